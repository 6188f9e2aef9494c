"""The walk: names and leaves as DCP has them, exact round trips, refusals by name, values put back."""

from __future__ import annotations

import argparse
import collections
import collections.abc
import dataclasses
import datetime
import itertools
import random
import sys
import threading
import types
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.nn.parameter import UninitializedParameter
from tree_states import Point, adamw, dcp_values, round_trip, same, stored

from aio_ckpt.errors import (
    ConfigError,
    EmptyStateError,
    SourceChangedError,
    UnsafeObjectError,
    UnsupportedLeafError,
)
from aio_ckpt.state.build import build, build_below
from aio_ckpt.state.check_leaves import check_leaves
from aio_ckpt.state.classify import CODES, holds_leaves
from aio_ckpt.state.dcp_paths import dcp_paths, unflatten_dcp
from aio_ckpt.state.flatten import flatten, read_template
from aio_ckpt.state.names import is_below, skeleton_names
from aio_ckpt.state.objects import decode_object, encode_object
from aio_ckpt.state.put_back import put_back
from aio_ckpt.state.skeleton import Container, decode_skeleton, encode_skeleton
from aio_ckpt.state.values import LeafKind, PerRank, Shard, StockCopy


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


def test_keys_of_different_type_never_make_equal_skeletons():
    leaf = torch.zeros(1)
    skeletons = [flatten({key: leaf}, rank=0).skeleton for key in (1, True, 1.0, "1", None, "None", (1,), (True,))]
    assert len(set(skeletons)) == len(skeletons)
    assert flatten({"a": OrderedDict(b=leaf)}, rank=0).skeleton != flatten({"a": {"b": leaf}}, rank=0).skeleton
    assert flatten({"a": leaf}, rank=0).skeleton != flatten({"a": 1}, rank=0).skeleton


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


# -- names -----------------------------------------------------------------------------------------


def has_equal_texts(value):
    if isinstance(value, dict):
        return len({str(key) for key in value}) < len(value) or any(map(has_equal_texts, value.values()))
    return isinstance(value, list) and any(map(has_equal_texts, value))


@examples(300)
@given(st.dictionaries(st.text("ab.0", max_size=2) | st.integers(0, 2) | st.none(), dcp_values, max_size=4))
def test_names_paths_and_order_are_those_of_dcp(state):
    try:
        theirs, paths = flatten_state_dict(state)
    except ValueError:  # two names that are equal as text
        assert same(round_trip(state), state)
        return
    if has_equal_texts(state):
        return
    if not theirs:
        with pytest.raises(EmptyStateError):
            flatten(state, rank=0)
        return
    ours = flatten(state, rank=0)
    assert ours.names == list(theirs)
    assert all(a is b for a, b in zip(ours.values, theirs.values(), strict=True))
    assert dcp_paths(ours.skeleton, rank=0) == paths
    assert same(round_trip(state), state)


def test_the_paths_of_tuples_and_per_rank_values_are_ones_dcp_can_unflatten():
    t = torch.ones(1)
    flat = flatten({"a": (t, {"b": 2}), "rng": PerRank({"x": 1})}, rank=3)
    paths = dcp_paths(flat.skeleton, rank=3)
    leaves = dict(zip(flat.names, flat.values, strict=True))
    assert flat.names[-1] == "a", "behind its parts, whose place it takes where all are put together"
    assert unflatten_state_dict(leaves, paths) == {"a": StockCopy((t, {"b": 2})), "rng": {"rank3": {"x": 1}}}
    assert leaves.pop("a").value[0] is t
    assert unflatten_state_dict(leaves, paths) == {"a": [t, {"b": 2}], "rng": {"rank3": {"x": 1}}}
    assert unflatten_dcp(paths, leaves) == {"a": [t, {"b": 2}], "rng": {"rank3": {"x": 1}}}


