"""The limit: the same bytes moved by nothing but system calls."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from bench.common.measure import DONE, Contender, Waitable

__all__ = ["PAGE_BYTES", "MemoryCopy", "PlainRead", "PlainWrite", "SequentialWrite", "pack", "page_aligned"]

PAGE_BYTES = 4096
THREADS = 4
_memmove = ctypes.CDLL(None).memmove
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove.restype = ctypes.c_void_p
_CHUNK_BYTES = 16 << 20


def page_aligned(nbytes: int) -> mmap.mmap:
    """Anonymous memory of at least ``nbytes``, rounded up to a page, on huge pages where there are any."""
    memory = mmap.mmap(-1, -(-nbytes // PAGE_BYTES) * PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    torch.frombuffer(memory, dtype=torch.uint8).zero_()
    return memory


def pack(state: Mapping[str, torch.Tensor]) -> mmap.mmap:
    """The raw bytes of all tensors, one after the other, page-aligned."""
    memory = page_aligned(sum(tensor.nbytes for tensor in state.values()))
    target, position = torch.frombuffer(memory, dtype=torch.uint8), 0
    for tensor in state.values():
        target[position : position + tensor.nbytes] = tensor.detach().reshape(-1).view(torch.uint8).cpu()
        position += tensor.nbytes
    return memory


def _ranges(nbytes: int) -> list[tuple[int, int]]:
    share = -(-nbytes // THREADS // PAGE_BYTES) * PAGE_BYTES
    step = min(_CHUNK_BYTES, max(share, PAGE_BYTES))
    return [(start, min(start + step, nbytes)) for start in range(0, nbytes, step)]


class _Plain(Contender):
    """Moves page-aligned memory that holds the state's bytes (see :func:`pack`)."""

    def __init__(self, packed: mmap.mmap, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.path = folder / "plain"
        self.view = memoryview(packed)
        self.pool = ThreadPoolExecutor(THREADS)

    def after(self) -> None:
        """Remove the file, so that the next round pays for allocation as a new checkpoint does."""
        self.path.unlink()

    def close(self) -> None:
        """End the threads."""
        self.pool.shutdown()


class PlainWrite(_Plain):
    """New file, fallocate, O_DIRECT pwrite by 4 threads, fdatasync, close: all of it timed."""

    name = "plain O_DIRECT pwrite"
    durability = "fdatasync"

    def start(self) -> Waitable:
        """Write the file."""
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o666)
        os.posix_fallocate(descriptor, 0, len(self.view))

        def write(span: tuple[int, int]) -> None:
            start, stop = span
            while start < stop:
                start += os.pwrite(descriptor, self.view[start:stop], start)

        list(self.pool.map(write, _ranges(len(self.view))))
        os.fdatasync(descriptor)
        os.close(descriptor)
        return DONE


class SequentialWrite(_Plain):
    """New file, one write through the page cache, fsync, close."""

    name = "one plain write + fsync"
    durability = "fsync"

    def start(self) -> Waitable:
        """Write the file."""
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        position = 0
        while position < len(self.view):
            position += os.write(descriptor, self.view[position:])
        os.fsync(descriptor)
        os.close(descriptor)
        return DONE


class PlainRead(_Plain):
    """O_DIRECT preadv by 4 threads into memory that is already there, page-aligned.

    Whole pages of ``targets`` first, as a load reads into the tensors of a template: memory whose pages lie scattered
    takes up to twice as long to read into on a virtual disk, and how they lie is another draw for each allocation. What
    the targets leave over goes to ``packed``.
    """

    name = "plain O_DIRECT preadv"
    durability = "-"

    def __init__(self, packed: mmap.mmap, folder: Path, targets: Iterable[torch.Tensor] = ()) -> None:
        super().__init__(packed, folder)
        self.path.write_bytes(self.view)
        with self.path.open("rb+") as file:
            os.fsync(file.fileno())
        pieces = [piece for target in targets if (piece := _whole_pages(target)).nbytes >= _CHUNK_BYTES]
        left = len(self.view) - sum(piece.nbytes for piece in pieces)
        self.pieces = [
            piece[start:stop] for piece in (*pieces, self.view[:left]) for start, stop in _ranges(len(piece))
        ]

    def start(self) -> Waitable:
        """Read the file."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECT)

        def read(start: int, piece: memoryview) -> None:
            done = 0
            while done < len(piece):
                done += os.preadv(descriptor, [piece[done:]], start + done)

        starts = itertools.accumulate((len(piece) for piece in self.pieces), initial=0)
        list(self.pool.map(read, starts, self.pieces))
        os.close(descriptor)
        return DONE

    def after(self) -> None:
        """The file is read again."""


def _whole_pages(target: torch.Tensor) -> memoryview:
    """Of a contiguous tensor of host memory."""
    whole: Any = target.view(-1).view(torch.uint8).numpy()  # whose stubs do not say that it is a buffer
    skipped = min(-target.data_ptr() % PAGE_BYTES, len(whole))
    return memoryview(whole)[skipped : len(whole) - (len(whole) - skipped) % PAGE_BYTES]


class MemoryCopy(Contender):
    """What a capture cannot do without: every tensor copied once to warm host memory, by one memmove each."""

    name = "memory copy alone"
    durability = "none: no file"

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        self.tensors = [tensor.detach() for tensor in state.values()]
        self.memory = page_aligned(sum(tensor.nbytes + 64 for tensor in self.tensors))

    def start(self) -> Waitable:
        """Copy; tensors of a device by torch."""
        flat = torch.frombuffer(self.memory, dtype=torch.uint8)
        address, position = flat.data_ptr(), 0
        for tensor in self.tensors:
            if tensor.device.type == "cpu":
                _memmove(address + position, tensor.data_ptr(), tensor.nbytes)
            else:
                flat[position : position + tensor.nbytes].copy_(tensor.reshape(-1).view(torch.uint8))
            position += -(-tensor.nbytes // 64) * 64
        return DONE
