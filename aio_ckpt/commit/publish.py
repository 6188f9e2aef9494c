"""Publish: make a pending directory durable, then visible.

Root mode: everything is written and fsynced in a directory below ``.aio_ckpt/pending/``, which is then renamed into
place, so that a checkpoint is complete or invisible at any instant. For a directory of the caller's see ``directory``.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from pathlib import Path

import anyio

from aio_ckpt.commit.owner import read_owner
from aio_ckpt.errors import AioCkptError, WriteError
from aio_ckpt.format.manifests import METADATA_FILE, ROOT_MANIFEST
from aio_ckpt.format.names import OWNER_FILE, TRASH_DIR
from aio_ckpt.storage.local import Storage, sync_parents

__all__ = ["publish", "sync_pending"]

_TIDY_SECS = 60.0
"""How long a committed save waits for what it replaces to be removed."""
_log = logging.getLogger("aio_ckpt")


async def sync_pending(storage: Storage, pending: Path, root_manifest: bytes) -> None:
    """Leader, root mode: make a pending directory durable as a whole.

    All other files in it must have been fsynced, in whatever order: none counts before :func:`publish`.
    """
    await storage.write_file(pending / ROOT_MANIFEST, root_manifest)
    await storage.sync_dir(pending)


async def publish(storage: Storage, *, pending: Path, final: Path, overwrite: bool) -> tuple[Path, ...]:
    """Leader, root mode: make a durable directory visible, durably.

    It never replaces; with ``overwrite`` the two directories are exchanged in one step and the old one is removed
    when the new one is durable. Where that fails it is under one of the names that are returned.
    """
    replaces = overwrite and await _holds_checkpoint(storage, final)  # else it would go without ever being one
    try:
        if replaces and not await storage.exists(final / OWNER_FILE):
            # The old one takes the pending name: what a crash leaves of it must be somebody's, to be cleared.
            await storage.write_file(final / OWNER_FILE, await read_owner(storage, pending))
        await _make_visible(storage, pending, final, replaces=replaces)
    except Exception:
        if replaces:  # the old one stays: it is a checkpoint again and nobody's
            with contextlib.suppress(AioCkptError, OSError):
                await storage.remove_file(final / OWNER_FILE)
        raise
    # Shielded, with a limit of its own: the step is committed, and no stall from here on may say that it is not.
    trash = final.parent / TRASH_DIR / pending.name if replaces else None
    is_tidy = False
    with anyio.move_on_after(_TIDY_SECS, shield=True) as tidying:
        is_tidy = await _tidied(storage, pending, final, trash)
    if tidying.cancelled_caught:
        _log.warning("%s is committed, but what it replaces was not removed within %s s", final, _TIDY_SECS)
    return () if is_tidy or trash is None else (pending, trash)


async def _holds_checkpoint(storage: Storage, path: Path) -> bool:
    """Whether it is a checkpoint, or was one of ours before it lost its ``.metadata``."""
    return await storage.exists(path / METADATA_FILE) or await storage.exists(path / ROOT_MANIFEST)


async def _make_visible(storage: Storage, pending: Path, final: Path, *, replaces: bool) -> None:
    move = storage.exchange if replaces else storage.rename
    try:
        await move(pending, final)
    except WriteError as error:
        if error.errno != errno.EEXIST:
            raise
        remedy = "is in the way and holds no checkpoint: move it away, or save another step"
        raise WriteError(errno.EEXIST, remedy, str(final)) from error
    try:
        await sync_parents(storage, pending, final)
    except Exception as error:
        # Visible but maybe not durable: the save fails, so it must not stay listed, and not come back after a power
        # loss without the files that are removed next.
        try:
            await move(final, pending)
            await sync_parents(storage, final, pending)
        except (AioCkptError, OSError) as undoing:
            error.add_note(f"{final} may still become visible, whole: it could not be taken back: {undoing}")
            if isinstance(error, AioCkptError):
                error.in_doubt = True
        raise


async def _tidied(storage: Storage, pending: Path, final: Path, trash: Path | None) -> bool:
    try:
        # Not before: without its owner what a crash leaves would be nobody's, and stay.
        await storage.remove_file(final / OWNER_FILE)
        if trash is not None:
            # As trash it is cleared even if a crash ends the removal.
            await storage.rename(pending, trash)
            await storage.remove_tree(trash)
    except Exception as error:  # noqa: BLE001 - MemoryError too: it is committed, and nothing may say that it is not
        _log.warning("%s is committed, but what it replaces could not be removed: %s", final, error)
        return False
    return True
