"""What a checkpoint stores: every name with the items that hold it. Pure: manifests or ``.metadata`` in, places out."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from aio_ckpt._torch import StorageInfo
from aio_ckpt.errors import CorruptCheckpointError
from aio_ckpt.format.dcp_metadata_read import DTYPES
from aio_ckpt.format.manifests import METADATA_FILE, FileEntry, IntArray, RankManifest, TensorColumns, block_sums

__all__ = [
    "Catalog",
    "Chunks",
    "Item",
    "Look",
    "ObjectArray",
    "Slot",
    "SmallItems",
    "SmallTargets",
    "StoredObject",
    "catalog_of_manifests",
    "catalog_of_metadata",
    "global_shape",
]

ObjectArray: TypeAlias = npt.NDArray[np.object_]
_Stored: TypeAlias = tuple[RankManifest, FileEntry]
"""The manifest of a rank that stored anything, and its data file."""


class Item(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One stored tensor item whose raw bytes are located. Compared by identity: tied names share one.

    A msgspec struct because a dataclass costs 2 us to make and a checkpoint may hold 100,000 of them.
    """

    name: str
    """First name stored in it, for messages."""
    file: str
    """Data file, relative to the checkpoint."""
    dtype: torch.dtype
    """Element type."""
    shape: tuple[int, ...]
    """Shape of the shard."""
    stride: tuple[int, ...]
    """Of the stored elements, in elements."""
    offsets: tuple[int, ...]
    """Where the shard begins in the global tensor."""
    storage_offset: int
    """Elements before the first one of the tensor; 0 in items of ours."""
    raw_offset: int
    """Where the raw bytes begin in the file."""
    raw_bytes: int
    """Length of the raw bytes."""
    block_bytes: int
    """Raw bytes that one sum covers."""
    sums: tuple[int, ...]
    """CRC32 of each block; empty if only the whole is summed."""
    record_crc32: int | None
    """CRC32 of all raw bytes, where no block has one (plain DCP)."""
    is_conj: bool = False
    """Whether the elements are the conjugates of what is stored (plain DCP)."""
    is_neg: bool = False
    """Whether they are the negatives (plain DCP)."""


