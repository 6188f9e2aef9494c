"""Who is crashed: this engine, and what a user would pick instead, each as its documentation says."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from aio_ckpt.config import EngineConfig
from aio_ckpt.engine.engine import CheckpointEngine
from aio_ckpt.format.names import CORRUPT_DIR, PENDING_DIR, TRASH_DIR
from aio_ckpt.runtime.portal import Executor
from aio_ckpt.storage.local import Storage
from tests.campaigns.crash.contents import differs, is_overwrite, state_of, step_of, tensors_of
from tests.campaigns.crash.points import KillPoint, PointedStorage, When

__all__ = ["ENGINE", "RIVALS", "BrokenError", "Contender"]

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
def _engine(root: Path, point: KillPoint | None = None, on_call: OnCall | None = None) -> Iterator[CheckpointEngine]:
    config = EngineConfig(keep_last=KEEP_LAST, workers=2)
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
def _engine_saving(root: Path, point: KillPoint | None, on_call: OnCall | None) -> Iterator[Callable[[int], None]]:
    with _engine(root, point, on_call) as engine:
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
    return state | {"number": 0, "tensors": zeros, "history": ["" for _ in history]}


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


ENGINE = Contender(name="aio_ckpt", saving=_engine_saving, newest=_engine_newest, saves_on=_engine_saves_on)

# -- what a user would pick instead -----------------------------------------------------------------


def _plain(save: Callable[[Path, int], None]) -> Callable[..., AbstractContextManager[Callable[[int], None]]]:
    @contextmanager
    def saving(root: Path, point: KillPoint | None, on_call: OnCall | None) -> Iterator[Callable[[int], None]]:
        del point, on_call
        root.mkdir(exist_ok=True)
        yield lambda number: save(root, number)

    return saving


def _whole(tensors: dict[str, torch.Tensor]) -> int:
    number = int(tensors["number"].item())
    check_same(tensors, {name: tensors_of(number)[name] for name in tensors})
    if tensors.keys() != tensors_of(number).keys():
        raise BrokenError("names are missing")
    return number


def _torch_save(root: Path, number: int) -> None:
    torch.save(tensors_of(number), root / "latest.pt")


def _torch_replace(root: Path, number: int) -> None:
    torch.save(tensors_of(number), root / "latest.pt.tmp")
    os.replace(root / "latest.pt.tmp", root / "latest.pt")


def _torch_newest(root: Path) -> int | None:
    if not (root / "latest.pt").exists():
        return None
    return _whole(torch.load(root / "latest.pt", weights_only=True))


def _safetensors_save(root: Path, number: int) -> None:
    safetensors.torch.save_file(tensors_of(number), root / "latest.safetensors")


def _safetensors_newest(root: Path) -> int | None:
    if not (root / "latest.safetensors").exists():
        return None
    return _whole(safetensors.torch.load_file(root / "latest.safetensors"))


def _dcp_write(folder: Path, number: int) -> None:
    with warnings.catch_warnings(action="ignore"):
        dcp_save(tensors_of(number), storage_writer=FileSystemWriter(folder), no_dist=True)


def _dcp_read(folder: Path) -> int:
    tensors = {name: torch.zeros_like(tensor) for name, tensor in tensors_of(0).items()}
    with warnings.catch_warnings(action="ignore"):
        dcp_load(tensors, checkpoint_id=folder, no_dist=True)
    return _whole(tensors)


def _dcp_save(root: Path, number: int) -> None:
    """A new directory for each; all but the two newest are removed, as a trainer would."""
    _dcp_write(root / f"step_{number:09d}", number)
    for old in sorted(root.glob("step_*"))[:-KEEP_LAST]:
        shutil.rmtree(old)


def _dcp_newest(root: Path) -> int | None:
    found = sorted(path.parent for path in root.glob("step_*/.metadata")) if root.exists() else []
    return _dcp_read(found[-1]) if found else None


def _dcp_overwrite(root: Path, number: int) -> None:
    _dcp_write(root / "latest", number)


def _dcp_overwritten(root: Path) -> int | None:
    return _dcp_read(root / "latest") if (root / "latest" / ".metadata").exists() else None


RIVALS = (
    Contender(name="torch.save", saving=_plain(_torch_save), newest=_torch_newest),
    Contender(name="torch.save + os.replace", saving=_plain(_torch_replace), newest=_torch_newest),
    Contender(name="safetensors", saving=_plain(_safetensors_save), newest=_safetensors_newest),
    Contender(name="dcp.save, a new directory each", saving=_plain(_dcp_save), newest=_dcp_newest),
    Contender(name="dcp.save, overwriting", saving=_plain(_dcp_overwrite), newest=_dcp_overwritten),
)
