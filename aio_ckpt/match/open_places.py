"""Open places of a template: Python values and empty containers, which take whatever is stored at or below their name.

A tensor or an array of a template has a shape, so that what is stored has to fit it. None, a number, ``{}`` and ``[]``
have none: a running best that began as ``0.0`` takes the tensor that it became, and the ``state`` of an optimizer that
was not stepped yet takes the moments. What they take is built as ``read`` builds it. Reads no data file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from aio_ckpt.checkpoint.open import Checkpoint
from aio_ckpt.errors import MissingNameError
from aio_ckpt.match.rank_names import skeleton_of
from aio_ckpt.state.build import build_below
from aio_ckpt.state.dcp_paths import unflatten_dcp
from aio_ckpt.state.names import skeleton_names, subtree
from aio_ckpt.state.skeleton import Skeleton

__all__ = ["OpenPlace", "build_at", "dcp_paths_of", "names_at", "nested_at", "with_numbers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPlace:
    """What is stored for an open place."""

    names: list[str]
    """Names in the template of its leaves."""
    branch: str
    """Stored name of the branch, or leaf, that it takes."""


def names_at(checkpoint: Checkpoint, places: Iterable[str], *, rank: int) -> dict[str, list[str]]:
    """Names in the template of the leaves at or below each of ``places``, for those of which anything is stored.

    A place that only another rank saved is taken as that rank saved it.
    """
    left = set(places)
    if not checkpoint.has_skeleton:
        return _below(left, checkpoint.as_named(checkpoint.metadata.state_dict_metadata))
    found: dict[str, list[str]] = {}
    for skeleton in _skeletons(checkpoint, rank):
        found |= _below(left, checkpoint.as_named(skeleton_names(skeleton, rank=rank)))
        found |= {place: [] for place in left - found.keys() if _holds(skeleton, place, rank)}
        left -= found.keys()
        if not left:
            break
    return found


def _below(places: Collection[str], names: Iterable[str]) -> dict[str, list[str]]:
    """``names`` by the place that they are at or below."""
    found: dict[str, list[str]] = {}
    for name in names:
        ends = [0, *(end for end, letter in enumerate(name) if letter == "."), len(name)]
        for place in {name[:end] for end in ends}.intersection(places):
            found.setdefault(place, []).append(name)
    return found


def build_at(
    checkpoint: Checkpoint,
    places: Mapping[str, OpenPlace],
    values: Mapping[str, object],
    *,
    rank: int,
    trusted: bool,
) -> dict[str, object]:
    """What is stored for each of ``places``, as ``read`` builds it from ``values``, which have stored names.

    Of plain DCP, which makes every key a str, the ``state`` of an optimizer gets back its numbers.
    """
    left = dict(places)
    built: dict[str, object] = {}
    for skeleton in _skeletons(checkpoint, rank) if left and checkpoint.has_skeleton else ():
        for name, place in places.items():
            if name in left and _holds(skeleton, place.branch, rank):
                built[name] = build_below(skeleton, place.branch, values, rank=rank, trusted=trusted)
                del left[name]
        if not left:
            break
    for name, place in left.items():
        stored = {found: values[found] for found in map(checkpoint.stored_name, place.names)}
        if list(stored) == [place.branch]:
            built[name] = values[place.branch]
        else:
            nested = nested_at(checkpoint, place.branch, stored)
            built[name] = with_numbers(nested) if name.rpartition(".")[2] == "state" else nested
    return built


def _skeletons(checkpoint: Checkpoint, rank: int) -> Iterator[Skeleton]:
    """That of ``rank`` first, then every other one that ranks saved."""
    own = rank if rank < len(checkpoint.ranks) else 0
    seen: set[bytes] = set()
    for number in (own, *range(len(checkpoint.ranks))):
        if checkpoint.ranks[number].skeleton not in seen:
            seen.add(checkpoint.ranks[number].skeleton)
            yield skeleton_of(checkpoint, number)


def _holds(skeleton: Skeleton, place: str, rank: int) -> bool:
    try:
        subtree(skeleton, place, rank=rank)
    except MissingNameError:
        return False
    return True


# -- as DCP flattened it ------------------------------------------------------------------------------


def dcp_paths_of(checkpoint: Checkpoint) -> dict[str, tuple[str | int, ...]] | None:
    """Where each name stands in the state, as stock DCP noted it; None if it did not."""
    paths = checkpoint.metadata.planner_data
    if not isinstance(paths, dict) or not all(isinstance(path, tuple) for path in paths.values()):
        return None
    return paths


def nested_at(checkpoint: Checkpoint, place: str, leaves: dict[str, object]) -> Any:
    """The value called ``place``, of which ``leaves`` are all leaves, as stock DCP flattened it."""
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


def with_numbers(state: Any) -> Any:
    """The ``state`` of an optimizer by int keys, as it finds it by them."""
    return {int(key) if str(key).isdigit() else key: item for key, item in state.items()}
