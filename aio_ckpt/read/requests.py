"""Pieces: blocks of raw bytes with their CRC32 and where they go; segments: what one read moves. Touches no file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from aio_ckpt.errors import MismatchError
from aio_ckpt.format.constants import PAGE_BYTES, align_up
from aio_ckpt.format.manifests import IntArray
from aio_ckpt.memory.copies import Copies
from aio_ckpt.read.catalog import Item

__all__ = ["SEGMENT_BYTES_MAX", "PieceRows", "Pieces", "ReadRequest", "ReassemblyBuffer", "cut_requests"]

_ObjectArray: TypeAlias = npt.NDArray[np.object_]

_BESIDE_TARGET_BYTES_MAX = 32 << 20
"""Of a landing on a device, whose memory is the trainer's: one is there for each part that has begun to be read."""
SEGMENT_BYTES_MAX = (16 << 20) - 2 * PAGE_BYTES
"""Of a read through a bounce buffer: two pages below, so that one whose ends were moved to pages still fits a buffer of
whole huge pages."""
_ITEM_BYTES_MAX = 16
"""Of the elements of a tensor, which have to lie at a multiple of it; so does every buffer."""
_GAP_BYTES = 64 << 10
"""Reading over so small a gap costs less than another read."""


@dataclass(slots=True, eq=False, repr=False, kw_only=True)
class ReassemblyBuffer:
    """Where pieces go that cannot be copied straight to their target, or whose sum covers all of them together.

    Used by the threads that fill it in any order; ``pieces_left`` belongs to the loop, which alone calls
    :meth:`finish`, after the last piece.
    """

    label: str
    """What lands here, for messages."""
    start: int
    """File offset of the first byte that lands."""
    nbytes: int
    """Length of what lands, gaps between pieces included."""
    crc32: int | None = None
    """CRC32 of everything that lands, if there is one; then the pieces have none of their own."""
    then: Callable[[torch.Tensor, Copies], None] | None = None
    """Is given the scratch bytes when they are complete, and what copies to the device. None: the pieces have
    addresses of their own."""
    device: int = 0
    """Device of the target behind ``then``, as in :class:`Pieces`."""
    sums: list[tuple[int, int]] = field(default_factory=list)
    """(CRC32, length) of each piece, if ``crc32``."""
    pieces_left: int = 0
    """Pieces that have not landed."""
    scratch: torch.Tensor | None = None
    """There from the first piece to the last, so that few exist at once: what they are read to, if that is one read and
    the target on the host; on its device, if there is room; else in host memory of its own."""

    def open(self, copies: Copies, segment: ReadRequest, view: memoryview, pieces: int) -> None:
        """Before so many pieces land that ``segment`` brings to ``view``: make room, unless an earlier one did.

        Beside a target on a device the device copies, and not the host.
        """
        if self.then is None or self.scratch is not None:
            return
        at = self.start - segment.start
        if not self.device and pieces == self.pieces_left and at % _ITEM_BYTES_MAX == 0:
            self.scratch = torch.frombuffer(view, dtype=torch.uint8, count=self.nbytes, offset=at)
            return
        # A byte more: two that lie side by side are no memory that one copy may reach across.
        beside = copies.buffer(self.nbytes + 1) if self.nbytes <= _BESIDE_TARGET_BYTES_MAX else None
        self.scratch = torch.empty(self.nbytes, dtype=torch.uint8) if beside is None else beside[: self.nbytes]

    @property
    def needs_finish(self) -> bool:
        """Whether :meth:`finish` has something to prove or to pass on."""
        return self.crc32 is not None or self.then is not None

    def finish(self, combine: Callable[[int, int, int], int] | None, copies: Copies) -> bool:
        """Prove the whole (by ``crc32_combine``, if given) and pass it on; whether there was a sum to prove it by.

        Raises:
            MismatchError: the sum does not match; names file and tensor or object.
        """
        is_summed = False
        if combine is not None and self.crc32 is not None:
            total = 0
            for crc, nbytes in self.sums:
                total = combine(total, crc, nbytes)
            if total != self.crc32:
                raise MismatchError(f"{self.label} does not match its CRC32")
            is_summed = True
        if self.then is not None and self.scratch is not None:
            self.then(self.scratch, copies)
        return is_summed


