"""The writer's lock of a root, by ``fcntl.lockf``."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import logging
import os
import socket
import weakref
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from types import TracebackType
from typing import Self

from aio_ckpt.errors import RootError
from aio_ckpt.remote_path import RemotePath
from aio_ckpt.runtime.ctrl_c import new_future
from aio_ckpt.runtime.limits import files_remedy
from aio_ckpt.storage.durability import sync_dir
from aio_ckpt.storage.os_errors import DISK_FULL
from aio_ckpt.storage.paths import open_without_links

_logger = logging.getLogger("aio_ckpt")
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})

_TRIES = 20
"""Number of times that the lock file is opened anew if its identity does not match its path. After that, the open file
counts as the lock file: a file system may report another inode at each call."""

_FORSAKEN_SECS = 60.0
"""Longest wait for the end of an engine of this process that nobody refers to."""

_held: dict[str, tuple[int, weakref.ref[RootLock]]] = {}
"""Real path -> (pid, holder) of the locks of this process. An fcntl lock belongs to the process, so the system would
grant a second one, and closing it would drop the first. A holder that no longer exists was lost by Ctrl-C."""


class RootLock:
    """Exclusive ``fcntl.lockf`` lock on a file that names its holder. It is held from construction to release.

    It is no flock, because a forked data loader would inherit that and keep it. If the file system has no locks, a
    warning is logged, and the lock excludes only other engines of this process; the claim excludes the others.
    """

    def __init__(self, path: Path) -> None:
        """Take the lock without waiting.

        Raises:
            RootError: this process or another one holds the lock; the message names the other one if it is known.
        """
        self.path = path
        self._pid = os.getpid()
        self._key = str(path) if isinstance(path, RemotePath) else os.path.realpath(path)
        self._descriptor: int | None = None
        self.is_granted = False
        """Whether the file system has granted the lock. False: it has no locks."""
        self.is_forsaken = False
        """Whether its engine is being closed because nobody refers to it."""
        self._released: Future[None] = new_future()
        self._entry = (self._pid, weakref.ref(self))
        try:
            self._claim()
            self._descriptor, self.is_granted = self._open()
        except BaseException:
            self._unclaim()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def renew(self) -> bool:
        """Make sure that the lock is still held, and take it again if it was lost. Return whether its file was new.

        The system drops it silently when this process closes any descriptor of the file, as a copy of the root does.
        The file is new if somebody removed the old one, alone or with its directory.

        Raises:
            RootError: another process holds the lock now.
        """
        if os.getpid() != self._pid:
            return False
        if self._descriptor is not None and not _is_file(self._descriptor, self.path):
            _close(self._descriptor)  # the file was removed, so that other processes would lock a new one
            self._descriptor = None
        if self._descriptor is None:
            self._descriptor, self.is_granted = self._open()
            return True
        _lock(self._descriptor, self.path)
        return False

    def discard(self) -> None:
        """Remove the file and release the lock. The next holder makes a new file."""
        if self._descriptor is not None and os.getpid() == self._pid:
            with contextlib.suppress(OSError):  # if the file stays, the next holder locks it
                if _is_file(self._descriptor, self.path):
                    os.unlink(self.path)
        self.release()

    def release(self) -> None:
        """Release the lock. Idempotent. In a forked child, the parent keeps its lock."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            _close(descriptor)
        if os.getpid() == self._pid:
            self._unclaim()  # also without a descriptor, as after a renewal that failed

    def _open(self) -> tuple[int | None, bool]:
        """Return a descriptor of the lock file, and whether its lock was granted."""
        path = self.path
        for is_last in (*[False] * _TRIES, True):
            try:
                if not path.parent.is_dir():
                    path.parent.mkdir(exist_ok=True)
                    sync_dir(path.parent.parent)
                if path.is_symlink():  # the file that it leads to would be emptied
                    _logger.warning("%s: a symbolic link in the place of the lock file is removed", path)
                    path.unlink(missing_ok=True)
                descriptor = open_without_links(path, os.O_RDWR | os.O_CREAT)
            except RootError:
                raise
            except FileNotFoundError as exc:
                raise root_is_gone(path) from exc
            except OSError as exc:
                way_on = "free space on its disk" if exc.errno in DISK_FULL else "give a writable root"
                way_on = files_remedy() if exc.errno == errno.EMFILE else way_on
                message = f"cannot open the lock file ({exc.strerror}): {way_on}"
                raise RootError(exc.errno, message, str(path)) from exc
            try:
                is_locked = _lock(descriptor, path)
                if is_last or _is_file(descriptor, path):
                    if is_locked:
                        _name_holder(descriptor)
                    else:
                        _logger.warning(
                            "%s: no file locks here: other hosts are excluded under a root alone, by its claim",
                            path,
                        )
                    return descriptor, is_locked
            except BaseException:
                _close(descriptor)
                raise
            _close(descriptor)  # its last holder has removed the file, so that other processes lock a newer one
        raise AssertionError("the last try returns or raises")

    def _claim(self) -> None:
        while (entry := _held.setdefault(self._key, self._entry)) is not self._entry:
            holder = entry[1]() if entry[0] == self._pid else None
            if holder is not None and not holder.is_forsaken:
                gc.collect()  # an engine that nobody refers to is forsaken now
            if holder is not None and not holder._is_released_soon():
                raise RootError(
                    errno.EBUSY,
                    "another engine of this process writes here: close it first. One that nobody refers to any more "
                    "closes itself once its saves have ended; after an error in a notebook, the traceback may still "
                    "refer to it: restart the kernel, and open engines by 'with'",
                    str(self.path),
                )
            if _held.get(self._key) is entry:  # the holder was lost, or it is the parent's, which fork copied
                _held.pop(self._key, None)

    def _is_released_soon(self) -> bool:
        """Wait for the end of an engine that nobody refers to. Return False for any other one."""
        if self.is_forsaken:
            text = (
                "%s: waiting up to %.0f s for the saves of an engine of this process that was dropped without close()"
            )
            _logger.info(text, self.path, _FORSAKEN_SECS)
            with contextlib.suppress(TimeoutError):
                self._released.result(_FORSAKEN_SECS)
        return self._released.done()

    def _unclaim(self) -> None:
        if _held.get(self._key) is self._entry:
            del _held[self._key]
        with contextlib.suppress(InvalidStateError):  # it was released before
            self._released.set_result(None)


