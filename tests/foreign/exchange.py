"""What another version of torch and aio_ckpt read of each other: the rows of README's table of versions.

``cd tests && python -m foreign.exchange save FOLDER`` writes with the engine and with ``aio_ckpt.dcp.Writer`` of the
running torch. ``... load FOLDER`` reads that with stock ``dcp.load`` alone, and works without aio_ckpt.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from foreign.foreign_state import assert_equal, blank, on_ranks, quiet, sharded_state, whole_state


def save_all(path: Path) -> None:
    """Save with the engine and with the Writer; sharded if there is a process group."""
    from aio_ckpt import SyncCheckpointEngine
    from aio_ckpt.dcp import Writer

    state = _state()
    with SyncCheckpointEngine(path / "engine") as engine:
        engine.save(state, step=1).result()
    with Writer(path / "writer") as writer:
        dcp.save(state, storage_writer=writer)


def load_all(path: Path) -> None:
    """Load both with stock ``dcp.load`` and compare."""
    for found in (path / "engine" / "step_000000001", path / "writer"):
        wanted = _state()
        target = blank(wanted)
        dcp.load(target, checkpoint_id=found)
        assert_equal(target, wanted)


def _state() -> dict:
    return sharded_state(2) if torch.distributed.is_initialized() else whole_state()


def main() -> None:
    """Run one half of the exchange."""
    work, folder = {"save": save_all, "load": load_all}[sys.argv[1]], Path(sys.argv[2])
    with quiet():
        work(folder / "one_rank")
    on_ranks(2, work, folder / "two_ranks")
    print(f"torch {torch.__version__}: {sys.argv[1]} of {folder} passed")


if __name__ == "__main__":
    main()
