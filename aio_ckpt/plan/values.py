"""The layout of one rank's data file: items, pieces and chunks.

Sizes and offsets are bytes. *Image* offsets count from the start of the data file, *item* offsets from the
start of one item inside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from aio_ckpt.format.constants import PAGE_BYTES, Envelope, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorItem:
    """Item of a tensor, as laid out in the image."""

    leaf: int
    """Position in the flat state of the first leaf that the item stores. Tied leaves share the item."""
    fqns: tuple[str, ...]
    """Every name of the item."""
    offsets: tuple[int, ...]
    """Start of the shard in the global tensor, in elements per dimension."""
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
    """Image offset of the first byte."""
    nbytes: int
    """Length, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkSums:
    """Checksums of one chunk: the bytes to sum and the places of the sums. In arrays, to save a Python step an item."""

    spans: tuple[tuple[int, int], ...]
    """(start, stop) in the chunk of the raw bytes of each item that has at most one block and lies wholly in it."""
    span_items: npt.NDArray[np.intp]
    """Item of each span."""
    parts: tuple[Piece, ...]
    """All other pieces."""
    crc_patches: npt.NDArray[np.intp]
    """Items whose trailer lies in the chunk."""
    patch_offsets: npt.NDArray[np.intp]
    """Positions in the chunk of their CRC32 fields, byte by byte: shape (items, fields, 4)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunk:
    """Part of the image that one write moves, from ``start`` to ``stop``."""

    index: int
    """Position in ``ImageLayout.chunks``."""
    start: int
    """Image offset, a multiple of the chunk size."""
    stop: int
    """Image offset after the last byte."""
    pieces: tuple[Piece, ...]
    """Raw bytes inside it, ascending."""
    constants: tuple[tuple[int, bytes], ...]
    """(image offset, bytes) of the headers and trailers inside it, ascending."""
    sums: ChunkSums
    """Checksums of the chunk. A trailer inside it is filled once its item is summed, so the chunk is written then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLayout:
    """Places of one rank's tensors in its data file.

    Objects follow at ``tensor_bytes``. Their length changes from save to save, so the layout does not hold them.
    No header or trailer straddles a multiple of ``chunk_bytes``.
    """

    items: tuple[TensorItem, ...]
    """Items, ascending by offset."""
    chunk_bytes: int
    """Size of every chunk but the last, a multiple of the page."""
    chunks: tuple[Chunk, ...]
    """Chunks that hold tensor bytes; the last ends at ``tensor_bytes``."""
    tensor_bytes: int
    """Offset at which the tensors end and the objects begin."""
    raw_bytes: int
    """Raw bytes of all items together."""
    file_alignment: int = PAGE_BYTES
    """Number of bytes of which the length of the file is a multiple."""
