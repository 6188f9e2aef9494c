"""Copy descriptors: from which address each source goes to which place in an image, for one fingerprint. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from aio_ckpt.format.manifests import IntArray
from aio_ckpt.memory.host_copy import CopyVectors
from aio_ckpt.plan.copy_plan import ChunkCopyMethods
from aio_ckpt.plan.structure import Structure
from aio_ckpt.plan.values import ImageLayout, Piece

__all__ = ["CopyDescriptors", "DeviceCopies", "Places", "Rows"]


@dataclass(frozen=True, slots=True, eq=False)
class DeviceCopies:
    """Copies by address from one device: tensors whole, ascending in the image."""

    vectors: CopyVectors
    """(image offset, source address, bytes)."""
    leaves: IntArray
    """Leaf of each."""
    _cuts: dict[tuple[int, int], CopyVectors] = field(default_factory=dict)
    """What :meth:`within` has found: each save of a layout asks for the same."""

    def within(self, start: int, stop: int) -> CopyVectors:
        """What lies between two image offsets; what reaches beyond is cut there. Read-only: it is given again."""
        rows = self._cuts.get((start, stop))
        if rows is None:
            rows = self._cuts[start, stop] = self._cut(start, stop)
            rows.setflags(write=False)
        return rows

    def _cut(self, start: int, stop: int) -> CopyVectors:
        starts = self.vectors[:, 0]
        first = np.searchsorted(starts + self.vectors[:, 2], start, side="right")
        rows = self.vectors[first : np.searchsorted(starts, stop)].copy()
        if len(rows):
            before = max(start - int(rows[0, 0]), 0)
            rows[0] += np.array([before, before, -before]).astype(np.uint64)
            rows[-1, 2] -= max(int(rows[-1, 0] + rows[-1, 2]) - stop, 0)
        return rows

    def only(self, is_wanted: npt.NDArray[np.bool_]) -> DeviceCopies:
        """Those rows."""
        return DeviceCopies(self.vectors[is_wanted], self.leaves[is_wanted])


@dataclass(frozen=True, slots=True, eq=False)
class CopyDescriptors:
    """Addresses of what is copied by address, valid for one fingerprint only."""

    fingerprint: list[int]
    """Address of every tensor leaf."""
    vectors: tuple[CopyVectors, ...]
    """Per chunk, small host tensors: (image offset, source address, bytes)."""
    device_copies: Mapping[torch.device, DeviceCopies]
    """Tensors on CUDA."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Parts of leaves and where they go, each number a column."""

    starts: IntArray
    """Image offsets."""
    leaves: IntArray
    """Whose bytes."""
    raw_starts: IntArray
    """Where in the leaf."""
    nbytes: IntArray
    """How many."""

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int, int, int]]) -> Rows:
        """Of (start, leaf, raw start, bytes) each."""
        return cls(*(np.array(column, dtype=np.int64) for column in (zip(*rows, strict=True) if rows else [()] * 4)))

    def vectors(self, addresses: CopyVectors) -> CopyVectors:
        """With the address of every tensor leaf."""
        sources = addresses[self.leaves] + self.raw_starts.astype(np.uint64)
        return np.stack([self.starts.astype(np.uint64), sources, self.nbytes.astype(np.uint64)], axis=1)


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """What is copied by address and where to: all of :class:`CopyDescriptors` but the addresses."""

    moved: tuple[Rows, ...]
    """Per chunk, small host tensors."""
    issued: Mapping[torch.device, Rows]
    """Tensors on CUDA, whole."""

    @classmethod
    def of(cls, structure: Structure, layout: ImageLayout, copy_methods: Sequence[ChunkCopyMethods]) -> Places:
        """Of the pieces that ``copy_methods`` send by address."""

        def rows(pieces: Iterable[Piece]) -> Rows:
            return Rows.of([(p.image_start, layout.items[p.item].leaf, p.raw_start, p.nbytes) for p in pieces])

        issued: dict[torch.device, list[Piece]] = {}
        for item in dict.fromkeys(piece.item for route in copy_methods for piece in route.issued):
            whole = layout.items[item]
            piece = Piece(item, 0, whole.raw_offset, whole.raw_bytes)  # no item goes by two ways
            issued.setdefault(structure.devices[whole.leaf], []).append(piece)
        return cls(
            moved=tuple(rows(route.moved) for route in copy_methods),
            issued={device: rows(pieces) for device, pieces in issued.items()},
        )

    def at(self, fingerprint: list[int]) -> CopyDescriptors:
        """With the address of every tensor leaf."""
        addresses = np.array(fingerprint, dtype=np.uint64)
        return CopyDescriptors(
            fingerprint,
            vectors=tuple(rows.vectors(addresses) for rows in self.moved),
            device_copies=self.device_copies(addresses),
        )

    def device_copies(self, addresses: CopyVectors) -> dict[torch.device, DeviceCopies]:
        """:attr:`CopyDescriptors.device_copies` with other addresses of the leaves."""
        return {device: DeviceCopies(rows.vectors(addresses), rows.leaves) for device, rows in self.issued.items()}
