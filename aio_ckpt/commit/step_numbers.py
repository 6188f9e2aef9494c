"""Step numbers: the valid ones, and the ones that a save may have."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Collection
from pathlib import Path
from typing import TypeVar

from aio_ckpt.argument_checks import shown
from aio_ckpt.errors import StepOrderError

MAX_STEP = 1 << 62
"""Largest number that a manifest holds."""
T = TypeVar("T")


def check_exceeds_newest(
    step: object,
    *,
    newest: int | None,
    committed: Collection[int],
    pending: Collection[int],
    overwrite: bool,
    mirror: Path | None = None,
) -> int:
    """Return the step of a save that its caller gave, as an int.

    ``newest`` may be a step of the ``mirror`` alone.

    Raises:
        StepOrderError: ``step`` is no whole number from 0, or it does not exceed ``newest`` and is not overwritten.
    """
    step = check_step_number(step)
    if newest is None or step > newest or (overwrite and step in committed):
        return step
    known = f"the newest committed or pending step {newest}"
    earlier, anew = "an earlier one", "another root begins anew"
    if mirror is not None and newest not in committed and newest not in pending:
        known += f", which may be in the mirror {mirror} alone"
        earlier += f", also if load() passes step {newest} by as damaged"
        anew = "another root with another mirror begins anew"
    remedy = f"load() resumes after step {newest}, rollback(step) goes back to {earlier}, {anew}"
    if mirror is None and newest not in committed and newest not in pending:
        known += ", which this engine has committed and whose directory is gone"
        remedy = f"give step {newest + 1} or a later one, or open a new engine, which counts the steps that are there"
    elif step in pending:
        remedy = (
            "its save is pending: await its ticket (or engine.ready(), if one save is in flight) before overwrite=True"
        )
    elif step in committed:
        remedy += f", save(overwrite=True) replaces step {step}"
    raise StepOrderError(f"step={step} does not exceed {known}: {remedy}")


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
