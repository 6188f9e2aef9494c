"""Keep staged snapshots in named shared memory, and commit those that a killed trainer left there.

In: orphaned segments. Out: committed checkpoints, or the reason why one cannot be committed. Optional: without
``shm_path`` nothing here runs. Imports everything up to ``commit``.
"""

from aio_ckpt.rescue.commit import rescue_root
from aio_ckpt.rescue.segment import SegmentDirectory

__all__ = ["SegmentDirectory", "rescue_root"]
