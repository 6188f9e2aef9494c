"""States of the golden checkpoints, and how they are written: ``python tests/support/golden_state.py FOLDER``.

``tests/golden/0.1.0/`` keeps what the release 0.1.0 writes: one directory for each kind of checkpoint and one for
files. They stay for ever: a release whose format differs gets a directory of its own. The root has a neutral name
(``/golden/run``), as it stands in ``.metadata``; only the directory of the step is kept.
"""

from __future__ import annotations

import collections
import datetime
import shutil
import sys
import types
from collections import OrderedDict
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from rank_processes import ranks
from rank_states import spread
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from aio_ckpt import PerRank, SyncCheckpointEngine
from aio_ckpt.plan import frozen_leaves, layout

STEP = 7
RANKS = 3


def golden_state() -> dict[str, Any]:
    """Every kind of leaf and container, a few bytes of each."""
    weight = torch.arange(12).to(torch.bfloat16).reshape(3, 4)
    bits = torch.tensor([0x7FC12345, -0x80000000, 0x7F800000, 1, -1], dtype=torch.int32).view(torch.float32)
    return {
        "model": OrderedDict(weight=weight, bias=bits, tied=weight),
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.linspace(-1, 1, 12).reshape(4, 3).t()}},
            "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "params": [0]}],
        },
        "fp8": torch.tensor([0.5, -448.0], dtype=torch.float32).to(torch.float8_e4m3fn),
        "every other": torch.arange(8)[::2],
        "none of them": torch.empty(0, 3, dtype=torch.complex64),
        "mask": np.array([True, False, True]),
        "scalar": np.float64(2.5),
        "parts": [torch.tensor([1, 255], dtype=torch.uint8), ({"deep": torch.tensor(True)},)],
        "empty": {"here": {}},
        "name": "golden \N{SNOWMAN}",
        "rng": PerRank({"seed": 5}),
    }


def golden_objects() -> dict[str, Any]:
    """Objects that are read without trust, and tensors that consist of others."""
    return {
        "time": datetime.datetime(2026, 11, 28, 12, 30, 1, 250, tzinfo=datetime.UTC),
        "pause": datetime.timedelta(days=1, seconds=2),
        "path": PurePosixPath("/data/train"),
        "seen": frozenset({1, 2}),
        "tags": {"a", "b"},
        "large": 1 << 200,
        "bytes": b"\x00\xff",
        "nothing": b"",
        "decimal": Decimal("0.1"),
        "fraction": Fraction(1, 3),
        "complex": 1 - 2j,
        "words": np.array(["one", "three"]),
        "dtype": torch.float8_e4m3fn,
        "size": torch.Size([2, 3]),
        "device": torch.device("cuda", 1),
        "options": types.SimpleNamespace(lr=0.1, names=["a"]),
        "counts": collections.defaultdict(int, a=1),
        "queue": collections.deque([1, 2], maxlen=3),
        "sparse": torch.eye(3).to_sparse(),
        0: {(1, "a"): "keys"},
    }


def golden_tensors() -> dict[str, torch.Tensor]:
    """Tensors as an exporter has them: in two shards of at most 64 bytes, and two names of one."""
    weight = torch.arange(8.0)
    return {"weight": weight, "tied": weight, "bias": torch.arange(6).to(torch.bfloat16), "scale": torch.tensor(2.5)}


def golden_ranks(rank: int, count: int) -> dict[str, Any]:
    """State of one of several ranks: sharded in rows, unevenly and in columns, replicated, and of its own."""
    mesh = init_device_mesh("cpu", (count,))
    return {
        "rows": spread(torch.arange(24.0).reshape(6, 4), mesh, Shard(0)),
        "uneven": spread(torch.arange(8), mesh, Shard(0)),
        "columns": spread(torch.arange(12).to(torch.bfloat16).reshape(2, 6), mesh, Shard(1)),
        "replica": torch.linspace(0, 1, 5),
        "rng": PerRank(torch.full((2,), float(rank))),
        "mine": {f"rank_{rank}": torch.tensor([rank])},
        "epoch": 3,
    }


def _save_on_rank(rank: int, count: int, root: str) -> None:
    with SyncCheckpointEngine(root) as engine:
        engine.save(golden_ranks(rank, count), STEP).result()


def _write_one_rank(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        engine.save(golden_state(), STEP, metrics={"loss": 0.25, "odd": float("nan")}).result()


def _write_frozen(root: Path) -> None:
    """After steps in which only the optimizer changes."""
    # A frozen file of a few bytes is read like any other. The engine makes none.
    frozen_leaves.LEAST_FROZEN_BYTES = layout.LEAST_FROZEN_BYTES = 1
    with SyncCheckpointEngine(root) as engine:
        for step in range(1, STEP + 1):
            state = golden_state()
            if step < STEP:
                state["optimizer"]["state"][0]["step"] -= step
                state["optimizer"]["state"][0]["exp_avg"] *= 1 / step
            engine.save(state, step).result()


def _write_objects(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        engine.save(golden_objects(), STEP).result()


def _write_ranks(root: Path) -> None:
    with ranks(RANKS) as processes:
        processes.run(_save_on_rank, str(root))


def _write_path(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        engine.save(golden_state(), path=root / "best", extra={"epoch": 3}, files={"notes.txt": b"best"}).result()


def _write_files(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        engine.save_file(golden_tensors(), root / "model.safetensors", metadata={"format": "pt"}).result()
        engine.save_file(golden_tensors(), root / "sharded" / "model.safetensors", max_shard_bytes=40).result()
        state = {name: value for name, value in golden_state().items() if name not in {"rng", "scalar", "mask"}}
        engine.save_file(state, root / "state.pt").result()


KINDS: dict[str, Callable[[Path], None]] = {
    "one_rank": _write_one_rank,
    "frozen": _write_frozen,
    "objects": _write_objects,
    "ranks": _write_ranks,
    "path": _write_path,
    "files": _write_files,
}
_KEPT = {"path": "best", "files": "[!.]*"}
"""What is kept of a root, if it is not the last step."""


def main(target: Path) -> None:
    """Write each kind that ``target`` lacks."""
    root = Path("/golden/run")
    for kind, write in KINDS.items():
        if not (target / kind).exists():
            shutil.rmtree(root, ignore_errors=True)
            root.mkdir(parents=True)
            write(root)
            for path in root.glob(_KEPT.get(kind, f"step_{STEP:09d}")):
                copy = shutil.copytree if path.is_dir() else shutil.copy2
                (target / kind).mkdir(parents=True, exist_ok=True)
                copy(path, target / kind / path.name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
