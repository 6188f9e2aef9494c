"""Assignment: which rank writes what. Pure. In: what every rank holds. Out: an ``Assignment`` for each rank.

A replica is written once, by a rank that captures it for this very save. Replicas go to the rank that has least to
write, the largest first; objects, and replicas that differ, go to the lowest rank.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from aio_ckpt.errors import PlanChangedError
from aio_ckpt.format.tensor_table import IntArray
from aio_ckpt.plan.shard_table import Flags, ShardTable, SmallInts, malformed

__all__ = [
    "Assignment",
    "Boxes",
    "Candidates",
    "Writers",
    "assign",
    "assign_replicas",
    "unequal_objects",
    "unequal_replicas",
]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Writers:
    """Who writes each box so far.

    Invariant: a box is taken if and only if exactly one of its rows is written.
    """

    held: ShardTable
    """What all ranks hold."""
    box: IntArray
    """Per row, its box."""
    is_written: Flags
    """Per row, whether its rank writes it."""
    is_taken: Flags
    """Per box, whether some rank writes it."""

    @classmethod
    def of(cls, held: ShardTable, box: IntArray, count: int) -> Writers:
        """Nobody writes anything."""
        return cls(held=held, box=box, is_written=np.zeros(len(box), np.bool_), is_taken=np.zeros(count, np.bool_))

    def take(self, rows: IntArray) -> None:
        """These rows, of different boxes, are written, those apart whose box another rank writes already."""
        new = rows[~self.is_taken[self.box[rows]]]
        self.is_written[new] = True
        self.is_taken[self.box[new]] = True

    def items(self) -> IntArray:
        """Per rank, of how many items it writes something."""
        return np.bincount(self.held.rank[self._first_rows()], minlength=self.held.ranks)

    def _first_rows(self) -> IntArray:
        """The first written row of each item."""
        rows = np.flatnonzero(self.is_written)
        return rows[self.held.is_first(rows)]

    def load_bytes(self) -> IntArray:
        """Per rank, raw bytes that it writes."""
        rows = self._first_rows()
        load = np.zeros(self.held.ranks, np.int64)
        np.add.at(load, self.held.rank[rows], self.held.nbytes[self.held.signature[rows]])
        return load


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidates:
    """Which rows may be written, box by box."""

    rows: IntArray
    """Rows in the order of boxes, those of one box by rank."""
    counts: IntArray
    """Per box, how many."""
    begins: IntArray
    """Per box, where its rows begin in ``rows``."""

    def of_boxes(self, boxes: IntArray) -> tuple[IntArray, IntArray]:
        """(all rows of ``boxes``, in that order; how many each has)."""
        counts = self.counts[boxes]
        return self.rows[_ranges(self.begins[boxes], counts)], counts


def assign_replicas(writers: Writers, boxes: IntArray, candidates: Candidates, *, came_first: IntArray) -> None:
    """Give each of ``boxes`` to one of its candidates.

    Largest first, of equals the one that came last (``came_first``: the first row of each of ``boxes``).
    """
    held = writers.held
    nbytes = held.nbytes[held.signature[candidates.rows[candidates.begins[boxes]]]]
    order = np.lexsort((came_first, nbytes))[::-1]
    boxes, nbytes = boxes[order], nbytes[order]
    load = writers.load_bytes()
    for equals in np.split(boxes, np.flatnonzero(np.diff(nbytes)) + 1):
        _assign_equal_replicas(writers, *candidates.of_boxes(equals), load=load)


def _assign_equal_replicas(writers: Writers, rows: IntArray, counts: IntArray, *, load: IntArray) -> None:
    """The same for boxes of equal length, with so many of ``rows`` each.

    A box waits for those before it that one of its ranks holds too. Where all ranks of each box come to it as their
    k-th (a model over a mesh), all k-th boxes are one step: 5,000 pairs of ranks take no more steps than one pair.
    """
    held, begins = writers.held, np.cumsum(counts) - counts
    occurrence = _occurrences(held.rank[rows])
    is_even = (np.minimum.reduceat(occurrence, begins) == np.maximum.reduceat(occurrence, begins)).all()
    if held.is_tied[rows].any() or not is_even:
        for begin, count in zip(begins.tolist(), counts.tolist(), strict=True):
            _place_one(writers, rows[begin : begin + count], load=load)
        return
    order = np.argsort(occurrence[begins], kind="stable")
    for step in np.split(order, np.flatnonzero(np.diff(occurrence[begins][order])) + 1):
        _place_at_once(writers, rows[_ranges(begins[step], counts[step])], counts[step], load=load)


def _place_at_once(writers: Writers, rows: IntArray, counts: IntArray, *, load: IntArray) -> None:
    """Boxes of which no two share a rank: each to the lowest of those ranks that have least to write."""
    held, begins = writers.held, np.cumsum(counts) - counts
    mine = load[held.rank[rows]]
    least = np.flatnonzero(mine == np.repeat(np.minimum.reduceat(mine, begins), counts))
    chosen = rows[least[np.searchsorted(least, begins)]]
    writers.take(chosen)
    load[held.rank[chosen]] += held.nbytes[held.signature[chosen]]


def _place_one(writers: Writers, rows: IntArray, *, load: IntArray) -> None:
    """One box, and what is tied to it on the rank that gets it."""
    if writers.is_taken[writers.box[rows[0]]]:
        return  # tied to one that was placed before
    held = writers.held
    row = int(rows[load[held.rank[rows]].argmin()])  # the first of equals: the lowest rank
    rank = int(held.rank[row])
    start, stop = held.starts[rank : rank + 2]
    first, end = np.searchsorted(held.item[start:stop], held.item[row] + np.arange(2))
    tied = np.arange(start + first, start + end)
    if not writers.is_written[tied].any():
        load[rank] += held.nbytes[held.signature[row]]
    writers.take(tied)


def _occurrences(rank: SmallInts) -> IntArray:
    """Per entry, how many before it are of the same rank."""
    order = np.argsort(rank, kind="stable")
    counts = np.bincount(rank)
    occurrence = np.empty(len(rank), np.int64)
    occurrence[order] = _ranges(np.zeros(len(counts), np.int64), counts)
    return occurrence


def _ranges(begins: IntArray, counts: IntArray) -> IntArray:
    """``begins[i]`` and the ``counts[i] - 1`` numbers behind it, of every i, one after the other."""
    found: IntArray = np.repeat(begins - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
    return found


_SHOWN = 5


class Assignment(msgspec.Struct, frozen=True, array_like=True):
    """What one rank writes of what it holds: one bit each, the lowest of a byte first."""

    tensors: bytes
    """For each name of each tensor item of its plan."""
    objects: bytes
    """For each of its objects."""

    @classmethod
    def of(cls, tensors: Sequence[bool] | Flags, objects: Sequence[bool]) -> Assignment:
        """The share of those that are True."""
        return cls(_packed(tensors), _packed(objects))

    def items(self, items: Sequence[tuple[str, ...]]) -> list[tuple[int, tuple[str, ...]]]:
        """(item, the names of it that are written), ascending, of a plan with these names of its items.

        Raises:
            PlanChangedError: the share is of another plan.
        """
        is_written = iter(_bits(self.tensors, sum(map(len, items))).tolist())
        named = ((index, tuple(name for name in fqns if next(is_written))) for index, fqns in enumerate(items))
        return [(index, names) for index, names in named if names]

    def object_names(self, names: Sequence[str]) -> tuple[str, ...]:
        """Those of the objects of a plan that are written.

        Raises:
            PlanChangedError: the share is of another plan.
        """
        is_written = _bits(self.objects, len(names)).tolist()
        return tuple(name for name, written in zip(names, is_written, strict=True) if written)

    def count_objects(self) -> int:
        """How many objects are written."""
        return int.from_bytes(self.objects, "little").bit_count()

    def rows(self, count: int) -> IntArray:
        """Which of ``count`` names of items are written.

        Raises:
            PlanChangedError: the share is of another plan.
        """
        return np.flatnonzero(_bits(self.tensors, count))


def _packed(flags: Sequence[bool] | Flags) -> bytes:
    return np.packbits(np.asarray(flags, np.bool_), bitorder="little").tobytes()


def _bits(packed: bytes, count: int) -> Flags:
    if len(packed) != -(-count // 8):
        raise PlanChangedError(f"a share of {8 * len(packed)} names of a plan of {count}; the next save plans anew")
    return np.unpackbits(np.frombuffer(packed, np.uint8), count=count, bitorder="little").astype(np.bool_)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Boxes:
    """The parts of tensors that are held: a box is a name and where in that tensor a shard begins."""

    order: IntArray
    """Rows by box, those of one box by rank."""
    of: IntArray
    """Per row, its box."""
    count: int
    """Number of boxes."""

    @classmethod
    def of_rows(cls, held: ShardTable) -> Boxes:
        """Sort what is held.

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
        """These rows, in the order of boxes, as those that may be written."""
        counts = np.bincount(self.of[rows], minlength=self.count)
        return Candidates(rows=rows, counts=counts, begins=np.cumsum(counts) - counts)


