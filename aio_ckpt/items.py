"""Pure values that the stages pass to each other. Nothing here touches a file, a thread or a device.

Sizes and offsets are bytes. *Image* offsets count from the start of the data file, *item* offsets from the
start of one item inside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from aio_ckpt.errors import AioCkptError, PlanChangedError

__all__ = [
    "BLOCK_BYTES",
    "PAGE_BYTES",
    "Chunk",
    "ChunkSums",
    "Envelope",
    "ImageLayout",
    "LeafKind",
    "LoadReport",
    "PerRank",
    "Piece",
    "SaveReport",
    "SkippedCheckpoint",
    "StageTimings",
    "TensorItem",
    "TensorSpec",
    "WriteMode",
    "WriteResult",
    "align_up",
    "check_complete",
]

BLOCK_BYTES = 1 << 20
"""Raw bytes of an item that one stored CRC32 covers (format)."""

PAGE_BYTES = 4096
"""Data files are padded to it and direct I/O keeps to it (format)."""

WriteMode = Literal["direct", "dontcache", "buffered"]


def align_up(value: int, alignment: int) -> int:
    """Smallest multiple of ``alignment`` that is at least ``value``."""
    return -(-value // alignment) * alignment


class LeafKind(IntEnum):
    """What a leaf is stored as. The numbers are part of the on-disk skeleton."""

    TENSOR = 0
    ARRAY = 1
    """A numpy array whose dtype torch has: stored as a tensor item."""
    OBJECT = 2
    SCALAR_ARRAY = 3
    """A numpy scalar: stored as a 0-dim tensor item."""


@dataclass(frozen=True, slots=True)
class PerRank:
    """Marks a value that each rank stores and gets back for itself (RNG state, data position)."""

    value: object
    """Any state that ``save`` takes."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What the envelope of a tensor item is a function of."""

    dtype: torch.dtype
    """Element type."""
    shape: tuple[int, ...]
    """Local shape: that of the shard, not of the global tensor."""
    stride: tuple[int, ...]
    """Stride of the stored bytes, in elements: the tensor's own if it is dense, else contiguous."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """The ``torch.save`` zip around the raw bytes of one tensor: ``[header][raw bytes][trailer]``."""

    header: bytes
    """Constant; its length is a multiple of 64."""
    trailer: bytes
    """Constant but for the CRC32 fields, which are zero here."""
    crc_offsets: tuple[int, ...]
    """Where in the trailer the little-endian CRC32 of the raw bytes goes."""
    raw_bytes: int
    """Length of the raw bytes."""

    @property
    def item_bytes(self) -> int:
        """Length of the whole item."""
        return len(self.header) + self.raw_bytes + len(self.trailer)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorItem:
    """A tensor's item as laid out in the image."""

    leaf: int
    """Position, in the flat state, of the first leaf stored here; tied leaves share the item."""
    fqns: tuple[str, ...]
    """Every name stored here."""
    offsets: tuple[int, ...]
    """Where the shard begins in the global tensor."""
    spec: TensorSpec
    """dtype, local shape, stored stride."""
    envelope: Envelope
    """Header and trailer."""
    item_offset: int
    """Image offset of the header."""

    @property
    def raw_offset(self) -> int:
        """Image offset of the raw bytes."""
        return self.item_offset + len(self.envelope.header)

    @property
    def raw_bytes(self) -> int:
        """Length of the raw bytes."""
        return self.envelope.raw_bytes

    @property
    def trailer_offset(self) -> int:
        """Image offset of the trailer."""
        return self.raw_offset + self.raw_bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """Raw bytes of one item that lie in one chunk."""

    item: int
    """Index into ``ImageLayout.items``."""
    raw_start: int
    """First byte, counted from the start of the item's raw bytes."""
    image_start: int
    """The same byte as an image offset."""
    nbytes: int
    """Length."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkSums:
    """What is summed in one chunk and where the sums go, as arrays: a Python step a small item is what costs."""

    spans: tuple[tuple[int, int], ...]
    """(start, stop) in the chunk of the raw bytes of items of at most one block that lie wholly in it."""
    span_items: npt.NDArray[np.intp]
    """Item of each span."""
    parts: tuple[Piece, ...]
    """All other pieces."""
    sealed_items: npt.NDArray[np.intp]
    """Items whose trailer lies in the chunk."""
    seals: npt.NDArray[np.intp]
    """Positions in the chunk of their CRC32 fields, byte by byte: shape (items, fields, 4)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunk:
    """What one write moves: the image from ``start`` to ``stop``."""

    index: int
    """Position in ``ImageLayout.chunks``."""
    start: int
    """Image offset, a multiple of the chunk size."""
    stop: int
    """Image offset."""
    pieces: tuple[Piece, ...]
    """Raw bytes inside it, ascending."""
    constants: tuple[tuple[int, bytes], ...]
    """(image offset, bytes) of the headers and trailers inside it, ascending."""
    sums: ChunkSums
    """What is summed in it; a trailer inside it is filled, and so written, only once its item is summed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLayout:
    """Where everything of one rank's tensors stands in its data file.

    Objects follow at ``tensor_bytes``; their length changes from save to save, so they are in no layout.
    No header or trailer straddles a multiple of ``chunk_bytes``.
    """

    items: tuple[TensorItem, ...]
    """Ascending by offset."""
    chunk_bytes: int
    """Size of every chunk but the last, a multiple of the page."""
    chunks: tuple[Chunk, ...]
    """Chunks that hold tensor bytes; the last ends at ``tensor_bytes``."""
    tensor_bytes: int
    """Where the tensors end and the objects begin."""
    raw_bytes: int
    """Raw bytes of all items together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteResult:
    """What the write stage did, per rank; enough to render the rank's manifest."""

    image_bytes: int
    """Length of the data file, padding included."""
    file_crc32: int
    """CRC32 of the whole data file."""
    sums: bytes
    """CRC32 of each block of each item's raw bytes, little-endian, items in the order of the layout."""
    mode: WriteMode
    """How the bytes went to the disk."""
    chunks: int
    """Chunks of the file."""
    chunks_written: frozenset[int]
    """Indices of the chunks that were written."""
    items_sealed: int
    """Items whose trailer got its CRC32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimings:
    """Seconds from the call of ``save()`` unless said otherwise."""

    blocked_secs: float = 0.0
    """How long ``save()`` kept its caller, waiting for room included."""
    waited_secs: float = 0.0
    """Part of ``blocked_secs`` spent waiting for room (busy or out of budget)."""
    plan_secs: float = 0.0
    """Duration of walk, digest, fingerprint and, on a miss, planning; on the caller's thread."""
    staged_secs: float = 0.0
    """Until everything was copied to the image."""
    written_secs: float = 0.0
    """Until every chunk was written."""
    synced_secs: float = 0.0
    """Until the data file (fdatasync) and ``.metadata`` were durable."""
    agreed_secs: float = 0.0
    """Until every rank's manifest was durable and every rank had said so."""
    sealed_secs: float = 0.0
    """Until the pending directory was durable as a whole; what is left is to rename it and to make that durable."""
    committed_secs: float = 0.0
    """Until the checkpoint was durable and visible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """What one save did."""

    step: int
    """Its step."""
    path: Path
    """The committed directory."""
    image_bytes: int
    """Bytes in data files of this rank."""
    raw_bytes: int
    """Tensor bytes without envelope and alignment."""
    plan_hit: bool
    """Whether the cached layout was reused."""
    fingerprint_hit: bool
    """Whether the cached copy descriptors were reused."""
    mode: WriteMode
    """How the bytes went to the disk."""
    timings: StageTimings
    """Where the time went."""
    slowest_rank: Mapping[str, int] = field(default_factory=dict)
    """Per stage, the rank that took longest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedCheckpoint:
    """A checkpoint that ``load`` walked past."""

    step: int
    """Its step."""
    path: Path
    """Its directory."""
    error: AioCkptError
    """What did not verify."""
    quarantined: Path | None = None
    """Where it was moved to; None if it was left in place: the mismatch is not proven, or the engine does not hold the
    writer's lock (yet: its first save moves it)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What one load did."""

    step: int
    """Step that was loaded."""
    path: Path
    """Its directory."""
    skipped: tuple[SkippedCheckpoint, ...] = ()
    """Newer checkpoints that did not verify, newest first."""
    missing: tuple[str, ...] = ()
    """Template names absent from the checkpoint (only with ``allow_missing=True``)."""
    unexpected: tuple[str, ...] = ()
    """Names of the checkpoint that the template lacks."""
    bytes_read: int = 0
    """Bytes read from data files."""
    verified: bool = True
    """Whether sums were there and were checked."""


def check_complete(requested: frozenset[str], written: frozenset[str]) -> None:
    """The post-condition of every save: written set == requested set.

    Raises:
        PlanChangedError: names up to five leaves that are missing or that nobody asked for.
    """
    if requested == written:
        return
    missing, extra = sorted(requested - written)[:5], sorted(written - requested)[:5]
    raise PlanChangedError(
        f"the plan does not cover the state: not written {missing}, not asked for {extra}; "
        "nothing was committed and the next save plans anew"
    )
