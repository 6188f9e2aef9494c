"""An engine that was dropped without ``close()``, as when a cell of a notebook is run again: it closes itself."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import broken, weights
from gated_storage import TIMEOUT, GatedStorage
from system_limits import names_of_threads
from waits import until
from warm_python import run_warm

from aio_ckpt import CheckpointEngine, SyncCheckpointEngine
from aio_ckpt.engine import engine as engine_module
from aio_ckpt.errors import RootError, SystemLimitError, WriteError
from aio_ckpt.runtime.portal import Executor

DROPPED = "an engine was dropped without close()"


def test_an_engine_that_nobody_refers_to_is_gone_at_once_whatever_it_did(root: Path) -> None:
    gc.collect()
    gc.disable()
    try:
        engine = SyncCheckpointEngine(root)
        engine.save(weights(1)).result(TIMEOUT)
        engine.save_file(weights(1), root.parent / "f.pt").result(TIMEOUT)
        engine.load(weights(0))
        engine.read()
        engine.protect(1)
        engine.stats()
        gone = weakref.ref(engine)
        del engine
        assert gone() is None, "no part may refer to its engine"
    finally:
        gc.enable()


def test_a_ticket_whose_failure_was_raised_keeps_no_engine(root: Path) -> None:
    """The cell of a notebook whose save failed is run again, with the ticket still there."""
    executor = Executor("broken", 4)
    storage = GatedStorage(executor)
    engine = SyncCheckpointEngine(root, storage=storage)
    failure = broken()
    failure.strerror += ": buy another one"  # as a full disk's remedy comes
    storage.fail("rename", "pending/*", failure)
    ticket = engine.save(weights(1))
    until(ticket.committed.done)
    with pytest.raises(WriteError, match="the disk is gone: buy another one: '/x'") as caught:
        engine.save(weights(2))
    assert "which nobody awaited" in caught.value.__notes__[0]
    del caught
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None, "the ticket's error keeps the frame of save()"
    assert not hasattr(ticket.exception(), "__notes__")
    assert executor.close(TIMEOUT)


def test_an_engine_that_has_only_read_is_dropped_without_a_word(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with SyncCheckpointEngine(root) as engine:
        engine.save(weights(1)).result(TIMEOUT)
    before = names_of_threads()
    assert SyncCheckpointEngine(root).steps() == [1]
    until(lambda: names_of_threads() <= before)
    assert DROPPED not in caplog.text


def test_a_cell_that_is_run_again_saves_and_leaves_no_thread(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = names_of_threads()
    for number in range(1, 5):
        engine = SyncCheckpointEngine(root)  # the one before is dropped here
        assert engine.save(weights(number)).result(TIMEOUT).step == number
    assert caplog.text.count(DROPPED) == 3
    engine.close()
    until(lambda: names_of_threads() <= before)
    assert caplog.text.count(DROPPED) == 3


def test_one_in_a_cycle_is_found_when_another_engine_wants_its_root(root: Path) -> None:
    gc.collect()
    gc.disable()  # only the engine that is refused looks for it
    try:
        cycle: list[object] = [SyncCheckpointEngine(root)]
        cycle[0].save(weights(1)).result(TIMEOUT)  # type: ignore[attr-defined]
        cycle.append(cycle)
        del cycle
        with SyncCheckpointEngine(root) as engine:
            assert engine.save(weights(2)).result(TIMEOUT).step == 2
    finally:
        gc.enable()


def test_its_pending_save_is_committed_before_another_engine_gets_the_root(root: Path) -> None:
    executor = Executor("gated", 4)
    storage = GatedStorage(executor)
    gate = storage.hold("rename", "pending/*")
    engine = SyncCheckpointEngine(root, storage=storage)
    ticket = engine.save(weights(1))
    gate.wait_reached()
    del engine
    with SyncCheckpointEngine(root) as other:
        waiting: list[int] = []
        thread = threading.Thread(target=lambda: waiting.append(other.save(weights(2)).result(TIMEOUT).step))
        thread.start()
        assert not ticket.committed.done()
        gate.open()
        assert ticket.result(TIMEOUT).step == 1
        thread.join(TIMEOUT)
        assert waiting == [2]
    assert executor.close(TIMEOUT)


def test_one_that_somebody_refers_to_keeps_its_root(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine, SyncCheckpointEngine(root) as other:
        engine.save(weights(1)).result(TIMEOUT)
        with pytest.raises(RootError, match="close it first\\. One that nobody refers to any more closes itself"):
            other.save(weights(2))


async def test_a_call_of_the_async_engine_keeps_it_open_until_its_end(root: Path) -> None:
    assert (await CheckpointEngine(root).save(weights(1))).step == 1
    state = weights(0)
    assert (await CheckpointEngine(root).load(state)).step == 1
    assert all(torch.equal(value, weights(1)[name]) for name, value in state.items())
    assert await CheckpointEngine(root).steps() == [1]
    assert (await CheckpointEngine(root).read()).keys() == state.keys()


def test_one_that_was_closed_is_dropped_in_silence(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    for end in (SyncCheckpointEngine.close, SyncCheckpointEngine.terminate):
        engine = SyncCheckpointEngine(root)
        end(engine)
        del engine
    gc.collect()
    assert not caplog.records


@pytest.mark.parametrize(("broken", "status"), [(False, 0), (True, 1)])
def test_a_script_that_drops_it_at_its_end_commits_and_tells_a_failure(root: Path, broken: bool, status: int) -> None:
    script = """
