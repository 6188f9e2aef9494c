"""Keys of mappings as a skeleton has them, and the parts of names that they make."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from aio_ckpt.errors import UnsupportedLeafError
from aio_ckpt.state.harmless import harmless_type
from aio_ckpt.state.objects import decode_object, encode_object

__all__ = ["HELD_KEYS", "Key", "freeze_key", "frozen_keys", "key_text", "thaw_key"]


Key: TypeAlias = "str | tuple[str, Any]"
"""A mapping's key: a str as itself, others as (type tag, text), so that 1, True and 1.0 never compare equal."""
HELD_KEYS = frozenset("ot")
"""Tags of keys that hold others."""
_KEY_BITS = 2040
"""What ``weights_only`` reads."""
_INT = {int}
_MANY_DIGITS = 1 << 64


def freeze_key(key: object, name: str) -> Key:
    """A mapping's key as it stands in a skeleton.

    Raises:
        UnsupportedLeafError: a tensor, or a whole number that no reader takes.
        UnsafeObjectError: a key that pickle cannot store.
    """
    if type(key) is str:
        return key
    frozen = _simple_key(key, name)
    if frozen is not None:
        return frozen
    if isinstance(key, torch.Tensor):
        raise UnsupportedLeafError(f"{name}: a tensor as a key, which has no name: give a str or a number")
    if harmless_type(key) is not None:
        return _object_key(key)
    return "o", (_text_of(key, name), encode_object(f"{name}: a key of type {type(key).__qualname__}", key))


def _simple_key(key: Any, name: str) -> Key | None:
    """A key that needs no object; None if it is another one."""
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


@functools.lru_cache(maxsize=4096, typed=True)
def _object_key(key: Any) -> Key:
    return "o", (str(key), encode_object("a key", key))


def _text_of(key: object, name: str) -> str:
    try:
        return str(key)
    except Exception as error:  # whatever a type's own __str__ raises
        raise UnsupportedLeafError(f"{name}: a key of type {type(key).__qualname__} without a text: {error}") from error


def frozen_keys(keys: Sequence[Any], name: str | None) -> tuple[tuple[Key, ...], list[str]]:
    """Keys as a skeleton has them, and the parts of names that they make."""
    if {*map(type, keys)} == _INT and max(max(keys), -min(keys)) < _MANY_DIGITS:  # of an optimizer
        texts = list(map(str, keys))
        return tuple([("i", text) for text in texts]), texts
    frozen = tuple([key if type(key) is str else freeze_key(key, name or "the state") for key in keys])
    return frozen, list(map(key_text, frozen))


def key_text(key: Key) -> str:
    """The part of a name that a key makes: ``str(key)``."""
    if isinstance(key, str):
        return key
    return str(key[1][0]) if key[0] == "o" else str(thaw_key(key))


def thaw_key(key: Any, *, trusted: bool = False) -> Any:
    """Inverse of :func:`freeze_key`; ValueError, TypeError or KeyError if ``key`` is none of its values.

    Raises:
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
