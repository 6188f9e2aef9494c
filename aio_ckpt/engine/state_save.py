"""Caller's half of ``save()`` and ``prepare()``: room, step, plan, lease, capture.

The second half runs on the loop: :mod:`aio_ckpt.engine.pipeline`.
"""

from __future__ import annotations

import contextlib
import functools
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from isal import isal_zlib

from aio_ckpt.commit import step_numbers
from aio_ckpt.config import BusyPolicy
from aio_ckpt.engine.call_lock import LockedCalls
from aio_ckpt.engine.capture_session import CaptureSession
from aio_ckpt.engine.context import EngineContext
from aio_ckpt.engine.image_leases import ImageLeases
from aio_ckpt.engine.job import SaveCall, SaveJob, SaveTimer, sent_target
from aio_ckpt.engine.job_queue import JobQueue, note_failure, raise_failure
from aio_ckpt.engine.known_steps import EarlierSteps
from aio_ckpt.engine.outcomes import Statistics
from aio_ckpt.engine.pipeline import SavePipeline
from aio_ckpt.engine.root import RootSession
from aio_ckpt.errors import AioCkptError, BusyError, EngineClosedError, StallError, StepOrderError
from aio_ckpt.format.checkpoint_files import data_file_name
from aio_ckpt.leaves.objects import ObjectBytes
from aio_ckpt.plan.local_plan import Plan, PlannedSave, narrow
from aio_ckpt.ranks.messages import Topic
from aio_ckpt.ranks.save_ledger import AssignReply, ContentSums, PlanMsg
from aio_ckpt.ranks.save_round import Room, SaveRound
from aio_ckpt.reports import Target
from aio_ckpt.runtime.deadline import NO_DEADLINE, Deadline
from aio_ckpt.runtime.portal import Portal
from aio_ckpt.runtime.waiting import disk_warning
from aio_ckpt.snapshot.replica_sums import content_sums
from aio_ckpt.snapshot.save_progress import CapturedChunks
from aio_ckpt.ticket import Milestone, SaveTicket, settle_with
from aio_ckpt.write.part import Part


