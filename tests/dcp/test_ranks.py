"""Our Writer and Reader under real ranks: sharded states, other layouts, one rank's failure or death."""

from __future__ import annotations

import errno
import functools
import os
import signal
import warnings
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_states import assert_same_state, needs_stagers
from gated_storage import TIMEOUT, Call, GatedStorage
from rank_processes import Ranks, ranks
from rank_states import spread
from slow import slow
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from aio_ckpt import EngineConfig
from aio_ckpt.config import LEAST_BUDGET_BYTES
from aio_ckpt.dcp import AsyncStager, Reader, Writer
from aio_ckpt.errors import WriteError
from aio_ckpt.runtime.portal import Executor

warnings.simplefilter("ignore")  # torch's own, in the ranks
Layout = Literal["fsdp", "tp", "hsdp", "both", "ddp", "untrained"]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


@functools.cache
def ranks_in_a_row(count: int) -> DeviceMesh:
    return init_device_mesh("cpu", (count,))


@functools.cache
def ranks_in_pairs(count: int) -> DeviceMesh:
    return init_device_mesh("cpu", (2, count // 2), mesh_dim_names=("a", "b"))


def trained(layout: Layout, count: int, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model whose rows no number of ranks divides, after one step of AdamW; the same values for every layout."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(10, 36), torch.nn.ReLU(), torch.nn.Linear(36, 7), torch.nn.Linear(7, 3))
    cut = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    if layout == "tp":
        parallelize_module(model, ranks_in_a_row(count), cut)
    elif layout == "both":
        pairs = ranks_in_pairs(count)
        fully_shard(parallelize_module(model, pairs["b"], cut), mesh=pairs["a"])
    elif layout == "hsdp":
        fully_shard(model, mesh=ranks_in_pairs(count))
    elif layout == "fsdp":
        fully_shard(model, mesh=ranks_in_a_row(count))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 10)).sum().backward()
    optimizer.step()
    return model, optimizer


def state_of(layout: Layout, count: int, seed: int) -> dict[str, Any]:
    """The state of a trainer; if it is "untrained", tensors alone, which cost a new rank half a second less."""
    model, optimizer = ({}, {}) if layout == "untrained" else get_state_dict(*trained(layout, count, seed))
    mesh = ranks_in_a_row(count)
    big = whole_big(seed)
    uneven = torch.arange(count * 3 - 2, dtype=torch.float64) + seed
    return {
        "model": model,
        "optimizer": optimizer,
        "big": spread(big, mesh, Shard(0)),
        "columns": spread(big, mesh, Shard(1)),
        "few": spread(uneven[: count - 1], mesh, Shard(0)),  # the last rank has none
        "uneven": spread(uneven, mesh, Shard(0)),
        "whole": spread(uneven, mesh, Replicate()),
        "plain": torch.full((5,), float(seed)),
        "step": seed,
    }


def whole_big(seed: int) -> torch.Tensor:
    """2 MiB: a rank's part goes in many waves through the least budget."""
    return torch.arange(1 << 19, dtype=torch.float32).reshape(1 << 9, -1) * seed


def save(rank: int, count: int, path: Path, layout: Layout, seed: int, kind: str = "ours") -> None:
    """On every rank; a CheckpointException is no Exception, which alone a rank reports."""
    writer = Writer(path) if kind == "ours" else dcp.FileSystemWriter(path)
    try:
        dcp.save(state_of(layout, count, seed), storage_writer=writer)
    except dcp.api.CheckpointException as error:
        raise RuntimeError(str(error)) from error


def check(rank: int, count: int, path: Path, layout: Layout, seed: int) -> None:
    """Both readers fill a state of this layout with the values of ``seed``."""
    wanted = state_of(layout, count, seed)
    for reader in (Reader(path), dcp.FileSystemReader(path)):
        target = state_of(layout, count, seed + 100)
        dcp.load(target, storage_reader=reader)
        assert_same_state(target, wanted)


@pytest.mark.parametrize("layout", [slow("fsdp"), slow("tp"), slow("hsdp"), "both", slow("ddp")])
def test_a_sharded_state_comes_back_on_every_rank_bit_for_bit(four: Ranks, tmp_path: Path, layout: Layout) -> None:
    four.run(save, tmp_path / "a", layout, 1)
    assert len(list((tmp_path / "a").glob("*.distcp"))) <= 4
    four.run(check, tmp_path / "a", layout, 1)


@pytest.mark.parametrize(("saved", "loaded"), [slow("fsdp", "tp"), ("both", "fsdp"), slow("ddp", "fsdp")])
def test_a_checkpoint_is_loaded_with_another_layout_and_number_of_ranks(
    four: Ranks, two: Ranks, tmp_path: Path, saved: Layout, loaded: Layout
) -> None:
    four.run(save, tmp_path / "a", saved, 2)
    two.run(read_as, tmp_path / "a", loaded, 2)
    two.run(save, tmp_path / "b", saved, 3)
    four.run(read_as, tmp_path / "b", loaded, 3)


def read_as(rank: int, count: int, path: Path, layout: Layout, seed: int) -> None:
    """``few`` and ``uneven`` have other lengths with another number of ranks, and training sums in another order:
    stock's reader is the judge."""
    results = []
    for reader in (Reader(path), dcp.FileSystemReader(path)):
        target = {name: value for name, value in state_of(layout, count, seed + 100).items() if name not in _COUNTED}
        dcp.load(target, storage_reader=reader)
        assert target["step"] == seed
        results.append(target)
    assert_same_state(*results)


_COUNTED = ("few", "uneven", "whole")


def test_a_checkpoint_of_many_ranks_is_loaded_by_one_process(four: Ranks, tmp_path: Path) -> None:
    four.run(save, tmp_path / "a", "both", 4)
    wanted = whole_big(4)
    target = {"big": torch.zeros_like(wanted), "columns": torch.zeros_like(wanted), "step": 0}
    dcp.load(target, storage_reader=Reader(tmp_path / "a"))
    assert_same_state(target, {"big": wanted, "columns": wanted, "step": 4})


def test_what_stock_saved_from_many_ranks_is_loaded(four: Ranks, two: Ranks, tmp_path: Path) -> None:
    four.run(save, tmp_path / "a", "both", 5, "stock")
    four.run(check, tmp_path / "a", "both", 5)
    two.run(read_as, tmp_path / "a", "fsdp", 5)


def test_ranks_replace_a_checkpoint_and_leave_nothing_of_it(four: Ranks, two: Ranks, tmp_path: Path) -> None:
    four.run(save, tmp_path / "a", "untrained", 1)
    two.run(save, tmp_path / "a", "untrained", 2)
    two.run(check, tmp_path / "a", "untrained", 2)
    assert len(list((tmp_path / "a").iterdir())) == 2 + 2 * 2


def set_back(rank: int, count: int, path: Path) -> None:
    model, optimizer = trained("fsdp", count, 1)
    other, its_optimizer = trained("fsdp", count, 2)
    names = ("model", "optimizer")
    dcp.save(dict(zip(names, get_state_dict(model, optimizer), strict=True)), storage_writer=Writer(path))
    state = dict(zip(names, get_state_dict(other, its_optimizer), strict=True))
    dcp.load(state, storage_reader=Reader(path))
    set_state_dict(other, its_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    wanted = get_state_dict(model, optimizer)
    assert_same_state(list(get_state_dict(other, its_optimizer)), list(wanted))


def test_model_and_optimizer_are_set_back(two: Ranks, tmp_path: Path) -> None:
    two.run(set_back, tmp_path / "a")


def save_async(rank: int, count: int, path: Path, own_stager: bool, budgets: tuple[int | None, int | None]) -> None:
    config = EngineConfig(budget_bytes=budgets[rank])
    with AsyncStager() as stager:
        for seed in (1, 2, 3):
            state = state_of("untrained", count, seed)
            kept = {"async_stager": stager} if own_stager else {}
            saving = dcp.async_save(state, storage_writer=Writer(path, config=config), **kept)
            for value in (state["big"], state["columns"], state["plain"]):
                value.zero_()
            saving.result(TIMEOUT)
            check(rank, count, path, "untrained", seed)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("own_stager", "budgets"),
    [
        (False, (None, None)),
        pytest.param(True, (None, None), marks=needs_stagers),
        pytest.param(False, (LEAST_BUDGET_BYTES, None), id="the leader in waves"),
        slow(False, (None, LEAST_BUDGET_BYTES), id="the other in waves"),
    ],
)
def test_async_saves_of_ranks_hold_what_was_there_at_the_call(
    two: Ranks, tmp_path: Path, own_stager: bool, budgets: tuple[int | None, int | None]
) -> None:
    two.run(save_async, tmp_path / "a", own_stager, budgets)


def save_cached(rank: int, count: int, path: Path) -> None:
    for seed in (1, 2, 3):
        state = state_of("untrained", count, seed)
        dcp.save(state, storage_writer=Writer(path), planner=DefaultSavePlanner(enable_plan_caching=True))
        check(rank, count, path, "untrained", seed)


def test_with_dcps_plan_cache_every_rank_finds_the_save_it_belongs_to(two: Ranks, tmp_path: Path) -> None:
    two.run(save_cached, tmp_path / "a")


# -- one rank fails -------------------------------------------------------------------------------


def save_with_a_full_disk(rank: int, count: int, path: Path, name: str, where: str) -> list[tuple[int, str, int]]:
    """What each rank is told: (rank, type, errno) of each failure."""
    executor = Executor("test", 6)
    storage = GatedStorage(executor)
    if rank == count - 1:
        storage.fail(name, where, WriteError(errno.ENOSPC, "full", f"{path}/x"))
    try:
        dcp.save(state_of("untrained", count, 2), storage_writer=Writer(path, storage=storage))
    except dcp.api.CheckpointException as error:
        return [(failed, type(cause).__name__, cause.errno) for failed, (cause, _) in error.failures.items()]
    finally:
        executor.close(TIMEOUT)
    return []


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "where"),
    [
        slow("create_data_file", "*"),
        ("write", "*"),
        slow("sync", "*"),
        ("write_file", "aio_ckpt.*.bin"),
    ],
)
def test_a_full_disk_on_one_rank_fails_the_save_of_all_and_the_old_checkpoint_stays(
    four: Ranks, tmp_path: Path, name: str, where: str
) -> None:
    path = tmp_path / "a"
    four.run(save, path, "untrained", 1)
    before = len(list(path.iterdir()))
    told = four.run(save_with_a_full_disk, path, name, where)
    assert told == [[(3, "WriteError", errno.ENOSPC)]] * 4
    four.run(check, path, "untrained", 1)
    four.run(save, path, "untrained", 3)
    four.run(check, path, "untrained", 3)
    assert len(list(path.iterdir())) == before


