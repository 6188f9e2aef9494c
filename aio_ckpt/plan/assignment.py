"""Assignment: which rank writes which shard. Pure. In: the shards of every rank. Out: one ``Assignment`` per rank.

Replicas are written once, by a rank that captures them for this save. The largest one is assigned first, each to the
rank that has least to write. Objects, small replicas, and replicas that differ or may differ are written by the lowest
rank.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from aio_ckpt.errors import PlanChangedError
from aio_ckpt.format.tensor_columns import IntArray
from aio_ckpt.plan.shard_table import Flags, ShardTable, SmallInts

_SMALL_BYTES, _SMALL_TOTAL_BYTES = 64 << 10, 16 << 20
"""Largest replica that is small, and the most bytes of all small ones that are not spread over the ranks."""
_MOST_STORED_BY = 64
"""Most ranks that a manifest names. A rank whose state lies with more of them reads the manifests of all."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Writers:
    """Writer of each box, as assigned so far.

    Invariant: a box is taken if and only if exactly one of its rows is written.
    """

    held: ShardTable
    box: IntArray
    """Per row, the number of its box."""
    is_written: Flags
    """Per row, whether its rank writes it."""
    is_taken: Flags
    """Per box, whether some rank writes it."""

    @classmethod
    def of(cls, held: ShardTable, box: IntArray, count: int) -> Writers:
        """Return the state in which no rank writes any of the ``count`` boxes."""
        return cls(held=held, box=box, is_written=np.zeros(len(box), np.bool_), is_taken=np.zeros(count, np.bool_))

    def take(self, rows: IntArray) -> None:
        """Mark rows of different boxes as written. Rows whose box is written already are left out."""
        new = rows[~self.is_taken[self.box[rows]]]
        self.is_written[new] = True
        self.is_taken[self.box[new]] = True

    def items(self) -> IntArray:
        """Return, per rank, the number of items that it writes in part or whole."""
        return np.bincount(self.held.rank[self._first_rows()], minlength=self.held.ranks)

    def _first_rows(self) -> IntArray:
        """Return the first written row of each item."""
        rows = np.flatnonzero(self.is_written)
        return rows[self.held.is_first(rows)]

    def load_bytes(self) -> IntArray:
        """Return, per rank, the raw bytes that it writes."""
        rows = self._first_rows()
        load = np.zeros(self.held.ranks, np.int64)
        np.add.at(load, self.held.rank[rows], self.held.nbytes[self.held.signature[rows]])
        return load


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidates:
    """Rows that may be written, box by box."""

    rows: IntArray
    """Rows in the order of boxes, and by rank within a box."""
    counts: IntArray
    """Per box, the number of its rows."""
    begins: IntArray
    """Per box, the index of its first row in ``rows``."""

    def of_boxes(self, boxes: IntArray) -> tuple[IntArray, IntArray]:
        """Return all rows of ``boxes``, in that order, and the number of rows of each box."""
        counts = self.counts[boxes]
        return self.rows[_ranges(self.begins[boxes], counts)], counts


def assign_replicas(writers: Writers, boxes: IntArray, candidates: Candidates, *, first_rows: IntArray) -> None:
    """Assign each of ``boxes`` to one of its candidates, the largest first.

    Of equally large boxes, the one with the highest of ``first_rows`` (the first row of each box) is assigned first.
    """
    held = writers.held
    nbytes = held.nbytes[held.signature[candidates.rows[candidates.begins[boxes]]]]
    order = np.lexsort((first_rows, nbytes))[::-1]
    boxes, nbytes = boxes[order], nbytes[order]
    load = writers.load_bytes()
    for equals in np.split(boxes, np.flatnonzero(np.diff(nbytes)) + 1):
        _assign_of_one_length(writers, *candidates.of_boxes(equals), load=load)


