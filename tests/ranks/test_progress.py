"""Progress and statistics of many ranks: each rank tells its own bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rank_processes import Ranks, engine_on

from aio_ckpt import PerRank, Progress

SECS = 30.0
MIB = 1 << 20


def state_of(rank: int, value: float) -> dict[str, Any]:
    """A state of one MiB more on each rank."""
    return {"own": PerRank(torch.full(((rank + 1) * MIB,), value, dtype=torch.uint8)), "step": 1}


def save_and_load(rank: int, count: int, root: Path) -> tuple[list[str], list[int], list[object]]:
    told: list[Progress] = []
    with engine_on(root, SECS) as engine:
        ticket = engine.save(state_of(rank, 1))
        report = ticket.result(SECS)
        assert report is not None
        saved = ticket.progress
        engine.load(state_of(rank, 0), progress=told.append if rank else None)  # the ranks need not do alike
        stats = engine.stats()
        assert (saved.stage, saved.bytes_done, saved.bytes_total) == ("done", report.image_bytes, report.image_bytes)
        assert abs(sum(stats.stage_secs.values()) - report.timings.committed_secs) < 1e-6
        stages = list(dict.fromkeys(now.stage for now in told))
        bytes_of = [report.image_bytes // MIB, *(now.bytes_done // MIB for now in told[-1:])]
        return stages, bytes_of, [stats.rank, stats.committed, stats.newest_step, stats.newest_age_secs is not None]


def test_each_rank_tells_its_own_bytes_and_only_where_it_is_asked(two: Ranks, tmp_path: Path) -> None:
    leader, other = two.run(save_and_load, tmp_path)
    assert leader == ([], [1], [0, 1, 1, True])
    assert other == (["read", "apply", "done"], [2, 2], [1, 1, 1, True])
