"""Counters of the saves of one engine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from aio_ckpt.errors import SaveCancelledError
from aio_ckpt.reports import SaveReport, StageTimings
from aio_ckpt.runtime.ctrl_c import Lock


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
