"""DCP's planner: over the state of one rank, and over the shares of several. Pure."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from aio_ckpt import tree
from aio_ckpt.errors import PlanChangedError
from aio_ckpt.items import ImageLayout, LeafKind, TensorItem
from aio_ckpt.manifest import MetadataTemplate, data_file_name, rank_manifest_name, render_metadata
from aio_ckpt.metadata import DTYPES
from aio_ckpt.objects import as_tensor
from aio_ckpt.shares import Holding, LocalPlan, Share

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


def storage_data(
    layout: ImageLayout, write_items: dict[str, WriteItem], file: str
) -> dict[MetadataIndex, _StorageInfo]:
    """Place of every tensor name, all in one file."""
    return {
        write_items[name].index: _StorageInfo(file, item.item_offset, item.envelope.item_bytes)
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
    return LocalPlan(
        tuple(
            Holding(
                item.fqns,
                item.offsets,
                item.spec.shape,
                tuple(shards[item.leaf][0]) if item.leaf in shards else item.spec.shape,
                str(item.spec.dtype).removeprefix("torch."),
            )
            for item in items
        ),
        object_names,
        skeleton,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What one rank stores, and where."""

    local: LocalPlan
    """All that it holds."""
    share: Share
    """What of it it writes."""
    places: tuple[tuple[int, int], ...]
    """(offset, length) of every item of the share in its data file."""


def render_global(ranks: Sequence[Stored]) -> MetadataTemplate:
    """``.metadata`` with holes for the objects: rank by rank, in the order of each share.

    Raises:
        PlanChangedError: the shares of a tensor overlap or leave a hole.
    """
    plans = [SavePlan([*_tensor_items(rank), *(_object_item(name) for name in rank.share.objects)]) for rank in ranks]
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        plans, metadata = planner.create_global_plan(plans)
    except ValueError as error:
        raise PlanChangedError(f"the ranks together do not hold whole tensors: {error}") from error
    metadata.storage_data = {
        item.index: _StorageInfo(data_file_name(number), *place)
        for number, (rank, plan) in enumerate(zip(ranks, plans, strict=True))
        for item, place in zip(plan.items, _places_of_items(rank), strict=False)
    }
    metadata.planner_data = {
        name: path for number, rank in enumerate(ranks) for name, path in _paths(rank.local.skeleton, number).items()
    }
    names = [(name, number) for number, rank in enumerate(ranks) for name in rank.share.objects]
    return render_metadata(
        metadata,
        object_indices=[MetadataIndex(name) for name, _ in names],
        data_file=[data_file_name(number) for _, number in names],
    )


def _tensor_items(rank: Stored) -> list[WriteItem]:
    return [_tensor_item(name, rank.local.tensors[index]) for index, names in rank.share.tensors for name in names]


def _places_of_items(rank: Stored) -> list[tuple[int, int]]:
    """Of every name; objects, which come last, have none yet."""
    return [place for (_, names), place in zip(rank.share.tensors, rank.places, strict=True) for _ in names]


def _tensor_item(name: str, item: Holding) -> WriteItem:
    offsets, shape = torch.Size(item.offsets), torch.Size(item.shape)
    return WriteItem(
        index=MetadataIndex(name, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=shape),
            properties=_properties(item.dtype),
            size=torch.Size(item.size),
        ),
    )


@functools.cache
def _properties(dtype: str) -> TensorProperties:
    return TensorProperties(dtype=DTYPES[dtype])


def _object_item(name: str) -> WriteItem:
    return WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO)


def _paths(skeleton: bytes, rank: int) -> dict[str, tuple[str | int, ...]]:
    return tree.dcp_paths(tree.decode_skeleton(skeleton, name=rank_manifest_name(rank)), rank=rank)
