"""Decide where every byte of a state goes, without copying any.

In: a ``FlatState``. Out: a ``PlannedSave``: the layout of the file image, the copy plan (which tensor goes by which
method to which offset). ``save_plan`` makes it, with ``global_plan`` (``.metadata``) and, for several ranks,
``shard_table``, ``assignment`` (which rank writes what) and ``differing_replicas`` (which values under one name may
differ). ``tied_tensors`` are stored once. ``frozen_leaves`` finds the leaves that do not change, and ``trusted_plan``
plans without them. ``file_plan`` and ``safetensors_plan`` place single files.
``copy_plan`` chooses the method of each copy, and ``gathering`` which small tensors go in one transfer. ``image_order``
decides where the items stand in the image, not when they are copied. ``layout`` gives each ``tensor_item`` its offset,
and ``chunks`` divides the image among writes. ``plan_cache`` reuses a plan if ``structure`` says that the state is the
same (names, shapes, dtypes, types of objects; never a value), and its copies if the ``fingerprint`` does. A cached plan
holds offsets and rendered bytes, never a tensor. Imports ``format``, ``state`` and ``memory``; never storage, threads
or stores. DCP's planner is called only here, in ``restore`` and in ``dcp``.
"""

from aio_ckpt.plan.assignment import assign
from aio_ckpt.plan.plan_cache import PlanCache
from aio_ckpt.plan.save_plan import PlannedSave

__all__ = ["PlanCache", "PlannedSave", "assign"]
