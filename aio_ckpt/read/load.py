"""Read: load into a template, or read a nested state without one. Verified, ranged, resharded by DCP's planner.

What is promised: everything that can be known before a byte of data is read is checked before. A tensor of the template
is filled block by block, each block once it is proven. Objects and ``load_state_dict`` come last, when all is proven.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch.autograd.graph import increment_version
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.tensor import DTensor

from aio_ckpt._torch import create_chunk_list
from aio_ckpt.errors import (
    CorruptCheckpointError,
    MissingNameError,
    TemplateMismatchError,
    UnsafeObjectError,
)
from aio_ckpt.format.tensor_zip import is_dense
from aio_ckpt.memory.cuda import using
from aio_ckpt.read.catalog import Catalog, Item, Shards, Slot, StoredObject, global_shape
from aio_ckpt.read.compounds import check_targets, stored_compounds
from aio_ckpt.read.data_files import Files
from aio_ckpt.read.fetch import Fetched, fetch
from aio_ckpt.read.foreign_items import check_inside, check_zip, parse_slots
from aio_ckpt.read.match import Match, OnMatched, WholeTarget, at_once, listed, match_template, shard_like
from aio_ckpt.read.open import Checkpoint, open_checkpoint
from aio_ckpt.read.open_places import build_at, dcp_paths_of, nested_at, with_numbers
from aio_ckpt.read.overlaps import check_agreement, write_shared
from aio_ckpt.read.plan import ReadPlan, ReadRequest, is_read_by_several, wanted_bytes
from aio_ckpt.read.rank_names import skeleton_of, wanted_names
from aio_ckpt.read.rename import Rename, renamed
from aio_ckpt.runtime.error_notes import tell_modified
from aio_ckpt.runtime.portal import Executor, run_blocking
from aio_ckpt.state import flatten as tree
from aio_ckpt.state.compound import settle
from aio_ckpt.state.objects import type_name
from aio_ckpt.state.values import OwnedShard, Shard, Target, UntrustedObject
from aio_ckpt.storage.local import PageCache, Storage

__all__ = [
    "Checkpoint",
    "LoadOutcome",
    "ReadOutcome",
    "load_checkpoint",
    "open_checkpoint",
    "read_state",
    "synchronize",
]

T = TypeVar("T")
_log = logging.getLogger("aio_ckpt")
_SHOWN = 5
"""Objects that a message names."""
_FREED_AFTER_SECS = 0.01
_MAX_EXPANSION = 1 << 16
"""Beyond, a size behind a stream extension is forged: zstd, DCP's own, packs 128 KiB into 4 bytes at best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOutcome:
    """What one load did."""

    step: int | None
    """Step that the checkpoint tells; None for plain DCP."""
    missing: tuple[str, ...]
    """Template names that the checkpoint lacks (only with ``allow_missing``)."""
    unexpected: tuple[str, ...]
    """Names of the checkpoint that the template lacks."""
    untrusted: tuple[str, ...]
    """Objects that were left as they are (only with ``skip_untrusted``)."""
    bytes_read: int
    """Bytes read from data files."""
    verified: bool
    """False if ``verify`` was, or nothing that was read has a sum."""
    identity: str
    """Of the checkpoint that was read: another one in its place has another."""
    put_back: Callable[[], None]
    """Sets objects and calls every ``load_state_dict``, once; blocks. What that raises has ``target_modified``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOutcome:
    """A state that was read without a template."""

    state: object
    """The nested state."""
    step: int | None
    """Step that the checkpoint tells; None for plain DCP."""
    untrusted: tuple[str, ...]
    """Objects in whose place an ``UntrustedObject`` stands."""
    plain: tuple[str, ...]
    """Containers that are of another type than they were: ``name (type)``."""
    bytes_read: int
    """Bytes read from data files."""
    verified: bool
    """False if ``verify`` was, or nothing that was read has a sum."""


async def load_checkpoint(
    storage: Storage,
    path: Path,
    state: object,
    *,
    step: int | None,
    executor: Executor,
    rank: int,
    world_size: int,
    ranks_on_host: int = 1,
    readers: int,
    past_page_cache: bool = False,
    verify: bool,
    strict: bool,
    allow_missing: bool,
    trusted: bool,
    skip_untrusted: bool = False,
    casts: bool = False,
    rename: Rename | None = None,
    on_matched: OnMatched = at_once,
) -> LoadOutcome:
    """Fill the tensors of ``state`` from the checkpoint at ``path``. ``readers`` reads are in flight.

    The rest of ``state`` is as it was until ``put_back`` of the outcome is called: the other ranks may find damage yet.
    With ``skip_untrusted`` an object that needs ``trusted`` is left as it is. ``casts``: see :func:`match_template`.
    ``rename`` makes the template's names of those that are stored.
    ``past_page_cache``: all is read from the disk, as the page cache would give what it gave before.

    Raises:
        CheckpointNotFoundError, FormatVersionError: see :func:`aio_ckpt.read.open.open_checkpoint`.
        MissingNameError, UnexpectedNameError, TemplateMismatchError: before anything is touched; see
            :func:`aio_ckpt.read.match.match_template` and :func:`aio_ckpt.read.overlaps.check_agreement`.
        CorruptCheckpointError: names file and tensor. ``target_modified`` is True once reading began.
        UnsafeObjectError: an object needs ``trusted``.
        ReadError: the operating system could not read.
    """
    async with Files(storage, path, readers=readers, page_cache="pass" if past_page_cache else "take") as files:
        checkpoint = await open_checkpoint(storage, path, executor=executor, step=step)
        if rename is not None:
            checkpoint = await run_blocking(executor, _renamed, checkpoint, rename, rank)
        match = functools.partial(match_template, checkpoint, state, rank=rank, world_size=world_size)
        options = {"strict": strict, "allow_missing": allow_missing, "trusted": trusted, "casts": casts}
        found = await run_blocking(executor, functools.partial(match, **options))
        if not past_page_cache:
            await _share(files, found, checkpoint.catalog, executor, ranks_on_host)
        shared = await _fetch_shared(files, checkpoint, found, executor=executor, readers=readers, verify=verify)
        draft, segments = await _planned(files, checkpoint, found, executor, readers, trusted, skip_untrusted)
        draft.shared = shared.values
        await on_matched(checkpoint.identity)
        with _target_modified():
            fetched = await _fetch(files, draft, segments, executor=executor, readers=readers, verify=verify)
            put_back = await run_blocking(executor, _decode, draft, checkpoint, state, found, rank, trusted)
    asyncio.get_running_loop().call_later(_FREED_AFTER_SECS, _free, checkpoint)
    return LoadOutcome(
        step=checkpoint.step,
        missing=found.missing,
        unexpected=found.unexpected,
        untrusted=tuple(draft.untrusted),
        bytes_read=fetched.bytes_read + shared.bytes_read,
        verified=_is_verified(fetched, draft, checkpoint, verify) and shared.is_verified,
        identity=checkpoint.identity,
        put_back=put_back,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _SharedValues:
    """What was read for targets that share memory."""

    values: Mapping[str, torch.Tensor]
    """Host tensors by name."""
    bytes_read: int
    """Bytes read from data files."""
    is_verified: bool
    """As :attr:`LoadOutcome.verified`; True if nothing was read."""


async def _fetch_shared(
    files: Files, checkpoint: Checkpoint, found: Match, *, executor: Executor, readers: int, verify: bool
) -> _SharedValues:
    """Read the values of targets that share memory into memory of their own.

    Raises:
        TemplateMismatchError: two values are stored for one place. Nothing was touched.
        CorruptCheckpointError, ReadError: as :func:`load_checkpoint`.
    """
    names = [name for name, _ in found.shared]
    if not names:
        return _SharedValues(values={}, bytes_read=0, is_verified=True)
    source = await _locate(files, checkpoint, names, executor=executor, readers=readers)
    draft = _LoadPlan(source=source, plan=ReadPlan())
    await run_blocking(executor, draft.add_all, [], names, [], False)
    segments = await run_blocking(executor, draft.plan.segments, readers)
    fetched = await _fetch(files, draft, segments, executor=executor, readers=readers, verify=verify)
    await run_blocking(executor, _settle, draft, checkpoint, False)
    values = {name: cast("torch.Tensor", draft.values[name]).to(target.dtype) for name, target in found.shared}
    try:
        await run_blocking(executor, check_agreement, found.shared, values)
    except TemplateMismatchError as error:
        raise TemplateMismatchError(f"{checkpoint.path}: {error}") from error
    is_verified = _is_verified(fetched, draft, checkpoint, verify)
    return _SharedValues(values=values, bytes_read=fetched.bytes_read, is_verified=is_verified)


def _renamed(checkpoint: Checkpoint, rename: Rename, rank: int) -> Checkpoint:
    return renamed(checkpoint, rename, stored_compounds(checkpoint, rank))


async def _share(files: Files, found: Match, catalog: Catalog, executor: Executor, ranks_on_host: int) -> None:
    """Read what other ranks of this host read, too, from the disk once."""
    if ranks_on_host > 1:
        wanted = await run_blocking(executor, wanted_bytes, found, catalog)
        if is_read_by_several(wanted, catalog.nbytes, ranks_on_host=ranks_on_host):
            await files.share()


def synchronize(devices: Iterable[torch.device]) -> None:
    """Wait for all that was begun on the devices: a caller's stream and a copy of ours know nothing of each other."""
    for device in devices:
        with using(device):
            torch.accelerator.synchronize(device)


