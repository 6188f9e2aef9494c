"""Sample of the frozen leaves: random blocks of their memory, compared with the sums of their file."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch

from aio_ckpt.format.checksum import crc32_of
from aio_ckpt.format.constants import BLOCK_BYTES
from aio_ckpt.memory.copies import Copies
from aio_ckpt.memory.cuda import CopyStreams
from aio_ckpt.plan.structure import flat_bytes
from aio_ckpt.plan.tensor_item import TensorItem
from aio_ckpt.snapshot.image import Image

_BLOCKS = 64
SAMPLE_BYTES = _BLOCKS * BLOCK_BYTES
"""Bytes behind an image that :func:`differing_item` needs."""


def differing_item(
    items: Sequence[TensorItem], tensors: Sequence[torch.Tensor], sums: bytes, image: Image, streams: CopyStreams
) -> TensorItem | None:
    """Return an item of which a random block does not have its sum; None if all blocks that were looked at have it.

    Blocks the caller until its streams have reached the copies.

    Args:
        items: those of a frozen file.
        tensors: local tensor of every tensor leaf. Those of ``items`` hold the bytes that a data file stores.
        sums: CRC32 of each block of the items, u32.
        image: image with ``SAMPLE_BYTES`` behind it, for the blocks.
    """
    stops = np.cumsum([-(-item.raw_bytes // BLOCK_BYTES) for item in items])
    # An own generator: the trainer's seed must neither choose the blocks nor see them chosen.
    blocks = random.SystemRandom().sample(range(int(stops[-1])), min(_BLOCKS, int(stops[-1])))
    chosen = np.searchsorted(stops, blocks, side="right").tolist()
    arena, base = image.lease.arena, image.chunks[-1].stop
    begun: dict[torch.device, Copies] = {}
    views: list[memoryview] = []
    try:
        for number, (block, index) in enumerate(zip(blocks, chosen, strict=True)):
            item, tensor = items[index], tensors[items[index].leaf].detach()
            start = (block - (int(stops[index - 1]) if index else 0)) * BLOCK_BYTES
            nbytes = min(BLOCK_BYTES, item.raw_bytes - start)
            offset = base + number * BLOCK_BYTES
            if tensor.device not in begun:
                begun[tensor.device] = streams.begin(tensor.device, is_registered=arena.is_registered)
            source = flat_bytes(tensor)[start : start + nbytes]
            begun[tensor.device].copy(arena.tensor[offset : offset + nbytes], source)
            views.append(memoryview(arena.memory)[offset : offset + nbytes])
    finally:
        for copies in begun.values():
            copies.record_event().synchronize()
    wanted = np.frombuffer(sums, "<u4")[blocks].tolist()
    found = [crc32_of(view) for view in views]
    return next((items[index] for index, old, new in zip(chosen, wanted, found, strict=True) if old != new), None)
