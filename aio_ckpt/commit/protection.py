"""Protected steps: each has a file that keeps retention and ``delete`` from the step."""

from __future__ import annotations

import errno
from pathlib import Path

from aio_ckpt.commit.discovery import discover
from aio_ckpt.commit.engine_dirs import refuse_linked_dirs
from aio_ckpt.commit.step_numbers import check_step_number
from aio_ckpt.errors import CheckpointNotFoundError, WriteError
from aio_ckpt.format.root_names import PROTECTED_DIR, protected_name, protected_step
from aio_ckpt.format.step_names import StepNames
from aio_ckpt.message_texts import steps_shown
from aio_ckpt.storage.local import Storage, names_in


async def protected_steps(storage: Storage, root: Path) -> set[int]:
    """Return the protected steps, committed or not."""
    names = await names_in(storage, root / PROTECTED_DIR)
    return {step for name in names if (step := protected_step(name)) is not None}


async def protect(storage: Storage, root: Path, names: StepNames, step: int) -> None:
    """Protect a committed step from deletion. Needs no lock.

    The mark is set first and the step is checked afterwards. Retention renames a step first and checks for the mark
    afterwards. So one of the two sees the other.

    Raises:
        CheckpointNotFoundError: ``step`` is not committed.
        StepOrderError: ``step`` is no valid step.
    """
    step = check_step_number(step)
    mark = root / protected_name(step)
    is_new = True
    await refuse_linked_dirs(storage, root)
    if not await storage.exists(mark.parent):  # a writer makes it at its first save
        await _check_committed(storage, root, names, step)  # first: a mistyped root stays as it is
        await storage.make_dirs(mark.parent)
    try:
        await storage.write_file(mark, b"")
    except WriteError as error:
        if error.errno != errno.EEXIST:
            raise
        is_new = False
    await storage.sync_dir(mark.parent)
    try:
        await _check_committed(storage, root, names, step)
    except CheckpointNotFoundError:
        if is_new:  # an older mark stays: a caller was told that the step is protected, and retention must see it
            await storage.remove_file(mark)
        raise
    if not await storage.exists(mark):  # a rollback removed the mark, and the step was saved anew
        await protect(storage, root, names, step)


async def _check_committed(storage: Storage, root: Path, names: StepNames, step: int) -> None:
    if not await discover(storage, root, names, only=step):
        known = steps_shown([checkpoint.step for checkpoint in await discover(storage, root, names)])
        raise CheckpointNotFoundError(f"protect({step}): no such committed step under {root}; committed are {known}")


async def unprotect(storage: Storage, root: Path, step: int) -> None:
    """End the protection of a step. Does nothing if it is not protected.

    Raises:
        StepOrderError: ``step`` is no valid step.
    """
    mark = root / protected_name(check_step_number(step))
    await refuse_linked_dirs(storage, root)
    if await storage.exists(mark):
        await storage.remove_file(mark)
        await storage.sync_dir(mark.parent)


async def unprotect_after(storage: Storage, root: Path, step: int) -> None:
    """End the protection of the steps after ``step``, to which a rollback went. It would protect new saves of them.

    Steps that the rollback set aside need no protection, because they are never deleted.
    """
    later = [each for each in await protected_steps(storage, root) if each > step]
    for each in later:
        await storage.remove_file(root / protected_name(each))
    if later:
        await storage.sync_dir(root / PROTECTED_DIR)