@dataclass(slots=True, kw_only=True, eq=False)
class StateSaves(LockedCalls):
    """Caller's half of the saves of states, at a step or a path."""

    ctx: EngineContext
    portal: Portal
    session: CaptureSession
    leases: ImageLeases
    root_session: RootSession
    queue: JobQueue
    pipeline: SavePipeline
    statistics: Statistics
    earlier_steps: EarlierSteps
    is_urgent: Callable[[], bool]
    """Whether the process is to end soon. A save is not skipped then: there may be no other."""
    saves: int = 0
    """Calls of ``save()``, the same number on every rank in the same call."""
    outdated_share: bytes = b""
    """Identity of a share of this rank after whose assignment another rank planned anew."""

    def meet(self) -> None:
        """Begin to wait for the other ranks and to look for earlier steps, in the background."""
        ctx, members = self.ctx, self.ctx.members

        async def read_steps() -> list[int]:
            with disk_warning("reading the steps", ctx.root, rank=ctx.rank).on_loop():
                found = await self.pipeline.quarantine.committed(ctx.storage, ctx.root, ctx.names)
            return [checkpoint.step for checkpoint in found]

        async def meet() -> None:
            await members.meet(ctx.root, read_steps)
            self.queue.take_steps()
            if members.is_leader:
                self.earlier_steps.tell_opened(members.newest)

        async def look() -> None:
            with contextlib.suppress(AioCkptError, OSError):  # the first call that needs the root raises it
                self.earlier_steps.tell_opened(max(await read_steps(), default=None))

        if members.opened.done():  # one rank has met itself
            self.portal.submit(look)
        else:
            try:
                members.coordinator.register(str(ctx.root), stall_secs=members.stall_secs)
            except RuntimeError as error:  # the system has no more threads
                members.opened.set_exception(error)
            else:
                members.opened = self.portal.submit(meet)

    def save(self, state: object, step: int | None, call: SaveCall) -> SaveTicket:
        """See ``CheckpointEngine.save``.

        Invariant: the failure of an earlier save that this call reports stops no save. It is raised once the save of
        this call goes on, or noted on the error with which this call ends.
        """
        self.call_lock.check("save()")
        with self.call_lock.mutex:
            number, failed = self.queue.next_number("save", step), None
            self.saves += 1
            if call.takes_step:
                self.queue.count_call(number, step)
            round_ = SaveRound(self.ctx.members, self.ctx.executor, topic=Topic("save", number))
            try:
                if call.refuse is not None and not self.ctx.members.are_several:  # at once: there is no rank to tell
                    call = call.refuse()
                when_busy = "wait" if self.is_urgent() else self.ctx.config.when_busy
                if when_busy != "wait":
                    round_.expect_room()
                self.ctx.members.await_met(call.deadline)
                self.queue.take_steps()
                # Under the lock no other call leases: a lease that no pending save owns was lost by Ctrl-C.
                self.session.lifetime.close_lost(self.queue.leases)
                waited_secs, through = self._make_room(call.path or step, number, when_busy, round_, call.deadline)
                failed = self.queue.take_unreported(through)
                ticket = self._save(state, step, call, number, waited_secs, round_)
            except BaseException as error:
                self._refuse(round_, number, error)
                if failed is not None:
                    note_failure(error, failed)
                raise
        if failed is not None:
            raise_failure(failed, made=ticket)
        return ticket

    def _save(
        self, state: object, step: int | None, call: SaveCall, number: int, waited_secs: float | None, round_: SaveRound
    ) -> SaveTicket:
        """Plan, lease and capture. ``waited_secs``: how long the call waited for room; None if it is to be skipped."""
        queue, deadline = self.queue, call.deadline
        self._learn_steps(deadline)
        if call.refuse is not None:  # after the wait, which ends alike on all ranks: the call is refused on all
            call = call.refuse()
        read_steps = functools.partial(self.root_session.steps, deadline)
        if call.path is not None:
            self.root_session.check_place(call.path, deadline)
        elif step is not None:
            try:
                queue.steps.check(step, queue.pending_steps, overwrite=call.overwrite, read=read_steps)
            except StepOrderError:
                if self.ctx.members.is_leader:  # if another process writes, it has made these steps, and that is told
                    self.root_session.become_writer(queue.steps.learn, deadline)
                raise
        if waited_secs is None:
            self.statistics.skip()
            skipped_step = 0 if call.path else (queue.steps.newest(queue.pending_steps) or 0) if step is None else step
            check = self.portal.check_thread
            return SaveTicket(step=skipped_step, path=call.path, portal_check=check, skipped=True)
        flat, planned = self.session.plan(state)
        plan_secs = time.perf_counter() - call.started - waited_secs
        encoded = self.session.encode(flat, planned)
        content = self._content(planned, encoded)
        if self.ctx.members.is_leader:
            self.root_session.become_writer(queue.steps.learn, deadline)
        if call.takes_step:
            self._tell_earlier_steps(step)
        target: Target = queue.claim_step(number, step) if call.path is None else call.path
        if step is not None:
            queue.steps.check(step, queue.pending_steps, overwrite=call.overwrite, read=read_steps)
        if _lacks_share(planned.plan):
            planned = self._assign(planned, content, target, number, round_, deadline)
            content = ContentSums(content.objects)
        objects = _own_objects(encoded, [name for name, _ in planned.objects], planned.plan.object_names)
        timeout_secs = self.pipeline.runner.slot_timeout_secs(planned.plan.layout.chunk_bytes)
        leased = self.leases.lease(flat, planned, objects, target, slot_timeout_secs=timeout_secs, deadline=deadline)
        image, layout = leased.image, leased.planned.plan.layout
        try:
            self.session.log_waves(image, target)
            ctx, plan = self.ctx, planned.plan
            job = queue.enter(
                SaveJob(
                    target=target,
                    round=round_,
                    timer=SaveTimer(
                        call.started, waited_secs=waited_secs + image.lease.waited_secs, plan_secs=plan_secs
                    ),
                    place=ctx.root,
                    number=number,
                    deadline=deadline,
                    call=call,
                    pending=ctx.pending_path(number),
                    files_at=ctx.files_path(number, target),
                    final=ctx.final_path(target),
                    save_id=ctx.save_id(number),
                    requested=flat.names,
                    plan=plan,
                    plan_hit=planned.plan_hit,
                    fingerprint_hit=planned.fingerprint_hit,
                    objects=objects,
                    content=content,
                    versions=leased.versions,
                    known=leased.known,
                )
            )
            part = Part(
                name=data_file_name(job.save_id, ctx.rank),
                frozen_name=data_file_name(job.save_id, ctx.rank, is_frozen=True),
                layout=layout,
                tail=objects.region,
                renders_constants=not image.has_constants or leased.planned.plan.copies.gathers,
                image=image,
                chunks=CapturedChunks(len(image.chunks), job.stall),
            )
            # Before the start: an error after it would be raised while the save goes on.
            self.session.map_next(leased.planned.plan, objects, leased.tail_bytes)
            queue.start(job, self.pipeline, [(leased.planned, part)])
        except Exception:
            image.lease.close()  # again: without memory, start() may have failed to close it
            raise
        return job.ticket

    def _make_room(
        self, target: Target | None, number: int, when_busy: BusyPolicy, round_: SaveRound, deadline: Deadline
    ) -> tuple[float | None, int]:
        """Wait for room. Returns the seconds waited (None: skip), and the last call whose failure this call reports.

        All ranks decide alike at the same call, because the decision uses only information that every rank has at that
        call: all calls up to the last one have settled on every rank.
        """
        queue = self.queue
        if not self.ctx.members.are_several:
            return queue.wait_for_room(SaveJob, target, when_busy, deadline), number - 1
        began, has_room, through = time.perf_counter(), True, queue.settled_by_now
        if when_busy != "wait":  # if the leader has room, every rank has, or will have once a message has arrived
            queue.check_open()
            has_room, through = self._ask_room(round_, deadline)
        queue.wait_settled(target, through, deadline)
        if not has_room and when_busy == "skip":
            return None, through
        if not has_room:
            raise BusyError("saves are pending on some rank: await engine.ready() first, or raise max_in_flight")
        queue.wait_for_room(SaveJob, target, "wait", deadline)
        return time.perf_counter() - began, through

    def _ask_room(self, round_: SaveRound, deadline: Deadline) -> Room:
        ask = functools.partial(round_.room, self.queue.room())
        try:
            limit_secs = deadline.left_secs(2 * self.ctx.members.stall_secs)
            return self.portal.call(ask, timeout=limit_secs, what="save()")
        except StallError:
            deadline.check(None, "waiting to hear whether rank 0 has room")
            raise

    def _refuse(self, round_: SaveRound, number: int, error: BaseException) -> None:
        """Tell the other ranks that ``save()`` is about to raise ``error``, so that they do not wait for this rank."""

        async def refuse() -> None:
            if await round_.refuse(error):
                self.pipeline.runner.trash.add(self.ctx.pending_path(number))

        if self.ctx.members.are_several:
            with contextlib.suppress(EngineClosedError):
                self.portal.submit(refuse)

    def _learn_steps(self, deadline: Deadline) -> None:
        """Read the committed steps if they are not known."""
        if not self.queue.steps.are_known:
            self.queue.steps.learn(functools.partial(self._known_steps, deadline))

    def _tell_earlier_steps(self, step: int | None) -> None:
        """Warn once if a save without a step goes on after the steps of another run."""
        if step is not None:
            self.earlier_steps.pass_first_save()
        elif self.earlier_steps.may_be_mixed and self.ctx.members.is_leader:
            self.earlier_steps.tell_first_save(self.queue.steps.newest(self.queue.pending_steps))

    def _known_steps(self, deadline: Deadline) -> list[int]:
        """Return the committed steps on the disk, as the leader sees them."""
        members = self.ctx.members
        if members.is_leader:
            return self.root_session.steps(deadline)
        # Another rank may see the disk late (NFS). The leader knows all steps and refuses one that this rank lacks.
        return [] if members.newest is None else [members.newest]

    def prepare(self, state: object, step: int | None) -> Milestone[None]:
        """See ``CheckpointEngine.prepare``."""
        self.call_lock.check("prepare()")
        self.ctx.members.check_group()
        with self.call_lock.mutex:
            self.queue.check_open()
            if step is not None:
                self._check_first_step(step_numbers.check_step_number(step))
            flat, planned = self.session.plan(state)
            objects = self.session.encode(flat, planned)
            if self.ctx.members.is_leader:
                self.root_session.become_writer(self.queue.steps.learn, NO_DEADLINE)
            self._tell_earlier_steps(step)
            self.session.copy_engines.prepare(planned.plan)
            # How much memory this rank's share takes is known once the ranks have agreed, in the first save.
            lacks_share = _lacks_share(planned.plan)
            mapped = None if lacks_share else self.session.map_ahead(planned.plan, objects, arenas=1)
        milestone: Milestone[None] = Milestone("prepare()", self.portal.check_thread)
        if mapped is None:
            milestone.resolve(None)
        else:
            settle_with(milestone, mapped)
        return milestone

    def _check_first_step(self, step: int) -> None:
        """Raise StepOrderError on all ranks if ``save(step=step)`` would. Nothing is locked or made."""
        self.ctx.members.await_met(NO_DEADLINE)
        self._learn_steps(NO_DEADLINE)
        read, pending = self.root_session.steps, self.queue.pending_steps
        self.queue.steps.check(step, pending, overwrite=False, read=read)

    def clear_cache(self) -> None:
        """Forget the plan and the gather buffers."""
        self.call_lock.check("clear_cache()")
        with self.call_lock.mutex:
            self.session.cache.clear()
            self.session.copy_engines.clear()

    def _content(self, planned: PlannedSave, objects: ObjectBytes) -> ContentSums:
        """Return the checksums of all that this rank holds, by which the leader compares replicas.

        Tensors are summed if this rank plans anew or another rank has, and in saves 1, 2, 4, 8, ... of the engine:
        contents that are equal at first (moments of zero, layers of one seed) differ soon after. The number of saves is
        equal on all ranks. A tensor that no other rank holds is not summed: on a device, to read the whole state costs
        training more than the save does.
        """
        plan = planned.plan
        if plan.local is None:  # there is one rank
            return ContentSums(b"")
        crc32s = [isal_zlib.crc32(objects.region[start : start + nbytes]) for start, nbytes in objects.spans]
        is_due = self.ctx.members.is_comparison_due
        if is_due:  # a rank that planned anew may hold what no other rank held when this share was assigned
            self.outdated_share = plan.share_id
        is_summed, sums = is_due or not plan.share_id or self.saves & (self.saves - 1) == 0, b""
        if is_summed:
            is_all = plan.share_id in {b"", self.outdated_share}
            replicated = range(len(plan.held)) if is_all else plan.replicated
            tensors = planned.tensors
            sums = content_sums([tensors[leaf] if item in replicated else None for item, leaf in enumerate(plan.held)])
        return ContentSums(struct.pack(f"<{len(crc32s)}I", *crc32s), sums)

    def _assign(
        self,
        planned: PlannedSave,
        content: ContentSums,
        target: Target,
        number: int,
        round_: SaveRound,
        deadline: Deadline,
    ) -> PlannedSave:
        """Agree which rank writes which shard, after a plan miss, and narrow the plan to this rank's share.

        Blocks until all ranks call save(). The first save always agrees, so that it shows whether all ranks have the
        same root.
        """
        whole = planned.plan
        assert whole.local is not None  # there are several ranks
        limit_secs = deadline.left_secs(2 * self.ctx.members.stall_secs)
        message = PlanMsg(sent_target(target, self.ctx.root), whole.local, content)
        assign = functools.partial(_assign_under_one_root, self.ctx, number, target, round_, message)
        try:
            reply = self.portal.call(assign, timeout=limit_secs, what="save()")
        except StallError:
            deadline.check(target, "waiting for the plans of the other ranks")
            raise
        assert reply.share is not None  # a rank that planned anew has no older share
        plan = narrow(whole, reply.share, reply.share_id, reply.replicated, reply.stored_by)
        self.session.cache.adopt(plan)
        return replace(planned, plan=plan)


