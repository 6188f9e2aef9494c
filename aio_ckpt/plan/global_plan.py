"""Global plans: what DCP's planner makes of the state of one rank, and ``.metadata`` over the shares of several. Pure.

DCP's planner is in charge of what each rank holds. What all of them hold is put together from columns instead of by its
``create_global_plan``, which takes 54 us a shard (measured: nine minutes for 10,000 ranks of 1,000) to concatenate and
check what is concatenated and checked here: :mod:`aio_ckpt.plan.coverage` makes its checks,
:mod:`aio_ckpt.format.dcp_metadata_write` its objects. ``tests/unit/plan/test_global_plan.py`` holds both against it,
field by field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from aio_ckpt._torch import StorageInfo
from aio_ckpt.errors import PlanChangedError
from aio_ckpt.format.dcp_metadata_write import ShardTable as MetadataTable
from aio_ckpt.format.dcp_metadata_write import render_columns
from aio_ckpt.format.manifests import MetadataTemplate, data_file_name, rank_manifest_name
from aio_ckpt.plan.assignment import Assignment
from aio_ckpt.plan.coverage import cover_faults
from aio_ckpt.plan.shard_table import LocalPlan, ShardInfo, ShardTable, TensorSignature
from aio_ckpt.plan.values import ImageLayout, TensorItem
from aio_ckpt.state import flatten as tree
from aio_ckpt.state.objects import as_tensor
from aio_ckpt.state.values import LeafKind

__all__ = ["Stored", "dcp_plan", "local_plan", "render_global", "shard_offsets", "storage_data"]


def dcp_plan(flat: tree.FlatState) -> tuple[DefaultSavePlanner, SavePlan]:
    """DCP's planner and what it would write of the state of one rank."""
    leaves = {
        name: None if kind is LeafKind.OBJECT else as_tensor(value, kind).detach()
        for name, value, kind in zip(flat.names, flat.values, flat.kinds, strict=True)
    }
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(leaves, is_coordinator=True)
    return planner, planner.create_local_plan()


def shard_offsets(write_items: dict[str, WriteItem], name: str) -> tuple[int, ...]:
    """Where in its global tensor the item called ``name`` begins."""
    data = write_items[name].tensor_data
    return tuple(data.chunk.offsets) if data is not None else ()


def storage_data(layout: ImageLayout, write_items: dict[str, WriteItem], file: str) -> dict[MetadataIndex, StorageInfo]:
    """Place of every tensor name, all in one file."""
    return {
        write_items[name].index: StorageInfo(file, item.item_offset, item.envelope.item_bytes)
        for item in layout.items
        for name in item.fqns
        if write_items[name].type is not WriteItemType.BYTE_IO
    }


def local_plan(
    items: Sequence[TensorItem],
    shards: Mapping[int, tuple[Any, ...]],
    object_names: tuple[str, ...],
    skeleton: bytes,
) -> LocalPlan:
    """What a rank holds, laid out as ``items``; ``shards`` begin with the shape of the global tensor, by leaf."""
    holdings = [
        ShardInfo(
            fqns=item.fqns,
            offsets=item.offsets,
            signature=TensorSignature(
                item.spec.shape,
                tuple(shards[item.leaf][0]) if item.leaf in shards else item.spec.shape,
                str(item.spec.dtype).removeprefix("torch."),
            ),
        )
        for item in items
    ]
    return LocalPlan.of(holdings, object_names, skeleton)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What one rank stores, and where."""

    local: LocalPlan
    """All that it holds."""
    share: Assignment
    """What of it it writes."""
    places: bytes
    """Offset and length of every item of the share in its data file: int64, little-endian."""


def render_global(ranks: Sequence[Stored]) -> MetadataTemplate:
    """``.metadata`` with holes for the objects, of each name rank by rank.

    Raises:
        PlanChangedError: the shares of a tensor overlap or leave a hole.
    """
    table = _table(ranks)
    faults = cover_faults(table)
    if faults:
        raise PlanChangedError(f"the ranks together do not hold whole tensors: {'; '.join(faults)}")
    return render_columns(table, _paths(ranks))


def _table(ranks: Sequence[Stored]) -> MetadataTable:
    """What all ranks store, by name."""
    held = ShardTable.of([rank.local for rank in ranks])
    starts = held.starts.tolist()
    written = [
        start + rank.share.rows(stop - start) for rank, start, stop in zip(ranks, starts[:-1], starts[1:], strict=True)
    ]
    rows = np.concatenate([np.empty(0, np.int64), *written])
    place = np.cumsum(held.is_first(rows)) - 1
    places = np.frombuffer(b"".join(rank.places for rank in ranks), "<i8").reshape(-1, 2)
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
        file=held.rank[rows].astype(np.int64),
        places=places[place],
        files=[data_file_name(number) for number in range(len(ranks))],
        objects=[
            (name, number)
            for number, (rank, names) in enumerate(zip(ranks, held.objects, strict=True))
            for name in rank.share.object_names(names)
        ],
    )


def _paths(ranks: Sequence[Stored]) -> dict[str, tuple[str | int, ...]]:
    """Of every name of every rank; equal skeletons are read once."""
    owners: dict[bytes, list[int]] = {}
    for number, rank in enumerate(ranks):
        owners.setdefault(rank.local.skeleton, []).append(number)
    paths: dict[str, tuple[str | int, ...]] = {}
    for skeleton, numbers in sorted(owners.items(), key=lambda owned: owned[1][-1]):  # the highest rank's word stands
        decoded = tree.decode_skeleton(skeleton, name=rank_manifest_name(numbers[0]))
        paths |= tree.dcp_paths(decoded, rank=numbers[0], others=numbers[1:])
    return paths
