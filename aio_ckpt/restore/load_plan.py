"""The plan of one load: where each value is stored, and the memory that it is read into."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch.distributed.tensor import DTensor

from aio_ckpt._torch import create_chunk_list
from aio_ckpt.checkpoint.catalog import Item, Shards, StoredObject, UnparsedItem, global_shape
from aio_ckpt.checkpoint.data_files import Files
from aio_ckpt.checkpoint.fetch import synchronize
from aio_ckpt.checkpoint.foreign_items import check_inside, parse_items
from aio_ckpt.checkpoint.open import Checkpoint
from aio_ckpt.checkpoint.read_plan import ReadPlan
from aio_ckpt.errors import CorruptCheckpointError, TemplateMismatchError, UnsafeObjectError
from aio_ckpt.format.tensor_zip import is_dense, row_major_stride
from aio_ckpt.leaves.tensor_memory import unwrapped
from aio_ckpt.leaves.values import OwnedShard, Shard, Target
from aio_ckpt.match.match import WholeTarget, shard_like
from aio_ckpt.restore.options import ReadContext

_SHOWN = 5
"""Objects that a message names."""
_MAX_EXPANSION = 1 << 16
"""Largest factor by which a stream extension is believed to shrink a tensor. DCP's own, zstd, packs at best 128 KiB
into 4 bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The stored items of the names to read. Every place was checked to lie inside its data file."""

    items: Mapping[str, tuple[Item, ...]]
    """Tensors by name."""
    objects: Mapping[str, StoredObject]
    """Objects by name."""
    transformed: Mapping[str, Shards]
    """Tensors that only DCP's own reader can read (stream extensions), by name."""


async def locate(ctx: ReadContext, files: Files, checkpoint: Checkpoint, names: Iterable[str]) -> Source:
    """Find the items of ``names``: measure their files and, for plain DCP, parse their envelopes.

    Raises:
        CorruptCheckpointError: an item does not lie inside its file, or its envelope cannot be parsed.
        ReadError: the operating system could not read.
    """
    catalog = checkpoint.catalog
    shards = {name: catalog.shards[name] for name in names if name in catalog.shards}
    stored = {name: catalog.objects[name] for name in names if name in catalog.objects}
    used = {shard.file for found in shards.values() for shard in found}
    await files.measure(used.union(found.file for found in stored.values()), catalog.files)
    for found in stored.values():
        check_inside(found.name, found.file, found.offset, found.nbytes, files.sizes)
    objects = {name: found for name, found in stored.items() if not found.is_transformed}
    if not checkpoint.is_plain_dcp:
        return Source(items=shards, objects=objects, transformed={})  # type: ignore[arg-type]  # no UnparsedItem in ours
    transformed = {name: found for name, found in shards.items() if any(_is_transformed(shard) for shard in found)}
    unparsed_items = [
        shard for name in shards.keys() - transformed for shard in shards[name] if isinstance(shard, UnparsedItem)
    ]
    parsed = await parse_items(files, unparsed_items, executor=ctx.executor, readers=ctx.readers)
    items = {
        name: tuple(parsed[id(shard)] for shard in found) for name, found in shards.items() if name not in transformed
    }
    return Source(items=items, objects=objects, transformed=transformed)


