"""Progress of one save: the time of its last progress, for the stall timer, and its captured chunks."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from aio_ckpt.memory.copies import CopyEvent
from aio_ckpt.runtime.portal import Executor, run_blocking

CapturedRun: TypeAlias = tuple[Sequence[int], tuple[CopyEvent, ...]]
"""(chunks, events): the chunks are captured once the events are reached."""


class StallTimer:
    """Time since the last progress of one save, and the failure of its capture. It is used on the loop."""

    def __init__(self) -> None:
        self._error: Exception | None = None
        self._ended_early = asyncio.Event()
        self.last = time.monotonic()
        """``time.monotonic`` of the last progress."""
        self.is_paused = False
        """Whether the save waits for another save, which has its own stall timer."""

    def touch(self) -> None:
        """Restart the stall timer: the save has made progress."""
        self.last = time.monotonic()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the stall timer of this save: it waits for another save, which has its own timer."""
        self.is_paused = True
        try:
            yield
        finally:
            self.resume()

    def resume(self) -> None:
        """End the pause of the stall timer, also inside the block of :meth:`paused`."""
        self.is_paused = False
        self.last = time.monotonic()

    def idle_left_secs(self, limit_secs: float) -> float:
        """Return the seconds left until the save counts as stalled, if it may make no progress for ``limit_secs``."""
        return limit_secs - self.idle_secs

    @property
    def idle_secs(self) -> float:
        """Seconds since the last progress; 0 while the save waits for another."""
        return 0.0 if self.is_paused else time.monotonic() - self.last

    def fail(self, error: Exception) -> None:
        """End the capture early, with ``error``: never KeyboardInterrupt, which would end the engine's loop."""
        self._error = error
        self._ended_early.set()

    async def raise_failure(self) -> None:
        """Wait for the end of a capture that ended early, and raise what ended it."""
        await self._ended_early.wait()
        if self._error is not None:
            raise self._error


class CapturedChunks:
    """Chunks of one image that the caller's thread has captured. It is used on the loop."""

    def __init__(self, chunks: int, timer: StallTimer) -> None:
        """Each captured run restarts ``timer``."""
        self._timer = timer
        self._events: list[tuple[CopyEvent, ...] | None] = [None] * chunks  # None: not captured yet
        self._awaited: dict[int, asyncio.Event] = {}  # made when awaited, which costs the caller's thread no time

    @property
    def are_complete(self) -> bool:
        """Whether the capture of every chunk was issued."""
        return None not in self._events

    def add(self, runs: Sequence[CapturedRun]) -> None:
        """Record the chunks of each run as captured once the events of the run are reached."""
        for indices, events in runs:
            for index in indices:
                self._events[index] = events
                if index in self._awaited:
                    self._awaited[index].set()
        self._timer.last = time.monotonic()

    async def wait_issued(self) -> None:
        """Wait until the capture of every chunk was issued: the caller's thread needs the CPU no more."""
        for index, events in enumerate(self._events):
            if events is None:
                await self._awaited.setdefault(index, asyncio.Event()).wait()

    async def wait(self, index: int, executor: Executor) -> None:
        """Wait until chunk ``index`` is captured. If the capture ended early, this waits for ever."""
        if self._events[index] is None:
            await self._awaited.setdefault(index, asyncio.Event()).wait()
        for event in self._events[index] or ():
            if not event.query():
                await run_blocking(executor, event.synchronize)
