"""Progress of one load or read, which the caller's function gets. The interval between its calls stands here."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import Future

import anyio

from aio_ckpt.checkpoint.read_requests import ReadRequest
from aio_ckpt.errors import AioCkptError
from aio_ckpt.reports import OnProgress, Progress, Stage
from aio_ckpt.runtime.error_notes import named
from aio_ckpt.runtime.futures import follow
from aio_ckpt.runtime.portal import Executor

_log = logging.getLogger("aio_ckpt")
_INTERVAL_SECS = 0.1
"""Least time between two calls in one stage: a terminal shows no more."""


class Meter:
    """Meter of a load that nobody watches. All methods are called on the loop."""

    def restart(self) -> None:
        """Note that a reading of a checkpoint begins. Nothing is reported before :meth:`begin_reading`."""

    async def begin_reading(self, requests: Iterable[ReadRequest]) -> None:
        """Begin the stage ``read``. All bytes are those of ``requests``, and those that were added before."""

    def add(self, nbytes: int) -> None:
        """Count bytes that are read and verified."""

    async def begin(self, stage: Stage) -> None:
        """Begin a stage."""


NO_METER = Meter()
"""Meter that counts nothing."""


class CallbackMeter(Meter):
    """Meter that tells the caller's function, in threads of an executor.

    Invariant: one call runs at a time. After an error of the function there is no other call.
    """

    def __init__(self, on_progress: OnProgress, executor: Executor) -> None:
        self._on_progress: OnProgress | None = on_progress
        self._executor = executor
        self._stage: Stage | None = None
        self._done = self._total = 0
        self._next = 0.0
        self._call: Future[None] | None = None

    def restart(self) -> None:
        self._stage = None
        self._done = self._total = 0

    async def begin_reading(self, requests: Iterable[ReadRequest]) -> None:
        self._total = self._done + sum(request.nbytes for request in requests)
        await self.begin("read")

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        is_idle = self._call is None or self._call.done()
        if self._stage is not None and is_idle and time.monotonic() >= self._next:
            self._submit(self._stage)

    async def begin(self, stage: Stage) -> None:
        """Report the stage, once the function has returned from the call before. Returns when it has returned again."""
        self._stage = stage
        await self._returned()
        self._submit(stage)
        await self._returned()

    def _submit(self, stage: Stage) -> None:
        on_progress = self._on_progress
        if on_progress is None:
            return
        self._next = time.monotonic() + _INTERVAL_SECS
        now = Progress(stage=stage, bytes_done=self._done, bytes_total=self._total)
        with contextlib.suppress(AioCkptError):  # the engine was closed
            self._call = self._executor.submit(self._run, on_progress, now)

    async def _returned(self) -> None:
        if self._call is not None:
            await asyncio.wrap_future(follow(self._call))

    def _run(self, on_progress: OnProgress, now: Progress) -> None:
        try:
            on_progress(now)
        except BaseException as error:  # noqa: BLE001 - no error of it ends a load, not even SystemExit
            self._on_progress = None
            _log.warning("progress= raised, it is not called again: %s", named(error))


@contextlib.asynccontextmanager
async def metered(on_progress: OnProgress | None, executor: Executor) -> AsyncIterator[Meter]:
    """Yield the meter of one load. At the end of the block, tell the function that the load is done or has failed."""
    if on_progress is None:
        yield NO_METER
        return
    meter = CallbackMeter(on_progress, executor)
    end: Stage = "failed"
    try:
        yield meter
        end = "done"
    finally:
        with anyio.CancelScope(shield=True):
            await meter.begin(end)
