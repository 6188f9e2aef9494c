"""The portal: one loop on one thread, I/O threads, exit and fork."""

from __future__ import annotations

import asyncio
import contextvars
import errno
import gc
import logging
import subprocess
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from pathlib import Path

import anyio
import anyio.abc
import pytest
from child_python import child_environment, python
from system_limits import threads_up_to
from warm_python import run_warm

from aio_ckpt.errors import EngineClosedError, SaveCancelledError, StallError, SystemLimitError, WrongThreadError
from aio_ckpt.runtime.portal import Executor, Portal, run_blocking, run_owned, watch_submissions

TIMEOUT = 20.0


@pytest.fixture
def portal() -> Iterator[Portal]:
    portal = Portal("engine", 2)
    portal.start()
    yield portal
    portal.close(TIMEOUT)


@pytest.fixture
def executor() -> Iterator[Executor]:
    executor = Executor("test", 2)
    yield executor
    executor.close(TIMEOUT)


async def forever() -> None:
    await asyncio.Event().wait()


def run_python(source: str) -> subprocess.CompletedProcess[str]:
    return run_warm(source, is_end_tested=True)


# -- calls and futures ----------------------------------------------------------------------------


def test_tasks_run_on_the_named_daemon_thread(portal: Portal) -> None:
    async def where() -> tuple[str, bool]:
        return threading.current_thread().name, threading.current_thread().daemon

    assert portal.call(where, timeout=TIMEOUT) == ("engine-loop", True)


def test_a_call_that_raises_stop_iteration_ends_its_await(portal: Portal) -> None:
    """No future of asyncio takes it. A ``load_state_dict`` of a user that raises it would let a load wait for ever."""

    async def call() -> None:
        await run_blocking(portal.executor, next, iter(()))

    with pytest.raises(RuntimeError, match="a call raised StopIteration"):
        portal.call(call, timeout=TIMEOUT)


def test_a_submit_does_not_wait_for_the_loop(portal: Portal) -> None:
    gate = threading.Event()

    async def answer() -> int:
        return 42

    portal.post(gate.wait)
    future = portal.submit(answer)  # would never return if it waited for a turn of the loop
    assert not future.done()
    gate.set()
    assert future.result(TIMEOUT) == 42


def test_the_error_of_a_task_reaches_its_future_and_the_portal_goes_on(portal: Portal) -> None:
    async def fail() -> None:
        raise ValueError("mine")

    async def fine() -> int:
        return 1

    with pytest.raises(ValueError, match="mine"):
        portal.call(fail, timeout=TIMEOUT)
    assert portal.call(fine, timeout=TIMEOUT) == 1


def test_cancelling_the_future_cancels_the_task(portal: Portal) -> None:
    started, ended = threading.Event(), threading.Event()

    async def task() -> None:
        started.set()
        try:
            await forever()
        finally:
            ended.set()

    future = portal.submit(task)
    assert started.wait(TIMEOUT)
    assert future.cancel()
    assert ended.wait(TIMEOUT)
    assert wait_for_futures([future], TIMEOUT).done == {future}


def test_a_task_that_ends_with_a_cancellation_of_its_own_does_not_end_the_portal(portal: Portal) -> None:
    async def cancelled() -> None:
        raise asyncio.CancelledError

    async def fine() -> int:
        return 1

    with pytest.raises(SaveCancelledError):
        portal.call(cancelled, timeout=TIMEOUT)
    assert portal.call(fine, timeout=TIMEOUT) == 1
    assert not portal.is_closed


def test_a_call_that_takes_too_long_names_what_was_awaited_and_cancels_it(portal: Portal) -> None:
    ended = threading.Event()

    async def stage() -> None:
        try:
            await forever()
        finally:
            ended.set()

    with pytest.raises(StallError, match=r"the agreement did not end within 0\.05 s"):
        portal.call(stage, timeout=0.05, what="the agreement")
    assert ended.wait(TIMEOUT)
    with pytest.raises(StallError, match="stage did not end"):
        portal.call(stage, timeout=0.05)