class Dying(GatedStorage):
    """Kills its process at a call."""

    victim: tuple[str, str] = ("", "")

    async def run(self, call: Call, act: Any) -> Any:
        if call.matches(*self.victim):
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().run(call, act)


def save_and_die(rank: int, count: int, path: Path, victim: int, name: str, where: str) -> None:
    storage = Dying(Executor("dying", 6))
    if rank == victim:
        storage.victim = name, where
    dcp.save(state_of("untrained", count, 2), storage_writer=Writer(path, storage=storage))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("victim", "name", "where"),
    [
        (1, "write", "*"),
        slow(0, "write", "*"),
        (0, "replace", ".metadata.tmp-*"),
    ],
)
def test_a_rank_that_is_killed_leaves_the_old_checkpoint(
    two: Ranks, tmp_path: Path, victim: int, name: str, where: str
) -> None:
    path = tmp_path / "a"
    two.run(save, path, "untrained", 1)
    before = len(list(path.iterdir()))
    with ranks(2) as dying:
        for rank in range(2):
            dying.start(rank, save_and_die, path, victim, name, where)
        dying.processes[victim].wait(TIMEOUT)
        assert dying.processes[victim].returncode == -signal.SIGKILL
    two.run(read_ours, path, 1)
    two.run(save, path, "untrained", 3)
    two.run(check, path, "untrained", 3)
    assert len(list(path.iterdir())) == before


def read_ours(rank: int, count: int, path: Path, seed: int) -> None:
    target = state_of("untrained", count, seed + 100)
    dcp.load(target, storage_reader=Reader(path))
    assert_same_state(target, state_of("untrained", count, seed))


def save_apart(rank: int, count: int, path: Path) -> str:
    """Each rank in a directory of its own, as on a disk that is not shared."""
    try:
        dcp.save(state_of("untrained", count, 1), storage_writer=Writer(path / str(rank)))
    except dcp.api.CheckpointException as error:
        return str(error)
    return ""


def test_a_save_of_ranks_that_do_not_share_the_directory_fails_with_the_remedy(two: Ranks, tmp_path: Path) -> None:
    for message in two.run(save_apart, tmp_path):
        assert "one shared" in message
    assert not list(tmp_path.glob("*/.metadata"))
