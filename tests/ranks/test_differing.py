"""Values that differ between ranks under one name: refused, warned of, or kept apart by PerRank."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from log_lines import kept_lines
from rank_processes import Ranks, engine_on, error_of
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.parallel import DistributedDataParallel

from aio_ckpt import PerRank, SyncCheckpointEngine
from aio_ckpt.engine import agreement
from aio_ckpt.errors import PeerFailedError

SECS = 30.0
CPU = torch.device("cpu")


def trained(model: nn.Module, rank: int, kind: type[Any] = torch.optim.AdamW, **settings: Any) -> Any:
    """An optimizer with moments."""
    optimizer = kind(model.parameters(), **settings)
    model(torch.full((3, 4), float(rank + 1))).square().sum().backward()
    optimizer.step()
    return optimizer


def with_seed(seed: int, make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def fsdp1(rank: int, *, use_orig_params: bool) -> dict[str, Any]:
    model = with_seed(0, lambda: nn.Linear(4, 8, bias=False))
    sharded = FullyShardedDataParallel(model, device_id=CPU, use_orig_params=use_orig_params)
    return {"optimizer": trained(sharded, rank)}


def stages(rank: int) -> dict[str, Any]:
    stage = with_seed(0, lambda: nn.Sequential(nn.Linear(4, 4)))
    return {"model": {f"layer{rank}": stage.state_dict()}, "optimizer": trained(stage, rank)}


def sharded_stages(rank: int) -> dict[str, Any]:
    """Stages that are sharded, each over a mesh of its own."""
    stage = with_seed(0, lambda: nn.Linear(4, 4))
    fully_shard(stage, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))["dp"])
    return {"optimizer": trained(stage, rank)}


def experts(rank: int) -> dict[str, Any]:
    return {"experts": with_seed(rank, lambda: nn.ModuleList([nn.Linear(4, 4)]))}


def local_zero(rank: int) -> dict[str, Any]:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns that torch.jit.script is deprecated

    model = with_seed(0, lambda: nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)))
    replica = DistributedDataParallel(model)
    optimizer = trained(replica, rank, ZeroRedundancyOptimizer, optimizer_class=torch.optim.AdamW)
    return {"model": replica, "optimizer": optimizer.optim}


REFUSED: dict[str, tuple[Callable[[int], dict[str, Any]], str]] = {
    "FSDP1": (lambda rank: fsdp1(rank, use_orig_params=False), "optimizer.state.0.exp_avg"),
    "FSDP1 with the original parameters": (lambda rank: fsdp1(rank, use_orig_params=True), "optimizer.state.0.exp_avg"),
    "pipeline stages": (stages, "optimizer.state.0.exp_avg"),
    "pipeline stages, each sharded over its own mesh": (sharded_stages, "optimizer.state.0.exp_avg"),
    "experts": (experts, "experts.0.weight"),
    "ZeroRedundancyOptimizer, the part of one rank": (local_zero, "optimizer.state.0.exp_avg"),
}


def save_what_is_refused(rank: int, count: int, root: Path) -> list[tuple[str, str]]:
    found = []
    with engine_on(root, SECS) as engine:
        for step, (make, _) in enumerate(REFUSED.values()):
            error = error_of(lambda: engine.save(make(rank), step=step), SECS)  # noqa: B023
            found.append((type(error).__name__, str(error)))
            engine.save({"good": torch.ones(3)}, step=step).result(SECS)
            dist.barrier()
            assert engine.latest_step() == step
        by_path = error_of(lambda: engine.save(experts(rank), path=root / "named"), SECS)
        assert "experts.0.weight" in str(by_path)
        assert not (root / "named").exists()
    return found


def test_parameters_and_optimizers_that_differ_between_ranks_are_refused_on_all_of_them(
    two: Ranks, tmp_path: Path
) -> None:
    """The error names them and the remedies, nothing is visible, and the next save works."""
    here, there = two.run(save_what_is_refused, tmp_path)
    for (what, (_, name)), (kind, text), (kind_there, text_there) in zip(REFUSED.items(), here, there, strict=True):
        assert (kind, kind_there) == ("DuplicateNameError", "PeerFailedError"), (what, text, text_there)
        for told in (text, text_there):
            assert name in told, what
            assert all(remedy in told for remedy in ("PerRank", "Shard", "get_optimizer_state_dict", "rank0"))


def differ_later(rank: int, count: int, root: Path) -> list[str]:
    found = []
    with engine_on(root, SECS) as engine:
        for step in range(1, 6):
            apart = rank if step in (2, 3) else 0
            moments = {f"layer{number}": torch.full((100,), float(apart)) for number in range(4)}
            found.append(type(error_of(lambda: engine.save(moments, step=step), SECS)).__name__)  # noqa: B023
            dist.barrier()
        assert engine.steps() == [1, 4, 5]
    return found


def test_tensors_that_are_equal_at_first_and_differ_at_the_second_save_are_refused_there(
    two: Ranks, tmp_path: Path
) -> None:
    """Moments of zero, or layers of one seed. The third save, which plans anew after the failure, compares too."""
    assert two.run(differ_later, tmp_path) == [
        ["NoneType", "DuplicateNameError", "DuplicateNameError", "NoneType", "NoneType"],
        ["NoneType", "PeerFailedError", "PeerFailedError", "NoneType", "NoneType"],
    ]


def differ_between_comparisons(rank: int, count: int, root: Path) -> list[str]:
    found = []
    with engine_on(root, SECS) as engine:
        for step in range(11, 15):
            apart = rank if step >= 13 else 0
            error = error_of(lambda: engine.save({"w": torch.full((9,), float(apart))}, step=step), SECS)  # noqa: B023
            found.append(str(error))
            dist.barrier()
    return found


def test_the_error_names_the_save_since_which_nothing_was_compared(two: Ranks, tmp_path: Path) -> None:
    for told in two.run(differ_between_comparisons, tmp_path):
        assert told[:3] == ["None"] * 3
        assert "They were equal in the save of step 12. The saves since then were not compared" in told[3]


def one_plans_anew(rank: int, count: int, root: Path) -> list[str]:
    """Rank 1 alone gets another tensor before save 5, and holds another one in other values since then."""
    found = []
    with engine_on(root, SECS) as engine:
        for step in range(1, 8):
            state = {"w": torch.zeros(9), "own": torch.full((9,), float(rank if step >= 5 else 0))}
            if rank == 1 and step >= 5:
                state["other"] = torch.ones(3)
            found.append(type(error_of(lambda: engine.save(state, step=step), SECS)).__name__)  # noqa: B023
            dist.barrier()
    return found


def test_after_one_rank_alone_planned_anew_the_next_save_compares_on_all_ranks(two: Ranks, tmp_path: Path) -> None:
    of_leader, of_other = two.run(one_plans_anew, tmp_path)
    assert of_leader[:5] == of_other[:5] == ["NoneType"] * 5
    assert (of_leader[5], of_other[5]) == ("DuplicateNameError", "PeerFailedError")


def rank_sums(rank: int, count: int, root: Path) -> list[int]:
    """The number of tensors that each save sums. The second state adds a name that the other rank holds already."""
    summed: list[int] = []
    make = agreement.content_sums

    def counted(tensors: list[torch.Tensor | None]) -> bytes:
        summed[-1] += sum(tensor is not None for tensor in tensors)
        return make(tensors)

    agreement.content_sums = counted
    own, later = {f"of{rank}": torch.ones(9), "of all": torch.ones(3)}, {"of0": torch.ones(9)}
    try:
        with engine_on(root, SECS) as engine:
            for step in range(1, 17):
                summed.append(0)
                engine.save(own | later if rank and step > 5 else own, step=step).result(SECS)
    finally:
        agreement.content_sums = make
    return summed


def test_a_tensor_that_no_other_rank_holds_is_summed_once(two: Ranks, tmp_path: Path) -> None:
    """To read the whole state again, at saves 2, 4, 8 and so on, takes a GPU longer than the save."""
    of_leader, of_other = two.run(rank_sums, tmp_path)
    assert [number for number, count in enumerate(of_leader, 1) if count] == [1, 2, 4, 7, 8, 16]
    assert of_leader[:4] == of_other[:4] == [2, 1, 0, 1]
    assert (of_leader[6:8], of_other[5:8]) == ([2, 2], [3, 3, 3])


def hsdp(rank: int) -> tuple[dict[str, Any], str]:
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    optimizer = trained(model, rank)
    optimizer.state[model.weight]["exp_avg"].to_local().add_(rank)  # they have drifted apart
    return {"model": model, "optimizer": optimizer}, "optimizer.state.0.exp_avg"


def declared(rank: int) -> tuple[dict[str, Any], str]:
    mesh = init_device_mesh("cpu", (2,))
    return {"w": DTensor.from_local(torch.full((3,), float(rank)), mesh, [Replicate()], run_check=False)}, "w"


def batch_norm(rank: int) -> nn.Module:
    model = with_seed(0, lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    replica = DistributedDataParallel(model, broadcast_buffers=False)
    replica(torch.randn(8, 4) + rank).sum().backward()
    return replica


def codebook(rank: int) -> nn.Module:
    module = nn.Module()
    module.register_buffer("seen", torch.full((3,), float(rank)))
    return module


class Extra(nn.Module):
    """A module whose ``get_extra_state`` returns a tensor, as those of TransformerEngine."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.extra = torch.full((3,), float(rank))

    def get_extra_state(self) -> torch.Tensor:
        return self.extra


