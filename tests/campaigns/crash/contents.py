"""What save ``n`` holds: a pure function of ``n``, so that the supervisor knows it without asking the engine."""

from __future__ import annotations

import functools

import torch

__all__ = ["Contents", "differs", "is_overwrite", "state_of", "step_of", "tensors_of"]

Contents = dict[str, object]
_SIZES = {"bulk": 250_007, "rows": 20_000, "a": 1_000, "b": 1_000, "scale": 1}
"""Elements of the tensors (float64 and int32 among them): 1.2 MB, no length a multiple of a page."""


def tensors_of(number: int) -> dict[str, torch.Tensor]:
    """The same names and shapes for every number; each element depends on the number, so no two saves share a block."""
    tensors = {
        name: torch.arange(count, dtype=torch.float64 if name == "rows" else torch.float32) * 0.5 + number
        for name, count in _SIZES.items()
    }
    return tensors | {"number": torch.tensor([number], dtype=torch.int32)}


def state_of(number: int) -> Contents:
    """Nested, with objects that grow and shrink and, for every fourth number, one tensor more: plans miss too.

    A tensor of 1.1 MB is the same in all saves: those whose plan is a hit clone its file. It is one object, so that
    ``frozen="trusted"`` does not capture it.
    """
    tensors = tensors_of(number)
    if number % 4 == 0:
        tensors["extra"] = torch.full((3, 700), float(number))
    history = [f"save {n}" for n in range(max(0, number - number % 7), number)]
    return {"number": number, "tensors": tensors, "history": history, "empty": {}, "base": _base()}


@functools.cache
def _base() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.arange(280_000.0), requires_grad=False)


def is_overwrite(number: int) -> bool:
    """Whether save ``number`` replaces the step of the one before."""
    return number % 3 == 2


def step_of(number: int) -> int:
    """Step that save ``number`` goes to: 1, 1 (overwritten), 2, 3, 3, 4, ..."""
    return number - (number + 1) // 3


def differs(found: object, expected: object) -> str | None:
    """Where two nested states differ, bit for bit; None if nowhere."""
    if isinstance(expected, dict):
        if not isinstance(found, dict) or list(found) != list(expected):
            return "names"
        return next(
            (f"{key}.{where}" for key, value in expected.items() if (where := differs(found[key], value))), None
        )
    if isinstance(expected, torch.Tensor):
        is_same = (
            isinstance(found, torch.Tensor)
            and (found.dtype, found.shape) == (expected.dtype, expected.shape)
            and torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))
        )
        return None if is_same else "tensor"
    return None if type(found) is type(expected) and found == expected else "value"
