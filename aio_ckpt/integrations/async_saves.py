"""Saves in the background, for libraries that schedule and finalize them: memory, one thread, one loop, one group."""

from __future__ import annotations

import functools
import logging
import os
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from aio_ckpt.config import EngineConfig
from aio_ckpt.dcp.runtime import Face, SharedRuntime
from aio_ckpt.dcp.stager import plan_staging
from aio_ckpt.runtime.futures import outcome_of
from aio_ckpt.runtime.portal import STOP_SECS, Lock, Portal
from aio_ckpt.runtime.priority import lower_priority

T = TypeVar("T")

_log = logging.getLogger("aio_ckpt")


class Committed:
    """Commit of a save, in the request that a queue gets: a finalize function, or an argument of ``async_fn``.

    A queue of ours waits for it before it calls a finalize function. A call waits too.
    """

    def __init__(self, future: Future[Any]) -> None:
        self.future = future

    def __call__(self) -> None:
        """Return once the checkpoint is committed. Raise the error of the save."""
        self.future.result()


class Shared:
    """Memory, threads and process group. Each opens at its first use, and again if it is used after :meth:`close`."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.runtime = SharedRuntime(config)
        """Threads and memory of the writers, the readers and the stager."""
        self._stager = _Stager(config).share(self.runtime)
        self._lock = Lock()
        self._portal: Portal | None = None
        self._groups: tuple[Any, dict[Any, Any]] = (None, {})
        """A world, and the groups of ours in it, by the group that has the same ranks."""

    def portal(self) -> Portal:
        """Return the portal. Its loop agrees with the other ranks; its one I/O thread saves, in the order of the calls.

        One thread only, because every rank must make the collectives of two saves in the same order.
        """
        with self._lock:
            if self._portal is None or self._portal.is_closed:
                config = self.config
                begin = functools.partial(lower_priority, config.thread_nice, config.thread_ioprio)
                portal = Portal(f"aio_ckpt-calls-{uuid.uuid4().hex[:8]}", 1, begin)
                with portal.opening():
                    self._portal = portal
            return self._portal

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Call ``work`` in the thread, behind earlier work."""
        return self.portal().executor.submit(work)

    def saved_now(self, save: Callable[[], None], path: str | os.PathLike[str]) -> Future[None]:
        """Call ``save`` in this thread, behind earlier work, as there is no memory for a copy. Return its outcome."""
        _log.warning(
            "%s: saved before training goes on, as budget_bytes holds no copy of the state: raise budget_bytes "
            "where there is memory",
            path,
        )
        self.submit(lambda: None).result()  # the collectives of earlier saves come first, as on other ranks
        return outcome_of(save, (Exception, CheckpointException))  # the latter is no Exception

    def group(self, like: Any = None) -> Any:
        """Return a gloo group that only the thread uses, with all ranks, or those of the group ``like``.

        Its ranks make the first call together. Without a process group, this returns None.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return None
        world = dist.group.WORLD
        if self._groups[0] is not world:
            self._groups = (world, {})
        groups, like = self._groups[1], None if like is world else like
        if like not in groups:
            ranks = None if like is None else dist.get_process_group_ranks(like)
            groups[like] = dist.new_group(ranks, backend="gloo", use_local_synchronization=ranks is not None)
        return groups[like]

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
