"""Verify the pieces of a finished read request and copy them to their targets. Runs in a thread."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from aio_ckpt.checkpoint.read_requests import Pieces, ReadRequest, ReassemblyBuffer
from aio_ckpt.errors import MismatchError
from aio_ckpt.format.checksum import crc32_of
from aio_ckpt.format.tensor_columns import IntArray
from aio_ckpt.memory.copies import Copies
from aio_ckpt.memory.cuda import is_host_memory
from aio_ckpt.memory.host_copy import copy_all, memmove
from aio_ckpt.memory.read_buffers import address_of

_SMALL_COPY_BYTES = 64 << 10
"""Longest copy that is made together with others in one call. A longer one is one ``memmove``."""


def verify_and_copy(request: ReadRequest, view: memoryview, verify: bool, copies: Sequence[Copies]) -> None:
    """Verify the pieces of a request, then copy them to their targets.

    ``copies``: the copies to each device, by its number in ``Pieces.devices``. The loops take 1 us a piece.

    Raises:
        MismatchError: a piece does not match its CRC32. Nothing of the request was copied.
    """
    pieces = request.pieces
    begins = pieces.starts - request.start
    if verify:
        _check_sums(request, view, begins)
    addresses, devices = _places(pieces)
    moves = np.stack([addresses, begins + address_of(view), pieces.nbytes], axis=1)
    is_moved = (moves[:, 0] != 0) & (moves[:, 0] != moves[:, 1])  # pieces that are not moved stay in the view
    _move(moves[is_moved & (devices == 0)])
    numbers = np.unique(devices[is_moved & (devices > 0)]).tolist()
    try:
        for number in numbers:
            copies[number].copy_vectors(0, _runs(moves[is_moved & (devices == number)]).astype(np.uint64))
    finally:  # the view is read into anew afterwards
        _wait_for(copies[number] for number in numbers)


def finish_buffers(reassemblies: Sequence[ReassemblyBuffer], verify: bool, copies: Sequence[Copies]) -> None:
    """Finish full reassembly buffers and free their memory."""
    try:
        for buffer in reassemblies:
            buffer.finish(verify, copies[buffer.device])
    finally:
        _wait_for(copies[number] for number in {buffer.device for buffer in reassemblies})
        for buffer in reassemblies:
            buffer.scratch = None


def _wait_for(issued: Iterable[Copies]) -> None:
    """Wait until the copies that this thread issued are done, so that sources and targets may be reused."""
    for copies in issued:
        copies.record_event().synchronize()


def _places(pieces: Pieces) -> tuple[IntArray, IntArray]:
    """Return the address and device that each piece is copied to: those of its target or of its reassembly buffer."""
    gathered = [row for row, buffer in enumerate(pieces.reassemblies.tolist()) if buffer is not None and buffer.then]
    if not gathered:
        return pieces.addresses, pieces.devices
    addresses, devices = pieces.addresses.copy(), pieces.devices.copy()
    for row in gathered:
        buffer = pieces.reassemblies[row]
        addresses[row] = buffer.scratch.data_ptr() + pieces.starts[row] - buffer.start
        devices[row] = 0 if is_host_memory(buffer.scratch) else buffer.device
    return addresses, devices


def _move(moves: IntArray) -> None:
    """Copy within host memory. ``moves``: rows of (target, source, bytes)."""
    is_small = moves[:, 2] <= _SMALL_COPY_BYTES
    copy_all(0, moves[is_small].astype(np.uint64))
    if not is_small.all():
        for move in _runs(moves[~is_small]).tolist():
            memmove(*move)


def _runs(moves: IntArray) -> IntArray:
    """Return the moves, joined where they follow each other in both memories, as the blocks of a tensor do."""
    stops = moves[:, :2] + moves[:, 2:]
    first = np.flatnonzero(np.append(True, (moves[1:, :2] != stops[:-1]).any(axis=1)))
    return np.column_stack([moves[first, :2], np.add.reduceat(moves[:, 2], first)])


def _check_sums(request: ReadRequest, view: memoryview, begins: IntArray) -> None:
    pieces = request.pieces
    ends = begins + pieces.nbytes
    is_summed = pieces.crcs >= 0
    rows = np.flatnonzero(is_summed)
    sums = [crc32_of(view[begin:end]) for begin, end in zip(begins[rows].tolist(), ends[rows].tolist(), strict=True)]
    bad = np.flatnonzero(pieces.crcs[rows] != sums)
    if len(bad):
        row = int(rows[bad[0]])
        start = int(pieces.starts[row])
        where = f"bytes {start} to {start + int(pieces.nbytes[row])} of the file"
        raise MismatchError(f"{request.label(row)}: {where} do not match their CRC32")
    for row in np.flatnonzero(~is_summed).tolist():
        buffer = pieces.reassemblies[row]
        if buffer is not None and buffer.sums:
            buffer.sums[pieces.positions[row]] = (crc32_of(view[begins[row] : ends[row]]), int(pieces.nbytes[row]))