def test_a_timeout_raised_by_the_task_is_not_taken_for_the_calls_own(portal: Portal) -> None:
    async def late() -> None:
        raise TimeoutError("the store")

    with pytest.raises(TimeoutError, match="the store") as caught:
        portal.call(late, timeout=TIMEOUT)
    assert not isinstance(caught.value, StallError)


def test_tasks_do_not_see_or_keep_the_callers_context(portal: Portal) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")

    async def read() -> str:
        return variable.get()

    token = variable.set("the trainer's")
    try:
        assert portal.call(read, timeout=TIMEOUT) == "unset"
    finally:
        variable.reset(token)


def test_a_wait_on_the_portals_own_threads_is_refused(portal: Portal) -> None:
    async def fine() -> None:
        pass

    def waits() -> None:
        with pytest.raises(WrongThreadError, match="engine"):
            portal.call(fine, timeout=TIMEOUT)
        with pytest.raises(WrongThreadError, match="close"):
            portal.close(TIMEOUT)

    async def on_loop() -> None:
        waits()

    portal.call(on_loop, timeout=TIMEOUT)
    portal.executor.submit(waits).result(TIMEOUT)
    portal.check_thread("here")
    other = Portal("other", 1)
    other.start()
    try:
        other.executor.submit(portal.check_thread, "there").result(TIMEOUT)
    finally:
        other.close(TIMEOUT)


# -- closing --------------------------------------------------------------------------------------


def test_close_cancels_tasks_waits_for_their_cleanup_and_resolves_every_future() -> None:
    portal = Portal("engine", 1)
    portal.start()
    steps: list[str] = []

    async def task() -> None:
        try:
            await forever()
        finally:
            steps.append(await asyncio.shield(run_blocking(portal.executor, lambda: "cleaned up in a thread")))

    started = threading.Event()

    async def begin() -> None:
        started.set()
        await task()

    future = portal.submit(begin)
    assert started.wait(TIMEOUT)
    portal.close(TIMEOUT)
    assert isinstance(future.exception(0), EngineClosedError)
    assert portal.is_closed


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_ctrl_c_in_the_wait_of_close_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    portal = Portal("interrupted", 2)
    portal.start()
    loop, threads = portal._thread, portal.executor._threads
    assert loop is not None
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(loop, "join", interrupted)
        portal.close(TIMEOUT)
    for thread in (loop, *threads):
        thread.join(TIMEOUT)
        assert not thread.is_alive()


