"""Object stores, by the calls of :class:`~aio_ckpt.storage.local.Storage`.

Every call is one of obstore's *blocking* calls, in a thread of the engine. (Its async calls abort the interpreter at
exit: a thread of its runtime wakes while the interpreter is finalized.) A store has no directories: a directory exists
while it holds an object; :mod:`~aio_ckpt.storage.object_directories` moves those of checkpoints. An object is durable
once the call that put it has returned, and no answer of a store is old.
"""

from __future__ import annotations

import errno
import functools
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, cast

from aio_ckpt.config import DirectIO
from aio_ckpt.errors import EngineForkedError, MismatchError, ReadError, RootError, WriteError
from aio_ckpt.remote_path import Place, RemotePath, place_of
from aio_ckpt.runtime.portal import Executor
from aio_ckpt.storage import object_directories
from aio_ckpt.storage.clone import Stamp
from aio_ckpt.storage.data_file import DataFile, ReadFile
from aio_ckpt.storage.direct_io import PageCache
from aio_ckpt.storage.durability import sync_file
from aio_ckpt.storage.local import Coro, FileStatus, Storage, each_status
from aio_ckpt.storage.object_client import COMMITS, DOWNLOADS, UPLOADS, open_store, with_limits
from aio_ckpt.storage.object_errors import DoubtfulError, raising_os_errors
from aio_ckpt.storage.object_upload import PART_BYTES, ObjectUpload, part_bytes_of
from aio_ckpt.storage.os_errors import translate_errors
from aio_ckpt.storage.root_lock import ProcessLock, RootLock

if TYPE_CHECKING:
    from obstore import GetResult

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_MODE = 0o644
_UPLOADS = 11
"""Parts of an object that are sent at once, which bound the memory of an upload.

On 16 cores, of which 8 were the server's, 8 parts at once reached 0.85 of the speed of 12.
"""
_RANGE_BYTES = 64 << 20
"""Bytes that one request gets of an object that becomes a file. A request for all of them may last too long."""


def is_object(place: RemotePath) -> bool:
    """Return whether an object has this very name: not a directory. Blocks.

    Raises:
        ConfigError: see :func:`open_store`.
        OSError: the store did not answer.
    """
    import obstore

    try:
        raising_os_errors(place, obstore.head, open_store(place), place.key)
    except FileNotFoundError:
        return False
    return True


@functools.cache
def _first_process() -> int:
    """Return the process that used obstore first. A fork gets this cache with all else."""
    return os.getpid()


