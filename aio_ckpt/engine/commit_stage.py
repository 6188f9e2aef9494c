"""How a save ends well: the ranks agree on who writes what, and what all have written becomes visible."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import anyio
import anyio.lowlevel
import numpy as np
from isal import isal_zlib

from aio_ckpt.commit import publish as commit
from aio_ckpt.commit.manifests import (
    MetadataFile,
    object_entries,
    object_spans,
    render_metadata_file,
    render_rank,
    render_root,
    written_names,
)
from aio_ckpt.engine.pending_save import EngineContext, PendingSave, save_id_of
from aio_ckpt.errors import StallError
from aio_ckpt.format.manifests import METADATA_FILE, FileEntry, rank_manifest_name
from aio_ckpt.plan.planner import Plan, narrow
from aio_ckpt.ranks.save_ledger import PlanMsg, WrittenMsg, extents_crc32
from aio_ckpt.runtime.futures import follow
from aio_ckpt.runtime.portal import run_blocking
from aio_ckpt.snapshot.image import item_sums, narrowed_image, narrowed_objects
from aio_ckpt.write.result import WriteResult, check_complete

__all__ = ["conclude", "narrow_save"]


async def narrow_save(ctx: EngineContext, save: PendingSave) -> None:
    """A miss: everything is captured; agree on who writes what, and close the image up over what others write."""
    save.stage = "agree"
    save.begin("waiting for its capture")
    whole, local = save.plan, save.plan.local
    assert local is not None  # several ranks
    for chunk in save.image.chunks:
        await save.progress.wait(chunk.index, ctx.executor)
    sums = await run_blocking(ctx.executor, item_sums, save.image, whole.layout)
    save.begin("waiting for the plans of the other ranks")
    with save.progress.paused():
        word = await save.round.assign(PlanMsg(save.step, local, sums))
    share = word.share
    assert share is not None  # a rank that planned anew has nothing to keep
    save.plan = await run_blocking(ctx.executor, narrow, whole, share, word.share_id)
    save.objects = narrowed_objects(save.objects, whole.object_names, frozenset(save.plan.object_names))
    region = len(save.objects.region)
    save.image = await run_blocking(
        ctx.executor, narrowed_image, save.image, whole.layout, share, save.plan.layout, region
    )
    save.adopt(save.plan)
    save.stage = "write"


async def conclude(
    ctx: EngineContext,
    save: PendingSave,
    pending: Path,
    final: Path,
    metadata: MetadataFile | None,
    result: WriteResult,
) -> Mapping[str, int]:
    """This rank's manifest, durably; then what all ranks wrote becomes visible. Per stage, the slowest rank."""
    entries = object_entries(save.plan, save.objects)
    written = written_names(save.plan, entries, result)
    check_complete(frozenset(save.requested), written | save.plan.elsewhere if save.plan.elsewhere else written)
    save.begin("writing the rank's manifest")
    members, save_id = ctx.members, save_id_of(ctx, save)
    rank, world_size = members.coordinator.rank, members.coordinator.world_size
    manifest = render_rank(
        save.plan, entries, result, step=save.step, save_id=save_id, rank=rank, world_size=world_size
    )
    await ctx.storage.write_file(pending / rank_manifest_name(rank), manifest)
    save.progress.touch()
    save.stage = "agree"
    save.begin("waiting for the other ranks")
    spans = object_spans(save.plan, save.objects)
    share_id, is_alone = save.plan.share_id, all(settled.done() for settled in save.earlier)
    report = WrittenMsg(
        save.step,
        share_id,
        len(manifest),
        isal_zlib.crc32(manifest),
        (save.blocked_secs, save.staged_secs, save.written_secs),
        members.sent.moved(share_id, spans, is_alone=is_alone) if members.are_several else (),
        extents_crc32(spans),
        _places(save.plan) if members.are_several and members.sent.is_new(share_id) else None,
    )

    async def publish(all_written: Sequence[WrittenMsg]) -> None:
        await _publish(ctx, save, pending, final, metadata, all_written)

    save.is_handed_over = not members.is_leader
    with save.progress.paused():
        word = await save.round.conclude(report, publish)
        save.is_committing = True
        await _earlier(save)
    if members.are_several:
        members.sent.confirm(share_id, spans)
    return word.slowest if members.are_several else {}


def _places(plan: Plan) -> bytes:
    places = [(item.item_offset, item.envelope.item_bytes) for item in plan.layout.items]
    return np.array(places, "<i8").tobytes()


async def _earlier(save: PendingSave) -> None:
    """Commits keep the order of the calls."""
    with save.progress.paused():
        for settled in save.earlier:
            await asyncio.wrap_future(follow(settled))


async def _publish(
    ctx: EngineContext,
    save: PendingSave,
    pending: Path,
    final: Path,
    metadata: MetadataFile | None,
    written: Sequence[WrittenMsg],
) -> None:
    """The leader: everything is durable but the names; make it one checkpoint, visible."""
    save.progress.resume()
    save.begin("waiting for the commit of the save before")
    await _earlier(save)
    save_id = save_id_of(ctx, save)
    ranks = [FileEntry(rank_manifest_name(rank), found.nbytes, found.crc32) for rank, found in enumerate(written)]
    if metadata is None:
        save.begin("rendering .metadata")
        spans = ctx.members.ledger.learn(written)
        with save.progress.paused():  # seconds for 10,000 ranks, in which no storage is asked for anything
            template = await run_blocking(ctx.executor, ctx.members.ledger.template, written)
        metadata = render_metadata_file(template, spans, checkpoint_id=str(final), save_id=save_id)
        await ctx.storage.write_file(pending / METADATA_FILE, *metadata.parts)
    save.progress.touch()
    save.agreed_secs = save.elapsed()
    root_manifest = render_root(
        metadata, ranks, step=save.step, save_id=save_id, created_unix=time.time(), metrics=save.call.metrics
    )
    await _commit(ctx, save, pending, final, root_manifest)


async def _commit(ctx: EngineContext, save: PendingSave, pending: Path, final: Path, root_manifest: bytes) -> None:
    save.stage = "commit"
    save.begin("making its directory durable")
    await commit.sync_pending(ctx.storage, pending, root_manifest)
    save.dir_synced_secs = save.elapsed()
    save.begin("waiting while other checkpoints are renamed")
    async with ctx.quarantine.renames:
        await anyio.lowlevel.checkpoint_if_cancelled()  # a cancellation that was accepted since the last wait
        save.is_committing = True
        save.begin("making it visible (rename, fsync)")
        # Shielded: a rename that was begun is finished or undone.
        with anyio.move_on_after(ctx.config.stall_timeout_secs, shield=True) as scope:
            left = await commit.publish(ctx.storage, pending=pending, final=final, overwrite=save.call.overwrite)
            for directory in left:
                ctx.pending_cleanup.add(directory, lambda: True)
    if scope.cancelled_caught:
        stalled = StallError(
            f"the commit of step {save.step} did not end within {ctx.config.stall_timeout_secs} s: {ctx.root} is "
            "stalled; the step may still become visible, whole, when it recovers"
        )
        stalled.in_doubt = True
        raise stalled
    save.is_visible = True
