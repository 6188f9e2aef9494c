"""The data files of one checkpoint: opened when first used, read into buffers, closed together."""

from __future__ import annotations

import ctypes
import errno
import mmap
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio

from aio_ckpt.errors import MismatchError
from aio_ckpt.items import PAGE_BYTES, align_up
from aio_ckpt.storage import ReadFile, Storage

__all__ = ["Files", "address_of", "bounce_buffers"]

_HUGE_PAGE_BYTES = 2 << 20
_OPEN_FILES = 64
"""Files kept open at once; beyond, a file is opened for each read: descriptors are few (1,024 is a usual limit)."""


class Files:
    """The data files of one checkpoint, opened when first used and closed by the ``async with``."""

    def __init__(self, storage: Storage, directory: Path, *, readers: int) -> None:
        self._storage = storage
        self._directory = directory
        self._readers = readers
        self._kept: dict[str, ReadFile] = {}
        self.is_direct: dict[str, bool] = {}
        """Per measured file, whether reads are aligned to pages."""
        self.sizes: dict[str, int] = {}
        """Per measured file, its real length."""

    async def __aenter__(self) -> Files:
        return self

    async def __aexit__(self, *_: object) -> None:
        with anyio.CancelScope(shield=True):
            for file in self._kept.values():
                await file.close()

    async def measure(self, names: Iterable[str], expected: Mapping[str, int | None]) -> None:
        """Learn the real length of files, before anything is believed that points into them.

        Raises:
            MismatchError: a file is missing or not as long as its manifest says.
        """
        for name in sorted(set(names) - self.sizes.keys()):
            async with self.use(name) as file:
                wanted = expected.get(name)
                if wanted is not None and wanted != file.nbytes:
                    raise MismatchError(f"{name}: {file.nbytes} bytes long, its manifest says {wanted}")
                self.sizes[name], self.is_direct[name] = file.nbytes, file.direct

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[ReadFile]:
        """The file, open. Files must be measured, one at a time, before they are used by several tasks."""
        kept = self._kept.get(name)
        if kept is not None:
            yield kept
            return
        try:
            file = await self._storage.open_data_file(self._directory / name, readers=self._readers)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR):
                raise MismatchError(f"{name}: missing") from error
            raise
        if len(self._kept) < _OPEN_FILES:
            self._kept[name] = file
            yield file
            return
        try:
            yield file
        finally:
            with anyio.CancelScope(shield=True):
                await file.close()


def bounce_buffers(nbytes: int, count: int) -> list[memoryview]:
    """Page-aligned buffers. Huge pages: touching fresh small ones costs as much as the read itself."""
    if not nbytes:
        return [memoryview(b"")] * count
    size = align_up(nbytes, PAGE_BYTES)
    ring = mmap.mmap(-1, size * count + _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        ring.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(ring)
    first = -address_of(view) % _HUGE_PAGE_BYTES
    return [view[first + size * number :][:size] for number in range(count)]


def address_of(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
