"""What several ranks agree on before a save is captured: room for it, and which rank writes what."""

from __future__ import annotations

import contextlib
import functools
import struct
import time
from dataclasses import dataclass, replace

from aio_ckpt.commit.trash import Trash
from aio_ckpt.config import BusyPolicy
from aio_ckpt.engine.context import EngineContext
from aio_ckpt.engine.job import NumberedCall, SaveJob, sent_target
from aio_ckpt.engine.job_queue import JobQueue
from aio_ckpt.errors import BusyError, EngineClosedError, StallError
from aio_ckpt.format.checksum import crc32_of
from aio_ckpt.leaves.objects import ObjectBytes
from aio_ckpt.plan.plan_cache import PlanCache
from aio_ckpt.plan.save_plan import PlannedSave, narrow
from aio_ckpt.ranks.same_root import check_same_root
from aio_ckpt.ranks.save_ledger import AssignReply, ContentSums, PlanMsg
from aio_ckpt.ranks.save_round import Room
from aio_ckpt.reports import Target
from aio_ckpt.runtime.portal import Portal
from aio_ckpt.snapshot.replica_sums import content_sums


@dataclass(frozen=True, slots=True)
class Admission:
    """Answer to a call that asks for room."""

    waited_secs: float | None
    """Time that the call waited; None if it is to be skipped."""
    finished_through: int
    """Number of the last call whose failure this call reports."""


@dataclass(slots=True, kw_only=True, eq=False)
class Agreement:
    """Agreement of several ranks on the saves of one engine. Its caller holds the engine's lock."""

    ctx: EngineContext
    portal: Portal
    queue: JobQueue
    cache: PlanCache
    trash: Trash
    outdated_share: bytes = b""
    """Identity of a share of this rank after whose assignment another rank planned anew."""

    def admit(self, numbered: NumberedCall, when_busy: BusyPolicy) -> Admission:
        """Wait for room.

        All ranks decide alike at the same call, because the decision uses only information that every rank has at that
        call: all calls up to the last one have finished on every rank.

        Raises:
            BusyError, StallError, EngineClosedError: as :meth:`JobQueue.wait_for_room`.
            PeerFailedError: another rank has refused the call, or is lost.
        """
        queue, target, deadline = self.queue, numbered.target, numbered.call.deadline
        began, has_room, through = time.perf_counter(), True, queue.finished_by_now
        if when_busy != "wait":  # if the leader has room, every rank has, or will have once a message has arrived
            queue.check_open()
            has_room, through = self._ask_room(numbered)
        queue.wait_finished(target, through, deadline)
        if not has_room and when_busy == "skip":
            return Admission(None, through)
        if not has_room:
            raise BusyError("saves are pending on some rank: await engine.ready() first, or raise max_in_flight")
        queue.wait_for_room(SaveJob, target, "wait", deadline)
        return Admission(time.perf_counter() - began, through)

    def _ask_room(self, numbered: NumberedCall) -> Room:
        deadline, ask = numbered.call.deadline, functools.partial(numbered.round.room, self.queue.room())
        try:
            limit_secs = deadline.left_secs(self.ctx.members.reply_limit_secs)
            return self.portal.call(ask, timeout=limit_secs, what="save()")
        except StallError:
            deadline.check(None, "waiting to hear whether rank 0 has room")
            raise

    def refuse(self, numbered: NumberedCall, error: BaseException) -> None:
        """Tell the other ranks that ``save()`` is about to raise ``error``, so that they do not wait for this rank."""

        async def refuse() -> None:
            if await numbered.round.refuse(error):
                self.trash.add(self.ctx.pending_path(numbered.number))

        with contextlib.suppress(EngineClosedError):
            self.portal.submit(refuse)

    def content(self, planned: PlannedSave, objects: ObjectBytes, count: int) -> ContentSums:
        """Return the checksums of all that this rank holds, by which the leader compares replicas.

        Tensors are summed if this rank plans anew or another rank has, and in saves 1, 2, 4, 8, ... of the engine:
        contents that are equal at first (moments of zero, layers of one seed) differ soon after. ``count`` numbers the
        saves, on all ranks alike. A tensor that no other rank holds is not summed: on a device, to read the whole state
        costs training more than the save does.
        """
        plan = planned.plan
        crc32s = [crc32_of(objects.region[start : start + nbytes]) for start, nbytes in objects.spans]
        is_due = self.ctx.members.is_comparison_due
        if is_due:  # a rank that planned anew may hold what no other rank held when this share was assigned
            self.outdated_share = plan.share_id
        is_summed, sums = is_due or not plan.share_id or count & (count - 1) == 0, b""
        if is_summed:
            is_all = plan.share_id in {b"", self.outdated_share}
            replicated = range(len(plan.held)) if is_all else plan.replicated
            tensors = planned.tensors
            sums = content_sums([tensors[leaf] if item in replicated else None for item, leaf in enumerate(plan.held)])
        return ContentSums(struct.pack(f"<{len(crc32s)}I", *crc32s), sums)

    def assign(self, planned: PlannedSave, content: ContentSums, target: Target, numbered: NumberedCall) -> PlannedSave:
        """Agree which rank writes which shard, after a plan miss, and narrow the plan to this rank's share.

        Blocks until all ranks call save(). The first save always agrees, so that it shows whether all ranks have the
        same root.
        """
        whole, deadline = planned.plan, numbered.call.deadline
        assert whole.local is not None  # there are several ranks
        limit_secs = deadline.left_secs(self.ctx.members.reply_limit_secs)
        message = PlanMsg(sent_target(target, self.ctx.root), whole.local, content)
        assign = functools.partial(_assign_under_one_root, self.ctx, numbered, target, message)
        try:
            reply = self.portal.call(assign, timeout=limit_secs, what="save()")
        except StallError:
            deadline.check(target, "waiting for the plans of the other ranks")
            raise
        assert reply.share is not None  # a rank that planned anew has no older share
        plan = narrow(whole, reply.share, reply.share_id, reply.replicated, reply.stored_by)
        self.cache.adopt(plan)
        return replace(planned, plan=plan)


async def _assign_under_one_root(
    ctx: EngineContext, numbered: NumberedCall, target: Target, message: PlanMsg
) -> AssignReply:
    """Do :meth:`SaveRound.assign`. The leader makes the pending directory before, and the other ranks must see it."""
    pending = ctx.pending_path(numbered.number)
    if ctx.members.is_leader:
        await ctx.storage.begin_dir(pending, ctx.final_path(target), ctx.save_id(numbered.number))
    reply = await numbered.round.assign(message)
    if not ctx.members.is_leader:
        await check_same_root(ctx.members, ctx.storage, ctx.root, pending)
    return reply
