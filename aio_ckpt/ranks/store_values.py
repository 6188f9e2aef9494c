"""Values of any size in a store: compressed, and cut into pieces.

A TCPStore refuses a request of more than 8 MiB by closing the connection. The plan of a rank with 50,000 tensors is
larger.
"""

from __future__ import annotations

import struct
from typing import Any, TypeAlias

from isal import isal_zlib

Store: TypeAlias = Any
"""``torch.distributed.Store``, whose stubs know neither ``append`` nor values of bytes."""

PIECE_BYTES = 1 << 20
"""Most bytes of one request."""
SMALL_BYTES = 1 << 16
"""Values up to this size are stored as they are. Plans of larger ones are names, which compress to a tenth."""
_NO_VALUE = "no value"
_HEAD = struct.Struct("<I?")
"""Number of the pieces after the first, and whether the value is compressed."""


def found(store: Store, key: str) -> bytes:
    """Return the value of ``key``; empty if there is none.

    It takes one request: between ``check`` and ``get`` another rank may delete the key, and ``get`` would wait for it.
    """
    # A missing key is set only if the expected value is empty.
    value = bytes(store.compare_set(key, _NO_VALUE, _NO_VALUE))
    return b"" if value == _NO_VALUE.encode() else value


def put_value(store: Store, key: str, value: bytes) -> int:
    """Set ``key`` to ``value``, whatever its size. Returns the number of bytes stored.

    The pieces after the first lie under ``key/1``, ``key/2`` and so on. ``key`` is set last.
    """
    is_compressed = len(value) > SMALL_BYTES
    data = isal_zlib.compress(value, 1) if is_compressed else value
    starts = range(PIECE_BYTES, len(data), PIECE_BYTES)
    for number, start in enumerate(starts, 1):
        store.set(f"{key}/{number}", data[start : start + PIECE_BYTES])
    store.set(key, _HEAD.pack(len(starts), is_compressed) + data[:PIECE_BYTES])
    return _HEAD.size + len(data)


def value_of(store: Store, key: str) -> bytes | None:
    """Return the value that :func:`put_value` has set; None if there is none."""
    first = found(store, key)
    if not first:
        return None
    count, is_compressed = _HEAD.unpack_from(first)
    pieces = [first[_HEAD.size :], *(found(store, f"{key}/{number}") for number in range(1, 1 + count))]
    data = b"".join(pieces)
    return isal_zlib.decompress(data) if is_compressed else data


def delete_value(store: Store, key: str) -> None:
    """Delete what :func:`put_value` has set, if there is anything."""
    first = found(store, key)
    count = _HEAD.unpack_from(first)[0] if first else 0
    for number in range(1, 1 + count):
        store.delete_key(f"{key}/{number}")
    store.delete_key(key)
