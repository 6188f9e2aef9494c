"""Chunks of one image that are captured, for the waits of its writers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeAlias

from aio_ckpt.memory.copies import CopyEvent
from aio_ckpt.runtime.portal import Executor, run_blocking
from aio_ckpt.snapshot.stall_timer import StallTimer

CapturedRun: TypeAlias = tuple[Sequence[int], tuple[CopyEvent, ...]]
"""(chunks, events): the chunks are captured once the events are reached."""


class CapturedChunks:
    """Chunks of one image that the caller's thread has captured.

    The caller's thread adds to it until the pipeline is submitted; then it is used on the loop alone.
    """

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
        self._timer.touch()

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
