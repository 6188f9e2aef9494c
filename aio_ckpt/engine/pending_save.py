"""One save between ``save()`` and its settlement, and what all saves of one engine share."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

import anyio

from aio_ckpt.checks import check_flag
from aio_ckpt.commit import owner
from aio_ckpt.commit import publish as commit
from aio_ckpt.commit.cleanup import PendingCleanup
from aio_ckpt.commit.quarantine import Quarantine
from aio_ckpt.commit.retention import check_metrics
from aio_ckpt.config import EngineConfig
from aio_ckpt.format.names import StepNames
from aio_ckpt.memory.copies import CopyEvent
from aio_ckpt.plan.planner import Plan
from aio_ckpt.ranks.membership import Membership
from aio_ckpt.ranks.save_round import SaveRound
from aio_ckpt.rescue.segment import OrphanSnapshots, SegmentDirectory
from aio_ckpt.runtime.deadline import NO_DEADLINE, Deadline
from aio_ckpt.runtime.futures import Threads
from aio_ckpt.runtime.portal import Executor
from aio_ckpt.snapshot.image import Image
from aio_ckpt.snapshot.progress import CaptureProgress
from aio_ckpt.state.objects import ObjectBytes
from aio_ckpt.storage.local import Storage
from aio_ckpt.ticket import SaveTicket
from aio_ckpt.write.throttle import WriteThrottle
from aio_ckpt.write.trace_file import NO_TRACE, SaveTrace, TraceFile

__all__ = ["EngineContext", "PendingSave", "SaveCall", "pending_of", "save_id_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineContext:
    """What all saves of one engine share."""

    root: Path
    """Checkpoint root."""
    names: StepNames
    """Directory names of steps."""
    owner: owner.Owner
    """Who writes."""
    storage: Storage
    """Where to."""
    members: Membership
    """The ranks."""
    executor: Executor
    """The engine's I/O threads."""
    config: EngineConfig
    """Settings."""
    quarantine: Quarantine = field(default_factory=Quarantine)
    """Checkpoints that loads proved damaged."""
    segments: SegmentDirectory | None = None
    """Where shared memory is made that outlives the process."""
    kept: OrphanSnapshots = field(default_factory=OrphanSnapshots)
    """What dead trainers left there that could be rescued."""
    throttle: WriteThrottle = field(default_factory=WriteThrottle)
    """The rate of writing."""
    pending_cleanup: PendingCleanup = field(default_factory=PendingCleanup)
    """Directories that are still to be removed."""

    def slot_timeout_secs(self, nbytes: int) -> float:
        """How long ``nbytes`` of memory may take to become free: none were written for too long, throttled or not."""
        return self.config.stall_timeout_secs + self.throttle.longest_wait_secs(nbytes)


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
                commit.check_step_number(step)
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


@dataclass(slots=True, kw_only=True)
class PendingSave:
    """One save between ``save()`` and its settlement.

    WrittenMsg by the caller's thread until it is submitted, then by the loop's; ``blocked_secs`` and ``staged_secs``
    by whoever measures them.
    """

    call: SaveCall
    """What was asked for."""
    step: int
    """Its step."""
    number: int
    """Its number in the session."""
    requested: Sequence[str]
    """Names of the leaves of the state that was given to this very call, not of the cached plan."""
    plan: Plan
    """Layout."""
    plan_hit: bool
    """Whether it was reused."""
    fingerprint_hit: bool
    """Whether the descriptors were reused."""
    objects: ObjectBytes
    """Encoded objects."""
    image: Image
    """The bytes."""
    round: SaveRound
    """Its agreement with the other ranks."""
    adopt: Callable[[Plan], None]
    """Told of the plan that was agreed."""
    progress: CaptureProgress
    """Of the capture."""
    threads: Threads = field(default_factory=Threads)
    """At work for it."""
    ticket: SaveTicket
    """What the caller holds."""
    plan_secs: float
    """Time to plan."""
    earlier: tuple[Future[None], ...]
    """Settlements of all saves that were pending at the call: commits keep the order of the calls. The last of them
    alone would not do: it may fail while one before it goes on."""
    settled: Future[None] = field(default_factory=Future)
    """Committed or failed, everything cleaned up."""
    blocked_secs: float = 0.0
    """Time the caller was kept."""
    staged_secs: float = 0.0
    """When everything was copied."""
    written_secs: float = 0.0
    """When every chunk was written."""
    synced_secs: float = 0.0
    """When the data file and ``.metadata`` were durable."""
    agreed_secs: float = 0.0
    """When all ranks were."""
    dir_synced_secs: float = 0.0
    """When the directory was."""
    events: tuple[CopyEvent, ...] = ()
    """Behind every copy from a device."""
    activity: str = "beginning"
    """What the save does now, for messages."""
    stage: str = "write"
    """Where it is: ``write``, ``agree``, ``commit``."""
    has_begun: bool = False
    """The pipeline runs or has run."""
    scope: anyio.CancelScope | None = None
    """Cancels the pipeline."""
    is_handed_over: bool = False
    """All of this rank is written and told, and the leader may commit: ``cancel`` comes too late, and the deadline
    leaves it in doubt."""
    is_committing: bool = False
    """It is being made visible, or known to be: from here on the deadline comes too late, too."""
    is_visible: bool = False
    """This rank, the leader, has made it visible and durable: whatever fails now, the step is there."""
    is_cancelled: bool = False
    """``cancel`` was accepted."""

    def elapsed(self) -> float:
        """Seconds since the call."""
        return time.perf_counter() - self.call.started

    def begin(self, activity: str) -> None:
        """On the loop: from now on it is doing this."""
        self.activity = activity
        self.call.trace.stage(activity)

    async def cancel(self) -> bool:
        """On the loop: cancel unless it is being made visible."""
        if self.is_handed_over or self.is_committing or self.settled.done():
            return False
        self.is_cancelled = True
        if self.scope is not None:
            self.scope.cancel()
        return True


def pending_of(ctx: EngineContext, save: PendingSave) -> Path:
    return owner.pending_path(ctx.root, ctx.members.owner, save.number)


def save_id_of(ctx: EngineContext, save: PendingSave) -> str:
    return f"{ctx.members.owner.session}-{save.number}"
