"""Trainers under torchrun in tests: a command whose ranks are ended with it, and whose output goes to a file."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_END_SECS = 60.0


def torchrun(ranks: int) -> list[str]:
    """Begin of a command that starts a script on ``ranks`` ranks of this host."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


def run_logged(command: Sequence[str], log: Path, *, env: Mapping[str, str], secs: float) -> int:
    """Return the exit code of ``command``, which is ended after ``secs`` seconds."""
    with log.open("wb") as file:
        running = subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT)
        try:
            return running.wait(secs)
        except subprocess.TimeoutExpired:
            running.terminate()  # torchrun ends its ranks, in the end by force
            return running.wait(_END_SECS)
