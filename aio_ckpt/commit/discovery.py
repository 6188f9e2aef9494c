"""What the committed checkpoints of a root say of themselves."""

from __future__ import annotations

from pathlib import Path

from aio_ckpt.errors import AioCkptError
from aio_ckpt.format.manifests import ROOT_MANIFEST, decode_root
from aio_ckpt.storage.local import Storage, read_small_file

__all__ = ["read_save_id"]


async def read_save_id(storage: Storage, checkpoint: Path) -> str:
    """Of the save that wrote it; "" if that cannot be told."""
    try:
        data = await read_small_file(storage, checkpoint / ROOT_MANIFEST)
        return "" if data is None else decode_root(data, name=ROOT_MANIFEST).save_id
    except AioCkptError:
        return ""