WARNED: dict[str, Callable[[int], tuple[dict[str, Any], str]]] = {
    "HSDP": hsdp,
    "a DTensor that is declared replicated": declared,
    "the buffers of a module": lambda rank: ({"model": codebook(rank)}, "model.seen"),
    "the extra state of a module": lambda rank: ({"model": Extra(rank)}, "model._extra_state"),
    "BatchNorm under DDP": lambda rank: ({"model": batch_norm(rank)}, "model.module.1.running_mean"),
    "BatchNorm in a plain state_dict": lambda rank: (dict(batch_norm(rank).state_dict()), "module.1.running_mean"),
    "a number": lambda rank: ({"loss": torch.tensor(float(rank))}, "loss"),
    "an array": lambda rank: ({"array": torch.full((3,), rank).numpy()}, "array"),
    "an object": lambda rank: ({"position": rank}, "position"),
}


def save_what_is_warned_of(rank: int, count: int, root: Path) -> list[tuple[str, list[str]]]:
    found = []
    for number, make in enumerate(WARNED.values()):
        state, name = make(rank)
        with kept_lines() as lines, engine_on(root / str(number), SECS) as engine:
            for step in (1, 2):
                engine.save(state, step=step).result(SECS)
        found.append((name, [line for line in lines.messages if "differ between ranks" in line]))
    return found


