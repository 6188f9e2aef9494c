"""State that ``dcp.async_save`` saves without a copy, because staging memory cannot hold one."""

from __future__ import annotations

import threading
import time
from collections.abc import ItemsView
from typing import Any, NoReturn

from aio_ckpt.errors import BudgetExceededError, SaveCancelledError, StallError
from aio_ckpt.runtime.ctrl_c import Lock

_POLL_SECS = 0.1
"""Interval at which the caller checks that the saving thread lives: a thread that fails notifies nobody."""


class UncopiedState(dict[str, Any]):
    """State whose tensors are the caller's own, until the thread of ``dcp.async_save`` has captured them.

    DCP first reads the items in that thread. So the thread that reads them is the one that saves this state.
    Invariant: the caller returns from :meth:`wait_captured` when that thread has released the state, or has ended. If
    an exception ends the wait earlier, :meth:`release` raises.
    """

    def __init__(self, state: dict[str, Any], budget_bytes: int) -> None:
        super().__init__(state)
        self._budget_bytes = budget_bytes
        self._caller = threading.current_thread()
        self._saver: threading.Thread | None = None
        self._released = threading.Event()
        self._lock = Lock()
        self._is_given_up = False

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        """Return the items, and note that the current thread saves this state, unless it is the caller's."""
        if threading.current_thread() is not self._caller:
            self._saver = threading.current_thread()
        return super().items()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raise BudgetExceededError: a copy for another process would be as large as the state."""
        self._released.set()
        raise BudgetExceededError(
            f"the state cannot be staged within budget_bytes={self._budget_bytes}: raise it, or save by a thread of "
            "this process (AsyncCheckpointerType.THREAD), which needs no copy"
        )

    @property
    def is_saved_here(self) -> bool:
        """Whether the current thread saves this state."""
        return self._saver is threading.current_thread()

    def release(self) -> None:
        """Let the caller go on: all tensors are captured, or the save has failed.

        Raises:
            SaveCancelledError: the caller has gone on before, and may have changed the tensors.
        """
        with self._lock:
            self._released.set()
            if self._is_given_up:
                raise SaveCancelledError("dcp.async_save was interrupted before the last wave was captured")

    def wait_captured(self, begin_secs: float) -> None:
        """Wait until the thread that saves has called :meth:`release` or has ended. Its future holds its error.

        Raises:
            StallError: no thread has begun to save within ``begin_secs``.
        """
        limit = time.monotonic() + begin_secs
        is_over = False
        try:
            while not is_over and (self._saver is not None or time.monotonic() < limit):
                is_over = self._released.wait(_POLL_SECS) or (self._saver is not None and not self._saver.is_alive())
        finally:
            with self._lock:
                self._is_given_up = not is_over and not self._released.is_set()
        if self._is_given_up:
            raise StallError(f"dcp.async_save did not begin to save within {begin_secs} s; nothing becomes visible")
