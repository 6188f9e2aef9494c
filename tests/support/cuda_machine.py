"""What the tests that need a GPU share."""

from __future__ import annotations

import torch

from aio_ckpt.config import Staging

TIMEOUT = 60.0
"""Deadline of every wait in a test; none is reached unless something is wrong."""
MIB = 1 << 20
STAGINGS: tuple[Staging, ...] = ("pinned", "shm", "pageable")


def ones(count: int, nbytes: int, value: float) -> dict[str, torch.Tensor]:
    """``count`` float32 tensors of ``nbytes`` bytes on the GPU, every element ``value``."""
    return {f"w{i}": torch.full((nbytes // 4,), value, device="cuda") for i in range(count)}
