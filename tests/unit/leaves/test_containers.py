"""Containers of other types than dict, list and tuple: they come back as their type, or plain and said so."""

from __future__ import annotations

import argparse
import collections
import collections.abc
import dataclasses
import sys
import types
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.immutable_collections import immutable_dict, immutable_list
from tree_states import Moments, Point, build_below, same, stored, t, through_skeleton

from aio_ckpt.leaves.objects import decode_object, encode_object
from aio_ckpt.leaves.values import LeafKind
from aio_ckpt.state.build import build
from aio_ckpt.state.flatten import flatten
from aio_ckpt.state.names import skeleton_names
from aio_ckpt.state.put_back import put_back
from aio_ckpt.state.skeleton import decode_skeleton, encode_skeleton


class NamedList(list):
    pass


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
    "aio_ckpt.leaves.values:LeafKind",
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


def test_defaultdicts_whose_factory_is_untrusted_or_a_lambda_come_back_plain():
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


def test_a_named_tuple_inside_of_an_object_keeps_its_type():
    back = decode_object(encode_object("p", [Point(1, 2)]), name="p", trusted=False)
    assert type(back[0]) is Point
    assert back == [(1, 2)]


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
