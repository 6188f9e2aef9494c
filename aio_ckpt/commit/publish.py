"""Publish: make a pending directory durable, then visible.

All files are written and fsynced in a directory below ``.aio_ckpt/pending/``, which is then renamed into place. So a
checkpoint is complete or invisible at any time. If a checkpoint is to be replaced, its directory stays: see
:mod:`aio_ckpt.commit.in_place`.
"""

from __future__ import annotations

import errno
from pathlib import Path

from aio_ckpt.commit.in_place import replace_by_pending
from aio_ckpt.commit.root_claim import Check
from aio_ckpt.commit.trash import discard_pending, tidy, trash_of
from aio_ckpt.errors import ReadError, WriteError
from aio_ckpt.format.checkpoint_files import METADATA_FILE, root_manifest_name, save_of_root_manifest
from aio_ckpt.remote_path import RemotePath
from aio_ckpt.storage.durability import sync_or_undo
from aio_ckpt.storage.local import Storage
from aio_ckpt.storage.object_store import store_of


async def sync_pending(storage: Storage, pending: Path, save_id: str, root_manifest: bytes) -> None:
    """Make a pending directory durable as a whole, on the leader.

    All other files in it must have been fsynced, in any order: no reader uses them before :func:`publish`.
    """
    await storage.write_file(pending / root_manifest_name(save_id), root_manifest)
    await storage.sync_dir(pending)


async def publish(storage: Storage, *, pending: Path, final: Path) -> None:
    """Make a durable pending directory visible under a new name, durably, on the leader.

    Raises:
        WriteError: ``final`` exists, or the system failed.
    """
    try:
        await storage.rename(pending, final)
    except WriteError as error:
        if error.errno == errno.EXDEV:
            text = f"is on another file system than the root {pending.parents[2]}: give a path on that of the root"
            raise WriteError(errno.EXDEV, text, str(final)) from error
        if error.errno != errno.EEXIST:
            raise
        remedy = "is in the way and holds no checkpoint (no .metadata): move it away, or save another step or path"
        if await storage.is_link(final):
            remedy = "is a symbolic link: remove the link, or save another step or path"
        raise WriteError(errno.EEXIST, remedy, str(final)) from error
    # A visible directory may not be durable yet. If the save fails, the directory must not stay listed.
    await sync_or_undo(storage, storage.rename, pending, final)


async def publish_over(storage: Storage, *, pending: Path, final: Path, save_id: str, check: Check) -> tuple[Path, ...]:
    """Do :func:`publish`; but if ``final`` is a checkpoint or an empty directory, replace what it holds, in place.

    Files of others in it stay. If the removal of the pending directory fails, the names where it may be are returned.
    """
    if isinstance(final, RemotePath):
        await store_of(storage, final).supersede(pending, final)
    elif await _is_replaceable(storage, final):
        await replace_by_pending(storage, pending, final, save_id, check)
    else:
        await publish(storage, pending=pending, final=final)
        return ()
    is_tidy = await tidy(discard_pending(storage, pending), final, f"what is left of {pending} was not removed")
    return () if is_tidy else (pending, trash_of(pending))


async def _is_replaceable(storage: Storage, path: Path) -> bool:
    """Return whether ``path`` is a directory that holds a checkpoint, or was one of ours, or is empty. No link is."""
    if await storage.is_link(path):
        return False
    try:
        names = await storage.list_dir(path)
    except ReadError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
        return False
    return METADATA_FILE in names or any(map(save_of_root_manifest, names)) or not names
