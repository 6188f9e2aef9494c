"""The only file that starts a thread or a loop: one event loop on one named thread, and its I/O threads.

:class:`Portal` follows anyio's ``BlockingPortal`` (4.16) and differs where that one waits without a deadline: its
``start_task_soon`` blocks the caller for a turn of the loop, and for ever if the loop ends meanwhile, a future whose
task never ran stays unresolved, and leaving it joins the thread however long that takes.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import contextvars
import functools
import logging
import multiprocessing
import os
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from multiprocessing.util import Finalize
from threading import Condition, Lock
from typing import Any, ParamSpec, TypeVar, TypeVarTuple

# The last three else by their packages at first use, on a thread: a fork meanwhile keeps their locks for ever.
import anyio
import anyio._backends._asyncio
import anyio.abc
import anyio.to_thread
import numpy.ma  # noqa: F401

from aio_ckpt.errors import (
    AioCkptError,
    EngineClosedError,
    EngineForkedError,
    SaveCancelledError,
    StallError,
    ThreadDiedError,
    WrongThreadError,
)

__all__ = ["HOUSEKEEPING_THREADS", "ON_SUBMIT", "STOP_SECS", "Condition", "Executor", "Lock", "Portal"]
__all__ += ["run_beside", "run_blocking", "run_owned", "unwatched", "watch_submissions"]

P = ParamSpec("P")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Watcher = Callable[["Future[Any]"], None]
Begin = Callable[[], object]

_logger = logging.getLogger("aio_ckpt")
_START_TIMEOUT_SECS = 60.0
HOUSEKEEPING_THREADS = 4
"""I/O threads beside those that read or write: sums, device copies, manifests, discovery."""
STOP_SECS = 10.0
"""How long closing waits for threads in a system call."""
_OWNER = threading.local()


# -- submissions ----------------------------------------------------------------------------------

ON_SUBMIT: contextvars.ContextVar[Watcher | None] = contextvars.ContextVar("aio_ckpt_on_submit", default=None)
"""Told of every future that this context submits to an :class:`Executor`."""


@contextlib.contextmanager
def watch_submissions(callback: Watcher) -> Iterator[None]:
    """Report the concurrent future of every submission made inside, by this task or one that it starts.

    A cancelled await does not stop its thread: who lends bytes to a thread holds them until the future reported
    here resolved. Watchers nest, the outer one is told first. ``callback`` must not raise: the work is queued.
    """
    outer = ON_SUBMIT.get()

    def both(future: Future[Any]) -> None:
        if outer is not None:
            outer(future)
        callback(future)

    with _watched_by(both):
        yield


def unwatched() -> contextlib.AbstractContextManager[None]:
    """What is submitted inside touches no bytes that anybody lent: nobody is told of it, and nobody waits for it."""
    return _watched_by(None)


@contextlib.contextmanager
def _watched_by(watcher: Watcher | None) -> Iterator[None]:
    token = ON_SUBMIT.set(watcher)
    try:
        yield
    finally:
        ON_SUBMIT.reset(token)


Work = tuple["Future[Any]", Callable[[], Any]]


class Executor(concurrent.futures.Executor):
    """``threads`` daemon threads named ``{name}-io_{n}``, all started at once.

    Started at once: if a thread cannot be had, no work was queued yet. Daemon threads: at interpreter exit Python joins
    the threads of its own pools and refuses them work before any ``atexit`` hook runs. A drain needs threads that still
    work, and a thread that is stuck in the system must not keep the process.
    """

    def __init__(self, name: str, threads: int, owner: object = None, begin: Begin | None = None) -> None:
        """``Portal.check_thread`` knows the threads by ``owner``; each calls ``begin()``. RuntimeError: no more."""
        self._pid = os.getpid()
        self._name = name
        self._lock = Lock()
        self._is_closed = False
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        try:
            for number in range(threads):
                thread = threading.Thread(
                    target=_work, args=(self._queue, owner, begin), name=f"{name}-io_{number}", daemon=True
                )
                self._threads.append(thread)
                thread.start()
        except BaseException:
            self.shutdown(wait=False)
            raise

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue ``fn`` and report its future to the context's watcher.

        EngineClosedError: the executor was shut down. EngineForkedError: its threads are another process's.
        """
        _check_process(self._pid, self._name)
        future: Future[T] = Future()
        work = future, functools.partial(fn, *args, **kwargs)
        with self._lock:
            if self._is_closed:
                raise EngineClosedError(
                    f"{self._name}: closed, no more I/O (cannot schedule new futures after shutdown)"
                )
            self._queue.put(work)
        watcher = ON_SUBMIT.get()
        if watcher is not None:
            watcher(future)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Refuse new work; the threads end behind what is queued, which ``cancel_futures`` drops. Idempotent."""
        dropped: list[Work] = []
        with self._lock:
            self._is_closed = True
            while cancel_futures and not self._queue.empty():
                with contextlib.suppress(queue.Empty):  # a thread was faster
                    work = self._queue.get_nowait()
                    dropped += [] if work is None else [work]
            for _ in self._threads:
                self._queue.put(None)
        for future, _ in dropped:
            future.cancel()
            future.set_running_or_notify_cancel()
        if wait:
            self._join(None)

    def close(self, timeout_secs: float) -> bool:
        """Refuse new work and drop what is queued; False if a thread is still at work after ``timeout_secs``."""
        self.shutdown(wait=False, cancel_futures=True)
        return self._join(timeout_secs)

    def _join(self, timeout_secs: float | None) -> bool:
        deadline = None if timeout_secs is None else time.monotonic() + timeout_secs
        started = [thread for thread in self._threads if thread.ident is not None]
        for thread in started:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in started)


def _work(works: queue.SimpleQueue[Work | None], owner: object, begin: Begin | None) -> None:
    """What each thread of an executor does."""
    _own_thread(owner, begin)
    while (work := works.get()) is not None:
        _run_one(*work)
        del work  # until the next one comes, nothing of this one is kept


def _run_one(future: Future[Any], fn: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        try:
            result = fn()
        except (SystemExit, KeyboardInterrupt) as error:  # asyncio would end the loop with what it awaits there
            raise ThreadDiedError(f"an I/O thread was ended by {type(error).__name__}: {error}") from error
    except BaseException as error:  # noqa: BLE001 - the waiter's to handle
        future.set_exception(error)
    else:
        future.set_result(result)
    finally:
        del future, fn  # an error's traceback holds this frame: without them it holds no cycle


async def run_blocking(executor: Executor, fn: Callable[[*Ts], T], *args: *Ts) -> T:
    """``fn(*args)`` in a thread. A cancelled await returns at once; the thread, once begun, runs on."""
    return await asyncio.get_running_loop().run_in_executor(executor, fn, *args)


async def run_beside(fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """``fn``, a blocking call of an engine, in a thread of the caller's loop. A cancelled await does not stop it.

    A thread of the engine would not do: the call waits for them.
    """
    return await asyncio.to_thread(fn, *args, **kwargs)


async def run_owned(executor: Executor, fn: Callable[[*Ts], T], *args: *Ts, dispose: Callable[[T], object]) -> T:
    """Like :func:`run_blocking`; after a cancelled await ``dispose(result)`` runs once the thread has one, in it."""
    future = executor.submit(fn, *args)
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        future.add_done_callback(lambda done: None if done.cancelled() or done.exception() else dispose(done.result()))
        raise


def _own_thread(owner: object, begin: Begin | None = None) -> None:
    _OWNER.value = owner
    if begin is not None:
        begin()


def _nothing() -> None: ...


def _check_process(pid: int, name: str) -> None:
    if os.getpid() != pid:
        raise EngineForkedError(f"{name} was opened by process {pid}, this is its fork: open an engine of its own here")


# -- the portal -----------------------------------------------------------------------------------


class Portal:
    """One asyncio loop on the daemon thread ``{name}-loop``, with an :class:`Executor` for its blocking calls.

    Invariant: every future that :meth:`submit` returned is resolved at the latest when the loop ended, by its
    task's outcome or by :class:`EngineClosedError`. Tasks belong to one task group and run in a context of the
    loop's own, so that none keeps alive what a caller's context holds. In a forked child every method raises
    :class:`EngineForkedError`.
    """

    def __init__(self, name: str, threads: int, begin: Begin | None = None) -> None:
        """Nothing is started yet; ``threads`` is the size of the executor, whose threads call ``begin()`` first."""
        self.name = name
        self._threads, self._begin = threads, begin
        self._pid = os.getpid()
        self._is_closing = False
        self._executor: Executor | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._context: contextvars.Context | None = None
        self._group: anyio.abc.TaskGroup | None = None
        self._ready: Future[None] = Future()
        self._unresolved: set[Future[Any]] = set()
        self._forget_exit: Callable[[], object] = _nothing

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """:meth:`start`; unless the block ends well, :meth:`close`."""
        with contextlib.ExitStack() as undo:
            undo.callback(self.close, STOP_SECS)
            self.start()
            yield
            undo.pop_all()

    def start(self) -> None:
        """Start the threads; returns when the loop runs. RuntimeError: started before, or no more threads."""
        _check_process(self._pid, self.name)
        if self._thread is not None or self._is_closing:
            raise RuntimeError(f"{self.name}: a portal is started once")
        self._executor = Executor(self.name, self._threads, self, self._begin)
        thread = threading.Thread(target=self._run, name=f"{self.name}-loop", daemon=True)
        thread.start()
        self._thread = thread
        self._ready.result(_START_TIMEOUT_SECS)

    @property
    def executor(self) -> Executor:
        """Runs what blocks; give it to :func:`run_blocking`."""
        _check_process(self._pid, self.name)
        if self._executor is None:
            raise EngineClosedError(f"{self.name}: not started")
        return self._executor

    @property
    def is_closed(self) -> bool:
        """Whether submissions are refused: closed, never started, or its loop died."""
        return self._is_closing or self._thread is None or not self._thread.is_alive()

    def check_thread(self, what: str) -> None:
        """Refuse a wait that only this very thread could end.

        Raises:
            WrongThreadError: called on the loop's thread or on one of the executor's.
        """
        _check_process(self._pid, self.name)
        if getattr(_OWNER, "value", None) is self:
            raise WrongThreadError(
                f"{what} on the engine's own thread {threading.current_thread().name!r} would wait for itself"
            )

    def submit(
        self, async_fn: Callable[[*Ts], Coroutine[Any, Any, T]], *args: *Ts, on_done: Watcher | None = None
    ) -> Future[T]:
        """Start ``async_fn(*args)`` on the loop, from any thread; does not wait for the loop.

        Cancelling the future cancels the task. :class:`EngineClosedError` if the portal is closed, and in the
        future if it closes first. ``on_done`` is told of the future, also where Ctrl-C keeps it from the caller.
        """
        _check_process(self._pid, self.name)
        future: Future[T] = Future()
        if on_done is not None:
            future.add_done_callback(on_done)
        # Added before it is scheduled: a loop that ends in between finds it here and resolves it.
        self._unresolved.add(future)
        if self.is_closed or not self._schedule(self._spawn, async_fn, args, future):
            self._unresolved.discard(future)
            raise EngineClosedError(f"{self.name}: closed")
        return future

    def call(
        self,
        async_fn: Callable[[*Ts], Coroutine[Any, Any, T]],
        *args: *Ts,
        timeout: float | None,
        what: str | None = None,
    ) -> T:
        """Run ``async_fn(*args)`` on the loop and wait. A wait given up (timeout, KeyboardInterrupt) cancels it.

        Raises:
            StallError: names ``what`` (default: the function) when ``timeout`` seconds have passed.
            WrongThreadError: called on a thread of this portal.
            EngineClosedError: the portal is closed, or closed meanwhile.
        """
        what = what or str(getattr(async_fn, "__qualname__", async_fn))
        self.check_thread(what)
        future = self.submit(async_fn, *args)
        try:
            future.exception(timeout)  # does not raise the task's: a TimeoutError from here is the wait's own
        except TimeoutError:
            raise StallError(f"{self.name}: {what} did not end within {timeout} s") from None
        finally:
            future.cancel()
        return future.result()

    def post(self, fn: Callable[[*Ts], object], *args: *Ts) -> None:
        """Call ``fn(*args)`` on the loop soon, from any thread. Ignored once the loop has ended."""
        _check_process(self._pid, self.name)
        self._schedule(fn, *args)

    def at_exit(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` at interpreter exit, threads still running, unless closed by then or in a forked child."""
        _check_process(self._pid, self.name)
        hook = functools.partial(self._run_at_exit, callback)
        if multiprocessing.parent_process() is None:
            atexit.register(hook)
            self._forget_exit = functools.partial(atexit.unregister, hook)
        else:  # a child that multiprocessing forked ends by os._exit(), which calls no atexit hook
            self._forget_exit = Finalize(None, hook, exitpriority=0).cancel

    def _run_at_exit(self, callback: Callable[[], object]) -> None:
        if os.getpid() == self._pid and not self.is_closed:
            callback()

    def close(self, timeout: float) -> None:
        """Cancel what still runs, end the loop, then the threads. Idempotent, from any thread but its own.

        A thread that is stuck in the system after ``timeout`` seconds is left behind with a warning that names
        the portal; every future is resolved all the same.
        """
        self.check_thread("close()")
        deadline = time.monotonic() + timeout
        self._is_closing = True
        forget, self._forget_exit = self._forget_exit, _nothing
        forget()
        if self._executor is None:
            return
        if self._group is not None:
            self._schedule(self._group.cancel_scope.cancel)
        if self._thread is not None:
            self._thread.join(timeout)
        threads_ended = self._executor.close(max(0.0, deadline - time.monotonic()))
        self._resolve_rest(None)
        if (self._thread is not None and self._thread.is_alive()) or not threads_ended:
            _logger.warning("%s: a thread was still at work %.1f s after close and is left behind", self.name, timeout)

    # -- on the loop's thread ---------------------------------------------------------------------

    def _run(self) -> None:
        _own_thread(self)
        cause: BaseException | None = None
        try:
            anyio.run(self._main, backend="asyncio")
        except BaseException as error:
            cause = error
            _logger.exception("%s: the loop died", self.name)
            if not self._ready.done():
                self._ready.set_exception(error)
        finally:
            self._resolve_rest(cause)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        async with anyio.create_task_group() as group:
            self._group = group
            self._ready.set_result(None)
            await anyio.sleep_forever()

    def _schedule(self, fn: Callable[[*Ts], object], *args: *Ts) -> bool:
        if self._loop is None or self._context is None:
            return False
        try:
            self._loop.call_soon_threadsafe(fn, *args, context=self._context.copy())
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            return False
        return True

    def _spawn(self, async_fn: Callable[[*Ts], Coroutine[Any, Any, T]], args: tuple[*Ts], future: Future[T]) -> None:
        if self._group is not None and not self._is_closing:  # else resolved when the loop has ended
            self._group.start_soon(self._run_task, async_fn, args, future, name=getattr(async_fn, "__qualname__", None))

    async def _run_task(
        self, async_fn: Callable[[*Ts], Coroutine[Any, Any, T]], args: tuple[*Ts], future: Future[T]
    ) -> None:
        with anyio.CancelScope() as scope:
            future.add_done_callback(lambda done: done.cancelled() and self._schedule(scope.cancel))
            try:
                value = await async_fn(*args)
            except asyncio.CancelledError:
                self._fail(future, None)
            except BaseException as error:  # noqa: BLE001 - the waiter's to handle; raised here it would end the loop
                if self._claim(future):
                    future.set_exception(error)
            else:
                if self._claim(future):
                    future.set_result(value)

    def _resolve_rest(self, cause: BaseException | None) -> None:
        for future in list(self._unresolved):
            self._fail(future, cause)

    def _fail(self, future: Future[Any], cause: BaseException | None) -> None:
        if self._claim(future):
            error: AioCkptError = SaveCancelledError(f"{self.name}: the task was cancelled from within")
            if cause is not None or self.is_closed:
                error = EngineClosedError(f"{self.name}: closed before the task had ended")
            error.__cause__ = cause
            future.set_exception(error)

    def _claim(self, future: Future[Any]) -> bool:
        """Whether the caller is to resolve it: the first to come, unless the future was cancelled."""
        try:
            self._unresolved.remove(future)
        except KeyError:
            return False
        return future.set_running_or_notify_cancel()
