"""One save on the engine's loop: write -> agree -> commit, and what happens when any of it fails."""

from __future__ import annotations

import errno
import functools
import logging
from pathlib import Path

import anyio.lowlevel

from aio_ckpt.checks import MAX_SECS
from aio_ckpt.commit import cleanup as undo
from aio_ckpt.commit import owner
from aio_ckpt.commit.discovery import read_save_id
from aio_ckpt.commit.manifests import MetadataFile, object_spans, render_metadata_file
from aio_ckpt.engine.commit_stage import conclude, narrow_save
from aio_ckpt.engine.pending_save import EngineContext, PendingSave, pending_of, save_id_of
from aio_ckpt.errors import AioCkptError, SaveCancelledError, StallError, WriteError
from aio_ckpt.format.manifests import METADATA_FILE, data_file_name
from aio_ckpt.ranks.heartbeat import HEARTBEATS_A_STALL
from aio_ckpt.reports import SaveReport, StageTimings
from aio_ckpt.rescue.snapshot_record import record_of, store_record_when_captured
from aio_ckpt.runtime.deadline import Deadline
from aio_ckpt.runtime.error_notes import tell_stage
from aio_ckpt.runtime.futures import first_cause
from aio_ckpt.runtime.portal import watch_submissions
from aio_ckpt.write.result import WriteResult
from aio_ckpt.write.writer import ChunkPreparer, new_file, write_image

__all__ = ["run_save"]

_log = logging.getLogger("aio_ckpt")
_TELL_SECS = 1.0
"""How much later than its deadline a save may end: a leader that lives answers in milliseconds."""


async def run_save(ctx: EngineContext, save: PendingSave) -> SaveReport:
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
            report = await _watched(ctx, save)
    except BaseException as error:
        cause = first_cause(error)
        tell_stage(cause, save.stage)
        with anyio.CancelScope(shield=True):
            cause = await save.round.end(cause, limit_secs=_tell_secs(save.call.deadline))
            if save.is_visible and isinstance(cause, AioCkptError):
                cause.in_doubt = True
            is_failed = save.round.is_failed and not save.is_visible
            pending = pending_of(ctx, save) if is_failed else None
            await undo.settle_failure(
                ctx.storage,
                pending,
                save.image,
                save.threads,
                step=save.step,
                cause=cause,
                pending_cleanup=ctx.pending_cleanup,
                are_several=ctx.members.are_several,
            )
            await keep_trace(ctx, save, cause)
        if cause is error:
            raise
        raise cause from cause.__cause__
    await keep_trace(ctx, save, None)
    return report


def _tell_secs(deadline: Deadline) -> float | None:
    """How long a save that failed may wait for the leader's word on it; None: as long as it lives."""
    return None if deadline.secs is None else deadline.left_secs(MAX_SECS) + _TELL_SECS


async def keep_trace(ctx: EngineContext, save: PendingSave, error: BaseException | None) -> None:
    """The save has ended, with ``error`` or well: write the trace that its caller asked for."""
    about = {"step": save.step, "plan_hit": save.plan_hit, "image_bytes": save.image.chunks[-1].stop}
    origin, rank = save.call.started, ctx.members.coordinator.rank
    await save.call.trace.keep(ctx.executor, origin=origin, rank=rank, about=about, error=error)


async def _watched(ctx: EngineContext, save: PendingSave) -> SaveReport:
    report: SaveReport | None = None
    with anyio.CancelScope() as scope:
        save.scope = scope
        if save.is_cancelled:
            scope.cancel()
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(_watch, ctx, save)
                if ctx.members.is_leader:
                    alive_secs = ctx.config.stale_after_secs
                    group.start_soon(owner.keep_alive, ctx.storage, pending_of(ctx, save), alive_secs)
                if ctx.members.are_several:
                    group.start_soon(_beat, ctx, save)
                try:
                    report = await _stages(ctx, save)
                finally:
                    save.image.lease.let_go(save.settled)  # visible or failed: nobody has to rescue it any more
                group.cancel_scope.cancel()
        except Exception as error:
            if report is None:
                raise
            # The deadline, say, in the same turn of the loop as the leader's word: it is committed all the same.
            _log.warning("step %d was committed before this came: %s", save.step, first_cause(error))
    if report is None:
        raise SaveCancelledError(f"the save of step {save.step} was cancelled; nothing became visible")
    return report


