"""Calls of an engine inside another call of it on the same thread: a signal handler's, or a state_dict()'s."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from gated_storage import gated_engine

from aio_ckpt import CheckpointEngine, SyncCheckpointEngine
from aio_ckpt.errors import WrongThreadError

TIMEOUT = 20.0
CALLS: dict[str, Callable[[SyncCheckpointEngine], object]] = {
    "save()": lambda engine: engine.save({"w": torch.ones(1)}, deadline_secs=1),
    "save_file()": lambda engine: engine.save_file({}, engine.root / "x.pt"),
    "prepare()": lambda engine: engine.prepare({"w": torch.ones(1)}),
    "rollback()": lambda engine: engine.rollback(1),
    "delete()": lambda engine: engine.delete(1),
    "clear_cache()": lambda engine: engine.clear_cache(),
}


class Calling:
    """A Stateful value in whose ``state_dict()`` something is called."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call

    def state_dict(self) -> dict[str, Any]:
        self.call()
        return {"v": torch.ones(2)}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@pytest.mark.parametrize("what", CALLS)
def test_a_call_that_would_wait_for_itself_is_refused(tmp_path: Path, what: str) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.save({"w": torch.ones(1)}).result(TIMEOUT)
        for outer in (engine.save, engine.prepare):
            with pytest.raises(WrongThreadError, match=f"{what[:-2]}.. inside another call.*on_preemption"):
                outer({"s": Calling(lambda: CALLS[what](engine))})
        assert engine.save({"w": torch.ones(1)}).result(TIMEOUT) is not None, "the next one works"


async def test_a_deletion_that_is_awaited_inside_a_save_is_refused(tmp_path: Path) -> None:
    """It runs in another thread, which would wait for the save."""
    async with CheckpointEngine(tmp_path) as engine:
        await engine.save({"w": torch.ones(1)})

        def save() -> None:
            engine.save({"s": Calling(lambda: asyncio.run(engine.delete(1, allow_newest=True)))})

        with pytest.raises(WrongThreadError, match=r"delete\(\) inside another call"):
            await asyncio.to_thread(save)
        assert (await engine.steps()) == [1]


def test_a_save_in_a_signal_handler_is_refused_while_another_is_captured(tmp_path: Path) -> None:
    found: list[Exception] = []

    def handler(*_: object) -> None:
        try:
            engine.save({"w": torch.ones(1)})
        except WrongThreadError as error:
            found.append(error)

    before = signal.signal(signal.SIGUSR2, handler)
    try:
        with SyncCheckpointEngine(tmp_path) as engine:
            engine.save({"s": Calling(lambda: signal.raise_signal(signal.SIGUSR2))}).result(TIMEOUT)
            assert len(found) == 1
            assert engine.steps() == [1]
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_save_in_a_signal_handler_is_refused_while_a_step_is_deleted(tmp_path: Path) -> None:
    found: list[Exception] = []
    with ThreadPoolExecutor(1) as pool, gated_engine(tmp_path) as (engine, storage):
        for step in (1, 2):
            engine.save({"w": torch.ones(1)}, step).result(TIMEOUT)
        gate = storage.hold("rename", "step_000000001")

        def handler(*_: object) -> None:
            try:
                engine.save({"w": torch.ones(1)}, deadline_secs=1)
            except WrongThreadError as error:
                found.append(error)
            finally:
                gate.open()

        def signal_once_it_deletes() -> None:
            gate.wait_reached()
            os.kill(os.getpid(), signal.SIGUSR2)

        before = signal.signal(signal.SIGUSR2, handler)
        try:
            signalling = pool.submit(signal_once_it_deletes)
            engine._agreed_changes.delete(1, allow_newest=False)
            signalling.result(TIMEOUT)
        finally:
            signal.signal(signal.SIGUSR2, before)
        assert engine.steps().result() == [2]
    assert ["inside another call" in str(error) for error in found] == [True]


def test_another_engine_may_be_called_inside(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path / "a") as engine, SyncCheckpointEngine(tmp_path / "b") as other:
        state = {"s": Calling(lambda: other.save({"w": torch.ones(1)}).result(TIMEOUT))}
        engine.save(state).result(TIMEOUT)
        assert (engine.steps(), other.steps()) == ([1], [1])
