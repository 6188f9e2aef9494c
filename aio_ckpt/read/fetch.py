"""Fetch: run a read plan: read, prove, copy. A few reads in flight, each into a bounce buffer of its own."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import anyio
import numpy as np
import torch
from isal import isal_zlib

from aio_ckpt.errors import CorruptCheckpointError, MismatchError, UnsupportedLeafError
from aio_ckpt.format.constants import BLOCK_BYTES
from aio_ckpt.format.tensor_zip import HEAD_BYTES, TAIL_BYTES, parse, records_of
from aio_ckpt.memory.copies import Copies, HostCopies
from aio_ckpt.memory.cuda import begin_uploads, takes_registered
from aio_ckpt.memory.read_buffers import address_of, page_locked, touch
from aio_ckpt.read.catalog import Item, Slot
from aio_ckpt.read.data_files import Files
from aio_ckpt.read.requests import Landing, PieceRows, Segment, cut_segments
from aio_ckpt.read.scatter import finish, place
from aio_ckpt.runtime.futures import first_cause
from aio_ckpt.runtime.portal import Executor, run_blocking

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

_IN_PLACE_PAYS = 1.5
"""So much longer than through buffers reads to the tensors' own memory may take: they spare a copy. Where pages lie
scattered a virtual disk takes two to three times as long (540 to 900 ms a GiB, 350 through buffers on huge pages), else
a tenth less; how they lie no system tells, and it is another draw for each allocation."""
_PLACERS = 2
"""Segments that are proven and copied while as many reads as allowed stay in flight."""


_Read: TypeAlias = list[tuple[Segment, memoryview]]
"""What one call reads: segments that follow each other in the file, and where to."""


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
    bounced = [segment.bounced_bytes for segment in segments if segment.file not in files.ahead]
    buffers = files.buffers(max(bounced, default=0), min(readers + _PLACERS, len(segments)))

    locking = next(filter(takes_registered, devices), None)
    async with page_locked(buffers if locking else [], locking, executor=executor):
        copies = await run_blocking(executor, _begin, devices) if devices else _begin(())
        run = _Run(files, executor, readers, verify, copies)
        try:
            await run.all(segments, buffers)
        except BaseExceptionGroup as errors:
            _let_go(segments)
            raise first_cause(errors) from None
    return Fetched(bytes_read=run.bytes_read, sums_checked=run.sums_checked)


def _begin(devices: Sequence[torch.device]) -> list[Copies]:
    """What copies to the memory of each number in ``Pieces.devices``."""
    return [HostCopies(), *map(begin_uploads, devices)]


class _Run:
    """One run of a plan. Landings are opened and finished on the loop, filled by threads."""

    def __init__(self, files: Files, executor: Executor, readers: int, verify: bool, copies: Sequence[Copies]) -> None:
        self._files = files
        self._executor = executor
        self._reading = anyio.Semaphore(readers)
        self._verify = verify
        self._copies = copies
        self._is_in_place = True
        self._placed: defaultdict[int, anyio.Event] = defaultdict(anyio.Event)  # by id(segment)
        self.bytes_read = 0
        self.sums_checked = 0

    async def all(self, segments: Sequence[Segment], buffers: Sequence[memoryview]) -> None:
        """Those of the trial first, which tell how the others are to be read; what is new to the disk is first slow."""
        trial = [segment for segment in segments if segment.is_trial]
        half = len(trial) // 2
        if half:
            longest = max(segment.bounced_bytes for segment in trial)
            await run_blocking(self._executor, touch, [buffer[:longest] for buffer in buffers[:half]])
            self._is_in_place = False
            bounced_secs = await self._secs_a_byte(trial[:half], buffers)
            self._is_in_place = True
            in_place_secs = await self._secs_a_byte(trial[half:], buffers)
            self._is_in_place = in_place_secs <= _IN_PLACE_PAYS * bounced_secs
            segments = [segment for segment in segments if not segment.is_trial]
        await self._some(segments, buffers)

    async def _secs_a_byte(self, segments: Sequence[Segment], buffers: Sequence[memoryview]) -> float:
        began = time.perf_counter()
        await self._some(segments, buffers)
        return (time.perf_counter() - began) / sum(segment.stop - segment.start for segment in segments)

    async def _some(self, segments: Sequence[Segment], buffers: Sequence[memoryview]) -> None:
        """As many at once as there are buffers."""
        left = iter(segments)

        async def work(buffer: memoryview) -> None:
            for segment in left:
                try:
                    await self._segment(segment, buffer)
                finally:  # also of one that failed or never began: nobody may wait for ever, and then the load fails
                    self._placed[id(segment)].set()

        async with anyio.create_task_group() as group:
            for buffer in buffers[: len(segments)]:
                group.start_soon(work, buffer)

    async def _segment(self, segment: Segment, buffer: memoryview) -> None:
        """Read one segment and put its pieces where they belong."""
        ahead = await self._files.read_already(segment.file, segment.start, segment.stop)
        assert ahead is None or segment.rest is None, "nothing of a file that is read ahead is read in place"
        for read in [[(segment, ahead)]] if ahead is not None else self._reads(segment, buffer):
            await self._reading.acquire()  # here a cancelled fetch stops
            # Shielded: whoever cancels a load may free or reuse the targets as soon as it returns.
            with anyio.CancelScope(shield=True):
                await self._read_and_place(read, after=segment.after, is_read=ahead is not None)

    def _reads(self, segment: Segment, buffer: memoryview) -> list[_Read]:
        """What is read by one call each, and where to."""
        if segment.target is None or not self._is_in_place:
            return [[(part, self._room(part, buffer))] for part in segment.bounced()]
        rest = [] if segment.rest is None else [(segment.rest, self._room(segment.rest, buffer))]
        return [[(segment, segment.target), *rest]]

    def _room(self, segment: Segment, buffer: memoryview) -> memoryview:
        nbytes = segment.stop - segment.start
        # One that should have been read ahead has no part in the size of the buffers.
        return buffer[:nbytes] if nbytes <= buffer.nbytes else self._files.buffers(nbytes, 1)[0][:nbytes]

    async def _read_and_place(self, read: _Read, *, after: Segment | None, is_read: bool) -> None:
        """Gives back the turn to read, which was taken, as soon as that has ended."""
        (segment, view), *_ = read
        landings = Counter(landing for landing in segment.pieces.landings.tolist() if landing is not None)
        try:
            for landing, count in landings.items():
                landing.open(self._copies[landing.device], segment, view, count)
            if not is_read:
                got = await self._read(segment, [view for _, view in read])
                self.bytes_read += got
                for part, _ in read:
                    _check_length(part, segment.start + got)
        finally:
            self._reading.release()
        if after is not None:
            await self._placed[id(after)].wait()
        is_proven = is_read and self._files.is_proven(segment.file)
        self.sums_checked += await run_blocking(self._executor, place, read, self._verify, is_proven, self._copies)
        complete = [landing for landing, count in landings.items() if _count_down(landing, count)]
        if complete:
            self.sums_checked += await run_blocking(self._executor, finish, complete, self._verify, self._copies)

    async def _read(self, segment: Segment, views: Sequence[memoryview]) -> int:
        async with self._files.use(segment.file) as file:
            return await file.read_into(segment.start, *views)


def _let_go(segments: Sequence[Segment]) -> None:
    """Of the memory where parts landed: who keeps the error keeps the segments, too."""
    for segment in segments:
        for landing in segment.pieces.landings.tolist():
            if landing is not None:
                landing.scratch = None


def _count_down(landing: Landing, count: int) -> bool:
    landing.pieces_left -= count
    return not landing.pieces_left


def _check_length(segment: Segment, end: int) -> None:
    beyond = np.flatnonzero(segment.pieces.starts + segment.pieces.nbytes > end)
    if len(beyond):
        raise MismatchError(f"{segment.label(int(beyond[0]))}: the file ends at byte {end}, inside of it")


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
    segments = [
        found for file, rows in pieces.items() for found in cut_segments(file, rows.ascending(), 4 * BLOCK_BYTES)
    ]
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
        UnsupportedLeafError: it is no plain tensor.
    """
    try:
        found = parse(bytes(head), bytes(tail), slot.item_bytes)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{slot.file}: tensor {slot.name!r}: {error}") from error
    except UnsupportedLeafError as error:
        remedy = "dcp.load with an aio_ckpt.dcp.Reader loads what torch.load can"
        raise UnsupportedLeafError(f"{slot.file}: tensor {slot.name!r}: {error}; {remedy}") from error
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
        is_conj=found.is_conj,
        is_neg=found.is_neg,
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
