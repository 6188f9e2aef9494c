"""A trainer with ``shm_path`` in a process of its own, killed -9 at a given point of its last save."""

from __future__ import annotations

import io
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gated_storage import TIMEOUT, GatedStorage
from saved_files import RANK_MANIFEST
from warm_python import WarmPython

from aio_ckpt import CheckpointEngine, EngineConfig, PerRank
from aio_ckpt.rescue.segment import SharedSegment
from aio_ckpt.runtime.portal import Executor

POINTS = {
    "writing its data": ("write", "*.distcp"),
    "making its data durable": ("sync", "*.distcp"),
    "writing its manifest": ("write_file", RANK_MANIFEST),
    "before the rename": ("rename", "pending/*"),
    "behind the rename": ("sync_dir", "root"),
}
"""Where the last save is held when the trainer is killed: a call of the storage."""

NOT_RECORDED = "summing its snapshot"


def state(value: float) -> dict[str, Any]:
    """Large, small, empty, strided, tied and other leaves, all of which tell ``value``."""
    weight = torch.arange(1_500_000, dtype=torch.float32).add_(value)
    return {
        "large": weight,
        "tied": weight,
        "small": [torch.full((n,), value, dtype=torch.bfloat16) for n in range(40)],
        "strided": torch.full((64, 33), value, dtype=torch.float64).t(),
        "conj": torch.full((7,), complex(value, 1.0)).conj(),
        "array": np.full((5, 3), value, dtype=np.int16),
        "file": io.BytesIO(str(value).encode()),
        "optimizer": {0: {"lr": 1e-3 * value}, "none": None, "empty": {}},
        "rng": PerRank(torch.full((16,), int(value), dtype=torch.uint8)),
    }


class RecordGate:
    """Counts the seals of this process; holds them while ``gate`` is closed."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = 0
        self.reached = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        real = SharedSegment.mark_valid

        def mark_valid(segment: SharedSegment, data: bytes) -> None:
            self.reached.set()
            self.gate.wait()
            real(segment, data)
            with self.changed:
                self.count += 1
                self.changed.notify_all()

        SharedSegment.mark_valid = mark_valid  # type: ignore[method-assign]

    def wait_for(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.count >= count, TIMEOUT)


def train(root: str, shm: str, point: str, saves: int, settings: dict[str, Any]) -> None:
    """In the child: save steps 1, 2, ...; all but the last are committed. Says ``held`` at the point, and waits."""
    sealing = RecordGate()
    storage = GatedStorage(Executor("gated", 6))
    engine = CheckpointEngine(root, EngineConfig(staging="shm", shm_path=shm, **settings), storage=storage)
    for step in range(1, saves):
        engine.save(state(step), step=step).result(TIMEOUT)
        sealing.wait_for(step)
    if point == NOT_RECORDED:
        sealing.gate.clear()
        sealing.reached.clear()
        engine.save(state(saves), step=saves)
        assert sealing.reached.wait(TIMEOUT)
    else:
        gate = storage.hold(*POINTS[point])
        engine.save(state(saves), step=saves, metrics={"loss": 0.5}, extra={"epoch": 4})
        gate.wait_reached()
        sealing.wait_for(saves)
    print("held", flush=True)
    threading.Event().wait()


CHILD = """
    import json, sys
    from rescued_trainer import train

    train(*sys.argv[1:4], int(sys.argv[4]), json.loads(sys.argv[5]))
"""


def start_trainer(
    root: Path, shm: Path, point: str = "writing its data", *, saves: int = 2, settings: str = "{}"
) -> subprocess.Popen[str]:
    """The trainer, once it is held at ``point``."""
    child = WarmPython(CHILD, str(root), str(shm), point, str(saves), settings, stdout=subprocess.PIPE)
    assert child.stdout is not None
    line = child.stdout.readline()
    if line != "held\n":
        child.kill()
        child.communicate()
        raise AssertionError(f"the trainer said {line!r}")
    return child


def kill(child: subprocess.Popen[str]) -> None:
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert child.returncode == -signal.SIGKILL


def train_until_killed(
    root: Path, shm: Path, point: str = "writing its data", *, saves: int = 2, settings: str = "{}"
) -> None:
    """Commit all steps but the last; kill -9 at ``point`` of that one."""
    kill(start_trainer(root, shm, point, saves=saves, settings=settings))
