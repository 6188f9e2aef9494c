"""Names that are equal as text, and what lies below a name."""

from __future__ import annotations

import pytest
import torch
from tree_states import round_trip, same, stored

from aio_ckpt.leaves.values import LeafKind, PerRank, StockCopy
from aio_ckpt.state.build import build, build_below
from aio_ckpt.state.dcp_paths import dcp_paths
from aio_ckpt.state.flatten import flatten, read_template
from aio_ckpt.state.names import is_below, skeleton_names
from aio_ckpt.state.put_back import put_back


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


def test_a_name_lies_below_itself_its_parents_and_the_state():
    assert is_below("a.b", "a")
    assert is_below("a", "a")
    assert is_below("a", "")
    assert not is_below("ab", "a")
