"""Sharded models that train: saved by all ranks, loaded into fresh ones, and the next step is the same bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_processes import Ranks, engine_on, needs_gloo_average
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

SECS = 60.0
WIDTH = 20  # 4 ranks: parts of 5; the 7 classes and the 30 words are uneven


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(30, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 7)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.words(words)
        hidden = hidden + self.down(torch.relu(self.up(hidden)))
        return self.head(self.norm(hidden))  # type: ignore[no-any-return]


def tensor_parallel(net: Net, mesh: Any) -> None:
    parallelize_module(net, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def shard(net: Net, mesh: Any) -> None:
    for part in (net.words, net.up, net.down):
        fully_shard(part, mesh=mesh)
    fully_shard(net, mesh=mesh)


def build(kind: str, count: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    net = Net()
    if kind == "FSDP2":
        shard(net, init_device_mesh("cpu", (count,)))
    elif kind == "HSDP":
        shard(net, init_device_mesh("cpu", (2, count // 2), mesh_dim_names=("copies", "shards")))
    elif kind == "TP":
        tensor_parallel(net, init_device_mesh("cpu", (count,)))
    elif kind == "FSDP2 and TP":
        mesh = init_device_mesh("cpu", (2, count // 2), mesh_dim_names=("dp", "tp"))
        tensor_parallel(net, mesh["tp"])
        shard(net, mesh["dp"])
    elif kind == "DDP":
        return DistributedDataParallel(net)
    return net


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    words = torch.randint(30, (8, 5), generator=torch.Generator().manual_seed(number))
    loss = nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten() % 7)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def full(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, dict):
        return {key: full(inner) for key, inner in value.items()}
    return value


def assert_equal(one: Any, other: Any) -> None:
    one, other = full(one), full(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_equal(value, other[key])
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


def train_save_load_train(rank: int, count: int, root: Path, kind: str) -> None:
    model = build(kind, count, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with engine_on(root, SECS) as engine:
        for number in (1, 2):
            step(model, optimizer, number)
            engine.save({"model": model, "optimizer": optimizer}, step=number).result(SECS)
        step(model, optimizer, 3)
        fresh = build(kind, count, seed=2)
        other = torch.optim.AdamW(fresh.parameters(), lr=0.5)
        engine.load({"model": fresh, "optimizer": other})
        step(fresh, other, 3)
    assert_equal(model.state_dict(), fresh.state_dict())
    assert_equal(optimizer.state_dict(), other.state_dict())


HSDP = pytest.param("HSDP", marks=needs_gloo_average)
KINDS = ["FSDP2", HSDP, "TP", "FSDP2 and TP", "DDP"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_goes_on_bit_for_bit(four: Ranks, tmp_path: Path, kind: str) -> None:
    four.run(train_save_load_train, tmp_path, kind)


def load_as(rank: int, count: int, root: Path, kind: str, saved_as: str) -> None:
    reference = build(saved_as, count, seed=1)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.01)
    for number in (1, 2):
        step(reference, optimizer, number)
    model = build(kind, count, seed=2)
    other = torch.optim.AdamW(model.parameters(), lr=0.5)
    with engine_on(root, SECS) as engine:
        engine.load({"model": model, "optimizer": other}, step=2)
    assert_equal(dict(model.state_dict()), dict(reference.state_dict()))
    assert_equal(other.state_dict(), optimizer.state_dict())
    template = {"model": {name: torch.zeros_like(value) for name, value in model.state_dict().items()}}
    dcp.load(template, checkpoint_id=str(root / "step_000000002"))
    assert_equal(template["model"], dict(model.state_dict()))


@pytest.mark.parametrize(
    ("saved_as", "kind"),
    [
        ("FSDP2", "TP"),
        ("TP", "FSDP2"),
        pytest.param("HSDP", "FSDP2 and TP", marks=needs_gloo_average),
        ("FSDP2 and TP", "FSDP2"),
    ],
)
def test_a_model_is_loaded_in_another_layout(four: Ranks, tmp_path: Path, saved_as: str, kind: str) -> None:
    four.run(train_save_load_train, tmp_path, saved_as)
    four.run(load_as, tmp_path, kind, saved_as)


def test_one_process_loads_what_sharded_ranks_saved(four: Ranks, tmp_path: Path) -> None:
    four.run(train_save_load_train, tmp_path, "FSDP2")
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    with engine_on(tmp_path, SECS) as engine:
        engine.load({"model": model, "optimizer": optimizer})
        read = engine.read()
    assert isinstance(read, dict)
    assert_equal(dict(model.state_dict()), dict(read["model"]))
    assert optimizer.state_dict()["state"][0]["exp_avg"].shape == (30, WIDTH)


def by_state_dicts(rank: int, count: int, root: Path) -> None:
    """``get_state_dict`` and ``set_state_dict``, as with stock DCP."""
    model = build("FSDP2", count, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step(model, optimizer, 1)
    with engine_on(root, SECS) as engine:
        given = get_state_dict(model, optimizer)
        engine.save({"model": given[0], "optimizer": given[1]}, step=1).result(SECS)
        step(model, optimizer, 2)
        fresh = build("FSDP2", count, seed=2)
        other = torch.optim.AdamW(fresh.parameters(), lr=0.01)
        step(fresh, other, 7)
        names = get_state_dict(fresh, other)
        state = {"model": names[0], "optimizer": names[1]}
        engine.load(state)
        set_state_dict(fresh, other, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        step(fresh, other, 2)
    assert_equal(model.state_dict(), fresh.state_dict())


def test_the_state_dicts_of_torch_are_saved_and_set(four: Ranks, tmp_path: Path) -> None:
    four.run(by_state_dicts, tmp_path)


def stages_and_experts(rank: int, count: int, root: Path) -> None:
    """Pipeline stages hold other names; an expert lives on the ranks of one mesh dimension only."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage = mesh.get_local_rank("pp")
    torch.manual_seed(stage)
    layer = nn.Linear(6, 6)
    shard_of: Callable[..., Any] = fully_shard
    shard_of(layer, mesh=mesh["dp"])
    state = {"stages": {f"layer{stage}": layer}, "shared": torch.arange(5.0)}
    wanted = {name: full(value).clone() for name, value in layer.state_dict().items()}
    with engine_on(root, SECS) as engine:
        for number in (1, 2):
            report = engine.save(state, step=number).result(SECS)
            assert report is not None
            assert report.plan_hit is (number == 2)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.zero_()
        report = engine.load(state)
        assert report.unexpected == ()
    assert_equal(layer.state_dict(), wanted)
    dist.barrier()


def test_stages_and_meshes_of_some_ranks_only_are_one_checkpoint(four: Ranks, tmp_path: Path) -> None:
    four.run(stages_and_experts, tmp_path)
    with engine_on(tmp_path, SECS) as engine:
        read = engine.read(only=["shared"])
    assert isinstance(read, dict)
    assert torch.equal(read["shared"], torch.arange(5.0))
