"""Rescue: commit what a dead trainer had staged in named segments and not written; give back what nobody can use."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import anyio
import msgspec
from isal import isal_zlib

from aio_ckpt.checks import is_path
from aio_ckpt.commit import publish as commit
from aio_ckpt.commit.cleanup import SETTLE_SECS
from aio_ckpt.commit.discovery import read_save_id
from aio_ckpt.commit.manifests import metadata_file, render_root
from aio_ckpt.commit.owner import Owner, clear_leftovers, make_engine_dirs, pending_path, write_owner
from aio_ckpt.errors import AioCkptError, CorruptCheckpointError
from aio_ckpt.format.manifests import (
    METADATA_FILE,
    FileEntry,
    data_file_name,
    encode_rank,
    encode_static,
    rank_manifest_name,
)
from aio_ckpt.format.names import LOCK_FILE, SEGMENTS_FILE, StepNames
from aio_ckpt.memory.arena import Arena
from aio_ckpt.memory.lifetime import Lease
from aio_ckpt.plan.layout import file_chunks
from aio_ckpt.rescue.segment import OrphanSnapshots, SegmentDirectory, map_image
from aio_ckpt.rescue.snapshot_record import layout_of
from aio_ckpt.rescue.survey import Decision, OrphanSegment, Refusal, RescuableSave, decide, find_orphans, segment_prefix
from aio_ckpt.runtime.futures import first_cause
from aio_ckpt.runtime.portal import Executor, Portal, run_blocking
from aio_ckpt.snapshot.image import Image
from aio_ckpt.storage.local import Storage
from aio_ckpt.write.trace_file import NO_TRACE
from aio_ckpt.write.writer import ChunkPreparer, new_file, write_image

__all__ = [
    "RescueReport",
    "Rescued",
    "Unrescued",
    "forget_segments",
    "open_segments",
    "reclaim",
    "rescue_root",
    "tell_rescuable",
]

_WORKERS = 4
_DIRECTORIES = msgspec.json.Decoder(list[str])
_log = logging.getLogger("aio_ckpt")


class Rescued(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot that is a checkpoint now."""

    step: int
    """Its step."""
    path: str
    """The committed directory."""
    nbytes: int
    """Of its data files."""


class Unrescued(msgspec.Struct, frozen=True, kw_only=True):
    """Segments that were not committed."""

    step: int | None
    """Of their save; None if no seal tells."""
    reason: str
    """Why."""
    segments: tuple[str, ...]
    """Their files."""
    is_loss: bool
    """Whether a whole snapshot, or what claims to be one, was not committed."""
    is_removed: bool
    """Whether their memory was given back: nobody can ever commit them, or needs to."""


class RescueReport(msgspec.Struct, frozen=True, kw_only=True):
    """What :func:`rescue_root` found and did."""

    root: str
    """The root."""
    rescued: tuple[Rescued, ...]
    """Committed now, ascending by step."""
    refused: tuple[Unrescued, ...]
    """All others."""


# -- where to look --------------------------------------------------------------------------------


