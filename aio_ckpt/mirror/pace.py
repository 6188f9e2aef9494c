"""Pace of a copy: at most so many bytes a second, and slower while the trainer saves."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

from aio_ckpt.runtime.ctrl_c import Condition
from aio_ckpt.runtime.portal import Executor, ThreadInit

P = ParamSpec("P")
T = TypeVar("T")
YIELD_SECS = 1.0
"""Longest time that one call waits for a pending save: a trainer that always saves must not stop its mirror."""
_POLL_SECS = 0.05


class Pace:
    """Time at which the next call may begin. Bytes are paid for after they were moved. Any thread may use it."""

    def __init__(self, limit: float | None, is_saving: Callable[[], bool]) -> None:
        """``limit``: bytes a second; None: as fast as it goes. ``is_saving()``: whether a save is pending."""
        self._limit = limit
        self._is_saving = is_saving
        self._changed = Condition()
        self._paid_until = time.monotonic()
        self._is_lifted = False

    def pay(self, nbytes: int) -> None:
        """Count bytes that were moved."""
        if self._limit is not None:
            with self._changed:
                self._paid_until = max(self._paid_until, time.monotonic()) + nbytes / self._limit

    def wait(self, *, gives_way: bool) -> None:
        """Block until what was moved is paid for; if ``gives_way``, also while a save is pending, for a while."""
        yields_until = time.monotonic() + (YIELD_SECS if gives_way else 0.0)
        with self._changed:
            while not self._is_lifted:
                now = time.monotonic()
                if now >= self._paid_until and not (now < yields_until and self._is_saving()):
                    return
                self._changed.wait(_POLL_SECS)

    def lift(self) -> None:
        """Delay no call from now on: the engine is closing."""
        with self._changed:
            self._is_lifted = True
            self._changed.notify_all()


class PacedExecutor(Executor):
    """Threads that begin each call at the :class:`Pace`."""

    def __init__(self, name: str, threads: int, pace: Pace, thread_init: ThreadInit) -> None:
        super().__init__(name, threads, thread_init=thread_init)
        self._pace = pace

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue ``fn``, see :meth:`Executor.submit`."""
        return super().submit(self._paced, functools.partial(fn, *args, **kwargs))

    def _paced(self, call: Callable[[], T]) -> T:
        self._pace.wait(gives_way=False)
        return call()
