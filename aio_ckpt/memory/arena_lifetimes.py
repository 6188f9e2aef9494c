"""Lifetime manager: arenas, leases, byte budget.

Invariant: an arena's bytes belong to exactly one :class:`Lease`, from ``acquire`` until the lease was closed *and* each
thread future that it holds has resolved. The end of a task does not count, because a cancelled await does not stop its
thread.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from aio_ckpt.errors import BudgetExceededError, EngineClosedError, StallError
from aio_ckpt.memory.arena import HUGE_PAGE_BYTES, Arena, ArenaKind, SharedMemoryFactory, arena_capacity, map_arena
from aio_ckpt.memory.available import default_budget_bytes
from aio_ckpt.runtime.ctrl_c import Condition, Lock, new_future
from aio_ckpt.runtime.portal import Executor
from aio_ckpt.runtime.waiting import WaitWarning, call_text


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaSpec:
    """Requirements of one save on its arena."""

    nbytes: int
    """Bytes of the image that the arena holds at once."""
    kind: ArenaKind
    source: torch.device | None
    """CUDA device that the save copies from. Memory that is not pageable is registered for it. None: the state is in
    host memory."""

    def is_met_by(self, kind: ArenaKind, capacity: int) -> bool:
        """Return whether an arena is of the right kind and large enough, but larger by one huge page or 1/8 at most."""
        return kind == self.kind and self.nbytes <= capacity <= self.nbytes + max(HUGE_PAGE_BYTES, self.nbytes // 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class LifetimeStats:
    """Numbers of arenas and leases that the manager holds."""

    arenas: int
    """Mapped arenas, idle or lent."""
    arena_bytes: int
    """Capacity of all mapped arenas, in bytes."""
    leases: int
    """Leases that have not ended."""


_KEPT_LEASES = 4
"""Leases for which an idle arena that fits none of them is kept: steps and files that take turns map nothing anew."""


class Lease:
    """Right of one save to use one arena. It ends exactly once: when it is closed and its last holder has released it.

    If Ctrl-C interrupts a method, the next call of :meth:`close` or :meth:`release` finishes its work.
    """

    def __init__(self, arena: Arena, on_end: Callable[[Lease], None], *, waited_secs: float) -> None:
        self.arena = arena
        self.waited_secs = waited_secs
        """Seconds that ``acquire`` waited for earlier leases."""
        self.ended: Future[None] = new_future()
        self._on_end = on_end
        self._lock = Lock()
        self._holders: set[object] = set()
        self._is_closed = False

    def hold_until(self, future: Future[object]) -> None:
        """Keep the bytes until ``future`` has resolved: the future of the thread itself, not of an await."""
        self.hold(future)
        future.add_done_callback(self.release)

    def hold(self, holder: object) -> None:
        """Keep the bytes until :meth:`release` of the same holder."""
        with self._lock:
            if self._is_closed and not self._holders:
                raise EngineClosedError("the lease has ended: its bytes may belong to another save")
            self._holders.add(holder)

    def release(self, holder: object) -> None:
        """End the hold of ``holder``, which no longer touches the bytes. Idempotent."""
        with self._lock:
            self._holders.discard(holder)
            self.arena.last_used = time.monotonic()
            self._end_if_unused()

    def close(self) -> None:
        """Refuse new holders; the lease ends when the last holder has released it. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._end_if_unused()

    def _end_if_unused(self) -> None:
        if self._is_closed and not self._holders and not self.ended.done():
            try:
                self._on_end(self)
            except Exception:  # after Ctrl-C alone, the next call finishes the work
                self.ended.set_result(None)
                raise
            self.ended.set_result(None)


