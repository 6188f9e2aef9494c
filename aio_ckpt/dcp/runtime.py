"""Runtime of the DCP faces: threads, storage and memory, for one call or for the block of a ``with``."""

from __future__ import annotations

import functools
import os
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist

from aio_ckpt._torch import log_untried_torch
from aio_ckpt.checks import check_kind
from aio_ckpt.config import LEAST_BUDGET_BYTES, EngineConfig
from aio_ckpt.memory.kind import StagingChoice
from aio_ckpt.memory.lifetime import LifetimeManager, default_budget_bytes, ranks_on_host
from aio_ckpt.plan.layout import chunk_bytes_for
from aio_ckpt.runtime.portal import HOUSEKEEPING_THREADS, STOP_SECS, Lock, Portal
from aio_ckpt.runtime.priority import lower_priority
from aio_ckpt.snapshot.capture import CopyEngines
from aio_ckpt.storage.local import Storage
from aio_ckpt.write.throttle import WriteThrottle

_WINDOW_CHUNKS = 2
"""Chunks of an image in memory for each write in flight: one is filled while another is written."""
_WINDOW_SHARE = 4
"""Largest part of the budget for the window, as 1 / this. The rest is for staging."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runtime:
    """Threads and memory of a face. Its opener closes it. Leased memory is freed once its last user has ended."""

    config: EngineConfig
    portal: Portal
    """Loop and I/O threads."""
    storage: Storage
    """File system of the checkpoints."""
    window: LifetimeManager
    """Memory of the window: the chunks of an image that are in memory while it is written."""
    staging: LifetimeManager
    """Memory of the stager, for whole states."""
    choice: StagingChoice
    """Kind of both memories."""
    throttle: WriteThrottle
    copy_engines: CopyEngines = field(default_factory=CopyEngines)

    @classmethod
    def open(cls, config: EngineConfig, storage: Storage | None) -> Runtime:
        """Start the threads. No memory is allocated yet. ``storage``: None for the local file system."""
        log_untried_torch()
        portal = Portal(
            f"aio_ckpt-dcp-{uuid.uuid4().hex[:8]}",
            config.workers + HOUSEKEEPING_THREADS,
            functools.partial(lower_priority, config.thread_nice, config.thread_ioprio),
        )
        with portal.opening():
            executor = portal.executor
            budget_bytes = config.budget_bytes or default_budget_bytes(ranks_on_host=peers_on_host())
            window_bytes = _WINDOW_CHUNKS * max(config.workers, 2) * chunk_bytes_for(sys.maxsize)
            window_bytes = min(window_bytes, max(budget_bytes // _WINDOW_SHARE, LEAST_BUDGET_BYTES))
            staging_bytes = budget_bytes - window_bytes
            return cls(
                config=config,
                portal=portal,
                storage=storage or Storage(executor, config.direct_io),
                window=LifetimeManager(budget_bytes=window_bytes, executor=executor, debug=config.debug),
                throttle=WriteThrottle(config.max_write_bytes_per_sec),
                staging=LifetimeManager(budget_bytes=staging_bytes, executor=executor, debug=config.debug),
                choice=StagingChoice(config.staging),
            )

    def close(self) -> None:
        """End the threads and close the memory. Idempotent."""
        self.window.close()
        self.staging.close()
        self.portal.close(STOP_SECS)


def peers_on_host() -> int:
    """Return the number of ranks on this host; 1 without a process group."""
    return ranks_on_host(dist.get_world_size()) if dist.is_available() and dist.is_initialized() else 1


class SharedRuntime:
    """Runtime of many faces. The first call opens it. After :meth:`close`, it ends behind the last call that uses it.

    In a forked child, a runtime that its parent has opened counts as closed.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._lock = Lock()
        self._runtime: Runtime | None = None
        self._pid = 0
        self._calls = 0
        self._is_closed = False

    @contextmanager
    def running(self) -> Iterator[Runtime | None]:
        """Yield the runtime for one call; None if it is closed."""
        runtime = self._begin_call()
        try:
            yield runtime
        finally:
            if runtime is not None:
                self._end_call()

    def close(self) -> None:
        """Let no other call begin, and close the runtime once no call runs on it. Idempotent. Waits for no call."""
        with self._lock:
            self._is_closed = True
            unused = self._taken_if_unused()
        if unused is not None:
            unused.close()

    def _begin_call(self) -> Runtime | None:
        with self._lock:
            if self._is_closed or (self._runtime is not None and self._pid != os.getpid()):
                return None
            if self._runtime is None:
                self._runtime, self._pid = Runtime.open(self._config, None), os.getpid()
            self._calls += 1
            return self._runtime

    def _end_call(self) -> None:
        with self._lock:
            self._calls -= 1
            unused = self._taken_if_unused()
        if unused is not None:
            unused.close()

    def _taken_if_unused(self) -> Runtime | None:
        if not self._is_closed or self._calls or self._pid != os.getpid():
            return None
        unused, self._runtime = self._runtime, None
        return unused


class Face:
    """Base of the faces. A face has a :class:`Runtime` of its own, or shares one.

    Inside ``with``, the face keeps one runtime, so that all calls share threads and staging memory. Outside, each call
    opens a runtime and closes it before it returns. A face that keeps none can be pickled and survives a fork.
    After :meth:`share`, the calls outside of ``with`` use the shared runtime as long as it is open.
    """

    def __init__(self, config: EngineConfig | None, storage: Storage | None) -> None:
        """Raise ConfigError if ``config`` or ``storage`` has the wrong type."""
        check_kind("config", config, EngineConfig)
        check_kind("storage", storage, Storage)
        self._config = config or EngineConfig()
        self._storage = storage
        self._kept: Runtime | None = None
        self._shared: SharedRuntime | None = None
        self._opening = Lock()

    def share(self, runtime: SharedRuntime) -> Self:
        """Use ``runtime`` for calls outside of ``with``, and return the face. A pickled face shares none."""
        self._shared = runtime
        return self

    def __enter__(self) -> Self:
        self._keep()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the kept runtime, if there is one. Idempotent. Later calls open a runtime each."""
        with self._opening:
            kept, self._kept = self._kept, None
        if kept is not None:
            kept.close()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without threads and memory: another process opens its own."""
        kept = {name: value for name, value in self.__dict__.items() if name != "_opening"}
        return kept | {"_kept": None, "_shared": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._opening = Lock()

    def _keep(self) -> Runtime:
        """Return the runtime that is kept until :meth:`close`. The first call opens it."""
        with self._opening:
            kept = self._kept = self._kept or Runtime.open(self._config, self._storage)
        kept.portal.check_thread(type(self).__name__)
        return kept

    @contextmanager
    def _running(self) -> Iterator[Runtime]:
        """Yield the kept runtime, the shared one, or one that is opened for this block."""
        with self._shared.running() if self._shared is not None else nullcontext() as shared:
            lasting = self._kept or shared
            if lasting is not None:
                lasting.portal.check_thread(type(self).__name__)
                yield lasting
                return
            runtime = Runtime.open(self._config, self._storage)
            try:
                yield runtime
            finally:
                runtime.close()
