"""Catalog of a checkpoint: every stored name, and the items that hold it. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Protocol, TypeAlias, TypeVar

import msgspec
import torch

from aio_ckpt.checkpoint.boxes import check_boxes
from aio_ckpt.errors import CorruptCheckpointError
from aio_ckpt.format.dtypes import DTYPES
from aio_ckpt.format.rank_manifest import FileTable, RankManifest


class _Stored(Protocol):
    @property
    def nbytes(self) -> int: ...


V = TypeVar("V")
S = TypeVar("S", bound=_Stored)
_box = attrgetter("offsets", "shape")


class Item(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Stored tensor item whose raw bytes are located. Compared by identity: tied names share one item.

    A msgspec struct because a dataclass costs 2 us to make and a checkpoint may hold 100,000 of them.
    """

    name: str
    """First of its names, for messages."""
    file: str
    """Data file, relative to the checkpoint."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Shape of the shard."""
    stride: tuple[int, ...]
    """Stride of the stored bytes, in elements."""
    offsets: tuple[int, ...]
    """Start of the shard in the global tensor, in elements per dimension."""
    storage_offset: int
    """Elements of the raw bytes before the first one of the tensor; 0 in items of aio_ckpt."""
    raw_offset: int
    """Offset of the raw bytes in the file."""
    raw_bytes: int
    block_bytes: int
    """Raw bytes that one checksum covers."""
    sums: tuple[int, ...]
    """CRC32 of each block; empty if no block has one."""
    record_crc32: int | None
    """CRC32 of all raw bytes of an item of plain DCP; None if each block has one, or if there is none."""
    global_shape: tuple[int, ...] | None = None
    """Shape of the global tensor of a shard; None if the item is the whole tensor, or if it is not known."""
    is_conj: bool = False
    """Whether the elements are the conjugates of the stored ones (plain DCP)."""
    is_neg: bool = False
    """Whether the elements are the negatives of the stored ones (plain DCP)."""


