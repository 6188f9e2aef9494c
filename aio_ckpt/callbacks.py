"""Futures whose callbacks may raise anything."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

__all__ = ["CallbackSafeFuture"]

T = TypeVar("T")
_log = logging.getLogger("aio_ckpt")


class CallbackSafeFuture(Future[T]):
    """Future that logs every error of a callback, and calls the other callbacks all the same.

    The standard library's future does so for Exception alone. If a callback raised SystemExit or CancelledError, it
    would end the thread or the event loop that sets the outcome.
    """

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        """Call ``fn(self)`` once the future is done, or at once if it is done."""
        super().add_done_callback(functools.partial(_call, fn))


def _call(fn: Callable[[Future[Any]], object], future: Future[Any]) -> None:
    try:
        fn(future)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise  # Ctrl-C, which comes to the main thread alone
        _log.exception("a callback of a finished wait raised, which changes nothing else")
