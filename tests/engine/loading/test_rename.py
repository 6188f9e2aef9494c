"""``load(rename=)``: a template whose names are not those of the checkpoint."""

from __future__ import annotations

import ast
import re
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from gated_storage import TIMEOUT
from torch import nn

import aio_ckpt
from aio_ckpt import ConfigError, MissingNameError, SyncCheckpointEngine, TemplateMismatchError, UnexpectedNameError


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[SyncCheckpointEngine]:
    with SyncCheckpointEngine(tmp_path / "root") as engine:
        yield engine


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def optimizer_of(model: nn.Module, steps: int) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    return optimizer


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


def test_leaves_and_branches_are_renamed_by_a_mapping_and_by_a_function(engine: SyncCheckpointEngine) -> None:
    engine.save({"enc": {"w": torch.ones(2), "n": 3}, "b": torch.full((2,), 2.0)}).result(TIMEOUT)
    for rename in (
        {"enc": "encoder", "b": "bias"},
        {"enc.w": "encoder.w", "enc.n": "encoder.n", "b": "bias"},
        lambda name: name.replace("enc.", "encoder.") if "." in name else "bias",
    ):
        template: dict[str, Any] = {"encoder": {"w": torch.zeros(2), "n": 0}, "bias": torch.zeros(2)}
        report = engine.load(template, rename=rename, strict=True)
        assert (template["encoder"]["w"].tolist(), template["encoder"]["n"]) == ([1, 1], 3)
        assert template["bias"].tolist() == [2, 2]
        assert report.unexpected == ()


