"""Run the work of a command on a loop of its own."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from aio_ckpt.runtime.portal import Executor, Portal
from aio_ckpt.storage import local
from aio_ckpt.storage.local import Storage

T = TypeVar("T")
_HOUSEKEEPING_THREADS = 2
_CLOSE_SECS = 5.0


def call(work: Callable[[Storage, Executor], Coroutine[Any, Any, T]], *, readers: int = 4) -> T:
    """Return the result of ``work``. It may be called inside of a running loop."""
    portal = Portal("aio_ckpt-cli", readers + _HOUSEKEEPING_THREADS)
    try:
        portal.start()
        return portal.call(work, local.Storage(portal.executor), portal.executor, timeout=None)
    finally:
        portal.close(_CLOSE_SECS)
