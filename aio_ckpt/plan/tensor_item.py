"""Item of a tensor in an image, before and after it has its place."""

from __future__ import annotations

from dataclasses import dataclass

from aio_ckpt.format.constants import Envelope, TensorSpec


@dataclass(frozen=True, slots=True)
class Placement:
    """Item that is to be placed in an image."""

    leaf: int
    """Position in the flat state of the first leaf that the item stores. Tied leaves share the item."""
    fqns: tuple[str, ...]
    offsets: tuple[int, ...]
    """Start of the shard in the global tensor, in elements per dimension."""
    spec: TensorSpec
    """dtype, local shape, stored stride."""
    envelope: Envelope
    """Header and trailer, rendered for ``spec``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorItem(Placement):
    """Item of a tensor, as laid out in the image."""

    item_offset: int
    """Image offset of the header."""

    @property
    def raw_offset(self) -> int:
        """Image offset of the raw bytes."""
        return self.item_offset + len(self.envelope.header)

    @property
    def raw_bytes(self) -> int:
        return self.envelope.raw_bytes

    @property
    def trailer_offset(self) -> int:
        """Image offset of the trailer."""
        return self.raw_offset + self.raw_bytes
