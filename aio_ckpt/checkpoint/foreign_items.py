"""Items that stock DCP wrote: the places of their raw bytes, and checks of their checksums.

A manifest of aio_ckpt holds the place of the raw bytes of a tensor; stock DCP has none. It stores each item as a
``torch.save`` zip. Therefore both ends of the zip are read first, and its directory is checked against ``.metadata``.
"""

from __future__ import annotations

from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from aio_ckpt._torch import StorageInfo
from aio_ckpt.checkpoint.catalog import Catalog, Item, Shards, StoredObject, UnparsedItem, global_shape
from aio_ckpt.checkpoint.dcp_places import descriptors_of, storage_info_of, stored_at
from aio_ckpt.errors import CorruptCheckpointError, MismatchError, UnsupportedLeafError
from aio_ckpt.format.checkpoint_files import METADATA_FILE
from aio_ckpt.format.checksum import crc32_of
from aio_ckpt.format.constants import BLOCK_BYTES
from aio_ckpt.format.tensor_zip import parse, records_of


def catalog_of_metadata(metadata: Metadata) -> Catalog:
    """Return the catalog of a checkpoint of plain DCP.

    Raises:
        CorruptCheckpointError: the metadata contradicts itself.
    """
    places: dict[MetadataIndex, StorageInfo] = metadata.storage_data or {}
    shards: dict[str, Shards] = {}
    objects: dict[str, StoredObject] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            shards[name] = tuple(
                unparsed_item_of(name, entry, chunk, storage_info_of(MetadataIndex(name, chunk.offsets), places))
                for chunk in entry.chunks
            )
            if not shards[name] or global_shape(shards[name]) != tuple(entry.size):
                raise CorruptCheckpointError(f"{METADATA_FILE}: the chunks of {name!r} do not make up its size")
        else:
            objects[name] = stored_at(name, storage_info_of(MetadataIndex(name), places))
    catalog = Catalog(
        shards=shards,
        objects=objects,
        files={place.relative_path: None for place in places.values()},
        nbytes=sum(place.length for place in places.values()),
    )
    catalog.check()
    return catalog


def unparsed_item_of(
    name: str, entry: TensorStorageMetadata, chunk: ChunkStorageMetadata, place: StorageInfo
) -> UnparsedItem:
    """Return the item of one chunk of a tensor, not parsed yet."""
    return UnparsedItem(
        name=name,
        file=place.relative_path,
        item_offset=place.offset,
        item_bytes=place.length,
        dtype=entry.properties.dtype,
        shape=tuple(chunk.sizes),
        offsets=tuple(chunk.offsets),
        is_transformed=bool(descriptors_of(place)),
        stride=getattr(entry.properties, "strides", None),
    )


def parse_item(unparsed: UnparsedItem, head: bytearray, tail: bytearray) -> Item:
    """Parse the envelope of an item from its first and last bytes.

    Raises:
        CorruptCheckpointError: the item is damaged, or contradicts the metadata.
        UnsupportedLeafError: the item is no plain tensor.
    """
    try:
        found = parse(bytes(head), bytes(tail), unparsed.item_bytes)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"{unparsed.file}: tensor {unparsed.name!r}: {error}") from error
    except UnsupportedLeafError as error:
        remedy = "dcp.load with an aio_ckpt.dcp.Reader loads what torch.load can"
        raise UnsupportedLeafError(f"{unparsed.file}: tensor {unparsed.name!r}: {error}; {remedy}") from error
    if found.shape != unparsed.shape or found.dtype != unparsed.dtype:
        raise CorruptCheckpointError(
            f"{unparsed.file}: tensor {unparsed.name!r} is {found.dtype} {found.shape}, "
            f".metadata says {unparsed.dtype} {unparsed.shape}"
        )
    return Item(
        name=unparsed.name,
        file=unparsed.file,
        dtype=unparsed.dtype,
        shape=unparsed.shape,
        stride=found.stride,
        offsets=unparsed.offsets,
        storage_offset=found.storage_offset,
        raw_offset=unparsed.item_offset + found.raw_offset,
        raw_bytes=found.raw_bytes,
        block_bytes=BLOCK_BYTES,
        sums=(),
        record_crc32=found.crc32 or None,
        is_conj=found.is_conj,
        is_neg=found.is_neg,
    )


def parse_or_object(unparsed: UnparsedItem, head: bytearray, tail: bytearray) -> Item | StoredObject:
    """Do :func:`parse_item`, but return an item that is no plain tensor as an object, which ``torch.load`` reads."""
    try:
        return parse_item(unparsed, head, tail)
    except UnsupportedLeafError:
        name, file, start, nbytes = unparsed.name, unparsed.file, unparsed.item_offset, unparsed.item_bytes
        return StoredObject(name, file, start, nbytes, None, is_transformed=False)


def check_zip(name: str, data: bytes) -> bool:
    """Compare the checksums of an object of stock DCP: its ``torch.save`` zip may have one for each record.

    Returns whether every record had one.

    Raises:
        CorruptCheckpointError: the bytes are no such zip, or a record does not match its CRC32.
    """
    try:
        records = records_of(data)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(f"object {name!r}: {error}") from error
    for record, (body, crc32) in records.items():
        if crc32 not in (0, crc32_of(body)):
            raise MismatchError(f"object {name!r}: record {record} does not match its CRC32")
    return all(crc32 or not body for body, crc32 in records.values())


def check_object_zip(name: str, data: bytes) -> None:
    """Do :func:`check_zip`, but accept bytes that are no zip: a planner of the user may store any bytes.

    Raises:
        MismatchError: a record does not match its CRC32.
    """
    try:
        check_zip(name, data)
    except MismatchError:
        raise
    except CorruptCheckpointError:
        return
