"""Manifests to and from bytes. Pure: no file, no thread.

Two manifests are ours: one msgpack file a rank (what lies where in its data file, in columns; the CRC32 of each block)
and one JSON file a checkpoint (digest of ``.metadata``, length and CRC32 of each rank's manifest, self-checksum).
DCP's own ``.metadata`` is read by :mod:`aio_ckpt.format.dcp_metadata_read` and written by ``dcp_metadata_write``.

Every number that comes from disk is checked before it is returned: a caller may use it as a size or an index.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import re
import struct
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec

from aio_ckpt.errors import CorruptCheckpointError, FormatVersionError, MismatchError
from aio_ckpt.format.constants import BLOCK_BYTES
from aio_ckpt.format.dcp_metadata_read import MAX_BYTES
from aio_ckpt.format.tensor_table import (
    IntArray,
    Names,
    Size,
    StoredColumns,
    TensorColumns,
    TensorEntry,
    columns_fault,
    columns_of,
    entries_of,
    read_columns,
    stored_columns,
)

__all__ = [
    "FORMAT_MAJOR",
    "FORMAT_MINOR",
    "METADATA_FILE",
    "ROOT_MANIFEST",
    "FileEntry",
    "IntArray",
    "ObjectEntry",
    "RankManifest",
    "RootManifest",
    "TensorColumns",
    "TensorEntry",
    "add_checksum",
    "block_sums",
    "data_file_name",
    "decode_rank",
    "decode_root",
    "encode_rank",
    "encode_root",
    "encode_static",
    "rank_manifest_name",
]

FORMAT_MAJOR = 1
FORMAT_MINOR = 0
ROOT_MANIFEST = "aio_ckpt.json"
METADATA_FILE = ".metadata"

_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=MAX_BYTES)]
_Crc: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=0xFFFFFFFF)]
_FileName: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^(?!\.{1,2}\Z)[^/\x00]+\Z", max_length=255)]
_Format: TypeAlias = tuple[Size, Size]


def rank_manifest_name(rank: int) -> str:
    """Return the file name of a rank's manifest."""
    return f"aio_ckpt.{rank}.bin"


def data_file_name(rank: int, n: int = 0) -> str:
    """Return the file name of a rank's ``n``-th data file, as DCP names it."""
    return f"__{rank}_{n}.distcp"


# -- the rank's manifest --------------------------------------------------------------------------


class FileEntry(msgspec.Struct, frozen=True, array_like=True):
    """Name, length and checksum that a file of the checkpoint must have."""

    name: _FileName
    """One component of a path."""
    nbytes: Size
    crc32: _Crc
    """CRC32 of the whole file."""


class ObjectEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A serialized object in the rank's data file."""

    fqns: Names
    """Every name whose object has these bytes."""
    offset: Size
    """Offset in the data file, in bytes."""
    nbytes: Size
    crc32: _Crc


class _RankFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a rank's manifest that come before the tensors."""

    format: _Format
    """(major, minor) of the writer."""
    save_id: str
    """The same in every file of one save."""
    step: Size
    """Step of the checkpoint."""
    rank: Size
    """Rank that wrote it, below ``world_size``."""
    world_size: _Count
    """Number of ranks that wrote the checkpoint."""
    block_bytes: _Count
    """Raw bytes of a tensor item that one CRC32 of ``sums`` covers."""
    file: FileEntry | None
    """The rank's data file; None if it stored nothing."""
    sums: bytes
    """u32 little-endian CRC32 of each block of raw bytes, item after item."""
    objects: tuple[ObjectEntry, ...]
    skeleton: bytes
    """The state's containers, as :mod:`aio_ckpt.state.skeleton` encodes them."""


class RankManifest(_RankFields, frozen=True, kw_only=True, dict=True):
    """Manifest of one rank. Once decoded, every offset and length lies inside ``file``."""

    stored: StoredColumns = msgspec.field(name="columns")
    """Tensor items as the manifest stores them, not yet checked."""

    @functools.cached_property
    def columns(self) -> TensorColumns:
        """Tensor items of this rank by column, in the order of ``sums``."""
        return read_columns(self.stored)

    @functools.cached_property
    def tensors(self) -> tuple[TensorEntry, ...]:
        """Tensor items of this rank, one entry a tensor, in the order of ``sums``."""
        return entries_of(self.columns)


