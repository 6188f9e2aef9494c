"""Mirror: a second root, on another file system or in an object store, to which committed steps are copied.

:class:`~aio_ckpt.mirror.mirroring.Mirroring` runs beside the engine and says which step is copied next;
:mod:`~aio_ckpt.mirror.copy_step` copies one.
"""

from __future__ import annotations

from aio_ckpt.mirror.mirroring import Mirroring

__all__ = ["Mirroring"]