class LifetimeManager:
    """Pool of arenas that lends them to saves within a byte budget.

    Invariants: an arena is either idle or lent to exactly one lease. ``budget_bytes`` bounds the bytes of all arenas,
    also of those that are still being mapped; the bytes by which each was rounded up do not count. An idle arena that
    does not fit the next save stays for a later one, as long as the budget holds both and one of the last leases used
    it. One assignment lends an arena, so Ctrl-C in :meth:`acquire` may lose a lease but never an arena: see
    :meth:`close_lost`.
    """

    def __init__(
        self,
        *,
        budget_bytes: int | None,
        executor: Executor,
        debug: bool,
        ranks_on_host: int = 1,
        rank: int | None = None,
        segments: SharedMemoryFactory | None = None,
    ) -> None:
        """Set up a manager without arenas.

        Args:
            budget_bytes: limit on staging memory; None: :func:`default_budget_bytes`.
            executor: threads that map arenas ahead.
            debug: whether a released arena is poisoned.
            ranks_on_host: number of ranks that share the memory of this host, for the default budget.
            rank: this rank, for log records; None if it is unknown.
            segments: factory of shared memory that outlives the process; the manager closes it.
        """
        self._ranks_on_host = ranks_on_host
        self._rank = rank
        self._is_measured = budget_bytes is None
        self.budget_bytes = default_budget_bytes(ranks_on_host=ranks_on_host) if budget_bytes is None else budget_bytes
        """Limit on staging memory in bytes: as given, or as last measured."""
        self._segments = segments
        self._executor = executor
        self._debug = debug
        self._changed = Condition()
        self._arenas: dict[Arena, Lease | None] = {}
        self._recent: deque[Arena] = deque(maxlen=_KEPT_LEASES)
        """Arenas that were mapped or lent last, the least recent first."""
        self._reserved_bytes = 0
        self._being_mapped: list[ArenaSpec] = []
        self._is_closed = False

    @property
    def stats(self) -> LifetimeStats:
        """Numbers of arenas and leases at this moment."""
        with self._changed:
            return LifetimeStats(
                arenas=len(self._arenas),
                arena_bytes=sum(arena.capacity for arena in self._arenas),
                leases=len(self._leases),
            )

    @property
    def arena_bytes(self) -> int:
        """Capacity of all mapped arenas, in bytes. Takes no lock, so that a signal handler may read it."""
        return sum(arena.capacity for arena in tuple(self._arenas))

    def measure_budget(self) -> int:
        """Return ``budget_bytes``. If the default is in force, measure it anew first.

        Call this when a new layout changes the memory that a save needs: the trainer may have taken memory meanwhile.
        As long as the layout stays, the budget must stay too, so that the arenas are reused.
        """
        if self._is_measured:
            held_bytes = self.stats.arena_bytes
            self.budget_bytes = default_budget_bytes(ranks_on_host=self._ranks_on_host, held_bytes=held_bytes)
        return self.budget_bytes

    def acquire(
        self, spec: ArenaSpec, *, timeout_secs: float, limit_secs: float = math.inf, step: int | None = None
    ) -> Lease:
        """Lease an arena that meets ``spec``. Block while other leases hold the budget, or one is being mapped ahead.

        If that lasts, lines are logged, which name ``step``.

        Raises:
            BudgetExceededError: the image alone exceeds the budget, or the system lacks the memory.
            StallError: no thread released a lent arena for ``timeout_secs``, or ``limit_secs`` passed in all.
            EngineClosedError: the manager was closed.
        """
        if spec.nbytes > self.budget_bytes:
            raise BudgetExceededError(
                f"an image of {spec.nbytes} bytes exceeds budget_bytes={self.budget_bytes}: raise it, or save less "
                "at once"
            )
        began, lines = time.monotonic(), self._lines(spec, step)
        while True:
            pause_secs = lines.pause_secs()  # logs, so it is not under the lock
            with self._changed:
                is_coming = any(
                    spec.is_met_by(other.kind, arena_capacity(other.nbytes)) for other in self._being_mapped
                )
                lease = self._try_take(spec, began)  # last: an error behind it would lose the lease
                if lease is not None or (not is_coming and self._make_room(spec)):
                    waited_secs = time.monotonic() - began
                    if lease is None:
                        self._reserved_bytes += spec.nbytes
                    break
                last_used = max([began, *(lent.arena.last_used for lent in self._leases)])
                left = last_used + timeout_secs - time.monotonic()
                if left <= 0:
                    raise StallError(f"an earlier save keeps its arena and made no progress for {timeout_secs} s")
                limit_left = began + limit_secs - time.monotonic()
                if limit_left <= 0:
                    raise StallError(f"an earlier save kept its arena, this one had {limit_secs:.1f} s left")
                self._changed.wait(min(left, limit_left, pause_secs))
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

        Returns None if there are enough arenas, or the budget has no room. The future raises what :meth:`acquire` would
        raise. A save that needs the arena meanwhile waits for it, and maps one itself if this fails.
        """
        with self._changed:
            if self._is_closed:
                return None
            fitting = sum(spec.is_met_by(arena.kind, arena.capacity) for arena in self._arenas)
            ready = fitting + len(self._being_mapped)
            has_room = self._held_bytes + spec.nbytes <= self.budget_bytes
            # Only the first arena replaces idle ones: a second is used only if saves overlap.
            if ready >= arenas or not (has_room or (not ready and self._make_room(spec))):
                return None
            self._being_mapped.append(spec)
        try:
            return self._executor.submit(self._map_idle, spec)
        except BaseException:
            self._end_mapping(spec, None)
            raise

    def close_lost(self, known: Collection[Lease]) -> None:
        """Close the leases that no save owns: Ctrl-C between :meth:`acquire` and registration leaves them.

        ``known`` holds every owned lease. No thread may be in :meth:`acquire`.
        """
        with self._changed:
            self._reserved_bytes = 0
            lost = [lease for lease in self._leases if lease not in known]
        for lease in lost:
            lease.close()

    def close(self) -> None:
        """Release idle arenas now, lent ones when their leases end, and others as soon as they are mapped."""
        with self._changed:
            self._is_closed = True
            idle, leases = self._idle, self._leases
            for arena in idle:
                del self._arenas[arena]
            self._changed.notify_all()
        with contextlib.ExitStack() as releases:  # if one raises, the others still run
            if self._segments is not None:
                # Segments that a thread still uses lose their names too: that thread may never end.
                releases.callback(self._segments.close)
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
        being_mapped = sum(arena_capacity(spec.nbytes) for spec in self._being_mapped)
        return sum(arena.capacity for arena in self._arenas) + self._reserved_bytes + being_mapped

    def _lines(self, spec: ArenaSpec, step: int | None) -> WaitWarning:
        def describe(waited: str) -> str:
            stats = self.stats
            return (
                f"{call_text('save', step)} has waited {waited} for {spec.nbytes} bytes of staging memory: "
                f"earlier saves ({stats.leases}) hold {stats.arena_bytes} of budget_bytes={self.budget_bytes}"
            )

        return WaitWarning(describe, step=step, rank=self._rank)

    def _try_take(self, spec: ArenaSpec, began: float) -> Lease | None:
        if self._is_closed:
            raise EngineClosedError("the engine was closed")
        fitting = [arena for arena in self._idle if spec.is_met_by(arena.kind, arena.capacity)]
        chosen = min(fitting, key=lambda arena: arena.capacity, default=None)
        if chosen is None:
            return None
        self._recent.append(chosen)
        for arena in self._idle:
            if arena not in self._recent and not spec.is_met_by(arena.kind, arena.capacity):
                self._release_idle(arena)
        self._arenas[chosen] = lease = Lease(chosen, self._give_back, waited_secs=time.monotonic() - began)
        return lease

    def _make_room(self, spec: ArenaSpec) -> bool:
        """Return whether the budget holds one more arena. Release idle ones for it, the least recently used first.

        Shared memory is scarce (a container's /dev/shm, a tmpfs), and other processes see it: none is kept for later.
        """
        idle = sorted(self._idle, key=lambda arena: arena.last_used)
        busy_bytes = self._held_bytes - sum(arena.capacity for arena in idle)
        if busy_bytes + spec.nbytes > self.budget_bytes:
            return False  # so the idle arenas may stay
        for arena in idle:
            if arena.kind == "shm" or self._held_bytes + spec.nbytes > self.budget_bytes:
                self._release_idle(arena)
        return True

    def _release_idle(self, arena: Arena) -> None:
        del self._arenas[arena]
        arena.release()

    def _map(self, spec: ArenaSpec, waited_secs: float) -> Lease:
        arena = lease = None
        try:
            try:
                arena = _make_arena(spec, self._segments)
            except BudgetExceededError:  # the system has less than the budget
                with self._changed:
                    idle = self._idle
                    for other in idle:
                        self._release_idle(other)
                if not idle:
                    raise
                arena = _make_arena(spec, self._segments)
            lease = Lease(arena, self._give_back, waited_secs=waited_secs)
        finally:
            with self._changed:
                self._reserved_bytes -= spec.nbytes
                if arena is not None:
                    self._arenas[arena] = lease
                    self._recent.append(arena)
                self._changed.notify_all()
        return lease

    def _map_idle(self, spec: ArenaSpec) -> None:
        arena = None
        try:
            arena = _make_arena(spec, self._segments)
            _register(arena, spec)
        except BaseException:
            arena = None  # an arena that could not be registered is of no use
            raise
        finally:
            self._end_mapping(spec, arena)

    def _end_mapping(self, spec: ArenaSpec, arena: Arena | None) -> None:
        """Add the arena that was mapped ahead to the idle ones; None if the mapping has failed."""
        with self._changed:
            self._being_mapped.remove(spec)
            is_closed = self._is_closed
            if arena is not None and not is_closed:
                self._arenas[arena] = None
                self._recent.append(arena)
            self._changed.notify_all()
        if arena is not None and is_closed:
            arena.release()

    def _give_back(self, lease: Lease) -> None:
        arena = lease.arena
        if self._arenas.get(arena) is not lease:
            return  # it was given back before Ctrl-C interrupted the lease
        arena.last_used = time.monotonic()
        is_reusable = False
        try:
            if arena.segment is not None:
                arena.segment.mark_invalid()
            if self._debug:
                arena.poison()
            is_reusable = True
        finally:
            with self._changed:
                is_kept = is_reusable and not self._is_closed
                if is_kept:
                    self._arenas[arena] = None
                else:
                    del self._arenas[arena]
                self._changed.notify_all()
            if not is_kept:
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