def _decode(
    draft: _LoadPlan, checkpoint: Checkpoint, state: object, found: Match, rank: int, trusted: bool
) -> Callable[[], None]:
    """See :attr:`LoadOutcome.put_back`."""
    _settle(draft, checkpoint, trusted)
    return _prepare_apply(checkpoint, state, found, draft, rank, trusted)


def _free(_: Checkpoint) -> None:
    """Its last reference goes here: a dozen small objects a tensor take 2 ms for 5,000, which no caller waits for."""


async def _planned(
    files: Files,
    checkpoint: Checkpoint,
    found: Match,
    executor: Executor,
    readers: int,
    trusted: bool,
    skip_untrusted: bool,
) -> tuple[_LoadPlan, list[ReadRequest]]:
    """What to read for a template, and by which reads."""
    catalog = checkpoint.catalog
    values, objects = _unplaced(found, catalog)
    names = [*(name for name, _ in found.tensors), *values, *objects]
    await files.measure({item.file for item, _, _ in found.whole}, catalog.files)
    source = await _locate(files, checkpoint, names, executor=executor, readers=readers)
    draft = _LoadPlan(
        source=source,
        plan=ReadPlan(),
        live=found.live,
        live_at=found.live_at,
        layouts=found.layouts,
        skip_untrusted=skip_untrusted,
    )

    def plan() -> list[ReadRequest]:
        draft.plan.add_whole(found.whole)
        draft.add_all(found.tensors, values, objects, trusted)
        return draft.plan.segments(readers)

    return draft, await run_blocking(executor, plan)


