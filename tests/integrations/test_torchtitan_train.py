"""The real ``torchtitan.train`` on a GPU, with CUDA graphs: killed, resumed, and as a run that was not disturbed."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.fsdp

import aio_ckpt

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed"),
    pytest.mark.skipif(
        not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"), reason="torchtitan.train needs torch 2.12"
    ),
    pytest.mark.gpu(1),
]
TIMEOUT = 150.0
LAST = "step-12"


def train(folder: Path, config: str, *, killed_behind: int | None = None) -> dict[int, str]:
    """Train in a process of its own. Returns the losses that it logged, by step."""
    command = [sys.executable, "-m", "tests.integrations.titan_train"]
    command += ["--module", "tests.integrations.titan_config", "--config", config]
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    kill = {} if killed_behind is None else {"KILLED_BEHIND": str(killed_behind)}
    env = os.environ | place | kill | {"DUMP_FOLDER": str(folder), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    done = subprocess.run(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT, check=False
    )
    print(done.stdout)
    assert done.returncode == (0 if killed_behind is None else -signal.SIGKILL)
    plain = re.sub(r"\x1b\[[\d;]*m", "", done.stdout)
    return {int(step): loss for step, loss in re.findall(r"step: *(\d+) +loss: *([\d.]+)", plain)}


def test_a_killed_torchtitan_resumes_with_equal_losses_and_equal_bits(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", "ours")
    train(tmp_path / "killed", "ours", killed_behind=8)
    resumed = train(tmp_path / "killed", "ours")
    by_stock = train(tmp_path / "stock", "stock")
    assert resumed == {step: whole[step] for step in (9, 10, 11, 12)}
    assert by_stock == whole
    states = [aio_ckpt.read(tmp_path / run / "checkpoint" / LAST) for run in ("whole", "killed")]
    tensors = [{name: value for name, value in state.items() if isinstance(value, torch.Tensor)} for state in states]
    assert tensors[0].keys() == tensors[1].keys() != set()
    for name, value in tensors[0].items():
        assert torch.equal(value, tensors[1][name]), name
