"""Resources of a call of the replacements: threads, storage and memory, for one call or for the block of a ``with``."""

from __future__ import annotations

import functools
import os
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aio_ckpt._torch import log_untried_torch
from aio_ckpt.argument_checks import MAX_SECS
from aio_ckpt.config import LEAST_BUDGET_BYTES, EngineConfig
from aio_ckpt.memory.arena_lifetimes import LifetimeManager
from aio_ckpt.memory.available import default_budget_bytes
from aio_ckpt.memory.staging_kind import StagingChoice
from aio_ckpt.plan.chunks import chunk_bytes_for
from aio_ckpt.plan.save_plan import PlannedImage
from aio_ckpt.ranks.on_host import ranks_on_host
from aio_ckpt.ranks.store_coordinator import rank_in_default_group
from aio_ckpt.runtime.ctrl_c import Lock
from aio_ckpt.runtime.portal import SMALL_IO_THREADS, STOP_SECS, Portal
from aio_ckpt.runtime.thread_priority import lower_priority
from aio_ckpt.snapshot.capture import CopyEngines, capture
from aio_ckpt.snapshot.captured_chunks import CapturedRun
from aio_ckpt.snapshot.image import Image, lease_image
from aio_ckpt.storage.local import Storage
from aio_ckpt.storage.object_store import AnyStorage
from aio_ckpt.write.throttle import WriteThrottle

_WINDOW_CHUNKS = 2
"""Chunks of an image in memory for each write in flight: one is filled while another is written."""
_WINDOW_SHARE = 4
"""Largest part of the budget for the window, as 1 / this. The rest is for staging."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResources:
    """Threads and memory of a replacement. Its opener closes it. Leased memory is freed when its last user ends."""

    config: EngineConfig
    portal: Portal
    """Loop and I/O threads."""
    storage: Storage
    window: LifetimeManager
    """Memory of the window: the chunks of an image that are in memory while it is written."""
    staging: LifetimeManager
    """Memory of the stager, for whole states."""
    choice: StagingChoice
    """Kind of both memories."""
    throttle: WriteThrottle
    copy_engines: CopyEngines = field(default_factory=CopyEngines)

    @classmethod
    def open(cls, config: EngineConfig, storage: Storage | None) -> CallResources:
        """Start the threads. No memory is allocated yet. ``storage``: None for any that a path names."""
        log_untried_torch()
        portal = Portal(
            f"aio_ckpt-dcp-{uuid.uuid4().hex[:8]}",
            config.workers + SMALL_IO_THREADS,
            functools.partial(lower_priority, config.thread_nice, config.thread_ioprio),
        )
        with portal.opening():
            executor = portal.executor
            budget_bytes = config.budget_bytes or default_budget_bytes(ranks_on_host=default_group_ranks_on_host())
            window_bytes = _WINDOW_CHUNKS * max(config.workers, 2) * chunk_bytes_for(sys.maxsize)
            window_bytes = min(window_bytes, max(budget_bytes // _WINDOW_SHARE, LEAST_BUDGET_BYTES))
            staging_bytes = budget_bytes - window_bytes
            return cls(
                config=config,
                portal=portal,
                storage=storage or AnyStorage(executor, config.direct_io),
                window=LifetimeManager(budget_bytes=window_bytes, executor=executor, debug=config.debug),
                throttle=WriteThrottle(config.max_write_bytes_per_sec),
                staging=LifetimeManager(budget_bytes=staging_bytes, executor=executor, debug=config.debug),
                choice=StagingChoice(config.staging),
            )

    def lease(self, planned: PlannedImage, stream_bytes: int, memory: LifetimeManager) -> Image:
        """Lease an image for the tensors and ``stream_bytes`` from ``memory``. See :func:`lease_image`."""
        timeout_secs = self.config.stall_timeout_secs
        return lease_image(planned, stream_bytes, memory, self.choice, timeout_secs=timeout_secs, limit_secs=MAX_SECS)

    def capture(
        self, planned: PlannedImage, image: Image, on_captured: Callable[[Sequence[CapturedRun]], None]
    ) -> None:
        """Capture the tensors. Returns once none of them is needed any more."""
        capture(
            planned,
            image,
            self.copy_engines,
            guarded=frozenset(),
            on_captured=on_captured,
            slot_timeout_secs=self.config.stall_timeout_secs,
        ).finish()

    def close(self) -> None:
        """End the threads and close the memory. Idempotent."""
        self.window.close()
        self.staging.close()
        self.portal.close(STOP_SECS)


def default_group_ranks_on_host() -> int:
    """Return the number of ranks on this host; 1 without a process group."""
    rank, world_size = rank_in_default_group()
    return ranks_on_host(world_size, rank, os.environ)


class SharedResources:
    """Resources that their first user opens and their last user closes. Several replacements may share it.

    A forked child opens resources of its own, because it has no threads of its parent.
    """

    def __init__(self, config: EngineConfig, storage: Storage | None = None, *, is_kept: bool = True) -> None:
        """Open nothing yet. ``is_kept``: once opened, the resources stay open without users until :meth:`close`."""
        self._config = config
        self._storage = storage
        self._is_kept = is_kept
        self._lock = Lock()
        self._users: set[object] = set()
        self._resources: CallResources | None = None
        self._pid = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the settings alone: another process opens threads and memory of its own."""
        return functools.partial(SharedResources, is_kept=False), (self._config, self._storage)

    @contextmanager
    def running(self, what: str) -> Iterator[CallResources]:
        """Yield the resources, which stay open for this block. ``what`` names the caller in errors."""
        user = object()
        resources = self.begin_use(user)
        try:
            resources.portal.check_thread(what)
            yield resources
        finally:
            self.end_use(user)

    def begin_use(self, user: object) -> CallResources:
        """Return the resources. They stay open until :meth:`end_use`. A second call for one ``user`` counts once."""
        with self._lock:
            if self._pid != os.getpid():
                self._resources, self._users, self._pid = None, set(), os.getpid()
            if self._resources is None:
                self._resources = CallResources.open(self._config, self._storage)
            self._users.add(user)
            return self._resources

    def end_use(self, user: object) -> None:
        """Close the resources if nobody else uses them. Idempotent."""
        unused = None
        with self._lock:
            self._users.discard(user)
            if not (self._is_kept or self._users) and self._pid == os.getpid():
                unused, self._resources = self._resources, None
        if unused is not None:
            unused.close()

    def close(self) -> None:
        """Let the resources close behind their last user. Idempotent. Waits for no call."""
        self._is_kept = False
        self.end_use(None)
