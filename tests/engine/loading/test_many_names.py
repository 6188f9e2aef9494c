"""The work of a load grows with the number of its names, whatever is asked for."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from slow import slow
from torch.distributed import checkpoint as dcp

import aio_ckpt
from aio_ckpt import SyncCheckpointEngine

COUNT = 2_000
PLAIN_COUNT = 1_000
"""Names of the checkpoint of plain DCP, of which each costs a hundred times as many calls."""
MULTIPLE = 40
"""Most work of a load with an option, in plain loads. A search among all names for each name is 100 and more."""

NAMES = [f"layers.{number // 10}.w{number % 10}" for number in range(COUNT)]
PLAIN_NAMES = NAMES[:PLAIN_COUNT]


class Scorer:
    """A value with a ``state_dict()`` of one number."""

    def __init__(self) -> None:
        self.best = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = state["best"]


def work_of(call: Callable[[], object]) -> int:
    """Number of calls of functions, in Python and C, on this thread and on those that the call starts."""
    counted = 0

    def count(*_: object) -> None:
        nonlocal counted
        counted += 1

    threading.setprofile(count)
    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return counted


def tensors(names: Sequence[str] = NAMES) -> dict[str, Any]:
    return {name: torch.zeros(1) for name in names}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("many")
    state = {name: torch.tensor([float(number)]) for number, name in enumerate(NAMES)}
    scorers = {f"s{number}": Scorer() for number in range(COUNT // 4)}
    with SyncCheckpointEngine(folder / "root") as engine:
        own = engine.save(state, step=1).result().path
        tied = engine.save(dict.fromkeys(NAMES, torch.ones(1)), step=2).result().path
        empty = engine.save({"x": torch.ones(1), **{name: {} for name in NAMES}}, step=3).result().path
        nested = engine.save({name: {"w": torch.ones(1)} for name in NAMES}, step=4).result().path
        values = engine.save({"x": torch.ones(1), **scorers}, step=5).result().path
    with warnings.catch_warnings(action="ignore"):
        dcp.save({name: state[name] for name in PLAIN_NAMES}, checkpoint_id=folder / "plain", no_dist=True)
    return {"nested": nested, "own": own, "tied": tied, "empty": empty, "values": values, "plain": folder / "plain"}


@pytest.fixture(scope="module")
def plain_load(stored: dict[str, Path]) -> int:
    aio_ckpt.load(stored["own"], tensors())  # imports
    return work_of(lambda: aio_ckpt.load(stored["own"], tensors()))


def moved(state: dict[str, Any]) -> dict[str, Any]:
    return {f"m.{name}": value for name, value in state.items()}


CASES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "read": ("own", aio_ckpt.read),
    "read(only=every name)": ("own", lambda path: aio_ckpt.read(path, only=NAMES)),
    "read(only=every branch)": ("own", lambda path: aio_ckpt.read(path, only={n.rpartition(".")[0] for n in NAMES})),
    "read(only=every empty container)": ("empty", lambda path: aio_ckpt.read(path, only=NAMES)),
    "rename= of every name": (
        "own",
        lambda path: aio_ckpt.load(path, moved(tensors()), rename={name: f"m.{name}" for name in NAMES}),
    ),
    "rename= of the branch": (
        "own",
        lambda path: aio_ckpt.load(path, moved(tensors()), rename={"layers": "m.layers"}),
    ),
    "rename= a function": ("own", lambda path: aio_ckpt.load(path, moved(tensors()), rename=lambda name: f"m.{name}")),
    "a template of None": ("own", lambda path: aio_ckpt.load(path, dict.fromkeys(NAMES))),
    "a template of None, renamed": (
        "own",
        lambda path: aio_ckpt.load(path, moved(dict.fromkeys(NAMES)), rename={"layers": "m.layers"}),
    ),
    "a template of {}": ("empty", lambda path: aio_ckpt.load(path, {"x": torch.ones(1), **{n: {} for n in NAMES}})),
    "a template of {}, renamed": (
        "nested",
        lambda path: aio_ckpt.load(
            path, {name.replace(".w", ".v"): {} for name in NAMES}, rename=lambda name: name.replace(".w", ".v", 1)
        ),
    ),
    "allow_missing=True": (
        "own",
        lambda path: aio_ckpt.load(path, tensors() | moved(tensors()), allow_missing=True),
    ),
    "cast=True": (
        "own",
        lambda path: aio_ckpt.load(path, {name: torch.zeros(1, dtype=torch.float64) for name in NAMES}, cast=True),
    ),
    "one tensor under every name": ("tied", lambda path: aio_ckpt.load(path, dict.fromkeys(NAMES, torch.zeros(1)))),
    "many Stateful values": (
        "values",
        lambda path: aio_ckpt.load(
            path, {"x": torch.zeros(1), **{f"s{number}": Scorer() for number in range(COUNT // 4)}}
        ),
    ),
}


@pytest.mark.sampled
@pytest.mark.parametrize("name", CASES)
def test_a_load_of_2000_names_costs_a_small_multiple_of_a_plain_load(
    name: str, stored: dict[str, Path], plain_load: int
) -> None:
    which, call = CASES[name]
    assert work_of(lambda: call(stored[which])) < MULTIPLE * plain_load


@pytest.fixture(scope="module")
def plain_dcp_load(stored: dict[str, Path]) -> int:
    return work_of(lambda: aio_ckpt.load(stored["plain"], tensors(PLAIN_NAMES)))


PLAIN_CASES: dict[str, Callable[[Path], object]] = {
    "read(only=every name)": lambda path: aio_ckpt.read(path, only=PLAIN_NAMES),
    "rename= of every name": lambda path: aio_ckpt.load(
        path, moved(tensors(PLAIN_NAMES)), rename={name: f"m.{name}" for name in PLAIN_NAMES}
    ),
    "a template of None, renamed": lambda path: aio_ckpt.load(
        path, moved(dict.fromkeys(PLAIN_NAMES)), rename={"layers": "m.layers"}
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name if "only" in name else slow(name) for name in PLAIN_CASES])
def test_a_load_of_1000_names_of_plain_dcp_costs_little_more_than_a_plain_one(
    name: str, stored: dict[str, Path], plain_dcp_load: int
) -> None:
    assert work_of(lambda: PLAIN_CASES[name](stored["plain"])) < 3 * plain_dcp_load
