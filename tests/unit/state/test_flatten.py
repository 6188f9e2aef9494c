"""The walk: names and leaves as DCP has them, exact round trips, refusals by name."""

from __future__ import annotations

import collections
import collections.abc
import dataclasses
import random
import sys
import threading
import types
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from tree_states import adamw, build_below, round_trip, same, stored, t, through_skeleton

from aio_ckpt.errors import (
    EmptyStateError,
    SourceChangedError,
    UnsupportedLeafError,
)
from aio_ckpt.leaves.values import LeafKind, PerRank, Shard
from aio_ckpt.state.build import build
from aio_ckpt.state.check_leaves import check_leaves
from aio_ckpt.state.flatten import check_not_empty, flatten, read_template
from aio_ckpt.state.leaf_or_container import CODES
from aio_ckpt.state.put_back import put_back
from aio_ckpt.state.skeleton import Container


def test_an_adamw_state_comes_back_exactly_and_is_taken_by_the_optimizer():
    model, optimizer = adamw()
    state = {"model": dict(model.state_dict()), "optim": optimizer.state_dict()}
    back = round_trip(state)
    assert same(back, state)
    assert list(back["optim"]["state"]) == [0, 1, 2, 3]
    assert type(back["optim"]["param_groups"][0]["betas"]) is tuple
    _, fresh = adamw()
    fresh.load_state_dict(back["optim"])
    assert same(fresh.state_dict(), optimizer.state_dict())


def test_a_fresh_optimizer_keeps_its_empty_state():
    optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    back = round_trip({"optim": optimizer.state_dict()})
    assert back["optim"]["state"] == {}
    optimizer.load_state_dict(back["optim"])


def test_containers_keys_and_order_come_back_as_they_were():
    t = torch.arange(3)
    state = {
        "ordered": OrderedDict(b=t, a=OrderedDict()),
        7: {True: 1, None: 2, 1.5: 3, -0.0: 4, (1, "x", (None, 2.5)): 5, 2**70: 6},
        "empty": {"dict": {}, "list": [], "tuple": (), "deep": [{}, [], t]},
        "tuple": (t, 1, (2, [t, "x"])),
        "list": [t, [1, 2], {}],
        "milestones": collections.Counter({30: 1, 80: 2}),
        "size": torch.Size([2, 3]),
        "": 0,
    }
    assert same(round_trip(state), state)


def test_random_states_come_back_and_are_taken():
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "generator": np.random.default_rng(3).bit_generator.state,
        "torch": torch.get_rng_state(),
    }
    back = round_trip(state)
    assert same(back["python"], state["python"])
    assert same(back["numpy"], state["numpy"])
    assert same(back["generator"], state["generator"])
    random.setstate(back["python"])
    np.random.set_state(back["numpy"])
    torch.set_rng_state(back["torch"])
    assert flatten(state, rank=0).names[:2] == ["python", "numpy"]


def test_modules_optimizers_and_schedulers_are_entered_at_any_depth():
    model, optimizer = adamw()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5])
    flat = flatten({"train": [model, {"o": optimizer}], "s": scheduler, "t": (model,)}, rank=0)
    assert {"train.0.0.weight", "train.1.o.state.0.exp_avg", "s.milestones.3", "t.0.1.bias"} <= set(flat.names)
    back = build(flat.skeleton, stored(flat), rank=0)
    scheduler.load_state_dict(back["s"])
    assert same(back["train"][1]["o"], optimizer.state_dict())
    assert flatten(model, rank=0).names == list(model.state_dict())


def test_a_per_rank_value_is_named_by_its_rank_and_given_back_bare():
    state = {"rng": PerRank(5), "data": PerRank({"pos": [1, 2], "w": torch.ones(2)}), "in_list": [PerRank(1)]}
    flat = flatten(state, rank=3)
    assert flat.names == ["rng.rank3", "data.rank3.pos", "data.rank3.w", "in_list.0.rank3"]
    assert flat.skeleton == flatten(state, rank=0).skeleton
    expected = {"rng": 5, "data": {"pos": [1, 2], "w": torch.ones(2)}, "in_list": [1]}
    assert same(round_trip(state, rank=3), expected)


