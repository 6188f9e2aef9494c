"""Texts of values, as commands show them: durations, ages, times, numbers with their nouns, what the caller stored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

_AGES = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


def printable(text: str) -> str:
    """Return ``text`` with control characters escaped: names come from files of others and could steer a terminal."""
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")


def clock_text(secs: float) -> str:
    """Return a duration as ``3 s``, ``2:05 min`` or ``1:02 h``."""
    whole = max(round(secs), 0)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02} h"


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


def plural(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 leaf``, ``2 checkpoints``."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun[:-1] + 'ves' if noun.endswith('f') else noun + 's'}"
