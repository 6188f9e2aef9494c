"""The engine's own directories in a root."""

from __future__ import annotations

import errno
from pathlib import Path

from aio_ckpt.errors import RootError
from aio_ckpt.format.root_names import ENGINE_DIR, ENGINE_DIRS
from aio_ckpt.storage.local import Storage
from aio_ckpt.storage.paths import LINKED


async def refuse_linked_dirs(storage: Storage, root: Path) -> None:
    """Refuse a root whose directories of the engine are symbolic links: the engine deletes what it finds in them.

    Call this before the first change below ``root``, the lock included.

    Raises:
        RootError: one of them is a symbolic link.
    """
    link = await storage.first_link(*(root / name for name in (ENGINE_DIR, *ENGINE_DIRS)))
    if link is not None:
        raise RootError(errno.ELOOP, LINKED, str(link))


async def make_engine_dirs(storage: Storage, root: Path) -> None:
    """Make the directories below ``.aio_ckpt/``, durably, as the holder of the lock.

    Call :func:`refuse_linked_dirs` before.
    """
    await storage.make_dirs(*(root / name for name in ENGINE_DIRS))