def test_shared_containers_stay_shared_and_every_place_has_its_names():
    shared = {"w": t(), "inner": [t(2), {"lr": 0.1}]}
    state = {"a": shared, "b": [shared, (shared,)], "c": {"inner": shared["inner"]}}
    flat = flatten(state, rank=0)
    assert {"a.w", "b.0.w", "b.1.0.w", "c.inner.0"} <= set(flat.names)
    back = through_skeleton(state)
    assert back["a"] is back["b"][0] is back["b"][1][0]
    assert back["c"]["inner"] is back["a"]["inner"]
    back["a"]["w"][0] = 5
    assert back["b"][0]["w"][0] == 5
    part = through_skeleton(state, only=["c", "b.0.w"])
    assert same(part, {"b": [{"w": t()}, None], "c": state["c"]})
    leaves = stored(flat)
    below = build_below(flat.skeleton, "b", leaves, rank=0)
    assert below[0] is below[1][0]
    assert same(below[0]["w"], t())
    assert same(build_below(flat.skeleton, "c", leaves, rank=0), state["c"])


def test_a_container_that_holds_itself_comes_back_holding_itself():
    state = {"w": t(), "list": [t()], "names": types.SimpleNamespace(w=t())}
    state["me"] = state
    state["list"].append({"up": state["list"], "top": state})
    state["names"].me = state["names"]
    back = through_skeleton(state)
    assert back["me"] is back
    assert back["list"][1]["up"] is back["list"]
    assert back["list"][1]["top"] is back
    assert back["names"].me is back["names"]
    put_back(state, {"w": 1}, rank=0)
    assert state["me"] is state


def test_a_container_in_a_cycle_may_stand_in_many_places():
    loop = [t()]
    loop.append(loop)
    parent, child = {"w": t(1)}, {"w": t(2)}
    parent["child"], child["parent"] = child, parent
    for state in ({"a": loop, "b": [loop, loop]}, {"nodes": [parent, child, parent]}, {"m": {"p": parent}, "c": child}):
        back = through_skeleton(state)
        if "a" in state:
            assert back["a"][1] is back["a"] is back["b"][0] is back["b"][1]
        else:
            one, other = back["nodes"][:2] if "nodes" in back else (back["m"]["p"], back["c"])
            assert one["child"] is other
            assert other["parent"] is one
            assert (one["w"].tolist(), other["w"].tolist()) == ([1, 1], [2, 2])
        flat = flatten(state, rank=0)
        only = build(flat.skeleton, stored(flat), rank=0, only=["b", "nodes.1", "c"])
        assert only.keys() == {"a": {"b"}, "nodes": {"nodes"}, "m": {"c"}}[next(iter(state))]


def test_temporary_containers_are_never_taken_for_shared_ones():
    class Fresh:
        def state_dict(self):
            return {"a": {"w": t()}, "b": [t()]}

        def load_state_dict(self, state):
            raise NotImplementedError

    state = {str(i): Fresh() for i in range(50)}
    assert "same" not in repr(flatten(state, rank=0).skeleton)


def test_leaf_tensors_keep_requires_grad():
    parameter, tensor = nn.Parameter(t()), t().requires_grad_()
    state = {
        "p": parameter,
        "t": tensor,
        "plain": t(),
        "made": tensor * 2,
        "l": [tensor],
        "i": torch.ones(1, dtype=torch.int8),
    }
    state["many"] = {str(i): (tensor if i % 2 else 3) for i in range(20)}
    state["all"] = {str(i): (tensor if i == 7 else t()) for i in range(20)}
    back = through_skeleton(state)
    assert {name: back[name].requires_grad for name in ("p", "t", "plain", "made", "i")} == {
        "p": True, "t": True, "plain": False, "made": False, "i": False,
    }  # fmt: skip
    assert back["l"][0].requires_grad
    assert back["many"]["1"].requires_grad
    assert [name for name, value in back["all"].items() if value.requires_grad] == ["7"]


