"""Take a user's nested state apart, and put a state together again. Pure, but for ``put_back``.

In: a nested state or template. Out: its names, leaves and skeleton (``flatten``).

In: a skeleton and loaded leaves. Out: the nested state (``build``). ``put_back`` sets loaded leaves in the containers
of a template instead. Imports ``leaves``, ``format``, ``errors`` and ``_torch``.
"""

from aio_ckpt.state.flatten import FlatState, Template
from aio_ckpt.state.skeleton import Skeleton

__all__ = ["FlatState", "Skeleton", "Template"]
