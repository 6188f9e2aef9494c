"""Copy what was planned into leased host memory.

In: a ``PlannedSave`` and a lease. Out: an ``Image`` whose chunks are captured once their events are reached, so that
the caller may change its tensors again. Imports everything up to ``plan``; never storage.
"""

from aio_ckpt.snapshot.capture import Capture
from aio_ckpt.snapshot.image import Image
from aio_ckpt.snapshot.optimizer_guard import OptimizerGuards

__all__ = ["Capture", "Image", "OptimizerGuards"]
