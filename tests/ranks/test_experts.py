"""Mixtures of experts and sharded optimizers: each rank has other names, or a part of a flat buffer, perhaps none."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from rank_processes import Ranks, engine_on
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from aio_ckpt import PerRank

SECS = 60.0
EXPERTS = 4
WIDTH = 6


class Mixture(nn.Module):
    """The experts that this rank has, under their global names, and what all ranks share."""

    def __init__(self, mine: range) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleDict({str(number): nn.Linear(WIDTH, WIDTH) for number in mine})

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        weights = torch.softmax(self.gate(given), dim=-1)
        found: torch.Tensor = sum(weights[:, int(number)] @ expert(given) for number, expert in self.experts.items())  # type: ignore[assignment]
        return found.square().sum()


def mixture(rank: int, count: int, groups: int, *, seed: int) -> tuple[Mixture, torch.optim.Optimizer]:
    """Experts spread over ``groups`` of ranks, each expert sharded over the ranks of its group."""
    mesh = init_device_mesh("cpu", (groups, count // groups), mesh_dim_names=("experts", "shards"))
    group, each = mesh.get_local_rank("experts"), EXPERTS // groups
    model = Mixture(range(group * each, (group + 1) * each))
    for parameter in model.parameters():
        nn.init.constant_(parameter, seed)
    for number, expert in model.experts.items():
        torch.manual_seed(seed + int(number))
        expert.reset_parameters()  # type: ignore[operator]
        fully_shard(expert, mesh=mesh["shards"])
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """As trainers of such models do: the optimizer's state by the names of parameters, which ranks do not share."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    moments = {names[parameter]: values for parameter, values in optimizer.state.items()}
    return {"model": dict(model.named_parameters()), "optimizer": moments}


def trained(rank: int, count: int, groups: int) -> tuple[Mixture, torch.optim.Optimizer]:
    model, optimizer = mixture(rank, count, groups, seed=1)
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.5 + 1.0  # the same for all who hold it
    optimizer.step()
    return model, optimizer


def full(value: Any) -> torch.Tensor:
    found: torch.Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return found.detach()


def save_mixture(rank: int, count: int, root: Path, groups: int) -> None:
    model, optimizer = trained(rank, count, groups)
    with engine_on(root, SECS) as engine:
        for step in (1, 2):
            report = engine.save(state_of(model, optimizer), step=step).result(SECS)
            assert report is not None
            assert report.plan_hit is (step == 2)


def load_mixture(rank: int, count: int, root: Path, groups: int) -> None:
    wanted, before = trained(rank, count, groups)
    model, optimizer = mixture(rank, count, groups, seed=7)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # which makes its state
    template = state_of(model, optimizer)
    with engine_on(root, SECS) as engine:
        engine.load(template)
    expected = state_of(wanted, before)
    assert template["model"].keys() == expected["model"].keys()
    for name, value in expected["model"].items():
        assert torch.equal(full(template["model"][name]), full(value)), name
        for key, moment in expected["optimizer"][name].items():
            assert torch.equal(full(template["optimizer"][name][key]), full(moment)), (name, key)


@pytest.mark.parametrize(("saved", "loaded"), [(4, 4), (4, 2), (2, 4), (2, 1)], ids=str)
def test_experts_go_to_other_ranks(four: Ranks, tmp_path: Path, saved: int, loaded: int) -> None:
    four.run(save_mixture, tmp_path, saved)
    four.run(load_mixture, tmp_path, loaded)


def test_fewer_ranks_and_one_process_load_all_experts(two: Ranks, four: Ranks, tmp_path: Path) -> None:
    four.run(save_mixture, tmp_path, 4)
    two.run(load_mixture, tmp_path, 2)
    with engine_on(tmp_path, SECS) as engine:
        read = engine.read(only=["model"])
    assert isinstance(read, dict)
    wanted = {"gate.weight", "gate.bias"}
    wanted |= {f"experts.{number}.{part}" for number in range(EXPERTS) for part in ("weight", "bias")}
    stored = dcp.FileSystemReader(tmp_path / "step_000000002").read_metadata().state_dict_metadata
    assert {name.removeprefix("model.") for name in stored if name.startswith("model.")} == wanted
    torch.manual_seed(1 + 3)
    expert = nn.Linear(WIDTH, WIDTH)
    entry = stored["model.experts.3.weight"]
    assert isinstance(entry, TensorStorageMetadata)
    assert entry.size == expert.weight.shape


