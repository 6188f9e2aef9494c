"""Names of a rank: which names of a checkpoint belong to its state, by the skeleton that it saved. Pure."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Set
from dataclasses import replace

from aio_ckpt.checkpoint.open import Checkpoint
from aio_ckpt.errors import MissingNameError
from aio_ckpt.message_texts import first_of
from aio_ckpt.state.names import below_each, branches_of, find_named, is_below, is_selected, skeleton_names
from aio_ckpt.state.skeleton_union import united

_log = logging.getLogger("aio_ckpt")


def as_seen_by_rank(checkpoint: Checkpoint, *, rank: int, world_size: int) -> Checkpoint:
    """Return the checkpoint with the union of what its ranks hold, if ranks of another number read it.

    Stages of a pipeline and experts hold names of their own. If as many ranks read as saved, each gets its own state.
    """
    if world_size == checkpoint.world_size:
        if lent := lent_names(checkpoint, rank):
            parts = sorted({name.partition(".")[0] for name in lent})
            _log.info(
                "%s: rank %d saved nothing in %s: read as rank 0 saved it", checkpoint.path, rank, first_of(parts)
            )
        return checkpoint
    if len(owners := checkpoint.owners()) < 2:
        return checkpoint
    union, lost = united({checkpoint.saved_skeleton(ranks[0]): ranks for ranks in owners.values()}, rank)
    if lost:
        _log.warning(
            "%s: ranks hold a container and a leaf under one name; left out: %s", checkpoint.path, first_of(lost)
        )
    return replace(checkpoint, union=union)


def wanted_names(checkpoint: Checkpoint, *, rank: int, only: Iterable[str] | None) -> list[str]:
    """Return the names of the state of ``rank``; with ``only``, those that equal one of these or lie below it.

    Raises:
        MissingNameError: one of ``only`` selects nothing.
    """
    names = checkpoint.names_of(rank)
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
    skeleton = checkpoint.skeleton(rank)
    found = find_named(skeleton, names, rank=rank).keys()
    return found - below_each(found, skeleton_names(skeleton, rank=rank)).keys() if found else found


def _why_nothing(checkpoint: Checkpoint, prefix: str, rank: int) -> str:
    """Return why ``rank`` has nothing at or below ``prefix``, and the remedy if another rank has."""
    for other in range(checkpoint.world_size) if checkpoint.has_skeleton else ():
        if any(is_below(name, prefix) and checkpoint.holds(name) for name in checkpoint.names_of(other)):
            own = rank if rank < checkpoint.world_size else 0
            return (
                f"{prefix!r} is what rank {other} saved, and read() gives what rank {own} did: load() it into a "
                f"template with its names, or read it on rank {other}"
            )
    return f"holds nothing named or below {prefix!r}; aio-ckpt inspect lists its names"


def lent_names(checkpoint: Checkpoint, rank: int) -> Set[str]:
    """Return the names that ``rank`` has from rank 0, as it saved nothing there itself: see ``Checkpoint.skeleton``."""
    if not 0 < rank < checkpoint.world_size or not checkpoint.has_skeleton:
        return frozenset()
    saved, skeleton = checkpoint.saved_skeleton(rank), checkpoint.skeleton(rank)
    if checkpoint.union is not None or skeleton is saved:
        return frozenset()
    return {*checkpoint.names_of(rank)} - {*checkpoint.as_named(skeleton_names(saved, rank=rank))}


def unexpected_names(checkpoint: Checkpoint, known: set[str], rank: int, world_size: int) -> set[str]:
    """Return the names of the checkpoint that this rank's template should have and that are not in ``known``.

    If the world size is that of the save, these are names that the same rank saved: stages of a pipeline have
    different names. Otherwise PerRank values are left out, as they belong to the ranks that saved them.
    """
    beyond = checkpoint.catalog.names() - known
    if not beyond or not checkpoint.has_skeleton:
        return beyond
    if checkpoint.world_size < 2:
        return beyond
    if world_size == checkpoint.world_size:
        return beyond.intersection(checkpoint.names_of(rank)).difference(lent_names(checkpoint, rank))
    return beyond.difference(checkpoint.as_named(_per_rank_names(checkpoint, since=0)))


def dropped_names(checkpoint: Checkpoint, known: Set[str], world_size: int) -> list[str]:
    """Return the names of the ``PerRank`` values of ranks beyond ``world_size`` that are not among ``known``."""
    if world_size >= checkpoint.world_size or not checkpoint.has_skeleton:
        return []
    return sorted(name for name in _per_rank_names(checkpoint, since=world_size) - known if checkpoint.holds(name))


def _per_rank_names(checkpoint: Checkpoint, *, since: int) -> set[str]:
    """Return the names of the ``PerRank`` values of the ranks from ``since`` on."""
    mark = 1 << 62  # no rank has this number, so a name that holds it is the name of a PerRank value
    found: set[str] = set()
    for ranks in checkpoint.owners().values():
        names = skeleton_names(checkpoint.saved_skeleton(ranks[0]), rank=mark)
        own = [name for name in names if f"rank{mark}" in name]
        found.update(name.replace(f"rank{mark}", f"rank{rank}") for rank in ranks if rank >= since for name in own)
    return found
