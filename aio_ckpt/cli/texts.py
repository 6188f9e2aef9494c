"""Texts of values in the tables of the command line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from aio_ckpt.cli.console import printable

__all__ = ["age_text", "extra_text", "metrics_text", "percent_text", "plural", "time_text"]

_AGES = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


def age_text(secs: float) -> str:
    """Return a duration in its largest whole unit, with two at most digits up to days: ``3 h``."""
    secs = max(secs, 0.0)
    unit, length = next(((unit, length) for unit, length in _AGES if secs >= 2 * length), _AGES[-1])
    return f"{secs // length:.0f} {unit}"


def time_text(unix: float | None) -> str:
    """Return a time in seconds since 1970 as local date and time; - for None."""
    if unix is None:
        return "-"
    try:
        return datetime.fromtimestamp(unix).astimezone().isoformat(" ", "seconds")
    except (OverflowError, ValueError, OSError):  # a number that no clock ever showed
        return "?"


def metrics_text(metrics: Mapping[str, float | None]) -> str:
    """Return what ``save(metrics=)`` was given as ``loss=0.25 acc=0.9``; - if it was given nothing."""
    values = ((name, "not finite" if value is None else f"{value:.6g}") for name, value in metrics.items())
    return printable(" ".join(f"{name}={value}" for name, value in values)) or "-"


def extra_text(extra: Mapping[str, Any]) -> str:
    """Return what ``save(extra=)`` was given as ``loss=1.23 epoch=4``; - if it was given nothing."""
    return printable(" ".join(f"{name}={_extra_value(value)}" for name, value in extra.items())) or "-"


def _extra_value(value: object) -> str:
    if isinstance(value, str):
        return value
    return f"{value:.6g}" if isinstance(value, float) else json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def percent_text(part: int, whole: int) -> str:
    """Return ``part`` of ``whole`` in per cent."""
    return f"{100 * part / whole:.0f}%" if whole else "-"


def plural(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 leaf``, ``2 checkpoints``."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun[:-1] + 'ves' if noun.endswith('f') else noun + 's'}"
