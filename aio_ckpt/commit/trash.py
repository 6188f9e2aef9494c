"""Deletion of directories that no reader finds any more, and the refusal of linked directories of the engine."""

from __future__ import annotations

import errno
from pathlib import Path

from aio_ckpt.errors import RootError
from aio_ckpt.format.names import ENGINE_DIR, ENGINE_DIRS
from aio_ckpt.format.root_manifest import METADATA_FILE
from aio_ckpt.storage.local import Storage
from aio_ckpt.storage.paths import LINKED


async def check_engine_dirs(storage: Storage, root: Path) -> None:
    """Refuse a root whose directories of the engine are symbolic links: the engine deletes what it finds in them.

    Call this before the first change below ``root``, the lock included.

    Raises:
        RootError: one of them is a symbolic link.
    """
    for name in (ENGINE_DIR, *ENGINE_DIRS):
        if await storage.is_link(root / name):
            raise RootError(errno.ELOOP, LINKED, str(root / name))


async def delete_trash(storage: Storage, path: Path) -> None:
    """Delete a directory with all its files, ``.metadata`` first. Do nothing if it does not exist.

    So trash is whole as long as it has its ``.metadata``. If ``path`` is a symbolic link, as a step may be, the link is
    removed, and what it leads to stays.

    Raises:
        ReadError, WriteError: the system failed. The next call goes on.
    """
    if not await storage.is_link(path) and await storage.exists(path / METADATA_FILE):
        await storage.remove_file(path / METADATA_FILE)
        await storage.sync_dir(path)
    await storage.remove_tree(path)
