"""Run the requests of a read plan: read, verify, copy. Each read in flight has its own bounce buffer."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import anyio
import numpy as np
import torch

from aio_ckpt.checkpoint.data_files import Files
from aio_ckpt.checkpoint.deliver_pieces import finish_buffers, verify_and_copy
from aio_ckpt.checkpoint.read_requests import ReadRequest, ReassemblyBuffer
from aio_ckpt.errors import AioCkptError, MismatchError
from aio_ckpt.memory.copies import Copies
from aio_ckpt.memory.cuda import begin_uploads, on_device, prefers_page_locked
from aio_ckpt.memory.read_buffers import bounce_buffers, page_locked
from aio_ckpt.runtime.futures import first_cause
from aio_ckpt.runtime.portal import Executor, run_blocking
from aio_ckpt.runtime.waiting import disk_warning

_COPIERS = 2
"""Requests that are verified and copied while the allowed number of reads stays in flight."""


async def fetch(
    files: Files,
    requests: Sequence[ReadRequest],
    *,
    executor: Executor,
    readers: int,
    verify: bool,
    devices: Sequence[torch.device] = (),
    on_read: Callable[[ReadRequest, AioCkptError | None], None] | None = None,
    on_fetched: Callable[[int], None] | None = None,
) -> int:
    """Run every request, ``readers`` at a time, and finish each reassembly buffer when it is full.

    Returns the bytes read from data files, alignment included.

    A fetch, cancelled or not, returns only when no thread or device writes to a target any more.

    Args:
        devices: ``ReadPlan.devices``.
        on_read: called with each request that has ended, and its error or None. The other requests go on after an
            error. Without ``on_read``, the first error ends the fetch.
        on_fetched: called on the loop with the length of each request whose pieces are verified and copied.

    Raises:
        MismatchError: bytes do not match their CRC32, or a file ends too soon.
        ReadError: the operating system could not read.
    """
    longest = max((request.nbytes for request in requests), default=0)
    buffers = bounce_buffers(longest, min(readers + _COPIERS, len(requests)))
    locking = next(filter(prefers_page_locked, devices), None)
    async with page_locked(buffers if locking else [], locking, executor=executor):
        copies = await run_blocking(executor, _begin, devices) if devices else _begin(())
        run = _Run(
            files=files,
            executor=executor,
            reading=anyio.Semaphore(readers),
            verify=verify,
            copies=copies,
            on_read=on_read,
            on_fetched=on_fetched,
        )
        try:
            await run.all(requests, buffers)
        except BaseExceptionGroup as errors:
            _free_scratch(requests)
            raise first_cause(errors) from None
    return run.bytes_read


def synchronize(devices: Iterable[torch.device]) -> None:
    """Wait for all work on the devices, because the copies of a fetch are not ordered with the caller's streams."""
    for device in devices:
        if device.type != "cpu":
            with on_device(device):
                torch.accelerator.synchronize(device)


def _begin(devices: Sequence[torch.device]) -> list[Copies]:
    """Return the copies to the host and to each device, in the order of the numbers in ``Pieces.devices``."""
    return [Copies(), *map(begin_uploads, devices)]


@dataclass(slots=True, eq=False, kw_only=True)
class _Run:
    """One run of a read plan. The loop opens and completes reassembly buffers; threads fill them."""

    files: Files
    executor: Executor
    reading: anyio.Semaphore
    verify: bool
    copies: Sequence[Copies]
    on_read: Callable[[ReadRequest, AioCkptError | None], None] | None
    on_fetched: Callable[[int], None] | None
    bytes_read: int = 0
    last: float = field(default_factory=time.monotonic)
    """Time of the last progress."""

    async def all(self, requests: Sequence[ReadRequest], buffers: Sequence[memoryview]) -> None:
        """Run the requests, as many at once as there are buffers."""
        left = iter(requests)

        async def work(buffer: memoryview) -> None:
            for request in left:
                await self.reading.acquire()  # a cancelled fetch stops here
                # Shielded, because the caller may free or reuse the targets once a cancelled load has returned.
                with anyio.CancelScope(shield=True):
                    await self._run_and_report(request, buffer[: request.nbytes])

        lines = disk_warning("reading", self.files.directory, idle_secs=lambda: time.monotonic() - self.last)
        with lines.on_loop():
            async with anyio.create_task_group() as group:
                for buffer in buffers[: len(requests)]:
                    group.start_soon(work, buffer)

    async def _run_and_report(self, request: ReadRequest, view: memoryview) -> None:
        failure = None
        try:
            await self._run_request(request, view)
        except AioCkptError as error:
            if self.on_read is None:
                raise
            failure = error
        if self.on_read is not None:
            self.on_read(request, failure)
        if self.on_fetched is not None and failure is None:
            self.on_fetched(request.nbytes)

    async def _run_request(self, request: ReadRequest, view: memoryview) -> None:
        """Read one request and copy its pieces to their targets. Releases ``reading`` after the read."""
        reassemblies = Counter(
            reassembly for reassembly in request.pieces.reassemblies.tolist() if reassembly is not None
        )
        try:
            for reassembly, count in reassemblies.items():
                reassembly.open(self.copies[reassembly.device], request, view, count)
            async with self.files.use(request.file) as file:
                got = await file.read_into(request.start, view)
            self.bytes_read += got
            self.last = time.monotonic()
            _check_length(request, request.start + got)
        finally:
            self.reading.release()
        await run_blocking(self.executor, verify_and_copy, request, view, self.verify, self.copies)
        complete: list[ReassemblyBuffer] = []
        for reassembly, count in reassemblies.items():
            reassembly.pieces_left -= count
            if not reassembly.pieces_left and reassembly.needs_finish:
                complete.append(reassembly)
        if complete:
            await run_blocking(self.executor, finish_buffers, complete, self.verify, self.copies)


def _free_scratch(requests: Sequence[ReadRequest]) -> None:
    """Free the memory of reassembly buffers, because a kept error keeps the requests alive by its traceback."""
    for request in requests:
        for reassembly in request.pieces.reassemblies.tolist():
            if reassembly is not None:
                reassembly.scratch = None


def _check_length(request: ReadRequest, end: int) -> None:
    beyond = np.flatnonzero(request.pieces.starts + request.pieces.nbytes > end)
    if len(beyond):
        raise MismatchError(f"{request.label(int(beyond[0]))}: the file ends at byte {end}, inside of it")