def _unplaced(found: Match, catalog: Catalog) -> tuple[list[str], list[str]]:
    """Names of the tensors that are set or given to ``load_state_dict``, and of the objects."""
    below = [
        name
        for names in (*(names for _, _, names in found.stateful), *(place.names for place in found.open.values()))
        for name in names
    ]
    values = [*(name for name, *_ in found.arrays), *(name for name in below if name in catalog.shards)]
    return values, [*found.objects, *(name for name in below if name in catalog.objects)]


async def read_state(
    storage: Storage,
    path: Path,
    *,
    step: int | None,
    executor: Executor,
    only: Collection[str] | None,
    rank: int,
    world_size: int,
    readers: int,
    past_page_cache: bool = False,
    verify: bool,
    trusted: bool,
    skip_untrusted: bool = False,
) -> ReadOutcome:
    """The nested state, or the part of it that ``only`` names, in fresh host memory. Tied names share a tensor.

    Raises:
        MissingNameError: one of ``only`` selects nothing, or a PerRank value of a rank that the checkpoint lacks.
        CorruptCheckpointError, UnsafeObjectError, ReadError: as :func:`load_checkpoint`.
    """
    checkpoint = await open_checkpoint(storage, path, executor=executor, step=step)
    names = await run_blocking(executor, lambda: wanted_names(checkpoint, rank=rank, only=only))
    catalog = checkpoint.catalog
    absent = [name for name in names if name not in catalog.shards and name not in catalog.objects]
    if absent:
        raise MissingNameError(
            f"{checkpoint.path}: rank {rank} of {world_size} has no {absent[:5]} among the {len(checkpoint.ranks)} "
            "ranks that saved; leave it out with only=[...]"
        )
    objects = [name for name in names if name in catalog.objects]
    fresh = [name for name in names if name in catalog.shards]
    page_cache: PageCache = "pass" if past_page_cache else "take"
    async with Files(storage, checkpoint.path, readers=readers, page_cache=page_cache) as files:
        source = await _locate(files, checkpoint, names, executor=executor, readers=readers)
        draft = _LoadPlan(source=source, plan=ReadPlan(), skip_untrusted=skip_untrusted)
        await run_blocking(executor, draft.add_all, [], fresh, objects, trusted)
        segments = await run_blocking(executor, draft.plan.segments, readers)
        fetched = await _fetch(files, draft, segments, executor=executor, readers=readers, verify=verify)
        await run_blocking(executor, _settle, draft, checkpoint, trusted)
    values = draft.values | {name: UntrustedObject(name, reason) for name, reason in draft.untrusted.items()}
    plain: list[str] = []
    if checkpoint.has_skeleton:
        state = tree.build(
            skeleton_of(checkpoint, rank),
            values,
            rank=rank,
            only=only,
            trusted=trusted,
            plain=plain,
            untrusted=draft.skipped,
        )
    else:
        state = tree.unflatten_dcp(dcp_paths_of(checkpoint), values)
    return ReadOutcome(
        state=state,
        step=checkpoint.step,
        untrusted=tuple(draft.untrusted),
        plain=tuple(plain),
        bytes_read=fetched.bytes_read,
        verified=_is_verified(fetched, draft, checkpoint, verify),
    )


