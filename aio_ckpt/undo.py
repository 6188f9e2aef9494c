"""What is left of a failed save: its buffers go back when the last thread let go, its directory is removed."""

from __future__ import annotations

import asyncio
import errno
import logging
from pathlib import Path

import anyio

from aio_ckpt.errors import AioCkptError
from aio_ckpt.image import Image
from aio_ckpt.progress import Threads, follow
from aio_ckpt.storage import Storage

__all__ = ["SETTLE_SECS", "settle_failure"]

_log = logging.getLogger("aio_ckpt")
_AGAIN_SECS = 0.05
SETTLE_SECS = 5.0
"""How long a failed save waits for its threads before it reports; the lease waits as long as it takes."""


async def settle_failure(
    storage: Storage, pending: Path | None, image: Image, threads: Threads, *, step: int, cause: BaseException
) -> None:
    """Give the buffers back when the last thread let go; leave nothing behind that is listed.

    ``pending`` is None where it is not this rank's to remove.
    """
    for future in image.written:
        if not future.done():
            future.set_exception(cause)
    lease = image.lease
    lease.close()
    with anyio.move_on_after(SETTLE_SECS):
        await asyncio.wrap_future(follow(lease.settled))
        await threads.wait()
    if not (lease.settled.done() and threads.are_idle):
        _log.error("step %d: a thread still works for it; its pending directory stays until it is cleared", step)
        return
    if pending is None:
        return
    if isinstance(cause, AioCkptError) and cause.in_doubt:
        # Its files may be those of a visible step, or those of the step that it replaced.
        _log.error("step %d: %s stays until it is cleared: the step may still become visible", step, pending)
        return
    try:
        with anyio.fail_after(SETTLE_SECS):
            await _remove(storage, pending)
    except (AioCkptError, OSError) as error:
        _log.warning("step %d: %s stays until it is cleared: %s", step, pending, str(error) or "too slow")


async def _remove(storage: Storage, pending: Path) -> None:
    while True:
        try:
            await storage.remove_tree(pending)
        except OSError as error:
            if error.errno == errno.ENOENT:  # another rank has removed it
                return
            if error.errno != errno.ENOTEMPTY:  # one has just made a file in it
                raise
        else:
            return
        await anyio.sleep(_AGAIN_SECS)
