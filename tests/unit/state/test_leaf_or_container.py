"""Leaves and containers: what is entered, and what is one leaf."""

from __future__ import annotations

import argparse
import collections
import collections.abc
import dataclasses
import itertools
from typing import Any

import numpy as np
import torch
from torch import nn
from tree_states import Moments, Point

from aio_ckpt.leaves.values import LeafKind
from aio_ckpt.state.flatten import flatten
from aio_ckpt.state.leaf_or_container import holds_leaves


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
    assert flatten(state, rank=0).names == ["p.0", "p.1", "m.mean", "m.steps", "l.0"]
    state = {"many": Losses([1.0] * 1025), "locked": Locked(1.0)}
    assert flatten(state, rank=0).names == list(state)


def test_a_list_that_stands_in_many_places_is_looked_at_once(monkeypatch):
    looks, look = itertools.count(), holds_leaves

    def counted(*arguments, **options):
        assert next(looks) < 200, "each place was looked at by itself"
        return look(*arguments, **options)

    monkeypatch.setattr("aio_ckpt.state.leaf_or_container.holds_leaves", counted)
    value = (1, 2)
    for _ in range(60):
        value = (value, value)
    flat = flatten({"a": value, "t": torch.ones(1)}, rank=0)
    assert flat.names == ["a", "t"]
