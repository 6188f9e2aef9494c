"""Names of a rank: which names of a checkpoint belong to its state, by the skeleton that it saved. Pure."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Set
from dataclasses import replace

from aio_ckpt.checkpoint.open import Checkpoint
from aio_ckpt.errors import MissingNameError
from aio_ckpt.format.root_manifest import rank_manifest_name
from aio_ckpt.state.names import below_each, branches_of, copy_names, find_named, is_below, is_selected, skeleton_names
from aio_ckpt.state.skeleton import Skeleton, decode_skeleton
from aio_ckpt.state.union import united

_log = logging.getLogger("aio_ckpt")
_SHOWN = 5


def skeleton_of(checkpoint: Checkpoint, rank: int) -> Skeleton:
    """Return the skeleton that ``rank`` saved; that of rank 0 if there was no such rank, or if it saved ``{}``.

    If ranks of another number read, it is the union of all.
    """
    if checkpoint.union is not None:
        return checkpoint.union
    for number in (rank, 0) if 0 < rank < len(checkpoint.ranks) else (0,):
        skeleton = _saved_skeleton(checkpoint, number)
        if isinstance(skeleton, tuple) and skeleton[2]:
            break
    return skeleton


def _saved_skeleton(checkpoint: Checkpoint, rank: int) -> Skeleton:
    return decode_skeleton(checkpoint.ranks[rank].skeleton, name=rank_manifest_name(rank))


def as_one_state(checkpoint: Checkpoint, *, rank: int, world_size: int) -> Checkpoint:
    """Return the checkpoint with the union of what its ranks hold, if ranks of another number read it.

    Stages of a pipeline and experts hold names of their own. If as many ranks read as saved, each gets its own state.
    """
    owners: dict[bytes, list[int]] = {}
    for number, manifest in enumerate(checkpoint.ranks):
        owners.setdefault(manifest.skeleton, []).append(number)
    if len(owners) < 2 or world_size == len(checkpoint.ranks):
        return checkpoint
    skeletons = {_saved_skeleton(checkpoint, ranks[0]): ranks for ranks in owners.values()}
    union, lost = united(skeletons, rank)
    if lost:
        more = f" and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else ""
        _log.warning(
            "%s: ranks hold a container and a leaf under one name; left out: %s%s", checkpoint.path, lost[:_SHOWN], more
        )
    return replace(checkpoint, union=union)


def wanted_names(checkpoint: Checkpoint, *, rank: int, only: Iterable[str] | None) -> list[str]:
    """Return the names of the state of ``rank``; with ``only``, those that equal one of these or lie below it.

    Raises:
        MissingNameError: one of ``only`` selects nothing.
    """
    if not checkpoint.has_skeleton:
        names = checkpoint.as_named(checkpoint.metadata.state_dict_metadata)
    else:
        names = _names_of(checkpoint, rank)
    if only is None:
        return names
    selected = frozenset(only)
    left = selected.difference(branch for name in names for branch in branches_of(name))
    left -= empty_containers(checkpoint, left, rank)
    if left:
        raise MissingNameError(f"{checkpoint.path}: {_why_nothing(checkpoint, min(left), rank)}")
    return [name for name in names if is_selected(name, selected)]


def empty_containers(checkpoint: Checkpoint, names: Set[str], rank: int) -> Set[str]:
    """Return which of ``names``, at or below which no leaf is stored, are containers that ``rank`` saved as empty.

    In a skeleton of another rank, ``PerRank`` values have leaves that ``rank`` did not save.
    """
    if not names or not checkpoint.has_skeleton:
        return frozenset()
    skeleton = skeleton_of(checkpoint, rank)
    found = find_named(skeleton, names, rank=rank).keys()
    return found - below_each(found, skeleton_names(skeleton, rank=rank)).keys() if found else found


def _why_nothing(checkpoint: Checkpoint, prefix: str, rank: int) -> str:
    """Return why ``rank`` has nothing at or below ``prefix``, and the remedy if another rank has."""
    if checkpoint.has_skeleton and any(is_below(name, prefix) for name in checkpoint.catalog.names()):
        for other in range(len(checkpoint.ranks)):
            if any(is_below(name, prefix) for name in _names_of(checkpoint, other)):
                own = rank if rank < len(checkpoint.ranks) else 0
                return (
                    f"{prefix!r} is what rank {other} saved, and read() gives what rank {own} did: load() it into a "
                    f"template with its names, or read it on rank {other}"
                )
    return f"holds nothing named or below {prefix!r}; aio-ckpt inspect lists its names"


def _names_of(checkpoint: Checkpoint, rank: int) -> list[str]:
    return checkpoint.as_named(skeleton_names(skeleton_of(checkpoint, rank), rank=rank))


def unexpected_names(checkpoint: Checkpoint, known: set[str], rank: int, world_size: int) -> set[str]:
    """Return the names of the checkpoint that this rank's template should have and that are not in ``known``.

    If the world size is that of the save, these are names that the same rank saved: stages of a pipeline have
    different names. Otherwise PerRank values are left out, as they belong to the ranks that saved them.
    """
    beyond = checkpoint.catalog.names() - known
    if not beyond or not checkpoint.has_skeleton:
        return beyond
    beyond.difference_update(checkpoint.as_named(_copies(checkpoint)))
    if len(checkpoint.ranks) < 2:
        return beyond
    if world_size == len(checkpoint.ranks):
        return beyond.intersection(_names_of(checkpoint, rank))
    return beyond.difference(checkpoint.as_named(_per_rank_names(checkpoint, since=0)))


def dropped_names(checkpoint: Checkpoint, known: Set[str], world_size: int) -> list[str]:
    """Return the names of the ``PerRank`` values of ranks beyond ``world_size`` that are not among ``known``."""
    if world_size >= len(checkpoint.ranks) or not checkpoint.has_skeleton:
        return []
    names = _per_rank_names(checkpoint, since=world_size) & checkpoint.catalog.names()
    return sorted(names.difference(known))


def _copies(checkpoint: Checkpoint) -> set[str]:
    """Return the names of items that were stored once more for stock DCP. They are leaves of no state."""
    owners: dict[bytes, list[int]] = {}
    for rank, manifest in enumerate(checkpoint.ranks):
        owners.setdefault(manifest.skeleton, []).append(rank)
    found = [copy_names(_saved_skeleton(checkpoint, ranks[0]), ranks=ranks) for ranks in owners.values()]
    return set().union(*found)


def _per_rank_names(checkpoint: Checkpoint, *, since: int) -> set[str]:
    """Return the names of the ``PerRank`` values of the ranks from ``since`` on."""
    mark = 1 << 62  # no rank has this number, so a name that holds it is the name of a PerRank value
    marked: dict[bytes, list[str]] = {}
    for rank, manifest in enumerate(checkpoint.ranks):
        if manifest.skeleton not in marked:
            names = skeleton_names(_saved_skeleton(checkpoint, rank), rank=mark)
            marked[manifest.skeleton] = [name for name in names if f"rank{mark}" in name]
    return {
        name.replace(f"rank{mark}", f"rank{rank}")
        for rank, manifest in enumerate(checkpoint.ranks)
        if rank >= since
        for name in marked[manifest.skeleton]
    }
