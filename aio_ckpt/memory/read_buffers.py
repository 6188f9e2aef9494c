"""Bounce buffers: page-aligned memory between a data file and a tensor that cannot be read into directly."""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import torch

from aio_ckpt.errors import SystemLimitError
from aio_ckpt.format.constants import PAGE_BYTES, align_up
from aio_ckpt.memory.arena import HUGE_PAGE_BYTES, map_private
from aio_ckpt.memory.cuda import on_device, register_host_memory, unregister_host_memory
from aio_ckpt.runtime.portal import Executor, run_blocking, run_owned

_log = logging.getLogger("aio_ckpt")


def bounce_buffers(nbytes: int, count: int) -> list[memoryview]:
    """Return ``count`` new page-aligned buffers of ``nbytes`` each, which lie side by side in one mapping.

    Raises:
        SystemLimitError: the system refuses the memory.
    """
    if not nbytes:
        return [memoryview(b"")] * count
    size = align_up(nbytes, PAGE_BYTES)
    try:
        memory = map_private(size * count + HUGE_PAGE_BYTES)
    except OSError as error:
        remedy = "set fewer workers, or raise the limit on memory (ulimit -v)"
        text = f"{error.strerror}: no memory for read buffers of {size * count} bytes: {remedy}"
        raise SystemLimitError(error.errno, text) from error
    # A fork would make the pages copy-on-write while a disk or a device uses them.
    memory.madvise(mmap.MADV_DONTFORK)
    view = memoryview(memory)
    first = -address_of(view) % HUGE_PAGE_BYTES
    return [view[first + size * number :][:size] for number in range(count)]


def address_of(view: memoryview) -> int:
    """Return the address of the first byte."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


@asynccontextmanager
async def page_locked(
    buffers: Sequence[memoryview], device: torch.device | None, *, executor: Executor
) -> AsyncIterator[None]:
    """Page-lock side-by-side buffers for CUDA while the block runs. If the driver refuses, copies are only slower.

    ``device`` must be one that this process uses, because locking memory makes a context on it.
    """
    if not any(buffer.nbytes for buffer in buffers):
        yield
        return
    # The partial keeps the memory alive until it is unlocked, even if this task is cancelled while it waits.
    unlock = functools.partial(_unlock, buffers, device)
    is_locked = await run_owned(executor, _lock, buffers, device, dispose=unlock)
    try:
        yield
    finally:
        with anyio.CancelScope(shield=True):
            await run_blocking(executor, unlock, is_locked)


def _lock(buffers: Sequence[memoryview], device: torch.device | None) -> bool:
    try:
        with on_device(device):
            register_host_memory(address_of(buffers[0]), sum(buffer.nbytes for buffer in buffers))
    except RuntimeError as error:
        _log.info("reading through memory that is not page-locked: %s", error)
        return False
    return True


def _unlock(buffers: Sequence[memoryview], device: torch.device | None, is_locked: bool) -> None:
    if is_locked:
        with on_device(device):
            unregister_host_memory(address_of(buffers[0]))
