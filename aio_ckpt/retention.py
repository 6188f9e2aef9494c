"""Retention: which committed steps are deleted, and how, so that a crash leaves trash but never a torn step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from aio_ckpt.commit import TRASH_PREFIX, Committed
from aio_ckpt.storage import Storage

__all__ = ["expired", "remove_expired"]


def expired(committed: Sequence[Committed], *, keep_last: int | None, keep_every: int | None) -> list[Committed]:
    """Steps to delete, oldest first. Without ``keep_last`` none; the newest never."""
    if keep_last is None:
        return []
    return [
        checkpoint
        for checkpoint in committed[: -max(keep_last, 1)]
        if keep_every is None or checkpoint.step % keep_every
    ]


async def remove_expired(storage: Storage, root: Path, checkpoints: Sequence[Committed]) -> None:
    """Delete checkpoints: renamed to trash first, so that no half-deleted directory is ever listed."""
    for checkpoint in checkpoints:
        trash = root / f"{TRASH_PREFIX}{checkpoint.path.name}"
        await storage.rename(checkpoint.path, trash)
        await storage.sync_dir(root)
        await storage.remove_tree(trash)
