"""Step numbers: the valid ones, and the next one."""

from __future__ import annotations

import numbers
import operator
from typing import TypeVar

from aio_ckpt.errors import StepOrderError
from aio_ckpt.message_texts import shown

MAX_STEP = 1 << 62
"""Largest number that a manifest holds."""
T = TypeVar("T")


def check_step_number(step: object) -> int:
    """Return ``step`` as an int.

    Raises:
        StepOrderError: ``step`` is no :func:`whole_number` from 0 to ``MAX_STEP``.
    """
    number = whole_number(step)
    if type(number) is not int or not 0 <= number <= MAX_STEP:
        raise StepOrderError(f"step={shown(step)}: give a whole number from 0 to {MAX_STEP}, such as int(step)")
    return number


def step_after(newest: int | None) -> int:
    """Return the step of a save that its caller gave none; ``newest`` is the newest committed or pending step.

    Raises:
        StepOrderError: no step exceeds ``newest``.
    """
    if newest is not None and newest >= MAX_STEP:
        raise StepOrderError(
            f"no step exceeds step {newest}, the newest: rollback(step) to an earlier one sets it aside, "
            f"delete({newest}, allow_newest=True) removes it, another root begins anew"
        )
    return 1 if newest is None else newest + 1


def whole_number(step: T) -> T | int:
    """Return ``step`` as an int if it is a whole number of any type, numpy's included; otherwise return it unchanged.

    A bool or a tensor does not count, although Python takes both as an index. To read a tensor would wait for its
    device.
    """
    return operator.index(step) if isinstance(step, numbers.Integral) and not isinstance(step, bool) else step
