"""How an engine ends: close, terminate, context managers, a fork, the end of the interpreter."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from builders import broken, listing, weights
from gated_storage import TIMEOUT, Gate, gated_engine
from warm_python import run_warm

from aio_ckpt import CheckpointEngine, SyncCheckpointEngine
from aio_ckpt.engine import engine as engine_module
from aio_ckpt.engine import failed_save
from aio_ckpt.engine.known_steps import KnownSteps
from aio_ckpt.errors import EngineClosedError, SaveCancelledError, WriteError
from aio_ckpt.format.root_names import PENDING_DIR
from aio_ckpt.memory import arena_lifetimes
from aio_ckpt.memory import cuda as device


@pytest.fixture(autouse=True)
def no_thread_and_no_file_is_left():
    def held() -> tuple[set[str], int]:
        threads = {thread.name for thread in threading.enumerate() if thread.name.startswith("aio_ckpt")}
        links = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
        return threads, sum("/root" in link or "aio_ckpt" in link for link in links)

    before = held()
    yield
    assert held() == before


# -- close ----------------------------------------------------------------------------------------


async def test_an_engine_that_a_cancel_scope_leaves_is_closed_all_the_same(root: Path) -> None:
    """Such a scope cancels every wait inside it anew."""
    with anyio.CancelScope() as scope:
        async with CheckpointEngine(root) as engine:
            ticket = engine.save(weights(1))
            scope.cancel()
            await anyio.sleep(TIMEOUT)
    assert scope.cancelled_caught
    assert ticket.result(TIMEOUT).step == 1
    async with CheckpointEngine(root) as again:
        assert (await again.save(weights(2))).step == 2


async def test_an_engine_whose_task_is_cancelled_again_is_closed_all_the_same(root: Path) -> None:
    """As by a timeout around a timeout: the later ones come while the block waits for what is pending."""
    with gated_engine(root) as (engine, storage):
        gate = storage.hold("rename", "pending/*")
        is_saving = asyncio.Event()

        async def body() -> None:
            async with engine:
                engine.save(weights(1))
                is_saving.set()
                await asyncio.sleep(TIMEOUT)

        task = asyncio.create_task(body())
        await is_saving.wait()
        await asyncio.to_thread(gate.wait_reached)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
            assert not task.done()
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(EngineClosedError):
            engine.save(weights(2))
        async with CheckpointEngine(root) as again:
            assert (await again.steps()) == [1]
            assert (await again.save(weights(2))).step == 2


def test_close_finishes_what_is_pending_without_blocking_the_loop(root: Path) -> None:
    async def close(engine: CheckpointEngine, gate: Gate) -> None:
        closing = asyncio.create_task(engine.close())
        asyncio.get_running_loop().call_soon(gate.open)  # would never run if close() blocked this loop
        await closing

    with ThreadPoolExecutor(1) as pool, gated_engine(root, max_in_flight=2) as (engine, storage):
        gate = storage.hold("sync", "*.distcp")
        tickets = [engine.save(weights(number)) for number in (1, 2)]
        pool.submit(asyncio.run, close(engine, gate)).result(TIMEOUT)
        assert [ticket.result(0).step for ticket in tickets] == [1, 2]
    assert listing(root) == ["step_000000001", "step_000000002"]


def test_close_may_be_called_again_and_from_several_threads_at_once(root: Path) -> None:
    engine = SyncCheckpointEngine(root)
    engine.save(weights(1))
    with ThreadPoolExecutor(3) as pool:
        for closing in [pool.submit(engine.close) for _ in range(3)]:
            closing.result(TIMEOUT)
    engine.close()
    engine.terminate()
    assert listing(root) == ["step_000000001"]


@pytest.mark.parametrize("missing", ["thread of the loop", "the loop", "memory limits"])
def test_an_engine_that_cannot_be_opened_gives_back_what_it_had(
    root: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    start = threading.Thread.start

    def fail(*_: object, **__: object) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    def no_loop_thread(thread: threading.Thread) -> None:
        if thread.name.endswith("-loop"):
            raise RuntimeError("can't start new thread")
        start(thread)

    if missing == "thread of the loop":
        monkeypatch.setattr(threading.Thread, "start", no_loop_thread)
    elif missing == "the loop":
        monkeypatch.setattr(asyncio.events, "new_event_loop", fail)
    else:
        monkeypatch.setattr(arena_lifetimes, "default_budget_bytes", fail)
    with pytest.raises((OSError, RuntimeError), match=r"Too many open files|can't start new thread"):
        SyncCheckpointEngine(root)
    monkeypatch.undo()
    with SyncCheckpointEngine(root) as engine:
        assert engine.save(weights(1)).result().step == 1


def test_a_closed_engine_refuses_everything_and_holds_no_lock(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        ticket = engine.save(weights(1))
    uses: list[Callable[[], object]] = [
        lambda: engine.save(weights(2)),
        lambda: engine.load(weights(0)),
        engine.read,
        engine.steps,
        engine.latest_step,
        lambda: engine.rollback(1),
    ]
    for use in uses:
        with pytest.raises(EngineClosedError, match="closed"):
            use()
    assert ticket.result(0).step == 1, "a ticket outlives its engine"
    assert engine.lifetime.arenas == 0
    with SyncCheckpointEngine(root) as other:
        assert other.save(weights(2)).result(TIMEOUT).step == 2


def test_a_save_that_waits_for_room_when_the_engine_is_closed_is_refused(root: Path) -> None:
    with ThreadPoolExecutor(2) as pool, gated_engine(root) as (engine, storage):
        gate = storage.hold("sync", "*.distcp")
        first = engine.save(weights(1))
        gate.wait_reached()
        waiting = pool.submit(engine.save, weights(2))
        deadline = time.monotonic() + TIMEOUT
        while not engine._queue._changed._waiters:  # it must be asleep, or there is nothing to wake
            assert time.monotonic() < deadline
        closing = pool.submit(engine.close_blocking)
        with pytest.raises(EngineClosedError):
            waiting.result(TIMEOUT)
        assert not closing.done()
        gate.open()
        closing.result(TIMEOUT)
        assert first.result(0).step == 1
    assert listing(root) == ["step_000000001"]


class SlowState:
    """Its ``state_dict`` takes until the gate is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.gate = threading.Event()

    def state_dict(self) -> dict[str, torch.Tensor]:
        self.reached.set()
        assert self.gate.wait(TIMEOUT)
        return weights(2)

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None: ...


