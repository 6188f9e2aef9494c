"""Copies of a state into its image: which tensor is copied by which method, and a table of those by address."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch

from aio_ckpt.format.tensor_columns import IntArray
from aio_ckpt.format.tensor_zip import is_dense
from aio_ckpt.memory.host_copy import CopyVectors
from aio_ckpt.plan import gathering
from aio_ckpt.plan.chunks import Piece
from aio_ckpt.plan.layout import ImageLayout
from aio_ckpt.plan.structure import Structure
from aio_ckpt.plan.tensor_item import TensorItem

SMALL_COPY_BYTES = 256 << 10
"""Largest host copy that is made together with others, by one call (:mod:`aio_ckpt.memory.host_copy`)."""

_RUNS_A_BUFFER = 4
"""Number of longest runs that fit the gather buffer at once: one is gathered while another is transferred."""


@dataclass(frozen=True, slots=True, eq=False)
class CopyTable:
    """Copies by address into the image, from one device. A row is one tensor, or a part of it. Rows ascend."""

    vectors: CopyVectors
    """(image offset, source address, bytes) of each row. Without :meth:`at`, the address is 0."""
    leaves: IntArray
    """Leaf of each row."""
    _cuts: dict[tuple[int, int], CopyTable] = field(default_factory=dict)
    """Results of :meth:`within`. Each save of a layout asks for the same ones."""

    @classmethod
    def of(cls, items: Sequence[TensorItem]) -> CopyTable:
        """Return the table of whole items, without addresses."""
        rows = [(item.raw_offset, 0, item.raw_bytes) for item in items]
        return cls(
            np.array(rows, dtype=np.uint64).reshape(-1, 3), np.array([item.leaf for item in items], dtype=np.int64)
        )

    def __len__(self) -> int:
        return len(self.leaves)

    def at(self, addresses: CopyVectors) -> CopyTable:
        """Return the table with the source address of each row, given the address of every tensor leaf."""
        vectors = self.vectors.copy()
        vectors[:, 1] = addresses[self.leaves]
        return CopyTable(vectors, self.leaves)

    def where(self, is_wanted: npt.NDArray[np.bool_]) -> CopyTable:
        return CopyTable(self.vectors[is_wanted], self.leaves[is_wanted])

    def within(self, start: int, stop: int) -> CopyTable:
        """Return the rows between two image offsets, cut at these. The result is cached and read-only."""
        found = self._cuts.get((start, stop))
        if found is None:
            found = self._cuts[start, stop] = self._cut(start, stop)
            found.vectors.setflags(write=False)
        return found

    def _cut(self, start: int, stop: int) -> CopyTable:
        starts = self.vectors[:, 0]
        first = np.searchsorted(starts + self.vectors[:, 2], start, side="right")
        rows = slice(first, np.searchsorted(starts, stop))
        vectors = self.vectors[rows].copy()
        if len(vectors):
            before = max(start - int(vectors[0, 0]), 0)
            vectors[0] += np.array([before, before, -before]).astype(np.uint64)
            vectors[-1, 2] -= max(int(vectors[-1, 0] + vectors[-1, 2]) - stop, 0)
        return CopyTable(vectors, self.leaves[rows])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GatherRun:
    """Run of small items, adjacent in the image, gathered on the device and moved in one transfer.

    The bytes between its pieces are constants of the image. They are rendered again when the chunk is prepared.
    """

    start: int
    """Image offset of the first raw byte."""
    stop: int
    """Image offset after the last raw byte."""
    device: torch.device
    pieces: tuple[Piece, ...]
    """Whole items, ascending."""
    leaves: tuple[int, ...]
    """Leaf of each piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkCopies:
    """Copies of one chunk that are not by address."""

    gathered: tuple[GatherRun, ...]
    """Small dense tensors on CUDA that are adjacent in the image."""
    packed: tuple[Piece, ...]
    """Larger host tensors, each copied by itself (:mod:`aio_ckpt.memory.copies`)."""
    converted: tuple[Piece, ...]
    """Tensors on devices, copied by torch on a side stream."""
    is_issued: bool
    """Whether other bytes of the chunk come from a device: by address, or gathered."""

    @property
    def comes_from_device(self) -> bool:
        return self.is_issued or bool(self.converted)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CopyPlan:
    """Copies of a state into its image."""

    chunks: tuple[ChunkCopies, ...]
    moved: CopyTable
    """Small dense host tensors, copied by address at once."""
    issued: Mapping[torch.device, CopyTable]
    """Dense tensors on CUDA, copied by address on a side stream, by device."""

    @property
    def gathers(self) -> bool:
        return any(chunk.gathered for chunk in self.chunks)

    def at(self, fingerprint: Sequence[int]) -> CopyPlan:
        """Return the plan with source addresses, given the address of every tensor leaf."""
        addresses = np.array(fingerprint, dtype=np.uint64)
        issued = {device: table.at(addresses) for device, table in self.issued.items()}
        return CopyPlan(chunks=self.chunks, moved=self.moved.at(addresses), issued=issued)


