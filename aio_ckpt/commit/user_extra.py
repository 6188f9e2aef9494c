"""Extra: the caller's own JSON beside a step, as ``save(extra=)`` takes it and the root manifest stores it."""

from __future__ import annotations

import json
from typing import Any

from aio_ckpt.errors import ConfigError
from aio_ckpt.message_texts import shown

MAX_EXTRA_BYTES = 1 << 16
"""Largest length of ``save(extra=)`` as JSON."""
_MAX_DEPTH = 32
_MIN_INT, _MAX_INT = -(1 << 63), (1 << 64) - 1
"""Bounds of whole numbers that readers of JSON keep exactly."""


def check_extra(extra: dict[str, Any] | None) -> dict[str, Any]:
    """Return a deep copy of ``save(extra=)``, of plain types; empty for None.

    Raises:
        ConfigError: something in it does not come back from JSON as it is, or it is too large. Names the key.
    """
    if extra is None:
        return {}
    if not isinstance(extra, dict):
        raise ConfigError(f"extra={shown(extra)}: give a dict of names and JSON values")
    if _is_deeper(extra, _MAX_DEPTH - 1):
        raise ConfigError(f"extra={shown(extra)}: nested deeper than {_MAX_DEPTH}: give fewer levels")
    copied: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    for name, value in extra.items():
        pair = {name: value}
        try:
            data = json.dumps(pair, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
            back = json.loads(data, parse_int=_exact_int)
            why = "" if back == pair else "it comes back otherwise"
        except (TypeError, ValueError) as error:
            why = str(error)
        if why:
            raise ConfigError(
                f"extra[{shown(name)}]={shown(value)} is no JSON value ({why}): give a str, finite float, int of at "
                "most 64 bits, bool, None, list, or dict with strings as keys, such as .item() of a number and "
                ".tolist() of an array; metrics= takes a number that may not be finite, such as a loss"
            )
        copied |= back
        sizes[name] = len(data)
    nbytes = sum(sizes.values()) - len(sizes) + 1  # each has braces of its own, and takes a comma beside others
    if nbytes > MAX_EXTRA_BYTES:
        largest = max(sizes, key=lambda name: sizes[name])
        raise ConfigError(
            f"extra: {nbytes} bytes as JSON, {MAX_EXTRA_BYTES} are allowed, and extra[{shown(largest)}] takes most: "
            "put that into the state, or write it to a file and give the path"
        )
    return copied


def _is_deeper(value: object, levels: int) -> bool:
    """Return whether a list or dict has more than ``levels`` levels below it."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (levels < 0 and isinstance(value, dict | list)) or any(_is_deeper(item, levels - 1) for item in inner)


def _exact_int(text: str) -> int:
    number = int(text)
    if not _MIN_INT <= number <= _MAX_INT:
        raise ValueError("so large a number loses digits in JSON")
    return number
