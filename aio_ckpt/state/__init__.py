"""Take a user's nested state apart, and put a state together again. Pure, but for ``put_back``.

In: a nested state or template. Out: its names, leaves and ``skeleton`` (``flatten``; ``leaf_or_container`` tells which
is which, ``check_leaves`` refuses what cannot be stored). ``names`` and ``dcp_paths`` are told by the skeleton.

In: a skeleton, of one rank or of all (``skeleton_union``), and loaded leaves. Out: the nested state (``build``).
``put_back`` sets loaded leaves in the containers of a template instead. Imports ``leaves``, ``format``, ``errors`` and
``_torch``.
"""
