"""The pending saves of one engine: room, order, end, and failures that nobody awaited."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from aio_ckpt.argument_checks import MAX_SECS
from aio_ckpt.commit import step_numbers
from aio_ckpt.commit.path_checkpoints import is_same_place
from aio_ckpt.config import BusyPolicy
from aio_ckpt.engine.context import EngineContext
from aio_ckpt.engine.job import Job, RemoveJob, SaveJob, WriteJob
from aio_ckpt.engine.known_steps import KnownSteps
from aio_ckpt.engine.outcome_log import logged_errors
from aio_ckpt.engine.outcomes import OutcomeRecorder
from aio_ckpt.engine.remove_pipeline import RemovePipeline
from aio_ckpt.engine.root_session import RootSession
from aio_ckpt.errors import BusyError, ConfigError, EngineClosedError, PeerFailedError, SaveCancelledError
from aio_ckpt.memory.arena_lifetimes import Lease
from aio_ckpt.mirror.mirror_queue import MirrorQueue
from aio_ckpt.ranks.membership import CALL_STAGE
from aio_ckpt.ranks.messages import Topic
from aio_ckpt.ranks.save_round import Room, SaveState
from aio_ckpt.remote_path import check_place
from aio_ckpt.reports import SaveReport, title
from aio_ckpt.runtime.ctrl_c import Condition
from aio_ckpt.runtime.deadline import Deadline
from aio_ckpt.runtime.error_notes import copy_to_raise, named
from aio_ckpt.runtime.futures import follow
from aio_ckpt.runtime.portal import Portal, run_blocking
from aio_ckpt.runtime.waiting import WaitWarning, call_text
from aio_ckpt.ticket import Milestone, SaveTicket, finish

J = TypeVar("J", bound=Job)
W = TypeVar("W", bound=WriteJob)
_log = logging.getLogger("aio_ckpt")
CallsByPath: TypeAlias = tuple[tuple[Path, Future[None]], ...]
"""Path and end of calls that save or remove at a path, in the order of the calls."""

MAX_CALLS = sys.maxsize
"""Larger than the number of any call."""


class JobQueue:
    """The table of pending saves, of steps, paths and files: their room, order, end, and failures.

    Invariant: a save is in the table from :meth:`add` until it is finished. The table holds at most ``max_in_flight``
    saves, and as many files. A failure that no waiter has seen stays here until it is raised once.
    """

    def __init__(
        self,
        ctx: EngineContext,
        portal: Portal,
        steps: KnownSteps,
        removals: RemovePipeline,
        recorder: OutcomeRecorder,
        root_session: RootSession,
        mirror_queue: MirrorQueue | None,
    ) -> None:
        self._ctx = ctx
        self._portal = portal
        self._removals = removals
        self._recorder = recorder
        self._root_session = root_session
        self._mirror_queue = mirror_queue
        self._max = ctx.config.max_in_flight
        self.steps = steps
        self._changed = Condition()
        self._calls = 0
        self._saves: deque[int] = deque(maxlen=self._max + 1)  # numbers of the newest calls of save()
        self._counted: deque[tuple[int, object]] = deque()  # calls that take their steps once the ranks have met
        self._jobs: list[Job] = []
        # Of the last save that came into the table. An error that was not reported yet keeps its ticket.
        self._newest: Callable[[], SaveTicket | None] = lambda: None
        self._unreported: list[tuple[int, SaveTicket]] = []  # with the number of the call
        self._is_closing = False

    # -- room -----------------------------------------------------------------------------------------

    def wait_for_room(
        self, kind: type[WriteJob], target: object, when_busy: BusyPolicy, deadline: Deadline
    ) -> float | None:
        """Wait until fewer than ``max_in_flight`` jobs of ``kind`` are pending.

        Without a deadline, this waits as long as it takes: each pending save has its own limits.

        Returns:
            The seconds waited; None if the save is to be skipped.

        Raises:
            BusyError: there is no room and ``when_busy="raise"``.
            StallError: there was no room by the deadline of this save, which names ``target`` if it is given.
            EngineClosedError: the engine is closed, or was closed meanwhile.
        """
        began, warning = time.perf_counter(), self.wait_warning(kind.kind, target, kind=kind)
        while True:
            pause_secs = warning.pause_secs(deadline.left_secs(MAX_SECS))  # logs, so it is not under the lock
            with self._changed:
                pending = self._of(kind)
                if self._is_closing or len(pending) < self._max:
                    self.check_open()
                    return time.perf_counter() - began
                if when_busy == "skip":
                    return None
                if when_busy == "raise":
                    raise BusyError(
                        f"the save of {pending[0].title} is pending: await engine.ready() first, or raise max_in_flight"
                    )
                deadline.check(target, f"waiting for the save of {pending[0].title} to end")
                self._changed.wait(pause_secs)

    def wait_warning(
        self, call: str, step: object = None, *, kind: type[WriteJob] = WriteJob, others: Callable[[], str] = lambda: ""
    ) -> WaitWarning:
        """Return the warning about a wait of ``call``, of ``step`` if it is given, for the oldest job of ``kind``.

        If none is pending, it names what ``others`` returns, and otherwise deletions.
        """

        def describe(waited: str) -> str:
            what = call_text(call, step)
            for oldest in self.pending(kind)[:1]:
                return (
                    f"{what} has waited {waited} for the save of {oldest.title}, which is {oldest.activity} "
                    f"(max_in_flight={self._max})"
                )
            return f"{what} has waited {waited} for {others() or 'deletions in the background'}"

        return WaitWarning(describe, step=step if type(step) is int else None, rank=self._ctx.rank)

    def check_open(self) -> None:
        """Raise EngineClosedError if no save may enter any more."""
        if self._is_closing:
            raise EngineClosedError

    def close(self) -> None:
        """Let no save enter from now on. Calls that wait get EngineClosedError.

        Raises:
            WrongThreadError: the caller is the engine's own thread, on which pending saves run.
        """
        self._portal.check_thread("close()")
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()

    def pending(self, kind: type[J]) -> tuple[J, ...]:
        """Return the jobs of ``kind`` that are not finished, oldest first; ``Job`` for all."""
        with self._changed:
            return tuple(self._of(kind))

    def _of(self, kind: type[J]) -> list[J]:
        """Return the pending jobs of ``kind``. Call this under the lock."""
        return [job for job in self._jobs if isinstance(job, kind)]

    @property
    def pending_count(self) -> int:
        """Number of pending calls of ``save()``. Takes no lock, so that a signal handler may read it."""
        return len(self._of(SaveJob))

    @property
    def leases(self) -> list[Lease]:
        """Memory of the pending jobs."""
        with self._changed:
            return [part.image.lease for job in self._jobs if isinstance(job, WriteJob) for part in job.parts]

    def room(self) -> Room:
        """Return whether another save may enter now, and up to which call all have finished."""
        with self._changed:
            pending = self._of(SaveJob)
            return Room(len(pending) < self._max, pending[0].number - 1 if pending else self._calls)

    @property
    def finished_by_now(self) -> int:
        """Number of the newest call of ``save()`` that has to be finished before the last one may enter; 0 for none.

        Removals and other calls are numbered with the saves, and take no room.
        """
        return self._saves[0] if len(self._saves) > self._max else 0

    def wait_finished(self, step: object, through: int, deadline: Deadline) -> None:
        """Wait until no save of a call up to number ``through`` is pending. Errors name ``step`` if it is given."""
        warning = self.wait_warning("save", step, kind=SaveJob)
        while True:
            pause_secs = warning.pause_secs(deadline.left_secs(MAX_SECS))
            with self._changed:
                pending = self._of(SaveJob)
                if not pending or pending[0].number > through:
                    return
                deadline.check(step, f"waiting for the save of {pending[0].title} to end")
                self._changed.wait(pause_secs)

    @property
    def finished_before_room(self) -> Future[None] | None:
        """Return the end of the oldest save if the table is full, else None."""
        with self._changed:
            pending = self._of(SaveJob)
            return pending[0].finished if len(pending) >= self._max else None

    # -- one save -------------------------------------------------------------------------------------

    def _check_thread(self, what: str) -> None:
        self._portal.check_thread(what)
        if self._mirror_queue is not None:
            self._mirror_queue.check_thread(what)

    def assign_ticket(self, job: W) -> W:
        """Give a new save its ticket and its turn. :meth:`add` puts it into the table."""

        def cancel() -> bool:
            return self._portal.call(job.cancel, timeout=self._ctx.config.stall_timeout_secs, what="cancel()")

        job.ticket = SaveTicket(
            step=job.step or 0,
            path=job.target if isinstance(job.target, Path) else None,
            portal_check=self._check_thread,
            cancel=cancel,
            fence=job.fence,
            progress=lambda: job.so_far,
            waited_secs=job.timer.waited_secs,
        )
        kinds = (SaveJob, RemoveJob) if isinstance(job, SaveJob) else type(job)
        with self._changed:
            job.earlier = tuple(other.turn_ended for other in self._jobs if isinstance(other, kinds))
        job.round.advance(SaveState.CAPTURING)
        return job

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

    def add(self, job: WriteJob) -> None:
        """Put a save into the table."""
        with self._changed:
            self.check_open()  # again: close() waits only for saves that are in the table then
            self._jobs.append(job)
            if isinstance(job, SaveJob):
                self._newest = weakref.ref(job.ticket)

    def start(self, job: WriteJob, run: Callable[..., Coroutine[Any, Any, SaveReport]], *args: object) -> None:
        """Begin ``run(*args)`` on the loop: what is left of a save until its commit. :meth:`finish` follows."""
        self._portal.submit(run, *args, on_done=functools.partial(self.finish, job))
        job.is_submitted = True

    def forget_failure(self, job: WriteJob) -> None:
        """Drop the failure of a save: its own call raises it."""
        with self._changed:  # a kept traceback would keep the caller's state alive
            self._unreported = [entry for entry in self._unreported if entry[1] is not job.ticket]

    def finish(self, job: WriteJob, done: Future[SaveReport]) -> None:
        """Do what follows a save whose pipeline has ended or will never begin: first the table, then the ticket.

        The first call counts.
        """
        if job.finished.done():
            return
        error = SaveCancelledError("the engine was closed") if done.cancelled() else done.exception()
        if job.round.is_committing and isinstance(error, (EngineClosedError, SaveCancelledError)):
            job.round.lose(error)
        outcome = done.result() if error is None else error
        try:
            with logged_errors(f"the outcome of the save of {job.title} was not recorded"):
                if error is not None:
                    for part in job.parts:
                        part.image.fail_slots(error)  # a pipeline that never began has not done it
                self._recorder.record(job, outcome, newest=self.steps.newest(()))
                if isinstance(job, SaveJob) and error is None:
                    self._root_session.delete_expired(job.step)
        finally:  # in any case: close() and later saves wait for a save that stays in the table
            self._leave(job, error)
            if error is None:
                self._mirror(job)  # first: close() lets no copy begin once the save has finished
            job.finished.set_result(None)
            finish(job.ticket, outcome)
        self._recorder.call_back(job, outcome)  # last: a slow callback delays no waiter, and no save() that waits

    def _mirror(self, job: WriteJob) -> None:
        """Offer a step that was committed to the mirror. Its pass of retention, on this loop, has not begun yet."""
        mirrored = job.ticket.mirrored
        if isinstance(job, SaveJob) and job.step is not None and self._mirror_queue is not None:
            self._mirror_queue.offer(job.step, mirrored, replaces=job.call.overwrite)
        else:
            mirrored.resolve(None)

    def _leave(self, job: WriteJob, error: BaseException | None) -> None:
        """Take a save that has ended out of the table."""
        with self._changed:
            self._jobs = [other for other in self._jobs if other is not job]
            if job.step is not None:
                self.steps.finish(job.step, is_committed=error is None)
            if error is not None and not isinstance(error, SaveCancelledError) and not _was_raised_elsewhere(error):
                self._unreported.append((job.number, job.ticket))
            self._changed.notify_all()

    # -- removals and paths ---------------------------------------------------------------------------

    def remove(self, path: Path, number: int) -> Milestone[None]:
        """Start the removal of the checkpoint at ``path``, in its place between the commits of other calls.

        Raises:
            EngineClosedError: the engine was closed.
        """
        with self._changed:
            self.check_open()
            job = RemoveJob(
                target=path,
                number=number,
                tickets=self._awaited_by_removal(),
                done=Milestone(f"removal of {path}", self._portal.check_thread),
            )
            self._jobs.append(job)
        try:
            self._portal.submit(self._removals.run, job, on_done=functools.partial(self._finish_removal, job))
        except BaseException:
            self._take_out(job)
            raise
        return job.done

    def _finish_removal(self, job: RemoveJob, done: Future[None]) -> None:
        error = EngineClosedError("the engine was closed") if done.cancelled() else done.exception()
        try:
            if error is not None:
                with logged_errors(f"remove({job.path}) failed, and no log line says so"):
                    _log.warning("remove(%s) failed: %s", job.path, named(error))
        finally:
            if not job.freed.done():
                job.freed.set_result(None)
            self._take_out(job)
            job.finished.set_result(None)
            if error is None:
                job.done.resolve(None)  # does nothing if the removal was dropped
            else:
                job.done.fail(error)

    def _take_out(self, job: Job) -> None:
        with self._changed:
            self._jobs = [other for other in self._jobs if other is not job]

    def _awaited_by_removal(self) -> tuple[SaveTicket, ...]:
        """Return the tickets of the saves whose failure drops a removal that is called now. Call this under the lock.

        The last save counts although it may have failed before the call: it may fail faster than the caller goes on.
        A failure that the caller knows does not count: the removal may be what makes room.
        """
        pending = [save.ticket for save in self._of(SaveJob)]
        newest = self._newest()
        earlier = [] if newest is None or newest in pending else [newest]
        return tuple(ticket for ticket in (*earlier, *pending) if not ticket.committed.observed)

    async def await_calls(self, call: str, path: object, calls: CallsByPath) -> None:
        """Wait for those of ``calls`` that save or remove at ``path``; for all of them if that is None.

        A path that is none names no call. A call that fails ends the wait, too. The wait has no deadline of its own,
        because each pending save has its limits. ``call`` names the waiting call in the log.
        """
        with contextlib.suppress(ConfigError), self.wait_warning(call).on_loop():
            place = None if path is None else check_place("path", path)
            for other, finished in calls:
                if finished.done():
                    continue
                if place is None or await run_blocking(self._ctx.executor, is_same_place, place, other):
                    await asyncio.wrap_future(follow(finished))

    def calls_by_path(self) -> CallsByPath:
        """Return path and end of each pending save by path, and of each removal."""
        with self._changed:
            saves = [(save.call.path, save.finished) for save in self._of(SaveJob)]
            removals = [(job.path, job.freed) for job in self._of(RemoveJob)]
        return tuple((path, finished) for path, finished in (*saves, *removals) if path is not None)

    def calls_before_load(self, step: object, path: object) -> CallsByPath:
        """Return the pending calls that a load of ``step`` or ``path`` may wait for: those that change what it finds.

        Without a path, these are the pending saves of ``step``, or of any step if that is None.
        """
        wanted, ctx = step_numbers.whole_number(step), self._ctx
        with self._changed:
            saves = [(job.step, job.finished) for job in self._jobs if job.step is not None]
        if type(wanted) is int:
            saves = [(own, finished) for own, finished in saves if own == wanted]
        steps = tuple((ctx.root / ctx.names.name(own), finished) for own, finished in saves)
        return steps if path is None else (*steps, *self.calls_by_path())

    # -- steps ----------------------------------------------------------------------------------------

    @property
    def pending_steps(self) -> list[int]:
        """Steps of the saves that are not finished, without the saves by path."""
        with self._changed:
            return [job.step for job in self._jobs if job.step is not None]

    def count_call(self, number: int, step: object) -> None:
        """Count call ``number`` of ``save()``. Of several ranks it takes its step, however it ends: all count alike."""
        if self._ctx.members.are_several:
            self._counted.append((number, step))
            if self._ctx.members.opened.done():
                self.take_steps()

    def take_steps(self) -> None:
        """Take the steps of the calls that were counted before the ranks had met."""
        while self._counted:
            self.claim_step(*self._counted.popleft())

    def claim_step(self, number: int, step: object) -> int:
        """Take the step of call ``number``; see :meth:`KnownSteps.claim`."""
        claimed = self.steps.claim(number, step, self.pending_steps, agreed=self._ctx.members.newest_step)
        if claimed != step:
            self._ctx.members.coordinator.begin_call(Topic("save", number), step=claimed)
        return claimed

    # -- failures -------------------------------------------------------------------------------------

    def take_unreported(self, through: int) -> SaveTicket | None:
        """Return the ticket of the oldest failure that nobody has awaited, which counts as reported from now on.

        Only calls up to number ``through`` count: a later call takes the others, as on the other ranks. None if there
        is no such failure, or with ``on_failure="log"``.
        """
        raises = self._ctx.config.on_failure == "raise"
        with self._changed:
            unseen = [entry for entry in self._unreported if not entry[1].committed.observed]
            failed = [entry for entry in unseen if entry[0] <= through][:1] if raises else []
            self._unreported = [entry for entry in unseen if entry not in failed] if raises else []
        return failed[0][1] if failed else None


def raise_failure(failed: SaveTicket, *, made: SaveTicket | None = None) -> None:
    """Raise the failure of a background save. ``made``: the save that the same call made all the same."""
    kept = failed.exception()
    if kept is not None:
        error = copy_to_raise(kept)
        error.add_note(f"this is the background save of {title(failed.path or failed.step)}, which nobody awaited")
        if made is not None:
            with contextlib.suppress(AttributeError):  # a type with slots
                error.ticket = made  # type: ignore[attr-defined]
        raise error


def note_failure(error: BaseException, failed: SaveTicket) -> None:
    """Note on ``error``, with which a call of ``save()`` ends, that an earlier background save had failed, too."""
    earlier = failed.exception()
    if earlier is not None:
        text = "before this call, the background save of %s had failed, which nobody awaited: %s"
        error.add_note(text % (title(failed.path or failed.step), named(earlier)))


def _was_raised_elsewhere(error: BaseException) -> bool:
    """Return whether ``save()`` raised ``error`` on another rank. Raised here again, it would be sent there again."""
    return isinstance(error, PeerFailedError) and error.stage == CALL_STAGE
