"""Replicas: values that several ranks hold under one name. Which of them may differ, and which of them do. Pure.

A save stores one of the replicas. If they differ, the values of the other ranks are lost, so a difference is a fault
unless it is lawful. Ranks compare checksums; see :class:`aio_ckpt.ranks.save_ledger.ContentSums`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from zlib import crc32

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from aio_ckpt.format.tensor_columns import IntArray
from aio_ckpt.leaves.values import LeafKind
from aio_ckpt.plan.assignment import Boxes, packed
from aio_ckpt.plan.shard_table import Flags, ShardTable, malformed
from aio_ckpt.plan.structure import Structure
from aio_ckpt.plan.tensor_item import TensorItem
from aio_ckpt.state.flatten import FlatState
from aio_ckpt.state.names import is_extra_state

_STATISTICS = frozenset({"running_mean", "running_var", "num_batches_tracked"})
"""Last parts of the names of BatchNorm's buffers, in a ``state_dict()`` without its module."""


class Tolerance:
    """Whether the replicas of a tensor may differ, as a number. Any other number: they may on ranks that give it, too.

    Such a number is the key of the mesh that declares the tensor replicated.
    """

    NONE = 0
    """The replicas have to be equal: parameters and the state of optimizers."""
    FREE = 1
    """The replicas may differ on any ranks: buffers, extra states, arrays and single numbers."""


def tolerances(
    flat: FlatState, structure: Structure, items: Sequence[TensorItem], addresses: Sequence[int]
) -> list[int]:
    """Return the tolerance of each of ``items``, whose leaves have these ``addresses``."""
    kinds = [kind for kind in flat.kinds if kind is not LeafKind.OBJECT]
    buffers = {
        buffer.data_ptr()
        for module in flat.modules
        for buffer in module.buffers()
        if type(buffer) is torch.Tensor and buffer.layout is torch.strided
    }

    def tolerance(item: TensorItem) -> int:
        leaf = item.leaf
        if structure.types[leaf] is DTensor:
            return crc32(repr(structure.shards[leaf][1]).encode()) | 2  # neither NONE nor FREE
        is_free = (
            not structure.shapes[leaf]
            or kinds[leaf] is not LeafKind.TENSOR
            or addresses[leaf] in buffers
            or any(name.rpartition(".")[2] in _STATISTICS or is_extra_state(name) for name in item.fqns)
        )
        return Tolerance.FREE if is_free else Tolerance.NONE

    return [tolerance(item) for item in items]


def have_to_be_equal(held: ShardTable, boxes: Boxes) -> Flags:
    """Return, per box, whether its replicas have to be equal: not all of its holders give it one tolerance."""
    strict = np.zeros(boxes.count, np.bool_)
    box, tolerance = boxes.of[boxes.order], held.tolerance[boxes.order]
    strict[box[tolerance == Tolerance.NONE]] = True
    strict[box[1:][(box[1:] == box[:-1]) & (tolerance[1:] != tolerance[:-1])]] = True
    return strict


def may_differ(held: ShardTable, boxes: Boxes) -> Flags:
    """Return, per box, whether its replicas may differ on any ranks."""
    free = np.zeros(boxes.count, np.bool_)
    free[boxes.of[held.tolerance == Tolerance.FREE]] = True
    return free


def replicated_items(held: ShardTable, boxes: Boxes) -> list[bytes]:
    """Return, per rank, a flag for each of its items, packed: whether another rank holds a part of it, too."""
    is_replica = np.bincount(boxes.of, minlength=boxes.count)[boxes.of] > 1
    replicated = []
    for start, stop in pairwise(held.starts.tolist()):
        item = held.item[start:stop]
        flags = np.zeros(int(item[-1]) + 1 if len(item) else 0, np.bool_)
        flags[item[is_replica[start:stop]]] = True
        replicated.append(packed(flags))
    return replicated


def unequal_replicas(held: ShardTable, boxes: Boxes, sums: Mapping[int, bytes]) -> Flags:
    """Return, per box, whether its content differs between ranks.

    ``sums``: by rank, an int64 for each of its items; 0 if the item was not summed.

    Raises:
        PeerFailedError: the sums of a rank do not fit its plan.
    """
    unequal = np.zeros(boxes.count, np.bool_)
    content, is_summed = np.zeros(len(held.name), np.int64), np.zeros(len(held.name), np.bool_)
    for rank, found in sums.items():
        mine = slice(held.starts[rank], held.starts[rank + 1])
        item = held.item[mine]
        if len(found) != 8 * (int(item[-1]) + 1 if len(item) else 0):
            raise malformed(rank, f"{len(found)} bytes of sums")
        content[mine] = np.frombuffer(found, "<i8")[item]
        is_summed[mine] = content[mine] != 0
    rows = boxes.order[is_summed[boxes.order]]
    box = boxes.of[rows]
    differs = (box[1:] == box[:-1]) & (content[rows[1:]] != content[rows[:-1]])
    unequal[box[1:][differs]] = True
    return unequal


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ObjectColumns:
    """Objects of all ranks. A row is one object of one rank. Rows are in the order of the ranks' plans."""

    names: tuple[str, ...]
    """Every name, in the order of its first row."""
    name: IntArray
    """Per row, the index into ``names``."""
    counts: tuple[int, ...]
    """Per rank, its number of rows."""

    @classmethod
    def of(cls, objects: Iterable[Sequence[str]]) -> ObjectColumns:
        """Make the columns of the names of all ranks, by rank. Ranks with equal names may share one sequence."""
        numbers: dict[str, int] = {}
        known: dict[int, tuple[Sequence[str], IntArray]] = {}
        columns = []
        for names in objects:
            if id(names) not in known:
                column = np.array([numbers.setdefault(name, len(numbers)) for name in names], np.int64)
                known[id(names)] = names, column
            columns.append(known[id(names)][1])
        return cls(
            names=tuple(numbers),
            name=np.concatenate([np.empty(0, np.int64), *columns]),
            counts=tuple(map(len, columns)),
        )

    def unequal(self, sums: Mapping[int, bytes]) -> set[str]:
        """Return the names whose bytes differ between ranks. ``sums``: by rank, a uint32 for each of its objects.

        Raises:
            PeerFailedError: the sums of a rank do not fit its plan.
        """
        for rank, found in sums.items():
            if len(found) != 4 * self.counts[rank]:
                raise malformed(rank, f"{len(found)} bytes of sums of objects")
        is_summed = np.repeat([rank in sums for rank in range(len(self.counts))], self.counts)
        name = self.name[is_summed]
        content = np.frombuffer(b"".join(sums[rank] for rank in sorted(sums)), "<u4")
        lowest = np.zeros(len(self.names), np.uint32)
        lowest[name[::-1]] = content[::-1]  # the last assignment of an index counts
        return {self.names[number] for number in np.unique(name[content != lowest[name]]).tolist()}
