"""The engine with blocking calls, for a training loop without asyncio."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, Concatenate, Literal, ParamSpec, Self, TypeVar

from aio_ckpt.engine.engine import BaseEngine, CheckpointEngine
from aio_ckpt.engine.shutdown import log_if_second_to
from aio_ckpt.ticket import PendingCall

__all__ = ["SyncCheckpointEngine"]

P = ParamSpec("P")
T = TypeVar("T")


def _blocking(call: Callable[Concatenate[Any, P], PendingCall[T]]) -> Callable[Concatenate[Any, P], T]:
    """Return the method of the async engine with the arguments of ``call`` that returns its result."""

    def blocking(engine: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return call(engine, *args, **kwargs).result()

    return functools.update_wrapper(blocking, call)


class SyncCheckpointEngine(BaseEngine):
    """Saves and loads the checkpoints of one root, for a trainer without asyncio. Usable from any thread.

    Its calls are those of :class:`~aio_ckpt.engine.engine.CheckpointEngine`. What is awaited there blocks here until it
    has ended. ``save`` returns a ticket, and its ``result()`` blocks.

    Arguments and errors are those of the other engine.
    """

    load = _blocking(CheckpointEngine.load)
    """Fill ``state`` in place from a checkpoint, and return a ``LoadReport``; see :meth:`CheckpointEngine.load`."""
    read = _blocking(CheckpointEngine.read)
    """Return the nested state of a checkpoint, without a template; see :meth:`CheckpointEngine.read`."""
    steps = _blocking(CheckpointEngine.steps)
    """Return the committed steps, ascending; see :meth:`CheckpointEngine.steps`."""
    latest_step = _blocking(CheckpointEngine.latest_step)
    """Return the newest committed step, or None."""
    rollback = _blocking(CheckpointEngine.rollback)
    """Make ``step`` the newest; return the later steps, which are put aside; see :meth:`CheckpointEngine.rollback`."""
    protect = _blocking(CheckpointEngine.protect)
    """Never delete ``step``; see :meth:`CheckpointEngine.protect`."""
    unprotect = _blocking(CheckpointEngine.unprotect)
    """Let ``step`` expire again; see :meth:`CheckpointEngine.unprotect`."""
    protected_steps = _blocking(CheckpointEngine.protected_steps)
    """Return the protected steps, ascending."""
    delete = _blocking(CheckpointEngine.delete)
    """Delete a committed step, durably; see :meth:`CheckpointEngine.delete`."""

    ready = BaseEngine._wait_ready
    """Block until ``save()`` would not have to wait for an earlier save; see :meth:`CheckpointEngine.ready`."""
    close = BaseEngine._close_blocking
    """Finish pending saves, then release all resources. ``with`` does this at the end of its block."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        with log_if_second_to(error):
            self.close()
        return False
