"""Data files on a local file system: concurrent writes and ranged reads, with O_DIRECT where a file takes it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import functools
import os
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
from aiofiles.threadpool import wrap

from aio_ckpt.errors import AioCkptError, EngineClosedError, MismatchError, ReadError, WriteError
from aio_ckpt.format.constants import PAGE_BYTES
from aio_ckpt.reports import WriteMode
from aio_ckpt.runtime.portal import Executor, run_blocking, watch_submissions
from aio_ckpt.storage.direct_io import (
    NOT_SUPPORTED,
    RWF_DONTCACHE,
    aligned_span,
    probe_read,
    probe_refusal,
    probe_write,
    supports_direct_io,
)
from aio_ckpt.storage.durability import sync_data
from aio_ckpt.storage.remedies import with_remedy

if TYPE_CHECKING:
    from aiofiles.threadpool.binary import AsyncFileIO

    from aio_ckpt.config import DirectIO

_LIBC = ctypes.CDLL(None, use_errno=True)


def translated(kind: type[WriteError | ReadError], path: Path, error: OSError) -> WriteError | ReadError:
    """Return an error of the system as ``kind``, with errno, message, remedy and path."""
    text = with_remedy(error, writes=kind is WriteError)
    return kind(error.errno or errno.EIO, text, error.filename or str(path), None, error.filename2)


@contextlib.contextmanager
def translate_errors(kind: type[WriteError | ReadError], path: Path) -> Iterator[None]:
    """Raise an OSError of the block as :func:`translated`. The cause is kept."""
    try:
        yield
    except AioCkptError:
        raise
    except OSError as error:
        raise translated(kind, path, error) from error


# -- descriptors and the threads that use them ----------------------------------------------------


class _Descriptors:
    """Open descriptors of one file.

    Invariant: they are closed once, after :meth:`close` was called and the last :meth:`use` has ended. A use ends when
    its block has ended *and* the last thread that it started is done. If a descriptor were closed earlier, its number
    could belong to another file when the thread uses it.
    """

    def __init__(self, executor: Executor, numbers: list[int]) -> None:
        self._executor = executor
        self._numbers = numbers
        self._users: set[object] = set()
        self._is_closed = False

    @contextlib.contextmanager
    def use(self) -> Iterator[list[Callable[[], object]]]:
        """Keep the descriptors open for the block. Yield a list of callbacks for the end of the use, on any thread."""
        if self._is_closed:
            raise OSError(errno.EBADF, "the file was closed")
        user = object()
        self._users.add(user)
        at_end: list[Callable[[], object]] = [functools.partial(self._leave, user)]
        threads: list[Future[Any]] = []
        try:
            with watch_submissions(threads.append):
                yield at_end
        finally:
            if threads:  # a use runs its threads one after the other, so the last submitted one ends last
                threads[-1].add_done_callback(lambda _: _call_all(at_end))
            else:
                _call_all(at_end)

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


def _call_all(functions: list[Callable[[], object]]) -> None:
    for function in reversed(functions):
        function()


# -- writing --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CreatedFile:
    """Created file with its open descriptors, before the asynchronous handles are made."""

    path: Path
    mode: WriteMode
    base: int
    """Descriptor that goes through the page cache."""
    writers: tuple[FileIO, ...]
    """One file for each concurrent write; none in the mode ``dontcache``. They do not own their descriptors."""

    @property
    def numbers(self) -> list[int]:
        """All open descriptors."""
        return [self.base, *(writer.fileno() for writer in self.writers)]

    @classmethod
    def create(cls, path: Path, nbytes: int, *, writers: int, direct_io: DirectIO) -> CreatedFile:
        """Create ``path``, which must not exist, reserve ``nbytes`` and open ``writers`` files."""
        base = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        files: list[FileIO] = []
        try:
            _reserve(base, nbytes)
            mode = _choose_mode(path, base, direct_io)
            if nbytes < PAGE_BYTES:
                os.ftruncate(base, nbytes)  # the probe wrote a whole page
            flags = os.O_WRONLY | os.O_CLOEXEC | (os.O_DIRECT if mode == "direct" else 0)
            for _ in range(0 if mode == "dontcache" else writers):
                files.append(FileIO(os.open(path, flags), "w", closefd=False))
        except BaseException:
            cls(path, "buffered", base, tuple(files)).discard()
            raise
        return cls(path, mode, base, tuple(files))

    def discard(self) -> None:
        """Close the descriptors and remove the file."""
        try:
            _close_numbers(self.numbers)
        finally:
            self.path.unlink(missing_ok=True)


class DataFile:
    """New file that several tasks write at once, each its own range.

    It has a pool of unbuffered aiofiles handles, each with its own file position.

    Invariant: a handle is in ``_free``, or belongs to one :meth:`write` until the last thread of that write is done,
    awaited or not. Otherwise, the seek of the next write would race with that thread.
    """

    def __init__(self, created: CreatedFile, executor: Executor) -> None:
        self.path = created.path
        self.mode = created.mode
        """How bytes reach the disk. It is fixed when the file is created."""
        self._base = created.base
        self._files = _Descriptors(executor, created.numbers)
        self._executor = executor
        self._loop = asyncio.get_running_loop()
        self._free: list[AsyncFileIO] = [wrap(writer, executor=executor) for writer in created.writers]
        self._room = anyio.Semaphore(len(self._free), fast_acquire=True)

    async def write(self, offset: int, data: memoryview) -> None:
        """Write all of ``data`` (contiguous, any length) at ``offset`` bytes. A short write is continued.

        It is fastest if address, offset and length are multiples of ``PAGE_BYTES``. ``data`` must stay unchanged until
        the futures of the *threads* have resolved (``watch_submissions``), which may be after a cancelled await.

        Raises:
            WriteError: the write failed; the error holds errno and path.
        """
        view = data.cast("B") if data.nbytes else data
        with translate_errors(WriteError, self.path), self._files.use() as at_end:
            flags, handle = RWF_DONTCACHE, None
            if self.mode != "dontcache":
                await self._room.acquire()
                flags, handle = 0, self._free.pop()
                at_end.append(functools.partial(self._return_handle, handle))
            done = 0
            while done < view.nbytes:
                rest = view[done:]
                span = aligned_span(rest, offset + done) if self.mode == "direct" else rest.nbytes
                if handle is not None and span:
                    os.lseek(handle.fileno(), offset + done, os.SEEK_SET)  # a seek never blocks, so it needs no thread
                    written = await handle.write(rest[:span])
                else:  # uncached data, or an unaligned rest, which direct I/O cannot take
                    written = await run_blocking(self._executor, os.pwritev, self._base, [rest], offset + done, flags)
                if not written:
                    raise OSError(errno.EIO, f"nothing of {rest.nbytes} bytes was written at offset {offset + done}")
                done += written

    async def sync(self) -> None:
        """Make the written bytes durable (fdatasync). After a failure the file is lost: do not try again."""
        with translate_errors(WriteError, self.path), self._files.use():
            await run_blocking(self._executor, sync_data, self._base)

    async def close(self) -> None:
        """Close the file when the thread of the last write is done. Idempotent; survives cancellation."""
        with translate_errors(WriteError, self.path):
            await self._files.close()

    def _return_handle(self, handle: AsyncFileIO) -> None:
        with contextlib.suppress(RuntimeError):  # after the end of the loop, no task writes again
            self._loop.call_soon_threadsafe(self._put_handle, handle)

    def _put_handle(self, handle: AsyncFileIO) -> None:
        self._free.append(handle)
        self._room.release()


def _reserve(descriptor: int, nbytes: int) -> None:
    """Allocate ``nbytes``. If the file system cannot, only set the length.

    This does not use os.posix_fallocate: if the file system cannot allocate, glibc writes a byte into every 4 KiB.
    """
    if not nbytes:
        return
    while _LIBC.fallocate(descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)):
        code = ctypes.get_errno()
        if code in NOT_SUPPORTED:
            os.ftruncate(descriptor, nbytes)
            return
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def _choose_mode(path: Path, base: int, direct_io: DirectIO) -> WriteMode:
    """Return the first mode in which a real write succeeds: direct, uncached, or through the page cache."""
    if direct_io != "off" and supports_direct_io(path, os.O_WRONLY, probe_write, is_required=direct_io == "on"):
        return "direct"
    return "buffered" if probe_refusal(probe_write, base, RWF_DONTCACHE) else "dontcache"


# -- reading --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenedFile:
    """Open descriptors of a file to be read, and its length, before the asynchronous handle is made."""

    nbytes: int
    numbers: list[int]
    """A descriptor that goes through the page cache. If the file takes O_DIRECT, a second one with it."""

    @classmethod
    def open(cls, path: Path, direct_io: DirectIO) -> OpenedFile:
        """Open ``path``, also with O_DIRECT if a read proves that the file takes it."""
        numbers = [open_regular_file(path)]
        try:
            nbytes = os.fstat(numbers[0]).st_size
            is_required = direct_io == "on"
            if direct_io != "off" and supports_direct_io(path, os.O_RDONLY, probe_read, is_required=is_required):
                numbers.append(os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC))
        except BaseException:
            _close_numbers(numbers)
            raise
        return cls(nbytes, numbers)

    def close(self) -> None:
        """Close all descriptors."""
        _close_numbers(self.numbers)


class ReadFile:
    """File that several tasks read at once: positioned reads, each in one call of a thread."""

    def __init__(self, path: Path, opened: OpenedFile, executor: Executor, *, reads_cached: bool) -> None:
        """If ``reads_cached``, bytes that the page cache holds come from there, and only the others with O_DIRECT."""
        self.path = path
        self.nbytes = opened.nbytes
        """Length of the file when it was opened."""
        self.is_direct = len(opened.numbers) > 1
        """Whether reads that are aligned to ``PAGE_BYTES`` (address, offset, length) bypass the page cache."""
        self._may_be_cached = reads_cached and self.is_direct
        self._numbers = tuple(opened.numbers)
        self._executor = executor
        self._files = _Descriptors(executor, opened.numbers)

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
        return cached + _read_fully(self._numbers, offset + cached, views)

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


def _read_fully(numbers: tuple[int, ...], offset: int, views: list[memoryview]) -> int:
    begin = offset
    while views:
        direct = _direct_prefix(views, offset) if len(numbers) > 1 else []
        count = os.preadv(numbers[1] if direct else numbers[0], direct or views, offset)
        if not count:
            break
        offset += count
        _skip(views, count)
    return offset - begin


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
