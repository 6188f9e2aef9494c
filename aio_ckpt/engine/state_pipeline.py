"""One save on the engine's loop: write, vote, commit; and its cleanup if a stage fails."""

from __future__ import annotations

import errno
import logging
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import anyio
import anyio.lowlevel

from aio_ckpt.argument_checks import MAX_SECS
from aio_ckpt.commit import path_checkpoints, publish
from aio_ckpt.commit.manifests import (
    MetadataFile,
    check_complete,
    object_entries,
    object_spans,
    render_metadata_file,
    render_rank,
    render_root,
    written_names,
)
from aio_ckpt.commit.root_claim import Claim
from aio_ckpt.commit.trash import Trash
from aio_ckpt.commit.user_files import write_user_files
from aio_ckpt.engine.common_stages import CommonStages
from aio_ckpt.engine.context import EngineContext
from aio_ckpt.engine.failed_save import end_failed_save
from aio_ckpt.engine.full_disk_remedy import explain_if_disk_full
from aio_ckpt.engine.job import SaveJob, sent_target
from aio_ckpt.engine.newest_frozen_file import NewestFrozenFile
from aio_ckpt.engine.root_session import RootSession
from aio_ckpt.errors import AioCkptError, ReadError, RootError, WriteError
from aio_ckpt.format.checkpoint_files import METADATA_FILE, rank_manifest_name
from aio_ckpt.format.checksum import crc32_of
from aio_ckpt.format.root_manifest import FileEntry
from aio_ckpt.plan.global_plan import packed_places
from aio_ckpt.ranks.heartbeats import heartbeat_pauses
from aio_ckpt.ranks.save_ledger import CommitReply, Vote, extents_crc32
from aio_ckpt.remote_path import RemotePath
from aio_ckpt.reports import SaveReport, amount
from aio_ckpt.rescue.hooks import Rescue
from aio_ckpt.rescue.snapshot_record import SnapshotRecord
from aio_ckpt.runtime.deadline import Deadline
from aio_ckpt.runtime.futures import first_cause
from aio_ckpt.runtime.log_records import log_step
from aio_ckpt.runtime.portal import run_blocking
from aio_ckpt.write.frozen_file import NOT_CAPTURED, FrozenFile, write_frozen, write_trusted
from aio_ckpt.write.full_disk import is_disk_full
from aio_ckpt.write.part import Part, write_part
from aio_ckpt.write.result import WriteResult
from aio_ckpt.write.writer import FileWriter

