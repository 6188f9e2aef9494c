"""How a trainer's process ends: what is pending is drained or its steps are named. Real children, real signals."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from slow import slow
from warm_python import WarmPython, run_warm

from aio_ckpt import SyncCheckpointEngine

PREAMBLE = """
    import asyncio, sys, threading, time, torch
    from aio_ckpt import CheckpointEngine, EngineConfig, SyncCheckpointEngine
    from aio_ckpt.runtime.portal import Executor
    from gated_storage import GatedStorage

    storage = GatedStorage(Executor("gated", 4))

    def engine_of(engine_class, **config):
        return engine_class(sys.argv[1], EngineConfig(drain_timeout_secs=float(sys.argv[2]), **config), storage=storage)

    def state(number, count=1):
        return {str(i): torch.full((1 << 20,), float(number)) for i in range(count)}

    def say_when_held(gate):
        threading.Thread(target=lambda: (gate.wait_reached(), print("held", flush=True)), daemon=True).start()
"""

ENDS = {
    "sys.exit in a thread": """
        engine = engine_of(SyncCheckpointEngine, max_in_flight=2)
        engine.save(state(1)).result()
        storage.slow("sync", secs=0.3)
        def work():
            engine.save(state(2))
            sys.exit(3)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    """,
    "an exception": """
        engine = engine_of(SyncCheckpointEngine)
        engine.save(state(1)).result()
        storage.slow("sync", secs=0.3)
        engine.save(state(2))
        raise ValueError("the trainer's own")
    """,
}

WAITS = {
    "ticket.result()": """
        engine = engine_of(SyncCheckpointEngine)
        engine.save(state(1)).result()
        say_when_held(storage.hold("sync", "*.distcp"))
        engine.save(state(2)).result()
    """,
    "close()": """
        engine = engine_of(SyncCheckpointEngine)
        engine.save(state(1)).result()
        say_when_held(storage.hold("sync", "*.distcp"))
        engine.save(state(2))
        engine.close()
    """,
    "save() for room": """
        engine = engine_of(SyncCheckpointEngine)
        engine.save(state(1)).result()
        say_when_held(storage.hold("sync", "*.distcp"))
        engine.save(state(2))
        engine.save(state(3))
    """,
    "await ticket": """
        async def train():
            engine = engine_of(CheckpointEngine)
            await engine.save(state(1))
            say_when_held(storage.hold("sync", "*.distcp"))
            await engine.save(state(2))
        asyncio.run(train())
    """,
    "interpreter exit": """
        engine = engine_of(SyncCheckpointEngine)
        engine.save(state(1)).result()
        say_when_held(storage.hold("sync", "*.distcp"))
        engine.save(state(2))
    """,
}

CAPTURE = """
    engine = engine_of(SyncCheckpointEngine, budget_bytes=20 << 20)
    engine.save(state(1)).result()
    say_when_held(storage.hold("write", "*.distcp"))
    engine.save(state(2, count=5))  # a ring: the last chunk waits until the first was written
