"""What the campaigns share: progress on standard error, a state with a leaf of each kind, and where results go."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import psutil
import torch

__all__ = ["RESULTS", "every_kind", "keep_result", "log", "machine"]

RESULTS = Path(__file__).parent / "results"
"""The newest run of each campaign that was kept, one JSON file each."""


def log(text: str) -> None:
    """Print progress, apart from the report."""
    print(text, file=sys.stderr, flush=True)


def keep_result(name: str, document: Mapping[str, object], folder: Path = RESULTS) -> Path:
    """Write ``document`` with today's date as the newest result of ``name``; return its file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"date": datetime.now(UTC).strftime("%Y-%m-%d")} | dict(document), indent=1) + "\n")
    return path


def machine(folder: Path) -> dict[str, object]:
    """Describe the machine, and the file system of ``folder``, without their names."""
    mounts = [part for part in psutil.disk_partitions(all=True) if folder.is_relative_to(part.mountpoint)]
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "kernel": platform.release().partition("-")[0],
        "file_system": max(mounts, key=lambda part: len(part.mountpoint)).fstype if mounts else "unknown",
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def every_kind(*, large_elements: int = 300_000, seed: int = 0) -> dict[str, object]:
    """A small state with a leaf of each kind: several blocks, permuted and tied tensors, an array, objects."""
    rng = torch.Generator().manual_seed(seed)
    shared = torch.randn(7, generator=rng)
    return {
        "large": torch.randn(large_elements, generator=rng),
        "permuted": torch.randn(5, 10, generator=rng).t(),
        "model": {"tied": shared, "again": shared, "bias": torch.randn(33, generator=rng).bfloat16()},
        "none of them": torch.empty(0, 3),
        "array": np.arange(12, dtype=np.int16).reshape(3, 4),
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999)}]},
        "words": "text of an object " * 20,
        "numbers": list(range(50)),
    }
