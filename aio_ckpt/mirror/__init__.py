"""Mirror: a second root, on another file system or in an object store, to which committed steps are copied.

:class:`~aio_ckpt.mirror.mirroring.Mirroring` runs beside the engine and says which step is copied next, and when again
after a failure; :mod:`~aio_ckpt.mirror.copy_step` copies one, by :mod:`aio_ckpt.copying`, which says how many files
go at once; :mod:`~aio_ckpt.mirror.pace` limits its bytes a second.
"""

from __future__ import annotations

from aio_ckpt.mirror.mirroring import Mirroring

__all__ = ["Mirroring"]
