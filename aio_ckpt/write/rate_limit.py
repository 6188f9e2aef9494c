"""Rate limits of writing, decided without a clock or a thread: a token bucket and the control of its rate. Pure."""

from __future__ import annotations

import statistics
from collections import deque

__all__ = ["StepControl", "TokenBucket"]


class TokenBucket:
    """Who may write when. A write reserves the next bytes and may begin once all before them are paid for.

    In any ``t`` seconds the writes that begin hold at most ``rate * t`` bytes and one write more: idle time is not
    saved up. Seconds are those of the caller's clock, which never goes back.
    """

    def __init__(self) -> None:
        self._paid = 0.0
        self._at = 0.0
        self._end = 0.0
        self._begun = 0.0
        self._waiting = 0

    def advance(self, now: float, rate: float | None) -> None:
        """Pay at ``rate`` bytes a second since the last call; None: all that is reserved."""
        if rate is None:
            self._paid = max(self._paid, self._end)
        else:
            self._paid += rate * max(0.0, now - self._at)
        self._at = now

    def reserve(self, nbytes: int) -> float:
        """Where a write of so many bytes begins; :meth:`leave` is due, whether it is written or not."""
        begin = max(self._end, self._paid)
        self._end = begin + nbytes
        self._waiting += 1
        return begin

    def wait_secs(self, begin: float, rate: float | None) -> float:
        """Seconds until it may begin if the rate stays; 0.0: now."""
        owed = begin - self._paid
        return 0.0 if rate is None or owed < 1 else owed / rate

    def leave(self, begin: float, nbytes: int) -> None:
        """The write of ``nbytes`` at ``begin`` begins now, or (0 bytes) never will."""
        if nbytes:
            self._begun = max(self._begun, begin + nbytes)
        self._waiting -= 1
        if not self._waiting:
            self._end = self._begun  # what was given up is not to be paid for


class StepControl:
    """The rate at which training steps stay within ``target`` of their length without writes: AIMD.

    Fed with each step's length, decides after each window of steps: a slow window halves the rate, any other adds a
    sixteenth of what it was before the cut. The rate is kept from one save to the next.
    """

    target = 1.02
    """Share of the baseline that a step may take."""
    window_steps = 9
    """Steps that are judged together, by their median; a window is at least as long as ``window_secs``."""
    window_secs = 0.2
    """A write is a chunk at a time: over less than a few chunks a rate means nothing."""
    baseline_steps = 64
    """Steps that make the baseline: the newest without writes."""
    least_baseline_steps = 8
    """With fewer nothing is known, and nothing is slowed down."""
    floor_bytes_per_sec = 64 * 2**20
    """Never slower: what still slows the steps then is not the writing."""

    def __init__(self) -> None:
        self.rate: float | None = None
        """Bytes a second; None: as fast as the disk."""
        self._free_steps: deque[float] = deque(maxlen=self.baseline_steps)
        self._window: list[float] = []
        self._window_bytes = 0
        self._peak = 0.0
        self._increase = 0.0

    @property
    def baseline_secs(self) -> float | None:
        """Median length of a step without writes; None while too few are known."""
        if len(self._free_steps) < self.least_baseline_steps:
            return None
        return statistics.median(self._free_steps)

    def free_step(self, secs: float) -> None:
        """A step beside which nothing was written."""
        self._free_steps.append(secs)

    def loaded_step(self, secs: float, written_bytes: int) -> None:
        """A step beside which a save was written all the time, ``written_bytes`` in it."""
        self._window.append(secs)
        self._window_bytes += written_bytes
        total = sum(self._window)
        if len(self._window) < self.window_steps or total < self.window_secs:
            return
        if self.rate is None and not self._window_bytes:
            return  # writes longer than the window: to halve it, the speed must be known
        self._decide(statistics.median(self._window), self._window_bytes / total)
        self._window, self._window_bytes = [], 0

    def _decide(self, step_secs: float, bytes_per_sec: float) -> None:
        baseline = self.baseline_secs
        if baseline is None:
            return
        self._peak = max(self._peak, bytes_per_sec)
        # Steps that vary by themselves are not slow as long as one in four of the free ones is longer.
        usual = statistics.quantiles(self._free_steps, n=4)[2]
        if step_secs > max(self.target * baseline, usual):
            before = bytes_per_sec if self.rate is None else self.rate
            self.rate = max(self.floor_bytes_per_sec, before / 2)
            self._increase = max(before / 16, self._peak / 64)
        elif self.rate is not None:
            self.rate += self._increase
            if self.rate >= self._peak:
                self.rate = None
