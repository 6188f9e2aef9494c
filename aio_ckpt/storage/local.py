"""The async ``Storage`` protocol, what the stages ask of a place for checkpoints, and the local file system.

Errors of the operating system are translated here: WriteError and ReadError keep errno, message and path.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from aio_ckpt.config import DirectIO
from aio_ckpt.errors import MismatchError, ReadError, RootError, WriteError
from aio_ckpt.reports import WriteMode
from aio_ckpt.runtime.portal import Executor, run_blocking
from aio_ckpt.storage.data_file import create_data_file, open_data_file, open_regular, translated
from aio_ckpt.storage.direct_io import PageCache, Probe, probe_read, probe_write
from aio_ckpt.storage.lock import RootLock
from aio_ckpt.storage.paths import make_dirs, sync_dir

__all__ = [
    "DataFile",
    "FileStatus",
    "LocalStorage",
    "PageCache",
    "ReadFile",
    "RootLock",
    "Storage",
    "names_in",
    "read_small_file",
    "sync_parents",
]

_LIBC = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
_MAX_SMALL_FILE_BYTES = 4 << 30
_NO_RENAMEAT2 = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})

# -- what the stages see --------------------------------------------------------------------------


class DataFile(Protocol):
    """A new file that several tasks write at once, each its own range."""

    @property
    def path(self) -> Path:
        """Path of the file."""

    @property
    def mode(self) -> WriteMode:
        """How bytes reach the disk, fixed when the file was created."""

    async def write(self, offset: int, data: memoryview) -> None:
        """Write all of ``data`` (contiguous, any length) at ``offset`` bytes.

        Fastest where address, offset and length are multiples of ``PAGE_BYTES``. ``data`` must stay unchanged
        until the *thread's* futures have resolved (``watch_submissions``), which may be after a cancelled await.

        Raises:
            WriteError: with errno and path.
        """

    async def sync(self) -> None:
        """Make what was written durable (fdatasync). After a failure the file is lost: do not try again."""

    async def close(self) -> None:
        """Close as soon as no thread uses the file. Idempotent; survives cancellation."""


class ReadFile(Protocol):
    """A file that several tasks read at once."""

    @property
    def path(self) -> Path:
        """Path of the file."""

    @property
    def nbytes(self) -> int:
        """Its length when it was opened."""

    @property
    def direct(self) -> bool:
        """Whether reads aligned to ``PAGE_BYTES`` (address, offset, length) pass the page cache by."""

    async def read_into(self, offset: int, *views: memoryview) -> int:
        """Fill ``views``, one after the other, from ``offset``; the bytes read, fewer only at the end of the file.

        They may be lent to another load as soon as this was cancelled and the thread's futures have resolved
        (:func:`aio_ckpt.runtime.portal.watch_submissions`): nothing else may write to them then.

        Raises:
            ReadError: with errno and path.
        """

    async def close(self) -> None:
        """Close as soon as no thread uses the file. Idempotent; survives cancellation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStatus:
    """What the file system tells of a file or directory."""

    identity: tuple[int, int, int]
    """Another one after the file was replaced, even by one that took over its inode."""
    modified_unix: float
    """When it last changed, by the file system's own clock; of a directory, its names."""


