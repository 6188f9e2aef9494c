"""A mutable value of a template gets the content of the stored one."""

from __future__ import annotations

import argparse
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from aio_ckpt.leaves.refill import refilled


def torch_generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


CONTENTS: dict[str, tuple[Any, Any, Callable[[Any], Any]]] = {
    "list": ([1, 2, 3], ["a"], list),
    "deque": (deque([1.0, 2.0], 5), deque([3.0], 5), list),
    "set": ({1, 2}, {3}, set),
    "random": (random.Random(1), random.Random(2), lambda value: value.getstate()),
    "numpy state": (np.random.RandomState(1), np.random.RandomState(2), lambda value: value.get_state()[1].tolist()),
    "numpy generator": (np.random.default_rng(1), np.random.default_rng(2), lambda value: value.bit_generator.state),
    "torch": (torch_generator(1), torch_generator(2), lambda value: value.get_state().tolist()),
}


@pytest.mark.parametrize("kind", CONTENTS)
def test_a_mutable_value_takes_the_content_of_the_stored_one(kind: str) -> None:
    value, stored, content = CONTENTS[kind]
    wanted = content(stored)
    assert content(value) != wanted
    assert refilled(value, stored) is value
    assert content(value) == wanted
    assert refilled(value, value) is value
    assert content(value) == wanted


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        ([1], (1,)),
        ((1,), (2,)),
        (1, [2]),
        (deque([1], 3), deque([1], 4)),
        (np.random.Generator(np.random.PCG64(1)), np.random.Generator(np.random.Philox(1))),
        (np.random.RandomState(np.random.PCG64(1)), np.random.RandomState(1)),
        (torch.Generator(), None),
        (argparse.Namespace(epochs=9), argparse.Namespace(epochs=1)),  # a program's own args stay as they are
    ],
)
def test_what_cannot_take_it_is_replaced(value: Any, stored: Any) -> None:
    assert refilled(value, stored) is stored
