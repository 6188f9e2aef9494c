"""One save on the engine's loop: write, vote, commit; and its cleanup if a stage fails."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.lowlevel
from isal import isal_zlib

from aio_ckpt.checks import MAX_SECS
from aio_ckpt.commit import by_path, cleanup, owner, publish
from aio_ckpt.commit.manifests import (
    MetadataFile,
    object_entries,
    object_spans,
    render_metadata_file,
    render_rank,
    render_root,
    written_names,
)
from aio_ckpt.commit.quarantine import Quarantine
from aio_ckpt.engine.context import EngineContext
from aio_ckpt.engine.outcomes import explain_failure, named
from aio_ckpt.engine.stages import PendingSave, WrittenRank, sent_target
from aio_ckpt.errors import AioCkptError, SaveCancelledError, StallError
from aio_ckpt.format.rank_manifest import data_file_name
from aio_ckpt.format.root_manifest import METADATA_FILE, FileEntry, rank_manifest_name
from aio_ckpt.plan.global_plan import places
from aio_ckpt.ranks.liveness import heartbeat_pauses
from aio_ckpt.ranks.save_ledger import CommitReply, Vote, extents_crc32
from aio_ckpt.ranks.save_round import SaveState
from aio_ckpt.reports import SaveReport
from aio_ckpt.rescue import Rescue
from aio_ckpt.runtime.deadline import Deadline
from aio_ckpt.runtime.error_notes import note_stage
from aio_ckpt.runtime.futures import first_cause, follow
from aio_ckpt.runtime.log_records import log_step
from aio_ckpt.runtime.portal import run_blocking, watch_submissions
from aio_ckpt.runtime.waiting import WaitLines
from aio_ckpt.write.result import WriteResult, check_complete
from aio_ckpt.write.throttle import WriteThrottle
from aio_ckpt.write.writer import ChunkPreparer, new_file, write_image

_TELL_SECS = 1.0
"""Time after its deadline within which a save ends: a living leader answers in milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePipeline:
    """Runs a save, from its captured image to a visible checkpoint. :meth:`_save` shows all of it."""

    ctx: EngineContext
    throttle: WriteThrottle
    """Limits the rate of writing."""
    quarantine: Quarantine
    """Quarantine of the root. Its lock ``renames`` orders all renames under the root."""
    pending_cleanup: cleanup.PendingCleanup
    """Gets the directories of failed saves, which are deleted later."""
    rescue: Rescue = field(default_factory=Rescue)
    """Records each snapshot, which can then be committed after a crash."""

    def slot_timeout_secs(self, nbytes: int) -> float:
        """Return the longest time in which ``nbytes`` of staging memory become free, if the disk does not stall."""
        return self.ctx.config.stall_timeout_secs + self.throttle.longest_wait_secs(nbytes)

    def clear_pending(self, number: int) -> None:
        """Delete the directory of call ``number`` later. The call has ended before its pipeline began."""
        self.pending_cleanup.add(self.ctx.pending_path(number), lambda: True)

    async def run(self, save: PendingSave) -> SaveReport:
        """Write and commit a save whose capture has begun.

        Raises:
            SaveCancelledError: ``cancel`` was accepted.
            StallError: no progress for ``stall_timeout_secs``, or ``deadline_secs`` passed.
            Exception: the first error of any stage. Nothing is visible then. The arena is free again once the last
                thread that uses it has ended.
        """
        if save.settled.done():
            raise SaveCancelledError(f"the save of {save.title} ended before its pipeline began")
        try:
            with watch_submissions(save.threads.add), _stall_lines(self.ctx, save).on_loop():
                report = await self._watched(save)
        except BaseException as error:
            cause = first_cause(error)
            stage = save.failing_stage
            note_stage(cause, stage)
            with anyio.CancelScope(shield=True):
                await explain_failure(cause, self.ctx, save.captured.image.chunks[-1].stop, save.target)
                cause = await self._clean_up(save, cause, stage)
                await keep_trace(self.ctx, save, cause)
            if cause is error:
                raise
            raise cause from cause.__cause__
        await keep_trace(self.ctx, save, None)
        return report

    async def _save(self, save: PendingSave) -> SaveReport:
        """Write, vote, commit."""
        group, progress = save.round, save.progress
        pending = await self._make_pending(save)
        written = await self._write_rank(save, pending)  # data file and rank manifest, durable
        vote = self._vote(save, written)
        with progress.paused():
            votes = await group.gather(vote)  # on the leader: of every rank; elsewhere ()
        if group.is_leader:
            await self._publish(save, pending, written.metadata, votes)  # .metadata, root manifest, one rename
        with progress.paused():
            reply = await group.finish(votes, save.call.extra)  # every rank knows of the commit
        await _await_earlier(save)
        self._confirm(save)
        save.begin("ending")
        return self._report(save, written, reply)

    # -- write ----------------------------------------------------------------------------------------

    async def _make_pending(self, save: PendingSave) -> Path:
        save.begin("making its directory")
        pending = self.ctx.pending_path(save.number)
        if self.ctx.world_size == 1:
            await self.ctx.storage.make_dir(pending)
        else:
            await owner.make_pending(self.ctx.storage, pending)
        return pending

    async def _write_rank(self, save: PendingSave, pending: Path) -> WrittenRank:
        """Write the data file and this rank's manifest, durable; ``.metadata``, too, if it depends on no other rank."""
        ctx, captured, storage = self.ctx, save.captured, self.ctx.storage
        plan, objects = captured.plan, captured.objects
        metadata = self._own_metadata(save)
        async with anyio.create_task_group() as beside:
            if save.round.is_leader:
                beside.start_soon(owner.write_owner, storage, pending, ctx.owner)
            if metadata is not None:
                beside.start_soon(storage.write_file, pending / METADATA_FILE, *metadata.parts)
                if save.step is not None:  # a save by path cannot be rescued
                    beside.start_soon(self._record_snapshot, save, metadata, save.step)
            result = await self._write_image(save, pending)
            save.begin("writing its .metadata")
            captured.image.lease.close()
        save.timer.reached("synced")
        entries = object_entries(plan, objects)
        written = written_names(plan, entries, result)
        check_complete(frozenset(captured.requested), written | plan.elsewhere if plan.elsewhere else written)
        save.begin("writing the rank's manifest")
        save_id = ctx.save_id(save.number)
        manifest = render_rank(
            plan, entries, result, step=save.stored_step, save_id=save_id, rank=ctx.rank, world_size=ctx.world_size
        )
        await storage.write_file(pending / rank_manifest_name(ctx.rank), manifest)
        save.progress.touch()
        save.begin("waiting for the other ranks", stage="agree")
        return WrittenRank(
            result=result, metadata=metadata, manifest_bytes=len(manifest), manifest_crc32=isal_zlib.crc32(manifest)
        )

    async def _write_image(self, save: PendingSave, pending: Path) -> WriteResult:
        ctx, image, progress = self.ctx, save.captured.image, save.progress
        layout = save.captured.plan.layout
        renders = not image.has_constants or save.captured.plan.gathers
        preparer = ChunkPreparer(layout, save.captured.objects.region, renders_constants=renders)
        path = pending / data_file_name(ctx.rank)
        is_hurried = save.call.deadline.secs is not None

        def on_written(nbytes: int) -> None:
            save.timer.reached("written")
            save.written_bytes += nbytes
            progress.touch()

        workers = ctx.config.workers
        file = new_file(
            ctx.storage,
            path,
            image.chunks[-1].stop,
            writers=workers,
            settle_secs=cleanup.SETTLE_SECS,
            on_activity=save.begin,
        )
        result = await write_image(
            image,
            preparer,
            file,
            ctx.executor,
            workers=workers,
            captured=lambda index: progress.wait(index, ctx.executor),
            admit=functools.partial(self.throttle.admit, is_hurried=is_hurried, on_wait=progress.touch),
            on_written=on_written,
            trace=save.call.trace,
        )
        progress.touch()
        if image.is_whole:
            image.lease.arena.keep_constants(layout)
        return result

    def _own_metadata(self, save: PendingSave) -> MetadataFile | None:
        """Render ``.metadata``; None if it depends on other ranks."""
        captured = save.captured
        if captured.plan.metadata is None:
            return None
        spans = object_spans(captured.plan, captured.objects)
        final, save_id = self.ctx.final_path(save.target), self.ctx.save_id(save.number)
        return render_metadata_file(captured.plan.metadata, spans, checkpoint_id=str(final), save_id=save_id)

    async def _record_snapshot(self, save: PendingSave, metadata: MetadataFile, step: int) -> None:
        captured, call = save.captured, save.call
        await self.rescue.record(
            captured.image,
            captured.plan,
            captured.objects,
            save.progress,
            metadata=metadata,
            final=self.ctx.final_path(save.target),
            save_id=self.ctx.save_id(save.number),
            step=step,
            overwrite=call.overwrite,
            metrics=call.metrics,
            extra=call.extra,
            settled=save.settled,
        )

    # -- vote -----------------------------------------------------------------------------------------

    def _vote(self, save: PendingSave, written: WrittenRank) -> Vote:
        """Return this rank's vote to commit, which describes the files that it has written."""
        plan, sent, timer = save.captured.plan, self.ctx.members.sent, save.timer
        spans = object_spans(plan, save.captured.objects)
        is_alone, is_first = all(settled.done() for settled in save.earlier), sent.is_new(plan.share_id)
        return Vote(
            sent_target(save.target),
            plan.share_id,
            written.manifest_bytes,
            written.manifest_crc32,
            (timer.secs("blocked"), timer.secs("staged"), timer.secs("written")),
            sent.moved(plan.share_id, spans, is_alone=is_alone),
            extents_crc32(spans),
            save.captured.content,
            places(plan.layout) if is_first else None,
        )

    def _confirm(self, save: PendingSave) -> None:
        """Note that the leader knows the places of this save's objects."""
        plan = save.captured.plan
        self.ctx.members.sent.confirm(plan.share_id, object_spans(plan, save.captured.objects))

    # -- commit ---------------------------------------------------------------------------------------

    async def _publish(
        self, save: PendingSave, pending: Path, metadata: MetadataFile | None, votes: Sequence[Vote]
    ) -> None:
        """Make the pending directory durable, then visible by one rename. Only the leader calls this."""
        ctx = self.ctx
        save.begin("waiting for the commit of the save before")
        await _await_earlier(save)
        if metadata is None:
            metadata = await self._metadata_of_all(save, pending, votes)
        save.progress.touch()
        save.timer.reached("agreed")
        root_manifest = render_root(
            metadata,
            [FileEntry(rank_manifest_name(rank), vote.nbytes, vote.crc32) for rank, vote in enumerate(votes)],
            step=save.stored_step,
            save_id=ctx.save_id(save.number),
            created_unix=time.time(),
            metrics=save.call.metrics,
            extra=save.call.extra,
            files=save.call.files,
        )
        save.begin("making its directory durable", stage="commit")
        if save.call.path is not None:
            await by_path.prepare_place(ctx.storage, save.call.path, spares_foreign=not save.call.overwrite)
        for name, content in save.call.files.items():
            await ctx.storage.write_file(pending / name, content)
        await publish.sync_pending(ctx.storage, pending, root_manifest)
        save.timer.reached("dir_synced")
        save.begin("waiting while other checkpoints are renamed")
        async with self.quarantine.renames:
            await anyio.lowlevel.checkpoint_if_cancelled()  # a cancellation may have been accepted since the last wait
            save.round.advance(SaveState.COMMITTING)
            save.begin("making it visible (rename, fsync)")
            await self._rename(save, pending)
        save.round.advance(SaveState.VISIBLE)

    async def _metadata_of_all(self, save: PendingSave, pending: Path, votes: Sequence[Vote]) -> MetadataFile:
        """Render and write ``.metadata`` of the shares of all ranks."""
        ctx, ledger = self.ctx, self.ctx.members.ledger
        save.begin("rendering .metadata")
        spans = ledger.learn(votes)
        with save.progress.paused():  # takes seconds for 10,000 ranks, without any request to the storage
            template = await run_blocking(ctx.executor, ledger.template, votes)
        final, save_id = ctx.final_path(save.target), ctx.save_id(save.number)
        metadata = render_metadata_file(template, spans, checkpoint_id=str(final), save_id=save_id)
        await ctx.storage.write_file(pending / METADATA_FILE, *metadata.parts)
        return metadata

    async def _rename(self, save: PendingSave, pending: Path) -> None:
        ctx, limit_secs, final = self.ctx, self.ctx.config.stall_timeout_secs, self.ctx.final_path(save.target)
        # Shielded, because a rename that has begun must be completed or undone.
        with anyio.move_on_after(limit_secs, shield=True) as scope:
            replaces = save.call.overwrite or save.call.path is not None
            left = await publish.publish(ctx.storage, pending=pending, final=final, overwrite=replaces)
            for directory in left:
                self.pending_cleanup.add(directory, lambda: True)
        if scope.cancelled_caught:
            save.round.advance(SaveState.IN_DOUBT)
            raise StallError(
                f"the commit of {save.title} did not end within {limit_secs} s: {ctx.root} is "
                "stalled; the checkpoint may still become visible, whole, when it recovers"
            )

    def _report(self, save: PendingSave, written: WrittenRank, reply: CommitReply) -> SaveReport:
        captured = save.captured
        return SaveReport(
            step=save.stored_step,
            path=self.ctx.final_path(save.target),
            image_bytes=written.result.image_bytes,
            raw_bytes=captured.plan.layout.raw_bytes,
            plan_hit=captured.plan_hit,
            fingerprint_hit=captured.fingerprint_hit,
            mode=written.result.mode,
            timings=save.timer.timings(),
            slowest_rank=reply.slowest,
            extra=reply.extra,
        )

    # -- watch and clean up ---------------------------------------------------------------------------

    async def _watched(self, save: PendingSave) -> SaveReport:
        """Run :meth:`_save`, with heartbeats. Its deadline, a stall or ``cancel()`` ends it."""
        ctx, report = self.ctx, None
        with anyio.CancelScope() as scope:
            save.scope = scope
            if save.round.state is SaveState.CANCELLED:
                scope.cancel()
            else:
                save.round.advance(SaveState.WRITING)
            try:
                async with anyio.create_task_group() as group:
                    group.start_soon(_watch, ctx, save)
                    if save.round.is_leader:
                        pending, alive_secs = ctx.pending_path(save.number), ctx.config.stale_after_secs
                        group.start_soon(owner.keep_alive, ctx.storage, pending, alive_secs)
                    group.start_soon(_send_heartbeats, ctx, save)
                    try:
                        report = await self._save(save)
                    finally:
                        save.captured.image.lease.release(save.settled)  # visible or failed: no rescue needs the image
                    group.cancel_scope.cancel()
            except Exception as error:
                if report is None:
                    raise
                # The deadline may pass in the same turn of the loop as the leader's reply. The step is committed then.
                late, rank = "%s was committed before this came: %s", ctx.rank
                log_step(logging.WARNING, save.step, rank, late, save.title, named(first_cause(error)))
        if report is None:
            raise SaveCancelledError(f"the save of {save.title} was cancelled; nothing became visible")
        return report

    async def _clean_up(self, save: PendingSave, cause: BaseException, stage: str) -> BaseException:
        """Tell the other ranks of a failure, then delete the files of the save. Returns the first error."""
        end = await save.round.end(cause, stage=stage, limit_secs=_tell_secs(save.call.deadline))
        await cleanup.settle_failure(
            self.ctx.storage,
            self.ctx.pending_path(save.number) if end.may_clear else None,
            save.captured.image,
            save.threads,
            title=save.title,
            cause=end.cause,
            pending_cleanup=self.pending_cleanup,
            are_several=self.ctx.world_size > 1,
        )
        return end.cause


