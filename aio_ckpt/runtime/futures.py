"""Futures that follow others, calls at once, waits that can be cancelled, and the threads that work for one save."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import CancelledError, Future
from typing import Any, Protocol, TypeVar

import anyio

from aio_ckpt.errors import SaveCancelledError
from aio_ckpt.runtime.ctrl_c import new_future
from aio_ckpt.runtime.portal import watch_submissions

T = TypeVar("T")


class ThreadTracker:
    """I/O threads that work for one save. A cancelled await does not stop them, so they are counted here."""

    def __init__(self) -> None:
        self._busy: set[Future[Any]] = set()

    def add(self, work: Future[Any]) -> None:
        """Add one piece of work of a thread. This is a callback for ``watch_submissions``."""
        self._busy.add(work)
        work.add_done_callback(self._busy.discard)

    async def wait(self) -> None:
        """Wait until no thread works for the save."""
        for work in tuple(self._busy):
            await asyncio.wrap_future(follow(work))

    @property
    def is_idle(self) -> bool:
        """Whether no thread works for the save."""
        return not self._busy


def first_cause(error: BaseException) -> BaseException:
    """Return the first error in (nested) exception groups. A cancellation counts only if there is no other error."""
    while isinstance(error, BaseExceptionGroup):
        error = min(error.exceptions, key=lambda inner: isinstance(inner, asyncio.CancelledError))
    return error


async def run_all(works: Iterable[Callable[[], Awaitable[T]]], *, at_once: int) -> list[T]:
    """Return what ``works`` return, in their order, with ``at_once`` of them at a time.

    Raises the first error itself, not a group. The other works are cancelled then.
    """
    limit, results = anyio.CapacityLimiter(at_once), dict[int, T]()

    async def run(number: int, work: Callable[[], Awaitable[T]]) -> None:
        async with limit:
            results[number] = await work()

    try:
        async with anyio.create_task_group() as group:
            for number, work in enumerate(works):
                group.start_soon(run, number, work)
    except BaseExceptionGroup as errors:
        raise first_cause(errors) from None
    return [results[number] for number in sorted(results)]


async def run_cancellable(given_up: Future[None], work: Callable[[], Awaitable[T]]) -> T:
    """Run ``work`` on the loop and return its result. When ``given_up`` is done, cancel ``work``.

    However ``work`` ends, this first waits for the threads that it started.

    Raises:
        SaveCancelledError: ``given_up`` was done first.
    """
    threads, loop = ThreadTracker(), asyncio.get_running_loop()
    try:
        with anyio.CancelScope() as scope, watch_submissions(threads.add):
            given_up.add_done_callback(lambda _: _cancel(loop, scope))
            return await work()
    finally:
        with anyio.CancelScope(shield=True):
            await threads.wait()
    raise SaveCancelledError("the call was given up")


def _cancel(loop: asyncio.AbstractEventLoop, scope: anyio.CancelScope) -> None:
    with contextlib.suppress(RuntimeError):  # a closed loop has no work left to cancel
        loop.call_soon_threadsafe(scope.cancel)


def cancellable_result_blocking(work: Future[T], given_up: Future[None]) -> T:
    """Return the result of ``work``, for a caller without a loop. However the wait ends, set ``given_up``.

    After Ctrl-C, or what another handler of a signal raises, this still waits until ``work`` has ended, also if a
    signal comes again.
    """
    try:
        return work.result()
    finally:
        is_over = False
        while not is_over:
            try:
                if not given_up.done():
                    given_up.set_result(None)
                work.exception()
                is_over = True
            except CancelledError:
                is_over = True
            except BaseException:  # noqa: BLE001 - a second signal, while the first one's error is on its way
                pass
        del work  # the traceback of its error holds this frame, which would close a cycle


class Ending(Protocol):
    """A future or a milestone: work that ends."""

    def add_done_callback(self, fn: Callable[[Any], object], /) -> object:
        """Call ``fn`` once the work has ended."""
        ...


def follow(future: Ending) -> Future[None]:
    """Return a future that is resolved when ``future`` is. A cancelled await cancels it, but never ``future``."""
    follower: Future[None] = new_future()

    def follow(_: object) -> None:
        if follower.set_running_or_notify_cancel():
            follower.set_result(None)

    future.add_done_callback(follow)
    return follower


def failed(error: BaseException) -> Future[Any]:
    """Return a future that holds ``error``."""
    future: Future[Any] = new_future()
    future.set_exception(error)
    return future


def outcome_of(work: Callable[[], object], errors: tuple[type[BaseException], ...] = (Exception,)) -> Future[None]:
    """Call ``work``, and return a future that is done: with None, or with one of ``errors`` that it raised."""
    try:
        work()
    except errors as error:
        return failed(error)
    done: Future[None] = new_future()
    done.set_result(None)
    return done