"""


@contextlib.contextmanager
def trainer(source: str, root: Path, *, drain_secs: float) -> Iterator[subprocess.Popen[str]]:
    """A child that does not outlive the block."""
    whole = textwrap.dedent(PREAMBLE) + textwrap.dedent(source)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with WarmPython(whole, str(root), str(drain_secs), is_end_tested=True, **streams) as child:
        try:
            yield child
        finally:
            child.kill()


def interrupt_when_held(child: subprocess.Popen[str]) -> str:
    """Press Ctrl-C once the gate is held, and return what the child has written to stderr when it ends.

    CPython forgets a signal that comes while its main thread is about to block, until that thread wakes. So whoever
    sees no KeyboardInterrupt presses Ctrl-C again, as people do.
    """
    assert child.stdout is not None
    assert child.stdout.readline() == "held\n"
    for _ in range(10):
        child.send_signal(signal.SIGINT)
        try:
            return child.communicate(timeout=5)[1]
        except subprocess.TimeoutExpired as still:
            if b"KeyboardInterrupt" in (still.stderr or b""):
                break
    return child.communicate(timeout=50)[1]


def steps(root: Path) -> list[int]:
    with SyncCheckpointEngine(root) as engine:
        return engine.steps()


@pytest.mark.sampled
@pytest.mark.parametrize(("how", "code"), [("sys.exit in a thread", 0), ("an exception", 1)])
def test_what_is_pending_is_committed_before_the_process_ends(tmp_path: Path, how: str, code: int) -> None:
    with trainer(ENDS[how], tmp_path, drain_secs=60) as child:
        _, err = child.communicate(timeout=90)
    assert child.returncode == code, err
    assert "not committed" not in err
    assert ("the trainer's own" in err) is (code == 1)
    assert steps(tmp_path) == [1, 2]


@pytest.mark.sampled
@pytest.mark.parametrize("waits_in", WAITS)
def test_ctrl_c_ends_the_wait_and_what_a_stuck_disk_keeps_is_named(tmp_path: Path, waits_in: str) -> None:
    drain_secs = 60.0 if waits_in == "interpreter exit" else 0.2  # there the wait itself is what Ctrl-C ends
    with trainer(WAITS[waits_in], tmp_path, drain_secs=drain_secs) as child:
        err = interrupt_when_held(child)
    assert "KeyboardInterrupt" in err
    assert "steps [2] were not committed" in err
    assert steps(tmp_path) == [1]


def test_ctrl_c_inside_save_leaves_nothing_of_that_save_and_the_process_ends(tmp_path: Path) -> None:
    with trainer(CAPTURE, tmp_path, drain_secs=0.2) as child:
        err = interrupt_when_held(child)
    assert "KeyboardInterrupt" in err
    assert "not committed" not in err, "it was raised to the caller, who knows"
    assert child.returncode in (1, -signal.SIGINT)
    assert steps(tmp_path) == [1]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".pending")] == []


BESIDE = {
    "a thread that the interpreter joins, and that saves": """
        engine = engine_of(SyncCheckpointEngine, max_in_flight=2)
        engine.save(state(1)).result()
        storage.slow("sync", secs=0.3)
        threading.Thread(target=lambda: (threading.main_thread().join(), engine.save(state(2)))).start()
    """,
    "an executor's thread that waits for the save": """
        from concurrent.futures import ThreadPoolExecutor
        engine = engine_of(SyncCheckpointEngine)
        engine.save(state(1)).result()
        storage.slow("sync", secs=0.3)
        ThreadPoolExecutor(1).submit(lambda: print(engine.save(state(2)).result().step, flush=True))
    """,
    "the workers of a data loader": """
        from torch.utils.data import DataLoader
        batches = iter(DataLoader(list(range(1000)), num_workers=2, persistent_workers=True))
        next(batches)
        engine = engine_of(SyncCheckpointEngine)
        engine.save(state(1)).result()
        storage.slow("sync", secs=0.3)
        engine.save(state(2))
    """,
    "a handler of its own": """
        import atexit
        engine = engine_of(SyncCheckpointEngine)
        engine.save(state(1)).result()
        storage.slow("sync", secs=0.3)
        atexit.register(lambda: engine.save(state(2)))
    """,
}


@pytest.mark.parametrize("what", [name if "loader" in name else slow(name) for name in BESIDE])
def test_what_is_pending_is_committed_beside_what_else_the_exit_ends(tmp_path: Path, what: str) -> None:
    with trainer(BESIDE[what], tmp_path, drain_secs=60) as child:
        _, err = child.communicate(timeout=90)
    assert (child.returncode, err) == (0, "")
    assert steps(tmp_path) == [1, 2]


STUCK_THREAD = """
    from aio_ckpt.engine import engine as module
    module.STOP_SECS = 1.0
    engine = engine_of(SyncCheckpointEngine)
    engine.save(state(1)).result()
    engine._portal.executor.submit(threading.Event().wait)
    say_when_held(storage.hold("sync", "*.distcp"))
    engine.save(state(2))
"""


def test_a_thread_that_never_ends_does_not_keep_the_process(tmp_path: Path) -> None:
    with trainer(STUCK_THREAD, tmp_path, drain_secs=0.2) as child:
        _, err = child.communicate(timeout=60)
    assert child.returncode == 1, err  # step 2 is lost
    assert "steps [2] were not committed" in err
    assert steps(tmp_path) == [1]


IN_A_CHILD = """
    import multiprocessing, sys, torch
    from pathlib import Path
    from aio_ckpt import SyncCheckpointEngine
    from aio_ckpt.runtime.portal import Executor
    from gated_storage import GatedStorage

    def train():
        storage = GatedStorage(Executor("gated", 4))
        engine = SyncCheckpointEngine(sys.argv[1], storage=storage)
        engine.save({"w": torch.ones(9)}).result()
        storage.slow("sync", secs=0.3)
        engine.save({"w": torch.ones(9)})

    child = multiprocessing.get_context("fork").Process(target=train)
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""


def test_a_trainer_that_multiprocessing_forked_is_drained(tmp_path: Path) -> None:
    assert run_warm(IN_A_CHILD, str(tmp_path), is_end_tested=True).returncode == 0
    assert steps(tmp_path) == [1, 2]
