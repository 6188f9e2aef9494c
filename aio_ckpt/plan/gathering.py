"""Which tensors of a device are gathered: copied together into a buffer on the device, from which one transfer goes."""

from __future__ import annotations

import torch

from aio_ckpt.memory.cuda_driver import batch_copy

_GATHERED_BELOW_BYTES = 1 << 20
"""Issued one by one, transfers of 64 KiB reach 19.6 GB/s, and transfers of 1 MiB 49.7. To issue 10,000 of 64 KiB costs
the host 30 ms, and 3 ms if they are gathered."""
_GATHERED_BESIDE_BATCHES_BELOW_BYTES = 64 << 10
"""In one batch, 10,000 transfers of 64 KiB cost the host 4.2 ms and reach 53 GB/s (bench/results). So only smaller
tensors are worth a copy on the device."""
LEAST_ITEMS = 32
"""Least number of items of a gather run. Fewer are copied one by one, as they do not pay for a buffer."""


def gathered_below_bytes(device: torch.device) -> int:
    """Return the size in bytes below which tensors on ``device`` are gathered there before they are moved; 0: none."""
    if device.type != "cuda":
        return 0
    return _GATHERED_BESIDE_BATCHES_BELOW_BYTES if batch_copy() is not None else _GATHERED_BELOW_BYTES


def is_gathered(device: torch.device, nbytes: int, gather_bytes: int) -> bool:
    """Return whether a tensor of ``nbytes`` on ``device`` is gathered there, given a buffer of ``gather_bytes``."""
    return bool(gather_bytes) and nbytes < gathered_below_bytes(device)
