"""Directory of a ``torch.save`` zip: which record lies where, read before any record is.

The records that this file accepts are stored as they are, lie one behind the other, and name no byte twice. So all of
them together take no more memory than the zip. A compressed record, or two records that overlap, would.

Source: PKWARE APPNOTE 6.3.10 (§4.3, §4.5.3).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn, Protocol

from aio_ckpt.errors import CorruptCheckpointError, UnsupportedLeafError
from aio_ckpt.format.checksum import crc32_of
from aio_ckpt.format.zip_records import CENTRAL, END, END64, LOCAL, LOCATOR64, MAX_U32, ZIP64_EXTRA

_ENCRYPTED_FLAG = 0x01


class CompressedError(CorruptCheckpointError):
    """A record of the zip is compressed or encrypted: torch.save writes none, another program made the zip."""


class ZipBytes(Protocol):
    """Bytes of a zip."""

    @property
    def nbytes(self) -> int:
        """Length of the zip."""

    def get(self, start: int, nbytes: int) -> bytes | memoryview | None:
        """Return bytes that lie inside the zip; None if this reader does not hold all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZipRecord:
    """Entry of the directory."""

    full_name: bytes
    """Name with the archive's own directory before it, such as ``archive/data/0``."""
    offset: int
    """Offset of the local header."""
    nbytes: int
    """Length of its bytes in the zip."""
    crc32: int
    """0 if torch stored none."""
    packing: tuple[int, int]
    """Method of the compression, and whether the record is encrypted; torch writes (0, 0)."""
    limit: int
    """Offset at which the next record, or the directory, begins."""

    @property
    def title(self) -> str:
        """Name for messages."""
        return self.full_name.decode("utf-8", "replace")[:80]


def corrupt(what: str) -> NoReturn:
    """Raise the error of a damaged zip."""
    raise CorruptCheckpointError(f"its torch.save zip is damaged: {what}")


def read_directory(data: ZipBytes) -> dict[str, ZipRecord]:
    """Return the records by name, without the archive's own directory name.

    Raises:
        CompressedError: a record is compressed or encrypted.
        CorruptCheckpointError: the zip is malformed, a number points outside of it, or two records overlap.
        UnsupportedLeafError: ``data`` does not hold the directory.
    """
    start, stop, count = _find_directory(data)
    raw = _get(data, start, stop - start)
    if raw is None:
        raise UnsupportedLeafError("an item with so many records is not one plain tensor")
    try:
        entries = sorted(_entries(bytes(raw)))
    except struct.error as error:
        raise CorruptCheckpointError(f"its torch.save zip is damaged: its directory is malformed ({error})") from error
    if len(entries) != count:
        corrupt(f"its directory holds {len(entries)} records, and its end record tells {count}")
    records: dict[str, ZipRecord] = {}
    limits = [*(offset for offset, *_ in entries[1:]), start]
    for (offset, name_bytes, nbytes, crc32, packing), limit in zip(entries, limits, strict=False):
        if offset + LOCAL.size + len(name_bytes) + nbytes > limit:
            corrupt("a record runs into another one or into its directory")
        record = ZipRecord(
            full_name=name_bytes, offset=offset, nbytes=nbytes, crc32=crc32, packing=packing, limit=limit
        )
        head, _, tail = name_bytes.partition(b"/")
        name = (tail or head).decode("utf-8", "replace")
        if records.setdefault(name, record) is not record:
            corrupt(f"its directory names {name[:40]!r} twice")
    if packed := [record for record in records.values() if any(record.packing)]:
        body_offset(data, packed[0])  # raises if a damaged byte of the directory alone tells of a compression
        raise CompressedError(f"its record {packed[0].title!r} is compressed or encrypted, as torch.save writes none")
    return records


def body_offset(data: ZipBytes, record: ZipRecord) -> int:
    """Return the offset of a record's bytes. The local header may have another extra field than the directory.

    Raises:
        CorruptCheckpointError: the local header contradicts the directory, or the bytes run into the next record.
        UnsupportedLeafError: ``data`` does not hold the local header.
    """
    size = LOCAL.size + len(record.full_name)
    local = _get(data, record.offset, size)
    if local is None:
        raise UnsupportedLeafError(f"record {record.title!r} lies too deep in its item for one plain tensor")
    magic, flags, method, _, _, _, name_bytes, extra_bytes = LOCAL.unpack_from(local)
    is_same = (
        local[LOCAL.size :][:name_bytes] == record.full_name and (method, flags & _ENCRYPTED_FLAG) == record.packing
    )
    if magic != b"PK\3\4" or not is_same:
        corrupt(f"the local header of {record.title!r} does not match its directory")
    begin = record.offset + size + int(extra_bytes)
    if begin + record.nbytes > record.limit:
        corrupt(f"record {record.title!r} runs into another one or into its directory")
    return begin