def test_the_paths_of_ranks_with_one_skeleton_are_those_of_each():
    """Read at once for several ranks, a skeleton gives the names and paths of all of them, and no other."""
    state = {"a": [1, PerRank({"x": 1, "y": PerRank(2)})], "rng": PerRank(4), "b": {"c": 5}}
    skeleton = flatten(state, rank=0).skeleton
    each = {}
    for rank in (2, 0, 7):
        each |= dcp_paths(skeleton, rank=rank)
    assert dcp_paths(skeleton, rank=2, others=[0, 7]) == each
    assert len(each) == 2 + 3 * 3


@pytest.mark.parametrize(
    ("state", "names"),
    [
        ({0: 1, "0": 2}, ["0", "0~2"]),
        ({"x": {0: 1, "0": [2]}}, ["x"]),
        ({"x": {0: torch.ones(1), "0": 2, "0~2": 3}}, ["x.0", "x.0~3", "x.0~2"]),
        ({"a.b": 1, "a": {"b": 2}}, ["a.b", "a.b~2"]),
        ({"r": PerRank(1), "r.rank2": 2}, ["r.rank2", "r.rank2~2"]),
        ({"a": (torch.ones(1),), "a.0": 1}, ["a.0", "a.0~2", "a"]),
        ({"x": {0: (torch.ones(1), 1), "0": 5}}, ["x.0.0", "x.0.1", "x.0"]),
        ({"x": {"0": 5, 0: (torch.ones(1), 1)}, "y": (torch.ones(1),)}, ["x.0", "x.0.0", "x.0.1", "y.0", "y"]),
        ({"a.b": (torch.ones(1), 1), "a": {"b": torch.ones(1)}}, ["a.b.0", "a.b.1", "a.b"]),
        ({"x": {1: {"w": torch.ones(1)}, "1": {"w": torch.zeros(1), "v": 3}}}, ["x.1.w", "x.1.w~2", "x.1.v"]),
    ],
)
def test_the_second_of_two_leaves_of_one_name_is_marked_and_both_come_back(state, names):
    flat = flatten(state, rank=2)
    assert flat.names == names
    paths = dcp_paths(flat.skeleton, rank=2, others=[3])
    assert paths.keys() >= set(names)
    assert len(set(paths.values())) == len(paths)
    names = [name for name, value in zip(flat.names, flat.values, strict=True) if not isinstance(value, StockCopy)]
    wanted = {key: value.value if isinstance(value, PerRank) else value for key, value in state.items()}
    assert same(round_trip(state, rank=2), wanted)
    assert skeleton_names(flat.skeleton, rank=2) == names
    kinds = dict(zip(flat.names, flat.kinds, strict=True))
    objects = {n: (n,) for n in names if kinds[n] is not LeafKind.TENSOR}
    put_back(state, objects, rank=2, names=read_template(state, rank=2).names)
    after = flatten(state, rank=2)
    assert {n: v for n, v in zip(after.names, after.values, strict=True) if n in objects} == objects


def test_a_part_of_a_state_with_names_that_are_equal_as_text_is_built_alone():
    state = {"x": {0: torch.ones(1), "0": torch.zeros(2)}, "y": {"m": {"w": torch.ones(3)}}}
    flat = flatten(state, rank=0)
    leaves = stored(flat)
    assert same(build_below(flat.skeleton, "x", leaves, rank=0), state["x"])
    assert same(build_below(flat.skeleton, "y.m", leaves, rank=0), state["y"]["m"])
    only = {name: leaf for name, leaf in leaves.items() if is_below(name, "x.0")}
    assert same(build(flat.skeleton, only, rank=0, only=["x.0"]), {"x": {0: torch.ones(1)}})


def test_kinds_follow_the_values():
    state = {
        "t": torch.ones(1), "p": nn.Parameter(torch.ones(1)), "a": np.zeros(2), "big_endian": np.zeros(2, ">f4"),
        "s": np.float64(1), "np_str": np.str_("x"), "o": 1.5, "list": [np.zeros(1)], "text": np.array(["a"]),
    }  # fmt: skip
    kinds = dict(zip(state, flatten(state, rank=0).kinds, strict=True))
    assert [name for name, kind in kinds.items() if kind is LeafKind.OBJECT] == [
        "big_endian",
        "np_str",
        "o",
        "list",
        "text",
    ]
    assert [kinds[name] for name in "tpas"] == [LeafKind.TENSOR] * 2 + [LeafKind.ARRAY, LeafKind.SCALAR_ARRAY]


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


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [torch.ones(1), lambda: None])
def test_a_key_that_cannot_be_stored_is_refused_by_name(key):
    with pytest.raises((UnsupportedLeafError, UnsafeObjectError), match=r"^some: "):
        flatten({"some": {key: torch.ones(1)}}, rank=0)


