"""Decide where every byte of a state goes, without copying any.

In: a ``FlatState``. Out: a ``PlannedSave``: the layout of the file image, the copy plan (which tensor goes by which
method to which offset). ``save_plan`` makes it, with ``global_plan`` (``.metadata``) and, for several ranks,
``shard_table``, ``assignment`` (which rank writes what) and ``differing_replicas`` (which values under one name may
differ). ``tied_tensors`` are stored once. ``frozen_leaves`` finds the leaves that do not change, and ``trusted_plan``
plans without them. ``file_plan`` and ``safetensors_plan`` place single files. ``copy_plan`` chooses the method of each
copy and the order of the items in the image, which is not that of the copies; ``gathering`` chooses which small tensors
go in one transfer. ``layout`` gives each ``tensor_item`` its offset, and ``chunks`` divides the image among writes.
``plan_cache`` reuses a plan if ``structure`` says that the state is the same (names, shapes, dtypes, strides, devices,
types of objects; never a value), and its copies if the ``pointer_fingerprint`` does. A cached plan holds offsets and
rendered bytes, never a tensor. Imports ``format``, ``leaves``, ``state`` and ``memory``; never storage, threads or
stores. DCP's planner is called here, in ``checkpoint``, in ``restore`` and in ``dcp``.
"""
