"""States of the containers that people have: saved, loaded into their own objects, and read."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import struct
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.format_utils
from gated_storage import TIMEOUT
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from aio_ckpt import EngineConfig, SyncCheckpointEngine, TemplateMismatchError

Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass
class TrainState:
    """As flax and others have it."""

    weight: torch.Tensor
    step: int = 0
    moments: tuple[torch.Tensor, ...] = ()


class Box(dict[str, Any]):
    """As EasyDict, AttributeDict, ConfigDict."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(name) from error


def state_at(number: float) -> dict[str, Any]:
    w = torch.full((3,), float(number))
    shared = {"w": w * 10}
    return {
        "box": Box(lr=number, inner=Box(w=w.clone())),
        "train": TrainState(w.clone(), int(number), (w.clone(), w.clone())),
        "args": argparse.Namespace(lr=number, w=w.clone()),
        "names": types.SimpleNamespace(lr=[number], w=w.clone()),
        "history": collections.deque([{"loss": number}], maxlen=5),
        "counts": collections.defaultdict(int, seen=int(number)),
        "point": Point(w.clone(), number),
        "one": shared,
        "other": [shared],
        0: w.clone(),
        b"bytes": number,
    }


def test_a_load_fills_the_objects_that_the_template_has(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        engine.save(state_at(1)).result(TIMEOUT)
        assert engine.save(state_at(2)).result(TIMEOUT).plan_hit
        state = state_at(0)
        before = dict(state)
        report = engine.load(state)
    assert report.missing == report.unexpected == report.untrusted == ()
    assert [key for key in state if state[key] is not before[key]] == ["point", b"bytes"]
    assert (state["box"].lr, state["box"].inner.w.tolist()) == (2, [2, 2, 2])
    assert (state["train"].step, state["train"].weight.tolist(), state["train"].moments[1].tolist()) == (
        2,
        [2] * 3,
        [2] * 3,
    )
    assert (state["args"].lr, state["args"].w.tolist(), state["names"].lr) == (2, [2, 2, 2], [2])
    assert (state["history"][0], state["counts"]["seen"]) == ({"loss": 2}, 2)
    assert (type(state["point"]), state["point"].y, state["point"].x.tolist()) == (Point, 2, [2, 2, 2])
    assert (state[0].tolist(), state[b"bytes"]) == ([2] * 3, 2)


def test_a_read_gives_harmless_types_and_says_what_came_back_plain(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        engine.save(state_at(1)).result(TIMEOUT)
        state, report = engine.read(with_report=True)
        assert engine.read(only=["0"]).keys() == engine.read(only="0").keys() == {0}
    assert list(state) == list(state_at(1))
    assert [type(state[key]) for key in ("args", "names", "history", "counts", "point")] == [
        argparse.Namespace, types.SimpleNamespace, collections.deque, collections.defaultdict, Point,
    ]  # fmt: skip
    assert type(state["box"]) is type(state["box"]["inner"]) is type(state["train"]) is dict
    assert [name.split(" ")[0] for name in report.plain] == ["box", "box.inner", "train"]
    assert "TrainState" in report.plain[2]
    assert state["one"] is state["other"][0]
    with SyncCheckpointEngine(root, EngineConfig(trusted_objects=True)) as engine:
        state, report = engine.read(with_report=True)
    assert report.plain == ()
    assert type(state["box"].inner) is Box
    assert isinstance(state["train"], TrainState)
    assert state["train"].moments[0].tolist() == [1, 1, 1]


def test_two_objects_with_a_state_dict_of_one_name_are_no_template(root: Path) -> None:
    models = {"m": {"0": nn.Linear(1, 1)}, "m.0": nn.BatchNorm1d(1, affine=False)}
    with SyncCheckpointEngine(root) as engine:
        engine.save(models).result(TIMEOUT)
        with pytest.raises(TemplateMismatchError, match=r"'m\.0' is the name of several values with state_dict"):
            engine.load(models)


@pytest.mark.parametrize("call", ["save", "prepare"])
def test_an_error_of_a_users_state_dict_names_the_value(root: Path, call: str) -> None:
    class Loader:
        def state_dict(self) -> Any:
            raise AttributeError("no dl_state_dict")

        def load_state_dict(self, state_dict: Any) -> None: ...

    with SyncCheckpointEngine(root) as engine, pytest.raises(AttributeError, match="no dl_state_dict") as caught:
        getattr(engine, call)({"train": {"loader": Loader()}})
    assert any("state_dict() of 'train.loader', a " in note for note in caught.value.__notes__)


# -- versions of modules ------------------------------------------------------------------------------


class Scaled(nn.Module):
    """As torch.ao's observers: a version says what the stored scale means."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        if local_metadata.get("version", 1) < 2:
            state_dict[prefix + "scale"] = state_dict[prefix + "scale"] * 100
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class Wrapper:
    """Stateful, neither module nor optimizer."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def state_dict(self) -> dict[str, Any]:
        return {"deep": [self.module.state_dict()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.module.load_state_dict(state["deep"][0])


def model_of(scale: float) -> nn.Module:
    model = nn.Sequential(Scaled(), nn.BatchNorm1d(2))
    model[0].scale.fill_(scale)  # type: ignore[union-attr,operator]
    return model


@pytest.mark.parametrize("wrap", [lambda module: module, Wrapper], ids=["module", "wrapper"])
def test_a_module_gets_the_versions_that_were_saved(root: Path, wrap: Callable[[nn.Module], Any]) -> None:
    with SyncCheckpointEngine(root) as engine:
        engine.save({"m": wrap(model_of(3)), "sd": model_of(4).state_dict()}).result(TIMEOUT)
        model = model_of(0)
        engine.load({"m": wrap(model)})
        assert model[0].scale.tolist() == [3]  # type: ignore[union-attr,operator]
        read = engine.read()
    model.load_state_dict(read["sd"])
    assert model[0].scale.tolist() == [4]  # type: ignore[union-attr,operator]
    assert read["sd"]._metadata == model.state_dict()._metadata  # type: ignore[attr-defined]


def test_a_checkpoint_without_versions_is_loaded_by_those_of_the_template(root: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"m": model_of(3).state_dict()}, checkpoint_id=str(root / "step_000000001"), no_dist=True)
    model = model_of(0)
    with SyncCheckpointEngine(root) as engine:
        engine.load({"m": model})
        assert model[0].scale.tolist() == [3]  # type: ignore[union-attr,operator]
        engine.save({"m": dict(model_of(5).state_dict())}).result(TIMEOUT)
        engine.load({"m": model})
    assert model[0].scale.tolist() == [5]  # type: ignore[union-attr,operator]


def test_what_requires_gradients_does_so_when_it_is_read(root: Path) -> None:
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    with SyncCheckpointEngine(root) as engine:
        engine.save({"p": dict(model.named_parameters()), "sd": model.state_dict()}).result(TIMEOUT)
        state = engine.read()
    assert [state["p"][name].requires_grad for name in ("weight", "bias")] == [True, False]
    assert not any(tensor.requires_grad for tensor in state["sd"].values())


# -- stock reads tuples -------------------------------------------------------------------------------


def stock_load(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=str(path), no_dist=True)
    return state


def test_stock_reads_a_tuple_with_tensors_into_a_list_and_reports_it_missing_for_a_tuple(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        path = engine.save({"pair": (torch.ones(2), 3), "plain": (1, 2)}).result(TIMEOUT).path
    assert str(stock_load(path, {"pair": [torch.zeros(2), 0]})["pair"]) == "[tensor([1., 1.]), 3]"
    assert stock_load(path, {"plain": None})["plain"] == (1, 2), "without a tensor it is one object"
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict: pair"):
        stock_load(path, {"pair": (torch.zeros(2), 0)})


def test_stock_converts_a_checkpoint_with_such_tuples(root: Path, tmp_path: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        path = engine.save({"a": {"pair": (torch.ones(2), {"b": torch.zeros(1)})}, "z": 1}).result(TIMEOUT).path
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.format_utils.dcp_to_torch_save(path, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=False)
    assert whole["a"]["pair"][0].tolist() == [1, 1]
    assert set(whole) == {"a", "z"}


@dataclasses.dataclass
class Config:
    """As people keep their settings; it holds no tensor."""

    rate: float
    widths: tuple[int, ...]
    name: str = "run"


@dataclasses.dataclass(frozen=True)
class FrozenConfig:
    """As people use for a key of a cache, or for the default of a parameter."""

    rate: float = 0.1
    weight: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class SlottedConfig:
    """The same, whose pickling ``dataclasses`` defines."""

    rate: float = 0.1
    weight: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class OwnSlotsConfig:
    """The same with slots of its own, and a copy that gives out the value itself."""

    __slots__ = ("rate", "weight")
    rate: float
    weight: torch.Tensor | None

    def __init__(self, rate: float = 0.1, weight: torch.Tensor | None = None) -> None:
        object.__setattr__(self, "rate", rate)
        object.__setattr__(self, "weight", weight)

    def __copy__(self) -> OwnSlotsConfig:
        return self


class Layers(list[int]):
    """As omegaconf's lists."""


@pytest.mark.parametrize("kind", [FrozenConfig, SlottedConfig, OwnSlotsConfig])
def test_a_frozen_dataclass_is_replaced_where_it_stands_and_is_itself_not_changed(root: Path, kind: type) -> None:
    with SyncCheckpointEngine(root) as engine:
        engine.save({"config": kind(0.5), "of": [kind(0.7, torch.ones(2))]}).result(TIMEOUT)
        default, weight = kind(), torch.zeros(2)
        state = {"config": default, "of": [kind(0.1, weight)]}
        engine.load(state)
    assert state["config"] == kind(0.5)
    assert default == kind()
    assert state["of"][0].rate == 0.7
    assert state["of"][0].weight is weight
    assert weight.tolist() == [1, 1]


def test_settings_of_a_type_of_ones_own_need_no_trust(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with SyncCheckpointEngine(root) as engine:
        engine.save({"config": Config(0.5, (1, 2)), "layers": Layers([3, 4]), "w": torch.ones(1)}).result(TIMEOUT)
        assert "only running code" not in caplog.text
        mine, layers = Config(0.0, ()), Layers([0, 0])
        state = {"config": mine, "layers": layers, "w": torch.zeros(1)}
        engine.load(state)
        assert state["config"] is mine
        assert mine == Config(0.5, (1, 2))
        assert state["layers"] is layers
        assert layers == [3, 4]
        found, report = engine.read(with_report=True)
        assert found["config"] == {"rate": 0.5, "widths": (1, 2), "name": "run"}
        assert type(found["layers"]) is list
        assert len(report.plain) == 2
    with SyncCheckpointEngine(root, EngineConfig(trusted_objects=True)) as engine:
        found = engine.read()
    assert found["config"] == Config(0.5, (1, 2))
    assert type(found["layers"]) is Layers


def parameter_state(number: float) -> dict[Any, Any]:
    """As ``get_parameter_state_dp_zero`` of Megatron-LM's distributed optimizer nests it: keys are pairs of dtypes."""
    dtypes = torch.bfloat16, torch.float32
    world = {name: torch.full((5,), number) for name in ("param", "exp_avg", "exp_avg_sq")}
    return {"buckets_coalesced": True, 0: {dtypes: {**world, "numel_unpadded": 5}}, "per_bucket_numel": [{dtypes: [5]}]}


def test_the_parameter_state_of_megatrons_distributed_optimizer_comes_back(root: Path) -> None:
    wanted = parameter_state(7.0)
    with SyncCheckpointEngine(root) as engine:
        engine.save({"optimizer": wanted}).result(TIMEOUT)
        state = {"optimizer": parameter_state(0.0)}
        engine.load(state)
        torch.testing.assert_close([state["optimizer"], engine.read()["optimizer"]], [wanted, wanted], rtol=0, atol=0)


def test_floats_keep_their_bits_and_large_ints_their_digits(root: Path) -> None:
    payload = struct.unpack("<d", b"\x01\x02\x03\x04\x05\x06\xf8\x7f")[0]
    state = {"nan": float("nan"), "minus": -float("nan"), "payload": payload, "pair": (payload, 1), "big": 10**5000}
    with SyncCheckpointEngine(root) as engine:
        engine.save(state).result(TIMEOUT)
        engine.save({**state, "nan": payload}).result(TIMEOUT)  # by the plan of the save before
        first, second = engine.read(1), engine.read(2)
    for name in ("nan", "minus", "payload"):
        assert struct.pack("<d", first[name]) == struct.pack("<d", state[name]), name
    assert struct.pack("<d", first["pair"][0]) == struct.pack("<d", second["nan"]) == struct.pack("<d", payload)
    assert first["big"] == 10**5000