@runtime_checkable
class Storage(Protocol):
    """A file system for checkpoints. Paths are absolute. Reading raises ReadError, changing WriteError."""

    async def create_data_file(self, path: Path, nbytes: int, *, writers: int) -> DataFile:
        """Create ``path`` exclusively and reserve ``nbytes``, so that a full disk shows before a byte is written."""

    async def open_data_file(self, path: Path, *, readers: int, page_cache: PageCache = "pass") -> ReadFile:
        """Open ``path`` for ``readers`` reads at once. ``page_cache`` says what they do with the page cache."""

    async def write_file(self, path: Path, *parts: bytes) -> None:
        """Create ``path`` exclusively, write one part after the other, fsync. What failed is removed."""

    async def read_file(self, path: Path, *, max_bytes: int) -> bytes:
        """The whole file. MismatchError, before memory is taken, if it is longer than ``max_bytes``."""

    async def make_dir(self, path: Path, *, parents: bool = False) -> None:
        """Create a directory; it must not exist. With ``parents`` it may, and all that are made are durable."""

    async def sync_dir(self, path: Path) -> None:
        """Make the names in ``path`` durable."""

    async def list_dir(self, path: Path) -> list[str]:
        """Names in ``path``, sorted."""

    async def exists(self, path: Path) -> bool:
        """Whether ``path`` is there; an error other than "not found" is raised, not taken for a no."""

    async def status(self, path: Path) -> FileStatus | None:
        """None if ``path`` is not there."""

    async def touch(self, path: Path) -> None:
        """Set the time of change of a file that is there to the file system's now. Not durable."""

    async def rename(self, src: Path, dst: Path) -> None:
        """Rename; WriteError (EEXIST) if ``dst`` exists, whatever it is."""

    async def exchange(self, a: Path, b: Path) -> None:
        """Swap two names in one step. RootError where the file system cannot."""

    async def replace(self, src: Path, dst: Path) -> None:
        """Rename a file over ``dst``."""

    async def remove_file(self, path: Path) -> None:
        """Remove one file; nothing if it is not there."""

    async def remove_tree(self, path: Path) -> None:
        """Remove a directory and all below it; nothing to do if it is gone."""

    def lock(self, path: Path) -> RootLock:
        """Take the writer's lock now, without waiting. RootError names the holder."""


# -- the local file system ------------------------------------------------------------------------


class LocalStorage:
    """:class:`Storage` on a mounted file system; every call that may block runs in ``executor``."""

    def __init__(
        self,
        executor: Executor,
        direct_io: DirectIO = "auto",
        *,
        write_probe: Probe = probe_write,
        read_probe: Probe = probe_read,
    ) -> None:
        """The probes decide, per file, whether O_DIRECT and RWF_DONTCACHE work."""
        self._executor = executor
        self._direct_io = direct_io
        self._write_probe = write_probe
        self._read_probe = read_probe

    async def create_data_file(self, path: Path, nbytes: int, *, writers: int) -> DataFile:
        """``writers`` aiofiles handles; O_DIRECT, else RWF_DONTCACHE, else the page cache."""
        return await create_data_file(
            path,
            nbytes,
            writers=writers,
            executor=self._executor,
            direct_io=self._direct_io,
            probe=self._write_probe,
        )

    async def open_data_file(self, path: Path, *, readers: int, page_cache: PageCache = "pass") -> ReadFile:
        """Only ``direct_io="auto"`` leaves a choice.

        Reads are positioned, so that ``readers`` needs no handles here.
        """
        del readers
        is_chosen = self._direct_io == "auto"
        return await open_data_file(
            path,
            executor=self._executor,
            direct_io="off" if page_cache == "fill" and is_chosen else self._direct_io,
            takes_cached=page_cache == "take" and is_chosen,
            probe=self._read_probe,
        )

    async def write_file(self, path: Path, *parts: bytes) -> None:
        """Exclusive create, write, fsync, close in one thread hop."""
        with translated(WriteError, path):
            await run_blocking(self._executor, _write_file, path, parts)

    async def read_file(self, path: Path, *, max_bytes: int) -> bytes:
        """Read the whole file in one thread hop."""
        with translated(ReadError, path):
            return await run_blocking(self._executor, _read_file, path, max_bytes)

    async def make_dir(self, path: Path, *, parents: bool = False) -> None:
        """Call mkdir; with ``parents``, fsync each parent that is made."""
        with translated(WriteError, path):
            await run_blocking(self._executor, make_dirs if parents else os.mkdir, path)

    async def sync_dir(self, path: Path) -> None:
        """fsync of the directory."""
        with translated(WriteError, path):
            await run_blocking(self._executor, sync_dir, path)

    async def list_dir(self, path: Path) -> list[str]:
        """Call os.listdir and sort the names."""
        with translated(ReadError, path):
            return sorted(await run_blocking(self._executor, os.listdir, path))

    async def exists(self, path: Path) -> bool:
        """Follows symbolic links."""
        with translated(ReadError, path):
            return await run_blocking(self._executor, _exists, path)

    async def status(self, path: Path) -> FileStatus | None:
        """Follows symbolic links."""
        with translated(ReadError, path):
            return await run_blocking(self._executor, _status, path)

    async def touch(self, path: Path) -> None:
        """utimensat without a time: a server stamps its own."""
        with translated(WriteError, path):
            await run_blocking(self._executor, os.utime, path)

    async def rename(self, src: Path, dst: Path) -> None:
        """renameat2 with RENAME_NOREPLACE; where that is missing, a check before the rename."""
        with translated(WriteError, dst):
            await run_blocking(self._executor, _rename_no_replace, src, dst)

    async def exchange(self, a: Path, b: Path) -> None:
        """renameat2 with RENAME_EXCHANGE."""
        with translated(WriteError, b):
            await run_blocking(self._executor, _exchange, a, b)

    async def replace(self, src: Path, dst: Path) -> None:
        """Call os.replace."""
        with translated(WriteError, dst):
            await run_blocking(self._executor, os.replace, src, dst)

    async def remove_file(self, path: Path) -> None:
        """See :meth:`Storage.remove_file`."""
        with translated(WriteError, path):
            await run_blocking(self._executor, path.unlink, True)

    async def remove_tree(self, path: Path) -> None:
        """Call shutil.rmtree."""
        with translated(WriteError, path):
            await run_blocking(self._executor, _remove_tree, path)

    def lock(self, path: Path) -> RootLock:
        """fcntl.lockf on ``path``, which is created, its directory too."""
        return RootLock(path)