def image_order(device: torch.device, nbytes: int, gather_bytes: int) -> tuple[bool, str, bool]:
    """Return the sort key of an item: items on devices come first, and gathered ones are adjacent."""
    is_host = device.type == "cpu"
    is_gathered = not is_host and gathering.is_gathered(device, nbytes, gather_bytes)
    return (is_host, "" if is_host else str(device), not (is_host or is_gathered))


def plan_copies(
    structure: Structure,
    layout: ImageLayout,
    *,
    can_copy_by_address: Callable[[torch.device], bool],
    gathers: Callable[[torch.device, int], bool],
    gather_bytes: int,
) -> CopyPlan:
    """Choose the copy method of every item of ``layout``, without addresses.

    Args:
        can_copy_by_address: whether a device can copy by address.
        gathers: whether a device gathers tensors of a length in bytes.
        gather_bytes: largest gather buffer of a device.
    """
    by_address: dict[torch.device, dict[int, None]] = {}  # items, in the order of the image

    def method(piece: Piece) -> tuple[str, torch.device]:
        item = layout.items[piece.item]
        leaf, raw_bytes = item.leaf, item.raw_bytes
        device = structure.devices[leaf]
        by_torch = ("packed" if device.type == "cpu" else "converted", device)
        is_plain = not structure.conj[leaf] and not structure.neg[leaf]
        if not (is_plain and is_dense(tuple(structure.shapes[leaf]), structure.strides[leaf])):
            return by_torch
        if piece.nbytes == raw_bytes and gathers(device, raw_bytes):
            return "gathered", device
        is_moved = raw_bytes <= SMALL_COPY_BYTES if device.type == "cpu" else can_copy_by_address(device)
        return ("by address", device) if is_moved else by_torch

    def of_chunk(pieces: Iterable[Piece]) -> ChunkCopies:
        by_torch: dict[str, list[Piece]] = {"packed": [], "converted": []}
        runs: list[GatherRun] = []
        is_issued = False
        for (kind, device), group in groupby(pieces, key=method):
            for run in _cut(group, gather_bytes // _RUNS_A_BUFFER) if kind == "gathered" else [[*group]]:
                if kind == "gathered" and len(run) >= gathering.LEAST_ITEMS:
                    runs.append(_gather_run(layout, device, run))
                elif kind == "by address" or (kind == "gathered" and can_copy_by_address(device)):
                    by_address.setdefault(device, {}).update(dict.fromkeys(piece.item for piece in run))
                    is_issued |= device.type != "cpu"
                else:
                    by_torch["converted" if kind == "gathered" else kind] += run
        return ChunkCopies(
            gathered=tuple(runs),
            packed=tuple(by_torch["packed"]),
            converted=tuple(by_torch["converted"]),
            is_issued=is_issued or bool(runs),
        )

    chunks = tuple(of_chunk(chunk.pieces) for chunk in layout.chunks)
    tables = {device: CopyTable.of([layout.items[item] for item in items]) for device, items in by_address.items()}
    moved = tables.pop(torch.device("cpu"), None) or CopyTable.of([])
    return CopyPlan(chunks=chunks, moved=moved, issued=tables)


def _gather_run(layout: ImageLayout, device: torch.device, run: Sequence[Piece]) -> GatherRun:
    leaves = tuple(layout.items[piece.item].leaf for piece in run)
    stop = run[-1].image_start + run[-1].nbytes
    return GatherRun(start=run[0].image_start, stop=stop, device=device, pieces=tuple(run), leaves=leaves)


def _cut(pieces: Iterable[Piece], run_bytes: int) -> Iterator[list[Piece]]:
    run: list[Piece] = []
    for piece in pieces:
        if run and piece.image_start + piece.nbytes - run[0].image_start > run_bytes:
            yield run
            run = []
        run.append(piece)
    if run:
        yield run