def test_buffers_declared_replicas_and_values_that_are_no_tensors_may_differ_with_one_warning(
    two: Ranks, tmp_path: Path
) -> None:
    here, there = two.run(save_what_is_warned_of, tmp_path)
    assert all(not lines for _, lines in there)
    for what, (name, lines) in zip(WARNED, here, strict=True):
        assert len(lines) == 1, (what, lines)
        assert repr(name) in lines[0], (what, lines)
        assert "PerRank" in lines[0]


def move_on(rank: int, count: int, root: Path) -> list[str]:
    with kept_lines() as lines, engine_on(root, SECS) as engine:
        for step in range(1, 8):
            position = step if step < 3 else 10 * step + rank
            engine.save({"position": position, "of": PerRank(rank), "lr": [0.1 * step]}, step=step).result(SECS)
            dist.barrier()
            if rank == 0:
                assert len([line for line in lines.messages if "'position'" in line]) == (step >= 3)
    return [line for line in lines.messages if "differ between ranks" in line]


def test_an_object_that_is_equal_at_first_is_told_of_at_the_save_at_which_it_differs_and_once(
    two: Ranks, tmp_path: Path
) -> None:
    told, silent = two.run(move_on, tmp_path)
    assert not silent
    (line,) = told
    assert line.startswith("values differ between ranks that hold the same part of them (1 name: 'position')")