@dataclass(frozen=True, slots=True, eq=False, repr=False, kw_only=True)
class Pieces:
    """Pieces of one file, ascending by start, in columns: numpy sorts and compares them all at once."""

    starts: IntArray
    """File offset."""
    nbytes: IntArray
    """Length."""
    crcs: IntArray
    """CRC32 of the bytes; -1 if they have none of their own."""
    addresses: IntArray
    """Memory they belong in; 0 if they go to the landing."""
    devices: IntArray
    """Whose memory: 0 for the host's, else 1 + the position in ``ReadPlan.devices``."""
    labels: _ObjectArray
    """What they are part of, for messages."""
    landings: _ObjectArray
    """The landing whose piece it is, or None."""
    positions: IntArray
    """Position in ``landing.sums``."""

    def take(self, rows: IntArray | slice) -> Pieces:
        """Some of the rows."""
        return Pieces(**{column.name: getattr(self, column.name)[rows] for column in fields(self)})


_Row: TypeAlias = tuple[int, int, int, int, int, str, "ReassemblyBuffer | None", int]
"""One piece: the columns of :class:`Pieces` in their order."""


@dataclass(slots=True, eq=False, repr=False)
class PieceRows:
    """Pieces of one file in any order, while they are collected."""

    rows: list[_Row] = field(default_factory=list)
    """A row for each piece."""

    def add_blocks(self, item: Item, address: int, device: int) -> None:
        """All blocks of an item, to be copied to its target, which begins at ``address``."""
        block, nbytes, start = item.block_bytes, item.raw_bytes, item.raw_offset
        for at, crc in zip(range(0, nbytes, block), item.sums, strict=True):
            self.rows.append((start + at, min(block, nbytes - at), crc, address + at, device, item.name, None, 0))

    def total_bytes(self) -> int:
        """Sum of all lengths."""
        return sum(row[1] for row in self.rows)

    def ascending(self) -> Pieces:
        """All of them."""
        starts, nbytes, crcs, addresses, devices, labels, landings, positions = zip(*self.rows, strict=True)
        every = Pieces(
            starts=np.array(starts, np.int64),
            nbytes=np.array(nbytes, np.int64),
            crcs=np.array(crcs, np.int64),
            addresses=np.array(addresses, np.int64),
            devices=np.array(devices, np.int64),
            labels=np.array(labels, np.object_),
            landings=np.array(landings, np.object_),
            positions=np.array(positions, np.int64),
        )
        return every.take(np.argsort(every.starts, kind="stable"))


@dataclass(frozen=True, slots=True, eq=False, repr=False, kw_only=True)
class ReadRequest:
    """One read."""

    file: str
    """Data file, relative to the checkpoint."""
    start: int
    """File offset, a multiple of the page (direct I/O)."""
    stop: int
    """File offset; the last page may be cut short by the end of the file."""
    pieces: Pieces
    """What is in it."""

    def label(self, row: int) -> str:
        """What a piece is part of, for messages: the file, and the tensor or object."""
        label: str = self.pieces.labels[row]
        return label if self.pieces.landings[row] is not None else f"{self.file}: tensor {label!r}"

    @property
    def nbytes(self) -> int:
        """Length of the read, and of the buffer that it needs."""
        return self.stop - self.start


def cut_requests(file: str, pieces: Pieces, segment_bytes: int) -> list[ReadRequest]:
    """Group pieces into reads of about ``segment_bytes``: page-aligned, small gaps read over. Never splits a piece.

    A landing that would be cut begins the next one, if nothing of it is then read twice: what lands whole needs no
    scratch memory.
    """
    stops = np.maximum.accumulate(pieces.starts + pieces.nbytes)
    far = np.flatnonzero(pieces.starts[1:] - stops[:-1] > _GAP_BYTES) + 1
    segments: list[ReadRequest] = []
    first = 0
    for end in (*far.tolist(), len(stops)):
        while first < end:
            limit = pieces.starts[first] + segment_bytes
            last = min(max(int(np.searchsorted(stops, limit, side="right")), first + 1), end)
            if last < end:
                last = _before_landing(pieces, stops, first, last)
            segments.append(
                ReadRequest(
                    file=file,
                    start=int(pieces.starts[first]) // PAGE_BYTES * PAGE_BYTES,
                    stop=align_up(int(stops[last - 1]), PAGE_BYTES),
                    pieces=pieces.take(slice(first, last)),
                )
            )
            first = last
    return segments


def _before_landing(pieces: Pieces, stops: IntArray, first: int, last: int) -> int:
    """``last``, or the first row of the landing that a cut there splits, if that is behind ``first`` and all before."""
    landing = pieces.landings[last]
    if landing is None:
        return last
    begin = next(row for row in range(first, last + 1) if pieces.landings[row] is landing)
    return begin if begin > first and stops[begin - 1] <= pieces.starts[begin] else last
