"""Capture of a job on the caller's thread: it submits the pipeline with the first chunks."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from aio_ckpt.engine.capture_resources import CaptureResources
from aio_ckpt.engine.context import EngineContext
from aio_ckpt.engine.job import WriteJob
from aio_ckpt.engine.job_queue import JobQueue
from aio_ckpt.engine.job_runner import Pipeline, run_job
from aio_ckpt.errors import EngineClosedError, SaveCancelledError, StallError
from aio_ckpt.plan.save_plan import PlannedImage
from aio_ckpt.ranks.membership import CALL_STAGE
from aio_ckpt.runtime.error_notes import note_stage
from aio_ckpt.runtime.futures import failed
from aio_ckpt.runtime.log_records import is_logged
from aio_ckpt.runtime.portal import Portal
from aio_ckpt.snapshot.capture import Capture, capture
from aio_ckpt.snapshot.captured_chunks import CapturedRun
from aio_ckpt.write.part import Part

W = TypeVar("W", bound=WriteJob)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCapturer:
    """Captures the jobs of one engine. Its caller holds the engine's lock."""

    ctx: EngineContext
    portal: Portal
    queue: JobQueue
    resources: CaptureResources

    def capture(self, job: W, pipeline: Pipeline[W], parts: Iterable[tuple[PlannedImage, Part]]) -> None:
        """Run ``pipeline`` and capture each part in its turn. The first chunks are written while later ones are copied.

        ``parts`` yields each part with its plan, and may wait for memory before. If this raises, the save is finished:
        nothing is visible and the ticket holds the error.
        """
        copies: list[tuple[Capture, Part]] = []
        copied: list[Future[None]] = []
        try:
            self.queue.add(job)  # inside the try: a save in the table that is never finished would block all later ones
            for planned, part in parts:
                job.parts.append(part)
                part.image.lease.hold(part)
                work = self._capture_part(job, pipeline, planned, part)
                copies.append((work, part))
                if work.is_done:
                    _end_copies(work, part)
                else:  # each part by itself, because the next one may need the memory
                    copied.append(self.portal.executor.submit(_end_copies, work, part))
            if is_logged(logging.DEBUG):
                job.debug(f"{job.kind}() returns")
            _after_all(copied, functools.partial(_staged, job, copied))
        except BaseException as error:
            for work, part in copies:
                _end_copies(work, part)  # no copy may still use the arena when it is given back
            for part in job.parts:
                part.image.lease.release(part)
            self._give_up(job, error)
            raise

    def _capture_part(self, job: W, pipeline: Pipeline[W], planned: PlannedImage, part: Part) -> Capture:
        """Issue the copies of a part. The first chunks that are captured submit the pipeline."""
        image, plan = part.image, planned.plan

        def captured(runs: Sequence[CapturedRun]) -> None:
            if job.is_submitted:
                self.portal.post(job.captured, part, runs)
                return
            # The loop takes the GIL when it is woken. So it is woken once, when there is something to write.
            part.chunks.add(runs)
            self.queue.start(job, run_job, self.ctx, job, pipeline)

        def issued(work: Capture) -> None:
            job.events += work.source_events
            self.resources.guards.before_next_step(work.source_events)
            job.timer.reached("blocked")  # now: the loop wakes next and may finish the save before this thread goes on

        return capture(
            planned,
            image,
            self.resources.copy_engines,
            guarded=self.resources.guards.leaves(plan.fingerprint, plan.structure),
            on_captured=captured,
            on_issued=issued,
            slot_timeout_secs=self.resources.slot_timeout_secs(image.slots * image.chunk_bytes),
        )

    def _give_up(self, job: WriteJob, error: BaseException) -> None:
        """End a save whose call is about to raise ``error``, at whatever stage it is."""
        timeout_secs = self.ctx.config.stall_timeout_secs
        # Only the call itself raises Ctrl-C. The pipeline and later saves get a SaveCancelledError.
        interrupted = SaveCancelledError(f"{job.kind}() of {job.title} was interrupted by {type(error).__name__}")
        cause = error if isinstance(error, Exception) else interrupted
        note_stage(cause, CALL_STAGE)
        try:
            self.portal.call(self._stop, job, cause, timeout=timeout_secs, what=f"{job.kind}()")
        except (EngineClosedError, StallError):  # no pipeline runs any more
            self.queue.finish(job, failed(cause))
        with contextlib.suppress(StallError):
            job.ticket.exception(timeout_secs)
        self.queue.forget_failure(job)

    async def _stop(self, job: WriteJob, cause: Exception) -> None:
        """Stop a save, on the loop: only there it is certain whether the pipeline has begun.

        If so, that finishes the save.
        """
        job.stall.fail(cause)
        if job.scope is None:  # the pipeline has not begun
            for part in job.parts:
                part.image.lease.close()
            self.queue.finish(job, failed(cause))


def _end_copies(work: Capture, part: Part) -> None:
    """Wait for the copies of a part, and end the hold of its memory for them."""
    work.finish()
    part.image.lease.release(part)


def _after_all(futures: Sequence[Future[None]], then: Callable[[], None]) -> None:
    """Call ``then`` once all ``futures`` are done: now, or on the thread of the last one."""
    if futures:
        futures[0].add_done_callback(lambda _: _after_all(futures[1:], then))
    else:
        then()


def _staged(job: WriteJob, copied: Sequence[Future[None]]) -> None:
    """Note that all copies of a save are done. If one failed, its pipeline fails, too, and finishes the ticket."""
    if all(copy.exception() is None for copy in copied):
        job.timer.reached("staged")
        if is_logged(logging.DEBUG):
            job.debug("everything is staged")
        job.ticket.staged.resolve(None)
