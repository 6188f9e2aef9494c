"""Agreed polls: once something has come to any rank, the same poll returns True on every rank.

:class:`AgreedPoll` waits for any event. :class:`AgreedTimer` is a poll for the end of an interval by the leader's
clock, :class:`AgreedPreemption` one for a signal to any rank.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future

import anyio

from aio_ckpt.errors import AioCkptError, StallError
from aio_ckpt.ranks.coordinator import Exchange
from aio_ckpt.ranks.membership import Membership
from aio_ckpt.ranks.messages import Topic
from aio_ckpt.runtime.futures import first_cause
from aio_ckpt.runtime.portal import Lock, Portal
from aio_ckpt.runtime.signals import Preemption

_FIRST_POLL: Exchange[int, int] = Exchange(int, int, stage="agree")
"""Each rank sends the number of its polls so far; the leader replies with the first poll that returns True."""
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
        on_error: Callable[[AioCkptError], None],
        flag: str = "",
        has_come: Callable[[], bool] = lambda: False,
    ) -> None:
        """``has_come()``: whether the event came to this rank. ``flag`` and ``topic`` name it, alike on all ranks.

        :meth:`agree` needs neither ``flag`` nor ``has_come``.

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
                raise StallError(f"{self._topic.text()}: the other ranks do not answer") from None
        return self._is_found_by(number)

    def _is_found_by(self, number: int) -> bool:
        return self._first is not None and number >= self._first

    def watch(self) -> None:
        """Begin to watch for the event on all ranks."""
        self._portal.submit(self._watch)

    async def agree(self) -> None:
        """Agree now. If the event has come to all ranks, each calls this in its loop, in place of :meth:`watch`."""
        await self._decide(self._members.met)

    async def _watch(self) -> None:
        await self._decide(self._come)

    async def _come(self) -> None:
        """Return once the event has come to any rank, and all ranks are about to know it."""
        members = self._members
        await members.met()
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._await_own, group.cancel_scope)
                await members.coordinator.flag(self._flag)
                group.cancel_scope.cancel()
        except BaseExceptionGroup as errors:
            raise first_cause(errors) from None
        if members.is_leader or self._has_come():
            await members.coordinator.raise_flag(self._flag)

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
            self._on_error(error)
        finally:
            with self._lock:
                if self._first is None and self._has_come():
                    self._first = self._polls + 1
                self._is_held = False
            self._decided.set_result(None)

    async def _after_all(self, polls: Sequence[int]) -> int:
        """Return the first poll that returns True, on the leader."""
        if self._flag:  # every rank has seen it, and has raised it before it sent the number of its polls
            await self._members.coordinator.lower_flag(self._flag)
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
        self._errors: list[AioCkptError] = []

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
        if self._errors:
            raise self._errors[0].with_traceback(None)  # at each poll: a traceback that grows would keep the frames
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
        name = f"{self._name}.{self._periods}"
        leads = self._members.is_leader
        agreed = AgreedPoll(
            self._members,
            self._portal,
            flag=name,
            topic=Topic(name),
            has_come=lambda: leads and self._is_over(),
            on_error=self._errors.append,
        )
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
            flag="preempted",
            topic=Topic("the preemption"),
            has_come=lambda: self.local.is_requested,
            on_error=_tell,
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
        is_found = self._agreed.poll()
        return is_found if self._is_watching else self.local.is_requested  # one rank, or signals are not handled

    def watch(self) -> None:
        """Begin to watch for signals to other ranks. If there is one rank, its signal counts at once."""
        if self._members.are_several and not self._is_watching:
            self._is_watching = True
            self._agreed.watch()


def _tell(error: AioCkptError) -> None:
    _log.error("preemption is not agreed, this rank goes by its own signal: %s", error)
