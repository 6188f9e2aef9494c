"""Locks and futures that Ctrl-C leaves usable, for the main thread to take and to wait for.

So does what another handler of a signal raises, as ``sys.exit()`` in that of SIGTERM.
"""

from __future__ import annotations

import threading
from _thread import RLock
from concurrent.futures import Future
from typing import Any, cast


class Lock(RLock):  # type: ignore[misc]  # typeshed calls the class final; CPython does not
    """Lock that Ctrl-C in its ``with`` does not leave held for ever. A thread that holds it does not take it again.

    CPython 3.14 looks for signals between an ``__enter__`` in C and the block, so this one is Python: no version looks
    for them behind its return. ``__exit__`` is C, as signals are looked for at the begin of a function in Python.
    """

    def __enter__(self) -> bool:  # type: ignore[override]  # no argument is given by ``with``
        try:
            return self.acquire()
        except BaseException:
            if self.is_mine:
                self.release()
            raise

    @property
    def is_mine(self) -> bool:
        """Whether this thread holds the lock."""
        return bool(self._is_owned())  # type: ignore[attr-defined]  # unknown to typeshed


class Condition(Lock):  # type: ignore[misc]  # as above
    """``threading.Condition``, as far as it is needed, on such a lock."""

    def __init__(self) -> None:
        self._waiters: list[threading.Lock] = []

    def wait(self, timeout: float | None = None) -> None:
        """Release the lock, which the caller holds once, until :meth:`notify_all` or for ``timeout`` seconds."""
        waiter = threading.Lock()
        waiter.acquire()
        self._waiters.append(waiter)
        try:
            self.release()
            waiter.acquire(timeout=-1 if timeout is None else max(timeout, 0))
        finally:
            interrupt, is_back = None, False
            while not is_back:
                try:
                    if not self.is_mine:  # else Ctrl-C came before the release
                        self.acquire()
                    if waiter in self._waiters:
                        self._waiters.remove(waiter)
                    is_back = True
                except BaseException as error:  # noqa: BLE001 - raised once the lock is held again
                    interrupt = error
            if interrupt is not None:
                raise interrupt

    def notify_all(self) -> None:
        """Wake every thread that waits. The caller holds the lock."""
        while self._waiters:
            waiter = self._waiters[-1]
            if waiter.locked():  # else Ctrl-C came after the release
                waiter.release()
            self._waiters.pop()  # last: a waiter off the list that was not released would wait for ever


def new_future() -> Future[Any]:
    """Return a future that Ctrl-C in any of its methods leaves usable."""
    future: Future[Any] = Future()
    future._condition = cast("threading.Condition", Condition())
    return future
