"""Whether the shards of every tensor make up the whole of it: inside of it, none over another, nothing left out. Pure.

The conditions, and their words, are those of DCP's own planner (``_validate_global_plan`` of ``default_planner.py``),
which looks at one shard after the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from aio_ckpt.format.dcp_metadata_write import ShardTable
from aio_ckpt.format.tensor_table import IntArray
from aio_ckpt.plan.shard_table import Flags, padded

__all__ = ["cover_faults"]

_PAIRS_AT_ONCE = 1 << 20
_SHOWN = 5


def cover_faults(table: ShardTable) -> list[str]:
    """What is wrong with the shards of a few tensors; empty if all are whole. A 0-dim tensor only has to be there."""
    lengths = np.diff(table.starts)
    name = np.repeat(np.arange(len(lengths)), lengths)
    dims = np.array([len(size) for size in table.sizes], np.int64)
    sizes = padded(table.sizes, table.offsets.shape[1])
    is_outside = np.zeros(len(name), np.bool_)
    for dim in range(sizes.shape[1]):
        is_outside |= table.offsets[:, dim] > sizes[name, dim] - table.shapes[:, dim]  # a sum may exceed 64 bits
    if is_outside.any():
        return [f"{_name(table, row)!r} has the out of bounds shard {_box(table, row)}" for row in _few(is_outside)]
    volumes = np.array([math.prod(size) for size in table.sizes], np.int64)
    filled = _volumes(table, name, dims)
    is_hollow = (filled != volumes) & (dims > 0) | (lengths == 0)
    faults = [
        f"{table.names[number]!r} has {volumes[number]} elements, {_holders(table, number)} {filled[number]}"
        for number in _few(is_hollow)
    ]
    for number in np.flatnonzero(~_grids(table, name, sizes) & (dims > 0)).tolist():
        found = _overlap(table, number, int(dims[number]))
        if found:
            faults.append(f"{table.names[number]!r} has the overlapping shards {' and '.join(found)}")
        if len(faults) >= _SHOWN:
            break
    return faults


def _few(flags: Flags) -> list[int]:
    found: list[int] = np.flatnonzero(flags)[:_SHOWN].tolist()
    return found


def _number(table: ShardTable, row: int) -> int:
    return int(np.searchsorted(table.starts, row, side="right")) - 1


def _name(table: ShardTable, row: int) -> str:
    return table.names[_number(table, row)]


def _box(table: ShardTable, row: int) -> str:
    dims = len(table.sizes[_number(table, row)])
    return f"{table.shapes[row, :dims].tolist()} at {table.offsets[row, :dims].tolist()} of rank {table.file[row]}"


def _holders(table: ShardTable, number: int) -> str:
    ranks = np.unique(table.file[table.starts[number] : table.starts[number + 1]]).tolist()
    if not ranks:
        return "no rank writes any of it: its shards have"
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"its shards of rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:_SHOWN]))}{more} have"


def _volumes(table: ShardTable, name: IntArray, dims: IntArray) -> IntArray:
    """Per name, elements of all its shards."""
    volume = np.ones(len(name), np.int64)
    for dim in range(table.shapes.shape[1]):
        volume *= np.where(dim < dims[name], table.shapes[:, dim], 1)
    total = np.cumsum(np.append(0, volume))
    return np.diff(total[table.starts])


def _grids(table: ShardTable, name: IntArray, sizes: IntArray) -> Flags:
    """Per name, whether its shards are different cells of a grid, as meshes cut them: no two of those overlap."""
    columns = range(table.offsets.shape[1])
    is_grid = ~_repeated(table, name, [table.offsets[:, dim] for dim in columns])
    for dim in columns:
        offset, side = table.offsets[:, dim], table.shapes[:, dim]
        is_cut = np.bincount(name, side != sizes[name, dim], minlength=len(sizes)) > 0
        if not is_cut.any():
            continue
        order = _order(name, [offset])
        named, begin, end = name[order], offset[order], (offset + side)[order]
        is_same = begin[1:] == begin[:-1]
        clashes = np.where(is_same, end[1:] != end[:-1], begin[1:] < end[:-1]) & (named[1:] == named[:-1])
        is_grid[named[1:][clashes]] = False
    return is_grid


def _repeated(table: ShardTable, name: IntArray, offsets: list[IntArray]) -> Flags:
    """Per name, whether two of its shards begin at one place."""
    order = _order(name, offsets)
    named = name[order]
    is_same = named[1:] == named[:-1]
    for offset in offsets:
        ordered = offset[order]
        is_same &= ordered[1:] == ordered[:-1]
    repeated = np.zeros(len(table.names), np.bool_)
    repeated[named[1:][is_same]] = True
    return repeated


def _order(name: IntArray, keys: list[IntArray]) -> IntArray | slice:
    """Rows by name, then by ``keys``. Ranks mostly hold parts in their own order: nothing is to be sorted then."""
    is_tied = name[1:] == name[:-1]
    is_sorted = True
    for key in keys:
        is_sorted = is_sorted and not (is_tied & (key[1:] < key[:-1])).any()
        is_tied &= key[1:] == key[:-1]
    return slice(None) if is_sorted else np.lexsort((*reversed(keys), name))


def _overlap(table: ShardTable, number: int, dims: int) -> tuple[str, str] | None:
    """Two shards of a tensor that overlap, if any do. Exact, for cuts that are no grid."""
    start, stop = int(table.starts[number]), int(table.starts[number + 1])
    begin = table.offsets[start:stop, :dims]
    end = begin + table.shapes[start:stop, :dims]
    orders = [np.argsort(begin[:, dim], kind="stable") for dim in range(dims)]
    behind = [np.searchsorted(begin[order, dim], end[order, dim]) for dim, order in enumerate(orders)]
    counts = [np.maximum(stops - np.arange(1, 1 + len(stops)), 0) for stops in behind]
    dim = min(range(dims), key=lambda dim: int(counts[dim].sum()))
    order = orders[dim]
    for left, right in _pairs(counts[dim]):
        one, other = order[left], order[right]
        is_over = ((begin[one] < end[other]) & (begin[other] < end[one])).all(axis=1)
        if is_over.any():
            first = int(is_over.argmax())
            return _box(table, start + int(one[first])), _box(table, start + int(other[first]))
    return None


def _pairs(counts: IntArray) -> Iterator[tuple[IntArray, IntArray]]:
    """Every place with each of the ``counts[place]`` behind it, some at a time."""
    batch = np.cumsum(counts) // _PAIRS_AT_ONCE
    cuts = [0, *(np.flatnonzero(np.diff(batch)) + 1).tolist(), len(counts)]
    for start, stop in pairwise(cuts):
        mine = counts[start:stop]
        left = np.repeat(np.arange(start, stop), mine)
        yield left, left + 1 + np.arange(len(left)) - np.repeat(np.cumsum(mine) - mine, mine)