# -- where everything is ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """Names with what holds them, every place inside the real files."""

    items: Mapping[str, tuple[Item, ...]]
    """Tensors by name."""
    objects: Mapping[str, StoredObject]
    """Objects by name."""
    transformed: Mapping[str, Shards]
    """Tensors that only DCP's own reader can read (stream extensions)."""


async def _locate(
    files: Files, checkpoint: Checkpoint, names: Iterable[str], *, executor: Executor, readers: int
) -> _Source:
    catalog = checkpoint.catalog
    shards = {name: catalog.shards[name] for name in names if name in catalog.shards}
    stored = {name: catalog.objects[name] for name in names if name in catalog.objects}
    used = {shard.file for found in shards.values() for shard in found}
    await files.measure(used.union(found.file for found in stored.values()), catalog.files)
    for found in stored.values():
        check_inside(found.name, found.file, found.offset, found.nbytes, files.sizes)
    objects = {name: found for name, found in stored.items() if not found.is_transformed}
    if checkpoint.root is not None:
        return _Source(items=shards, objects=objects, transformed={})  # type: ignore[arg-type]  # no Slot in ours
    transformed = {name: found for name, found in shards.items() if any(_is_transformed(shard) for shard in found)}
    slots = [shard for name in shards.keys() - transformed for shard in shards[name] if isinstance(shard, Slot)]
    parsed = await parse_slots(files, slots, executor=executor, readers=readers)
    items = {
        name: tuple(parsed[id(shard)] for shard in found) for name, found in shards.items() if name not in transformed
    }
    return _Source(items=items, objects=objects, transformed=transformed)


def _is_transformed(shard: Item | Slot) -> bool:
    return isinstance(shard, Slot) and shard.is_transformed


# -- what goes where --------------------------------------------------------------------------------


