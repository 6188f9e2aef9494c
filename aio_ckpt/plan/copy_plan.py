"""The copy method of each piece of a state, and its copy descriptors (addresses) for one fingerprint. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch

from aio_ckpt.format.tensor_table import IntArray
from aio_ckpt.format.tensor_zip import is_dense
from aio_ckpt.memory.copies import FOREACH_DTYPES
from aio_ckpt.memory.host_copy import CopyVectors
from aio_ckpt.plan.structure import Structure
from aio_ckpt.plan.values import Chunk, ImageLayout, Piece

SMALL_COPY_BYTES = 256 << 10
"""Largest host copy that is one ``memmove`` with the GIL held. Torch makes larger ones, on many threads."""

_GATHER_PAYS_ITEMS = 32
"""Least number of items of a gather run. Fewer are copied one by one, as they do not pay for a buffer."""
_RUNS_A_BUFFER = 4
"""Number of longest runs that fit the gather buffer at once: one is gathered while another is transferred."""


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
    """Device on which the run is gathered."""
    pieces: tuple[Piece, ...]
    """Whole items, ascending."""
    leaves: tuple[int, ...]
    """Leaf of each piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkCopyMethods:
    """Pieces of one chunk, by their copy method."""

    moved: tuple[Piece, ...]
    """Small dense host tensors, copied by address at once."""
    issued: tuple[Piece, ...]
    """Dense tensors on CUDA, copied by address on a side stream."""
    gathered: tuple[GatherRun, ...]
    """Small dense tensors on CUDA that are adjacent in the image."""
    copied: tuple[Piece, ...]
    """Other host tensors, copied by torch."""
    converted: tuple[Piece, ...]
    """Other tensors on devices, copied by torch on a side stream."""


def image_order(device: torch.device, *, is_gathered: bool) -> tuple[bool, str, bool]:
    """Return the sort key of an item: items on devices come first, and gathered ones are adjacent."""
    is_host = device.type == "cpu"
    return (is_host, "" if is_host else str(device), not is_host and not is_gathered)


def choose_copy_methods(
    structure: Structure,
    layout: ImageLayout,
    *,
    can_copy_by_address: Callable[[torch.device], bool],
    gathers: Callable[[torch.device, int], bool],
    gather_bytes: int,
) -> tuple[ChunkCopyMethods, ...]:
    """Return the copy method of every piece, per chunk of ``layout``.

    Args:
        can_copy_by_address: whether a device can copy by address.
        gathers: whether a device gathers tensors of a length in bytes.
        gather_bytes: largest gather buffer of a device.
    """

    def is_dense_leaf(leaf: int) -> bool:
        return (
            not structure.conj[leaf]
            and not structure.neg[leaf]
            and is_dense(tuple(structure.shapes[leaf]), structure.strides[leaf])
        )

    def method(piece: Piece) -> str:
        leaf = layout.items[piece.item].leaf
        device, raw_bytes = structure.devices[leaf], layout.items[piece.item].raw_bytes
        by_torch = "copied" if device.type == "cpu" else "converted"
        if not is_dense_leaf(leaf):
            return by_torch
        if piece.nbytes == raw_bytes and structure.dtypes[leaf] in FOREACH_DTYPES and gathers(device, raw_bytes):
            return "gathered"
        if device.type == "cpu":
            return "moved" if raw_bytes <= SMALL_COPY_BYTES else by_torch
        return "issued" if can_copy_by_address(device) else by_torch

    run_bytes = gather_bytes // _RUNS_A_BUFFER
    return tuple(_of_chunk(chunk, structure, layout, method, can_copy_by_address, run_bytes) for chunk in layout.chunks)


def _of_chunk(
    chunk: Chunk,
    structure: Structure,
    layout: ImageLayout,
    method: Callable[[Piece], str],
    can_copy_by_address: Callable[[torch.device], bool],
    run_bytes: int,
) -> ChunkCopyMethods:
    by_method: dict[str, list[Piece]] = {"moved": [], "issued": [], "copied": [], "converted": []}
    runs: list[GatherRun] = []

    def device_of(piece: Piece) -> torch.device:
        return structure.devices[layout.items[piece.item].leaf]

    for (method_, device), found in groupby(chunk.pieces, key=lambda piece: (method(piece), device_of(piece))):
        pieces = list(found)
        if method_ != "gathered":
            by_method[method_] += pieces
            continue
        for run in _cut(pieces, run_bytes):
            if len(run) < _GATHER_PAYS_ITEMS:
                by_method["issued" if can_copy_by_address(device) else "converted"] += run
            else:
                leaves = tuple(layout.items[piece.item].leaf for piece in run)
                stop = run[-1].image_start + run[-1].nbytes
                runs.append(
                    GatherRun(start=run[0].image_start, stop=stop, device=device, pieces=tuple(run), leaves=leaves)
                )
    return ChunkCopyMethods(
        moved=tuple(by_method["moved"]),
        issued=tuple(by_method["issued"]),
        gathered=tuple(runs),
        copied=tuple(by_method["copied"]),
        converted=tuple(by_method["converted"]),
    )


