"""A load that is given up: whoever gave up may fill the template by other means at once."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gated_storage import TIMEOUT

from aio_ckpt import CheckpointEngine, SyncCheckpointEngine, datafile

ELEMENTS = 1000


@pytest.fixture
def slow_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """A checkpoint of ones; set once a thread of a load is about to read, which goes on a moment later."""
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.save({"w": torch.ones(ELEMENTS), "x": 1}).result(TIMEOUT)
    begun, read = threading.Event(), datafile._read_fully

    def slowly(*arguments):
        begun.set()
        time.sleep(0.3)
        return read(*arguments)

    monkeypatch.setattr(datafile, "_read_fully", slowly)
    return begun


def check_is_let_alone(state: dict[str, object], wait: Callable[[], object]) -> None:
    state["w"].zero_()
    state["x"] = 0
    wait()
    assert not state["w"].any()
    assert state["x"] == 0


async def test_a_cancelled_load_fills_nothing_after_it_returned(tmp_path: Path, slow_read: threading.Event) -> None:
    state = {"w": torch.zeros(ELEMENTS), "x": 0}
    async with CheckpointEngine(tmp_path) as engine:
        load = asyncio.ensure_future(engine.load(state))
        await asyncio.to_thread(slow_read.wait, TIMEOUT)
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
        check_is_let_alone(state, lambda: time.sleep(0.6))
        assert (await engine.load(state)).step == 1
        assert bool(state["w"].all())


def test_ctrl_c_ends_a_load_which_fills_nothing_afterwards(tmp_path: Path, slow_read: threading.Event) -> None:
    state = {"w": torch.zeros(ELEMENTS), "x": 0}

    def interrupt() -> None:
        slow_read.wait(TIMEOUT)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    with SyncCheckpointEngine(tmp_path) as engine:
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            engine.load(state)
        thread.join(TIMEOUT)
        check_is_let_alone(state, lambda: time.sleep(0.6))
        assert engine.load(state).step == 1
        assert state["x"] == 1
