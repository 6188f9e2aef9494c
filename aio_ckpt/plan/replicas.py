"""Who writes what several ranks hold: whoever has least to write so far, the largest first. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from aio_ckpt.format.tensor_table import IntArray
from aio_ckpt.plan.shard_table import Flags, ShardTable, SmallInts

__all__ = ["Candidates", "Writers", "assign_replicas"]


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
