"""Records of a ``torch.save`` zip: local headers, data descriptors, the central directory and its end.

A record whose bytes are summed while they are written is *deferred*: flag bit 3 moves its CRC32 out of the local header
into a descriptor behind the bytes. So the header can be written before the sum is known.

Source: PKWARE APPNOTE 6.3.10 (§4.3, §4.5.3).
"""

from __future__ import annotations

import struct
import sys

from aio_ckpt.format.checksum import crc32_of

LOCAL = struct.Struct("<4s2xHH4x3I2H")
"""magic, flags, method, crc, packed, nbytes, name, extra. Versions and dates stay zero, as torch writes them."""
CENTRAL = struct.Struct("<4s4xHH4x3I4H6xI")
"""magic, flags, method, crc, packed, nbytes, name, extra, comment, disk, offset."""
END = struct.Struct("<4s4x2H2I2x")
"""magic, records here, records, directory's length, directory's offset. No comment."""
END64 = struct.Struct("<4sQ12x4Q")
"""magic, [bytes that follow,] records here, records, directory's length, directory's offset."""
LOCATOR64 = struct.Struct("<4s4xQI")
_EXTRA = struct.Struct("<2H")

SMALL_RECORDS = 3
"""Number of the records that :func:`small_records` returns."""
MAX_U32 = 0xFFFFFFFF
_MAX_U16 = 0xFFFF
DEFERRED_FLAG = 0x08
ZIP64_EXTRA = 1
_PADDING_EXTRA = 0x4246
"""The id ("FB") under which torch pads its own records."""


def small_records(pickled: bytes, start: int = 0) -> tuple[bytearray, bytearray]:
    """Return the records of the pickle, the byte order and the version, and their entries in the central directory.

    ``start``: offset of the first record.
    """
    records, entries = bytearray(), bytearray()
    bodies = {b"archive/data.pkl": pickled, b"archive/byteorder": sys.byteorder.encode(), b"archive/version": b"3\n"}
    for name, body in bodies.items():
        offset, sizes = start + len(records), (crc32_of(body), len(body), len(body))
        zip64 = offset >= MAX_U32
        extra = struct.pack("<2HQ", ZIP64_EXTRA, 8, offset) if zip64 else b""
        lengths = (len(name), len(extra), 0, 0)
        entries += CENTRAL.pack(b"PK\1\2", 0, 0, *sizes, *lengths, MAX_U32 if zip64 else offset) + name + extra
        records += LOCAL.pack(b"PK\3\4", 0, 0, *sizes, len(name), 0) + name + body
    return records, entries


def deferred_header(name: bytes, *, zip64: bool, padding: int) -> bytes:
    """Return the local header of a deferred record, with ``padding`` more bytes at its end."""
    size, extra = (MAX_U32, struct.pack("<2H2Q", ZIP64_EXTRA, 16, 0, 0)) if zip64 else (0, b"")
    extra += _EXTRA.pack(_PADDING_EXTRA, padding) + bytes(padding)
    return LOCAL.pack(b"PK\3\4", DEFERRED_FLAG, 0, 0, size, size, len(name), len(extra)) + name + extra


def deferred_descriptor(nbytes: int, *, zip64: bool) -> bytes:
    """Return what follows the bytes of a deferred record. Its CRC32, at offset 4, is zero."""
    return struct.pack("<4sI2Q" if zip64 else "<4s3I", b"PK\7\10", 0, nbytes, nbytes)


def deferred_entry(name: bytes, nbytes: int, offset: int, *, crc32: int = 0, zip64: bool) -> bytes:
    """Return the entry in the central directory of a deferred record at ``offset``. Its CRC32 is at offset 16.

    ``zip64``: whether the record itself is; an ``offset`` of 4 GiB or more makes the entry one in any case.
    """
    fields = [nbytes, nbytes] if zip64 else []
    fields += [offset] if offset >= MAX_U32 else []
    extra = struct.pack(f"<2H{len(fields)}Q", ZIP64_EXTRA, 8 * len(fields), *fields) if fields else b""
    size, place = MAX_U32 if zip64 else nbytes, min(offset, MAX_U32)
    lengths = (len(name), len(extra), 0, 0)
    return CENTRAL.pack(b"PK\1\2", DEFERRED_FLAG, 0, crc32, size, size, *lengths, place) + name + extra


def end_of_zip(count: int, size: int, offset: int, *, zip64: bool) -> bytes:
    """Return the end of a zip of ``count`` records, whose directory of ``size`` bytes begins at ``offset``."""
    few = min(count, _MAX_U16)
    end = END.pack(b"PK\5\6", few, few, min(size, MAX_U32), MAX_U32 if zip64 else offset)
    if not zip64:
        return end
    record = END64.pack(b"PK\6\6", END64.size - 12, count, count, size, offset)
    return record + LOCATOR64.pack(b"PK\6\7", offset + size, 1) + end


def needs_zip64(count: int, offset: int) -> bool:
    """Return whether a zip of ``count`` records whose directory begins at ``offset`` ends in zip64 records."""
    return count >= _MAX_U16 or offset >= MAX_U32
