"""Base of the storages under test control: every call goes to a storage inside, through one of three methods."""

from __future__ import annotations

import fnmatch
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from aio_ckpt.errors import ReadError
from aio_ckpt.storage.clone import Stamp
from aio_ckpt.storage.data_file import DataFile, ReadFile
from aio_ckpt.storage.direct_io import PageCache
from aio_ckpt.storage.local import FileStatus, Storage
from aio_ckpt.storage.root_lock import RootLock

__all__ = ["Call", "ForwardingDataFile", "ForwardingStorage"]

T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """One call of the storage, or of one of its files: write, sync, close, read_into, close_read."""

    name: str
    path: Path
    other: Path | None = None
    """Second path of a rename."""
    data: bytes = field(default=b"", repr=False)
    """Content of a file that is written whole."""

    def matches(self, name: str, where: str) -> bool:
        """Whether the call is a ``name``, and ``where``, a pattern, fits the last part of ``path``, or its last two."""
        last = self.path.name if "/" not in where else f"{self.path.parent.name}/{self.path.name}"
        return self.name == name and fnmatch.fnmatch(last, where)


class ForwardingStorage(Storage):
    """Forwards every call to ``inner``. A subclass overrides the method that the calls of interest come through."""

    def __init__(self, inner: Storage) -> None:
        self._inner = inner
        self._executor = inner._executor

    async def run(self, call: Call, act: Callable[[], Awaitable[T]]) -> T:
        """A call that changes something; ``act()`` makes it."""
        return await act()

    async def run_read(self, call: Call, act: Callable[[], Awaitable[T]]) -> T:
        """A call that changes nothing."""
        return await act()

    async def run_close(self, call: Call, close: Callable[[], Awaitable[None]]) -> None:
        """The end of a file that was written (``close``) or read (``close_read``)."""
        await close()

    async def create_data_file(self, path: Path, nbytes: int) -> DataFile:
        """The calls of the file that is returned come through this storage, too."""
        made = await self.run(Call("create_data_file", path), lambda: self._inner.create_data_file(path, nbytes))
        return ForwardingDataFile(self, made)

    async def open_data_file(self, path: Path, *, page_cache: PageCache = "pass") -> ReadFile:
        """The calls of the file that is returned come through this storage, too."""
        opened = await self.run_read(
            Call("open_data_file", path),
            lambda: self._inner.open_data_file(path, page_cache=page_cache),
        )
        return _ForwardingReadFile(self, opened)

    async def stamp(self, path: Path) -> Stamp:
        return await self.run_read(Call("stamp", path), lambda: self._inner.stamp(path))

    async def clone(self, source: Path, target: Path, stamp: Stamp) -> Stamp | None:
        return await self.run(Call("clone", source, target), lambda: self._inner.clone(source, target, stamp))

    async def write_file(self, path: Path, *parts: bytes) -> None:
        await self.run(Call("write_file", path, data=b"".join(parts)), lambda: self._inner.write_file(path, *parts))

    async def read_file(self, path: Path, *, max_bytes: int) -> bytes:
        return await self.run_read(Call("read_file", path), lambda: self._inner.read_file(path, max_bytes=max_bytes))

    async def read_end(self, path: Path, nbytes: int) -> bytes:
        return await self.run_read(Call("read_file", path), lambda: self._inner.read_end(path, nbytes))

    async def has_begun(self, pending: Path) -> bool:
        return await self.run_read(Call("exists", pending), lambda: self._inner.has_begun(pending))

    async def make_dir(self, path: Path) -> None:
        await self.run(Call("make_dir", path), lambda: self._inner.make_dir(path))

    async def make_dirs(self, *paths: Path) -> None:
        await self.run(Call("make_dirs", paths[0]), lambda: self._inner.make_dirs(*paths))

    async def sync_dir(self, path: Path) -> None:
        await self.run(Call("sync_dir", path), lambda: self._inner.sync_dir(path))

    async def list_dir(self, path: Path) -> list[str]:
        return await self.run_read(Call("list_dir", path), lambda: self._inner.list_dir(path))

    async def exists(self, path: Path) -> bool:
        return await self.run_read(Call("exists", path), lambda: self._inner.exists(path))

    async def status(self, path: Path) -> FileStatus | None:
        return await self.run_read(Call("status", path), lambda: self._inner.status(path))

    async def statuses(self, directory: Path, names: Sequence[str]) -> list[FileStatus | ReadError | None]:
        if not names:  # which needs no call of the system
            return []
        return await self.run_read(Call("status", directory), lambda: self._inner.statuses(directory, names))

    async def fresh_status(self, path: Path) -> FileStatus | None:
        return await self.run_read(Call("status", path), lambda: self._inner.fresh_status(path))

    async def first_link(self, *paths: Path) -> Path | None:
        return await self.run_read(Call("first_link", paths[0]), lambda: self._inner.first_link(*paths))

    async def free_bytes(self, path: Path) -> int:
        return await self.run_read(Call("free_bytes", path), lambda: self._inner.free_bytes(path))

    async def touch(self, path: Path) -> None:
        await self.run(Call("touch", path), lambda: self._inner.touch(path))

    async def set_mode(self, path: Path, mode: int) -> None:
        await self.run(Call("set_mode", path), lambda: self._inner.set_mode(path, mode))

    async def rename(self, src: Path, dst: Path) -> None:
        await self.run(Call("rename", src, dst), lambda: self._inner.rename(src, dst))

    async def exchange(self, a: Path, b: Path) -> None:
        await self.run(Call("exchange", a, b), lambda: self._inner.exchange(a, b))

    async def replace(self, src: Path, dst: Path) -> None:
        await self.run(Call("replace", src, dst), lambda: self._inner.replace(src, dst))

    async def remove_file(self, path: Path) -> None:
        await self.run(Call("remove_file", path), lambda: self._inner.remove_file(path))

    async def remove_tree(self, path: Path) -> None:
        await self.run(Call("remove_tree", path), lambda: self._inner.remove_tree(path))

    def lock(self, path: Path) -> RootLock:
        return self._inner.lock(path)


class ForwardingDataFile(DataFile):
    """A data file of :class:`ForwardingStorage`."""

    def __init__(self, storage: ForwardingStorage, inner: DataFile) -> None:
        self.path = inner.path
        self.mode = inner.mode
        self._storage = storage
        self._inner = inner

    async def write(self, offset: int, data: memoryview) -> None:
        await self._storage.run(Call("write", self.path), lambda: self._inner.write(offset, data))

    async def sync(self) -> None:
        await self._storage.run(Call("sync", self.path), self._inner.sync)

    async def close(self) -> None:
        await self._storage.run_close(Call("close", self.path), self._inner.close)


class _ForwardingReadFile(ReadFile):
    def __init__(self, storage: ForwardingStorage, inner: ReadFile) -> None:
        self.path = inner.path
        self.nbytes = inner.nbytes
        self.is_direct = inner.is_direct
        self._storage = storage
        self._inner = inner

    async def read_into(self, offset: int, *views: memoryview) -> int:
        return await self._storage.run_read(Call("read_into", self.path), lambda: self._inner.read_into(offset, *views))

    async def close(self) -> None:
        await self._storage.run_close(Call("close_read", self.path), self._inner.close)
