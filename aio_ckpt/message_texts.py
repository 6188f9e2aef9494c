"""Texts that messages share: values, several things, numbers and commands."""

from __future__ import annotations

import reprlib
import shlex
from collections.abc import Sequence

SHOWN = 5
"""Most things of a kind that a message names, unless said otherwise."""
_REPR = reprlib.Repr()
_REPR.maxother = 200


def command_line(*words: object) -> str:
    """Return a command of ``aio-ckpt`` for a message, such that a shell takes it as it is printed."""
    return f"`aio-ckpt {shlex.join(map(str, words))}`"


def shown(value: object) -> str:
    """Return ``repr(value)`` for a message, of at most 200 characters. Never raises.

    The repr of a caller's value may raise, such as that of an int of 5,000 digits.
    """
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an int of {value.bit_length()} bits"
    return _REPR.repr_instance(value, 1)


def first_of(things: Sequence[object], *, between: str = ", ", most: int = SHOWN) -> str:
    """Return the first of several things, and how many more there are, for a message: "a, b and 3 more"."""
    before = " " if between == ", " else between
    more = f"{before}and {len(things) - most} more" if len(things) > most else ""
    return f"{between.join(map(str, things[:most]))}{more}"


def steps_shown(steps: Sequence[int]) -> str:
    """Return ascending steps for a message; of many, the newest: "[2, 3]", "[..., 1599, 1600] (1600 in all)"."""
    if len(steps) <= 2 * SHOWN:
        return str([*steps])
    return f"[..., {str([*steps[-SHOWN:]])[1:]} ({len(steps)} in all)"


def numbered(noun: str, numbers: Sequence[int], *, most: int = SHOWN) -> str:
    """Return the first of several things that have numbers, for a message: "rank 1", "ranks 1, 2 and 3 more"."""
    return f"{noun}{'' if len(numbers) == 1 else 's'} {first_of(numbers, most=most)}"
