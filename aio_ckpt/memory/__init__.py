"""Lend host memory within a byte budget, and copy tensors into it and out of it.

In: sizes; tensors. Out: leases on page-aligned arenas, read buffers, and copies with the events that mark their end.
``torch.cuda`` is used here only. Imports ``runtime`` and ``format``.
"""

from aio_ckpt.memory.image_copies import Copies
from aio_ckpt.memory.lifetime import Lease, LifetimeManager

__all__ = ["Copies", "Lease", "LifetimeManager"]
