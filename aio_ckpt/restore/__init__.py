"""Load a checkpoint into a template, or read its state without one.

In: a checkpoint directory, and a template if values are to be filled in place. Out: values whose checksums were
verified, or an error that names the damaged file and tensor. ``plan_fills`` finds the bytes of each fill,
``page_cache`` decides whether the page cache is used, ``fetch_values`` reads and decodes, ``apply`` lets the takers put
their values. Imports ``match``, ``checkpoint`` and what they import; nothing that saves.
"""

from aio_ckpt.restore.load import match_checkpoint
from aio_ckpt.restore.read import read_state

__all__ = ["match_checkpoint", "read_state"]