def _write_file(path: Path, parts: tuple[bytes, ...]) -> None:
    with path.open("xb", buffering=0) as file:
        try:
            for part in parts:
                rest = memoryview(part)
                while rest:
                    rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def _read_file(path: Path, max_bytes: int) -> bytes:
    with open(open_regular(path), "rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes > max_bytes:
            raise MismatchError(f"{path}: {nbytes} bytes long, at most {max_bytes} are expected")
        return file.read(nbytes)


def _exists(path: Path) -> bool:
    return _status(path) is not None


def _status(path: Path) -> FileStatus | None:
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return FileStatus(identity=(found.st_dev, found.st_ino, found.st_ctime_ns), modified_unix=found.st_mtime)


def _renameat2(src: Path, dst: Path, flags: int) -> None:
    function = getattr(_LIBC, "renameat2", None)  # absent before glibc 2.28
    code = errno.ENOSYS
    if function is not None:
        if not function(_AT_FDCWD, os.fsencode(src), _AT_FDCWD, os.fsencode(dst), flags):
            return
        code = ctypes.get_errno()
    raise OSError(code, os.strerror(code), str(src), None, str(dst))


def _rename_no_replace(src: Path, dst: Path) -> None:
    try:
        _renameat2(src, dst, _RENAME_NOREPLACE)
    except OSError as error:
        if error.errno not in _NO_RENAMEAT2:
            raise
        if os.path.lexists(dst):  # a window for a rename between check and ours remains; the root lock narrows it
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(src), None, str(dst)) from error
        src.rename(dst)


def _exchange(a: Path, b: Path) -> None:
    try:
        _renameat2(a, b, _RENAME_EXCHANGE)
    except OSError as error:
        if error.errno not in _NO_RENAMEAT2:
            raise
        raise RootError(
            error.errno, "this file system cannot exchange two directories: overwrite=True needs it", str(b)
        ) from error


def _remove_tree(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        if os.path.lexists(path):  # something below vanished meanwhile: not done yet
            shutil.rmtree(path)


async def names_in(storage: Storage, path: Path) -> list[str]:
    """Names in a directory, sorted; none if nobody has made it yet."""
    try:
        return await storage.list_dir(path)
    except ReadError:
        if await storage.exists(path):
            raise
        return []


async def sync_parents(storage: Storage, src: Path, dst: Path) -> None:
    """Make a rename from ``src`` to ``dst`` durable.

    The new name first: after a power loss in between what was renamed has one name at least.
    """
    await storage.sync_dir(dst.parent)
    if src.parent != dst.parent:
        await storage.sync_dir(src.parent)


async def read_small_file(storage: Storage, path: Path, *, max_bytes: int = _MAX_SMALL_FILE_BYTES) -> bytes | None:
    """All bytes of a manifest or ``.metadata``; None if there is no such file.

    Raises:
        MismatchError: it is longer than ``max_bytes``; no memory was taken for it.
    """
    try:
        return await storage.read_file(path, max_bytes=max_bytes)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return None
        raise
