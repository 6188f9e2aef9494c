"""Copies of steps in a mirror: those that a load may take, and those that its root has abandoned."""

from __future__ import annotations

from pathlib import Path

from aio_ckpt.commit.discovery import CommittedCheckpoint, discover, read_save_id
from aio_ckpt.format.names import ABANDONED_DIR, StepNames
from aio_ckpt.storage.local import Storage, names_in


async def counting_copies(storage: Storage, root: Path, mirror: Path, names: StepNames) -> list[CommittedCheckpoint]:
    """Return the committed checkpoints of a mirror, ascending, without those that the root has abandoned."""
    aside = {copy.path for copy in await abandoned_copies(storage, root, mirror, names)}
    return [copy for copy in await discover(storage, mirror, names) if copy.path not in aside]


async def abandoned_copies(storage: Storage, root: Path, mirror: Path, names: StepNames) -> list[CommittedCheckpoint]:
    """Return the checkpoints of a mirror whose very saves a rollback of the root has set aside, newest first."""
    aside: dict[int, list[Path]] = {}
    for name in await names_in(storage, root / ABANDONED_DIR):
        step = names.step(name.partition("-")[2])
        if step is not None:
            aside.setdefault(step, []).append(root / ABANDONED_DIR / name)
    found = []
    for copy in await discover(storage, mirror, names) if aside else []:
        if copy.step in aside:
            save_id = await read_save_id(storage, copy.path)
            if save_id and save_id in [await read_save_id(storage, each) for each in aside[copy.step]]:
                found.append(copy)
    return found[::-1]
