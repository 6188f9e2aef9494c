"""The state that the checkpoints of `tests/foreign` hold, and one call per rank. Needs torch alone, of any version."""

from __future__ import annotations

import contextlib
import datetime
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

KINDS = ("one_rank", "two_ranks", "old_names")
"""Folders of one version: unsharded; sharded over two ranks; unsharded in class names from before torch 2.3."""


def whole_state() -> dict[str, Any]:
    """Return the state with plain tensors."""
    return {
        "model": {
            "weight": torch.arange(24, dtype=torch.float32).reshape(4, 6).to(torch.bfloat16),
            "transposed": torch.arange(6, dtype=torch.float64).reshape(3, 2).t(),
            "mask": torch.tensor([True, False]),
        },
        "steps": {"exp_avg": torch.linspace(0, 1, 8).reshape(4, 2), "step": torch.tensor(7.0)},
        "epoch": 3,
    }


def sharded_state(world_size: int) -> dict[str, Any]:
    """Return the same state with ``weight`` sharded by rows and ``exp_avg`` by columns. Call it on every rank."""
    state, mesh = whole_state(), init_device_mesh("cpu", (world_size,))
    state["model"]["weight"] = distribute_tensor(state["model"]["weight"], mesh, [Shard(0)])
    state["steps"]["exp_avg"] = distribute_tensor(state["steps"]["exp_avg"], mesh, [Shard(1)])
    return state


def blank(value: Any) -> Any:
    """Return the state with every value zeroed."""
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else 0


def assert_equal(found: Any, wanted: Any) -> None:
    """Compare two states by value; sharded tensors by the shard of this rank."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key in wanted:
            assert_equal(found[key], wanted[key])
    elif isinstance(wanted, torch.Tensor):
        pair = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in (found, wanted)]
        assert pair[0].dtype == pair[1].dtype
        assert torch.equal(*pair)
    else:
        assert found == wanted


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress the warnings of DCP, among them that there is no process group."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def on_ranks(world_size: int, work: Callable[[Path], None], path: Path) -> None:
    """Call ``work(path)`` on each of ``world_size`` new processes, which share a gloo group."""
    with tempfile.TemporaryDirectory() as meeting:
        mp.spawn(_rank, (world_size, f"file://{meeting}/ranks", work, path), nprocs=world_size)


def _rank(rank: int, world_size: int, meeting: str, work: Callable[[Path], None], path: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size, timeout=limit)
    with quiet():
        work(path)
    dist.barrier()
    # Not destroyed, and the interpreter not ended: gloo of torch 2.7 may wait there for a thread that waits for the
    # GIL, and torch 2.12 may abort.
    os._exit(0)
