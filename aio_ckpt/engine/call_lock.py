"""The lock that orders the calls of one engine."""

from __future__ import annotations

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
        if self.mutex.is_mine:
            raise WrongThreadError(
                f"{what} inside another call of the same engine (by a signal handler, a state_dict()) would wait for "
                "itself: set a flag there and save behind it, as engine.on_preemption() does"
            )