def test_a_shard_is_a_tensor_leaf_in_every_container():
    shard = Shard(torch.ones(2, 3), (4, 3), [2, 0])
    assert (shard.global_shape, shard.offsets) == ((4, 3), (2, 0))
    state = {"a": shard, "b": (shard, 1), "c": {str(i): shard for i in range(20)}, "d": [[shard]], "e": torch.ones(1)}
    flat = flatten(state, rank=0)
    assert [name for name, value in zip(flat.names, flat.values, strict=True) if value is shard][:3] == [
        "a",
        "b.0",
        "c.0",
    ]
    assert flat.kinds.count(LeafKind.TENSOR) == 24
    assert "b" not in flat.names  # nor a second item for stock, which would pickle it
    check_leaves(flat)
    needing = Shard(torch.ones(2, 3).requires_grad_(), (4, 3), (2, 0))
    assert flatten({"a": needing, "b": 1}, rank=0).skeleton[2] == (4, LeafKind.OBJECT)


@pytest.mark.parametrize("state", [{}, {"a": {}, "b": [{}], "c": PerRank({})}])
def test_a_state_without_a_leaf_is_refused(state):
    with pytest.raises(EmptyStateError):
        check_not_empty(flatten(state, rank=0))
    assert read_template(state, rank=0).empty, "a template takes what is stored below it"


def test_a_template_that_takes_nothing_is_refused():
    with pytest.raises(EmptyStateError, match="give the state"):
        read_template({"n": dataclasses.make_dataclass("Empty", [])()}, rank=0)


@pytest.mark.parametrize("state", [[torch.ones(1)], torch.ones(1), 5, None, PerRank({"a": 1})])
def test_a_state_that_is_no_mapping_is_refused(state):
    with pytest.raises(UnsupportedLeafError, match="give a dict"):
        flatten(state, rank=0)


class Recursive:
    def state_dict(self):
        return self

    def load_state_dict(self, state):
        raise NotImplementedError


def test_what_no_walk_ends_is_refused():
    loop_tuple = ([torch.ones(1)],)
    loop_tuple[0].append(PerRank(loop_tuple))
    for state in ({"s": Recursive()}, Recursive()):
        with pytest.raises(UnsupportedLeafError, match="deeper"):
            flatten(state, rank=0)
    assert flatten({"l": loop_tuple}, rank=0).names == ["l.0.0"]


def test_containers_that_stand_in_ever_more_places_with_a_tensor_are_refused(monkeypatch):
    monkeypatch.setattr("aio_ckpt.state.flatten._MAX_ENTERED", 1000)
    value = {"t": torch.ones(1)}
    for _ in range(60):
        value = {"a": value, "b": value}
    with pytest.raises(UnsupportedLeafError, match=r"^x\.a\.a\..{0,80}: more than 1000 containers.*in one place$"):
        flatten({"x": value}, rank=0)
    with pytest.raises(UnsupportedLeafError, match="more than 1000 containers"):
        read_template({"x": value}, rank=0)
    assert len(flatten({"x": [{"t": torch.ones(1)}] * 990}, rank=0).names) == 990


def test_too_deep_a_state_is_told_before_its_name_grows_long():
    deep = {"t": torch.ones(1)}
    for _ in range(300):
        deep = {"me": deep}
    with pytest.raises(UnsupportedLeafError) as caught:
        flatten(deep, rank=0)
    assert len(str(caught.value)) < 160
    assert str(caught.value).endswith("me...: nested deeper than 200 (does a container hold itself?)")


@pytest.mark.parametrize("wrap", [lambda v: {"k": v}, lambda v: [v], lambda v: (v,), PerRank])
def test_a_deep_but_finite_state_is_taken(wrap):
    value = torch.ones(1)
    for _ in range(150):
        value = wrap(value)
    state = {"deep": value}
    flat = flatten(state, rank=0)
    round_trip(state)
    put_back(state, {flat.names[0]: 1}, rank=0)


