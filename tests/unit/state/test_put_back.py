"""Values are put back into the caller's own containers."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import MutableMapping

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples
from torch import nn
from tree_states import dcp_values, same

from aio_ckpt.errors import DuplicateNameError
from aio_ckpt.leaves.values import LeafKind, PerRank
from aio_ckpt.state.flatten import flatten, read_template
from aio_ckpt.state.put_back import put_back


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


def test_an_empty_mapping_does_not_take_the_value_of_a_leaf_whose_name_is_its_path():
    state = {"a.b": (1,), "a": {"b": {}}}
    put_back(state, {"a.b": (2,)}, rank=0, empty=read_template(state, rank=0).empty)
    assert state == {"a.b": (2,), "a": {"b": {}}}


@examples(100)
@given(st.dictionaries(st.text("ab", max_size=2), dcp_values, min_size=1, max_size=4), st.integers())
def test_put_back_reaches_every_object_that_flatten_named(state, mark):
    try:
        flat = flatten(state, rank=0)
    except DuplicateNameError:
        return
    rows = zip(flat.names, flat.values, flat.kinds, strict=True)
    objects = {name: (mark, name) for name, _, kind in rows if kind is not LeafKind.TENSOR}
    template = read_template(state, rank=0)
    put_back(state, objects, rank=0, empty=template.empty)
    after = dict(zip(*(lambda f: (f.names, f.values))(flatten(state, rank=0)), strict=True))
    assert {name: after[name] for name in objects} == objects
    assert list(after) == flat.names


def test_put_back_gives_one_object_at_two_places_the_value_of_each():
    """It stays at the first place. Defaults are often shared: ``dict.fromkeys(names, [])``."""
    for one in ([0], [], {0}, deque([0])):
        kind = type(one)
        state = {"a": one, "b": one, "t": {"x": one}}
        put_back(state, {"a": kind([1]), "b": kind([2]), "t.x": kind([3])}, rank=0)
        assert state == {"a": kind([1]), "b": kind([2]), "t": {"x": kind([3])}}
        assert state["a"] is one


class Copies(MutableMapping):
    """A mapping that hands out copies of what it holds, as ``shelve`` does."""

    def __init__(self, **held):
        self.held = held

    def __getitem__(self, key):
        return copy.copy(self.held[key])

    def __setitem__(self, key, value):
        self.held[key] = copy.copy(value)

    def __delitem__(self, key):
        del self.held[key]

    def __iter__(self):
        return iter(self.held)

    def __len__(self):
        return len(self.held)


def test_put_back_sets_what_a_mapping_of_copies_holds():
    state = Copies(numbers=[0], other=[5])
    put_back({"inner": state}, {"inner.numbers": [1, 2]}, rank=0)
    assert state.held == {"numbers": [1, 2], "other": [5]}
