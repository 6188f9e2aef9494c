"""Sealed snapshots: what a dead trainer's segments hold, and which of them may be committed.

A snapshot is sealed once it is whole: its seal holds all that a commit needs beside the image, and a CRC32 of every
block of raw bytes. It counts as torn until then, and if any sum does not match.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from isal import isal_zlib

from aio_ckpt.envelope import render
from aio_ckpt.errors import AioCkptError, CorruptCheckpointError
from aio_ckpt.image import Image
from aio_ckpt.items import BLOCK_BYTES, PAGE_BYTES, ImageLayout, TensorItem, TensorSpec, WriteResult
from aio_ckpt.layout import cut_chunks
from aio_ckpt.manifest import RankManifest, decode_rank
from aio_ckpt.metadata import DTYPES, MAX_BYTES
from aio_ckpt.owner import Owner, is_abandoned, owner_by_name
from aio_ckpt.plan import Plan
from aio_ckpt.record import object_entries, render_rank
from aio_ckpt.segment import SEGMENT_PREFIX, Segment, StoredSegment, list_segments, read_segment
from aio_ckpt.snapshot import ObjectBytes

__all__ = [
    "Decision",
    "Left",
    "Refusal",
    "Seal",
    "SealedSave",
    "decide",
    "decode_seal",
    "find_left",
    "layout_of",
    "raw_sums",
    "seal_snapshot",
    "segment_prefix",
]

_VERSION = 1
_log = logging.getLogger("aio_ckpt")
_Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_BYTES)]
_Name = Annotated[str, msgspec.Meta(pattern=r"^(?!\.)[^/\x00]+\Z", max_length=255)]


class Seal(msgspec.Struct, frozen=True, kw_only=True):
    """What stands behind the image of one rank's whole snapshot."""

    root: str
    """Where it is to be committed."""
    directory: _Name
    """Name of its directory there."""
    save_id: str
    """The same for all ranks of one save."""
    step: _Size
    """Its step."""
    world_size: _Count
    """Ranks that save together."""
    rank: _Size
    """This one."""
    overwrite: bool
    """Whether it replaces a committed step."""
    metrics: dict[str, float | None]
    """What the caller measured."""
    created_unix: float
    """When it was sealed, by the trainer's clock."""
    metadata: bytes
    """``.metadata``; empty where only all ranks together know it."""
    version: int = _VERSION
    """Of this struct."""
    generation: _Size = 0
    """Of the segment when it was sealed."""
    chunk_bytes: Annotated[int, msgspec.Meta(ge=PAGE_BYTES, le=MAX_BYTES, multiple_of=PAGE_BYTES)] = PAGE_BYTES
    """Size of a chunk."""
    tensor_bytes: _Size = 0
    """Where the tensors end and the objects begin."""
    image_bytes: _Size = 0
    """Length of the data file."""
    objects: bytes = b""
    """What follows the tensors in the image."""
    manifest: bytes = b""
    """The rank's manifest but for the sum of the whole file, which is not known yet."""


def seal_snapshot(segment: Segment, seal: Seal, plan: Plan, objects: ObjectBytes, image: Image) -> None:
    """Sum a captured image and seal its segment; ``seal`` tells whose it is. No room for the seal: a note in the log.

    Only raw bytes are summed, which nobody changes any more: the write may be rendering the rest of the image.
    """
    layout, image_bytes = plan.layout, image.chunks[-1].stop
    result = WriteResult(
        image_bytes=image_bytes,
        file_crc32=0,
        sums=raw_sums(layout, memoryview(image.lease.arena.memory)),
        mode="buffered",
        chunks=0,
        chunks_written=frozenset(),
        items_sealed=0,
    )
    manifest = render_rank(
        plan,
        object_entries(plan, objects),
        result,
        step=seal.step,
        save_id=seal.save_id,
        rank=seal.rank,
        world_size=seal.world_size,
    )
    whole = msgspec.structs.replace(
        seal,
        generation=segment.next_generation,
        chunk_bytes=layout.chunk_bytes,
        tensor_bytes=layout.tensor_bytes,
        image_bytes=image_bytes,
        objects=objects.region,
        manifest=manifest,
    )
    try:
        segment.seal(msgspec.msgpack.encode(whole))
    except OSError as error:
        _log.warning("step %d could not be rescued: no room for its seal (%s)", seal.step, error)


