"""Matching: which stored values go where, what is refused, and that nothing of the template is touched. No files."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_maker import content_of, opened_checkpoint, opened_plain_dcp

from aio_ckpt.checkpoint.open import Checkpoint
from aio_ckpt.checkpoint.read_context import ReadContext
from aio_ckpt.config import EngineConfig
from aio_ckpt.errors import (
    AioCkptError,
    CorruptCheckpointError,
    MissingNameError,
    TemplateMismatchError,
    UnexpectedNameError,
)
from aio_ckpt.leaves.values import PerRank
from aio_ckpt.match.match import Match, match_template
from aio_ckpt.match.options import LoadOptions
from aio_ckpt.match.rename import renamed
from aio_ckpt.match.takers import Fetched

NOTHING: Any = None


def match(stored: object, template: object, *, rank: int = 0, world_size: int = 1, **options: Any) -> Match:
    """Match a template with a state, with the states of several ranks if they are a list, or with a checkpoint."""
    rename = options.pop("rename", None)
    if not isinstance(stored, Checkpoint):
        states = stored if isinstance(stored, list) else [stored]
        stored = opened_checkpoint([content_of(state, number) for number, state in enumerate(states)])
    if rename is not None:
        stored = renamed(stored, rename, rank)
    ctx = ReadContext(config=EngineConfig(), storage=NOTHING, executor=NOTHING, rank=rank, world_size=world_size)
    return match_template(ctx, stored, template, LoadOptions(**options))


def put(found: Match, **values: object) -> None:
    """Give the takers values as if a load had read them."""
    puts = [taker.prepare(Fetched(values=values)) for taker in found.takers]
    is_modified = found.fills_template
    for put_one in puts:
        is_modified = put_one(is_modified)


def filled(found: Match) -> dict[str, object]:
    """The memory that each stored tensor is read into: a tensor of the template, or None for a new one."""
    exact: dict[str, object] = {item.name: tensor for item, tensor, _ in found.fills.exact}
    return exact | {fill.name: fill.target for fill in found.fills.others}


# -- what is read into which memory ---------------------------------------------------------------------


def test_a_tensor_of_the_stored_bytes_is_filled_exactly_and_one_of_another_layout_is_not() -> None:
    template = {"a": torch.zeros(3, 4), "b": torch.zeros(4, 3).t(), "c": torch.zeros(6, 4)[::2]}
    found = match({name: torch.ones(3, 4) for name in "abc"}, template)
    assert [(item.name, tensor is template["a"], address) for item, tensor, address in found.fills.exact] == [
        ("a", True, template["a"].data_ptr())
    ]
    assert [(fill.name, fill.target) for fill in found.fills.others] == [("b", template["b"]), ("c", template["c"])]


def test_an_exact_tensor_of_other_bytes_is_none() -> None:
    stored = {"w": torch.zeros(2, dtype=torch.complex64), "n": torch.zeros(2)}
    template = {"w": torch.zeros(2, dtype=torch.complex64).conj(), "n": torch._neg_view(torch.zeros(2))}
    found = match(stored, template)
    assert not found.fills.exact
    assert [fill.name for fill in found.fills.others] == ["w", "n"]


def test_arrays_are_filled_in_place_and_numpy_scalars_and_read_only_arrays_are_replaced() -> None:
    fixed = np.zeros(3)
    fixed.flags.writeable = False
    template = {"array": np.zeros(3), "fixed": fixed, "scalar": np.float32(0)}
    found = match({"array": np.ones(3), "fixed": np.ones(3), "scalar": np.float32(1)}, template)
    memory = filled(found)
    assert isinstance(memory["array"], torch.Tensor)
    assert memory["array"].data_ptr() == template["array"].__array_interface__["data"][0]
    assert (memory["fixed"], memory["scalar"]) == (None, None)
    put(found, fixed=torch.full((3,), 5.0, dtype=torch.float64), scalar=torch.tensor(4.0))
    assert template["fixed"].tolist() == [5, 5, 5]
    assert (template["scalar"], type(template["scalar"])) == (4, np.float32)


def test_objects_are_read_and_set_and_need_no_memory() -> None:
    template = {"n": 0, "in": {"text": "a"}, "w": torch.zeros(1)}
    found = match({"n": 5, "in": {"text": "b"}, "w": torch.ones(1)}, template)
    assert found.fills.objects == ["n", "in.text"]
    assert list(filled(found)) == ["w"]
    put(found, **{"n": 5, "in.text": "b"})
    assert (template["n"], template["in"]) == (5, {"text": "b"})


def test_a_value_without_a_shape_takes_a_tensor_and_a_whole_branch() -> None:
    template: dict[str, Any] = {"best": None, "state": {}, "number": 0.0}
    stored = {"best": torch.ones(2), "state": {"m": torch.ones(2), "k": 1}, "number": torch.ones(3)}
    found = match(stored, template)
    assert filled(found) == {"best": None, "state.m": None, "number": None}
    assert found.fills.objects == ["state.k"]
    assert found.unexpected == ()
    values = {"best": torch.ones(2), "state.m": torch.full((2,), 2.0), "number": torch.ones(3)}
    put(found, **values, **{"state.k": 1})
    assert template["best"] is values["best"]
    assert template["number"] is values["number"]
    assert template["state"] == {"m": values["state.m"], "k": 1}


def test_nothing_of_the_template_is_touched_by_match_nor_by_what_is_prepared() -> None:
    model = torch.nn.Linear(2, 2)
    template = {"w": torch.zeros(2), "n": 0, "model": model, "any": None}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = match({"w": torch.ones(2), "n": 1, "model": torch.nn.Linear(2, 2), "any": torch.ones(1)}, template)
    values = {"n": 1, "any": torch.ones(1), "model.weight": torch.ones(2, 2), "model.bias": torch.ones(2)}
    for taker in found.takers:
        taker.prepare(Fetched(values=values))
    assert (template["n"], template["any"]) == (0, None)
    assert not template["w"].any()
    assert template["w"]._version == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_stock_has_no_items_yet_so_its_tensors_are_not_filled_exactly() -> None:
    template = {"w": torch.zeros(3), "n": 0}
    found = match(opened_plain_dcp({"w": torch.ones(3), "n": 1}), template)
    assert not found.fills.exact
    assert filled(found) == {"w": template["w"]}
    assert found.fills.objects == ["n"]


# -- missing and unexpected -----------------------------------------------------------------------------


def test_missing_names_are_all_listed_with_the_remedy_or_left_as_they_are() -> None:
    template = {"a": torch.zeros(1), "b": torch.zeros(1), "c": 0}
    with pytest.raises(MissingNameError, match=r"lacks 2 names: 'b', 'c'; allow_missing=True leaves them"):
        match({"a": torch.ones(1)}, template)
    found = match({"a": torch.ones(1)}, template, allow_missing=True)
    assert found.missing == ("b", "c")
    assert list(filled(found)) == ["a"]
    put(found)
    assert template["c"] == 0


@pytest.mark.parametrize(
    ("stored", "template", "remedy"),
    [
        ({"r": PerRank(1)}, {"r": 0}, "it holds 'r' of each rank by itself: give it as PerRank(...)"),
        ({"r": 1}, {"r": PerRank(0)}, "it holds 'r' of all ranks: give that without PerRank"),
    ],
)
def test_a_value_of_one_rank_and_one_of_all_ranks_are_told_apart(stored: Any, template: Any, remedy: str) -> None:
    with pytest.raises(MissingNameError, match=re.escape(remedy)):
        match(stored, template)


def test_a_rank_that_did_not_save_is_told_so_of_its_own_values() -> None:
    stored = [{"rng": PerRank(rank)} for rank in range(2)]
    with pytest.raises(MissingNameError, match=r"'rng' is PerRank, and rank 2 did not save: 2 saved. .*allow_missing"):
        match(stored, {"rng": PerRank(0)}, rank=2, world_size=3)


def test_unexpected_names_are_listed_and_strict_refuses_them() -> None:
    stored = {"a": torch.ones(1), "z": torch.ones(1), "k": 1}
    assert match(stored, {"a": torch.zeros(1)}).unexpected == ("k", "z")
    with pytest.raises(UnexpectedNameError, match="the template lacks 2 names: 'k', 'z'"):
        match(stored, {"a": torch.zeros(1)}, strict=True)


def test_each_rank_expects_what_it_saved_and_other_ranks_lose_values_of_one_rank() -> None:
    stored = [{f"stage{rank}": torch.ones(1), "rng": PerRank(rank)} for rank in range(2)]
    found = match(stored, {"stage1": torch.zeros(1), "rng": PerRank(0)}, rank=1, world_size=2)
    assert (found.unexpected, found.dropped) == ((), ())
    found = match(stored, {"stage0": torch.zeros(1), "rng": PerRank(0)})
    assert (found.unexpected, found.dropped) == (("stage1",), ("rng.rank1",))


# -- shapes, dtypes and kinds ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored", "template", "text"),
    [
        (torch.ones(3), torch.zeros(4), r"'x' has shape (4,) in the template and (3,) in the checkpoint"),
        (torch.ones(3), torch.zeros(3, 1), r"'x' has shape (3, 1) in the template and (3,) in the checkpoint"),
        (torch.ones(3), torch.zeros(3).half(), "is torch.float16 in the template and torch.float32"),
        (torch.ones(3), np.zeros(3), "is torch.float64 in the template and torch.float32"),
        (5, torch.zeros(1), "is a tensor in the template and an object in the checkpoint"),
        (5, np.zeros(1), "is an array in the template and an object in the checkpoint"),
        (torch.ones(3), np.array(["a"]), "in the template and a tensor in the checkpoint"),
        (torch.ones(2, 2), torch.zeros(1, 2).expand(2, 2), "shares memory with itself in the template"),
        (torch.ones(2, 2).to_sparse(), torch.zeros(2, 2), "is a plain tensor in the template and a sparse_coo tensor"),
        (torch.ones(2, 2), torch.zeros(2, 2).to_sparse(), "is a sparse_coo tensor in the template and a plain tensor"),
    ],
)
def test_what_does_not_fit_is_named_with_both_sides(stored: Any, template: Any, text: str) -> None:
    with pytest.raises(TemplateMismatchError, match=re.escape(text)) as caught:
        match({"x": stored, "fits": torch.ones(1)}, {"x": template, "fits": torch.zeros(1)})
    assert "fits" not in str(caught.value)


def test_a_cast_is_asked_for_and_a_smaller_range_is_told() -> None:
    stored = {"small": torch.ones(2), "wide": torch.ones(2), "array": np.ones(2), "real": torch.ones(2)}
    template = {"small": torch.zeros(2).half(), "wide": torch.zeros(2).double(), "array": np.zeros(2, np.float16)}
    with pytest.raises(TemplateMismatchError, match="cast=True converts it"):
        match(stored, template)
    found = match(stored, template, cast=True)
    assert found.narrowed == ("'small' (float32 -> float16)", "'array' (float64 -> float16)")
    with pytest.raises(TemplateMismatchError, match="which cast=True does not convert"):
        match(stored, {"real": torch.zeros(2, dtype=torch.int32)}, cast=True)


def test_tensors_of_another_shape_are_left_as_they_are_if_asked_for() -> None:
    model = torch.nn.Linear(2, 3)
    template = {"x": torch.zeros(4), "y": torch.zeros(1), "model": model}
    stored = {"x": torch.ones(3), "y": torch.ones(1), "model": torch.nn.Linear(2, 5)}
    found = match(stored, template, skip_mismatched=True)
    assert found.mismatched == ("x", "model.weight", "model.bias")
    assert list(filled(found)) == ["y"]
    before = model.weight.clone()
    put(found)
    assert torch.equal(model.weight, before)


# -- one memory for several names -----------------------------------------------------------------------


def test_one_tensor_under_two_names_takes_one_value_and_not_two() -> None:
    tensor = torch.zeros(3)
    equal, other = {"a": torch.ones(3), "b": torch.ones(3)}, {"a": torch.ones(3), "b": torch.zeros(3)}
    assert len(match(equal, {"a": tensor, "b": tensor}).fills.exact) == 2
    with pytest.raises(TemplateMismatchError, match=r"'b' shares memory with 'a' .* holds other values for it"):
        match(other, {"a": tensor, "b": tensor})
    with pytest.raises(TemplateMismatchError, match=r"'a' shares memory with 'b' .* is another view of it"):
        match({"a": torch.ones(3), "b": torch.ones(2)}, {"a": tensor, "b": tensor[:2]})


def linear() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 3))


BESIDE_A_MODULE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "its state_dict": (lambda model: model.state_dict(), r"give it memory of its own \(\.clone\(\)\)"),
    "the module again": (lambda model: model, "give a copy of one of both modules"),
    "a module in it": (lambda model: {"0": model[0]}, "give a copy of one of both modules"),
}


@pytest.mark.parametrize("beside", BESIDE_A_MODULE)
@pytest.mark.parametrize("names", ["mx", "xm"])
def test_a_module_and_what_shares_its_memory_take_one_value_and_not_two(beside: str, names: str) -> None:
    """load_state_dict() would write over what was loaded before, and the load would report success."""
    make, remedy = BESIDE_A_MODULE[beside]
    saved, model = linear(), linear()
    made = {"m": model, "x": make(model)}
    template = {name: made[name] for name in names}
    other = {name: tensor + 1 for name, tensor in saved.state_dict().items()}
    why = (
        r"'[mx]\.0\.weight' shares memory with '[mx]\.0\.weight' in the template, and the checkpoint holds other values"
    )
    with pytest.raises(TemplateMismatchError, match=f"{why} for it: {remedy}"):
        match({"m": saved, "x": other}, template)
    assert set(match({"m": saved, "x": saved.state_dict()}, template).missing) == set()
    stock = opened_plain_dcp({"m": saved.state_dict(), "x": {name: tensor.clone() for name, tensor in other.items()}})
    assert sorted(map(sorted, match(stock, template).tied)) == [["m.0.bias", "x.0.bias"], ["m.0.weight", "x.0.weight"]]


def test_a_leaf_that_is_a_view_of_a_module_is_refused() -> None:
    model = linear()
    with pytest.raises(TemplateMismatchError, match=r"'x' shares memory with 'm\.0\.weight' .* is another view of it"):
        match({"m": linear(), "x": torch.ones(2)}, {"m": model, "x": model[0].weight.data[1]})


def test_an_optimizer_and_its_own_moment_take_two_values() -> None:
    """Its load_state_dict() keeps the tensors that it is given, and so writes over nothing."""
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([weight], lr=1, momentum=0.9)
    weight.grad = torch.ones(3)
    optimizer.step()
    moment = optimizer.state[weight]["momentum_buffer"]
    found = match({"o": optimizer.state_dict(), "x": torch.ones(3)}, {"o": optimizer, "x": moment})
    assert filled(found)["o.state.0.momentum_buffer"] is None


def test_the_checksums_of_stock_are_not_read_yet_so_the_pair_is_compared_later() -> None:
    tensor = torch.zeros(3)
    found = match(opened_plain_dcp({"a": torch.ones(3), "b": torch.ones(3)}), {"a": tensor, "b": tensor})
    assert found.tied == [("a", "b")]


# -- rename ---------------------------------------------------------------------------------------------


def test_rename_finds_leaves_and_branches_under_other_names() -> None:
    stored = {"old": torch.ones(1), "model": {"w": torch.ones(2)}}
    template = {"new": torch.zeros(1), "net": {"w": torch.zeros(2)}}
    found = match(stored, template, rename={"old": "new", "model": "net"})
    assert filled(found) == {"old": template["new"], "model.w": template["net"]["w"]}
    assert found.unexpected == ()


def test_a_fault_of_a_renamed_leaf_tells_its_stored_name() -> None:
    with pytest.raises(TemplateMismatchError, match=r"'new' \(stored as 'old'\) has shape"):
        match({"old": torch.ones(1)}, {"new": torch.zeros(2)}, rename={"old": "new"})
    with pytest.raises(MissingNameError, match="rename= gives it 'old' as 'typo'"):
        match({"old": torch.ones(1)}, {"new": torch.zeros(1)}, rename={"old": "typo"})


def test_a_stateful_value_takes_a_renamed_branch_and_no_leaves_from_several() -> None:
    stored = {"a": {"s": 1, "t": 2}, "b": {"u": 3}}
    taken = Taking()
    put(match(stored, {"x": taken}, rename={"a": "x"}), **{"x.s": 1, "x.t": 2})
    assert taken.given == [{"s": 1, "t": 2}]
    with pytest.raises(TemplateMismatchError, match="rename= changes names inside of what is stored for it"):
        match(stored, {"x": Taking()}, rename={"a.s": "x.s", "b.u": "x.u"})


# -- Stateful values ------------------------------------------------------------------------------------


class Taking:
    """A Stateful value that notes what it is given."""

    def __init__(self, state: Any = None) -> None:
        self.state, self.given = state, list[Any]()

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.given.append(state)


def test_the_tensors_of_a_module_are_filled_in_place_and_it_is_given_them() -> None:
    model = torch.nn.Linear(2, 3)
    found = match({"model": torch.nn.Linear(2, 3)}, {"model": model})
    fills = {fill.name: fill for fill in found.fills.others}
    for name, parameter in model.named_parameters():
        fill = fills[f"model.{name}"]
        assert isinstance(fill.target, torch.Tensor)
        assert fill.target.data_ptr() == fill.address == parameter.data_ptr()


def test_tensors_that_share_memory_with_another_leaf_are_read_into_new_memory() -> None:
    model = torch.nn.Linear(2, 3)
    saved = torch.nn.Linear(2, 3)
    stored = {"model": saved, "bias": saved.bias.detach()}
    memory = filled(match(stored, {"model": model, "bias": model.bias.detach()}))
    assert memory["model.bias"] is None
    assert memory["model.weight"] is not None


def test_what_a_fresh_optimizer_lacks_is_read_into_new_memory() -> None:
    def optimizer() -> torch.optim.Optimizer:
        return torch.optim.Adam([torch.nn.Parameter(torch.ones(2))])

    stepped = optimizer()
    stepped.param_groups[0]["params"][0].grad = torch.ones(2)
    stepped.step()
    found = match({"o": stepped}, {"o": optimizer()})
    assert {name for name, target in filled(found).items() if target is None} == {
        "o.state.0.step",
        "o.state.0.exp_avg",
        "o.state.0.exp_avg_sq",
    }


def test_a_stateful_value_is_given_what_its_state_dict_was_even_none() -> None:
    taking = Taking()
    found = match({"s": Taking(None), "t": Taking({"k": 1})}, {"s": taking, "t": Taking({"k": 0})})
    assert sorted(found.fills.objects) == ["s", "t.k"]
    put(found, **{"s": None, "t.k": 1})
    assert taking.given == [None]


def test_a_module_for_which_a_leaf_or_nothing_is_stored_is_refused() -> None:
    with pytest.raises(TemplateMismatchError, match="'m' is a Linear in the template and a single leaf"):
        match({"m": 5}, {"m": torch.nn.Linear(1, 1)})
    with pytest.raises(MissingNameError, match="'m'"):
        match({"n": 5}, {"m": torch.nn.Linear(1, 1), "n": 0})


def test_with_allow_missing_a_module_keeps_what_is_not_stored_and_the_names_are_told() -> None:
    model = torch.nn.Linear(2, 2)
    before = model.bias.detach().clone()
    found = match({"m": torch.nn.Linear(2, 2, bias=False)}, {"m": model}, allow_missing=True)
    put(found, **{"m.weight": torch.full((2, 2), 7.0)})
    assert found.all_missing == ("m.bias",)
    assert torch.equal(model.bias, before)
    assert bool((model.weight == 7).all())


class OneBuffer(torch.nn.Module):
    """A module with one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("w", torch.zeros(2))


