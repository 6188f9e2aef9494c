"""Clones of files: a second name for the same bytes, made without writing them."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import TypeAlias

from aio_ckpt.errors import MismatchError
from aio_ckpt.storage.data_file import open_regular_file
from aio_ckpt.storage.durability import sync_data

Stamp: TypeAlias = "tuple[int | str, ...]"
"""Mark of the content of a file. It changes if somebody writes to the file or replaces it, but not with a link."""
_FICLONE = 0x40049409


def file_stamp(path: Path) -> Stamp:
    """Return the mark of a file: its modification time, in ns, its length and its inode."""
    found = os.stat(path, follow_symlinks=False)
    return found.st_mtime_ns, found.st_size, found.st_ino


def clone_file(source: Path, target: Path, stamp: Stamp) -> Stamp | None:
    """Make ``target`` from the bytes of ``source``: a reflink, or else a hard link. Returns the mark of ``target``.

    None if ``source`` has another mark than ``stamp``, or the file system can do neither. No ``target`` is left then.
    A reflink is durable. A hard link needs a sync of its directory alone.

    Sources: ioctl_ficlonerange(2), link(2).
    """
    # A caller that gets no clone writes the file, and then meets what is wrong.
    with contextlib.suppress(OSError, MismatchError):
        if not _reflink(source, target):
            os.link(source, target, follow_symlinks=False)
        if file_stamp(source) == stamp:
            return file_stamp(target)
    with contextlib.suppress(OSError):
        target.unlink(missing_ok=True)
    return None


def _reflink(source: Path, target: Path) -> bool:
    reading = open_regular_file(source)
    try:
        writing = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            fcntl.ioctl(writing, _FICLONE, reading)
            sync_data(writing)
        except OSError:
            target.unlink()
            return False
        finally:
            os.close(writing)
    finally:
        os.close(reading)
    return True
