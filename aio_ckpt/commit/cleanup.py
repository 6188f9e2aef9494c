"""Cleanup of a failed save: its memory is given back once its last thread has ended, and its directory is removed.

A directory cannot be removed at once if a thread still works in it, or if the removal fails. It is then removed after a
later commit, at the end of the engine, or by the next writer.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import anyio

from aio_ckpt.errors import AioCkptError
from aio_ckpt.runtime.futures import ThreadTracker, follow
from aio_ckpt.snapshot.image import Image
from aio_ckpt.storage.local import Storage

_log = logging.getLogger("aio_ckpt")
_AGAIN_SECS = 0.05
SETTLE_SECS = 5.0
"""Time that a failed save waits for its threads before it settles. The lease waits as long as it takes."""


class PendingCleanup:
    """Directories to remove: those of failed saves, and replaced checkpoints. Used on the engine's loop."""

    def __init__(self) -> None:
        self._directories: dict[Path, Callable[[], bool]] = {}

    def __len__(self) -> int:
        return len(self._directories)

    def add(self, pending: Path, is_idle: Callable[[], bool]) -> None:
        """Add a directory. No thread works in it any more once ``is_idle()`` is True."""
        self._directories[pending] = is_idle

    async def clear(self, storage: Storage) -> None:
        """Remove the idle directories, for at most ``SETTLE_SECS``.

        A directory that cannot be removed stays for the next call.
        """
        with anyio.move_on_after(SETTLE_SECS):
            for pending, is_idle in tuple(self._directories.items()):
                if is_idle() and await _try_remove(storage, pending):
                    self._directories.pop(pending, None)


async def settle_failure(
    storage: Storage,
    pending: Path | None,
    images: Sequence[Image],
    threads: ThreadTracker,
    *,
    title: str,
    cause: BaseException,
    pending_cleanup: PendingCleanup,
    is_in_doubt: bool = False,
    are_several: bool = False,
) -> None:
    """Give the memory back once the last thread has ended, and remove the directory of the save.

    ``title`` names the save. ``pending`` is None if another rank removes it. It stays if ``is_in_doubt``, as the
    checkpoint may become visible. If ``are_several``, a late rank may make the directory anew.
    """
    for image in images:
        image.fail_slots(cause)
        image.lease.close()
    with anyio.move_on_after(SETTLE_SECS):
        for image in images:
            await asyncio.wrap_future(follow(image.lease.settled))
        await threads.wait()

    def is_idle() -> bool:
        return threads.is_idle and all(image.lease.settled.done() for image in images)

    if not is_idle():
        _log.error("%s: a thread still works for it; its pending directory stays until it has ended", title)
    if pending is None:
        return
    if is_in_doubt:
        # The directory may hold the files of a visible step, or of the step that it replaced.
        _log.error("%s: %s stays until it is cleared: the checkpoint may still become visible", title, pending)
    elif not is_idle() or not await _try_remove(storage, pending) or are_several:
        pending_cleanup.add(pending, is_idle)


async def _try_remove(storage: Storage, pending: Path) -> bool:
    """Remove a directory, and return whether that succeeded in time. A failure is logged."""
    try:
        with anyio.fail_after(SETTLE_SECS):
            await _remove(storage, pending)
    except (AioCkptError, OSError) as error:
        _log.warning("%s stays until it is cleared: %s", pending, str(error) or "too slow")
        return False
    return True


async def _remove(storage: Storage, pending: Path) -> None:
    while True:
        try:
            await storage.remove_tree(pending)
        except OSError as error:
            if error.errno == errno.ENOENT:  # another rank has removed it
                return
            if error.errno != errno.ENOTEMPTY:  # another rank has just made a file in it
                raise
        else:
            return
        await anyio.sleep(_AGAIN_SECS)
