"""Modules and optimizers of which a part is stored, or a part has another shape: the rest is loaded, and reported."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import aio_ckpt
from aio_ckpt import LoadReport, SyncCheckpointEngine
from aio_ckpt.errors import MissingNameError, TemplateMismatchError, UnexpectedNameError
from aio_ckpt.state.names import listed

Load = Callable[..., LoadReport]


def saved(path: Path, state: dict[str, Any], by: str) -> Path:
    if by == "stock":
        with warnings.catch_warnings(action="ignore"):
            dcp.save(state, checkpoint_id=path, no_dist=True)
        return path
    with SyncCheckpointEngine(path) as engine:
        return engine.save(state, step=1).result(20).path


def net(words: int = 10, **more: torch.nn.Module) -> torch.nn.ModuleDict:
    return torch.nn.ModuleDict({"words": torch.nn.Embedding(words, 4), "head": torch.nn.Linear(4, 4), **more})


@pytest.fixture(params=["ours", "stock"])
def by(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# -- missing ------------------------------------------------------------------------------------------


def test_keys_of_a_module_that_are_not_stored_stay_and_are_reported_and_logged(
    tmp_path: Path, by: str, caplog: pytest.LogCaptureFixture
) -> None:
    trained, model = net(), net(adapter=torch.nn.BatchNorm1d(4))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    path = saved(tmp_path / "x", {"model": {"head.weight": trained["head"].weight}}, by)
    with pytest.raises(MissingNameError, match="allow_missing=True leaves them as they are"):
        aio_ckpt.load(path, {"model": net()})
    report = aio_ckpt.load(path, {"model": model}, allow_missing=True)
    assert report.missing == tuple(f"model.{name}" for name in before if name != "head.weight")
    assert f"{path}: allow_missing=True: lacks {listed(report.missing)}, left as they are" in caplog.messages
    assert torch.equal(model["head"].weight, trained["head"].weight)
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items() if name != "head.weight")


def test_of_a_module_that_is_the_whole_template_renamed_leaves_are_filled(tmp_path: Path) -> None:
    trained, model = net(), net()
    path = saved(tmp_path / "x", {"a": {"w": trained["head"].weight}, "b": trained["head"].bias}, "ours")
    rename = {"a.w": "head.weight", "b": "head.bias"}
    report = aio_ckpt.load(path, model, allow_missing=True, rename=rename)
    assert report.missing == ("words.weight",)
    assert torch.equal(model["head"].weight, trained["head"].weight)


def test_settings_of_an_optimizer_that_are_not_stored_stay(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    stored = optimizer.state_dict()
    del stored["param_groups"][0]["amsgrad"]
    path = saved(tmp_path / "x", {"opt": stored}, "ours")
    other = torch.optim.AdamW(model.parameters(), lr=2.0, amsgrad=True)
    report = aio_ckpt.load(path, {"opt": other}, allow_missing=True)
    assert report.missing == ("opt.param_groups.0.amsgrad",)
    assert (other.param_groups[0]["lr"], other.param_groups[0]["amsgrad"]) == (1.0, True)


def test_a_stateful_value_gets_what_is_not_stored_from_itself_and_types_stay(tmp_path: Path) -> None:
    class Kept:
        def __init__(self, state: dict[str, Any]) -> None:
            self.state = state

        def state_dict(self) -> dict[str, Any]:
            return self.state

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.state = state

    one = Kept({"count": Counter({3: 1}), "list": [{"t": torch.ones(1)}], "other": [1]})
    path = saved(tmp_path / "x", {"s": one}, "ours")
    two = Kept({"count": Counter({4: 1}), "list": [{"t": torch.zeros(1), "u": 5}], "other": [1, 2], "new": 6})
    report = aio_ckpt.load(path, {"s": two}, allow_missing=True)
    assert sorted(report.missing) == ["s.count.4", "s.list.0.u", "s.new"]
    assert (type(two.state["count"]), two.state["count"]) == (Counter, Counter({3: 1, 4: 1}))
    assert (two.state["list"], two.state["other"], two.state["new"]) == ([{"t": torch.ones(1), "u": 5}], [1], 6)


# -- unexpected ---------------------------------------------------------------------------------------


def test_strict_finds_a_name_beside_a_template_that_has_a_name_inside_a_module(tmp_path: Path) -> None:
    class Taking(torch.nn.Linear):
        def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
            return super().load_state_dict(state_dict, strict=False)

    model, more = Taking(2, 2), torch.ones(4)
    path = saved(tmp_path / "x", {"a": model, "a.extra": more, "zzz": more}, "ours")
    with pytest.raises(UnexpectedNameError, match="zzz"):
        aio_ckpt.load(path, {"a": model, "a.extra": more.clone()}, strict=True)


# -- another shape ------------------------------------------------------------------------------------


def test_tensors_of_another_shape_stay_and_are_reported_if_that_is_asked_for(tmp_path: Path, by: str) -> None:
    trained, grown = net(10), net(12)
    before = grown["words"].weight.detach().clone()
    path = saved(tmp_path / "x", {"model": trained, "array": torch.ones(3)}, by)
    template = {"model": grown.state_dict(), "array": torch.zeros(2).numpy()}
    with pytest.raises(TemplateMismatchError, match=r"skip_mismatched=True leaves it as it is"):
        aio_ckpt.load(path, template)
    report = aio_ckpt.load(path, template, skip_mismatched=True, strict=True)
    assert report.mismatched == ("model.words.weight", "array")
    assert torch.equal(grown["words"].weight, before)
    assert torch.equal(grown["head"].weight, trained["head"].weight)
    assert not template["array"].any()  # type: ignore[union-attr]


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    sum(parameter.sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()


def stepped(words: int) -> tuple[torch.nn.ModuleDict, torch.optim.Optimizer]:
    model = net(words)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    return model, optimizer


def test_keys_of_modules_and_of_optimizers_with_state_stay_if_their_shape_differs(tmp_path: Path, by: str) -> None:
    (trained, its), (grown, own) = stepped(10), stepped(12)
    path = saved(tmp_path / "x", {"model": trained, "opt": its}, by)
    with pytest.raises(TemplateMismatchError, match="skip_mismatched=True leaves it as it is"):
        aio_ckpt.load(path, {"model": net(12)})
    words, moments = grown["words"].weight.detach().clone(), own.state[grown["words"].weight]["exp_avg"].clone()
    report = aio_ckpt.load(path, {"model": grown, "opt": own}, skip_mismatched=True)
    assert sorted(report.mismatched) == ["model.words.weight", "opt.state.0.exp_avg", "opt.state.0.exp_avg_sq"]
    assert report.missing == ()
    assert torch.equal(grown["words"].weight, words)
    assert torch.equal(grown["head"].weight, trained["head"].weight)
    assert torch.equal(own.state[grown["words"].weight]["exp_avg"], moments)
    own.step()


@pytest.mark.parametrize("part", [lambda model: model, torch.nn.Module.state_dict], ids=["module", "state_dict"])
def test_an_optimizer_that_was_not_stepped_is_refused_the_moments_of_a_parameter_of_another_shape(
    tmp_path: Path, part: Callable[[torch.nn.Module], object]
) -> None:
    """Its ``load_state_dict`` takes them, and ``step()`` then fails with a text about sizes of tensors."""
    trained, its = stepped(10)
    path = saved(tmp_path / "x", {"model": trained, "opt": its}, "ours")
    grown = net(12)
    own = torch.optim.AdamW(grown.parameters())
    with pytest.raises(TemplateMismatchError, match=r"'opt.state.0' belongs to 'model.words.weight'.*step\(\) it once"):
        aio_ckpt.load(path, {"model": part(grown), "opt": own}, skip_mismatched=True)
    assert not own.state
    step(grown, own)
    report = aio_ckpt.load(path, {"model": part(grown), "opt": own}, skip_mismatched=True)
    assert report.mismatched == ("model.words.weight", "opt.state.0.exp_avg", "opt.state.0.exp_avg_sq")
    step(grown, own)


def test_the_moments_of_a_tied_weight_that_is_loaded_by_another_name_are_loaded(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(12, 4), "head": torch.nn.Linear(4, 12, bias=False)})
    its = torch.optim.AdamW(model["embed"].parameters())
    model["embed"].weight.sum().backward()
    its.step()
    stored = {**model.state_dict(), "head.weight": torch.ones(10, 4)}
    path = saved(tmp_path / "x", {"model": stored, "opt": its}, "ours")
    model["head"].weight = model["embed"].weight
    own = torch.optim.AdamW(model.parameters())
    report = aio_ckpt.load(path, {"model": model.state_dict(), "opt": own}, skip_mismatched=True)
    assert report.mismatched == ("model.head.weight",)
    own.step()


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
def test_what_has_no_memory_is_no_parameter_of_another_shape(tmp_path: Path) -> None:
    trained = torch.nn.Linear(3, 3)
    stored = {"w": torch.ones(2), "opt": torch.optim.SGD(trained.parameters())}
    path = saved(tmp_path / "x", stored, "ours")
    lazy = torch.optim.SGD([*torch.nn.LazyLinear(3).parameters()])
    report = aio_ckpt.load(path, {"w": torch.ones(4), "opt": lazy}, skip_mismatched=True)
    assert report.mismatched == ("w",)
    sparse = torch.eye(4).to_sparse_csr()
    assert aio_ckpt.load(path, {"w": sparse}, skip_mismatched=True).mismatched == ("w",)


def test_an_optimizer_of_other_parameters_gets_its_moments(tmp_path: Path) -> None:
    """Tensors without elements all lie at one address."""

    def made(width: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.ParameterDict({"w": torch.ones(3), "y": torch.zeros(0), "z": torch.zeros(0, width)})
        return model, torch.optim.AdamW([model["y"], model["w"]])

    trained, its = made(2)
    step(trained, its)
    path = saved(tmp_path / "x", {"model": trained, "opt": its}, "ours")
    other, own = made(3)
    assert aio_ckpt.load(path, {"model": other, "opt": own}, skip_mismatched=True).mismatched == ("model.z",)
    assert len(own.state) == 2


def test_a_load_of_an_engine_takes_skip_mismatched(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.save({"w": torch.ones(3), "v": torch.ones(2)}, step=1).result(20)
        state = {"w": torch.zeros(4), "v": torch.zeros(2)}
        assert engine.load(state, skip_mismatched=True).mismatched == ("w",)
        assert (state["w"].tolist(), state["v"].tolist()) == ([0] * 4, [1] * 2)


# -- names of a note ----------------------------------------------------------------------------------


def refusal(path: Path, model: torch.nn.Module) -> str:
    with pytest.raises(MissingNameError) as caught:
        aio_ckpt.load(path, {"model": model})
    return str(caught.value)


def test_a_note_pairs_only_names_that_differ_by_the_prefix(tmp_path: Path) -> None:
    path = saved(tmp_path / "x", {"model": net()}, "ours")
    note = refusal(path, torch.nn.ModuleDict({"module": net()}))
    assert "the template has 'module.words.weight' where 'words.weight' is stored: rename={'model': " in note
    wrapped = saved(tmp_path / "y", {"model": torch.nn.ModuleDict({"module": net()})}, "ours")
    assert "the template has 'words.weight' where 'module.words.weight' is stored: rename={" in refusal(wrapped, net())
    other = torch.nn.ModuleDict({"tokens": torch.nn.Embedding(10, 4), "out": torch.nn.Linear(4, 4)})
    note = refusal(path, other)
    assert "rename={'model.head': 'model.out'}" not in note
    assert "where" not in note
