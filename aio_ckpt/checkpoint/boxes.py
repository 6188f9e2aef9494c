"""Boxes that the shards of a tensor take: a search for two that overlap. Pure.

The time grows as that of sorting, if each group of boxes can be cut along one dimension into parts that no box crosses.
Torch cuts all tensors so. Other groups are compared pair by pair.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from aio_ckpt.errors import CorruptCheckpointError

Box: TypeAlias = "tuple[tuple[int, ...], tuple[int, ...]]"
"""(offsets, shape), of one number of dimensions."""


def check_boxes(tensors: Iterable[tuple[str, Iterable[Box]]]) -> None:
    """Check that no two shards of a tensor overlap. They would hide a hole of the same size from a load.

    Raises:
        CorruptCheckpointError: names the tensor and the shards.
    """
    sound: set[tuple[Box, ...]] = set()  # most tensors are cut as another one is
    for name, found in tensors:
        boxes = tuple(found)
        if boxes in sound:
            continue
        if (pair := overlapping_boxes(boxes)) is not None:
            (start, shape), (begin, other) = pair
            raise CorruptCheckpointError(f"the shards of {name!r} overlap: {shape} at {start} and {other} at {begin}")
        sound.add(boxes)


def overlapping_boxes(boxes: Iterable[Box]) -> tuple[Box, Box] | None:
    """Return two boxes that have an element in common; None if there are none."""
    filled = [box for box in boxes if 0 not in box[1]]
    groups = [filled] if len(filled) > 1 else []
    while groups:
        group = groups.pop()
        cut = next((parts for dim in range(len(group[0][0])) if len(parts := _cut(group, dim)) > 1), None)
        if cut is not None:
            groups += (part for part in cut if len(part) > 1)
        elif found := next((pair for pair in itertools.combinations(group, 2) if _overlap(*pair)), None):
            return found
    return None


def _cut(group: Sequence[Box], dim: int) -> list[list[Box]]:
    """Return the boxes in as many parts as possible whose ranges along ``dim`` do not overlap."""
    parts: list[list[Box]] = []
    end = -1
    for box in sorted(group, key=lambda box: box[0][dim]):
        start = box[0][dim]
        if start >= end:
            parts.append([])
        parts[-1].append(box)
        end = max(end, start + box[1][dim])
    return parts


def _overlap(one: Box, other: Box) -> bool:
    rows = zip(*one, *other, strict=True)
    return all(start < begin + length and begin < start + size for start, size, begin, length in rows)
