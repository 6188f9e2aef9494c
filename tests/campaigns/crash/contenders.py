"""A way to save that can be crashed, and the engine as one."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from aio_ckpt.config import EngineConfig, FrozenPolicy
from aio_ckpt.engine.engine import CheckpointEngine
from aio_ckpt.format.root_names import CORRUPT_DIR, PENDING_DIR, TRASH_DIR
from aio_ckpt.runtime.portal import Executor
from aio_ckpt.storage.local import Storage
from tests.campaigns.crash.contents import differs, is_overwrite, state_of, step_of
from tests.campaigns.crash.points import KillPoint, PointedStorage, When

__all__ = ["ENGINE", "KEEP_LAST", "TIMEOUT_SECS", "TRUSTED", "BrokenError", "Contender", "OnCall", "check_same"]

OnCall = Callable[[str, tuple[When, ...]], None]
KEEP_LAST = 2
TIMEOUT_SECS = 60.0


class BrokenError(Exception):
    """What a crash left breaks a promise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way to save."""

    name: str
    """For people."""
    saving: Callable[[Path, KillPoint | None, OnCall | None], AbstractContextManager[Callable[[int], None]]]
    """Open a root for saving: gives what saves a number, durable and visible when it returns."""
    newest: Callable[[Path], int | None]
    """Number of the newest checkpoint as a trainer that resumes finds it, all of it compared; None if there is none.
    Raises whatever the loader raises for a torn one."""
    saves_on: Callable[[Path, int], None] | None = None
    """After a crash: save one number more, and look for what should not be there."""


def check_same(found: object, expected: object) -> None:
    """Bit for bit.

    Raises:
        BrokenError: names where they differ.
    """
    where = differs(found, expected)
    if where is not None:
        raise BrokenError(f"what was loaded differs from what was saved at {where}")


# -- the engine -----------------------------------------------------------------------------------


@contextmanager
def _engine(
    root: Path, point: KillPoint | None = None, on_call: OnCall | None = None, *, frozen: FrozenPolicy = "compared"
) -> Iterator[CheckpointEngine]:
    config = EngineConfig(keep_last=KEEP_LAST, workers=2, frozen=frozen)
    if point is None and on_call is None:
        engine = CheckpointEngine(root, config)
        try:
            yield engine
        finally:
            engine.close_blocking()
        return
    executor = Executor("crash", 4)
    engine = CheckpointEngine(root, config, storage=PointedStorage(Storage(executor), point, on_call))
    try:
        yield engine
    finally:
        engine.close_blocking()
        executor.close(TIMEOUT_SECS)


def _save(engine: CheckpointEngine, number: int) -> None:
    engine.save(state_of(number), step=step_of(number), overwrite=is_overwrite(number)).result(TIMEOUT_SECS)


@contextmanager
def _engine_saving(
    root: Path, point: KillPoint | None, on_call: OnCall | None, *, frozen: FrozenPolicy
) -> Iterator[Callable[[int], None]]:
    with _engine(root, point, on_call, frozen=frozen) as engine:
        yield lambda number: _save(engine, number)


def _engine_newest(root: Path) -> int | None:
    """Every listed checkpoint is read whole; the newest is loaded into a template, too."""
    with _engine(root) as engine:
        number = None
        for step in engine.steps().result():
            state = engine.read(step, only=None).result(TIMEOUT_SECS)
            number = _number(state)
            check_same(state, state_of(number))
            if step_of(number) != step:
                raise BrokenError(f"step {step} holds save {number}, which is of step {step_of(number)}")
        if number is None:
            return None
        template = _emptied(state_of(number))
        loading = engine.load(template, None, strict=True, allow_missing=False, fallback=True)
        report = loading.result(TIMEOUT_SECS)
        check_same(template, state_of(number))
        if report.skipped:
            raise BrokenError(f"load() had to skip {report.skipped}")
        return number


def _number(state: object) -> int:
    if isinstance(state, dict) and isinstance(number := state.get("number"), int):
        return number
    raise BrokenError("a checkpoint without its number")


def _emptied(state: dict[str, object]) -> dict[str, object]:
    tensors, history = state["tensors"], state["history"]
    assert isinstance(tensors, dict)
    assert isinstance(history, list)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    base = torch.zeros(280_000)
    return state | {"number": 0, "tensors": zeros, "history": ["" for _ in history], "base": base}


def _engine_saves_on(root: Path, number: int) -> None:
    with _engine(root) as engine:
        _save(engine, number)
    names = sorted(os.listdir(root))
    left = [str(path) for name in (PENDING_DIR, TRASH_DIR, CORRUPT_DIR) for path in (root / name).iterdir()]
    if left:
        raise BrokenError(f"leftovers stay: {left}")
    steps = [int(name.removeprefix("step_")) for name in names if name.startswith("step_")]
    if steps[-1] != step_of(number) or len(steps) > KEEP_LAST:
        raise BrokenError(f"steps {steps} after save {number} to step {step_of(number)} with keep_last={KEEP_LAST}")


ENGINE = Contender(
    name="aio_ckpt",
    saving=functools.partial(_engine_saving, frozen="compared"),
    newest=_engine_newest,
    saves_on=_engine_saves_on,
)
TRUSTED = Contender(
    name="aio_ckpt, trusted",
    saving=functools.partial(_engine_saving, frozen="trusted"),
    newest=_engine_newest,
    saves_on=_engine_saves_on,
)
