"""Publish: make a pending directory durable, then visible.

In root mode, all files are written and fsynced in a directory below ``.aio_ckpt/pending/``, which is then renamed into
place. So a checkpoint is complete or invisible at any time. For a directory of the caller, see ``directory``.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from pathlib import Path

import anyio

from aio_ckpt.commit.owner import read_owner
from aio_ckpt.commit.trash import discard_pending, trash_of
from aio_ckpt.errors import AioCkptError, ReadError, WriteError
from aio_ckpt.format.names import OWNER_FILE
from aio_ckpt.format.root_manifest import METADATA_FILE, ROOT_MANIFEST
from aio_ckpt.storage.local import Storage, sync_or_undo

_TIDY_SECS = 60.0
"""Longest time that a committed save waits for the removal of the replaced checkpoint."""
_log = logging.getLogger("aio_ckpt")


async def sync_pending(storage: Storage, pending: Path, root_manifest: bytes) -> None:
    """Make a pending directory durable as a whole, on the leader in root mode.

    All other files in it must have been fsynced, in any order: no reader uses them before :func:`publish`.
    """
    await storage.write_file(pending / ROOT_MANIFEST, root_manifest)
    await storage.sync_dir(pending)


async def publish(storage: Storage, *, pending: Path, final: Path, overwrite: bool) -> tuple[Path, ...]:
    """Make a durable directory visible, durably, on the leader in root mode.

    Without ``overwrite``, an existing directory is an error. With it, a checkpoint or an empty directory is replaced:
    the two directories are exchanged in one step, and the old one is removed once the new one is durable. If the
    removal fails, the names where it may be are returned. If a symbolic link is replaced, what it leads to stays as it
    is.
    """
    replaces = overwrite and (await holds_checkpoint(storage, final) or await _is_empty(storage, final))
    marks_old = replaces and not await storage.is_link(final)
    try:
        if marks_old and not await storage.exists(final / OWNER_FILE):
            # The old directory takes the pending name. After a crash it is cleared by its owner record.
            await storage.write_file(final / OWNER_FILE, await read_owner(storage, pending))
        await _make_visible(storage, pending, final, replaces=replaces)
    except Exception:
        if marks_old:  # the old directory stays a checkpoint, which has no owner
            with contextlib.suppress(AioCkptError, OSError):
                await storage.remove_file(final / OWNER_FILE)
        raise
    # Shielded, with its own limit: the step is committed, and a stall from here on must not fail the save.
    is_tidy = False
    with anyio.move_on_after(_TIDY_SECS, shield=True) as tidying:
        is_tidy = await _tidy(storage, pending, final, replaces=replaces)
    if tidying.cancelled_caught:
        _log.warning("%s is committed, but what it replaces was not removed within %s s", final, _TIDY_SECS)
    return () if is_tidy or not replaces else (pending, trash_of(pending))


async def holds_checkpoint(storage: Storage, path: Path) -> bool:
    """Return whether a directory is a checkpoint, or was one of ours before it lost its ``.metadata``."""
    return await storage.exists(path / METADATA_FILE) or await storage.exists(path / ROOT_MANIFEST)


async def _is_empty(storage: Storage, path: Path) -> bool:
    """Return whether ``path`` is a directory without files. A save that died may have left its owner record there."""
    try:
        return await storage.exists(path) and {*await storage.list_dir(path)} <= {OWNER_FILE}
    except ReadError as error:
        if error.errno != errno.ENOTDIR:
            raise
        return False


async def _make_visible(storage: Storage, pending: Path, final: Path, *, replaces: bool) -> None:
    move = storage.exchange if replaces else storage.rename
    try:
        await move(pending, final)
    except WriteError as error:
        if error.errno == errno.EXDEV:
            text = f"is on another file system than the root {pending.parents[2]}: give a path on that of the root"
            raise WriteError(errno.EXDEV, text, str(final)) from error
        if error.errno != errno.EEXIST:
            raise
        remedy = "is in the way and holds no checkpoint: move it away, or save another step or path"
        raise WriteError(errno.EEXIST, remedy, str(final)) from error
    # A visible directory may not be durable yet. If the save fails, the directory must not stay listed, nor come back
    # after a power loss without the files that are removed next.
    await sync_or_undo(storage, move, pending, final)


async def _tidy(storage: Storage, pending: Path, final: Path, *, replaces: bool) -> bool:
    """Remove the owner record and the replaced directory. Return False if that fails."""
    try:
        # Only now: after a crash, a directory without an owner record would never be cleared.
        await storage.remove_file(final / OWNER_FILE)
        if replaces:
            await discard_pending(storage, pending)
    except Exception as error:  # noqa: BLE001 - MemoryError, too: the step is committed, so that the save must not fail
        _log.warning("%s is committed, but what it replaces could not be removed: %s", final, error)
        return False
    return True
