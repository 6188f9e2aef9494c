"""Shares: which rank writes what. Pure: what every rank holds in, who writes it out.

A replica is written once, by a rank that captured it for this very save: all that it holds on a miss, its own share on
a hit. Replicas go to whoever has least to write, the largest first; objects, and replicas that differ, to the lowest
rank.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import msgspec

from aio_ckpt.errors import DuplicateNameError, PlanChangedError
from aio_ckpt.metadata import DTYPES

__all__ = ["Holding", "LocalPlan", "Share", "assign", "unequal_replicas"]

_SHOWN = 5
_Key: TypeAlias = "tuple[str, tuple[int, ...]]"
"""A box of a global tensor: name and offsets."""


class Holding(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A tensor item that one rank holds."""

    fqns: tuple[str, ...]
    """Every name of it; tied leaves share it."""
    offsets: tuple[int, ...]
    """Where the shard begins in the global tensor."""
    shape: tuple[int, ...]
    """Shape of the shard."""
    size: tuple[int, ...]
    """Shape of the global tensor."""
    dtype: str
    """``str(torch.dtype)`` without ``torch.``."""

    @property
    def nbytes(self) -> int:
        """Raw bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class LocalPlan(msgspec.Struct, frozen=True, array_like=True):
    """All that one rank holds."""

    tensors: tuple[Holding, ...]
    """Tensor items, in the order of its image."""
    objects: tuple[str, ...]
    """Names of the leaves stored as objects, in order."""
    skeleton: bytes
    """Containers of its state, encoded."""

    def boxes(self) -> Iterator[tuple[_Key, int]]:
        """Every box with the item that holds it."""
        for index, item in enumerate(self.tensors):
            for name in item.fqns:
                yield (name, item.offsets), index


class Share(msgspec.Struct, frozen=True, array_like=True):
    """What one rank writes of what it holds."""

    tensors: tuple[tuple[int, tuple[str, ...]], ...]
    """(item, the names of it that this rank writes), ascending."""
    objects: tuple[str, ...]
    """Names, in the order of its plan."""


def assign(
    plans: Sequence[LocalPlan], kept: Mapping[int, Share], unequal: frozenset[_Key] = frozenset()
) -> list[Share]:
    """The share of every rank. ``kept``: ranks that captured only the share that they have.

    Raises:
        DuplicateNameError: two ranks give one name to things of different kind, dtype or shape.
        PlanChangedError: nobody captured something that a rank holds; every rank has to plan anew.
    """
    _check_names(plans)
    writers = _Writers(len(plans))
    holders: dict[_Key, list[tuple[int, int]]] = {}
    for rank, plan in enumerate(plans):
        for key, index in plan.boxes():
            holders.setdefault(key, []).append((rank, index))
    for rank, share in kept.items():
        for index, names in share.tensors:
            writers.take(rank, index, plans[rank].tensors[index], names)
    open_boxes = [key for key in holders if key not in writers.taken]
    free = {key: [place for place in holders[key] if place[0] not in kept] for key in open_boxes}
    _check_captured([key[0] for key, places in free.items() if not places])
    sizes = {key: plans[places[0][0]].tensors[places[0][1]].nbytes for key, places in free.items()}
    single = [key for key in open_boxes if len(free[key]) == 1 or key in unequal]
    several = sorted((key for key in open_boxes if len(free[key]) > 1 and key not in unequal), key=sizes.__getitem__)
    for key in single:
        rank, index = free[key][0]
        writers.take(rank, index, plans[rank].tensors[index], (key[0],))
    for key in reversed(several):
        if key not in writers.taken:  # tied to one that was placed before
            rank, index = min(free[key], key=lambda place: (writers.load_bytes[place[0]], place[0]))
            item = plans[rank].tensors[index]
            tied = tuple(name for name in item.fqns if (name, item.offsets) in free and name != key[0])
            writers.take(rank, index, item, (key[0], *tied))
    objects = _assign_objects(plans, kept)
    return [
        Share(
            tuple((index, _in_order(names, plan.tensors[index])) for index, names in sorted(mine.items())),
            tuple(name for name in plan.objects if objects[name] == rank),
        )
        for rank, (plan, mine) in enumerate(zip(plans, writers.items, strict=True))
    ]


def unequal_replicas(plans: Sequence[LocalPlan], sums: Mapping[int, Sequence[int]]) -> frozenset[_Key]:
    """Boxes whose bytes differ between ranks, by the CRC32 of every item of those ranks that captured all."""
    first: dict[_Key, int] = {}
    return frozenset(
        key
        for rank, found in sums.items()
        for key, index in plans[rank].boxes()
        if first.setdefault(key, found[index]) != found[index]
    )


class _Writers:
    """Who writes each box so far."""

    def __init__(self, ranks: int) -> None:
        self.taken: set[_Key] = set()
        self.items: list[dict[int, list[str]]] = [{} for _ in range(ranks)]
        self.load_bytes = [0] * ranks

    def take(self, rank: int, index: int, item: Holding, names: Sequence[str]) -> None:
        """``rank`` writes these names of an item of its own, those apart that another writes already."""
        new = [name for name in names if (name, item.offsets) not in self.taken]
        if new:
            if index not in self.items[rank]:
                self.load_bytes[rank] += item.nbytes
            self.items[rank].setdefault(index, []).extend(new)
            self.taken.update((name, item.offsets) for name in new)


def _in_order(names: Sequence[str], item: Holding) -> tuple[str, ...]:
    return tuple(name for name in item.fqns if name in names)


def _assign_objects(plans: Sequence[LocalPlan], kept: Mapping[int, Share]) -> dict[str, int]:
    writers = {name: rank for rank, share in kept.items() for name in share.objects}
    for rank, plan in enumerate(plans):
        if rank not in kept:
            for name in plan.objects:
                writers.setdefault(name, rank)
    _check_captured([name for plan in plans for name in plan.objects if name not in writers])
    return writers


def _check_captured(lost: Sequence[str]) -> None:
    if lost:
        raise PlanChangedError(
            f"no rank captured {heapq.nsmallest(_SHOWN, set(lost))} for this save: the rank that used to write it no "
            "longer holds it; nothing was committed and the next save plans anew on all ranks"
        )


def _check_names(plans: Sequence[LocalPlan]) -> None:
    known: dict[str, tuple[int, object]] = {}
    for rank, plan in enumerate(plans):
        described: Iterator[tuple[str, object]] = (
            (name, (item.dtype, item.size)) for item in plan.tensors for name in item.fqns
        )
        for name, what in (*described, *((name, "object") for name in plan.objects)):
            other, known_as = known.setdefault(name, (rank, what))
            if known_as != what:
                raise DuplicateNameError(
                    f"{name!r} is {known_as} on rank {other} and {what} on rank {rank}: name them apart, or wrap "
                    "values of each rank's own in PerRank"
                )
