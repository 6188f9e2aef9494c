"""Trace of one save: spans on lanes, rendered as Chrome trace JSON for Perfetto or chrome://tracing. Pure.

Borrowed fact: the Trace Event Format (complete events ``X``, metadata ``M``, instants ``i``; microseconds).
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

CALLER = "save() on the caller's thread"
COPIES = "copies from devices"
STAGES = "stages"
SUMS = "captured, summed"
_FIRST_LANES = (CALLER, COPIES, STAGES, SUMS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Named interval of time on a lane of the trace."""

    name: str
    lane: str
    """Row of the trace. On one lane, two spans are disjoint, or one contains the other."""
    began: float
    """Seconds by the clock of the recorder."""
    ended: float
    """Seconds by the same clock, at least ``began``."""
    details: Mapping[str, object]
    """Arguments that the viewer shows with the span."""


class Recorder(Protocol):
    """Recorder of the time that one save spends. Any thread may call it."""

    def span(self, name: str, lane: str, **details: object) -> AbstractContextManager[None]:
        """Record the block as a span."""

    def add(self, name: str, lane: str, began: float, ended: float, **details: object) -> None:
        """Add a span that the caller has measured with ``time.perf_counter``."""

    def stage(self, name: str | None) -> None:
        """End the current stage on the lane ``STAGES``, and begin ``name`` unless it is None. One thread calls this."""


class SpanRecorder:
    """Recorder that keeps the spans of one save in memory."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._spans: list[Span] = []
        self._open: dict[object, Span] = {}
        self._stage: object = None

    @contextlib.contextmanager
    def span(self, name: str, lane: str, **details: object) -> Iterator[None]:
        """Record the block as a span. If the block raises, the details of the span name the error's type."""
        key = self._begin(name, lane, details, self._clock())
        try:
            yield
        except BaseException as error:
            details["error"] = type(error).__name__
            raise
        finally:
            self._end(key, self._clock())

    def add(self, name: str, lane: str, began: float, ended: float, **details: object) -> None:
        """Add a span that the caller has measured with the recorder's clock."""
        self._spans.append(Span(name=name, lane=lane, began=began, ended=ended, details=details))

    def stage(self, name: str | None) -> None:
        """End the current stage, and begin ``name`` unless it is None."""
        now, before = self._clock(), self._stage
        self._stage = None if name is None else self._begin(name, STAGES, {}, now)
        if before is not None:
            self._end(before, now)

    def spans(self) -> list[Span]:
        """Return all spans so far. A span that is still open ends now."""
        now = self._clock()
        still_open = [replace(span, ended=now) for span in list(self._open.values())]
        return [*self._spans, *still_open]

    def _begin(self, name: str, lane: str, details: Mapping[str, object], now: float) -> object:
        key = object()
        self._open[key] = Span(name=name, lane=lane, began=now, ended=now, details=details)
        return key

    def _end(self, key: object, now: float) -> None:
        self._spans.append(replace(self._open.pop(key), ended=now))


def render(spans: Sequence[Span], *, origin: float, rank: int, about: Mapping[str, object], error: str | None) -> bytes:
    """Return the trace as JSON. The rank is a process of the trace, and each lane is a thread of it.

    Args:
        spans: the spans of one save, in the order in which they ended.
        origin: time of the call of ``save()``, by the spans' clock. All times of the trace count from it.
        rank: number of the process in the trace, so that a viewer can show the traces of several ranks side by side.
        about: facts on the save, which the viewer shows for the whole trace.
        error: error of the save, shown where the last span ends; None if the save succeeded.
    """
    lanes = sorted({span.lane for span in spans}, key=_lane_order)
    threads = {lane: number for number, lane in enumerate(lanes)}
    events: list[dict[str, object]] = [_named("process_name", rank, 0, f"aio_ckpt, rank {rank}")]
    for lane, thread in threads.items():
        events.append(_named("thread_name", rank, thread, lane))
        events.append(
            {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": thread, "args": {"sort_index": thread}}
        )
    # Ends are rounded, and not durations. Otherwise a span that ends with its outer span could seem to end later.
    ordered = list(reversed(spans))  # of two spans with equal times, the outer one ended last, and so is the last
    ordered.sort(key=lambda span: (span.began, -span.ended))
    for span in ordered:
        began, ended = (round((at - origin) * 1e6, 3) for at in (span.began, span.ended))
        place = {"pid": rank, "tid": threads[span.lane], "ts": began, "dur": round(ended - began, 3)}
        events.append({"ph": "X", "name": span.name, "cat": "save", **place, "args": dict(span.details)})
    if error is not None:
        at = round((max((span.ended for span in spans), default=origin) - origin) * 1e6, 3)
        events.append(
            {"ph": "i", "name": "failed", "s": "p", "pid": rank, "tid": 0, "ts": at, "args": {"error": error}}
        )
    outcome = {} if error is None else {"error": error}
    document = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {**about, **outcome}}
    return json.dumps(document, default=str).encode()


def _lane_order(lane: str) -> tuple[int, str]:
    return (_FIRST_LANES.index(lane) if lane in _FIRST_LANES else len(_FIRST_LANES), lane)


def _named(kind: str, rank: int, thread: int, name: str) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": {"name": name}}