class UnparsedItem(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Tensor item of plain DCP whose envelope is not parsed yet, so that the place of its raw bytes is unknown."""

    name: str
    file: str
    """Data file, relative to the checkpoint."""
    item_offset: int
    item_bytes: int
    dtype: torch.dtype
    """Dtype according to the metadata."""
    shape: tuple[int, ...]
    """Shape of the shard according to the metadata."""
    offsets: tuple[int, ...]
    """Start of the shard in the global tensor, in elements per dimension."""
    is_transformed: bool
    """Whether the item was written through a stream extension of DCP, so that only DCP can read it."""
    stride: tuple[int, ...] | None = None
    """Stride of the shard according to the metadata, in elements; None before torch 2.15, which first stores it."""


Shards: TypeAlias = "tuple[Item | UnparsedItem, ...]"
"""All shards of one name."""


class StoredObject(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A serialized object."""

    name: str
    """First of its names."""
    file: str
    """Data file, relative to the checkpoint."""
    offset: int
    nbytes: int
    crc32: int | None
    """CRC32 of the bytes; None in plain DCP, where each record of the zip has one."""
    is_transformed: bool
    """Whether the object was written through a stream extension of DCP."""

    def __str__(self) -> str:
        return f"{self.file}: object {self.name!r}"


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """Every name of a checkpoint. Offsets were checked against ``files`` only if a manifest gives lengths."""

    shards: Mapping[str, Shards]
    objects: Mapping[str, StoredObject]
    files: Mapping[str, int | None]
    """Data files with their length in bytes; None if no manifest gives it."""
    nbytes: int
    """Approximate length of all stored items, in bytes."""

    def names(self) -> set[str]:
        return {*self.shards, *self.objects}

    def renamed(self, names: Mapping[str, str | None]) -> Catalog:
        """Return the catalog under other names. Names that map to None are left out."""
        return replace(self, shards=_renamed(self.shards, names), objects=_renamed(self.objects, names))

    def only(self, names: Iterable[str]) -> Catalog:
        """Return the catalog with no other name than ``names``."""
        kept = frozenset(names)
        shards = {name: found for name, found in self.shards.items() if name in kept}
        objects = {name: found for name, found in self.objects.items() if name in kept}
        return replace(self, shards=shards, objects=objects)

    def check(self) -> None:
        """Check what is stored against itself.

        Raises:
            CorruptCheckpointError: a name of two kinds, a tensor of two dtypes or numbers of dimensions, or shards that
                overlap.
        """
        both = self.shards.keys() & self.objects.keys()
        if both:
            raise CorruptCheckpointError(f"{min(both)!r} is stored as a tensor and as an object")
        several = {name: found for name, found in self.shards.items() if len(found) > 1}
        for name, found in several.items():
            shapes = {getattr(shard, "global_shape", None) for shard in found}
            if len(shapes) > 1:  # a shard that is the whole tensor names none; the others are empty then
                shapes = {getattr(shard, "global_shape", None) or shard.shape for shard in found}
            if len(shapes) > 1 or len({(shard.dtype, len(shard.shape)) for shard in found}) > 1:
                raise CorruptCheckpointError(f"the shards of {name!r} differ in dtype, dimensions or global shape")
        check_boxes((name, map(_box, found)) for name, found in several.items())


def _renamed(found: Mapping[str, V], names: Mapping[str, str | None]) -> dict[str, V]:
    named = ((names.get(name, name), value) for name, value in found.items())
    return {name: value for name, value in named if name is not None}


def global_shape(shards: Shards) -> tuple[int, ...]:
    """Return the shape of the global tensor: the stored one, or the smallest that holds all shards."""
    first = shards[0]
    if type(first) is Item and first.global_shape is not None:
        return first.global_shape
    if len(shards) == 1 and not any(first.offsets):
        return first.shape
    stops = ([start + size for start, size in zip(shard.offsets, shard.shape, strict=True)] for shard in shards)
    return tuple(map(max, zip(*stops, strict=True)))


# -- checkpoints of aio_ckpt -------------------------------------------------------------------------------------------


def catalog_of_manifests(manifests: Iterable[RankManifest]) -> Catalog:
    """Return the catalog of a checkpoint of aio_ckpt.

    Raises:
        CorruptCheckpointError: the manifests contradict each other.
    """
    tables = [table for manifest in manifests for table in manifest.data_files]
    objects: dict[str, StoredObject] = {}
    for table in tables:
        for entry in table.objects:
            stored_object = StoredObject(entry.fqns[0], table.file.name, entry.offset, entry.nbytes, entry.crc32, False)
            objects.update((name, stored_object) for name in entry.fqns if name not in objects)
    shards: dict[str, Shards] = {}
    further: defaultdict[str, list[Item]] = defaultdict(list)  # of names that are stored more than once
    for table in tables:
        items = items_of(table)
        for item in items:
            if shards.setdefault(item.name, found := (item,)) is not found:
                further[item.name].append(item)
        for row, names in table.columns.ties.items():
            for name in names:
                if shards.setdefault(name, found := (items[row],)) is not found:
                    further[name].append(items[row])
    shards.update((name, (*shards[name], *items)) for name, items in further.items())
    catalog = Catalog(
        shards=shards,
        objects=objects,
        files={table.file.name: table.file.nbytes for table in tables},
        nbytes=sum(table.file.nbytes for table in tables),
    )
    catalog.check()
    return catalog


def items_of(table: FileTable) -> list[Item]:
    """Return the tensor items of a data file in the order of its table. Takes 1 us each."""
    columns, name_of_file, block_bytes = table.columns, table.file.name, table.block_bytes
    signatures = [
        (DTYPES[dtype], shape, stride, (0,) * dims, whole)
        for (dtype, shape, stride, dims, _), whole in zip(columns.signatures, columns.global_shapes, strict=True)
    ]
    of_row = [signatures[number] for number in columns.signature_numbers]
    offsets = [origin for _, _, _, origin, _ in of_row]
    for row, of_shard in columns.shards.items():
        offsets[row] = of_shard
    rows = zip(
        columns.names,
        of_row,
        offsets,
        columns.raw_offsets.tolist(),
        columns.raw_bytes.tolist(),
        table.block_sums(),
        strict=True,
    )
    return [
        Item(name, name_of_file, dtype, shape, stride, begin, 0, raw_offset, raw_bytes, block_bytes, sums, None, whole)
        for name, (dtype, shape, stride, _, whole), begin, raw_offset, raw_bytes, sums in rows
    ]


def batches(stored: Iterable[S], most_bytes: int) -> Iterator[list[S]]:
    """Yield runs of values that have at most ``most_bytes`` together. A longer one is a run of its own."""
    batch: list[S] = []
    nbytes = 0
    for each in stored:
        if batch and nbytes + each.nbytes > most_bytes:
            yield batch
            batch, nbytes = [], 0
        batch.append(each)
        nbytes += each.nbytes
    if batch:
        yield batch
