"""Keys of mappings: every key comes back as it was, and keys of different types never are equal."""

from __future__ import annotations

import datetime
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from tree_states import round_trip, same

from aio_ckpt.errors import (
    UnsafeObjectError,
    UnsupportedLeafError,
)
from aio_ckpt.leaves.values import LeafKind
from aio_ckpt.state.flatten import flatten
from aio_ckpt.state.put_back import put_back


def test_keys_of_different_type_never_make_equal_skeletons():
    leaf = torch.zeros(1)
    skeletons = [flatten({key: leaf}, rank=0).skeleton for key in (1, True, 1.0, "1", None, "None", (1,), (True,))]
    assert len(set(skeletons)) == len(skeletons)
    assert flatten({"a": OrderedDict(b=leaf)}, rank=0).skeleton != flatten({"a": {"b": leaf}}, rank=0).skeleton
    assert flatten({"a": leaf}, rank=0).skeleton != flatten({"a": 1}, rank=0).skeleton


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
