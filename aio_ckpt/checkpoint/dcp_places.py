"""Places of items and objects, as the ``.metadata`` of a checkpoint of ours or of stock DCP tells them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch.distributed.checkpoint.metadata import MetadataIndex

from aio_ckpt._torch import StorageInfo
from aio_ckpt.checkpoint.catalog import StoredObject
from aio_ckpt.errors import CorruptCheckpointError
from aio_ckpt.format.checkpoint_files import METADATA_FILE


def storage_info_of(index: MetadataIndex, places: Mapping[MetadataIndex, StorageInfo]) -> StorageInfo:
    """Return the place of an item according to ``.metadata``.

    Raises:
        CorruptCheckpointError: ``.metadata`` holds no place for it.
    """
    place = places.get(index)
    if place is None:
        raise CorruptCheckpointError(f"{METADATA_FILE}: tells no place for {index.fqn!r} {index.offset or ''}")
    return place


def stored_at(name: str, place: StorageInfo, crc32: int | None = None) -> StoredObject:
    """Return the object at ``place``."""
    return StoredObject(name, place.relative_path, place.offset, place.length, crc32, bool(descriptors_of(place)))


def descriptors_of(place: StorageInfo) -> Sequence[str]:
    """Return the stream extensions of DCP that an item was written through, outermost first."""
    return getattr(place, "transform_descriptors", None) or ()
