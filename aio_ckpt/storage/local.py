"""Storage: the file system as the stages use it.

Errors of the operating system are translated here: WriteError and ReadError keep errno, message and path.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import functools
import itertools
import os
import shutil
import stat
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, TypeVarTuple

import anyio

from aio_ckpt.config import DirectIO
from aio_ckpt.errors import AioCkptError, MismatchError, ReadError, RootError, WriteError
from aio_ckpt.remote_path import RemotePath
from aio_ckpt.runtime.portal import Executor, run_blocking, run_owned
from aio_ckpt.storage.clone import Stamp, clone_file, file_stamp
from aio_ckpt.storage.data_file import DataFile, ReadFile, open_regular_file
from aio_ckpt.storage.direct_io import PageCache
from aio_ckpt.storage.directories import make_dirs, remaking
from aio_ckpt.storage.durability import sync_dir, sync_file
from aio_ckpt.storage.freshness import found_afresh
from aio_ckpt.storage.os_errors import NOT_SUPPORTED, translate_errors, translated
from aio_ckpt.storage.root_lock import RootLock

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Coro: TypeAlias = Coroutine[Any, Any, T]
_LIBC = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
_THREADS_A_DIRECTORY, _FILES_A_THREAD = 4, 16
"""Most threads that look at the files of one directory, or remove them, and the files for which a further one is worth
it. A server takes its time for each file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStatus:
    """Identity, modification time and permissions of a file or directory."""

    identity: tuple[int, int, int]
    """Device, inode and change time: it changes if the file is replaced, even by a file that gets the same inode."""
    modified_unix: float
    """Time of the last change, in seconds since 1970 by the file system's clock. For a directory, a change of its
    names."""
    mode: int
    """Permissions of owner, group and others, as ``os.chmod`` takes them."""
    links: int = 1
    """Number of names of the file."""


