"""One save on the engine's loop: write -> agree -> commit, and what happens when any of it fails."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import anyio.lowlevel
import msgspec
from isal import isal_zlib

from aio_ckpt import commit, owner, undo
from aio_ckpt.config import EngineConfig
from aio_ckpt.coordinator import Coordinator
from aio_ckpt.copies import Mark
from aio_ckpt.errors import SaveCancelledError, StallError, tell_stage
from aio_ckpt.image import Image
from aio_ckpt.items import SaveReport, StageTimings, WriteResult, check_complete
from aio_ckpt.manifest import METADATA_FILE, FileEntry, data_file_name, rank_manifest_name
from aio_ckpt.names import StepNames
from aio_ckpt.plan import Plan
from aio_ckpt.portal import Executor, watch_submissions
from aio_ckpt.progress import CaptureProgress, Deadline, Threads, follow
from aio_ckpt.quarantine import Quarantine
from aio_ckpt.record import (
    MetadataFile,
    object_entries,
    render_metadata_file,
    render_rank,
    render_root,
    written_names,
)
from aio_ckpt.snapshot import ObjectBytes
from aio_ckpt.storage import Storage
from aio_ckpt.throttle import WriteThrottle
from aio_ckpt.ticket import SaveTicket
from aio_ckpt.tracing import NO_TRACE, SaveTrace
from aio_ckpt.write import ChunkPreparer, write_image

__all__ = ["PendingSave", "SaveCall", "Site", "run_save"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What all saves of one engine share."""

    root: Path
    """Checkpoint root."""
    names: StepNames
    """Directory names of steps."""
    owner: owner.Owner
    """Who writes."""
    storage: Storage
    """Where to."""
    coordinator: Coordinator
    """The other ranks."""
    executor: Executor
    """The engine's I/O threads."""
    config: EngineConfig
    """Settings."""
    quarantine: Quarantine = field(default_factory=Quarantine)
    """Checkpoints that loads proved damaged."""
    throttle: WriteThrottle = field(default_factory=WriteThrottle)
    """The rate of writing."""

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