def test_a_save_that_was_reading_its_state_when_another_thread_closed_is_refused(root: Path) -> None:
    """It would enter behind what close() awaits, and be told that it failed where it was committed."""
    state = SlowState()
    with ThreadPoolExecutor(2) as pool, gated_engine(root, max_in_flight=2) as (engine, storage):
        gate = storage.hold("sync", "*.distcp")
        first = engine.save(weights(1))
        gate.wait_reached()
        saving = pool.submit(engine.save, {"w": state})
        assert state.reached.wait(TIMEOUT)
        closing = pool.submit(engine.close_blocking)
        deadline = time.monotonic() + TIMEOUT
        while not engine._queue._is_closing:
            assert time.monotonic() < deadline
        state.gate.set()
        with pytest.raises(EngineClosedError):
            saving.result(TIMEOUT)
        gate.open()
        closing.result(TIMEOUT)
        assert first.result(0).step == 1
    assert listing(root) == ["step_000000001"]


def test_a_commit_that_nobody_waited_for_is_in_doubt(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "STOP_SECS", 0.1)
    with gated_engine(root, drain_timeout_secs=0.1) as (engine, storage):
        gate = storage.hold("sync_dir", "root")
        ticket = engine.save(weights(1))
        gate.wait_reached()
        engine._shutdown.drain()
        error = ticket.exception(TIMEOUT)
        assert isinstance(error, EngineClosedError)
        assert error.in_doubt
        gate.open()
    assert listing(root) == ["step_000000001"]


