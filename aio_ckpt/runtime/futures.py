"""Futures that follow others, waits that can be given up, and the threads that work for one save."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import anyio

from aio_ckpt.errors import SaveCancelledError
from aio_ckpt.runtime.portal import watch_submissions

__all__ = ["Threads", "first_cause", "follow", "outcome", "outcome_blocking", "unless_given_up"]

T = TypeVar("T")


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