import errno, sys, torch
from aio_ckpt import SyncCheckpointEngine
from aio_ckpt.errors import WriteError
from aio_ckpt.runtime.portal import Executor
from gated_storage import GatedStorage

def main():
    storage = GatedStorage(Executor("gated", 4))
    engine = SyncCheckpointEngine(sys.argv[1], storage=storage)
    engine.save({"w": torch.ones(3)}).result()
    if sys.argv[2] == "True":
        storage.fail("rename", "pending/*", WriteError(errno.EIO, "broken"))
    engine.save({"w": torch.ones(3)})

main()
"""
    child = run_warm(script, str(root), str(broken))
    assert child.returncode == status, child.stderr
    assert DROPPED in child.stderr
    assert (root / "step_000000002").is_dir() is not broken


def test_a_thread_that_the_system_refuses_is_asked_for_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    start = engine_module.start_beside

    def refused_once(work: Callable[..., None], *arguments: Any) -> Future[None]:
        asked.append(work)
        if len(asked) == 1:
            raise SystemLimitError("no thread")
        return start(work, *arguments)

    monkeypatch.setattr(engine_module, "start_beside", refused_once)
    monkeypatch.setattr(engine_module, "_AGAIN_SECS", 0.01)
    engine = SyncCheckpointEngine(root)
    engine.save(weights(1)).result(TIMEOUT)
    del engine
    with SyncCheckpointEngine(root) as other:
        assert other.save(weights(2)).result(TIMEOUT).step == 2
    assert len(asked) == 2


def test_the_interpreter_waits_until_it_is_closed(root: Path) -> None:
    script = """
import sys, threading, torch
from aio_ckpt import SyncCheckpointEngine
from aio_ckpt.memory.arena_lifetimes import LifetimeManager

close, closing = LifetimeManager.close, threading.Event()

def slow_close(self):
    closing.set()
    threading.Event().wait(0.5)
    close(self)
    print("closed", flush=True)

LifetimeManager.close = slow_close
SyncCheckpointEngine(sys.argv[1]).save({"w": torch.ones(3)})
closing.wait(20)
"""
    child = run_warm(script, str(root))
    assert (child.returncode, child.stdout.strip()) == (0, "closed"), child.stderr


def test_the_exit_lifts_its_write_rate_limit(root: Path) -> None:
    script = """
import atexit, sys, time, torch
from aio_ckpt import EngineConfig, SyncCheckpointEngine

limit = EngineConfig(max_write_bytes_per_sec=1 << 20)
engine = SyncCheckpointEngine(sys.argv[1], limit)
engine.save({"w": torch.ones(40 << 20)})  # after the first chunk, it has to wait for more than a minute
hooks = atexit._ncallbacks()
del engine
while atexit._ncallbacks() == hooks:
    time.sleep(0.001)  # until the exit waits for the thread that closes the engine
"""
    child = run_warm(script, str(root), timeout=60)
    assert child.returncode == 0, child.stderr
    assert (root / "step_000000001").is_dir()


def test_a_fork_that_leaves_or_drops_it_says_nothing(root: Path) -> None:
    found = run_warm(
        """
        import os, sys
        from aio_ckpt import SyncCheckpointEngine

        def drop():
            engine = SyncCheckpointEngine(sys.argv[1])
            if os.fork() == 0:
                sys.exit(0)
            assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
            engine.close()

        drop()
        with SyncCheckpointEngine(sys.argv[1]):
            if os.fork() == 0:
                sys.exit(3)
            assert os.waitstatus_to_exitcode(os.wait()[1]) == 3
        """,
        str(root),
    )
    assert (found.returncode, found.stderr) == (0, "")
