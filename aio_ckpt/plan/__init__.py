"""Decide where every byte of a state goes, without copying any.

In: a ``FlatState``. Out: a ``PlannedSave``: the layout of the file image, the copy plan (which tensor goes by which
method to which offset); for several ranks, also the assignment. ``frozen_leaves`` finds the leaves that do not change,
and ``trusted_plan`` plans without them.
``copy_plan`` chooses the method of each copy: which small tensors are gathered into one transfer, below which size; its
``image_order`` decides where the items stand in the image, not when they are copied. ``layout`` gives each
``tensor_item`` its offset, and ``chunks`` divides the image among writes. ``plan_cache`` decides by the structure
whether a plan is reused, and by the ``fingerprint`` whether its copies are. A cached plan holds offsets and rendered
bytes, never a tensor. Imports ``format``, ``state`` and ``memory``; never storage, threads or stores. DCP's planner is
called only here, in ``restore`` and in ``dcp``.
"""

from aio_ckpt.plan.assignment import assign
from aio_ckpt.plan.plan_cache import PlanCache
from aio_ckpt.plan.save_plan import PlannedSave

__all__ = ["PlanCache", "PlannedSave", "assign"]
