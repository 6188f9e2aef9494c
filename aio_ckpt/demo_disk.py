"""What the disk can do: a plain write of as many bytes as a save, nothing else."""

from __future__ import annotations

import mmap
import os
import time
from concurrent.futures import wait
from dataclasses import dataclass
from pathlib import Path

from aio_ckpt.items import PAGE_BYTES, align_up
from aio_ckpt.portal import Executor

__all__ = ["PlainWrite", "plain_write"]

_PIECE_BYTES = 16 << 20
_CLOSE_SECS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainWrite:
    """One plain write."""

    secs: float
    """From opening the file until its bytes were durable."""
    is_direct: bool
    """Whether O_DIRECT worked; else the page cache was in between."""


def plain_write(path: Path, nbytes: int, *, writers: int) -> PlainWrite:
    """Reserve, write (O_DIRECT where it works, ``writers`` threads, pages touched before), fdatasync; then remove.

    Raises:
        OSError: the disk refuses even a buffered write.
    """
    nbytes = align_up(nbytes, PAGE_BYTES)
    executor = Executor("aio_ckpt-plain-write", writers)
    try:
        with mmap.mmap(-1, nbytes) as pages:
            pages[:] = os.urandom(PAGE_BYTES) * (nbytes // PAGE_BYTES)
            try:
                return PlainWrite(secs=_write(path, pages, executor, os.O_DIRECT), is_direct=True)
            except OSError:  # tmpfs and some network and overlay file systems; a real fault shows again below
                return PlainWrite(secs=_write(path, pages, executor, 0), is_direct=False)
    finally:
        executor.close(_CLOSE_SECS)


def _write(path: Path, pages: mmap.mmap, executor: Executor, flags: int) -> float:
    begin = time.perf_counter()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | flags, 0o666)
    try:
        os.posix_fallocate(descriptor, 0, len(pages))
        starts = range(0, len(pages), _PIECE_BYTES)
        writes = [executor.submit(_write_piece, descriptor, pages, start) for start in starts]
        wait(writes)
        for done in writes:
            done.result()
        os.fdatasync(descriptor)
        return time.perf_counter() - begin
    finally:
        os.close(descriptor)
        path.unlink()


def _write_piece(descriptor: int, pages: mmap.mmap, start: int) -> None:
    stop = min(start + _PIECE_BYTES, len(pages))
    with memoryview(pages) as view:
        while start < stop:
            with view[start:stop] as rest:
                start += os.pwrite(descriptor, rest, start)
