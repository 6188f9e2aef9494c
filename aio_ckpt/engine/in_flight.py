"""The saves in flight of one engine: room, start, settlement, and failures that nobody awaited.

:meth:`InFlight.start` runs the capture on the caller's thread and submits the pipeline to the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeAlias

from aio_ckpt.checks import MAX_SECS, check_path
from aio_ckpt.commit import step_numbers
from aio_ckpt.commit.by_path import is_same_place
from aio_ckpt.config import BusyPolicy
from aio_ckpt.engine.context import EngineContext
from aio_ckpt.engine.known_steps import KnownSteps
from aio_ckpt.engine.outcomes import call_back, log_commit, log_failure, logged_errors, named
from aio_ckpt.engine.pipeline import SavePipeline, keep_trace
from aio_ckpt.engine.removal import Removal, Remover
from aio_ckpt.engine.stages import CapturedSave, PendingSave, SaveCall, SaveTimer
from aio_ckpt.errors import (
    BusyError,
    ConfigError,
    EngineClosedError,
    PeerFailedError,
    SaveCancelledError,
    StallError,
)
from aio_ckpt.leaves.objects import ObjectBytes
from aio_ckpt.plan.planner import Plan, PlannedSave
from aio_ckpt.ranks.group_call import CALL_STAGE
from aio_ckpt.ranks.messages import Topic
from aio_ckpt.ranks.save_ledger import ContentSums
from aio_ckpt.ranks.save_round import SaveRound, SaveState
from aio_ckpt.reports import SaveReport, Target, title
from aio_ckpt.runtime.deadline import Deadline
from aio_ckpt.runtime.error_notes import note_stage, note_ticket
from aio_ckpt.runtime.futures import failed, follow
from aio_ckpt.runtime.portal import Condition, Lock, Portal, run_blocking
from aio_ckpt.runtime.waiting import WaitLines, call_text
from aio_ckpt.snapshot.capture import Capture, CopyEngines, capture
from aio_ckpt.snapshot.device_copy import DeviceCopier
from aio_ckpt.snapshot.image import Image
from aio_ckpt.snapshot.optimizer_guard import OptimizerGuards
from aio_ckpt.snapshot.progress import CapturedRun, CaptureProgress
from aio_ckpt.ticket import Milestone, SaveTicket, settle

CallsByPath: TypeAlias = tuple[tuple[Path, Future[None]], ...]
"""Path and settlement of calls that save or remove at a path, in the order of the calls."""

MAX_CALLS = sys.maxsize
"""Larger than the number of any call."""


class InFlight:
    """The table of pending saves.

    Invariant: a save is in the table from :meth:`start` until it is settled. The table holds at most ``max_in_flight``
    saves. A failure that no waiter has seen stays here until it is raised once.
    """

    def __init__(
        self,
        ctx: EngineContext,
        portal: Portal,
        pipeline: SavePipeline,
        *,
        on_settled: Callable[[SaveReport | BaseException, int | None], None],
    ) -> None:
        """``on_settled`` gets the report or the error of each save before the save leaves the table, and its step."""
        self._ctx = ctx
        self._pipeline = pipeline
        self._portal = portal
        self._remover = Remover(ctx=ctx, quarantine=pipeline.quarantine, pending_cleanup=pipeline.pending_cleanup)
        self._on_settled = on_settled
        max_bytes = ctx.config.device_copy_bytes
        self.copy_engines = CopyEngines(device_copier=DeviceCopier(None if max_bytes == "auto" else max_bytes))
        """Streams and buffers of all captures of the engine."""
        self.guards = OptimizerGuards()
        self._max = ctx.config.max_in_flight
        self.steps = KnownSteps(pipeline.quarantine, counts_calls=ctx.world_size > 1)
        self._on_failure = ctx.config.on_failure
        # Entered as a plain lock, whose ``with`` is C: Ctrl-C inside Condition's own, which is Python, would leave it
        # held for ever.
        self._lock = Lock()
        self._changed = Condition(self._lock)
        self._calls = 0
        self._saves: deque[int] = deque(maxlen=self._max + 1)  # numbers of the newest calls of save()
        self._pending: list[PendingSave] = []
        self._removals: list[Removal] = []
        # Of the last save that came into the table. An error that nobody was told yet keeps its ticket.
        self._newest: Callable[[], SaveTicket | None] = lambda: None
        self._unreported: list[tuple[int, SaveTicket]] = []  # with the number of the call
        self._is_closing = False

    # -- room -----------------------------------------------------------------------------------------

    def wait_for_room(self, step: object, when_busy: BusyPolicy, deadline: Deadline) -> float | None:
        """Wait for room. Returns the seconds waited; None if the save is to be skipped.

        Without a deadline, this waits as long as it takes: each pending save has its own limits.

        Raises:
            BusyError: there is no room and ``when_busy="raise"``.
            StallError: there was no room by the deadline of this save, which names ``step`` if it is given.
            EngineClosedError: the engine is closed, or was closed meanwhile.
        """
        began, lines = time.perf_counter(), self.lines("save", step)
        while True:
            pause_secs = lines.pause_secs(deadline.left_secs(MAX_SECS))  # logs, so it is not under the lock
            with self._lock:
                if self._is_closing or len(self._pending) < self._max:
                    self.check_open()
                    return time.perf_counter() - began
                if when_busy == "skip":
                    return None
                if when_busy == "raise":
                    raise BusyError(
                        f"the save of {self._pending[0].title} is pending: await engine.ready() first, "
                        "or raise max_in_flight"
                    )
                deadline.check(step, f"waiting for the save of {self._pending[0].title} to end")
                self._changed.wait(pause_secs)

    def lines(self, call: str, step: object = None, *, others: Callable[[], str] = lambda: "") -> WaitLines:
        """Return the lines about a wait of ``call``, of ``step`` if it is given, for the oldest pending save.

        If no save is pending, the lines name what ``others`` returns, and otherwise deletions.
        """

        def describe(waited: str) -> str:
            what = call_text(call, step)
            for oldest in self.pending[:1]:
                return (
                    f"{what} has waited {waited} for the save of {oldest.title}, which is {oldest.activity} "
                    f"(max_in_flight={self._max})"
                )
            return f"{what} has waited {waited} for {others() or 'deletions in the background'}"

        return WaitLines(describe, step=step if type(step) is int else None, rank=self._ctx.rank)

    def check_open(self) -> None:
        """Raise EngineClosedError if no save may enter any more."""
        if self._is_closing:
            raise EngineClosedError("the engine was closed: open a new one")

    def close(self) -> None:
        """Let no save enter from now on. Calls that wait get EngineClosedError.

        Raises:
            WrongThreadError: the caller is the engine's own thread, on which pending saves run.
        """
        self._portal.check_thread("close()")
        with self._lock:
            self._is_closing = True
            self._changed.notify_all()

    def prepare_buffers(self, plan: Plan) -> None:
        """Make the side streams and gather buffers of ``plan`` now, ahead of its first save."""
        self.copy_engines.prepare(plan)

    def clear_buffers(self) -> None:
        """Free the gather buffers, ``EngineConfig.gather_bytes`` on each device."""
        self.copy_engines.clear()

    @property
    def pending(self) -> tuple[PendingSave, ...]:
        """Saves that are not settled, oldest first."""
        with self._lock:
            return tuple(self._pending)

    @property
    def pending_count(self) -> int:
        """Number of saves that are not settled. Takes no lock, so that a signal handler may read it."""
        return len(self._pending)

    def room(self) -> tuple[bool, int]:
        """Return whether another save may enter now, and the number of the last call before the oldest pending one."""
        with self._lock:
            through = self._pending[0].number - 1 if self._pending else self._calls
            return len(self._pending) < self._max, through

    @property
    def settled_by_now(self) -> int:
        """Number of the newest call of ``save()`` that has to be settled before the last one may enter; 0 for none.

        Removals and other calls are numbered with the saves, and take no room.
        """
        return self._saves[0] if len(self._saves) > self._max else 0

    def wait_settled(self, step: object, through: int, deadline: Deadline) -> None:
        """Wait until no save of a call up to number ``through`` is pending. Errors name ``step`` if it is given."""
        lines = self.lines("save", step)
        while True:
            pause_secs = lines.pause_secs(deadline.left_secs(MAX_SECS))
            with self._lock:
                if not self._pending or self._pending[0].number > through:
                    return
                deadline.check(step, f"waiting for the save of {self._pending[0].title} to end")
                self._changed.wait(pause_secs)

    @property
    def settled_before_room(self) -> Future[None] | None:
        """Return the settlement of the oldest save if the table is full, else None."""
        with self._lock:
            return self._pending[0].settled if len(self._pending) >= self._max else None

    # -- one save -------------------------------------------------------------------------------------

    def enter(
        self,
        call: SaveCall,
        planned: PlannedSave,
        objects: ObjectBytes,
        image: Image,
        *,
        content: ContentSums,
        target: Target,
        number: int,
        agreement: SaveRound,
        requested: Sequence[str],
        waited_secs: float,
        plan_secs: float,
    ) -> PendingSave:
        """Make a pending save, which owns the lease from now on. :meth:`start` puts it into the table and runs it."""

        def cancel() -> bool:
            return self._portal.call(save.cancel, timeout=self._ctx.config.stall_timeout_secs, what="cancel()")

        def fence(stream: object) -> None:
            for event in save.events:
                event.fence(stream)

        captured = CapturedSave(
            target=target,
            number=number,
            requested=requested,
            plan=planned.plan,
            plan_hit=planned.plan_hit,
            fingerprint_hit=planned.fingerprint_hit,
            objects=objects,
            content=content,
            image=image,
            progress=CaptureProgress(len(image.chunks)),
        )
        try:
            with self._lock:
                save = PendingSave(
                    call=call,
                    captured=captured,
                    round=agreement,
                    ticket=SaveTicket(
                        step=0 if isinstance(target, Path) else target,
                        path=target if isinstance(target, Path) else None,
                        portal_check=self._portal.check_thread,
                        cancel=cancel,
                        fence=fence,
                        progress=lambda: save.so_far,
                        waited_secs=waited_secs,
                    ),
                    earlier=self._unsettled(),
                    timer=SaveTimer(call.started, waited_secs=waited_secs, plan_secs=plan_secs),
                )
        except BaseException:
            image.lease.close()
            raise
        agreement.advance(SaveState.CAPTURING)
        return save

    def next_number(self, kind: str = "save", step: object = None) -> int:
        """Return the number of a new call of ``save()``, or of the method ``kind`` that is numbered with it.

        The number is the same on every rank for the same call.

        Raises:
            ConfigError: the engine was opened before the process group of its ranks; nothing was touched.
        """
        self._ctx.members.check_group()
        self._calls += 1
        if kind == "save":
            self._saves.append(self._calls)
        self._ctx.members.coordinator.begin_call(Topic(kind, self._calls), step=step if type(step) is int else None)
        return self._calls

    def start(self, save: PendingSave, planned: PlannedSave) -> None:
        """Start the pipeline and the copies. The first chunks are written while later ones are copied.

        If this raises, the save is settled: nothing is visible and the ticket holds the error.
        """
        work: Capture | None = None
        image = save.captured.image
        is_running, is_staged, plan = False, False, planned.plan

        def begin() -> None:
            nonlocal is_running
            self._portal.submit(self._pipeline.run, save, on_done=lambda done: self._settle(save, done))
            is_running = True

        def captured(runs: Sequence[CapturedRun]) -> None:
            if is_running:
                self._portal.post(save.progress.add, runs)
            else:
                save.progress.add(runs)  # nothing waits for it yet, so that the loop is woken once
                begin()

        def issued(work: Capture) -> None:
            nonlocal is_staged
            save.events = work.source_events
            self.guards.wait_for(work.source_events)
            is_staged = work.is_done
            save.timer.reached(
                "blocked"
            )  # first: the loop wakes next and may settle the save before this thread goes on

        try:
            image.lease.hold(save.ticket.staged)
            with self._lock:  # inside the try: a save in the table that is never settled would block all later ones
                self.check_open()  # again: close() waits only for saves that are in the table then
                self._pending.append(save)
                self._newest = weakref.ref(save.ticket)
            if not plan.uses_cuda:  # with CUDA, once all copies are issued: see capture()
                begin()
            work = capture(
                planned,
                image,
                self.copy_engines,
                guarded=self.guards.leaves(plan.descriptors.fingerprint, plan.structure),
                on_captured=captured,
                on_issued=issued,
                stall_timeout_secs=self._pipeline.slot_timeout_secs(image.slots * image.chunk_bytes),
                trace=save.call.trace,
            )
            save.debug("save() returns")
            self._finish(save, work, is_staged=is_staged)
        except BaseException as error:
            if work is not None:
                work.finish()  # no copy may still use the arena when it is given back
            image.lease.release(save.ticket.staged)
            self._give_up(save, error)
            raise

    def _finish(self, save: PendingSave, work: Capture, *, is_staged: bool) -> None:
        """Resolve ``staged`` once all issued copies are done, or now if ``is_staged``."""

        def finish() -> None:
            work.finish()
            save.timer.reached("staged")
            save.debug("everything is staged")
            save.ticket.staged.resolve(None)

        lease, staged = save.captured.image.lease, save.ticket.staged
        if is_staged:
            finish()
            lease.release(staged)
        else:
            self._portal.executor.submit(finish).add_done_callback(lambda _: lease.release(staged))

    def _give_up(self, save: PendingSave, error: BaseException) -> None:
        """End a save whose ``save()`` is about to raise ``error``, at whatever stage it is."""
        timeout_secs = self._ctx.config.stall_timeout_secs
        # Only save() raises Ctrl-C. The pipeline and later saves get a SaveCancelledError.
        interrupted = SaveCancelledError(f"save() of {save.title} was interrupted by {type(error).__name__}")
        cause = error if isinstance(error, Exception) else interrupted
        note_stage(cause, CALL_STAGE)
        try:
            self._portal.call(self._stop, save, cause, timeout=timeout_secs, what="save()")
        except (EngineClosedError, StallError):  # no pipeline runs any more
            self._settle(save, failed(cause))
        with contextlib.suppress(StallError):
            save.ticket.exception(timeout_secs)
        with self._lock:  # save() raises it; a kept traceback would keep the caller's state alive
            self._unreported = [entry for entry in self._unreported if entry[1] is not save.ticket]

    async def _stop(self, save: PendingSave, cause: Exception) -> None:
        """Stop a save, on the loop: only there it is certain whether the pipeline has begun.

        If so, that settles the save.
        """
        save.progress.fail(cause)
        if save.scope is None:  # the pipeline has not begun
            save.captured.image.lease.close()
            await keep_trace(self._ctx, save, cause)
            self._settle(save, failed(cause))

    def _settle(self, save: PendingSave, done: Future[SaveReport]) -> None:
        """Settle a save whose pipeline has ended or will never begin: first the table, then the ticket.

        The first call counts.
        """
        if save.settled.done():
            return
        error = SaveCancelledError("the engine was closed") if done.cancelled() else done.exception()
        is_cancelled = isinstance(error, SaveCancelledError)
        if save.round.is_committing and isinstance(error, (EngineClosedError, SaveCancelledError)):
            save.round.lose(error)
        rank = self._ctx.rank
        try:
            with logged_errors(f"the outcome of the save of {save.title} was not recorded"):
                self._record(save, done, error)
        finally:  # in any case: close() and later saves wait for a save that stays in the table
            self._leave(save, error)
            save.settled.set_result(None)
            settle(save.ticket, done.result() if error is None else error)
        # Last: a slow callback then delays neither the waiters of this save nor a save() that waits for room.
        config = self._ctx.config
        if error is None:
            call_back("on_commit", config.on_commit, done.result(), target=save.target, rank=rank)
        elif isinstance(error, Exception) and not is_cancelled:
            call_back("on_error", config.on_error, error, target=save.target, rank=rank)

    def _record(self, save: PendingSave, done: Future[SaveReport], error: BaseException | None) -> None:
        """Log and count the outcome of a save that is about to settle."""
        rank, world_size = self._ctx.rank, self._ctx.world_size
        if error is not None:
            save.captured.image.fail_slots(error)  # a pipeline that never began has not done it
        if error is None:
            log_commit(done.result(), save.target, rank=rank, world_size=world_size)
        elif not isinstance(error, SaveCancelledError):
            newest = self.steps.newest(())
            log_failure(error, save.target, stage=save.failing_stage, rank=rank, newest=newest)
        self._on_settled(done.result() if error is None else error, save.step)

    def _leave(self, save: PendingSave, error: BaseException | None) -> None:
        """Take a save that has ended out of the table."""
        with self._lock:
            self._pending = [other for other in self._pending if other is not save]
            if save.step is not None:
                self.steps.settle(save.step, is_committed=error is None)
            if error is not None and not isinstance(error, SaveCancelledError) and not _was_raised_elsewhere(error):
                self._unreported.append((save.number, save.ticket))
            self._changed.notify_all()

    # -- removals and paths ---------------------------------------------------------------------------

    def remove(self, path: Path, number: int) -> Milestone[None]:
        """Start the removal of the checkpoint at ``path``, in its place between the commits of other calls.

        Raises:
            EngineClosedError: the engine was closed.
        """
        done: Milestone[None] = Milestone(f"removal of {path}", self._portal.check_thread)
        with self._lock:
            self.check_open()
            removal = Removal(
                path=path,
                number=number,
                tickets=self._awaited_by_removal(),
                done=done,
            )
            self._removals.append(removal)
        removal.ended.add_done_callback(lambda _: self._forget(removal))
        try:
            self._remover.start(removal, self._portal)
        except BaseException:
            self._forget(removal)
            raise
        return done

    def _forget(self, removal: Removal) -> None:
        with self._lock:
            self._removals = [other for other in self._removals if other is not removal]

    def _awaited_by_removal(self) -> tuple[SaveTicket, ...]:
        """Return the tickets of the saves whose failure drops a removal that is called now. Call this under the lock.

        The last save counts although it may have failed before the call: it may fail faster than the caller goes on.
        A failure that the caller knows does not count: the removal may be what makes room.
        """
        pending = [save.ticket for save in self._pending]
        newest = self._newest()
        earlier = [] if newest is None or newest in pending else [newest]
        return tuple(ticket for ticket in (*earlier, *pending) if not ticket.committed.observed)

    def _unsettled(self) -> tuple[Future[None], ...]:
        """Return the settlements of all saves and removals of earlier calls. Call this under the lock."""
        saves, removals = (save.settled for save in self._pending), (removal.settled for removal in self._removals)
        return (*saves, *removals)

    def removals(self) -> list[Future[None]]:
        """Return the futures of the removals that have not ended."""
        with self._lock:
            return [removal.ended for removal in self._removals]

    async def await_calls(self, call: str, path: object, calls: CallsByPath) -> None:
        """Wait for those of ``calls`` that save or remove at ``path``; for all of them if that is None.

        A path that is none names no call. A call that fails ends the wait, too. The wait has no deadline of its own,
        because each pending save has its limits. ``call`` names the waiting call in lines of the log.
        """
        with contextlib.suppress(ConfigError), self.lines(call).on_loop():
            place = None if path is None else check_path("path", path)
            for other, settled in calls:
                if settled.done():
                    continue
                if place is None or await run_blocking(self._ctx.executor, is_same_place, place, other):
                    await asyncio.wrap_future(follow(settled))

    def calls_by_path(self) -> CallsByPath:
        """Return path and settlement of each pending save by path, and of each removal."""
        with self._lock:
            saves = [(save.call.path, save.settled) for save in self._pending]
            removals = [(removal.path, removal.settled) for removal in self._removals]
        return tuple((path, settled) for path, settled in (*saves, *removals) if path is not None)

    def calls_before_load(self, step: object, path: object) -> CallsByPath:
        """Return the pending calls that a load of ``step`` or ``path`` may wait for: those that change what it finds.

        Without a path, these are the pending saves of ``step``, or of any step if that is None.
        """
        wanted, ctx = step_numbers.whole_number(step), self._ctx
        with self._lock:
            saves = [(save.step, save.settled) for save in self._pending if save.step is not None]
        if type(wanted) is int:
            saves = [(own, settled) for own, settled in saves if own == wanted]
        steps = tuple((ctx.root / ctx.names.name(own), settled) for own, settled in saves)
        return steps if path is None else (*steps, *self.calls_by_path())

    # -- steps ----------------------------------------------------------------------------------------

    @property
    def pending_steps(self) -> list[int]:
        """Steps of the saves that are not settled, without the saves by path."""
        return [save.step for save in self.pending if save.step is not None]

    @property
    def newest_step(self) -> int | None:
        """Newest step that is committed or pending."""
        return self.steps.newest(self.pending_steps)

    def claim_step(self, number: int, step: object) -> int:
        """Take the step of call ``number``; see :meth:`KnownSteps.claim`."""
        claimed = self.steps.claim(number, step, self.pending_steps, agreed=self._ctx.members.newest)
        if claimed != step:
            self._ctx.members.coordinator.begin_call(Topic("save", number), step=claimed)
        return claimed

    def check_step(self, step: int, *, overwrite: bool, read_steps: Callable[[], Collection[int]]) -> int:
        """Return ``step`` if a save of it may enter now, else raise StepOrderError."""
        return self.steps.check(step, self.pending_steps, overwrite=overwrite, read=read_steps)

    # -- failures -------------------------------------------------------------------------------------

    def add_unreported(self, ticket: SaveTicket) -> None:
        """Add the failure of a file of this rank alone. The next call reports it, as no other rank knows of it."""
        with self._lock:
            self._unreported.append((0, ticket))

    def take_unreported(self, through: int) -> SaveTicket | None:
        """Return the ticket of the oldest failure that nobody has awaited, which counts as reported from now on.

        Only calls up to number ``through`` count: a later call takes the others, as on the other ranks. None if there
        is no such failure, or with ``on_failure="log"``.
        """
        raises = self._on_failure == "raise"
        with self._lock:
            unseen = [entry for entry in self._unreported if not entry[1].committed.observed]
            failed = [entry for entry in unseen if entry[0] <= through][:1] if raises else []
            self._unreported = [entry for entry in unseen if entry not in failed] if raises else []
        return failed[0][1] if failed else None


def raise_failure(failed: SaveTicket, *, made: SaveTicket | None = None) -> None:
    """Raise the failure of a background save. ``made``: the save that the same call made all the same."""
    error = failed.exception()
    if error is not None:
        error.add_note(f"this is the background save of {title(failed.path or failed.step)}, which nobody awaited")
        if made is not None:
            note_ticket(error, made)
        raise error


def note_failure(error: BaseException, failed: SaveTicket) -> None:
    """Note on ``error``, with which a call of ``save()`` ends, that an earlier background save had failed, too."""
    earlier = failed.exception()
    if earlier is not None:
        text = "before this call, the background save of %s had failed, which nobody awaited: %s"
        error.add_note(text % (title(failed.path or failed.step), named(earlier)))


def _was_raised_elsewhere(error: BaseException) -> bool:
    """Return whether ``save()`` raised ``error`` on another rank. Raised here again, it would be told there again."""
    return isinstance(error, PeerFailedError) and error.stage == CALL_STAGE
