"""States that each of several ranks holds a part of."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from aio_ckpt import PerRank


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
