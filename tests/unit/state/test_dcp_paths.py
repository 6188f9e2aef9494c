"""Paths of leaves: those that stock DCP makes, and states from a checkpoint of stock DCP."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples
from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict
from tree_states import dcp_values, round_trip, same, text_keyed

from aio_ckpt.errors import CorruptCheckpointError, DuplicateNameError
from aio_ckpt.leaves.values import PerRank
from aio_ckpt.state.dcp_paths import dcp_paths, unflatten_dcp
from aio_ckpt.state.flatten import flatten


def has_equal_texts(value):
    if isinstance(value, dict):
        return len({str(key) for key in value}) < len(value) or any(map(has_equal_texts, value.values()))
    return isinstance(value, list) and any(map(has_equal_texts, value))


@examples(300)
@given(st.dictionaries(st.text("ab.0", max_size=2) | st.integers(0, 2) | st.none(), dcp_values, max_size=4))
def test_names_paths_and_order_are_those_of_dcp(state):
    try:
        theirs, paths = flatten_state_dict(state)
    except ValueError:  # two leaves of one name
        with pytest.raises(DuplicateNameError):
            flatten(state, rank=0)
        return
    if has_equal_texts(state):  # stock takes them if what is below the keys has other names
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
