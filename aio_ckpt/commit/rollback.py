"""Rollback: the steps after one are moved below ``.aio_ckpt/abandoned/``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from aio_ckpt.commit.discovery import CommittedCheckpoint, step_directories, torn_among
from aio_ckpt.commit.root_claim import Check
from aio_ckpt.commit.step_numbers import check_step_number
from aio_ckpt.errors import CheckpointNotFoundError
from aio_ckpt.format.root_names import abandoned_name
from aio_ckpt.format.step_names import StepNames
from aio_ckpt.message_texts import steps_shown
from aio_ckpt.storage.durability import sync_parents
from aio_ckpt.storage.local import Storage


async def abandon_after(storage: Storage, root: Path, names: StepNames, step: int, tag: str, check: Check) -> list[int]:
    """Move every committed step after ``step`` below ``.aio_ckpt/abandoned/``, newest first; nothing is deleted.

    A later step that has lost its ``.metadata`` is moved, too: it would be in the way of the next save of that step.
    Newest first: a crash between two renames leaves a prefix of the history, never one with a gap.

    ``check`` raises if this process may not write under the root any more. It is called before each rename.

    Raises:
        CheckpointNotFoundError: ``step`` is not committed.
    """
    step = check_step_number(step)
    entries = await step_directories(storage, root, names)  # all directories: a step may have two
    steps = sorted({checkpoint.step for checkpoint in entries.committed})
    if step not in steps:
        known = steps_shown(steps)
        raise CheckpointNotFoundError(f"rollback({step}): no such committed step under {root}; committed are {known}")
    found = [*entries.committed, *await torn_among(storage, entries)]
    found.sort(key=lambda checkpoint: checkpoint.step, reverse=True)
    later = [checkpoint for checkpoint in found if checkpoint.step > step]
    await abandon(storage, root, later, tag, check)
    return sorted({checkpoint.step for checkpoint in later}, reverse=True)


async def abandon(
    storage: Storage,
    root: Path,
    checkpoints: Iterable[CommittedCheckpoint],
    tag: str,
    check: Check,
) -> None:
    """Move checkpoints below ``.aio_ckpt/abandoned/``, in their order; see :func:`abandon_after`."""
    for checkpoint in checkpoints:
        target = root / abandoned_name(tag, checkpoint.path.name)
        await check()
        await storage.rename(checkpoint.path, target)
        await sync_parents(storage, checkpoint.path, target)  # after each rename: a power loss may keep any of several
