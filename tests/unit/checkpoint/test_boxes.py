"""Boxes of a tensor's shards: two that overlap are found, in time that grows as that of sorting."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples

from aio_ckpt.checkpoint.boxes import Box, check_boxes, overlapping_boxes
from aio_ckpt.errors import CorruptCheckpointError

SIZES = st.integers(0, 3)
SHARDS = 60_000


def elements(box: Box) -> set[tuple[int, ...]]:
    ranges = [range(start, start + size) for start, size in zip(*box, strict=True)]
    return set(itertools.product(*ranges))


@examples(200)
@given(st.integers(0, 3).flatmap(lambda dims: st.lists(st.tuples(*[st.tuples(*[SIZES] * dims)] * 2), max_size=6)))
def test_two_boxes_are_found_if_and_only_if_they_have_an_element_in_common(boxes: list[Box]) -> None:
    found = overlapping_boxes(boxes)
    pairs = itertools.combinations([elements(box) for box in boxes], 2)
    assert (found is not None) == any(one & other for one, other in pairs)
    if found is not None:
        assert elements(found[0]) & elements(found[1])


def test_boxes_that_no_cut_separates_are_compared_pair_by_pair() -> None:
    pinwheel: list[Box] = [((0, 0), (2, 1)), ((0, 1), (1, 2)), ((1, 2), (2, 1)), ((2, 0), (1, 2)), ((1, 1), (1, 1))]
    assert overlapping_boxes(pinwheel) is None
    assert overlapping_boxes([*pinwheel, ((1, 0), (1, 2))]) is not None


@pytest.mark.parametrize("side", [1, 400])
def test_the_time_grows_as_that_of_sorting_with_the_number_of_shards(side: int) -> None:
    boxes: list[Box] = [((number // side, number % side), (1, 1)) for number in range(SHARDS)]
    began = time.perf_counter()
    assert overlapping_boxes(boxes) is None
    assert time.perf_counter() - began < 30, "all pairs would take minutes"


def test_tensors_that_are_cut_alike_are_looked_at_once() -> None:
    boxes: list[Box] = [((row, 0), (1, 4)) for row in range(1000)]
    began = time.perf_counter()
    check_boxes((str(number), boxes) for number in range(1000))
    assert time.perf_counter() - began < 10
    with pytest.raises(CorruptCheckpointError, match=r"the shards of 'x' overlap: \(2, 1\) at \(0, 0\) and"):
        check_boxes([("y", boxes), ("x", [((0, 0), (2, 1)), ((1, 0), (2, 1))])])
