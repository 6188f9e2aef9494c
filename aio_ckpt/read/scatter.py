"""Place: prove what reads brought, and copy it to where it belongs, in a thread; the loop decides what and when."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from isal import isal_zlib

from aio_ckpt.errors import MismatchError
from aio_ckpt.format.manifests import IntArray
from aio_ckpt.memory.copies import Copies
from aio_ckpt.memory.cuda import is_host
from aio_ckpt.memory.host_copy import copy_all, memmove
from aio_ckpt.memory.read_buffers import address_of
from aio_ckpt.read.requests import Pieces, ReadRequest, ReassemblyBuffer

__all__ = ["finish", "place"]

_SMALL_COPY_BYTES = 64 << 10
"""Up to this size copies are made many at once; beyond, each is one memmove."""


def place(segment: ReadRequest, view: memoryview, verify: bool, copies: Sequence[Copies]) -> int:
    """Prove the pieces of a segment, then put them where they belong; the number of sums that matched.

    ``copies`` are those of each number in ``Pieces.devices``. The loops take 1 us a piece.

    Raises:
        MismatchError: a piece does not match its CRC32. Nothing of the segment was copied.
    """
    pieces = segment.pieces
    begins = pieces.starts - segment.start
    checked = _prove(segment, view, begins) if verify else 0
    addresses, devices = _places(pieces)
    moves = np.stack([addresses, begins + address_of(view), pieces.nbytes], axis=1)
    is_moved = (moves[:, 0] != 0) & (moves[:, 0] != moves[:, 1])  # else it stays in the view
    _move(moves[is_moved & (devices == 0)])
    numbers = np.unique(devices[is_moved & (devices > 0)]).tolist()
    try:
        for number in numbers:
            copies[number].issue(0, _runs(moves[is_moved & (devices == number)]).astype(np.uint64))
    finally:  # the view is read into anew afterwards
        _wait_for(copies[number] for number in numbers)
    return checked


def finish(landings: Sequence[ReassemblyBuffer], verify: bool, copies: Sequence[Copies]) -> int:
    """Finish landings that are full, and let go of their memory; the number of sums that matched."""
    try:
        combine = isal_zlib.crc32_combine if verify else None
        return sum(landing.finish(combine, copies[landing.device]) for landing in landings)
    finally:
        _wait_for(copies[number] for number in {landing.device for landing in landings})
        for landing in landings:
            landing.scratch = None


def _wait_for(issued: Iterable[Copies]) -> None:
    """Until what this thread issued is done: then its sources and targets are free."""
    for copies in issued:
        copies.record_event().synchronize()


def _places(pieces: Pieces) -> tuple[IntArray, IntArray]:
    """Address and device that each piece is copied to: its own, or those of the scratch memory that it lands in."""
    landed = [row for row, landing in enumerate(pieces.landings.tolist()) if landing is not None and landing.then]
    if not landed:
        return pieces.addresses, pieces.devices
    addresses, devices = pieces.addresses.copy(), pieces.devices.copy()
    for row in landed:
        landing = pieces.landings[row]
        addresses[row] = landing.scratch.data_ptr() + pieces.starts[row] - landing.start
        devices[row] = 0 if is_host(landing.scratch) else landing.device
    return addresses, devices


def _move(moves: IntArray) -> None:
    """Within the host's memory: (target, source, bytes) each."""
    is_small = moves[:, 2] <= _SMALL_COPY_BYTES
    copy_all(0, moves[is_small].astype(np.uint64))
    if not is_small.all():
        for move in _runs(moves[~is_small]).tolist():
            memmove(*move)


def _runs(moves: IntArray) -> IntArray:
    """The same with those joined that follow each other in both memories: the blocks of a tensor."""
    stops = moves[:, :2] + moves[:, 2:]
    first = np.flatnonzero(np.append(True, (moves[1:, :2] != stops[:-1]).any(axis=1)))
    return np.column_stack([moves[first, :2], np.add.reduceat(moves[:, 2], first)])


def _prove(segment: ReadRequest, view: memoryview, begins: IntArray) -> int:
    pieces, crc32 = segment.pieces, isal_zlib.crc32
    ends = begins + pieces.nbytes
    is_summed = pieces.crcs >= 0
    rows = np.flatnonzero(is_summed)
    sums = [crc32(view[begin:end]) for begin, end in zip(begins[rows].tolist(), ends[rows].tolist(), strict=True)]
    bad = np.flatnonzero(pieces.crcs[rows] != sums)
    if len(bad):
        raise _mismatch(segment, int(rows[bad[0]]))
    for row in np.flatnonzero(~is_summed).tolist():
        landing = pieces.landings[row]
        if landing is not None and landing.sums:
            landing.sums[pieces.positions[row]] = (crc32(view[begins[row] : ends[row]]), int(pieces.nbytes[row]))
    return len(rows)


def _mismatch(segment: ReadRequest, row: int) -> MismatchError:
    pieces = segment.pieces
    start = int(pieces.starts[row])
    where = f"bytes {start} to {start + int(pieces.nbytes[row])} of the file"
    return MismatchError(f"{segment.label(row)}: {where} do not match their CRC32")
