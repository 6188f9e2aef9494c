"""The saves in flight of one engine: who may enter, in what order of steps, and whose failure nobody has seen."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from aio_ckpt import commit
from aio_ckpt.config import BusyPolicy, FailurePolicy
from aio_ckpt.errors import BusyError, EngineClosedError
from aio_ckpt.pipeline import PendingSave
from aio_ckpt.portal import Condition
from aio_ckpt.ticket import SaveTicket

__all__ = ["InFlight"]

_log = logging.getLogger("aio_ckpt")


class InFlight:
    """The table of pending saves.

    Invariant: a save is in the table from :meth:`add` until :meth:`remove`, and at most ``max_in_flight`` are. A
    failure that no waiter has seen stays here until it was raised once.
    """

    def __init__(self, *, max_in_flight: int, when_busy: BusyPolicy, on_failure: FailurePolicy) -> None:
        self._max = max_in_flight
        self._when_busy = when_busy
        self._on_failure = on_failure
        self._changed = Condition()
        self._pending: list[PendingSave] = []
        self._unreported: list[SaveTicket] = []
        self._committed: set[int] | None = None
        self._is_closing = False

    # -- room -----------------------------------------------------------------------------------------

    def wait_for_room(self) -> float | None:
        """Seconds waited for room; None if the save is to be skipped.

        No deadline of its own: each pending save settles by its own.

        Raises:
            BusyError: there is none and ``when_busy="raise"``.
            EngineClosedError: the engine was closed, maybe meanwhile.
        """
        began = time.perf_counter()
        with self._changed:
            while not self._is_closing and len(self._pending) >= self._max:
                if self._when_busy == "skip":
                    return None
                if self._when_busy == "raise":
                    raise BusyError(
                        f"the save of step {self._pending[0].step} is pending: await engine.ready() first, "
                        "or raise max_in_flight"
                    )
                self._changed.wait()
            if self._is_closing:
                raise EngineClosedError("the engine was closed: open a new one")
        return time.perf_counter() - began

    def close(self) -> None:
        """No save may enter from now on; those that wait get EngineClosedError."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()

    @property
    def pending(self) -> tuple[PendingSave, ...]:
        """Saves not settled, oldest first."""
        with self._changed:
            return tuple(self._pending)

    @property
    def has_room(self) -> bool:
        """Whether a save would not wait."""
        with self._changed:
            return len(self._pending) < self._max

    def add(self, save: PendingSave) -> None:
        """Enter the table."""
        with self._changed:
            self._pending.append(save)

    def remove(self, save: PendingSave, error: BaseException | None) -> None:
        """Leave the table, committed or failed."""
        with self._changed:
            self._pending.remove(save)
            if error is None and self._committed is not None:
                self._committed.add(save.step)
            if error is not None and not save.is_cancelled:
                self._unreported.append(save.ticket)
            self._changed.notify_all()

    # -- steps ----------------------------------------------------------------------------------------

    @property
    def knows_steps(self) -> bool:
        """Whether the committed steps were read from the disk."""
        return self._committed is not None

    def learn_steps(self, committed: Iterable[int]) -> None:
        """Take over what is committed on the disk; None of it is forgotten until the next call."""
        self._committed = set(committed)

    @property
    def newest_step(self) -> int:
        """Newest committed or pending step; 0 if there is none."""
        with self._changed:
            return max((self._committed or set()).union(save.step for save in self._pending), default=0)

    def next_step(self, step: object, *, overwrite: bool) -> int:
        """The step of a save that enters now.

        Raises:
            StepOrderError: see :func:`aio_ckpt.commit.check_step`.
        """
        with self._changed:
            committed = self._committed or set()
            taken = committed.union(save.step for save in self._pending)
        return commit.check_step(step, newest=max(taken, default=None), committed=committed, overwrite=overwrite)

    # -- failures -------------------------------------------------------------------------------------

    def raise_unreported(self) -> None:
        """Raise the oldest failure that nobody has seen, once; with ``on_failure="log"`` they were only logged."""
        with self._changed:
            failed = [ticket for ticket in self._unreported if not ticket.committed.observed]
            self._unreported = failed[1:] if self._on_failure == "raise" else []
        if failed and self._on_failure == "raise":
            error = failed[0].exception()
            if error is not None:
                error.add_note(f"this is the background save of step {failed[0].step}, which nobody awaited")
                raise error
