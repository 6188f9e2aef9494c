"""Progress in bytes: one bar with rate and remaining time, which ends full."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aio_ckpt.cli.console import Screen
from aio_ckpt.reports import amount

__all__ = ["bytes_progress", "duration_text", "pace_words"]

_PARTS = 1000
"""Steps of a bar."""


@contextmanager
def bytes_progress(screen: Screen, label: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress. The yielded function takes the bytes done so far, and those in all."""
    with screen.progress(label, _PARTS) as advance:
        begin = time.monotonic()

        def on_progress(done: int, total: int) -> None:
            words = pace_words(done, total, time.monotonic() - begin)
            advance(_PARTS * done // total if total else _PARTS, words)

        yield on_progress


def pace_words(done: int, total: int, secs: float) -> str:
    """Return how much of how much, how fast, and how long it will still take: ``1 GB of 3 GB, 1 GB/s, 2 s left``."""
    rate = done / secs if secs > 0 else 0.0
    said = f"{amount(done)} of {amount(total)}, {amount(rate)}/s"
    return f"{said}, {duration_text((total - done) / rate)} left" if rate else said


def duration_text(secs: float) -> str:
    """Return a duration as ``3 s``, ``2:05 min`` or ``1:02 h``."""
    whole = max(round(secs), 0)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02} h"
