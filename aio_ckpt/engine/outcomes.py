"""Outcomes of saves and loads, told to the log and to the callbacks of ``EngineConfig``.

Invariant: no function of this module raises. A log handler or a callback that fails never breaks a save or a load.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from aio_ckpt.errors import AioCkptError
from aio_ckpt.reports import LoadReport, ReadReport, SaveReport, amount
from aio_ckpt.runtime.log_records import is_logged, log_step

__all__ = ["call_back", "duration", "log_commit", "log_failure", "log_load", "named"]

T = TypeVar("T")


def log_commit(report: SaveReport, *, rank: int, world_size: int) -> None:
    """Log one line of a committed save: INFO on rank 0, DEBUG on the others, so that a run of many ranks logs one."""
    level, timings = logging.DEBUG if rank else logging.INFO, report.timings
    if not is_logged(level):
        return
    log_step(
        level,
        report.step,
        rank,
        "step %d committed: %s durable after %s; save() blocked %s, staged after %s",
        report.step,
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
        str(report.path) if report.step < 0 else f"step {report.step}",
        "loaded" if isinstance(report, LoadReport) else "read",
        _size(report.bytes_read, rank, world_size),
        _took(report.bytes_read, secs),
        "verified" if report.verified else "not verified",
    )


def log_failure(error: BaseException, *, step: int, stage: str, rank: int, newest: int | None) -> None:
    """Log one ERROR line of a failed save: its cause, and what is still good. ``newest`` is the newest committed step.

    ``stage`` counts only if ``error`` tells none.
    """
    is_in_doubt, told_stage = False, stage
    if isinstance(error, AioCkptError):
        is_in_doubt, told_stage = error.in_doubt, error.stage or stage
    good = "no step is committed yet" if newest is None else f"the newest committed step is {newest}"
    log_step(
        logging.ERROR,
        step,
        rank,
        "the save of step %d failed: %s (rank %d, stage %s); %s%s",
        step,
        named(error),
        rank,
        told_stage,
        f"step {step} may still become visible; without it, " if is_in_doubt else "",
        good,
    )


def call_back(name: str, callback: Callable[[T], object] | None, value: T, *, step: int, rank: int) -> None:
    """Call ``callback(value)``, the setting ``name``, if it is given. If it raises, log the error."""
    if callback is None:
        return
    try:
        callback(value)
    except BaseException as error:  # noqa: BLE001 - SystemExit would end the engine's loop
        text = "%s raised at step %d, which changes nothing for the save: %s"
        log_step(logging.ERROR, step, rank, text, name, step, named(error))


def named(error: BaseException) -> str:
    """Return type and text of ``error``. The text of a caller's exception may raise."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001
        return f"{type(error).__name__} (its text cannot be shown)"


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
