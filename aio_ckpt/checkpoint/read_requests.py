"""Pieces (blocks of raw bytes with CRC32 and target) and the read requests that read them. Touches no file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from aio_ckpt.checkpoint.catalog import Item, StoredObject
from aio_ckpt.errors import MismatchError
from aio_ckpt.format.checksum import crc32_of_parts
from aio_ckpt.format.constants import PAGE_BYTES, align_up
from aio_ckpt.format.tensor_columns import IntArray
from aio_ckpt.memory.copies import Copies

_ObjectArray: TypeAlias = npt.NDArray[np.object_]

_BESIDE_TARGET_BYTES_MAX = 32 << 20
"""Largest buffer on a device, in bytes; the trainer needs the rest of its memory. Each part being read has one."""
REQUEST_BYTES_MAX = (16 << 20) - 2 * PAGE_BYTES
"""Longest read into a bounce buffer. It is two pages below 16 MiB: a read whose ends are moved to pages still fits a
buffer of whole huge pages."""
_ITEM_BYTES_MAX = 16
"""Largest element of a tensor. An element lies at a multiple of its size, and so does every buffer."""
_GAP_BYTES = 64 << 10
"""Longest gap between two pieces of one read. To read a gap of this length costs less than another read."""


@dataclass(slots=True, eq=False, repr=False, kw_only=True)
class ReassemblyBuffer:
    """Buffer for pieces that cannot be copied straight to their target, or that have one sum together.

    Threads fill it in any order. ``pieces_left`` belongs to the loop, which has :meth:`finish` called after the last
    piece.
    """

    label: str
    """File, and tensor or object, for messages."""
    start: int
    """File offset of the first byte."""
    nbytes: int
    """Length in bytes, gaps between pieces included."""
    crc32: int | None = None
    """CRC32 of all pieces together; the pieces have none of their own then. None if each piece has its own, or none."""
    then: Callable[[torch.Tensor, Copies], object] | None = None
    """Called with the complete bytes and the copies of the device. None if the pieces have addresses of their own."""
    device: int = 0
    """Device of the target of ``then``, numbered as in :class:`Pieces`."""
    sums: list[tuple[int, int]] = field(default_factory=list)
    """(CRC32, length) of each piece, if ``crc32``."""
    pieces_left: int = 0
    scratch: torch.Tensor | None = None
    """Memory of the bytes. It exists from the first piece to the last, so that few buffers exist at once.

    If one read reads all pieces and the target is on the host, it is the bounce buffer. If not, it is memory of the
    target's device if there is room, and host memory if there is none.
    """

    def open(self, copies: Copies, request: ReadRequest, view: memoryview, pieces: int) -> None:
        """Allocate ``scratch`` unless an earlier request did. ``request`` reads ``pieces`` pieces into ``view``."""
        if self.then is None or self.scratch is not None:
            return
        at = self.start - request.start
        if not self.device and pieces == self.pieces_left and at % _ITEM_BYTES_MAX == 0:
            self.scratch = torch.frombuffer(view, dtype=torch.uint8, count=self.nbytes, offset=at)
            return
        # One byte more, because a copy must not reach across two allocations that lie side by side.
        beside = copies.allocate(self.nbytes + 1) if self.nbytes <= _BESIDE_TARGET_BYTES_MAX else None
        self.scratch = torch.empty(self.nbytes, dtype=torch.uint8) if beside is None else beside[: self.nbytes]

    @property
    def needs_finish(self) -> bool:
        """Whether :meth:`finish` has a sum to compare or bytes to pass on."""
        return self.crc32 is not None or self.then is not None

    def finish(self, verify: bool, copies: Copies) -> None:
        """Compare the sum of all pieces (if ``verify``) and call ``then``.

        Raises:
            MismatchError: the sum does not match; names file and tensor or object.
        """
        if verify and self.crc32 is not None and crc32_of_parts(self.sums) != self.crc32:
            raise MismatchError(f"{self.label} does not match its CRC32")
        if self.then is not None and self.scratch is not None:
            self.then(self.scratch, copies)


@dataclass(frozen=True, slots=True, eq=False, repr=False, kw_only=True)
class Pieces:
    """Pieces of one file in columns, ascending by start."""

    starts: IntArray
    """Offset in the file."""
    nbytes: IntArray
    crcs: IntArray
    """CRC32 of the bytes; -1 if they have none of their own."""
    addresses: IntArray
    """Address of the target; 0 if the piece goes to a reassembly buffer."""
    devices: IntArray
    """Device of the target: 0 for the host, else 1 + the position in ``ReadPlan.devices``."""
    labels: _ObjectArray
    """What the piece is of, for messages: a name of a tensor, a StoredObject, or the label of the reassembly buffer."""
    reassemblies: _ObjectArray
    """``ReassemblyBuffer`` of the piece, or None."""
    positions: IntArray
    """Index into ``ReassemblyBuffer.sums``."""

    def take(self, rows: IntArray | slice) -> Pieces:
        return Pieces(**{column.name: getattr(self, column.name)[rows] for column in fields(self)})


Row: TypeAlias = tuple[int, int, int, int, int, "str | StoredObject", "ReassemblyBuffer | None", int]
"""One piece: the columns of :class:`Pieces` in their order."""


def block_rows(item: Item, address: int, device: int) -> Iterator[Row]:
    """Yield all blocks of an item, to be copied to the target that begins at ``address``."""
    block, nbytes, start = item.block_bytes, item.raw_bytes, item.raw_offset
    for at, crc in zip(range(0, nbytes, block), item.sums, strict=True):
        yield start + at, min(block, nbytes - at), crc, address + at, device, item.name, None, 0


def _ascending(rows: Sequence[Row]) -> Pieces:
    """Return pieces in columns, ascending by start."""
    starts, nbytes, crcs, addresses, devices, labels, reassemblies, positions = zip(*rows, strict=True)
    every = Pieces(
        starts=np.array(starts, np.int64),
        nbytes=np.array(nbytes, np.int64),
        crcs=np.array(crcs, np.int64),
        addresses=np.array(addresses, np.int64),
        devices=np.array(devices, np.int64),
        labels=np.array(labels, np.object_),
        reassemblies=np.array(reassemblies, np.object_),
        positions=np.array(positions, np.int64),
    )
    return every.take(np.argsort(every.starts, kind="stable"))


@dataclass(frozen=True, slots=True, eq=False, repr=False, kw_only=True)
class ReadRequest:
    """One read of a data file."""

    file: str
    """Data file, relative to the checkpoint."""
    start: int
    """File offset, a multiple of the page (direct I/O)."""
    stop: int
    """File offset; the last page may be cut short by the end of the file."""
    pieces: Pieces
    """Pieces inside the read, ascending."""

    def label(self, row: int) -> str:
        """Return the file, and the tensor or object, of a piece, for messages."""
        label, buffer = self.pieces.labels[row], self.pieces.reassemblies[row]
        return f"{self.file}: tensor {label!r}" if buffer is None and isinstance(label, str) else str(label)

    @property
    def nbytes(self) -> int:
        """Length of the read, and of the buffer that it needs."""
        return self.stop - self.start


def group_into_requests(file: str, rows: Sequence[Row], request_bytes: int) -> list[ReadRequest]:
    """Group pieces, given in any order, into reads of about ``request_bytes``. Never splits a piece.

    The reads are page-aligned. Small gaps are read over.

    If a cut would split the pieces of a reassembly buffer, the request ends before them, unless bytes were read twice
    then: pieces that one request brings need no memory of their own.
    """
    pieces = _ascending(rows)
    stops = np.maximum.accumulate(pieces.starts + pieces.nbytes)
    far = np.flatnonzero(pieces.starts[1:] - stops[:-1] > _GAP_BYTES) + 1
    requests: list[ReadRequest] = []
    first = 0
    for end in (*far.tolist(), len(stops)):
        while first < end:
            limit = pieces.starts[first] + request_bytes
            last = min(max(int(np.searchsorted(stops, limit, side="right")), first + 1), end)
            if last < end:
                last = _before_reassembly(pieces, stops, first, last)
            requests.append(
                ReadRequest(
                    file=file,
                    start=int(pieces.starts[first]) // PAGE_BYTES * PAGE_BYTES,
                    stop=align_up(int(stops[last - 1]), PAGE_BYTES),
                    pieces=pieces.take(slice(first, last)),
                )
            )
            first = last
    return requests


def _before_reassembly(pieces: Pieces, stops: IntArray, first: int, last: int) -> int:
    """Return ``last``, or the first row of the buffer that a cut there splits, if a cut is possible there."""
    buffer = pieces.reassemblies[last]
    if buffer is None:
        return last
    begin = next(row for row in range(first, last + 1) if pieces.reassemblies[row] is buffer)
    return begin if begin > first and stops[begin - 1] <= pieces.starts[begin] else last
