"""Extra: the caller's own JSON beside a step, as ``save(extra=)`` takes it and the root manifest stores it."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from aio_ckpt.checks import shown
from aio_ckpt.errors import ConfigError
from aio_ckpt.leaves.objects import type_name

MAX_EXTRA_BYTES = 1 << 16
"""Largest length of ``save(extra=)`` as JSON."""
_MAX_DEPTH = 32
_MIN_INT, _MAX_INT = -(1 << 63), (1 << 64) - 1
"""Bounds of whole numbers that readers of JSON keep exactly."""


def check_extra(extra: dict[str, Any] | None) -> dict[str, Any]:
    """Return a deep copy of ``save(extra=)``; empty for None.

    Raises:
        ConfigError: something in it is no JSON value, or it is too large. Names the key.
    """
    if extra is None:
        return {}
    if not isinstance(extra, dict):
        raise ConfigError(f"extra={shown(extra)}: give a dict of names and JSON values")
    copied: dict[str, Any] = _copied("extra", extra, 0)
    nbytes = _json_bytes(copied)
    if nbytes > MAX_EXTRA_BYTES:
        largest = max(copied, key=lambda name: _json_bytes(copied[name]))
        raise ConfigError(
            f"extra: {nbytes} bytes as JSON, {MAX_EXTRA_BYTES} are allowed, and extra[{shown(largest)}] takes most: "
            "put that into the state, or write it to a file and give the path"
        )
    return copied


def _json_bytes(value: object) -> int:
    return len(msgspec.json.encode(value))


def _copied(where: str, value: object, depth: int) -> Any:
    """Return a copy of a JSON value, of plain types; ``where`` names it in messages."""
    match value:
        case None | bool():
            return value
        case str():
            _check_text(where, value)
            return str.__str__(value)
        case int():
            if not _MIN_INT <= value <= _MAX_INT:
                raise ConfigError(f"{where}: so large a number loses digits in JSON: give it as text")
            return int(value)
        case float():
            if not math.isfinite(value):
                raise ConfigError(f"{where}={shown(value)}: JSON has finite numbers only: give None or text")
            return float(value)
        case list() | dict() if depth == _MAX_DEPTH:
            raise ConfigError(f"{where}: nested deeper than {_MAX_DEPTH}: give fewer levels")
        case list():
            return [_copied(f"{where}[{number}]", item, depth + 1) for number, item in enumerate(value)]
        case dict():
            return {
                _name(where, name): _copied(f"{where}[{shown(name)}]", item, depth + 1) for name, item in value.items()
            }
    raise ConfigError(
        f"{where}: a {type_name(value)} is no JSON value: give a str, int, float, bool, None, list or dict, "
        "such as .item() of a number and .tolist() of an array"
    )


def _name(where: str, name: object) -> str:
    if not isinstance(name, str):
        raise ConfigError(f"{where}: the key {shown(name)} is no string: give a string")
    _check_text(f"{where}: the key", name)
    return str.__str__(name)


def _check_text(where: str, text: str) -> None:
    if text != text.encode(errors="ignore").decode():
        raise ConfigError(f"{where} {shown(text)} has a lone surrogate, which no JSON holds: remove it")
