"""The state that the golden checkpoints hold, and how they are written: ``python tests/support/golden_state.py ROOT``.

``tests/golden/v1/`` keeps a checkpoint of format 1.0, ``v2/`` one of 2.0, with a frozen file (``ROOT frozen``).
Before the first release they are written anew when the format changes; after it, a changed format gets a directory of
its own and these stay for ever. The root has a neutral name (it stands in ``.metadata``), and only the directory of the
step is kept.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from typing import Any

import numpy as np
import torch

from aio_ckpt import PerRank, SyncCheckpointEngine
from aio_ckpt.plan import frozen, layout

STEP = 7


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


def write(root: str, *, has_frozen: bool) -> None:
    """Write the state into ``root``: for a frozen file after steps in which only the optimizer changes."""
    with SyncCheckpointEngine(root) as engine:
        for step in range(1, STEP) if has_frozen else ():
            state = golden_state()
            state["optimizer"]["state"][0]["step"] -= step
            state["optimizer"]["state"][0]["exp_avg"] *= 1 / step
            engine.save(state, step).result()
        engine.save(golden_state(), STEP, metrics={"loss": 0.25, "odd": float("nan")}).result()


if __name__ == "__main__":
    # A frozen file of a few bytes is read like any other. The engine makes none.
    frozen.LEAST_FROZEN_BYTES = layout.LEAST_FROZEN_BYTES = 1
    write(sys.argv[1], has_frozen=sys.argv[2:] == ["frozen"])