def decode_seal(stored: StoredSegment) -> Seal:
    """The seal of a segment, its numbers checked.

    Raises:
        CorruptCheckpointError: it is none of this version, or does not belong to this filling of the segment.
    """
    name = stored.path.name
    try:
        seal = msgspec.msgpack.decode(stored.seal, type=Seal)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{name}: no seal of version {_VERSION}: {error}") from error
    if seal.version != _VERSION:
        raise CorruptCheckpointError(f"{name}: a seal of version {seal.version}, known here is {_VERSION}")
    if seal.generation != stored.generation:
        raise CorruptCheckpointError(f"{name}: torn: sealed at generation {seal.generation}, now {stored.generation}")
    if seal.rank >= seal.world_size:
        raise CorruptCheckpointError(f"{name}: rank {seal.rank} of {seal.world_size}")
    if max(seal.tensor_bytes + len(seal.objects), seal.image_bytes) > stored.capacity:
        raise CorruptCheckpointError(f"{name}: an image of {seal.image_bytes} bytes in {stored.capacity}")
    return seal


def layout_of(seal: Seal) -> tuple[RankManifest, ImageLayout]:
    """The rank's manifest in a seal, checked, and the layout that it describes.

    Raises:
        CorruptCheckpointError: it is not what this version would have laid out.
    """
    manifest = decode_rank(seal.manifest, name="seal")
    items = []
    for leaf, entry in enumerate(manifest.tensors):
        spec = TensorSpec(DTYPES[entry.dtype], entry.shape, entry.stride)
        item = TensorItem(
            leaf=leaf,
            fqns=entry.fqns,
            offsets=entry.offsets,
            spec=spec,
            envelope=render(spec),
            item_offset=entry.item_offset,
        )
        if (item.raw_offset, item.raw_bytes, item.envelope.item_bytes) != (
            entry.raw_offset,
            entry.raw_bytes,
            entry.item_bytes,
        ):
            raise CorruptCheckpointError(f"seal: {entry.fqns[0]!r} was laid out by another version")
        items.append(item)
    end = max((item.item_offset + item.envelope.item_bytes for item in items), default=0)
    is_ordered = all(a.trailer_offset <= b.item_offset for a, b in itertools.pairwise(items))
    if end != seal.tensor_bytes or not is_ordered:
        raise CorruptCheckpointError("seal: its tensors are not laid out one behind the other")
    return manifest, ImageLayout(
        items=tuple(items),
        chunk_bytes=seal.chunk_bytes,
        chunks=cut_chunks(items, seal.chunk_bytes, seal.tensor_bytes),
        tensor_bytes=seal.tensor_bytes,
        raw_bytes=sum(item.raw_bytes for item in items),
    )


def raw_sums(layout: ImageLayout, memory: memoryview) -> bytes:
    """CRC32 of each block of raw bytes, little-endian, as in the rank's manifest. ``memory`` holds the whole image."""
    crc32 = isal_zlib.crc32
    return b"".join(
        crc32(memory[start : min(start + BLOCK_BYTES, item.trailer_offset)]).to_bytes(4, "little")
        for item in layout.items
        for start in range(item.raw_offset, item.trailer_offset, BLOCK_BYTES)
    )


# -- what is left of dead trainers ----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """A segment that was found."""

    path: Path
    """Its file."""
    owner_is_dead: bool
    """Whether this host proves it, or has seen no sign of life for long."""
    stored: StoredSegment
    """What is in it."""
    seal: Seal | None
    """Its seal, if it has a good one."""
    fault: str
    """Why it has none."""
    is_damaged: bool = False
    """Whether it was sealed, and the seal is not good."""


def segment_prefix(root: Path) -> str:
    """What the names of all segments for ``root`` begin with."""
    real = os.path.realpath(root)
    return f"{SEGMENT_PREFIX}{hashlib.blake2b(os.fsencode(real), digest_size=8).hexdigest()}-"


