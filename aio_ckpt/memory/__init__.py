"""Lend host memory within a byte budget, and copy tensors into it and out of it.

In: sizes; tensors. Out: leases on page-aligned arenas, read buffers, and copies with the events that mark their end.
``arena_lifetimes`` lends arenas within ``budget_bytes``, whose default ``available`` measures, and frees those that are
too large or not needed (an image that never fits is a BudgetExceededError, a wait for other saves a StallError); an
``arena`` is the staging memory of one save, page-locked if a device is copied into it, and ``staging_kind`` decides of
which memory: pageable if locking fails. ``read_buffers`` serve reads. ``copies`` and ``host_copy`` copy host memory;
``cuda`` copies from and to devices: its streams wait for the work of the caller's stream (``cuda_driver``: many copies
in one call). ``torch.cuda`` is used here only. Imports ``runtime``, ``format`` and ``config``.
"""
