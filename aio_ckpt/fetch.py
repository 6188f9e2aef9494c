"""Fetch: run a read plan: read, prove, copy. A few reads in flight, each into a bounce buffer of its own."""

from __future__ import annotations

import ctypes
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import anyio
import numpy as np
import torch
from isal import isal_zlib

from aio_ckpt.bounce import address_of, page_locked
from aio_ckpt.contents import Item, Slot
from aio_ckpt.copies import Copies, HostCopies
from aio_ckpt.device import begin_uploads, takes_registered
from aio_ckpt.envelope import HEAD_BYTES, TAIL_BYTES, parse, records_of
from aio_ckpt.errors import CorruptCheckpointError, MismatchError, UnsupportedLeafError
from aio_ckpt.files import Files
from aio_ckpt.items import BLOCK_BYTES
from aio_ckpt.manifest import IntArray
from aio_ckpt.moves import copy_near
from aio_ckpt.pieces import Landing, PieceRows, Segment, cut_segments
from aio_ckpt.portal import Executor, run_blocking

__all__ = [
    "Ends",
    "Fetched",
    "check_inside",
    "check_zip",
    "fetch",
    "parse_slot",
    "parse_slots",
    "read_ends",
]

_PLACERS = 2
"""Segments that are proven and copied while as many reads as allowed stay in flight."""

_SMALL_COPY_BYTES = 64 << 10
"""Up to this size copies are made many at once; beyond, each is one memmove."""