def _keys(held: ShardTable) -> IntArray:
    """A number for every row, equal for equal boxes: the place of the shard's first element among all tensors'."""
    of_signature = [
        math.prod(side + 1 for side in signature.size) for signature in held.signatures
    ]  # a shard may begin at the very end
    volumes = [of_signature[signature] for signature in held.signature_of_name.tolist()]
    if sum(volumes) >= 1 << 63:
        raise PlanChangedError(f"the tensors of all ranks have {sum(volumes)} elements, more than can be numbered")
    key: IntArray = (np.cumsum([0, *volumes], dtype=np.int64)[:-1])[held.name]
    stride = np.ones(len(held.signatures), np.int64)
    for dim in reversed(range(held.offsets.shape[1])):
        key += held.offsets[:, dim] * stride[held.signature]
        stride *= held.sizes[:, dim] + 1
    return key


def unequal_replicas(held: ShardTable, boxes: Boxes, sums: Mapping[int, bytes]) -> Flags:
    """Per box, whether its content differs between ranks. ``sums``: of a rank, an int64 for each of its items.

    Raises:
        PeerFailedError: the sums of a rank are of another plan.
    """
    unequal = np.zeros(boxes.count, np.bool_)
    content, is_summed = np.zeros(len(held.name), np.int64), np.zeros(len(held.name), np.bool_)
    for rank, found in sums.items():
        mine = slice(held.starts[rank], held.starts[rank + 1])
        item = held.item[mine]
        if len(found) != 8 * (int(item[-1]) + 1 if len(item) else 0):
            raise malformed(rank, f"{len(found)} bytes of sums")
        content[mine], is_summed[mine] = np.frombuffer(found, "<i8")[item], True
    rows = boxes.order[is_summed[boxes.order]]
    box = boxes.of[rows]
    differs = (box[1:] == box[:-1]) & (content[rows[1:]] != content[rows[:-1]])
    unequal[box[1:][differs]] = True
    return unequal


