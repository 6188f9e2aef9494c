"""Preemption by real signals: a flag, handlers that are chained and put back, saves that come first."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from builders import listing, weights
from gated_storage import TIMEOUT, gated_engine
from warm_python import WarmPython

from aio_ckpt import CheckpointEngine, EngineConfig, SyncCheckpointEngine
from aio_ckpt.errors import ConfigError, EngineClosedError, WrongThreadError

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


@pytest.fixture(autouse=True)
def handlers_are_put_back() -> Iterator[None]:
    def current() -> list[Any]:
        return [signal.getsignal(number) for number in SIGNALS]

    before = current()
    yield
    assert current() == before


def send(number: int) -> None:
    """To this process; a handler of the main thread has run when this returns."""
    os.kill(os.getpid(), number)


# -- the flag -------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_sets_the_flag_for_good_and_the_process_goes_on(tmp_path: Path, number: signal.Signals) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        assert not engine.preempted
        engine.on_preemption()
        assert not engine.preempted
        send(number)
        assert engine.preempted
        assert engine.save(weights(1), deadline_secs=TIMEOUT).result(TIMEOUT).step == 1
        assert engine.preempted
    assert engine.preempted, "a loop may look once more after the engine was closed"


async def test_a_signal_inside_a_running_loop_sets_the_flag(tmp_path: Path) -> None:
    async with CheckpointEngine(tmp_path) as engine:
        engine.on_preemption((signal.SIGUSR1,))
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "only what was asked for is handled"
        send(signal.SIGUSR1)
        assert engine.preempted
        await engine.save(weights(1), deadline_secs=TIMEOUT)
        assert (await engine.steps()) == [1]


def test_two_engines_both_hear_of_a_signal_in_whatever_order_they_are_closed(tmp_path: Path) -> None:
    first, second = SyncCheckpointEngine(tmp_path / "model"), SyncCheckpointEngine(tmp_path / "ema")
    for engine in (first, second):
        engine.on_preemption()
        engine.on_preemption((signal.SIGTERM,))  # asked for twice: once is enough
    first.close()
    send(signal.SIGTERM)
    assert second.preempted
    assert not first.preempted, "it was closed before"
    second.close()
    for number in SIGNALS:  # second put first's back, which gives way at the next signal
        assert signal.getsignal(number) is not signal.SIG_DFL
        signal.signal(number, signal.SIG_DFL)


# -- handlers of others ---------------------------------------------------------------------------


def test_a_handler_that_was_there_before_is_called_after_the_flag_was_set_and_put_back(tmp_path: Path) -> None:
    seen: list[tuple[int, bool, bool]] = []

    def theirs(number: int, frame: FrameType | None) -> None:
        seen.append((number, engine.preempted, frame is not None))

    signal.signal(signal.SIGUSR1, theirs)
    try:
        with SyncCheckpointEngine(tmp_path) as engine:
            engine.on_preemption()
            send(signal.SIGUSR1)
            assert seen == [(signal.SIGUSR1, True, True)]
        assert signal.getsignal(signal.SIGUSR1) is theirs
        send(signal.SIGUSR1)
        assert len(seen) == 2
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_a_handler_that_was_installed_later_stays_and_ours_lets_signals_pass_after_close(tmp_path: Path) -> None:
    calls: list[str] = []
    signal.signal(signal.SIGUSR1, lambda *_: calls.append("before"))
    try:
        with SyncCheckpointEngine(tmp_path) as engine:
            engine.on_preemption((signal.SIGUSR1,))
            ours: Any = signal.getsignal(signal.SIGUSR1)
            signal.signal(signal.SIGUSR1, lambda *args: (calls.append("later"), ours(*args)))
        send(signal.SIGUSR1)
        assert calls == ["later", "before"]
        assert not engine.preempted
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


def test_an_ignored_signal_sets_the_flag_and_is_ignored_again_afterwards(tmp_path: Path) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with SyncCheckpointEngine(tmp_path) as engine:
            engine.on_preemption((signal.SIGUSR1,))
            send(signal.SIGUSR1)
            assert engine.preempted
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


# -- wrong use ------------------------------------------------------------------------------------


def test_only_the_main_thread_may_call_on_preemption(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine, ThreadPoolExecutor(1) as pool:
        with pytest.raises(WrongThreadError, match="main thread"):
            pool.submit(engine.on_preemption).result(TIMEOUT)
        engine.on_preemption()


@pytest.mark.parametrize("signals", [(), (0,), (999,), ("SIGTERM",), 15, (signal.SIGTERM, signal.SIGKILL)])
def test_signals_that_cannot_be_handled_are_refused_and_none_is_half_installed(tmp_path: Path, signals: Any) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        with pytest.raises(ConfigError, match="signal"):
            engine.on_preemption(signals)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_closed_engine_installs_nothing(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        pass
    with pytest.raises(EngineClosedError):
        engine.on_preemption()


# -- what comes first from then on ----------------------------------------------------------------


@pytest.mark.parametrize("when_busy", ["skip", "raise"])
def test_the_last_save_is_neither_skipped_nor_refused(tmp_path: Path, when_busy: Any) -> None:
    with gated_engine(tmp_path / "root", when_busy=when_busy) as (engine, storage), ThreadPoolExecutor(1) as pool:
        engine.on_preemption()
        gate = storage.hold("sync", "*.distcp")
        engine.save(weights(1))
        gate.wait_reached()
        send(signal.SIGTERM)
        last = pool.submit(engine.save, weights(2), deadline_secs=TIMEOUT)
        gate.open()
        ticket = last.result(TIMEOUT)
        assert not ticket.skipped
        assert ticket.result(TIMEOUT).step == 2
        assert engine.steps().result() == [1, 2]


def test_retention_deletes_nothing_more_and_the_next_run_catches_up(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path, EngineConfig(keep_last=1)) as engine:
        engine.on_preemption()
        engine.save(weights(1)).result(TIMEOUT)
        send(signal.SIGTERM)
        engine.save(weights(2)).result(TIMEOUT)
    with SyncCheckpointEngine(tmp_path, EngineConfig(keep_last=1)) as engine:
        assert engine.steps() == [1, 2]
        engine.save(weights(3)).result(TIMEOUT)
    with SyncCheckpointEngine(tmp_path) as engine:
        assert engine.steps() == [3]


def test_a_deletion_that_is_under_way_ends_and_no_other_begins(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path / "root") as engine:
        for number in (1, 2, 3):
            engine.save(weights(number)).result(TIMEOUT)
    with gated_engine(tmp_path / "root", keep_last=1) as (engine, storage):
        engine.on_preemption()
        gate = storage.hold("remove_tree", "trash/*")
        engine.save(weights(4)).result(TIMEOUT)
        gate.wait_reached()
        send(signal.SIGTERM)
        gate.open()
        engine.close_blocking()
    kept = ["step_000000004", "trash/step_000000002", "trash/step_000000003"]
    assert listing(tmp_path / "root") == kept, "the next engine deletes them"


# -- real processes -------------------------------------------------------------------------------

TRAINER = """
    import sys, torch
    from aio_ckpt import SyncCheckpointEngine
    state = {"w": torch.zeros(1 << 20)}
    with SyncCheckpointEngine(sys.argv[1]) as engine:
        engine.on_preemption()
        for step in range(1, 1_000_000):
            state["w"].add_(1)
            if step == 2:
                print("training", flush=True)
            if step % 10 == 0:
                engine.save(state, step=step)
            if engine.preempted:
                engine.save(state, step=step + 1, deadline_secs=25).result()
                print(step + 1, flush=True)
                break