@dataclass(slots=True, kw_only=True)
class PendingSave:
    """One save between ``save()`` and its settlement.

    Written by the caller's thread until it is submitted, then by the loop's; ``blocked_secs`` and ``staged_secs``
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
    progress: CaptureProgress
    """Of the capture."""
    threads: Threads = field(default_factory=Threads)
    """At work for it."""
    ticket: SaveTicket
    """What the caller holds."""
    plan_secs: float
    """Time to plan."""
    previous: Future[None] | None
    """Settlement of the save before: commits keep the order of the calls."""
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
    sealed_secs: float = 0.0
    """When the directory was."""
    marks: tuple[Mark, ...] = ()
    """Behind every copy from a device."""
    doing: str = "beginning"
    """What it is doing, for messages."""
    stage: str = "write"
    """Where it is: ``write``, ``agree``, ``commit``."""
    has_begun: bool = False
    """The pipeline runs or has run."""
    scope: anyio.CancelScope | None = None
    """Cancels the pipeline."""
    is_committing: bool = False
    """It is being made visible: from here on ``cancel`` and the deadline come too late."""
    is_cancelled: bool = False
    """``cancel`` was accepted."""

    def elapsed(self) -> float:
        """Seconds since the call."""
        return time.perf_counter() - self.call.started

    def begin(self, doing: str) -> None:
        """On the loop: from now on it is doing this."""
        self.doing = doing
        self.call.trace.stage(doing)

    async def cancel(self) -> bool:
        """On the loop: cancel unless it is being made visible."""
        if self.is_committing or self.settled.done():
            return False
        self.is_cancelled = True
        if self.scope is not None:
            self.scope.cancel()
        return True


async def run_save(site: Site, save: PendingSave) -> SaveReport:
    """Take a captured (or still being captured) save to the disk.

    Raises:
        SaveCancelledError: ``cancel`` was accepted.
        StallError: no progress for ``stall_timeout_secs``, or ``deadline_secs`` passed.
        Exception: the first error of any stage. Nothing is visible then, and the arena returns when the last
            thread has let go of it.
    """
    if save.settled.done():
        raise SaveCancelledError(f"the save of step {save.step} ended before its pipeline began")
    save.has_begun = True
    try:
        with watch_submissions(save.threads.add):
            report = await _watched(site, save)
    except BaseException as error:
        cause = _first_cause(error)
        tell_stage(cause, save.stage)
        with anyio.CancelScope(shield=True):
            pending = _pending(site, save)
            await undo.settle_failure(site.storage, pending, save.image, save.threads, step=save.step, cause=cause)
            await keep_trace(site, save, cause)
        if cause is error:
            raise
        raise cause from cause.__cause__
    await keep_trace(site, save, None)
    return report


async def keep_trace(site: Site, save: PendingSave, error: BaseException | None) -> None:
    """The save has ended, with ``error`` or well: write the trace that its caller asked for."""
    about = {"step": save.step, "plan_hit": save.plan_hit, "image_bytes": save.image.chunks[-1].stop}
    origin, rank = save.call.started, site.coordinator.rank
    await save.call.trace.keep(site.executor, origin=origin, rank=rank, about=about, error=error)


async def _watched(site: Site, save: PendingSave) -> SaveReport:
    report: SaveReport | None = None
    with anyio.CancelScope() as scope:
        save.scope = scope
        if save.is_cancelled:
            scope.cancel()
        async with anyio.create_task_group() as group:
            group.start_soon(_watch, site, save)
            group.start_soon(owner.keep_alive, site.storage, _pending(site, save), site.config.stale_after_secs)
            report = await _stages(site, save)
            group.cancel_scope.cancel()
    if report is None:
        raise SaveCancelledError(f"the save of step {save.step} was cancelled; nothing became visible")
    return report


async def _watch(site: Site, save: PendingSave) -> None:
    """Raise what ended the capture early; StallError when nothing moves for too long or the deadline passes."""
    limit = site.config.stall_timeout_secs
    while not save.is_committing:  # which has a limit of its own: to give it up would not take it back
        save.call.deadline.check(save.step, save.doing)
        idle_left = save.progress.idle_left_secs(limit)
        if idle_left <= 0:
            raise StallError(
                f"the save of step {save.step} (rank {site.coordinator.rank}) made no progress for {limit} s: "
                f"storage under {site.root} is stalled, it was {save.doing}"
            )
        with anyio.move_on_after(save.call.deadline.left_secs(idle_left)):
            await save.progress.raise_failure()


async def _stages(site: Site, save: PendingSave) -> SaveReport:
    storage, pending = site.storage, _pending(site, save)
    final = site.root / site.names.name(save.step)
    save.begin("making its directory")
    await storage.make_dir(pending)
    # On the loop: malloc keeps the megabytes for each thread that ever had them.
    metadata = render_metadata_file(save.plan, save.objects, checkpoint_id=str(final), save_id=_save_id(site, save))
    async with anyio.create_task_group() as beside:
        beside.start_soon(owner.write_owner, storage, pending, site.owner)
        beside.start_soon(storage.write_file, pending / METADATA_FILE, metadata.data)
        result = await _write(site, save, pending)
        save.begin("writing its .metadata")
        save.image.lease.close()
    save.synced_secs = save.elapsed()
    root_manifest = await _agree(site, save, pending, metadata, result)
    await _commit(site, save, pending, final, root_manifest)
    save.begin("ending")
    return SaveReport(
        step=save.step,
        path=final,
        image_bytes=result.image_bytes,
        raw_bytes=save.plan.layout.raw_bytes,
        plan_hit=save.plan_hit,
        fingerprint_hit=save.fingerprint_hit,
        mode=result.mode,
        timings=StageTimings(
            blocked_secs=save.blocked_secs,
            waited_secs=save.ticket.waited_secs,
            plan_secs=save.plan_secs,
            staged_secs=save.staged_secs,
            written_secs=save.written_secs,
            synced_secs=save.synced_secs,
            agreed_secs=save.agreed_secs,
            sealed_secs=save.sealed_secs,
            committed_secs=save.elapsed(),
        ),
    )


async def _agree(site: Site, save: PendingSave, pending: Path, metadata: MetadataFile, result: WriteResult) -> bytes:
    """This rank's manifest, durably, then what all ranks wrote: the root manifest."""
    entries = object_entries(save.plan, save.objects)
    check_complete(frozenset(save.requested), written_names(save.plan, entries, result))
    save.begin("writing the rank's manifest")
    rank, world_size, save_id = site.coordinator.rank, site.coordinator.world_size, _save_id(site, save)
    manifest = render_rank(
        save.plan, entries, result, step=save.step, save_id=save_id, rank=rank, world_size=world_size
    )
    await site.storage.write_file(pending / rank_manifest_name(rank), manifest)
    message = msgspec.msgpack.encode(FileEntry(rank_manifest_name(rank), len(manifest), isal_zlib.crc32(manifest)))
    save.progress.touch()
    save.stage = "agree"
    save.begin("waiting for the other ranks")
    results = await site.coordinator.exchange(
        f"results/{save.number}", message, timeout_secs=site.config.stall_timeout_secs
    )
    if save.previous is not None:
        save.begin("waiting for the commit of the save before")
        with save.progress.paused():
            await asyncio.wrap_future(follow(save.previous))
    save.progress.touch()
    save.agreed_secs = save.elapsed()
    ranks = [msgspec.msgpack.decode(result, type=FileEntry) for result in results]
    return render_root(
        metadata, ranks, step=save.step, save_id=save_id, created_unix=time.time(), metrics=save.call.metrics
    )