def unequal_objects(held: ShardTable, sums: Mapping[int, bytes]) -> set[str]:
    """Names of objects whose bytes differ between ranks. ``sums``: of a rank, a uint32 for each of its objects.

    Raises:
        PeerFailedError: the sums of a rank are of another plan.
    """
    first: dict[str, int] = {}
    seen: set[tuple[int, bytes]] = set()  # equal names are one tuple
    unequal: set[str] = set()
    for rank, found in sums.items():
        names = held.objects[rank]
        if len(found) != 4 * len(names):
            raise malformed(rank, f"{len(found)} bytes of sums of objects")
        if (id(names), found) in seen:
            continue
        seen.add((id(names), found))
        for name, crc32 in zip(names, np.frombuffer(found, "<u4").tolist(), strict=True):
            if first.setdefault(name, crc32) != crc32:
                unequal.add(name)
    return unequal


def assign(
    held: ShardTable, boxes: Boxes, kept: Mapping[int, Assignment], unequal: Flags
) -> tuple[list[Assignment], list[int]]:
    """The share of every rank, and how many items it has.

    ``kept``: ranks that captured only the share that they have. ``unequal``: boxes whose replicas differ.

    Raises:
        PlanChangedError: nobody captured something that a rank holds; every rank has to plan anew.
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
    is_single = is_open & ((candidates.counts == 1) | unequal)
    writers.take(free[candidates.begins[is_single]])
    several = np.flatnonzero(is_open & ~is_single)
    if len(several):
        all_rows = boxes.candidates(boxes.order)
        assign_replicas(writers, several, candidates, came_first=boxes.order[all_rows.begins[several]])
    starts, objects = held.starts.tolist(), _assign_objects(held, kept)
    shares = [
        Assignment.of(writers.is_written[start:stop], own)
        for start, stop, own in zip(starts[:-1], starts[1:], objects, strict=True)
    ]
    return shares, writers.items().tolist()


def _assign_objects(held: ShardTable, kept: Mapping[int, Assignment]) -> list[list[bool]]:
    """Per rank and object, whether the rank writes it."""
    writers = {name: rank for rank, share in kept.items() for name in share.object_names(held.objects[rank])}
    seen: set[int] = set()  # equal names are one tuple: of such ranks the first decides
    for rank, names in enumerate(held.objects):
        if rank not in kept and id(names) not in seen:
            seen.add(id(names))
            for name in names:
                writers.setdefault(name, rank)
    distinct = {id(names): names for names in held.objects}
    lost = [name for names in distinct.values() for name in names if name not in writers]
    if lost:
        raise _not_captured(lost)
    writing = set(writers.values())
    return [
        [writers[name] == rank for name in names] if rank in writing else [False] * len(names)
        for rank, names in enumerate(held.objects)
    ]


def _not_captured(names: Iterable[str]) -> PlanChangedError:
    return PlanChangedError(
        f"no rank captured {heapq.nsmallest(_SHOWN, set(names))} for this save: the rank that used to write it no "
        "longer holds it; nothing was committed and the next save plans anew on all ranks"
    )
