"""Data files of a checkpoint: opened at their first use, read into buffers, closed together."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.lowlevel

from aio_ckpt.errors import MismatchError
from aio_ckpt.runtime.waiting import disk_lines
from aio_ckpt.storage.local import PageCache, ReadFile, Storage

__all__ = ["Files"]

_OPEN_FILES = 64
"""Most files kept open. A further file is opened for each read, because descriptors are few (often 1,024)."""


class Files:
    """Data files of one checkpoint, opened at their first use and closed by the ``async with``."""

    def __init__(self, storage: Storage, directory: Path, *, readers: int, page_cache: PageCache) -> None:
        self._storage = storage
        self.directory = directory
        """Directory of the checkpoint."""
        self._readers = readers
        self._kept: dict[str, ReadFile] = {}
        self.sizes: dict[str, int] = {}
        """Real length in bytes of each measured file."""
        self._page_cache = page_cache

    async def __aenter__(self) -> Files:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close()

    async def _close(self) -> None:
        with anyio.CancelScope(shield=True):
            while self._kept:
                _, file = self._kept.popitem()
                await file.close()

    async def share(self) -> None:
        """Read through the page cache from now on, because other ranks of this host read the same bytes.

        Closes open files, so no task may be using one. Files must be measured again.
        """
        self._page_cache = "fill"
        self.sizes.clear()
        await self._close()

    async def measure(self, names: Iterable[str], expected: Mapping[str, int | None]) -> None:
        """Measure the real length of files. Offsets into a file are checked against it before they are used.

        Raises:
            MismatchError: a file is missing or not as long as its manifest says.
        """
        for name in sorted(set(names)):
            if name not in self.sizes:
                with disk_lines(f"opening {name}", self.directory).on_loop():
                    async with self.use(name) as file:
                        self.sizes[name] = file.nbytes
            wanted = expected.get(name)
            if wanted is not None and wanted != self.sizes[name]:
                raise MismatchError(f"{name}: {self.sizes[name]} bytes long, its manifest says {wanted}")

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[ReadFile]:
        """Yield the open file. A file must have been measured before several tasks use it."""
        kept = self._kept.get(name)
        if kept is not None:
            yield kept
            return
        try:
            path = self.directory / name
            file = await self._storage.open_data_file(path, readers=self._readers, page_cache=self._page_cache)
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