async def _write(site: Site, save: PendingSave, pending: Path) -> WriteResult:
    arena, layout = save.image.lease.arena, save.plan.layout
    renders = arena.rendered is not layout or not save.image.is_whole or save.plan.gathers
    preparer = ChunkPreparer(layout, save.objects.region, renders_constants=renders)
    arena.rendered = None
    path = pending / data_file_name(site.coordinator.rank)
    image_bytes = save.image.chunks[-1].stop
    is_hurried = save.call.deadline.secs is not None

    def on_written(nbytes: int) -> None:
        save.progress.touch()
        site.throttle.wrote(nbytes)

    save.begin("reserving room for its data")
    file = await site.storage.create_data_file(path, image_bytes, writers=site.config.workers)
    try:
        save.begin("writing its data")
        with site.throttle.drain():
            result = await write_image(
                save.image,
                preparer,
                file,
                site.executor,
                workers=site.config.workers,
                captured=lambda index: save.progress.wait(index, site.executor),
                admit=functools.partial(site.throttle.admit, is_hurried=is_hurried, on_wait=save.progress.touch),
                on_written=on_written,
                trace=save.call.trace,
            )
        save.written_secs = save.elapsed()
        save.begin("making its data durable (fdatasync)")
        await file.sync()
    finally:
        with anyio.move_on_after(undo.SETTLE_SECS, shield=True):
            await file.close()
    if save.image.is_whole:
        arena.rendered = layout
    return result


async def _commit(site: Site, save: PendingSave, pending: Path, final: Path, root_manifest: bytes) -> None:
    save.stage = "commit"
    save.begin("making its directory durable")
    await commit.seal(site.storage, pending, root_manifest)
    save.sealed_secs = save.elapsed()
    save.begin("waiting while other checkpoints are renamed")
    async with site.quarantine.renames:
        await anyio.lowlevel.checkpoint_if_cancelled()  # a cancellation that was accepted since the last wait
        save.is_committing = True
        save.begin("making it visible (rename, fsync)")
        # Shielded: a rename that was begun is finished or undone.
        with anyio.move_on_after(site.config.stall_timeout_secs, shield=True) as scope:
            await commit.publish(site.storage, pending=pending, final=final, overwrite=save.call.overwrite)
    if scope.cancelled_caught:
        stalled = StallError(
            f"the commit of step {save.step} did not end within {site.config.stall_timeout_secs} s: {site.root} is "
            "stalled; the step may still become visible, whole, when it recovers"
        )
        stalled.in_doubt = True
        raise stalled


def _pending(site: Site, save: PendingSave) -> Path:
    return owner.pending_path(site.root, site.owner, save.number)


def _save_id(site: Site, save: PendingSave) -> str:
    return f"{site.owner.session}-{save.number}"


def _first_cause(error: BaseException) -> BaseException:
    """The first real error inside (nested) exception groups; a cancellation only if there is nothing else."""
    while isinstance(error, BaseExceptionGroup):
        error = min(error.exceptions, key=lambda inner: isinstance(inner, asyncio.CancelledError))
    return error
