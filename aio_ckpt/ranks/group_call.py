"""Group calls: the agreement of the ranks on a call of ``save()``, before it is a pending save."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeAlias

from aio_ckpt.checks import MAX_SECS
from aio_ckpt.errors import AioCkptError, EngineClosedError, PeerFailedError, StallError, StepOrderError
from aio_ckpt.ranks.coordinator import Exchange
from aio_ckpt.ranks.membership import Membership
from aio_ckpt.ranks.messages import Topic
from aio_ckpt.ranks.save_round import SaveRound, SaveState
from aio_ckpt.runtime.deadline import Deadline
from aio_ckpt.runtime.portal import Executor, Portal

CALL_STAGE = "capture"
"""Stage of the errors that ``save()`` itself raises."""
Room: TypeAlias = tuple[bool, int]
"""(whether the leader has room, number of the last call before the oldest that is pending on the leader)."""

_ROOM: Exchange[None, Room] = Exchange(None, Room, stage="agree")
_NOT_SKIPPED: Room = (True, 0)


class GroupCall:
    """One call of ``save()`` on every rank.

    Invariant: however this call ends locally, the other ranks are told, unless the leader decides that all skip the
    call; and this rank never waits for a reply that cannot arrive.
    """

    def __init__(
        self,
        members: Membership,
        executor: Executor,
        portal: Portal,
        *,
        number: int,
        claim: Callable[[], object],
        clear: Callable[[], object],
    ) -> None:
        """``claim`` takes the step of a call that is not skipped; ``clear`` deletes the directory of its save."""
        self.agreement = SaveRound(members, executor, topic=Topic("save", number))
        """Agreement on the save once it is pending."""
        self._members = members
        self._portal = portal
        self._topic = Topic("save", number, "room")
        self._claim = claim
        self._clear = clear
        self._own: Room = _NOT_SKIPPED
        self._room: Room | None = _NOT_SKIPPED

    def expect_room(self) -> None:
        """Note that the leader decides whether there is room."""
        self._room = None

    def room(self, own: Room, deadline: Deadline) -> Room:
        """Return the leader's room at this call. On the leader it is ``own``.

        Raises:
            StallError: the leader does not answer by the deadline.
            PeerFailedError: the leader refused the call, or is gone.
        """
        limit_secs = deadline.left_secs(2 * self._members.stall_secs)
        self._own = own
        try:
            return self._portal.call(self._announce, timeout=limit_secs, what="save()")
        except StallError:
            deadline.check(None, "waiting to hear whether rank 0 has room")
            raise

    async def _announce(self) -> Room:
        coordinator = self._members.coordinator
        then = self._topic._replace(part="") if self._own[0] else None
        self._room = await _ROOM.broadcast(coordinator, self._topic, self._own, then=then)
        if not self._room[0]:  # the call is skipped on every rank
            coordinator.end_call(self._topic)
        return self._room

    # -- the call ends here ---------------------------------------------------------------------------

    def refuse(self, error: BaseException) -> Future[None]:
        """Tell the other ranks that ``save()`` is about to raise, so that they do not wait for this rank.

        The returned future is done once it is known whether this call has taken its step. The next call needs that.
        """
        counted: Future[None] = Future()
        if not self._members.are_several:  # no rank waits, and the step of a refused call is free
            counted.set_result(None)
            return counted
        ended = functools.partial(self._refuse, peer_error(self._members, error), counted)
        with contextlib.suppress(EngineClosedError):
            self._portal.submit(ended, on_done=lambda _: _settle(counted))
            return counted
        _settle(counted)
        return counted

    async def _refuse(self, error: PeerFailedError, counted: Future[None]) -> None:
        room = await self._learn_room(error) if self._room is None else self._room
        if room[0]:
            self._take_step()
            _settle(counted)
            await self._end(error)

    async def _end(self, error: PeerFailedError) -> None:
        """End the call on this rank. The others may have begun to write."""
        if self.agreement.state is not SaveState.CALLED:  # the pipeline of the save cleans up itself
            await self.agreement.abort(error, stage=CALL_STAGE)
            return
        end = await self.agreement.end(error, stage=CALL_STAGE)
        if self._members.is_leader and end.may_clear:
            self._clear()

    async def _learn_room(self, error: PeerFailedError) -> Room:
        """Return the leader's decision on this call; on the leader, abort the call."""
        members = self._members
        with contextlib.suppress(AioCkptError):  # the leader has refused the call, too, or the ranks never meet
            await members.met()
            if not members.is_leader:
                return await self._announce()
            if (await members.abort(self._topic, error, stage=CALL_STAGE)).failure is None:  # it had replied before
                return self._own
        return _NOT_SKIPPED

    def _take_step(self) -> None:
        with contextlib.suppress(StepOrderError):
            self._claim()


def await_counted(refused: Future[None], members: Membership, deadline: Deadline) -> None:
    """Block until it is known whether the previous call, which was refused, has taken its step."""
    wait([refused], deadline.left_secs(min(2 * members.stall_secs, MAX_SECS)))
    if not refused.done():
        deadline.check(None, "waiting to hear of the call before")


def _settle(counted: Future[None]) -> None:
    if not counted.done():
        counted.set_result(None)


def peer_error(members: Membership, error: BaseException) -> PeerFailedError:
    """Return the error by which a call fails on the other ranks if it fails here with ``error``."""
    if isinstance(error, PeerFailedError):  # the first rank that failed is named
        return PeerFailedError(str(error), rank=error.rank, stage=CALL_STAGE, cause=error.cause)
    return PeerFailedError(f"{type(error).__name__}: {error}", rank=members.coordinator.rank, stage=CALL_STAGE)


def await_met(members: Membership, deadline: Deadline) -> None:
    """Block until all ranks have opened their engines.

    Raises:
        StallError: a rank did not come in time.
        PeerFailedError, RootError: see :meth:`Membership.meet`.
    """
    try:
        members.opened.exception(deadline.left_secs(min(2 * members.stall_secs, MAX_SECS)))
    except TimeoutError:
        deadline.check(None, "waiting for the other ranks to open their engines")
        raise StallError("the other ranks did not open their engines in time") from None
    members.check_met()
