"""Trace of one save: spans on lanes, rendered as Chrome trace JSON (Perfetto, chrome://tracing). Touches no file.

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

__all__ = ["CALLER", "COPIES", "STAGES", "SUMS", "Recorder", "Span", "SpanRecorder", "render"]

CALLER = "save() on the caller's thread"
COPIES = "copies from devices"
STAGES = "stages"
SUMS = "captured, summed"
_FIRST_LANES = (CALLER, COPIES, STAGES, SUMS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Something that took time."""

    name: str
    lane: str
    """Row of the trace; on one lane, spans lie beside or inside each other."""
    began: float
    """Seconds by the clock of the recorder."""
    ended: float
    """Seconds by the same clock, at least ``began``."""
    details: Mapping[str, object]
    """Arguments that the viewer shows with the span."""


class Recorder(Protocol):
    """Told where the time of one save goes, by whichever thread spends it."""

    def span(self, name: str, lane: str, **details: object) -> AbstractContextManager[None]:
        """The block is a span."""

    def add(self, name: str, lane: str, began: float, ended: float, **details: object) -> None:
        """A span that was measured by ``time.perf_counter``."""

    def stage(self, name: str | None) -> None:
        """On the lane ``STAGES`` one ends here and ``name``, if it is none, begins. Called by one thread."""


class SpanRecorder:
    """Keeps the spans of one save."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._spans: list[Span] = []
        self._open: dict[object, Span] = {}
        self._stage: object = None

    @contextlib.contextmanager
    def span(self, name: str, lane: str, **details: object) -> Iterator[None]:
        """See :class:`Recorder`; a block that raises is marked with the error's type."""
        key = self._begin(name, lane, details, self._clock())
        try:
            yield
        except BaseException as error:
            details["error"] = type(error).__name__
            raise
        finally:
            self._end(key, self._clock())

    def add(self, name: str, lane: str, began: float, ended: float, **details: object) -> None:
        """See :class:`Recorder`."""
        self._spans.append(Span(name=name, lane=lane, began=began, ended=ended, details=details))

    def stage(self, name: str | None) -> None:
        """See :class:`Recorder`."""
        now, before = self._clock(), self._stage
        self._stage = None if name is None else self._begin(name, STAGES, {}, now)
        if before is not None:
            self._end(before, now)

    def spans(self) -> list[Span]:
        """All so far; what goes on ends now."""
        now = self._clock()
        going_on = [replace(span, ended=now) for span in list(self._open.values())]
        return [*self._spans, *going_on]

    def _begin(self, name: str, lane: str, details: Mapping[str, object], now: float) -> object:
        key = object()
        self._open[key] = Span(name=name, lane=lane, began=now, ended=now, details=details)
        return key

    def _end(self, key: object, now: float) -> None:
        self._spans.append(replace(self._open.pop(key), ended=now))


def render(spans: Sequence[Span], *, origin: float, rank: int, about: Mapping[str, object], error: str | None) -> bytes:
    """The trace as JSON. Times count from ``origin``; one process, the rank; one thread a lane.

    Args:
        spans: of one save, as they ended.
        origin: the call of ``save()``, by the spans' clock.
        rank: the process of the trace, so that traces of several ranks can be laid side by side.
        about: what the whole is about.
        error: what the save failed with, shown where its last span ends.
    """
    lanes = sorted({span.lane for span in spans}, key=_lane_order)
    threads = {lane: number for number, lane in enumerate(lanes)}
    events: list[dict[str, object]] = [_named("process_name", rank, 0, f"aio_ckpt, rank {rank}")]
    for lane, thread in threads.items():
        events.append(_named("thread_name", rank, thread, lane))
        events.append(
            {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": thread, "args": {"sort_index": thread}}
        )
    # Ends are rounded, not durations: else what ends with what it lies in could seem to end behind it.
    ordered = list(reversed(spans))  # of equals the outer one ended, and so came, last
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
