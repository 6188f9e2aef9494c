"""What runs at interpreter exit, while threads still work: draining, for as long as a thread is left to do it."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, thread
from concurrent.futures import wait as wait_for_futures
from types import FrameType
from typing import Any

__all__ = ["at_exit", "drain_at_exit", "forget_exit"]

_logger = logging.getLogger("aio_ckpt")
_hooks: dict[object, Callable[[], object]] = {}
_registered_by: int | None = None

_LOOK_SECS = 0.05
_IDLE_LOOKS = 2
"""An executor's thread that has just taken its work from the queue looks idle until its next instruction."""


def at_exit(hook: Callable[[], object], key: object) -> None:
    """Run ``hook`` while threads still work: before the executors are joined, unlike ``atexit``'s; newest first."""
    global _registered_by
    _hooks[key] = hook
    if _registered_by != os.getpid():
        _registered_by = os.getpid()
        getattr(threading, "_register_atexit", atexit.register)(_run_hooks)


def forget_exit(key: object) -> None:
    """Do not run the hook of ``key``; nothing if there is none."""
    _hooks.pop(key, None)


def drain_at_exit(done: Future[Any], timeout_secs: float, *, late: str) -> None:
    """At interpreter exit wait for ``done`` while any thread is left to do it, in this process alone.

    ``late`` is logged if threads still worked after ``timeout_secs``. Daemon threads do not count: the interpreter
    does not wait for them either.
    """
    pid = os.getpid()

    def drain() -> None:
        if os.getpid() == pid and not _wait_while_threads_work(done, timeout_secs):
            _logger.error("interpreter exit: %s", late)

    at_exit(drain, done)
    done.add_done_callback(forget_exit)


def _run_hooks() -> None:
    while _hooks:
        _, hook = _hooks.popitem()
        try:
            hook()
        except Exception:  # the hooks of other engines must run too
            _logger.exception("draining at interpreter exit failed")


def _wait_while_threads_work(done: Future[Any], timeout_secs: float) -> bool:
    """False if ``done`` is not, and may yet be, after ``timeout_secs``."""
    deadline = time.monotonic() + timeout_secs
    idle_looks = 0
    while idle_looks < _IDLE_LOOKS:
        left_secs = deadline - time.monotonic()
        if wait_for_futures([done], max(0.0, min(left_secs, _LOOK_SECS))).done:
            return True
        if left_secs <= 0:
            return False
        idle_looks = 0 if _threads_work() else idle_looks + 1
    return True


def _threads_work() -> bool:
    """Whether another thread that the interpreter would join is at work."""
    frames = sys._current_frames()
    return any(
        not other.daemon
        and other is not threading.current_thread()
        and not _is_idle(other, frames.get(other.ident or 0))
        for other in threading.enumerate()
    )


def _is_idle(other: threading.Thread, frame: FrameType | None) -> bool:
    """Whether it is an executor's and waits for work. False where this Python does not tell."""
    queue = getattr(thread, "_threads_queues", {}).get(other)
    worker = getattr(thread, "_worker", None)
    if frame is None or queue is None or worker is None:
        return False
    return frame.f_code is worker.__code__ and queue.empty()