def test_an_object_that_needs_trust_stays_and_modifies_nothing() -> None:
    template = {"n": 0, "m": OneBuffer()}
    found = match({"n": 5, "m": OneBuffer()}, template)
    fetched = Fetched(values={"m.w": torch.ones(3)}, untrusted={"n": "why"}, skip_untrusted=True)
    leaves, module = found.takers
    assert leaves.prepare(fetched)(False) is False
    assert template["n"] == 0
    with pytest.raises(RuntimeError, match="size mismatch") as caught:
        module.prepare(fetched)(False)
    assert "refused what step 7 at made holds for it; the target may be modified" in caught.value.__notes__[0]
    with pytest.raises(RuntimeError, match="size mismatch") as caught:
        module.prepare(fetched)(True)
    assert "the target was modified" in caught.value.__notes__[0]


# -- compound tensors -----------------------------------------------------------------------------------


def test_a_sparse_tensor_is_filled_by_its_parts_and_gets_the_stored_mark() -> None:
    stored = torch.eye(3).to_sparse()
    template = {"s": torch.sparse_coo_tensor(stored.indices(), torch.zeros(3), (3, 3), is_coalesced=False)}
    found = match({"s": stored}, template)
    assert all(target is not None for target in filled(found).values())
    assert len(filled(found)) == 2
    put(found)
    assert template["s"].is_coalesced()


def test_parts_that_make_no_tensor_are_damage_and_nothing_is_set() -> None:
    stored = torch.eye(3).to_sparse()
    template = {"s": torch.sparse_coo_tensor(stored.indices(), torch.zeros(3), (3, 3)), "n": 0}
    found = match({"s": stored, "n": 1}, template)
    template["s"]._indices().fill_(9)  # what a load would have read
    with pytest.raises(CorruptCheckpointError, match="'s': its parts are of no tensor"):
        put(found, n=1)
    assert template["n"] == 0


def test_sparse_tensors_with_other_parts_are_refused() -> None:
    with pytest.raises(AioCkptError, match="'s"):
        match({"s": torch.eye(3).to_sparse()}, {"s": torch.eye(4).to_sparse()})


def test_the_path_of_the_checkpoint_is_in_every_error() -> None:
    for stored, template in (({}, {"a": 1}), ({"a": torch.ones(1)}, {"a": torch.ones(2)})):
        with pytest.raises(AioCkptError, match=f"^{Path('made')}: "):
            match(stored, template)
