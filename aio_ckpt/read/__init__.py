"""Load checkpoints and verify them.

In: a checkpoint directory, and a template where its values are to be filled in place. Out: values whose checksums were
proven, or an error that names what is damaged. Knows nothing of saving: imports ``runtime``, ``format``, ``state``,
``memory`` and ``storage`` only.
"""

from aio_ckpt.read.load import load_checkpoint, read_state
from aio_ckpt.read.verify import verify_checkpoint

__all__ = ["load_checkpoint", "read_state", "verify_checkpoint"]
