"""``dcp.save``, ``dcp.load`` on our Writer and Reader, in one process: beside stock, with faults, deaths and leaks."""

from __future__ import annotations

import errno
import io
import os
import pickle
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_states import Flip, assert_same_state, blank, state_of
from gated_storage import TIMEOUT, Call, GatedStorage
from rank_processes import ranks
from torch.distributed.checkpoint._extension import ExtensionRegistry
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import SerializationFormat

from aio_ckpt import CheckpointEngine, EngineConfig, SyncCheckpointEngine
from aio_ckpt.dcp import Reader, Writer, recover
from aio_ckpt.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    PlanChangedError,
    StallError,
    WriteError,
)
from aio_ckpt.portal import Executor
from aio_ckpt.storage import LocalStorage, ReadFile

T = TypeVar("T")
pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is (disabled|unavailable)", "ignore:Detected an existing checkpoint"
)


@pytest.fixture
def storage() -> Iterator[GatedStorage]:
    executor = Executor("test", 6)
    gated = GatedStorage(executor)
    yield gated
    gated.open_gates()
    assert executor.close(TIMEOUT)


def save(state: dict[str, Any], path: Path, **arguments: Any) -> None:
    dcp.save(state, storage_writer=Writer(path, **arguments))


def save_stock(state: dict[str, Any], path: Path) -> None:
    dcp.save(state, checkpoint_id=path)


def load(state: dict[str, Any], path: Path, **arguments: Any) -> dict[str, Any]:
    """What our reader reads into a blank state like ``state``."""
    target = blank(state)
    dcp.load(target, storage_reader=Reader(path, **arguments))
    return target


def load_stock(state: dict[str, Any], path: Path) -> dict[str, Any]:
    target = blank(state)
    dcp.load(target, checkpoint_id=path)
    return target


def names_in(path: Path) -> set[str]:
    return {entry.name for entry in path.iterdir()}


def assert_holds(path: Path, state: dict[str, Any]) -> None:
    """Both readers find this very state."""
    assert_same_state(load(state, path), state)
    assert_same_state(load_stock(state, path), state)


# -- beside stock ---------------------------------------------------------------------------------


def test_what_our_writer_saves_both_readers_load_bit_for_bit(tmp_path: Path) -> None:
    state = state_of(1)
    save(state, tmp_path / "a")
    assert_holds(tmp_path / "a", state)


def test_what_stock_saves_our_reader_loads_bit_for_bit(tmp_path: Path) -> None:
    state = state_of(2)
    save_stock(state, tmp_path / "a")
    assert_same_state(load(state, tmp_path / "a"), state)


def test_a_step_of_an_engine_is_loaded_and_what_we_save_as_a_step_an_engine_loads(tmp_path: Path) -> None:
    state = state_of(3)
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.save(state, step=1).result()
    assert_same_state(load(state, tmp_path / "step_000000001"), state)
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    given = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "x": 1.5}
    save(given, tmp_path / "step_000000002")
    other = torch.nn.Linear(5, 3)
    restored: dict[str, Any] = {"model": other, "optimizer": torch.optim.AdamW(other.parameters()), "x": 0.0}
    with SyncCheckpointEngine(tmp_path) as engine:
        assert engine.load(restored).step == 2
    assert restored["x"] == 1.5
    assert_same_state(other.state_dict(), given["model"])
    assert restored["optimizer"].state_dict()["state"].keys() == {0, 1}
    assert_same_state(restored["optimizer"].state_dict(), given["optimizer"])


async def test_every_byte_that_our_writer_saves_verifies(tmp_path: Path) -> None:
    from aio_ckpt.verify import verify_checkpoint

    save(state_of(4), tmp_path / "a")
    save(state_of(4, mebibytes=1), tmp_path / "b", _extensions=[Flip()])
    executor = Executor("verify", 2)
    try:
        for name in ("a", "b"):
            faults = await verify_checkpoint(
                LocalStorage(executor), tmp_path / name, executor=executor, readers=2, on_progress=lambda _: None
            )
            assert faults == ()
    finally:
        assert executor.close(TIMEOUT)


