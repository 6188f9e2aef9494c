"""What the machine gives: the same bytes by O_DIRECT alone, and one large copy from device to host."""

from __future__ import annotations

import gc
import mmap
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from bench.common.limits import PlainRead, PlainWrite, pack
from bench.common.pagecache import make_cold
from bench.gpu.options import Trial
from bench.gpu.train import Ground, Trainer

__all__ = ["RAW", "measure_raw"]

RAW = "raw"
"""Key of the limits among the contenders."""
COPIES = 5


def measure_raw(trainer: Trainer, ground: Ground, folder: Path, trial: Trial) -> Iterator[tuple[str, dict[str, float]]]:
    """Events ``copy`` and ``disk``; all ranks write or read at once, as their saves and loads do."""
    packed = pack(trainer.local())
    if ground.device.type == "cuda" and (copied := _copy(packed, ground)) is not None:
        yield "copy", copied
    nbytes = len(packed)
    kind = PlainRead if trial.mode == "load" else PlainWrite
    plain = kind(packed, folder / f"rank{ground.rank}")
    secs: list[float] = []
    for number in range(1 + min(2, trial.repeats)):
        make_cold(plain.path)
        gc.collect()
        ground.barrier()
        os.sync()
        ground.barrier()
        begin = time.perf_counter()
        plain.start()
        secs.append(time.perf_counter() - begin)
        ground.barrier()
        plain.after()
        yield "disk", {"number": number, "secs": secs[-1], "nbytes": nbytes}
    plain.close()


def _copy(packed: mmap.mmap, ground: Ground) -> dict[str, float] | None:
    """Median of some copies of up to 8 GB into registered memory; None if it cannot be registered."""
    host = torch.frombuffer(packed, dtype=torch.uint8)[: 8 << 30]
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = runtime.cudaHostRegister(host.data_ptr(), host.nbytes, 0)
    if int(error):
        return None
    source = torch.empty(host.nbytes, dtype=torch.uint8, device=ground.device)
    secs: list[float] = []
    for _ in range(COPIES):
        ground.barrier()
        begin = time.perf_counter()
        host.copy_(source, non_blocking=True)
        ground.synchronize()
        secs.append(time.perf_counter() - begin)
    runtime.cudaHostUnregister(host.data_ptr())
    return {"nbytes": host.nbytes, "secs": statistics.median(secs)}
