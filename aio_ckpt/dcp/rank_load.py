"""Load by a plan of DCP: find the bytes of each read item, read and verify them, and give them to the planner."""

from __future__ import annotations

import functools
import io
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.autograd.graph import increment_version
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from aio_ckpt._torch import StorageInfo, narrow_tensor_by_index
from aio_ckpt.checkpoint.boxes import Box, check_boxes
from aio_ckpt.checkpoint.catalog import Item, StoredObject, UnparsedItem, items_of
from aio_ckpt.checkpoint.data_files import Files
from aio_ckpt.checkpoint.fetch import fetch, synchronize
from aio_ckpt.checkpoint.foreign_items import (
    Ends,
    check_inside,
    check_object_zip,
    descriptors_of,
    parse_item,
    place_of,
    read_ends,
    stored_at,
    unparsed_item_of,
)
from aio_ckpt.checkpoint.open import Checkpoint
from aio_ckpt.checkpoint.read_plan import ReadPlan
from aio_ckpt.dcp.runtime import Runtime, peers_on_host
from aio_ckpt.errors import (
    CorruptCheckpointError,
    TemplateMismatchError,
    UnsupportedLeafError,
)
from aio_ckpt.format.rank_manifest import RankManifest
from aio_ckpt.format.root_manifest import METADATA_FILE, FileEntry
from aio_ckpt.leaves.tensor_memory import span_of
from aio_ckpt.restore.page_cache import is_read_by_several
from aio_ckpt.runtime.futures import cancellable_result_blocking, run_cancellable
from aio_ckpt.runtime.portal import run_blocking

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class _Located:
    """Places of the items of a plan. Each was checked to lie inside its file."""

    items: dict[MetadataIndex, Item] = field(default_factory=dict)
    """Tensors whose raw bytes are known."""
    streams: dict[MetadataIndex, StoredObject] = field(default_factory=dict)
    """Objects, and tensors that only ``torch.load`` or a stream extension can read."""


