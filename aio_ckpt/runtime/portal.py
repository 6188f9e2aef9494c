"""Portal: one event loop on one named thread, and its I/O threads. No other file starts a thread or a loop.

:class:`Portal` follows anyio's ``BlockingPortal`` (4.16), which waits without a deadline in three places:

- Its ``start_task_soon`` blocks the caller for a turn of the loop, and for ever if the loop ends meanwhile.
- A future whose task never ran stays unresolved.
- Its exit joins the thread, however long that takes.
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
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from multiprocessing.util import Finalize
from queue import Empty
from queue import SimpleQueue as SimpleQueue
from typing import Any, ParamSpec, TypeVar, TypeVarTuple

# Imported here, because anyio would import the last three at first use, on a thread. A fork during such an import would
# keep its locks for ever.
import anyio
import anyio._backends._asyncio
import anyio.abc
import anyio.to_thread

from aio_ckpt.errors import (
    AioCkptError,
    EngineClosedError,
    EngineForkedError,
    SaveCancelledError,
    StallError,
    SystemLimitError,
    ThreadDiedError,
    WrongThreadError,
)
from aio_ckpt.runtime.ctrl_c import Lock, new_future
from aio_ckpt.runtime.error_notes import named
from aio_ckpt.runtime.limits import opening_refusal, thread_refusal, threads_remedy

P = ParamSpec("P")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Watcher = Callable[["Future[Any]"], None]
ThreadInit = Callable[[], object]

_logger = logging.getLogger("aio_ckpt")
_START_TIMEOUT_SECS = 60.0
SMALL_IO_THREADS = 4
"""I/O threads beside those that read or write. They compute sums, wait for device copies, and write small files."""
STOP_SECS = 10.0
"""Seconds that closing waits for threads in a system call."""
_OWNER = threading.local()


# -- submissions ----------------------------------------------------------------------------------

ON_SUBMIT: contextvars.ContextVar[tuple[Watcher, ...]] = contextvars.ContextVar("aio_ckpt_on_submit", default=())
"""Callbacks that get every future that this context submits to an :class:`Executor`."""


@contextlib.contextmanager
def watch_submissions(callback: Watcher) -> Iterator[None]:
    """Report the concurrent future of every submission in the block, by this task or a task that it starts.

    A cancelled await does not stop its thread. So a lender of bytes to a thread must hold them until the reported
    future has resolved. Watchers nest; the outer one is called first. ``callback`` must not raise, because the work is
    already queued.
    """
    token = ON_SUBMIT.set((*ON_SUBMIT.get(), callback))
    try:
        yield
    finally:
        ON_SUBMIT.reset(token)


def report_submission(work: Future[Any]) -> None:
    """Report work that this context gives to a thread."""
    for watcher in ON_SUBMIT.get():
        watcher(work)


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Report no submission in the block to a watcher. The work must touch no lent bytes: no lender waits for it."""
    token = ON_SUBMIT.set(())
    try:
        yield
    finally:
        ON_SUBMIT.reset(token)


Work = tuple["Future[Any]", Callable[[], Any]]


class Executor(concurrent.futures.Executor):
    """Pool of daemon threads named ``{name}-io_{n}``, all started by the constructor.

    The constructor starts all, so that no work is queued if the system refuses every thread. If it refuses some, the
    pool works with the others: no work in a thread waits for other work in a thread. They are daemon threads,
    because at interpreter exit Python joins the threads of its own pools, and refuses them work, before any ``atexit``
    hook runs. A drain at exit needs threads that still work, and a thread that is stuck in the system must not keep the
    process.
    """

    def __init__(self, name: str, threads: int, owner: object = None, thread_init: ThreadInit | None = None) -> None:
        """Start the threads. Each calls ``thread_init()`` first. ``Portal.check_thread`` recognises them by ``owner``.

        Raises:
            SystemLimitError: the system refuses every thread.
        """
        self._pid = os.getpid()
        self._name = name
        self._lock = Lock()
        self._is_closed = False
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        try:
            for number in range(threads):
                thread = threading.Thread(
                    target=_work, args=(self._queue, owner, thread_init), name=f"{name}-io_{number}", daemon=True
                )
                self._threads.append(thread)
                try:
                    thread.start()
                except RuntimeError as error:
                    self._threads.remove(thread)
                    if not self._threads:
                        raise thread_refusal(name, error) from error
                    break
        except BaseException:
            self.shutdown(wait=False)
            raise

    @property
    def thread_count(self) -> int:
        """Number of threads that the system gave."""
        return len(self._threads)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue ``fn`` and report its future to the context's watcher.

        Raises:
            EngineClosedError: the executor was shut down.
            EngineForkedError: the threads belong to another process, of which this one is a fork.
        """
        if os.getpid() != self._pid:
            raise _fork_refusal(self._pid, self._name)
        future: Future[T] = new_future()
        work = future, functools.partial(fn, *args, **kwargs)
        with self._lock:
            if self._is_closed:
                raise EngineClosedError(
                    f"{self._name}: closed, no more I/O (cannot schedule new futures after shutdown)"
                )
            self._queue.put(work)
        report_submission(future)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Refuse new work. The threads end after the queued work, which ``cancel_futures`` drops. Idempotent."""
        dropped: list[Work] = []
        with self._lock:
            self._is_closed = True
            while cancel_futures and not self._queue.empty():
                with contextlib.suppress(Empty):  # a thread took the work first
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
        """Refuse new work and drop the queue. Return whether all threads ended within ``timeout_secs``."""
        self.shutdown(wait=False, cancel_futures=True)
        return self._join(timeout_secs)

    def _join(self, timeout_secs: float | None) -> bool:
        deadline = None if timeout_secs is None else time.monotonic() + timeout_secs
        started = [thread for thread in self._threads if thread.ident is not None]
        for thread in started:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in started)


