"""The writer's lock of a root."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import socket
import weakref
from pathlib import Path
from types import TracebackType
from typing import Self

from aio_ckpt.errors import RootError
from aio_ckpt.storage.paths import sync_dir

__all__ = ["RootLock"]

_logger = logging.getLogger("aio_ckpt")
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})

_TRIES = 20
"""Then the file is believed: a file system may number its files anew at each look."""

_held: dict[str, tuple[int, weakref.ref[RootLock]]] = {}
"""Real path -> (pid, holder) of the locks of this process. fcntl locks belong to the process: a second one would
be granted, and closing it would drop the first. A holder that is gone was lost by Ctrl-C and holds nothing."""


class RootLock:
    """An exclusive ``fcntl.lockf`` lock on a file that says who holds it; held from construction to release.

    Not flock, which a forked data loader would inherit and keep. Where the file system has no locks, a warning is
    logged and the lock only keeps this process out.
    """

    def __init__(self, path: Path) -> None:
        """Take it without waiting.

        Raises:
            RootError: held by another process, which is named if it could be read, or by this one.
        """
        self.path = path
        self._pid = os.getpid()
        self._key = os.path.realpath(path)
        self._descriptor: int | None = None
        self._mine = (self._pid, weakref.ref(self))
        try:
            self._claim()
            self._descriptor = _open_locked(path)
        except BaseException:
            self._unclaim()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def renew(self) -> None:
        """Make sure that it is held still: closing any descriptor of the file (a copy of the root) drops it unnoticed.

        Raises:
            RootError: another process holds it now.
        """
        if os.getpid() != self._pid:
            return
        if self._descriptor is not None and not _is_file(self._descriptor, self.path):
            os.close(self._descriptor)  # the file was removed: others would lock a new one
            self._descriptor = None
        if self._descriptor is None:
            self._descriptor = _open_locked(self.path)
        else:
            _lock(self._descriptor, self.path)

    def discard(self) -> None:
        """Remove the file and let go: who waits for it locks a new one."""
        if self._descriptor is not None and os.getpid() == self._pid:
            with contextlib.suppress(OSError):  # a file that stays is locked again
                if _is_file(self._descriptor, self.path):
                    os.unlink(self.path)
        self.release()

    def release(self) -> None:
        """Let go. Idempotent; in a forked child it leaves the parent's lock alone."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
            if os.getpid() == self._pid:
                self._unclaim()

    def _claim(self) -> None:
        while (holder := _held.setdefault(self._key, self._mine)) is not self._mine:
            if holder[0] == self._pid and holder[1]() is not None:
                raise RootError(errno.EBUSY, "another engine of this process writes here", str(self.path))
            _held.pop(self._key, None)  # lost, or copied by fork: the parent's

    def _unclaim(self) -> None:
        if _held.get(self._key) is self._mine:
            del _held[self._key]


def _open_locked(path: Path) -> int:
    for is_last in (*[False] * _TRIES, True):
        try:
            if not path.parent.is_dir():
                path.parent.mkdir(exist_ok=True)
                sync_dir(path.parent.parent)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as exc:
            message = f"cannot open the lock file ({exc.strerror}): give a writable root"
            raise RootError(exc.errno, message, str(path)) from exc
        try:
            is_locked = _lock(descriptor, path)
            if is_last or _is_file(descriptor, path):
                if is_locked:
                    _name_holder(descriptor)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its last holder had removed it: others lock the one that is there now
    raise AssertionError("the last try returns or raises")


def _name_holder(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # for people only; whoever clears a full disk needs the lock first
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()} on {socket.gethostname()}".encode(), 0)


def _lock(descriptor: int, path: Path) -> bool:
    """Whether it is locked now; False, with a warning, where the file system has no locks."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            _logger.warning("%s: no file locks here (%s): a second writer would not be noticed", path, error.strerror)
            return False
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise RootError(error.errno, f"cannot lock: {error.strerror}", str(path)) from error
        raise RootError(error.errno, f"locked by another writer: process {_holder(descriptor)}", str(path)) from error
    return True


def _holder(descriptor: int) -> str:
    with contextlib.suppress(OSError):
        if named := os.pread(descriptor, 200, 0).decode(errors="replace").strip():
            return named
    return "(not named)"


def _is_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
    except OSError as error:
        message = f"cannot see whether the lock is still held ({error.strerror}): save again once the root can be read"
        raise RootError(error.errno, message, str(path)) from error
