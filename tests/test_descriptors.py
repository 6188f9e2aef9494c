"""Copy descriptors: what is issued between any two offsets of an image, and from which addresses."""

from __future__ import annotations

import ctypes
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rings import plan_of

from aio_ckpt.descriptors import Issues, Places
from aio_ckpt.moves import copy_all
from aio_ckpt.plan import ImagePlan
from aio_ckpt.routes import ChunkRoutes


def issued(state: dict[str, torch.Tensor]) -> tuple[ImagePlan, Places]:
    """A plan, and places for it as if every tensor were on one device."""
    plan = plan_of(state).plan
    routes = [
        ChunkRoutes(moved=(), issued=chunk.pieces, gathered=(), copied=(), converted=()) for chunk in plan.layout.chunks
    ]
    return plan, Places.of(plan.structure, plan.layout, routes)


def state_of(sizes: list[int]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(len(sizes))
    return {f"t{i}": torch.randint(0, 255, (n,), generator=generator).to(torch.uint8) for i, n in enumerate(sizes)}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 3_000_000), min_size=1, max_size=6),
    st.lists(st.floats(0, 1), max_size=5),
)
def test_however_an_image_is_cut_each_byte_is_issued_once_and_from_its_own_tensor(sizes, cuts):
    state = state_of(sizes)
    plan, places = issued(state)
    issues = places.at(plan.descriptors.fingerprint).issues
    image = np.zeros(plan.layout.tensor_bytes, dtype=np.uint8)
    offsets = sorted({0, len(image), *(int(cut * len(image)) for cut in cuts)})
    for start, stop in pairwise(offsets):
        for found in issues.values():
            moves = found.within(start, stop)
            assert (moves[:, 0] >= start).all()
            assert (moves[:, 0] + moves[:, 2] <= stop).all()
            assert (moves[:, 2] > 0).all()
            copy_all(image.ctypes.data, moves)
    assert sum(len(found.moves) for found in issues.values()) == sum(n > 0 for n in sizes)  # whole, one row each
    for item in plan.layout.items:
        (name,) = item.fqns
        got = image[item.raw_offset : item.raw_offset + item.raw_bytes]
        assert bytes(got) == ctypes.string_at(state[name].data_ptr(), state[name].nbytes)


def test_what_is_chosen_by_leaf_is_what_the_others_lack():
    _, places = issued(state_of([100, 200, 300, 400]))
    (found,) = places.at([1000, 2000, 3000, 4000]).issues.values()
    wanted = np.array([True, False, False, True])
    assert found.of(wanted).leaves.tolist() == [0, 3]
    assert found.of(~wanted).moves[:, 1].tolist() == [2000, 3000]


@pytest.mark.parametrize(("start", "stop"), [(0, 10), (40, 50), (20, 20)])
def test_where_nothing_lies_nothing_is_issued(start, stop):
    moves = np.array([(10, 1, 10), (20, 100, 20)], dtype=np.uint64)
    assert len(Issues(moves, np.arange(2)).within(start, stop)) == 0


def test_addresses_of_the_upper_half_are_no_sign():
    moves = np.array([(0, (1 << 64) - 100, 50)], dtype=np.uint64)
    assert Issues(moves, np.arange(1)).within(10, 20).tolist() == [[10, (1 << 64) - 90, 10]]
