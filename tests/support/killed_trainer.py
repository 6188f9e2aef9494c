"""A trainer in a process of its own, killed while its second save is inside the I/O threads."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil
from warm_python import WarmPython

TRAINER = """
    import sys, threading
    from pathlib import Path
    from image_files import MIB, uniform
    from watched_writes import WatchedStorage, watched_engine

    storage = WatchedStorage()
    with watched_engine(Path(sys.argv[1]), storage, staging=sys.argv[2]) as engine:
        engine.save(uniform(4, 4 * MIB, 1.0), step=1).result(60)
        gate = storage.gate()
        storage.on_write = lambda write: gate.hold()
        engine.save(uniform(4, 4 * MIB, 2.0), step=2)
        gate.wait_held()
        print("held", flush=True)
        threading.Event().wait()
"""


@dataclass(frozen=True)
class Killed:
    """What was seen of the trainer just before the end."""

    pid: int
    children: list[psutil.Process]
    maps: str
    named_segments: set[str]


def named_segments() -> set[str]:
    """Names in /dev/shm, without those that other tests make there at the same time."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("test-", "sem.mp-"))}


def train_until_killed(root: Path, staging: str) -> Killed:
    """Commit step 1 of four float32 tensors of 4 MiB, all 1; kill -9 within step 2."""
    with WarmPython(TRAINER, str(root), staging, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "held\n"
            seen = Killed(
                pid=child.pid,
                children=psutil.Process(child.pid).children(recursive=True),
                maps=Path(f"/proc/{child.pid}/maps").read_text(),
                named_segments=named_segments(),
            )
        finally:
            child.send_signal(signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL
    return seen
