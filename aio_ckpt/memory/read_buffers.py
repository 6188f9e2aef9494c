"""Bounce: the page-aligned memory that data files are read to when a target cannot be read to itself."""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
from collections.abc import AsyncIterator, Iterable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress

import anyio
import torch

from aio_ckpt.format.constants import PAGE_BYTES, align_up
from aio_ckpt.memory.cuda import register_host_memory, unregister_host_memory, using
from aio_ckpt.runtime.portal import Executor, Lock, run_blocking, run_owned

__all__ = ["BounceLoan", "BounceRing", "address_of", "bounce_buffers", "page_locked"]

_log = logging.getLogger("aio_ckpt")

_HUGE_PAGE_BYTES = 2 << 20
_KEPT_BYTES = 128 << 20
"""Memory kept for the next load, at most: what a load of large tensors by four workers takes."""


class BounceRing:
    """Bounce memory of one engine, kept from load to load.

    Touching fresh pages costs as much as the read itself, and several times that where the kernel first has to make
    room for huge ones.

    Invariant: memory is lent to one load at a time, and comes back once every thread of that load has ended.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._kept: list[mmap.mmap] = []
        self._is_closed = False

    @property
    def kept_bytes(self) -> int:
        """Memory that no load has now."""
        with self._lock:
            return sum(map(len, self._kept))

    def take(self, nbytes: int) -> mmap.mmap:
        """At least ``nbytes``, not cleared."""
        with self._lock:
            found = min((memory for memory in self._kept if len(memory) >= nbytes), key=len, default=None)
            if found is not None:
                self._kept.remove(found)
        return found or _map(nbytes)

    def give_back(self, memories: Iterable[mmap.mmap]) -> None:
        """Nobody touches them any more. Large ones are kept rather than small ones, if there is no room for all."""
        with self._lock:
            room, kept = 0 if self._is_closed else _KEPT_BYTES, []
            for memory in sorted([*self._kept, *memories], key=len, reverse=True):
                if len(memory) <= room:
                    room -= len(memory)
                    kept.append(memory)
            self._kept = kept

    def let_go(self) -> None:
        """Release what is kept."""
        with self._lock:
            self._kept.clear()

    def close(self) -> None:
        """Release what is kept, and keep nothing that loads still have."""
        with self._lock:
            self._is_closed = True
            self._kept.clear()


class BounceLoan:
    """Bounce memory of one load: until it was closed, and every thread that it is held for has ended."""

    def __init__(self, ring: BounceRing) -> None:
        self._ring = ring
        self._lock = Lock()
        self._memories: list[mmap.mmap] = []
        self._holders = 1  # the load

    def buffers(self, nbytes: int, count: int) -> list[memoryview]:
        """As :func:`bounce_buffers`."""
        if not nbytes:
            return [memoryview(b"")] * count
        memory = self._ring.take(_capacity(nbytes, count))
        self._memories.append(memory)
        return _cut(memory, nbytes, count)

    def hold_until(self, future: Future[object]) -> None:
        """Keep the memory until ``future``, the thread's own, has resolved: a cancelled await does not stop it."""
        with self._lock:
            self._holders += 1
        future.add_done_callback(self._let_go)

    def close(self) -> None:
        """The load begins no thread more. Once."""
        self._let_go()

    def _let_go(self, _: object = None) -> None:
        with self._lock:
            self._holders -= 1
            memories = [] if self._holders else self._memories
            if memories:
                self._memories = []
        self._ring.give_back(memories)


def bounce_buffers(nbytes: int, count: int) -> list[memoryview]:
    """``count`` fresh page-aligned buffers of ``nbytes``, rounded up to pages, that lie in a row."""
    return _cut(_map(_capacity(nbytes, count)), nbytes, count) if nbytes else [memoryview(b"")] * count


def _capacity(nbytes: int, count: int) -> int:
    return align_up(nbytes, PAGE_BYTES) * count + _HUGE_PAGE_BYTES


def _map(nbytes: int) -> mmap.mmap:
    """In huge pages: touching fresh small ones costs as much as the read itself."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    # A forked worker would make the pages that a disk or a device is using copies on write.
    memory.madvise(mmap.MADV_DONTFORK)
    return memory


def _cut(memory: mmap.mmap, nbytes: int, count: int) -> list[memoryview]:
    size, view = align_up(nbytes, PAGE_BYTES), memoryview(memory)
    first = -address_of(view) % _HUGE_PAGE_BYTES
    return [view[first + size * number :][:size] for number in range(count)]


def address_of(view: memoryview) -> int:
    """Where the bytes are."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


@asynccontextmanager
async def page_locked(
    buffers: Sequence[memoryview], device: torch.device | None, *, executor: Executor
) -> AsyncIterator[None]:
    """Buffers that lie in a row are page-locked for CUDA inside; if the driver refuses, copies from them are slower.

    ``device`` is one that this process uses: to lock memory makes a context.
    """
    if not any(buffer.nbytes for buffer in buffers):
        yield
        return
    # Holds the memory until then, also for a wait that was given up.
    unlock = functools.partial(_unlock, buffers, device)
    is_locked = await run_owned(executor, _lock, buffers, device, dispose=unlock)
    try:
        yield
    finally:
        with anyio.CancelScope(shield=True):
            await run_blocking(executor, unlock, is_locked)


def _lock(buffers: Sequence[memoryview], device: torch.device | None) -> bool:
    try:
        with using(device):
            register_host_memory(address_of(buffers[0]), sum(buffer.nbytes for buffer in buffers))
    except RuntimeError as error:
        _log.info("reading through memory that is not page-locked: %s", error)
        return False
    return True


def _unlock(buffers: Sequence[memoryview], device: torch.device | None, is_locked: bool) -> None:
    if is_locked:
        with using(device):
            unregister_host_memory(address_of(buffers[0]))