@dataclass(slots=True, repr=False, kw_only=True)
class _LoadPlan:
    """A load being put together; afterwards, the values that it read."""

    source: _Source
    """Where everything is."""
    plan: ReadPlan
    """The reads."""
    values: dict[str, object] = field(default_factory=dict)
    """Tensors outside the template's own leaves, and objects once decoded, by name."""
    undecoded: dict[str, bytes] = field(default_factory=dict)
    """Bytes of objects as read."""
    by_dcp: dict[str, Any] = field(default_factory=dict)
    """Name -> target of what DCP's own reader must read; None for an object."""
    live: Mapping[str, Target] = field(default_factory=dict)
    """Names below Stateful values that are read into a tensor that is there."""
    live_at: Mapping[str, int] = field(default_factory=dict)
    """Addresses of those of ``live`` whose bytes are those of one item."""
    layouts: Mapping[str, Target] = field(default_factory=dict)
    """Names below Stateful values that are read into a fresh tensor like this one."""
    shared: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """What was read before for targets that share memory, by name."""
    skip_untrusted: bool = False
    """Leave objects that need trust unread."""
    untrusted: dict[str, str] = field(default_factory=dict)
    """Names of such objects, and why they need it."""
    devices: set[torch.device] = field(default_factory=set)
    """Devices of targets that are no host memory."""

    def add_all(
        self, tensors: Iterable[tuple[str, Target]], values: Iterable[str], objects: Iterable[str], trusted: bool
    ) -> None:
        """Plan ``tensors`` into their memory, ``values`` into that of ``live`` or new memory, and ``objects``."""
        for name, tensor in tensors:
            self._add_tensor(name, tensor)
        self._add_values(values)
        for name in objects:
            if name in self.source.objects:
                self.plan.add_object(self.source.objects[name], functools.partial(self.undecoded.__setitem__, name))
            elif trusted:
                self.by_dcp[name] = None
            else:
                self.untrusted[name] = (
                    f"{name}: written through an extension of DCP, whose reader runs code; set trusted_objects=True if "
                    "you trust whoever wrote the checkpoint"
                )
        self.check_trusted()
        synchronize(self.devices)

    @property
    def skipped(self) -> dict[str, str] | None:
        """``untrusted`` where such objects are left out, else None."""
        return self.untrusted if self.skip_untrusted else None

    def check_trusted(self) -> None:
        """Raise UnsafeObjectError, which names the objects that need trust, unless they are left out."""
        if not self.untrusted or self.skip_untrusted:
            return
        (_, why), *more = self.untrusted.items()
        names = [repr(name) for name, _ in more]
        if names:
            further = f" and {len(names) - _SHOWN + 1} others" if len(names) >= _SHOWN else ""
            why += f" (and so it is with {len(names)} more: {', '.join(names[: _SHOWN - 1])}{further})"
        raise UnsafeObjectError(why)

    def _add_values(self, names: Iterable[str]) -> None:
        made: dict[tuple[int, ...], Target] = {}
        whole: list[WholeTarget] = []
        for name in names:
            shards: Shards = self.source.items.get(name) or self.source.transformed[name]
            target, like = self.live.get(name), shard_like(self.layouts.get(name), shards)
            if isinstance(like, OwnedShard):  # only its owner can be given to load_state_dict
                target = like
            key = (id(target), id(like), *map(id, shards))  # tied names are read once
            if key not in made:
                made[key] = _new_tensor(name, shards, like) if target is None else target
                address = self.live_at.get(name, 0)
                if address and isinstance(target, torch.Tensor):
                    whole.append((shards[0], target, address))  # type: ignore[arg-type]
                else:
                    self._add_tensor(name, made[key])
            value = made[key]
            self.values[name] = value.owner if isinstance(value, OwnedShard) else value
        self.plan.add_whole(whole)

    def _add_tensor(self, name: str, target: Target) -> None:
        items = self.source.items.get(name)
        if items is None:
            if isinstance(target, Shard):
                raise TemplateMismatchError(
                    f"{name!r}: written through an extension of DCP, whose reader fills no Shard: give the whole tensor"
                )
            self.by_dcp[name] = target
            return
        tensor = target.tensor if isinstance(target, Shard) else target
        offsets: Sequence[int] = target.offsets if isinstance(target, Shard) else (0,) * tensor.dim()
        if type(tensor) is DTensor:
            shard = create_chunk_list(tensor)[0]
            offsets = shard.offsets
            with torch.no_grad():
                tensor = tensor.to_local()
            if tensor.shape != shard.sizes:
                raise TemplateMismatchError(
                    f"{name!r} holds a shard of shape {tuple(tensor.shape)} in the template where torch cuts one of "
                    f"{tuple(shard.sizes)}: lay it out with distribute_tensor() or fully_shard()"
                )
        if not tensor.is_cpu:
            self.devices.add(tensor.device)
        self.plan.add_tensor(items, offsets, tensor)