class ObjectStorage(Storage):
    """Objects of one bucket, by the paths of :class:`~aio_ckpt.remote_path.RemotePath`.

    A path is the same object on every host.
    """

    def __init__(self, executor: Executor, store: Any) -> None:
        """``store`` is any store of obstore, with the limits of a commit.

        Raises:
            EngineForkedError: the process of which this one is a fork has used obstore, whose threads are not here.
        """
        if (first := _first_process()) != os.getpid():
            raise EngineForkedError(
                f"process {first} has used object stores, and this is its fork, where each request would hang: start "
                "this process with the method 'spawn' or 'forkserver' (of DataLoader: multiprocessing_context=)"
            )
        super().__init__(executor)
        self._store = store
        self._bucket = object_directories.Bucket(store)

    @functools.cached_property
    def _uploads(self) -> Any:
        """Client that puts data files."""
        return with_limits(self._store, UPLOADS)

    @functools.cached_property
    def _downloads(self) -> Any:
        """Client that gets data files."""
        return with_limits(self._store, DOWNLOADS)

    async def _run(self, kind: type[WriteError | ReadError], path: Path, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        try:
            return await super()._run(kind, path, raising_os_errors, path, fn, *args)
        except WriteError as error:
            error.in_doubt = isinstance(error.__cause__, DoubtfulError)
            raise

    def read_file(self, path: Path, *, max_bytes: int) -> Coro[bytes]:
        """Get a whole object."""
        return self._run(ReadError, path, self._get, path, max_bytes)

    def _get(self, path: Path, max_bytes: int) -> bytes:
        import obstore

        found = obstore.get(self._store, _key(path))
        if found.meta["size"] > max_bytes:
            raise MismatchError(f"{path}: {found.meta['size']} bytes long, at most {max_bytes} are expected")
        return bytes(found.bytes())

    def read_end(self, path: Path, nbytes: int) -> Coro[bytes]:
        """Get the end of an object."""
        return self._run(ReadError, path, self._get_end, path, nbytes)

    def _get_end(self, path: Path, nbytes: int) -> bytes:
        import obstore

        length = obstore.head(self._store, _key(path))["size"]
        if not length or not nbytes:
            return b""
        found = obstore.get(self._store, _key(path), options={"range": (max(length - nbytes, 0), length)})
        return bytes(found.bytes())

    async def list_dir(self, path: Path) -> list[str]:
        """List what lies directly below a prefix. If nothing does, the directory does not exist."""
        return await self._run(ReadError, path, self._names, path)

    def _names(self, path: Path) -> list[str]:
        import obstore

        found = obstore.list_with_delimiter(self._store, _key(path) or None)
        keys = [*found["common_prefixes"], *(each["path"] for each in found["objects"])]
        if not keys and _key(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return sorted(key.rpartition("/")[2] for key in keys)

    def lengths(self, path: Path) -> Coro[dict[str, int]]:
        """Return the length in bytes of each object directly below a prefix, by its name."""
        return self._run(ReadError, path, self._lengths, path)

    def _lengths(self, path: Path) -> dict[str, int]:
        import obstore

        found = obstore.list_with_delimiter(self._store, _key(path) or None)
        return {each["path"].rpartition("/")[2]: each["size"] for each in found["objects"]}

    def status(self, path: Path) -> Coro[FileStatus | None]:
        """Return the status of an object, or of a directory that holds one; None if there is neither."""
        return self._run(ReadError, path, self._status, path)

    def statuses(self, directory: Path, names: Sequence[str]) -> Coro[list[FileStatus | ReadError | None]]:
        """Return the status of each object below a directory: one request in each free thread."""
        return each_status(self, directory, names)

    def fresh_status(self, path: Path) -> Coro[FileStatus | None]:
        """Return :meth:`status`: no answer is old."""
        return self.status(path)

    def _status(self, path: Path) -> FileStatus | None:
        import obstore

        try:
            found = obstore.head(self._store, _key(path))
        except FileNotFoundError:
            listed = obstore.list_with_delimiter(self._store, _key(path))
            is_directory = bool(listed["common_prefixes"] or listed["objects"])
            return FileStatus(identity=(0, 0, 0), modified_unix=0.0, mode=_MODE) if is_directory else None
        modified_unix = found["last_modified"].timestamp()
        tag = zlib.crc32((found["e_tag"] or "").encode())
        return FileStatus(
            identity=(tag, found["size"], int(modified_unix * 1e9)), modified_unix=modified_unix, mode=_MODE
        )

    async def first_link(self, *paths: Path) -> None:
        """Return None: a store has no links."""

    async def open_data_file(self, path: Path, *, page_cache: PageCache = "pass") -> ReadFile:
        """Look at an object, whose ranges are then read. ``page_cache`` counts for disks."""
        del page_cache
        nbytes, tag = await self._run(ReadError, path, self._head, path)
        return _ObjectFile(self, path, nbytes, tag)

    def _head(self, path: Path) -> tuple[int, str | None]:
        import obstore

        found = obstore.head(self._store, _key(path))
        return found["size"], found["e_tag"]

    def read_range(self, path: Path, tag: str | None, offset: int, views: list[memoryview]) -> int:
        """Fill ``views`` from ``offset`` of an object, and return the number of bytes. Blocks.

        Raises:
            OSError: ESTALE if the object is not the one of the ETag ``tag`` any more.
        """
        import numpy as np  # copies without the interpreter's lock, unlike a memoryview

        end = offset + sum(view.nbytes for view in views)
        data = rest = np.frombuffer(memoryview(self._get_range(path, tag, offset, end).bytes()), np.uint8)
        for view in views:
            taken, rest = rest[: view.nbytes], rest[view.nbytes :]
            np.frombuffer(view, np.uint8)[: len(taken)] = taken
        return len(data)

    def _get_range(self, path: Path, tag: str | None, begin: int, end: int) -> GetResult:
        import obstore

        options: Any = {"range": (begin, end)} | ({} if tag is None else {"if_match": tag})
        return obstore.get(self._downloads, _key(path), options=options)

    # -- files ------------------------------------------------------------------------------------------

    async def create_data_file(self, path: Path, nbytes: int) -> DataFile:
        """Begin an object of ``nbytes``, which several tasks write. It exists once it is synced."""

        def put(parts: Iterator[memoryview]) -> None:
            raising_os_errors(path, self._put_parts, path, nbytes, parts)

        return ObjectUpload(path, put)

    def _put_parts(self, path: Path, nbytes: int, parts: Iterator[bytes] | Iterator[memoryview]) -> None:
        import obstore

        obstore.put(self._uploads, _key(path), parts, chunk_size=part_bytes_of(nbytes), max_concurrency=_UPLOADS)

    def stamp(self, path: Path) -> Coro[Stamp]:
        """Return ETag and length of an object."""
        return self._run(ReadError, path, self._stamp, path)

    def _stamp(self, path: Path) -> Stamp:
        nbytes, tag = self._head(path)
        return tag or "", nbytes

    def clone(self, source: Path, target: Path, stamp: Stamp) -> Coro[Stamp | None]:
        """Let the store copy an object, which S3 does up to 5 GiB. The copy needs no traffic."""
        return self._run(WriteError, target, self._clone, source, target, stamp)

    def _clone(self, source: Path, target: Path, stamp: Stamp) -> Stamp | None:
        import obstore
        from obstore.exceptions import BaseError

        try:
            if self._stamp(source) == stamp:
                obstore.copy(self._store, _key(source), _key(target))
                return self._stamp(target)
        except (OSError, BaseError):  # a caller that gets no clone puts the object, and then meets what is wrong
            return None
        return None

    def write_file(self, path: Path, *parts: bytes) -> Coro[None]:
        """Put an object, which must not exist."""
        return self._run(WriteError, path, self._bucket.create, _key(path), b"".join(parts))

    def put_file(self, source: Path, path: Path, advance: Callable[[int], None]) -> Coro[None]:
        """Put a file of this host, or replace an object by it. ``advance`` is called with the bytes read since."""
        return self._run(WriteError, path, self._put_file, source, path, advance)

    def _put_file(self, source: Path, path: Path, advance: Callable[[int], None]) -> None:
        with source.open("rb", buffering=0) as file:

            def parts() -> Iterator[bytes]:
                while data := file.read(PART_BYTES):
                    yield data
                    advance(len(data))

            self._put_parts(path, os.fstat(file.fileno()).st_size, parts())

    def all_lengths(self, path: Path) -> Coro[dict[str, int]]:
        """Return the length in bytes of each object below a prefix, at whatever depth, by its name below it."""
        return self._run(ReadError, path, self._bucket.lengths, _key(path))

    def get_file(self, path: Path, target: Path, advance: Callable[[int], None]) -> Coro[None]:
        """Get an object as a new file of this host, durably. ``advance`` is called with the bytes written since."""
        return self._run(ReadError, path, self._get_file, path, target, advance)

    def _get_file(self, path: Path, target: Path, advance: Callable[[int], None]) -> None:

        nbytes, tag = self._head(path)
        with translate_errors(WriteError, target):
            target.parent.mkdir(parents=True, exist_ok=True)
            file = target.open("xb")
        with file:
            for offset in range(0, nbytes, _RANGE_BYTES):
                found = self._get_range(path, tag, offset, min(offset + _RANGE_BYTES, nbytes))
                for part in found.stream(PART_BYTES):
                    with translate_errors(WriteError, target):
                        file.write(part)
                    advance(memoryview(part).nbytes)
            with translate_errors(WriteError, target):
                file.flush()
                sync_file(file.fileno())

    def remove_file(self, path: Path) -> Coro[None]:
        """Delete an object. Do nothing if it does not exist."""
        return self._run(WriteError, path, self._bucket.delete, _key(path))

    def replace_file(self, path: Path, data: bytes) -> Coro[None]:
        """Put an object, in the place of another one if there is one."""
        return self._run(WriteError, path, self._bucket.put, _key(path), data)

    def touch(self, path: Path) -> Coro[None]:
        """Put an existing object anew, with its own content. Fails if another one takes its place meanwhile."""
        return self._run(WriteError, path, self._put_anew, path)

    def _put_anew(self, path: Path) -> None:
        data, version = self._bucket.get_version(_key(path))
        if data is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        self._bucket.put(_key(path), data, version)

    # -- directories ------------------------------------------------------------------------------------

    async def make_dir(self, path: Path) -> None:
        """Do nothing: a directory is there with its first object."""

    async def make_dirs(self, *paths: Path) -> None:
        """Do nothing, as :meth:`make_dir`."""

    async def sync_dir(self, path: Path) -> None:
        """Do nothing: what was put is durable."""

    async def begin_dir(self, pending: Path, place: Path, save_id: str) -> None:
        """See :func:`~aio_ckpt.storage.object_directories.begin`."""
        begin = object_directories.begin
        await self._run(WriteError, pending, begin, self._bucket, _key(pending), _key(place), save_id)

    async def has_begun(self, pending: Path) -> bool:
        """Look for the record, which is one request, and not a listing."""
        return await self.exists(pending / object_directories.RECORD_FILE)

    def name_files(self, pending: Path, files: Sequence[str]) -> Coro[None]:
        """See :func:`~aio_ckpt.storage.object_directories.name_files`."""
        return self._run(WriteError, pending, object_directories.name_files, self._bucket, _key(pending), files)

    def rename(self, src: Path, dst: Path) -> Coro[None]:
        """Move a directory or an object, see :func:`~aio_ckpt.storage.object_directories.move`."""
        return self._run(WriteError, dst, object_directories.move, self._bucket, _key(src), _key(dst))

    def replace(self, src: Path, dst: Path) -> Coro[None]:
        """See :func:`~aio_ckpt.storage.object_directories.replace`."""
        return self._run(WriteError, dst, object_directories.replace, self._bucket, _key(src), _key(dst))

    def supersede(self, pending: Path, place: Path) -> Coro[None]:
        """See :func:`~aio_ckpt.storage.object_directories.supersede`."""
        return self._run(WriteError, place, object_directories.supersede, self._bucket, _key(pending), _key(place))

    def remove_tree(self, path: Path) -> Coro[None]:
        """Remove what lies below ``path``, see :func:`~aio_ckpt.storage.object_directories.remove_tree`."""
        return self._run(WriteError, path, object_directories.remove_tree, self._bucket, _key(path))

    def lock(self, path: Path) -> RootLock:
        """Return a lock that excludes other engines of this process. Its file shows the time of the store.

        Raises:
            RootError: another engine of this process holds it; the store failed, or refuses the put; or it ignores
                conditions, and so could not exclude a second writer.
        """
        return ProcessLock(path, functools.partial(self._prove_conditions, path))

    def _prove_conditions(self, path: Path) -> None:
        try:
            raising_os_errors(path, self._bucket.put, _key(path), b"")
            raising_os_errors(path, self._bucket.create, _key(path), b"on the condition that there is no such object")
        except FileExistsError:
            return
        except OSError as error:
            raise RootError(error.errno, error.strerror, str(path)) from error
        text = "the store ignores the condition of a put (If-None-Match), and so cannot exclude a second writer: use a "
        raise RootError(errno.EOPNOTSUPP, text + "store that has conditional puts, or a root on a disk", str(path))


class Unpublished(ObjectStorage):
    """A checkpoint in a store of which some files are not put yet: they are read from memory, all others from there."""

    def __init__(self, store: ObjectStorage, files: Mapping[Path, bytes]) -> None:
        """``files``: what is to be put, by its place."""
        super().__init__(store._executor, store._store)
        self._files = files

    async def read_file(self, path: Path, *, max_bytes: int) -> bytes:
        return self._files[path] if path in self._files else await super().read_file(path, max_bytes=max_bytes)

    async def read_end(self, path: Path, nbytes: int) -> bytes:
        return self._files[path][-nbytes:] if path in self._files else await super().read_end(path, nbytes)

    def status(self, path: Path) -> Coro[FileStatus | None]:
        return super().status(path.parent if path in self._files else path)


class _ObjectFile(ReadFile):
    """Object whose ranges several tasks read at once."""

    def __init__(self, storage: ObjectStorage, path: Path, nbytes: int, tag: str | None) -> None:
        self.path = path
        self.nbytes = nbytes
        self.is_direct = False
        self._storage = storage
        self._tag = tag

    async def read_into(self, offset: int, *views: memoryview) -> int:
        left = [view.cast("B") for view in views if view.nbytes]
        if not left or offset >= self.nbytes:
            return 0
        return await self._storage._run(
            ReadError, self.path, self._storage.read_range, self.path, self._tag, offset, left
        )

    async def close(self) -> None:
        """Nothing is held."""


def _by_path(method: F) -> F:
    """Return ``method``, called on the file systems of this host or on the store in which its first path lies."""

    @functools.wraps(method)
    def call(self: AnyStorage, path: Path, *args: Any, **options: Any) -> Any:
        return getattr(self._at(path), method.__name__)(path, *args, **options)

    return cast("F", call)


class AnyStorage(Storage):
    """The file systems of this host, and each object store that a path names."""

    def __init__(self, executor: Executor, direct_io: DirectIO = "auto", given: Iterable[Place] = ()) -> None:
        """``given``: places of a caller. Of these, store objects are used; other stores are opened by their URL."""
        super().__init__(executor, direct_io)
        self._disks = Storage(executor, direct_io)
        self._stores: dict[str, ObjectStorage] = {}
        for value in given:
            place = place_of("root", value)
            if isinstance(place, RemotePath) and place is not value:
                self._stores[place.bucket_url] = ObjectStorage(executor, with_limits(value, COMMITS))

    def store_of(self, place: RemotePath) -> ObjectStorage:
        """Return the storage of a bucket, which is opened at its first use.

        Raises:
            ConfigError: see :func:`open_store`.
        """
        if place.bucket_url not in self._stores:
            self._stores[place.bucket_url] = ObjectStorage(self._executor, open_store(place))
        return self._stores[place.bucket_url]

    def _at(self, path: Path) -> Storage:
        return self.store_of(path) if isinstance(path, RemotePath) else self._disks

    read_file = _by_path(Storage.read_file)
    read_end = _by_path(Storage.read_end)
    list_dir = _by_path(Storage.list_dir)
    lengths = _by_path(Storage.lengths)
    status = _by_path(Storage.status)
    statuses = _by_path(Storage.statuses)
    fresh_status = _by_path(Storage.fresh_status)
    first_link = _by_path(Storage.first_link)
    open_data_file = _by_path(Storage.open_data_file)
    create_data_file = _by_path(Storage.create_data_file)
    stamp = _by_path(Storage.stamp)
    clone = _by_path(Storage.clone)
    write_file = _by_path(Storage.write_file)
    make_dir = _by_path(Storage.make_dir)
    make_dirs = _by_path(Storage.make_dirs)
    begin_dir = _by_path(Storage.begin_dir)
    has_begun = _by_path(Storage.has_begun)
    sync_dir = _by_path(Storage.sync_dir)
    touch = _by_path(Storage.touch)
    rename = _by_path(Storage.rename)
    replace = _by_path(Storage.replace)
    remove_file = _by_path(Storage.remove_file)
    remove_tree = _by_path(Storage.remove_tree)
    lock = _by_path(Storage.lock)


def store_of(storage: Storage, place: RemotePath) -> ObjectStorage:
    """Return the object store of ``place``, which ``storage`` is or knows."""
    if isinstance(storage, AnyStorage):
        return storage.store_of(place)
    assert isinstance(storage, ObjectStorage), f"{place} in {storage!r}"
    return storage


def _key(path: Path) -> str:
    assert isinstance(path, RemotePath), f"{path!s} is on a disk"
    return path.key
