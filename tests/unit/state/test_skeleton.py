"""The skeleton: its bytes, and the states and parts of states that it builds."""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from tree_states import adamw, round_trip, same, stored, text_keyed

from aio_ckpt.errors import (
    CorruptCheckpointError,
    MissingNameError,
)
from aio_ckpt.state.build import build, build_below
from aio_ckpt.state.dcp_paths import unflatten_dcp
from aio_ckpt.state.flatten import flatten
from aio_ckpt.state.names import is_below, skeleton_names, subtree
from aio_ckpt.state.skeleton import decode_skeleton, encode_skeleton
from aio_ckpt.state.values import LeafKind, PerRank

JUNK = st.recursive(
    st.integers(0, 30) | st.text("bifnt0.", max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.tuples(st.integers(14, 23), inner, inner).map(list),
    max_leaves=12,
)


@examples(300)
@given(JUNK.map(msgspec.msgpack.encode) | st.binary(max_size=40))
def test_junk_is_either_a_skeleton_that_builds_or_corrupt(data):
    try:
        skeleton = decode_skeleton(data, name="m.bin")
    except CorruptCheckpointError:
        return
    names = skeleton_names(skeleton, rank=0)
    build(skeleton, dict.fromkeys(names, 1), rank=0)
    assert decode_skeleton(encode_skeleton(skeleton), name="m") == skeleton


@pytest.mark.parametrize(
    "raw",
    [
        0,
        [16, ["a"], []],
        [16, ["a", "a"], [0, 0]],
        [16, [["f", "x"]], [0]],
        [16, [["o", "x"]], [0]],
        [16, [["c", ["0x0p0"]]], [0]],
        [23, [["i", "1"]], [0]],
        [24, [], []],
        [24, [], [0], [["same", 0]]],
        [16, [], [], [["type", 1]]],
        [16, [], [], [["new", []]]],
        [19, [], [], 7],
        [16, [["f", "0x1p99999"]], [0]],
        [16, [["x", "1"]], [0]],
        [16, ["a"], [9]],
        [16, ["a"], [True]],
        [21, [], [0, 0]],
        [22, [], []],
        [99, [], []],
    ],
)
def test_a_damaged_skeleton_is_corrupt_and_names_its_file(raw):
    with pytest.raises(CorruptCheckpointError, match=r"m\.bin"):
        decode_skeleton(msgspec.msgpack.encode(raw), name="m.bin")


TYPES = (
    *("torch.fx.immutable_collections:immutable_dict", "torch.fx.immutable_collections:immutable_list"),
    *("collections:deque", "collections:defaultdict", "types:SimpleNamespace", "torch.return_types:max"),
    *("tree_states:Point", "builtins:mappingproxy"),
)
NOTES = st.lists(
    st.tuples(st.just("type"), st.sampled_from(TYPES))
    | st.tuples(st.just("metadata"), st.binary(max_size=3) | JUNK.map(msgspec.msgpack.encode))
    | st.tuples(st.sampled_from(["maxlen", "same", "copy"]), st.integers(-(2**63), 2**64 - 1))
    | st.tuples(st.just("factory"), st.sampled_from(["list", "", b"PK", b""])),
    max_size=3,
)


@examples(300)
@given(NOTES, st.sampled_from([16, 17, 18, 19, 20, 23]), st.integers(0, 3))
def test_crafted_notes_give_a_state_or_say_that_the_checkpoint_is_corrupt(notes, code, count):
    keys = list("abc"[:count]) if code in (16, 17, 18, 23) else []
    raw = [16, ["w", "x"], [2, [code, keys, [2] * count, notes]]]
    try:
        skeleton = decode_skeleton(msgspec.msgpack.encode(raw), name="m.bin")
        names = skeleton_names(skeleton, rank=0)
        build(skeleton, dict.fromkeys(names, 1), rank=0)
    except CorruptCheckpointError:
        pass


def test_a_skeleton_nested_for_ever_is_corrupt():
    for data in (b"\x91" * 100_000, b"\x93\x10\x91\xa1a\x91" * 300 + b"\x00", b"\xdd\xff\xff\xff\xff"):
        with pytest.raises(CorruptCheckpointError):
            decode_skeleton(data, name="m.bin")


# -- building a part -------------------------------------------------------------------------------


def test_only_keeps_the_named_branches():
    t = torch.ones(2)
    state = {"a": {"b": t, "c": 1, "empty": {}}, "ab": 2, "l": [t, {"x": 1}, ()], "e": {}, "t": (t, 5)}
    assert same(round_trip(state, only=["a"]), {"a": state["a"]})
    assert same(round_trip(state, only=["a.b", "l.1.x"]), {"a": {"b": t}, "l": [None, {"x": 1}, None]})
    assert same(round_trip(state, only={"t.1", "e"}), {"e": {}, "t": (None, 5)})
    with pytest.raises(MissingNameError, match="nope"):
        round_trip(state, only=["nope", "a.x"])


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
    assert subtree(flat.skeleton, "a.b.c", rank=1) == LeafKind.OBJECT
    for name in ("train.7", "train.1.rank0", "ab"):
        with pytest.raises(MissingNameError, match=name):
            subtree(flat.skeleton, name, rank=1)
    with pytest.raises(MissingNameError, match=r"train\.0\.m\.0\.weight"):
        build_below(flat.skeleton, "train.0.m", {}, rank=1)


def test_a_name_lies_below_itself_its_parents_and_the_state():
    assert is_below("a.b", "a")
    assert is_below("a", "a")
    assert is_below("a", "")
    assert not is_below("ab", "a")


# -- plain DCP -------------------------------------------------------------------------------------
@examples(150)
@given(st.dictionaries(st.text("ab", max_size=2), text_keyed, min_size=1, max_size=4))
def test_a_plain_dcp_checkpoint_is_unflattened_as_dcp_does(state):
    leaves, paths = flatten_state_dict(state)
    assert same(unflatten_dcp(paths, leaves), unflatten_state_dict(leaves, paths))
    assert unflatten_dcp(None, leaves) == leaves


@pytest.mark.parametrize(
    "paths",
    [
        {"a": ("x",), "b": ("x",)},
        {"a": ("x",), "b": ("x", "y")},
        {"a": ("x", "y"), "b": ("x",)},
        {"a": ("x", 10**12)},
        {"a": ("x", -1)},
        {"a": ("x", ["y"])},
    ],
)
def test_paths_that_contradict_each_other_are_refused(paths):
    with pytest.raises(CorruptCheckpointError):
        unflatten_dcp(paths, dict.fromkeys(paths, 1))
