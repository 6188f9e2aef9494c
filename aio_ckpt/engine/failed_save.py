"""The end of a failed save: its memory is given back, and its directory removed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

import anyio

from aio_ckpt.commit.trash import THREAD_WAIT_SECS, Trash
from aio_ckpt.runtime.futures import ThreadTracker, follow
from aio_ckpt.snapshot.image import Image

_log = logging.getLogger("aio_ckpt")


async def end_failed_save(
    trash: Trash,
    pending: Path | None,
    images: Sequence[Image],
    threads: ThreadTracker,
    *,
    title: str,
    cause: BaseException,
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
    with anyio.move_on_after(THREAD_WAIT_SECS):
        for image in images:
            await asyncio.wrap_future(follow(image.lease.ended))
        await threads.wait()

    def is_idle() -> bool:
        return threads.is_idle and all(image.lease.ended.done() for image in images)

    if not is_idle():
        _log.error("%s: a thread still works for it; its pending directory stays until it has ended", title)
    if pending is None:
        return
    if is_in_doubt:
        # The directory may hold the files of a visible step, or of the step that it replaced.
        _log.error("%s: %s stays until it is cleared: the checkpoint may still become visible", title, pending)
    elif not is_idle() or not await trash.delete(pending) or are_several:
        trash.add(pending, is_idle)
