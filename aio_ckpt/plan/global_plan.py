"""Global plan: DCP's plan of one rank's state, the checks over the plans of all ranks, and ``.metadata``. Pure.

DCP's planner plans each rank. Its ``create_global_plan`` is not used: it takes 54 us a shard (measured: nine minutes
for 10,000 ranks of 1,000). Instead, the plans of all ranks are combined as columns. :func:`cover_faults` makes the same
checks, and :mod:`aio_ckpt.format.dcp_metadata_write` makes the same objects. ``tests/unit/plan/test_global_plan.py``
compares both with DCP's, field by field.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

from aio_ckpt.errors import PlanChangedError
from aio_ckpt.format.dcp_metadata_write import MetadataTable, MetadataTemplate, render_metadata
from aio_ckpt.format.tensor_columns import IntArray, are_sizes
from aio_ckpt.leaves.arrays import as_tensor
from aio_ckpt.leaves.values import LeafKind
from aio_ckpt.message_texts import numbered
from aio_ckpt.plan.assignment import Assignment
from aio_ckpt.plan.layout import ImageLayout
from aio_ckpt.plan.shard_table import Flags, LocalPlan, ShardInfo, ShardTable, TensorSignature, padded
from aio_ckpt.plan.tensor_item import TensorItem
from aio_ckpt.state.dcp_paths import dcp_paths
from aio_ckpt.state.flatten import FlatState
from aio_ckpt.state.skeleton import decode_skeleton

_PAIRS_AT_ONCE = 1 << 20
_SHOWN = 5
_PLACE_BYTES = 24
"""Length of a row of :func:`places`."""


def cover_faults(table: MetadataTable) -> list[str]:
    """Return the faults of the first few tensors whose shards leave holes or overlap; empty if there are none.

    A 0-dim tensor needs one shard and may have several.
    """
    lengths = np.diff(table.starts)
    name = np.repeat(np.arange(len(lengths)), lengths)
    dims = np.array([len(size) for size in table.sizes], np.int64)
    sizes = padded(table.sizes, table.offsets.shape[1])
    is_outside = np.zeros(len(name), np.bool_)
    for dim in range(sizes.shape[1]):
        is_outside |= table.offsets[:, dim] > sizes[name, dim] - table.shapes[:, dim]  # a sum may exceed 64 bits
    if is_outside.any():
        named = [(table.names[_number(table, row)], _box(table, row)) for row in _few(is_outside)]
        return [f"{name!r} has the out of bounds shard {box}" for name, box in named]
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


def _number(table: MetadataTable, row: int) -> int:
    return int(np.searchsorted(table.starts, row, side="right")) - 1


def _box(table: MetadataTable, row: int) -> str:
    dims = len(table.sizes[_number(table, row)])
    return f"{table.shapes[row, :dims].tolist()} at {table.offsets[row, :dims].tolist()} of rank {table.rank(row)}"


def _holders(table: MetadataTable, number: int) -> str:
    ranks = sorted({table.rank(row) for row in range(table.starts[number], table.starts[number + 1])})
    if not ranks:
        return "no rank writes any of it: its shards have"
    return f"its shards of {numbered('rank', ranks)} have"


def _volumes(table: MetadataTable, name: IntArray, dims: IntArray) -> IntArray:
    """Return, per name, the number of elements of all its shards."""
    volume = np.ones(len(name), np.int64)
    for dim in range(table.shapes.shape[1]):
        volume *= np.where(dim < dims[name], table.shapes[:, dim], 1)
    total = np.cumsum(np.append(0, volume))
    return np.diff(total[table.starts])


def _grids(table: MetadataTable, name: IntArray, sizes: IntArray) -> Flags:
    """Return, per name, whether its shards are different cells of a grid. Such cells never overlap.

    The shards of a tensor over a mesh are such cells.
    """
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


def _repeated(table: MetadataTable, name: IntArray, offsets: list[IntArray]) -> Flags:
    """Return, per name, whether two of its shards have the same offsets."""
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
    """Return the rows sorted by name, then by ``keys``. Rows are mostly sorted already; then this takes no sort."""
    is_tied = name[1:] == name[:-1]
    is_sorted = True
    for key in keys:
        is_sorted = is_sorted and not (is_tied & (key[1:] < key[:-1])).any()
        is_tied &= key[1:] == key[:-1]
    return slice(None) if is_sorted else np.lexsort((*reversed(keys), name))


def _overlap(table: MetadataTable, number: int, dims: int) -> tuple[str, str] | None:
    """Return two overlapping shards of a tensor; None if none overlap. Exact, for shards that are no grid."""
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
    """Yield every index paired with each of the ``counts[index]`` indices after it, in batches."""
    batch = np.cumsum(counts) // _PAIRS_AT_ONCE
    cuts = [0, *(np.flatnonzero(np.diff(batch)) + 1).tolist(), len(counts)]
    for start, stop in pairwise(cuts):
        mine = counts[start:stop]
        left = np.repeat(np.arange(start, stop), mine)
        yield left, left + 1 + np.arange(len(left)) - np.repeat(np.cumsum(mine) - mine, mine)


def dcp_plan(flat: FlatState) -> SavePlan:
    """Return the plan of DCP's planner for the tensors of one rank. Every rank writes its own objects."""
    leaves = {
        name: as_tensor(value, kind).detach()
        for name, value, kind in zip(flat.names, flat.values, flat.kinds, strict=True)
        if kind is not LeafKind.OBJECT
    }
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(leaves, is_coordinator=True)
    return planner.create_local_plan()


