"""Lifetime manager: arenas, leases, byte budget.

Who may touch which bytes until when: an arena's bytes belong to exactly one :class:`Lease` from ``acquire``
until the lease was closed *and* every thread future that it holds has resolved. Not the task's end counts: a
cancelled await does not stop its thread (ACCEPTANCE S1).
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from aio_ckpt.errors import BudgetExceededError, EngineClosedError, StallError
from aio_ckpt.memory.arena import HUGE_PAGE_BYTES, Arena, ArenaKind, SharedMemoryFactory, arena_capacity, map_arena
from aio_ckpt.runtime.portal import Condition, Executor, Lock

__all__ = ["ArenaSpec", "Lease", "LifetimeManager", "LifetimeStats", "default_budget_bytes", "ranks_on_host"]


def ranks_on_host(world_size: int) -> int:
    """Ranks of this host, which share its memory and disk: what the launcher says, else all of them."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return min(int(told), world_size) if told.isascii() and told.isdigit() and int(told) else world_size


_LEAST_BUDGET_BYTES = 16 << 20
"""Of a machine that has nothing left: a save needs some memory."""


def default_budget_bytes(*, ranks_on_host: int, held_bytes: int = 0) -> int:
    """Half of the memory that is available, at most the cgroup's headroom, shared among the host's ranks.

    The ``held_bytes`` that this rank has for images already count as available, and as many for each other rank.
    """
    held_bytes *= ranks_on_host
    available = (psutil.virtual_memory().available + held_bytes) // 2
    headroom = _cgroup_headroom_bytes(available - held_bytes) + held_bytes
    return max(min(available, headroom) // ranks_on_host, _LEAST_BUDGET_BYTES)


def _cgroup_headroom_bytes(otherwise: int) -> int:
    try:
        own = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip().lstrip("/")
        group = Path("/sys/fs/cgroup") / own
        return int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
    except (OSError, ValueError):  # no cgroup v2, or "max": no limit to keep to
        return otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaSpec:
    """What a save needs of an arena."""

    nbytes: int
    """Bytes of the image that it holds at once."""
    kind: ArenaKind
    """What kind of memory."""
    source: torch.device | None
    """CUDA device that is copied from: the memory is registered for it, unless it is pageable. None: the state is in
    host memory."""

    def is_met_by(self, kind: ArenaKind, capacity: int) -> bool:
        """Whether an arena is large enough, and hardly larger."""
        return kind == self.kind and self.nbytes <= capacity <= self.nbytes + max(HUGE_PAGE_BYTES, self.nbytes // 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class LifetimeStats:
    """What the manager holds now."""

    arenas: int
    """Arenas mapped, idle or lent."""
    arena_bytes: int
    """Capacity of all of them, in bytes."""
    leases: int
    """Leases that have not ended."""


class Lease:
    """The right of one save over one arena; ends exactly once, when closed and let go of by all who held it.

    What Ctrl-C interrupts here is finished by the next call of :meth:`close` or :meth:`let_go`.
    """

    def __init__(self, arena: Arena, ended: Callable[[Lease], None], *, waited_secs: float) -> None:
        self.arena = arena
        self.waited_secs = waited_secs
        """How long ``acquire`` waited for earlier leases."""
        self.settled: Future[None] = Future()
        """Resolved when the lease has ended."""
        self._ended = ended
        self._lock = Lock()
        self._holders: set[object] = set()
        self._is_closed = False

    def hold_until(self, future: Future[object]) -> None:
        """Keep the bytes until ``future``, the thread's own, has resolved."""
        self.hold(future)
        future.add_done_callback(self.let_go)

    def hold(self, holder: object) -> None:
        """Keep the bytes until :meth:`let_go` of the same holder."""
        with self._lock:
            if self._is_closed and not self._holders:
                raise EngineClosedError("the lease has ended: its bytes may belong to another save")
            self._holders.add(holder)

    def let_go(self, holder: object) -> None:
        """``holder`` touches the bytes no more. Idempotent."""
        with self._lock:
            self._holders.discard(holder)
            self.arena.last_used = time.monotonic()
            self._end_if_unused()

    def close(self) -> None:
        """Nothing new will touch the bytes. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._end_if_unused()

    def _end_if_unused(self) -> None:
        if self._is_closed and not self._holders and not self.settled.done():
            self._ended(self)
            self.settled.set_result(None)


class LifetimeManager:
    """Lends arenas within a byte budget.

    Invariant: an arena is either idle here or lent to exactly one lease; ``budget_bytes`` bounds the capacity of all
    arenas together, those included that are still being mapped, less what each was rounded up by. Idle arenas that fit
    no more are released, never kept for later. An arena changes hands in one assignment, so that Ctrl-C in
    :meth:`acquire` may lose a lease but never an arena: see :meth:`close_lost`.
    """

    def __init__(
        self,
        *,
        budget_bytes: int | None,
        executor: Executor,
        debug: bool,
        ranks_on_host: int = 1,
        segments: SharedMemoryFactory | None = None,
    ) -> None:
        """``budget_bytes`` is None: :func:`default_budget_bytes`, with ``ranks_on_host``.

        ``segments``: what makes shared memory that outlives the process; closed with the manager.
        """
        self._ranks_on_host = ranks_on_host
        self._is_measured = budget_bytes is None
        self.budget_bytes = default_budget_bytes(ranks_on_host=ranks_on_host) if budget_bytes is None else budget_bytes
        """As given, or as it was measured last."""
        self._segments = segments
        self._executor = executor
        self._debug = debug
        self._lock = Lock()
        self._changed = Condition(self._lock)
        self._arenas: dict[Arena, Lease | None] = {}
        self._reserved_bytes = 0
        self._coming: list[ArenaSpec] = []
        self._is_closed = False

    @property
    def stats(self) -> LifetimeStats:
        """Arenas and leases at this moment."""
        with self._lock:
            return LifetimeStats(
                arenas=len(self._arenas),
                arena_bytes=sum(arena.capacity for arena in self._arenas),
                leases=len(self._leases),
            )

    def measure_budget(self) -> int:
        """Return ``budget_bytes``; the default is measured anew.

        Asked where a new layout changes what is needed: the trainer may have taken memory since the last time. In
        between, the budget stays, and with it the arenas that are used again.
        """
        if self._is_measured:
            held_bytes = self.stats.arena_bytes
            self.budget_bytes = default_budget_bytes(ranks_on_host=self._ranks_on_host, held_bytes=held_bytes)
        return self.budget_bytes

    def acquire(self, spec: ArenaSpec, *, timeout_secs: float, limit_secs: float = math.inf) -> Lease:
        """An arena that meets ``spec``; blocks while other leases hold the budget, or while one is being mapped ahead.

        Raises:
            BudgetExceededError: it alone is more than the budget, or the memory cannot be had.
            StallError: no thread let go of a lent byte for ``timeout_secs``, or ``limit_secs`` passed in all.
            EngineClosedError: the manager was closed.
        """
        if spec.nbytes > self.budget_bytes:
            raise BudgetExceededError(
                f"an image of {spec.nbytes} bytes exceeds budget_bytes={self.budget_bytes}: raise it, or save less "
                "at once"
            )
        began = time.monotonic()
        with self._lock:
            while (lease := self._try_take(spec, began)) is None and not self._may_map(spec):
                last_used = max([began, *(lent.arena.last_used for lent in self._leases)])
                left = last_used + timeout_secs - time.monotonic()
                if left <= 0:
                    raise StallError(f"an earlier save keeps its arena and made no progress for {timeout_secs} s")
                limit_left = began + limit_secs - time.monotonic()
                if limit_left <= 0:
                    raise StallError(f"an earlier save kept its arena, this one had {limit_secs:.1f} s left")
                self._changed.wait(min(left, limit_left))
            waited_secs = time.monotonic() - began
            if lease is None:
                self._reserved_bytes += spec.nbytes
        if lease is None:
            lease = self._map(spec, waited_secs)
        try:
            _register(lease.arena, spec)
        except BaseException:
            lease.close()
            raise
        return lease

    def map_ahead(self, spec: ArenaSpec, *, arenas: int) -> Future[None] | None:
        """Map and register one more arena in the background, if fewer than ``arenas`` meet ``spec``.

        None if there is nothing to do, or no room within the budget. Its error is that of :meth:`acquire`; a save that
        comes meanwhile waits for it, and tries by itself if it fails.
        """
        with self._lock:
            if self._is_closed:
                return None
            self._release_unfit(spec)
            fitting = sum(spec.is_met_by(arena.kind, arena.capacity) for arena in self._arenas)
            if fitting + len(self._coming) >= arenas or self._held_bytes + spec.nbytes > self.budget_bytes:
                return None
            self._coming.append(spec)
        try:
            return self._executor.submit(self._map_idle, spec)
        except BaseException:
            self._come(spec, None)
            raise

    def close_lost(self, known: Collection[Lease]) -> None:
        """Release the leases that no save owns: Ctrl-C between :meth:`acquire` and registration leaves them.

        ``known`` holds every lease that is owned. No thread may be in :meth:`acquire`.
        """
        with self._lock:
            self._reserved_bytes = 0
            lost = [lease for lease in self._leases if lease not in known]
        for lease in lost:
            lease.close()

    def close(self) -> None:
        """Release idle arenas now, lent ones when the last thread has let go of them, others when they are mapped."""
        with self._lock:
            self._is_closed = True
            idle, leases = self._idle, self._leases
            for arena in idle:
                del self._arenas[arena]
            self._changed.notify_all()
        with contextlib.ExitStack() as releases:  # each, whatever the others raise
            if self._segments is not None:
                releases.callback(self._segments.close)  # names of what a thread that does not end still has, too
            for lease in leases:
                releases.callback(lease.close)
            for arena in idle:
                releases.callback(arena.release)

    @property
    def _idle(self) -> list[Arena]:
        return [arena for arena, lease in self._arenas.items() if lease is None]

    @property
    def _leases(self) -> list[Lease]:
        return [lease for lease in self._arenas.values() if lease is not None]

    @property
    def _held_bytes(self) -> int:
        coming = sum(arena_capacity(spec.nbytes) for spec in self._coming)
        return sum(arena.capacity for arena in self._arenas) + self._reserved_bytes + coming

    def _try_take(self, spec: ArenaSpec, began: float) -> Lease | None:
        if self._is_closed:
            raise EngineClosedError("the engine was closed")
        self._release_unfit(spec)
        chosen = min(self._idle, key=lambda arena: arena.capacity, default=None)
        if chosen is None:
            return None
        self._arenas[chosen] = lease = Lease(chosen, self._give_back, waited_secs=time.monotonic() - began)
        return lease

    def _release_unfit(self, spec: ArenaSpec) -> None:
        for arena in self._idle:
            if not spec.is_met_by(arena.kind, arena.capacity):
                del self._arenas[arena]
                arena.release()

    def _may_map(self, spec: ArenaSpec) -> bool:
        if any(spec.is_met_by(coming.kind, arena_capacity(coming.nbytes)) for coming in self._coming):
            return False  # soon there
        if not self._leases and not self._reserved_bytes and not self._coming:
            return True
        return self._held_bytes + spec.nbytes <= self.budget_bytes

    def _map(self, spec: ArenaSpec, waited_secs: float) -> Lease:
        arena = lease = None
        try:
            arena = _make_arena(spec, self._segments)
            lease = Lease(arena, self._give_back, waited_secs=waited_secs)
        finally:
            with self._lock:
                self._reserved_bytes -= spec.nbytes
                if arena is not None:
                    self._arenas[arena] = lease
                self._changed.notify_all()
        return lease

    def _map_idle(self, spec: ArenaSpec) -> None:
        arena = None
        try:
            arena = _make_arena(spec, self._segments)
            _register(arena, spec)
        except BaseException:
            arena = None  # nobody else has it
            raise
        finally:
            self._come(spec, arena)

    def _come(self, spec: ArenaSpec, arena: Arena | None) -> None:
        """What was mapped ahead is there, or will not be."""
        with self._lock:
            self._coming.remove(spec)
            is_closed = self._is_closed
            if arena is not None and not is_closed:
                self._arenas[arena] = None
            self._changed.notify_all()
        if arena is not None and is_closed:
            arena.release()

    def _give_back(self, lease: Lease) -> None:
        arena = lease.arena
        if self._arenas.get(arena) is not lease:
            return  # told once more, after Ctrl-C
        if arena.segment is not None:
            arena.segment.mark_invalid()
        if self._debug:
            arena.poison()
        with self._lock:
            is_closed = self._is_closed
            if is_closed:
                del self._arenas[arena]
            else:
                self._arenas[arena] = None
            self._changed.notify_all()
        if is_closed:
            arena.release()


def _make_arena(spec: ArenaSpec, segments: SharedMemoryFactory | None) -> Arena:
    make_shared = None if segments is None else segments.make
    try:
        return map_arena(spec.nbytes, spec.kind, make_shared)
    except OSError as error:
        raise BudgetExceededError(
            f"cannot map {spec.nbytes} bytes for an image ({error}): lower budget_bytes"
        ) from error


def _register(arena: Arena, spec: ArenaSpec) -> None:
    if spec.source is not None and spec.kind != "pageable":
        arena.register(spec.source)