KEYS = [
    b"x",
    b"",
    (1, b"x"),
    float("inf"),
    1j,
    np.int64(1),
    np.float32(1.5),
    LeafKind.ARRAY,
    Path("/a.b"),
    torch.float32,
    torch.device("cpu"),
    frozenset({1}),
    datetime.date(2026, 1, 1),
    (LeafKind.ARRAY, "x"),
    True,
    2**2000,
    (),
    ...,
]


@pytest.mark.parametrize("key", KEYS, ids=lambda key: type(key).__name__)
def test_every_key_comes_back_as_it_was(key):
    state = {"some": {key: torch.ones(1), "b": 1}}
    flat = flatten(state, rank=0)
    assert flat.names == [f"some.{key!s}", "some.b"]
    assert flat.skeleton == flatten(state, rank=0).skeleton
    assert same(round_trip(state), state)
    put_back(state, {"some.b": 2}, rank=0)
    assert state["some"]["b"] == 2


def test_a_key_that_is_no_number_comes_back():
    (key,) = round_trip({"some": {float("nan"): torch.ones(1)}})["some"]
    assert key != key


# -- containers of other types ----------------------------------------------------------------------


class NamedList(list):
    pass


@dataclasses.dataclass
class Moments:
    mean: Any
    steps: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    mean: Any


