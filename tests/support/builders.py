"""Small states, saves and looks at a root that many test modules share."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import torch

from aio_ckpt.errors import WriteError
from aio_ckpt.format.root_names import ENGINE_DIR
from aio_ckpt.reports import SaveReport, StageTimings
from aio_ckpt.ticket import PendingCall

__all__ = ["broken", "flip", "listing", "report_of", "save", "state_of", "steps_dir", "value", "weights"]

TIMEOUT = 60.0


def weights(number: float) -> dict[str, torch.Tensor]:
    """A state of one tensor of ten float32, every one ``number``."""
    return {"w": torch.full((10,), float(number))}


def state_of(number: float, size: int = 300) -> dict[str, Any]:
    """A state of one tensor of ``size`` float32 and one object, both ``number``."""
    return {"w": torch.full((size,), float(number)), "step": number}


def value(engine: Any, step: int | None = None) -> float:
    """The number of the :func:`weights` that a checkpoint holds; the newest one without a step."""
    found = engine.read(step)
    state = found.result(TIMEOUT) if isinstance(found, PendingCall) else found
    return float(state["w"][0])


def report_of(step: int, timings: StageTimings) -> SaveReport:
    """The report of a save of 4 raw bytes."""
    return SaveReport(
        step=step,
        path=Path(f"/root/step_{step:09}"),
        image_bytes=4096,
        raw_bytes=4,
        plan_hit=False,
        fingerprint_hit=False,
        mode="direct",
        timings=timings,
    )


def save(engine: Any, *steps: int) -> None:
    """Commit each step, one after the other; the state of a step holds its number."""
    for step in steps:
        engine.save(weights(step), step).result(TIMEOUT)


def listing(root: Path) -> list[str]:
    """Names in a root, and of what is pending, set aside, trash or a mark (``pending/...``); without the lock."""
    own = [path for path in (root / ENGINE_DIR).glob("*") if path.is_file() and path.name not in ("lock", "claim.json")]
    below = [f"{path.parent.name}/{path.name}" for path in (root / ENGINE_DIR).glob("*/*")]
    return sorted([*(path.name for path in (*root.iterdir(), *own) if path.name != ENGINE_DIR), *below])


def steps_dir(root: Path, step: int) -> Path:
    """Directory of a committed step."""
    return root / f"step_{step:09d}"


def flip(path: Path, offset: int, mask: int = 0x10) -> None:
    """Change the bits of ``mask`` in one byte of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= mask
    path.write_bytes(data)


def broken() -> WriteError:
    """An error as a failing disk raises it."""
    return WriteError(errno.EIO, "the disk is gone", "/x")