@dataclass(slots=True, kw_only=True)
class Load:
    """Load of one rank."""

    runtime: Runtime
    checkpoint: Checkpoint
    metadata: Metadata
    """Metadata that the plan was made from."""

    def run(self, plan: LoadPlan, planner: LoadPlanner, transforms: Any) -> None:
        """Read all items of the plan. The planner is called on this thread only. See :meth:`Reader.read_data`."""
        located = self._wait(lambda: self._locate(plan))
        targets = [
            (item, _target(item, planner))
            for item in plan.items
            if item.type is LoadItemType.TENSOR and item.storage_index in located.items
        ]
        rounds = _rounds(targets)
        plans = [ReadPlan() for _ in range(max(rounds, default=0) + 1)]
        for (item, target), number in zip(targets, rounds, strict=True):
            plans[number].add_part(located.items[item.storage_index], item.storage_offsets, target)
        streams: dict[MetadataIndex, bytes] = {}
        for index, stored in located.streams.items():
            plans[0].add_object(stored, lambda data, index=index: streams.__setitem__(index, data))  # type: ignore[misc]
        devices = {target.device for _, target in targets if not target.is_cpu}
        synchronize(devices)
        for reads in plans:
            self._wait(functools.partial(self._fetch, reads))
        synchronize(devices)
        increment_version([tensor for reads in plans for tensor in reads.filled])
        for item, target in targets:
            planner.commit_tensor(item, target)
        for item in plan.items:
            if item.storage_index in streams:
                self._give(item, streams[item.storage_index], planner, transforms)

    def _wait(self, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of ``work``. After Ctrl-C, this raises once no thread fills a target any more."""
        given_up: Future[None] = Future()
        return cancellable_result_blocking(self.runtime.portal.submit(run_cancellable, given_up, work), given_up)

    def _files(self) -> Files:
        runtime = self.runtime
        return Files(runtime.storage, self.checkpoint.path, page_cache="take")

    async def _fetch(self, reads: ReadPlan) -> None:
        config, executor = self.runtime.config, self.runtime.portal.executor
        async with self._files() as files:
            requests = await run_blocking(executor, reads.requests, config.workers)
            if (ranks_on_host := peers_on_host()) > 1:
                stored = sum(place.length for place in self.metadata.storage_data.values())
                if is_read_by_several(reads.total_bytes, stored, ranks_on_host=ranks_on_host):
                    await files.share()
            await files.measure({request.file for request in requests}, {})
            await fetch(
                files,
                requests,
                executor=executor,
                readers=config.workers,
                verify=config.verify == "load",
                devices=reads.devices,
            )

    # -- places of the items ----------------------------------------------------------------------

    async def _locate(self, plan: LoadPlan) -> _Located:
        places = self.metadata.storage_data
        wanted = {item.storage_index: place_of(item.storage_index, places) for item in plan.items}
        check_boxes(_boxes(self.metadata, {index.fqn for index in wanted}))
        used = {place.relative_path for place in wanted.values()}
        manifests = {ours.file.name: ours for ours in self.checkpoint.ranks if ours.file and ours.file.name in used}
        located = _Located()
        config, executor = self.runtime.config, self.runtime.portal.executor
        async with self._files() as files:
            await files.measure(used, {name: ours.file.nbytes for name, ours in manifests.items() if ours.file})
            for index, place in wanted.items():
                check_inside(index.fqn, place.relative_path, place.offset, place.length, files.sizes)
            if self.checkpoint.is_plain_dcp:
                unparsed_items = self._unparsed_items(wanted, located)
                ends = await read_ends(files, list(unparsed_items.values()), executor=executor, readers=config.workers)
                await run_blocking(executor, _parse, unparsed_items, ends, located)
            else:
                await run_blocking(executor, _locate_ours, wanted, manifests, located)
        return located

    def _unparsed_items(
        self, wanted: Mapping[MetadataIndex, StorageInfo], into: _Located
    ) -> dict[MetadataIndex, UnparsedItem]:
        """Return the tensors of plain DCP whose envelope must be parsed; add the other items to ``into.streams``."""
        unparsed_items: dict[MetadataIndex, UnparsedItem] = {}
        for index, place in wanted.items():
            entry = self.metadata.state_dict_metadata.get(index.fqn)
            if isinstance(entry, TensorStorageMetadata) and not descriptors_of(place):
                offsets = tuple(index.offset or (0,) * len(entry.size))
                chunks = [chunk for chunk in entry.chunks if tuple(chunk.offsets) == offsets]
                if not chunks:
                    raise CorruptCheckpointError(f"{METADATA_FILE}: {index.fqn!r} has no chunk at {offsets}")
                unparsed_items[index] = unparsed_item_of(index.fqn, entry, chunks[0], place)
            else:
                into.streams[index] = stored_at(index.fqn, place)
        return unparsed_items

    # -- values for the planner -------------------------------------------------------------------

    def _give(self, item: ReadItem, data: bytes, planner: LoadPlanner, transforms: Any) -> None:
        """Give an object, or a tensor that is stored as bytes, to the planner, as stock DCP does."""
        descriptors = descriptors_of(place_of(item.storage_index, self.metadata.storage_data))
        if self.checkpoint.is_plain_dcp and not descriptors and item.type is LoadItemType.BYTE_IO:
            check_object_zip(item.storage_index.fqn, data)
        stream: Any = io.BytesIO(data)
        if descriptors:
            stream = io.BytesIO(transforms.transform_load_stream(item, descriptors, stream).read(-1))
        if item.type is LoadItemType.BYTE_IO:
            planner.load_bytes(item, stream)
            return
        stored = torch.load(stream, map_location="cpu", weights_only=True)
        target = _target(item, planner)
        target.copy_(narrow_tensor_by_index(stored, item.storage_offsets, item.lengths))
        planner.commit_tensor(item, target)


def _target(item: ReadItem, planner: LoadPlanner) -> torch.Tensor:
    target: torch.Tensor = planner.resolve_tensor(item).detach()
    if target.layout is torch.sparse_coo:  # the planner made this target as a copy, so filling it has no effect
        raise TemplateMismatchError(f"{item.dest_index.fqn!r}: a sparse COO tensor cannot be filled; give a dense one")
    if tuple(target.shape) != tuple(item.lengths):
        raise TemplateMismatchError(
            f"{item.dest_index.fqn!r}: a target of shape {tuple(target.shape)} where {tuple(item.lengths)} is read"
        )
    return target


def _boxes(metadata: Metadata, names: Iterable[str]) -> Iterator[tuple[str, list[Box]]]:
    """Yield (name, boxes of its shards) for each of these tensors that has several."""
    for name in names:
        entry = metadata.state_dict_metadata.get(name)
        if isinstance(entry, TensorStorageMetadata) and len(entry.chunks) > 1:
            yield name, [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]


def _rounds(targets: Sequence[tuple[ReadItem, torch.Tensor]]) -> list[int]:
    """Return the number of the round in which each target is read. Targets of several names in one memory wait.

    Reads of one round run at once. If tied tensors hold two values, the last of the plan counts, as with stock DCP.
    The targets of one name never overlap, as its shards do not.
    """
    spans: dict[tuple[str, str], tuple[int, int]] = {}
    for item, target in targets:
        key, (start, nbytes) = (str(target.device), item.dest_index.fqn), span_of(target)
        if nbytes:
            low, high = spans.get(key, (start, start))
            spans[key] = min(low, start), max(high, start + nbytes)
    groups: list[list[tuple[str, str]]] = []
    device, end = "", 0
    for key in sorted(spans, key=lambda key: (key[0], spans[key])):
        start, stop = spans[key]
        if key[0] != device or start >= end:
            groups.append([])
            end = 0
        groups[-1].append(key)
        device, end = key[0], max(end, stop)
    order = {key: number for number, key in enumerate(spans)}
    rounds = {key: number for group in groups for number, key in enumerate(sorted(group, key=order.__getitem__))}
    return [rounds.get((str(target.device), item.dest_index.fqn), 0) for item, target in targets]


def _locate_ours(
    wanted: Mapping[MetadataIndex, StorageInfo], manifests: Mapping[str, RankManifest], into: _Located
) -> None:
    """Add the places of all ``wanted`` items to ``into``, by the manifests, because these hold the checksums.

    Raises:
        CorruptCheckpointError: ``.metadata`` has another place for an item.
    """
    items = {name: _items_by_place(ours, ours.file) for name, ours in manifests.items() if ours.file is not None}
    objects = {(name, entry.offset): entry for name, ours in manifests.items() for entry in ours.objects}
    for index, place in wanted.items():
        file = place.relative_path
        item = items.get(file, {}).get((place.offset, place.length))
        stored = objects.get((file, place.offset))
        if item is not None:
            into.items[index] = item
        elif stored is not None and stored.nbytes == place.length:
            into.streams[index] = stored_at(index.fqn, place, stored.crc32)
        else:
            raise CorruptCheckpointError(f"{file}: the manifests tell another place for {index.fqn!r} than .metadata")


def _items_by_place(manifest: RankManifest, file: FileEntry) -> dict[tuple[int, int], Item]:
    """Return the items of a rank by (offset, length)."""
    columns = manifest.columns
    places = zip(columns.item_offsets.tolist(), columns.item_bytes.tolist(), strict=True)
    return dict(zip(places, items_of(manifest, file), strict=True))


def _parse(unparsed_items: Mapping[MetadataIndex, UnparsedItem], ends: Ends, into: _Located) -> None:
    for index, unparsed in unparsed_items.items():
        try:
            into.items[index] = parse_item(unparsed, *ends[id(unparsed)])
        except UnsupportedLeafError:  # only torch.load can read it, such as a quantized tensor
            into.streams[index] = StoredObject.of_item(unparsed)
