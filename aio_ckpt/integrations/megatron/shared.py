"""Resources of the strategies and the queue of one process: memory, one thread, one loop, one process group."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from aio_ckpt.config import EngineConfig
from aio_ckpt.dcp.runtime import Face, SharedRuntime
from aio_ckpt.dcp.stager import plan_staging
from aio_ckpt.runtime.portal import STOP_SECS, Lock, Portal
from aio_ckpt.runtime.priority import lower_priority

__all__ = ["Shared"]

T = TypeVar("T")


class Shared:
    """Memory, threads and process group. Each opens at its first use, and again if it is used after :meth:`close`."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.runtime = SharedRuntime(config)
        """Threads and memory of the writers, the readers and the stager."""
        self._stager = _Stager(config).share(self.runtime)
        self._lock = Lock()
        self._portal: Portal | None = None
        self._group: tuple[Any, Any] | None = None

    def portal(self) -> Portal:
        """Return the portal. Its loop agrees with the other ranks; its one I/O thread saves, in the order of the calls.

        One thread only, because every rank must make the collectives of two saves in the same order.
        """
        with self._lock:
            if self._portal is None or self._portal.is_closed:
                config = self.config
                begin = functools.partial(lower_priority, config.thread_nice, config.thread_ioprio)
                portal = Portal(f"aio_ckpt-megatron-{uuid.uuid4().hex[:8]}", 1, begin)
                portal.start()
                self._portal = portal
            return self._portal

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Call ``work`` in the thread, behind earlier work."""
        return self.portal().executor.submit(work)

    def group(self) -> Any:
        """Return a gloo group of all ranks, which only the thread uses. The first call is one of all ranks."""
        world = dist.group.WORLD
        if self._group is None or self._group[0] is not world:
            self._group = (world, dist.new_group(backend="gloo"))
        return self._group[1]

    def copies(self, tensors: list[torch.Tensor]) -> list[torch.Tensor] | None:
        """Return copies of ``tensors`` in staging memory; None if ``budget_bytes`` cannot hold them."""
        return self._stager.copies(tensors)

    def close(self) -> None:
        """End the threads behind the work that was submitted, and free the memory behind its last user."""
        with self._lock:
            portal, self._portal = self._portal, None
        if portal is not None and not portal.is_closed:
            portal.executor.submit(lambda: None).exception()
            portal.close(STOP_SECS)
        self.runtime.close()


class _Stager(Face):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, None)

    def copies(self, tensors: list[torch.Tensor]) -> list[torch.Tensor] | None:
        with self._running() as runtime:
            staging = plan_staging(runtime, {"tensors": tensors})
            if not staging.fits:
                return None
            copied: list[torch.Tensor] = staging.copied(runtime)["tensors"]
            return copied
