"""One save's agreement, and how far the save has come on this rank.

If a save must not wait, the leader first says whether there is room (:meth:`SaveRound.room`). A rank that has no plan
yet agrees before it captures (:meth:`SaveRound.assign`). Then every rank votes that its share is durable
(:meth:`SaveRound.gather`), the leader publishes, and every rank learns of it (:meth:`SaveRound.finish`).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import anyio
import anyio.lowlevel

from aio_ckpt.errors import AioCkptError, PeerFailedError, PlanChangedError
from aio_ckpt.plan.shard_table import malformed
from aio_ckpt.ranks.coordinator import CallEnd
from aio_ckpt.ranks.exchange import Exchange
from aio_ckpt.ranks.membership import CALL_STAGE, Membership
from aio_ckpt.ranks.messages import Topic
from aio_ckpt.ranks.save_ledger import (
    AssignReply,
    CommitReply,
    PlanMsg,
    Vote,
    slowest_ranks,
)
from aio_ckpt.runtime.portal import Executor, run_blocking

SAVE: Exchange[PlanMsg | Vote | None, AssignReply | CommitReply] = Exchange(
    PlanMsg | Vote | None, AssignReply | CommitReply, stage="agree"
)
"""One save. A rank sends its plan or its vote; None if the vote that it has sent before still stands."""


class Room(NamedTuple):
    """Answer of the leader to a call of ``save()`` that must not wait."""

    is_free: bool
    """Whether the leader admits the call."""
    finished_through: int
    """Number of the newest call such that it and all before it have finished on the leader."""


_ROOM: Exchange[None, Room] = Exchange(None, Room, stage="agree")


class SaveState(enum.Enum):
    """How far one save has come on this rank."""

    CALLED = "called"
    """``save()`` runs; the save is not pending yet."""
    CAPTURING = "being captured"
    """The save is pending; its pipeline has not begun."""
    WRITING = "being written"
    """The pipeline of the save runs."""
    CANCELLED = "cancelled"
    """``cancel()`` was accepted: nothing becomes visible."""
    VOTED = "voted for"
    """This rank has voted that its share is durable: the leader may commit from now on."""
    COMMITTING = "being committed"
    """The leader makes the step visible: a deadline or a cancellation comes too late."""
    VISIBLE = "visible"
    """The leader has made the step visible and durable."""
    COMMITTED = "committed"
    """The leader has sent its last reply, or another rank has received it."""
    FAILED = "failed"
    """Nothing of the save becomes visible."""
    IN_DOUBT = "in doubt"
    """The save failed here, but the step is visible or may become so."""


_S = SaveState
_ENDS = frozenset({_S.FAILED, _S.IN_DOUBT})
_NEXT: Mapping[SaveState, frozenset[SaveState]] = {
    _S.CALLED: frozenset({_S.CAPTURING}) | _ENDS,
    _S.CAPTURING: frozenset({_S.WRITING, _S.CANCELLED}) | _ENDS,
    _S.WRITING: frozenset({_S.VOTED, _S.CANCELLED}) | _ENDS,
    _S.CANCELLED: frozenset({_S.CANCELLED}) | _ENDS,
    _S.VOTED: frozenset({_S.COMMITTING, _S.COMMITTED, _S.CANCELLED}) | _ENDS,
    _S.COMMITTING: frozenset({_S.VISIBLE}) | _ENDS,
    _S.VISIBLE: frozenset({_S.COMMITTED, _S.IN_DOUBT}),
    _S.COMMITTED: frozenset({_S.IN_DOUBT}),
    _S.FAILED: _ENDS,
    _S.IN_DOUBT: frozenset({_S.IN_DOUBT}),
}


def next_state(now: SaveState, then: SaveState) -> SaveState:
    """Return ``then`` if a save in state ``now`` may go to it.

    Raises:
        RuntimeError: a save in state ``now`` never goes to ``then``.
    """
    if then not in _NEXT[now]:
        raise RuntimeError(f"a save that is {now.value} cannot come to be {then.value}")
    return then


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveEnd:
    """How a failed save ended on this rank."""

    cause: BaseException
    """The first error, of this rank or of another."""
    may_clear: bool
    """Whether the save has certainly failed on all ranks, so that its directory may be deleted."""


class SaveRound:
    """Agreement of all ranks on one save, and the state of the save on this rank.

    Invariant: the state changes by :func:`next_state` only. The caller's thread changes it until the save is pending,
    then the loop's thread.
    """

    def __init__(self, members: Membership, executor: Executor, *, topic: Topic) -> None:
        self._members = members
        self._executor = executor
        self._topic = topic
        self._second = topic._replace(part="planned")
        """Topic in which the ranks vote if one of them has planned anew."""
        self._firsts: Sequence[PlanMsg | Vote] = ()
        self.state = SaveState.CALLED
        self.rank = members.coordinator.rank
        self.is_leader = members.is_leader

    @property
    def is_committing(self) -> bool:
        """Whether the step is being made visible, or is visible: a deadline comes too late."""
        return self.state in (SaveState.COMMITTING, SaveState.VISIBLE, SaveState.COMMITTED)

    def advance(self, then: SaveState) -> None:
        """Set the state to ``then``; see :func:`next_state`."""
        self.state = next_state(self.state, then)

    def cancel(self) -> bool:
        """Accept a cancellation; False if it comes too late."""
        in_time = {SaveState.CAPTURING, SaveState.WRITING, SaveState.CANCELLED}
        is_in_time = self.state in (in_time | {SaveState.VOTED} if self.is_leader else in_time)
        if is_in_time:
            self.advance(SaveState.CANCELLED)
        return is_in_time

    # -- the exchanges --------------------------------------------------------------------------------

    def expect_room(self) -> None:
        """Note that :meth:`room` comes first. A rank that fails before it ends the call there."""
        self._topic = self._topic._replace(part="room")

    async def room(self, mine: Room) -> Room:
        """Return the leader's room at this call, which is ``mine`` there. Without room, all ranks skip the call."""
        coordinator, topic = self._members.coordinator, self._topic._replace(part="")
        room = await _ROOM.broadcast(coordinator, self._topic, [mine], then=topic if mine.is_free else None)
        if room.is_free:
            self._topic = topic
        else:
            coordinator.end_call(topic)
        return room

    async def assign(self, plan: PlanMsg) -> AssignReply:
        """Send all that this rank holds, if it has no plan; return the share that it is to capture and write."""
        coordinator = self._members.coordinator
        messages = await SAVE.gather(coordinator, self._topic, plan)
        replies = await self._replan(_newest(messages, ())) if self.is_leader else []
        reply = await SAVE.broadcast(coordinator, self._topic, replies, then=self._second)
        self._topic = self._second
        if not isinstance(reply, AssignReply):
            raise PlanChangedError("the leader committed a save that this rank has not written")
        return reply

    async def gather(self, mine: Vote) -> tuple[Vote, ...]:
        """Vote that this rank's share is durable.

        The leader gets the votes of all ranks, by rank; another rank gets ().
        """
        coordinator = self._members.coordinator
        await anyio.lowlevel.checkpoint_if_cancelled()  # a cancellation may have been accepted since the last wait
        self.advance(SaveState.VOTED)
        messages = await SAVE.gather(coordinator, self._topic, mine)
        if not self.is_leader:
            return ()
        reports = _newest(messages, self._firsts)
        if self._topic != self._second and any(isinstance(report, PlanMsg) for report in reports):
            replies = await self._replan(reports)
            await SAVE.broadcast(coordinator, self._topic, replies, then=self._second)
            self._topic = self._second
            reports = _newest(await SAVE.gather(coordinator, self._topic, None), reports)
        votes: list[Vote] = []
        for rank, report in enumerate(reports):
            if not isinstance(report, Vote):
                raise PeerFailedError(f"rank {rank} has not written its share", rank=rank, stage="agree")
            votes.append(report)
        self._members.ledger.check_same_target(votes)
        if self._members.are_several:
            await run_blocking(self._executor, self._members.ledger.compare, votes)
        return tuple(votes)

    async def finish(self, votes: Sequence[Vote], extra: Mapping[str, Any]) -> CommitReply:
        """Tell the other ranks, as the leader, that the step is visible; wait for that, as another rank.

        ``extra`` is stored with the step if this rank leads; the reply holds the leader's.
        """
        coordinator = self._members.coordinator
        due = self._members.ledger.is_comparison_due
        committed = CommitReply(dict(slowest_ranks(votes)), dict(extra), due)
        reply = await SAVE.broadcast(coordinator, self._topic, [committed])
        if isinstance(reply, AssignReply) and self._topic != self._second:
            self._topic = self._second  # another rank planned anew; the vote of this rank still stands
            await SAVE.gather(coordinator, self._topic, None)
            reply = await SAVE.broadcast(coordinator, self._topic, [committed])
        if not isinstance(reply, CommitReply):
            raise PlanChangedError("the leader planned a save twice")
        self._members.is_comparison_due = reply.is_comparison_due
        self.advance(SaveState.COMMITTED)
        coordinator.end_call(self._topic)
        return reply

    async def _replan(self, reports: Sequence[PlanMsg | Vote]) -> list[AssignReply]:
        """Assign a share to each rank. Only the leader calls this."""
        ledger = self._members.ledger
        ledger.check_same_target(reports)
        self._firsts = reports
        return await run_blocking(self._executor, ledger.assign, reports)

    # -- the end of a save that failed ----------------------------------------------------------------

    async def end(self, cause: BaseException, *, stage: str, limit_secs: float = math.inf) -> SaveEnd:
        """End a save that failed here with ``cause`` in ``stage``: tell the others; decide whether it is in doubt.

        This rank waits for the leader's reply as long as the leader lives, ``limit_secs`` at most.
        """
        self._mark_doubt(cause)  # first: the failure that the other ranks get says whether the step is in doubt
        end = CallEnd()
        if self.state is not SaveState.COMMITTED:  # a committed save is known to all ranks and is never undone
            end = await self._members.abort(self._topic, cause, stage=stage, limit_secs=limit_secs)
        self.fail(cause, end.failure)
        may_clear = self.state is SaveState.FAILED and (self.is_leader or end.failure is not None)
        is_first = not end.is_earlier or self.is_leader or isinstance(cause, PeerFailedError)
        if end.failure is not None and not is_first:
            end.failure.__cause__ = cause
            cause = end.failure
        return SaveEnd(cause=cause, may_clear=may_clear)

    async def refuse(self, error: BaseException) -> bool:
        """Tell the other ranks that this call raises ``error`` here. Returns whether its directory may be deleted."""
        cause = self._members.call_error(error)
        if self.state is SaveState.CALLED:
            end = await self.end(cause, stage=CALL_STAGE)
            return self.is_leader and end.may_clear
        await self._members.abort(self._topic, cause, stage=CALL_STAGE)  # the pipeline of the save cleans up itself
        return False

    def fail(self, cause: BaseException, peer_failure: PeerFailedError | None = None) -> None:
        """End the save with ``cause``. Only this method decides whether the step is in doubt.

        ``peer_failure`` is the failure that the leader sent to all ranks; None if the leader did not answer.
        """
        if peer_failure is None:
            is_in_doubt = self._mark_doubt(cause) or (self.state is SaveState.VOTED and not self.is_leader)
        else:
            is_in_doubt = peer_failure.in_doubt or self._mark_doubt(cause)
        self.advance(SaveState.IN_DOUBT if is_in_doubt else SaveState.FAILED)
        self._mark_doubt(cause)

    def lose(self, error: BaseException) -> None:
        """End a save whose engine ended in the middle of the commit: it is in doubt. A commit cannot be cancelled."""
        self.advance(SaveState.IN_DOUBT)
        self.fail(error)

    def _mark_doubt(self, cause: BaseException) -> bool:
        """Return whether the step may be visible, by all that this rank knows. If so, mark ``cause`` as in doubt."""
        states = (SaveState.VISIBLE, SaveState.COMMITTED, SaveState.IN_DOUBT)
        is_in_doubt = self.state in states or (isinstance(cause, AioCkptError) and cause.in_doubt)
        if is_in_doubt and isinstance(cause, AioCkptError):
            cause.in_doubt = True
        return is_in_doubt


def _newest(messages: Sequence[PlanMsg | Vote | None], before: Sequence[PlanMsg | Vote]) -> list[PlanMsg | Vote]:
    """Return the last message of each rank: the one ``before`` if its new message is None."""
    newest: list[PlanMsg | Vote] = []
    for rank, message in enumerate(messages):
        if message is None and not before:
            raise malformed(rank, message)
        newest.append(before[rank] if message is None else message)
    return newest
