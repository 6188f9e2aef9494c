"""The data files of one checkpoint: opened when first used, read into buffers, closed together."""

from __future__ import annotations

import errno
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path

import anyio
import anyio.lowlevel
from isal import isal_zlib

from aio_ckpt.errors import MismatchError
from aio_ckpt.format.constants import PAGE_BYTES, align_up
from aio_ckpt.format.manifests import FileEntry
from aio_ckpt.memory.read_buffers import BounceLoan, BounceRing
from aio_ckpt.runtime.portal import Executor, run_blocking, watch_submissions
from aio_ckpt.storage.local import ReadFile, Storage

__all__ = ["Files"]

_log = logging.getLogger("aio_ckpt")

_AHEAD_BYTES = 32 << 20
"""Read for nothing, so much costs some 10 ms and memory that any process has."""
_OPEN_FILES = 64
"""Files kept open at once; beyond, a file is opened for each read: descriptors are few (1,024 is a usual limit)."""


class Files:
    """The data files of one checkpoint, opened when first used and closed by the ``async with``.

    Invariant: what is read ahead goes to memory of its own, which nobody sees before the read is done; a part that
    could not be read ahead is read again by whoever wants it, and fails there.
    """

    def __init__(self, storage: Storage, directory: Path, *, readers: int, ring: BounceRing | None = None) -> None:
        """``ring``: of the engine; None: memory is mapped anew."""
        self._storage = storage
        self._directory = directory
        self._readers = readers
        self._kept: dict[str, ReadFile] = {}
        self.is_direct: dict[str, bool] = {}
        """Per measured file, whether reads are aligned to pages."""
        self.sizes: dict[str, int] = {}
        """Per measured file, its real length."""
        self.ahead: dict[str, _Ahead] = {}
        """Files that are read whole while it is found out what of them is wanted."""
        self._are_shared = False
        self._reading_ahead = anyio.create_task_group()
        self._loan = BounceLoan(ring or BounceRing())
        self._lending = ExitStack()

    async def __aenter__(self) -> Files:
        await self._reading_ahead.__aenter__()
        self._lending.callback(self._loan.close)
        self._lending.enter_context(watch_submissions(self._loan.hold_until))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._reading_ahead.cancel_scope.cancel()
        with self._lending:
            try:
                await self._reading_ahead.__aexit__(None, None, None)
            finally:
                await self._close()

    def buffers(self, nbytes: int, count: int) -> list[memoryview]:
        """As :func:`aio_ckpt.memory.read_buffers.bounce_buffers`; not cleared, for the threads of this load alone."""
        return self._loan.buffers(nbytes, count)

    async def _close(self) -> None:
        with anyio.CancelScope(shield=True):
            for file in self._kept.values():
                await file.close()

    async def share(self) -> None:
        """Other ranks of this host read the same bytes: what is open and not read ahead is opened anew, to be shared.

        Nobody may be using a file; what was forgotten must be measured again.
        """
        self._are_shared = True
        for name in self._kept.keys() - self.ahead.keys():
            del self.sizes[name], self.is_direct[name]
            with anyio.CancelScope(shield=True):
                await self._kept.pop(name).close()

    async def measure(self, names: Iterable[str], expected: Mapping[str, int | None]) -> None:
        """Learn the real length of files, before anything is believed that points into them.

        Raises:
            MismatchError: a file is missing or not as long as its manifest says.
        """
        for name in sorted(set(names)):
            if name not in self.sizes:
                async with self.use(name) as file:
                    self.sizes[name], self.is_direct[name] = file.nbytes, file.direct
            wanted = expected.get(name)
            if wanted is not None and wanted != self.sizes[name]:
                raise MismatchError(f"{name}: {self.sizes[name]} bytes long, its manifest says {wanted}")

    async def read_ahead(
        self, name: str, may_begin: Callable[[], Awaitable[object]], *, executor: Executor | None
    ) -> None:
        """Begin to read a whole file, ``readers`` parts at once, and to sum it by ``executor`` (None: not at all).

        It is opened at once, and read once ``may_begin`` says so: smaller reads it would only hold up. A large one is
        left alone. Returns when the reads wait for threads.
        """
        with suppress(Exception):  # told by whoever wants the file, if anybody does
            await self.measure([name], {})
            await may_begin()
            if not 0 < self.sizes[name] <= _AHEAD_BYTES:
                return
            ahead = self.ahead[name] = _Ahead(self.sizes[name], self._readers, self.buffers)
            for part in ahead.parts:
                self._reading_ahead.start_soon(self._read_part, name, part, executor)
            await anyio.lowlevel.checkpoint()  # theirs goes to a thread before what the caller does next

    async def _read_part(self, name: str, part: _Part, executor: Executor | None) -> None:
        try:
            async with self.use(name) as file:
                part.got = await file.read_into(part.start, part.view)
        except Exception as error:  # noqa: BLE001  # whoever wants the part reads it, and fails there
            _log.debug("%s could not be read ahead: %s", name, error)
            part.got = 0
        finally:
            part.is_done.set()
        if executor is not None:
            with suppress(Exception):  # without a sum each block is proven by its own
                part.crc32 = await run_blocking(executor, isal_zlib.crc32, part.view[: part.got])

    @property
    def bytes_ahead(self) -> int:
        """What was read ahead so far."""
        return sum(part.got for ahead in self.ahead.values() for part in ahead.parts)

    def is_proven(self, name: str) -> bool:
        """Whether all of the file was read ahead by now and is what :meth:`vouch` says, byte for byte."""
        return name in self.ahead and self.ahead[name].is_proven

    def vouch(self, entries: Iterable[FileEntry | None]) -> None:
        """Tell what files must be."""
        for entry in entries:
            if entry is not None and entry.name in self.ahead:
                self.ahead[entry.name].entry = entry

    async def read_already(self, name: str, start: int, stop: int) -> memoryview | None:
        """The bytes of the file from ``start`` to ``stop``, both multiples of the page, if they were read ahead."""
        ahead = self.ahead.get(name)
        return None if ahead is None else await ahead.between(start, stop)

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[ReadFile]:
        """The file, open. Files must be measured, one at a time, before they are used by several tasks."""
        kept = self._kept.get(name)
        if kept is not None:
            yield kept
            return
        try:
            path = self._directory / name
            file = await self._storage.open_data_file(path, readers=self._readers, shared=self._are_shared)
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