class _RankOut(_RankFields, frozen=True, kw_only=True):
    columns: msgspec.Raw


class _Head(msgspec.Struct):
    format: _Format


def encode_static(tensors: Sequence[TensorEntry]) -> bytes:
    """Return the part of a rank manifest that holds the tensors.

    It depends on the plan alone: encode it once a plan.
    """
    return msgspec.msgpack.encode(stored_columns(columns_of(tensors)))


def encode_rank(
    *,
    save_id: str,
    step: int,
    rank: int,
    world_size: int,
    file: FileEntry | None,
    tensors: bytes,
    sums: bytes,
    objects: Sequence[ObjectEntry],
    skeleton: bytes,
) -> bytes:
    """Return the bytes of ``aio_ckpt.{rank}.bin``; ``tensors`` comes from :func:`encode_static`."""
    manifest = _RankOut(
        format=(FORMAT_MAJOR, FORMAT_MINOR),
        save_id=save_id,
        step=step,
        rank=rank,
        world_size=world_size,
        block_bytes=BLOCK_BYTES,
        file=file,
        sums=sums,
        objects=tuple(objects),
        skeleton=skeleton,
        columns=msgspec.Raw(tensors),
    )
    return msgspec.msgpack.encode(manifest)


def decode_rank(data: bytes, *, name: str) -> RankManifest:
    """Read a rank's manifest and check every number in it. ``name`` is the file, for messages.

    Raises:
        FormatVersionError: written by a newer major version of the format.
        CorruptCheckpointError: any other fault; the message names the file and, if known, the tensor.
    """
    manifest = _decode(data, _RANKS, name)
    try:
        fault = _rank_fault(manifest)
    except _UNREADABLE as exc:
        fault = str(exc)
    if fault:
        raise CorruptCheckpointError(f"{name}: {fault}")
    return manifest


