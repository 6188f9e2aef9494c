"""Errors of the operating system: their kinds, the way out that a message names, and their translation."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from aio_ckpt.errors import AioCkptError, ReadError, WriteError
from aio_ckpt.runtime.limits import files_remedy

ErrorT = TypeVar("ErrorT", bound="WriteError | ReadError")
NOT_SUPPORTED = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS})
"""Error numbers with which file systems refuse an operation that they lack."""
DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Numbers of the errors of a disk or a quota without room."""


def with_remedy(error: OSError, *, writes: bool) -> str:
    """Return the text of ``error`` and, after a colon, the way out of it if there is a common one.

    ``writes``: whether the system call was to change something.
    """
    text = error.strerror or str(error)
    remedy = _remedy(error.errno or 0, writes=writes)
    return f"{text}: {remedy}" if remedy and text == os.strerror(error.errno or 0) else text


def _remedy(code: int, *, writes: bool) -> str:
    match code:
        case errno.EMFILE:
            return files_remedy()
        case errno.ENFILE:
            return "the machine has no more open files: raise fs.file-max, or end processes that hold many"
        case errno.EFBIG:
            return "raise the limit on the size of files (ulimit -f), or give a path on a file system that allows it"
        case errno.EROFS:
            return "give a path on a file system that is mounted for writing"
        case errno.EACCES if writes:
            return "give a path that this user may write to"
        case errno.EACCES:
            return "let this user read it"
        case errno.EIO:
            return "the device or the server below it fails: the kernel's log (dmesg) tells more"
        case errno.ESTALE:
            return "the file server knows this file no more: look at the server, then mount it anew"
        case errno.EEXIST | errno.ENOTDIR if writes:
            return "a file is in the way: move it, or give another path"
        case _:
            return ""


def translated(kind: type[ErrorT], path: Path, error: OSError) -> ErrorT:
    """Return an error of the system as ``kind``, with errno, message, remedy and path."""
    text = with_remedy(error, writes=kind is WriteError)
    return kind(error.errno or errno.EIO, text, error.filename or str(path), None, error.filename2)


@contextlib.contextmanager
def translate_errors(kind: type[WriteError | ReadError], path: Path) -> Iterator[None]:
    """Raise an OSError of the block as :func:`translated`. The cause is kept."""
    try:
        yield
    except AioCkptError:
        raise
    except OSError as error:
        raise translated(kind, path, error) from error