def _assign_of_one_length(writers: Writers, rows: IntArray, counts: IntArray, *, load: IntArray) -> None:
    """Assign boxes of equal length. ``rows``: their candidates, box by box; ``counts``: number of them per box.

    Boxes that share a rank must be assigned one after the other. If every box is the k-th one for all of its ranks (a
    model over a mesh), all k-th boxes are independent and are assigned in one vectorised step. So 5,000 pairs of ranks
    take no more steps than one pair.
    """
    held, begins = writers.held, np.cumsum(counts) - counts
    occurrence = _occurrences(held.rank[rows])
    is_even = (np.minimum.reduceat(occurrence, begins) == np.maximum.reduceat(occurrence, begins)).all()
    if held.is_tied[rows].any() or not is_even:
        for begin, count in zip(begins.tolist(), counts.tolist(), strict=True):
            _one_to_least_loaded(writers, rows[begin : begin + count], load=load)
        return
    order = np.argsort(occurrence[begins], kind="stable")
    for step in np.split(order, np.flatnonzero(np.diff(occurrence[begins][order])) + 1):
        _many_to_least_loaded(writers, rows[_ranges(begins[step], counts[step])], counts[step], load=load)


def _many_to_least_loaded(writers: Writers, rows: IntArray, counts: IntArray, *, load: IntArray) -> None:
    """Assign boxes that share no rank: each to the rank that has least to write, the lowest of several such ranks."""
    held, begins = writers.held, np.cumsum(counts) - counts
    mine = load[held.rank[rows]]
    least = np.flatnonzero(mine == np.repeat(np.minimum.reduceat(mine, begins), counts))
    chosen = rows[least[np.searchsorted(least, begins)]]
    writers.take(chosen)
    load[held.rank[chosen]] += held.nbytes[held.signature[chosen]]


def _one_to_least_loaded(writers: Writers, rows: IntArray, *, load: IntArray) -> None:
    """Assign one box, and the names that are tied to it on the rank that writes it."""
    if writers.is_taken[writers.box[rows[0]]]:
        return  # it was tied to a box that is assigned already
    held = writers.held
    row = int(rows[load[held.rank[rows]].argmin()])  # argmin returns the first of several, which is the lowest rank
    rank = int(held.rank[row])
    start, stop = held.starts[rank : rank + 2]
    first, end = np.searchsorted(held.item[start:stop], held.item[row] + np.arange(2))
    tied = np.arange(start + first, start + end)
    if not writers.is_written[tied].any():
        load[rank] += held.nbytes[held.signature[row]]
    writers.take(tied)


def _occurrences(rank: SmallInts) -> IntArray:
    """Return, per entry, the number of earlier entries of the same rank."""
    order = np.argsort(rank, kind="stable")
    counts = np.bincount(rank)
    occurrence = np.empty(len(rank), np.int64)
    occurrence[order] = _ranges(np.zeros(len(counts), np.int64), counts)
    return occurrence


