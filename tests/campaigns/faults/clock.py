"""A clock that the campaign puts forward, so that a deadline passes without anybody waiting for it."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Self
from unittest import mock

from aio_ckpt import CheckpointEngine
from aio_ckpt.engine import job, state_pipeline
from aio_ckpt.runtime import deadline
from aio_ckpt.snapshot import stall_timer

__all__ = ["Clock"]


class Clock:
    """The time of the engine's loop and of its pipeline: the real one plus what :meth:`advance` added.

    Waits of the caller's own thread keep the real time.
    """

    def __init__(self) -> None:
        self._ahead_secs = 0.0
        self._patches = [
            mock.patch.object(module, "time", self) for module in (job, state_pipeline, deadline, stall_timer)
        ]

    def __enter__(self) -> Self:
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for patch in self._patches:
            patch.stop()

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def monotonic(self) -> float:
        """Also the loop's time."""
        return time.monotonic() + self._ahead_secs

    def advance(self, secs: float) -> None:
        """On the loop's thread: what is due within ``secs`` is due now."""
        self._ahead_secs += secs

    def drive(self, engine: CheckpointEngine) -> None:
        """The engine's loop takes its time from here."""
        engine._portal._loop.time = self.monotonic  # type: ignore[union-attr,method-assign]