class Attributes(dict):
    """As EasyDict: entries are attributes too."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)


class Settings(collections.abc.MutableMapping):
    """As ConfigDict: a mapping that is no dict."""

    def __init__(self, held=()):
        self.held = dict(held)

    def __getitem__(self, key):
        return self.held[key]

    def __setitem__(self, key, value):
        self.held[key] = value

    def __delitem__(self, key):
        del self.held[key]

    def __iter__(self):
        return iter(self.held)

    def __len__(self):
        return len(self.held)

    def __eq__(self, other):
        return type(other) is Settings and same(self.held, other.held)

    __hash__ = None


def t(number=1.0):
    return torch.full((2,), float(number))


def through_skeleton(state, **options):
    flat = flatten(state, rank=0)
    skeleton = decode_skeleton(encode_skeleton(flat.skeleton), name="m.bin")
    assert skeleton == flat.skeleton
    return build(skeleton, stored(flat), rank=0, **options)


def packed():
    return nn.utils.rnn.pack_sequence([t(1), t(2)])


HARMLESS_CONTAINERS = {
    "defaultdict": lambda: collections.defaultdict(list, a=t(), b=[1]),
    "deque": lambda: collections.deque([t(), 1], maxlen=4),
    "Namespace": lambda: argparse.Namespace(w=t(), lr=0.1),
    "SimpleNamespace": lambda: types.SimpleNamespace(w=[t()]),
    "namedtuple": lambda: Point(t(), (1, t(2))),
    "mappingproxy": lambda: types.MappingProxyType({"w": t()}),
    "return_types": lambda: torch.max(torch.ones(2, 2), 0),
    "PackedSequence": packed,
    "immutable_dict": lambda: immutable_dict({"w": t(), "deep": {"x": 1}}),
    "immutable_list": lambda: immutable_list([t(), 1]),
}


@pytest.mark.parametrize("case", HARMLESS_CONTAINERS)
def test_a_container_of_a_harmless_type_comes_back_as_that_type(case):
    value = HARMLESS_CONTAINERS[case]()
    plain = []
    back = through_skeleton({"some": value, "more": [value]}, plain=plain)
    assert plain == []
    assert back["more"][0] is back["some"]
    back = back["some"]
    assert type(back) is type(value)
    if isinstance(value, (argparse.Namespace, types.SimpleNamespace)):
        assert same(vars(back), vars(value))
    else:
        assert same(
            list(back.items() if hasattr(value, "items") else back),
            list(value.items() if hasattr(value, "items") else value),
        )
    if case == "deque":
        assert back.maxlen == 4
    if case == "defaultdict":
        assert back["new"] == []
    if case == "PackedSequence":
        assert torch.equal(nn.utils.rnn.pad_packed_sequence(back)[0], nn.utils.rnn.pad_packed_sequence(value)[0])


OTHER_CONTAINERS = {
    "dict": (lambda: Attributes(), dict),
    "Mapping": (lambda: Settings(), dict),
    "OrderedDict": (lambda: Sorted(), OrderedDict),
    "list": (lambda: NamedList([t()]), list),
    "dataclass": (lambda: Moments(t(), 3), dict),
    "frozen": (lambda: Frozen([t()]), dict),
}


class Sorted(OrderedDict):
    pass


@pytest.mark.parametrize("case", OTHER_CONTAINERS)
def test_another_container_comes_back_plain_and_said_so_or_as_it_was_where_it_is_trusted(case):
    make, plain_type = OTHER_CONTAINERS[case]
    value = make()
    if isinstance(value, collections.abc.MutableMapping):
        value["w"], value["lr"] = t(), 0.1
    said = []
    back = through_skeleton({"x": {"some": value}}, plain=said)["x"]["some"]
    assert type(back) is plain_type
    assert said == [f"x.some ({type(value).__module__}.{type(value).__qualname__})"]
    again = through_skeleton({"x": {"some": value}}, trusted=True)["x"]["some"]
    assert type(again) is type(value)
    with torch.serialization.safe_globals([type(value)]):
        assert type(through_skeleton({"x": {"some": value}})["x"]["some"]) is type(value)
    if case == "dict":
        assert same(again.w, t())
    if case in ("dataclass", "frozen"):
        assert dataclasses.is_dataclass(again)
        assert same(getattr(again.mean, "__iter__", lambda: [again.mean]) and again.mean, value.mean)


HOSTILE_TYPES = [
    "os:system",
    "subprocess:Popen",
    "builtins:eval",
    "builtins:type",
    "no.such.module:X",
    "X",
    ":",
    "this:d",
    "collections:defaultdict",
    "torch.nn.modules.module:Module",
    "aio_ckpt.state.values:LeafKind",
]


@pytest.mark.parametrize("name", HOSTILE_TYPES)
@pytest.mark.parametrize("code", [16, 19, 20, 23])
def test_a_crafted_type_of_a_container_calls_and_imports_nothing(name, code):
    keys = ("a",) if code in (16, 23) else ()
    notes = (("type", name), ("factory", b"PK\x03\x04 no zip"))
    skeleton = decode_skeleton(encode_skeleton((16, ("x",), ((code, keys, (2,), notes),))), name="m")
    before, said = set(sys.modules), []
    back = build(skeleton, {skeleton_names(skeleton, rank=0)[0]: 1}, rank=0, plain=said)
    assert type(back["x"]) in (dict, list, tuple)
    assert said == [f"x ({name.replace(':', '.')})"]
    assert set(sys.modules) == before


class Job(collections.namedtuple("Job", "command")):
    __slots__ = ()

    def __new__(cls, command):
        raise AssertionError(f"ran {command}")


@dataclasses.dataclass
class Task(collections.namedtuple("Task", "command")):
    def __new__(cls, *command):
        raise AssertionError(f"ran {command}")


@pytest.mark.parametrize("kind", [Job, Task, torch.return_types.max, nn.utils.rnn.PackedSequence])
@pytest.mark.parametrize("code", [16, 17, 18, 19, 20, 21, 23])
def test_a_named_tuple_is_made_of_a_tuple_alone_and_by_no_code_of_its_class(kind, code):
    count = 2 if kind is torch.return_types.max and code == 20 else 1
    keys = ("a",) if code in (16, 17, 18, 23) else ()
    notes = (("type", f"{kind.__module__}:{kind.__qualname__}"),)
    skeleton = decode_skeleton(encode_skeleton((16, ("x",), ((code, keys, (2,) * count, notes),))), name="m")
    said = []
    back = build(skeleton, dict.fromkeys(skeleton_names(skeleton, rank=0), 1), rank=0, plain=said)["x"]
    if code == 20 and kind in (Job, torch.return_types.max):
        assert (type(back), tuple(back), said) == (kind, (1,) * count, [])
    else:
        plain = {17: OrderedDict, 18: collections.Counter, 19: list, 20: tuple, 21: int}
        assert type(back) is plain.get(code, dict)
        assert said == [f"x ({kind.__module__}.{kind.__qualname__})"]


@pytest.mark.parametrize("kind", [Attributes, NamedList, Moments, Point])
@pytest.mark.parametrize("code", [16, 19, 20, 23])
def test_a_type_that_the_user_allowed_is_made_of_what_it_is_taken_apart_into_alone(kind, code):
    """And of no other: ``Attributes`` of a list would run code that the user allowed for mappings."""
    fitting = {Attributes: 16, NamedList: 19, Point: 20, Moments: 23}[kind]
    keys = ("mean", "steps") if code in (16, 23) else ()
    notes = (("type", f"{kind.__module__}:{kind.__qualname__}"),)
    skeleton = (16, ("x",), ((code, keys, (2, 2), notes),))
    with torch.serialization.safe_globals([kind]):
        back = build(skeleton, dict.fromkeys(skeleton_names(skeleton, rank=0), 1), rank=0)["x"]
    assert type(back) is (kind if code == fitting else {19: list, 20: tuple}.get(code, dict))


def test_a_defaultdict_whose_factory_is_not_trusted_comes_back_plain_and_one_of_a_lambda_too():
    said = []
    value = collections.defaultdict(Moments, w=t())
    back = through_skeleton({"some": value, "odd": collections.defaultdict(lambda: 1, w=t())}, plain=said)
    assert type(back["some"]) is dict
    assert said == ["some (collections.defaultdict)"]
    assert back["odd"].default_factory is None
    assert through_skeleton({"some": value}, trusted=True)["some"].default_factory is Moments


def test_a_type_of_the_pytree_registry_comes_back_without_trust():
    class_ = type("Registered", (dict,), {"__module__": __name__})
    globals()["Registered"] = class_
    torch.utils._pytree.register_pytree_node(
        class_, lambda d: (list(d.values()), list(d)), lambda v, k: class_(zip(k, v, strict=True))
    )
    try:
        back = through_skeleton({"some": class_(w=t())})
    finally:
        torch.utils._pytree.SUPPORTED_NODES.pop(class_)
        del globals()["Registered"]
    assert type(back["some"]) is class_


def test_load_fills_the_own_object_of_a_template():
    frozen, settings, names = Frozen([1, t()]), Settings({"lr": 1, "w": t()}), types.SimpleNamespace(lr=1, w=t())
    state = {
        "d": collections.defaultdict(int, lr=1), "e": Attributes(), "s": settings, "n": names, "f": frozen,
        "p": Point(t(), 1), "q": collections.deque([t(), 1]), "r": torch.max(torch.ones(2), 0), "m": Moments(t(), 1),
        "v": types.MappingProxyType({"lr": 1}), "list": [Point(1, t())],
    }  # fmt: skip
    state["e"]["lr"] = 1
    before = dict(state)
    flat = flatten(state, rank=0)
    new = {name: 2 for name, kind in zip(flat.names, flat.kinds, strict=True) if kind is not LeafKind.TENSOR}
    put_back(state, new, rank=0)
    assert all(state[name] is before[name] for name in state if name not in "pv")
    assert (state["d"]["lr"], state["e"].lr, settings["lr"], names.lr, frozen.mean[0]) == (2, 2, 2, 2, 2)
    assert type(state["p"]) is type(state["list"][0]) is Point
    assert (state["p"].y, state["p"].x is before["p"].x, state["q"][1], state["m"].steps) == (2, True, 2, 2)
    assert state["v"] == {"lr": 2}
    assert state["list"][0].x == 2


class Losses(list[float]):
    """A sequence of a type of somebody's own."""


