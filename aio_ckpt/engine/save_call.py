"""The caller's half of a save: room, step, plan, lease, capture.

The second half runs on the loop: :mod:`aio_ckpt.engine.pipeline`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import struct
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from isal import isal_zlib

from aio_ckpt.checks import MAX_SECS, check_flag, check_path
from aio_ckpt.commit import step_numbers
from aio_ckpt.commit.owner import make_pending
from aio_ckpt.config import BusyPolicy
from aio_ckpt.engine.context import EngineContext
from aio_ckpt.engine.file_save import FileSaves, file_target, log_file
from aio_ckpt.engine.job import FileJob, SaveCall, SaveJob, SaveTimer, WriteJob, sent_target
from aio_ckpt.engine.job_queue import JobQueue, note_failure, raise_failure
from aio_ckpt.engine.known_steps import EarlierSteps
from aio_ckpt.engine.outcomes import Statistics, log_commit, log_failure
from aio_ckpt.engine.pipeline import SavePipeline
from aio_ckpt.engine.root import RootSession, StepsChange
from aio_ckpt.errors import (
    AioCkptError,
    BusyError,
    EngineClosedError,
    PeerFailedError,
    SaveCancelledError,
    StallError,
    WrongThreadError,
)
from aio_ckpt.format.rank_manifest import data_file_name
from aio_ckpt.leaves.objects import ObjectBytes, ObjectEncoder
from aio_ckpt.memory.kind import StagingChoice
from aio_ckpt.memory.lifetime import ArenaSpec, LifetimeManager
from aio_ckpt.plan.planner import Plan, PlanCache, PlannedSave, narrow
from aio_ckpt.plan.safetensors_plan import SafetensorsOptions
from aio_ckpt.ranks.exchange import Exchange
from aio_ckpt.ranks.messages import Topic
from aio_ckpt.ranks.save_ledger import AssignReply, ContentSums, PlanMsg
from aio_ckpt.ranks.save_round import Room, SaveRound
from aio_ckpt.reports import SaveReport, Target, title
from aio_ckpt.rescue import Rescue
from aio_ckpt.runtime.deadline import NO_DEADLINE, Deadline
from aio_ckpt.runtime.log_records import log_step
from aio_ckpt.runtime.portal import Lock, Portal
from aio_ckpt.runtime.waiting import call_within, disk_warning
from aio_ckpt.snapshot.image import Image, arena_spec, lease_image
from aio_ckpt.snapshot.progress import CapturedChunks
from aio_ckpt.snapshot.replica_sums import content_sums
from aio_ckpt.state.flatten import FlatState, check_not_empty, flatten
from aio_ckpt.state.leaf_faults import naming_all_faults
from aio_ckpt.ticket import Milestone, SaveTicket, settle_with
from aio_ckpt.write.part import Part

_log = logging.getLogger("aio_ckpt")


class SaveFrontend:
    """Caller's half of all saves of one engine.

    Invariant: one call at a time plans, leases and captures. Other calls wait for the lock.
    """

    def __init__(
        self,
        ctx: EngineContext,
        portal: Portal,
        root_session: RootSession,
        pipeline: SavePipeline,
        *,
        rescue: Rescue,
        is_urgent: Callable[[], bool],
        on_committed: Callable[[int | None], None],
    ) -> None:
        """Set up the calls.

        Args:
            ctx: the engine's context.
            portal: the engine's loop.
            root_session: the root and its lock.
            pipeline: the half of a save on the loop.
            rescue: the hooks of rescue.
            is_urgent: whether the process is to end soon. A save is not skipped then, as there may be no other.
            on_committed: called after each commit, with its step; None for a save by path.
        """
        config = ctx.config
        self._ctx = ctx
        self._portal = portal
        self._root_session = root_session
        self._pipeline = pipeline
        self._rescue = rescue
        self._is_urgent = is_urgent
        self._on_committed = on_committed
        self.lifetime = LifetimeManager(
            budget_bytes=config.budget_bytes,
            ranks_on_host=ctx.members.on_host,
            rank=ctx.rank,
            executor=ctx.executor,
            debug=config.debug,
            segments=rescue.shared_memory,
        )
        self.cache = PlanCache(
            world_size=ctx.members.coordinator.world_size,
            gather_bytes=config.gather_bytes,
            budget_bytes=self.lifetime.measure_budget,
        )
        """The plan of the last save."""
        self.queue = JobQueue(ctx, portal, pipeline.runner, pipeline.quarantine, on_settled=self._after)
        self.earlier_steps = EarlierSteps(ctx.root)
        """Messages about the steps of an earlier run."""
        self._files = FileSaves(ctx, pipeline.runner, self.queue, self.lifetime)
        self.statistics = Statistics()
        self._encoder = ObjectEncoder(trusted=config.trusted_objects)
        self._staging = StagingChoice(config.staging, is_named=config.shm_path is not None)
        self._has_told_waves = False
        self.dropping: list[Future[None]] = []
        """Future of the deletion of dead trainers' snapshots."""
        self._saves = 0
        """Calls of ``save()``, the same number on every rank in the same call."""
        self._outdated_share = b""
        """Identity of a share of this rank after whose assignment another rank planned anew."""
        self._lock = Lock()

    def meet(self) -> None:
        """Begin to wait for the other ranks and to look for earlier steps, in the background."""
        ctx, members = self._ctx, self._ctx.members

        async def read_steps() -> list[int]:
            with disk_warning("reading the steps", ctx.root, rank=ctx.rank).on_loop():
                found = await self._pipeline.quarantine.committed(ctx.storage, ctx.root, ctx.names)
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
            self._portal.submit(look)
        else:
            try:
                members.coordinator.register(str(ctx.root), stall_secs=members.stall_secs)
            except RuntimeError as error:  # the system has no more threads
                members.opened.set_exception(error)
            else:
                members.opened = self._portal.submit(meet)

    def save(self, state: object, step: int | None, call: SaveCall) -> SaveTicket:
        """See ``CheckpointEngine.save``.

        Invariant: the failure of an earlier save that this call reports stops no save. It is raised once the save of
        this call goes on, or noted on the error with which this call ends.
        """
        self._portal.check_thread("save()")
        self._check_not_inside("save()")
        with self._lock:
            number, failed = self.queue.next_number("save", step), None
            self._saves += 1
            if call.takes_step:
                self.queue.count_call(number, step)
            round_ = SaveRound(self._ctx.members, self._ctx.executor, topic=Topic("save", number))
            try:
                if call.refuse is not None and not self._ctx.members.are_several:  # at once: there is no rank to tell
                    call = call.refuse()
                when_busy = "wait" if self._is_urgent() else self._ctx.config.when_busy
                if when_busy != "wait":
                    round_.expect_room()
                self._ctx.members.await_met(call.deadline)
                self.queue.take_steps()
                # Under the lock no other call leases: a lease that no pending save owns was lost by Ctrl-C.
                self._close_lost()
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

    def save_file(self, obj: object, path: object, options: SafetensorsOptions) -> SaveTicket:
        """See ``CheckpointEngine.save_file``."""
        started = time.perf_counter()
        self._portal.check_thread("save_file()")
        self._check_not_inside("save_file()")
        limit_secs, place = self._ctx.config.stall_timeout_secs, check_path("path", path, of="a file")
        target = call_within(limit_secs, functools.partial(file_target, path), "looking at the file", place)
        with self._lock:
            self.queue.check_open()
            self._close_lost()
            earlier = self.queue.take_unreported(0)
            try:
                ticket = self._files.save(obj, target, options, started)
            except BaseException as error:
                if earlier is not None:
                    note_failure(error, earlier)
                raise
        if earlier is not None:
            raise_failure(earlier, made=ticket)
        return ticket

    def _close_lost(self) -> None:
        self.lifetime.close_lost(self.queue.leases)

    def _save(
        self, state: object, step: int | None, call: SaveCall, number: int, waited_secs: float | None, round_: SaveRound
    ) -> SaveTicket:
        """Plan, lease and capture. ``waited_secs``: how long the call waited for room; None if it is to be skipped."""
        queue, deadline = self.queue, call.deadline
        self._learn_steps(deadline)
        if call.refuse is not None:  # after the wait, which ends alike on all ranks: the call is refused on all
            call = call.refuse()
        read_steps = functools.partial(self._root_session.steps, deadline)
        if call.path is not None:
            self._root_session.check_place(call.path, deadline)
        elif step is not None:
            queue.steps.check(step, queue.pending_steps, overwrite=call.overwrite, read=read_steps)
        if waited_secs is None:
            self.statistics.skip()
            skipped_step = 0 if call.path else (queue.steps.newest(queue.pending_steps) or 0) if step is None else step
            check = self._portal.check_thread
            return SaveTicket(step=skipped_step, path=call.path, portal_check=check, skipped=True)
        flat = self._flatten(state)
        with naming_all_faults(flat):
            planned = self.cache.resolve(flat)
        plan_secs = time.perf_counter() - call.started - waited_secs
        with naming_all_faults(flat):
            encoded = self._encoder.encode(planned.objects, flat.versions)
        content = self._content(planned, encoded)
        if self._ctx.members.is_leader:
            self._root_session.become_writer(queue.steps.learn, deadline)
        if call.takes_step:
            self._tell_earlier_steps(step)
        target: Target = queue.claim_step(number, step) if call.path is None else call.path
        if step is not None:
            queue.steps.check(step, queue.pending_steps, overwrite=call.overwrite, read=read_steps)
        if _lacks_share(planned.plan):
            planned = self._assign(planned, content, target, number, round_, deadline)
            content = ContentSums(content.objects)
        objects = _own_objects(encoded, [name for name, _ in planned.objects], planned.plan.object_names)
        image = self._lease(planned, objects, target, deadline)
        try:
            self._tell_waves(image, target)
            ctx, plan = self._ctx, planned.plan
            job = queue.enter(
                SaveJob,
                target,
                round_,
                SaveTimer(call.started, waited_secs=waited_secs + image.lease.waited_secs, plan_secs=plan_secs),
                place=ctx.root,
                number=number,
                deadline=deadline,
                call=call,
                pending=ctx.pending_path(number),
                final=ctx.final_path(target),
                save_id=ctx.save_id(number),
                requested=flat.names,
                plan=plan,
                plan_hit=planned.plan_hit,
                fingerprint_hit=planned.fingerprint_hit,
                objects=objects,
                content=content,
            )
            part = Part(
                name=data_file_name(ctx.rank),
                layout=plan.layout,
                tail=objects.region,
                renders_constants=not image.has_constants or plan.gathers,
                image=image,
                chunks=CapturedChunks(len(image.chunks), job.stall),
            )
            # Before the start: an error after it would be raised while the save goes on.
            self._map_next(plan, objects)
            queue.start(job, self._pipeline, [(planned, part)])
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
        if not self._ctx.members.are_several:
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
            limit_secs = deadline.left_secs(2 * self._ctx.members.stall_secs)
            return self._portal.call(ask, timeout=limit_secs, what="save()")
        except StallError:
            deadline.check(None, "waiting to hear whether rank 0 has room")
            raise

    def _refuse(self, round_: SaveRound, number: int, error: BaseException) -> None:
        """Tell the other ranks that ``save()`` is about to raise ``error``, so that they do not wait for this rank."""

        async def refuse() -> None:
            if await round_.refuse(error):
                self._pipeline.clear_pending(number)

        if self._ctx.members.are_several:
            with contextlib.suppress(EngineClosedError):
                self._portal.submit(refuse)

    def _learn_steps(self, deadline: Deadline) -> None:
        """Read the committed steps if they are not known."""
        if not self.queue.steps.are_known:
            self.queue.steps.learn(functools.partial(self._known_steps, deadline))

    def _tell_earlier_steps(self, step: int | None) -> None:
        """Warn once if a save without a step goes on after the steps of another run."""
        if step is not None:
            self.earlier_steps.pass_first_save()
        elif self.earlier_steps.may_be_mixed and self._ctx.members.is_leader:
            self.earlier_steps.tell_first_save(self.queue.steps.newest(self.queue.pending_steps))

    def _known_steps(self, deadline: Deadline) -> list[int]:
        """Return the committed steps on the disk, as the leader sees them."""
        members = self._ctx.members
        if members.is_leader:
            return self._root_session.steps(deadline)
        # Another rank may see the disk late (NFS). The leader knows all steps and refuses one that this rank lacks.
        return [] if members.newest is None else [members.newest]

    def _check_not_inside(self, what: str) -> None:
        """Raise WrongThreadError inside another call on the same thread: the inner call would wait for ever."""
        frame = sys._getframe(2) if self._lock.locked() else None  # the caller of the calling method
        while frame is not None:
            if frame.f_code in _LOCKING and frame.f_locals.get("self") is self:
                raise WrongThreadError(
                    f"{what} inside {frame.f_code.co_name}() of the same engine (by a signal handler, a state_dict()) "
                    "would wait for itself: set a flag there and save behind it, as engine.on_preemption() does"
                )
            frame = frame.f_back

    def prepare(self, state: object, step: int | None) -> Milestone[None]:
        """See ``CheckpointEngine.prepare``."""
        self._portal.check_thread("prepare()")
        self._check_not_inside("prepare()")
        self._ctx.members.check_group()
        with self._lock:
            self.queue.check_open()
            if step is not None:
                self._check_first_step(step_numbers.check_step_number(step))
            flat = self._flatten(state)
            with naming_all_faults(flat):
                planned = self.cache.resolve(flat)
                objects = self._encoder.encode(planned.objects, flat.versions)
            spec = self._spec(planned.plan, objects)
            if self._ctx.members.is_leader:
                self._root_session.become_writer(self.queue.steps.learn, NO_DEADLINE)
            self._tell_earlier_steps(step)
            self.queue.copy_engines.prepare(planned.plan)
            # How much memory this rank's share takes is known once the ranks have agreed, in the first save.
            mapped = None if _lacks_share(planned.plan) else self.lifetime.map_ahead(spec, arenas=1)
        return _milestone_of(mapped, self._portal)

    def _check_first_step(self, step: int) -> None:
        """Raise StepOrderError on all ranks if ``save(step=step)`` would. Nothing is locked or made."""
        self._ctx.members.await_met(NO_DEADLINE)
        self._learn_steps(NO_DEADLINE)
        read, pending = self._root_session.steps, self.queue.pending_steps
        self.queue.steps.check(step, pending, overwrite=False, read=read)

    def rollback(self, step: int) -> list[int]:
        """See ``CheckpointEngine.rollback``."""
        self._portal.check_thread("rollback()")
        self._check_not_inside("rollback()")
        with self._lock:
            topic = Topic("rollback", self.queue.next_number("rollback"))
            gone = self._change_steps("rollback", topic, step, self._root_session.rollback)
            self.earlier_steps.go_on()
            self._rescue.give_up(f"rollback({step}) went back behind it", after=step)
            return gone

    def delete(self, step: int, *, allow_newest: bool) -> None:
        """See ``CheckpointEngine.delete``. Blocks."""
        self._portal.check_thread("delete()")
        self._check_not_inside("delete()")
        with self._lock:
            topic = Topic("delete", self.queue.next_number("delete"))
            self._change_steps("delete", topic, step, self._root_session.discard, allow_newest=allow_newest)
        self._delete_files(step, Topic(f"the deletion of the files of step {step}", part=f"call {topic.number}"))

    def before_load(self, kind: str, step: object, path: object) -> Callable[[], Awaitable[None]]:
        """Return what a load or read awaits first: the pending calls that change what it finds. ``kind`` names it.

        Raises:
            WrongThreadError: the call stands inside a save of the same thread, which may be one of these.
        """
        calls = self.queue.calls_before_load(step, path)
        if calls:
            self._check_not_inside(f"{kind}()")
        return functools.partial(self.queue.await_calls, kind, path, calls)

    def check_call(self, what: str) -> None:
        """Raise WrongThreadError if the call ``what``, run in another thread, would wait for the calling thread."""
        self._portal.check_thread(what)
        self._check_not_inside(what)

    def _change_steps(
        self, kind: str, topic: Topic, step: int, change: Callable[..., StepsChange], **flags: bool
    ) -> list[int]:
        """Change the committed steps on all ranks: the leader does it if no rank has a pending save; the others wait.

        ``kind`` names the call, and the ranks meet under ``topic``. ``change`` gets the step and ``flags``. Returns the
        steps that are gone.
        """
        members = self._ctx.members
        coordinator, timeout_secs, what = members.coordinator, 2 * members.stall_secs, f"{kind}()"
        try:
            members.await_met(NO_DEADLINE)
            step = step_numbers.check_step_number(step)
            for name, flag in flags.items():
                check_flag(name, flag)
            call = f"{kind}({', '.join([str(step), *(f'{name}=True' for name, flag in flags.items() if flag)])})"
            mine = call, bool(self.queue.pending_count)
            asked = self._portal.call(_CHANGE.gather, coordinator, topic, mine, timeout=timeout_secs, what=what)
            busy = _busy_ranks(asked, call)
            changed: StepsChange = (None, [])
            if members.is_leader and not busy:
                self._root_session.check_holds_steps(call)  # first: a mistyped root stays as it is
                self._root_session.become_writer(self.queue.steps.learn, NO_DEADLINE)
                self.queue.steps.forget()  # a change that fails midway has renamed some steps
                changed = change(step, **flags)
            busy, (newest, gone) = self._portal.call(
                _CHANGE.broadcast, coordinator, topic, [(busy, changed)], timeout=timeout_secs, what=what
            )
        except BaseException as error:
            self._tell_refused(topic, error)
            raise
        coordinator.end_call(topic)
        if busy:
            whose = f"saves of rank {busy}" if len(asked) != 1 else "saves"
            raise BusyError(f"{kind}({step}): {whose} are pending; await their tickets first")
        self.queue.steps.change(newest)
        members.newest = newest
        return gone

    def _delete_files(self, step: int, topic: Topic) -> None:
        """Delete the files of a step that was renamed: the leader does it, and the others wait. Saves go on."""
        members = self._ctx.members
        try:
            if members.is_leader:
                self._root_session.delete_discarded(step)
            timeout_secs = 2 * members.stall_secs
            done = functools.partial(_DELETED.broadcast, members.coordinator, topic, [None])
            self._portal.call(done, timeout=timeout_secs, what="delete()")
        except BaseException as error:
            self._tell_refused(topic, error)
            raise
        members.coordinator.end_call(topic)

    def remove(self, path: object) -> Milestone[None]:
        """See ``CheckpointEngine.remove``."""
        self._portal.check_thread("remove()")
        self._check_not_inside("remove()")
        members, session = self._ctx.members, self._root_session
        with self._lock:
            number = self.queue.next_number("remove")
            try:
                self.queue.check_open()
                members.await_met(NO_DEADLINE)
                place = check_path("path", path)
                session.check_place(place, NO_DEADLINE)
                if members.is_leader:
                    session.become_writer(self.queue.steps.learn, NO_DEADLINE)
                return self.queue.remove(place, number)
            except BaseException as error:
                self._tell_refused(Topic("remove", number), error)
                raise

    def _tell_refused(self, topic: Topic, error: BaseException) -> None:
        """Tell the other ranks that this rank takes no part in the call of ``topic``."""
        with contextlib.suppress(EngineClosedError):
            self._portal.submit(self._ctx.members.refuse, topic, error)

    def clear_cache(self) -> None:
        """Forget the plan and the gather buffers."""
        self._check_not_inside("clear_cache()")
        with self._lock:
            self.cache.clear()
            self.queue.copy_engines.clear()

    def let_go(self) -> None:
        """Forget guarded optimizers and free the gather buffers. Arenas are freed once their last thread has ended."""
        self.queue.guards.close()
        self.queue.copy_engines.clear()

    def _spec(self, plan: Plan, objects: ObjectBytes) -> ArenaSpec:
        kind, budget_bytes = self._staging.kind(plan.source), self.lifetime.budget_bytes
        return arena_spec(plan, len(objects.region), kind, budget_bytes=budget_bytes)

    def _flatten(self, state: object) -> FlatState:
        members = self._ctx.members
        flat = flatten(state, rank=members.coordinator.rank)
        if not members.are_several:  # rank 0 alone may hold the whole state, and the others nothing
            check_not_empty(flat)
        return flat

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
        is_due = self._ctx.members.is_comparison_due
        if is_due:  # a rank that planned anew may hold what no other rank held when this share was assigned
            self._outdated_share = plan.share_id
        is_summed, sums = is_due or not plan.share_id or self._saves & (self._saves - 1) == 0, b""
        if is_summed:
            is_all = plan.share_id in {b"", self._outdated_share}
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
        limit_secs = deadline.left_secs(2 * self._ctx.members.stall_secs)
        told = PlanMsg(sent_target(target), whole.local, content)
        assign = functools.partial(_assign_under_one_root, self._ctx, number, round_, told)
        try:
            reply = self._portal.call(assign, timeout=limit_secs, what="save()")
        except StallError:
            deadline.check(target, "waiting for the plans of the other ranks")
            raise
        assert reply.share is not None  # a rank that planned anew has no older share
        plan = narrow(whole, reply.share, reply.share_id, reply.replicated)
        self.cache.adopt(plan)
        return replace(planned, plan=plan)

    def _lease(self, planned: PlannedSave, objects: ObjectBytes, target: Target, deadline: Deadline) -> Image:
        return lease_image(
            planned,
            len(objects.region),
            self.lifetime,
            self._staging,
            timeout_secs=self._pipeline.runner.slot_timeout_secs(planned.plan.layout.chunk_bytes),
            limit_secs=deadline.left_secs(MAX_SECS),
            step=target if isinstance(target, int) else None,
        )

    def _tell_waves(self, image: Image, target: Target) -> None:
        """Log once that the state is saved in waves, so that ``save()`` takes as long as the disk."""
        if image.is_whole or self._has_told_waves:
            return
        self._has_told_waves = True
        image_bytes, budget_bytes = image.chunks[-1].stop, self.lifetime.budget_bytes
        log_step(
            logging.WARNING,
            target if isinstance(target, int) else None,
            self._ctx.rank,
            "%s: %d bytes are saved in waves, as budget_bytes=%d holds no more: save() returns when the last wave "
            "is captured, which takes as long as the disk needs for the others%s; raise budget_bytes where there is "
            "memory. Told once",
            title(target),
            image_bytes,
            budget_bytes,
            "" if self._ctx.config.shm_path is None else ", and such a snapshot cannot be rescued (shm_path)",
        )

    def _map_next(self, plan: Plan, objects: ObjectBytes) -> None:
        """Map the arena of the next save ahead, in the background."""
        arenas = self._ctx.config.max_in_flight
        if arenas == 1:
            return
        with contextlib.suppress(EngineClosedError):
            mapped = self.lifetime.map_ahead(self._spec(plan, objects), arenas=arenas)
            if mapped is not None:
                mapped.add_done_callback(_log_failure)

    def _drop_orphans(self) -> None:
        """Delete the snapshots of dead trainers: this run has committed a step and does not go on from them."""
        if self._rescue.has_orphans:
            with contextlib.suppress(EngineClosedError):
                self.dropping = [self._ctx.executor.submit(self._rescue.give_up, "a later run has committed a step")]

    def _after(self, job: WriteJob, outcome: SaveReport | BaseException) -> None:
        """Log and count the outcome of a save that is about to settle.

        After a failure, the cached plan is not trusted.
        """
        if isinstance(job, FileJob):
            log_file(job, outcome)
            return
        ctx = self._ctx
        if isinstance(outcome, BaseException):
            if not isinstance(outcome, SaveCancelledError):
                newest = self.queue.steps.newest(())
                log_failure(outcome, job.target, stage=job.failing_stage, rank=ctx.rank, newest=newest)
            self.cache.clear()
            ctx.members.sent.forget()
        else:
            log_commit(outcome, job.target, rank=ctx.rank, world_size=ctx.world_size)
        self.statistics.settle(outcome, job.step)
        if isinstance(outcome, SaveReport):
            if job.step is not None:
                ctx.members.newest = max(job.step, ctx.members.newest or 0)
                self._drop_orphans()
            self._on_committed(job.step)


