"""Mirror: a second root, on another file system or in an object store, to which committed steps are copied.

``mirror_queue`` runs beside the engine and says which step is copied next, and when again after a failure;
``copy_step`` copies one, by :mod:`aio_ckpt.copying`, which says how many files go at once; ``pace`` limits its bytes a
second.
"""
