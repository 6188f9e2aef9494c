"""Open places of a template: Python values and empty containers. They take any value stored at or below their name.

A tensor or an array of a template has a shape, which the stored one must fit. None, a number, ``{}`` and ``[]`` have no
shape. Examples: a running best that began as ``0.0`` takes the tensor that it became, and the ``state`` of an optimizer
that was not stepped yet takes the moments. Their values are built as ``read`` builds them. Reads no data file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from aio_ckpt.checkpoint.open import Checkpoint
from aio_ckpt.match.rank_names import skeleton_of
from aio_ckpt.state.build import build_parts
from aio_ckpt.state.dcp_paths import unflatten_dcp
from aio_ckpt.state.names import below_each, find_named, skeleton_names
from aio_ckpt.state.skeleton import Skeleton


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
        return below_each(left, checkpoint.as_named(checkpoint.metadata.state_dict_metadata))
    found: dict[str, list[str]] = {}
    for skeleton in _skeletons(checkpoint, rank):
        found |= below_each(left, checkpoint.as_named(skeleton_names(skeleton, rank=rank)))
        found |= {place: [] for place in find_named(skeleton, left - found.keys(), rank=rank)}
        left -= found.keys()
        if not left:
            break
    return found


def build_at(
    checkpoint: Checkpoint,
    places: Mapping[str, OpenPlace],
    values: Mapping[str, object],
    *,
    rank: int,
    trusted: bool,
) -> dict[str, object]:
    """Return the value for each of ``places``, built as ``read`` does. ``values``: all that was read, by stored name.

    Plain DCP stores every key as a str. The keys of an optimizer's ``state`` are made numbers again.
    """
    left = dict(places)
    built: dict[str, object] = {}
    for skeleton in _skeletons(checkpoint, rank) if left and checkpoint.has_skeleton else ():
        branches = {place.branch for place in left.values()}
        parts = build_parts(skeleton, branches, values, rank=rank, trusted=trusted)
        found = {name: parts[place.branch] for name, place in left.items() if place.branch in parts}
        built |= found
        left = {name: place for name, place in left.items() if name not in found}
        if not left:
            break
    for name, place in left.items():
        stored = {found: values[found] for found in map(checkpoint.stored_name, place.names)}
        if list(stored) == [place.branch]:
            built[name] = values[place.branch]
        else:
            nested = nested_at(checkpoint, place.branch, stored)
            built[name] = with_int_keys(nested) if name.rpartition(".")[2] == "state" else nested
    return built


def _skeletons(checkpoint: Checkpoint, rank: int) -> Iterator[Skeleton]:
    """Yield the distinct skeletons of all ranks, that of ``rank`` first."""
    own = rank if rank < len(checkpoint.ranks) else 0
    seen: set[bytes] = set()
    for number in (own, *range(len(checkpoint.ranks))):
        if checkpoint.ranks[number].skeleton not in seen:
            seen.add(checkpoint.ranks[number].skeleton)
            yield skeleton_of(checkpoint, number)


# -- as DCP flattened it ------------------------------------------------------------------------------


def dcp_paths_of(checkpoint: Checkpoint) -> dict[str, tuple[str | int, ...]] | None:
    """Return the path of each name in the state, as stock DCP noted it; None if it noted none."""
    paths = checkpoint.metadata.planner_data
    if not isinstance(paths, dict) or not all(isinstance(path, tuple) for path in paths.values()):
        return None
    return paths


def nested_at(checkpoint: Checkpoint, place: str, leaves: dict[str, object]) -> Any:
    """Return the nested value called ``place``, which stock DCP flattened. ``leaves``: all its leaves, by name."""
    paths = dcp_paths_of(checkpoint) or {}
    nested: Any = unflatten_dcp(paths, leaves)
    name = next(iter(leaves))
    path = paths.get(name, (name,))
    depth = next((n for n in range(len(path)) if ".".join(map(str, path[:n])) == place), None)
    if depth is None:
        return {name.removeprefix(f"{place}."): leaf for name, leaf in leaves.items()}
    for part in path[:depth]:
        nested = nested[part]
    return nested


def with_int_keys(state: Any) -> Any:
    """Return the ``state`` of an optimizer with keys of digits as ints, by which the optimizer looks them up."""
    return {int(key) if str(key).isdigit() else key: item for key, item in state.items()}
