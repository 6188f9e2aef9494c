"""Fetch: run a read plan: read, prove, copy. A few reads in flight, each into a bounce buffer of its own."""

from __future__ import annotations

from collections import Counter
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
from aio_ckpt.memory.read_buffers import address_of, bounce_buffers, page_locked
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

_PLACERS = 2
"""Segments that are proven and copied while as many reads as allowed stay in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """What a run of a read plan did."""

    bytes_read: int
    """Bytes moved from data files, alignment included."""
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
    longest = max((segment.nbytes for segment in segments), default=0)
    buffers = bounce_buffers(longest, min(readers + _PLACERS, len(segments)))
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
        self.bytes_read = 0
        self.sums_checked = 0

    async def all(self, segments: Sequence[Segment], buffers: Sequence[memoryview]) -> None:
        """As many at once as there are buffers."""
        left = iter(segments)

        async def work(buffer: memoryview) -> None:
            for segment in left:
                await self._reading.acquire()  # here a cancelled fetch stops
                # Shielded: whoever cancels a load may free or reuse the targets as soon as it returns.
                with anyio.CancelScope(shield=True):
                    await self._segment(segment, buffer[: segment.nbytes])

        async with anyio.create_task_group() as group:
            for buffer in buffers[: len(segments)]:
                group.start_soon(work, buffer)

    async def _segment(self, segment: Segment, view: memoryview) -> None:
        """Read one segment and put its pieces where they belong. The turn to read, taken before, ends with the read."""
        landings = Counter(landing for landing in segment.pieces.landings.tolist() if landing is not None)
        try:
            for landing, count in landings.items():
                landing.open(self._copies[landing.device], segment, view, count)
            async with self._files.use(segment.file) as file:
                got = await file.read_into(segment.start, view)
            self.bytes_read += got
            _check_length(segment, segment.start + got)
        finally:
            self._reading.release()
        self.sums_checked += await run_blocking(self._executor, place, segment, view, self._verify, self._copies)
        complete = [landing for landing, count in landings.items() if _count_down(landing, count)]
        if complete:
            self.sums_checked += await run_blocking(self._executor, finish, complete, self._verify, self._copies)


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
            row = (start, len(end), -1, address, 0, slot.name, None, 0)
            pieces.setdefault(slot.file, PieceRows()).rows.append(row)
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