def test_a_template_lists_stateful_values_and_enters_the_rest():
    model, optimizer = adamw()
    template = read_template({"m": [model], "r": PerRank({"o": optimizer, "n": 1}), "t": torch.ones(1)}, rank=2)
    assert template.names == ["r.rank2.n", "t"]
    assert template.kinds == [LeafKind.OBJECT, LeafKind.TENSOR]
    assert [name for name, _ in template.stateful] == ["m.0", "r.rank2.o"]
    assert template.stateful[1][1] is optimizer
    assert read_template(model, rank=0).stateful == [("", model)]
    with pytest.raises(UnsupportedLeafError, match="give it a name"):
        read_template({"": model}, rank=0)


MANY = {
    "tensors": {f"w{i}": torch.ones(2) for i in range(20)},
    "leaves": {
        f"w{i}": value for i, value in enumerate([torch.ones(2), nn.Parameter(torch.ones(2)), 3, "x", None] * 4)
    },
    "ordered": OrderedDict((f"w{i}", i) for i in range(20)),
    "int keys": {i: torch.ones(2) for i in range(20)},
    "mixed keys": {(i if i % 2 else f"w{i}"): torch.ones(2) for i in range(20)},
    "arrays": {f"w{i}": np.ones(2) for i in range(20)},
    "nested": {f"w{i}": {"a": torch.ones(2)} for i in range(20)},
    "per rank": {f"w{i}": PerRank(i) for i in range(20)},
}


@pytest.mark.parametrize("below", [False, True])
@pytest.mark.parametrize("kind", MANY)
def test_a_large_mapping_is_walked_as_a_small_one(monkeypatch: pytest.MonkeyPatch, kind: str, below: bool) -> None:
    state = {"state": MANY[kind]} if below else MANY[kind]
    found = flatten(state, rank=0)
    monkeypatch.setattr("aio_ckpt.state.flatten._MANY", 1000)
    wanted = flatten(state, rank=0)
    assert (found.names, found.kinds, found.skeleton) == (wanted.names, wanted.kinds, wanted.skeleton)
    assert all(map(lambda one, other: one is other, found.values, wanted.values))


class Torn(dict[str, object]):
    """Another thread changes it between any two looks."""

    looks = 0

    def items(self) -> Any:
        self.looks += 1
        return super().items()

    def keys(self) -> Any:
        raise AssertionError("a second look")

    values = __iter__ = keys


@pytest.mark.parametrize("count", [3, 20])
def test_a_mapping_is_read_once(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setitem(CODES, Torn, Container.DICT)
    state = Torn({f"w{i}": torch.full((1,), float(i)) for i in range(count)})
    found = flatten(state, rank=0)
    assert [float(value) for value in found.values] == list(range(count))
    assert state.looks == 1


@pytest.mark.parametrize("name", [None, "inner"])
def test_a_mapping_that_grows_while_it_is_read_is_an_error_with_its_name(
    monkeypatch: pytest.MonkeyPatch, name: str | None
) -> None:
    class Growing(Torn):
        def items(self) -> Any:
            for item in super().items():
                self[f"w{len(self)}"] = 1
                yield item

    monkeypatch.setitem(CODES, Growing, Container.DICT)
    state = Growing(w0=torch.ones(1), w1=torch.ones(1))
    with pytest.raises(SourceChangedError, match=f"{name or 'the state'}.*keep the state still"):
        flatten({name: state} if name else state, rank=0)


def test_a_dict_that_changes_while_it_is_read_gives_no_value_under_another_name() -> None:
    state = {f"w{i}": i for i in range(40)}
    ended = threading.Event()

    def turn_over() -> None:
        while not ended.is_set():
            for name in list(state):
                state[name] = state.pop(name)  # at the end

    interval, thread = sys.getswitchinterval(), threading.Thread(target=turn_over)
    sys.setswitchinterval(1e-6)
    thread.start()
    try:
        for _ in range(500):
            found = flatten(state, rank=0)
            assert [name for name, value in zip(found.names, found.values, strict=True) if name != f"w{value}"] == []
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(interval)