def segment_directories(root: Path) -> list[Path]:
    """Where writers of ``root`` said that they make their segments; empty if none did, or each has ended well."""
    try:
        found = _DIRECTORIES.decode((root / SEGMENTS_FILE).read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return []
    return [Path(text) for text in found if is_path(text)]  # others name no directory, whoever wrote them


def open_segments(
    root: Path, owner: Owner, shm_path: str | Path | None
) -> tuple[SegmentDirectory | None, OrphanSnapshots]:
    """Where an engine makes its segments, and what it keeps of others'. ConfigError: see :class:`SegmentDirectory`."""
    kept = OrphanSnapshots()
    if shm_path is None:
        return None, kept
    return SegmentDirectory(Path(shm_path).absolute(), f"{segment_prefix(root)}{owner.session}-{owner.tag}", kept), kept


async def _decide(storage: Storage, root: Path, names: StepNames, found: Sequence[OrphanSegment]) -> Decision:
    steps = {orphan.record.step for orphan in found if orphan.record is not None}
    committed = {
        checkpoint.step: await read_save_id(storage, checkpoint.path) if checkpoint.step in steps else ""
        for checkpoint in (await commit.discover(storage, root, names) if found else ())
    }
    return decide(found, committed)


# -- a writer's own -------------------------------------------------------------------------------


def tell_rescuable(
    storage: Storage,
    root: Path,
    names: StepNames,
    here: Owner,
    portal: Portal,
    *,
    segments: SegmentDirectory | None,
    kept: OrphanSnapshots,
    stale_after_secs: float,
    limit_secs: float,
) -> None:
    """When an engine is opened: say in the log what a dead trainer orphan that may be worth more than a resume.

    On every rank: what lies in the memory of another host only a rank there can give up.
    """
    found = find_orphans(_places(root, segments), root, here, stale_after_secs=stale_after_secs)
    if not any(orphan.record is not None and orphan.owner_is_dead for orphan in found):
        return
    try:
        decision = portal.call(_decide, storage, root, names, found, timeout=limit_secs, what="opening")
    except (AioCkptError, OSError) as error:
        _log.warning("what a trainer that died has staged for %s could not be compared with its steps: %s", root, error)
        return
    for save in decision.saves:
        _log.warning(
            "step %d was staged by a trainer that died, and not committed: `aio-ckpt rescue %s` commits it; the first "
            "commit of this engine gives it up",
            save.step,
            root,
        )
    kept.keep(_segments_of(decision))


def _segments_of(decision: Decision) -> list[tuple[int, Path]]:
    return [(save.step, save.orphan.path) for save in decision.saves]


async def reclaim(
    storage: Storage,
    executor: Executor,
    root: Path,
    names: StepNames,
    here: Owner,
    *,
    segments: SegmentDirectory | None,
    kept: OrphanSnapshots,
    stale_after_secs: float,
) -> None:
    """For the holder of the root's lock: remove the segments of dead writers; keep those that can be rescued.

    They are kept until this engine has committed a step of its own, goes back behind theirs, or needs their memory.
    """
    if segments is None and not await storage.exists(root / SEGMENTS_FILE):
        return
    find = functools.partial(find_orphans, stale_after_secs=stale_after_secs)
    found = await run_blocking(executor, find, _places(root, segments), root, here)
    decision = await _decide(storage, root, names, found)
    for refusal in decision.refusals:
        if refusal.is_obsolete:
            (_log.warning if refusal.is_loss else _log.info)("removed %s: %s", _told(refusal.segments), refusal.reason)
            await run_blocking(executor, _remove, refusal.segments)
    kept.keep(_segments_of(decision))
    own = [] if segments is None else [segments.path]
    places = list(dict.fromkeys([*own, *(path.parent for path in kept.paths)]))
    if places:
        await _tell_places(storage, root, places)
    else:
        await storage.remove_file(root / SEGMENTS_FILE)


async def _tell_places(storage: Storage, root: Path, places: Sequence[Path]) -> None:
    """Say where segments are: whatever fails here, the old places are told or the new ones, or a snapshot is lost."""
    if segment_directories(root) == places:
        return
    temporary = root / f"{SEGMENTS_FILE}.tmp"
    await storage.remove_file(temporary)  # of a writer that was killed here
    await storage.write_file(temporary, msgspec.json.encode([str(path) for path in places]))
    await storage.replace(temporary, root / SEGMENTS_FILE)


def forget_segments(root: Path, kept: OrphanSnapshots) -> None:
    """At a clean end of the writer: nothing of its own is orphan to be found."""
    if not kept.paths:
        with contextlib.suppress(OSError):  # a hint, that costs the next writer a look
            (root / SEGMENTS_FILE).unlink(missing_ok=True)


def _places(root: Path, own: SegmentDirectory | None) -> list[Path]:
    return [*segment_directories(root), *([own.path] if own else [])]


def _told(segments: Iterable[OrphanSegment]) -> str:
    return ", ".join(str(orphan.path) for orphan in segments)


def _remove(segments: Iterable[OrphanSegment]) -> None:
    for orphan in segments:
        orphan.path.unlink(missing_ok=True)


# -- committing -----------------------------------------------------------------------------------


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
    """Commit every sealed snapshot of dead trainers that is newer than what is committed, oldest first.

    Args:
        directories: where to look beside the places that the root's writers have told.

    Raises:
        RootError: a writer, alive, holds the root.
        WriteError: the disk; what was not committed stays where it is.
    """
    places = [*directories, *segment_directories(root)]
    find = functools.partial(find_orphans, places, root, here, stale_after_secs=stale_after_secs)
    if not await run_blocking(executor, find):
        return RescueReport(root=str(root), rescued=(), refused=())  # a root that nobody staged for is not touched
    with storage.lock(root / LOCK_FILE):
        await make_engine_dirs(storage, root)
        await clear_leftovers(storage, root, names, here=here, stale_after_secs=stale_after_secs)
        decision = await _decide(storage, root, names, await run_blocking(executor, find))
        rescued, torn = list[Rescued](), list[Refusal]()
        for number, save in enumerate(decision.saves, start=1):
            try:
                _check_name(save, names)
                rescued.append(await _commit(storage, executor, root, here, save, number))
            except CorruptCheckpointError as error:
                torn.append(
                    Refusal(step=save.step, reason=str(error), segments=(save.orphan,), is_obsolete=False, is_loss=True)
                )
            else:
                await run_blocking(executor, _remove, [save.orphan])
        kept = {refusal.step for refusal in torn}  # what a torn one superseded may be all that is orphan of its step
        refused = []
        for refusal in (*decision.refusals, *torn):
            is_removed = refusal.is_obsolete and not refusal.is_loss and refusal.step not in kept
            if is_removed:
                await run_blocking(executor, _remove, refusal.segments)
            refused.append(_unrescued(refusal, is_removed=is_removed))
        if not await run_blocking(executor, find):
            await storage.remove_file(root / SEGMENTS_FILE)
        return RescueReport(root=str(root), rescued=tuple(rescued), refused=tuple(refused))


def _unrescued(refusal: Refusal, *, is_removed: bool) -> Unrescued:
    return Unrescued(
        step=refusal.step,
        reason=refusal.reason,
        segments=tuple(str(orphan.path) for orphan in refusal.segments),
        is_loss=refusal.is_loss,
        is_removed=is_removed,
    )


def _check_name(save: RescuableSave, names: StepNames) -> None:
    """Committed steps were looked for by name: under another pattern the order of the steps was not checked."""
    directory = save.record.directory
    if names.step(directory) != save.step:
        raise CorruptCheckpointError(f"step {save.step} is to be called {directory!r}: give the trainer's --step-dir")


async def _commit(
    storage: Storage, executor: Executor, root: Path, here: Owner, save: RescuableSave, number: int
) -> Rescued:
    record = save.record
    pending, final = pending_path(root, here, number), root / record.directory
    await storage.make_dir(pending)
    try:
        await write_owner(storage, pending, here)
        manifest, nbytes = await _write_data(storage, executor, pending, save)
        await storage.write_file(pending / METADATA_FILE, record.metadata)
        root_manifest = render_root(
            metadata_file(record.metadata),
            [manifest],
            step=save.step,
            save_id=record.save_id,
            created_unix=time.time(),
            metrics=record.metrics,
        )
        await commit.sync_pending(storage, pending, root_manifest)
        await commit.publish(storage, pending=pending, final=final, overwrite=record.overwrite)
    except BaseException as error:
        if not (isinstance(error, AioCkptError) and error.in_doubt):
            with anyio.CancelScope(shield=True), contextlib.suppress(AioCkptError, OSError):
                await storage.remove_tree(pending)
        cause = first_cause(error)
        if cause is error:
            raise
        raise cause from cause.__cause__
    return Rescued(step=save.step, path=str(final), nbytes=nbytes)


async def _is_captured(_: int) -> None:
    """Every chunk is: it is sealed."""


async def _is_admitted(_: int) -> None:
    """At any rate: no training waits beside it."""


async def _write_data(
    storage: Storage, executor: Executor, pending: Path, save: RescuableSave
) -> tuple[FileEntry, int]:
    """Write the data and the rank's manifest; what the root manifest says of it, and the length of the data.

    Raises:
        CorruptCheckpointError: the snapshot is torn: what was written is not what was sealed.
    """
    orphan, record = save.orphan, save.record
    sealed, layout = layout_of(record)
    memory = map_image(orphan.stored)
    chunks = file_chunks(layout, record.image_bytes)
    lease = Lease(Arena(memory, "shm"), lambda _: None, waited_secs=0.0)
    image = Image(lease=lease, chunks=chunks, chunk_bytes=layout.chunk_bytes, slots=len(chunks), written=())
    name = data_file_name(0)
    try:
        result = await write_image(
            image,
            ChunkPreparer(layout, record.objects, renders_constants=True),
            new_file(
                storage,
                pending / name,
                record.image_bytes,
                writers=_WORKERS,
                settle_secs=SETTLE_SECS,
                begin=lambda _: None,
            ),
            executor,
            workers=_WORKERS,
            captured=_is_captured,
            admit=_is_admitted,
            on_written=lambda _: None,
            trace=NO_TRACE,
        )
    finally:
        lease.close()
    if result.sums != sealed.sums:
        raise CorruptCheckpointError(f"{orphan.path.name}: torn: its bytes do not match the sums in its seal")
    manifest = encode_rank(
        save_id=record.save_id,
        step=record.step,
        rank=0,
        world_size=1,
        file=FileEntry(name, result.image_bytes, result.file_crc32),
        tensors=encode_static(sealed.tensors),
        sums=result.sums,
        objects=sealed.objects,
        skeleton=sealed.skeleton,
    )
    await storage.write_file(pending / rank_manifest_name(0), manifest)
    return FileEntry(rank_manifest_name(0), len(manifest), isal_zlib.crc32(manifest)), result.image_bytes