_GONE = frozenset({errno.ENOENT, errno.ESTALE})
_HEAD_START_SECS = 0.05
"""Time that the leader has to make the directory of a save. On a shared file system, a rank that makes it, too, needs
two calls to the server more."""
_REPLY_SECS = 1.0
"""Time after its deadline within which a save ends: a living leader answers in milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenRank:
    """Files that one rank has written, durable."""

    result: WriteResult
    """Result of writing the data file."""
    frozen: FrozenFile | None
    """Frozen file; None if the plan has none."""
    metadata: MetadataFile | None
    """``.metadata`` as written by this rank; None if the leader renders it for all ranks."""
    spans: Sequence[tuple[int, int]]
    """Places of the objects in the data file."""
    manifest_bytes: int
    """Length of the rank's manifest."""
    manifest_crc32: int
    """CRC32 of the rank's manifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePipeline:
    """Pipeline of a checkpoint, of a step or at a path, up to its commit, which :meth:`save` shows.

    What follows a commit (retention, mirror, ticket) is in :meth:`aio_ckpt.engine.job_queue.JobQueue.finish`.
    """

    ctx: EngineContext
    stages: CommonStages
    root_session: RootSession
    claim: Claim
    """Read before each commit: a writer that was taken over commits nothing."""
    renames: anyio.Lock
    """Orders all renames under the root."""
    trash: Trash
    """Deletes the directories of failed saves, and what is left of replaced checkpoints."""
    newest_frozen: NewestFrozenFile
    """What did not change from save to save."""
    rescue: Rescue | None = None
    """Records each snapshot in a named segment, which can then be committed after a crash."""

    async def save(self, job: SaveJob) -> SaveReport:
        """Write, vote, commit, with heartbeats."""
        ctx, group = self.ctx, job.round
        async with anyio.create_task_group() as beside:
            if ctx.world_size > 1:
                beside.start_soon(_send_heartbeats, ctx, job)
            try:
                await self._make_pending(job)
                written = await self._write_rank(job)  # data file and rank manifest, durable
                vote = self._vote(job, written)
                with job.stall.paused():
                    votes = await group.gather(vote)  # on the leader: of every rank; elsewhere ()
                if group.is_leader:
                    await self._publish(job, written.metadata, votes)  # .metadata, root manifest, one rename
                with job.stall.paused():
                    reply = await group.finish(votes, job.call.extra)  # every rank knows of the commit
                await job.wait_for_earlier()
            finally:
                job.parts[0].image.lease.release(job.finished)  # visible or failed: ends the hold of the rescue
            beside.cancel_scope.cancel()
        ctx.members.sent.confirm(job.plan.layout, written.spans)  # the leader knows the places of the objects
        self.newest_frozen.committed(job.plan, written.result, written.frozen, job.versions)
        job.begin("ending")
        return self._report(job, written, reply)

    # -- write ----------------------------------------------------------------------------------------

    async def _make_pending(self, job: SaveJob) -> None:
        storage = self.ctx.storage
        if job.round.is_leader:
            job.begin("looking at the lock of the root")
            await self.root_session.renew()
        job.begin("making its directory")
        if not job.round.is_leader:  # thousands of mkdirs of one name are slow
            if self.ctx.mount.is_shared:
                await anyio.sleep(_HEAD_START_SECS)
            if await storage.has_begun(job.pending):
                return
        await storage.begin_dir(job.pending, job.final, job.save_id)

    async def _write_rank(self, job: SaveJob) -> WrittenRank:
        """Write the data file and this rank's manifest, durable; ``.metadata``, too, if it depends on no other rank."""
        ctx, plan, storage, image = self.ctx, job.plan, self.ctx.storage, job.parts[0].image
        spans, metadata = object_spans(plan, job.objects), None
        async with anyio.create_task_group() as beside:
            if plan.metadata is not None:
                metadata = render_metadata_file(plan.metadata, spans, checkpoint_id=str(job.final), save_id=job.save_id)
                beside.start_soon(storage.write_file, job.pending / METADATA_FILE, *metadata.parts)
                # A save by path cannot be rescued.
                if self.rescue is not None and job.step is not None and image.lease.arena.segment is not None:
                    beside.start_soon(self._record_snapshot, self.rescue, job, metadata, job.step)
            result, frozen = await self._write_data(job, job.parts[0])
            if image.is_whole:
                image.lease.arena.keep_constants(job.parts[0].layout)
            job.begin("writing its .metadata")
            image.lease.close()
        job.timer.reached("synced")
        entries = object_entries(plan, job.objects)
        of_frozen = None if frozen is None else frozen.result
        written = written_names(plan, entries, [result] if of_frozen is None else [of_frozen, result])
        check_complete(frozenset(job.requested), written | plan.elsewhere if plan.elsewhere else written)
        job.begin("writing the rank's manifest")
        manifest = render_rank(
            plan,
            entries,
            result,
            of_frozen,
            step=job.stored_step,
            save_id=job.save_id,
            rank=ctx.rank,
            world_size=ctx.world_size,
        )
        await storage.write_file(job.write_dir / rank_manifest_name(job.save_id, ctx.rank), manifest)
        job.begin("waiting for the other ranks", stage="agree")
        return WrittenRank(
            result=result,
            frozen=frozen,
            metadata=metadata,
            spans=spans,
            manifest_bytes=len(manifest),
            manifest_crc32=crc32_of(manifest),
        )

    async def _write_data(self, job: SaveJob, part: Part) -> tuple[WriteResult, FrozenFile | None]:
        """Write the data file, and write or clone the frozen file beside it."""
        writer, frozen = self.stages.file_writer(job), None

        async def make_frozen() -> None:
            nonlocal frozen
            job.clone_source = self.newest_frozen.take()
            if job.trusted_file is not None:
                frozen = await self._renew_frozen(job, part, job.trusted_file, writer)
                return
            frozen = await write_frozen(part, job.write_dir, job.final, job.clone_source, writer)

        async with anyio.create_task_group() as beside:
            if job.plan.layout.frozen_items:
                beside.start_soon(make_frozen)
            result = await write_part(part, job.write_dir / part.name, writer)
            job.stall.touch()  # the other file may still be made durable
        # A cancellation may end the other task alone, and with it the group, before it reaches this one.
        await anyio.lowlevel.checkpoint_if_cancelled()
        return result if job.trusted_file is None else result.moved(job.plan.layout.frozen_chunks), frozen

    async def _renew_frozen(self, job: SaveJob, part: Part, trusted: FrozenFile, writer: FileWriter) -> FrozenFile:
        """Clone or copy the frozen file, whose leaves were not captured.

        If the step of ``trusted`` is deleted meanwhile, a newer one has the same bytes. If none has them, the next save
        captures the leaves.
        """
        shared, layout = job.clone_source, job.plan.layout
        while True:
            may_clone = shared is not None and shared.sharers is trusted.sharers
            try:
                return await write_trusted(part, layout, job.write_dir, job.final, trusted, writer, may_clone=may_clone)
            except ReadError as error:
                newest = self.newest_frozen.newest
                if newest is None or newest is trusted or not newest.holds(trusted.result):
                    self.newest_frozen.forget()
                    error.strerror = f"{error.strerror}, and {NOT_CAPTURED}"
                    raise
                trusted = newest
            except Exception as error:
                if not is_disk_full(first_cause(error)):
                    self.newest_frozen.forget()
                raise

    async def _record_snapshot(self, rescue: Rescue, job: SaveJob, metadata: MetadataFile, step: int) -> None:
        call, part = job.call, job.parts[0]
        record = SnapshotRecord(
            directory=job.final.name,
            save_id=job.save_id,
            step=step,
            overwrite=call.overwrite,
            metrics=dict(call.metrics),
            extra=dict(call.extra),
            metadata=b"".join(metadata.parts),
        )
        await rescue.record(record, job.plan, job.objects, part.image, part.chunks, finished=job.finished)

    # -- vote -----------------------------------------------------------------------------------------

    def _vote(self, job: SaveJob, written: WrittenRank) -> Vote:
        """Return this rank's vote to commit, which describes the files that it has written."""
        plan, sent, timer = job.plan, self.ctx.members.sent, job.timer
        is_alone, is_first = all(finished.done() for finished in job.earlier), sent.is_new(plan.layout)
        return Vote(
            sent_target(job.target, self.ctx.root),
            plan.share_id,
            written.manifest_bytes,
            written.manifest_crc32,
            (timer.secs["blocked"], timer.secs["staged"], timer.secs["written"]),
            sent.moved(plan.layout, written.spans, is_alone=is_alone),
            extents_crc32(written.spans),
            job.content,
            packed_places(plan.layout, plan.held) if is_first else None,
        )

    # -- commit ---------------------------------------------------------------------------------------

    async def _publish(self, job: SaveJob, metadata: MetadataFile | None, votes: Sequence[Vote]) -> None:
        """Make the pending directory durable, then visible by one rename. Only the leader calls this."""
        ctx = self.ctx
        job.begin("waiting for the commit of the save before")
        await job.wait_for_earlier()
        if metadata is None:
            metadata = await self._metadata_of_all(job, votes)
        job.timer.reached("agreed")
        root_manifest = render_root(
            metadata,
            [
                FileEntry(rank_manifest_name(job.save_id, rank), vote.nbytes, vote.crc32)
                for rank, vote in enumerate(votes)
            ],
            step=job.stored_step,
            save_id=job.save_id,
            created_unix=time.time(),
            metrics=job.call.metrics,
            extra=job.call.extra,
            files=job.call.files,
        )
        job.begin("making its directory durable", stage="commit")
        if job.call.path is not None:
            await path_checkpoints.prepare_place(ctx.storage, job.call.path)
        await write_user_files(ctx.storage, job.pending, job.write_dir, job.call.files, self.claim.check)
        await publish.sync_pending(ctx.storage, job.write_dir, job.save_id, root_manifest)
        job.timer.reached("dir_synced")
        job.begin("waiting while other checkpoints are renamed")
        async with self.stages.committing(job, self.renames):
            await self.claim.check()
            if job.call.overwrite or job.call.path is not None:
                for directory in await publish.publish_over(
                    ctx.storage, pending=job.pending, final=job.final, save_id=job.save_id, check=self.claim.check
                ):
                    self.trash.add(directory)
            else:
                await publish.publish(ctx.storage, pending=job.pending, final=job.final)
            await self._check_in_time(job)

    async def _check_in_time(self, job: SaveJob) -> None:
        """Raise RootError, in doubt, if the next writer may have cleared the files before a commit in a store, whose
        request hung."""
        if isinstance(job.final, RemotePath):
            try:
                await self.claim.check()
            except RootError as error:
                error.in_doubt = True
                raise

    async def _metadata_of_all(self, job: SaveJob, votes: Sequence[Vote]) -> MetadataFile:
        """Render and write ``.metadata`` of the shares of all ranks."""
        ctx, ledger = self.ctx, self.ctx.members.ledger
        job.begin("rendering .metadata")
        spans = ledger.learn(votes)
        with job.stall.paused():  # takes seconds for 10,000 ranks, without any request to the storage
            template = await run_blocking(ctx.executor, ledger.template, votes)
        metadata = render_metadata_file(template, spans, checkpoint_id=str(job.final), save_id=job.save_id)
        await ctx.storage.write_file(job.pending / METADATA_FILE, *metadata.parts)
        return metadata

    def _report(self, job: SaveJob, written: WrittenRank, reply: CommitReply) -> SaveReport:
        frozen_bytes = 0 if written.frozen is None else written.frozen.result.image_bytes
        return SaveReport(
            step=job.stored_step,
            path=job.final,
            image_bytes=written.result.image_bytes + frozen_bytes,
            cloned_bytes=frozen_bytes if written.frozen is not None and written.frozen.is_clone else 0,
            raw_bytes=job.plan.layout.raw_bytes,
            plan_hit=job.plan_hit,
            fingerprint_hit=job.fingerprint_hit,
            mode=written.result.mode,
            timings=job.timer.timings(),
            slowest_rank=reply.slowest,
            extra=reply.extra,
        )

    # -- clean up -------------------------------------------------------------------------------------

    async def clean_up(self, job: SaveJob, cause: BaseException, stage: str) -> BaseException:
        """Tell the other ranks of a failure, then delete the files of the save. Returns the first error."""
        if job.round.is_leader and isinstance(cause, WriteError | ReadError) and cause.errno in _GONE:
            cause = await self._lost_claim(cause)
        await explain_if_disk_full(cause, self.ctx, _needed_bytes(job, cause), job.target)
        if is_disk_full(cause) and job.plan.layout.frozen_items and job.clone_source is None:
            self._lift_relink_limit(job)
        end = await job.round.end(cause, stage=stage, limit_secs=_reply_secs(job.deadline))
        await end_failed_save(
            self.trash,
            job.pending if end.may_clear else None,
            [part.image for part in job.parts],
            job.threads,
            title=job.title,
            cause=end.cause,
            is_in_doubt=isinstance(end.cause, AioCkptError) and end.cause.in_doubt,
            are_several=self.ctx.world_size > 1,
        )
        return end.cause

    def _lift_relink_limit(self, job: SaveJob) -> None:
        """Let later saves share the frozen file beyond the limit, if this one failed as it wrote another one."""
        shared = self.newest_frozen.lift_relink_limit()
        if shared is not None:
            log_step(
                logging.WARNING,
                job.step,
                self.ctx.rank,
                "the disk has no room for a fresh copy of the tensors that do not change (%s): saves go on to share "
                "that of %s, beyond relink_limit=%d. To delete steps that share it frees none of it. Logged once",
                amount(shared.result.image_bytes),
                shared.path.parent,
                self.newest_frozen.relink_limit,
            )

    async def _lost_claim(self, cause: WriteError | ReadError) -> BaseException:
        """Return why the pending directory is gone, if another writer has taken over and cleared it; else ``cause``."""
        try:
            await self.claim.check()
        except RootError as error:
            error.__cause__ = cause
            return error
        return cause