class ProcessLock(RootLock):
    """Lock that excludes other engines of this process. The claim of the root excludes all others."""

    def __init__(self, path: Path, make: Callable[[], None] = lambda: None) -> None:
        """Call ``make``, which makes the file of the lock.

        Raises:
            RootError: another engine of this process holds the lock.
        """
        self._make = make
        super().__init__(path)

    def renew(self) -> bool:
        """Return False: nothing of this lock is on the file system."""
        return False

    def _open(self) -> tuple[int | None, bool]:
        self._make()
        return None, False


def root_is_gone(path: Path) -> RootError:
    """Return the error for a root that does not exist any more; ``path``: the root, or what was looked for in it."""
    message = "the root is gone (its directory was removed or unmounted): bring it back, or give another root"
    return RootError(errno.ENOENT, message, str(path))


def _close(descriptor: int) -> None:
    """Close a lock file. An error is dropped: it tells that the holder's name was not written, and the lock is gone."""
    with contextlib.suppress(OSError):
        os.close(descriptor)


def _name_holder(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # the name is for people only, and on a full disk the lock must still work
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()} on {socket.gethostname()}".encode(), 0)


def _lock(descriptor: int, path: Path) -> bool:
    """Lock the file. Return False if the file system has no locks.

    Raises:
        RootError: another process holds the lock, or the system refuses to lock the file.
    """
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise RootError(error.errno, f"cannot lock: {error.strerror}", str(path)) from error
        reason = f"locked by another writer, process {_holder(descriptor)}: let it end, or give another root"
        raise RootError(errno.EAGAIN, reason, str(path)) from error  # EACCES is that of a file that cannot be opened
    return True


def _holder(descriptor: int) -> str:
    with contextlib.suppress(OSError):
        if named := os.pread(descriptor, 200, 0).decode(errors="replace").strip():
            return named
    return "(not named)"


def _is_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False
    except OSError as error:
        message = f"cannot see whether the lock is still held ({error.strerror}): save again once the root can be read"
        raise RootError(error.errno, message, str(path)) from error
