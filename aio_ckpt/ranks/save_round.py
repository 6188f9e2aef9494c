"""One save's agreement: who writes what where a rank planned anew, then what all ranks have written."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import anyio
import msgspec

from aio_ckpt.errors import AioCkptError, PeerFailedError, PlanChangedError
from aio_ckpt.ranks.membership import Membership
from aio_ckpt.ranks.messages import Decision
from aio_ckpt.ranks.save_ledger import (
    AssignReply,
    CommitReply,
    PlanMsg,
    WrittenMsg,
    decode_reply,
    decode_report,
    slowest_ranks,
)
from aio_ckpt.runtime.portal import Executor, run_blocking

__all__ = ["SaveRound"]

Publish = Callable[[Sequence[WrittenMsg]], Awaitable[None]]
"""The leader's: make what every rank has written visible."""


class SaveRound:
    """One save's agreement: a plan where any rank missed its own, then what all have written."""

    def __init__(self, members: Membership, executor: Executor, *, topic: str) -> None:
        self._members = members
        self._executor = executor
        self._topic = topic
        self._firsts: Sequence[PlanMsg | WrittenMsg] = ()
        self.is_told = False
        """This rank's last word was given: the leader may commit from now on."""
        self.is_over = False
        """The leader's last word was heard, or given."""
        self.is_entered = False
        """A pending save has it, and clears up after itself."""
        self.is_failed = False
        """It is certain that the save has failed on all ranks, and for good: what it wrote may go."""

    async def assign(self, planned: PlanMsg) -> AssignReply:
        """A miss: what this rank is to write."""

        async def decide(messages: tuple[bytes, ...]) -> Decision:
            return await self._replan(_reports(messages))

        word = await self._agree(planned, decide, stage="agree")
        self._topic = _second(self._topic)
        if not isinstance(word, AssignReply):
            raise PlanChangedError("the leader committed a save that this rank has not written")
        return word

    async def conclude(self, written: WrittenMsg, publish: Publish) -> CommitReply:
        """Everything of this rank is durable: once that of all is, the leader publishes it."""
        word: AssignReply | CommitReply
        self.is_told = True
        if self._topic.endswith(_SECOND):
            word = await self._agree(written, lambda messages: self._commit(messages, publish), stage="agree")
        else:

            async def decide(messages: tuple[bytes, ...]) -> Decision:
                reports = _reports(messages)
                if all(isinstance(report, WrittenMsg) for report in reports):
                    return await self._commit(messages, publish)
                return await self._replan(reports)

            word = await self._agree(written, decide, stage="agree")
            if isinstance(word, AssignReply):  # another rank planned anew; what this one has written stands
                self._topic = _second(self._topic)
                word = await self._agree(None, lambda messages: self._commit(messages, publish), stage="agree")
        if not isinstance(word, CommitReply):
            raise PlanChangedError("the leader planned a save twice")
        self.is_over = True
        self._members.coordinator.end_call(self._topic)
        return word

    async def end(self, cause: BaseException, *, limit_secs: float | None = None) -> BaseException:
        """The save fails here with ``cause``: tell the others; what it failed with first, here or elsewhere.

        What the leader says of it is waited for as long as that lives, ``limit_secs`` at most.
        """
        members = self._members
        if self.is_over and members.are_several:  # committed, and told so: nothing undoes that
            if isinstance(cause, AioCkptError):
                cause.in_doubt = True
            return cause
        if not members.are_several:
            self.is_failed = True
            return cause
        first: PeerFailedError | None = None
        told: PeerFailedError | None = None
        with anyio.move_on_after(limit_secs, shield=True):
            try:
                await members.met()
                first = told = await members.coordinator.failure(self._topic)
                if told is None:
                    told = await members.coordinator.abort(self._topic, cause, stage="write")
            except AioCkptError as error:  # the store is gone: the others learn it by their deadlines
                cause.add_note(f"the other ranks could not be told: {error}")
        members.coordinator.end_call(self._topic)  # as the next sign of life says
        may_commit = self.is_told and not members.is_leader  # the leader has all that it needs
        is_in_doubt = may_commit if told is None else told.in_doubt
        self.is_failed = not is_in_doubt and (members.is_leader or told is not None)
        if is_in_doubt and isinstance(cause, AioCkptError):
            cause.in_doubt = True
        if first is None or members.is_leader or isinstance(cause, PeerFailedError):
            return cause
        first.__cause__ = cause
        return first

    async def _agree(
        self,
        report: PlanMsg | WrittenMsg | None,
        decide: Callable[[tuple[bytes, ...]], Awaitable[Decision]],
        *,
        stage: str,
    ) -> AssignReply | CommitReply:
        message = b"" if report is None else msgspec.msgpack.encode(report)
        # Who fails in here comes to ``end``, which tells the others why: a cancelled await knows only that it was.
        return decode_reply(
            await self._members.coordinator.exchange(self._topic, message, decide, stage=stage, abort_on_error=False)
        )

    async def _replan(self, reports: Sequence[PlanMsg | WrittenMsg]) -> Decision:
        self._members.ledger.check(reports)
        self._firsts = reports
        words = await run_blocking(self._executor, self._members.ledger.assign, reports)
        return Decision(each=tuple(msgspec.msgpack.encode(word) for word in words), then=_second(self._topic))

    async def _commit(self, messages: tuple[bytes, ...], publish: Publish) -> Decision:
        written: list[WrittenMsg] = []
        for rank, message in enumerate(messages):
            report = decode_report(message, rank=rank) if message else self._firsts[rank]
            if not isinstance(report, WrittenMsg):
                raise PeerFailedError(f"rank {rank} has not written its share", rank=rank, stage="agree")
            written.append(report)
        if self._members.are_several:
            self._members.ledger.check(written)
        await publish(written)
        return Decision(common=msgspec.msgpack.encode(CommitReply(dict(slowest_ranks(written)))))


def _reports(messages: Sequence[bytes]) -> list[PlanMsg | WrittenMsg]:
    return [decode_report(message, rank=rank) for rank, message in enumerate(messages)]


_SECOND = ", anew planned"


def _second(topic: str) -> str:
    return topic + _SECOND
