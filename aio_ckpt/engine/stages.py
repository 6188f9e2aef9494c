"""The values that one save passes from stage to stage, and the save while it is pending."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import anyio

from aio_ckpt.checks import check_flag
from aio_ckpt.commit import step_numbers
from aio_ckpt.commit.manifests import MetadataFile
from aio_ckpt.commit.retention import check_metrics
from aio_ckpt.memory.copies import CopyEvent
from aio_ckpt.plan.planner import Plan
from aio_ckpt.ranks.save_round import SaveRound
from aio_ckpt.reports import StageTimings
from aio_ckpt.runtime.deadline import NO_DEADLINE, Deadline
from aio_ckpt.runtime.futures import Threads
from aio_ckpt.snapshot.image import Image
from aio_ckpt.snapshot.progress import CaptureProgress
from aio_ckpt.state.objects import ObjectBytes
from aio_ckpt.ticket import SaveTicket
from aio_ckpt.write.result import WriteResult
from aio_ckpt.write.trace_file import NO_TRACE, SaveTrace, TraceFile

__all__ = ["CALL_STAGE", "CapturedSave", "PendingSave", "SaveCall", "SaveTimer", "WrittenRank"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCall:
    """What one call of ``save()`` asks for, beside the state and its step."""

    overwrite: bool
    """Whether a committed step is replaced."""
    metrics: Mapping[str, float | None]
    """What the caller measured."""
    deadline: Deadline
    """When it must be committed."""
    started: float
    """``time.perf_counter`` at the call."""
    trace: SaveTrace = NO_TRACE
    """Told where the time goes."""
    refuse: Callable[[], SaveCall] | None = None
    """Raises why the call is refused, if it is: the other ranks are told first, under the number of the call."""

    @classmethod
    def of(
        cls,
        step: object,
        *,
        overwrite: bool,
        deadline_secs: float | None,
        metrics: Mapping[str, object] | None,
        trace: str | os.PathLike[str] | None,
    ) -> SaveCall:
        """What ``save()`` was called with just now. Raises nothing: a refusal is kept, without its traceback."""
        started, began = time.perf_counter(), time.monotonic()

        def checked() -> SaveCall:
            deadline = replace(Deadline.after(deadline_secs), began=began)
            check_flag("overwrite", overwrite)
            if step is not None:
                step_numbers.check_step_number(step)
            return cls(
                overwrite=overwrite,
                metrics=check_metrics(metrics),
                deadline=deadline,
                started=started,
                trace=NO_TRACE if trace is None else TraceFile(trace),
            )

        try:
            return checked()
        except Exception:  # noqa: BLE001 - it is raised by ``refuse``
            return cls(overwrite=False, metrics={}, deadline=NO_DEADLINE, started=started, refuse=checked)


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedSave:
    """One save whose copies are issued, and whose bytes are in the image as they end."""

    step: int
    number: int
    """Number of the call of ``save()``, the same on every rank."""
    requested: Sequence[str]
    """Names of the leaves of the state that was given to this very call, not of the cached plan."""
    plan: Plan
    """What this rank writes, and where."""
    plan_hit: bool
    """Whether the plan was reused."""
    fingerprint_hit: bool
    """Whether the copy descriptors were reused."""
    objects: ObjectBytes
    image: Image
    """The bytes of the data file."""
    progress: CaptureProgress
    """Which chunks are captured, and when something moved last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenRank:
    """What one rank has written, durably."""

    result: WriteResult
    """Of the data file."""
    metadata: MetadataFile | None
    """``.metadata``, where it depends on no other rank; else the leader renders it."""
    manifest_bytes: int
    """Length of the rank's manifest."""
    manifest_crc32: int
    """CRC32 of the rank's manifest."""


CALL_STAGE = "capture"
"""Stage of what ``save()`` itself raises."""
Reached: TypeAlias = Literal["blocked", "staged", "written", "synced", "agreed", "dir_synced"]


class SaveTimer:
    """When one save reached what, in seconds from its call."""

    def __init__(self, started: float, *, waited_secs: float, plan_secs: float) -> None:
        """``started`` is ``time.perf_counter`` at the call."""
        self._started = started
        self._waited_secs = waited_secs
        self._plan_secs = plan_secs
        self._secs: dict[Reached, float] = {}

    def elapsed(self) -> float:
        """Seconds since the call."""
        return time.perf_counter() - self._started

    def reached(self, what: Reached) -> None:
        """It is reached now; the last call counts."""
        self._secs[what] = self.elapsed()

    def secs(self, what: Reached) -> float:
        """When it was reached; 0 if it was not."""
        return self._secs.get(what, 0.0)

    def timings(self) -> StageTimings:
        """All of it, for the report of a save that is committed now."""
        return StageTimings(
            blocked_secs=self.secs("blocked"),
            waited_secs=self._waited_secs,
            plan_secs=self._plan_secs,
            staged_secs=self.secs("staged"),
            written_secs=self.secs("written"),
            synced_secs=self.secs("synced"),
            agreed_secs=self.secs("agreed"),
            dir_synced_secs=self.secs("dir_synced"),
            committed_secs=self.elapsed(),
        )


@dataclass(slots=True, kw_only=True)
class PendingSave:
    """One save between ``save()`` and its settlement: its ticket, its state, its deadline and its progress.

    Written by the caller's thread until it is submitted, then by the loop's.
    """

    call: SaveCall
    """What was asked for, the deadline included."""
    captured: CapturedSave
    """Captured bytes, their plan and their image."""
    round: SaveRound
    """Its state, and its agreement with the other ranks."""
    ticket: SaveTicket
    """What the caller holds."""
    earlier: tuple[Future[None], ...]
    """Settlements of all saves that were pending at the call: commits keep the order of the calls. The last of them
    alone would not do: it may fail while one before it goes on."""
    timer: SaveTimer
    """When it reached what."""
    threads: Threads = field(default_factory=Threads)
    """Threads that work for this save."""
    settled: Future[None] = field(default_factory=Future)
    """Committed or failed, everything cleaned up."""
    events: tuple[CopyEvent, ...] = ()
    """Behind every copy from a device."""
    activity: str = "beginning"
    """What it does now, for messages."""
    stage: str = "write"
    """Where it is, for errors: ``write``, ``agree`` or ``commit``."""
    scope: anyio.CancelScope | None = None
    """Cancels the pipeline; None until the pipeline has begun."""

    @property
    def failing_stage(self) -> str:
        """Where an error of now comes: in waves, ``save()`` itself raises it while there is more to capture."""
        is_waiting = not self.captured.image.is_whole and self.progress.is_capturing
        return CALL_STAGE if is_waiting else self.stage

    @property
    def step(self) -> int:
        """Step of the save."""
        return self.captured.step

    @property
    def number(self) -> int:
        """Number of the call of ``save()``."""
        return self.captured.number

    @property
    def progress(self) -> CaptureProgress:
        """When something moved last."""
        return self.captured.progress

    def begin(self, activity: str, *, stage: str | None = None) -> None:
        """On the loop: from now on it does this, in this stage if another one begins."""
        self.activity = activity
        self.stage = stage or self.stage
        self.call.trace.stage(activity)

    async def cancel(self) -> bool:
        """On the loop: cancel unless it is too late."""
        if self.settled.done() or not self.round.cancel():
            return False
        if self.scope is not None:
            self.scope.cancel()
        return True