def _needed_bytes(job: SaveJob, cause: BaseException) -> int:
    """Return the bytes that the data files of a failed save take. A clone takes none."""
    frozen_bytes = job.plan.layout.main_start
    main_bytes = job.image_bytes - (frozen_bytes if job.trusted_file is None else 0)
    failed_name = os.path.basename(str(getattr(cause, "filename", "")))
    is_cloned = job.clone_source is not None and all(part.frozen_name != failed_name for part in job.parts)
    return main_bytes + (0 if is_cloned else frozen_bytes)


def _reply_secs(deadline: Deadline) -> float:
    """Return how long a failed save may wait for the leader's reply, while the leader lives."""
    return math.inf if deadline.secs is None else deadline.left_secs(MAX_SECS) + _REPLY_SECS


async def _send_heartbeats(ctx: EngineContext, job: SaveJob) -> None:
    """Send heartbeats while the save moves, so that the other ranks wait for a slow rank."""
    last: float | None = None  # the first heartbeat tells that the save has begun here
    for pause_secs in heartbeat_pauses(ctx.config.stall_timeout_secs):
        await anyio.sleep(pause_secs)
        if job.stall.last != last or job.stall.is_paused:
            last = job.stall.last
            try:
                await ctx.members.coordinator.beat()
            except AioCkptError:
                if not job.round.is_committing:  # a commit goes on without the store
                    raise
