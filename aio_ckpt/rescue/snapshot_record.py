"""Snapshot records: the part of a named segment that a commit needs beside the image when the trainer is dead.

The record is written when the snapshot is complete. It also holds a CRC32 of every block of raw bytes. If there is no
record, or a sum does not match, the snapshot counts as torn.
"""

from __future__ import annotations

import itertools
import logging
import time
from typing import Annotated, Any

import msgspec

from aio_ckpt.commit.manifests import object_entries
from aio_ckpt.errors import CorruptCheckpointError
from aio_ckpt.format.checkpoint_files import data_file_name
from aio_ckpt.format.checksum import crc32_of
from aio_ckpt.format.constants import BLOCK_BYTES, MAX_BYTES, PAGE_BYTES, TensorSpec
from aio_ckpt.format.dtypes import DTYPES
from aio_ckpt.format.rank_manifest import RankManifest, decode_rank, encode_rank
from aio_ckpt.format.root_manifest import FileEntry
from aio_ckpt.format.tensor_zip import render
from aio_ckpt.leaves.objects import ObjectBytes
from aio_ckpt.plan.chunks import cut_chunks
from aio_ckpt.plan.layout import ImageLayout
from aio_ckpt.plan.save_plan import Plan
from aio_ckpt.plan.tensor_item import TensorItem
from aio_ckpt.rescue.segment import SharedSegment, StoredSegment
from aio_ckpt.snapshot.image import Image

_VERSION = 1
_log = logging.getLogger("aio_ckpt")
_Size = Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)]
_Name = Annotated[str, msgspec.Meta(pattern=r"^(?!\.)[^/\x00]+\Z", max_length=255)]


class SnapshotRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that a commit needs beside the image of a complete snapshot of one rank."""

    directory: _Name
    """Name of the checkpoint's directory under the root."""
    save_id: str
    """Id that every file of the save holds."""
    step: _Size
    overwrite: bool
    """Whether the save replaces a committed step."""
    replaces: str = ""
    """Save id of the committed checkpoint that the save replaces; "" if it replaces none, or none could be read."""
    metrics: dict[str, float | None]
    extra: dict[str, Any] = {}
    """JSON values that the caller passed."""
    metadata: bytes
    created_unix: float = msgspec.field(default_factory=time.time)
    """Time of the record, by the trainer's clock."""
    since_boot_secs: float = 0.0
    """Time of the record by the monotonic clock, in seconds."""
    version: int = _VERSION
    generation: _Size = 0
    """Generation of the segment that the record belongs to."""
    chunk_bytes: Annotated[int, msgspec.Meta(ge=PAGE_BYTES, le=MAX_BYTES, multiple_of=PAGE_BYTES)] = PAGE_BYTES
    tensor_bytes: _Size = 0
    """Offset in the image where the tensors end and the objects begin."""
    image_bytes: _Size = 0
    """Length of the data file."""
    objects: bytes = b""
    """Encoded objects, which follow the tensors in the image."""
    manifest: bytes = b""
    """The rank's manifest. The CRC32 of the file in it is 0, because it is not known yet."""


_RECORDS = msgspec.msgpack.Decoder(SnapshotRecord)


def store_record(
    segment: SharedSegment, record: SnapshotRecord, plan: Plan, objects: ObjectBytes, image: Image
) -> None:
    """Sum a captured image, write its record and mark the segment valid. If there is no room for the record, log it.

    Only raw bytes are summed, because the write may still render the headers and trailers.
    """
    layout, image_bytes = plan.layout, image.chunks[-1].stop
    manifest = encode_rank(
        save_id=record.save_id,
        step=record.step,
        rank=0,
        world_size=1,
        file=FileEntry(data_file_name(record.save_id, 0), image_bytes, 0),
        tensors=plan.tensors_static,
        sums=raw_sums(layout, memoryview(image.lease.arena.memory)),
        objects=object_entries(plan, objects),
        skeleton=plan.skeleton,
    )
    whole = msgspec.structs.replace(
        record,
        generation=segment.next_generation,
        chunk_bytes=layout.chunk_bytes,
        tensor_bytes=layout.tensor_bytes,
        image_bytes=image_bytes,
        objects=objects.region,
        manifest=manifest,
    )
    try:
        segment.mark_valid(msgspec.msgpack.encode(whole))
    except OSError as error:
        _log.warning("step %d could not be rescued: no room for its snapshot record (%s)", record.step, error)


def decode_record(stored: StoredSegment) -> SnapshotRecord:
    """Decode the snapshot record of a segment and check its numbers.

    Raises:
        CorruptCheckpointError: the record is of another version, or of another generation of the segment.
    """
    name = stored.path.name
    try:
        record = _RECORDS.decode(stored.record)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{name}: no snapshot record of version {_VERSION}: {error}") from error
    if record.version != _VERSION:
        raise CorruptCheckpointError(f"{name}: a snapshot record of version {record.version}, known here is {_VERSION}")
    if record.generation != stored.generation:
        raise CorruptCheckpointError(
            f"{name}: torn: recorded at generation {record.generation}, now {stored.generation}"
        )
    if max(record.tensor_bytes + len(record.objects), record.image_bytes) > stored.capacity:
        raise CorruptCheckpointError(f"{name}: an image of {record.image_bytes} bytes in {stored.capacity}")
    return record


def layout_of(record: SnapshotRecord) -> tuple[RankManifest, ImageLayout]:
    """Return the rank's manifest of a snapshot record, checked, and the layout that it describes.

    Raises:
        CorruptCheckpointError: this version would lay the tensors out otherwise.
    """
    manifest = decode_rank(record.manifest, name="record")
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
            raise CorruptCheckpointError(f"snapshot record: {entry.fqns[0]!r} was laid out by another version")
        items.append(item)
    end = max((item.item_offset + item.envelope.item_bytes for item in items), default=0)
    is_ordered = all(a.trailer_offset <= b.item_offset for a, b in itertools.pairwise(items))
    if end != record.tensor_bytes or not is_ordered:
        raise CorruptCheckpointError("snapshot record: its tensors are not laid out one behind the other")
    return manifest, ImageLayout(
        items=tuple(items),
        chunk_bytes=record.chunk_bytes,
        chunks=cut_chunks(items, record.chunk_bytes, record.tensor_bytes),
        tensor_bytes=record.tensor_bytes,
        raw_bytes=sum(item.raw_bytes for item in items),
    )


def raw_sums(layout: ImageLayout, memory: memoryview) -> bytes:
    """Return the CRC32 of each block of raw bytes, as the rank's manifest stores it. ``memory`` holds the image."""
    return b"".join(
        crc32_of(memory[start : min(start + BLOCK_BYTES, item.trailer_offset)]).to_bytes(4, "little")
        for item in layout.items
        for start in range(item.raw_offset, item.trailer_offset, BLOCK_BYTES)
    )
