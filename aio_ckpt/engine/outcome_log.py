"""Log lines of saves and loads that have ended."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from aio_ckpt.errors import AioCkptError, SaveCancelledError
from aio_ckpt.reports import LoadReport, ReadReport, SaveReport, Target, amount, step_of, title
from aio_ckpt.runtime.error_notes import named
from aio_ckpt.runtime.log_records import is_logged, log_step

_log = logging.getLogger("aio_ckpt")


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
