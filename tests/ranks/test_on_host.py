"""The ranks of a host share its memory, and those of other hosts take nothing from it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from log_lines import kept_lines
from rank_processes import Ranks

from aio_ckpt import EngineConfig, SyncCheckpointEngine
from aio_ckpt.dcp.call_resources import default_group_ranks_on_host
from aio_ckpt.memory import available

MIB = 1 << 20
ONE_A_HOST = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}


def saved(rank: int, count: int, root: Path, launcher: dict[str, str]) -> tuple[int, list[str]]:
    """Save 24 MiB on a host with 64 MiB; how many ranks the replacements see there, and what was logged."""
    environment = {name: text for name, text in os.environ.items() if name != "LOCAL_WORLD_SIZE"}
    with pytest.MonkeyPatch.context() as patch, kept_lines() as lines:
        patch.setattr(os, "environ", environment | launcher | {"SLURM_NODEID": str(rank), "SLURM_PROCID": str(rank)})
        patch.setattr(available, "available_bytes", lambda: 64 * MIB)
        with SyncCheckpointEngine(root, EngineConfig(stall_timeout_secs=60.0)) as engine:
            engine.save({f"w{rank}": torch.ones(6 * MIB)}).result()
        return default_group_ranks_on_host(), lines.messages


def test_a_rank_takes_its_share_of_half_of_the_memory_and_the_log_names_the_share(two: Ranks, tmp_path: Path) -> None:
    share = f"budget_bytes={16 * MIB} (the share of one of 2 ranks on this host) holds no more"
    for here, lines in two.run(saved, tmp_path / "one host", {}):
        assert here == 2
        assert any(share in line for line in lines), lines
    assert two.run(saved, tmp_path / "a host each", ONE_A_HOST) == [(1, [])] * 2
