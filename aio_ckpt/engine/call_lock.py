"""The lock that orders the calls of one engine."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from aio_ckpt.errors import WrongThreadError
from aio_ckpt.runtime.ctrl_c import Lock
from aio_ckpt.runtime.portal import Portal


class CallLock:
    """Lock of one engine: one call at a time plans, leases and captures. Other calls wait for it.

    Callers enter ``mutex`` itself: Ctrl-C in a context manager around it could leave it held.
    """

    def __init__(self, portal: Portal) -> None:
        self.mutex = Lock()
        self._portal = portal

    def check(self, what: str) -> None:
        """Raise WrongThreadError if the calling method, ``what``, would wait for its own thread.

        It would on the engine's own threads, and inside a call that holds the lock.
        """
        self._portal.check_thread(what)
        outer, frame = "", sys._getframe(2) if self.mutex.is_mine else None  # the caller of the calling method
        while frame is not None:
            calls = frame.f_locals.get("self")
            if isinstance(calls, LockedCalls) and calls.call_lock is self:
                outer = frame.f_code.co_name
            frame = frame.f_back
        if outer:
            raise WrongThreadError(
                f"{what} inside {outer}() of the same engine (by a signal handler, a state_dict()) "
                "would wait for itself: set a flag there and save behind it, as engine.on_preemption() does"
            )


@dataclass(slots=True, kw_only=True, eq=False)
class LockedCalls:
    """Calls of one engine that hold its lock. The engine's methods have the same names."""

    call_lock: CallLock
