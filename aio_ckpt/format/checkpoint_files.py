"""Names of a checkpoint's files, and the trailer of its ``.metadata``. Pure.

The name of every file of ours holds the id of its save. ``.metadata`` alone has one name for all saves: it is written
last and replaced by one rename. Behind its pickle stands a trailer with the id of the save, which stock ``dcp.load``
does not read. So ``.metadata`` alone decides which of the saves in a directory is its checkpoint.
"""

from __future__ import annotations

import re
import struct

from aio_ckpt.errors import MismatchError
from aio_ckpt.format.checksum import crc32_of

METADATA_FILE = ".metadata"
_ID = r"([0-9a-zA-Z-]{1,40})"
_OF_SAVE = re.compile(
    rf"__{_ID}_\d+_\d+\.distcp|aio_ckpt\.{_ID}\.(?:\d+\.bin|json)|{re.escape(METADATA_FILE)}\.tmp-{_ID}"
)
_ROOT_MANIFEST = re.compile(rf"aio_ckpt\.{_ID}\.json")
_MAGIC = b"\naio_ckpt\0save"
_TRAILER = struct.Struct(f"<{len(_MAGIC)}s40sI")
TRAILER_BYTES = _TRAILER.size


def data_file_name(save_id: str, rank: int, *, is_frozen: bool = False) -> str:
    """Return the file name of a rank's data file, or of that of its frozen leaves.

    DCP's own begin with ``__{rank}_``, so it never is one of those.
    """
    return f"__{save_id}_{rank}_{int(is_frozen)}.distcp"


def rank_manifest_name(save_id: str, rank: int) -> str:
    return f"aio_ckpt.{save_id}.{rank}.bin"


def root_manifest_name(save_id: str) -> str:
    return f"aio_ckpt.{save_id}.json"


def new_metadata_name(save_id: str) -> str:
    """Return the name that ``.metadata`` of a save has in a directory until its commit."""
    return f"{METADATA_FILE}.tmp-{save_id}"


def save_of_file(name: str) -> str | None:
    """Return the id of the save that a file of ours belongs to, by its name; None for other files."""
    match = _OF_SAVE.fullmatch(name)
    return match[match.lastindex or 0] if match else None


def save_of_root_manifest(name: str) -> str | None:
    """Return the id of the save whose root manifest has this name; None for other files."""
    match = _ROOT_MANIFEST.fullmatch(name)
    return match[1] if match else None


def trailer(save_id: str) -> bytes:
    """Return the bytes behind the pickle of ``.metadata``: a mark, the id of the save, and their CRC32."""
    body = _TRAILER.pack(_MAGIC, save_id.encode(), 0)[:-4]
    return body + struct.pack("<I", crc32_of(body))


def save_of_metadata(data: bytes) -> str | None:
    """Return the id of the save that wrote a ``.metadata``, from its last bytes; None if it has no trailer.

    Raises:
        MismatchError: the trailer is damaged.
    """
    end = data[-TRAILER_BYTES:]
    if len(end) < TRAILER_BYTES:
        return None
    mark, save_id, crc32 = _TRAILER.unpack(end)
    if crc32_of(end[:-4]) == crc32 and mark == _MAGIC:
        return str(save_id.rstrip(b"\0").decode("ascii", "replace"))
    if sum(there == here for there, here in zip(mark, _MAGIC, strict=True)) > len(_MAGIC) // 2:
        raise MismatchError(f"{METADATA_FILE}: not as it was written: its last {TRAILER_BYTES} bytes are damaged")
    return None
