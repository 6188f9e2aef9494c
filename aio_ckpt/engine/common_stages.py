"""Stages that the pipelines of states and of files have in common: the writer of a data file, and the commit."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import anyio
import anyio.lowlevel

from aio_ckpt.commit.trash import THREAD_WAIT_SECS
from aio_ckpt.engine.context import EngineContext
from aio_ckpt.engine.job import WriteJob
from aio_ckpt.errors import StallError
from aio_ckpt.ranks.save_round import SaveState
from aio_ckpt.write.throttle import WriteThrottle
from aio_ckpt.write.writer import FileWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonStages:
    """Stages of the jobs of one engine that states and files have in common."""

    ctx: EngineContext
    throttle: WriteThrottle
    """Limits the rate of writing."""

    def file_writer(self, job: WriteJob) -> FileWriter:
        """Return the writer of the data files of a job, whose writes tell that the job goes on."""
        return FileWriter(
            storage=self.ctx.storage,
            executor=self.ctx.executor,
            workers=self.ctx.config.workers,
            thread_wait_secs=THREAD_WAIT_SECS,
            admit=functools.partial(
                self.throttle.admit, is_hurried=job.deadline.secs is not None, on_wait=job.stall.touch
            ),
            on_activity=job.begin,
            on_written=job.wrote,
        )

    @contextlib.asynccontextmanager
    async def committing(self, job: WriteJob, lock: AbstractAsyncContextManager[object]) -> AsyncIterator[None]:
        """Let the block make a job visible, by renames, while it holds ``lock``.

        The block is shielded from cancellation: renames that have begun are completed or undone.

        Raises:
            StallError: the block did not end within ``stall_timeout_secs``. The job is in doubt.
        """
        limit_secs = self.ctx.config.stall_timeout_secs
        async with lock:
            await anyio.lowlevel.checkpoint_if_cancelled()  # a cancellation may have been accepted since the last wait
            job.round.advance(SaveState.COMMITTING)
            job.begin("making it visible (rename, fsync)", stage="commit")
            with anyio.move_on_after(limit_secs, shield=True) as scope:
                yield
            if scope.cancelled_caught:
                job.round.advance(SaveState.IN_DOUBT)
                error = StallError(
                    f"the commit of {job.title} did not end within {limit_secs} s: {job.place} is "
                    "stalled; it may still become visible, whole, when the disk recovers"
                )
                error.in_doubt = True
                raise error
            job.round.advance(SaveState.VISIBLE)
