"""Ways out of errors of the operating system that a user can mend, by their numbers."""

from __future__ import annotations

import errno
import os

from aio_ckpt.runtime.limits import files_remedy

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