"""


@contextlib.contextmanager
def start(source: str, *args: str) -> Iterator[subprocess.Popen[str]]:
    """A child that does not outlive the block."""
    with WarmPython(source, *args, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        try:
            yield child
        finally:
            child.kill()


@pytest.mark.parametrize("number", SIGNALS)
def test_a_preempted_trainer_saves_its_last_step_and_ends_well(tmp_path: Path, number: signal.Signals) -> None:
    with start(TRAINER, str(tmp_path)) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "training\n"
        child.send_signal(number)
        out, err = child.communicate(timeout=60)
    assert (child.returncode, err) == (0, "")
    with SyncCheckpointEngine(tmp_path) as engine:
        assert engine.latest_step() == int(out)
        state: Any = engine.read()
        assert torch.equal(state["w"], torch.full((1 << 20,), float(int(out) - 1)))


FORKING = """
    import os, signal, sys, warnings
    from aio_ckpt import SyncCheckpointEngine
    warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 warns of forking with threads, as it should
    engine = SyncCheckpointEngine(sys.argv[1])
    engine.on_preemption()
"""
"""Begin of a program that forks."""

WORKERS = (
    FORKING
    + """
    ready, tell = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(tell, b"!")  # Python drops a signal that comes while it forks
        while True:
            pass  # a call that blocks could begin between the signal and its handler
    os.read(ready, 1)
    os.kill(pid, signal.SIGTERM)
    status = os.waitpid(pid, 0)[1]
    print(os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM, engine.preempted)
    engine.close()
