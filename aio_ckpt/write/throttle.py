"""Throttle: it delays the writes of data files so that they stay below ``max_write_bytes_per_sec``."""

from __future__ import annotations

import time
from collections.abc import Callable

import anyio

_POLL_SECS = 0.05
"""Interval at which a waiting write checks whether the limit was lifted meanwhile."""


class TokenBucket:
    """Order and time in which writes may begin. A write begins once the bytes before it are paid for at the rate.

    In any ``t`` seconds, the writes that begin hold at most ``rate * t`` bytes and one write more, because idle time
    earns no credit. Seconds are those of the caller's clock, which never goes back.
    """

    def __init__(self) -> None:
        self._paid = 0.0
        self._at = 0.0
        self._end = 0.0
        self._begun = 0.0
        self._waiting = 0

    def pay(self, now: float, rate: float | None) -> None:
        """Pay for ``rate`` bytes a second since the last call; None: pay for all reserved bytes."""
        if rate is None:
            self._paid = max(self._paid, self._end)
        else:
            self._paid += rate * max(0.0, now - self._at)
        self._at = now

    def reserve(self, nbytes: int) -> float:
        """Return the number of bytes before a write of ``nbytes``. Idle time before it earns no credit.

        The caller must call :meth:`leave` in any case.
        """
        begin = max(self._end, self._paid)
        self._end = begin + nbytes
        self._waiting += 1
        return begin

    def wait_secs(self, begin: float, rate: float | None) -> float:
        """Return the seconds until the write at ``begin`` may begin at ``rate``; 0.0 if it may begin now."""
        owed = begin - self._paid
        return 0.0 if rate is None or owed < 1 else owed / rate

    def leave(self, begin: float, nbytes: int) -> None:
        """End the wait of the write at ``begin``, which now writes ``nbytes``; 0 if it was given up."""
        if nbytes:
            self._begun = max(self._begun, begin + nbytes)
        self._waiting -= 1
        if not self._waiting:
            self._end = self._begun  # a write that was given up costs the next one nothing


class WriteThrottle:
    """Limit of the write rate of one engine. Writes wait for it on the engine's loop.

    The throttle delays a chunk of a data file before its write begins. It delays neither the copies out of the state,
    which end sooner, nor the few small files, nor a hurried save.
    """

    def __init__(self, limit: float | None = None, *, is_urgent: Callable[[], bool] = lambda: False) -> None:
        """Set the limit, in bytes a second; None: no limit. While ``is_urgent()`` is True, it does not hold."""
        self._limit = limit
        self._is_urgent = is_urgent
        self._bucket = TokenBucket()
        self._is_lifted = False

    async def admit(self, nbytes: int, *, is_hurried: bool, on_wait: Callable[[], None]) -> None:
        """Wait until a write of ``nbytes`` may begin, in the order of the calls. Call ``on_wait()`` meanwhile."""
        if is_hurried or self._limit is None:
            return
        self._advance()
        begin, begun_bytes = self._bucket.reserve(nbytes), 0
        try:
            while wait_secs := self._bucket.wait_secs(begin, self._advance()):
                on_wait()
                await anyio.sleep(min(wait_secs, _POLL_SECS))
            begun_bytes = nbytes
        finally:
            self._bucket.leave(begin, begun_bytes)

    def lift(self) -> None:
        """Delay no write from now on, because the process is about to end."""
        self._is_lifted = True

    def longest_wait_secs(self, nbytes: int) -> float:
        """Return the longest time in seconds that the limit alone may delay ``nbytes``."""
        return 0.0 if self._limit is None else nbytes / self._limit

    def _advance(self) -> float | None:
        """Pay until now, and return the rate in force; None: no limit."""
        rate = None if self._is_lifted or self._is_urgent() else self._limit
        self._bucket.pay(time.monotonic(), rate)
        return rate
