"""Union of the skeletons of several ranks: what all of them hold, built as one state."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

from aio_ckpt.leaves.values import PerRank
from aio_ckpt.state.build import build
from aio_ckpt.state.flatten import flatten
from aio_ckpt.state.names import skeleton_names
from aio_ckpt.state.skeleton_union import completed, united


def as_one(*states: object, rank: int = 0) -> tuple[Any, list[str]]:
    """The union of what ranks hold, built for one of them."""
    flats = [flatten(state, rank=number) for number, state in enumerate(states)]
    owners: dict[Any, list[int]] = {}
    leaves: dict[str, object] = {}
    for number, flat in enumerate(flats):
        owners.setdefault(flat.skeleton, []).append(number)
        leaves = dict(zip(flat.names, flat.values, strict=True)) | leaves
    union, lost = united(owners, rank)
    assert set(skeleton_names(union, rank=rank)) <= leaves.keys()
    return build(union, leaves, rank=rank), lost


def test_names_of_their_own_are_joined_in_dicts_of_any_depth_and_in_lists() -> None:
    one = {"m": OrderedDict(a=1, both=2), "l": [{"x": 1}], "e": {}}
    other = {"m": OrderedDict(both=2, b=3), "l": [{"y": 2}, 7], "e": {"z": []}}
    assert as_one(one, other) == (
        {"m": OrderedDict(a=1, both=2, b=3), "l": [{"x": 1, "y": 2}, 7], "e": {"z": []}},
        [],
    )


def test_values_of_other_ranks_alone_stand_in_a_dict_by_rank() -> None:
    other = {"rng": PerRank(8), "own": (PerRank({"v": 9}),)}
    states = {"rng": PerRank(7)}, other, other
    assert as_one(*states) == ({"rng": 7, "own": ({"rank1": {"v": 9}, "rank2": {"v": 9}},)}, [])
    assert as_one(*states, rank=1) == ({"rng": 8, "own": ({"v": 9},)}, [])


def test_what_is_a_container_on_one_rank_and_a_leaf_on_another_is_named_if_it_is_left_out() -> None:
    states = {"o": None, "p": {"a": 1}, "t": ({},)}, {"o": {"x": {"z": 1}}, "p": 5, "t": ({}, {"u": 2})}
    assert as_one(*states) == (states[0], ["o.x.z", "p", "t.1.u"])


def test_containers_that_are_shared_stay_shared() -> None:
    shared = {"w": torch.ones(1)}
    one: dict[str, Any] = {"a": {"first": torch.zeros(1)}, "shared": shared, "again": shared}
    theirs = {"v": torch.ones(1)}
    other: dict[str, Any] = {"a": {"second": {"deep": torch.zeros(1)}}, "theirs": theirs, "also": [theirs]}
    other["theirs"]["itself"] = theirs
    found, lost = as_one(one, other)
    assert lost == []
    assert sorted(found["a"]) == ["first", "second"]
    assert found["shared"] is found["again"]
    assert found["theirs"] is found["also"][0]
    assert found["theirs"]["itself"] is found["theirs"]


def test_keys_that_are_equal_as_text_are_one_name_between_ranks() -> None:
    assert as_one({"m": {0: 1}}, {"m": {"0": 1, "1": 2}}) == ({"m": {0: 1, "1": 2}}, [])


def as_completed(own: object, lowest: object) -> Any:
    """What rank 1 reads of its state ``own`` beside that of rank 0."""
    flats = [flatten(state, rank=rank) for rank, state in enumerate((lowest, own))]
    leaves = {name: value for flat in flats for name, value in zip(flat.names, flat.values, strict=True)}
    skeleton = completed(flats[1].skeleton, flats[0].skeleton)  # type: ignore[arg-type]
    assert set(skeleton_names(skeleton, rank=1)) <= leaves.keys()
    return build(skeleton, leaves, rank=1)


def test_a_part_that_is_an_empty_mapping_is_as_rank_0_saved_it() -> None:
    whole = {"m": OrderedDict(w=1, deep={"x": [2]}), "step": 3}
    assert as_completed({}, whole) == whole
    assert as_completed({"m": {}, "step": 5}, whole) == {"m": whole["m"], "step": 5}
    assert as_completed({"m": {}, "own": {}}, whole) == {"m": whole["m"], "own": {}}


def test_every_other_part_stays_as_it_was_saved() -> None:
    lowest = {"o": {"state": {0: 1}, "groups": [2]}, "l": [3], "n": {"a": 1}, "p": {"b": 1}, "d": {"x": {"y": 1}}}
    own = {"o": {"state": {}, "groups": [2]}, "l": [], "n": None, "p": 7, "d": {"x": {}}}
    assert as_completed(own, lowest) == own
    of_an_optimizer = {"state": {}, "param_groups": [{"lr": 1}]}
    assert as_completed(of_an_optimizer, {**of_an_optimizer, "state": {0: 1}}) == of_an_optimizer
    for of_rank_0 in ({"a": PerRank(5)}, PerRank({"n": 1})):
        assert as_completed({"rng": {}, "lr": 1}, {"rng": of_rank_0, "lr": 1}) == {"rng": {}, "lr": 1}
    assert as_completed({"x": PerRank({})}, {"x": PerRank({"n": 1})}) == {"x": {}}


def test_what_is_shared_with_a_part_that_is_replaced_or_left_out_stands_alone() -> None:
    shared, empty = {"a": 1}, dict[str, Any]()
    found = as_completed({"cfg": {"a": 2}, "model": {}}, {"cfg": shared, "model": {"w": 3, "cfg": shared}})
    assert found["model"] == {"w": 3, "cfg": shared}
    whole = {"model": {"w": 3}, "log": [{}, 4]}
    assert as_completed({"model": empty, "log": [empty, 4]}, whole) == whole


def test_what_is_shared_in_a_part_of_rank_0_stays_shared() -> None:
    shared = {"v": 1}
    lowest: dict[str, Any] = {"x": {"y": 5}, "m": {"a": shared, "b": [shared]}}
    lowest["m"]["itself"] = lowest["m"]
    theirs = {"u": 2}
    found = as_completed({"z": theirs, "again": theirs, "m": {}}, lowest)
    assert found["m"]["a"] is found["m"]["b"][0]
    assert found["m"]["itself"] is found["m"]
    assert found["z"] is found["again"]
