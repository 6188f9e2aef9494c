"""Turn values into the bytes of a checkpoint and back: pure, without a file and without a thread.

In: tensor specs, tables and manifests, or bytes that are not trusted. Out: the ``torch.save`` zip of one tensor,
our root and rank manifests, DCP's ``.metadata``, the names of files and directories; and all of these parsed, which
runs no code: each reader of pickles has its own list of what is allowed, on ``restricted_unpickler`` (that of objects:
``leaves.pickle_allow_list``). Imports ``errors``, ``config`` and ``reports`` only.
Names, constants and the root manifest need neither torch nor numpy.
"""

from aio_ckpt.format.root_manifest import RootManifest
from aio_ckpt.format.root_names import StepNames

__all__ = ["RootManifest", "StepNames"]
