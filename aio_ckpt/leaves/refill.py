"""Give a mutable Python value of a template the content of the stored one, so that whoever holds it sees that."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def refilled(value: Any, stored: Any) -> Any:
    """Return ``value`` with the content of ``stored``; ``stored`` itself if ``value`` cannot take it.

    The types are list, deque, set, and random generators of Python, numpy and torch. A namespace is none of them: the
    ``args`` that a program holds are those of this run. Of a numpy Generator, the seed that ``spawn()`` counts from
    stays that of ``value``.
    """
    refill = _REFILLS.get(type(value))
    if refill is None or type(stored) is not type(value) or stored is value:
        return stored
    return value if refill(value, stored) else stored


def _refill_list(value: list[object], stored: list[object]) -> bool:
    value[:] = stored
    return True


def _refill_deque(value: collections.deque[object], stored: collections.deque[object]) -> bool:
    if value.maxlen != stored.maxlen:
        return False
    value.clear()
    value.extend(stored)
    return True


def _refill_set(value: set[object], stored: set[object]) -> bool:
    value.clear()
    value |= stored
    return True


def _refill_random(value: random.Random, stored: random.Random) -> bool:
    value.setstate(stored.getstate())
    return True


def _refill_random_state(value: np.random.RandomState, stored: np.random.RandomState) -> bool:
    state = stored.get_state(legacy=False)
    if value.get_state(legacy=False)["bit_generator"] != state["bit_generator"]:
        return False
    value.set_state(state)
    return True


def _refill_numpy_generator(value: np.random.Generator, stored: np.random.Generator) -> bool:
    if type(value.bit_generator) is not type(stored.bit_generator):
        return False
    value.bit_generator.state = stored.bit_generator.state
    return True


def _refill_torch_generator(value: torch.Generator, stored: torch.Generator) -> bool:
    if value.device.type != stored.device.type:  # one rank's state serves another's device
        return False
    value.set_state(stored.get_state())
    return True


_REFILLS: dict[type, Callable[[Any, Any], bool]] = {
    list: _refill_list,
    collections.deque: _refill_deque,
    set: _refill_set,
    random.Random: _refill_random,
    np.random.RandomState: _refill_random_state,
    np.random.Generator: _refill_numpy_generator,
    torch.Generator: _refill_torch_generator,
}
"""Function by type, which returns whether the value could take the content."""
