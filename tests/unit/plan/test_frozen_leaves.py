"""Frozen leaves: which tensors get a file of their own, learned from the sums of the saves."""

from __future__ import annotations

import struct
import sys

import pytest
import torch

from aio_ckpt.format.constants import TensorSpec
from aio_ckpt.format.tensor_zip import render
from aio_ckpt.plan.frozen_leaves import FrozenLeaves
from aio_ckpt.plan.layout import ImageLayout, lay_out
from aio_ckpt.plan.tensor_item import Placement

MIB = 1 << 20
NOTHING = frozenset[str]()


def laid_out(sizes: dict[str, int], *, frozen: int = 0) -> ImageLayout:
    specs = [TensorSpec(torch.uint8, (nbytes,), (1,)) for nbytes in sizes.values()]
    placements = [
        Placement(leaf, (name, f"tied {name}"), (0,), spec, render(spec))
        for leaf, (name, spec) in enumerate(zip(sizes, specs, strict=True))
    ]
    return lay_out(placements, budget_bytes=sys.maxsize, frozen=frozen)


SIZES = {"big": 3 * MIB, "empty": 0, "small": 5, "other": 2 * MIB}
LAYOUT = laid_out(SIZES)


def sums(big: tuple[int, int, int] = (1, 2, 3), small: int = 4, other: tuple[int, int] = (5, 6)) -> bytes:
    return struct.pack("<6I", *big, small, *other)


def learned(leaves: FrozenLeaves, layout: ImageLayout, sums: bytes, frozen: frozenset[str] = NOTHING) -> frozenset[str]:
    """The frozen leaves of the next save."""
    leaves.learn(layout, sums, frozen)
    found = leaves.renew(frozen)
    assert leaves.renew(frozen) is None
    return frozen if found is None else found & SIZES.keys()


def test_a_tensor_counts_once_two_saves_in_a_row_have_found_the_sums_of_the_save_before():
    leaves = FrozenLeaves()
    assert learned(leaves, LAYOUT, sums()) == NOTHING
    assert learned(leaves, LAYOUT, sums(other=(5, 7))) == NOTHING
    assert learned(leaves, LAYOUT, sums(other=(5, 8))) == {"big", "empty", "small"}
    assert leaves.choose([*SIZES], [0] * len(SIZES), []) == {"big", "empty", "small"}


@pytest.mark.parametrize("changed", [(9, 2, 3), (1, 9, 3), (1, 2, 9)])
def test_a_change_of_any_block_begins_the_count_anew(changed: tuple[int, int, int]):
    leaves, rest = FrozenLeaves(), frozenset({"empty", "small", "other"})
    saves = [sums(), sums(), sums(big=changed)]
    assert [learned(leaves, LAYOUT, each) for each in saves] == [NOTHING, NOTHING, rest]
    assert learned(leaves, LAYOUT, sums(big=changed), rest) == rest
    assert learned(leaves, LAYOUT, sums(big=changed), rest) == {"big", *rest}


def test_what_is_less_than_a_mebibyte_or_a_twentieth_of_the_state_changes_no_plan():
    leaves = FrozenLeaves()
    for number in range(5):
        assert learned(leaves, LAYOUT, sums(big=(number, 2, 3), other=(number, 0))) == NOTHING
    large = laid_out({"most": 21 * MIB, "still": MIB})
    for number in range(5):
        assert learned(leaves, large, struct.pack("<22I", *[number] * 21, 0)) == NOTHING


def test_a_frozen_tensor_that_changes_never_counts_again():
    leaves, layout = FrozenLeaves(), laid_out(SIZES, frozen=2)
    frozen = frozenset({"big", "empty"})
    assert learned(leaves, layout, sums(small=0), frozen) == frozen
    assert learned(leaves, layout, sums(big=(1, 2, 4), small=1), frozen) == {"empty"}
    kept = frozenset({"empty"})
    for number in range(2, 9):
        kept = learned(leaves, LAYOUT, sums(small=number), kept)
    assert kept == {"other", "empty"}
    assert leaves.choose([*SIZES], [0] * len(SIZES), []) == {"other"}


def test_sums_of_another_layout_are_never_compared():
    leaves, same = FrozenLeaves(), laid_out(SIZES)
    for layout in (LAYOUT, same, LAYOUT, same):
        assert learned(leaves, layout, sums()) == NOTHING


def test_the_commit_of_a_save_that_was_planned_before_changes_no_plan_twice():
    leaves = FrozenLeaves()
    for _ in range(2):
        leaves.learn(LAYOUT, sums(), NOTHING)
    frozen = learned(leaves, LAYOUT, sums())
    leaves.learn(LAYOUT, sums(), NOTHING)
    assert leaves.renew(frozen | {"tied big", "tied empty", "tied small", "tied other"}) is None


def test_the_leaves_of_a_parameter_without_gradient_count_at_once():
    frozen, trained, empty = (torch.nn.Parameter(torch.zeros(size)) for size in (1, 1, 0))
    for parameter in (frozen, empty):
        parameter.requires_grad_(False)
    values = {
        "frozen": frozen,
        "detached": frozen.detach(),
        "trained": trained,
        "empty": empty,
        "other": torch.zeros(0),
    }
    addresses = [tensor.data_ptr() for tensor in values.values()]
    assert FrozenLeaves().choose([*values], addresses, [frozen, trained, empty]) == {"frozen", "detached"}