async def _watch(ctx: EngineContext, save: PendingSave) -> None:
    """Raise what ended the capture early; StallError when nothing moves for too long or the deadline passes."""
    limit = ctx.config.stall_timeout_secs
    while not save.is_committing:  # which has a limit of its own: to give it up would not take it back
        save.call.deadline.check(save.step, save.activity)
        idle_left = save.progress.idle_left_secs(limit)
        if idle_left <= 0:
            raise StallError(
                f"the save of step {save.step} (rank {ctx.members.coordinator.rank}) made no progress for {limit} s: "
                f"storage under {ctx.root} is stalled, it was {save.activity}"
            )
        with anyio.move_on_after(save.call.deadline.left_secs(idle_left)):
            await save.progress.raise_failure()


async def _beat(ctx: EngineContext, save: PendingSave) -> None:
    """Let the other ranks wait for a rank that is slow but moves."""
    last = save.progress.last
    while True:
        await anyio.sleep(ctx.config.stall_timeout_secs / HEARTBEATS_A_STALL)
        if save.progress.last != last or save.progress.is_paused:
            last = save.progress.last
            try:
                await ctx.members.coordinator.beat()
            except AioCkptError:
                if not save.is_committing:  # else the others cannot be told, which undoes nothing
                    raise


async def _stages(ctx: EngineContext, save: PendingSave) -> SaveReport:
    storage, pending = ctx.storage, pending_of(ctx, save)
    final = ctx.root / ctx.names.name(save.step)
    save.begin("making its directory")
    await _make_pending(ctx, pending)
    if ctx.members.are_several and not save.plan.share_id:
        await narrow_save(ctx, save)
    metadata = _own_metadata(ctx, save, final)
    async with anyio.create_task_group() as beside:
        if ctx.members.is_leader:
            beside.start_soon(owner.write_owner, storage, pending, ctx.owner)
        if metadata is not None:
            beside.start_soon(storage.write_file, pending / METADATA_FILE, *metadata.parts)
            if save.image.lease.arena.segment is not None:
                beside.start_soon(_seal, ctx, save, final, b"".join(metadata.parts))
        result = await _write(ctx, save, pending)
        save.begin("writing its .metadata")
        save.image.lease.close()
    save.synced_secs = save.elapsed()
    slowest = await conclude(ctx, save, pending, final, metadata, result)
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
            dir_synced_secs=save.dir_synced_secs,
            committed_secs=save.elapsed(),
        ),
        slowest_rank=slowest,
    )


async def _make_pending(ctx: EngineContext, pending: Path) -> None:
    try:
        await ctx.storage.make_dir(pending)
    except WriteError as error:
        if error.errno != errno.EEXIST or not ctx.members.are_several:  # another rank was first
            raise


def _own_metadata(ctx: EngineContext, save: PendingSave, final: Path) -> MetadataFile | None:
    """``.metadata``, where it depends on no other rank."""
    if save.plan.metadata is None:
        return None
    spans = object_spans(save.plan, save.objects)
    return render_metadata_file(save.plan.metadata, spans, checkpoint_id=str(final), save_id=save_id_of(ctx, save))


async def _seal(ctx: EngineContext, save: PendingSave, final: Path, metadata: bytes) -> None:
    """So that the snapshot can be committed after a crash, from when it is captured until the save has ended."""
    if not save.image.is_whole:
        _log.info("step %d: larger than budget_bytes, so that no whole snapshot is there to be rescued", save.step)
        return
    save.image.lease.hold(save.settled)  # until the save has ended; now, as the write may end while it is read below
    save_id, call = save_id_of(ctx, save), save.call
    replaces = await read_save_id(ctx.storage, final) if call.overwrite else ""
    record = record_of(final.name, save_id, save.step, call.overwrite, replaces, call.metrics, metadata)
    await store_record_when_captured(record, save.plan, save.objects, save.image, save.progress, ctx.executor)


async def _write(ctx: EngineContext, save: PendingSave, pending: Path) -> WriteResult:
    layout = save.plan.layout
    renders = not save.image.has_constants or save.plan.gathers
    preparer = ChunkPreparer(layout, save.objects.region, renders_constants=renders)
    path = pending / data_file_name(ctx.members.coordinator.rank)
    image_bytes = save.image.chunks[-1].stop
    is_hurried = save.call.deadline.secs is not None

    def on_written(nbytes: int) -> None:
        save.written_secs = save.elapsed()
        save.progress.touch()

    workers = ctx.config.workers
    result = await write_image(
        save.image,
        preparer,
        new_file(ctx.storage, path, image_bytes, writers=workers, settle_secs=undo.SETTLE_SECS, begin=save.begin),
        ctx.executor,
        workers=workers,
        captured=lambda index: save.progress.wait(index, ctx.executor),
        admit=functools.partial(ctx.throttle.admit, is_hurried=is_hurried, on_wait=save.progress.touch),
        on_written=on_written,
        trace=save.call.trace,
    )
    save.progress.touch()
    if save.image.is_whole:
        save.image.lease.arena.keep_constants(layout)
    return result