class _Part:
    """What one read ahead moves."""

    def __init__(self, start: int, view: memoryview) -> None:
        self.start = start
        self.view = view
        self.got = 0
        self.crc32: int | None = None
        self.is_done = anyio.Event()


class _Ahead:
    """Memory for all of a file, filled part by part."""

    def __init__(self, nbytes: int, readers: int, buffers: Callable[[int, int], list[memoryview]]) -> None:
        self._nbytes = nbytes
        self.entry: FileEntry | None = None
        (self._view,) = buffers(nbytes, 1)
        # One for each reader: a second one would begin late, when the loop gets the GIL from who matches.
        step = self._part_bytes = align_up(-(-nbytes // readers), PAGE_BYTES)
        self.parts = [_Part(start, self._view[start : start + step]) for start in range(0, nbytes, step)]

    async def between(self, start: int, stop: int) -> memoryview | None:
        """Waits until these bytes were read; None if they could not be."""
        for part in self.parts[start // self._part_bytes : -(-stop // self._part_bytes)]:
            await part.is_done.wait()
            if part.start + part.got < min(part.start + part.view.nbytes, stop, self._nbytes):
                return None
        return self._view[start:stop]

    @property
    def is_proven(self) -> bool:
        """By the sum of the whole file: a CRC is linear, so damage to one block, or a swap of two, changes it exactly
        where it changes the sum of a block."""
        total = nbytes = 0
        for part in self.parts:
            if part.crc32 is None:
                return False
            total = isal_zlib.crc32_combine(total, part.crc32, part.got)
            nbytes += part.got
        return self.entry is not None and (nbytes, total) == (self.entry.nbytes, self.entry.crc32)