async def keep_trace(ctx: EngineContext, save: PendingSave, error: BaseException | None) -> None:
    """Write the trace that the caller asked for, once the save has ended. ``error``: its failure, or None."""
    captured = save.captured
    about = {"step": save.stored_step, "plan_hit": captured.plan_hit, "image_bytes": captured.image.chunks[-1].stop}
    await save.call.trace.keep(ctx.executor, origin=save.call.started, rank=ctx.rank, about=about, error=error)


def _tell_secs(deadline: Deadline) -> float:
    """Return how long a failed save may wait for the leader's reply, while the leader lives."""
    return math.inf if deadline.secs is None else deadline.left_secs(MAX_SECS) + _TELL_SECS


async def _await_earlier(save: PendingSave) -> None:
    """Wait until earlier saves have settled: commits keep the order of the calls."""
    with save.progress.paused():
        for settled in save.earlier:
            await asyncio.wrap_future(follow(settled))


def _stall_lines(ctx: EngineContext, save: PendingSave) -> WaitLines:
    """Return the lines about a save that makes no progress. A save that waits for another has none: the other tells."""
    whose = f"the save of {save.title}" + (f" on rank {ctx.rank}" if ctx.world_size > 1 else "")

    def describe(idle: str) -> str:
        return f"{whose} has made no progress for {idle}: it is {save.activity} under {ctx.root}"

    return WaitLines(describe, waited_secs=lambda: save.progress.idle_secs, step=save.step, rank=ctx.rank)


