"""The recipe for Ray Train, run by Ray. Skipped without Ray: ``pip install 'ray[train]'``."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from child_python import child_environment

import aio_ckpt

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="could not import 'ray'"),
]
REPOSITORY = Path(__file__).parents[2]
LONG_SECS = 300.0


@pytest.mark.parametrize("ranks", [1, 2])
def test_ray_learns_of_durable_checkpoints(tmp_path: Path, ranks: int) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs/coming-from/huggingface.md").read_text(), re.DOTALL)
    block = next(block for block in blocks if "ray.train" in block)
    for last in (4, 6):  # the second run goes on after the first
        command = [sys.executable, str(REPOSITORY / "tests/support/ray_run.py")]
        done = subprocess.run(
            [*command, block.replace("range(first, 4)", f"range(first, {last})"), str(tmp_path), str(ranks)],
            env=child_environment(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0"),
            capture_output=True,
            text=True,
            timeout=LONG_SECS,
        )
        assert done.returncode == 0, done.stderr
        newest = tmp_path / "run" / "steps" / f"step_{last - 1:09d}"
        assert f"RESULT {last - 1} {newest}" in done.stdout
        assert aio_ckpt.read(newest)["model"].keys() == {"weight", "bias"}
    assert sorted(os.listdir(newest.parent))[-5:] == [f"step_{step:09d}" for step in range(1, 6)]
