"""Many ranks as threads of one process: they save and load a sharded state; prints the files that a rank opened.

Run it as a script: the audit hook that counts cannot be taken away again.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from aio_ckpt import EngineConfig, PerRank, Shard, StoreCoordinator, SyncCheckpointEngine

SECS = 120.0


def state_of(rank: int, ranks: int, value: int) -> dict[str, Any]:
    """A model sharded by rows, and what every rank holds."""
    sharded = {
        f"layer{number}": Shard(
            torch.full((4, 16), float(value + rank)), global_shape=(4 * ranks, 16), offsets=(4 * rank, 0)
        )
        for number in range(8)
    }
    norms = {f"norm{number}": torch.full((64,), float(value)) for number in range(10)}
    return {**sharded, **norms, "step": value, "rng": PerRank(value * rank)}


def main(root: Path, ranks: int) -> None:
    """Print the opens of files under ``root`` during the load of all ``ranks``, by kind of file, as JSON."""
    opens: Counter[str] = Counter()
    is_loading = threading.Event()

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and is_loading.is_set() and str(arguments[0]).startswith(str(root)):
            opens[re.sub(r"[0-9a-f]{12}-\d+|\d+", "N", Path(str(arguments[0])).name)] += 1

    sys.addaudithook(count)
    store = dist.TCPStore("localhost", 0, 1, is_master=True, wait_for_workers=False)
    together = threading.Barrier(ranks)

    def run(rank: int) -> None:
        config = EngineConfig(stall_timeout_secs=SECS, budget_bytes=64 << 20, workers=1)
        coordinator = StoreCoordinator(store, rank=rank, world_size=ranks)
        with SyncCheckpointEngine(root, config, coordinator=coordinator) as engine:
            engine.save(state_of(rank, ranks, 5), step=1).result(SECS)
            together.wait(SECS)
            is_loading.set()
            state = state_of(rank, ranks, 0)
            engine.load(state)
            together.wait(SECS)
            is_loading.clear()
            wanted = state_of(rank, ranks, 5)
            assert (state["step"], state["rng"]) == (wanted["step"], wanted["rng"])
            assert all(torch.equal(state[name], wanted[name]) for name in wanted if name.startswith("norm"))
            assert all(
                torch.equal(state[name].tensor, wanted[name].tensor) for name in wanted if name.startswith("layer")
            )

    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(run, range(ranks)))
    print(json.dumps(opens))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
