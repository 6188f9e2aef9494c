"""Saves by path, with removals behind them, and files as contenders."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import safetensors.torch
import torch

import aio_ckpt
from aio_ckpt.config import EngineConfig
from aio_ckpt.engine.engine import CheckpointEngine
from aio_ckpt.format.root_names import PENDING_DIR, TRASH_DIR
from aio_ckpt.runtime.portal import Executor
from aio_ckpt.storage.local import Storage
from tests.campaigns.crash.contenders import TIMEOUT_SECS, BrokenError, Contender, OnCall, check_same
from tests.campaigns.crash.contents import state_of, step_of, tensors_of
from tests.campaigns.crash.points import KillPoint, PointedStorage

__all__ = ["FILES", "MODELS", "PATHS"]

_HOME, _FILE, _MODEL = "root", "latest.pt", "latest.safetensors"
_SHARD_BYTES = (400_000, None, 400_000, 400_000, 1_000_000)
"""Limit of each save's files in turn: several, one, several of the same number, several of another."""
Save = Callable[[CheckpointEngine, Path, int], None]


@contextmanager
def _engine(root: Path, point: KillPoint | None, on_call: OnCall | None) -> Iterator[CheckpointEngine]:
    root.mkdir(exist_ok=True)
    executor = Executor("crash", 4)
    storage = PointedStorage(Storage(executor), point, on_call)
    engine = CheckpointEngine(root / _HOME, EngineConfig(workers=2), storage=storage)
    try:
        yield engine
    finally:
        engine.close_blocking()
        executor.close(TIMEOUT_SECS)


def _at_path(engine: CheckpointEngine, root: Path, number: int) -> None:
    """Save at a new path, or at that of the save before; remove the one before it."""
    path = root / f"best-{step_of(number)}"
    engine.save(state_of(number), path=path).result(TIMEOUT_SECS)
    for other in root.glob("best-*"):
        if other != path:
            engine.remove(other).result(TIMEOUT_SECS)


def _to_file(engine: CheckpointEngine, root: Path, number: int) -> None:
    engine.save_file(state_of(number), root / _FILE).result(TIMEOUT_SECS)


def _to_model(engine: CheckpointEngine, root: Path, number: int) -> None:
    limit = _SHARD_BYTES[number % len(_SHARD_BYTES)]
    engine.save_file(tensors_of(number), root / _MODEL, max_shard_bytes=limit).result(TIMEOUT_SECS)


def _newest(path: Path, read: Callable[[Path], object]) -> int | None:
    if not path.exists():
        return None
    state = read(path)
    if not isinstance(state, dict) or not isinstance(number := state.get("number"), int):
        raise BrokenError(f"{path} has no number")
    check_same(state, state_of(number))
    return number


def _newest_checkpoint(root: Path) -> int | None:
    numbers = [_newest(path, aio_ckpt.read) for path in root.glob("best-*")]
    return max((number for number in numbers if number is not None), default=None)


def _newest_file(root: Path) -> int | None:
    return _newest(root / _FILE, lambda path: torch.load(path, weights_only=True))


def _newest_model(root: Path) -> int | None:
    """As transformers, which prefers the single file. What an index names must be whole all the same."""
    numbers = []
    if (single := root / _MODEL).exists():
        numbers.append(_number_of(safetensors.torch.load_file(single)))
    if (index := root / f"{_MODEL}.index.json").exists():
        files = json.loads(index.read_text())["weight_map"]
        loaded = {file: safetensors.torch.load_file(root / file) for file in set(files.values())}
        numbers.append(_number_of({name: loaded[file][name] for name, file in files.items()}))
    return numbers[0] if numbers else None


def _number_of(tensors: dict[str, torch.Tensor]) -> int:
    number = int(tensors["number"].item())
    check_same({name: tensors[name] for name in tensors_of(number)}, tensors_of(number))
    return number


def _contender(name: str, places: str, save: Save, newest: Callable[[Path], int | None]) -> Contender:
    @contextmanager
    def saving(root: Path, point: KillPoint | None, on_call: OnCall | None) -> Iterator[Callable[[int], None]]:
        with _engine(root, point, on_call) as engine:
            yield lambda number: save(engine, root, number)

    def saves_on(root: Path, number: int) -> None:
        with saving(root, None, None) as save_one:
            save_one(number)
        if newest(root) != number:
            raise BrokenError(f"save {number} is not there after it was saved")
        home = [root / _HOME / folder for folder in (PENDING_DIR, TRASH_DIR)]
        left = [str(path) for folder in home if folder.exists() for path in folder.iterdir()]
        left += [str(path) for path in root.iterdir() if path.name != _HOME and not path.match(places)]
        if left or not [*root.glob(places)] or (len([*root.glob(places)]) > 1 and places != _MODELS):
            raise BrokenError(f"leftovers stay: {left}, {[*root.glob(places)]}")

    return Contender(name=name, saving=saving, newest=newest, saves_on=saves_on)


PATHS = _contender("aio_ckpt, save(path=)", "best-*", _at_path, _newest_checkpoint)
_MODELS = "latest*.safetensors*"
"""A kill may leave files that no index names, as documented."""
MODELS = _contender("aio_ckpt, save_file(max_shard_bytes=)", _MODELS, _to_model, _newest_model)
FILES = _contender("aio_ckpt, save_file()", _FILE, _to_file, _newest_file)