def find_left(directories: Sequence[Path], root: Path, here: Owner, *, stale_after_secs: float) -> list[Left]:
    """Segments for ``root`` that other processes made, whether they live or not.

    An owner whose death cannot be proven, as of another container, counts as dead once it has sealed nothing for
    ``stale_after_secs``: only the holder of the root's lock, which a living writer would have, may act on that.
    """
    prefix, found = segment_prefix(root), []
    for directory in dict.fromkeys(directories):
        for path in list_segments(directory, prefix):
            owner = owner_by_name(path.name, here)
            if owner is not None and (owner.pid, owner.started_ticks) == (here.pid, here.started_ticks):
                continue
            stored, seal = read_segment(path), None
            fault, is_damaged = stored.fault, stored.is_damaged
            if not fault:
                try:
                    seal = decode_seal(stored)
                except AioCkptError as error:
                    fault, is_damaged = str(error), True
            idle_secs = None if stored.modified_unix is None else time.time() - stored.modified_unix
            is_dead = is_abandoned(owner, here, idle_secs=idle_secs, stale_after_secs=stale_after_secs)
            left = Left(path=path, owner_is_dead=is_dead, stored=stored, seal=seal, fault=fault, is_damaged=is_damaged)
            found.append(left)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedSave:
    """A save that all its ranks sealed."""

    step: int
    """Its step."""
    ranks: tuple[tuple[Left, Seal], ...]
    """By rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Segments that are not committed."""

    step: int | None
    """Of their save; None if no seal tells."""
    reason: str
    """Why."""
    segments: tuple[Left, ...]
    """Which."""
    is_obsolete: bool
    """Whether nobody can ever commit them, or needs to: their memory may be given back."""
    is_loss: bool
    """Whether a whole snapshot, or what claims to be one, is not committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What becomes of the segments of a root."""

    saves: tuple[SealedSave, ...]
    """To commit, ascending by step."""
    refusals: tuple[Refusal, ...]
    """All others."""


def decide(found: Sequence[Left], committed: Mapping[int, str]) -> Decision:
    """Which sealed saves may be committed.

    A save needs the seal of each of its ranks, all of the same save, and a step that exceeds every committed one, or
    replaces it if the trainer asked for that.

    Args:
        found: segments of one root.
        committed: save id of each committed step; "" where it is not known.
    """
    refusals = [_unsealed(left) for left in found if left.seal is None]
    saves: list[SealedSave] = []
    groups: dict[str, list[tuple[Left, Seal]]] = {}
    for left in found:
        if left.seal is not None:
            groups.setdefault(left.seal.save_id, []).append((left, left.seal))
    newest = max(committed, default=-1)
    for group in sorted(groups.values(), key=lambda each: (each[0][1].step, -each[0][1].created_unix)):
        refusal = _refusal(group, committed, newest)
        if refusal is None:
            step = group[0][1].step
            saves.append(SealedSave(step=step, ranks=tuple(sorted(group, key=lambda each: each[1].rank))))
            newest = max(newest, step)
        else:
            refusals.append(refusal)
    return Decision(saves=tuple(saves), refusals=tuple(refusals))


def _unsealed(left: Left) -> Refusal:
    if not left.owner_is_dead:
        return Refusal(step=None, reason="its trainer may be alive", segments=(left,), is_obsolete=False, is_loss=False)
    return Refusal(step=None, reason=left.fault, segments=(left,), is_obsolete=True, is_loss=left.is_damaged)


def _refusal(group: Sequence[tuple[Left, Seal]], committed: Mapping[int, str], newest: int) -> Refusal | None:
    """Why the seals of one save are not committed; None: they are."""
    step, save_id, world_size = group[0][1].step, group[0][1].save_id, group[0][1].world_size

    def refused(reason: str, *, is_obsolete: bool, is_loss: bool) -> Refusal:
        segments = tuple(left for left, _ in group)
        return Refusal(step=step, reason=reason, segments=segments, is_obsolete=is_obsolete, is_loss=is_loss)

    alive = [left.path.name for left, _ in group if not left.owner_is_dead]
    if alive:
        return refused(f"its trainer may be alive ({alive[0]})", is_obsolete=False, is_loss=True)
    if committed.get(step) == save_id:
        return refused("it is committed", is_obsolete=True, is_loss=False)
    if len({(seal.step, seal.world_size, seal.directory, seal.overwrite) for _, seal in group}) > 1:
        return refused("its ranks do not tell the same of it", is_obsolete=True, is_loss=True)
    if step <= newest and not (group[0][1].overwrite and step in committed):
        return refused(f"step {newest} is committed, which is not older", is_obsolete=True, is_loss=False)
    ranks = sorted(seal.rank for _, seal in group)
    missing = sorted(set(range(world_size)) - set(ranks))
    if missing:
        told = ", ".join(map(str, missing[:5]))
        return refused(f"{len(missing)} of {world_size} ranks did not seal it: {told}", is_obsolete=True, is_loss=True)
    if len(ranks) != world_size:
        return refused("a rank sealed it twice", is_obsolete=True, is_loss=True)
    if not any(seal.metadata for _, seal in group):
        return refused("its .metadata is in no seal", is_obsolete=True, is_loss=True)
    return None