def _new_tensor(name: str, shards: Shards, like: Target | None) -> Target:
    """Memory of the stored dtype with the device, mesh and placements, or the box, of ``like``.

    Without ``like``, host memory for the whole tensor, laid out as it is stored where that is one item.

    Raises:
        CorruptCheckpointError: more than the shards can hold; nothing was allocated.
    """
    if isinstance(like, Shard):
        return replace(like, tensor=torch.empty_like(like.tensor, dtype=shards[0].dtype, requires_grad=False))
    if like is not None:
        return torch.empty_like(like, dtype=shards[0].dtype, requires_grad=False)
    first, shape = shards[0], global_shape(shards)
    stored = sum(shard.raw_bytes if isinstance(shard, Item) else shard.item_bytes * _MAX_EXPANSION for shard in shards)
    if math.prod(shape) * first.dtype.itemsize > stored:
        raise CorruptCheckpointError(f"{name!r}: shape {shape} needs more bytes than the {stored} that are stored")
    if first.shape == shape and first.stride is not None and is_dense(shape, first.stride):
        return torch.empty_strided(shape, first.stride, dtype=first.dtype)
    return torch.empty(shape, dtype=first.dtype)


# -- reading, and what comes after ------------------------------------------------------------------


async def _fetch(
    files: Files, draft: _LoadPlan, segments: Sequence[ReadRequest], *, executor: Executor, readers: int, verify: bool
) -> Fetched:
    devices = draft.plan.devices
    return await fetch(files, segments, executor=executor, readers=readers, verify=verify, devices=devices)


def _settle(draft: _LoadPlan, checkpoint: Checkpoint, trusted: bool) -> None:
    """Decode objects; tell torch and the devices what was written behind their backs."""
    if draft.by_dcp:
        _load_by_dcp(checkpoint, draft)
    synchronize(draft.devices)
    increment_version(draft.plan.filled)
    for name, data in draft.undecoded.items():
        if checkpoint.root is None:
            check_zip(name, data)
        try:
            draft.values[name] = tree.decode_object(data, name=name, trusted=trusted)
        except UnsafeObjectError as error:
            draft.untrusted[name] = str(error)
    draft.check_trusted()