def test_a_module_and_an_optimizer_take_a_branch_of_another_name(engine: SyncCheckpointEngine) -> None:
    model = model_of(1)
    optimizer = optimizer_of(model, 2)
    engine.save({"net": {"gen": model}, "opts": [optimizer], "step": 7}).result(TIMEOUT)
    for steps in (0, 1):
        other = model_of(2)
        state: dict[str, Any] = {"model": other, "optimizer": optimizer_of(other, steps), "step": 0}
        engine.load(state, rename={"net.gen": "model", "opts.0": "optimizer"}, strict=True)
        assert same(other, model)
        assert state["step"] == 7
        loaded = state["optimizer"].state_dict()
        assert loaded["param_groups"] == optimizer.state_dict()["param_groups"]
        assert torch.equal(loaded["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


@pytest.mark.parametrize("rename", [{"model.module": "model"}, lambda name: name.replace(".module.", ".")])
def test_a_prefix_of_a_wrapper_is_taken_off_the_names_of_a_module(engine: SyncCheckpointEngine, rename: Any) -> None:
    model, other = model_of(1), model_of(2)
    wrapped = {f"module.{name}": tensor for name, tensor in model.state_dict().items()}
    engine.save({"model": wrapped}).result(TIMEOUT)
    engine.load({"model": other}, rename=rename, strict=True)
    assert same(other, model)


def in_wrapper(kind: str, model: nn.Module) -> nn.Module:
    """The model under the names that ``torch.compile`` or DDP give it."""
    return torch.compile(model, backend="eager") if kind == "_orig_mod" else nn.Sequential(OrderedDict(module=model))  # type: ignore[return-value]


@pytest.mark.parametrize("kind", ["_orig_mod", "module"])
@pytest.mark.parametrize("stored_as", ["model", ""])
def test_the_remedy_of_a_refused_prefix_loads(engine: SyncCheckpointEngine, kind: str, stored_as: str) -> None:
    def state_of(module: nn.Module) -> Any:
        return {stored_as: module} if stored_as else module

    for wrap_saved in (True, False):
        model, other = model_of(1), model_of(2)
        saved, template = (in_wrapper(kind, model), other) if wrap_saved else (model, in_wrapper(kind, other))
        engine.save(state_of(saved)).result(TIMEOUT)
        with pytest.raises(MissingNameError) as caught:
            engine.load(state_of(template))
        assert f"'{kind}.0." in str(caught.value)
        found = re.search(r"rename=(\{.*?\})", str(caught.value))
        assert found is not None
        engine.load(state_of(template), rename=ast.literal_eval(found[1]), strict=True)
        assert same(other, model)


@pytest.mark.parametrize("saved", [
    lambda model: {"model": model, "optimizer": optimizer_of(model, 1), "step": 3},
    lambda model: {"state": {"model": model, "step": 3}, "rng": {"a": 1, "b": torch.ones(2)}},
])  # fmt: skip
@pytest.mark.parametrize("template", [lambda model: model, lambda model: model.state_dict()])
def test_the_remedy_for_a_template_that_is_a_branch_of_what_is_stored_loads_that(
    engine: SyncCheckpointEngine, saved: Any, template: Any
) -> None:
    """A trainer saves ``{"model": model, ...}``, and an evaluation loads the model."""
    model, other = model_of(1), model_of(2)
    engine.save(saved(model)).result(TIMEOUT)
    loads_by_remedy(engine, template(other))
    assert same(other, model)


@pytest.mark.parametrize("saved", [lambda model: model, lambda model: model.state_dict()])
@pytest.mark.parametrize("template", [
    lambda model: {"model": model},
    lambda model: {"model": model.state_dict()},
    lambda model: {"model": {"net": model.state_dict()}},
])  # fmt: skip
def test_the_remedy_for_a_template_with_one_branch_more_than_what_is_stored_loads_into_that(
    engine: SyncCheckpointEngine, saved: Any, template: Any
) -> None:
    model, other = model_of(1), model_of(2)
    engine.save(saved(model)).result(TIMEOUT)
    loads_by_remedy(engine, template(other))
    assert same(other, model)


@pytest.mark.parametrize("of", [lambda model: model, lambda model: model.state_dict()])
def test_a_name_beside_the_branch_keeps_its_place(engine: SyncCheckpointEngine, of: Any) -> None:
    model, other = model_of(1), model_of(2)
    template = {"step": torch.zeros(1), "model": of(other)}
    engine.save({**model.state_dict(), "step": torch.ones(1)}).result(TIMEOUT)
    loads_by_remedy(engine, template)
    assert same(other, model)
    assert template["step"].item() == 1


def test_a_remedy_for_one_of_two_wrapped_modules_names_that_one(engine: SyncCheckpointEngine) -> None:
    engine.save(model_of(1)).result(TIMEOUT)
    with pytest.raises(
        MissingNameError, match=r"what 'model' lacks .* for key in state\['model'\]\.state_dict\(\)\} adds"
    ):
        engine.load({"model": model_of(2), "ema": model_of(3)})


@pytest.mark.parametrize("missing", [nn.ReLU(), nn.Linear(3, 3)])
def test_a_module_that_is_not_stored_is_no_branch(engine: SyncCheckpointEngine, missing: nn.Module) -> None:
    engine.save({"w": torch.ones(1)}).result(TIMEOUT)
    with pytest.raises(MissingNameError) as caught:
        engine.load({"act": missing, "lin": nn.Linear(2, 2)})
    assert "without that prefix" not in str(caught.value)


def test_the_message_calls_no_state_dict_which_may_wait_for_other_ranks(engine: SyncCheckpointEngine) -> None:
    class Sharded(nn.Linear):
        calls = 0

        def state_dict(self, *args: Any, **options: Any) -> Any:
            self.calls += 1
            return super().state_dict(*args, **options)

    engine.save(nn.Linear(2, 2)).result(TIMEOUT)
    model = Sharded(2, 2)
    with pytest.raises(MissingNameError, match="without that prefix"):
        engine.load({"model": model})
    assert model.calls == 0


def test_a_leaf_above_the_branch_is_passed_by(engine: SyncCheckpointEngine) -> None:
    engine.save({"a": torch.ones(1), "a.b": {"w": torch.ones(1), "x": torch.ones(1)}, "c": torch.ones(1)}).result(
        TIMEOUT
    )
    template = {"w": torch.zeros(1), "x": torch.zeros(1)}
    loads_by_remedy(engine, template)
    assert template["w"].item() == 1


def test_many_branches_beside_the_one_are_counted(engine: SyncCheckpointEngine) -> None:
    one = {"weight": torch.ones(2), "bias": torch.ones(2)}
    engine.save({"head": one, **{f"l{i}": {"weight": torch.ones(2)} for i in range(50)}}).result(TIMEOUT)
    template = {name: torch.zeros(2) for name in one}
    with pytest.raises(
        MissingNameError, match=r"rename=\{'head': ''\}, with None for each of the 50 branches beside it"
    ):
        engine.load(template)
    loads_by_remedy(engine, template)
    assert template["bias"].tolist() == [1, 1]


def test_one_name_or_a_branch_that_lacks_a_name_of_the_template_is_no_branch(engine: SyncCheckpointEngine) -> None:
    one = torch.ones(1)
    engine.save({"a": {"step": one, "lr": one}, "w": one, "b": one}).result(TIMEOUT)
    for names in (["step"], ["step", "lr", "w"]):
        with pytest.raises(MissingNameError) as caught:
            engine.load({name: torch.zeros(1) for name in names})
        assert "all of them are stored below" not in str(caught.value)


def test_a_name_that_the_template_has_itself_is_not_offered_for_a_branch(engine: SyncCheckpointEngine) -> None:
    engine.save({"step": torch.ones(1)}).result(TIMEOUT)
    with pytest.raises(MissingNameError) as caught:
        engine.load({"step": torch.zeros(1), "optimizer": {"step": torch.zeros(1)}})
    assert "without that prefix" not in str(caught.value)


def loads_by_remedy(engine: SyncCheckpointEngine, template: Any) -> None:
    with pytest.raises(MissingNameError) as caught:
        engine.load(template)
    found = re.search(r"rename=(\{.*?\})(, with| loads| adds)", str(caught.value))
    assert found is not None, caught.value
    engine.load(template, rename=eval(found[1], {"state": template}))


def test_branches_that_all_hold_the_template_are_named(engine: SyncCheckpointEngine) -> None:
    model = model_of(1)
    engine.save({"model": model, "ema": model.state_dict(), "other": {"0": {"weight": torch.ones(1)}}}).result(TIMEOUT)
    with pytest.raises(
        MissingNameError, match=r"all of them are stored below 'ema', 'model': rename=.* loads those of"
    ):
        engine.load(model_of(2))


@pytest.mark.parametrize("names", [["step"], ["step", "exp_avg"]])
def test_names_that_are_stored_below_many_branches_are_no_branch(
    engine: SyncCheckpointEngine, names: list[str]
) -> None:
    engine.save({"optimizer": {str(i): {name: torch.ones(1) for name in names} for i in range(9)}}).result(TIMEOUT)
    with pytest.raises(MissingNameError, match=r"it holds .* names") as caught:
        engine.load({name: torch.zeros(1) for name in names})
    assert "rename={" not in str(caught.value)


def test_a_rename_of_the_caller_is_not_offered_again(engine: SyncCheckpointEngine) -> None:
    engine.save({"model": model_of(1)}).result(TIMEOUT)
    with pytest.raises(MissingNameError, match=r"rename= gives it 'model\.0\.bias' as 'model\.model\.0") as caught:
        engine.load({"model": model_of(2).state_dict()}, rename={"": "model"})
    assert "rename={" not in str(caught.value)
    assert "which the template lacks" not in str(caught.value)


@pytest.mark.parametrize(("stored", "template", "rename"), [
    ({"model": {"a": {"w": 0}}}, {"modle": {"a": {"w": 0}}}, {"model": "modle"}),
    ({"step": 0, "w": 1}, {"stpe": 0}, {"step": "stpe"}),
    ({"m": {"encoder.w": 0, "head.w": 0}}, {"m": {"encode.w": 0, "head.w": 0}}, {"m.encoder": "m.encode"}),
    ({"m": {"w": 0}}, {"m": {"w": 0, "nothing_like_it": 0}}, None),
])  # fmt: skip
def test_a_name_that_is_close_to_a_missing_one_is_offered(
    engine: SyncCheckpointEngine, stored: Any, template: Any, rename: dict[str, str] | None
) -> None:
    def tensors(values: Any) -> Any:
        return {key: tensors(each) if isinstance(each, dict) else torch.ones(2) * each for key, each in values.items()}

    engine.save(tensors(stored)).result(TIMEOUT)
    with pytest.raises(MissingNameError) as caught:
        engine.load(tensors(template))
    assert str(caught.value).endswith("allow_missing=True leaves them as they are")
    found = re.search(r"rename=(\{.*?\}) loads", str(caught.value))
    assert (found and ast.literal_eval(found[1])) == rename
    if rename:
        engine.load(tensors(template), rename=rename)


@pytest.mark.parametrize(("stored", "template", "told"), [
    ({"best": {"loss": 1.0}}, {"best": 2.0}, r"it holds names below 'best' \('best.loss'\): give a container"),
    ({"best": {"loss": torch.ones(1)}}, {"best": torch.ones(1)}, "it holds names below 'best'"),
    ({"best": 1.0}, {"best": {"loss": 2.0}}, "it holds one value as 'best', where the template has names below that"),
])  # fmt: skip
def test_a_value_where_a_container_is_stored_is_told_as_such(
    engine: SyncCheckpointEngine, stored: Any, template: Any, told: str
) -> None:
    engine.save(stored).result(TIMEOUT)
    with pytest.raises(MissingNameError, match=told) as caught:
        engine.load(template)
    assert "rename=" not in str(caught.value)
    empty = {"best": {}} if isinstance(stored["best"], dict) else {"best": 0.0}
    engine.load(empty)
    assert empty == stored


def test_what_rename_puts_in_the_place_of_another_is_told(engine: SyncCheckpointEngine) -> None:
    state = {"model": {"w": torch.ones(1)}, "ema": {"w": torch.zeros(1)}}
    engine.save(state).result(TIMEOUT)
    with pytest.raises(MissingNameError) as caught:
        engine.load(state, rename={"ema": "model"})
    assert "lacks 1 name: 'ema.w'; rename= gives it 'ema.w' as 'model.w'; allow_missing" in str(caught.value)


def test_a_module_under_another_key_is_offered_the_stored_one(engine: SyncCheckpointEngine) -> None:
    saved, other = model_of(1), model_of(2)
    engine.save({"model": saved, "optimizer": torch.optim.AdamW(saved.parameters())}).result(TIMEOUT)
    with pytest.raises(
        MissingNameError, match=r"rename=\{'model': 'models'\} loads 'model' as 'models'; allow_missing"
    ):
        engine.load({"models": other})
    with pytest.raises(
        MissingNameError, match=r"it holds .* names: 'model.0.bias', .*which the template lacks, and rename="
    ):
        engine.load({"net": other})
    engine.load({"models": other}, rename={"model": "models"})
    assert same(other, saved)


@pytest.mark.parametrize("by_function", [False, True])
def test_none_leaves_a_leaf_or_a_branch_out(engine: SyncCheckpointEngine, by_function: bool) -> None:
    model = model_of(1)
    optimizer = torch.optim.AdamW(model.parameters())
    engine.save({"model": model, "optimizer": optimizer, "n": 1}).result(TIMEOUT)
    names = [name for name in model.state_dict() if not name.startswith("0.")]
    out = {f"model.{name}": None for name in names}
    smaller = nn.Sequential(model_of(2)[0])
    report = engine.load(
        {"model": smaller, "optimizer": optimizer, "n": 0},
        rename=(lambda name: out.get(name, name)) if by_function else out,
    )
    assert report.unexpected == tuple(sorted(out))
    with pytest.raises(MissingNameError, match=r"lacks 1 name: 'n'; it holds \d+ names: 'model\.0\.bias', "):
        engine.load({"n": 0}, rename={"n": None})
    assert torch.equal(smaller[0].weight, model[0].weight)


def test_a_checkpoint_of_stock_is_renamed(tmp_path: Path) -> None:
    model, other = model_of(1), model_of(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"net": model.state_dict()}, checkpoint_id=tmp_path / "stock", no_dist=True)
    aio_ckpt.load(tmp_path / "stock", {"model": other}, rename={"net": "model"}, strict=True)
    assert same(other, model)
    aio_ckpt.load(tmp_path / "stock", fresh := model_of(3), rename={"net": ""}, strict=True)
    assert same(fresh, model)


def test_names_are_exchanged_and_a_renamed_one_takes_the_place_of_another(engine: SyncCheckpointEngine) -> None:
    engine.save({"a": torch.ones(1), "b": torch.full((1,), 2.0)}).result(TIMEOUT)
    template = {"a": torch.zeros(1), "b": torch.zeros(1)}
    engine.load(template, rename={"a": "b", "b": "a"})
    assert (template["a"].item(), template["b"].item()) == (2, 1)
    report = engine.load(alone := {"a": torch.zeros(1)}, rename={"b": "a"})
    assert (alone["a"].item(), report.unexpected) == (2, ("a",))
    with pytest.raises(UnexpectedNameError, match="'a'"):
        engine.load(alone, rename={"b": "a"}, strict=True)


def test_errors_name_both(engine: SyncCheckpointEngine) -> None:
    engine.save({"enc": {"w": torch.ones(2)}, "n": 3}).result(TIMEOUT)
    with pytest.raises(TemplateMismatchError, match=r"'encoder.w' \(stored as 'enc.w'\) has shape"):
        engine.load({"encoder": {"w": torch.zeros(3)}}, rename={"enc": "encoder"})
    with pytest.raises(MissingNameError, match=r"lacks 1 name: 'encode.w'.*rename= gives it 'enc.w' as 'encoder.w'"):
        engine.load({"encode": {"w": torch.zeros(2)}}, rename={"enc": "encoder"})
    with pytest.raises(MissingNameError, match=r"rename= names 'encoder', and nothing is stored there; aio-ckpt insp"):
        engine.load({"encoder": {"w": torch.zeros(2)}}, rename={"encoder": "e"})
    swapped = r"names 'encoder', and nothing is stored there; 'enc' is stored, and .* give \{'enc': 'encoder'\}"
    with pytest.raises(MissingNameError, match=swapped):
        engine.load({"encoder": {"w": torch.zeros(2)}}, rename={"encoder": "enc"})
    assert engine.load({"n": 0}, rename={"enc": "encoder"}).unexpected == ("enc.w",)


def test_two_names_that_become_one_and_a_function_that_returns_no_text_are_refused(
    engine: SyncCheckpointEngine,
) -> None:
    engine.save({"a": torch.ones(1), "b": torch.ones(1)}).result(TIMEOUT)
    template = {"c": torch.zeros(1)}
    with pytest.raises(ConfigError, match=r"makes one name, 'c', of 'a' and 'b'"):
        engine.load(template, rename=lambda name: "c")
    with pytest.raises(ConfigError, match=r"makes 3 of 'a'"):
        engine.load(template, rename=lambda name: 3)  # type: ignore[arg-type,return-value]
    assert not template["c"].any()


def test_leaves_inside_of_an_optimizer_cannot_be_renamed_singly(engine: SyncCheckpointEngine) -> None:
    model = model_of(1)
    engine.save({"optimizer": optimizer_of(model, 1)}).result(TIMEOUT)
    rename = {"optimizer.state.0.exp_avg": "optimizer.state.0.momentum"}
    with pytest.raises(TemplateMismatchError, match=r"'optimizer' is a AdamW, .*rename the whole branch"):
        engine.load({"optimizer": optimizer_of(model, 1)}, rename=rename)
