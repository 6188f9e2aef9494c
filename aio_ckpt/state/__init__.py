"""Take a user's nested value apart, and put one together again.

In: a nested state or template. Out: its names, leaves and skeleton, the bytes of its non-tensor leaves, the memory that
its tensors occupy; and from loaded leaves the state again. Imports ``format``.
"""

from aio_ckpt.state.flatten import FlatState, put_back
from aio_ckpt.state.skeleton import build
from aio_ckpt.state.values import PerRank

__all__ = ["FlatState", "PerRank", "build", "put_back"]
