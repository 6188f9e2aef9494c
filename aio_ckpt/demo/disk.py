"""What the disk can do: a plain write of as many bytes as a save, nothing else."""

from __future__ import annotations

import mmap
import os
import time
from concurrent.futures import wait
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from aio_ckpt.format.constants import PAGE_BYTES, align_up
from aio_ckpt.runtime.portal import Executor

__all__ = ["PlainDisk", "PlainWrite"]

_PIECE_BYTES = 16 << 20
_CLOSE_SECS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainWrite:
    """One plain write."""

    secs: float
    """From opening the file until its bytes were durable."""
    is_direct: bool
    """Whether O_DIRECT worked; else the page cache was in between."""


class PlainDisk:
    """Plain writes under one directory. Threads and pages are made, and touched, once, as the engine's are."""

    def __init__(self, folder: Path, nbytes: int, *, writers: int) -> None:
        """``nbytes`` (rounded up to pages) a write, by ``writers`` threads."""
        self._path = folder / "plain.bin"
        self._executor = Executor("aio_ckpt-plain-write", writers)
        self._pages = mmap.mmap(-1, align_up(nbytes, PAGE_BYTES))
        self._pages[:] = os.urandom(PAGE_BYTES) * (len(self._pages) // PAGE_BYTES)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._executor.close(_CLOSE_SECS)
        self._pages.close()

    def write(self) -> PlainWrite:
        """Reserve, write, with O_DIRECT where it works, and fdatasync a file that is then removed.

        Raises:
            OSError: the disk refuses even a buffered write.
        """
        try:
            return PlainWrite(secs=_write(self._path, self._pages, self._executor, os.O_DIRECT), is_direct=True)
        except OSError:  # tmpfs and some network and overlay file systems; a real fault shows again here
            return PlainWrite(secs=_write(self._path, self._pages, self._executor, 0), is_direct=False)


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