async def _assign_under_one_root(
    ctx: EngineContext, number: int, target: Target, round_: SaveRound, message: PlanMsg
) -> AssignReply:
    """Do :meth:`SaveRound.assign`. The leader makes the pending directory before, and the other ranks must see it."""
    pending = ctx.pending_path(number)
    if ctx.members.is_leader:
        await ctx.storage.begin_dir(pending, ctx.final_path(target), ctx.save_id(number))
    reply = await round_.assign(message)
    if not ctx.members.is_leader:
        await ctx.members.check_root(ctx.storage, ctx.root, pending)
    return reply


def _lacks_share(plan: Plan) -> bool:
    """Return whether other ranks hold shards, too, and it is not agreed yet which rank writes what."""
    return plan.local is not None and not plan.share_id


def _own_objects(objects: ObjectBytes, names: Sequence[str], own: Sequence[str]) -> ObjectBytes:
    """Return the encoded objects whose names are in ``own``; ``names`` are those of all ``objects``."""
    if len(own) == len(names):
        return objects
    kept = frozenset(own)
    parts: dict[tuple[int, int], int] = {}
    spans: list[tuple[int, int]] = []
    end = 0
    for name, span in zip(names, objects.spans, strict=True):
        if name in kept:
            start = parts.setdefault(span, end)
            end += span[1] if start == end else 0
            spans.append((start, span[1]))
    region = b"".join(objects.region[start : start + nbytes] for start, nbytes in parts)
    return ObjectBytes(region=region, spans=tuple(spans))
