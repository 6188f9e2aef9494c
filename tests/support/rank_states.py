"""States that each of several ranks holds a part of."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from aio_ckpt import PerRank


def whole(name: str, *shape: int, step: int = 0) -> torch.Tensor:
    """The same values on every rank."""
    seed = sum(name.encode()) * 1000 + step
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def spread(tensor: torch.Tensor, mesh: DeviceMesh, *placements: Placement) -> DTensor:
    """This rank's part of a tensor that every rank has: no rank sends another one anything."""
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def mixed_state(rank: int, count: int, step: int = 0) -> dict[str, Any]:
    """Sharded, replicated, uneven, empty, tied, per rank, and of one rank only."""
    mesh = init_device_mesh("cpu", (count,))
    replica = whole("replica", 300, 40, step=step)
    return {
        "rows": spread(whole("rows", 4 * count, 8, step=step), mesh, Shard(0)),
        "uneven": spread(whole("uneven", 2 * count + 1, 3, step=step), mesh, Shard(0)),
        "short": spread(whole("short", 1, 5, step=step), mesh, Shard(0)),
        "columns": spread(whole("columns", 3, 4 * count, step=step), mesh, Shard(1)),
        "copy": spread(whole("copy", 7, 7, step=step), mesh, Replicate()),
        "replica": replica,
        "tied": replica,
        "nested": {0: whole("nested", 11, step=step), "names": ["a", step]},
        "rng": PerRank(torch.full((3,), float(rank + step))),
        "mine": {f"rank_{rank}": torch.full((rank + 1,), float(step))},
        "step": step,
    }


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
    """Each rank compares its own parts, where the layouts are the same, and whole tensors where they differ."""
    if isinstance(found, DTensor) and isinstance(given, DTensor):
        assert found.shape == given.shape
        if (found.device_mesh, found.placements) == (given.device_mesh, given.placements):
            found, given = found.to_local(), given.to_local()
    if isinstance(given, PerRank):
        assert_same(found.value if isinstance(found, PerRank) else found, given.value)
    elif isinstance(given, dict):
        assert found.keys() == given.keys()
        for key, value in given.items():
            assert_same(found[key], value)
    elif isinstance(given, list):
        assert len(found) == len(given)
        for one, other in zip(found, given, strict=True):
            assert_same(one, other)
    elif isinstance(given, torch.Tensor):
        one, other = whole_of(found), whole_of(given)
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    else:
        assert found == given


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """What every rank has of a DTensor; others are whole."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
