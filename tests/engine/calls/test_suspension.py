"""A trainer that is suspended, as Ctrl-Z, Slurm and ``docker pause`` do it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from warm_python import WarmPython

_SOURCE = """
    import sys, torch
    from aio_ckpt import EngineConfig, SyncCheckpointEngine

    state = {"w": torch.ones(8_000_000)}
    config = EngineConfig(stall_timeout_secs=3, max_write_bytes_per_sec=8 << 20)
    with SyncCheckpointEngine(sys.argv[1], config) as engine:
        ticket = engine.save(state)
        print("saving", flush=True)
        print("saved", ticket.result(60).step, flush=True)
"""


@pytest.mark.slow
def test_a_save_goes_on_after_its_process_was_suspended_for_longer_than_the_stall_limit(tmp_path: Path) -> None:
    """The time of that is no stall of the disk."""
    with WarmPython(_SOURCE, str(tmp_path / "run"), stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "saving\n"
        os.kill(child.pid, signal.SIGSTOP)
        time.sleep(6)  # longer than the limit: of the clock that goes on while the process stands still
        os.kill(child.pid, signal.SIGCONT)
        assert child.stdout.readline() == "saved 1\n"
