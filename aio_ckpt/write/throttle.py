"""Throttle: each write of a data file waits here for its turn at ``max_write_bytes_per_sec``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Literal, Protocol

import anyio

from aio_ckpt.memory.cuda import StepClock
from aio_ckpt.write.rate_limit import StepControl, TokenBucket

__all__ = ["StepTimes", "WriteThrottle"]

_LOOK_SECS = 0.05
"""How often a write that waits looks whether the rate has changed or the save is in a hurry now."""
_IDLE_STEPS, _IDLE_SECS = 10, 1.0
"""Without a step for so many usual ones, and at least so long, training stands still: nothing is slowed down."""


class StepTimes(Protocol):
    """Tells how long training steps take."""

    def tick(self) -> list[float]:
        """A step has ended here: seconds of each step whose end is known by now and was not told before."""


class WriteThrottle:
    """The write rate of one engine: unlimited, fixed, or ``"auto"``: what training steps do not feel.

    Only the chunks of data files are paced, when each begins to be written: not the copies out of the state, which
    are over sooner, and not the few small files. A hurried save is not paced at all. Steps are told on the trainer's
    threads, one at a time; all else happens on the engine's loop.
    """

    def __init__(
        self,
        limit: float | Literal["auto"] | None = None,
        *,
        is_urgent: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[object]] = anyio.sleep,
        steps: StepTimes | None = None,
    ) -> None:
        """``limit`` in bytes a second; none while ``is_urgent()``."""
        self._limit = None if limit == "auto" else limit
        self._control = StepControl() if limit == "auto" else None
        self._is_urgent = is_urgent
        self._clock = clock
        self._sleep = sleep
        self._steps = steps or StepClock()
        self._bucket = TokenBucket()
        self._is_lifted = False
        self._is_told = False
        self._drains = 0
        self._has_changed = True
        self._written_bytes = self._written_before = 0
        self._last_step_at: float | None = None

    # -- writing, on the engine's loop ----------------------------------------------------------------

    @contextlib.contextmanager
    def drain(self) -> Iterator[None]:
        """A data file is written inside."""
        self._drains += 1
        self._has_changed = True
        try:
            yield
        finally:
            self._drains -= 1
            self._has_changed = True

    async def admit(self, nbytes: int, *, is_hurried: bool, on_wait: Callable[[], None]) -> None:
        """Return when a write of ``nbytes`` may begin, in the order of the calls; ``on_wait()`` now and then."""
        if is_hurried or (self._limit is None and self._control is None):
            return
        self._look()
        begin, begun_bytes = self._bucket.reserve(nbytes), 0
        try:
            while wait_secs := self._bucket.wait_secs(begin, self._look()):
                on_wait()
                await self._sleep(min(wait_secs, _LOOK_SECS))
            begun_bytes = nbytes
        finally:
            self._bucket.leave(begin, begun_bytes)

    def wrote(self, nbytes: int) -> None:
        """So many bytes are on the disk."""
        self._written_bytes += nbytes

    def lift(self) -> None:
        """From now on nothing is paced: the process is about to end."""
        self._is_lifted = True

    def longest_wait_secs(self, nbytes: int) -> float:
        """How long ``nbytes`` may wait because of the limit alone."""
        slowest = self._limit if self._control is None else self._control.floor_bytes_per_sec
        return 0.0 if slowest is None else nbytes / slowest

    # -- steps, on the trainer's threads --------------------------------------------------------------

    def step_done(self) -> None:
        """A training step has ended; from now on the steps of guarded optimizers do not count."""
        self._is_told = True
        self._tick()

    def guarded_step(self) -> None:
        """A guarded optimizer is about to step."""
        if not self._is_told:
            self._tick()

    def _tick(self) -> None:
        control = self._control
        if control is None:
            return
        self._last_step_at = self._clock()
        lengths = self._steps.tick()
        is_mixed, self._has_changed = self._has_changed, False
        written = self._written_bytes - self._written_before
        self._written_before += written
        for secs in () if is_mixed else lengths:
            if self._drains:
                control.loaded_step(secs, written // len(lengths))
            else:
                control.free_step(secs)

    # -- the rate -------------------------------------------------------------------------------------

    def _look(self) -> float | None:
        now = self._clock()
        rate = None if self._is_lifted or self._is_urgent() else self._rate(now)
        self._bucket.advance(now, rate)
        return rate

    def _rate(self, now: float) -> float | None:
        if self._control is None:
            return self._limit
        usual_secs = self._control.baseline_secs
        if usual_secs is None or self._last_step_at is None:
            return None
        is_idle = now - self._last_step_at > max(_IDLE_SECS, _IDLE_STEPS * usual_secs)
        return None if is_idle else self._control.rate
