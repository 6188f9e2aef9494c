"""How things are timed: samples, spreads, interleaved rounds, and what runs beside a save."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import resource
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = [
    "DONE",
    "Beside",
    "Contender",
    "Sample",
    "Spread",
    "Waitable",
    "beside",
    "cpu_secs",
    "interleave",
    "ratio",
    "sample",
]

TICK_SECS = 0.001
_SPINS = 2_000
"""Turns of the Python loop between two looks at the clock: about 0.1 ms."""


class Waitable(Protocol):
    """What a contender that works in the background returns: a future or a ticket's milestone."""

    def done(self) -> bool:
        """Whether it ended."""
        ...

    def result(self) -> object:
        """Block until it ended."""
        ...

    def add_done_callback(self, fn: Callable[[Any], object], /) -> object:
        """Call ``fn`` when it ended, from any thread."""
        ...


class _Done:
    def done(self) -> bool:
        return True

    def result(self) -> object:
        return None

    def add_done_callback(self, fn: Callable[[Any], object], /) -> object:
        return fn(self)


DONE: Waitable = _Done()
"""Returned by contenders that block until everything is done."""


class Contender(ABC):
    """One way of saving or loading the same bytes."""

    name: str
    """Shown in the table."""
    durability: str
    """What is on the disk when it says that it is done."""
    is_async = False
    """Whether ``start`` returns before the work is done."""

    @abstractmethod
    def start(self) -> Waitable:
        """The timed operation; what it returns tells when it is done."""

    def before(self) -> None:  # noqa: B027 - nothing to do is the usual case
        """Untimed, ahead of each operation."""

    def after(self) -> None:  # noqa: B027
        """Untimed, behind each operation."""

    def close(self) -> None:  # noqa: B027
        """Release what it holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One operation."""

    total_secs: float
    """From the call until done."""
    blocked_secs: float
    """From the call until the caller's thread was free again."""
    cpu_secs: float
    """User and system time of the whole process meanwhile; writeback by the kernel's own threads is not in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A figure over several rounds."""

    median: float
    """Middle value."""
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return cls(median=statistics.median(values), low=min(values), high=max(values))


def ratio(values: Sequence[float], limits: Sequence[float]) -> tuple[float, Spread]:
    """Ratio of the medians, and the spread of the ratios of each round."""
    paired = [value / limit for value, limit in zip(values, limits, strict=True)]
    return statistics.median(values) / statistics.median(limits), Spread.of(paired)


def cpu_secs() -> float:
    """User and system time of this process, all threads, so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def sample(contender: Contender) -> Sample:
    """Time one operation, between its untimed ``before`` and ``after``."""
    contender.before()
    gc.collect()
    os.sync()  # dirty pages and journal of the contender before must not be paid for by this one
    cpu, begin = cpu_secs(), time.perf_counter()
    pending = contender.start()
    free = time.perf_counter()
    pending.result()
    end = time.perf_counter()
    used = cpu_secs() - cpu
    del pending
    contender.after()
    return Sample(total_secs=end - begin, blocked_secs=free - begin, cpu_secs=used)


def interleave(
    contenders: Sequence[Contender], rounds: int, *, log: Callable[[str], None]
) -> tuple[Mapping[str, Sample], Mapping[str, list[Sample]]]:
    """A B C, B C A, A C B, ...: the first round apart (it warms up), then ``rounds`` samples of each.

    Each round has an order of its own, the same in every run: what one leaves behind on a disk that caches, or that
    others share, is not paid for by the same other in each round.
    """
    first: dict[str, Sample] = {}
    samples: dict[str, list[Sample]] = {contender.name: [] for contender in contenders}
    for number in range(rounds + 1):
        for contender in random.Random(number).sample(contenders, len(contenders)):
            taken = sample(contender)
            if number:
                samples[contender.name].append(taken)
            else:
                first[contender.name] = taken
            log(f"    round {number}: {contender.name}: {taken.total_secs * 1e3:.1f} ms")
    return first, samples


# -- beside an operation --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """What a caller feels while operations run in the background."""

    operations: int
    """How many."""
    idle_lag_p99_secs: float
    """99th percentile of the same ticker with nothing beside it."""
    idle_lag_max_secs: float
    """Largest lag of that ticker."""
    lag_p99_secs: float
    """How late a 1 ms ticker on the caller's loop was, all ticks from each call until done."""
    lag_max_secs: float
    """Ditto; holds the call itself, which captures host tensors on the caller's thread."""
    lag_p99_after_call_secs: float
    """The same without the ticks that the call itself held up."""
    lag_max_after_call_secs: float
    """Largest lag without those ticks."""
    python_rate: Spread
    """Rate of a Python-bound loop on the caller's thread from the return of the call until done, as a share of
    its rate alone; each operation paired with idle runs just before and just after it, together about as long."""
    python_total_secs: Spread
    """How long the operation takes with that loop beside it."""


