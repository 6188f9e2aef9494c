"""Run of one pipeline on the engine's loop, with its watch: cancellation, stall and deadline."""

from __future__ import annotations

import logging
from typing import Protocol, TypeVar

import anyio
import anyio.lowlevel

from aio_ckpt.engine.context import EngineContext
from aio_ckpt.engine.job import WriteJob
from aio_ckpt.errors import SaveCancelledError, StallError
from aio_ckpt.ranks.save_round import SaveState
from aio_ckpt.reports import SaveReport
from aio_ckpt.runtime.error_notes import named, note_stage
from aio_ckpt.runtime.futures import first_cause
from aio_ckpt.runtime.log_records import log_step
from aio_ckpt.runtime.portal import watch_submissions
from aio_ckpt.runtime.waiting import WaitWarning, forgiving_suspension

J_contra = TypeVar("J_contra", bound=WriteJob, contravariant=True)
J = TypeVar("J", bound=WriteJob)


class Pipeline(Protocol[J_contra]):
    """From the captured parts of a job to what is visible: one for steps and paths, one for files."""

    async def save(self, job: J_contra) -> SaveReport:
        """Write and publish."""

    async def clean_up(self, job: J_contra, cause: BaseException, stage: str) -> BaseException:
        """Remove what a save that failed with ``cause`` in ``stage`` has written. Returns the error to raise."""


async def run_job(ctx: EngineContext, job: J, pipeline: Pipeline[J]) -> SaveReport:
    """Write and commit a save whose capture has begun.

    Raises:
        SaveCancelledError: ``cancel`` was accepted.
        StallError: no progress for ``stall_timeout_secs``, or ``deadline_secs`` passed.
        Exception: the first error of any stage. Nothing is visible then. The memory is free again once the last
            thread that uses it has ended.
    """
    if job.finished.done():
        raise SaveCancelledError(f"the save of {job.title} ended before its pipeline began")
    report, job.scope = None, anyio.CancelScope()  # the deadline of the save, a stall or cancel() ends it
    try:
        with watch_submissions(job.threads.add), _stall_warning(ctx, job).on_loop(), job.scope:
            if job.round.state is SaveState.CANCELLED:
                job.scope.cancel()
            else:
                job.round.advance(SaveState.WRITING)
            async with anyio.create_task_group() as group:
                group.start_soon(_watch, ctx, job)
                report = await pipeline.save(job)
                group.cancel_scope.cancel()
        if report is None:
            raise SaveCancelledError(f"the save of {job.title} was cancelled; nothing became visible")  # noqa: TRY301
    except BaseException as error:
        cause, stage = first_cause(error), job.failing_stage
        if report is not None and isinstance(error, Exception):
            # The deadline may pass in the same turn of the loop as the leader's reply. The step is committed then.
            late, rank = "%s was committed before this came: %s", ctx.rank
            log_step(logging.WARNING, job.step, rank, late, job.title, named(cause))
            return report
        note_stage(cause, stage)
        with anyio.CancelScope(shield=True):
            cause = await pipeline.clean_up(job, cause, stage)
        if cause is error:
            raise
        raise cause from cause.__cause__
    return report


async def _watch(ctx: EngineContext, job: WriteJob) -> None:
    """Raise the failure of the capture; StallError if nothing moves for too long or the deadline passes."""
    limit_secs = ctx.config.stall_timeout_secs
    while not job.round.is_committing:  # the commit has its own limit, and is not undone
        job.deadline.check(job.target, job.activity)
        idle_left = job.stall.idle_left_secs(limit_secs)
        if idle_left <= 0:
            raise StallError(
                f"{_named(ctx, job)} made no progress for {limit_secs} s: "
                f"storage under {job.place} is stalled, it was {job.activity}"
            )
        secs = job.deadline.left_secs(idle_left)
        with forgiving_suspension(secs, job.stall.forgive, limit_secs=limit_secs), anyio.move_on_after(secs):
            await job.stall.raise_failure()


def _stall_warning(ctx: EngineContext, job: WriteJob) -> WaitWarning:
    """Return the warning about a save that makes no progress. A save that waits for another one has none."""
    whose = _named(ctx, job)

    def describe(idle: str) -> str:
        return f"{whose} has made no progress for {idle}: it is {job.activity} under {job.place}"

    return WaitWarning(describe, waited_secs=lambda: job.stall.idle_secs, step=job.step, rank=ctx.rank)


def _named(ctx: EngineContext, job: WriteJob) -> str:
    return f"the save of {job.title}" + (f" on rank {ctx.rank}" if ctx.world_size > 1 else "")
