"""A wait of one thread until another one, which may fail unheard, needs something no more."""

from __future__ import annotations

import threading
import time

__all__ = ["Handover"]

_LOOK_SECS = 0.1
"""How often the worker is looked at: nothing tells that it failed."""


class Handover:
    """What the thread that makes this, the owner, lends to a thread that is not known yet, the worker.

    Invariant: the owner returns from :meth:`wait` when the worker has released what was lent, or has ended. If an
    exception ends the wait before, :meth:`release` tells the worker so.
    """

    def __init__(self) -> None:
        self._owner = threading.current_thread()
        self._worker: threading.Thread | None = None
        self._released = threading.Event()
        self._lock = threading.Lock()
        self._is_given_up = False

    def take(self) -> None:
        """The current thread is the worker, unless it is the owner."""
        if threading.current_thread() is not self._owner:
            self._worker = threading.current_thread()

    @property
    def is_taken_here(self) -> bool:
        """Whether the current thread is the worker."""
        return self._worker is threading.current_thread()

    def release(self) -> bool:
        """The worker needs nothing of it any more. Returns whether the owner still waited, or was yet to wait."""
        with self._lock:
            self._released.set()
            return not self._is_given_up

    def wait(self, begin_secs: float) -> bool:
        """Wait for the worker; return False if no thread took it within ``begin_secs``, and count as given up then."""
        limit = time.monotonic() + begin_secs
        is_over = False
        try:
            while not is_over and (self._worker is not None or time.monotonic() < limit):
                is_over = self._released.wait(_LOOK_SECS) or (self._worker is not None and not self._worker.is_alive())
        finally:
            with self._lock:
                self._is_given_up = not is_over and not self._released.is_set()
        return not self._is_given_up
