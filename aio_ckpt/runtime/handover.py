"""Handover: a wait of one thread until another thread, which may fail unnoticed, no longer needs something."""

from __future__ import annotations

import threading
import time

_POLL_SECS = 0.1
"""Interval at which the owner checks that the worker is alive: a thread that fails notifies nobody."""


class Handover:
    """Loan from one thread, the owner, to another, the worker, which becomes known only when it calls :meth:`take`.

    The thread that makes the object is the owner. Invariant: the owner returns from :meth:`wait` when the worker has
    released the loan, or has ended. If an exception ends the wait earlier, :meth:`release` tells the worker so.
    """

    def __init__(self) -> None:
        self._owner = threading.current_thread()
        self._worker: threading.Thread | None = None
        self._released = threading.Event()
        self._lock = threading.Lock()
        self._is_given_up = False

    def take(self) -> None:
        """Make the current thread the worker, unless it is the owner."""
        if threading.current_thread() is not self._owner:
            self._worker = threading.current_thread()

    @property
    def is_taken_here(self) -> bool:
        """Whether the current thread is the worker."""
        return self._worker is threading.current_thread()

    def release(self) -> bool:
        """End the loan, on the worker. Return False if the owner has given up its wait; otherwise return True."""
        with self._lock:
            self._released.set()
            return not self._is_given_up

    def wait(self, begin_secs: float) -> bool:
        """Wait until the worker has released the loan or has ended, and return True.

        If no thread calls :meth:`take` within ``begin_secs``, give up and return False.
        """
        limit = time.monotonic() + begin_secs
        is_over = False
        try:
            while not is_over and (self._worker is not None or time.monotonic() < limit):
                is_over = self._released.wait(_POLL_SECS) or (self._worker is not None and not self._worker.is_alive())
        finally:
            with self._lock:
                self._is_given_up = not is_over and not self._released.is_set()
        return not self._is_given_up