@dataclasses.dataclass
class Locked:
    """It leaves out of a pickle what cannot be stored."""

    rate: float

    def __getstate__(self) -> dict[str, Any]:
        return {"rate": self.rate}


def test_containers_without_a_tensor_are_one_object_if_that_is_read_without_trust():
    state = {"t": (1, 2), "l": [1], "q": collections.deque([1]), "n": argparse.Namespace(a=1)}
    assert flatten(state, rank=0).names == list(state)
    state = {"p": Point(1, 2), "m": Moments(1), "l": Losses([1.0]), "none": Losses()}
    assert flatten(state, rank=0).names == ["p.0", "p.1", "m.mean", "m.steps", "l.0", *state]  # and for stock
    state = {"many": Losses([1.0] * 1025), "locked": Locked(1.0)}
    assert flatten(state, rank=0).names == list(state)


def test_a_named_tuple_inside_of_an_object_keeps_its_type():
    back = decode_object(encode_object("p", [Point(1, 2)]), name="p", trusted=False)
    assert type(back[0]) is Point
    assert back == [(1, 2)]


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


def test_the_versions_of_a_module_come_back_at_any_depth():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    back = through_skeleton({"model": model, "more": [{"ema": model.state_dict()}]})
    assert back["model"]._metadata == model.state_dict()._metadata
    assert type(back["model"]._metadata) is OrderedDict
    assert back["more"][0]["ema"]._metadata[""] == {"version": 1}
    odd = model.state_dict()
    odd._metadata[""]["pair"] = (1, 2)
    odd._metadata["0"]["type"] = {1: {2}}
    assert through_skeleton({"model": odd})["model"]._metadata == odd._metadata
    flat = flatten({"model": model}, rank=0)
    assert build_below(flat.skeleton, "model", stored(flat), rank=0)._metadata == model.state_dict()._metadata
    assert flatten({"model": dict(model.state_dict())}, rank=0).skeleton != flat.skeleton


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


