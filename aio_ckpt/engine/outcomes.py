"""Outcomes of saves and loads: logged, passed to the callbacks of ``EngineConfig``, explained, and counted.

Invariant: no function of this module raises. A log handler or a callback that fails never breaks a save or a load.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import anyio

from aio_ckpt.argument_checks import command_line
from aio_ckpt.engine.capture_resources import CaptureResources
from aio_ckpt.engine.context import EngineContext
from aio_ckpt.engine.job import FileJob, WriteJob
from aio_ckpt.errors import AioCkptError, SaveCancelledError
from aio_ckpt.reports import LoadReport, ReadReport, SaveReport, StageTimings, Target, amount, step_of, title
from aio_ckpt.runtime.ctrl_c import Lock
from aio_ckpt.runtime.error_notes import named
from aio_ckpt.runtime.log_records import is_logged, log_step
from aio_ckpt.storage.local import names_in
from aio_ckpt.write.full_disk import LOOK_SECS, explain_full_disk, is_disk_full

_log = logging.getLogger("aio_ckpt")
T = TypeVar("T")


def log_commit(report: SaveReport, target: Target, *, rank: int, world_size: int) -> None:
    """Log one line of a committed save: INFO on rank 0, DEBUG on the others, so that a run of many ranks logs one."""
    level, timings = logging.DEBUG if rank else logging.INFO, report.timings
    if not is_logged(level):
        return
    log_step(
        level,
        step_of(target),
        rank,
        "%s committed: %s durable after %s; save() blocked %s, staged after %s",
        title(target),
        _size(report.image_bytes, rank, world_size),
        _took(report.image_bytes, timings.committed_secs),
        duration(timings.blocked_secs),
        duration(timings.staged_secs),
    )


def log_load(report: LoadReport | ReadReport, secs: float, *, rank: int, world_size: int) -> None:
    """Log one line of a load or a read that took ``secs``: INFO on rank 0, DEBUG on the others."""
    level = logging.DEBUG if rank else logging.INFO
    if not is_logged(level):
        return
    log_step(
        level,
        report.step,
        rank,
        "%s %s: %s in %s, %s",
        f"step {report.step}" if report.step > 0 else str(report.path),  # 0: of save(path=), or a first step
        "loaded" if isinstance(report, LoadReport) else "read",
        _size(report.bytes_read, rank, world_size),
        _took(report.bytes_read, secs),
        "verified" if report.verified else "not verified",
    )


def log_failure(error: BaseException, target: Target, *, stage: str, rank: int, newest: int | None) -> None:
    """Log one ERROR line of a failed save: its cause, and what is still good. ``newest`` is the newest committed step.

    ``stage`` counts only if ``error`` names none.
    """
    is_in_doubt, failed_stage = False, stage
    if isinstance(error, AioCkptError):
        is_in_doubt, failed_stage = error.in_doubt, error.stage or stage
    if isinstance(target, Path):
        good = "what was at its path is unchanged"
    else:
        good = "no step is committed yet" if newest is None else f"the newest committed step is {newest}"
    log_step(
        logging.ERROR,
        step_of(target),
        rank,
        "the save of %s failed: %s (rank %d, stage %s); %s%s",
        title(target),
        named(error),
        rank,
        failed_stage,
        f"{title(target)} may still become visible; without it, " if is_in_doubt else "",
        good,
    )


def log_file(path: Path, outcome: SaveReport | BaseException) -> None:
    """Log one line of a file that is committed, or that failed to be saved at ``path``."""
    if isinstance(outcome, SaveReport):
        timings = outcome.timings
        _log.info(
            "%s: %s durable after %s; save_file() blocked %s, staged after %s",
            outcome.path,
            amount(outcome.image_bytes),
            duration(timings.committed_secs),
            duration(timings.blocked_secs),
            duration(timings.staged_secs),
        )
    elif not isinstance(outcome, SaveCancelledError):
        good = "what was at its path is unchanged"
        if isinstance(outcome, AioCkptError) and outcome.in_doubt:
            good = "the new one may be in its place, and a power loss may undo that"
        _log.error("saving %s failed: %s; %s", path, named(outcome), good)


@contextlib.contextmanager
def logged_errors(what: str) -> Iterator[None]:
    """Log an error of the block, after ``what``, in the place of raising it. For work that must not stop what follows.

    A handler of the log that raises does not stop it, either.
    """
    try:
        yield
    except Exception:  # noqa: BLE001 - whatever a log handler or a counter raises
        with contextlib.suppress(Exception):
            _log.exception("%s", what)


def duration(secs: float) -> str:
    """Return a number of seconds for a log line: ``4 ms``, ``3.21 s``, ``125 s``."""
    if secs < 0.9995:
        return f"{secs * 1000:.0f} ms"
    return f"{secs:.2f} s" if secs < 99.995 else f"{secs:.0f} s"


def _size(nbytes: int, rank: int, world_size: int) -> str:
    """Return bytes for a log line: ``8.53 GB``, or ``8.53 GB by rank 0 of 8``."""
    return amount(nbytes) if world_size == 1 else f"{amount(nbytes)} by rank {rank} of {world_size}"


def _took(nbytes: int, secs: float) -> str:
    """Return time and rate for a log line: ``3.21 s (2.66 GB/s)``."""
    return f"{duration(secs)} ({amount(nbytes / max(secs, 1e-9))}/s)"


# -- a full disk ------------------------------------------------------------------------------------


async def explain_failure(error: BaseException, ctx: EngineContext, needed_bytes: int, target: Target) -> None:
    """Add to the text of ``error`` what the save of ``target`` needs, if the disk is full; see explain_full_disk."""
    if not is_disk_full(error):
        return
    if isinstance(target, Path):
        remedy = "delete an older checkpoint: engine.remove(path)"
    else:
        remedy = older_step(ctx.root, await _steps_in_sight(ctx), ctx.config.keep_last)
    whose = "" if ctx.world_size == 1 else f" of rank {ctx.rank} of {ctx.world_size}"
    await explain_full_disk(error, ctx.storage, ctx.root, needed_bytes, whose=whose, remedy=remedy)


async def _steps_in_sight(ctx: EngineContext) -> int:
    """Return the number of steps in the root; 0 if it cannot be listed in time."""
    with anyio.move_on_after(LOOK_SECS), contextlib.suppress(AioCkptError):
        return sum(ctx.names.step(name) is not None for name in await names_in(ctx.storage, ctx.root))
    return 0


def older_step(root: Path, steps: int, keep_last: int | None) -> str:
    """Return the remedy of a full disk for the save of a step, in a root that holds a number of ``steps``."""
    # Retention deletes only after a commit, which a full disk prevents: keep_last helps the next run only.
    kept, needed = ("N", "N + 2") if keep_last is None else (keep_last, keep_last + 2)
    room = f"keep_last={kept} needs room for {needed} steps, as one is deleted while the next is written"
    if steps < 2:
        look = f"{command_line('du', root)} shows what else is there"
        return f"save to another disk: there is no older step to delete, and {room}; {look}"
    prune = command_line("prune", root, "--keep-last", 1, "--yes")
    return f"delete an older step: engine.delete(step), or {prune} once the trainer has ended; {room}"


# -- counters ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Counters at one instant; see :class:`aio_ckpt.reports.EngineStats`."""

    committed: int = 0
    failed: int = 0
    skipped: int = 0
    committed_bytes: int = 0
    blocked_secs: float = 0.0
    stage_secs: Mapping[str, float] = field(default_factory=lambda: stage_secs(StageTimings()))
    last_commit: tuple[int, float] | None = None
    """Step of the last commit of a step, and ``time.monotonic`` then."""

    def age_secs(self, step: int | None) -> float | None:
        """Return the seconds since the commit of ``step``; None if it is not that of the last commit."""
        if self.last_commit is None or self.last_commit[0] != step:
            return None
        return time.monotonic() - self.last_commit[1]


