"""Preemption, agreed: after a signal to one rank, the same poll of ``preempted`` returns True on every rank."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future

import anyio

from aio_ckpt.errors import AioCkptError, StallError
from aio_ckpt.ranks.coordinator import Exchange
from aio_ckpt.ranks.membership import Membership
from aio_ckpt.runtime.portal import Lock, Portal
from aio_ckpt.runtime.signals import Preemption

__all__ = ["AgreedPreemption"]

_log = logging.getLogger("aio_ckpt")
_FIRST_POLL: Exchange[int, int] = Exchange(int, int, stage="agree")
"""Each rank sends the number of its polls so far; the leader replies with the first poll that returns True."""
_FLAG = "preempted"
_FLAG_SECS = 0.2
_FLAG_SECS_A_RANK = 1e-4
"""Pause per rank between two questions for the flag: all ranks ask, and the store has one thread."""


class AgreedPreemption:
    """Whether the process is to end. The n-th :meth:`poll` returns the same on every rank.

    Every rank polls at the same places of its program. Once a signal came to any rank, each rank tells the leader the
    number of its polls, and its next poll blocks until the leader has named the first poll that returns True: the one
    after the highest number. That takes milliseconds, because engines answer, not trainers.
    """

    def __init__(self, members: Membership, portal: Portal) -> None:
        self.local = Preemption()
        """The signals of this process."""
        self._members = members
        self._portal = portal
        self._lock = Lock()
        self._polls = 0
        self._is_held = False
        self._first: int | None = None
        self._decided: Future[None] = Future()
        self._is_watching = False

    @property
    def is_on(self) -> bool:
        """Whether a poll has returned True. Reading this is no poll."""
        return self._is_found(self._polls)

    def poll(self) -> bool:
        """Count a poll; return whether the process is to end. Once True, it stays True.

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
                raise StallError("preempted: the other ranks do not answer") from None
        return self._is_found(number)

    def _is_found(self, number: int) -> bool:
        if not self._is_watching:  # one rank, or signals are not handled
            return self.local.is_requested
        return self._first is not None and number >= self._first

    def watch(self) -> None:
        """Begin to watch for signals to other ranks. If there is one rank, its signal counts at once."""
        if self._members.are_several and not self._is_watching:
            self._is_watching = True
            self._portal.submit(self._watch)

    async def _watch(self) -> None:
        coordinator = self._members.coordinator
        pause = max(_FLAG_SECS, _FLAG_SECS_A_RANK * coordinator.world_size)
        try:
            await self._members.met()
            while not (self.local.is_requested or await coordinator.is_raised(_FLAG)):  # noqa: ASYNC110 - there is no event
                await anyio.sleep(pause)
            await coordinator.raise_flag(_FLAG)
            with self._lock:
                self._is_held, polls = True, self._polls
            self._first = await _FIRST_POLL.run(coordinator, "the preemption", polls, _after_all)
        except AioCkptError as error:
            _log.error("preemption is not agreed, this rank goes by its own signal: %s", error)
        finally:
            with self._lock:
                if self._first is None and self.local.is_requested:
                    self._first = self._polls + 1
                self._is_held = False
            self._decided.set_result(None)


async def _after_all(polls: Sequence[int]) -> int:
    return max(polls) + 1