# -- sharded optimizers -----------------------------------------------------------------------------


def flat(rank: int, count: int, numel: int, *, fill: bool) -> dict[str, Any]:
    """The flat buffers of a distributed optimizer: with 9 elements of four ranks the last has none."""
    mesh = init_device_mesh("cpu", (count,))
    whole = torch.arange(float(numel)) if fill else torch.full((numel,), -1.0)
    local = [*whole.chunk(count), *[whole[:0]] * count][rank].clone()
    make = {"shape": torch.Size([numel]), "stride": (1,), "run_check": False}
    master = DTensor.from_local(local, mesh, [Shard(0)], **make)  # type: ignore[arg-type]
    moment = DTensor.from_local(local * 2, mesh, [Shard(0)], **make)  # type: ignore[arg-type]
    return {"buffers": {"0": {"main": master, "exp_avg": moment, "step": torch.tensor(3.0 if fill else 0.0)}}}


def save_flat(rank: int, count: int, root: Path, numel: int) -> None:
    with engine_on(root, SECS) as engine:
        engine.save(flat(rank, count, numel, fill=True), step=1).result(SECS)


def load_flat(rank: int, count: int, root: Path, numel: int) -> None:
    template, wanted = flat(rank, count, numel, fill=False), flat(rank, count, numel, fill=True)
    with engine_on(root, SECS) as engine:
        engine.load(template)
    for key, value in wanted["buffers"]["0"].items():
        found = template["buffers"]["0"][key]
        assert torch.equal(*(part.to_local() if isinstance(part, DTensor) else part for part in (found, value))), key


@pytest.mark.parametrize("numel", [9, 10, 3, 1_000_003])
def test_parts_of_flat_buffers_uneven_or_empty_come_back_on_any_number_of_ranks(
    two: Ranks, four: Ranks, tmp_path: Path, numel: int
) -> None:
    four.run(save_flat, tmp_path / "four", numel)
    for ranks in (four, two):
        ranks.run(load_flat, tmp_path / "four", numel)
    two.run(save_flat, tmp_path / "two", numel)
    four.run(load_flat, tmp_path / "two", numel)


def zero_redundancy(rank: int, count: int, root: Path) -> None:
    """torch's own, whose ranks hold the state of other parameters each."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own: its module is made with torch.jit
        from torch.distributed.optim import ZeroRedundancyOptimizer

    def build() -> tuple[list[nn.Parameter], Any]:
        parameters = [nn.Parameter(torch.full((5 + i,), float(i))) for i in range(6)]
        return parameters, ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=0.1)

    def step(parameters: list[nn.Parameter], optimizer: Any, number: int) -> None:
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, float(number))
        optimizer.step()

    parameters, optimizer = build()
    step(parameters, optimizer, 1)
    with engine_on(root, SECS) as engine:
        engine.save({"model": parameters, "optimizer": PerRank(optimizer.optim.state_dict())}, step=1).result(SECS)
        step(parameters, optimizer, 2)
        fresh, other = build()
        step(fresh, other, 9)
        template = {"model": fresh, "optimizer": PerRank(other.optim.state_dict())}
        engine.load(template)
        other.optim.load_state_dict(template["optimizer"].value)  # type: ignore[attr-defined]
        step(fresh, other, 2)
    assert all(map(torch.equal, fresh, parameters))


def test_an_optimizer_whose_ranks_hold_other_parameters_each_goes_on(two: Ranks, tmp_path: Path) -> None:
    two.run(zero_redundancy, tmp_path)
