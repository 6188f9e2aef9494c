"""Keys of mappings: as a skeleton stores them, and as parts of names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from aio_ckpt.errors import UnsupportedLeafError
from aio_ckpt.leaves.objects import decode_object, encode_object

Key: TypeAlias = "str | tuple[str, Any]"
"""A mapping's key: a str as itself, others as (type tag, text), so that 1, True and 1.0 never compare equal."""
HELD_KEYS = frozenset("ot")
"""Tags of keys that hold values of other types: objects and tuples."""

_KEY_BITS = 2040
"""Bits of the largest whole number that a skeleton holds as a text."""
_INT = {int}
_MANY_DIGITS = 1 << 64
"""Smallest absolute value of an int that :func:`freeze_key` checks."""


def freeze_key(key: object, name: str) -> Key:
    """Return the form in which a skeleton holds a mapping's key. ``name``: of the mapping, for messages.

    Raises:
        UnsupportedLeafError: a tensor, or a whole number that no reader takes.
        UnsafeObjectError: a key that pickle cannot store.
    """
    frozen = _simple_key(key, name)
    if frozen is not None:
        return frozen
    if isinstance(key, torch.Tensor):
        raise UnsupportedLeafError(f"{name}: a tensor as a key, which has no name: give a str or a number")
    return "o", (_text_of(key, name), encode_object(f"{name}: a key of type {type(key).__qualname__}", key))


def _simple_key(key: Any, name: str) -> Key | None:
    """Return the frozen form of a key of a plain type; None for a key that is stored as an object."""
    kind = type(key)
    if kind is str:
        return str(key)
    if kind is int or kind is bool:
        if key.bit_length() > _KEY_BITS:
            raise UnsupportedLeafError(
                f"{name}: a whole number of {key.bit_length()} bits as a key, at most {_KEY_BITS}"
            )
        return ("b" if kind is bool else "i", str(int(key)))
    if kind is float:
        return ("f", key.hex())
    if key is None:
        return ("n", "")
    if kind is complex:
        return ("c", (key.real.hex(), key.imag.hex()))
    if kind is bytes:
        return ("y", key.hex())
    if kind is tuple:
        parts = [_simple_key(part, name) for part in key]
        return None if None in parts else ("t", tuple(parts))
    return None


def _text_of(key: object, name: str) -> str:
    try:
        return str(key)
    except Exception as error:  # A type's own __str__ raises any error.
        raise UnsupportedLeafError(f"{name}: a key of type {type(key).__qualname__} without a text: {error}") from error


def frozen_keys(keys: Sequence[Any], name: str | None) -> tuple[tuple[Key, ...], list[str]]:
    """Return the frozen form of each key, and its part of a name."""
    if {*map(type, keys)} == _INT and max(max(keys), -min(keys)) < _MANY_DIGITS:  # An optimizer numbers its parameters.
        texts = list(map(str, keys))
        return tuple([("i", text) for text in texts]), texts
    frozen = tuple([key if type(key) is str else freeze_key(key, name or "the state") for key in keys])
    return frozen, list(map(key_text, frozen))


def key_text(key: Key) -> str:
    """Return the part of a name that a frozen key makes: ``str`` of the key."""
    if isinstance(key, str):
        return key
    return str(key[1][0]) if key[0] == "o" else str(thaw_key(key))


def thaw_key(key: Any, *, trusted: bool = False) -> Any:
    """Return the key that :func:`freeze_key` was given.

    Raises:
        ValueError, TypeError, KeyError: ``key`` is no frozen key.
        UnsafeObjectError: only running code reads the key.
    """
    if isinstance(key, str):
        return key
    tag, text = key
    if tag == "o":
        return decode_object(text[1], name=f"the key {text[0]}", trusted=trusted)
    return _THAW[tag](text)


_THAW: dict[str, Any] = {
    "i": lambda text: int(text),
    "b": lambda text: {"0": False, "1": True}[text],
    "f": lambda text: float.fromhex(text),
    "n": lambda text: {"": None}[text],
    "c": lambda parts: complex(float.fromhex(parts[0]), float.fromhex(parts[1])),
    "y": lambda text: bytes.fromhex(text),
    "t": lambda parts: tuple(map(thaw_key, parts)),
}
