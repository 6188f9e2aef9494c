"""A storage over the local file system that counts its calls and lets one of them fail."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from aio_ckpt.errors import ReadError, RootError, WriteError
from aio_ckpt.reports import WriteMode
from aio_ckpt.storage.local import DataFile, FileStatus, ReadFile, Storage
from aio_ckpt.storage.lock import RootLock

__all__ = ["CALLS", "ERRORS", "SYNCS", "Call", "Fault", "FaultStorage"]

T = TypeVar("T")
ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EINTR)
"""What a disk answers when it is full, broken, used up, or disturbed."""
READS = frozenset({"open_data_file", "read_file", "list_dir", "exists", "status", "read_into", "close_read"})
CALLS = READS | {"lock", "create_data_file", "write", "sync", "close", "write_file", "make_dir", "sync_dir"}
CALLS |= {"rename", "exchange", "replace", "remove_file", "remove_tree", "touch"}
"""Every call."""
SYNCS = frozenset({"sync", "sync_dir", "write_file"})
"""Calls that end with an fsync."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the storage or of one of its files."""

    name: str
    """Of the method; ``close_read`` is the end of a file that was read."""
    path: Path
    """What its error names."""
    source: Path | None = None
    """What is renamed or exchanged."""

    def error(self, code: int) -> OSError:
        """What the local storage raises when the system answers ``code``."""
        kind: type[ReadError | WriteError | RootError]
        kind = RootError if self.name == "lock" else ReadError if self.name in READS else WriteError
        failure = kind(code, os.strerror(code), str(self.path))
        failure.__cause__ = OSError(code, os.strerror(code), str(self.path))
        return failure

    def __str__(self) -> str:
        return f"{self.name}({self.path.name})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens to the call that it is armed for."""

    name: str
    """Of the class in the report."""
    code: int = 0
    """errno of the error that is raised; 0: none."""
    counts: frozenset[str] | None = None
    """Calls that are counted; None: all."""
    is_late: bool = False
    """The call does its work, then it fails."""
    is_lasting: bool = False
    """Every later call fails as well."""
    is_slow: bool = False
    """The call does not end until it is given up."""


