"""A load or read of the engine that saves waits for the pending saves that change what it finds."""

from __future__ import annotations

import asyncio
import errno
import signal
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import weights
from gated_storage import TIMEOUT, gated_engine
from log_lines import early_lines

from aio_ckpt import SyncCheckpointEngine
from aio_ckpt.engine import capture_job
from aio_ckpt.errors import CheckpointNotFoundError, WriteError, WrongThreadError

PLAIN: dict[str, Any] = {"strict": False, "allow_missing": False, "fallback": True}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.mark.parametrize("step", [None, 2])
def test_a_load_or_read_of_the_engine_finds_a_save_that_was_pending(root: Path, step: int | None) -> None:
    with gated_engine(root, max_in_flight=2) as (engine, storage):
        engine.save(weights(1), step=1).result(TIMEOUT)
        gate = storage.hold("rename", "pending/*")
        engine.save(weights(2), step=2)
        gate.wait_reached()
        loading = engine.load(template := weights(0), step, **PLAIN)
        reading = engine.read(step, only=None)
        assert not any(waiting.done() for waiting in (loading, reading))
        gate.open()
        assert loading.result(TIMEOUT).step == 2
        assert (float(template["w"][0]), float(reading.result(TIMEOUT)["w"][0])) == (2, 2)


def test_a_load_waits_for_a_pending_step_that_it_names_by_its_path(root: Path) -> None:
    with gated_engine(root, max_in_flight=2) as (engine, storage):
        gate = storage.hold("rename", "pending/*")
        engine.save(weights(2), step=2)
        gate.wait_reached()
        loading = engine.load(template := weights(0), None, path=root / "step_000000002", **PLAIN)
        gate.open()
        assert loading.result(TIMEOUT).step == 2
        assert float(template["w"][0]) == 2


def test_a_load_of_a_committed_step_waits_for_no_pending_one(root: Path) -> None:
    with gated_engine(root, max_in_flight=2) as (engine, storage):
        engine.save(weights(1), step=1).result(TIMEOUT)
        gate = storage.hold("rename", "pending/*")
        engine.save(weights(2), step=2)
        gate.wait_reached()
        assert engine.load(weights(0), 1, **PLAIN).result(TIMEOUT).step == 1
        assert float(engine.read(1, only=None).result(TIMEOUT)["w"][0]) == 1


def test_a_pending_save_that_fails_fails_no_load_and_is_raised_by_the_next_save(root: Path) -> None:
    with gated_engine(root, max_in_flight=2) as (engine, storage):
        engine.save(weights(1), step=1).result(TIMEOUT)
        gate = storage.hold("rename", "pending/*")
        storage.fail("rename", "pending/*", error := WriteError(errno.EIO, "the disk is gone", "x"))
        engine.save(weights(2), step=2)
        gate.wait_reached()
        loading, named = (engine.load(weights(0), step, **PLAIN) for step in (None, 2))
        gate.open()
        assert loading.result(TIMEOUT).step == 1
        with pytest.raises(CheckpointNotFoundError, match="no committed checkpoint of step 2"):
            named.result(TIMEOUT)
        with pytest.raises(WriteError) as caught:
            engine.save(weights(3), step=3)
        assert str(caught.value) == str(error)


def test_a_load_that_waits_for_a_save_is_told_of(root: Path) -> None:
    with early_lines() as lines, gated_engine(root, max_in_flight=2) as (engine, storage):
        gate = storage.hold("rename", "pending/*")
        engine.save(weights(1), step=1)
        gate.wait_reached()
        loading = engine.load(weights(0), None, **PLAIN)
        lines.wait_for(r"load\(\) has waited \d+ s for the save of step 1, which is .*")
        reading = engine.read(None, only=None)
        lines.wait_for(r"read\(\) has waited \d+ s for the save of step 1, which is .*")
        gate.open()
        assert loading.result(TIMEOUT).step == 1
        reading.result(TIMEOUT)


async def test_a_load_that_is_given_up_waits_for_no_save(root: Path) -> None:
    with gated_engine(root, max_in_flight=2) as (engine, storage):
        gate = storage.hold("rename", "pending/*")
        ticket = engine.save(weights(1), step=1)
        await asyncio.to_thread(gate.wait_reached)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await engine.load(template := weights(0))
        assert not template["w"].any()
        assert not ticket.committed.done()
        gate.open()
        assert (await ticket) is not None


def test_a_load_inside_the_capture_that_it_would_wait_for_is_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal handler that loads, for one."""
    found: list[Exception] = []
    capture = capture_job.capture

    def captured(*arguments: Any, **more: Any) -> Any:
        signal.raise_signal(signal.SIGUSR2)
        return capture(*arguments, **more)

    def handler(*_: object) -> None:
        for call in (lambda: engine.load({"w": torch.zeros(1)}), lambda: engine.read()):
            try:
                call()
            except WrongThreadError as error:
                found.append(error)

    before = signal.signal(signal.SIGUSR2, handler)
    try:
        monkeypatch.setattr(capture_job, "capture", captured)
        with SyncCheckpointEngine(root) as engine:
            engine.save({"w": torch.ones(1)}).result(TIMEOUT)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert [str(error).partition(" of")[0] for error in found] == [
        "load() inside another call",
        "read() inside another call",
    ]


def test_loads_that_wait_for_different_saves_end_in_any_order(root: Path) -> None:
    with gated_engine(root, max_in_flight=3) as (engine, storage):
        engine.save(weights(1), step=1).result(TIMEOUT)
        gate = storage.hold("rename", "pending/*")
        engine.save(weights(2), step=2)
        gate.wait_reached()
        first: Future[Any] = engine.load(weights(0), None, **PLAIN)
        assert engine.load(weights(0), 1, **PLAIN).result(TIMEOUT).step == 1
        gate.open()
        assert first.result(TIMEOUT).step == 2