def test_ctrl_c_in_the_wait_for_the_loop_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop may still be about to begin."""
    begins = threading.Event()
    real = anyio.create_task_group

    def late() -> anyio.abc.TaskGroup:
        assert begins.wait(TIMEOUT)
        return real()

    portal = Portal("interrupted", 2)
    monkeypatch.setattr(anyio, "create_task_group", late)
    monkeypatch.setattr(portal._ready, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        portal.start()
    portal.close(0.0)
    begins.set()
    assert portal._thread is not None
    portal._thread.join(TIMEOUT)
    assert not portal._thread.is_alive()


def test_everything_after_close_is_refused_and_a_post_is_ignored(portal: Portal) -> None:
    portal.close(TIMEOUT)
    portal.close(TIMEOUT)
    with pytest.raises(EngineClosedError):
        portal.submit(forever)
    with pytest.raises(EngineClosedError):
        portal.executor.submit(print)
    portal.post(pytest.fail, "must not run")
    with pytest.raises(RuntimeError, match="once"):
        portal.start()


def test_a_portal_that_was_never_started_is_closed() -> None:
    portal = Portal("engine", 1)
    assert portal.is_closed
    with pytest.raises(EngineClosedError):
        portal.submit(forever)
    with pytest.raises(EngineClosedError):
        _ = portal.executor
    portal.close(TIMEOUT)


def test_close_leaves_a_stuck_loop_behind_with_a_warning_and_resolves_what_waits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    portal = Portal("engine", 1)
    portal.start()
    gate = threading.Event()
    portal.post(gate.wait)
    future = portal.submit(forever)
    with caplog.at_level(logging.WARNING, "aio_ckpt"):
        portal.close(0.05)
    assert isinstance(future.exception(0), EngineClosedError)
    assert "engine" in caplog.text
    assert "left behind" in caplog.text
    gate.set()
    portal.close(TIMEOUT)


def test_close_does_not_wait_for_a_stuck_io_thread(caplog: pytest.LogCaptureFixture) -> None:
    portal = Portal("engine", 1)
    portal.start()
    gate, entered = threading.Event(), threading.Event()
    stuck = portal.executor.submit(lambda: entered.set() or gate.wait())
    assert entered.wait(TIMEOUT)
    queued = portal.executor.submit(pytest.fail, "must not run")
    with caplog.at_level(logging.WARNING, "aio_ckpt"):
        portal.close(0.05)
    assert "left behind" in caplog.text
    assert queued.cancelled()
    gate.set()
    assert stuck.result(TIMEOUT)


def test_no_future_is_left_unresolved_when_threads_submit_while_it_closes() -> None:
    portal = Portal("engine", 1)
    portal.start()
    futures: list[Future[None]] = []
    barrier = threading.Barrier(5)

    def submit_many() -> None:
        barrier.wait(TIMEOUT)
        for _ in range(200):
            try:
                futures.append(portal.submit(forever))
            except EngineClosedError:
                return

    threads = [threading.Thread(target=submit_many) for _ in range(4)]
    for thread in threads:
        thread.start()
    barrier.wait(TIMEOUT)
    portal.close(TIMEOUT)
    for thread in threads:
        thread.join(TIMEOUT)
    assert not wait_for_futures(futures, TIMEOUT).not_done
    assert all(isinstance(future.exception(0), EngineClosedError) for future in futures)


def test_an_exit_request_in_a_task_is_its_waiters_and_the_portal_goes_on(portal: Portal) -> None:
    async def leave() -> None:
        raise SystemExit(3)

    async def fine() -> int:
        return 1

    assert isinstance(portal.submit(leave).exception(TIMEOUT), SystemExit)
    assert portal.call(fine, timeout=TIMEOUT) == 1


def test_a_loop_that_dies_tells_everyone_who_waits(caplog: pytest.LogCaptureFixture) -> None:
    portal = Portal("engine", 1)
    portal.start()
    started = threading.Event()

    async def wait() -> None:
        started.set()
        await forever()

    def leave() -> None:
        raise SystemExit(3)

    with caplog.at_level(logging.ERROR, "aio_ckpt"):
        waiting = portal.submit(wait)
        assert started.wait(TIMEOUT)
        portal.post(leave)
        with pytest.raises((EngineClosedError, SaveCancelledError)):
            waiting.result(TIMEOUT)
        portal.close(TIMEOUT)
    assert "loop died" in caplog.text
    with pytest.raises(EngineClosedError):
        portal.submit(forever)


# -- executor -------------------------------------------------------------------------------------


def test_all_threads_of_an_executor_are_started_at_once_and_named(executor: Executor) -> None:
    names = {thread.name for thread in threading.enumerate()}
    assert {"test-io_0", "test-io_1"} <= names


def test_an_executor_that_gets_no_thread_says_so_at_once_and_names_the_limit() -> None:
    with threads_up_to(0), pytest.raises(SystemLimitError, match=r"can't start new thread\): .*ulimit -u") as caught:
        Executor("test", 3)
    assert (caught.value.errno, caught.value.filename) == (errno.EAGAIN, "test")


def test_an_executor_works_with_the_threads_that_it_gets() -> None:
    with threads_up_to(1) as refused:
        executor = Executor("test", 3)
    assert (refused, executor.thread_count) == (["test-io_1"], 1)
    assert [work.result(TIMEOUT) for work in [executor.submit(int, text) for text in "123"]] == [1, 2, 3]
    assert executor.close(TIMEOUT)


@pytest.mark.parametrize("count", [0, 1])
def test_a_portal_that_gets_too_few_threads_leaves_none(count: int) -> None:
    portal = Portal("engine", 2)
    with threads_up_to(count), pytest.raises(SystemLimitError), portal.opening():
        raise AssertionError("it was opened")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("engine-")]


def test_a_portal_that_gets_fewer_threads_than_it_asks_for_warns(caplog: pytest.LogCaptureFixture) -> None:
    portal = Portal("engine", 2)
    with threads_up_to(2):
        portal.start()
    assert "engine: the system gives 1 of 2 threads" in caplog.text
    assert portal.executor.submit(int, "1").result(TIMEOUT) == 1
    portal.close(TIMEOUT)


async def test_a_cancelled_await_leaves_its_thread_running_and_the_watcher_knows_its_future(
    executor: Executor,
) -> None:
    gate, entered = threading.Event(), threading.Event()
    seen: list[Future[object]] = []

    def work() -> str:
        entered.set()
        gate.wait(TIMEOUT)
        return "done"

    async def awaiting() -> None:
        with watch_submissions(seen.append):
            await run_blocking(executor, work)

    task = asyncio.create_task(awaiting())
    async with asyncio.timeout(TIMEOUT):
        while not entered.is_set():
            await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    (future,) = seen
    assert not future.done()
    gate.set()
    assert future.result(TIMEOUT) == "done"


async def test_watchers_nest_and_end_with_their_block(executor: Executor) -> None:
    calls: list[str] = []

    async def in_a_thread() -> None:
        await run_blocking(executor, int)

    with watch_submissions(lambda _: calls.append("outer")):
        with watch_submissions(lambda _: calls.append("inner")):
            await run_blocking(executor, int)
        await asyncio.create_task(in_a_thread())
    await run_blocking(executor, int)
    assert calls == ["outer", "inner", "outer"]


async def test_the_result_of_a_cancelled_await_is_disposed_of(executor: Executor) -> None:
    gate, entered = threading.Event(), threading.Event()
    disposed: Future[str] = Future()

    def work() -> str:
        entered.set()
        gate.wait(TIMEOUT)
        return "a descriptor"

    task = asyncio.create_task(run_owned(executor, work, dispose=disposed.set_result))
    async with asyncio.timeout(TIMEOUT):
        while not entered.is_set():
            await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not disposed.done()
    gate.set()
    assert disposed.result(TIMEOUT) == "a descriptor"
    assert await run_owned(executor, lambda: "kept", dispose=pytest.fail) == "kept"


def test_an_executor_reports_whether_its_threads_let_go() -> None:
    executor = Executor("test", 1)
    gate, entered = threading.Event(), threading.Event()
    executor.submit(lambda: entered.set() or gate.wait())
    assert entered.wait(TIMEOUT)
    assert not executor.close(0.05)
    gate.set()
    assert executor.close(TIMEOUT)
    with pytest.raises(EngineClosedError):
        executor.submit(int)


# -- other processes ------------------------------------------------------------------------------


@pytest.mark.slow
def test_no_thread_of_the_engine_imports_a_module(tmp_path: Path) -> None:
    """A fork meanwhile, as of a data loader's workers, would keep the lock of the import for ever in the child."""
    done = subprocess.run(
        python(
            """
            import sys, threading
            import torch
            from aio_ckpt import EngineConfig, PerRank, SyncCheckpointEngine

            class Watcher:
                def find_spec(self, name, path=None, target=None):
                    if threading.current_thread().name.startswith("aio_ckpt-"):
                        print(name)

            sys.meta_path.insert(0, Watcher())
            root = sys.argv[1]
            state = {"w": torch.ones(1 << 20), "n": [torch.ones(3), {"k": 1}], "rank": PerRank(1)}
            with SyncCheckpointEngine(root, EngineConfig(keep_last=2)) as engine:
                for _ in range(3):
                    engine.save(state).result()
                engine.load(state)
                engine.read(only=["w"])
                engine.rollback(2)
            print("done")
            """,
            str(tmp_path / "root"),
        ),
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("done\n", "")


def test_every_method_raises_in_a_forked_child_which_may_open_its_own() -> None:
    done = run_python(
        """
        import os
        from aio_ckpt.errors import EngineForkedError
        from aio_ckpt.runtime.portal import Portal

        async def answer():
            return 42

        portal = Portal("engine", 1)
        portal.start()
        executor = portal.executor
        pid = os.fork()
        if not pid:
            attempts = [
                portal.start, lambda: portal.submit(answer), lambda: portal.call(answer, timeout=1),
                lambda: portal.post(print), lambda: portal.check_thread("x"), lambda: portal.executor,
                lambda: portal.at_exit(print), lambda: portal.close(1), lambda: executor.submit(print),
            ]
            raised = 0
            for attempt in attempts:
                try:
                    attempt()
                except EngineForkedError as error:
                    assert str(os.getppid()) in str(error)
                    raised += 1
            own = Portal("child", 1)
            own.start()
            right = raised == len(attempts) and own.call(answer, timeout=10) == 42
            own.close(10)
            os._exit(0 if right else 1)
        _, status = os.waitpid(pid, 0)
        portal.close(10)
        print(os.waitstatus_to_exitcode(status))
        """
    )
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_at_exit_the_callback_runs_while_threads_work_but_not_when_closed_or_forked() -> None:
    done = run_python(
        """
        import os, sys
        from aio_ckpt.runtime.portal import Portal, run_blocking

        portal, closed = Portal("engine", 1), Portal("closed", 1)
        portal.start()
        closed.start()

        async def drain():
            return await run_blocking(portal.executor, lambda: "drained in a thread")

        def callback():
            print(portal.call(drain, timeout=10), flush=True)
            portal.close(10)

        portal.at_exit(callback)
        closed.at_exit(lambda: print("must not run"))
        closed.close(10)
        if not os.fork():
            sys.exit()
        os.wait()
        """
    )
    assert (done.stdout, done.stderr) == ("drained in a thread\n", "")


def test_a_closed_portal_keeps_nothing_alive_for_the_exit() -> None:
    class Engine:
        def drain(self) -> None:
            pass

    engine = Engine()
    alive = weakref.ref(engine)
    portal = Portal("engine", 1)
    portal.start()
    portal.at_exit(engine.drain)
    del engine
    assert alive() is not None
    portal.close(TIMEOUT)
    gc.collect()
    assert alive() is None


def test_a_callback_that_fails_at_exit_does_not_keep_the_others_from_running() -> None:
    done = run_python(
        """
        from aio_ckpt.runtime.portal import Portal

        first, second = Portal("first", 1), Portal("second", 1)
        first.start()
        second.start()
        first.at_exit(lambda: print("first drained"))
        second.at_exit(lambda: 1 / 0)
        """
    )
    assert done.stdout == "first drained\n"
    assert "ZeroDivisionError" in done.stderr
    assert done.returncode == 0


def test_a_portal_runs_on_uvloop_where_that_is_the_policy() -> None:
    pytest.importorskip("uvloop")
    done = run_python(
        """
        import asyncio, uvloop, warnings
        from aio_ckpt.runtime.portal import Portal, run_blocking

        warnings.simplefilter("ignore", DeprecationWarning)  # of policies, from Python 3.14 on
        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
        portal = Portal("engine", 1)
        portal.start()

        async def answer():
            return type(asyncio.get_running_loop()).__module__, await run_blocking(portal.executor, lambda: 42)

        print(portal.call(answer, timeout=10))
        future = portal.submit(asyncio.sleep, 100)
        portal.close(10)
        print(type(future.exception(0)).__name__)
        """
    )
    assert (done.stdout, done.stderr) == ("('uvloop', 42)\nEngineClosedError\n", "")