class Statistics:
    """Counts the saves of one engine. A reader takes ``counters`` as a whole and waits for no lock."""

    def __init__(self) -> None:
        self.counters = Counters()
        self._lock = Lock()  # a save is skipped on the caller's thread and finished on the loop

    def skip(self) -> None:
        """Count a skipped save."""
        with self._lock:
            self.counters = replace(self.counters, skipped=self.counters.skipped + 1)

    def count(self, outcome: SaveReport | BaseException, step: int | None) -> None:
        """Count a save that is finished. ``step`` is None if it was saved by path."""
        with self._lock:
            before = self.counters
            if isinstance(outcome, SaveReport):
                self.counters = replace(
                    before,
                    committed=before.committed + 1,
                    committed_bytes=before.committed_bytes + outcome.image_bytes,
                    blocked_secs=before.blocked_secs + outcome.timings.blocked_secs,
                    stage_secs={
                        stage: before.stage_secs[stage] + secs for stage, secs in stage_secs(outcome.timings).items()
                    },
                    last_commit=before.last_commit if step is None else (step, time.monotonic()),
                )
            elif not isinstance(outcome, SaveCancelledError):
                self.counters = replace(before, failed=before.failed + 1)


def stage_secs(timings: StageTimings) -> dict[str, float]:
    """Return the duration of each stage of one save, in seconds. Their sum is ``committed_secs``.

    Only the leader knows when the ranks had agreed. On another rank, all after ``synced_secs`` counts as ``agree``.
    """
    ends = {
        "wait": timings.waited_secs,
        "plan": timings.waited_secs + timings.plan_secs,
        "capture": timings.staged_secs,
        "write": timings.synced_secs,
        "agree": timings.agreed_secs or timings.committed_secs,
        "commit": timings.committed_secs,
    }
    secs, start = {}, 0.0
    for stage, end in ends.items():
        secs[stage] = max(0.0, end - start)
        start = max(start, end)
    return secs


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
