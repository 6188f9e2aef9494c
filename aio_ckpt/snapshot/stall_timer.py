"""Stall timer of one save: the time of its last progress, and the failure of its capture."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator


class StallTimer:
    """Time since the last progress of one save, and the failure of its capture.

    Any thread may :meth:`touch` it. All else is used on the loop.
    """

    def __init__(self) -> None:
        self._error: Exception | None = None
        self._ended_early = asyncio.Event()
        self.last = time.monotonic()
        """``time.monotonic`` of the last progress."""
        self.is_paused = False

    def touch(self) -> None:
        """Restart the stall timer: the save has made progress."""
        self.last = time.monotonic()

    def forgive(self, secs: float) -> None:
        """Do not count ``secs`` that have passed: the process was suspended. A save may have moved since."""
        self.last = min(self.last + secs, time.monotonic())

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the stall timer of this save in the block, which waits for what has a limit of its own."""
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False
            self.touch()

    def idle_left_secs(self, limit_secs: float) -> float:
        """Return the seconds left until the save counts as stalled, if it may make no progress for ``limit_secs``."""
        return limit_secs - self.idle_secs

    @property
    def idle_secs(self) -> float:
        """Seconds since the last progress; 0 while the timer is paused."""
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
