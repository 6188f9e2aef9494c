"""fsync, and what holds on file systems that refuse it. All commits make their files and names durable by this file.

Mounts of object stores and some network file systems (FUSE) refuse fsync. A file that cannot be synced fails the save
before anything is visible: after a power loss, its checkpoint could be torn. Names of a directory that cannot be synced
are accepted, because a load notices a checkpoint that is missing or lacks a file.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from aio_ckpt.errors import AioCkptError
from aio_ckpt.storage.mounts import mount_point
from aio_ckpt.storage.os_errors import NOT_SUPPORTED

if TYPE_CHECKING:
    from aio_ckpt.storage.local import Storage  # it imports this module

_logger = logging.getLogger("aio_ckpt")


def sync_file(descriptor: int) -> None:
    """Make a file durable by fsync.

    Raises:
        OSError: the sync failed. If the file system refuses it, the text says so and names a way on.
    """
    try:
        os.fsync(descriptor)
    except OSError as error:
        _explain(error)
        raise


def sync_data(descriptor: int) -> None:
    """Make the bytes and the length of a file durable by fdatasync. Raises like :func:`sync_file`."""
    try:
        os.fdatasync(descriptor)
    except OSError as error:
        _explain(error)
        raise


def sync_dir(path: Path) -> None:
    """Make the names in a directory durable. If the file system refuses that, log a warning, once for each mount.

    Raises:
        OSError: the directory cannot be opened or synced.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NOT_SUPPORTED:
            raise
        warn_of_unsynced_names(mount_point(path))
    finally:
        os.close(descriptor)


@functools.cache
def warn_of_unsynced_names(mount: Path) -> None:
    """Log what is not durable on a file system that refuses fsync of directories."""
    _logger.warning(
        "%s: the file system there refuses fsync of a directory: after a power loss, the newest checkpoints may be "
        "missing or lack files, which a load notices; what was written into the files is durable. Logged once",
        mount,
    )


def _explain(error: OSError) -> None:
    """Add the cause and a way on to the text of ``error``, if the file system refuses fsync."""
    if error.errno in NOT_SUPPORTED:
        error.strerror = (
            f"{error.strerror}: this file system refuses fsync, so that a power loss could tear a checkpoint on it: "
            "save to a local disk, and copy committed checkpoints from there by another tool"
        )


async def sync_parents(storage: Storage, src: Path, dst: Path) -> None:
    """Make a rename from ``src`` to ``dst`` durable.

    The new name becomes durable first, so that after a power loss in between at least one of the names is there.
    """
    await storage.sync_dir(dst.parent)
    if src.parent != dst.parent:
        await storage.sync_dir(src.parent)


async def sync_or_undo(storage: Storage, move: Callable[[Path, Path], Awaitable[None]], src: Path, dst: Path) -> None:
    """Make a rename from ``src`` to ``dst``, which ``move`` made, durable. If that fails, ``move`` takes it back.

    Raises:
        WriteError: an fsync failed. If ``in_doubt`` is set, the rename could not be taken back.
    """
    try:
        await sync_parents(storage, src, dst)
    except Exception as error:
        try:
            await move(dst, src)
            await sync_parents(storage, dst, src)
        except (AioCkptError, OSError) as undoing:
            error.add_note(f"what was renamed to {dst} may still become visible, whole: undoing that failed: {undoing}")
            if isinstance(error, AioCkptError):
                error.in_doubt = True
        raise
