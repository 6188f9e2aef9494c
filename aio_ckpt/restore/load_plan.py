"""The plan of one load: where each value is stored, and the memory that it is read into."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch.distributed.tensor import DTensor

from aio_ckpt._torch import create_chunk_list
from aio_ckpt.checkpoint import foreign_items
from aio_ckpt.checkpoint.catalog import Item, StoredObject, global_shape
from aio_ckpt.checkpoint.data_files import Files
from aio_ckpt.checkpoint.fetch import synchronize
from aio_ckpt.checkpoint.foreign_items import parse_item
from aio_ckpt.checkpoint.open import Checkpoint
from aio_ckpt.checkpoint.read_plan import ReadPlan
from aio_ckpt.errors import CorruptCheckpointError, TemplateMismatchError, UnsafeObjectError, UnsupportedLeafError
from aio_ckpt.format.tensor_zip import is_dense, row_major_stride
from aio_ckpt.leaves.tensor_memory import unwrapped
from aio_ckpt.leaves.values import OwnedShard, Shard, Target
from aio_ckpt.match.match import Match, WholeTarget, shard_like
from aio_ckpt.restore.options import ReadContext

_SHOWN = 5
"""Objects that a message names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The stored items of the names to read. Every place was checked to lie inside its data file."""

    items: Mapping[str, tuple[Item, ...]]
    """Tensors by name."""
    objects: Mapping[str, StoredObject]
    """Objects by name."""


async def locate(ctx: ReadContext, files: Files, checkpoint: Checkpoint, names: Iterable[str]) -> Source:
    """Find the items of ``names``: measure their files and, for plain DCP, parse their envelopes.

    Raises:
        CorruptCheckpointError: an item does not lie inside its file, or its envelope cannot be parsed.
        UnsupportedLeafError: an item is no plain tensor, or was written through a stream extension of DCP.
        ReadError: the operating system could not read.
    """
    catalog = checkpoint.catalog
    shards = {name: catalog.shards[name] for name in names if name in catalog.shards}
    objects = {name: catalog.objects[name] for name in names if name in catalog.objects}
    stored = [*{id(shard): shard for found in shards.values() for shard in found}.values(), *objects.values()]
    for each in stored if checkpoint.is_plain_dcp else ():
        if not isinstance(each, Item) and each.is_transformed:
            raise UnsupportedLeafError(
                f"{each.file}: {each.name!r} was written through a stream extension of DCP, which DCP's calls alone "
                "undo: load it by dcp.load with an aio_ckpt.dcp.Reader"
            )
    located = await foreign_items.locate(
        files, stored, catalog.files, parse_item, executor=ctx.executor, readers=ctx.readers
    )
    if not checkpoint.is_plain_dcp:
        return Source(items=shards, objects=objects)  # type: ignore[arg-type]  # no UnparsedItem in ours
    parsed = {id(before): item for before, item in zip(stored, located, strict=True) if isinstance(item, Item)}
    items = {name: tuple(parsed[id(shard)] for shard in found) for name, found in shards.items()}
    return Source(items=items, objects=objects)


HostMemory: TypeAlias = Callable[[int], torch.Tensor]
"""Function that returns host memory of a number of bytes, as a uint8 tensor with a storage of its own."""


@dataclass(slots=True, repr=False, kw_only=True)
class LoadPlan:
    """Plan of one load: the items to read, and their targets. The reads add the bytes of objects to it."""

    source: Source
    """Places of all items to read."""
    reads: ReadPlan = field(default_factory=ReadPlan)
    """The pieces to read."""
    values: dict[str, object] = field(default_factory=dict)
    """Tensors that are read into memory outside of the template's leaves, by name."""
    undecoded: dict[str, bytes] = field(default_factory=dict)
    """Bytes of the objects that were read, by name."""
    found: Match = field(default_factory=Match)
    """The tensors of Stateful values that are filled, and the layouts of new ones; empty without a template."""
    skip_untrusted: bool = False
    """Whether objects that need trust are left unread."""
    memory: HostMemory | None = None
    """Memory of new host tensors; None: torch's own."""
    devices: set[torch.device] = field(default_factory=set)
    """Devices of the targets, without the host."""

    def add_all(self, tensors: Iterable[tuple[str, Target]], values: Iterable[str], objects: Iterable[str]) -> None:
        """Plan ``tensors`` into their memory, ``values`` into that of a live tensor or new memory, and ``objects``."""
        for name, tensor in tensors:
            self._add_tensor(name, tensor)
        self._add_values(values)
        for name in objects:
            self.reads.add_object(self.source.objects[name], functools.partial(self.undecoded.__setitem__, name))
        synchronize(self.devices)

    def _add_values(self, names: Iterable[str]) -> None:
        made: dict[tuple[int, ...], Target] = {}
        whole: list[WholeTarget] = []
        for name in names:
            items = self.source.items[name]
            target, like = self.found.live.get(name), shard_like(self.found.layouts.get(name), items)
            if isinstance(like, OwnedShard):  # load_state_dict takes only the owner, so that is filled in place
                target = like
            key = (id(target), id(like), *map(id, items))  # tied names have one key, so they are read once
            if key not in made:
                made[key] = new_tensor(name, items, like, self.memory) if target is None else target
                address = self.found.live_at.get(name, 0)
                if address and isinstance(target, torch.Tensor):
                    whole.append((items[0], target, address))
                else:
                    self._add_tensor(name, made[key])
            value = made[key]
            self.values[name] = value.owner if isinstance(value, OwnedShard) else value
        self.reads.add_whole(whole)

    def _add_tensor(self, name: str, target: Target) -> None:
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
        if not tensor.is_cpu:
            self.devices.add(tensor.device)
        self.reads.add_tensor(self.source.items[name], offsets, tensor)


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


def check_trusted(untrusted: Mapping[str, str], *, skip_untrusted: bool) -> None:
    """Raise UnsafeObjectError, which names the objects that need trust, unless they are skipped."""
    if not untrusted or skip_untrusted:
        return
    (_, why), *more = untrusted.items()
    names = [repr(name) for name, _ in more]
    if names:
        further = f" and {len(names) - _SHOWN + 1} others" if len(names) >= _SHOWN else ""
        why += f" (and so it is with {len(names)} more: {', '.join(names[: _SHOWN - 1])}{further})"
    raise UnsafeObjectError(why)
