"""Parts of a state, built from a skeleton and leaves."""

from __future__ import annotations

import pytest
import torch
from tree_states import adamw, build_below, round_trip, same, stored

from aio_ckpt.errors import (
    MissingNameError,
)
from aio_ckpt.leaves.values import LeafKind, PerRank
from aio_ckpt.state.build import build
from aio_ckpt.state.flatten import flatten
from aio_ckpt.state.names import find_named


def test_only_keeps_the_named_branches():
    t = torch.ones(2)
    state = {"a": {"b": t, "c": 1, "empty": {}}, "ab": 2, "l": [t, {"x": 1}, ()], "e": {}, "t": (t, 5)}
    assert same(round_trip(state, only=["a"]), {"a": state["a"]})
    assert same(round_trip(state, only=["a.b", "l.1.x"]), {"a": {"b": t}, "l": [None, {"x": 1}, None]})
    assert same(round_trip(state, only={"t.1", "e"}), {"e": {}, "t": (None, 5)})
    with pytest.raises(MissingNameError, match="nope"):
        round_trip(state, only=["nope", "a.x"])


def test_only_takes_a_branch_whose_name_ends_inside_of_a_key():
    t = torch.ones(2)
    state = {"model": {"body.0.w": t, "body.0.b": 1, "body.10.w": t, "body": {}, "head.w": t}, "ema.body": {"w": 2}}
    assert same(round_trip(state, only=["model.body.0"]), {"model": {"body.0.w": t, "body.0.b": 1}})
    assert same(round_trip(state, only=["ema"]), {"ema.body": {"w": 2}})
    assert set(round_trip(state, only=["model.body"])["model"]) == {"body.0.w", "body.0.b", "body.10.w", "body"}
    with pytest.raises(MissingNameError, match="bod"):
        round_trip(state, only=["model.bod"])


def test_only_reads_no_leaf_that_it_leaves_out():
    flat = flatten({"a": torch.ones(1), "b": 2}, rank=0)
    assert build(flat.skeleton, {"b": 2}, rank=0, only=["b"]) == {"b": 2}
    with pytest.raises(MissingNameError, match="'a'"):
        build(flat.skeleton, {"b": 2}, rank=0)


def test_the_value_below_one_name_can_be_built_alone():
    model, optimizer = adamw()
    state = {"train": [{"m": model}, PerRank({"o": optimizer})], "a.b": {"c": 1}, "a": {"b": {"d": 2}, "x": 1}}
    flat = flatten(state, rank=1)
    leaves = stored(flat)
    built = build_below(flat.skeleton, "train.1.rank1.o", leaves, rank=1)
    assert same(built, optimizer.state_dict())
    assert build_below(flat.skeleton, "a.b.d", leaves, rank=1) == 2
    assert build_below(flat.skeleton, "a.x", leaves, rank=1) == 1
    assert same(build_below(flat.skeleton, "", leaves, rank=1), build(flat.skeleton, leaves, rank=1))
    assert find_named(flat.skeleton, {"a.b.c"}, rank=1)["a.b.c"].node == LeafKind.OBJECT
    assert find_named(flat.skeleton, {"train.7", "train.1.rank0", "ab"}, rank=1) == {}
    with pytest.raises(MissingNameError, match=r"train\.0\.m\.0\.weight"):
        build_below(flat.skeleton, "train.0.m", {}, rank=1)
