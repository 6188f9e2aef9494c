"""The sync face: the same engine for a classic loop."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from aio_ckpt.config import EngineConfig
from aio_ckpt.engine.engine import CheckpointEngine
from aio_ckpt.memory.lifetime import LifetimeStats
from aio_ckpt.ranks.store_coordinator import Coordinator
from aio_ckpt.reports import LoadReport
from aio_ckpt.runtime.futures import outcome_blocking
from aio_ckpt.storage.local import Storage
from aio_ckpt.ticket import Milestone, SaveTicket

__all__ = ["SyncCheckpointEngine"]


class SyncCheckpointEngine:
    """:class:`~aio_ckpt.engine.engine.CheckpointEngine` with blocking ``load``, ``read``, ``ready`` and ``close``.

    ``save`` is the same plain function that returns a ticket; ``ticket.result()`` waits for it. Arguments,
    results and errors are those of the async engine.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        config: EngineConfig | None = None,
        *,
        coordinator: Coordinator | None = None,
        storage: Storage | None = None,
    ) -> None:
        self._engine = CheckpointEngine(root, config, coordinator=coordinator, storage=storage)

    @property
    def root(self) -> Path:
        """Directory of the checkpoints."""
        return self._engine.root

    @property
    def config(self) -> EngineConfig:
        """Settings."""
        return self._engine.config

    @property
    def plan_hits(self) -> int:
        """See :attr:`CheckpointEngine.plan_hits`."""
        return self._engine.plan_hits

    @property
    def plan_misses(self) -> int:
        """See :attr:`CheckpointEngine.plan_misses`."""
        return self._engine.plan_misses

    @property
    def lifetime(self) -> LifetimeStats:
        """Arenas and leases held now."""
        return self._engine.lifetime

    def save(
        self,
        state: object,
        step: int | None = None,
        *,
        overwrite: bool = False,
        deadline_secs: float | None = None,
        metrics: Mapping[str, object] | None = None,
        trace: str | os.PathLike[str] | None = None,
    ) -> SaveTicket:
        """See :meth:`CheckpointEngine.save`."""
        return self._engine.save(
            state, step, overwrite=overwrite, deadline_secs=deadline_secs, metrics=metrics, trace=trace
        )

    def prepare(self, state: object) -> Milestone[None]:
        """See :meth:`CheckpointEngine.prepare`; ``result()`` waits for the memory."""
        return self._engine.prepare(state)

    def guard(self, guarded: object) -> None:
        """See :meth:`CheckpointEngine.guard`."""
        self._engine.guard(guarded)

    def step_done(self) -> None:
        """See :meth:`CheckpointEngine.step_done`."""
        self._engine.step_done()

    def ready(self) -> None:
        """Block until ``save()`` would not have to wait for an earlier save."""
        self._engine.wait_ready()

    def load(
        self,
        state: object,
        step: int | None = None,
        *,
        strict: bool = False,
        allow_missing: bool = False,
        fallback: bool = True,
    ) -> LoadReport:
        """See :meth:`CheckpointEngine.load`; what a ``load_state_dict`` of the template raises comes through, too."""
        given_up: Future[None] = Future()
        options = {"strict": strict, "allow_missing": allow_missing, "fallback": fallback}
        return outcome_blocking(self._engine.submit_load(state, step, given_up, **options), given_up)

    def read(self, step: int | None = None, *, only: Collection[str] | None = None) -> object:
        """See :meth:`CheckpointEngine.read`."""
        return self._engine.submit_read(step, only=only).result()

    def steps(self) -> list[int]:
        """See :meth:`CheckpointEngine.steps`."""
        return self._engine.steps()

    def latest_step(self) -> int | None:
        """See :meth:`CheckpointEngine.latest_step`."""
        return self._engine.latest_step()

    def rollback(self, step: int) -> list[int]:
        """See :meth:`CheckpointEngine.rollback`."""
        return self._engine.rollback(step)

    def protect(self, step: int) -> None:
        """See :meth:`CheckpointEngine.protect`."""
        self._engine.protect(step)

    def unprotect(self, step: int) -> None:
        """See :meth:`CheckpointEngine.unprotect`."""
        self._engine.unprotect(step)

    def protected_steps(self) -> list[int]:
        """See :meth:`CheckpointEngine.protected_steps`."""
        return self._engine.protected_steps()

    @property
    def undeleted_steps(self) -> Mapping[int, str]:
        """See :attr:`CheckpointEngine.undeleted_steps`."""
        return self._engine.undeleted_steps

    def clear_cache(self) -> None:
        """See :meth:`CheckpointEngine.clear_cache`."""
        self._engine.clear_cache()

    def on_preemption(self, signals: Iterable[int] = (signal.SIGTERM, signal.SIGUSR1)) -> None:
        """See :meth:`CheckpointEngine.on_preemption`."""
        self._engine.on_preemption(signals)

    @property
    def preempted(self) -> bool:
        """See :attr:`CheckpointEngine.preempted`."""
        return self._engine.preempted

    def close(self) -> None:
        """See :meth:`CheckpointEngine.close`."""
        self._engine.close_blocking()

    def terminate(self) -> None:
        """See :meth:`CheckpointEngine.terminate`."""
        self._engine.terminate()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        self._engine.close_after(error)
        return False
