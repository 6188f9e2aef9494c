"""fsync, and what holds on file systems that refuse it. All commits make their files and names durable by this file.

Mounts of object stores and some network file systems (FUSE) refuse fsync. A file that cannot be synced fails the save
before anything is visible: after a power loss, its checkpoint could be torn. Names of a directory that cannot be synced
are accepted, because a load notices a checkpoint that is missing or lacks a file.
"""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path

from aio_ckpt.storage.direct_io import NOT_SUPPORTED
from aio_ckpt.storage.mounts import mount_point

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
        warn_of_names(mount_point(path))
    finally:
        os.close(descriptor)


@functools.cache
def warn_of_names(mount: Path) -> None:
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
