"""Fresh answers from file systems that keep old ones: what is not found is asked for once more.

A client of NFS keeps the answer that a name does not exist for 30 to 60 s. If it opens the directory of that name,
it asks the server whether the directory has changed, and forgets such answers.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from aio_ckpt.storage.mounts import is_shared

T = TypeVar("T")
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE})


def found_afresh(find: Callable[[Path], T], path: Path) -> T:
    """Return ``find(path)``; if it finds nothing on a file system that may be shared, ask once more.

    Raises:
        FileNotFoundError, NotADirectoryError: there is nothing, by a fresh answer. Another host may have removed it.
    """
    try:
        return find(path)
    except OSError as error:
        if error.errno not in _GONE or not _forget_old_answers(path):
            raise
    try:
        return find(path)
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from error


def _forget_old_answers(path: Path) -> bool:
    """Open the nearest directory above ``path`` that exists. Return whether its file system may be shared."""
    for directory in path.parents:
        try:
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            return is_shared(os.fstat(descriptor).st_dev)
        finally:
            os.close(descriptor)
    return False