_copy = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(("memmove", ctypes.CDLL(None)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """What a run of a read plan did."""

    bytes_read: int
    """Bytes moved from data files, alignment included; not what had been read ahead."""
    sums_checked: int
    """CRC32s that were there and matched."""


async def fetch(
    files: Files,
    segments: Sequence[Segment],
    *,
    executor: Executor,
    readers: int,
    verify: bool,
    devices: Sequence[torch.device] = (),
) -> Fetched:
    """Run every segment, ``readers`` at a time, and finish landings as they fill up.

    A fetch, cancelled or not, returns only when no thread or device writes to a target any more. ``devices`` are those
    of ``ReadPlan``.

    Raises:
        MismatchError: bytes that do not match their CRC32, or a file that ends too soon.
        ReadError: the operating system could not read.
    """
    left = iter(segments)
    bounced = [
        segment.stop - segment.start
        for segment in segments
        if segment.target is None and segment.file not in files.ahead
    ]
    buffers = files.buffers(max(bounced, default=0), min(readers + _PLACERS, len(segments)))

    async def work(buffer: memoryview) -> None:
        for segment in left:
            await run.segment(segment, buffer)

    locked = buffers if any(map(takes_registered, devices)) else []
    async with page_locked(locked, executor=executor):
        copies = await run_blocking(executor, _begin, devices) if devices else _begin(())
        run = _Run(files, executor, anyio.Semaphore(readers), verify, copies)
        try:
            async with anyio.create_task_group() as group:
                for buffer in buffers:
                    group.start_soon(work, buffer)
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
    return Fetched(bytes_read=run.bytes_read, sums_checked=run.sums_checked)


def _begin(devices: Sequence[torch.device]) -> list[Copies]:
    """What copies to the memory of each number in ``Pieces.devices``."""
    return [HostCopies(), *map(begin_uploads, devices)]


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """One error stands for all: a peer that found the next bad block says nothing new."""
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


class _Run:
    """One run of a plan. Landings are opened and finished on the loop, filled by threads."""

    def __init__(
        self, files: Files, executor: Executor, reading: anyio.Semaphore, verify: bool, copies: Sequence[Copies]
    ) -> None:
        self._files = files
        self._executor = executor
        self._reading = reading
        self._verify = verify
        self._copies = copies
        self._placed: defaultdict[int, anyio.Event] = defaultdict(anyio.Event)  # by id(segment)
        self.bytes_read = 0
        self.sums_checked = 0

    async def segment(self, segment: Segment, buffer: memoryview) -> None:
        """Read one segment and put its pieces where they belong."""
        try:
            await self._segment(segment, buffer)
        finally:  # also of one that failed or never began: nobody may wait for ever, and then the load fails anyway
            self._placed[id(segment)].set()

    async def _segment(self, segment: Segment, buffer: memoryview) -> None:
        view = await self._files.read_already(segment.file, segment.start, segment.stop)
        is_read = view is not None
        if view is None:
            view = _room(segment, buffer, self._files)
        landings = Counter(landing for landing in segment.pieces.landings.tolist() if landing is not None)
        for landing in landings:
            landing.open()
        await self._reading.acquire()  # here a cancelled fetch stops
        # Shielded: whoever cancels a load may free or reuse the targets as soon as it returns.
        with anyio.CancelScope(shield=True):
            try:
                if not is_read:
                    got = await self._read(segment, view)
                    self.bytes_read += got
                    _check_length(segment, got)
            finally:
                self._reading.release()
            if segment.after is not None:
                await self._placed[id(segment.after)].wait()
            is_proven = is_read and self._files.is_proven(segment.file)
            self.sums_checked += await run_blocking(
                self._executor, _place, segment, view, self._verify, is_proven, self._copies
            )
            complete = [landing for landing, count in landings.items() if _count_down(landing, count)]
            if complete:
                self.sums_checked += await run_blocking(self._executor, _finish, complete, self._verify, self._copies)

    async def _read(self, segment: Segment, view: memoryview) -> int:
        async with self._files.use(segment.file) as file:
            return await file.read_into(segment.start, view)


def _room(segment: Segment, buffer: memoryview, files: Files) -> memoryview:
    """Where a segment is read to."""
    if segment.target is not None:
        return segment.target
    nbytes = segment.stop - segment.start
    # One that should have been read ahead has no part in the size of the buffers.
    return buffer[:nbytes] if nbytes <= buffer.nbytes else files.buffers(nbytes, 1)[0][:nbytes]


def _count_down(landing: Landing, count: int) -> bool:
    landing.pieces_left -= count
    return not landing.pieces_left


def _finish(landings: Sequence[Landing], verify: bool, copies: Sequence[Copies]) -> int:
    try:
        combine = isal_zlib.crc32_combine if verify else None
        return sum(landing.finish(combine, copies[landing.device]) for landing in landings)
    finally:
        _wait_for(copies[number] for number in {landing.device for landing in landings})


def _wait_for(issued: Iterable[Copies]) -> None:
    """Until what this thread issued is done: then its sources and targets are free."""
    for copies in issued:
        copies.mark().synchronize()


def _check_length(segment: Segment, got: int) -> None:
    beyond = np.flatnonzero(segment.pieces.starts + segment.pieces.nbytes > segment.start + got)
    if len(beyond):
        label = segment.pieces.labels[beyond[0]]
        raise MismatchError(f"{segment.file}: ends at byte {segment.start + got}, inside {label}")


def _place(segment: Segment, view: memoryview, verify: bool, is_proven: bool, copies: Sequence[Copies]) -> int:
    """Prove the pieces of a segment, then copy them; the number of sums that matched. The hot loops: 1 us a piece.

    ``is_proven`` tells that the whole file was.
    """
    pieces = segment.pieces
    begins = pieces.starts - segment.start
    checked = 0
    if verify and is_proven and (pieces.crcs >= 0).all():
        checked = len(pieces.crcs)
    elif verify:
        checked = _prove(segment, view, begins)
    moves = np.stack([pieces.addresses, begins + address_of(view), pieces.nbytes], axis=1)
    is_moved = pieces.addresses != 0
    _move(moves[is_moved & (pieces.devices == 0)])
    numbers = np.unique(pieces.devices[is_moved & (pieces.devices > 0)]).tolist()
    try:
        for number in numbers:
            copies[number].issue(0, _runs(moves[is_moved & (pieces.devices == number)]).astype(np.uint64))
    finally:  # the view is read into anew afterwards
        _wait_for(copies[number] for number in numbers)
    for row, landing in enumerate(pieces.landings.tolist()):
        if landing is not None and landing.scratch is not None:
            begin, nbytes = int(begins[row]), int(pieces.nbytes[row])
            _land(landing, int(pieces.starts[row]) - landing.start, view[begin : begin + nbytes])
    return checked


def _move(moves: IntArray) -> None:
    """Within the host's memory: (target, source, bytes) each."""
    is_small = moves[:, 2] <= _SMALL_COPY_BYTES
    copy_near(moves[is_small].astype(np.uint64))
    if not is_small.all():
        for move in _runs(moves[~is_small]).tolist():  # of a shifted segment it is one, over itself
            _copy(*move)


def _runs(moves: IntArray) -> IntArray:
    """The same with those joined that follow each other in both memories: the blocks of a tensor."""
    stops = moves[:, :2] + moves[:, 2:]
    first = np.flatnonzero(np.append(True, (moves[1:, :2] != stops[:-1]).any(axis=1)))
    return np.column_stack([moves[first, :2], np.add.reduceat(moves[:, 2], first)])


def _prove(segment: Segment, view: memoryview, begins: IntArray) -> int:
    pieces, crc32 = segment.pieces, isal_zlib.crc32
    ends = begins + pieces.nbytes
    sums = [crc32(view[begin:end]) for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
    is_summed = pieces.crcs >= 0
    bad = np.flatnonzero(is_summed & (pieces.crcs != sums))
    if len(bad):
        raise _mismatch(segment, int(bad[0]))
    for row in np.flatnonzero(~is_summed).tolist():
        landing = pieces.landings[row]
        if landing is not None and landing.sums:
            landing.sums[pieces.positions[row]] = (sums[row], int(pieces.nbytes[row]))
    return int(np.count_nonzero(is_summed))


def _land(landing: Landing, at: int, data: memoryview) -> None:
    assert landing.scratch is not None
    _copy(landing.scratch.data_ptr() + at, address_of(data), data.nbytes)


def _mismatch(segment: Segment, row: int) -> MismatchError:
    pieces = segment.pieces
    start, label = int(pieces.starts[row]), pieces.labels[row]
    if pieces.landings[row] is None:
        label = f"{segment.file}: tensor {label!r}"
    where = f"bytes {start} to {start + int(pieces.nbytes[row])} of the file"
    return MismatchError(f"{label}: {where} do not match their CRC32")


# -- plain DCP: where the raw bytes are -------------------------------------------------------------


Ends: TypeAlias = dict[int, tuple[bytearray, bytearray]]
"""Both ends of items, by ``id(slot)``."""


async def parse_slots(files: Files, slots: Sequence[Slot], *, executor: Executor, readers: int) -> dict[int, Item]:
    """Read both ends of each slot's item and parse its envelope; keyed by ``id(slot)``.

    Raises:
        CorruptCheckpointError: an item lies outside its file, is damaged, or is not what the metadata says.
    """
    ends = await read_ends(files, slots, executor=executor, readers=readers)
    return await run_blocking(executor, _parse_all, slots, ends)


async def read_ends(files: Files, slots: Sequence[Slot], *, executor: Executor, readers: int) -> Ends:
    """What :func:`parse_slot` needs of each slot's item.

    Raises:
        CorruptCheckpointError: an item lies outside its file.
    """
    ends: Ends = {}
    pieces: dict[str, PieceRows] = {}
    for slot in slots:
        check_inside(slot.name, slot.file, slot.item_offset, slot.item_bytes, files.sizes)
        head, tail = min(slot.item_bytes, HEAD_BYTES), min(slot.item_bytes, TAIL_BYTES)
        ends[id(slot)] = bytearray(head), bytearray(tail)
        starts = slot.item_offset, slot.item_offset + slot.item_bytes - tail
        for start, end in zip(starts, ends[id(slot)], strict=True):
            address = address_of(memoryview(end)) if end else 0
            pieces.setdefault(slot.file, PieceRows()).add(start, len(end), -1, address, slot.name)
    segments = [found for file, rows in pieces.items() for found in cut_segments(file, rows, 4 * BLOCK_BYTES)]
    await fetch(files, segments, executor=executor, readers=readers, verify=False)
    return ends


def check_inside(name: str, file: str, offset: int, nbytes: int, sizes: Mapping[str, int]) -> None:
    """Raises MismatchError if a range that the metadata tells is not inside its file."""
    if offset + nbytes > sizes[file] or not nbytes:
        raise MismatchError(
            f"{file}: {name!r} at bytes {offset} to {offset + nbytes} is not inside the file of {sizes[file]} bytes"
        )


def _parse_all(slots: Sequence[Slot], ends: Ends) -> dict[int, Item]:
    return {id(slot): parse_slot(slot, *ends[id(slot)]) for slot in slots}


def parse_slot(slot: Slot, head: bytearray, tail: bytearray) -> Item:
    """The item in a slot.

    Raises:
        CorruptCheckpointError: it is damaged, or not what the metadata says.
    """
    try:
        found = parse(bytes(head), bytes(tail), slot.item_bytes)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{slot.file}: tensor {slot.name!r}: {error}") from error
    except UnsupportedLeafError as error:
        raise UnsupportedLeafError(f"{slot.file}: tensor {slot.name!r}: {error}") from error
    if found.shape != slot.shape or found.dtype != slot.dtype:
        raise CorruptCheckpointError(
            f"{slot.file}: tensor {slot.name!r} is {found.dtype} {found.shape}, "
            f".metadata says {slot.dtype} {slot.shape}"
        )
    return Item(
        name=slot.name,
        file=slot.file,
        dtype=slot.dtype,
        shape=slot.shape,
        stride=found.stride,
        offsets=slot.offsets,
        storage_offset=found.storage_offset,
        raw_offset=slot.item_offset + found.raw_offset,
        raw_bytes=found.raw_bytes,
        block_bytes=BLOCK_BYTES,
        sums=(),
        record_crc32=found.crc32 or None,
    )


def check_zip(name: str, data: bytes) -> None:
    """Stock DCP has no sum over an object; its ``torch.save`` zip has one for each record.

    Raises:
        CorruptCheckpointError: no such zip, or a record that does not match its CRC32.
    """
    try:
        records = records_of(data)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"object {name!r}: {error}") from error
    for record, (body, crc32) in records.items():
        if crc32 not in (0, isal_zlib.crc32(body)):
            raise MismatchError(f"object {name!r}: record {record} does not match its CRC32")
