"""Names that two values would have, and what lies below a name."""

from __future__ import annotations

import re

import pytest
import torch

from aio_ckpt.errors import DuplicateNameError
from aio_ckpt.leaves.values import PerRank
from aio_ckpt.state.flatten import flatten, read_template
from aio_ckpt.state.names import is_below


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ({0: 1, "0": 2}, "the state: the keys 0 and '0' are equal as text"),
        ({"x": {0: 1, "0": [2]}}, "x: the keys 0 and '0' are equal as text"),
        ({"x": {"None": {}, None: torch.ones(1)}}, "x: the keys 'None' and None are equal as text"),
        ({"a.b": 1, "a": {"b": 2}}, "'a.b' is the name of 2 values"),
        ({"r": PerRank(1), "r.rank2": 2}, "'r.rank2' is the name of 2 values"),
        ({"a": (torch.ones(1),), "a.0": 1}, "'a.0' is the name of 2 values"),
        ({"w": torch.ones(2).to_sparse(), "w.values": 1}, "'w.values' is the name of 2 values"),
    ],
)
def test_two_values_of_one_name_are_refused_in_a_state_and_in_a_template(state, told):
    for walk in (flatten, read_template):
        with pytest.raises(DuplicateNameError, match=re.escape(told)) as caught:
            walk(state, rank=2)
        assert "rename" in str(caught.value)


def test_a_name_lies_below_itself_its_parents_and_the_state():
    assert is_below("a.b", "a")
    assert is_below("a", "a")
    assert is_below("a", "")
    assert not is_below("ab", "a")
