"""Fetch: run a read plan: read, prove, copy. A few reads in flight, each into a bounce buffer of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import anyio
import numpy as np
import torch

from aio_ckpt.errors import AioCkptError, MismatchError
from aio_ckpt.memory.copies import Copies, HostCopies
from aio_ckpt.memory.cuda import begin_uploads, takes_registered
from aio_ckpt.memory.read_buffers import bounce_buffers, page_locked
from aio_ckpt.read.data_files import Files
from aio_ckpt.read.requests import ReadRequest, ReassemblyBuffer
from aio_ckpt.read.scatter import finish, place
from aio_ckpt.runtime.futures import first_cause
from aio_ckpt.runtime.portal import Executor, run_blocking

__all__ = [
    "Fetched",
    "fetch",
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
    segments: Sequence[ReadRequest],
    *,
    executor: Executor,
    readers: int,
    verify: bool,
    devices: Sequence[torch.device] = (),
    on_read: Callable[[ReadRequest, AioCkptError | None], None] | None = None,
) -> Fetched:
    """Run every segment, ``readers`` at a time, and finish landings as they fill up.

    A fetch, cancelled or not, returns only when no thread or device writes to a target any more. ``devices`` are those
    of ``ReadPlan``. ``on_read`` is told of each request that is done, with the error that ended it: the others go on.
    Without it, the first error ends the fetch.

    Raises:
        MismatchError: bytes that do not match their CRC32, or a file that ends too soon.
        ReadError: the operating system could not read.
    """
    longest = max((segment.nbytes for segment in segments), default=0)
    buffers = bounce_buffers(longest, min(readers + _PLACERS, len(segments)))
    locking = next(filter(takes_registered, devices), None)
    async with page_locked(buffers if locking else [], locking, executor=executor):
        copies = await run_blocking(executor, _begin, devices) if devices else _begin(())
        run = _Run(files, executor, readers, verify, copies, on_read)
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

    def __init__(
        self,
        files: Files,
        executor: Executor,
        readers: int,
        verify: bool,
        copies: Sequence[Copies],
        on_read: Callable[[ReadRequest, AioCkptError | None], None] | None,
    ) -> None:
        self._files = files
        self._executor = executor
        self._reading = anyio.Semaphore(readers)
        self._verify = verify
        self._copies = copies
        self._on_read = on_read
        self.bytes_read = 0
        self.sums_checked = 0

    async def all(self, segments: Sequence[ReadRequest], buffers: Sequence[memoryview]) -> None:
        """As many at once as there are buffers."""
        left = iter(segments)

        async def work(buffer: memoryview) -> None:
            for segment in left:
                await self._reading.acquire()  # here a cancelled fetch stops
                # Shielded: whoever cancels a load may free or reuse the targets as soon as it returns.
                with anyio.CancelScope(shield=True):
                    await self._report(segment, buffer[: segment.nbytes])

        async with anyio.create_task_group() as group:
            for buffer in buffers[: len(segments)]:
                group.start_soon(work, buffer)

    async def _report(self, segment: ReadRequest, view: memoryview) -> None:
        failure = None
        try:
            await self._segment(segment, view)
        except AioCkptError as error:
            if self._on_read is None:
                raise
            failure = error
        if self._on_read is not None:
            self._on_read(segment, failure)

    async def _segment(self, segment: ReadRequest, view: memoryview) -> None:
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
        full = [landing for landing, count in landings.items() if _count_down(landing, count)]
        complete = [landing for landing in full if landing.needs_finish]
        if complete:
            self.sums_checked += await run_blocking(self._executor, finish, complete, self._verify, self._copies)


def _let_go(segments: Sequence[ReadRequest]) -> None:
    """Of the memory where parts landed: who keeps the error keeps the segments, too."""
    for segment in segments:
        for landing in segment.pieces.landings.tolist():
            if landing is not None:
                landing.scratch = None


def _count_down(landing: ReassemblyBuffer, count: int) -> bool:
    landing.pieces_left -= count
    return not landing.pieces_left


def _check_length(segment: ReadRequest, end: int) -> None:
    beyond = np.flatnonzero(segment.pieces.starts + segment.pieces.nbytes > end)
    if len(beyond):
        raise MismatchError(f"{segment.label(int(beyond[0]))}: the file ends at byte {end}, inside of it")