def quantized():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces the end of quantized tensors
        return torch.quantize_per_channel(torch.ones(2, 2), torch.ones(2), torch.zeros(2), 0, torch.quint4x2)


def nested():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])


def fake():
    with FakeTensorMode():
        return torch.ones(2)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: torch.ones(2, 2).to_mkldnn(), "to_dense"),
        (quantized, "quantized"),
        (nested, "unbind"),
        (lambda: torch.ones(2, device="meta"), "meta"),
        (fake, "FakeTensor"),
        (lambda: UninitializedParameter(), "forward"),
    ],
)
def test_a_tensor_that_no_item_can_hold_is_refused_by_name(make, word):
    flat = flatten({"some": [make()]}, rank=0)
    with pytest.raises(UnsupportedLeafError, match=rf"'some\.0'.*{word}"):
        check_leaves(flat)


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


@pytest.mark.parametrize(
    ("shape", "offsets"), [((4, 3), (3, 0)), ((4, 3), (-1, 0)), ((4, 3), (0,)), ((4,), (0, 0)), ((4, 2), (0, 0))]
)
def test_a_shard_outside_of_its_tensor_is_refused(shape, offsets):
    with pytest.raises(ConfigError, match=r"Shard: a box of shape \(2, 3\) at .* does not lie inside"):
        Shard(torch.ones(2, 3), shape, offsets)


def test_a_shard_over_a_tensor_that_is_no_plain_one_is_refused_by_name():
    flat = flatten({"s": Shard(torch.eye(2).to_sparse(), (4, 2), (0, 0))}, rank=0)
    with pytest.raises(UnsupportedLeafError, match="'s': a tensor of layout"):
        check_leaves(flat)


def test_a_name_that_is_no_utf8_is_refused():
    with pytest.raises(UnsupportedLeafError, match="surrogate"):
        check_leaves(flatten({"x\ud800": torch.ones(1)}, rank=0))
    check_leaves(flatten({"gewicht_ä": torch.ones(1)}, rank=0))