def local_plan(
    items: Sequence[TensorItem],
    shards: Mapping[int, tuple[Any, ...]],
    object_names: tuple[str, ...],
    skeleton: bytes,
    tolerances: Sequence[int],
) -> LocalPlan:
    """Return the plan of all that a rank holds, laid out as ``items``. ``shards``: see ``Structure.shards``."""
    holdings = [
        ShardInfo(
            fqns=item.fqns,
            offsets=item.offsets,
            signature=TensorSignature(
                item.spec.shape,
                tuple(shards[item.leaf][0]) if item.leaf in shards else item.spec.shape,
                str(item.spec.dtype).removeprefix("torch."),
            ),
            tolerance=tolerance,
        )
        for item, tolerance in zip(items, tolerances, strict=True)
    ]
    return LocalPlan.of(holdings, object_names, skeleton)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Items that one rank stores, and their places."""

    local: LocalPlan
    share: Assignment
    """The part of ``local`` that the rank writes."""
    places: bytes
    """Places of the items of the share, in their order in ``local``; see :func:`packed_places`."""

    @classmethod
    def whole(cls, local: LocalPlan, layout: ImageLayout, objects: int) -> Stored:
        """Return the items of a rank that writes all that it holds."""
        names = sum(len(item.fqns) for item in layout.items)
        return cls(local=local, share=Assignment.of([True] * names, [True] * objects), places=packed_places(layout))


def packed_places(layout: ImageLayout, held: Sequence[int] = ()) -> bytes:
    """Return the place of every item of ``layout``: offset and length in its file, and 1 if that is the frozen one.

    Each is an int64, little-endian. The items are in the order of their leaves in ``held``, or else of the layout.
    """
    rows = [
        (layout.file_offset(item.item_offset), item.envelope.item_bytes, index < layout.frozen_items)
        for index, item in enumerate(layout.items)
    ]
    if held:
        number_of = {leaf: number for number, leaf in enumerate(held)}
        order = sorted(range(len(rows)), key=lambda index: number_of[layout.items[index].leaf])
        rows = [rows[index] for index in order]
    return np.array(rows, "<i8").tobytes()


def are_places(data: bytes, count: int) -> bool:
    """Return whether ``data`` is the :func:`places` of ``count`` items."""
    if len(data) != count * _PLACE_BYTES:
        return False
    rows = np.frombuffer(data, "<i8").reshape(-1, 3)
    return are_sizes(rows) and not (rows[:, 2] > 1).any()


def render_global(ranks: Sequence[Stored]) -> MetadataTemplate:
    """Render ``.metadata`` of all ranks, with holes for the places of the objects.

    Raises:
        PlanChangedError: the shares of a tensor overlap or leave a hole.
    """
    table = _table(ranks)
    faults = cover_faults(table)
    if faults:
        remedy = "give what several ranks share under one name on all of them, or PerRank(tensor.to_local())"
        raise PlanChangedError(
            f"the ranks together do not hold whole tensors: {'; '.join(faults)}; a sharded tensor in PerRank is a part "
            f"only: {remedy}"
        )
    return render_metadata(table, _paths(ranks))


def _table(ranks: Sequence[Stored]) -> MetadataTable:
    """Return the shards that all ranks store, sorted by name."""
    held = ShardTable.of([rank.local for rank in ranks])
    starts = held.starts.tolist()
    written = [
        start + rank.share.rows(stop - start) for rank, start, stop in zip(ranks, starts[:-1], starts[1:], strict=True)
    ]
    rows = np.concatenate([np.empty(0, np.int64), *written])
    place = np.cumsum(held.is_first(rows)) - 1
    counts = [len(rank.places) // _PLACE_BYTES for rank in ranks]
    places = np.frombuffer(b"".join(rank.places for rank in ranks), "<i8").reshape(-1, 3)
    of_rank = np.repeat(np.arange(len(ranks)), counts)
    frozen = np.unique(of_rank[places[:, 2] == 1])
    # First come the data files of all ranks, then the frozen ones.
    file = np.where(places[:, 2] == 1, len(ranks) + np.searchsorted(frozen, of_rank), of_rank)
    by_name = np.argsort(held.name[rows], kind="stable")
    rows, place = rows[by_name], place[by_name]
    signatures = [held.signatures[signature] for signature in held.signature_of_name.tolist()]
    return MetadataTable(
        names=held.names,
        dtypes=[signature.dtype for signature in signatures],
        sizes=[signature.size for signature in signatures],
        starts=np.cumsum(np.append(0, np.bincount(held.name[rows], minlength=len(held.names)))),
        offsets=held.offsets[rows],
        shapes=held.shapes[held.signature[rows]],
        file=file[place],
        places=places[place, :2],
        files=[*((rank, False) for rank in range(len(ranks))), *((rank, True) for rank in frozen.tolist())],
        objects=[
            (name, number)
            for number, (rank, names) in enumerate(zip(ranks, held.objects, strict=True))
            for name in rank.share.object_names(names)
        ],
    )


def _paths(ranks: Sequence[Stored]) -> dict[str, tuple[str | int, ...]]:
    """Return the path of every name of every rank. Equal skeletons are decoded once."""
    owners: dict[bytes, list[int]] = {}
    for number, rank in enumerate(ranks):
        owners.setdefault(rank.local.skeleton, []).append(number)
    paths: dict[str, tuple[str | int, ...]] = {}
    # If ranks differ in the path of a name, the highest rank counts, so it comes last.
    for skeleton, numbers in sorted(owners.items(), key=lambda owned: owned[1][-1]):
        decoded = decode_skeleton(skeleton, name=f"the plan of rank {numbers[0]}")
        paths |= dcp_paths(decoded, rank=numbers[0], others=numbers[1:])
    return paths
