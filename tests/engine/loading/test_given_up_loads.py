"""A load that is given up: whoever gave up may fill the template by other means at once."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from gated_storage import TIMEOUT

import aio_ckpt
from aio_ckpt import CheckpointEngine, SyncCheckpointEngine
from aio_ckpt.errors import TemplateMismatchError
from aio_ckpt.runtime import futures
from aio_ckpt.storage import data_file as datafile
from aio_ckpt.ticket import Milestone

ELEMENTS = 1000


@dataclass(frozen=True)
class HeldRead:
    """The next read of a data file, held in its thread."""

    begun: threading.Event = field(default_factory=threading.Event)
    goes_on: threading.Event = field(default_factory=threading.Event)


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HeldRead:
    """A checkpoint of ones whose first read is held."""
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.save({"w": torch.ones(ELEMENTS), "x": 1}).result(TIMEOUT)
    held, read = HeldRead(), datafile.ReadFile._read

    def reached(*arguments: Any) -> int:
        held.begun.set()
        assert held.goes_on.wait(TIMEOUT)
        return read(*arguments)

    monkeypatch.setattr(datafile.ReadFile, "_read", reached)
    return held


@pytest.fixture(params=[KeyboardInterrupt, SystemExit])
def raised(request: pytest.FixtureRequest) -> Iterator[type[BaseException]]:
    """What the handler of SIGINT raises: Ctrl-C's own, or that of ``sys.exit()``, as people write for SIGTERM."""

    def handle(*_: object) -> None:
        raise request.param

    before = signal.signal(signal.SIGINT, handle)
    yield request.param
    signal.signal(signal.SIGINT, before)


def empty_state() -> dict[str, Any]:
    return {"w": torch.zeros(ELEMENTS), "x": 0}


def check_is_empty(state: dict[str, Any]) -> None:
    assert not state["w"].any()
    assert state["x"] == 0


def check_interrupted(
    engine: SyncCheckpointEngine,
    state: dict[str, Any],
    interrupt: Callable[[], None],
    held: HeldRead,
    raised: type[BaseException],
) -> None:
    """The load that ``interrupt`` ends returns only once its read went on."""
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(raised):
        engine.load(state)
    assert held.goes_on.is_set()
    thread.join(TIMEOUT)


async def test_a_cancelled_load_fills_nothing_after_it_returned(tmp_path: Path, held: HeldRead) -> None:
    state, other = empty_state(), empty_state()
    async with CheckpointEngine(tmp_path) as engine:
        load = asyncio.ensure_future(engine.load(state))
        await asyncio.to_thread(held.begun.wait, TIMEOUT)
        load.cancel()
        for _ in range(10):  # turns of this loop, in which a load that does not wait for its threads would end
            await asyncio.sleep(0)
            load.cancel()  # as a cancel scope of anyio does
        assert not load.done()
        held.goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await load
        state["w"].zero_()
        state["x"] = 0
        assert (await engine.load(other)).step == 1  # by the same threads: what they still had to do is done
        check_is_empty(state)
        assert (await engine.load(state)).step == 1
        assert bool(state["w"].all())


def test_a_second_signal_does_not_leave_a_load_behind(
    tmp_path: Path, held: HeldRead, monkeypatch: pytest.MonkeyPatch, raised: type[BaseException]
) -> None:
    state, waits, wait = empty_state(), list[float | None](), Milestone._wait

    def interrupted(milestone: Milestone[Any], timeout: float | None) -> None:
        waits.append(timeout)
        if len(waits) == 2:
            raise raised
        if len(waits) > 2:
            held.goes_on.set()
        wait(milestone, timeout)

    def interrupt() -> None:
        held.begun.wait(TIMEOUT)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    monkeypatch.setattr(Milestone, "_wait", interrupted)
    with SyncCheckpointEngine(tmp_path) as engine:
        check_interrupted(engine, state, interrupt, held, raised)


def test_a_signal_ends_a_load_which_fills_nothing_afterwards(
    tmp_path: Path, held: HeldRead, monkeypatch: pytest.MonkeyPatch, raised: type[BaseException]
) -> None:
    state, other = empty_state(), empty_state()
    heard, cancel = threading.Event(), futures._cancel

    def hear(*arguments: Any) -> None:
        cancel(*arguments)
        heard.set()

    monkeypatch.setattr(futures, "_cancel", hear)

    def interrupt() -> None:
        held.begun.wait(TIMEOUT)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        if heard.wait(TIMEOUT):  # else the load has returned and its thread is still held
            held.goes_on.set()

    with SyncCheckpointEngine(tmp_path) as engine:
        check_interrupted(engine, state, interrupt, held, raised)
        state["w"].zero_()
        state["x"] = 0
        assert engine.load(other).step == 1
        check_is_empty(state)
        assert engine.load(state).step == 1
        assert state["x"] == 1


async def of_async_engine(root: Path, state: dict[str, Any]) -> None:
    with contextlib.suppress(TemplateMismatchError):  # asyncio.run() itself keeps the frames of an error
        async with CheckpointEngine(root) as engine:
            await engine.load(state)


def of_sync_engine(root: Path, state: dict[str, Any]) -> None:
    with SyncCheckpointEngine(root) as engine:
        engine.load(state)


@pytest.mark.parametrize(
    "load",
    [
        of_sync_engine,
        lambda root, state: asyncio.run(of_async_engine(root, state)),
        lambda root, state: aio_ckpt.load(root / "step_000000001", state),
    ],
    ids=["sync", "async", "without an engine"],
)
def test_a_load_that_failed_keeps_no_tensor_of_its_template(
    tmp_path: Path, load: Callable[[Path, dict[str, Any]], None]
) -> None:
    """Not until the garbage collector runs, either: it may be a model on a GPU, of which the next one has no room."""
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.save({"w": torch.ones(3)}, step=1).result()

    def fail() -> weakref.ref[torch.Tensor]:
        tensor = torch.zeros(4)
        with contextlib.suppress(TemplateMismatchError):
            load(tmp_path, {"w": tensor})
        return weakref.ref(tensor)

    gc.disable()
    try:
        assert fail()() is None
    finally:
        gc.enable()