def drift_apart(rank: int, count: int, root: Path) -> tuple[list[str], set[float]]:
    names, mesh, told = [f"layer{number}" for number in range(8)], init_device_mesh("cpu", (2,)), list[str]()

    def state(value: float) -> dict[str, DTensor]:
        local = torch.full((50,), value)
        return {name: DTensor.from_local(local.clone(), mesh, [Replicate()], run_check=False) for name in names}

    with engine_on(root, SECS) as engine:
        for step in (1, 2, 3, 4):
            apart = 10.0 * rank if step > 1 else 0.0
            error = engine.save(state(step + apart), step=step).exception(SECS)
            told.append(type(error).__name__)
            assert error is None or "which stores those of the lowest rank" in " ".join(str(error).split())
        assert engine.steps() == [1, 3, 4]
        engine.load(loaded := state(0.0))
    return told, {float(loaded[name].to_local()[0]) for name in names}


def test_declared_replicas_that_drift_apart_fail_one_save_and_are_never_mixed(two: Ranks, tmp_path: Path) -> None:
    (of_leader, values), (of_other, others) = two.run(drift_apart, tmp_path)
    assert of_leader == ["NoneType", "DuplicateNameError", "NoneType", "NoneType"]
    assert of_other == ["NoneType", "PeerFailedError", "NoneType", "NoneType"]
    assert values == others == {4.0}


def save_of_rank_0(rank: int, count: int, root: Path) -> set[float]:
    names = [f"layer{number}" for number in range(8)]
    with engine_on(root, SECS, differing_replicas="rank0") as engine:
        for step in (1, 2, 3):  # at the third save, no tensor is compared
            apart = 10.0 * rank if step > 1 else 0.0
            engine.save({name: torch.full((50,), step + apart) for name in names}, step=step).result(SECS)
        engine.load(loaded := {name: torch.zeros(50) for name in names})
    return {float(loaded[name][0]) for name in names}


def test_if_the_values_of_rank_0_are_meant_none_of_another_rank_is_ever_mixed_in(two: Ranks, tmp_path: Path) -> None:
    assert two.run(save_of_rank_0, tmp_path) == [{3.0}] * 2


class Holder:
    """A Stateful value of the user's own, which keeps the tensor that it has."""

    def __init__(self, value: float) -> None:
        self.tensor, self.count = torch.full((3,), value), int(value)

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor.copy_(state["tensor"])
        self.count = state["count"]


def tensors_of(state: dict[str, Any]) -> list[torch.Tensor]:
    """The moments of the optimizer, or the weights of the experts."""
    if "experts" in state:
        return list(state["experts"].parameters())
    found = [moments[key] for moments in state["optimizer"].state.values() for key in ("exp_avg", "exp_avg_sq")]
    return [each.to_local() if isinstance(each, DTensor) else each for each in found]


def keep_apart(rank: int, count: int, root: Path) -> None:
    layouts: list[Callable[[int], dict[str, Any]]] = [make for make, _ in REFUSED.values()]
    for number, make in enumerate(layouts):
        state = make(rank)
        with engine_on(root / str(number), SECS) as engine:
            engine.save({key: PerRank(value) for key, value in state.items()}, step=1).result(SECS)
            before, tensors = [each.clone() for each in tensors_of(state)], tensors_of(state)
            for tensor in tensors:
                tensor.detach().zero_()
            engine.load({key: PerRank(value) for key, value in state.items()})
            after = tensors_of(state)
        assert all(map(torch.equal, before, after))
        assert [tensor.data_ptr() for tensor in after] == [tensor.data_ptr() for tensor in tensors]
    mine, other = Holder(rank + 1.0), Holder(9.0)
    with engine_on(root / "holder", SECS) as engine:
        engine.save({"own": PerRank(mine)}, step=1).result(SECS)
        engine.load({"own": PerRank(other)})
    assert other.tensor.tolist() == [rank + 1.0] * 3
    assert other.count == rank + 1


def test_a_module_an_optimizer_and_a_stateful_value_in_per_rank_come_back_in_place_on_their_rank(
    two: Ranks, tmp_path: Path
) -> None:
    two.run(keep_apart, tmp_path)


