"""Writer, Reader and AsyncStager with tensors on a GPU; where there is none the same tests run on the CPU."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cuda_machine import MIB, TIMEOUT
from dcp_states import assert_same_state, blank, needs_stagers
from rank_processes import Ranks, ranks
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from aio_ckpt import EngineConfig
from aio_ckpt.dcp import AsyncStager, Reader, Writer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LARGE_MIB, SMALL = (64, 200) if DEVICE == "cuda" else (4, 40)
RANKS = max(torch.cuda.device_count(), 1) if DEVICE == "cuda" else 2
warnings.simplefilter("ignore")  # torch's own, in the ranks
pytestmark = [pytest.mark.gpu(0), pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")]


def state_on(device: str, value: float) -> dict[str, Any]:
    """One large tensor, many small ones, views, host tensors and an object."""
    return {
        "large": torch.full((LARGE_MIB * MIB // 4,), value, device=device),
        "small": {f"s{i}": torch.full((i % 7, 33), value + i, device=device) for i in range(SMALL)},
        "half": torch.full((1000, 3), value, device=device, dtype=torch.bfloat16),
        "transposed": torch.arange(30.0, device=device).reshape(5, 6).t() + value,
        "cut": torch.full((64, 64), value, device=device)[::2, 1::3],
        "scalar": torch.tensor(value, device=device),
        "host": torch.full((1000,), value),
        "step": int(value),
    }


def check_loaded(path: Path, value: float) -> None:
    """Into tensors on the device and on the host, by both readers."""
    wanted = state_on(DEVICE, value)
    for reader in (Reader(path), dcp.FileSystemReader(path)):
        target = blank(state_on(DEVICE, value + 1))
        dcp.load(target, storage_reader=reader)
        assert target["large"].device.type == DEVICE
        assert_same_state(on_host(target), on_host(wanted))


def on_host(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: on_host(item) for key, item in state.items()}
    return state.cpu() if isinstance(state, torch.Tensor) else state


def test_a_state_on_a_device_comes_back(tmp_path: Path) -> None:
    dcp.save(state_on(DEVICE, 3.0), storage_writer=Writer(tmp_path / "a"))
    check_loaded(tmp_path / "a", 3.0)


def test_a_state_larger_than_the_window_goes_through_it_in_waves(tmp_path: Path) -> None:
    state = {f"w{i}": torch.full((LARGE_MIB * MIB // 5,), float(i), device=DEVICE) for i in range(12)}
    dcp.save(state, storage_writer=Writer(tmp_path / "a"))
    target = blank(state)
    dcp.load(target, storage_reader=Reader(tmp_path / "a"))
    assert all(torch.equal(target[name], state[name]) for name in state)


def change(state: dict[str, Any]) -> None:
    for value in (state["large"], *state["small"].values(), state["half"], state["cut"], state["host"]):
        value.fill_(-1)


def test_what_changes_on_the_device_after_async_save_returned_is_not_saved(tmp_path: Path) -> None:
    with Writer(tmp_path / "a", config=EngineConfig(debug=True)) as writer:
        for value in (1.0, 2.0, 3.0):
            state = state_on(DEVICE, value)
            saving = dcp.async_save(state, storage_writer=writer)
            change(state)
            saving.result(TIMEOUT)
            check_loaded(tmp_path / "a", value)


@needs_stagers
@pytest.mark.parametrize("staging", ["auto", "shm", "pageable"])
def test_our_stager_serves_stocks_writer(tmp_path: Path, staging: Any) -> None:
    with AsyncStager(EngineConfig(staging=staging, debug=True)) as stager:
        for value in (1.0, 2.0):
            state = state_on(DEVICE, value)
            path = tmp_path / str(value)
            saving = dcp.async_save(state, storage_writer=dcp.FileSystemWriter(path), async_stager=stager)
            change(state)
            saving.result(TIMEOUT)
            check_loaded(path, value)


@pytest.mark.gpu
def test_device_memory_is_back_at_its_baseline_after_async_saves(tmp_path: Path) -> None:
    def turn(value: float) -> None:
        dcp.async_save(state_on(DEVICE, value), storage_writer=Writer(tmp_path / "a")).result(TIMEOUT)

    turn(1.0)
    baseline = torch.cuda.memory_allocated()
    for value in (2.0, 3.0, 4.0):
        turn(value)
    assert torch.cuda.memory_allocated() <= baseline


# -- ranks ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def group() -> Iterator[Ranks]:
    with ranks(RANKS) as running:
        yield running


def sharded(mesh: DeviceMesh, seed: int) -> dict[str, Any]:
    """FSDP2, after one step of AdamW."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(100, 257), torch.nn.ReLU(), torch.nn.Linear(257, 33)).to(DEVICE)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 100, device=DEVICE)).sum().backward()
    optimizer.step()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "step": seed}


def save_sharded(rank: int, count: int, path: Path) -> None:
    """NCCL for the tensors, the default group, which is gloo, for what DCP exchanges."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    mesh = DeviceMesh.from_group(dist.new_group(backend="nccl" if DEVICE == "cuda" else "gloo"), DEVICE)
    with Writer(path) as writer:
        for seed in (1, 2, 3):
            state = sharded(mesh, seed)
            dcp.async_save(state, storage_writer=writer).result(TIMEOUT)
            wanted = sharded(mesh, seed)
            for reader in (Reader(path), dcp.FileSystemReader(path)):
                target = sharded(mesh, seed + 100)
                dcp.load(target, storage_reader=reader)
                assert_same_state(target, wanted)


@pytest.mark.slow
def test_ranks_save_what_they_sharded_over_devices(group: Ranks, tmp_path: Path) -> None:
    group.run(save_sharded, tmp_path / "a", timeout=3 * TIMEOUT)
