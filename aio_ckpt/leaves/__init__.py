"""Store what stands in a state: objects, containers of any type, keys, tensors that consist of other tensors. Pure.

In: one value of a state. Out: its bytes or parts, and a note of its type (``objects``, ``arrays``, ``containers``,
``compound``, ``keys``).

In: bytes or parts, and a note. Out: the value, made without running code unless its type is trusted
(``object_unpickler``; ``pickle_allow_list.HARMLESS``: paths, dates, random generators, enumerations); ``refill`` puts
it into a mutable value of a template. ``values`` are the leaves that have a meaning of their own, ``tensor_memory``
tells which tensors share memory. Imports ``format``, ``errors`` and ``_torch``.
"""
