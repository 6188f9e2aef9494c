"""The saves in flight of one engine: which may enter, with which step, how each is started and settled, which failures
nobody saw."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from aio_ckpt.checks import MAX_SECS
from aio_ckpt.commit import step_numbers
from aio_ckpt.commit.quarantine import Quarantine
from aio_ckpt.config import BusyPolicy
from aio_ckpt.engine.context import EngineContext
from aio_ckpt.engine.pipeline import SavePipeline, keep_trace
from aio_ckpt.engine.stages import CALL_STAGE, CapturedSave, PendingSave, SaveCall, SaveTimer
from aio_ckpt.errors import (
    BusyError,
    EngineClosedError,
    PeerFailedError,
    SaveCancelledError,
    StallError,
    StepOrderError,
)
from aio_ckpt.plan.planner import Plan, PlannedSave
from aio_ckpt.ranks.save_round import SaveRound, SaveState
from aio_ckpt.reports import SaveReport
from aio_ckpt.runtime.deadline import Deadline
from aio_ckpt.runtime.error_notes import tell_stage
from aio_ckpt.runtime.portal import Condition, Lock, Portal
from aio_ckpt.snapshot.capture import Capture, CopyEngines, capture
from aio_ckpt.snapshot.device_copy import DeviceCopier
from aio_ckpt.snapshot.image import Image
from aio_ckpt.snapshot.optimizer_guard import OptimizerGuards
from aio_ckpt.snapshot.progress import CapturedRun, CaptureProgress
from aio_ckpt.state.objects import ObjectBytes
from aio_ckpt.ticket import SaveTicket

__all__ = ["MAX_CALLS", "InFlight", "KnownSteps"]

_log = logging.getLogger("aio_ckpt")
MAX_CALLS = sys.maxsize
"""Beyond the number of any call."""


class KnownSteps:
    """The committed steps as one rank knows them, and the step of a call of ``save()`` that gives none.

    Invariant: the step of such a call is computed only from what every rank knows at that call. Of several ranks that
    is the newest step when all met, loaded or went back, and the steps of all calls since that were not skipped,
    whatever became of them: another rank may not have heard of a failure yet. One rank alone counts only what is
    committed or pending, so that a step that failed is free again.
    """

    def __init__(self, quarantine: Quarantine, *, counts_calls: bool) -> None:
        """``counts_calls``: there are other ranks."""
        self._quarantine = quarantine
        self._counts_calls = counts_calls
        self._lock = Lock()
        self._last_call: tuple[int, int] | None = None
        """Number and step of the last call that was not skipped."""
        self._highest: int | None = None
        """Highest step of all such calls since a rollback."""
        self._newest: int | None = None
        self._newest_since_read: int | None = None
        self._are_read = False
        self._times_condemned = 0

    # -- committed ------------------------------------------------------------------------------------

    @property
    def are_known(self) -> bool:
        """Whether the committed steps were read from the disk, and no load found one damaged since."""
        return self._are_read and self._times_condemned == self._quarantine.times_condemned

    def forget(self) -> None:
        """The steps on the disk are about to change: the next save reads them anew."""
        self._are_read = False

    def learn(self, read_steps: Callable[[], Iterable[int]]) -> None:
        """Take over the newest step on the disk, or what is committed while the disk is read."""
        try:
            with self._lock:
                self._newest_since_read = None
                self._are_read = True
                self._times_condemned = self._quarantine.times_condemned
            found = max(read_steps(), default=None)
        except BaseException:
            self._are_read = False
            raise
        with self._lock:
            self._newest = _later(self._newest_since_read, found)

    def settle(self, step: int, *, is_committed: bool) -> None:
        """The save of ``step`` has ended."""
        with self._lock:
            if is_committed:
                self._newest = _later(self._newest, step)
                self._newest_since_read = _later(self._newest_since_read, step)
            else:
                self._are_read = False  # a commit that stalled may have become visible: look again

    # -- the next one ---------------------------------------------------------------------------------

    def newest(self, pending: Iterable[int]) -> int | None:
        """Newest step committed or ``pending`` here."""
        return _later(self._newest, max(pending, default=None))

    def claim(self, number: int, step: object, pending: Iterable[int], *, agreed: int | None) -> int:
        """The step of call ``number`` on every rank: ``step``, or the next one if it is no step that could be given.

        Every call that is not skipped claims its step, one that is refused here, too. ``agreed`` is the newest step
        as all ranks know it.
        """
        with self._lock:
            if self._last_call is not None and self._last_call[0] == number:
                return self._last_call[1]
            try:
                step = step_numbers.check_step_number(step)
            except StepOrderError:
                newest = _later(agreed, self._highest) if self._counts_calls else self.newest(pending)
                step = step_numbers.check_step(None, newest=newest, committed=(), pending=(), overwrite=False)
            self._last_call, self._highest = (number, step), _later(self._highest, step)
            return step

    def roll_back(self, step: int) -> None:
        """All ranks have gone back to ``step``."""
        with self._lock:
            self._are_read = False
            self._highest = step

    def check(self, step: int, pending: Iterable[int], *, overwrite: bool, read: Callable[[], Collection[int]]) -> int:
        """A step that the caller gave. Only the newest is remembered: an older one is looked up on the disk.

        Raises:
            StepOrderError: see :func:`aio_ckpt.commit.step_numbers.check_step`.
        """
        pending = list(pending)
        newest = self.newest(pending)
        committed = read() if newest is not None and step <= newest else ()
        return step_numbers.check_step(step, newest=newest, committed=committed, pending=pending, overwrite=overwrite)


class InFlight:
    """The table of pending saves.

    Invariant: a save is in the table from :meth:`start` until it is settled, and at most ``max_in_flight`` are. A
    failure that no waiter has seen stays here until it was raised once.
    """

    def __init__(
        self,
        ctx: EngineContext,
        portal: Portal,
        pipeline: SavePipeline,
        *,
        on_settled: Callable[[int, BaseException | None], None],
    ) -> None:
        """``on_settled`` is told of each outcome before the save leaves the table."""
        self._ctx = ctx
        self._pipeline = pipeline
        self._portal = portal
        self._on_settled = on_settled
        most_bytes = ctx.config.device_copy_bytes
        self._copy_engines = CopyEngines(device_copier=DeviceCopier(None if most_bytes == "auto" else most_bytes))
        self.guards = OptimizerGuards()
        self._max = ctx.config.max_in_flight
        self.steps = KnownSteps(pipeline.quarantine, counts_calls=ctx.world_size > 1)
        self._on_failure = ctx.config.on_failure
        # Entered as a plain lock, whose ``with`` is C: Ctrl-C inside Condition's own, which is Python, would leave it
        # held for ever.
        self._lock = Lock()
        self._changed = Condition(self._lock)
        self._calls = 0
        self._pending: list[PendingSave] = []
        self._unreported: list[tuple[int, SaveTicket]] = []  # with the number of the call
        self._is_closing = False

    # -- room -----------------------------------------------------------------------------------------

    def wait_for_room(self, step: object, when_busy: BusyPolicy, deadline: Deadline) -> float | None:
        """Seconds waited for room; None if the save is to be skipped.

        Without a deadline for as long as it takes: each pending save settles by its own.

        Raises:
            BusyError: there is none and ``when_busy="raise"``.
            StallError: there was none by the deadline of this save, which is to be ``step`` (or the next).
            EngineClosedError: the engine was closed, maybe meanwhile.
        """
        began = time.perf_counter()
        with self._lock:
            while not self._is_closing and len(self._pending) >= self._max:
                if when_busy == "skip":
                    return None
                if when_busy == "raise":
                    raise BusyError(
                        f"the save of step {self._pending[0].step} is pending: await engine.ready() first, "
                        "or raise max_in_flight"
                    )
                deadline.check(step, f"waiting for the save of step {self._pending[0].step} to end")
                self._changed.wait(deadline.left_secs(MAX_SECS))
            self.check_open()
        return time.perf_counter() - began

    def check_open(self) -> None:
        """Raise EngineClosedError if no save may enter any more."""
        if self._is_closing:
            raise EngineClosedError("the engine was closed: open a new one")

    def close(self) -> None:
        """No save may enter from now on; those that wait get EngineClosedError.

        Raises:
            WrongThreadError: on the engine's own thread, where what is pending could never end.
        """
        self._portal.check_thread("close()")
        with self._lock:
            self._is_closing = True
            self._changed.notify_all()

    def prepare_buffers(self, plan: Plan) -> None:
        """Make side streams and gather buffers now that the first save of ``plan`` would make."""
        self._copy_engines.prepare(plan)

    def clear_buffers(self) -> None:
        """Let go of the gather buffers: 64 MiB of each device."""
        self._copy_engines.clear()

    @property
    def pending(self) -> tuple[PendingSave, ...]:
        """Saves not settled, oldest first."""
        with self._lock:
            return tuple(self._pending)

    def room(self) -> tuple[bool, int]:
        """Whether another save may enter now, and the last call before the oldest that is pending."""
        with self._lock:
            through = self._pending[0].number - 1 if self._pending else self._calls
            return len(self._pending) < self._max, through

    def wait_settled(self, through: int, deadline: Deadline) -> None:
        """Until no save of a call up to ``through`` is pending."""
        with self._lock:
            while self._pending and self._pending[0].number <= through:
                deadline.check(None, f"waiting for the save of step {self._pending[0].step} to end")
                self._changed.wait(deadline.left_secs(MAX_SECS))

    @property
    def settled_before_room(self) -> Future[None] | None:
        """Settlement of the oldest save, if another would have to wait for it."""
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
        step: int,
        number: int,
        agreement: SaveRound,
        requested: Sequence[str],
        waited_secs: float,
        plan_secs: float,
    ) -> PendingSave:
        """Make a pending save, which has the lease from now on; :meth:`start` enters it in the table and runs it."""

        def cancel() -> bool:
            return self._portal.call(save.cancel, timeout=self._ctx.config.stall_timeout_secs, what="cancel()")

        def fence(stream: object) -> None:
            for event in save.events:
                event.fence(stream)

        captured = CapturedSave(
            step=step,
            number=number,
            requested=requested,
            plan=planned.plan,
            plan_hit=planned.plan_hit,
            fingerprint_hit=planned.fingerprint_hit,
            objects=objects,
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
                        step=step,
                        portal_check=self._portal.check_thread,
                        cancel=cancel,
                        fence=fence,
                        waited_secs=waited_secs,
                    ),
                    earlier=tuple(pending.settled for pending in self._pending),
                    timer=SaveTimer(call.started, waited_secs=waited_secs, plan_secs=plan_secs),
                )
        except BaseException:
            image.lease.close()
            raise
        agreement.advance(SaveState.CAPTURING)
        return save

    def next_number(self) -> int:
        """The number of a call of ``save()``: the same on every rank for the same call."""
        self._calls += 1
        self._ctx.members.coordinator.begin_call(f"save {self._calls}")
        return self._calls

    def start(self, save: PendingSave, planned: PlannedSave) -> None:
        """Start the pipeline and copy: the first chunks are written while later ones are copied.

        When it raises, the save is settled: nothing is visible and the ticket holds the error.
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
                self._portal.post(save.progress.tell, runs)
            else:
                save.progress.tell(runs)  # nobody waits for it yet, and the loop is woken once
                begin()

        def issued(work: Capture) -> None:
            nonlocal is_staged
            save.events = work.source_events
            self.guards.wait_for(work.source_events)
            is_staged = work.is_done
            save.timer.reached("blocked")  # now: the loop, woken next, may be done before this goes on

        try:
            image.lease.hold(save.ticket.staged)
            with self._lock:  # in here: a save in the table that nobody settles would keep all later ones waiting
                self.check_open()  # since there was room; whoever closes awaits what is in the table then
                self._pending.append(save)
            if not plan.uses_cuda:  # else once all is issued: see capture()
                begin()
            work = capture(
                planned,
                image,
                self._copy_engines,
                guarded=self.guards.leaves(plan.descriptors.fingerprint, plan.structure),
                on_captured=captured,
                on_issued=issued,
                stall_timeout_secs=self._pipeline.slot_timeout_secs(image.slots * image.chunk_bytes),
                trace=save.call.trace,
            )
            self._finish(save, work, is_staged=is_staged)
        except BaseException as error:
            if work is not None:
                work.finish()  # the arena goes back: no copy may still be under way
            image.lease.let_go(save.ticket.staged)
            self._give_up(save, error)
            raise

    def _finish(self, save: PendingSave, work: Capture, *, is_staged: bool) -> None:
        """Every copy is issued: ``staged`` is reached once they are done, or now if ``is_staged``."""

        def finish() -> None:
            work.finish()
            save.timer.reached("staged")
            save.ticket.staged.resolve(None)

        lease, staged = save.captured.image.lease, save.ticket.staged
        if is_staged:
            finish()
            lease.let_go(staged)
        else:
            self._portal.executor.submit(finish).add_done_callback(lambda _: lease.let_go(staged))

    def _give_up(self, save: PendingSave, error: BaseException) -> None:
        """``save()`` is about to raise ``error``: the save ends with it first, however far it has come."""
        timeout_secs = self._ctx.config.stall_timeout_secs
        # Ctrl-C is raised by save() and only there: the pipeline and later saves hear of a cancelled save.
        interrupted = SaveCancelledError(f"save() of step {save.step} was interrupted by {type(error).__name__}")
        cause = error if isinstance(error, Exception) else interrupted
        tell_stage(cause, CALL_STAGE)
        try:
            self._portal.call(self._stop, save, cause, timeout=timeout_secs, what="save()")
        except (EngineClosedError, StallError):  # no pipeline runs any more
            self._settle(save, failed(cause))
        with contextlib.suppress(StallError):
            save.ticket.exception(timeout_secs)
        with self._lock:  # raised by save(); kept, its traceback would keep the caller's state alive
            self._unreported = [entry for entry in self._unreported if entry[1] is not save.ticket]

    async def _stop(self, save: PendingSave, cause: Exception) -> None:
        """On the loop, where alone it is certain whether the pipeline has begun; it settles the save if it has."""
        save.progress.fail(cause)
        if save.scope is None:  # the pipeline has not begun
            save.captured.image.lease.close()
            await keep_trace(self._ctx, save, cause)
            self._settle(save, failed(cause))

    def _settle(self, save: PendingSave, done: Future[SaveReport]) -> None:
        """The pipeline ended or will never begin: leave the table, then tell the ticket. The first call counts."""
        if save.settled.done():
            return
        error = SaveCancelledError("the engine was closed") if done.cancelled() else done.exception()
        is_cancelled = isinstance(error, SaveCancelledError)
        if save.round.is_committing and isinstance(error, (EngineClosedError, SaveCancelledError)):
            save.round.lose(error)
        if error is not None and not is_cancelled:
            # As text: a handler that keeps records would keep the error's traceback and with it the caller's state.
            _log.error("the save of step %d failed: %s: %s", save.step, type(error).__name__, str(error))
        if error is not None:
            save.captured.image.fail_slots(error)  # a pipeline that never began has not
        self._on_settled(save.step, error)
        with self._lock:
            self._pending = [other for other in self._pending if other is not save]
            self.steps.settle(save.step, is_committed=error is None)
            if error is not None and not is_cancelled and not _was_raised_elsewhere(error):
                self._unreported.append((save.number, save.ticket))
            self._changed.notify_all()
        save.settled.set_result(None)
        if error is None:
            save.ticket.committed.resolve(done.result())
        else:
            save.ticket.staged.fail(error)
            save.ticket.committed.fail(error)

    # -- steps ----------------------------------------------------------------------------------------

    @property
    def pending_steps(self) -> list[int]:
        """Steps of the saves not settled."""
        return [save.step for save in self.pending]

    @property
    def newest_step(self) -> int | None:
        """Newest step that is committed or pending."""
        return self.steps.newest(self.pending_steps)

    def claim_step(self, number: int, step: object) -> int:
        """The step of call ``number``: see :meth:`KnownSteps.claim`."""
        return self.steps.claim(number, step, self.pending_steps, agreed=self._ctx.members.newest)

    def check_step(self, step: int, *, overwrite: bool, read_steps: Callable[[], Collection[int]]) -> int:
        """``step`` if a save of it may enter now, else StepOrderError."""
        return self.steps.check(step, self.pending_steps, overwrite=overwrite, read=read_steps)

    # -- failures -------------------------------------------------------------------------------------

    def raise_unreported(self, through: int) -> None:
        """Raise the oldest failure that nobody has seen, once; with ``on_failure="log"`` they were only logged.

        Of calls up to number ``through``: later ones are raised by a later call, as on the other ranks.
        """
        raises = self._on_failure == "raise"
        with self._lock:
            unseen = [entry for entry in self._unreported if not entry[1].committed.observed]
            failed = [entry for entry in unseen if entry[0] <= through][:1] if raises else []
            self._unreported = [entry for entry in unseen if entry not in failed] if raises else []
        for _, ticket in failed:
            error = ticket.exception()
            if error is not None:
                error.add_note(f"this is the background save of step {ticket.step}, which nobody awaited")
                raise error


def _was_raised_elsewhere(error: BaseException) -> bool:
    """Whether ``save()`` raised it on another rank: raised once more, here, it would be news again there, and so on."""
    return isinstance(error, PeerFailedError) and error.stage == CALL_STAGE


def failed(error: BaseException) -> Future[Any]:
    """A future that holds ``error``."""
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


def _later(a: int | None, b: int | None) -> int | None:
    return b if a is None or (b is not None and b > a) else a