def _ranges(begins: IntArray, counts: IntArray) -> IntArray:
    """Return the ranges from ``begins[i]`` to ``begins[i] + counts[i]``, for every i, as one array."""
    found: IntArray = np.repeat(begins - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
    return found


_SHOWN = 5


class Assignment(msgspec.Struct, frozen=True, array_like=True):
    """Share of a rank: the parts of its plan that it writes, as bits, the lowest bit of a byte first."""

    tensors: bytes
    """One bit for each name of each tensor item of its plan."""
    objects: bytes
    """One bit for each object of its plan."""

    @classmethod
    def of(cls, tensors: Sequence[bool] | Flags, objects: Sequence[bool]) -> Assignment:
        """Return the share of the names and objects that are True."""
        return cls(packed(tensors), packed(objects))

    def items(self, items: Sequence[tuple[str, ...]]) -> list[tuple[int, tuple[str, ...]]]:
        """Return (item, its names that are written), ascending. ``items``: all names of each item of the plan.

        Raises:
            PlanChangedError: the share belongs to another plan.
        """
        is_written = iter(unpacked(self.tensors, sum(map(len, items))).tolist())
        named = ((index, tuple(name for name in fqns if next(is_written))) for index, fqns in enumerate(items))
        return [(index, names) for index, names in named if names]

    def object_names(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the written ones of ``names``, which are the objects of the plan.

        Raises:
            PlanChangedError: the share belongs to another plan.
        """
        is_written = unpacked(self.objects, len(names)).tolist()
        return tuple(name for name, written in zip(names, is_written, strict=True) if written)

    def count_objects(self) -> int:
        return int.from_bytes(self.objects, "little").bit_count()

    def rows(self, count: int) -> IntArray:
        """Return the indices of the written ones of the ``count`` names of all items.

        Raises:
            PlanChangedError: the share belongs to another plan.
        """
        return np.flatnonzero(unpacked(self.tensors, count))


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned:
    """What is assigned to one rank."""

    share: Assignment
    items: int
    """Number of tensor items of the share."""
    stored_by: tuple[int, ...] | None
    """Other ranks that write a part of what this rank holds, too, ascending; None if there are many."""


def packed(flags: Sequence[bool] | Flags) -> bytes:
    """Return flags as bits, the lowest bit of a byte first."""
    return np.packbits(np.asarray(flags, np.bool_), bitorder="little").tobytes()


def unpacked(bits: bytes, count: int) -> Flags:
    """Return the ``count`` flags of :func:`packed`.

    Raises:
        PlanChangedError: there are more or fewer of them.
    """
    if len(bits) != -(-count // 8):
        raise PlanChangedError(f"a share of {8 * len(bits)} names of a plan of {count}; the next save plans anew")
    return np.unpackbits(np.frombuffer(bits, np.uint8), count=count, bitorder="little").astype(np.bool_)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Boxes:
    """Boxes of all shards. Shards of one name that begin at one place of the tensor are replicas: they have one box."""

    order: IntArray
    """Rows by box, and by rank within a box."""
    of: IntArray
    """Per row, the number of its box."""
    count: int

    @classmethod
    def of_rows(cls, held: ShardTable) -> Boxes:
        """Number the boxes of all shards.

        Raises:
            PlanChangedError: the tensors together have more than 2**63 elements.
        """
        key = _keys(held)
        order = np.argsort(key, kind="stable")
        ordered = key[order]
        is_new = np.ones(len(order), np.bool_)
        np.not_equal(ordered[1:], ordered[:-1], out=is_new[1:])
        number = np.cumsum(is_new) - 1
        of = np.empty(len(order), np.int64)
        of[order] = number
        return cls(order=order, of=of, count=int(number[-1]) + 1 if len(number) else 0)

    def candidates(self, rows: IntArray) -> Candidates:
        """Return ``rows``, which are in the order of boxes, as candidates."""
        counts = np.bincount(self.of[rows], minlength=self.count)
        return Candidates(rows=rows, counts=counts, begins=np.cumsum(counts) - counts)


def _keys(held: ShardTable) -> IntArray:
    """Return a number for every row, equal for equal boxes: the position of the first element, over all tensors."""
    # Each side counts one more, because an empty shard may begin at the end.
    of_signature = [math.prod(side + 1 for side in signature.size) for signature in held.signatures]
    volumes = [of_signature[signature] for signature in held.signature_of_name.tolist()]
    if sum(volumes) >= 1 << 63:
        raise PlanChangedError(f"the tensors of all ranks have {sum(volumes)} elements, more than can be numbered")
    key: IntArray = (np.cumsum([0, *volumes], dtype=np.int64)[:-1])[held.name]
    stride = np.ones(len(held.signatures), np.int64)
    for dim in reversed(range(held.offsets.shape[1])):
        key += held.offsets[:, dim] * stride[held.signature]
        stride *= held.sizes[:, dim] + 1
    return key


def assign(held: ShardTable, boxes: Boxes, kept: Mapping[int, Assignment], of_lowest: Flags) -> list[Assigned]:
    """Return what is assigned to every rank.

    Args:
        kept: shares of the ranks that keep the share that they have, because they captured only that.
        of_lowest: per box, whether the lowest rank writes it, whatever the others have to write.

    Raises:
        PlanChangedError: no rank captured a shard that a rank holds. Every rank has to plan anew.
    """
    writers = Writers.of(held, boxes.of, boxes.count)
    is_kept = np.zeros(held.ranks, np.bool_)
    for rank, share in kept.items():
        start, stop = held.starts[rank : rank + 2]
        writers.take(start + share.rows(stop - start))
        is_kept[rank] = True
    free = boxes.order[~is_kept[held.rank[boxes.order]]]
    candidates = boxes.candidates(free)
    is_open = ~writers.is_taken
    is_lost = is_open & (candidates.counts == 0)
    if is_lost.any():
        raise _not_captured(held.names[name] for name in held.name[is_lost[boxes.of]].tolist())
    is_single = is_open & ((candidates.counts == 1) | of_lowest)
    is_single |= _small(writers, candidates, is_open & ~is_single)
    writers.take(free[candidates.begins[is_single]])
    several = np.flatnonzero(is_open & ~is_single)
    if len(several):
        all_rows = boxes.candidates(boxes.order)
        assign_replicas(writers, several, candidates, first_rows=boxes.order[all_rows.begins[several]])
    starts, objects = held.starts.tolist(), _object_writers(held, kept)
    of_objects = {key: {objects[name] for name in names} for key, names in _distinct(held.objects).items()}
    return [
        Assigned(
            share=Assignment.of(
                writers.is_written[start:stop],
                [objects[name] == rank for name in names] if rank in of_objects[id(names)] else [False] * len(names),
            ),
            items=items,
            stored_by=_few(others | (of_objects[id(names)] - {rank})),
        )
        for rank, (start, stop, names, items, others) in enumerate(
            zip(starts[:-1], starts[1:], held.objects, writers.items().tolist(), _other_writers(writers), strict=True)
        )
    ]


def _small(writers: Writers, candidates: Candidates, boxes: Flags) -> Flags:
    """Return which of ``boxes`` are small, and few enough to be written by the lowest rank.

    A rank that loads then reads them from one file, and not each from the file of another rank.
    """
    held, chosen = writers.held, np.flatnonzero(boxes)
    first = candidates.rows[candidates.begins[chosen]]
    nbytes = held.nbytes[held.signature[first]]
    is_small = (nbytes <= _SMALL_BYTES) & ~held.is_tied[first]
    is_small &= np.cumsum(np.where(is_small, nbytes, 0)) <= _SMALL_TOTAL_BYTES
    small = np.zeros(len(boxes), np.bool_)
    small[chosen[is_small]] = True
    return small


def _other_writers(writers: Writers) -> list[set[int]]:
    """Return, per rank, the other ranks that write a shard which it holds, too."""
    held = writers.held
    writer = np.empty(len(writers.is_taken), np.int64)
    rows = np.flatnonzero(writers.is_written)
    writer[writers.box[rows]] = held.rank[rows]
    of_row = writer[writers.box]
    elsewhere = np.flatnonzero(of_row != held.rank)
    found: list[set[int]] = [set() for _ in range(held.ranks)]
    for pair in np.unique(held.rank[elsewhere].astype(np.int64) * held.ranks + of_row[elsewhere]).tolist():
        found[pair // held.ranks].add(pair % held.ranks)
    return found


def _few(ranks: set[int]) -> tuple[int, ...] | None:
    return None if len(ranks) > _MOST_STORED_BY else tuple(sorted(ranks))


def _object_writers(held: ShardTable, kept: Mapping[int, Assignment]) -> dict[str, int]:
    """Return the rank that writes each object."""
    writers = {name: rank for rank, share in kept.items() for name in share.object_names(held.objects[rank])}
    seen: set[int] = set()  # ranks with equal names share one tuple, and the first such rank decides
    for rank, names in enumerate(held.objects):
        if rank not in kept and id(names) not in seen:
            seen.add(id(names))
            for name in names:
                writers.setdefault(name, rank)
    lost = [name for names in _distinct(held.objects).values() for name in names if name not in writers]
    if lost:
        raise _not_captured(lost)
    return writers


def _distinct(objects: Sequence[tuple[str, ...]]) -> dict[int, tuple[str, ...]]:
    """Return the tuples of names by identity: ranks with equal names share one."""
    return {id(names): names for names in objects}


def _not_captured(names: Iterable[str]) -> PlanChangedError:
    return PlanChangedError(
        f"no rank captured {heapq.nsmallest(_SHOWN, set(names))} for this save: the rank that used to write it no "
        "longer holds it; nothing was committed and the next save plans anew on all ranks"
    )
