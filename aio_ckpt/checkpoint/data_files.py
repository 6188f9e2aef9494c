"""Data files of a checkpoint: opened at their first use, read into buffers, closed together."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.lowlevel

from aio_ckpt.errors import MismatchError
from aio_ckpt.runtime.limits import files_limit
from aio_ckpt.runtime.waiting import disk_warning
from aio_ckpt.storage.data_file import ReadFile
from aio_ckpt.storage.direct_io import PageCache
from aio_ckpt.storage.local import FileStatus, Storage

_KEPT_FILES = 64
"""Most files kept open. A further file is opened for each read, because descriptors are few (often 1,024)."""
_NO_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})


def files_to_keep(limit: int) -> int:
    """Return how many data files may stay open of a process that may have ``limit`` files open.

    A data file has two descriptors. Three quarters are left to the rest of the process.
    """
    return max(0, min(_KEPT_FILES, limit // 8))


@dataclass(slots=True, eq=False)
class _Opened:
    """Open file, and the number of tasks that use it now."""

    file: ReadFile
    users: int = 0


class Files:
    """Data files of one checkpoint, opened at their first use and closed by the ``async with``.

    Invariant: an open file is kept, or closed when its last user has ended. If descriptors run out, the kept files that
    no task uses are closed, and no further one is kept.
    """

    def __init__(self, storage: Storage, directory: Path, *, page_cache: PageCache) -> None:
        self._storage = storage
        self.directory = directory
        """Directory of the checkpoint."""
        self._kept: dict[str, _Opened] = {}
        self._most_kept = files_to_keep(files_limit())
        self.sizes: dict[str, int] = {}
        """Real length in bytes of each measured file."""
        self._page_cache = page_cache

    async def __aenter__(self) -> Files:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the open files. A later use opens them anew.

        Raises:
            ReadError: the operating system reports an error. The ``async with`` closes the other files.
        """
        with anyio.CancelScope(shield=True):
            while self._kept:
                _, opened = self._kept.popitem()
                await opened.file.close()

    async def share(self) -> None:
        """Read through the page cache from now on, because other ranks of this host read the same bytes.

        Closes open files, so no task may be using one. Files must be measured again.
        """
        self._page_cache = "fill"
        self.sizes.clear()
        await self.close()

    async def status(self, name: str) -> FileStatus | None:
        """Return the status of a file; None if it does not exist."""
        return await self._storage.status(self.directory / name)

    async def measure(self, names: Iterable[str], expected: Mapping[str, int | None]) -> None:
        """Measure the real length of files. Offsets into a file are checked against it before they are used.

        Raises:
            MismatchError: a file is missing or not as long as its manifest says.
        """
        for name in sorted(set(names)):
            if name not in self.sizes:
                with disk_warning(f"opening {name}", self.directory).on_loop():
                    async with self.use(name) as file:
                        self.sizes[name] = file.nbytes
            wanted = expected.get(name)
            if wanted is not None and wanted != self.sizes[name]:
                raise MismatchError(f"{name}: {self.sizes[name]} bytes long, its manifest says {wanted}")

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[ReadFile]:
        opened = self._kept.get(name)
        if opened is None:
            opened = _Opened(await self._open(name))
            if name not in self._kept and len(self._kept) < self._most_kept:  # another task may have kept one meanwhile
                self._kept[name] = opened
        opened.users += 1
        try:
            yield opened.file
        finally:
            opened.users -= 1
            if not opened.users and self._kept.get(name) is not opened:
                with anyio.CancelScope(shield=True):
                    await opened.file.close()

    async def _open(self, name: str) -> ReadFile:
        try:
            return await self._open_once(name)
        except OSError as error:
            if error.errno not in _NO_DESCRIPTORS or not self._kept:
                raise
        self._most_kept = 0
        idle = [name for name, opened in self._kept.items() if not opened.users]
        with anyio.CancelScope(shield=True):
            for opened in [self._kept.pop(name) for name in idle]:
                await opened.file.close()
        return await self._open_once(name)

    async def _open_once(self, name: str) -> ReadFile:
        try:
            return await self._storage.open_data_file(self.directory / name, page_cache=self._page_cache)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR):
                raise MismatchError(f"{name}: missing") from error
            raise