def test_an_engine_that_is_closed_while_it_becomes_the_writer_lets_the_root_go(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn = KnownSteps.learn
    engine = SyncCheckpointEngine(root)

    def closed_behind(self: KnownSteps, read: Any) -> None:
        learn(self, read)
        if engine._quarantine.claim is not None:  # it has the lock
            with ThreadPoolExecutor(1) as pool:
                pool.submit(engine.terminate).result(TIMEOUT)

    monkeypatch.setattr(KnownSteps, "learn", closed_behind)
    with pytest.raises(EngineClosedError):
        engine.save(weights(1))
    monkeypatch.undo()
    with SyncCheckpointEngine(root) as other:
        assert other.save(weights(2)).result(TIMEOUT).step == 1


# -- context managers -----------------------------------------------------------------------------


class TrainerError(Exception):
    """What went wrong in the user's own code."""


async def test_the_end_of_an_async_block_commits_what_is_pending(root: Path) -> None:
    async with CheckpointEngine(root) as engine:
        engine.save(weights(1))
    assert listing(root) == ["step_000000001"]


@pytest.mark.parametrize("save_fails", [False, True])
async def test_the_trainers_own_error_comes_first_and_pending_saves_end_before_it(
    root: Path, caplog: pytest.LogCaptureFixture, save_fails: bool
) -> None:
    with gated_engine(root) as (engine, storage):
        if save_fails:
            storage.fail("sync", "*", broken())
        with pytest.raises(TrainerError), caplog.at_level(logging.ERROR, "aio_ckpt"):
            async with engine:
                engine.save(weights(1))
                raise TrainerError
        assert ("a save failed while the trainer was failing" in caplog.text) is save_fails
    assert listing(root) == ([] if save_fails else ["step_000000001"])


@pytest.mark.parametrize("save_fails", [False, True])
def test_the_trainers_own_error_ends_a_sync_block_behind_its_pending_saves(root: Path, save_fails: bool) -> None:
    with gated_engine(root) as (engine, storage):
        engine_class = SyncCheckpointEngine.__new__(SyncCheckpointEngine)
        engine_class.__dict__ = engine.__dict__
        if save_fails:
            storage.fail("sync", "*", broken())
        with pytest.raises(TrainerError), engine_class:
            engine_class.save(weights(1))
            raise TrainerError
    assert listing(root) == ([] if save_fails else ["step_000000001"])


async def test_a_block_that_ends_well_raises_what_an_unawaited_save_failed_with(root: Path) -> None:
    with gated_engine(root) as (engine, storage):
        storage.fail("sync", "*", broken())
        with pytest.raises(WriteError, match="the disk is gone"):
            async with engine:
                engine.save(weights(1))


# -- terminate ------------------------------------------------------------------------------------


def test_terminate_abandons_what_is_pending(root: Path) -> None:
    with ThreadPoolExecutor(1) as pool, gated_engine(root, max_in_flight=2) as (engine, storage):
        engine.save(weights(1)).result(TIMEOUT)
        storage.hold("sync", "*.distcp")  # never opened: terminate must not need it
        tickets = [engine.save(weights(number)) for number in (2, 3)]
        pool.submit(engine.terminate).result(TIMEOUT)
        for ticket in tickets:
            with pytest.raises(SaveCancelledError):
                ticket.result(0)
        with pytest.raises(EngineClosedError):
            engine.save(weights(4))
    assert listing(root) == ["step_000000001"]
    with SyncCheckpointEngine(root) as other:
        assert other.save(weights(2)).result(TIMEOUT).step == 2


def test_terminate_lets_a_commit_that_has_begun_finish(root: Path) -> None:
    with gated_engine(root) as (engine, storage), ThreadPoolExecutor(1) as pool:
        gate = storage.hold("sync_dir", "root")
        ticket = engine.save(weights(1))
        gate.wait_reached()
        terminating = pool.submit(engine.terminate)
        gate.open()
        terminating.result(TIMEOUT)
        assert ticket.result(0).step == 1
    assert listing(root) == ["step_000000001"]


def test_terminate_releases_the_engine_though_a_save_does_not_end(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(failed_save, "THREAD_WAIT_SECS", 1.0)
    with gated_engine(root, stall_timeout_secs=0.2) as (engine, storage):
        storage.hold("sync", "*.distcp")
        storage.hold("remove_tree", "pending/*")
        engine.save(weights(1))
        engine.terminate()
        assert "step 1 does not end" in caplog.text
        with SyncCheckpointEngine(root) as other:
            assert other.save(weights(2), 2).result(TIMEOUT).step == 2


def test_what_a_failed_save_left_is_removed_without_the_lock(root: Path) -> None:
    """So on a rank that does not lead."""
    with SyncCheckpointEngine(root) as engine:
        left = root / PENDING_DIR / "of-this-engine"
        left.mkdir(parents=True)
        engine._trash.add(left)
    assert listing(root) == []


class DeadMark:
    """Of a device whose context an assertion has ended."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    def fence(self, stream: object = None) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")


def test_an_engine_whose_device_is_dead_releases_all_that_it_can(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: int) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    parameter = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([parameter])
    engine = SyncCheckpointEngine(root)
    engine.guard(optimizer)
    engine.save({"p": parameter}).result(TIMEOUT)
    engine._resources.guards._marks = (DeadMark(),)
    (arena,) = engine._resources.lifetime._arenas
    arena.is_registered = True
    monkeypatch.setattr(device, "unregister_host_memory", refuse)
    with pytest.raises(RuntimeError, match="device-side assert"):
        engine.close()
    assert engine._portal.is_closed
    assert not optimizer._optimizer_step_pre_hooks
    with SyncCheckpointEngine(root) as other:
        assert other.save({"p": parameter}).result(TIMEOUT).step == 2
    engine.close()


# -- other processes ------------------------------------------------------------------------------


def run_python(source: str, root: Path) -> subprocess.CompletedProcess[str]:
    return run_warm(source, str(root), options=(), is_end_tested=True)


EXIT = """
    import sys, torch
    from pathlib import Path
    from aio_ckpt import CheckpointEngine, EngineConfig
    engine = CheckpointEngine(sys.argv[1], EngineConfig(max_in_flight=3))
    for number in (1, 2, 3):
        engine.save({"w": torch.full((1 << 20,), float(number))})
"""


def test_an_interpreter_that_exits_right_after_save_commits_first(root: Path) -> None:
    ended = run_python(EXIT, root)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    with SyncCheckpointEngine(root) as engine:
        assert engine.steps() == [1, 2, 3]
        for step in (1, 2, 3):
            state: Any = engine.read(step)
            assert torch.equal(state["w"], torch.full((1 << 20,), float(step)))


FAILED_LAST_SAVE = """
    import atexit, os, sys, torch
    atexit.register(print, "what Python does at exit is done")
    from aio_ckpt import SyncCheckpointEngine
    engine = SyncCheckpointEngine(sys.argv[1])
    os.makedirs(f"{sys.argv[1]}/step_000000001/in_the_way")
    ticket = engine.save({"w": torch.ones(10)}, step=1)
"""


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("then", "status"),
    [
        ("", 1),
        ("ticket.exception()", 0),
        ("ticket.result()", 1),
        ("engine.close()", 1),
        ("sys.exit(3)", 1),
    ],
)
def test_a_script_whose_last_save_fails_ends_with_1_unless_it_heard_of_the_failure(
    root: Path, then: str, status: int
) -> None:
    ended = run_python(f"{FAILED_LAST_SAVE}    {then}\n", root)
    assert ended.returncode == status
    assert ended.stdout == "what Python does at exit is done\n"
    assert "the save of step 1 failed" in ended.stderr


FORK = """
    import os, sys, torch, warnings
    from aio_ckpt import SyncCheckpointEngine
    from aio_ckpt.errors import EngineClosedError
    warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 warns of forking with threads, as it should
    state = {"w": torch.ones(10)}
    engine = SyncCheckpointEngine(sys.argv[1])
    ticket = engine.save(state)
    pid = os.fork()
    if not pid:
        uses = {
            "save": lambda: engine.save(state), "load": lambda: engine.load(state), "read": engine.read,
            "steps": engine.steps, "close": engine.close, "terminate": engine.terminate, "ready": engine.ready,
            "rollback": lambda: engine.rollback(1),
        }
        for name, use in uses.items():
            try:
                use()
            except EngineClosedError as error:
                print(name, type(error).__name__, "open an engine of its own here" in str(error), flush=True)
        sys.exit(0)  # runs the hooks that a data loader's worker would run
    assert os.waitpid(pid, 0)[1] == 0
    assert ticket.result(30).step == 1
    engine.save(state).result(30)
    engine.close()
"""


def test_a_forked_child_is_refused_everything_and_the_parent_goes_on(root: Path) -> None:
    ended = run_python(FORK, root)
    assert ended.returncode == 0, ended.stderr
    names = ["save", "load", "read", "steps", "close", "terminate", "ready", "rollback"]
    assert ended.stdout.splitlines() == [f"{name} EngineForkedError True" for name in names]
    assert listing(root) == ["step_000000001", "step_000000002"]
