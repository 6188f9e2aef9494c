"""Caller's half of ``save()`` and ``prepare()``: room, step, plan, lease, capture.

The second half runs on the loop: :mod:`aio_ckpt.engine.state_pipeline`.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aio_ckpt.commit import step_numbers
from aio_ckpt.commit.discovery import step_directories, torn_among
from aio_ckpt.engine.agreement import Admission, Agreement
from aio_ckpt.engine.call_lock import CallLock
from aio_ckpt.engine.capture_job import JobCapturer
from aio_ckpt.engine.capture_resources import CaptureResources
from aio_ckpt.engine.context import EngineContext
from aio_ckpt.engine.earlier_run import EarlierRun
from aio_ckpt.engine.job import NumberedCall, SaveCall, SaveJob, SaveTimer
from aio_ckpt.engine.job_queue import JobQueue, note_failure, raise_failure
from aio_ckpt.engine.root_session import RootSession
from aio_ckpt.engine.state_pipeline import StatePipeline
from aio_ckpt.engine.statistics import Statistics
from aio_ckpt.engine.trusted_leaves import Leased, TrustedLeaves
from aio_ckpt.errors import AioCkptError, StepOrderError
from aio_ckpt.format.checkpoint_files import data_file_name
from aio_ckpt.leaves.objects import ObjectBytes
from aio_ckpt.plan.save_plan import Plan, PlannedSave
from aio_ckpt.ranks.messages import Topic
from aio_ckpt.ranks.save_ledger import ContentSums
from aio_ckpt.ranks.save_round import SaveRound
from aio_ckpt.remote_path import RemotePath
from aio_ckpt.reports import Target
from aio_ckpt.runtime.deadline import NO_DEADLINE, Deadline
from aio_ckpt.runtime.portal import Portal
from aio_ckpt.runtime.waiting import disk_warning
from aio_ckpt.snapshot.captured_chunks import CapturedChunks
from aio_ckpt.ticket import Milestone, SaveTicket, resolve_with
from aio_ckpt.write.part import Part


@dataclass(slots=True, kw_only=True, eq=False)
class StateSaves:
    """Caller's half of the saves of states, at a step or a path."""

    ctx: EngineContext
    call_lock: CallLock
    portal: Portal
    resources: CaptureResources
    trusted: TrustedLeaves | None
    """None unless frozen leaves are trusted."""
    root_session: RootSession
    queue: JobQueue
    agreement: Agreement
    capturer: JobCapturer
    pipeline: StatePipeline
    statistics: Statistics
    earlier_run: EarlierRun
    is_urgent: Callable[[], bool]
    """Whether the process is to end soon. A save is not skipped then: there may be no other."""
    saves: int = 0
    """Calls of ``save()``, the same number on every rank in the same call."""

    def meet(self) -> None:
        """Begin to wait for the other ranks and to look for earlier steps, in the background."""
        ctx, members, torn = self.ctx, self.ctx.members, 0

        async def read_steps() -> list[int]:
            nonlocal torn
            with disk_warning("reading the steps", ctx.root, rank=ctx.rank).on_loop():
                entries = await step_directories(ctx.storage, ctx.root, ctx.names)
                if not entries.committed:
                    with contextlib.suppress(AioCkptError, OSError):  # for a line of the log alone
                        torn = len(await torn_among(ctx.storage, entries))
            return [checkpoint.step for checkpoint in entries.committed]

        async def meet() -> None:
            await members.meet(ctx.root, read_steps)
            self.queue.take_steps()
            if members.is_leader:
                self.earlier_run.log_opened(members.newest_step, torn)

        async def look() -> None:
            with contextlib.suppress(AioCkptError, OSError):  # the first call that needs the root raises it
                self.earlier_run.log_opened(max(await read_steps(), default=None), torn)

        if members.opened.done():  # one rank has met itself
            self.portal.submit(look)
        else:
            try:
                members.coordinator.register(str(ctx.root), stall_secs=members.stall_secs)
            except RuntimeError as error:  # the system has no more threads
                members.opened.set_exception(error)
            else:
                members.opened = self.portal.submit(meet)

    def save(self, state: object, call: SaveCall) -> SaveTicket:
        """See ``CheckpointEngine.save``.

        Invariant: the failure of an earlier save that this call reports stops no save. It is raised once the save of
        this call goes on, or noted on the error with which this call ends.
        """
        self.call_lock.check("save()")
        with self.call_lock.mutex:
            numbered, failed = self._number(call), None
            try:
                if not self.ctx.members.are_several:  # at once: there is no rank to tell
                    numbered = numbered.accepted()
                admission = self._admit(numbered)
                failed = self.queue.take_unreported(admission.finished_through)
                ticket = self._save(state, numbered, admission.waited_secs)
            except BaseException as error:
                if self.ctx.members.are_several:
                    self.agreement.refuse(numbered, error)
                if failed is not None:
                    note_failure(error, failed)
                raise
        if failed is not None:
            raise_failure(failed, made=ticket)
        return ticket

    def _number(self, call: SaveCall) -> NumberedCall:
        number = self.queue.next_number("save", call.step)
        self.saves += 1
        if call.takes_step:
            self.queue.count_call(number, call.step)
        round_ = SaveRound(self.ctx.members, self.ctx.executor, topic=Topic("save", number))
        return NumberedCall(call=call, number=number, round=round_)

    def _admit(self, numbered: NumberedCall) -> Admission:
        """Wait until the ranks have met and there is room."""
        when_busy = "wait" if self.is_urgent() else self.ctx.config.when_busy
        if when_busy != "wait":
            numbered.round.expect_room()
        self.ctx.members.await_met(numbered.call.deadline)
        self.queue.take_steps()
        # Under the lock no other call leases: a lease that no pending save owns was lost by Ctrl-C.
        self.resources.lifetime.close_lost(self.queue.leases)
        if self.ctx.members.are_several:
            return self.agreement.admit(numbered, when_busy)
        waited_secs = self.queue.wait_for_room(SaveJob, numbered.target, when_busy, numbered.call.deadline)
        return Admission(waited_secs, finished_through=numbered.number - 1)

    def _save(self, state: object, numbered: NumberedCall, waited_secs: float | None) -> SaveTicket:
        """Plan, lease and capture. ``waited_secs``: how long the call waited for room; None if it is to be skipped."""
        self.root_session.learn_steps(numbered.call.deadline)
        numbered = numbered.accepted()  # on all ranks, as the wait before it ends alike on all
        self._check_target(numbered)
        if waited_secs is None:
            return self._skipped(numbered)
        call = numbered.call
        flat, planned = self.resources.plan(state)
        plan_secs = time.perf_counter() - call.started - waited_secs
        encoded = self.resources.encode(flat, planned)
        content = ContentSums(b"")
        if planned.plan.local is not None:  # there are several ranks
            content = self.agreement.content(planned, encoded, self.saves)
        target = self._claim_target(numbered, planned.plan)
        if planned.plan.lacks_share:
            planned = self.agreement.assign(planned, content, target, numbered)
            content = ContentSums(content.objects)
        objects = _own_objects(encoded, [name for name, _ in planned.objects], planned.plan.object_names)
        if self.trusted is None or not planned.plan.layout.frozen_items:
            leased = Leased(planned=planned, image=self.resources.lease(planned, objects, target, call.deadline))
        else:
            leased = self.trusted.lease(flat, planned, objects, target, call.deadline)
        image, layout = leased.image, leased.planned.plan.layout
        try:
            self.resources.log_waves(image, target)
            timer = SaveTimer(call.started, waited_secs=waited_secs + image.lease.waited_secs, plan_secs=plan_secs)
            job = self.queue.assign_ticket(
                self._job(numbered, target, flat.names, planned, leased, objects, content, timer)
            )
            part = Part(
                name=data_file_name(job.save_id, self.ctx.rank),
                frozen_name=data_file_name(job.save_id, self.ctx.rank, is_frozen=True),
                layout=layout,
                tail=objects.region,
                renders_constants=not image.has_constants or leased.planned.plan.copies.gathers,
                image=image,
                chunks=CapturedChunks(len(image.chunks), job.stall),
            )
            # Before the capture: an error after it would be raised while the save goes on.
            self.resources.map_next(leased.planned.plan, objects, leased.spare_bytes)
            self.capturer.capture(job, self.pipeline, [(leased.planned, part)])
        except Exception:
            image.lease.close()  # again: without memory, capture() may have failed to close it
            raise
        return job.ticket

    def _check_target(self, numbered: NumberedCall) -> None:
        """Raise if nothing may be saved at the step or path that the caller gave.

        Only if the step is refused, the root is locked, because another process that writes there is named then.
        """
        call = numbered.call
        if call.path is not None:
            self.root_session.check_outside_root(call.path, call.deadline)
        elif call.step is not None:
            try:
                self._check_step(call.step, call.deadline, overwrite=call.overwrite)
            except StepOrderError:
                # If another process writes, it has made these steps, and the error says so.
                if self.ctx.members.is_leader:
                    self.root_session.become_writer(call.deadline)
                raise

    def _check_step(self, step: int, deadline: Deadline, *, overwrite: bool) -> None:
        read_steps = functools.partial(self.root_session.steps, deadline)
        self.queue.steps.check(step, self.queue.pending_steps, overwrite=overwrite, read=read_steps)

    def _skipped(self, numbered: NumberedCall) -> SaveTicket:
        """Return the ticket of a call that saves nothing."""
        self.statistics.skip()
        step, path = numbered.call.step, numbered.call.path
        if step is None:
            step = 0 if path else self.queue.steps.newest(self.queue.pending_steps) or 0
        return SaveTicket(step=step, path=path, portal_check=self.portal.check_thread, skipped=True)

    def _claim_target(self, numbered: NumberedCall, plan: Plan) -> Target:
        """Lock the root, and return the path or step to save at: by default, the next step."""
        call, step = numbered.call, numbered.call.step
        # A later save looks at the lock in the background, unless the other ranks wait for the leader now.
        if self.ctx.members.is_leader and (plan.lacks_share or not self.root_session.is_writer):
            self.root_session.become_writer(call.deadline)
        if call.takes_step:
            self._log_earlier_run(step)
        target: Target = self.queue.claim_step(numbered.number, step) if call.path is None else call.path
        if step is not None:  # again: the writer before may have committed more
            self._check_step(step, call.deadline, overwrite=call.overwrite)
        return target

    def _job(
        self,
        numbered: NumberedCall,
        target: Target,
        requested: Sequence[str],
        planned: PlannedSave,
        leased: Leased,
        objects: ObjectBytes,
        content: ContentSums,
        timer: SaveTimer,
    ) -> SaveJob:
        ctx, number = self.ctx, numbered.number
        pending, final = ctx.pending_path(number), ctx.final_path(target)
        return SaveJob(
            target=target,
            round=numbered.round,
            timer=timer,
            place=ctx.root,
            number=number,
            deadline=numbered.call.deadline,
            call=numbered.call,
            pending=pending,
            write_dir=final if isinstance(ctx.root, RemotePath) else pending,  # a store cannot move files later
            final=final,
            save_id=ctx.save_id(number),
            requested=requested,
            plan=planned.plan,
            plan_hit=planned.plan_hit,
            fingerprint_hit=planned.fingerprint_hit,
            objects=objects,
            content=content,
            versions=leased.versions,
            trusted_file=leased.trusted_file,
        )

    def _log_earlier_run(self, step: int | None) -> None:
        """Warn once if a save without a step goes on after the steps of another run."""
        is_next = step is None and self.ctx.members.is_leader
        self.earlier_run.note_save(self.queue.steps.newest(self.queue.pending_steps) if is_next else None)

    def prepare(self, state: object, step: int | None) -> Milestone[None]:
        """See ``CheckpointEngine.prepare``."""
        self.call_lock.check("prepare()")
        self.ctx.members.check_group()
        with self.call_lock.mutex:
            self.queue.check_open()
            if step is not None:
                self._check_first_step(step_numbers.check_step_number(step))
            flat, planned = self.resources.plan(state)
            objects = self.resources.encode(flat, planned)
            if self.ctx.members.is_leader:
                self.root_session.become_writer(NO_DEADLINE)
            if step is not None:  # without one, a load may still follow
                self._log_earlier_run(step)
            self.resources.copy_engines.prepare(planned.plan)
            # How much memory this rank's share takes is known once the ranks have agreed, in the first save.
            mapped = None if planned.plan.lacks_share else self.resources.map_ahead(planned.plan, objects, arenas=1)
        milestone: Milestone[None] = Milestone("prepare()", self.portal.check_thread)
        if mapped is None:
            milestone.resolve(None)
        else:
            resolve_with(milestone, mapped)
        return milestone

    def _check_first_step(self, step: int) -> None:
        """Raise StepOrderError on all ranks if ``save(step=step)`` would. Nothing is locked or made."""
        self.ctx.members.await_met(NO_DEADLINE)
        self.root_session.learn_steps(NO_DEADLINE)
        self._check_step(step, NO_DEADLINE, overwrite=False)

    def clear_cache(self) -> None:
        """Forget the plan and the gather buffers."""
        self.call_lock.check("clear_cache()")
        with self.call_lock.mutex:
            self.resources.cache.clear()
            self.resources.copy_engines.clear()


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
