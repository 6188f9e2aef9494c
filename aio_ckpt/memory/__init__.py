"""Lend host memory within a byte budget, and copy tensors into it and out of it.

In: sizes; tensors. Out: leases on page-aligned arenas, read buffers, and copies with the events that mark their end.
``lifetime`` lends arenas within ``budget_bytes``, whose default ``available`` measures; ``arena`` is one of them.
``torch.cuda`` is used here only. Imports ``runtime`` and ``format``.
"""

from aio_ckpt.memory.image_copies import Copies
from aio_ckpt.memory.lifetime import Lease, LifetimeManager

__all__ = ["Copies", "Lease", "LifetimeManager"]
