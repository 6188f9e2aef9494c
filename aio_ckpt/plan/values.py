"""The layout of one rank's data file: items, pieces and chunks.

Sizes and offsets are bytes. *Image* offsets count from the start of the data file, *item* offsets from the
start of one item inside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from aio_ckpt.format.constants import Envelope, TensorSpec

__all__ = ["Chunk", "ChunkSums", "ImageLayout", "Piece", "TensorItem"]


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
    """Length, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkSums:
    """What is summed in one chunk and where the sums go, as arrays: a Python step a small item is what costs."""

    spans: tuple[tuple[int, int], ...]
    """(start, stop) in the chunk of the raw bytes of items of at most one block that lie wholly in it."""
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
    """What one write moves: the image from ``start`` to ``stop``."""

    index: int
    """Position in ``ImageLayout.chunks``."""
    start: int
    """Image offset, a multiple of the chunk size."""
    stop: int
    """Image offset behind the last byte."""
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
