"""Read the small files of a checkpoint: ``.metadata``, whose end names the save, and the root manifest of that save."""

from __future__ import annotations

import errno
from pathlib import Path

from aio_ckpt.errors import CorruptCheckpointError, MismatchError, ReadError
from aio_ckpt.format.checkpoint_files import (
    METADATA_FILE,
    TRAILER_BYTES,
    root_manifest_name,
    save_of_metadata,
    save_of_root_manifest,
)
from aio_ckpt.format.root_manifest import RootManifest, decode_root
from aio_ckpt.storage.local import Storage, names_in

_MAX_SMALL_FILE_BYTES = 4 << 30


async def save_of(storage: Storage, checkpoint: Path) -> str | None:
    """Return the id of the save that wrote a checkpoint; None if there is none of ours.

    Raises:
        CorruptCheckpointError, ReadError: the end of its ``.metadata`` is damaged, or cannot be read.
    """
    try:
        return save_of_metadata(await storage.read_end(checkpoint / METADATA_FILE, TRAILER_BYTES))
    except ReadError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise
        return None


async def read_root(storage: Storage, checkpoint: Path) -> RootManifest | None:
    """Return the root manifest of a checkpoint; None if there is none of ours.

    Raises:
        CorruptCheckpointError, FormatVersionError, ReadError: it cannot be read.
    """
    save_id = await save_of(storage, checkpoint)
    return None if save_id is None else await read_root_of(storage, checkpoint, save_id)


async def read_root_of(storage: Storage, checkpoint: Path, save_id: str) -> RootManifest:
    """Return the root manifest of a save.

    Raises:
        CorruptCheckpointError: it is missing or damaged, or of another save; names the file.
        FormatVersionError: a newer major version wrote it.
    """
    name = root_manifest_name(save_id)
    data = await read_small_file(storage, checkpoint / name)
    if data is None:
        raise MismatchError(f"{name}: missing, although {METADATA_FILE} names it")
    root = decode_root(data, name=name)
    if root.save_id != save_id:
        raise CorruptCheckpointError(f"{name}: of another save ({root.save_id}): the file was renamed")
    return root


async def saves_in(storage: Storage, directory: Path) -> list[str]:
    """Return the ids of the saves whose root manifests lie in a directory, also if it has no ``.metadata``."""
    try:
        found = map(save_of_root_manifest, await names_in(storage, directory))
    except ReadError as error:
        if error.errno != errno.ENOTDIR:
            raise
        return []
    return [save_id for save_id in found if save_id is not None]


async def read_small_file(storage: Storage, path: Path, *, max_bytes: int = _MAX_SMALL_FILE_BYTES) -> bytes | None:
    """Return the bytes of a file that is read whole, such as a manifest or ``.metadata``; None if there is none.

    Raises:
        MismatchError: the file is longer than ``max_bytes``; no memory was taken for it.
    """
    try:
        return await storage.read_file(path, max_bytes=max_bytes)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return None
        raise
