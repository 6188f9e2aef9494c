"""Data files on a local file system: concurrent writes and ranged reads, with O_DIRECT where a file takes it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import stat
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiofiles.ospath import wrap  # type: ignore[attr-defined] # its stubs lack it

from aio_ckpt.errors import EngineClosedError, MismatchError, ReadError, WriteError
from aio_ckpt.format.constants import PAGE_BYTES
from aio_ckpt.reports import WriteMode
from aio_ckpt.runtime.portal import Executor, run_blocking, watch_submissions
from aio_ckpt.storage.direct_io import (
    REFUSALS,
    RWF_DONTCACHE,
    aligned_span,
    check_fallback,
    create_direct,
    create_exclusively,
    open_direct,
)
from aio_ckpt.storage.durability import sync_data
from aio_ckpt.storage.mounts import is_shared
from aio_ckpt.storage.os_errors import NOT_SUPPORTED, translate_errors

if TYPE_CHECKING:
    from aio_ckpt.config import DirectIO

_LIBC = ctypes.CDLL(None, use_errno=True)


# -- descriptors and the threads that use them ----------------------------------------------------


class _Descriptors:
    """Open descriptors of one file.

    Invariant: they are closed once, after :meth:`close` was called and the last :meth:`use` has ended. A use ends when
    its block has ended *and* the thread that it started is done. If a descriptor were closed earlier, its number
    could belong to another file when the thread uses it.
    """

    def __init__(self, executor: Executor, numbers: list[int]) -> None:
        self._executor = executor
        self._numbers = numbers
        self._users: set[object] = set()
        self._is_closed = False

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Keep the descriptors open for the block, and until the thread that it starts is done."""
        if self._is_closed:
            raise OSError(errno.EBADF, "the file was closed")
        user = object()
        self._users.add(user)
        threads: list[Future[Any]] = []
        try:
            with watch_submissions(threads.append):
                yield
        finally:
            if threads:
                threads[-1].add_done_callback(lambda _: self._leave(user))
            else:
                self._leave(user)

    async def close(self) -> None:
        """Close the descriptors now, or when the last use ends."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._users:
            return
        try:
            closing = self._executor.submit(_close_numbers, self._numbers)
        except EngineClosedError:
            _close_numbers(self._numbers)
            return
        # Shielded, because a cancelled await would take the call out of the queue and leave the descriptors open.
        await asyncio.shield(asyncio.wrap_future(closing))

    def _leave(self, user: object) -> None:
        self._users.discard(user)
        if self._is_closed and not self._users:
            _close_numbers(self._numbers)


def _close_numbers(numbers: list[int]) -> None:
    failure: OSError | None = None
    while numbers:
        try:
            os.close(numbers.pop())
        except IndexError:  # another thread took the last number
            break
        except OSError as error:  # NFS reports write errors here; the other descriptors must still be closed
            failure = error
    if failure is not None:
        raise failure


# -- writing --------------------------------------------------------------------------------------


class DataFile:
    """New file that several tasks write at once, each its own range: positioned writes, each in one call of a thread.

    The first mode is tried by the first write, and the next one if the file system refuses it: no write is repeated for
    another reason.
    """

    begins_late = False
    """Whether writes take the CPU time that the capture needs, and so begin when the caller's thread has done that."""

    def __init__(self, path: Path, nbytes: int, executor: Executor, direct_io: DirectIO) -> None:
        """Create ``path``, which must not exist, and reserve ``nbytes`` on a file system of this host. Blocks.

        It is opened once, because each open of a shared file system asks the server.
        """
        direct = create_direct(path, direct_io)
        self.path = path
        self.mode: WriteMode = "dontcache" if direct is None else "direct"
        """How bytes reach the disk from now on."""
        self._direct_io = direct_io
        self._is_direct = self._takes_unaligned = direct is not None
        self._numbers = [create_exclusively(path, 0) if direct is None else direct]
        """The descriptor of the file. If that is direct and some bytes went through the page cache, one for these."""
        self._files = _Descriptors(executor, self._numbers)
        self._executor = executor
        try:
            _reserve(self._numbers[0], nbytes)
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Close the file, which nobody has written to, and remove it. Blocks."""
        try:
            _close_numbers(self._numbers)
        finally:
            self.path.unlink(missing_ok=True)

    async def write(self, offset: int, data: memoryview) -> None:
        """Write all of ``data`` (contiguous, any length) at ``offset`` bytes. A short write is continued.

        It is fastest if address, offset and length are multiples of ``PAGE_BYTES``. ``data`` must stay unchanged until
        the future of the *thread* has resolved (``watch_submissions``), which may be after a cancelled await.

        Raises:
            WriteError: the write failed; the error holds errno and path.
        """
        view = data.cast("B") if data.nbytes else data
        with translate_errors(WriteError, self.path), self._files.use():
            await wrap(self._write_fully)(offset, view, executor=self._executor)

    def _write_fully(self, offset: int, rest: memoryview) -> None:
        while rest:
            mode = self.mode
            span = aligned_span(rest, offset) if mode == "direct" else 0
            is_direct = bool(span) or (mode == "direct" and self._takes_unaligned)
            number = self._numbers[0] if is_direct else self._cached_number()
            flags = RWF_DONTCACHE if mode == "dontcache" else 0
            try:
                written = os.pwritev(number, [rest[:span] if span else rest], offset, flags)
            except OSError as error:
                if not (is_direct or flags) or error.errno not in REFUSALS:
                    raise
                if is_direct and not span:
                    self._takes_unaligned = False
                else:
                    self._fall_back(mode, error)
                continue
            if not written:
                raise OSError(errno.EIO, f"nothing of {rest.nbytes} bytes was written at offset {offset}")
            offset, rest = offset + written, rest[written:]

    def _fall_back(self, refused: WriteMode, error: OSError) -> None:
        """Take the mode after ``refused``, unless another thread has: the file system refuses it with ``error``."""
        if refused == "direct":
            check_fallback(self.path, self._direct_io, error)
        if self.mode == refused:
            self.mode = "dontcache" if refused == "direct" else "buffered"

    def _cached_number(self) -> int:
        """Return the descriptor that goes through the page cache. If the first one is direct, open it when needed."""
        if self._is_direct and len(self._numbers) == 1:  # two threads may each open one; all are closed
            self._numbers.append(os.open(self.path, os.O_WRONLY | os.O_CLOEXEC))
        return self._numbers[-1]

    async def sync(self) -> None:
        """Make the written bytes durable (fdatasync). After a failure the file is lost: do not try again."""
        with translate_errors(WriteError, self.path), self._files.use():
            await run_blocking(self._executor, sync_data, self._numbers[0])

    async def close(self) -> None:
        """Close the file when the thread of the last write is done. Idempotent; survives cancellation."""
        with translate_errors(WriteError, self.path):
            await self._files.close()


def _reserve(descriptor: int, nbytes: int) -> None:
    """Allocate ``nbytes`` on a file system of this host. If it cannot, only set the length.

    A server allocates what is written, and to reserve is a further call to it. This does not use os.posix_fallocate: if
    the file system cannot allocate, glibc writes a byte into every 4 KiB.
    """
    if not nbytes or is_shared(os.fstat(descriptor).st_dev):
        return
    while _LIBC.fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)):
        code = ctypes.get_errno()
        if code in NOT_SUPPORTED:
            os.ftruncate(descriptor, nbytes)
            return
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


# -- reading --------------------------------------------------------------------------------------


class ReadFile:
    """File that several tasks read at once: positioned reads, each in one call of a thread."""

    def __init__(self, path: Path, executor: Executor, direct_io: DirectIO, *, reads_cached: bool) -> None:
        """Open ``path``, also with O_DIRECT if that can be opened. Blocks.

        If ``reads_cached``, bytes that the page cache holds come from there, and only the others with O_DIRECT.
        """
        self.path = path
        numbers = [open_regular_file(path)]
        try:
            self.nbytes = os.fstat(numbers[0]).st_size
            """Length of the file when it was opened."""
            if (direct := open_direct(path, direct_io)) is not None:
                numbers.append(direct)
        except BaseException:
            _close_numbers(numbers)
            raise
        self.is_direct = len(numbers) > 1
        """Whether reads that are aligned to ``PAGE_BYTES`` (address, offset, length) bypass the page cache. False from
        the first one that the file system refuses."""
        self._direct_io = direct_io
        self._may_be_cached = reads_cached and self.is_direct
        self._numbers = tuple(numbers)
        self._executor = executor
        self._files = _Descriptors(executor, numbers)

    def discard(self) -> None:
        """Close the file, which nobody has read. Blocks."""
        _close_numbers([*self._numbers])

    async def read_into(self, offset: int, *views: memoryview) -> int:
        """Fill ``views``, one after the other, from ``offset``.

        Returns the number of bytes read, which is less than the length of the views only at the end of the file. After
        a cancelled await, a thread may still write to the views until its future has resolved
        (:func:`aio_ckpt.runtime.portal.watch_submissions`). From then on, another load may use them.

        Raises:
            ReadError: the read failed; the error holds errno and path.
        """
        left = [view.cast("B") for view in views if view.nbytes]
        if not left:
            return 0
        with translate_errors(ReadError, self.path), self._files.use():
            return await run_blocking(self._executor, self._read, offset, left)

    def _read(self, offset: int, views: list[memoryview]) -> int:
        """Read in a thread. The page cache is asked for one page first, and not again after a miss.

        A miss makes the kernel read what was asked for, which the direct read then waits for.
        """
        cached = 0
        if self._may_be_cached:
            if _read_cached(self._numbers[0], offset, [views[0][:PAGE_BYTES]]):
                cached = _read_cached(self._numbers[0], offset, views)
            self._may_be_cached = not _skip(views, cached)
        return cached + self._read_fully(offset + cached, views)

    def _read_fully(self, offset: int, views: list[memoryview]) -> int:
        begin = offset
        while views:
            direct = _direct_prefix(views, offset) if self.is_direct else []
            try:
                count = os.preadv(self._numbers[1 if direct else 0], direct or views, offset)
            except OSError as error:
                if not direct or error.errno not in REFUSALS:
                    raise
                check_fallback(self.path, self._direct_io, error)
                self.is_direct = False
                continue
            if not count:
                break
            offset += count
            _skip(views, count)
        return offset - begin

    async def close(self) -> None:
        """Close the file when the thread of the last read is done. Idempotent; survives cancellation."""
        with translate_errors(ReadError, self.path):
            await self._files.close()


def open_regular_file(path: Path) -> int:
    """Open a regular file for reading and return its descriptor. The open of a FIFO does not wait for a writer.

    Raises:
        MismatchError: ``path`` is no regular file.
    """
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        is_regular = stat.S_ISREG(os.fstat(number).st_mode)
    except BaseException:
        os.close(number)
        raise
    if is_regular:
        return number
    os.close(number)
    raise MismatchError(f"{path}: no regular file")


def _read_cached(number: int, offset: int, views: list[memoryview]) -> int:
    """Read the next bytes up to the first that the page cache lacks. Return their number; 0 without kernel support."""
    try:
        return os.preadv(number, views, offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return 0
    except OSError as error:
        if error.errno not in NOT_SUPPORTED:
            raise
        return 0


def _skip(views: list[memoryview], count: int) -> bool:
    """Drop the first ``count`` bytes of ``views``. Return whether any are left."""
    while views and count >= views[0].nbytes:
        count -= views.pop(0).nbytes
    if count:
        views[0] = views[0][count:]
    return bool(views)


def _direct_prefix(views: list[memoryview], offset: int) -> list[memoryview]:
    """Return the first of the views, the last one cut, that O_DIRECT takes in one call at ``offset``."""
    taken: list[memoryview] = []
    for view in views:
        span = aligned_span(view, offset)
        taken += [view[:span]] if span else []
        if span < view.nbytes:
            break
        offset += span
    return taken
