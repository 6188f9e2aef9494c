"""Checks of paths that the user gives."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from aio_ckpt.argument_checks import is_path, local_name, without_secrets
from aio_ckpt.errors import RootError
from aio_ckpt.message_texts import shown

LINKED = "is a symbolic link, and what it leads to is never changed: remove the link"
"""Text of the error of a name of the package's own that is a symbolic link."""


def checked_path(path: str | os.PathLike[str]) -> Path:
    """Return ``path`` as a Path; that of a ``file:`` URL is its path. The file system is not read.

    Raises:
        RootError: ``path`` is no path, another URL, empty text, or a name that no file system can hold.
    """
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str):
        remedy = "give a str or a pathlib.Path"
        raise RootError(errno.EINVAL, f"the root is a {type(path).__name__}, no path: {remedy}", shown(path))
    name = os.fspath(path)
    if not name:
        raise RootError(errno.ENOENT, "the root is empty text: give a directory, '.' for the current one", "")
    if not is_path(name):
        raise RootError(errno.EINVAL, "no file system can hold this name (a NUL, or a lone surrogate)", ascii(name))
    try:
        return Path(local_name(name))
    except ValueError as error:
        raise RootError(errno.EINVAL, f"the root is {error}", without_secrets(name)) from None


def open_without_links(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file of the package for writing and return its descriptor. It is an ``opener`` of :func:`open`.

    If the name is a symbolic link, the file behind it belongs to somebody else, so the call is refused.

    Raises:
        RootError: the name is a symbolic link.
        OSError: the system failed.
    """
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise RootError(errno.ELOOP, LINKED, os.fspath(path)) from error


def device_of(path: Path) -> int:
    """Return the device of ``path``, or of its nearest parent that exists; -1 if there is none."""
    for place in (path, *path.parents):
        try:
            return place.stat().st_dev
        except (FileNotFoundError, NotADirectoryError):
            continue
    return -1
