"""A load fills the tensors of modules, optimizers and other Stateful values where they are, and runs their hooks."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import flip, steps_dir
from saved_files import data_file
from torch import nn
from wrapper_tensors import Blockwise, blockwise

from aio_ckpt import SyncCheckpointEngine
from aio_ckpt.errors import CorruptCheckpointError, MissingNameError, TemplateMismatchError

SECS = 60.0


class Box:
    """Stateful: gives what it holds, and keeps what it was given."""

    def __init__(self, **held: Any) -> None:
        self.held = held
        self.given: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        return dict(self.held)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given = state


class Copies(Box):
    """Stateful, whose ``state_dict()`` holds copies."""

    def state_dict(self) -> dict[str, Any]:
        return {name: value.clone() for name, value in self.held.items()}


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[SyncCheckpointEngine]:
    with SyncCheckpointEngine(tmp_path) as engine:
        yield engine


def trained(seed: int, kind: Callable[..., nn.Module] = nn.Sequential) -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = kind(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=seed / 100)
    for _ in range(seed):
        model(torch.randn(3, 4)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def tensors_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [value for state in optimizer.state.values() for value in state.values()]


def same(one: Any, other: Any) -> bool:
    """Whether two state dicts are equal, tensors by their bytes."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def spied(value: Any) -> list[dict[str, Any]]:
    """What ``value.load_state_dict`` is given from now on."""
    given: list[dict[str, Any]] = []
    load = value.load_state_dict

    def load_state_dict(state: dict[str, Any]) -> Any:
        given.append(state)
        return load(state)

    load_state_dict.__module__ = "torch"  # no load hook of the module's own, as far as the engine is concerned
    value.load_state_dict = load_state_dict
    return given


def test_the_state_of_an_optimizer_stays_in_its_own_tensors(engine: SyncCheckpointEngine) -> None:
    model, optimizer = trained(3)
    engine.save({"model": model, "optimizer": optimizer}).result(SECS)
    other, resumed = trained(2)
    before = tensors_of(resumed)
    for _ in range(2):
        engine.load({"model": other, "optimizer": resumed})
        assert all(now is then for now, then in zip(tensors_of(resumed), before, strict=True))
        assert same(resumed.state_dict(), optimizer.state_dict())
        assert same(other.state_dict(), model.state_dict())
        other(torch.randn(3, 4)).sum().backward()
        resumed.step()


def test_a_module_is_given_its_own_memory_and_the_versions_of_the_checkpoint(engine: SyncCheckpointEngine) -> None:
    model, _ = trained(1)
    engine.save({"model": model}).result(SECS)
    other, _ = trained(2)
    given = spied(other)
    seen: list[set[str]] = []
    other[1].register_load_state_dict_post_hook(lambda module, keys: seen.append({"hook"}))
    engine.load({"model": other})
    assert {name: tensor.data_ptr() for name, tensor in given[0].items()} == {
        name: tensor.data_ptr() for name, tensor in other.state_dict().items()
    }
    assert given[0]._metadata == model.state_dict()._metadata  # type: ignore[attr-defined]
    assert seen == [{"hook"}]
    assert same(other.state_dict(), model.state_dict())


def test_an_optimizer_without_state_is_filled_by_its_load_state_dict(engine: SyncCheckpointEngine) -> None:
    model, optimizer = trained(3)
    engine.save({"optimizer": optimizer}).result(SECS)
    fresh = torch.optim.AdamW(model.parameters())
    engine.load({"optimizer": fresh})
    assert same(fresh.state_dict(), optimizer.state_dict())


def test_a_state_dict_of_copies_gives_its_values_to_load_state_dict(engine: SyncCheckpointEngine) -> None:
    engine.save({"s": Box(a=torch.arange(4.0))}).result(SECS)
    copies = Copies(a=torch.zeros(4))
    engine.load({"s": copies})
    assert copies.given is not None
    assert copies.given["a"].tolist() == [0, 1, 2, 3]
    assert not copies.held["a"].any()


class Buffer:
    """Stateful of one's own that clears its tensor before it reads what it is given, as a replay buffer does."""

    def __init__(self, *values: float) -> None:
        self.data = torch.tensor(values)
        self.again = self.data

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"first": self.data[:3], "again": self.again[:3]}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        assert state["first"] is state["again"]
        self.data.zero_()
        self.data[:3] = state["first"]


