"""What some ranks saved is loaded by others, in another number and layout."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_processes import Ranks, engine_on
from slow import slow
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import aio_ckpt
from aio_ckpt import PerRank

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


# The gate saves and loads each kind at least once: here or in the tests below.
KINDS = [
    "FSDP2",
    slow("HSDP"),
    slow("TP"),
    slow("FSDP2 and TP"),
    "DDP",
]


@pytest.mark.sampled
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
        slow("FSDP2", "TP"),
        slow("TP", "FSDP2"),
        ("HSDP", "FSDP2 and TP"),
        slow("FSDP2 and TP", "FSDP2"),
    ],
)
def test_a_model_is_loaded_in_another_layout(four: Ranks, tmp_path: Path, saved_as: str, kind: str) -> None:
    four.run(train_save_load_train, tmp_path, saved_as)
    four.run(load_as, tmp_path, kind, saved_as)


def test_one_process_loads_what_sharded_ranks_saved(two: Ranks, tmp_path: Path) -> None:
    two.run(train_save_load_train, tmp_path, "FSDP2")
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


def test_the_state_dicts_of_torch_are_saved_and_set(two: Ranks, tmp_path: Path) -> None:
    two.run(by_state_dicts, tmp_path)


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


# -- experts ----------------------------------------------------------------------------------------

EXPERTS = 4
EXPERT_WIDTH = 6


class Mixture(nn.Module):
    """The experts that this rank has, under their global names, and what all ranks share."""

    def __init__(self, mine: range) -> None:
        super().__init__()
        self.gate = nn.Linear(EXPERT_WIDTH, EXPERTS)
        self.experts = nn.ModuleDict({str(number): nn.Linear(EXPERT_WIDTH, EXPERT_WIDTH) for number in mine})

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


def full_value(value: Any) -> torch.Tensor:
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
        assert torch.equal(full_value(template["model"][name]), full_value(value)), name
        for key, moment in expected["optimizer"][name].items():
            assert torch.equal(full_value(template["optimizer"][name][key]), full_value(moment)), (name, key)


@pytest.mark.parametrize(("saved", "loaded"), [slow(4, 4), (4, 2), slow(2, 4), slow(2, 1)], ids=str)
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
    expert = nn.Linear(EXPERT_WIDTH, EXPERT_WIDTH)
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


@pytest.mark.sampled
@pytest.mark.parametrize("numel", [9, slow(10), 3, 1_000_003])
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


def save_and_load_without_elements(rank: int, count: int, root: Path) -> None:
    """The shard of the first rank has the shape of the whole tensor, and those of the others another one."""
    mesh = init_device_mesh("cpu", (count,))

    def state() -> dict[str, Any]:
        shapes: list[tuple[int, ...]] = [(1, 0), (1, 7, 0), (0, 3)]
        return {str(shape): distribute_tensor(torch.zeros(shape), mesh, [Shard(0)]) for shape in shapes}

    with engine_on(root, SECS) as engine:
        engine.save(state() | {"w": torch.ones(4)}, step=1).result(SECS)
        target = state() | {"w": torch.zeros(4)}
        engine.load(target, strict=True)
    assert torch.equal(target["w"], torch.ones(4))


def test_sharded_tensors_without_elements_do_not_make_a_checkpoint_unreadable(two: Ranks, tmp_path: Path) -> None:
    two.run(save_and_load_without_elements, tmp_path)
    read: Any = aio_ckpt.read(tmp_path / "step_000000001")
    assert [tuple(read[name].shape) for name in sorted(read)] == [(0, 3), (1, 0), (1, 7, 0), (4,)]
