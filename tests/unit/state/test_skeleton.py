"""The bytes of a skeleton: damaged ones are corrupt, and crafted ones give a state or an error."""

from __future__ import annotations

from collections import OrderedDict

import msgspec
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from property_examples import examples

from aio_ckpt.errors import (
    CorruptCheckpointError,
    UnsupportedLeafError,
)
from aio_ckpt.state.build import build
from aio_ckpt.state.flatten import flatten
from aio_ckpt.state.names import skeleton_names
from aio_ckpt.state.skeleton import decode_skeleton, encode_skeleton, has_empty_part


def test_a_key_that_no_file_holds_is_refused_by_name():
    with pytest.raises(UnsupportedLeafError, match=r"^a\.b: a whole number of 16610 bits as a key, at most 2040"):
        flatten({"a": {"b": {10**5000: torch.ones(1)}}}, rank=0)
    with pytest.raises(UnsupportedLeafError, match="surrogate"):
        encode_skeleton(flatten({"a": torch.ones(1), "x\ud800": {}}, rank=0).skeleton)


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
@example([("metadata", b"")], 17, 0)  # in older versions of msgspec, its error is no ValueError
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


@pytest.mark.parametrize(
    ("state", "wanted"),
    [
        ({}, True),
        ({"a": 1, "b": {}}, True),
        (OrderedDict(a=OrderedDict()), True),
        ({"a": {"b": {}}, "c": [], "d": None}, False),
        ({"a": [{}], 3: ()}, False),
    ],
)
def test_an_empty_part_is_found_in_the_bytes_at_the_first_level_alone(state, wanted):
    assert has_empty_part(encode_skeleton(flatten(state, rank=0).skeleton)) == wanted


@pytest.mark.parametrize("raw", [b"", b"\x10", b"\x93\x10", b"\x90", b"\x91" * 10**5 + b"\x90", b"\xc1"])
def test_bytes_that_are_no_skeleton_have_no_empty_part(raw):
    assert not has_empty_part(raw)


def test_a_skeleton_nested_for_ever_is_corrupt():
    for data in (b"\x91" * 100_000, b"\x93\x10\x91\xa1a\x91" * 300 + b"\x00", b"\xdd\xff\xff\xff\xff"):
        with pytest.raises(CorruptCheckpointError):
            decode_skeleton(data, name="m.bin")
