"""Load by a plan of DCP: find the bytes of each read item, read and verify them, and give them to the planner."""

from __future__ import annotations

import functools
import io
import itertools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.autograd.graph import increment_version
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from aio_ckpt._torch import StorageInfo, narrow_tensor_by_index
from aio_ckpt.checkpoint.boxes import Box, check_boxes
from aio_ckpt.checkpoint.catalog import Item, StoredObject, UnparsedItem, items_of
from aio_ckpt.checkpoint.data_files import Files
from aio_ckpt.checkpoint.dcp_places import descriptors_of, storage_info_of, stored_at
from aio_ckpt.checkpoint.fetch import fetch, synchronize
from aio_ckpt.checkpoint.foreign_items import check_object_zip, parse_or_object, unparsed_item_of
from aio_ckpt.checkpoint.locate import locate
from aio_ckpt.checkpoint.open import Checkpoint
from aio_ckpt.checkpoint.read_plan import ReadPlan
from aio_ckpt.dcp.call_resources import CallResources, default_group_ranks_on_host
from aio_ckpt.errors import CorruptCheckpointError, TemplateMismatchError
from aio_ckpt.format.checkpoint_files import METADATA_FILE
from aio_ckpt.format.rank_manifest import FileTable, ObjectEntry
from aio_ckpt.leaves.tensor_memory import span_of
from aio_ckpt.restore.page_cache import share_page_cache
from aio_ckpt.runtime.ctrl_c import new_future
from aio_ckpt.runtime.futures import cancellable_result_blocking, run_cancellable
from aio_ckpt.runtime.portal import run_blocking

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class RankLoad:
    """Load of one rank."""

    resources: CallResources
    checkpoint: Checkpoint
    metadata: Metadata
    """Metadata that the plan was made from."""

    def run(self, plan: LoadPlan, planner: LoadPlanner, transforms: Any) -> None:
        """Read all items of the plan. The planner is called on this thread only. See :meth:`Reader.read_data`."""
        located = self._wait(lambda: self._locate(plan))
        items = {index: stored for index, stored in located.items() if isinstance(stored, Item)}
        targets = [
            (item, _target(item, planner))
            for item in plan.items
            if item.type is LoadItemType.TENSOR and item.storage_index in items
        ]
        rounds = _rounds(targets)
        plans = [ReadPlan() for _ in range(max(rounds, default=0) + 1)]
        for (item, target), number in zip(targets, rounds, strict=True):
            plans[number].add_part(items[item.storage_index], item.storage_offsets, target)
        # An object, or a tensor that only torch.load or an extension reads.
        objects = {index: stored for index, stored in located.items() if isinstance(stored, StoredObject)}
        streams = plans[0].add_objects(objects.values())
        devices = {target.device for _, target in targets}
        synchronize(devices)
        for reads in plans:
            self._wait(functools.partial(self._fetch, reads))
        synchronize(devices)
        increment_version([tensor for reads in plans for tensor in reads.filled])
        for item, target in targets:
            planner.commit_tensor(item, target)
        for item in plan.items:
            if item.storage_index in objects:
                self._give(item, streams.bytes_of(objects[item.storage_index]), planner, transforms)

    def _wait(self, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of ``work``. After Ctrl-C, this raises once no thread fills a target any more."""
        given_up: Future[None] = new_future()
        return cancellable_result_blocking(self.resources.portal.submit(run_cancellable, given_up, work), given_up)

    def _files(self) -> Files:
        return Files(self.resources.storage, self.checkpoint.path, page_cache="take")

    async def _fetch(self, reads: ReadPlan) -> None:
        config, executor = self.resources.config, self.resources.portal.executor
        async with self._files() as files:
            requests = await run_blocking(executor, reads.requests, config.workers)
            stored = sum(place.length for place in self.metadata.storage_data.values())
            await share_page_cache(files, reads, stored, ranks_on_host=default_group_ranks_on_host())
            await files.measure(reads.rows, {})
            await fetch(
                files,
                requests,
                executor=executor,
                readers=config.workers,
                verify=config.verify == "load",
                devices=reads.devices,
            )

    # -- places of the items ----------------------------------------------------------------------

    async def _locate(self, plan: LoadPlan) -> dict[MetadataIndex, Item | StoredObject]:
        """Return where each item of the plan is stored. Each was checked to lie inside its file."""
        places = self.metadata.storage_data
        wanted = {item.storage_index: storage_info_of(item.storage_index, places) for item in plan.items}
        check_boxes(_boxes(self.metadata, {index.fqn for index in wanted}))
        used = {place.relative_path for place in wanted.values()}
        tables = [
            table for ours in self.checkpoint.ranks.values() for table in ours.data_files if table.file.name in used
        ]
        lengths = {table.file.name: table.file.nbytes for table in tables}
        config, executor = self.resources.config, self.resources.portal.executor
        stored: Mapping[MetadataIndex, Item | UnparsedItem | StoredObject]
        if self.checkpoint.is_plain_dcp:
            stored = {index: self._stored(index, place) for index, place in wanted.items()}
        else:
            stored = await run_blocking(executor, _stored_by_manifests, wanted, tables)
        async with self._files() as files:
            located = await locate(
                files, [*stored.values()], lengths, parse_or_object, executor=executor, readers=config.workers
            )
        return dict(zip(stored, located, strict=True))

    def _stored(self, index: MetadataIndex, place: StorageInfo) -> UnparsedItem | StoredObject:
        """Return an item of plain DCP: a tensor whose envelope must be parsed, or an object."""
        entry = self.metadata.state_dict_metadata.get(index.fqn)
        if not isinstance(entry, TensorStorageMetadata) or descriptors_of(place):
            return stored_at(index.fqn, place)
        offsets = tuple(index.offset or (0,) * len(entry.size))
        chunk = next((chunk for chunk in entry.chunks if tuple(chunk.offsets) == offsets), None)
        if chunk is None:
            raise CorruptCheckpointError(f"{METADATA_FILE}: {index.fqn!r} has no chunk at {offsets}")
        return unparsed_item_of(index.fqn, entry, chunk, place)

    # -- values for the planner -------------------------------------------------------------------

    def _give(self, item: ReadItem, data: bytes, planner: LoadPlanner, transforms: Any) -> None:
        """Give an object, or a tensor that is stored as bytes, to the planner, as stock DCP does."""
        descriptors = descriptors_of(storage_info_of(item.storage_index, self.metadata.storage_data))
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


def _stored_by_manifests(
    wanted: Mapping[MetadataIndex, StorageInfo], tables: Iterable[FileTable]
) -> dict[MetadataIndex, Item | StoredObject]:
    """Return the ``wanted`` items by the tables of the manifests, because these hold the checksums.

    Raises:
        CorruptCheckpointError: ``.metadata`` has another place for an item.
    """
    held: dict[tuple[str, int, int], Item | ObjectEntry] = {}
    for table in tables:
        columns, files = table.columns, itertools.repeat(table.file.name)
        places = zip(files, columns.item_offsets.tolist(), columns.item_bytes.tolist(), strict=False)
        held.update(zip(places, items_of(table), strict=True))
        held.update(((table.file.name, entry.offset, entry.nbytes), entry) for entry in table.objects)
    found: dict[MetadataIndex, Item | StoredObject] = {}
    for index, place in wanted.items():
        stored = held.get((place.relative_path, place.offset, place.length))
        if stored is None:
            raise CorruptCheckpointError(
                f"{place.relative_path}: the manifests tell another place for {index.fqn!r} than .metadata"
            )
        found[index] = stored if isinstance(stored, Item) else stored_at(index.fqn, place, stored.crc32)
    return found
