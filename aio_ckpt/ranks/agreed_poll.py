"""Agreed polls: once something has come to any rank, the same poll returns True on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import anyio

from aio_ckpt.errors import AioCkptError, StallError
from aio_ckpt.ranks.coordinator import Exchange
from aio_ckpt.ranks.membership import Membership
from aio_ckpt.runtime.portal import Lock, Portal

__all__ = ["AgreedPoll"]

_FIRST_POLL: Exchange[int, int] = Exchange(int, int, stage="agree")
"""Each rank sends the number of its polls so far; the leader replies with the first poll that returns True."""
_FLAG_SECS = 0.2
_FLAG_SECS_A_RANK = 1e-4
"""Pause per rank between two questions for the flag: all ranks ask, and the store has one thread."""


class AgreedPoll:
    """Polls for one event. The n-th :meth:`poll` returns the same on every rank.

    Every rank polls at the same places of its program. Once the event came to any rank, each rank tells the leader the
    number of its polls, and its next poll blocks until the leader has named the first poll that returns True: the one
    after the highest number. That takes milliseconds, because engines answer, not trainers.
    """

    def __init__(
        self,
        members: Membership,
        portal: Portal,
        *,
        flag: str,
        topic: str,
        has_come: Callable[[], bool],
        on_error: Callable[[AioCkptError], None],
    ) -> None:
        """``has_come()``: whether the event came to this rank. ``flag`` and ``topic`` name it, alike on all ranks.

        ``on_error`` gets the reason if the ranks cannot agree. This rank goes by itself then.
        """
        self._members = members
        self._portal = portal
        self._flag = flag
        self._topic = topic
        self._has_come = has_come
        self._on_error = on_error
        self._lock = Lock()
        self._polls = 0
        self._is_held = False
        self._first: int | None = None
        self._decided: Future[None] = Future()

    @property
    def is_found(self) -> bool:
        """Whether a poll has returned True. Reading this is no poll."""
        return self._is_found_by(self._polls)

    def poll(self) -> bool:
        """Count a poll; return whether the event has come. Once True, it stays True.

        Raises:
            StallError: another rank does not answer.
        """
        with self._lock:
            self._polls += 1
            number, is_held = self._polls, self._is_held
        if is_held and self._first is None:
            try:
                self._decided.result(2 * self._members.stall_secs)
            except TimeoutError:
                raise StallError(f"{self._topic}: the other ranks do not answer") from None
        return self._is_found_by(number)

    def _is_found_by(self, number: int) -> bool:
        return self._first is not None and number >= self._first

    def watch(self, quiet_secs: float = 0.0) -> None:
        """Begin to watch for the event on all ranks; after ``quiet_secs``, in which none is expected."""
        self._portal.submit(self._watch, quiet_secs)

    async def _watch(self, quiet_secs: float) -> None:
        coordinator = self._members.coordinator
        pause = max(_FLAG_SECS, _FLAG_SECS_A_RANK * coordinator.world_size)
        try:
            await self._members.met()
            await anyio.sleep(quiet_secs)
            while not (self._has_come() or await coordinator.is_raised(self._flag)):  # noqa: ASYNC110 - there is no event
                await anyio.sleep(pause)
            await coordinator.raise_flag(self._flag)
            with self._lock:
                self._is_held, polls = True, self._polls
            self._first = await _FIRST_POLL.run(coordinator, self._topic, polls, _after_all)
        except AioCkptError as error:
            self._on_error(error)
        finally:
            with self._lock:
                if self._first is None and self._has_come():
                    self._first = self._polls + 1
                self._is_held = False
            self._decided.set_result(None)


async def _after_all(polls: Sequence[int]) -> int:
    return max(polls) + 1
