"""Shards of torch's ``ShardedTensor``."""

from __future__ import annotations

import torch

from aio_ckpt._torch import ShardedTensor
from aio_ckpt.errors import UnsupportedLeafError
from aio_ckpt.leaves.values import OwnedShard


def shard_of(tensor: ShardedTensor, name: str) -> OwnedShard:
    """Return this rank's shard of a ``ShardedTensor`` (FSDP1 without a mesh, TorchRec), which may be empty.

    Raises:
        UnsupportedLeafError: this rank holds several shards.
    """
    shards, metadata = tensor.local_shards(), tensor.metadata()
    shape = tuple(metadata.size)
    if len(shards) > 1:
        raise UnsupportedLeafError(
            f"{name!r}: a ShardedTensor of which this rank holds {len(shards)} shards, and one name stands for one: "
            "give each as an aio_ckpt.Shard of a tensor of its own"
        )
    if not shards:
        empty = torch.empty((0,) * len(shape), dtype=metadata.tensor_properties.dtype)
        return OwnedShard(empty, shape, (0,) * len(shape), tensor)
    return OwnedShard(shards[0].tensor, shape, shards[0].metadata.shard_offsets, tensor)
