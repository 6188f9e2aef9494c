"""The objects of one save, as bytes."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from aio_ckpt.state import objects

__all__ = ["ObjectBytes", "ObjectEncoder"]

_DOUBLE = struct.Struct("<d")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectBytes:
    """The objects of one save, encoded; equal immutable values stand there once."""

    region: bytes
    """What follows the tensors in the image."""
    spans: tuple[tuple[int, int], ...]
    """Per object, (offset in the region, length)."""


class ObjectEncoder:
    """Encodes the object leaves of a save; the bytes of the last save's immutable values are used again.

    Borrowed fact: ``torch.save(1e-3)`` costs 39 us (FACTS), 4,000 hyperparameters 150 ms.
    """

    def __init__(self, *, trusted: bool) -> None:
        self._trusted = trusted
        self._known: dict[tuple[object, ...], bytes] = {}

    def encode(self, leaves: Sequence[tuple[str, object]]) -> ObjectBytes:
        """Encode leaves given as (name, value); mutable values are captured by it.

        Raises:
            UnsafeObjectError: names a leaf that could be read back only by running code.
        """
        seen: dict[tuple[object, ...], bytes] = {}
        parts: dict[bytes, int] = {}
        spans: list[tuple[int, int]] = []
        end = 0
        for name, value in leaves:
            data = self._bytes(name, value, seen)
            start = parts.setdefault(data, end)
            if start == end:
                end += len(data)
            spans.append((start, len(data)))
        self._known = seen
        return ObjectBytes(region=b"".join(parts), spans=tuple(spans))

    def _bytes(self, name: str, value: object, seen: dict[tuple[object, ...], bytes]) -> bytes:
        if not objects.is_immutable(value):
            return objects.encode_object(name, value, trusted=self._trusted)
        key = _identity(value)
        data = seen.get(key)
        if data is None:
            data = self._known.get(key)
            seen[key] = data = objects.encode_object(name, value, trusted=self._trusted) if data is None else data
        return data


def _identity(value: object) -> tuple[object, ...]:
    """Equal for immutable values of equal bytes only: 1 and True, 0.0 and -0.0, two nans of other bits all differ."""
    if isinstance(value, float):
        return (float, _DOUBLE.pack(value))
    if isinstance(value, complex):
        return (complex, _DOUBLE.pack(value.real), _DOUBLE.pack(value.imag))
    return (tuple, *map(_identity, value)) if isinstance(value, tuple) else (type(value), value)