class Storage:
    """File system for checkpoints. Paths are absolute. Reads raise ReadError, and changes raise WriteError.

    Every call that may block runs in ``executor``.
    """

    def __init__(self, executor: Executor, direct_io: DirectIO = "auto") -> None:
        self._executor = executor
        self._direct_io = direct_io

    async def _run(self, kind: type[WriteError | ReadError], path: Path, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        """Return ``fn(*args)``, called in a thread. Raise an OSError about ``path`` as ``kind``."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, fn, *args)
        except AioCkptError:
            raise
        except OSError as error:
            raise translated(kind, path, error) from error

    async def create_data_file(self, path: Path, nbytes: int) -> DataFile:
        """Create ``path`` for concurrent writes, in the first mode of :data:`WriteMode` that works.

        On a disk of this host, ``nbytes`` are reserved, so that a full disk shows before a byte is written.

        Raises:
            WriteError: the file exists, or there is no room for it, or ``direct_io="on"`` and it cannot be opened so.
                No byte was written, and no file is left.
        """
        with translate_errors(WriteError, path):
            create = functools.partial(DataFile, path, nbytes, self._executor, self._direct_io)
            return await run_owned(self._executor, create, dispose=DataFile.discard)

    async def open_data_file(self, path: Path, *, page_cache: PageCache = "pass") -> ReadFile:
        """Open ``path`` for reading, with O_DIRECT where it works.

        ``page_cache`` counts only with ``direct_io="auto"``: see :data:`PageCache`.

        Raises:
            ReadError: the file is missing or unreadable, or ``direct_io="on"`` and it cannot be opened so.
        """
        is_chosen = self._direct_io == "auto"
        direct_io: DirectIO = "off" if page_cache == "fill" and is_chosen else self._direct_io
        with translate_errors(ReadError, path):
            reads_cached = page_cache == "take" and is_chosen
            read = functools.partial(ReadFile, path, self._executor, direct_io, reads_cached=reads_cached)
            return await run_owned(self._executor, read, dispose=ReadFile.discard)

    def stamp(self, path: Path) -> Coro[Stamp]:
        """Return the mark of the content of a file. It changes if somebody writes to the file."""
        return self._run(ReadError, path, file_stamp, path)

    def clone(self, source: Path, target: Path, stamp: Stamp) -> Coro[Stamp | None]:
        """Make ``target`` from the bytes of ``source`` without writing them, durable once its directory is synced.

        Returns the mark of ``target``. None if ``source`` has not the mark ``stamp`` any more, or the storage cannot.
        """
        return self._run(WriteError, target, clone_file, source, target, stamp)

    def write_file(self, path: Path, *parts: bytes) -> Coro[None]:
        """Create ``path`` exclusively, write one part after the other, and fsync. If that fails, remove the file."""
        return self._run(WriteError, path, _write_file, path, parts)

    def read_file(self, path: Path, *, max_bytes: int) -> Coro[bytes]:
        """Return the bytes of the whole file.

        Raises:
            MismatchError: the file is longer than ``max_bytes``; no memory was taken for it.
        """
        return self._run(ReadError, path, _read_file, path, max_bytes)

    def read_end(self, path: Path, nbytes: int) -> Coro[bytes]:
        """Return the last ``nbytes`` of a file, or the whole file if it is shorter."""
        return self._run(ReadError, path, _read_end, path, nbytes)

    def make_dir(self, path: Path) -> Coro[None]:
        """Create a directory, which must not exist. Its name is not durable yet."""
        return self._run(WriteError, path, remaking, path.parent, functools.partial(os.mkdir, path))

    def make_dirs(self, *paths: Path) -> Coro[None]:
        """Create directories and their missing parents, durably. A directory may exist."""
        return self._run(WriteError, paths[0], make_dirs, *paths)

    async def begin_dir(self, pending: Path, place: Path, save_id: str) -> None:
        """Make the directory of a save, which gets its files until its commit, unless another rank has made it.

        A store puts the files of save ``save_id`` where they stay, into ``place``, and ``pending`` names them.
        """
        del place, save_id
        try:
            await self.make_dir(pending)
        except WriteError as error:
            if error.errno != errno.EEXIST:
                raise

    async def has_begun(self, pending: Path) -> bool:
        """Return whether a rank has made the directory of a save.

        On a shared file system the answer may be old, and costs one call of the server: then this rank makes it, too.
        """
        return await self._run(ReadError, pending, os.path.exists, pending)

    def sync_dir(self, path: Path) -> Coro[None]:
        """Make the names in the directory ``path`` durable."""
        return self._run(WriteError, path, sync_dir, path)

    async def list_dir(self, path: Path) -> list[str]:
        """Return the names in ``path``, sorted."""
        return sorted(await self._run(ReadError, path, found_afresh, os.listdir, path))

    def lengths(self, path: Path) -> Coro[dict[str, int]]:
        """Return the length in bytes of each regular file in a directory, by its name. Links are left out."""
        return self._run(ReadError, path, _lengths, path)

    async def exists(self, path: Path) -> bool:
        """Return whether ``path`` exists. Links are followed. Only "not found" counts as False; other errors raise."""
        return await self.status(path) is not None

    def status(self, path: Path) -> Coro[FileStatus | None]:
        """Return the status of ``path``; None if it does not exist. Symbolic links are followed."""
        return self._run(ReadError, path, _status, path)

    async def statuses(self, directory: Path, names: Sequence[str]) -> list[FileStatus | ReadError | None]:
        """Return :meth:`status` of each file below ``directory``, or its error."""
        batches = _batches(names)
        found = await asyncio.gather(*(self._run(ReadError, directory, _statuses, directory, each) for each in batches))
        return list(itertools.chain.from_iterable(found))

    def fresh_status(self, path: Path) -> Coro[FileStatus | None]:
        """Return the status of a file as its server knows it now; None if the file is gone.

        A client of a shared file system answers :meth:`status` from a copy that may be 60 s old. It asks at each open.
        """
        return self._run(ReadError, path, _fresh_status, path)

    async def is_link(self, path: Path) -> bool:
        """Return whether ``path`` is a symbolic link, whatever it leads to."""
        return await self.first_link(path) is not None

    def first_link(self, *paths: Path) -> Coro[Path | None]:
        """Return the first of ``paths`` that is a symbolic link, whatever it leads to; None if there is none."""
        return self._run(ReadError, paths[0], lambda: next(filter(_is_link, paths), None))

    async def free_bytes(self, path: Path) -> int:
        """Return the bytes that this user may still write to the file system of ``path``. Quotas may allow less."""
        found = await self._run(ReadError, path, os.statvfs, path)
        return found.f_bavail * found.f_frsize

    def touch(self, path: Path) -> Coro[None]:
        """Set the modification time of an existing file to the file system's present time. Not durable.

        If ``path`` is a symbolic link, its own time is set. No time is passed, so a file server takes its own clock.
        """
        return self._run(WriteError, path, functools.partial(os.utime, path, follow_symlinks=False))

    def set_mode(self, path: Path, mode: int) -> Coro[None]:
        """Set the permissions of a file or directory, as ``os.chmod`` does."""
        return self._run(WriteError, path, os.chmod, path, mode)

    def rename(self, src: Path, dst: Path) -> Coro[None]:
        """Rename a file or directory. Raises WriteError (EEXIST) if ``dst`` exists, of whatever type."""
        return self._run(WriteError, dst, remaking, dst.parent, functools.partial(_rename_no_replace, src, dst))

    def exchange(self, a: Path, b: Path) -> Coro[None]:
        """Swap two names in one step. Raises RootError if the file system cannot."""
        return self._run(WriteError, b, exchange_directories, a, b)

    def replace(self, src: Path, dst: Path) -> Coro[None]:
        """Rename a file to ``dst``, and replace the file that has that name."""
        return self._run(WriteError, dst, os.replace, src, dst)

    def remove_file(self, path: Path) -> Coro[None]:
        """Remove a file. Do nothing if it does not exist."""
        return self._run(WriteError, path, path.unlink, True)

    async def remove_tree(self, path: Path) -> None:
        """Remove a directory and all below it, or a file. Do nothing if it does not exist.

        Symbolic links are removed, ``path`` included. What they lead to stays.
        """
        batches = _batches(await self._run(WriteError, path, _file_names, path))
        if len(batches) > 1:
            await asyncio.gather(*(self._run(WriteError, path, _remove_files, path, batch) for batch in batches))
        await self._run(WriteError, path, _remove_tree, path)

    def lock(self, path: Path) -> RootLock:
        """Take the writer's lock without waiting. If the file or its directory does not exist, create it.

        Raises:
            RootError: the lock is held; the message names the holder.
        """
        return RootLock(path)

    @contextlib.asynccontextmanager
    async def locked(self, path: Path, *, release_secs: float) -> AsyncIterator[None]:
        """Hold :meth:`lock`, which a thread takes and gives back: on a hung disk both hang.

        The end of the block waits at most ``release_secs`` for the thread, also if it is cancelled.
        """
        lock = await run_owned(self._executor, self.lock, path, dispose=RootLock.discard)
        try:
            yield
        finally:
            with anyio.move_on_after(release_secs, shield=True), contextlib.suppress(OSError):
                await run_blocking(self._executor, lock.discard)


def _write_file(path: Path, parts: tuple[bytes, ...]) -> None:
    with path.open("xb", buffering=0) as file:
        try:
            for part in parts:
                rest = memoryview(part)
                while rest:
                    rest = rest[file.write(rest) :]
            sync_file(file.fileno())
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def _read_file(path: Path, max_bytes: int) -> bytes:
    with open(found_afresh(open_regular_file, path), "rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes > max_bytes:
            raise MismatchError(f"{path}: {nbytes} bytes long, at most {max_bytes} are expected")
        return file.read(nbytes)


def _read_end(path: Path, nbytes: int) -> bytes:
    with open(found_afresh(open_regular_file, path), "rb", buffering=0) as file:
        file.seek(max(os.fstat(file.fileno()).st_size - nbytes, 0))
        return file.read(nbytes)


def _lengths(directory: Path) -> dict[str, int]:
    with os.scandir(directory) as entries:
        return {entry.name: entry.stat().st_size for entry in entries if entry.is_file(follow_symlinks=False)}


def _status(path: Path) -> FileStatus | None:
    try:
        found = found_afresh(Path.stat, path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return _file_status(found)


def _statuses(directory: Path, names: Sequence[str]) -> list[FileStatus | ReadError | None]:
    return [_status_or_error(directory / name) for name in names]


def _status_or_error(path: Path) -> FileStatus | ReadError | None:
    try:
        return _status(path)
    except OSError as error:
        return translated(ReadError, path, error)


def _batches(names: Sequence[str]) -> list[Sequence[str]]:
    """Cut names into one run for each thread."""
    nthreads = max(1, min(_THREADS_A_DIRECTORY, len(names) // _FILES_A_THREAD))
    length = -(-len(names) // nthreads)
    return [names[start : start + length] for start in range(0, len(names), length or 1)]


def _fresh_status(path: Path) -> FileStatus | None:
    try:
        descriptor = found_afresh(open_regular_file, path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        return _file_status(os.fstat(descriptor))
    finally:
        os.close(descriptor)


def _file_status(found: os.stat_result) -> FileStatus:
    return FileStatus(
        identity=(found.st_dev, found.st_ino, found.st_ctime_ns),
        modified_unix=found.st_mtime,
        mode=found.st_mode & 0o777,
        links=found.st_nlink,
    )


def _is_link(path: Path) -> bool:
    try:
        return stat.S_ISLNK(found_afresh(Path.lstat, path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


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
        if error.errno not in NOT_SUPPORTED:
            raise
        if os.path.lexists(dst):  # another rename may come between this check and ours; the root lock makes that rare
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(src), None, str(dst)) from error
        src.rename(dst)


def exchange_directories(a: Path, b: Path) -> None:
    """Exchange two directories in one step. Raises RootError if the file system cannot."""
    try:
        _renameat2(a, b, _RENAME_EXCHANGE)
    except OSError as error:
        if error.errno not in NOT_SUPPORTED:
            raise
        raise RootError(
            error.errno,
            "this file system cannot exchange two directories, so that no checkpoint is replaced in one step: "
            "delete(step) or remove(path) the old one first",
            str(b),
        ) from error


def _file_names(path: Path) -> list[str]:
    """Return the names in a directory that are no directories; none if ``path`` is no directory."""
    try:
        with os.scandir(path) if not _is_link(path) else contextlib.nullcontext(()) as entries:
            return [entry.name for entry in entries if not entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _remove_files(directory: Path, names: Sequence[str]) -> None:
    for name in names:
        (directory / name).unlink(missing_ok=True)


def _remove_tree(path: Path) -> None:
    if _is_link(path) or path.is_file():
        path.unlink(missing_ok=True)
        return
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        if os.path.lexists(path):  # only a file below it vanished meanwhile, so the removal is not complete
            shutil.rmtree(path)


async def each_status(storage: Storage, directory: Path, names: Sequence[str]) -> list[FileStatus | ReadError | None]:
    """Return what :meth:`Storage.statuses` does, by one call of ``storage.status`` for each file."""

    async def of(path: Path) -> FileStatus | ReadError | None:
        try:
            return await storage.status(path)
        except ReadError as error:
            return error

    return await asyncio.gather(*(of(directory / name) for name in names))


async def names_in(storage: Storage, path: Path) -> list[str]:
    """Return the names in a directory, sorted; an empty list if the directory does not exist."""
    try:
        return await storage.list_dir(path)
    except ReadError as error:
        # It may be made in this moment, so that "not found" counts whatever a second look would tell. A store that does
        # not answer is not asked again.
        if error.errno != errno.ENOENT and (isinstance(path, RemotePath) or await storage.exists(path)):
            raise
        return []