def _cut(pieces: Sequence[Piece], run_bytes: int) -> Iterator[list[Piece]]:
    run: list[Piece] = []
    for piece in pieces:
        if run and piece.image_start + piece.nbytes - run[0].image_start > run_bytes:
            yield run
            run = []
        run.append(piece)
    if run:
        yield run


@dataclass(frozen=True, slots=True, eq=False)
class HostTransfers:
    """Copies by address of whole tensors from one device to the image in host memory, ascending in the image."""

    vectors: CopyVectors
    """(image offset, source address, bytes) of each transfer."""
    leaves: IntArray
    """Leaf of each transfer."""
    _cuts: dict[tuple[int, int], CopyVectors] = field(default_factory=dict)
    """Results of :meth:`within`. Each save of a layout asks for the same ones."""

    def within(self, start: int, stop: int) -> CopyVectors:
        """Return the transfers between two image offsets, cut at these. The result is cached and read-only."""
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

    def only(self, is_wanted: npt.NDArray[np.bool_]) -> HostTransfers:
        """Return the transfers whose flag is set."""
        return HostTransfers(self.vectors[is_wanted], self.leaves[is_wanted])


@dataclass(frozen=True, slots=True, eq=False)
class CopyDescriptors:
    """Copies by address, with addresses. Valid for one fingerprint only."""

    fingerprint: list[int]
    """Address of every tensor leaf."""
    vectors: tuple[CopyVectors, ...]
    """Per chunk, (image offset, source address, bytes) of small host tensors."""
    host_transfers: Mapping[torch.device, HostTransfers]
    """Transfers of tensors on CUDA, by device."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Parts of leaves and their places in the image, as columns."""

    starts: IntArray
    """Image offset of each part."""
    leaves: IntArray
    """Leaf of each part."""
    raw_starts: IntArray
    """Offset of each part in the bytes of its leaf."""
    nbytes: IntArray
    """Length of each part, in bytes."""

    @classmethod
    def of(cls, rows: Sequence[tuple[int, int, int, int]]) -> Rows:
        """Return the columns of rows of (start, leaf, raw start, bytes)."""
        return cls(*(np.array(column, dtype=np.int64) for column in (zip(*rows, strict=True) if rows else [()] * 4)))

    def vectors(self, addresses: CopyVectors) -> CopyVectors:
        """Return the copies, given the address of every tensor leaf."""
        sources = addresses[self.leaves] + self.raw_starts.astype(np.uint64)
        return np.stack([self.starts.astype(np.uint64), sources, self.nbytes.astype(np.uint64)], axis=1)


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Copies by address without the addresses; with them, they are :class:`CopyDescriptors`."""

    moved: tuple[Rows, ...]
    """Small host tensors, per chunk."""
    issued: Mapping[torch.device, Rows]
    """Whole tensors on CUDA, by device."""

    @classmethod
    def of(cls, structure: Structure, layout: ImageLayout, copy_methods: Sequence[ChunkCopyMethods]) -> Places:
        """Return the places of the pieces that are copied by address."""

        def rows(pieces: Iterable[Piece]) -> Rows:
            return Rows.of([(p.image_start, layout.items[p.item].leaf, p.raw_start, p.nbytes) for p in pieces])

        issued: dict[torch.device, list[Piece]] = {}
        for item in dict.fromkeys(piece.item for route in copy_methods for piece in route.issued):
            whole = layout.items[item]
            piece = Piece(item, 0, whole.raw_offset, whole.raw_bytes)  # all pieces of an item have one copy method
            issued.setdefault(structure.devices[whole.leaf], []).append(piece)
        return cls(
            moved=tuple(rows(route.moved) for route in copy_methods),
            issued={device: rows(pieces) for device, pieces in issued.items()},
        )

    def at(self, fingerprint: list[int]) -> CopyDescriptors:
        """Return the copy descriptors, given the address of every tensor leaf."""
        addresses = np.array(fingerprint, dtype=np.uint64)
        return CopyDescriptors(
            fingerprint,
            vectors=tuple(rows.vectors(addresses) for rows in self.moved),
            host_transfers=self.host_transfers(addresses),
        )

    def host_transfers(self, addresses: CopyVectors) -> dict[torch.device, HostTransfers]:
        """Return :attr:`CopyDescriptors.host_transfers` for these addresses of the leaves."""
        return {device: HostTransfers(rows.vectors(addresses), rows.leaves) for device, rows in self.issued.items()}
