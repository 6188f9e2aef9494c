"""What can be guarded, and that the guard goes off again. What it does on a device: ``tests/gpu``."""

from __future__ import annotations

import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from wrapper_tensors import blockwise

from aio_ckpt import SyncCheckpointEngine
from aio_ckpt.errors import ConfigError, EngineClosedError
from aio_ckpt.plan.pointer_fingerprint import fingerprint_of
from aio_ckpt.plan.structure import Leaves, Structure
from aio_ckpt.runtime.portal import Portal
from aio_ckpt.snapshot.capture import Capture
from aio_ckpt.snapshot.optimizer_guard import OptimizerGuards
from aio_ckpt.state.flatten import flatten


class Wrapper:
    def __init__(self, param_groups: Any = ()) -> None:
        self.param_groups = param_groups

    def step(self) -> str:
        return "stepped"


class Slots:
    __slots__ = ("param_groups",)

    def __init__(self) -> None:
        self.param_groups = []

    def step(self) -> None: ...


@pytest.mark.parametrize(
    "guarded",
    [None, torch.nn.Linear(1, 1), Slots(), *map(Wrapper, (None, 5, [None], [{}], [{"params": None}]))],
)
def test_what_is_no_optimizer_is_refused_at_once_and_saves_go_on(tmp_path: Path, guarded: Any) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        with pytest.raises(ConfigError, match="guard"):
            engine.guard(guarded)
        assert engine.save({"w": torch.ones(3)}).result().step == 1


def test_a_step_of_the_objects_own_is_put_back(tmp_path: Path) -> None:
    step, wrapper = (lambda: "own"), Wrapper()
    own = types.SimpleNamespace(step=step, param_groups=[])
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.guard(own)
        engine.guard(wrapper)
        assert (own.step(), wrapper.step()) == ("own", "stepped")
    assert own.step is step
    assert "step" not in vars(wrapper)


def test_a_closed_engine_guards_nothing(tmp_path: Path) -> None:
    engine = SyncCheckpointEngine(tmp_path)
    engine.close()
    with pytest.raises(EngineClosedError):
        engine.guard(Wrapper())


def test_the_engines_loop_is_woken_once_and_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is woken takes the GIL in the next call of CUDA, and ``save()`` waits a millisecond for it."""
    order: list[str] = []

    def noted(owner: type, name: str) -> None:
        plain = getattr(owner, name)

        def noting(*args: Any, **kwargs: Any) -> Any:
            order.append(name)
            return plain(*args, **kwargs)

        monkeypatch.setattr(owner, name, noting)

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(4))], lr=0.1)
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.guard(optimizer)
        engine.save({"w": torch.ones(4)}).result()
        noted(Capture, "end")
        noted(OptimizerGuards, "before_next_step")
        for name in ("submit", "post"):
            noted(Portal, name)
        ticket = engine.save({"w": torch.ones(4)})
        called, order[:] = list(order), []
        assert ticket.result().step == 2
    assert called == ["end", "before_next_step", "submit"]


def test_guarded_leaves_follow_the_optimizer_and_the_addresses() -> None:
    parameters = [torch.nn.Parameter(torch.ones(4)) for _ in range(3)]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    guards, device, host = OptimizerGuards(), torch.device("cuda", 0), torch.device("cpu")
    guards.add(optimizer)

    def leaves(fingerprint: list[int], devices: list[torch.device]) -> frozenset[int]:
        flat = flatten({str(i): torch.ones(4) for i in range(len(devices))}, rank=0)
        return guards.leaves(fingerprint, replace(Structure.of(flat, Leaves.of(flat)), devices=devices))

    fingerprint = [*(parameter.data_ptr() for parameter in parameters), 7]
    assert leaves(fingerprint, [device, device, host, device]) == {0, 1}
    for parameter in parameters:
        parameter.grad = torch.ones(4)
    optimizer.step()  # which makes its state
    buffer = optimizer.state[parameters[0]]["momentum_buffer"]
    longer, devices = [*fingerprint, buffer.data_ptr()], [device, device, host, device, device]
    assert leaves(longer, devices) == {0, 1, 4}
    optimizer.param_groups[0]["params"][1] = torch.nn.Parameter(torch.ones(4))
    assert leaves(longer, devices) == {0, 4}, "the same addresses, another optimizer"
    assert leaves(fingerprint, devices[:4]) == {0}, "the same optimizer, other addresses"


@pytest.mark.filterwarnings("ignore:Sparse invariant")
@pytest.mark.parametrize("names", [["sums"], ["moment"], ["sums", "moment"]])
def test_compound_state_of_a_guarded_object_is_guarded_by_its_parts(names: list[str]) -> None:
    made = {"sums": torch.ones(4).to_sparse(), "moment": blockwise(1)}

    class Compound(Wrapper):
        def __init__(self) -> None:
            super().__init__()
            self.dense = torch.nn.Parameter(torch.ones(4))
            self.param_groups = [{"params": [self.dense]}]
            self.state = {self.dense: {name: made[name] for name in names}}

    guarded = Compound()
    guards = OptimizerGuards()
    guards.add(guarded)
    flat = flatten({"dense": guarded.dense, **guarded.state[guarded.dense], "other": torch.ones(1)}, rank=0)
    leaves = Leaves.of(flat)
    structure = replace(Structure.of(flat, leaves), devices=[torch.device("cuda", 0)] * len(flat.names))
    found = guards.leaves([tensor.data_ptr() for tensor in leaves.tensors], structure)
    assert [flat.names[leaf] for leaf in sorted(found)] == flat.names[:-1]


def test_no_leaf_is_guarded_beyond_the_tensor_that_the_optimizer_changes() -> None:
    memory = torch.zeros(100)
    short, gapped = torch.nn.Parameter(memory[:10]), torch.nn.Parameter(memory[50::2])
    guards = OptimizerGuards()
    guards.add(torch.optim.SGD([short, gapped], lr=0.1))
    views = {
        "all": memory,
        "same": memory[:10],
        "part": memory[:4],
        "empty": memory[:0],
        "turned": memory[:10].view(2, 5).t(),
        "with gaps": memory[50::2],
        "in gaps": memory[50:70],
    }
    flat = flatten(views, rank=0)
    structure = Structure.of(flat, Leaves.of(flat))
    structure = replace(structure, devices=[torch.device("cuda")] * len(views))
    fingerprint = fingerprint_of(list(views.values()))
    guarded = {list(views)[leaf] for leaf in guards.leaves(fingerprint, structure)}
    assert guarded == {"same", "part", "turned"}
    short.data = memory[:4]
    assert {list(views)[leaf] for leaf in guards.leaves(fingerprint, structure)} == {"part"}
