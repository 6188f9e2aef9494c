"""Load a checkpoint into a template, or read its state without one.

In: a checkpoint directory, and a template if values are to be filled in place. Out: values whose checksums were
verified, or an error that names the damaged file and tensor. ``load_plan`` decides what is read, ``page_cache`` whether
the page cache is used, ``apply`` sets the values. Imports ``match``, ``checkpoint`` and what they import; nothing that
saves.
"""

from aio_ckpt.restore.load import load_checkpoint
from aio_ckpt.restore.read import read_state

__all__ = ["load_checkpoint", "read_state"]
