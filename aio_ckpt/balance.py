"""Who writes what several ranks hold: whoever has least to write so far, the largest first. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from aio_ckpt.holdings import Flags, Held, Ints

__all__ = ["Writers", "spread"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Writers:
    """Who writes each box so far.

    Invariant: a box is taken if and only if exactly one of its rows is written.
    """

    held: Held
    """What all ranks hold."""
    box: Ints
    """Per row, its box."""
    is_written: Flags
    """Per row, whether its rank writes it."""
    is_taken: Flags
    """Per box, whether some rank writes it."""

    @classmethod
    def of(cls, held: Held, box: Ints, count: int) -> Writers:
        """Nobody writes anything."""
        return cls(held=held, box=box, is_written=np.zeros(len(box), np.bool_), is_taken=np.zeros(count, np.bool_))

    def take(self, rows: Ints) -> None:
        """These rows, of different boxes, are written, those apart whose box another rank writes already."""
        new = rows[~self.is_taken[self.box[rows]]]
        self.is_written[new] = True
        self.is_taken[self.box[new]] = True

    def items(self) -> Ints:
        """Per rank, of how many items it writes something."""
        return np.bincount(self.held.rank[self._first_rows()], minlength=self.held.ranks)

    def _first_rows(self) -> Ints:
        """The first written row of each item."""
        rows = np.flatnonzero(self.is_written)
        return rows[self.held.is_first(rows)]

    def load_bytes(self) -> Ints:
        """Per rank, raw bytes that it writes."""
        rows = self._first_rows()
        load = np.zeros(self.held.ranks, np.int64)
        np.add.at(load, self.held.rank[rows], self.held.nbytes[self.held.look[rows]])
        return load


def spread(
    held: Held,
    writers: Writers,
    boxes: Ints,
    free: Ints,
    begins: Ints,
    counts: Ints,
    *,
    came_first: Ints,
    is_open: Flags,
) -> None:
    """Give each of ``boxes`` to one of the ranks that captured it.

    The rows of box b that a rank may write are ``free[begins[b] :][: counts[b]]``, by rank. Largest first, of equals
    the one that came last (``came_first``: the first row of each of ``boxes``); ``is_open``: nobody wrote it before.
    """
    nbytes = held.nbytes[held.look[free[begins[boxes]]]]
    order = np.lexsort((came_first, nbytes))[::-1]
    boxes, nbytes = boxes[order], nbytes[order]
    load = writers.load_bytes()
    ends = np.flatnonzero(np.append(nbytes[1:] != nbytes[:-1], True)) + 1
    for start, stop in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True):
        equals = boxes[start:stop]
        equals = equals[~writers.is_taken[equals]]  # tied to one that was placed before
        _spread_equals(held, writers, equals, free, begins, counts, load=load, is_open=is_open)


def _spread_equals(
    held: Held, writers: Writers, boxes: Ints, free: Ints, begins: Ints, counts: Ints, *, load: Ints, is_open: Flags
) -> None:
    """The same for boxes of equal length, in this order.

    Each waits for those before it that one of its ranks holds too. Where all ranks of a box come to it as their k-th
    (a model over a mesh), the k-th of all ranks are one step: 5,000 pairs of ranks take no more steps than one pair.
    """
    rows = _ragged(free, begins[boxes], counts[boxes])
    lengths = counts[boxes]
    starts = np.cumsum(lengths) - lengths
    turn = _turns(held.rank[rows].astype(np.int64))
    is_even = (
        bool((np.minimum.reduceat(turn, starts) == np.maximum.reduceat(turn, starts)).all()) if len(rows) else True
    )
    if held.is_tied[rows].any() or not is_even:
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            _place_one(held, writers, rows[start : start + length], load=load, is_open=is_open)
        return
    by_turn = np.argsort(turn[starts], kind="stable")
    rows = _ragged(rows, starts[by_turn], lengths[by_turn])
    lengths = lengths[by_turn]
    ends = np.cumsum(lengths)
    steps = np.flatnonzero(np.diff(turn[starts][by_turn], prepend=-1))
    for first, last in zip(steps.tolist(), [*steps[1:].tolist(), len(lengths)], strict=True):
        begin = int(ends[first - 1]) if first else 0
        _place_at_once(
            held, writers, rows[begin : ends[last - 1]], ends[first:last] - begin - lengths[first:last], load
        )


def _place_at_once(held: Held, writers: Writers, rows: Ints, starts: Ints, load: Ints) -> None:
    """Boxes that no two share a rank: each to the lowest rank of those that have least to write."""
    rank = held.rank[rows]
    mine = load[rank]
    least = np.minimum.reduceat(mine, starts)
    is_least = mine == np.repeat(least, np.diff(np.append(starts, len(rows))))
    candidates = np.flatnonzero(is_least)
    chosen = rows[candidates[np.searchsorted(candidates, starts)]]
    writers.take(chosen)
    load[held.rank[chosen]] += held.nbytes[held.look[chosen]]


def _place_one(held: Held, writers: Writers, rows: Ints, *, load: Ints, is_open: Flags) -> None:
    """One box, and what is tied to it on the rank that gets it."""
    if writers.is_taken[writers.box[rows[0]]]:
        return
    row = int(rows[load[held.rank[rows]].argmin()])  # the first of equals: the lowest rank
    start, stop = held.starts[held.rank[row] : held.rank[row] + 2]
    item = start + np.searchsorted(held.item[start:stop], held.item[row] + np.arange(2))
    tied = np.arange(*item)
    if not writers.is_written[tied].any():
        load[held.rank[row]] += held.nbytes[held.look[row]]
    writers.take(tied[is_open[writers.box[tied]]])


def _turns(rank: Ints) -> Ints:
    """Per entry, how many before it are of the same rank."""
    order = np.argsort(rank, kind="stable")
    ordered = rank[order]
    is_new = np.append(True, ordered[1:] != ordered[:-1])[: len(rank)]
    begins = np.flatnonzero(is_new)
    turn = np.empty(len(rank), np.int64)
    turn[order] = np.arange(len(rank)) - begins[np.cumsum(is_new) - 1]
    return turn


def _ragged(values: Ints, begins: Ints, lengths: Ints) -> Ints:
    """``values[begins[i] :][: lengths[i]]`` of every i, one after the other."""
    shift = np.repeat(begins - (np.cumsum(lengths) - lengths), lengths)
    return values[shift + np.arange(len(shift))]
