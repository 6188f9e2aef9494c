"""Open places of a template: Python values and empty containers. They take any value stored at or below their name.

A tensor or an array of a template has a shape, which the stored one must fit. None, a number, ``{}`` and ``[]`` have no
shape. Examples: a running best that began as ``0.0`` takes the tensor that it became, and the ``state`` of an optimizer
that was not stepped yet takes the moments. Their values are built as ``read`` builds them. Reads no data file.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from aio_ckpt.checkpoint.open import Checkpoint
from aio_ckpt.state.names import below_each, find_named, skeleton_names


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPlace:
    """The stored leaves that an open place takes."""

    names: list[str]
    """Names of the leaves, as the template would name them."""
    branch: str
    """Stored name of the branch, or of the leaf if there is one alone."""


def names_at(checkpoint: Checkpoint, places: Iterable[str], *, rank: int) -> dict[str, list[str]]:
    """Return the names of the stored leaves at or below each place, for places at which anything is stored.

    If ``rank`` saved nothing at a place and another rank did, the other rank's leaves are taken.
    """
    left = set(places)
    if not checkpoint.has_skeleton:
        return below_each(left, checkpoint.names_of(rank))
    found: dict[str, list[str]] = {}
    for skeleton in checkpoint.skeletons(rank):
        found |= below_each(left, checkpoint.as_named(skeleton_names(skeleton, rank=rank)))
        found |= {place: [] for place in find_named(skeleton, left - found.keys(), rank=rank)}
        left -= found.keys()
        if not left:
            break
    return found
