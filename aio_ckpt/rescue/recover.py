"""The rescue command: commit the snapshots that dead trainers staged in named segments, and free the other segments."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Sequence
from pathlib import Path

import anyio
import msgspec

from aio_ckpt.commit import publish
from aio_ckpt.commit.manifests import metadata_file, render_root
from aio_ckpt.commit.owner import Owner, pending_path
from aio_ckpt.commit.root_claim import Claim
from aio_ckpt.commit.root_writer import writing
from aio_ckpt.commit.trash import THREAD_WAIT_SECS
from aio_ckpt.errors import AioCkptError, CorruptCheckpointError
from aio_ckpt.format.checkpoint_files import METADATA_FILE, data_file_name, rank_manifest_name
from aio_ckpt.format.checksum import crc32_of
from aio_ckpt.format.rank_manifest import encode_rank, encode_static
from aio_ckpt.format.root_manifest import FileEntry
from aio_ckpt.format.root_names import SEGMENTS_FILE
from aio_ckpt.format.step_names import StepNames
from aio_ckpt.memory.arena import Arena
from aio_ckpt.memory.arena_lifetimes import Lease
from aio_ckpt.plan.layout import file_chunks
from aio_ckpt.rescue.decision import Refusal, RescuableSave, decide_against_root
from aio_ckpt.rescue.found_segments import find_segments, remove_segment, segment_directories
from aio_ckpt.rescue.segment import map_image
from aio_ckpt.rescue.snapshot_record import layout_of
from aio_ckpt.runtime.futures import first_cause
from aio_ckpt.runtime.portal import Executor, run_blocking
from aio_ckpt.snapshot.image import Image
from aio_ckpt.storage.local import Storage
from aio_ckpt.write.writer import ChunkPreparer, FileWriter

_WORKERS = 4


class Rescued(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot that is a committed checkpoint now."""

    step: int
    path: str
    nbytes: int
    """Length of the data file."""


class Unrescued(msgspec.Struct, frozen=True, kw_only=True):
    """Segments that were not committed."""

    step: int | None
    """None if no readable snapshot record holds the step."""
    reason: str
    segments: tuple[str, ...]
    """Segment files."""
    is_loss: bool
    """Whether a complete snapshot, or a segment that claims to hold one, was not committed."""
    is_removed: bool
    """Whether the memory was freed, because the segments can never be committed, or need not be."""


class RescueReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of :func:`rescue_root`: the committed snapshots and the refused segments."""

    root: str
    rescued: tuple[Rescued, ...]
    """Committed by this call, ascending by step."""
    refused: tuple[Unrescued, ...]
    """All other segments."""


async def rescue_root(
    storage: Storage,
    executor: Executor,
    root: Path,
    names: StepNames,
    here: Owner,
    *,
    directories: Sequence[Path],
    stale_after_secs: float,
) -> RescueReport:
    """Commit every complete snapshot of a dead trainer that is newer than the committed steps, oldest first.

    Args:
        directories: searched beside the directories that the root's writers recorded.

    Raises:
        RootError: a living writer holds the root.
        WriteError: the disk could not be written; snapshots that were not committed stay where they are.
    """
    places = [*directories, *segment_directories(root)]
    find = functools.partial(find_segments, places, root, here, stale_after_secs=stale_after_secs)
    if not await run_blocking(executor, find):
        return RescueReport(root=str(root), rescued=(), refused=())  # a root without segments is not touched
    async with writing(storage, root, names, here, stale_after_secs=stale_after_secs) as claim:
        found = await run_blocking(executor, find)
        decision = await decide_against_root(storage, root, names, found)
        rescued, torn = list[Rescued](), list[Refusal]()
        for number, save in enumerate(decision.saves, start=1):
            try:
                rescued.append(await _commit(storage, executor, root, names, claim, save, number))
            except CorruptCheckpointError as error:
                torn.append(
                    Refusal(step=save.step, reason=str(error), orphan=save.orphan, is_obsolete=False, is_loss=True)
                )
            else:
                await run_blocking(executor, remove_segment, save.orphan)
        kept = {refusal.step for refusal in torn}  # an older snapshot of a torn step may be all that is left of it
        refused = []
        for refusal in (*decision.refusals, *torn):
            is_removed = refusal.is_obsolete and not refusal.is_loss and refusal.step not in kept
            if is_removed:
                await run_blocking(executor, remove_segment, refusal.orphan)
            refused.append(
                Unrescued(
                    step=refusal.step,
                    reason=refusal.reason,
                    segments=(str(refusal.orphan.stored.path),),
                    is_loss=refusal.is_loss,
                    is_removed=is_removed,
                )
            )
        if not await run_blocking(executor, find):
            await storage.remove_file(root / SEGMENTS_FILE)
        return RescueReport(root=str(root), rescued=tuple(rescued), refused=tuple(refused))


async def _commit(
    storage: Storage, executor: Executor, root: Path, names: StepNames, claim: Claim, save: RescuableSave, number: int
) -> Rescued:
    record = save.record
    if names.step(record.directory) != save.step:  # committed steps were found by this pattern, and compared with it
        raise CorruptCheckpointError(
            f"step {save.step} is to be called {record.directory!r}: give the trainer's --step-dir"
        )
    pending, final = pending_path(root, claim.owner, number), root / record.directory
    await storage.make_dir(pending)
    try:
        manifest, nbytes = await _write_data(storage, executor, pending, save)
        await storage.write_file(pending / METADATA_FILE, record.metadata)
        root_manifest = render_root(
            metadata_file(record.metadata),
            [manifest],
            step=save.step,
            save_id=record.save_id,
            created_unix=time.time(),
            metrics=record.metrics,
            extra=record.extra,
        )
        await publish.sync_pending(storage, pending, record.save_id, root_manifest)
        await claim.check()
        if record.overwrite:
            save_id, check = record.save_id, claim.check
            await publish.publish_over(storage, pending=pending, final=final, save_id=save_id, check=check)
        else:
            await publish.publish(storage, pending=pending, final=final)
    except BaseException as error:
        if not (isinstance(error, AioCkptError) and error.in_doubt):
            with anyio.CancelScope(shield=True), contextlib.suppress(AioCkptError, OSError):
                await storage.remove_tree(pending)
        cause = first_cause(error)
        if cause is error:
            raise
        raise cause from cause.__cause__
    return Rescued(step=save.step, path=str(final), nbytes=nbytes)


async def _write_data(
    storage: Storage, executor: Executor, pending: Path, save: RescuableSave
) -> tuple[FileEntry, int]:
    """Write the data file and the rank's manifest. Return the manifest's entry, and the length of the data file.

    Raises:
        CorruptCheckpointError: the snapshot is torn: the written bytes do not match the sums in its record.
    """
    orphan, record = save.orphan, save.record
    recorded, layout = layout_of(record)
    memory = map_image(orphan.stored)
    chunks = file_chunks(layout, record.image_bytes)
    lease = Lease(Arena(memory, "shm"), lambda _: None, waited_secs=0.0)
    image = Image(lease=lease, chunks=chunks, chunk_bytes=layout.chunk_bytes, slots=len(chunks), written=())
    name = data_file_name(record.save_id, 0)
    try:
        writer = FileWriter(storage=storage, executor=executor, workers=_WORKERS, thread_wait_secs=THREAD_WAIT_SECS)
        preparer = ChunkPreparer(layout, record.objects, renders_constants=True)
        result = await writer.write_image(image, preparer, pending / name)
    finally:
        lease.close()
    if result.sums != recorded.sums:
        raise CorruptCheckpointError(f"{orphan.stored.path.name}: torn: its bytes do not match its snapshot record")
    manifest = encode_rank(
        save_id=record.save_id,
        step=record.step,
        rank=0,
        world_size=1,
        file=FileEntry(name, result.image_bytes, result.file_crc32),
        tensors=encode_static(recorded.tensors),
        sums=result.sums,
        objects=recorded.objects,
        skeleton=recorded.skeleton,
    )
    manifest_name = rank_manifest_name(record.save_id, 0)
    await storage.write_file(pending / manifest_name, manifest)
    return FileEntry(manifest_name, len(manifest), crc32_of(manifest)), result.image_bytes