def block_sums(manifest: RankManifest) -> list[tuple[int, ...]]:
    """Return, for each of ``manifest.tensors``, the CRC32 of each block of its raw bytes."""
    sums = struct.unpack(f"<{len(manifest.sums) // 4}I", manifest.sums)
    counts = (-(-manifest.columns.raw_bytes // manifest.block_bytes)).tolist()
    stops = itertools.accumulate(counts)
    return [sums[stop - count : stop] for count, stop in zip(counts, stops, strict=True)]


_S = TypeVar("_S", RankManifest, "RootManifest")
_Decoders: TypeAlias = "tuple[Callable[[bytes], _S], Callable[[bytes], _Head]]"
_RANKS: _Decoders[RankManifest] = msgspec.msgpack.Decoder(RankManifest).decode, msgspec.msgpack.Decoder(_Head).decode


def _decode(data: bytes, decoders: _Decoders[_S], name: str) -> _S:
    try:
        found = decoders[0](data)
    except _UNREADABLE as exc:
        head = _Head((FORMAT_MAJOR, FORMAT_MINOR))
        with contextlib.suppress(*_UNREADABLE):
            head = decoders[1](data)
        _check_format(head.format, name)  # first: a newer major version may have changed every other field
        raise CorruptCheckpointError(f"{name}: no manifest of format {FORMAT_MAJOR}: {exc}") from exc
    _check_format(found.format, name)
    return found


_UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)


def _check_format(found: tuple[int, int], name: str) -> None:
    text = f"{found[0]}.{found[1]}"
    if found[0] > FORMAT_MAJOR:
        known = f"{FORMAT_MAJOR}.{FORMAT_MINOR}"
        raise FormatVersionError(f"{name}: format {text}, known here is {known}: read it with a newer aio_ckpt")
    if found[0] < FORMAT_MAJOR:
        raise CorruptCheckpointError(f"{name}: format {text} never existed")


def _rank_fault(manifest: RankManifest) -> str:
    """Return what is wrong with the numbers, or ''."""
    if manifest.rank >= manifest.world_size:
        return f"rank {manifest.rank} of {manifest.world_size}"
    file_bytes = manifest.file.nbytes if manifest.file else 0
    if manifest.file is None and (manifest.columns.names or manifest.objects):
        return "lists items but no data file"
    for item in manifest.objects:
        if item.offset + item.nbytes > file_bytes:
            return f"object {item.fqns[0]!r} ends beyond the data file of {file_bytes} bytes"
    if fault := columns_fault(manifest.columns, file_bytes):
        return fault
    blocks = sum((-(-manifest.columns.raw_bytes // manifest.block_bytes)).tolist())  # may exceed 64 bits
    if len(manifest.sums) != 4 * blocks:
        return f"{len(manifest.sums)} bytes of sums for {blocks} blocks"
    return ""


# -- the root manifest ----------------------------------------------------------------------------


class RootManifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The root manifest: length and checksum of ``.metadata`` and of each rank's manifest."""

    format: _Format
    """(major, minor) of the writer."""
    save_id: str
    """The same in every file of one save."""
    step: Size
    """Step of the checkpoint."""
    world_size: _Count
    """Number of ranks that wrote it; the length of ``ranks``."""
    metadata: FileEntry
    metadata_blake2b: Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{2}){16,64}\Z")]
    """BLAKE2b digest of ``.metadata``, 16 to 64 bytes in lower-case hex."""
    ranks: tuple[FileEntry, ...]
    """Each rank's manifest, by rank."""
    written_by: dict[str, str]
    """Versions of the writer, by ``aio_ckpt``, ``torch`` and ``python``."""
    created_unix: Annotated[float, msgspec.Meta(ge=0)]
    """Seconds since 1970 by the leader's clock."""
    metrics: dict[str, float | None] = {}
    """Metrics given to ``save()``; None stands for a value that is not finite. Absent if empty."""
    extra: dict[str, Any] = {}
    """JSON values given to ``save(extra=)``. Absent if empty."""


_ROOTS: _Decoders[RootManifest] = msgspec.json.Decoder(RootManifest).decode, msgspec.json.Decoder(_Head).decode


def encode_root(manifest: RootManifest) -> bytes:
    """Return the bytes of ``aio_ckpt.json``: indented JSON that ends in its self-checksum and a newline."""
    return add_checksum(msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")


def decode_root(data: bytes, *, name: str) -> RootManifest:
    """Read the root manifest. ``name`` is the file, for messages.

    Raises:
        FormatVersionError: written by a newer major version of the format.
        MismatchError: its self-checksum does not match, or is missing.
        CorruptCheckpointError: any other fault; the message names the file.
    """
    found = _CHECKSUM.search(data, max(len(data) - 128, 0))
    is_whole = _is_json(data) if found is None else found[1] == _digest(data[: found.start()])
    if not is_whole:
        raise MismatchError(f"{name}: not what was written: its own sum does not match, or it is cut short")
    manifest = _decode(data, _ROOTS, name)
    if found is None:
        raise MismatchError(f"{name}: not what was written: its own sum is missing")
    if len(manifest.ranks) != manifest.world_size:
        raise CorruptCheckpointError(f"{name}: {len(manifest.ranks)} ranks for a world of {manifest.world_size}")
    return manifest


# The self-checksum of the root manifest: a last member that holds the digest of all bytes before it.
_END = b"\n}\n"
_CHECKSUM = re.compile(rb',\n "blake2b": "([0-9a-f]{64})"\n\}\n\Z')


def add_checksum(document: bytes) -> bytes:
    """Return ``document`` with its self-checksum. It is a JSON object, indented by 1 by :func:`msgspec.json.format`."""
    body = document.removesuffix(_END)
    return b'%b,\n "blake2b": "%b"%b' % (body, _digest(body), _END)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=32).hexdigest().encode()


def _is_json(data: bytes) -> bool:
    try:
        msgspec.json.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return False
    return True
