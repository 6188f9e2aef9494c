"""The copy method of each piece of a state, and its copy descriptors (addresses) for one fingerprint. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch

from aio_ckpt.format import tensor_zip as envelope
from aio_ckpt.format.manifests import IntArray
from aio_ckpt.memory.copies import FOREACH_DTYPES
from aio_ckpt.memory.host_copy import CopyVectors
from aio_ckpt.plan.structure import Structure
from aio_ckpt.plan.values import Chunk, ImageLayout, Piece

__all__ = [
    "SMALL_COPY_BYTES",
    "ChunkCopyMethods",
    "CopyDescriptors",
    "DeviceCopies",
    "GatherRun",
    "Places",
    "Rows",
    "choose_copy_methods",
    "image_order",
]

SMALL_COPY_BYTES = 256 << 10
"""Host copies up to this size go by one ``memmove`` with the GIL held; larger ones by torch, on many threads."""

_GATHER_PAYS_ITEMS = 32
"""Fewer are issued one by one: the buffer, which stays for the next save, is not worth it."""
_RUNS_A_BUFFER = 4
"""So many of the longest runs fit the gather buffer at once: one is gathered while another is transferred."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GatherRun:
    """A run of items that are small, side by side in the image, gathered on the device and moved in one transfer.

    The bytes between its pieces are constants of the image, rendered again when the chunk is prepared.
    """

    start: int
    """Image offset of the first raw byte."""
    stop: int
    """Image offset behind the last raw byte."""
    device: torch.device
    """Where it is gathered."""
    pieces: tuple[Piece, ...]
    """Whole items, ascending."""
    leaves: tuple[int, ...]
    """Leaf of each piece."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkCopyMethods:
    """The pieces of one chunk, by the way they go."""

    moved: tuple[Piece, ...]
    """Small dense host tensors: by address, at once."""
    issued: tuple[Piece, ...]
    """Dense tensors on CUDA: by address, on a side stream."""
    gathered: tuple[GatherRun, ...]
    """Small dense tensors on CUDA that lie side by side."""
    copied: tuple[Piece, ...]
    """Other host tensors: by torch."""
    converted: tuple[Piece, ...]
    """Other tensors on devices: by torch, on a side stream."""


def image_order(device: torch.device, *, is_gathered: bool) -> tuple[bool, str, bool]:
    """Sort key of an item: what is on a device first, what is gathered there together."""
    is_host_memory = device.type == "cpu"
    return (is_host_memory, "" if is_host_memory else str(device), not is_host_memory and not is_gathered)


def choose_copy_methods(
    structure: Structure,
    layout: ImageLayout,
    *,
    can_copy_by_address: Callable[[torch.device], bool],
    gathers: Callable[[torch.device, int], bool],
    gather_bytes: int,
) -> tuple[ChunkCopyMethods, ...]:
    """Return the copy method of every piece, per chunk of ``layout``.

    ``can_copy_by_address`` tells whether a device copies by address, ``gathers`` whether it gathers tensors of so many
    bytes. The gather buffer of a device may have ``gather_bytes``.
    """

    def is_dense(leaf: int) -> bool:
        return (
            not structure.conj[leaf]
            and not structure.neg[leaf]
            and envelope.is_dense(tuple(structure.shapes[leaf]), structure.strides[leaf])
        )

    def method(piece: Piece) -> str:
        leaf = layout.items[piece.item].leaf
        device, raw_bytes = structure.devices[leaf], layout.items[piece.item].raw_bytes
        by_torch = "copied" if device.type == "cpu" else "converted"
        if not is_dense(leaf):
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
        """Return the copies whose row is wanted."""
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
    """Image offset of each part."""
    leaves: IntArray
    """Leaf of each part."""
    raw_starts: IntArray
    """Offset of each part in the bytes of its leaf."""
    nbytes: IntArray
    """Length of each part, in bytes."""

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
