"""How far one save is: its deadline, which chunks are captured, which threads work for it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import anyio

from aio_ckpt.config import check_seconds
from aio_ckpt.copies import Mark
from aio_ckpt.errors import SaveCancelledError, StallError
from aio_ckpt.portal import Executor, run_blocking, watch_submissions

__all__ = [
    "NO_DEADLINE",
    "CaptureProgress",
    "CapturedRun",
    "Deadline",
    "Threads",
    "first_cause",
    "follow",
    "outcome",
    "outcome_blocking",
    "unless_given_up",
]

T = TypeVar("T")

CapturedRun: TypeAlias = tuple[Sequence[int], tuple[Mark, ...]]
"""(chunks, marks): the chunks are captured once the marks are reached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """When one save must be committed, counted from the call of ``save()``."""

    secs: float | None
    """Limit in seconds; None: there is none."""
    began: float
    """``time.monotonic`` at the call."""

    @classmethod
    def after(cls, secs: float | None) -> Deadline:
        """``secs`` from now; raises ConfigError if that is no number above 0."""
        if secs is not None:
            check_seconds("deadline_secs", secs)
        return cls(secs=secs, began=time.monotonic())

    def left_secs(self, at_most: float) -> float:
        """Seconds until then, at least 0 and at most ``at_most``."""
        if self.secs is None:
            return at_most
        return min(at_most, max(0.0, self.began + self.secs - time.monotonic()))

    def check(self, step: object, stage: str) -> None:
        """Raise StallError, naming ``stage``, if the time is over. ``step`` may not be known yet."""
        if self.secs is not None and not self.left_secs(1.0):
            which = "the next step" if step is None else f"step {step}"
            raise StallError(f"the save of {which} did not end within deadline_secs={self.secs}: it was {stage}")


NO_DEADLINE = Deadline(secs=None, began=0.0)
"""Never over."""


class CaptureProgress:
    """Which chunks the caller's thread has captured; told and awaited on the loop."""

    def __init__(self, chunks: int) -> None:
        self._marks: list[tuple[Mark, ...] | None] = [None] * chunks  # None: not told yet
        self._awaited: dict[int, asyncio.Event] = {}  # made on the loop, not on the caller's time
        self._error: Exception | None = None
        self._ended_early = asyncio.Event()
        self.last = time.monotonic()
        """When something moved last."""
        self.is_paused = False
        """What is awaited has limits of its own."""

    def touch(self) -> None:
        """A byte or a message moved."""
        self.last = time.monotonic()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What is awaited inside is another save, which has limits of its own and may take as long as it moves."""
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
        """The chunks of each run are captured once its marks are reached."""
        for indices, marks in runs:
            for index in indices:
                self._marks[index] = marks
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
        if self._marks[index] is None:
            await self._awaited.setdefault(index, asyncio.Event()).wait()
        for mark in self._marks[index] or ():
            if not mark.query():
                await run_blocking(executor, mark.synchronize)


class Threads:
    """The I/O threads that work for one save: a cancelled await does not stop them."""

    def __init__(self) -> None:
        self._busy: set[Future[Any]] = set()

    def add(self, work: Future[Any]) -> None:
        """Told by ``watch_submissions`` of each piece of work."""
        self._busy.add(work)
        work.add_done_callback(self._busy.discard)

    async def wait(self) -> None:
        """Until all are done."""
        for work in tuple(self._busy):
            await asyncio.wrap_future(follow(work))

    @property
    def are_idle(self) -> bool:
        """Whether all are done."""
        return not self._busy


def first_cause(error: BaseException) -> BaseException:
    """The first real error inside (nested) exception groups; a cancellation only if there is nothing else."""
    while isinstance(error, BaseExceptionGroup):
        error = min(error.exceptions, key=lambda inner: isinstance(inner, asyncio.CancelledError))
    return error


async def unless_given_up(given_up: Future[None], work: Callable[[], Awaitable[T]]) -> T:
    """What ``work`` gives, on the loop; it is cancelled once ``given_up`` is done.

    However it ends, no thread that it began is at work any more.

    Raises:
        SaveCancelledError: it was given up.
    """
    threads, loop = Threads(), asyncio.get_running_loop()
    try:
        with anyio.CancelScope() as scope, watch_submissions(threads.add):
            given_up.add_done_callback(lambda _: _cancel(loop, scope))
            return await work()
    finally:
        with anyio.CancelScope(shield=True):
            await threads.wait()
    raise SaveCancelledError("the load was given up")


def _cancel(loop: asyncio.AbstractEventLoop, scope: anyio.CancelScope) -> None:
    with contextlib.suppress(RuntimeError):  # the loop was closed: the work has ended
        loop.call_soon_threadsafe(scope.cancel)


async def outcome(work: Future[T], given_up: Future[None]) -> T:
    """What ``work`` gives. A cancelled wait sets ``given_up`` and still waits until ``work`` has ended.

    Also when it is cancelled again, as a cancel scope of anyio does without end.
    """
    try:
        await asyncio.wrap_future(follow(work))
    except asyncio.CancelledError:
        given_up.set_result(None)
        with anyio.CancelScope(shield=True):
            while not work.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wrap_future(follow(work))
        raise
    return work.result()


def outcome_blocking(work: Future[T], given_up: Future[None]) -> T:
    """:func:`outcome` for a caller without a loop; here Ctrl-C gives up, and once more changes nothing."""
    try:
        return work.result()
    finally:
        given_up.set_result(None)
        while not work.done():
            with contextlib.suppress(KeyboardInterrupt):
                wait([work])


def follow(future: Future[Any]) -> Future[None]:
    """A future that follows ``future``; cancelling it (as a cancelled await does) leaves ``future`` alone."""
    follower: Future[None] = Future()

    def follow(_: Future[None]) -> None:
        if follower.set_running_or_notify_cancel():
            follower.set_result(None)

    future.add_done_callback(follow)
    return follower
