"""A Stateful of the user's own around a sharded model (torch's AppState tutorial): on one rank, on two, two on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import Ranks, engine_on, ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from aio_ckpt import MissingNameError

SECS = 60.0


class AppState:
    """Neither module nor optimizer: it holds both, as torch's tutorial and torchtitan do."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


def trained(seed: int, count: int) -> tuple[nn.Module, AppState]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (count,)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return model, AppState(model, optimizer)


def weights(model: nn.Module) -> list[list[float]]:
    return [parameter.full_tensor().flatten().tolist() for parameter in model.parameters()]  # type: ignore[attr-defined]


def save(rank: int, count: int, root: Path) -> list[list[float]]:
    model, app = trained(1, count)
    with engine_on(root, SECS) as engine:
        engine.save({"app": app, "epoch": 3}, step=1).result(SECS)
    return weights(model)


def memory(app: AppState) -> list[int]:
    shards = [state["exp_avg"].to_local() for state in app.optimizer.state.values()]
    return [shard.data_ptr() for shard in shards]


def load(rank: int, count: int, root: Path) -> list[list[float]]:
    model, app = trained(2, count)
    before = memory(app)
    state = {"app": app, "epoch": 0}
    with engine_on(root, SECS) as engine:
        engine.load(state)
    assert state["epoch"] == 3
    assert memory(app) == before
    return weights(model)


@pytest.mark.sampled
@pytest.mark.parametrize("saving", [1, 2])
@pytest.mark.parametrize("loading", [1, 2])
def test_a_stateful_around_a_sharded_model_is_resumed_on_any_number_of_ranks(
    two: Ranks, tmp_path: Path, saving: int, loading: int
) -> None:
    with ranks(1) as one:
        group = {1: one, 2: two}
        wanted = group[saving].run(save, tmp_path)[0]
        assert group[loading].run(load, tmp_path) == [wanted] * loading


def load_deeper(rank: int, count: int, root: Path) -> tuple[str, bool]:
    """Load into a sharded model with one more layer; its error, and whether the model is as it was."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(4, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (count,)))
    before = weights(model)
    with engine_on(root, SECS) as engine, pytest.raises(MissingNameError) as caught:
        engine.load({"model": model})
    return str(caught.value), weights(model) == before


def save_model(rank: int, count: int, root: Path) -> None:
    model, _ = trained(1, count)
    with engine_on(root, SECS) as engine:
        engine.save({"model": model}, step=1).result(SECS)


def test_a_sharded_model_that_differs_is_refused_before_anything_is_touched(two: Ranks, tmp_path: Path) -> None:
    two.run(save_model, tmp_path)
    for error, is_same in two.run(load_deeper, tmp_path):
        assert "lacks 2 names: 'model.2.weight', 'model.2.bias'; allow_missing=True" in error
        assert is_same


def stage(layer: int, value: float) -> nn.ModuleDict:
    """A stage of a pipeline, which holds one layer."""
    made = nn.ModuleDict({f"layer{layer}": nn.Linear(4, 4)})
    nn.init.constant_(made[f"layer{layer}"].weight, value)  # type: ignore[arg-type]
    return made


def swap_stages(rank: int, count: int, root: Path) -> tuple[str, float]:
    """Save a stage on each rank, and load it on the other one; the error, and the weight that its dict gets."""
    moved = stage(1 - rank, -1.0)
    with engine_on(root, SECS) as engine:
        engine.save({"model": stage(rank, float(rank))}, step=1).result(SECS)
        with pytest.raises(MissingNameError) as caught:
            engine.load({"model": nn.ModuleDict({**moved, "new": nn.Linear(4, 4)})})
        assert "lacks 4 names" in str(caught.value)  # no rank saved one of them
        assert "rename=" not in str(caught.value)
        with pytest.raises(MissingNameError) as caught:
            engine.load({"model": moved})
        state = {"model": moved.state_dict()}
        engine.load(state)
        moved.load_state_dict(state["model"])
    return str(caught.value), moved.get_parameter(f"layer{1 - rank}.weight")[0, 0].item()


def test_of_a_stage_that_moved_the_error_names_the_rank_that_saved_it_and_its_remedy_loads_it(
    two: Ranks, tmp_path: Path
) -> None:
    """A remedy of another kind, such as ``rename=``, would load the weights of another layer."""
    for rank, (error, weight) in enumerate(two.run(swap_stages, tmp_path)):
        names = f"'model.layer{1 - rank}.weight', 'model.layer{1 - rank}.bias'"
        assert f"rank {rank} did not save 2 names: {names}, and a value" in error
        assert f"('model.layer{1 - rank}.weight' is of rank {1 - rank})" in error
        assert "rename=" not in error
        assert "allow_missing" not in error
        assert weight == 1 - rank
