"""Sizes of the format, and the parts of one tensor's item. Sizes and offsets are bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, TypeAlias

import msgspec

if TYPE_CHECKING:  # manifests are read without torch, see aio_ckpt.cli
    import torch

BLOCK_BYTES = 1 << 20
"""Raw bytes of an item that one stored CRC32 covers (format)."""

MAX_BYTES = 1 << 62
"""Largest size or offset taken from disk: two of them still add up inside 64 bits."""

Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)]
"""A length or an offset."""

MAX_DIMS = 64
"""Dimensions of a tensor, at most (format)."""

PAGE_BYTES = 4096
"""Data files are padded to a multiple of this, which direct I/O needs (format)."""

RAW_ALIGN_BYTES = 64
"""Raw bytes of a tensor begin at a multiple of this, counted from the start of the item and of the file (format)."""


def align_up(value: int, alignment: int) -> int:
    """Return the smallest multiple of ``alignment`` that is at least ``value``."""
    return -(-value // alignment) * alignment


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Arguments of the envelope of a tensor item: equal specs have equal envelopes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    """Shape of the shard, not of the global tensor."""
    stride: tuple[int, ...]
    """Stride of the stored bytes, in elements: the tensor's own if it is dense, and otherwise the contiguous one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """The ``torch.save`` zip around the raw bytes of one tensor: ``[header][raw bytes][trailer]``."""

    header: bytes
    """Constant; its length is a multiple of 64."""
    trailer: bytes
    """Constant but for the CRC32 fields, which are zero here."""
    crc_offsets: tuple[int, ...]
    """Offsets in the trailer at which the little-endian CRC32 of the raw bytes is stored."""
    raw_bytes: int

    @property
    def item_bytes(self) -> int:
        return len(self.header) + self.raw_bytes + len(self.trailer)
