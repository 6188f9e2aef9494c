"""Scalars (None, bool, int, float, str) as ``torch.save`` zips, rendered and read by hand; and other pickles, rendered.

A state holds thousands of them: step counters, the entries of a user's dict. ``torch.save`` and ``torch.load`` take
some 50 us for each, most of it for the zip. The bytes rendered here are read by ``torch.load`` as any other file.

Source: the pickle opcodes of Python's ``pickletools``. Protocol 2 is what ``torch.save`` writes.
"""

from __future__ import annotations

import pickle
import struct
from functools import lru_cache
from types import NoneType

from aio_ckpt.format import zip_records
from aio_ckpt.format.checksum import crc32_of
from aio_ckpt.format.zip_records import LOCAL

SCALAR_TYPES = frozenset({NoneType, bool, int, float, str})
"""Types whose pickle of protocol 2 names no class. Values of subclasses are no scalars."""

_BODY_OFFSET = LOCAL.size + len(b"archive/data.pkl")
_LOCAL_CRC, _CENTRAL_CRC = 14, 16
"""Offset of the CRC32 in a local header and in an entry of the directory, in bytes."""
_CONSTANTS = {b"N": None, b"\x88": True, b"\x89": False}
_NUMBERS = {b"K": struct.Struct("<B"), b"M": struct.Struct("<H"), b"J": struct.Struct("<i"), b"G": struct.Struct(">d")}
_CRC = struct.Struct("<I")
_MAX_CACHED = 1024


class NotScalarError(Exception):
    """The bytes were not rendered by :func:`render_scalar`."""


def render_scalar(value: object) -> bytes:
    """Return the ``torch.save`` bytes of a value whose type is one of ``SCALAR_TYPES``."""
    return render_pickle(pickle.dumps(value, 2))


def render_pickle(body: bytes) -> bytes:
    """Return the ``torch.save`` zip of a pickle without tensors."""
    return _filled(body) if len(body) <= _MAX_CACHED else _zip_of(body)


def read_scalar(data: bytes) -> object:
    """Return the value that :func:`render_scalar` was given. Checks every byte.

    Raises:
        NotScalarError: the bytes are others, such as those of ``torch.save``.
    """
    if len(data) < _BODY_OFFSET:
        raise NotScalarError
    _, _, _, _, nbytes, *_ = LOCAL.unpack_from(data)
    if not 0 < nbytes <= _MAX_CACHED:
        raise NotScalarError
    body = data[_BODY_OFFSET : _BODY_OFFSET + nbytes]
    if len(body) != nbytes or data != _filled(body):
        raise NotScalarError
    return _value_of(body)


def _filled(body: bytes) -> bytes:
    crc = _CRC.pack(crc32_of(body))
    before_crc, before_body, after_body, after_crc = _frame(len(body))
    return b"".join((before_crc, crc, before_body, body, after_body, crc, after_crc))


def _zip_of(body: bytes) -> bytes:
    records, entries = zip_records.small_records(body)
    end = zip_records.end_of_zip(zip_records.SMALL_RECORDS, len(entries), len(records), zip64=False)
    return bytes(records + entries) + end


@lru_cache(maxsize=_MAX_CACHED)
def _frame(nbytes: int) -> tuple[bytes, bytes, bytes, bytes]:
    """Return the bytes around a pickle of this length and the two places of its CRC32."""
    data = _zip_of(bytes(nbytes))
    head, tail = data[:_BODY_OFFSET], data[_BODY_OFFSET + nbytes :]
    at = tail.index(b"PK\1\2") + _CENTRAL_CRC
    return head[:_LOCAL_CRC], head[_LOCAL_CRC + 4 :], tail[:at], tail[at + 4 :]


def _value_of(body: bytes) -> object:
    """Return the value of a pickle of one scalar.

    Raises:
        NotScalarError: it is the pickle of something else.
    """
    opcode, rest = body[2:3], body[3:-1]
    if body[:2] != b"\x80\x02" or body[-1:] != b".":
        raise NotScalarError
    if opcode in _CONSTANTS and not rest:
        return _CONSTANTS[opcode]
    number = _NUMBERS.get(opcode)
    if number is not None and len(rest) == number.size:
        return number.unpack(rest)[0]
    if opcode == b"\x8a" and rest and rest[0] == len(rest) - 1:
        return int.from_bytes(rest[1:], "little", signed=True)
    if opcode == b"X" and rest[-2:] == b"q\0" and rest[:4] == struct.pack("<I", len(rest) - 6):
        try:
            return rest[4:-2].decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise NotScalarError from None
    raise NotScalarError
