"""Many ranks save one checkpoint: real processes, DTensors, and what stock DCP reads of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from builders import listing
from rank_processes import Ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from aio_ckpt import EngineConfig, PerRank, SyncCheckpointEngine

SECS = 30.0


def whole(name: str, *shape: int, step: int = 0) -> torch.Tensor:
    """The same values on every rank."""
    seed = sum(name.encode()) * 1000 + step
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mixed_state(rank: int, count: int, step: int = 0) -> dict[str, Any]:
    """Sharded, replicated, uneven, empty, tied, per rank, and of one rank only."""
    mesh = init_device_mesh("cpu", (count,))
    replica = whole("replica", 300, 40, step=step)
    return {
        "rows": distribute_tensor(whole("rows", 4 * count, 8, step=step), mesh, [Shard(0)]),
        "uneven": distribute_tensor(whole("uneven", 2 * count + 1, 3, step=step), mesh, [Shard(0)]),
        "short": distribute_tensor(whole("short", 1, 5, step=step), mesh, [Shard(0)]),
        "columns": distribute_tensor(whole("columns", 3, 4 * count, step=step), mesh, [Shard(1)]),
        "copy": distribute_tensor(whole("copy", 7, 7, step=step), mesh, [Replicate()]),
        "replica": replica,
        "tied": replica,
        "nested": {0: whole("nested", 11, step=step), "names": ["a", step]},
        "rng": PerRank(torch.full((3,), float(rank + step))),
        "mine": {f"rank_{rank}": torch.full((rank + 1,), float(step))},
        "step": step,
    }


def full(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, PerRank):
        return full(value.value)
    if isinstance(value, dict):
        return {key: full(inner) for key, inner in value.items()}
    return [full(inner) for inner in value] if isinstance(value, list) else value


def zeroed(value: Any) -> Any:
    """A template of the same layout."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, PerRank):
        return PerRank(zeroed(value.value))
    if isinstance(value, dict):
        return {key: zeroed(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [zeroed(inner) for inner in value]
    return None


def assert_same(found: Any, given: Any) -> None:
    found, given = full(found), full(given)
    if isinstance(given, dict):
        assert found.keys() == given.keys()
        for key, value in given.items():
            assert_same(found[key], value)
    elif isinstance(given, torch.Tensor):
        assert found.dtype == given.dtype
        assert torch.equal(found, given)
    else:
        assert found == given


def config(**settings: Any) -> EngineConfig:
    return EngineConfig(stall_timeout_secs=SECS, budget_bytes=64 << 20, **settings)


# -- one checkpoint of many ranks -------------------------------------------------------------------


def save_and_load(rank: int, count: int, root: Path) -> tuple[bool, ...]:
    hits = []
    with SyncCheckpointEngine(root, config()) as engine:
        for step in (1, 2, 3):
            report = engine.save(mixed_state(rank, count, step), step=step).result(SECS)
            assert report is not None
            hits.append(report.plan_hit)
        template = zeroed(mixed_state(rank, count))
        assert engine.load(template).step == 3
        assert_same(template, mixed_state(rank, count, 3))
        template = zeroed(mixed_state(rank, count))
        assert engine.load(template, step=1).step == 1
        assert_same(template, mixed_state(rank, count, 1))
    return tuple(hits)


@pytest.mark.parametrize("count", [2, 4])
def test_what_many_ranks_saved_each_of_them_loads(request: pytest.FixtureRequest, count: int, tmp_path: Path) -> None:
    running: Ranks = request.getfixturevalue({2: "two", 4: "four"}[count])
    assert running.run(save_and_load, tmp_path) == [(False, True, True)] * count
    for step in (1, 2, 3):
        names = sorted(path.name for path in (tmp_path / f"step_{step:09d}").iterdir())
        assert names == sorted(
            [".metadata", "aio_ckpt.json"]
            + [f"__{rank}_0.distcp" for rank in range(count)]
            + [f"aio_ckpt.{rank}.bin" for rank in range(count)]
        )
    assert listing(tmp_path) == [f"step_{n:09d}" for n in (1, 2, 3)]


def load_by_dcp(rank: int, count: int, path: Path, step: int) -> None:
    given = mixed_state(rank, count, step)
    names = ("rows", "uneven", "short", "columns", "copy", "replica", "tied")
    template = {name: torch.zeros_like(given[name]) for name in names}
    template |= {"nested": {"0": torch.zeros(11), "names": [None, None]}, "mine": zeroed(given["mine"]), "step": None}
    dcp.load(template, checkpoint_id=str(path))
    for name in names:
        assert_same(template[name], given[name])
    assert torch.equal(template["nested"]["0"], given["nested"][0])
    assert template["step"] == step
    assert_same(template["mine"], given["mine"])


def test_stock_dcp_reads_what_many_ranks_saved(two: Ranks, tmp_path: Path) -> None:
    two.run(save_and_load, tmp_path)
    two.run(load_by_dcp, tmp_path / "step_000000003", 3)


def move_a_shard(rank: int, count: int, root: Path) -> list[tuple[bool, bool]]:
    local = torch.arange(6.0).view(2, 3) + 6 * rank
    found = []
    with SyncCheckpointEngine(root, config()) as engine:
        for order in ([0, 1], [1, 0]):
            spread = DTensor.from_local(local, DeviceMesh("cpu", order), [Shard(0)], run_check=False)
            report = engine.save({"w": spread}).result(SECS)
            assert report is not None
            read = engine.read()
            assert isinstance(read, dict)
            parts = [torch.arange(6.0).view(2, 3) + 6 * r for r in order]
            found.append((report.plan_hit, torch.equal(read["w"], torch.cat(parts))))
    return found


def test_a_shard_that_moved_in_its_global_tensor_is_a_miss(two: Ranks, tmp_path: Path) -> None:
    """S4 (e): same local shape, same memory; the mesh gives each rank another row block."""
    assert two.run(move_a_shard, tmp_path) == [[(False, True), (False, True)]] * 2