def _is_transformed(shard: Item | UnparsedItem) -> bool:
    return isinstance(shard, UnparsedItem) and shard.is_transformed


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
    by_dcp: dict[str, Any] = field(default_factory=dict)
    """Name -> target of a value that DCP's own reader must read; None for an object."""
    live: Mapping[str, Target] = field(default_factory=dict)
    """See ``Match.live``."""
    live_at: Mapping[str, int] = field(default_factory=dict)
    """See ``Match.live_at``."""
    layouts: Mapping[str, Target] = field(default_factory=dict)
    """See ``Match.layouts``."""
    skip_untrusted: bool = False
    """Whether objects that need trust are left unread."""
    memory: HostMemory | None = None
    """Memory of new host tensors; None: torch's own."""
    untrusted: dict[str, str] = field(default_factory=dict)
    """Name of each object that needs trust -> why it does."""
    devices: set[torch.device] = field(default_factory=set)
    """Devices of the targets, without the host."""

    def add_all(
        self, tensors: Iterable[tuple[str, Target]], values: Iterable[str], objects: Iterable[str], trusted: bool
    ) -> None:
        """Plan ``tensors`` into their memory, ``values`` into that of ``live`` or new memory, and ``objects``."""
        for name, tensor in tensors:
            self._add_tensor(name, tensor)
        self._add_values(values)
        for name in objects:
            if name in self.source.objects:
                self.reads.add_object(self.source.objects[name], functools.partial(self.undecoded.__setitem__, name))
            elif trusted:
                self.by_dcp[name] = None
            else:
                self.untrusted[name] = (
                    f"{name}: written through an extension of DCP, whose reader runs code; set trusted_objects=True if "
                    "you trust whoever wrote the checkpoint"
                )
        check_trusted(self.untrusted, skip_untrusted=self.skip_untrusted)
        synchronize(self.devices)

    def _add_values(self, names: Iterable[str]) -> None:
        made: dict[tuple[int, ...], Target] = {}
        whole: list[WholeTarget] = []
        for name in names:
            shards: Shards = self.source.items.get(name) or self.source.transformed[name]
            target, like = self.live.get(name), shard_like(self.layouts.get(name), shards)
            if isinstance(like, OwnedShard):  # load_state_dict takes only the owner, so that is filled in place
                target = like
            key = (id(target), id(like), *map(id, shards))  # tied names have one key, so they are read once
            if key not in made:
                made[key] = new_tensor(name, shards, like, self.memory) if target is None else target
                address = self.live_at.get(name, 0)
                if address and isinstance(target, torch.Tensor):
                    whole.append((shards[0], target, address))  # type: ignore[arg-type]
                else:
                    self._add_tensor(name, made[key])
            value = made[key]
            self.values[name] = value.owner if isinstance(value, OwnedShard) else value
        self.reads.add_whole(whole)

    def _add_tensor(self, name: str, target: Target) -> None:
        items = self.source.items.get(name)
        if items is None:
            if isinstance(target, Shard):
                raise TemplateMismatchError(
                    f"{name!r}: written through an extension of DCP, whose reader fills no Shard: give the whole tensor"
                )
            _check_cover(name, self.source.transformed[name])
            self.by_dcp[name] = target
            return
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
        self.reads.add_tensor(items, offsets, tensor)


def new_tensor(name: str, shards: Shards, like: Target | None, memory: HostMemory | None = None) -> Target:
    """Return a new tensor of the stored dtype with the device, mesh and placements, or the box, of ``like``.

    Without ``like``, it is a host tensor for the whole value. If one item holds the whole value, it has the stride of
    that item.

    Raises:
        CorruptCheckpointError: the shape needs more bytes than the shards can hold; nothing was allocated.
    """
    if isinstance(like, Shard):
        return replace(like, tensor=torch.empty_like(like.tensor, dtype=shards[0].dtype, requires_grad=False))
    if like is not None:
        return torch.empty_like(like, dtype=shards[0].dtype, requires_grad=False)
    first, shape = shards[0], global_shape(shards)
    stored = sum(shard.raw_bytes if isinstance(shard, Item) else shard.item_bytes * _MAX_EXPANSION for shard in shards)
    if math.prod(shape) * first.dtype.itemsize > stored:
        raise CorruptCheckpointError(f"{name!r}: shape {shape} needs more bytes than the {stored} that are stored")
    is_whole = first.shape == shape and first.stride is not None and is_dense(shape, first.stride)
    stride = first.stride if is_whole and first.stride is not None else row_major_stride(shape)
    if memory is None or 0 in shape:
        return torch.empty_strided(shape, stride, dtype=first.dtype)
    return torch.as_strided(memory(math.prod(shape) * first.dtype.itemsize).view(first.dtype), shape, stride)


def _check_cover(name: str, shards: Shards) -> None:
    """Raise CorruptCheckpointError if shards, which do not overlap, leave a hole: DCP's own reader looks for none."""
    covered, total = sum(math.prod(shard.shape) for shard in shards), math.prod(global_shape(shards))
    if covered != total:
        raise CorruptCheckpointError(f"{name!r}: the stored shards cover {covered} of {total} elements")


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
