"""Lifetime manager: arenas, leases, byte budget.

Who may touch which bytes until when: an arena's bytes belong to exactly one :class:`Lease` from ``acquire``
until the lease was closed *and* every thread future that it holds has resolved. Not the task's end counts: a
cancelled await does not stop its thread (ACCEPTANCE S1).
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import torch

from aio_ckpt import device
from aio_ckpt.errors import BudgetExceededError, EngineClosedError, StallError
from aio_ckpt.items import ImageLayout, align_up
from aio_ckpt.portal import Condition, Executor, Lock

__all__ = ["Arena", "ArenaKind", "Lease", "LifetimeManager", "default_budget_bytes"]

ArenaKind = Literal["pinned", "shm", "pageable"]

POISON = 0xCB
HUGE_PAGE_BYTES = 2 << 20
_SMALL_STEP_BYTES = 64 << 10
_POPULATE_STEP_BYTES = 64 << 20
_MADV_POPULATE_WRITE = 23
_LIBC = ctypes.CDLL(None, use_errno=True)


def default_budget_bytes(*, ranks_on_host: int) -> int:
    """Half of the memory that is available, at most the cgroup's headroom, shared among the host's ranks."""
    available: int = psutil.virtual_memory().available // 2
    return min(available, _cgroup_headroom_bytes(available)) // ranks_on_host


def _cgroup_headroom_bytes(otherwise: int) -> int:
    try:
        own = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip().lstrip("/")
        group = Path("/sys/fs/cgroup") / own
        return int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
    except (OSError, ValueError):  # no cgroup v2, or "max": no limit to keep to
        return otherwise


class Arena:
    """Page-aligned host memory that holds one image at a time."""

    def __init__(self, nbytes: int, kind: ArenaKind, executor: Executor) -> None:
        self.kind = kind
        step = HUGE_PAGE_BYTES if nbytes >= 8 * HUGE_PAGE_BYTES else _SMALL_STEP_BYTES
        self.capacity = align_up(max(nbytes, 1), step)
        """Bytes mapped: the image, rounded up to a huge page (64 KiB for small ones)."""
        self.rendered: ImageLayout | None = None
        """Layout whose constant bytes stand in the memory."""
        self.last_used = time.monotonic()
        """When a thread last let go of the bytes."""
        self.is_registered = False
        """Whether it is page-locked for CUDA."""
        self.memory = _map_shared(self.capacity) if kind == "shm" else _map_private(self.capacity)
        try:
            self.memory.madvise(mmap.MADV_DONTFORK)
            self.tensor = torch.frombuffer(self.memory, dtype=torch.uint8)
            self.address: int = self.tensor.data_ptr()
            _populate(self.address, self.capacity, executor)
        except BaseException:
            self.__dict__.clear()  # whoever keeps the error keeps this frame, and must not keep the memory
            raise

    def register(self) -> None:
        """Page-lock for CUDA, once."""
        if self.is_registered:
            return
        try:
            device.register_host_memory(self.address, self.capacity)
            self.is_registered = True
        except KeyboardInterrupt:  # before or behind the driver's work: memory cannot be registered twice
            self.is_registered = False
            with contextlib.suppress(RuntimeError):
                device.unregister_host_memory(self.address)
            raise

    def poison(self) -> None:
        """Overwrite everything, so that a use after release shows in the data."""
        self.rendered = None
        self.tensor.fill_(POISON)

    def release(self) -> None:
        """Give the memory back to the system once the last view of it is gone."""
        if self.is_registered:
            device.unregister_host_memory(self.address)
            self.is_registered = False
        # No close(): torch keeps no export of the map, so it would unmap under a tensor that is still in use.
        del self.tensor, self.memory


def _map_private(capacity: int) -> mmap.mmap:
    memory = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel built without huge pages: only slower
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _map_shared(capacity: int) -> mmap.mmap:
    descriptor = os.memfd_create("aio_ckpt", os.MFD_CLOEXEC)
    try:
        # Secured now: without it the first touch of a page that cannot be had is a SIGBUS.
        os.posix_fallocate(descriptor, 0, capacity)
        return mmap.mmap(descriptor, capacity, flags=mmap.MAP_SHARED)
    except OSError as error:
        raise BudgetExceededError(
            f'staging="shm": no {capacity} bytes of shared memory ({error.strerror}); '
            'lower budget_bytes or use staging="pageable"'
        ) from error
    finally:
        os.close(descriptor)


def _populate(address: int, capacity: int, executor: Executor) -> None:
    starts = range(0, capacity, _POPULATE_STEP_BYTES)

    def touch(start: int) -> None:
        # A kernel before 5.14 refuses; then the copy faults the pages in, slower but as right.
        length = min(_POPULATE_STEP_BYTES, capacity - start)
        _LIBC.madvise(ctypes.c_void_p(address + start), ctypes.c_size_t(length), _MADV_POPULATE_WRITE)

    list(executor.map(touch, starts))


@dataclass(frozen=True, slots=True, kw_only=True)
class LifetimeStats:
    """What the manager holds now."""

    arenas: int
    """Arenas mapped."""
    arena_bytes: int
    """Their capacity."""
    leases: int
    """Leases not ended."""


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

    Invariant: an arena is either idle here or lent to exactly one lease; ``budget_bytes`` bounds the capacity
    of all arenas together. Idle arenas that fit no more are released, never kept for later. An arena changes hands
    in one assignment, so that Ctrl-C in :meth:`acquire` may lose a lease but never an arena: see :meth:`close_lost`.
    """

    def __init__(self, *, budget_bytes: int, executor: Executor, debug: bool) -> None:
        self.budget_bytes = budget_bytes
        self._executor = executor
        self._debug = debug
        self._lock = Lock()
        self._changed = Condition(self._lock)
        self._arenas: dict[Arena, Lease | None] = {}
        self._reserved_bytes = 0
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

    def acquire(
        self, nbytes: int, kind: ArenaKind, *, registers: bool, timeout_secs: float, limit_secs: float = math.inf
    ) -> Lease:
        """An arena of at least ``nbytes``; blocks while other leases hold the budget.

        With ``registers`` the memory is registered with CUDA unless it is ``pageable``.

        Raises:
            BudgetExceededError: ``nbytes`` alone is more than the budget, or the memory cannot be had.
            StallError: no thread let go of a lent byte for ``timeout_secs``, or ``limit_secs`` passed in all.
            EngineClosedError: the manager was closed.
        """
        if nbytes > self.budget_bytes:
            raise BudgetExceededError(
                f"an image of {nbytes} bytes exceeds budget_bytes={self.budget_bytes}: raise it, or save less at once"
            )
        began = time.monotonic()
        with self._lock:
            while (lease := self._try_take(nbytes, kind, began)) is None and not self._may_map(nbytes):
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
                self._reserved_bytes += nbytes
        if lease is None:
            lease = self._map(nbytes, kind, waited_secs)
        try:
            if registers and kind != "pageable":
                lease.arena.register()
        except BaseException:
            lease.close()
            raise
        return lease

    def close_lost(self, known: Collection[Lease]) -> None:
        """Close the leases that nobody has, as Ctrl-C in :meth:`acquire` or behind it leaves them.

        For whoever knows them all, and that no thread is in :meth:`acquire`.
        """
        with self._lock:
            self._reserved_bytes = 0
            lost = [lease for lease in self._leases if lease not in known]
        for lease in lost:
            lease.close()

    def close(self) -> None:
        """Release idle arenas now and lent ones when the last thread has let go of them."""
        with self._lock:
            self._is_closed = True
            idle, leases = self._idle, self._leases
            for arena in idle:
                del self._arenas[arena]
            self._changed.notify_all()
        for arena in idle:
            arena.release()
        for lease in leases:
            lease.close()

    @property
    def _idle(self) -> list[Arena]:
        return [arena for arena, lease in self._arenas.items() if lease is None]

    @property
    def _leases(self) -> list[Lease]:
        return [lease for lease in self._arenas.values() if lease is not None]

    def _try_take(self, nbytes: int, kind: ArenaKind, began: float) -> Lease | None:
        if self._is_closed:
            raise EngineClosedError("the engine was closed")
        idle = self._idle
        fitting = [a for a in idle if a.kind == kind and nbytes <= a.capacity <= nbytes + _slack(nbytes)]
        chosen = min(fitting, key=lambda arena: arena.capacity, default=None)
        for arena in idle:
            if arena not in fitting:
                del self._arenas[arena]
                arena.release()
        if chosen is None:
            return None
        self._arenas[chosen] = lease = Lease(chosen, self._give_back, waited_secs=time.monotonic() - began)
        return lease

    def _may_map(self, nbytes: int) -> bool:
        held = sum(arena.capacity for arena in self._arenas) + self._reserved_bytes
        return (not self._leases and not self._reserved_bytes) or held + nbytes <= self.budget_bytes

    def _map(self, nbytes: int, kind: ArenaKind, waited_secs: float) -> Lease:
        arena = lease = None
        try:
            arena = Arena(nbytes, kind, self._executor)
            lease = Lease(arena, self._give_back, waited_secs=waited_secs)
        except OSError as error:
            raise BudgetExceededError(
                f"cannot map {nbytes} bytes for an image ({error}): lower budget_bytes"
            ) from error
        finally:
            with self._lock:
                self._reserved_bytes -= nbytes
                if arena is not None:
                    self._arenas[arena] = lease
                self._changed.notify_all()
        return lease

    def _give_back(self, lease: Lease) -> None:
        arena = lease.arena
        if self._arenas.get(arena) is not lease:
            return  # told once more, after Ctrl-C
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


def _slack(nbytes: int) -> int:
    return max(HUGE_PAGE_BYTES, nbytes // 8)
