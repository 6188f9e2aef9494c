"""State that ``dcp.async_save`` saves without a copy, because staging memory cannot hold one."""

from __future__ import annotations

from collections.abc import ItemsView
from typing import Any, NoReturn

from aio_ckpt.errors import BudgetExceededError, SaveCancelledError, StallError
from aio_ckpt.runtime.handover import Handover


class LiveState(dict[str, Any]):
    """State whose tensors are the caller's own, until the thread of ``dcp.async_save`` has captured them.

    DCP first reads the items in that thread. So the thread that reads them is the one that saves this state.
    """

    def __init__(self, state: dict[str, Any], budget_bytes: int) -> None:
        super().__init__(state)
        self._budget_bytes = budget_bytes
        self._tensors = Handover()

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        """Return the items, and note that the current thread saves this state."""
        self._tensors.take()
        return super().items()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raise BudgetExceededError: a copy for another process would be as large as the state."""
        self._tensors.release()
        raise BudgetExceededError(
            f"the state cannot be staged within budget_bytes={self._budget_bytes}: raise it, or save by a thread of "
            "this process (AsyncCheckpointerType.THREAD), which needs no copy"
        )

    @property
    def is_saved_here(self) -> bool:
        """Whether the current thread saves this state."""
        return self._tensors.is_taken_here

    def release(self) -> None:
        """Let the caller go on: all tensors are captured, or the save has failed.

        Raises:
            SaveCancelledError: the caller has gone on before, and may have changed the tensors.
        """
        if not self._tensors.release():
            raise SaveCancelledError("dcp.async_save was interrupted before the last wave was captured")

    def wait_captured(self, begin_secs: float) -> None:
        """Wait until the thread that saves has called :meth:`release` or has ended. Its future holds its error.

        Raises:
            StallError: no thread has begun to save within ``begin_secs``.
        """
        if not self._tensors.wait(begin_secs):
            raise StallError(f"dcp.async_save did not begin to save within {begin_secs} s; nothing becomes visible")
