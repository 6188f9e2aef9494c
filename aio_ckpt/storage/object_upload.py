"""Upload of a data file: an object that is put while its bytes are still being prepared.

A store takes an object in one stream, from its first byte to its last. Several tasks write a data file, each its own
range, in any order: the thread that sends the object puts them in order.
"""

from __future__ import annotations

import asyncio
import errno
import mmap
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from aio_ckpt.errors import WriteError
from aio_ckpt.reports import WriteMode
from aio_ckpt.runtime.ctrl_c import Lock
from aio_ckpt.runtime.futures import follow
from aio_ckpt.runtime.portal import SimpleQueue, report_submission, start_beside
from aio_ckpt.storage.data_file import DataFile
from aio_ckpt.storage.os_errors import translate_errors

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PART_BYTES = 5 << 20
"""Most bytes that are copied at once, and least bytes of a part of an upload, which is the least that S3 takes."""
_PARTS = 9_000
"""Most parts of an upload. S3 takes 10,000."""
Put: TypeAlias = Callable[[Iterator[memoryview]], None]
"""Blocking call that puts an object from the parts of an iterator."""


def part_bytes_of(nbytes: int) -> int:
    """Return the bytes of each part of an object of ``nbytes``."""
    return max(PART_BYTES, -(-nbytes // _PARTS))


@dataclass(frozen=True, slots=True, eq=False)
class _Range:
    offset: int
    data: memoryview
    copied: Future[bool] = field(default_factory=Future)
    """Whether the thread has copied ``data``. If not, the object has failed."""


class ObjectUpload(DataFile):
    """New object. It exists once :meth:`sync` has returned. Each range is copied, so that its memory is free at once.

    The call that puts it blocks a thread of its own from the first range on, which copies the ranges, too: the engine's
    threads prepare them.
    """

    mode: WriteMode = "object"
    begins_late = True

    def __init__(self, path: Path, put: Put) -> None:
        self.path = path
        self._put = put
        self._arrived: SimpleQueue[_Range | None] = SimpleQueue()
        """Ranges for the thread. None ends the object."""
        self._lock = Lock()
        self._waiting: set[_Range] = set()
        """Ranges that are not copied."""
        self._sent: Future[None] | None = None
        self._is_whole = self._is_given_up = self._is_over = False

    async def write(self, offset: int, data: memoryview) -> None:
        """Send ``data``, a view of bytes, once all before ``offset`` is on its way. Returns once it is copied.

        Raises:
            WriteError: the store refuses the object.
        """
        sent, arrived = self._begin(), _Range(offset, data)
        report_submission(arrived.copied)
        with self._lock:
            if self._is_over:
                arrived.copied.set_result(False)
            else:
                self._waiting.add(arrived)
        self._arrived.put(arrived)
        await asyncio.wrap_future(follow(arrived.copied))
        if arrived.copied.result():
            return
        await asyncio.wrap_future(follow(sent))
        with translate_errors(WriteError, self.path):
            sent.result()
            raise OSError(errno.EIO, "the upload has ended before its last byte")

    async def sync(self) -> None:
        """Wait until the store has the object. After a failure the object does not exist."""
        sent = self._begin()
        self._is_whole = True
        await self.close()
        with translate_errors(WriteError, self.path):
            sent.result()

    async def close(self) -> None:
        """End the upload, and wait for its thread. If :meth:`sync` was not called, no object is made."""
        if self._sent is not None:
            self._is_given_up = not self._is_whole
            self._arrived.put(None)
            await asyncio.wrap_future(follow(self._sent))

    def _begin(self) -> Future[None]:
        if self._sent is None:
            self._sent = start_beside(self._send)
        return self._sent

    def _send(self) -> None:
        """Put the object. This is the work of its thread."""
        try:
            self._put(self._copies())
        finally:
            with self._lock:
                self._is_over = True
            for each in self._waiting:
                each.copied.set_result(False)

    def _copies(self) -> Iterator[memoryview]:
        """Yield copies of the ranges, in the order of the object: full parts, and what is left."""
        parts, early, position = _Parts(), dict[int, _Range](), 0
        part, length = parts.take(), 0
        while (arrived := self._arrived.get()) is not None and not self._is_given_up:
            early[arrived.offset] = arrived
            while (each := early.pop(position, None)) is not None:
                rest = each.data
                while rest.nbytes:
                    copied = parts.copy(rest, part[length:])
                    rest, length = rest[copied:], length + copied
                    if length == PART_BYTES:
                        yield part
                        part, length = parts.take(), 0
                position += each.data.nbytes
                with self._lock:
                    self._waiting.discard(each)
                each.copied.set_result(True)
        if not self._is_whole:
            raise OSError(errno.ECANCELED, "the upload was given up")
        if length:
            yield part[:length]


class _Parts:
    """Memory of parts, used again once nothing holds the part: new memory costs more CPU time than the copy itself."""

    def __init__(self) -> None:
        self._free: list[NDArray[np.uint8]] = []

    def take(self) -> memoryview:
        """Return the memory of a part."""
        import numpy as np

        try:
            memory = self._free.pop()
        except IndexError:
            # It goes back to the system. That of an allocator stays in the arena of each thread.
            memory = np.frombuffer(mmap.mmap(-1, PART_BYTES), np.uint8)
        part = memory[:]
        weakref.finalize(part, self._free.append, memory).atexit = False
        return memoryview(part.data)

    @staticmethod
    def copy(data: memoryview, to: memoryview) -> int:
        """Copy as much as there is room for, without the interpreter's lock: that would hold up the trainer's capture.

        Returns the number of bytes.
        """
        import numpy as np

        nbytes = min(data.nbytes, to.nbytes)
        np.copyto(np.frombuffer(to[:nbytes], np.uint8), np.frombuffer(data[:nbytes], np.uint8))
        return nbytes
