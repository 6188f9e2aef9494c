"""Futures that Ctrl-C does not leave locked, for the main thread to wait for."""

from __future__ import annotations

import threading
from _thread import RLock
from concurrent.futures import Future
from typing import Any, cast


class _Condition(RLock):  # type: ignore[misc]  # typeshed calls the class final; CPython does not
    """What a future needs of ``threading.Condition``. Its ``with`` is C.

    That of ``threading.Condition`` is Python: Ctrl-C inside of it leaves the lock held for ever, and the engine's loop
    then waits for it in ``set_result()``.
    """

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
                    if not self._is_owned():  # type: ignore[attr-defined]  # Ctrl-C may have come before the release
                        self.acquire()
                    if waiter in self._waiters:
                        self._waiters.remove(waiter)
                    is_back = True
                except KeyboardInterrupt as error:
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
    future._condition = cast("threading.Condition", _Condition())
    return future
