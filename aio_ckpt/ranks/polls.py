"""Agreed polls: once something has come to any rank, the same poll returns True on every rank.

:class:`AgreedPoll` waits for any event. :class:`AgreedTimer` is a poll for the end of an interval by the leader's
clock, :class:`AgreedPreemption` one for a signal to any rank, and :class:`AgreedWork` one for the end of work that each
rank does by itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeAlias

import anyio

from aio_ckpt.errors import AioCkptError, EngineClosedError, StallError
from aio_ckpt.ranks.exchange import Exchange
from aio_ckpt.ranks.failure import WORK_STAGE, Failure, work_failure
from aio_ckpt.ranks.membership import Membership
from aio_ckpt.ranks.messages import Topic
from aio_ckpt.runtime.ctrl_c import Lock, new_future
from aio_ckpt.runtime.futures import first_cause, follow
from aio_ckpt.runtime.portal import Portal
from aio_ckpt.runtime.signals import Preemption
from aio_ckpt.runtime.waiting import WaitWarning
from aio_ckpt.ticket import Milestone

Work: TypeAlias = Future[Any] | Milestone[Any]
"""Work that ends by itself, with a result or an error."""

_FIRST_POLL: Exchange[int, int] = Exchange(int, int, stage="agree")
"""Each rank sends the number of its polls so far; the leader replies with the first poll that returns True."""
_OUTCOME: Exchange[Failure | None, Failure | None] = Exchange(Failure | None, Failure | None, stage=WORK_STAGE)
"""Each rank sends its failure, once its work has ended. The leader replies with the first failure of any rank."""
_OWN_SECS = 0.2
"""Pause between two looks whether the event has come to this rank. A signal handler can wake nothing."""
_log = logging.getLogger("aio_ckpt")


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
        topic: Topic,
        has_come: Callable[[], bool] = lambda: False,
        on_error: Callable[[AioCkptError], None] = lambda _: None,
    ) -> None:
        """``topic`` names the event, alike on all ranks. ``has_come()``: whether it came to this rank.

        ``on_error`` gets the reason if the ranks cannot agree. This rank goes by itself then.
        """
        self._members = members
        self._portal = portal
        self._topic = topic
        self._has_come = has_come
        self._on_error = on_error
        self.error: AioCkptError | None = None
        """Reason why the ranks cannot agree; None if they can."""
        self._lock = Lock()
        self._polls = 0
        self._is_held = False
        self._first: int | None = None
        self._decided: Future[None] = new_future()
        self._is_watched = False

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
                self._decided.result(self._members.reply_limit_secs)
            except TimeoutError:
                raise StallError(f"{self._topic.text()}: the other ranks do not answer") from None
        return self._is_found_by(number)

    def _is_found_by(self, number: int) -> bool:
        return self._first is not None and number >= self._first

    def watch(self) -> None:
        """Begin to watch for the event on all ranks, by a flag that is named as the topic."""
        self._is_watched = True
        self._portal.submit(self._decide, self._come)

    async def agree(self) -> None:
        """Agree now. If the event has come to all ranks, each calls this in its loop, in place of :meth:`watch`."""
        await self._decide(self._members.met)

    async def _come(self) -> None:
        """Return once the event has come to any rank, and all ranks are about to know it."""
        members = self._members
        await members.met()
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._await_own, group.cancel_scope)
                await members.coordinator.flag(self._topic.key)
                group.cancel_scope.cancel()
        except BaseExceptionGroup as errors:
            raise first_cause(errors) from None
        if members.is_leader or self._has_come():
            await members.coordinator.raise_flag(self._topic.key)

    async def _await_own(self, waiting: anyio.CancelScope) -> None:
        while not self._has_come():  # noqa: ASYNC110 - a signal handler sets no event
            await anyio.sleep(_OWN_SECS)
        waiting.cancel()

    async def _decide(self, come: Callable[[], Awaitable[None]]) -> None:
        """Await ``come()``, then agree with the other ranks on the first poll that returns True."""
        try:
            await come()
            with self._lock:
                self._is_held, polls = True, self._polls
            self._first = await _FIRST_POLL.run(self._members.coordinator, self._topic, polls, self._after_all)
        except AioCkptError as error:
            self.error = error
            if not isinstance(error, EngineClosedError):  # then nobody polls any more
                self._on_error(error)
        finally:
            with self._lock:
                if self._first is None and self._has_come():
                    self._first = self._polls + 1
                self._is_held = False
            self._decided.set_result(None)

    async def _after_all(self, polls: Sequence[int]) -> int:
        """Return the first poll that returns True, on the leader."""
        if self._is_watched:  # every rank has seen it, and has raised it before it sent the number of its polls
            await self._members.coordinator.lower_flag(self._topic.key)
        return max(polls) + 1


class AgreedTimer:
    """Timer of ``secs`` seconds. The n-th :meth:`poll` returns the same on every rank.

    The first poll starts the timer. Every rank polls and restarts at the same places of its program.
    """

    def __init__(
        self, members: Membership, portal: Portal, secs: float, *, name: str, now: Callable[[], float]
    ) -> None:
        """``name``: the same for this timer on every rank, and of no other timer. ``now``: a clock, in seconds."""
        self._members = members
        self._portal = portal
        self._secs = secs
        self._name = name
        self._now = now
        self._began: float | None = None
        self._periods = 0
        self._agreed: AgreedPoll | None = None

    def poll(self) -> bool:
        """Count a poll; return whether the time is over. The next poll begins a new agreement.

        Raises:
            PeerFailedError, StallError: another rank failed, or does not answer.
        """
        if self._began is None:
            self.restart()
        if not self._members.are_several:
            return self._is_over()
        if self._agreed is None:
            self._agreed = self._watched()
        is_over = self._agreed.poll()
        if self._agreed.error is not None:
            raise self._agreed.error.with_traceback(None)  # at each poll: a traceback that grows would keep the frames
        if is_over:
            self._agreed = None
        return is_over

    def restart(self) -> None:
        """Start the time anew."""
        self._began = self._now()

    def _is_over(self) -> bool:
        return self._began is not None and self._now() - self._began >= self._secs

    def _watched(self) -> AgreedPoll:
        self._periods += 1
        leads, topic = self._members.is_leader, Topic(self._name, part=f"period {self._periods}")
        agreed = AgreedPoll(self._members, self._portal, topic=topic, has_come=lambda: leads and self._is_over())
        agreed.watch()
        return agreed


class AgreedPreemption:
    """Whether the process is to end. The n-th :meth:`poll` returns the same on every rank; see :class:`AgreedPoll`."""

    def __init__(self, members: Membership, portal: Portal) -> None:
        self.local = Preemption()
        """The signals of this process."""
        self._members = members
        self._agreed = AgreedPoll(
            members,
            portal,
            topic=Topic("the preemption"),
            has_come=lambda: self.local.is_requested,
            on_error=lambda error: _log.error("preemption is not agreed, this rank goes by its own signal: %s", error),
        )
        self._is_watching = False

    @property
    def is_on(self) -> bool:
        """Whether a poll has returned True. Reading this is no poll."""
        return self._agreed.is_found if self._is_watching else self.local.is_requested

    def poll(self) -> bool:
        """Count a poll; return whether the process is to end. Once True, it stays True.

        Raises:
            StallError: another rank does not answer.
        """
        return self._agreed.poll() if self._is_watching else self.local.is_requested

    def watch(self) -> None:
        """Begin to watch for signals to other ranks. If there is one rank, its signal counts at once."""
        if self._members.are_several and not self._is_watching:
            self._is_watching = True
            self._agreed.watch()


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
        on_leader: Callable[[Failure | None], Awaitable[None]] | None = None,
    ) -> None:
        """Begin to follow ``works``, those of this rank.

        Args:
            name: the same for this object on every rank, and of no other object.
            on_leader: called on the leader once all work has ended, with the first failure. The other ranks hear of
                the end once it has returned. Its error is the failure of all, if there is none yet.
        """
        self._members = members
        self._works = works
        self.name = name
        """What messages call this work."""
        self._on_leader = on_leader
        self._agreed = AgreedPoll(members, portal, topic=Topic(name, part="poll"))
        self.leaders_error: BaseException | None = None
        """Error of ``on_leader``, on the leader."""
        self.ended = portal.submit(self._follow)
        """Done once the ranks have agreed, with the first failure of any rank."""

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
        has_broken = self.ended.done() and self.ended.exception() is not None
        return self._agreed.poll() or self._agreed.error is not None or has_broken

    def failure(self) -> Failure | None:
        """Return the first failure of any rank. Call it once :meth:`is_done`.

        Raises:
            AioCkptError: the ranks could not agree.
        """
        found = self.ended.result()
        if found is None and self._agreed.error is not None:
            raise self._agreed.error.with_traceback(None)
        return found

    def _lines(self) -> WaitWarning:
        """Return the lines about a blocking poll. Those about the other ranks are logged by the exchange."""

        def describe(waited: str) -> str:
            left = sum(not work.done() for work in self._works)
            whose = f"{left} of {len(self._works)} works of this rank" if left else "the other ranks"
            return f"{self.name} has waited {waited} for {whose}"

        return WaitWarning(describe, rank=self._members.coordinator.rank)

    def failure_of(self, work: Work) -> Failure | None:
        """Return the failure of a work that has ended on this rank; None if it has none."""
        error = work.exception()
        return None if error is None else work_failure(error, self._members.coordinator.rank)

    async def _follow(self) -> Failure | None:
        await self._members.met()
        outcome = await self._members.coordinator.while_beating(self._agreed_outcome)
        await self._agreed.agree()
        return outcome

    async def _agreed_outcome(self) -> Failure | None:
        coordinator = self._members.coordinator
        for work in self._works:
            await asyncio.wrap_future(follow(work))
        mine = next(filter(None, (self.failure_of(work) for work in self._works)), None)
        return await _OUTCOME.run(coordinator, Topic(self.name, part="outcome"), mine, self._decide)

    async def _decide(self, failures: Sequence[Failure | None]) -> Failure | None:
        """Return the failure of all, on the leader."""
        first = next(filter(None, failures), None)
        if self._on_leader is not None:
            try:
                await self._on_leader(first)
            except (AioCkptError, OSError) as error:
                self.leaders_error = error
                return first or work_failure(error, self._members.coordinator.leader)
        return first