class Named:
    """Model and optimizer by the names of their parameters, as ``docs/parallelism.md`` gives it."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.options = StateDictOptions(flatten_optimizer_state_dict=True)

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer, options=self.options)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=self.options,
        )


def named_fsdp1(rank: int, *, use_orig_params: bool) -> Named:
    model = with_seed(0, lambda: nn.Linear(4, 8, bias=False))
    sharded = FullyShardedDataParallel(model, device_id=CPU, use_orig_params=use_orig_params)
    return Named(sharded, trained(sharded, rank))


def named_stage(rank: int) -> Named:
    stage = with_seed(0, lambda: nn.Sequential(OrderedDict({f"layer{rank}": nn.Linear(4, 4)})))
    return Named(stage, trained(stage, rank, lr=0.1 * (rank + 1)))


def save_by_name(rank: int, count: int, root: Path) -> list[str]:
    layouts: list[Callable[[int], Named]] = [
        named_stage,
        lambda rank: named_fsdp1(rank, use_orig_params=False),
        lambda rank: named_fsdp1(rank, use_orig_params=True),
    ]
    told = []
    for number, make in enumerate(layouts):
        named = make(rank)
        with kept_lines() as lines, engine_on(root / str(number), SECS) as engine:
            engine.save({"train": named}, step=1).result(SECS)
            tensors = tensors_of({"optimizer": named.optimizer})
            before = [tensor.clone() for tensor in tensors]
            for tensor in tensors:
                tensor.zero_()
            named.optimizer.param_groups[0]["lr"] = 9.0
            engine.load({"train": named})
        assert all(map(torch.equal, before, tensors_of({"optimizer": named.optimizer})))
        assert named.optimizer.param_groups[0]["lr"] == (0.1 * (rank + 1) if number == 0 else 0.001)
        told += [line for line in lines.messages if "differ" in line]
    return told


def test_optimizers_by_the_names_of_parameters_are_kept_apart_without_per_rank(two: Ranks, tmp_path: Path) -> None:
    """FSDP1 and pipeline stages, as ``docs/parallelism.md`` says."""
    assert two.run(save_by_name, tmp_path) == [[], []]


def save_on_rank_0(rank: int, count: int, root: Path) -> None:
    model = with_seed(0, lambda: nn.Linear(4, 4))
    whole = {"model": model.state_dict(), "lr": 0.5}
    with engine_on(root, SECS) as engine:
        for step in (1, 2):
            assert engine.save(whole if rank == 0 else {}, step=step).result(SECS) is not None
        nothing = error_of(lambda: engine.save({}, step=3), SECS)
        assert "hold no leaf" in str(nothing)
        assert isinstance(nothing, PeerFailedError) == (rank > 0)
        fresh = nn.Linear(4, 4)
        engine.load({"model": fresh, "lr": 0.0})
        assert_equal(fresh.state_dict(), whole["model"])
        template: dict[str, Any] = {"model": nn.Linear(4, 4).state_dict(), "lr": 0.0} if rank == 0 else {}
        assert engine.load(template).step == 2  # as broadcast_from_rank0 of torch begins
        assert template["lr"] == 0.5
        assert_equal(template["model"], whole["model"])
        assert_equal(engine.read()["model"], whole["model"])


def assert_equal(found: dict[str, Any], given: dict[str, Any]) -> None:
    assert found.keys() == given.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in given.items())


def test_rank_0_alone_may_hold_the_whole_state(two: Ranks, tmp_path: Path) -> None:
    """``get_model_state_dict(full_state_dict=True, cpu_offload=True)`` gives the other ranks an empty dict."""
    two.run(save_on_rank_0, tmp_path)


def prepare_what_differs(rank: int, count: int, root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        engine.prepare(experts(rank)).result(SECS)
        engine.prepare({"a": torch.ones(3)} if rank == 0 else {}).result(SECS)


def test_prepare_compares_nothing_between_ranks_and_takes_a_rank_without_a_leaf(two: Ranks, tmp_path: Path) -> None:
    """The page says so: what differs between ranks shows at the first save."""
    two.run(prepare_what_differs, tmp_path)
