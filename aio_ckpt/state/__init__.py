"""Take a user's nested state apart, and put a state together again. Pure, but for ``put_back``.

In: a nested state or template. Out: its names, leaves and skeleton (``flatten``), the bytes of its leaves that are no
tensors (``objects``) and the memory that its tensors occupy (``tensor_memory``). From loaded leaves and a skeleton, the
state again (``build``); loaded leaves, set in the containers of a template (``put_back``). Imports ``format``,
``errors`` and ``_torch``.
"""

from aio_ckpt.state.flatten import FlatState, Template
from aio_ckpt.state.skeleton import Skeleton
from aio_ckpt.state.values import LeafKind, PerRank, Shard

__all__ = ["FlatState", "LeafKind", "PerRank", "Shard", "Skeleton", "Template"]
