"""``python -m bench.files``: ``save_file()`` beside ``torch.save`` and safetensors, as a ratio of their time.

For each format: how long the caller is blocked, and until when the file is durable. The rivals' files are fsynced
afterwards, as a careful user would.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from aio_ckpt import SyncCheckpointEngine

__all__ = ["Times", "compare", "made", "main"]

Times = dict[str, float]
"""Seconds: ``blocked`` and ``durable``."""


def main() -> None:
    """Run the bench and print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("bench-files"), help="on the file system to measure")
    parser.add_argument("--mebibytes", type=int, default=512)
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    state = made(options.tensors, options.mebibytes << 20, options.device)
    options.folder.mkdir(parents=True)
    try:
        print(json.dumps(compare(state, options.folder, options.rounds), indent=2))
    finally:
        shutil.rmtree(options.folder)


def made(count: int, nbytes: int, device: str) -> dict[str, torch.Tensor]:
    """Return ``count`` tensors of ``nbytes`` together."""
    return {f"layers.{n}.weight": torch.rand(nbytes // count // 4, device=device) for n in range(count)}


def compare(state: dict[str, torch.Tensor], folder: Path, rounds: int) -> dict[str, dict[str, object]]:
    """Measure each format in turns, and return the ratios of the medians, ours to theirs, with the seconds."""
    rivals: dict[str, Callable[[Path], object]] = {
        "pt": lambda path: torch.save(state, path),
        "safetensors": lambda path: save_file(state, path),
    }
    found: dict[str, dict[str, object]] = {}
    with SyncCheckpointEngine(folder / "root") as engine:
        for suffix, write in rivals.items():
            ours, theirs = list[Times](), list[Times]()
            for _ in range(rounds + 1):  # the first of each warms up
                ours.append(_ours(engine, state, folder / f"ours.{suffix}"))
                theirs.append(_theirs(write, folder / f"theirs.{suffix}"))
            mine, stock = _median(ours[1:]), _median(theirs[1:])
            ratios = {f"{name}_ratio": round(mine[name] / stock[name], 3) for name in mine}
            found[suffix] = {**ratios, "ours_secs": mine, "theirs_secs": stock}
    return found


def _ours(engine: SyncCheckpointEngine, state: dict[str, torch.Tensor], path: Path) -> Times:
    began = time.perf_counter()
    ticket = engine.save_file(state, path)
    blocked = time.perf_counter() - began
    ticket.result()
    return {"blocked": blocked, "durable": time.perf_counter() - began}


def _theirs(write: Callable[[Path], object], path: Path) -> Times:
    began = time.perf_counter()
    write(path)
    blocked = time.perf_counter() - began
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return {"blocked": blocked, "durable": time.perf_counter() - began}


def _median(samples: Sequence[Times]) -> Times:
    return {name: round(statistics.median(sample[name] for sample in samples), 4) for name in samples[0]}


if __name__ == "__main__":
    main()
