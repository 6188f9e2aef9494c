"""Arenas: page-aligned host memory for one image each, in huge pages where the kernel has them.

Many threads touch the pages, and CUDA page-locks them on request. Torch's pinned allocator is not used, because one
thread touches all of its pages: 1.9 GB/s against 26.
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

ArenaKind = Literal["pinned", "shm", "pageable"]

POISON = 0xCB
HUGE_PAGE_BYTES = 2 << 20
_SMALL_STEP_BYTES = 64 << 10
_POPULATE_STEP_BYTES = 64 << 20
_POPULATE_THREADS = 16
"""16 threads touch 26 GB/s, one thread 6.9. More threads were not measured."""
_POPULATE_END_SECS = 10.0
_MADV_POPULATE_WRITE = 23
_LIBC = ctypes.CDLL(None, use_errno=True)


def arena_capacity(nbytes: int) -> int:
    """Return the bytes to map for an image of ``nbytes``: rounded up to huge pages, or to 64 KiB if it is small."""
    step = HUGE_PAGE_BYTES if nbytes >= 8 * HUGE_PAGE_BYTES else _SMALL_STEP_BYTES
    return align_up(max(nbytes, 1), step)


class SharedMemory(Protocol):
    """Named shared memory of one image, which outlives the process. A plug-in makes it."""

    memory: mmap.mmap

    def mark_invalid(self) -> None:
        """Mark the image as no complete snapshot, because its lease has ended. Idempotent."""

    def remove(self) -> None:
        """Remove the name; the memory is freed with the last view of it. Idempotent."""


class SharedMemoryFactory(Protocol):
    """Factory of shared memory that outlives the process."""

    def make(self, capacity: int, /) -> SharedMemory:
        """Return new shared memory of ``capacity`` bytes. Raises BudgetExceededError if there is no room for it."""

    def close(self) -> None:
        """Remove the names of all memory that this factory made. Idempotent."""


class Arena:
    """Page-aligned host memory that holds one image at a time."""

    def __init__(self, memory: mmap.mmap, kind: ArenaKind, segment: SharedMemory | None = None) -> None:
        self.memory = memory
        self.kind = kind
        self.segment = segment
        """Named file that holds the memory; None if the memory has no name and ends with the process."""
        self.capacity = len(memory)
        """Bytes mapped."""
        self._constants_of: object = None
        self.last_used = time.monotonic()
        """``time.monotonic`` when a thread, or a lease, last released the bytes."""
        self.is_registered = False
        """Whether the memory is page-locked for CUDA."""
        self._source: torch.device | None = None
        with torch.inference_mode(mode=False):  # outside of inference mode, a tensor made inside cannot be written to
            self.tensor = torch.frombuffer(memory, dtype=torch.uint8)
        self.address: int = self.tensor.data_ptr()

    def register(self, source: torch.device) -> None:
        """Page-lock the memory for CUDA, through the context of ``source``. A registered arena stays as it is."""
        if self.is_registered:
            return
        self._source = source
        with device.on_device(source):
            try:
                device.register_host_memory(self.address, self.capacity)
                self.is_registered = True
            except KeyboardInterrupt:
                # It may come before or after the driver's work. Memory cannot be registered twice, so undo it.
                self.is_registered = False
                with contextlib.suppress(RuntimeError):
                    device.unregister_host_memory(self.address)
                raise

    def take_constants(self, layout: object) -> bool:
        """Return whether the memory holds the constant bytes of ``layout``, which is compared by identity.

        The caller may overwrite the memory now. So the arena counts as without constants until :meth:`keep_constants`.
        """
        has_constants = self._constants_of is layout
        self._constants_of = None
        return has_constants

    def keep_constants(self, layout: object) -> None:
        """Record that the memory holds the whole image of ``layout``, so that a later save reuses its constants."""
        self._constants_of = layout

    def poison(self) -> None:
        """Overwrite all bytes, so that a use after release shows in the data."""
        self._constants_of = None
        self.tensor.fill_(POISON)

    def release(self) -> None:
        """Unregister the memory and drop it. The system gets it back when the last view of it is gone."""
        try:
            if self.is_registered:
                self.is_registered = False
                with device.on_device(self._source):
                    device.unregister_host_memory(self.address)
        finally:  # a dead CUDA context refuses to unregister, but the process must still be able to end
            if self.segment is not None:
                self.segment.remove()
            # No close(): torch keeps no export of the map, so it would unmap under a tensor that is still in use.
            del self.tensor, self.memory, self.segment


def map_arena(nbytes: int, kind: ArenaKind, make_shared: Callable[[int], SharedMemory] | None) -> Arena:
    """Map memory for an image of ``nbytes`` and touch every page of it. ``make_shared``, if given, makes shared memory.

    The pages lie on the NUMA nodes of the CPUs that this process may use.

    Raises:
        BudgetExceededError: there is no shared memory of that size.
        OSError: the system refuses to map the memory.
    """
    capacity = arena_capacity(nbytes)
    segment = make_shared(capacity) if kind == "shm" and make_shared is not None else None
    memory = arena = None
    try:
        if segment is not None:
            memory = segment.memory
        else:
            memory = _map_shared(capacity) if kind == "shm" else map_private(capacity)
        memory.madvise(mmap.MADV_DONTFORK)
        arena = Arena(memory, kind, segment)
        _populate(arena.address, capacity)
    except BaseException:
        if segment is not None:
            segment.remove()
        del memory, arena, segment  # the error keeps this frame alive, which must not keep the memory
        raise
    return arena


def map_private(capacity: int) -> mmap.mmap:
    """Map memory of this process, in huge pages: to touch new small pages costs as much as a read from the disk."""
    memory = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages only makes the copies slower
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _map_shared(capacity: int) -> mmap.mmap:
    descriptor = os.memfd_create("aio_ckpt", os.MFD_CLOEXEC)
    try:
        # The memory is reserved now. Without that, the first touch of a page that the system lacks is a SIGBUS.
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
    """Touch every page, with many threads if the system gives them."""
    starts = range(0, capacity, _POPULATE_STEP_BYTES)

    def touch(start: int) -> None:
        # A kernel before 5.14 refuses the call. The copies then fault the pages in, which is slower.
        length = min(_POPULATE_STEP_BYTES, capacity - start)
        _LIBC.madvise(ctypes.c_void_p(address + start), ctypes.c_size_t(length), _MADV_POPULATE_WRITE)

    count, threads = min(len(starts), _POPULATE_THREADS, len(os.sched_getaffinity(0))), None
    # New threads, because the engine's own may all wait for a disk. If the system gives none, this thread does it.
    with contextlib.suppress(RuntimeError):
        threads = Executor("aio_ckpt-touch", count) if count > 1 else None
    if threads is None:
        for start in starts:
            touch(start)
        return
    try:
        list(threads.map(touch, starts))
    finally:
        threads.close(_POPULATE_END_SECS)
