"""Remedy that the error of a full disk names for the save of an engine."""

from __future__ import annotations

import contextlib
from pathlib import Path

import anyio

from aio_ckpt.engine.context import EngineContext
from aio_ckpt.errors import AioCkptError
from aio_ckpt.format.step_names import StepNames
from aio_ckpt.message_texts import command_line
from aio_ckpt.reports import Target
from aio_ckpt.storage.local import names_in
from aio_ckpt.write.full_disk import LOOK_SECS, explain_full_disk, is_disk_full


async def explain_if_disk_full(error: BaseException, ctx: EngineContext, needed_bytes: int, target: Target) -> None:
    """Add to the text of ``error`` what the save of ``target`` needs, if the disk is full; see explain_full_disk."""
    if not is_disk_full(error):
        return
    if isinstance(target, Path):
        remedy = "delete an older checkpoint: engine.remove(path)"
    else:
        remedy = step_remedy(ctx.root, ctx.names, await _steps_in_sight(ctx), ctx.config.keep_last)
    whose = "" if ctx.world_size == 1 else f" of rank {ctx.rank} of {ctx.world_size}"
    await explain_full_disk(error, ctx.storage, ctx.root, needed_bytes, whose=whose, remedy=remedy)


async def _steps_in_sight(ctx: EngineContext) -> int:
    """Return the number of steps in the root; 0 if it cannot be listed in time."""
    with anyio.move_on_after(LOOK_SECS), contextlib.suppress(AioCkptError):
        return sum(ctx.names.step(name) is not None for name in await names_in(ctx.storage, ctx.root))
    return 0


def step_remedy(root: Path, names: StepNames, steps: int, keep_last: int | None) -> str:
    """Return the remedy of a full disk for the save of a step, in a root that holds a number of ``steps``."""
    # Retention deletes only after a commit, which a full disk prevents: keep_last helps the next run only.
    kept, needed = ("N", "N + 2") if keep_last is None else (keep_last, keep_last + 2)
    room = f"keep_last={kept} needs room for {needed} steps, as one is deleted while the next is written"
    if steps < 2:
        look = f"{command_line('du', root, *names.option)} shows what else is there"
        return f"save to another disk: there is no older step to delete, and {room}; {look}"
    prune = command_line("prune", root, "--keep-last", 1, "--yes", *names.option)
    return f"delete an older step: engine.delete(step), or {prune} once the trainer has ended; {room}"