class FaultStorage:
    """Counts and logs every call; lets the n-th fail."""

    def __init__(self, inner: Storage) -> None:
        self._inner = inner
        self._fault: Fault | None = None
        self._left = 0
        self._on_hit: Callable[[], object] = _nothing
        self.hit: Call | None = None
        """The call that failed."""
        self.struck: list[Call] = []
        """All that failed: more than one where a fault lasts."""
        self.done_at_hit = 0
        """How many of ``done`` had ended by then."""
        self.begun: list[Call] = []
        """Calls since it was armed, as they began."""
        self.done: list[Call] = []
        """Those that ended well, as they ended."""

    def arm(self, fault: Fault, number: int, on_hit: Callable[[], object] | None = None) -> None:
        """Let the call ``number`` (from 1) fail; ``on_hit`` is called just before."""
        self.begun, self.done = [], []
        self.hit, self.struck, self.done_at_hit = None, [], 0
        self._fault, self._left, self._on_hit = fault, number, on_hit or _nothing

    def disarm(self) -> Call | None:
        """Fail no more; the first call that failed."""
        self._fault = None
        return self.hit

    def _strikes(self, call: Call) -> Fault | None:
        fault = self._fault
        self.begun.append(call)
        if fault is None or (fault.counts is not None and call.name not in fault.counts):
            return None
        self._left -= 1
        if self._left and not (fault.is_lasting and self._left < 0):
            return None
        self.struck.append(call)
        if self.hit is None:
            self.hit, self.done_at_hit = call, len(self.done)
            self._on_hit()
        return fault

    async def run(self, call: Call, act: Callable[[], Awaitable[T]]) -> T:
        """``act()``, unless this is the call that fails."""
        fault = self._strikes(call)
        if fault is not None and fault.is_slow:
            await asyncio.Event().wait()
        if fault is not None and fault.code and not fault.is_late:
            raise call.error(fault.code)
        result = await act()
        if fault is not None and fault.code:
            raise call.error(fault.code)
        self.done.append(call)
        return result

    async def create_data_file(self, path: Path, nbytes: int, *, writers: int) -> DataFile:
        """Counted; so are the writes, the sync and the close of what it returns."""
        call = Call("create_data_file", path)
        return _FaultDataFile(
            self, await self.run(call, lambda: self._inner.create_data_file(path, nbytes, writers=writers))
        )

    async def open_data_file(self, path: Path, *, readers: int, shared: bool = False) -> ReadFile:
        """Counted; so are the reads and the close of what it returns."""
        call = Call("open_data_file", path)
        return _FaultReadFile(
            self, await self.run(call, lambda: self._inner.open_data_file(path, readers=readers, shared=shared))
        )

    async def write_file(self, path: Path, *parts: bytes) -> None:
        """Counted."""
        await self.run(Call("write_file", path), lambda: self._inner.write_file(path, *parts))

    async def read_file(self, path: Path, *, max_bytes: int) -> bytes:
        """Counted."""
        return await self.run(Call("read_file", path), lambda: self._inner.read_file(path, max_bytes=max_bytes))

    async def make_dir(self, path: Path, *, parents: bool = False) -> None:
        """Counted."""
        await self.run(Call("make_dir", path), lambda: self._inner.make_dir(path, parents=parents))

    async def sync_dir(self, path: Path) -> None:
        """Counted."""
        await self.run(Call("sync_dir", path), lambda: self._inner.sync_dir(path))

    async def list_dir(self, path: Path) -> list[str]:
        """Counted."""
        return await self.run(Call("list_dir", path), lambda: self._inner.list_dir(path))

    async def exists(self, path: Path) -> bool:
        """Counted."""
        return await self.run(Call("exists", path), lambda: self._inner.exists(path))

    async def status(self, path: Path) -> FileStatus | None:
        """Counted."""
        return await self.run(Call("status", path), lambda: self._inner.status(path))

    async def touch(self, path: Path) -> None:
        """Counted."""
        await self.run(Call("touch", path), lambda: self._inner.touch(path))

    async def rename(self, src: Path, dst: Path) -> None:
        """Counted."""
        await self.run(Call("rename", dst, src), lambda: self._inner.rename(src, dst))

    async def exchange(self, a: Path, b: Path) -> None:
        """Counted."""
        await self.run(Call("exchange", b, a), lambda: self._inner.exchange(a, b))

    async def replace(self, src: Path, dst: Path) -> None:
        """Counted."""
        await self.run(Call("replace", dst, src), lambda: self._inner.replace(src, dst))

    async def remove_file(self, path: Path) -> None:
        """Counted."""
        await self.run(Call("remove_file", path), lambda: self._inner.remove_file(path))

    async def remove_tree(self, path: Path) -> None:
        """Counted."""
        await self.run(Call("remove_tree", path), lambda: self._inner.remove_tree(path))

    def lock(self, path: Path) -> RootLock:
        """Counted; it blocks nobody, so it is never slow."""
        fault = self._strikes(Call("lock", path))
        if fault is not None and fault.code:
            raise Call("lock", path).error(fault.code)
        return self._inner.lock(path)


class _FaultDataFile:
    """A data file whose calls are its storage's to count."""

    def __init__(self, storage: FaultStorage, inner: DataFile) -> None:
        self._storage = storage
        self._inner = inner

    @property
    def path(self) -> Path:
        """Where it is."""
        return self._inner.path

    @property
    def mode(self) -> WriteMode:
        """How it is written."""
        return self._inner.mode

    async def write(self, offset: int, data: memoryview) -> None:
        """Counted."""
        await self._storage.run(Call("write", self.path), lambda: self._inner.write(offset, data))

    async def sync(self) -> None:
        """Counted."""
        await self._storage.run(Call("sync", self.path), self._inner.sync)

    async def close(self) -> None:
        """Counted; what fails here has closed, as in the system."""
        await _close(self._storage, Call("close", self.path), self._inner.close)


class _FaultReadFile:
    """A file to be read whose calls are its storage's to count."""

    def __init__(self, storage: FaultStorage, inner: ReadFile) -> None:
        self._storage = storage
        self._inner = inner

    @property
    def path(self) -> Path:
        """Where it is."""
        return self._inner.path

    @property
    def nbytes(self) -> int:
        """Its length."""
        return self._inner.nbytes

    @property
    def direct(self) -> bool:
        """Whether aligned reads are direct."""
        return self._inner.direct

    async def read_into(self, offset: int, *views: memoryview) -> int:
        """Counted."""
        return await self._storage.run(Call("read_into", self.path), lambda: self._inner.read_into(offset, *views))

    async def close(self) -> None:
        """Counted; what fails here has closed, as in the system."""
        await _close(self._storage, Call("close_read", self.path), self._inner.close)


async def _close(storage: FaultStorage, call: Call, close: Callable[[], Awaitable[Any]]) -> None:
    await close()
    await storage.run(call, _return)


async def _return() -> None:
    return None


def _nothing() -> None:
    return None
