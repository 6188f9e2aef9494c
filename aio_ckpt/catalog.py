"""What a checkpoint stores: manifests opened and proven, every name with the items that hold it."""

from __future__ import annotations

import errno
import functools
import hashlib
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import anyio
import msgspec
import torch
from isal import isal_zlib
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from aio_ckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from aio_ckpt.items import PAGE_BYTES
from aio_ckpt.manifest import (
    METADATA_FILE,
    ROOT_MANIFEST,
    FileEntry,
    RankManifest,
    RootManifest,
    block_sums,
    decode_rank,
    decode_root,
    rank_manifest_name,
)
from aio_ckpt.metadata import DTYPES, parse_metadata
from aio_ckpt.storage import Storage

__all__ = [
    "Catalog",
    "Checkpoint",
    "Chunks",
    "Item",
    "Slot",
    "StoredObject",
    "check_metadata",
    "check_rank",
    "global_shape",
    "open_checkpoint",
    "read_small_file",
]

MAX_BLOCK_BYTES = 16 << 20
"""A block is read and summed at once; a larger one is a forged number."""

_MAX_SMALL_FILE_BYTES = 4 << 30
_MANIFESTS_IN_FLIGHT = 8


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalog:
    """Every name of a checkpoint. Offsets are checked against ``files`` only where a manifest gives lengths."""

    chunks: Mapping[str, Chunks]
    """Tensors by name."""
    objects: Mapping[str, StoredObject]
    """Objects by name."""
    files: Mapping[str, int | None]
    """Data files with their length; None if no manifest tells it."""

    def names(self) -> set[str]:
        """Every name stored."""
        return {*self.chunks, *self.objects}


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One opened checkpoint: its small files, read and proven against each other. No data file was touched."""

    path: Path
    """Its directory."""
    step: int | None
    """Step of the root manifest; None for plain DCP."""
    metadata_bytes: bytes
    """``.metadata``, proven by the root manifest if there is one."""
    root: RootManifest | None
    """None for plain DCP."""
    ranks: tuple[RankManifest, ...]
    """By rank; empty for plain DCP."""

    @functools.cached_property
    def metadata(self) -> Metadata:
        """``.metadata``, parsed when first asked for: 20 us an entry, and our own manifests tell all that it does.

        Raises:
            CorruptCheckpointError: it is no ``.metadata`` of DCP.
        """
        return parse_metadata(self.metadata_bytes, name=METADATA_FILE)

    @functools.cached_property
    def catalog(self) -> Catalog:
        """What is stored where.

        Raises:
            CorruptCheckpointError: manifests or metadata that contradict themselves.
        """
        return _catalog_of_manifests(self.ranks) if self.root else _catalog_of_metadata(self.metadata)


# -- opening ----------------------------------------------------------------------------------------


async def open_checkpoint(storage: Storage, path: Path) -> Checkpoint:
    """Read ``.metadata`` and the manifests of the checkpoint at ``path`` and hold them against each other.

    Raises:
        CheckpointNotFoundError: no ``.metadata``, so no checkpoint.
        CorruptCheckpointError: a small file is missing or not the one that was written; names it.
        FormatVersionError: written by a newer major version.
    """
    data = await read_small_file(storage, path / METADATA_FILE)
    if data is None:
        raise CheckpointNotFoundError(errno.ENOENT, "no checkpoint: there is no .metadata", str(path))
    root_data = await read_small_file(storage, path / ROOT_MANIFEST)
    if root_data is None:
        if await storage.exists(path / rank_manifest_name(0)):
            raise CorruptCheckpointError(f"{path / ROOT_MANIFEST}: missing, although the manifest of rank 0 is there")
        return Checkpoint(path=path, step=None, metadata_bytes=data, root=None, ranks=())
    root = decode_root(root_data, name=ROOT_MANIFEST)
    fault = check_metadata(root, data)
    if fault is None:
        ranks = await _read_ranks(storage, path, root)
        return Checkpoint(path=path, step=root.step, metadata_bytes=data, root=root, ranks=ranks)
    plain = Checkpoint(path=path, step=None, metadata_bytes=data, root=None, ranks=())
    if await _is_foreign(storage, plain, root):
        return plain
    raise CorruptCheckpointError(fault)


async def read_small_file(storage: Storage, path: Path) -> bytes | None:
    """All bytes of a manifest or ``.metadata``; None if there is no such file."""
    try:
        return await storage.read_file(path, max_bytes=_MAX_SMALL_FILE_BYTES)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return None
        raise


def check_metadata(root: RootManifest, data: bytes) -> str | None:
    """What is wrong with the bytes of ``.metadata``, or None."""
    digest = hashlib.blake2b(data, digest_size=len(root.metadata_blake2b) // 2).hexdigest()
    if _is_exact(root.metadata, data) and digest == root.metadata_blake2b:
        return None
    return f"{METADATA_FILE}: not the {root.metadata.nbytes} bytes that {ROOT_MANIFEST} vouches for"


def check_rank(root: RootManifest, rank: int, data: bytes | None) -> RankManifest:
    """The manifest of ``rank``, if it is the one of this save.

    Raises:
        CorruptCheckpointError, FormatVersionError: it is not; names the file.
    """
    entry = root.ranks[rank]
    if data is None:
        raise CorruptCheckpointError(f"{entry.name}: missing")
    if not _is_exact(entry, data):
        raise CorruptCheckpointError(f"{entry.name}: not the {entry.nbytes} bytes that {ROOT_MANIFEST} vouches for")
    found = decode_rank(data, name=entry.name)
    if (found.save_id, found.step, found.rank, found.world_size) != (root.save_id, root.step, rank, root.world_size):
        raise CorruptCheckpointError(f"{entry.name}: of another save or rank (step {found.step}, rank {found.rank})")
    if found.block_bytes > MAX_BLOCK_BYTES or found.block_bytes % PAGE_BYTES:
        raise CorruptCheckpointError(f"{entry.name}: sums over blocks of {found.block_bytes} bytes")
    return found


def _is_exact(entry: FileEntry, data: bytes) -> bool:
    return len(data) == entry.nbytes and isal_zlib.crc32(data) == entry.crc32


async def _read_ranks(storage: Storage, path: Path, root: RootManifest) -> tuple[RankManifest, ...]:
    found: dict[int, RankManifest] = {}
    limit = anyio.CapacityLimiter(_MANIFESTS_IN_FLIGHT)

    async def read(rank: int) -> None:
        async with limit:
            data = await read_small_file(storage, path / root.ranks[rank].name)
        found[rank] = check_rank(root, rank, data)

    if root.world_size == 1:
        await read(0)
    else:
        await _run_all(read, range(root.world_size))
    return tuple(found[rank] for rank in range(root.world_size))


async def _run_all(run: Callable[[int], Coroutine[Any, Any, None]], numbers: Iterable[int]) -> None:
    """Run all at once; the first error is raised as itself, not as a group."""
    try:
        async with anyio.create_task_group() as group:
            for number in numbers:
                group.start_soon(run, number)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _is_foreign(storage: Storage, plain: Checkpoint, root: RootManifest) -> bool:
    """Whether stock DCP saved into a directory of ours: another save id, and none of the files of our ranks.

    A ``.metadata`` of ours with a flipped bit names our files, so it does not pass for a foreign one.
    """
    try:
        metadata, ranks = plain.metadata, await _read_ranks(storage, plain.path, root)
    except CorruptCheckpointError:
        return False
    theirs = {info.relative_path for info in (metadata.storage_data or {}).values()}
    ours = {rank.file.name for rank in ranks if rank.file}
    save_id = getattr(metadata.storage_meta, "save_id", None)
    return save_id != root.save_id and theirs.isdisjoint(ours)


# -- what is stored where ---------------------------------------------------------------------------


def global_shape(chunks: Chunks) -> tuple[int, ...]:
    """Shape of the smallest global tensor that holds all chunks; not checked to be covered."""
    first = chunks[0]
    if len(chunks) == 1 and not any(first.offsets):
        return first.shape
    stops = ([start + size for start, size in zip(chunk.offsets, chunk.shape, strict=True)] for chunk in chunks)
    return tuple(map(max, zip(*stops, strict=True)))


def _catalog_of_manifests(ranks: Iterable[RankManifest]) -> Catalog:
    chunks: dict[str, Chunks] = {}
    objects: dict[str, StoredObject] = {}
    files: dict[str, int | None] = {}
    for rank in ranks:
        if rank.file is None:
            continue
        file, block_bytes = rank.file.name, rank.block_bytes
        files[file] = rank.file.nbytes
        for entry, sums in zip(rank.tensors, block_sums(rank), strict=True):
            item = Item(
                entry.fqns[0],
                file,
                DTYPES[entry.dtype],
                entry.shape,
                entry.stride,
                entry.offsets,
                0,
                entry.raw_offset,
                entry.raw_bytes,
                block_bytes,
                sums,
                None,
            )
            for name in entry.fqns:
                chunks[name] = (*chunks[name], item) if name in chunks else (item,)
        for found in rank.objects:
            stored = StoredObject(found.fqns[0], file, found.offset, found.nbytes, found.crc32, False)
            objects.update((name, stored) for name in found.fqns if name not in objects)
    _check_catalog(chunks, objects)
    return Catalog(chunks=chunks, objects=objects, files=files)


def _catalog_of_metadata(metadata: Metadata) -> Catalog:
    places: dict[MetadataIndex, _StorageInfo] = metadata.storage_data or {}
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
    _check_catalog(chunks, objects)
    return Catalog(chunks=chunks, objects=objects, files={place.relative_path: None for place in places.values()})


def _slot(name: str, entry: TensorStorageMetadata, number: int, places: Mapping[MetadataIndex, _StorageInfo]) -> Slot:
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
    )


def _place(name: str, index: MetadataIndex, places: Mapping[MetadataIndex, _StorageInfo]) -> _StorageInfo:
    place = places.get(index)
    if place is None:
        raise CorruptCheckpointError(f"{METADATA_FILE}: tells no place for {name!r} {index.offset or ''}")
    return place


def _check_catalog(chunks: Mapping[str, Chunks], objects: Mapping[str, StoredObject]) -> None:
    """A name is a tensor of one dtype and rank, or an object."""
    for name, found in chunks.items():
        if len(found) > 1 and len({(chunk.dtype, len(chunk.shape)) for chunk in found}) > 1:
            raise CorruptCheckpointError(f"the shards of {name!r} differ in dtype or number of dimensions")
    both = chunks.keys() & objects.keys()
    if both:
        raise CorruptCheckpointError(f"{min(both)!r} is stored as a tensor and as an object")