def read_record(data: ZipBytes, record: ZipRecord) -> bytes:
    """Return the bytes of a small record, checked against its CRC32 if there is one.

    Raises:
        CorruptCheckpointError: the record is damaged; see :func:`body_offset`.
        UnsupportedLeafError: ``data`` does not hold it.
    """
    body = _get(data, body_offset(data, record), record.nbytes)
    if body is None:
        raise UnsupportedLeafError(f"record {record.title!r} of {record.nbytes} bytes is no plain tensor's")
    if record.crc32 not in (0, crc32_of(body)):
        corrupt(f"record {record.title!r} does not match its CRC32")
    return bytes(body)


def _get(data: ZipBytes, start: int, nbytes: int) -> bytes | memoryview | None:
    if start < 0 or nbytes < 0 or start + nbytes > data.nbytes:
        corrupt(f"bytes {start} to {start + nbytes} lie outside its {data.nbytes} bytes")
    return data.get(start, nbytes)


def _find_directory(data: ZipBytes) -> tuple[int, int, int]:
    """Return begin and end of the directory, and its number of records.

    A directory must end where the end records begin: a reader that took another place for it would read other records.
    """
    stop = data.nbytes - END.size
    end = _get(data, stop, END.size) or b""
    magic, count, _, size, start = END.unpack(end)
    if magic != b"PK\5\6" or any(end[-2:]):  # torch writes no comment; zip readers would search
        corrupt("it does not end in a zip end record")
    locator = data.get(stop - LOCATOR64.size, LOCATOR64.size) if stop >= LOCATOR64.size else None
    if locator is not None and locator[:4] == b"PK\6\7":
        _, place, _ = LOCATOR64.unpack(locator)
        stop -= LOCATOR64.size + END64.size
        if place != stop:
            corrupt("its zip64 end record is elsewhere")
        magic, _, count, _, size, start = END64.unpack(_get(data, stop, END64.size) or b"")
        if magic != b"PK\6\6":
            corrupt("it has no zip64 end record")
    if start + size != stop:
        corrupt("its directory does not end where its end record begins")
    return start, stop, count


def _entries(raw: bytes) -> Iterator[tuple[int, bytes, int, int, tuple[int, int]]]:
    """Yield (offset of the local header, full name, length, CRC32, packing) of each record of a directory."""
    at = 0
    while at < len(raw):
        magic, flags, method, crc32, packed, nbytes, name_bytes, extra_bytes, comment, _, offset = CENTRAL.unpack_from(
            raw, at
        )
        if magic != b"PK\1\2":
            corrupt("its directory is malformed")
        at += CENTRAL.size
        name, extra = raw[at : at + name_bytes], raw[at + name_bytes : at + name_bytes + extra_bytes]
        at += name_bytes + extra_bytes + comment
        wide = _wide_numbers(extra)  # in the order of the next line
        nbytes, packed, offset = [
            next(wide, -1) if number == MAX_U32 else number for number in (nbytes, packed, offset)
        ]
        if min(nbytes, packed, offset) < 0:
            corrupt("its directory lacks a 64-bit number")
        if packed != nbytes and not method:
            corrupt("its directory gives a record two lengths")
        yield offset, name, packed, crc32, (method, flags & _ENCRYPTED_FLAG)
    if at != len(raw):
        corrupt("its directory is cut off")


def _wide_numbers(extra: bytes) -> Iterator[int]:
    """Yield the 64-bit numbers of an entry's zip64 field."""
    at = 0
    while at + 4 <= len(extra):
        kind, nbytes = struct.unpack_from("<2H", extra, at)
        if kind == ZIP64_EXTRA:
            for place in range(at + 4, at + 4 + nbytes - 7, 8):
                yield struct.unpack_from("<Q", extra, place)[0]
            return
        at += 4 + nbytes
