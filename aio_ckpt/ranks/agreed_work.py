"""Agreed work: work that each rank does by itself ends, and fails, at the same poll on every rank."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeAlias

import msgspec

from aio_ckpt.errors import AioCkptError, EngineClosedError
from aio_ckpt.ranks.agreed_poll import AgreedPoll
from aio_ckpt.ranks.coordinator import Exchange
from aio_ckpt.ranks.membership import Membership
from aio_ckpt.ranks.messages import Topic
from aio_ckpt.runtime.futures import follow
from aio_ckpt.runtime.portal import Portal
from aio_ckpt.runtime.waiting import WaitWarning
from aio_ckpt.ticket import Milestone

WORK_STAGE = "write"

Work: TypeAlias = Future[Any] | Milestone[Any]
"""Work that ends by itself, with a result or an error."""


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """Failure of the work of a rank, as all ranks are told it."""

    rank: int
    text: str


_OUTCOME: Exchange[Failure | None, Failure | None] = Exchange(Failure | None, Failure | None, stage=WORK_STAGE)
"""Each rank sends its failure, once its work has ended. The leader replies with the first failure of any rank."""

OnLeader: TypeAlias = Callable[[Failure | None], Awaitable[None]]


def failure_of(work: Work, rank: int) -> Failure | None:
    """Return the failure of a work that has ended on ``rank``; None if it has none."""
    error = work.exception()
    return None if error is None else failure_by(error, rank)


def failure_by(error: BaseException, rank: int) -> Failure:
    """Return the failure that ``error`` is on ``rank``."""
    return Failure(rank, f"{type(error).__name__}: {error}")


class AgreedWork:
    """Work of all ranks, which make their objects in the same order. The n-th :meth:`is_done` is alike on every rank.

    The ranks agree through their store, in the loop of ``portal``. No poll waits for the work of another rank.
    """

    def __init__(
        self,
        members: Membership,
        portal: Portal,
        works: Sequence[Work],
        *,
        name: str,
        failure_of: Callable[[Work, int], Failure | None] = failure_of,
        on_leader: OnLeader | None = None,
    ) -> None:
        """Begin to follow ``works``, those of this rank.

        Args:
            members: the ranks.
            portal: the loop in which this rank agrees.
            works: work that has begun.
            name: the same for this object on every rank, and of no other object.
            failure_of: tells the failure of one work that has ended, on this rank.
            on_leader: called on the leader once all work has ended, with the first failure. The other ranks hear of
                the end once it has returned. Its error is the failure of all, if there is none yet.
        """
        self._members = members
        self._works = works
        self.name = name
        """What messages call this work."""
        self._failure_of = failure_of
        self._on_leader = on_leader
        self._errors: list[AioCkptError] = []
        self._agreed = AgreedPoll(members, portal, topic=Topic(name, part="poll"), on_error=self._errors.append)
        self._outcome: Future[Failure | None] = Future()
        self.leaders_error: BaseException | None = None
        """Error of ``on_leader``, on the leader."""
        self.ended = portal.submit(self._follow, on_done=self._settle)
        """Done once the ranks have agreed."""

    def is_done(self, *, blocking: bool) -> bool:
        """Count a poll, and return whether the work is done, or the ranks cannot agree whether it is.

        A blocking poll waits for the work of all ranks. They all make it at the same place, so it needs no agreement.
        It has no deadline of its own: the work has one, and a rank without heartbeats ends the wait.

        Raises:
            StallError: another rank does not answer.
        """
        if blocking:
            self._lines().wait_for([self.ended])
            return True
        return self._agreed.poll() or bool(self._errors) or self._has_broken

    def failure(self) -> Failure | None:
        """Return the first failure of any rank. Call it once :meth:`is_done`.

        Raises:
            AioCkptError: the ranks could not agree.
        """
        found = self._outcome.result() if self._outcome.done() else None
        if found is None and self._errors:
            raise self._errors[0].with_traceback(None)
        return found

    def _lines(self) -> WaitWarning:
        """Return the lines about a blocking poll. Those about the other ranks are logged by the exchange."""

        def describe(waited: str) -> str:
            left = sum(not work.done() for work in self._works)
            whose = f"{left} of {len(self._works)} works of this rank" if left else "the other ranks"
            return f"{self.name} has waited {waited} for {whose}"

        return WaitWarning(describe, rank=self._members.coordinator.rank)

    @property
    def _has_broken(self) -> bool:
        return self._outcome.done() and self._outcome.exception() is not None

    async def _follow(self) -> None:
        await self._members.met()
        outcome = await self._members.coordinator.while_beating(self._agreed_outcome)
        self._outcome.set_result(outcome)
        await self._agreed.agree()

    async def _agreed_outcome(self) -> Failure | None:
        coordinator = self._members.coordinator
        for work in self._works:
            await asyncio.wrap_future(follow(work))
        mine = next(filter(None, (self._failure_of(work, coordinator.rank) for work in self._works)), None)
        return await _OUTCOME.run(coordinator, Topic(self.name, part="outcome"), mine, self._decide)

    async def _decide(self, failures: Sequence[Failure | None]) -> Failure | None:
        """Return the failure of all, on the leader."""
        first = next(filter(None, failures), None)
        if self._on_leader is not None:
            try:
                await self._on_leader(first)
            except (AioCkptError, OSError) as error:
                self.leaders_error = error
                return first or failure_by(error, self._members.coordinator.leader)
        return first

    def _settle(self, done: Future[None]) -> None:
        error = done.exception() if not done.cancelled() else None
        if not self._outcome.done():
            self._outcome.set_exception(error or EngineClosedError(f"{self.name}: closed before it had ended"))