_CHANGE: Exchange[tuple[str, bool], tuple[str, StepsChange]] = Exchange(
    tuple[str, bool], tuple[str, StepsChange], stage="agree"
)
"""A rank sends its call and whether it has pending saves; the leader replies with the busy ranks and the change."""
_DELETED: Exchange[None, None] = Exchange(None, None, stage="agree")
"""The leader tells that it has deleted the files of a step."""
_LOCKING = frozenset(
    call.__code__
    for call in (
        SaveFrontend.save,
        SaveFrontend.save_file,
        SaveFrontend.prepare,
        SaveFrontend.rollback,
        SaveFrontend.delete,
        SaveFrontend.remove,
        SaveFrontend.clear_cache,
    )
)


async def _assign_under_one_root(ctx: EngineContext, number: int, round_: SaveRound, told: PlanMsg) -> AssignReply:
    """Do :meth:`SaveRound.assign`. The leader makes the pending directory before, and the other ranks must see it."""
    pending = ctx.pending_path(number)
    if ctx.members.is_leader:
        await make_pending(ctx.storage, pending)
    reply = await round_.assign(told)
    if not ctx.members.is_leader:
        await ctx.members.check_root(ctx.storage, ctx.root, pending)
    return reply


def _lacks_share(plan: Plan) -> bool:
    """Return whether other ranks hold shards, too, and it is not agreed yet which rank writes what."""
    return plan.local is not None and not plan.share_id


def _milestone_of(work: Future[None] | None, portal: Portal) -> Milestone[None]:
    milestone: Milestone[None] = Milestone("prepare()", portal.check_thread)
    if work is None:
        milestone.resolve(None)
    else:
        settle_with(milestone, work)
    return milestone


def _log_failure(done: Future[None]) -> None:
    error = None if done.cancelled() else done.exception()
    if error is not None:
        _log.info("no arena was mapped ahead, the next save will try: %s: %s", type(error).__name__, str(error))


def _busy_ranks(asked: Sequence[tuple[str, bool]], call: str) -> str:
    """Describe the ranks that have pending saves, which forbid a change of the steps; '' if there is none."""
    for rank, (other, _) in enumerate(asked):
        if other != call:
            text = f"rank {rank} calls {other} where rank 0 calls {call}"
            raise PeerFailedError(f"{text}: give the same step on every rank", rank=rank, stage="agree")
    return ", ".join(str(rank) for rank, (_, is_busy) in enumerate(asked) if is_busy)


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
