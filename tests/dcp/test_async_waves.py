"""A state larger than the budget, by ``dcp.save`` and ``dcp.async_save`` with our Writer."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_states import assert_same_state, blank, state_of
from gated_storage import TIMEOUT, GatedStorage

from aio_ckpt import EngineConfig
from aio_ckpt.dcp import Reader, Writer
from aio_ckpt.errors import WriteError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)", "ignore:TypedStorage")

BUDGET = 1 << 20
"""A third of the states here."""
CONFIG = EngineConfig(budget_bytes=BUDGET)


def spoil(state: dict[str, Any]) -> None:
    with torch.no_grad():
        for tensor in state["model"].values():
            tensor.zero_()
    state["names"].clear()


def assert_saved(path: Path, seed: int) -> None:
    target = blank(state_of(seed))
    dcp.load(target, storage_reader=Reader(path))
    assert_same_state(target, state_of(seed))


def saving_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "AsyncCheckpointExecutor" in thread.name]


def test_a_save_takes_a_quarter_of_the_budget_as_its_window(tmp_path: Path) -> None:
    with Writer(tmp_path / "a", config=CONFIG) as writer:
        dcp.save(state_of(1), storage_writer=writer)
        runtime = writer._keep()
        assert runtime.window.stats.arena_bytes <= runtime.window.budget_bytes == BUDGET // 4
        assert runtime.window.budget_bytes + runtime.staging.budget_bytes == BUDGET
    assert_saved(tmp_path / "a", 1)


@pytest.mark.parametrize("is_kept", [False, True])
def test_async_save_returns_when_the_last_wave_is_captured(
    tmp_path: Path, storage: GatedStorage, caplog: pytest.LogCaptureFixture, is_kept: bool
) -> None:
    writer, gate = Writer(tmp_path / "a", config=CONFIG, storage=storage), storage.hold("sync")
    if is_kept:
        writer.__enter__()
    state = state_of(1)
    saving = dcp.async_save(state, storage_writer=writer)
    spoil(state)
    gate.wait_reached()
    assert not saving.done()
    gate.open()
    saving.result(TIMEOUT)
    assert_saved(tmp_path / "a", 1)
    assert "in waves, as budget_bytes holds no copy of them" in caplog.text
    dcp.async_save({"w": torch.ones(3)}, storage_writer=writer, checkpoint_id=tmp_path / "b").result(TIMEOUT)
    assert len([record for record in caplog.records if record.name == "aio_ckpt"]) == 1
    writer.close()


def test_a_write_that_fails_in_a_wave_ends_the_wait_and_fails_the_future(tmp_path: Path, storage: GatedStorage) -> None:
    storage.fail("write", "*", WriteError(28, "full", "x"))
    writer = Writer(tmp_path / "a", config=CONFIG, storage=storage)
    saving = dcp.async_save(state_of(1), storage_writer=writer)
    with pytest.raises(dcp.api.CheckpointException, match="full"):
        saving.result(TIMEOUT)
    dcp.async_save(state_of(2), storage_writer=writer).result(TIMEOUT)
    assert_saved(tmp_path / "a", 2)


class OddPlanner(dcp.DefaultSavePlanner):
    """Fails before the writer is asked for anything."""

    def create_local_plan(self) -> dcp.SavePlan:
        raise ValueError("odd")


def test_a_save_that_fails_before_it_writes_ends_the_wait(tmp_path: Path) -> None:
    saving = dcp.async_save(state_of(1), storage_writer=Writer(tmp_path, config=CONFIG), planner=OddPlanner())
    with pytest.raises(dcp.api.CheckpointException, match="odd"):
        saving.result(TIMEOUT)


def test_nothing_of_a_save_becomes_visible_whose_caller_was_interrupted(tmp_path: Path, storage: GatedStorage) -> None:
    """The caller may change the tensors from then on."""
    gate, main = storage.hold("create_data_file"), threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        gate.wait_reached()
        signal.pthread_kill(main, signal.SIGINT)

    writer = Writer(tmp_path / "a", config=CONFIG, storage=storage)
    with ThreadPoolExecutor(1) as other:
        interrupting = other.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            dcp.async_save(state_of(1), storage_writer=writer)
        interrupting.result(TIMEOUT)
    gate.open()
    for thread in saving_threads():
        thread.join(TIMEOUT)
    assert list((tmp_path / "a").glob("*.distcp")) == []
    assert not (tmp_path / "a" / ".metadata").exists()
    dcp.async_save(state_of(2), storage_writer=writer).result(TIMEOUT)
    assert_saved(tmp_path / "a", 2)