"""
)


def test_forked_workers_still_die_of_the_signal(tmp_path: Path) -> None:
    """Data loaders and pools end their workers by SIGTERM, and would wait for ever for one that shrugs it off."""
    with start(WORKERS, str(tmp_path)) as child:
        out, err = child.communicate(timeout=60)
    assert (child.returncode, out, err) == (0, "True False\n", "")


OTHER_SIGNAL = (
    FORKING
    + """
    ready, tell = os.pipe()
    pid = os.fork()
    if not pid:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.write(tell, b"preempted" if engine.preempted else b"alive")
        os._exit(0)
    print(os.read(ready, 100).decode(), os.waitpid(pid, 0)[1])
    engine.close()
"""
)


def test_forked_workers_live_on_if_the_scheduler_signals_all_processes(tmp_path: Path) -> None:
    """Else the trainer, which has to save now, would fail for want of its next batch."""
    with start(OTHER_SIGNAL, str(tmp_path)) as child:
        out, err = child.communicate(timeout=60)
    assert (child.returncode, out, err) == (0, "alive 0\n", "")


CLOSED_ELSEWHERE = """
    import os, signal, sys
    from concurrent.futures import ThreadPoolExecutor
    from aio_ckpt import SyncCheckpointEngine
    engine = SyncCheckpointEngine(sys.argv[1])
    engine.on_preemption()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(engine.close).result(30)
    print("closed", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    print("survived", flush=True)
"""


def test_after_a_close_in_another_thread_the_signal_ends_the_process_again(tmp_path: Path) -> None:
    with start(CLOSED_ELSEWHERE, str(tmp_path)) as child:
        out, err = child.communicate(timeout=60)
    assert (child.returncode, out, err) == (-signal.SIGTERM, "closed\n", "")


CLOSED_AND_FORKED = (
    FORKING
    + """
    from concurrent.futures import ThreadPoolExecutor
    with ThreadPoolExecutor(1) as pool:
        pool.submit(engine.close).result(30)
    pid = os.fork()
    if not pid:
        os.kill(os.getpid(), signal.SIGUSR1)
        os._exit(0)
    print(os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGUSR1)
"""
)


def test_after_a_close_a_signal_ends_a_forked_child_again(tmp_path: Path) -> None:
    with start(CLOSED_AND_FORKED, str(tmp_path)) as child:
        out, err = child.communicate(timeout=60)
    assert (child.returncode, out, err) == (0, "True\n", "")
