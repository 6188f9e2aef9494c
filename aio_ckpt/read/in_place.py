"""In place: reads of large tensors to their own memory, whatever its address. Touches no file."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from aio_ckpt.format.constants import PAGE_BYTES, align_up
from aio_ckpt.read.catalog import Item
from aio_ckpt.read.requests import PieceRows, Pieces, Segment

__all__ = ["InPlace", "in_place_segments"]

_IN_PLACE_BYTES_MIN, _IN_PLACE_BYTES_MAX = 16 << 20, 32 << 20
"""Of one read."""
_IN_PLACE_A_READER = 4
"""Wanted at least; each costs the loop's thread 0.4 ms."""
_TRIED_FROM_BYTES, _TRIAL_BYTES = 128 << 20, 4 << 20
"""What is to be read in place at least for a trial of it to pay, and each read of that."""


def in_place_segments(tensors: Sequence[InPlace], readers: int, total: int) -> list[Segment]:
    """Reads of all, beside ``total`` bytes of others; a few of them for a trial if there is much to gain."""
    in_place = sum(tensor.item.raw_bytes for tensor in tensors)
    size = min(max((total + in_place) // (_IN_PLACE_A_READER * readers), _IN_PLACE_BYTES_MIN), _IN_PLACE_BYTES_MAX)
    trials = 2 * readers if in_place >= _TRIED_FROM_BYTES else 0
    found: list[Segment] = []
    for tensor in tensors:
        segments = tensor.segments(size, trials=trials)
        trials -= sum(segment.is_trial for segment in segments)
        found += segments
    return found


@dataclass(frozen=True, slots=True, eq=False)
class InPlace:
    """An item that is read into its target itself.

    The memory that is read to is aligned, whatever the target is: it begins up to a page, ``shift``, behind its place,
    to which the bytes are moved once they are proven.
    """

    item: Item
    """What is read; its raw bytes begin on a page if reads are direct."""
    memory: torch.Tensor
    """Bytes of host memory, shape ``(nbytes,)``, laid out like it."""
    count: int
    """Blocks that are read in place: all whole ones that have room."""
    shift: int
    """Bytes."""

    def segments(self, nbytes: int, *, trials: int) -> list[Segment]:
        """Reads of about ``nbytes``, and at most so many of a trial before; the last also brings what is left.

        With ``shift`` each is placed after the one before, which was read over the first bytes of its place.
        """
        item, shift, view, block = self.item, self.shift, self.memory.numpy().data, self.item.block_bytes
        step, short = max(nbytes // block, 1), max(_TRIAL_BYTES // block, 1)
        tried = min(trials, self.count // short) * short
        begins = [*range(0, tried, short), *range(tried, self.count, step), self.count]
        found: list[Segment] = []
        for first, stop in itertools.pairwise(begins):
            segment = Segment(
                file=item.file,
                start=item.raw_offset + first * block,
                stop=item.raw_offset + stop * block,
                pieces=self._pieces(range(first, stop)),
                target=view[first * block + shift : stop * block + shift],
                rest=self._rest() if stop == self.count else None,
                is_trial=first < tried,
                after=found[-1] if shift and found else None,
            )
            found.append(segment)
        return found

    def _rest(self) -> Segment | None:
        """The blocks that are not read in place."""
        item = self.item
        blocks = range(self.count, len(item.sums))
        if not blocks:
            return None
        start, stop = item.raw_offset + self.count * item.block_bytes, item.raw_offset + item.raw_bytes
        return Segment(file=item.file, start=start, stop=align_up(stop, PAGE_BYTES), pieces=self._pieces(blocks))

    def _pieces(self, blocks: range) -> Pieces:
        rows = PieceRows()
        rows.add_blocks(self.item, blocks, self.memory.data_ptr())
        return rows.ascending()
