"""Explanation of a save that failed because the disk is full: what it needs, what is free, and what helps."""

from __future__ import annotations

import errno

import anyio

from aio_ckpt.engine.context import EngineContext
from aio_ckpt.errors import WriteError
from aio_ckpt.reports import amount

__all__ = ["explain_full_disk", "explained"]

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_LOOK_SECS = 2.0
"""Time within which the file system must tell how much is free: the save has failed and others wait for it."""


async def explain_full_disk(error: BaseException, ctx: EngineContext, needed_bytes: int) -> None:
    """Add to the text of ``error`` what a save of ``needed_bytes`` needs, if the disk or the quota is full.

    Call it before the files of the save are removed, and before the other ranks are told. It raises nothing.
    """
    if not isinstance(error, WriteError) or error.errno not in _FULL:
        return
    free_bytes: int | None = None
    with anyio.move_on_after(_LOOK_SECS):
        try:
            free_bytes = await ctx.storage.free_bytes(ctx.root)
        except Exception:  # noqa: BLE001 - the save has failed already; its own error is the one to tell
            free_bytes = None
    error.strerror = explained(
        error.strerror,
        needed_bytes,
        free_bytes,
        whose="" if ctx.world_size == 1 else f" of rank {ctx.rank} of {ctx.world_size}",
        is_quota=error.errno == errno.EDQUOT,
        keep_last=ctx.config.keep_last,
    )


def explained(
    text: str | None, needed_bytes: int, free_bytes: int | None, *, whose: str, is_quota: bool, keep_last: int | None
) -> str:
    """Return the text of the error with what is needed, what is free and the remedy."""
    free = "" if free_bytes is None else f", {amount(free_bytes)} are free on its file system"
    quota = "raise the quota, " if is_quota else ""
    if keep_last is None:
        remedy = "free space, or delete older steps with keep_last"
    else:
        lower = "" if keep_last == 1 else ", or lower keep_last"
        remedy = f"free space{lower}: keep_last={keep_last} needs room for {keep_last + 1} steps"
    return f"{text}: this save{whose} needs {amount(needed_bytes)}{free}; {quota}{remedy}"
