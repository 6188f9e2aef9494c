"""Manifests of the ranks to and from bytes. Pure: no file, no thread.

A rank's manifest is one msgpack file: what lies where in its data files, in columns, and the CRC32 of each block. Every
number that comes from disk is checked before it is returned: a caller may use it as a size or an index.
"""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from aio_ckpt.errors import CorruptCheckpointError
from aio_ckpt.format.constants import BLOCK_BYTES, Size
from aio_ckpt.format.root_manifest import (
    FORMAT_MAJOR,
    FORMAT_MINOR,
    FROZEN_FORMAT,
    RANK_HEADS,
    UNREADABLE,
    Count,
    Crc,
    FileEntry,
    FormatHead,
    decode_checked,
)
from aio_ckpt.format.tensor_columns import (
    Names,
    StoredColumns,
    TensorColumns,
    TensorEntry,
    columns_fault,
    entries_of,
    read_columns,
    stored_columns,
)


class ObjectEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A serialized object in the rank's data file."""

    fqns: Names
    """Every name whose object has these bytes."""
    offset: Size
    """Offset in the data file, in bytes."""
    nbytes: Size
    crc32: Crc


class _RankFields(FormatHead, frozen=True, kw_only=True):
    """Fields of a rank's manifest that come before the tensors."""

    save_id: str
    """The same in every file of one save."""
    step: Size
    rank: Size
    """Rank that wrote it, below ``world_size``."""
    world_size: Count
    block_bytes: Count
    """Raw bytes of a tensor item that one CRC32 of ``sums`` covers."""
    file: FileEntry | None
    """The rank's data file; None if it stored nothing."""
    sums: bytes
    """u32 little-endian CRC32 of each block of raw bytes, item after item."""
    objects: tuple[ObjectEntry, ...]
    skeleton: bytes
    """The state's containers, as :mod:`aio_ckpt.state.skeleton` encodes them."""
    stored_by: tuple[Size, ...] | None = None
    """Other ranks that stored a part of the state of this rank. None: any may have."""


class _FrozenTable(msgspec.Struct, frozen=True, kw_only=True):
    """Frozen file of a rank, and its tensor items."""

    file: FileEntry
    sums: bytes
    columns: StoredColumns


class RankManifest(_RankFields, frozen=True, kw_only=True, dict=True):
    """Manifest of one rank. Once decoded, every offset and length lies inside of its data file."""

    stored: StoredColumns = msgspec.field(name="columns")
    """Tensor items of ``file`` as the manifest stores them, not yet checked."""
    frozen: _FrozenTable | None = None
    """The data file of frozen leaves; None if all is in ``file``."""

    @functools.cached_property
    def data_files(self) -> tuple[FileTable, ...]:
        main, frozen = self.file, self.frozen
        tables = () if main is None else (FileTable(main, self.stored, self.sums, self.block_bytes, self.objects),)
        if frozen is None:
            return tables
        return *tables, FileTable(frozen.file, frozen.columns, frozen.sums, self.block_bytes, ())

    @property
    def tensors(self) -> tuple[TensorEntry, ...]:
        """Tensor items of all data files, one entry a tensor."""
        return tuple(itertools.chain.from_iterable(table.tensors for table in self.data_files))


@dataclass(frozen=True)
class FileTable:
    """Table of what one data file holds."""

    file: FileEntry
    stored: StoredColumns
    sums: bytes
    block_bytes: int
    objects: tuple[ObjectEntry, ...]

    @functools.cached_property
    def columns(self) -> TensorColumns:
        """Tensor items by column, in the order of ``sums``."""
        return read_columns(self.stored)

    @functools.cached_property
    def tensors(self) -> tuple[TensorEntry, ...]:
        """Tensor items, one entry a tensor, in the order of ``sums``."""
        return entries_of(self.columns)

    def block_sums(self) -> list[tuple[int, ...]]:
        """Return, for each of ``tensors``, the CRC32 of each block of its raw bytes."""
        sums = struct.unpack(f"<{len(self.sums) // 4}I", self.sums)
        counts = (-(-self.columns.raw_bytes // self.block_bytes)).tolist()
        stops = itertools.accumulate(counts)
        return [sums[stop - count : stop] for count, stop in zip(counts, stops, strict=True)]

    def fault(self) -> str:
        """Return what is wrong with the numbers, or ''."""
        file_bytes = self.file.nbytes
        for item in self.objects:
            if item.offset + item.nbytes > file_bytes:
                return f"object {item.fqns[0]!r} ends beyond the data file of {file_bytes} bytes"
        if fault := columns_fault(self.columns, file_bytes):
            return fault
        blocks = sum((-(-self.columns.raw_bytes // self.block_bytes)).tolist())  # may exceed 64 bits
        if len(self.sums) != 4 * blocks:
            return f"{len(self.sums)} bytes of sums for {blocks} blocks"
        return ""


class FrozenOut(msgspec.Struct, frozen=True, kw_only=True):
    """Frozen file of a rank, to be encoded."""

    file: FileEntry
    sums: bytes
    """See :attr:`RankManifest.sums`."""
    columns: msgspec.Raw
    """Its tensors, from :func:`encode_static`."""


class _RankOut(_RankFields, frozen=True, kw_only=True, omit_defaults=True):
    columns: msgspec.Raw
    frozen: FrozenOut | None = None


def encode_static(tensors: Sequence[TensorEntry]) -> bytes:
    """Return the part of a rank manifest that holds the tensors.

    It depends on the plan alone: encode it once a plan.
    """
    return msgspec.msgpack.encode(stored_columns(tensors))


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
    stored_by: Sequence[int] | None = None,
    frozen: FrozenOut | None = None,
) -> bytes:
    """Return the bytes of a rank's manifest; ``tensors`` comes from :func:`encode_static`."""
    manifest = _RankOut(
        format=(FORMAT_MAJOR, FORMAT_MINOR) if frozen is None else FROZEN_FORMAT,
        save_id=save_id,
        step=step,
        rank=rank,
        world_size=world_size,
        block_bytes=BLOCK_BYTES,
        file=file,
        sums=sums,
        objects=tuple(objects),
        skeleton=skeleton,
        stored_by=None if stored_by is None else tuple(stored_by),
        columns=msgspec.Raw(tensors),
        frozen=frozen,
    )
    return msgspec.msgpack.encode(manifest)


def decode_rank(data: bytes, *, name: str) -> RankManifest:
    """Read a rank's manifest and check every number in it. ``name`` is the file, for messages.

    Raises:
        FormatVersionError: written by a newer major version of the format.
        CorruptCheckpointError: any other fault; the message names the file and, if known, the tensor.
    """
    manifest = decode_checked(data, _RANKS, RANK_HEADS, name=name)
    try:
        fault = _rank_fault(manifest)
    except UNREADABLE as exc:
        fault = str(exc)
    if fault:
        raise CorruptCheckpointError(f"{name}: {fault}")
    return manifest


_RANKS = msgspec.msgpack.Decoder(RankManifest).decode


def _rank_fault(manifest: RankManifest) -> str:
    """Return what is wrong with the numbers, or ''."""
    if manifest.rank >= manifest.world_size:
        return f"rank {manifest.rank} of {manifest.world_size}"
    if max(manifest.stored_by or (0,)) >= manifest.world_size:
        return f"names rank {max(manifest.stored_by or ())} of {manifest.world_size}"
    if manifest.file is None and (read_columns(manifest.stored).names or manifest.objects or manifest.sums):
        return "lists items but no data file"
    return next(filter(None, (table.fault() for table in manifest.data_files)), "")
