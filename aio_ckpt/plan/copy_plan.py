"""The copy method of each piece of a state: by which way it gets into the image. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from aio_ckpt.format import tensor_zip as envelope
from aio_ckpt.memory.copies import FOREACH_DTYPES
from aio_ckpt.plan.structure import Structure
from aio_ckpt.plan.values import Chunk, ImageLayout, Piece

__all__ = ["SMALL_COPY_BYTES", "ChunkCopyMethods", "GatherRun", "choose_copy_methods", "image_order"]

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
    is_host = device.type == "cpu"
    return (is_host, "" if is_host else str(device), not is_host and not is_gathered)


def choose_copy_methods(
    structure: Structure,
    layout: ImageLayout,
    *,
    copies_by_address: Callable[[torch.device], bool],
    gathers: Callable[[torch.device, int], bool],
    gather_bytes: int,
) -> tuple[ChunkCopyMethods, ...]:
    """Return the copy method of every piece, per chunk of ``layout``.

    ``copies_by_address`` tells whether a device can copy by address, ``gathers`` whether it gathers tensors of so many
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
        return "issued" if copies_by_address(device) else by_torch

    run_bytes = gather_bytes // _RUNS_A_BUFFER
    return tuple(_of_chunk(chunk, structure, layout, method, copies_by_address, run_bytes) for chunk in layout.chunks)


def _of_chunk(
    chunk: Chunk,
    structure: Structure,
    layout: ImageLayout,
    method: Callable[[Piece], str],
    copies_by_address: Callable[[torch.device], bool],
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
                by_method["issued" if copies_by_address(device) else "converted"] += run
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
