"""What follows the outcome of a save: a log line, the counters, and the callbacks of ``EngineConfig``.

Invariant: no function of this module raises. A log handler or a callback that fails never breaks a save.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from aio_ckpt.engine.capture_resources import CaptureResources
from aio_ckpt.engine.context import EngineContext
from aio_ckpt.engine.job import FileJob, WriteJob
from aio_ckpt.engine.outcome_log import log_commit, log_failure, log_file
from aio_ckpt.engine.statistics import Statistics
from aio_ckpt.errors import SaveCancelledError
from aio_ckpt.reports import SaveReport
from aio_ckpt.runtime.error_notes import named
from aio_ckpt.runtime.log_records import log_step

T = TypeVar("T")


class OutcomeRecorder:
    """Records the outcomes of the saves of one engine."""

    def __init__(self, ctx: EngineContext, resources: CaptureResources) -> None:
        self._ctx = ctx
        self._resources = resources
        self.statistics = Statistics()

    def record(self, job: WriteJob, outcome: SaveReport | BaseException, *, newest: int | None) -> None:
        """Log and count the outcome of a save that is about to finish. ``newest``: the newest committed step.

        After a failure, the cached plan is not trusted.
        """
        ctx = self._ctx
        if isinstance(job, FileJob):
            log_file(job.path, outcome)
            return
        if isinstance(outcome, BaseException):
            if not isinstance(outcome, SaveCancelledError):
                log_failure(outcome, job.target, stage=job.failing_stage, rank=ctx.rank, newest=newest)
            self._resources.cache.clear()
            ctx.members.sent.forget()
        else:
            log_commit(outcome, job.target, rank=ctx.rank, world_size=ctx.world_size)
        self.statistics.count(outcome, job.step)
        if isinstance(outcome, SaveReport) and job.step is not None:
            ctx.members.newest_step = max(job.step, ctx.members.newest_step or 0)

    def call_back(self, job: WriteJob, outcome: SaveReport | BaseException) -> None:
        """Call the user's ``on_commit`` or ``on_error`` with the outcome of a save that has finished."""
        config = self._ctx.config
        if isinstance(job, FileJob):
            return
        if isinstance(outcome, SaveReport):
            self._call("on_commit", config.on_commit, outcome, job)
        elif isinstance(outcome, Exception) and not isinstance(outcome, SaveCancelledError):
            self._call("on_error", config.on_error, outcome, job)

    def _call(self, name: str, callback: Callable[[T], object] | None, value: T, job: WriteJob) -> None:
        """Call ``callback(value)``, the setting ``name``, if it is given. If it raises, log the error."""
        if callback is None:
            return
        try:
            callback(value)
        except BaseException as error:  # noqa: BLE001 - SystemExit would end the engine's loop
            text = "%s raised at %s, which changes nothing for the save: %s"
            log_step(logging.ERROR, job.step, self._ctx.rank, text, name, job.title, named(error))
