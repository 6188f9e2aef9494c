"""``python -m bench.calls``: Python calls of a save that hits its plan, counted over all threads, and its host time."""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType

import torch

import aio_ckpt
from aio_ckpt import CheckpointEngine, EngineConfig

__all__ = ["count_calls", "main"]

_PACKAGE = str(Path(aio_ckpt.__file__).parent)
_PAUSE_SECS = 0.3
"""Time in which the threads end what follows a commit."""


def count_calls(root: Path) -> Counter[tuple[str, str]]:
    """Return the calls of each function of the package in one save, by its file and name. A resumption is a call."""
    calls: Counter[tuple[str, str]] = Counter()
    is_counting = threading.Event()

    def count(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and is_counting.is_set() and code.co_filename.startswith(_PACKAGE):
            calls[code.co_filename.removeprefix(_PACKAGE), code.co_qualname] += 1

    threading.setprofile(count)  # before the engine starts its threads
    try:
        engine, state = CheckpointEngine(root, EngineConfig(max_in_flight=2)), _state()
        for _ in range(3):
            engine.save(state).result()
        time.sleep(_PAUSE_SECS)
        is_counting.set()
        sys.setprofile(count)
        engine.save(state).result()
        time.sleep(_PAUSE_SECS)
        sys.setprofile(None)
        is_counting.clear()
        engine.close_blocking()
    finally:
        threading.setprofile(None)
    return calls


def host_secs(root: Path, saves: int = 300) -> float:
    """Return the median time of ``save()`` until it returns, on a plan hit."""
    engine, state, secs = CheckpointEngine(root, EngineConfig(keep_last=2)), _state(), list[float]()
    for _ in range(saves):
        began = time.perf_counter()
        ticket = engine.save(state)
        secs.append(time.perf_counter() - began)
        ticket.result()
    engine.close_blocking()
    return statistics.median(secs[saves // 10 :])


def _state() -> dict[str, object]:
    return {"weight": torch.ones(1000), "bias": torch.ones(10), "step": 3}


def main() -> None:
    """Print the counts, the most frequent functions first."""
    with tempfile.TemporaryDirectory() as folder:
        calls = count_calls(Path(folder) / "calls")
        secs = host_secs(Path(folder) / "host")
    for (file, name), count in calls.most_common(20):
        print(f"{count:5} {file}:{name}")
    files = {file for file, _ in calls}
    print(
        f"{sum(calls.values())} calls of {len(calls)} functions in {len(files)} files; save() takes {secs * 1e6:.0f} us"
    )


if __name__ == "__main__":
    main()
