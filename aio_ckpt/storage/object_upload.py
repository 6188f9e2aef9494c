"""Upload of a data file: an object that is put while its bytes are still being prepared.

A store takes an object in one stream, from its first byte to its last. Several tasks write a data file, each its own
range, and their ranges follow each other: so each waits for its turn.
"""

from __future__ import annotations

import asyncio
import errno
import mmap
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from aio_ckpt.errors import WriteError
from aio_ckpt.reports import WriteMode
from aio_ckpt.runtime.futures import follow
from aio_ckpt.runtime.portal import Executor, run_blocking, start_beside
from aio_ckpt.storage.data_file import DataFile, translate_errors

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_PIECE_BYTES, _WAITING = 8 << 20, 1
"""Most bytes that are copied at once, and most copies that wait to be sent. They bound the memory of an upload."""
Put: TypeAlias = Callable[[Iterator[memoryview]], None]
"""Blocking call that puts an object from the parts of an iterator."""


class ObjectUpload(DataFile):
    """New object. It exists once :meth:`sync` has returned. Each range is copied, so that its memory is free at once.

    The call that puts it blocks a thread of its own from the first range on: the engine's threads prepare the ranges.
    """

    mode: WriteMode = "object"
    begins_late = True

    def __init__(self, path: Path, put: Put, executor: Executor) -> None:
        self.path = path
        self._put = put
        self._executor = executor
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Condition()
        self._parts: deque[memoryview] = deque()
        self._buffers = _Buffers()
        self._next = 0
        self._sent: Future[None] | None = None
        self._end: asyncio.Task[None] | None = None
        self._is_whole = self._is_over = False

    async def write(self, offset: int, data: memoryview) -> None:
        """Send ``data``, a view of bytes, once all before ``offset`` is on its way. Returns once it is copied.

        Raises:
            WriteError: the store refuses the object.
        """
        sent = self._begin()
        for start in range(0, data.nbytes, _PIECE_BYTES):
            await self._send(sent, offset + start, data[start : start + _PIECE_BYTES])

    async def _send(self, sent: Future[None], offset: int, piece: memoryview) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: sent.done() or (self._next == offset and len(self._parts) < _WAITING))
            if sent.done():
                with translate_errors(WriteError, self.path):
                    sent.result()
                raise WriteError(errno.EIO, "the upload has ended before its last byte", str(self.path))
            self._parts.append(await run_blocking(self._executor, self._buffers.copy_of, piece))
            self._next += piece.nbytes
            self._changed.notify_all()

    async def sync(self) -> None:
        """Wait until the store has the object. After a failure the object does not exist."""
        sent = self._begin()
        self._is_whole = True
        await self.close()
        with translate_errors(WriteError, self.path):
            sent.result()

    async def close(self) -> None:
        """End the upload, and wait for its thread. If :meth:`sync` was not called, no object is made."""
        if self._end is not None:
            await self._finish()
            await asyncio.shield(self._end)

    def _begin(self) -> Future[None]:
        if self._sent is None:
            self._sent = start_beside(self._put, self._arriving())
            self._end = self._loop.create_task(self._wait_for_end(self._sent))
        return self._sent

    async def _wait_for_end(self, sent: Future[None]) -> None:
        await asyncio.wait([asyncio.wrap_future(follow(sent))])
        async with self._changed:
            self._changed.notify_all()

    async def _finish(self) -> None:
        async with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _arriving(self) -> Iterator[memoryview]:
        """Return the parts, on the thread that sends them."""
        while (part := asyncio.run_coroutine_threadsafe(self._take(), self._loop).result()) is not None:
            yield part
        if not self._is_whole:
            raise OSError(errno.ECANCELED, "the upload was given up")

    async def _take(self) -> memoryview | None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._parts or self._is_over)
            part = self._parts.popleft() if self._parts else None
            self._changed.notify_all()
            return part


class _Buffers:
    """Memory of copies, used again once nothing holds the copy: new memory costs more CPU time than the copy itself."""

    def __init__(self) -> None:
        self._free: list[NDArray[np.uint8]] = []

    def copy_of(self, piece: memoryview) -> memoryview:
        """Return a copy. It is made without the interpreter's lock: ``bytes`` would hold up the trainer's capture."""
        import numpy as np

        try:
            memory = self._free.pop()
        except IndexError:
            # It goes back to the system. That of an allocator stays in the arena of each thread.
            memory = np.frombuffer(mmap.mmap(-1, _PIECE_BYTES), np.uint8)
        copy = memory[: piece.nbytes]
        np.copyto(copy, np.frombuffer(piece, np.uint8))
        weakref.finalize(copy, self._free.append, memory).atexit = False
        return memoryview(copy.data)
