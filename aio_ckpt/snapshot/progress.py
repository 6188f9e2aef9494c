"""Which chunks of one save are captured, and when something moved last."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from aio_ckpt.memory.copies import CopyEvent
from aio_ckpt.runtime.portal import Executor, run_blocking

__all__ = ["CaptureProgress", "CapturedRun"]

CapturedRun: TypeAlias = tuple[Sequence[int], tuple[CopyEvent, ...]]
"""(chunks, events): the chunks are captured once the events are reached."""


class CaptureProgress:
    """Which chunks the caller's thread has captured; told and awaited on the loop."""

    def __init__(self, chunks: int) -> None:
        self._events: list[tuple[CopyEvent, ...] | None] = [None] * chunks  # None: not told yet
        self._awaited: dict[int, asyncio.Event] = {}  # made on the loop, not on the caller's time
        self._error: Exception | None = None
        self._ended_early = asyncio.Event()
        self.last = time.monotonic()
        """When something moved last."""
        self.is_paused = False
        """What is awaited has limits of its own."""

    @property
    def is_capturing(self) -> bool:
        """Whether some chunk was not told of yet."""
        return None in self._events

    def touch(self) -> None:
        """A byte or a message moved."""
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
        """What is awaited from here on is the save itself, inside of ``paused``, too."""
        self.is_paused = False
        self.touch()

    def idle_left_secs(self, limit_secs: float) -> float:
        """How much longer nothing may move if ``limit_secs`` are allowed."""
        return limit_secs if self.is_paused else self.last + limit_secs - time.monotonic()

    def tell(self, runs: Sequence[CapturedRun]) -> None:
        """The chunks of each run are captured once its events are reached."""
        for indices, events in runs:
            for index in indices:
                self._events[index] = events
                if index in self._awaited:
                    self._awaited[index].set()
        self.touch()

    def fail(self, error: Exception) -> None:
        """The capture ended early. No KeyboardInterrupt: raised in a task, it would end the engine's loop."""
        self._error = error
        self._ended_early.set()

    async def raise_failure(self) -> None:
        """Wait for the end of a capture that ended early, and raise what ended it."""
        await self._ended_early.wait()
        if self._error is not None:
            raise self._error

    async def wait(self, index: int, executor: Executor) -> None:
        """Until chunk ``index`` is captured; for ever if the capture ended early."""
        if self._events[index] is None:
            await self._awaited.setdefault(index, asyncio.Event()).wait()
        for event in self._events[index] or ():
            if not event.query():
                await run_blocking(executor, event.synchronize)