class Slot(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A tensor item of plain DCP before its envelope was parsed: where its raw bytes stand is not known."""

    name: str
    """Its name."""
    file: str
    """Data file, relative to the checkpoint."""
    item_offset: int
    """Where the item begins."""
    item_bytes: int
    """Its length."""
    dtype: torch.dtype
    """As the metadata says."""
    shape: tuple[int, ...]
    """Shape of the shard, as the metadata says."""
    offsets: tuple[int, ...]
    """Where the shard begins in the global tensor."""
    is_transformed: bool
    """Written through a stream extension of DCP, so that only DCP can read it."""
    stride: tuple[int, ...] | None = None
    """Stride of the shard as the metadata says (since torch 2.15), in elements."""


Chunks: TypeAlias = "tuple[Item | Slot, ...]"
"""All shards of one name."""


class StoredObject(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One serialized object."""

    name: str
    """First name stored in it."""
    file: str
    """Data file, relative to the checkpoint."""
    offset: int
    """Where it begins."""
    nbytes: int
    """Its length."""
    crc32: int | None
    """CRC32 of its bytes; None in plain DCP, where its zip records hold theirs."""
    is_transformed: bool
    """As in :class:`Slot`."""

    @classmethod
    def of_slot(cls, slot: Slot) -> StoredObject:
        """An item that is no plain tensor, as what it is for torch.load: one object."""
        return cls(slot.name, slot.file, slot.item_offset, slot.item_bytes, None, is_transformed=False)


class Look(NamedTuple):
    """What an item looks like."""

    dtype: torch.dtype
    """Element type."""
    shape: tuple[int, ...]
    """Shape of the shard."""
    stride: tuple[int, ...]
    """Of the stored elements, in elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallItems:
    """Items of ours in columns, and the names that are one block of one of them: what most tensors are.

    Such a name is read without an :class:`Item`, which costs 1 us with all that it holds.
    """

    rows: Mapping[str, int]
    """Name -> row of the item that is all of it: one block, stored once, beginning where the tensor begins."""
    names: ObjectArray
    """First name stored in each item, for messages. Items are rank after rank."""
    look_numbers: Sequence[int]
    """Position in ``looks``."""
    looks: Sequence[Look]
    """What items look like."""
    files: Sequence[str]
    """Data files, by number."""
    file_numbers: IntArray
    """Of the data file."""
    starts: IntArray
    """Where the raw bytes begin in the file."""
    nbytes: IntArray
    """Length of the raw bytes."""
    crcs: IntArray
    """CRC32 of the first block."""

    def files_of(self, targets: SmallTargets) -> list[str]:
        """Data files that hold any of these items."""
        return [self.files[number] for number in np.unique(self.file_numbers[targets.rows]).tolist()]


@dataclass(frozen=True, slots=True, repr=False)
class SmallTargets:
    """Where small items go, in columns."""

    rows: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    """Rows in :class:`SmallItems`."""
    tensors: Sequence[torch.Tensor] = ()
    """Host tensors, each laid out like its item."""
    addresses: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    """Of their first elements."""


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """Every name of a checkpoint. Offsets are checked against ``files`` only where a manifest gives lengths."""

    tensor_names: Set[str]
    """The names of ``chunks``."""
    make_chunks: Callable[[], Mapping[str, Chunks]]
    """Makes ``chunks``."""
    small: SmallItems
    """Tensors that can be read without their chunks; none in plain DCP."""
    objects: Mapping[str, StoredObject]
    """Objects by name."""
    files: Mapping[str, int | None]
    """Data files with their length; None if no manifest tells it."""
    nbytes: int
    """Of all that is stored, about."""

    @functools.cached_property
    def chunks(self) -> Mapping[str, Chunks]:
        """Tensors by name; made when first asked for, which many loads never do."""
        return self.make_chunks()

    def names(self) -> set[str]:
        """Every name stored."""
        return {*self.tensor_names, *self.objects}


def global_shape(chunks: Chunks) -> tuple[int, ...]:
    """Shape of the smallest global tensor that holds all chunks; not checked to be covered."""
    first = chunks[0]
    if len(chunks) == 1 and not any(first.offsets):
        return first.shape
    stops = ([start + size for start, size in zip(chunk.offsets, chunk.shape, strict=True)] for chunk in chunks)
    return tuple(map(max, zip(*stops, strict=True)))


# -- ours -------------------------------------------------------------------------------------------


def catalog_of_manifests(manifests: Iterable[RankManifest]) -> Catalog:
    """Of a checkpoint of ours.

    Raises:
        CorruptCheckpointError: the manifests contradict each other.
    """
    stored = [(manifest, manifest.file) for manifest in manifests if manifest.file is not None]
    objects: dict[str, StoredObject] = {}
    for manifest, file in stored:
        for entry in manifest.objects:
            found = StoredObject(entry.fqns[0], file.name, entry.offset, entry.nbytes, entry.crc32, False)
            objects.update((name, found) for name in entry.fqns if name not in objects)
    names = [name for manifest, _ in stored for name in manifest.columns.names]
    tied = list(_tied(manifest.columns for manifest, _ in stored))
    rows = dict(zip(names, range(len(names)), strict=True))
    rows.update(tied)
    is_once = len(rows) == len(names) + len(tied)
    catalog = Catalog(
        tensor_names=rows.keys(),
        make_chunks=functools.partial(_chunks_of_manifests, stored),
        small=_small_items(stored, rows if is_once else _stored_once([*names, *(name for name, _ in tied)], rows)),
        objects=objects,
        files={file.name: file.nbytes for _, file in stored},
        nbytes=sum(file.nbytes for _, file in stored),
    )
    _check_kinds(catalog)
    if not is_once:
        _check_shards(catalog.chunks)
    return catalog


def _tied(columns: Iterable[TensorColumns]) -> Iterator[tuple[str, int]]:
    """Further names of items that tied tensors share, with their rows."""
    first = 0
    for part in columns:
        yield from ((name, first + row) for row, names in part.ties.items() for name in names)
        first += len(part.names)


def _stored_once(names: Sequence[str], rows: Mapping[str, int]) -> Mapping[str, int]:
    times = Counter(names)
    return {name: row for name, row in rows.items() if times[name] == 1}


def _small_items(stored: Sequence[_Stored], rows: Mapping[str, int]) -> SmallItems:
    arrays = np.concatenate(
        [_NO_NUMBERS, *(_small_part(manifest, number) for number, (manifest, _) in enumerate(stored))], axis=1
    )
    columns = [manifest.columns for manifest, _ in stored]
    firsts = itertools.accumulate((len(part.signatures) for part in columns), initial=0)
    is_small = arrays[4].astype(np.bool_)
    if not is_small.all():
        kept = is_small.tolist()
        rows = {name: row for name, row in rows.items() if kept[row]}
    return SmallItems(
        rows=rows,
        names=np.array([name for part in columns for name in part.names], np.object_),
        look_numbers=[
            first + number for first, part in zip(firsts, columns, strict=False) for number in part.signature_numbers
        ],
        looks=[
            Look(DTYPES[dtype], shape, stride) for part in columns for dtype, shape, stride, _, _ in part.signatures
        ],
        files=[file.name for _, file in stored],
        file_numbers=arrays[0],
        starts=arrays[1],
        nbytes=arrays[2],
        crcs=arrays[3],
    )


_NO_NUMBERS = np.empty((5, 0), np.int64)


def _small_part(manifest: RankManifest, number: int) -> IntArray:
    """Columns of one rank: file number, start, nbytes, crc, is_small."""
    columns = manifest.columns
    blocks = -(-columns.raw_bytes // manifest.block_bytes)
    # An empty item at the end has no block: the sum that is added is its.
    sums = np.append(np.frombuffer(manifest.sums, "<u4").astype(np.int64), -1)
    crcs = sums[np.cumsum(blocks) - blocks]
    is_small = blocks == 1
    is_small[list(columns.shards)] = False
    numbers = np.full(len(blocks), number)
    return np.array([numbers, columns.raw_offsets, columns.raw_bytes, crcs, is_small], np.int64)


def _chunks_of_manifests(stored: Sequence[_Stored]) -> dict[str, Chunks]:
    chunks: dict[str, list[Item]] = {}
    for manifest, file in stored:
        for entry, sums in zip(manifest.tensors, block_sums(manifest), strict=True):
            item = Item(
                entry.fqns[0],
                file.name,
                DTYPES[entry.dtype],
                entry.shape,
                entry.stride,
                entry.offsets,
                0,
                entry.raw_offset,
                entry.raw_bytes,
                manifest.block_bytes,
                sums,
                None,
            )
            for name in entry.fqns:
                chunks.setdefault(name, []).append(item)
    return {name: tuple(found) for name, found in chunks.items()}


# -- plain DCP --------------------------------------------------------------------------------------


def catalog_of_metadata(metadata: Metadata) -> Catalog:
    """Of a checkpoint of plain DCP.

    Raises:
        CorruptCheckpointError: the metadata contradicts itself.
    """
    places: dict[MetadataIndex, StorageInfo] = metadata.storage_data or {}
    chunks: dict[str, Chunks] = {}
    objects: dict[str, StoredObject] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            chunks[name] = tuple(_slot(name, entry, number, places) for number in range(len(entry.chunks)))
            if not chunks[name] or global_shape(chunks[name]) != tuple(entry.size):
                raise CorruptCheckpointError(f"{METADATA_FILE}: the chunks of {name!r} do not make up its size")
        else:
            place = _place(name, MetadataIndex(name), places)
            moved = bool(getattr(place, "transform_descriptors", None))
            objects[name] = StoredObject(name, place.relative_path, place.offset, place.length, None, moved)
    catalog = Catalog(
        tensor_names=chunks.keys(),
        make_chunks=lambda: chunks,
        small=_small_items((), {}),
        objects=objects,
        files={place.relative_path: None for place in places.values()},
        nbytes=sum(place.length for place in places.values()),
    )
    _check_kinds(catalog)
    _check_shards(chunks)
    return catalog


def _slot(name: str, entry: TensorStorageMetadata, number: int, places: Mapping[MetadataIndex, StorageInfo]) -> Slot:
    chunk = entry.chunks[number]
    place = _place(name, MetadataIndex(name, chunk.offsets), places)
    return Slot(
        name=name,
        file=place.relative_path,
        item_offset=place.offset,
        item_bytes=place.length,
        dtype=entry.properties.dtype,
        shape=tuple(chunk.sizes),
        offsets=tuple(chunk.offsets),
        is_transformed=bool(getattr(place, "transform_descriptors", None)),
        stride=getattr(entry.properties, "strides", None),
    )


def _place(name: str, index: MetadataIndex, places: Mapping[MetadataIndex, StorageInfo]) -> StorageInfo:
    place = places.get(index)
    if place is None:
        raise CorruptCheckpointError(f"{METADATA_FILE}: tells no place for {name!r} {index.offset or ''}")
    return place


# -- checks -----------------------------------------------------------------------------------------


def _check_kinds(catalog: Catalog) -> None:
    """A name is a tensor or an object."""
    both = catalog.tensor_names & catalog.objects.keys()
    if both:
        raise CorruptCheckpointError(f"{min(both)!r} is stored as a tensor and as an object")


def _check_shards(chunks: Mapping[str, Chunks]) -> None:
    """A tensor has one dtype and number of dimensions."""
    for name, found in chunks.items():
        if len(found) > 1 and len({(chunk.dtype, len(chunk.shape)) for chunk in found}) > 1:
            raise CorruptCheckpointError(f"the shards of {name!r} differ in dtype or number of dimensions")