def test_a_value_may_clear_its_tensors_before_it_reads_the_given_ones(engine: SyncCheckpointEngine) -> None:
    engine.save({"s": Buffer(1, 2, 3, 4)}).result(SECS)
    used = Buffer(7, 7, 7, 7)
    engine.load({"s": used})
    assert used.data.tolist() == [1, 2, 3, 0]


UNLIKE: dict[str, Callable[[], torch.Tensor]] = {
    "another dtype": lambda: torch.zeros(2, 2, dtype=torch.bfloat16),
    "another shape": lambda: torch.zeros(4),
    "no memory": lambda: torch.zeros(2, 2, device="meta"),
    "memory shared with itself": lambda: torch.zeros(1).expand(2, 2),
    "made in inference mode": lambda: torch.inference_mode()(torch.zeros)(2, 2),
}


@pytest.mark.parametrize("kind", UNLIKE)
def test_a_tensor_that_cannot_take_the_stored_one_is_left_to_load_state_dict(
    engine: SyncCheckpointEngine, kind: str
) -> None:
    engine.save({"s": Box(a=torch.tensor([[1.0, 2.0], [3.0, 4.0]]))}).result(SECS)
    box = Box(a=UNLIKE[kind]())
    engine.load({"s": box})
    assert box.given is not None
    assert (box.given["a"].dtype, box.given["a"].tolist()) == (torch.float32, [[1.0, 2.0], [3.0, 4.0]])
    assert box.held["a"].is_meta or not box.held["a"].any()