async def _watch(ctx: EngineContext, save: PendingSave) -> None:
    """Raise the failure of the capture; StallError if nothing moves for too long or the deadline passes."""
    limit = ctx.config.stall_timeout_secs
    while not save.round.is_committing:  # the commit has its own limit, and is not undone
        save.call.deadline.check(save.target, save.activity)
        idle_left = save.progress.idle_left_secs(limit)
        if idle_left <= 0:
            raise StallError(
                f"the save of {save.title} (rank {ctx.rank}) made no progress for {limit} s: "
                f"storage under {ctx.root} is stalled, it was {save.activity}"
            )
        with anyio.move_on_after(save.call.deadline.left_secs(idle_left)):
            await save.progress.raise_failure()


async def _send_heartbeats(ctx: EngineContext, save: PendingSave) -> None:
    """Send heartbeats while the save moves, so that the other ranks wait for a slow rank."""
    last: float | None = None  # the first heartbeat tells that the save has begun here
    for pause_secs in heartbeat_pauses(ctx.config.stall_timeout_secs):
        await anyio.sleep(pause_secs)
        if save.progress.last != last or save.progress.is_paused:
            last = save.progress.last
            try:
                await ctx.members.coordinator.beat()
            except AioCkptError:
                if not save.round.is_committing:  # a commit goes on without the store
                    raise