def _load_by_dcp(checkpoint: Checkpoint, draft: _LoadPlan) -> None:
    """Stream extensions: DCP's own reader, on a flat dict and our parsed metadata, so that it unpickles none."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    wanted = dict(_by_stored_name(checkpoint, draft.by_dcp))
    planner.set_up_planner(wanted, checkpoint.metadata, is_coordinator=True)
    reader = FileSystemReader(checkpoint.path)
    reader.set_up_storage_reader(checkpoint.metadata, is_coordinator=True)
    reader.read_data(planner.create_local_plan(), planner).wait()
    draft.values.update({name: wanted[checkpoint.stored_name(name)] for name in draft.by_dcp})


def _is_verified(fetched: Fetched, draft: _LoadPlan, checkpoint: Checkpoint, verify: bool) -> bool:
    checked = fetched.sums_checked + (len(draft.undecoded) if checkpoint.root is None else 0)
    return verify and (checked > 0 or not fetched.bytes_read)


# -- into the template ----------------------------------------------------------------------------------


def _prepare_apply(
    checkpoint: Checkpoint, state: object, found: Match, draft: _LoadPlan, rank: int, trusted: bool
) -> Callable[[], None]:
    """Build all that can be damaged; return what sets the objects and calls each ``load_state_dict``."""
    check_targets(found.compounds)
    values = draft.values
    leaves = {name: values[name] for name in found.objects if name not in draft.untrusted}
    for name, kind, dtype in found.arrays:
        tensor = values[name]
        assert isinstance(tensor, torch.Tensor)
        leaves[name] = tree.from_tensor(tensor.to(dtype), kind)
    refused = {name: UntrustedObject(name, reason) for name, reason in draft.untrusted.items()}
    known = _by_stored_name(checkpoint, values | refused)
    leaves |= build_at(checkpoint, found.open, known, rank=rank, trusted=trusted)
    skeleton = skeleton_of(checkpoint, rank) if found.stateful and checkpoint.has_skeleton else None
    below: list[tuple[str, Any, object]] = []
    for prefix, value, names in found.stateful:
        if not draft.untrusted.keys().isdisjoint(names):  # which keep what the template has
            own = tree.leaves_of(value.state_dict(), prefix, rank=rank)
            values |= {name: own[name] for name in names if name in draft.untrusted and name in own}
        branch = found.branches[prefix]
        if branch is None:
            inner: object = {name.removeprefix(f"{prefix}."): values[name] for name in names}
        elif skeleton is not None:
            stored, parts = _by_stored_name(checkpoint, values), _by_stored_name(checkpoint, found.own)
            inner = tree.build_below(
                skeleton, branch, stored, rank=rank, trusted=trusted, own=parts, untrusted=draft.skipped
            )
        else:
            leaves_below = {checkpoint.stored_name(name): values[name] for name in names if name in values}
            inner = _below(checkpoint, branch, leaves_below, value)
        below.append((prefix, value, _with_versions(inner, value)))

    def put_back() -> None:
        with _target_modified():
            _write_rest(found, draft)
            if leaves:
                tree.put_back(state, leaves, rank=rank, names=found.names)
            for prefix, value, state_dict in below:
                with _told_of(prefix, value, checkpoint):
                    value.load_state_dict(state_dict)
        if found.unexpected and rank == 0:  # the others would say the same
            _log.warning(
                "%s: the template lacks %s; they were not loaded (strict=True refuses them)",
                checkpoint.path,
                listed(found.unexpected),
            )

    return put_back


def _write_rest(found: Match, draft: _LoadPlan) -> None:
    """Write to tensors of the template what no read wrote: shared memory, scales, marks."""
    written = [*(tensor for _, tensor in found.shared), *(target.own.tensor for target in found.compounds)]
    devices = {tensor.device for tensor in written if tensor.device.type != "cpu"}
    synchronize(devices)
    write_shared(found.shared, draft.shared)
    for target in found.compounds:
        settle(target.own, target.stored)
    synchronize(devices)


def _by_stored_name(checkpoint: Checkpoint, values: Mapping[str, T]) -> Mapping[str, T]:
    if not checkpoint.names:
        return values
    return {checkpoint.stored_name(name): value for name, value in values.items()}


@contextmanager
def _told_of(prefix: str, value: object, checkpoint: Checkpoint) -> Iterator[None]:
    """Notes on what ``load_state_dict`` raises, whatever it is, which value refused which checkpoint."""
    try:
        yield
    except Exception as error:
        which = f"step {checkpoint.step} at {checkpoint.path}" if checkpoint.root else f"{checkpoint.path}"
        error.add_note(
            f"aio_ckpt: load_state_dict() of {prefix or 'the template'!r}, a {type_name(value)}, refused what {which} "
            "holds for it; the target was modified: tensors of other names were filled before"
        )
        raise


def _with_versions(state_dict: Any, value: object) -> Any:
    """A module's ``state_dict`` without versions gets those of the module, as stock's ``dcp.load`` fills that."""
    if not isinstance(value, torch.nn.Module) or hasattr(state_dict, "_metadata"):
        return state_dict
    versions = getattr(value.state_dict(), "_metadata", None)
    if versions is None or not isinstance(state_dict, Mapping):
        return state_dict
    made: Any = OrderedDict(state_dict)
    made._metadata = versions
    return made


@contextmanager
def _target_modified() -> Iterator[None]:
    """Marks what is raised inside: the template may hold a mix of old and new values."""
    try:
        yield
    except Exception as error:  # also what load_state_dict raises
        tell_modified(error)
        raise


def _below(checkpoint: Checkpoint, prefix: str, leaves: dict[str, object], value: object) -> object:
    """The ``state_dict()`` called ``prefix`` as stock DCP flattened it."""
    nested = nested_at(checkpoint, prefix, leaves)
    if isinstance(value, torch.optim.Optimizer):  # DCP drops {}
        nested["state"] = with_numbers(nested.get("state", {}))
    return nested
