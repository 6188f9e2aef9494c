"""Copy a planned state into leased host memory.

In: a ``PlannedSave`` and a lease. Out: an ``Image``. Its chunks are captured when their events are reached; from then
on, the caller may change its tensors. ``capture`` decides the order of the copies: those of unguarded tensors come
first; ``plan.copy_plan`` has chosen their methods. ``device_copy`` decides which tensors are copied within their
device, from which size and in how much memory; ``optimizer_guard``: what an optimizer waits for.
``gather_buffers`` collect small tensors on a device. ``image``: what is captured, as a ring of chunks, and the length
of its arena; ``captured_chunks``: which of them are captured. ``replica_sums`` sums what the ranks compare, ``sample``
compares frozen leaves that are not captured. ``stall_timer``: when a save last moved. Imports everything up to
``plan``; never storage.
"""
