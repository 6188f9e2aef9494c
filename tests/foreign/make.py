"""Write the checkpoints that stock ``dcp.save`` of the running torch writes: ``cd tests && python -m foreign.make``.

Run it with every new minor version of torch and commit the folder. It needs torch alone, no aio_ckpt.
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
from foreign.foreign_state import on_ranks, quiet, sharded_state, whole_state
from torch.distributed._shard.sharded_tensor import metadata as old_metadata
from torch.distributed.checkpoint import planner_helpers


def save_one_rank(path: Path) -> None:
    """Save the whole state."""
    dcp.save(whole_state(), checkpoint_id=path)


def save_two_ranks(path: Path) -> None:
    """Save this rank's part of the sharded state."""
    dcp.save(sharded_state(2), checkpoint_id=path)


def save_old_names(path: Path) -> None:
    """Save with the class of tensor properties that torch used before 2.3."""
    with mock.patch.object(planner_helpers, "TensorProperties", old_metadata.TensorProperties):
        dcp.save(whole_state(), checkpoint_id=path)


def main() -> None:
    """Write the three checkpoints of this torch."""
    minor = ".".join(torch.__version__.split(".")[:2])
    base = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    folder = base / f"torch-{minor}"
    with quiet():
        save_one_rank(folder / "one_rank")
        save_old_names(folder / "old_names")
    on_ranks(2, save_two_ranks, folder / "two_ranks")
    print(f"{folder}: {sum(file.stat().st_size for file in folder.rglob('*') if file.is_file())} bytes")


if __name__ == "__main__":
    main()
