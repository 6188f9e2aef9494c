"""The plan of one load: where each value is stored, the memory that it is read into, and the reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch.distributed.tensor import DTensor

from aio_ckpt._torch import create_chunk_list
from aio_ckpt.checkpoint.catalog import Item, StoredObject, global_shape
from aio_ckpt.checkpoint.data_files import Files
from aio_ckpt.checkpoint.fetch import synchronize
from aio_ckpt.checkpoint.foreign_items import parse_item
from aio_ckpt.checkpoint.locate import locate
from aio_ckpt.checkpoint.open import Checkpoint
from aio_ckpt.checkpoint.read_context import ReadContext
from aio_ckpt.checkpoint.read_plan import ObjectMemory, ReadPlan
from aio_ckpt.checkpoint.read_requests import ReadRequest
from aio_ckpt.errors import CorruptCheckpointError, TemplateMismatchError, UnsupportedLeafError
from aio_ckpt.format.tensor_zip import is_dense, row_major_stride
from aio_ckpt.leaves.tensor_memory import unwrapped
from aio_ckpt.leaves.values import OwnedShard, Shard, Target
from aio_ckpt.match.fills import ExactFill, Fill, Fills
from aio_ckpt.runtime.portal import run_blocking

HostMemory: TypeAlias = Callable[[int], torch.Tensor]
"""Function that returns host memory of a number of bytes, as a uint8 tensor with a storage of its own."""


@dataclass(slots=True, repr=False, kw_only=True)
class FillPlan:
    """Plan of one load."""

    pieces: ReadPlan
    requests: Sequence[ReadRequest] = ()
    """The reads of these pieces."""
    values: dict[str, object] = field(default_factory=dict)
    """Tensors that are read, by name, without those that fill exactly."""
    objects: Mapping[str, StoredObject]
    """Objects that are read, by name. Several names may have one."""
    undecoded: ObjectMemory
    """Memory that the objects are read into."""


async def plan_fills(
    ctx: ReadContext,
    files: Files,
    checkpoint: Checkpoint,
    fills: Fills,
    *,
    tied: Iterable[tuple[str, str]] = (),
    memory: HostMemory | None = None,
) -> FillPlan:
    """Return the plan that reads ``fills``: measure the files and, for plain DCP, parse the envelopes.

    Args:
        tied: see :attr:`aio_ckpt.match.match.Match.tied`.
        memory: gives the memory of new host tensors; None: torch's own.

    Raises:
        CorruptCheckpointError: an item does not lie inside its file, or its envelope cannot be parsed.
        TemplateMismatchError: a target cannot take the stored values.
        UnsupportedLeafError: an item is no plain tensor, or was written through a stream extension of DCP.
        ReadError: the operating system could not read.
    """
    names = [fill.name for fill in fills.others]
    await files.measure({item.file for item, _, _ in fills.exact}, checkpoint.catalog.files)
    items, objects = await _locate(ctx, files, checkpoint, names, fills.objects)
    _check_tied(checkpoint, tied, items)

    def planned() -> FillPlan:
        pieces = ReadPlan()
        plan = FillPlan(pieces=pieces, objects=objects, undecoded=pieces.add_objects(objects.values()))
        exact = _add_fills(plan, fills.others, items, memory)
        pieces.add_whole([*fills.exact, *exact])
        synchronize(pieces.devices)
        plan.requests = pieces.requests(ctx.config.workers)
        return plan

    return await run_blocking(ctx.executor, planned)


async def _locate(
    ctx: ReadContext, files: Files, checkpoint: Checkpoint, tensors: Sequence[str], objects: Sequence[str]
) -> tuple[Mapping[str, tuple[Item, ...]], Mapping[str, StoredObject]]:
    """Return the items of tensors and the stored objects by name. Each was checked to lie inside its data file."""
    catalog = checkpoint.catalog
    shards = {name: catalog.shards[name] for name in tensors}
    held = {name: catalog.objects[name] for name in objects}
    stored = [*{id(shard): shard for found in shards.values() for shard in found}.values(), *held.values()]
    for each in stored if checkpoint.is_plain_dcp else ():
        if not isinstance(each, Item) and each.is_transformed:
            raise UnsupportedLeafError(
                f"{each.file}: {each.name!r} was written through a stream extension of DCP, which DCP's calls alone "
                "undo: load it by dcp.load with an aio_ckpt.dcp.Reader"
            )
    located = await locate(files, stored, catalog.files, parse_item, executor=ctx.executor, readers=ctx.config.workers)
    if not checkpoint.is_plain_dcp:
        return shards, held  # type: ignore[return-value]  # no UnparsedItem in ours
    parsed = {id(before): item for before, item in zip(stored, located, strict=True) if isinstance(item, Item)}
    return {name: tuple(parsed[id(shard)] for shard in found) for name, found in shards.items()}, held


def _check_tied(checkpoint: Checkpoint, pairs: Iterable[tuple[str, str]], items: Mapping[str, Sequence[Item]]) -> None:
    """Check that the two values that plain DCP stores for one tensor of the template have the same checksums.

    Raises:
        TemplateMismatchError: the values differ, or have no checksums.
    """
    for before, later in pairs:
        one, other = ({item.offsets: _content(item) for item in items.get(name, ())} for name in (before, later))
        if one and one == other and all(item.record_crc32 is not None for item in items[later]):
            continue
        holds = "holds other values for it" if one != other else "has no checksums that tell whether their values agree"
        raise TemplateMismatchError(
            f"{checkpoint.path}: {later!r} shares memory with {before!r} in the template, and the checkpoint {holds}: "
            "give it memory of its own (.clone()), or leave it out"
        )


def _content(item: Item) -> tuple[object, ...]:
    return item.record_crc32, item.raw_bytes, item.storage_offset, item.stride, item.is_conj, item.is_neg


def _add_fills(
    plan: FillPlan, fills: Iterable[Fill], items: Mapping[str, tuple[Item, ...]], memory: HostMemory | None
) -> list[ExactFill]:
    """Add tensors to the plan, but for those that fill exactly, which are returned. New tensors are made."""
    exact: list[ExactFill] = []
    made: dict[tuple[int, ...], Target] = {}
    for name, target, like, address in fills:
        if isinstance(like, OwnedShard):  # load_state_dict takes only the owner, so that is filled in place
            target = like
        key = (id(target), id(like), *map(id, items[name]))  # tied names have one key, so they are read once
        if key not in made:
            made[key] = new_tensor(name, items[name], like, memory) if target is None else target
            if address and isinstance(target, torch.Tensor):
                exact.append((items[name][0], target, address))
            else:
                _add_fill(plan, name, items[name], made[key])
        value = made[key]
        plan.values[name] = value.owner if isinstance(value, OwnedShard) else value
    return exact


def _add_fill(plan: FillPlan, name: str, items: tuple[Item, ...], target: Target) -> None:
    tensor = target.tensor if isinstance(target, Shard) else target
    offsets: Sequence[int] = target.offsets if isinstance(target, Shard) else (0,) * tensor.dim()
    if type(tensor) is DTensor:
        shard = create_chunk_list(tensor)[0]
        offsets = shard.offsets
        with torch.no_grad():
            tensor = unwrapped(tensor.to_local())
        if tensor.shape != shard.sizes:
            raise TemplateMismatchError(
                f"{name!r} holds a shard of shape {tuple(tensor.shape)} in the template where torch cuts one of "
                f"{tuple(shard.sizes)}: lay it out with distribute_tensor() or fully_shard()"
            )
    plan.pieces.add_tensor(items, offsets, tensor)


def new_tensor(name: str, items: tuple[Item, ...], like: Target | None, memory: HostMemory | None = None) -> Target:
    """Return a new tensor of the stored dtype with the device, mesh and placements, or the box, of ``like``.

    Without ``like``, it is a host tensor for the whole value. If one item holds the whole value, it has the stride of
    that item.

    Raises:
        CorruptCheckpointError: the shape needs more bytes than the items can hold; nothing was allocated.
    """
    if isinstance(like, Shard):
        return replace(like, tensor=torch.empty_like(like.tensor, dtype=items[0].dtype, requires_grad=False))
    if like is not None:
        return torch.empty_like(like, dtype=items[0].dtype, requires_grad=False)
    first, shape = items[0], global_shape(items)
    stored = sum(item.raw_bytes for item in items)
    if math.prod(shape) * first.dtype.itemsize > stored:
        raise CorruptCheckpointError(f"{name!r}: shape {shape} needs more bytes than the {stored} that are stored")
    is_whole = first.shape == shape and is_dense(shape, first.stride)
    stride = first.stride if is_whole else row_major_stride(shape)
    if memory is None or 0 in shape:
        return torch.empty_strided(shape, stride, dtype=first.dtype)
    return torch.as_strided(memory(math.prod(shape) * first.dtype.itemsize).view(first.dtype), shape, stride)