def beside(contender: Contender, operations: int) -> Beside:
    """Run ``operations`` under a ticker, then as many beside a Python-bound loop."""
    ticks: list[tuple[float, bool]] = []
    seconds = 0.0
    for _ in range(operations):
        contender.before()
        os.sync()
        begin = time.perf_counter()
        ticks += asyncio.run(_tick_beside(contender))
        seconds += time.perf_counter() - begin
        contender.after()
    idle = [lag for lag, _ in asyncio.run(_tick_for(min(max(seconds, 0.5), 10.0)))]
    every = [lag for lag, _ in ticks]
    after_call = [lag for lag, in_call in ticks if not in_call] or [0.0]
    pairs: list[tuple[float, float]] = []
    for _ in range(operations):
        pairs.append(_spin_beside(contender, pairs[-1][1] if pairs else seconds / operations))
    return Beside(
        operations=operations,
        idle_lag_p99_secs=percentile(idle, 0.99),
        idle_lag_max_secs=max(idle),
        lag_p99_secs=percentile(every, 0.99),
        lag_max_secs=max(every),
        lag_p99_after_call_secs=percentile(after_call, 0.99),
        lag_max_after_call_secs=max(after_call),
        python_rate=Spread.of([share for share, _ in pairs]),
        python_total_secs=Spread.of([secs for _, secs in pairs]),
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The value that ``share`` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


async def _ticker(ticks: list[tuple[float, float]]) -> None:
    last = time.perf_counter()
    while True:
        await asyncio.sleep(TICK_SECS)
        now = time.perf_counter()
        ticks.append((last, now))
        last = now


async def _tick_beside(contender: Contender) -> list[tuple[float, bool]]:
    """Per tick: (seconds late, whether the call was in it)."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    ticks: list[tuple[float, float]] = []
    ticker = asyncio.create_task(_ticker(ticks))
    await asyncio.sleep(10 * TICK_SECS)
    ticks.clear()
    begin = time.perf_counter()
    pending = contender.start()
    free = time.perf_counter()
    pending.add_done_callback(lambda _: loop.call_soon_threadsafe(ended.set))
    await ended.wait()
    pending.result()
    await asyncio.sleep(2 * TICK_SECS)
    ticker.cancel()
    return [(stop - start - TICK_SECS, start < free and stop > begin) for start, stop in ticks]


async def _tick_for(secs: float) -> list[tuple[float, bool]]:
    ticks: list[tuple[float, float]] = []
    ticker = asyncio.create_task(_ticker(ticks))
    await asyncio.sleep(secs)
    ticker.cancel()
    return [(stop - start - TICK_SECS, False) for start, stop in ticks]


def _spin(is_over: Callable[[], bool]) -> tuple[float, float]:
    """(turns a second, seconds) of a loop that never gives up the GIL by itself."""
    turns, value = 0, 1
    begin = time.perf_counter()
    while not is_over():
        for _ in range(_SPINS):
            value = (value * 31 + 7) & 0xFFFF
        turns += _SPINS
    secs = time.perf_counter() - begin
    return turns / secs, secs


def _spin_for(secs: float) -> float:
    stop = time.perf_counter() + secs
    return _spin(lambda: time.perf_counter() >= stop)[0]


def _spin_beside(contender: Contender, expected_secs: float) -> tuple[float, float]:
    """(share of the idle rate that the loop keeps, seconds of the operation)."""
    contender.before()
    os.sync()
    idle_secs = max(expected_secs / 2, 0.1)
    alone = _spin_for(idle_secs)
    begin = time.perf_counter()
    pending = contender.start()
    rate, secs = _spin(pending.done) if not pending.done() else (0.0, 0.0)
    pending.result()
    total = time.perf_counter() - begin
    alone = (alone + _spin_for(idle_secs)) / 2
    contender.after()
    # Over before the loop began: nothing was taken from it.
    return (rate / alone if secs else 1.0), total