def test_values_that_are_no_tensors_come_back_as_stock_gives_them_back(tmp_path: Path) -> None:
    state = {"array": np.arange(5), "file": io.BytesIO(b"abc"), "none": None, "set": {1, 2}, "t": torch.ones(1)}
    save(state, tmp_path / "a")
    target: dict[str, Any] = dict.fromkeys(state, 0) | {"t": torch.zeros(1)}
    dcp.load(target, storage_reader=Reader(tmp_path / "a"))
    assert (target["array"] == state["array"]).all()
    assert (target["file"].getvalue(), target["none"], target["set"]) == (b"abc", None, {1, 2})


def test_tied_tensors_are_stored_once(tmp_path: Path) -> None:
    tensor = torch.rand(1 << 20)
    save({"a": tensor, "b": tensor, "c": tensor[:100]}, tmp_path / "a")
    (data,) = (tmp_path / "a").glob("*.distcp")
    assert data.stat().st_size < 1.1 * tensor.nbytes
    assert_holds(tmp_path / "a", {"a": tensor, "b": tensor.clone(), "c": tensor[:100]})


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:TypedStorage")
def test_a_tensor_that_only_torch_save_knows_is_stored_as_stock_stores_it(tmp_path: Path) -> None:
    state = {"q": torch.quantize_per_tensor(torch.arange(6.0), 0.5, 1, torch.qint8), "t": torch.ones(2)}
    target = {"q": torch.quantize_per_tensor(torch.zeros(6), 0.5, 1, torch.qint8), "t": torch.zeros(2)}
    for path, write in ((tmp_path / "a", save), (tmp_path / "b", save_stock)):
        write(state, path)
        dcp.load(target, storage_reader=Reader(path))
        assert torch.equal(target["q"].int_repr(), state["q"].int_repr())


def test_a_target_of_another_dtype_is_converted_as_stock_does(tmp_path: Path) -> None:
    save({"w": torch.arange(10.0)}, tmp_path / "a")
    target = {"w": torch.zeros(10, dtype=torch.float64)}
    dcp.load(target, storage_reader=Reader(tmp_path / "a"))
    assert target["w"].tolist() == list(range(10))


def test_a_state_without_a_template_is_loaded_as_stock_does(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

    state = state_of(5)
    save(state, tmp_path / "a")
    assert_same_state(_load_state_dict_from_keys(storage_reader=Reader(tmp_path / "a")), state)


# -- planners -------------------------------------------------------------------------------------


class Halving(DefaultSavePlanner):
    """Makes another tensor of each, as planners that cast do."""

    def resolve_data(self, write_item: Any) -> Any:
        data = super().resolve_data(write_item)
        return data / 2 if isinstance(data, torch.Tensor) and data.is_floating_point() else data


class Replacing(DefaultLoadPlanner):
    """Gives fresh memory and puts it in place when told that it is filled."""

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        return torch.empty_like(super().resolve_tensor(read_item))

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        self.state_dict[read_item.dest_index.fqn].copy_(tensor)


def test_planners_that_transform_are_asked_as_by_stock(tmp_path: Path) -> None:
    state = {"a": torch.arange(6.0), "b": torch.arange(4)}
    dcp.save(state, storage_writer=Writer(tmp_path / "a"), planner=Halving())
    target = blank(state)
    dcp.load(target, storage_reader=Reader(tmp_path / "a"), planner=Replacing())
    assert_same_state(target, {"a": state["a"] / 2, "b": state["b"]})


def test_with_dcps_plan_cache_every_save_has_its_own_values_and_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cache in ("save_plan", "final_save_plan", "all_plans", "global_plan", "metadata"):
        monkeypatch.setattr(dcp.SavePlanner, f"_cached_{cache}", {})
    state = state_of(0, mebibytes=1)
    for seed in (1, 2, 3):
        state = state_of(seed, mebibytes=1)
        dcp.save(state, storage_writer=Writer(tmp_path / "a"), planner=DefaultSavePlanner(enable_plan_caching=True))
        assert_holds(tmp_path / "a", state)
    dcp.save(state, storage_writer=Writer(tmp_path / "b"), planner=DefaultSavePlanner(enable_plan_caching=True))
    assert_holds(tmp_path / "b", state)
    assert len(names_in(tmp_path / "a")) == 4
    changed = {**state, "lr": torch.ones(2)}
    dcp.save(changed, storage_writer=Writer(tmp_path / "a"), planner=DefaultSavePlanner(enable_plan_caching=True))
    assert_holds(tmp_path / "a", changed)
