"""Arena: page-aligned host memory for one image: huge pages, touched by many threads, registered with CUDA.

Not torch's pinned allocator, which touches its pages by one thread (FACTS: 1.9 GB/s against 26).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import time
from collections.abc import Callable
from typing import Literal, Protocol

import torch

from aio_ckpt.errors import BudgetExceededError
from aio_ckpt.format.constants import align_up
from aio_ckpt.memory import cuda as device
from aio_ckpt.runtime.portal import Executor

__all__ = [
    "HUGE_PAGE_BYTES",
    "POISON",
    "Arena",
    "ArenaKind",
    "SharedMemory",
    "SharedMemoryFactory",
    "arena_capacity",
    "map_arena",
]

ArenaKind = Literal["pinned", "shm", "pageable"]

POISON = 0xCB
HUGE_PAGE_BYTES = 2 << 20
_SMALL_STEP_BYTES = 64 << 10
_POPULATE_STEP_BYTES = 64 << 20
_POPULATE_THREADS = 16
"""Borrowed fact (FACTS): 16 threads touch 26 GB/s, one 6.9; more were not measured."""
_POPULATE_END_SECS = 10.0
_MADV_POPULATE_WRITE = 23
_LIBC = ctypes.CDLL(None, use_errno=True)


def arena_capacity(nbytes: int) -> int:
    """Bytes mapped for an image of ``nbytes``: rounded up to a huge page (64 KiB for small ones)."""
    step = HUGE_PAGE_BYTES if nbytes >= 8 * HUGE_PAGE_BYTES else _SMALL_STEP_BYTES
    return align_up(max(nbytes, 1), step)


class SharedMemory(Protocol):
    """Shared memory that outlives the process, made by a plug-in."""

    memory: mmap.mmap
    """The bytes of the image."""

    def mark_invalid(self) -> None:
        """What is in the image is nobody's from now on. Idempotent."""

    def remove(self) -> None:
        """Take the name away; the memory goes with the last view of it. Idempotent."""


class SharedMemoryFactory(Protocol):
    """Makes shared memory that outlives the process."""

    def make(self, capacity: int, /) -> SharedMemory:
        """New shared memory of ``capacity`` bytes; raises BudgetExceededError if there is no room for it."""

    def close(self) -> None:
        """Remove the names of all that was made. Idempotent."""


class Arena:
    """Page-aligned host memory that holds one image at a time."""

    def __init__(self, memory: mmap.mmap, kind: ArenaKind, segment: SharedMemory | None = None) -> None:
        self.memory = memory
        self.kind = kind
        self.segment = segment
        """Named file that the memory is; None: it has no name, and ends with the process."""
        self.capacity = len(memory)
        """Bytes mapped."""
        self._constants_of: object = None
        self.last_used = time.monotonic()
        """When a thread last let go of the bytes."""
        self.is_registered = False
        """Whether it is page-locked for CUDA."""
        self._source: torch.device | None = None
        with torch.inference_mode(mode=False):  # one made inside could not be written to outside
            self.tensor = torch.frombuffer(memory, dtype=torch.uint8)
        self.address: int = self.tensor.data_ptr()

    def register(self, source: torch.device) -> None:
        """Page-lock for CUDA, for copies from ``source`` above all, once."""
        if self.is_registered:
            return
        self._source = source
        with device.using(source):
            try:
                device.register_host_memory(self.address, self.capacity)
                self.is_registered = True
            except KeyboardInterrupt:  # before or behind the driver's work: memory cannot be registered twice
                self.is_registered = False
                with contextlib.suppress(RuntimeError):
                    device.unregister_host_memory(self.address)
                raise

    def take_constants(self, layout: object) -> bool:
        """Return whether the constant bytes of ``layout``, compared by identity, stand in the memory.

        The caller may overwrite the memory now: until :meth:`keep_constants`, it counts as without constants.
        """
        are_there = self._constants_of is layout
        self._constants_of = None
        return are_there

    def keep_constants(self, layout: object) -> None:
        """State that the whole image of ``layout`` stands in the memory, so that its constants can be used again."""
        self._constants_of = layout

    def poison(self) -> None:
        """Overwrite everything, so that a use after release shows in the data."""
        self._constants_of = None
        self.tensor.fill_(POISON)

    def release(self) -> None:
        """Give the memory back to the system once the last view of it is gone."""
        try:
            if self.is_registered:
                self.is_registered = False
                with device.using(self._source):
                    device.unregister_host_memory(self.address)
        finally:  # a context that is dead refuses, and its process must end all the same
            if self.segment is not None:
                self.segment.remove()
            # No close(): torch keeps no export of the map, so it would unmap under a tensor that is still in use.
            del self.tensor, self.memory, self.segment


def map_arena(nbytes: int, kind: ArenaKind, make_shared: Callable[[int], SharedMemory] | None) -> Arena:
    """Memory for an image of ``nbytes``, every page there. Shared memory is made by ``make_shared``, if it is given.

    Its pages lie on the NUMA nodes of the CPUs that this process may use.

    Raises:
        BudgetExceededError: shared memory of that size cannot be had.
        OSError: the system refuses to map it.
    """
    capacity = arena_capacity(nbytes)
    segment = make_shared(capacity) if kind == "shm" and make_shared is not None else None
    memory = arena = None
    try:
        if segment is not None:
            memory = segment.memory
        else:
            memory = _map_shared(capacity) if kind == "shm" else _map_private(capacity)
        memory.madvise(mmap.MADV_DONTFORK)
        arena = Arena(memory, kind, segment)
        _populate(arena.address, capacity)
    except BaseException:
        if segment is not None:
            segment.remove()
        del memory, arena, segment  # whoever keeps the error keeps this frame, and must not keep the memory
        raise
    return arena


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


def _populate(address: int, capacity: int) -> None:
    """Touch every page, by many threads."""
    starts = range(0, capacity, _POPULATE_STEP_BYTES)

    def touch(start: int) -> None:
        # A kernel before 5.14 refuses; then the copy faults the pages in, slower but as right.
        length = min(_POPULATE_STEP_BYTES, capacity - start)
        _LIBC.madvise(ctypes.c_void_p(address + start), ctypes.c_size_t(length), _MADV_POPULATE_WRITE)

    threads = _touching_threads(min(len(starts), _POPULATE_THREADS, len(os.sched_getaffinity(0))))
    if threads is None:
        for start in starts:
            touch(start)
        return
    try:
        list(threads.map(touch, starts))
    finally:
        threads.close(_POPULATE_END_SECS)


def _touching_threads(count: int) -> Executor | None:
    """Threads for this once: the engine's own may all wait for a disk. None: one thread is enough, or all there is."""
    if count < 2:
        return None
    try:
        return Executor("aio_ckpt-touch", count)
    except RuntimeError:  # the system gives no more: only slower
        return None
