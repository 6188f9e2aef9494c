"""What a save needs, what is free, and the remedy, in the text of the error of a full disk."""

from __future__ import annotations

import contextlib
import errno
from pathlib import Path
from typing import TypeGuard

import anyio

from aio_ckpt.errors import WriteError
from aio_ckpt.reports import amount
from aio_ckpt.storage.local import Storage
from aio_ckpt.storage.os_errors import DISK_FULL

LOOK_SECS = 2.0
"""Time within which the file system must tell how much is free: the save has failed and others wait for it."""


def is_disk_full(error: BaseException) -> TypeGuard[WriteError]:
    """Return whether a write failed because the disk or the quota is full."""
    return isinstance(error, WriteError) and error.errno in DISK_FULL


async def explain_full_disk(
    error: BaseException, storage: Storage, place: Path, needed_bytes: int, *, whose: str = "", remedy: str
) -> None:
    """Add to the text of ``error`` what a save of ``needed_bytes`` needs at ``place``, if the disk or quota is full.

    ``remedy`` stands beside free space. Call it before the files of the save are removed, and before the other ranks
    hear of it. It raises nothing.
    """
    if not is_disk_full(error):
        return
    free_bytes: int | None = None
    # The save has failed already; its own error is the one to tell.
    with anyio.move_on_after(LOOK_SECS), contextlib.suppress(Exception):
        free_bytes = await storage.free_bytes(place)
    is_quota = error.errno == errno.EDQUOT
    error.strerror = explained(error.strerror, needed_bytes, free_bytes, whose=whose, is_quota=is_quota, remedy=remedy)


def explained(
    text: str | None, needed_bytes: int, free_bytes: int | None, *, whose: str, is_quota: bool, remedy: str
) -> str:
    """Return the text of the error with what is needed, what is free and the remedy beside free space."""
    free = "" if free_bytes is None else f", {amount(free_bytes)} are free on its file system"
    if free_bytes is not None and free_bytes > needed_bytes and not is_quota:
        free += " (it may be out of inodes: df -i)"
    quota = "raise the quota, " if is_quota else ""
    return f"{text}: this save{whose} needs {amount(needed_bytes)}{free}; {quota}free space, or {remedy}"