def _work(works: SimpleQueue[Work | None], owner: object, thread_init: ThreadInit | None) -> None:
    """Run queued work until None comes. This is the main function of each thread of an executor."""
    _own_thread(owner, thread_init)
    while (work := works.get()) is not None:
        _run_one(*work)
        del work  # a waiting thread must not keep the last work and its arguments alive


def _run_one(future: Future[Any], fn: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        try:
            result = fn()
        except (SystemExit, KeyboardInterrupt) as error:  # if an await raised one of these, asyncio would end the loop
            raise ThreadDiedError(f"an I/O thread was ended by {named(error)}") from error
        except StopIteration as error:  # no future of asyncio takes it: its await would never end
            raise RuntimeError(f"a call raised {named(error)}") from error
    except BaseException as error:  # noqa: BLE001 - the waiter handles it
        future.set_exception(error)
    else:
        future.set_result(result)
    finally:
        del future, fn  # an error's traceback holds this frame, which would close a cycle through the future


def run_blocking(executor: Executor, fn: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
    """Return ``fn(*args)``, called in a thread. A cancelled await ends at once, but a call that has begun runs on."""
    return asyncio.get_running_loop().run_in_executor(executor, fn, *args)


def start_beside(fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Call ``fn``, a blocking call of an engine, in a daemon thread of its own. Returns its future.

    A thread of the engine would not do: the call waits for them. A thread of the caller's loop would not do: if the
    disk hangs, the end of that loop waits for it, and if the system refuses it a thread, it may call ``fn`` later,
    although this has raised.

    Raises:
        SystemLimitError: the system refuses the thread. ``fn`` was not called.
    """
    beside = Executor("aio_ckpt-call", 1)
    try:
        with unwatched():
            return beside.submit(contextvars.copy_context().run, functools.partial(fn, *args, **kwargs))
    finally:
        beside.shutdown(wait=False)


def start_beside_or_here(fn: Callable[[], T]) -> Future[T]:
    """Do :meth:`start_beside` for work that cannot be left undone: without a thread, the caller's thread does it."""
    try:
        return start_beside(fn)
    except SystemLimitError:
        future: Future[T] = new_future()
        _run_one(future, fn)
        return future


def await_at_exit(work: Future[Any], hurry: Callable[[], object], limit_secs: float) -> None:
    """Let the exit of this process, not of a fork, wait for ``work`` in a daemon thread, for at most ``limit_secs``.

    ``hurry`` is called before the wait.
    """
    pid = os.getpid()

    def wait() -> None:
        if os.getpid() != pid:
            return
        hurry()
        with contextlib.suppress(TimeoutError, concurrent.futures.CancelledError):
            work.exception(limit_secs)

    atexit.register(wait)
    work.add_done_callback(lambda _: atexit.unregister(wait))


async def run_owned(executor: Executor, fn: Callable[[*Ts], T], *args: *Ts, dispose: Callable[[T], object]) -> T:
    """Return ``fn(*args)``, called in a thread. If the await is cancelled, the thread calls ``dispose(result)``."""
    future = executor.submit(fn, *args)
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        future.add_done_callback(lambda done: None if done.cancelled() or done.exception() else dispose(done.result()))
        raise


def _own_thread(owner: object, thread_init: ThreadInit | None = None) -> None:
    _OWNER.value = owner
    if thread_init is not None:
        thread_init()


def _nothing() -> None: ...


def _fork_refusal(pid: int, name: str) -> EngineForkedError:
    return EngineForkedError(f"{name} was opened by process {pid}, this is its fork: open an engine of its own here")


# -- the portal -----------------------------------------------------------------------------------


class Portal:
    """Asyncio loop on the daemon thread ``{name}-loop``, with an :class:`Executor` for its blocking calls.

    Invariant: every future that :meth:`submit` returned is resolved when the loop has ended, with the task's result or
    with :class:`EngineClosedError`. Tasks belong to one task group. They run in a context of the loop, so that no task
    keeps the values of a caller's context alive. In a forked child, every method raises :class:`EngineForkedError`.
    """

    def __init__(self, name: str, threads: int, thread_init: ThreadInit | None = None) -> None:
        """Start nothing yet. ``threads`` is the size of the executor. Each thread calls ``thread_init()`` first."""
        self.name = name
        self._threads, self._thread_init = threads, thread_init
        self._pid = os.getpid()
        self._is_closing = self._has_ended = False
        self._executor: Executor | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._context: contextvars.Context | None = None
        self._group: anyio.abc.TaskGroup | None = None
        self._ready: Future[None] = new_future()
        self._unresolved: set[Future[Any]] = set()
        self._forget_exit: Callable[[], object] = _nothing

    @contextlib.contextmanager
    def opening(self) -> Iterator[None]:
        """Start the portal, and close it if the block raises."""
        with contextlib.ExitStack() as undo:
            undo.callback(self.close, STOP_SECS)
            self.start()
            yield
            undo.pop_all()

    def start(self) -> None:
        """Start the threads, and return when the loop runs.

        If the system refuses some threads of the executor, a warning is logged.

        Raises:
            RuntimeError: the portal was started before.
            SystemLimitError: the system refuses a thread for the loop, or every other one, or the loop's own files.
        """
        if not self.is_of_this_process:
            raise _fork_refusal(self._pid, self.name)
        if self._thread is not None or self._is_closing:
            raise RuntimeError(f"{self.name}: a portal is started once")
        thread = threading.Thread(target=self._run, name=f"{self.name}-loop", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise thread_refusal(self.name, error) from error
        self._thread = thread
        try:
            self._ready.result(_START_TIMEOUT_SECS)
        except OSError as error:
            raise opening_refusal(self.name, error) from error
        self._executor = Executor(self.name, self._threads, self, self._thread_init)
        given = self._executor.thread_count
        if given < self._threads:
            _logger.warning(
                "%s: the system gives %d of %d threads, which makes saves and loads slower: %s",
                self.name,
                given,
                self._threads,
                threads_remedy(),
            )

    @property
    def executor(self) -> Executor:
        """Executor for blocking calls, to be passed to :func:`run_blocking`."""
        if not self.is_of_this_process:
            raise _fork_refusal(self._pid, self.name)
        if self._executor is None:
            raise EngineClosedError(f"{self.name}: not started")
        return self._executor

    @property
    def is_of_this_process(self) -> bool:
        """Whether this process made the portal, and is no fork of the one that did."""
        return os.getpid() == self._pid

    @property
    def is_closed(self) -> bool:
        """Whether submissions are refused, because the portal was closed or never started, or its loop died."""
        # Not is_alive(): Ctrl-C in it makes Python 3.11 and 3.12 take a thread that lives for one that ended.
        return self._is_closing or self._thread is None or self._has_ended

    def check_thread(self, what: str) -> None:
        """Refuse a wait on a thread of this portal, which would wait for itself.

        Raises:
            WrongThreadError: the caller runs on the loop's thread or on a thread of the executor.
        """
        if not self.is_of_this_process:
            raise _fork_refusal(self._pid, self.name)
        if getattr(_OWNER, "value", None) is self:
            raise WrongThreadError(
                f"{what} on the engine's own thread {threading.current_thread().name!r} would wait for itself"
            )

    def submit(
        self, async_fn: Callable[[*Ts], Coroutine[Any, Any, T]], *args: *Ts, on_done: Watcher | None = None
    ) -> Future[T]:
        """Start ``async_fn(*args)`` on the loop, from any thread, without a wait for the loop.

        Cancelling the future cancels the task. If the portal closes before the task ends, the future raises
        :class:`EngineClosedError`. ``on_done`` gets the future when it is done, even if Ctrl-C ended this call before
        it returned the future.

        Raises:
            EngineClosedError: the portal is closed.
        """
        if not self.is_of_this_process:
            raise _fork_refusal(self._pid, self.name)
        future: Future[T] = new_future()
        if on_done is not None:
            future.add_done_callback(on_done)
        # The future is added before its task is scheduled, so that a loop that ends in between resolves it.
        self._unresolved.add(future)
        if self.is_closed or not self._schedule(self._spawn, async_fn, args, future):
            self._unresolved.discard(future)
            raise EngineClosedError
        return future

    def call(
        self,
        async_fn: Callable[[*Ts], Coroutine[Any, Any, T]],
        *args: *Ts,
        timeout: float | None,
        what: str | None = None,
    ) -> T:
        """Run ``async_fn(*args)`` on the loop and wait. If the wait ends early (timeout, Ctrl-C), cancel the task.

        Raises:
            StallError: ``timeout`` seconds have passed; the message names ``what`` (default: the function).
            WrongThreadError: the caller runs on a thread of this portal.
            EngineClosedError: the portal is closed, or was closed meanwhile.
        """
        what = what or str(getattr(async_fn, "__qualname__", async_fn))
        self.check_thread(what)
        future = self.submit(async_fn, *args)
        try:
            future.exception(timeout)  # this never raises the task's error, so a TimeoutError is that of the wait
        except TimeoutError:
            raise StallError(f"{self.name}: {what} did not end within {timeout} s") from None
        finally:
            future.cancel()
        return future.result()

    def post(self, fn: Callable[[*Ts], object], *args: *Ts) -> None:
        """Call ``fn(*args)`` soon on the loop, from any thread. If the loop has ended, do nothing."""
        if not self.is_of_this_process:
            raise _fork_refusal(self._pid, self.name)
        self._schedule(fn, *args)

    def at_exit(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` at interpreter exit, while the threads still run.

        It is not called if the portal is closed by then, nor in a forked child.
        """
        if not self.is_of_this_process:
            raise _fork_refusal(self._pid, self.name)
        hook = functools.partial(self._run_at_exit, callback)
        if multiprocessing.parent_process() is None:
            atexit.register(hook)
            self._forget_exit = functools.partial(atexit.unregister, hook)
        else:  # a child of multiprocessing ends by os._exit(), which calls no atexit hook
            self._forget_exit = Finalize(None, hook, exitpriority=0).cancel

    def _run_at_exit(self, callback: Callable[[], object]) -> None:
        if self.is_of_this_process and not self.is_closed:
            callback()

    def close(self, timeout: float) -> None:
        """Cancel the tasks, end the loop, then end the threads. Idempotent. Call it on any thread but the portal's own.

        If a thread is still stuck in the system after ``timeout`` seconds, a warning is logged and the thread is
        abandoned. Every future is resolved in any case.
        """
        self.check_thread("close()")
        deadline = time.monotonic() + timeout
        self._is_closing = True
        forget, self._forget_exit = self._forget_exit, _nothing
        forget()
        try:
            if self._group is not None:
                self._schedule(self._group.cancel_scope.cancel)
            if self._thread is not None:
                self._thread.join(timeout)
        finally:  # Ctrl-C in the wait for the loop leaves no thread
            threads_ended = self._executor is None or self._executor.close(max(0.0, deadline - time.monotonic()))
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
            if not self._ready.done():
                self._ready.set_exception(error)
            else:
                _logger.exception("%s: the loop died", self.name)
        finally:
            self._has_ended = True
            self._resolve_rest(cause)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        async with anyio.create_task_group() as group:
            self._group = group
            if self._is_closing:  # Ctrl-C ended start()
                return
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
        if self._group is not None and not self._is_closing:  # a closing portal resolves the future when the loop ends
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
            except BaseException as error:  # noqa: BLE001 - the waiter handles it; raised here, it would end the loop
                if self._claim(future):
                    future.set_exception(error)
            else:
                if self._claim(future):
                    future.set_result(value)
            finally:
                del future, args  # an error's traceback holds this frame, which would close a cycle through the future

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
        """Return whether the caller must resolve ``future``: only the first caller, and not if it was cancelled."""
        try:
            self._unresolved.remove(future)
        except KeyError:
            return False
        return future.set_running_or_notify_cancel()