def test_a_key_that_no_file_holds_is_refused_by_name():
    with pytest.raises(UnsupportedLeafError, match=r"^a\.b: a whole number of 16610 bits as a key, at most 2040"):
        flatten({"a": {"b": {10**5000: torch.ones(1)}}}, rank=0)
    with pytest.raises(UnsupportedLeafError, match="surrogate"):
        encode_skeleton(flatten({"a": torch.ones(1), "x\ud800": {}}, rank=0).skeleton)


@pytest.mark.parametrize("state", [{}, {"a": {}, "b": [{}], "c": PerRank({})}])
def test_a_state_without_a_leaf_is_refused(state):
    with pytest.raises(EmptyStateError):
        flatten(state, rank=0)
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


def test_a_list_that_stands_in_many_places_is_looked_at_once(monkeypatch):
    looks, look = itertools.count(), holds_leaves

    def counted(*arguments, **options):
        assert next(looks) < 200, "each place was looked at by itself"
        return look(*arguments, **options)

    monkeypatch.setattr("aio_ckpt.state.classify.holds_leaves", counted)
    value = (1, 2)
    for _ in range(60):
        value = (value, value)
    flat = flatten({"a": value, "t": torch.ones(1)}, rank=0)
    assert flat.names == ["a", "t"]


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


# -- templates -------------------------------------------------------------------------------------


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


def test_put_back_sets_objects_in_place_and_leaves_tensors_and_stateful_values_alone():
    model, tensor = nn.Linear(1, 1), torch.ones(1)
    inner, listed = {"lr": 0.1, "t": tensor, "keep": "old"}, [tensor, 1, {"x": 1}]
    state = {
        "i": inner,
        "l": listed,
        "tup": (tensor, (1, {"y": 2}), "z"),
        "rng": PerRank(1),
        "m": model,
        0: 5,
        "arr": np.zeros(2),
    }
    state["whole"] = OrderedDict(p=PerRank({"d": 1}))
    new = {
        "i.lr": 0.2, "i.t": "must not land", "l.1": None, "l.2.x": 9, "tup.1": "not a leaf", "tup.1.0": 8,
        "tup.1.1.y": 7,
        "rng.rank1": (3,), "m": 0, "m.weight": 0, "0": 6, "arr": np.ones(2), "whole.p.rank1.d": 4, "unknown": 1,
    }  # fmt: skip
    per_rank = state["whole"]["p"]
    put_back(state, new, rank=1)
    assert state["i"] is inner
    assert state["l"] is listed
    assert inner == {"lr": 0.2, "t": tensor, "keep": "old"}
    assert listed == [tensor, None, {"x": 9}]
    assert state["tup"] == (tensor, (8, {"y": 7}), "z")
    assert state["tup"][0] is tensor
    assert state["rng"] == PerRank((3,))
    assert state["whole"]["p"] is per_rank
    assert per_rank.value == {"d": 4}
    assert state["m"] is model
    assert state[0] == 6
    assert same(state["arr"], np.ones(2))


def test_put_back_rebuilds_no_tuple_that_did_not_change():
    pair = (torch.ones(1), {"x": 1})
    state = {"t": pair, "r": PerRank(pair)}
    put_back(state, {"t.1.x": 2, "elsewhere": 3}, rank=0)
    assert state["t"] is pair
    assert pair[1] == {"x": 2}
    put_back(nn.Linear(1, 1), {"weight": 1}, rank=0)


@examples(100)
@given(st.dictionaries(st.text("ab", max_size=2), dcp_values, min_size=1, max_size=4), st.integers())
def test_put_back_reaches_every_object_that_flatten_named(state, mark):
    try:
        flat = flatten(state, rank=0)
    except EmptyStateError:
        return
    rows = zip(flat.names, flat.values, flat.kinds, strict=True)
    objects = {  # a mapping for a mapping that is one object: else a list of mappings would be none any more
        name: {mark: name, str(mark): name} if isinstance(value, dict) else (mark, name)
        for name, value, kind in rows
        if kind is not LeafKind.TENSOR
    }
    put_back(state, objects, rank=0, names=read_template(state, rank=0).names)
    after = dict(zip(*(lambda f: (f.names, f.values))(flatten(state, rank=0)), strict=True))
    assert {name: after[name] for name in objects} == objects
    assert list(after) == flat.names


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
