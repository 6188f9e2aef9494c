"""One blocking call with a loop and threads of its own, which end with it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from aio_ckpt.runtime.ctrl_c import new_future
from aio_ckpt.runtime.futures import cancellable_result_blocking, run_cancellable
from aio_ckpt.runtime.portal import SMALL_IO_THREADS, STOP_SECS, Executor, Portal

T = TypeVar("T")


def call_on_own_threads(work: Callable[[Executor], Coroutine[Any, Any, T]], workers: int) -> T:
    """Return the result of ``work``, which gets ``workers`` threads. Ctrl-C ends it before this call ends."""
    portal, given_up = Portal(f"aio_ckpt-{uuid.uuid4().hex[:8]}", workers + SMALL_IO_THREADS), new_future()
    try:
        portal.start()
        # In no variable: the traceback of an error holds this frame, which would close a cycle through the future.
        return cancellable_result_blocking(
            portal.submit(run_cancellable, given_up, lambda: work(portal.executor)), given_up
        )
    finally:
        portal.close(STOP_SECS)