def test_a_transposed_tensor_is_filled_by_its_elements(engine: SyncCheckpointEngine) -> None:
    engine.save({"s": Box(a=torch.arange(6.0).reshape(2, 3))}).result(SECS)
    box = Box(a=torch.zeros(3, 2).t())
    engine.load({"s": box})
    assert box.held["a"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_objects_that_share_memory_here_and_not_in_the_checkpoint_get_a_tensor_each(
    engine: SyncCheckpointEngine,
) -> None:
    engine.save({"one": Box(a=torch.ones(4)), "other": Box(b=torch.full((4,), 2.0))}).result(SECS)
    shared = torch.zeros(6)
    one, other = Box(a=shared[:4]), Box(b=shared[2:])
    engine.load({"one": one, "other": other})
    assert one.given is not None
    assert other.given is not None
    assert (one.given["a"].tolist(), other.given["b"].tolist()) == ([1.0] * 4, [2.0] * 4)


def test_an_object_that_shares_memory_with_a_tensor_of_the_template_gets_its_own_value(
    engine: SyncCheckpointEngine,
) -> None:
    engine.save({"best": Box(a=torch.ones(4)), "w": torch.full((4,), 2.0)}).result(SECS)
    live = torch.zeros(4)
    best = Box(a=live)
    engine.load({"best": best, "w": live})
    assert best.given is not None
    assert (best.given["a"].tolist(), live.tolist()) == ([1.0] * 4, [2.0] * 4)


def test_tied_weights_stay_tied_and_those_that_are_tied_in_the_checkpoint_alone_do_not(
    engine: SyncCheckpointEngine,
) -> None:
    weight = torch.arange(4.0)
    engine.save({"s": Box(a=weight, b=weight)}).result(SECS)
    tied, live = Box(), torch.zeros(4)
    tied.held = {"a": live, "b": live}
    engine.load({"s": tied})
    assert tied.given is not None
    assert tied.given["a"] is tied.given["b"]
    assert tied.given["a"].tolist() == live.tolist() == [0, 1, 2, 3]
    apart = Box(a=torch.zeros(4), b=torch.zeros(4))
    engine.load({"s": apart})
    assert apart.given is not None
    assert apart.given["a"] is apart.given["b"]
    assert apart.given["a"].tolist() == [0, 1, 2, 3]
    assert not apart.held["a"].any()


class Tied(nn.Module):
    """Two layers, of one weight if ``is_tied``."""

    def __init__(self, *, is_tied: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight


def test_a_tied_module_takes_equal_values_of_an_untied_one_and_refuses_others(engine: SyncCheckpointEngine) -> None:
    untied, tied = Tied(is_tied=False), Tied(is_tied=True)
    engine.save({"m": untied}).result(SECS)
    before = tied.head.weight.detach().clone()
    with pytest.raises(TemplateMismatchError, match=r"'m\.head\.weight' and 'm\.embedding\.weight' are one tensor"):
        engine.load({"m": tied})
    assert torch.equal(tied.head.weight, before)
    untied.head.weight.data.copy_(untied.embedding.weight)
    engine.save({"m": untied}).result(SECS)
    engine.load({"m": tied})
    assert tied.head.weight is tied.embedding.weight
    assert torch.equal(tied.head.weight, untied.head.weight)


class Shifting(nn.Sequential):
    """Renames what it loads by a hook of its own: each stored layer is that of the layer behind it."""

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        first = {name: state[prefix + name] for name in ("2.weight", "2.bias")}
        state |= {prefix + name.replace("2", "3"): tensor for name, tensor in first.items()}
        state |= {f"{prefix}2.{name}": torch.full_like(first[f"2.{name}"], 7) for name in ("weight", "bias")}
        super()._load_from_state_dict(state, prefix, *rest)


def test_a_module_whose_own_hook_renames_what_it_loads_is_read_into_fresh_memory(engine: SyncCheckpointEngine) -> None:
    model, _ = trained(1)
    last = {f"3.{name}": torch.zeros_like(tensor) for name, tensor in model[2].state_dict().items()}
    engine.save({"model": model.state_dict() | last}).result(SECS)
    other = Shifting(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 5), nn.Linear(5, 5))
    engine.load({"model": other})
    assert torch.equal(other[3].weight, model[2].weight)
    assert bool((other[2].weight == 7).all())


def test_no_load_state_dict_is_called_where_a_block_is_damaged_and_the_error_says_that_tensors_changed(
    engine: SyncCheckpointEngine, tmp_path: Path
) -> None:
    box = Box(a=torch.ones(8 << 20), n=3, z=torch.ones(4))
    engine.save({"s": box}, 1).result(SECS)
    path = data_file(steps_dir(tmp_path, 1))
    flip(path, path.stat().st_size // 2)
    template = Box(a=torch.zeros(8 << 20), n=0, z=torch.zeros(4))
    with pytest.raises(CorruptCheckpointError, match=r"'s\.a'") as caught:
        engine.load({"s": template}, 1)
    assert caught.value.target_modified
    assert template.given is None
    assert bool(((template.held["a"] == 0) | (template.held["a"] == 1)).all())


@pytest.mark.parametrize("steps", [0, 1])
def test_what_a_load_state_dict_raises_says_whether_tensors_changed(engine: SyncCheckpointEngine, steps: int) -> None:
    model, optimizer = trained(1)
    engine.save({"optimizer": optimizer}).result(SECS)
    fewer = torch.optim.AdamW(model[0].parameters())
    for _ in range(steps):
        fewer.step()  # moments that the load fills in place
    with pytest.raises(ValueError, match="parameter group") as caught:
        engine.load({"optimizer": fewer})
    assert getattr(caught.value, "target_modified", False) == bool(steps)
    assert "leave 'optimizer' out of the template if it has other parameters" in caught.value.__notes__[-1]


def test_an_optimizer_as_the_whole_template_is_told_what_is_stored(engine: SyncCheckpointEngine) -> None:
    model, optimizer = trained(1)
    engine.save({"model": model, "optimizer": optimizer}).result(SECS)
    with pytest.raises(KeyError) as caught:
        engine.load(optimizer)
    assert "it holds 'model', 'optimizer': give a dict with such names" in caught.value.__notes__[-1]


class Refusing(Box):
    """Stateful that takes a part and raises."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held["n"] = state["n"]
        raise ValueError("refused")


class Hooked(nn.Linear):
    """Module that may take other names and shapes than it has, as its method is its own."""

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)


@pytest.mark.parametrize(("saved", "template", "changed"), [
    ({"a": nn.Linear(2, 2)}, {"a": Hooked(3, 3)}, "may be modified"),
    ({"a": Box(n=1)}, {"a": Refusing(n=0)}, "may be modified"),
    ({"a": Box(n=1), "b": nn.Linear(2, 2)}, {"a": Box(n=0), "b": Hooked(3, 3)}, "was modified"),
    ({"n": 1, "b": nn.Linear(2, 2)}, {"n": 0, "b": Hooked(3, 3)}, "was modified"),
])  # fmt: skip
def test_a_refused_load_says_whether_the_target_changed_or_may_have(
    engine: SyncCheckpointEngine, saved: dict[str, Any], template: dict[str, Any], changed: str
) -> None:
    engine.save(saved).result(SECS)
    with pytest.raises((RuntimeError, ValueError)) as caught:
        engine.load(template)
    (note,) = [note for note in caught.value.__notes__ if note.startswith("aio_ckpt")]
    assert f"the target {changed}" in note
    assert caught.value.target_modified  # type: ignore[attr-defined]


def test_a_value_that_is_no_tensor_is_refused_for_a_module_before_anything_is_touched(
    engine: SyncCheckpointEngine,
) -> None:
    engine.save({"m": {**layers(2).state_dict(), "step": 3}}).result(SECS)
    template = layers(2)
    before = {name: tensor.clone() for name, tensor in template.state_dict().items()}
    words = "lacks 1 name: 'm.step', stored for it: rename={'m.step': None} leaves them out"
    with pytest.raises(TemplateMismatchError, match=re.escape(words)) as caught:
        engine.load({"m": template})
    assert not caught.value.target_modified
    assert all(torch.equal(before[name], tensor) for name, tensor in template.state_dict().items())
    engine.load({"m": template}, rename={"m.step": None})


@pytest.mark.parametrize(("own", "rename"), [("", {"m": ""}), ("net", {"m": "net"})])
def test_the_remedy_for_a_renamed_module_names_what_is_stored(
    engine: SyncCheckpointEngine, own: str, rename: dict[str, str]
) -> None:
    saved, template = layers(2), layers(2)
    engine.save({"m": {**saved.state_dict(), "step": 3, "cfg": {"a": 1}}}).result(SECS)
    given = {own: template} if own else template
    words = r"rename=\{'m.step': None, 'm.cfg': None\} leaves them out"
    with pytest.raises(TemplateMismatchError, match=words):
        engine.load(given, rename=rename)
    engine.load(given, rename={**rename, "m.step": None, "m.cfg": None})
    assert all(map(torch.equal, template.state_dict().values(), saved.state_dict().values()))


def layers(*widths: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width) for width in widths))


@pytest.mark.parametrize("beside", [{}, {"n": 1, "t": torch.ones(3)}])
@pytest.mark.parametrize(("saved", "template", "words"), [
    (layers(2, 2), layers(2, 2, 2), "lacks 2 names: 'm.2.weight', 'm.2.bias'; allow_missing=True leaves them"),
    (layers(2, 2), layers(2), "lacks 2 names: 'm.1.weight', 'm.1.bias', stored for it: rename={'m.1': None}"),
    (layers(2, 2), layers(2, 3), "'m.1.weight' has shape (3, 3) in the template and (2, 2) in the checkpoint: skip_"),
    (nn.Linear(2, 2), nn.Linear(2, 2, bias=False), "lacks 1 name: 'm.bias', stored for it: rename={'m.bias': None}"),
    (layers(2, 2), nn.ReLU(), "'m.1.bias', stored for it: rename={'m.0': None, 'm.1': None} leaves them out"),
    (nn.ModuleDict({"a": layers(2)}), nn.ModuleDict({"b": layers(2)}), "rename={'m.a': 'm.b'} loads 'm.a.0.weight' as"),
])  # fmt: skip
def test_a_module_that_differs_is_refused_before_anything_is_touched(
    engine: SyncCheckpointEngine, saved: nn.Module, template: nn.Module, words: str, beside: dict[str, Any]
) -> None:
    engine.save({"m": saved, **beside}).result(SECS)
    before = {name: tensor.clone() for name, tensor in template.state_dict().items()}
    state = {"m": template, **{name: value * 0 for name, value in beside.items()}}
    with pytest.raises((MissingNameError, TemplateMismatchError), match=re.escape(words)) as caught:
        engine.load(state)
    assert not caught.value.target_modified
    assert all(torch.equal(before[name], tensor) for name, tensor in template.state_dict().items())
    assert all(not bool(torch.as_tensor(state[name]).any()) for name in beside)
    found = re.search(r"rename=(\{.*?\})", str(caught.value))
    if found and before:  # of a module without tensors, nothing would be left to load
        report = engine.load(state, rename=ast.literal_eval(found[1]))
        assert all(name.startswith("m.") for name in report.unexpected)
        stored = {name: tensor for name, tensor in saved.state_dict().items() if f"m.{name}" not in report.unexpected}
        assert all(map(torch.equal, template.state_dict().values(), stored.values()))


@pytest.mark.parametrize("names", [("0", "1", "2"), ("fc1", "fc2", "fc3")])
def test_no_rename_is_offered_if_several_stored_names_are_equally_close(
    engine: SyncCheckpointEngine, names: tuple[str, ...]
) -> None:
    """A guess among layers of one shape would load the weights of one into another, and nobody would be told."""
    engine.save({"m": nn.ModuleDict({name: nn.Linear(2, 2) for name in names})}).result(SECS)
    with pytest.raises(MissingNameError, match="which the template lacks") as caught:
        engine.load({"m": nn.ModuleDict({name: nn.Linear(2, 2) for name in ("enc", "mid", "dec")})})
    assert "rename={" not in str(caught.value)


def test_a_scalar_of_a_module_takes_the_only_element_that_is_stored(engine: SyncCheckpointEngine) -> None:
    class Scaled(nn.Module):
        def __init__(self, scale: torch.Tensor) -> None:
            super().__init__()
            self.scale = nn.Parameter(scale)

    module = Scaled(torch.tensor(0.0))
    engine.save({"m": Scaled(torch.tensor([2.0]))}).result(SECS)
    engine.load({"m": module})
    assert module.scale.item() == 2.0


class Extra(nn.Linear):
    extra: Any = None

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_a_module_takes_back_its_extra_state_whatever_leaves_it_has(engine: SyncCheckpointEngine) -> None:
    saved, other = (nn.Sequential(Extra(2, 2), Extra(2, 2)) for _ in range(2))
    saved[0].extra, saved[1].extra = {"scale": torch.full((2,), 3.0), "recipe": "fp8"}, {}
    engine.save({"m": saved}).result(SECS)
    engine.load({"m": other})
    assert torch.equal(other[0].extra["scale"], saved[0].extra["scale"])
    assert (other[0].extra["recipe"], other[1].extra) == ("fp8", {})


@pytest.mark.parametrize("skip_mismatched", [False, True])
def test_a_module_takes_back_an_extra_state_that_is_a_tensor_of_another_length(
    engine: SyncCheckpointEngine, skip_mismatched: bool
) -> None:
    """Those of TransformerEngine are pickles in a uint8 tensor, which grow once FP8 has begun."""
    saved, other = (nn.Sequential(Extra(2, 2)) for _ in range(2))
    saved[0].extra, other[0].extra = torch.arange(5.0), torch.zeros(1)
    engine.save({"m": saved}).result(SECS)
    report = engine.load({"m": other}, skip_mismatched=skip_mismatched)
    assert torch.equal(other[0].extra, torch.arange(5.0))
    assert not report.mismatched


@pytest.mark.parametrize("extra", [{"scale": torch.ones(2), "recipe": "fp8"}, {"recipe": "fp8"}, torch.ones(2), None])
def test_an_extra_state_that_the_module_has_no_place_for_is_refused_and_the_remedy_works(
    engine: SyncCheckpointEngine, extra: Any
) -> None:
    saved, plain = nn.Sequential(Extra(2, 2)), nn.Sequential(nn.Linear(2, 2))
    saved[0].extra, before = extra, plain[0].weight.detach().clone()
    engine.save({"m": saved}).result(SECS)
    with pytest.raises(TemplateMismatchError, match=r"rename=\{'m.0._extra_state': None\} leaves them out"):
        engine.load({"m": plain})
    assert torch.equal(plain[0].weight, before), "nothing was touched"
    engine.load({"m": plain}, rename={"m.0._extra_state": None})
    assert torch.equal(plain[0].weight, saved[0].weight)


def test_an_empty_extra_state_is_there_under_another_name_too(engine: SyncCheckpointEngine) -> None:
    saved, other = (nn.Sequential(Extra(2, 2)) for _ in range(2))
    saved[0].extra, other[0].extra = {}, {"old": 1}
    engine.save({"before": saved}).result(SECS)
    engine.load({"m": other}, rename={"before": "m"})
    assert other[0].extra == {}


def test_a_module_may_take_an_extra_state_and_give_none(engine: SyncCheckpointEngine) -> None:
    class Takes(nn.Linear):
        taken: Any = None

        def set_extra_state(self, state: Any) -> None:
            self.taken = state

    saved, other = nn.Sequential(Extra(2, 2)), nn.Sequential(Takes(2, 2))
    saved[0].extra = {"scale": torch.ones(2), "recipe": "fp8"}
    engine.save({"m": saved}).result(SECS)
    engine.load({"m": other})
    assert other[0].taken["recipe"] == "fp8"
    assert torch.equal(other[0].taken["scale"], torch.ones(2))


def test_an_extra_state_that_is_not_stored_is_missing(engine: SyncCheckpointEngine) -> None:
    saved, other = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(Extra(2, 2))
    before = other[0].weight.detach().clone()
    engine.save({"m": saved}).result(SECS)
    with pytest.raises(MissingNameError, match=r"'m.0._extra_state'; allow_missing=True"):
        engine.load({"m": other})
    assert torch.equal(other[0].weight, before), "nothing was touched"
    engine.load({"m": other}, allow_missing=True)
    assert torch.equal(other[0].weight, saved[0].weight)


def test_a_module_that_takes_other_names_than_it_has_decides_for_itself(engine: SyncCheckpointEngine) -> None:
    """A hook of torch's weight_norm reads the names that older versions wrote."""
    old = {"weight_g": torch.full((2, 1), 3.0), "weight_v": torch.eye(2), "bias": torch.zeros(2)}
    engine.save({"m": old}).result(SECS)
    new = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    engine.load({"m": new})
    assert torch.equal(new.weight, 3 * torch.eye(2))


@pytest.mark.parametrize("cast", [False, True])
def test_a_module_of_another_dtype_converts_and_the_log_says_so(
    engine: SyncCheckpointEngine, caplog: pytest.LogCaptureFixture, cast: bool
) -> None:
    engine.save({"m": layers(2)}).result(SECS)
    engine.load({"m": layers(2).bfloat16()}, cast=cast)
    told = "load_state_dict converts to the module's dtype: 'm.0.weight' (float32 -> bfloat16), 'm.0.bias' (float32 -> "
    assert (told in caplog.text) == (not cast)


def test_a_state_dict_that_is_no_mapping_is_loaded(engine: SyncCheckpointEngine) -> None:
    class Listed(Box):
        def state_dict(self) -> Any:
            return [self.held["a"], {"n": 1}]

    engine.save({"s": Listed(a=torch.arange(3.0))}).result(SECS)
    listed = Listed(a=torch.zeros(3))
    engine.load({"s": listed})
    assert listed.held["a"].tolist() == [0, 1, 2]
    assert listed.given is not None
    assert (listed.given[0].tolist(), listed.given[1:]) == ([0, 1, 2], [{"n": 1}])


class Chained:
    """Stateful, whose ``state_dict()`` is a list, as that of Megatron's ChainedOptimizer."""

    def __init__(self, model: nn.Module) -> None:
        self.optimizers = [torch.optim.AdamW([parameter]) for parameter in model.parameters()]

    def state_dict(self) -> list[Any]:
        return [optimizer.state_dict() for optimizer in self.optimizers]

    def load_state_dict(self, states: list[Any]) -> None:
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_state_dict_that_is_a_list_is_loaded(engine: SyncCheckpointEngine, steps: int) -> None:
    def chained(number: float, steps: int) -> Chained:
        model = nn.Linear(2, 2)
        chain = Chained(model)
        for _ in range(steps):
            model(torch.full((1, 2), number)).sum().backward()
            for optimizer in chain.optimizers:
                optimizer.step()
        return chain

    saved, fresh = chained(1.0, 2), chained(3.0, steps)
    engine.save({"optimizers": saved, "sparse": torch.eye(2).to_sparse()}).result(SECS)
    engine.load({"optimizers": fresh})
    assert str(fresh.state_dict()) == str(saved.state_dict())


def test_a_compound_tensor_in_a_state_dict_that_is_a_list_is_loaded(engine: SyncCheckpointEngine) -> None:
    class Wrapped:
        def __init__(self, number: float) -> None:
            self.held: list[Any] = [blockwise(number), {"x": number}]

        def state_dict(self) -> list[Any]:
            return self.held

        def load_state_dict(self, held: list[Any]) -> None:
            self.held = held

    fresh = Wrapped(0.0)
    engine.save({"list": Wrapped(2.0)}).result(SECS)
    engine.load({"list": fresh})
    assert type(fresh.held[0]) is Blockwise
