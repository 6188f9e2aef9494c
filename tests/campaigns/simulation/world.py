"""What a simulated save runs on: a virtual clock, threads that end in a drawn order, a disk that knows what is durable,
and other hosts, whose answers about the disk may be old.

The loop is asyncio's own over a selector that never sleeps. Two libraries were looked at: ``aiotools.VirtualClock``
spins for ever where nothing is scheduled any more, which here must be found; ``looptime`` waits in real time for
executors, and theirs are simulated here.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import selectors
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from unittest import mock

from aio_ckpt.errors import CorruptCheckpointError, ReadError, WriteError
from aio_ckpt.memory.arena import POISON
from aio_ckpt.reports import WriteMode
from aio_ckpt.runtime.portal import ON_SUBMIT, Executor, run_blocking
from aio_ckpt.storage.data_file import DataFile, ReadFile
from aio_ckpt.storage.direct_io import PageCache
from aio_ckpt.storage.local import FileStatus, Storage
from aio_ckpt.storage.root_lock import RootLock

__all__ = [
    "Chances",
    "DeadlockError",
    "Directory",
    "File",
    "HostStorage",
    "SimStorage",
    "SimThreads",
    "virtual_loop",
]

P = ParamSpec("P")
T = TypeVar("T")
_POISON = bytes([POISON]) * 64
HANG_SECS = 50_000.0
"""A call that hangs ends after so long: no wait of a save is as patient."""


class DeadlockError(AssertionError):
    """Every task waits for something that nobody will do."""


class _NoSleep(selectors.SelectSelector):
    """Moves the clock instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def time(self) -> float:
        return self.now

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise DeadlockError
            # Time passes in each turn, as it does on a machine: a wait whose rest is lost by rounding ends, too.
            self.now += max(timeout, 1e-9)
        return ready


@contextlib.contextmanager
def virtual_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """A loop on a clock of its own, which ``time.monotonic`` and ``time.perf_counter`` show too."""
    selector = _NoSleep()
    loop = asyncio.SelectorEventLoop(selector)
    with mock.patch("time.monotonic", selector.time), mock.patch("time.perf_counter", selector.time):
        try:
            yield loop
        finally:
            loop.close()


# -- threads ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Chances:
    """How often what goes wrong in one run."""

    fails: float = 0.0
    """A call of the storage raises."""
    hangs: float = 0.0
    """A call of the storage takes ``HANG_SECS``."""
    slow: float = 0.0
    """A call takes a hundred times as long."""


class SimThreads(Executor):
    """The engine's threads: work begins in the order of submission and ends after a drawn time, when it takes effect.

    Work that has begun goes on when its await was cancelled, as that of a thread does.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        rng: random.Random,
        threads: int,
        chances: Chances,
        *,
        mean_secs: float = 0.01,
    ) -> None:
        # Not the base class's: it would start threads.
        self._loop = loop
        self._rng = rng
        self._free = threads
        self._chances = chances
        self._mean_secs = mean_secs
        self._waiting: list[tuple[Future[Any], Callable[[], Any]]] = []
        self.has_hung = False
        self.paused_until = 0.0
        """No call takes effect before this time, as on a host that is cut off from the file server."""

    def now(self) -> float:
        """Time of the loop, in seconds."""
        return self._loop.time()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue ``fn`` and tell the context's watcher."""
        future: Future[T] = Future()
        self._waiting.append((future, lambda: fn(*args, **kwargs)))
        for watcher in ON_SUBMIT.get():
            watcher(future)
        self._begin()
        return future

    def map(self, fn: Callable[..., T], *iterables: Any, **_: Any) -> Iterator[T]:
        """At once: whoever maps waits for it."""
        return map(fn, *iterables)

    @property
    def are_idle(self) -> bool:
        """Whether nothing is queued and nothing runs."""
        return not self._waiting and self._busy == 0

    _busy = 0

    def _begin(self) -> None:
        while self._waiting and self._free:
            future, work = self._waiting.pop(0)
            if future.set_running_or_notify_cancel():
                self._free -= 1
                self._busy += 1
                self._loop.call_later(self._secs(), self._end, future, work)

    def _secs(self) -> float:
        draw = self._rng.random()
        if draw < self._chances.hangs:
            self.has_hung = True
            return HANG_SECS
        secs = self._rng.expovariate(1.0 / self._mean_secs)
        return secs * 100 if draw < self._chances.hangs + self._chances.slow else secs

    def _end(self, future: Future[Any], work: Callable[[], Any]) -> None:
        if self.now() < self.paused_until:
            self._loop.call_at(self.paused_until + self._rng.random(), self._end, future, work)
            return
        self._free += 1
        self._busy -= 1
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - the waiter's, as in any executor
            future.set_exception(error)
        else:
            future.set_result(result)
        self._begin()


# -- the disk ---------------------------------------------------------------------------------------


@dataclass(eq=False)
class File:
    """A file: what reads see, and what a power loss leaves for certain."""

    data: bytearray = field(default_factory=bytearray)
    durable: bytes | None = None
    modified: float = 0.0
    """When it was made or touched, by the virtual clock."""
    is_removed: bool = False
    """Whether it has no name any more. Another host cannot read it then (ESTALE)."""

    def after_loss(self, rng: random.Random) -> File:
        """One of the things that a power loss may leave."""
        now = bytes(self.data)
        torn = now[: rng.randrange(len(now) + 1)] + bytes(len(now))
        choices = [now] if self.durable == now else [now, self.durable or b"", torn[: len(now)]]
        data = rng.choice(choices)
        return File(bytearray(data), data)


@dataclass(eq=False)
class Directory:
    """A directory: for each name all that it may be after a power loss; the last is what it is now."""

    names: dict[str, list[Node]] = field(default_factory=dict)
    modified: float = 0.0
    is_removed: bool = False

    def now(self, name: str) -> Node:
        """What the name means, or None."""
        return self.names.get(name, [None])[-1]

    def put(self, name: str, node: Node) -> None:
        """Change the name."""
        self.names.setdefault(name, [None]).append(node)

    def sync(self) -> None:
        """What the names are is durable."""
        self.names = {name: nodes[-1:] for name, nodes in self.names.items()}

    def copy(self) -> Directory:
        """As it is now, as if all were durable."""
        copied = Directory()
        for name in self.listing():
            node = self.now(name)
            if isinstance(node, Directory):
                copied.names[name] = [node.copy()]
            elif node is not None:
                copied.names[name] = [File(bytearray(node.data))]
        return copied

    def listing(self) -> list[str]:
        """Names that are there."""
        return [name for name, nodes in self.names.items() if nodes[-1] is not None]

    def after_loss(self, rng: random.Random) -> Directory:
        """One of the things that a power loss may leave."""
        left = Directory()
        for name, nodes in self.names.items():
            node = rng.choice(nodes)
            if node is not None:
                left.names[name] = [node.after_loss(rng)]
        return left


Node = File | Directory | None


class SimStorage(Storage):
    """:class:`~aio_ckpt.storage.local.Storage` in memory; each call is one piece of work of the threads."""

    def __init__(self, threads: SimThreads, rng: random.Random, chances: Chances, top: Directory, root: Path) -> None:
        self._threads = threads
        self._rng = rng
        self._chances = chances
        self._top = top
        self._root = root
        self.trace: list[str] = []
        """Every call that took effect, in order."""
        self.poisoned: list[str] = []
        """Writes whose bytes had been given back before the thread was done with them."""

    def at(self, path: Path) -> Node:
        """What is at ``path``."""
        node: Node = self._top
        for part in path.relative_to(self._root).parts:
            node = node.now(part) if isinstance(node, Directory) else None
        return node

    def directory(self, path: Path) -> Directory:
        """The directory at ``path``."""
        node = self.at(path)
        if not isinstance(node, Directory):
            raise _system_error(errno.ENOENT, path)
        return node

    async def run(self, name: str, path: Path, kind: type[WriteError | ReadError], act: Callable[[], T]) -> T:
        """``act`` in a thread, when its time is over; or an error, before or (an fsync's) after its effect."""

        def work() -> T:
            if self._rng.random() < self._chances.fails:
                self.trace.append(f"{name} {path.name} fails")
                raise _system_error(self._rng.choice((errno.EIO, errno.ENOSPC, errno.EDQUOT)), path)
            result = act()
            self.trace.append(f"{name} {path.name}")
            return result

        try:
            return await run_blocking(self._threads, work)
        except OSError as error:
            raise kind(error.errno, error.strerror, str(path)) from error

    def _new_file(self, path: Path, data: bytes = b"", durable: bytes | None = None) -> File:
        parent = self.directory(path.parent)
        if parent.now(path.name) is not None:
            raise _system_error(errno.EEXIST, path)
        file = File(bytearray(data), durable, modified=self._threads.now())
        parent.put(path.name, file)
        return file

    def _file(self, path: Path) -> File:
        node = self.at(path)
        if not isinstance(node, File):
            raise _system_error(errno.ENOENT, path)
        return node

    async def create_data_file(self, path: Path, nbytes: int) -> DataFile:
        """See :class:`~aio_ckpt.storage.local.Storage`, here and below."""
        file = await self.run("create", path, WriteError, lambda: self._new_file(path, bytes(nbytes)))
        return SimDataFile(self, path, file)

    def check_handle(self, file: File, path: Path) -> None:
        """Raise what a read of an open file gives; nothing here."""

    async def open_data_file(self, path: Path, *, page_cache: PageCache = "pass") -> ReadFile:
        """Open."""
        return SimReadFile(self, path, await self.run("open", path, ReadError, lambda: self._file(path)))

    async def write_file(self, path: Path, *parts: bytes) -> None:
        """Create, write, fsync."""
        data = b"".join(parts)
        await self.run("write_file", path, WriteError, lambda: self._new_file(path, data, data))

    async def read_file(self, path: Path, *, max_bytes: int) -> bytes:
        """Read."""
        data = await self.run("read_file", path, ReadError, lambda: bytes(self._file(path).data))
        if len(data) > max_bytes:
            raise CorruptCheckpointError(f"{path}: too long")
        return data

    async def read_end(self, path: Path, nbytes: int) -> bytes:
        """Read the end."""
        return await self.run("read_end", path, ReadError, lambda: bytes(self._file(path).data)[-nbytes:])

    async def make_dir(self, path: Path) -> None:
        """mkdir."""

        def act() -> None:
            parent = self.directory(path.parent)
            if parent.now(path.name) is not None:
                raise _system_error(errno.EEXIST, path)
            parent.put(path.name, Directory())

        await self.run("make_dir", path, WriteError, act)

    async def make_dirs(self, *paths: Path) -> None:
        """mkdir and fsync."""

        def act() -> None:
            for path in paths:
                parent = self.directory(path.parent)
                if parent.now(path.name) is None:
                    parent.put(path.name, Directory())
                    parent.sync()

        await self.run("make_dirs", paths[0], WriteError, act)

    async def sync_dir(self, path: Path) -> None:
        """fsync."""
        await self.run("sync_dir", path, WriteError, lambda: self.directory(path).sync())

    async def list_dir(self, path: Path) -> list[str]:
        """Names."""
        return await self.run("list_dir", path, ReadError, lambda: sorted(self.directory(path).listing()))

    async def exists(self, path: Path) -> bool:
        """Whether it is there."""
        return await self.run("exists", path, ReadError, lambda: self.at(path) is not None)

    async def has_begun(self, pending: Path) -> bool:
        """Whether it is there."""
        return await self.exists(pending)

    async def status(self, path: Path) -> FileStatus | None:
        """What is there."""
        return await self.run("status", path, ReadError, lambda: _status(self.at(path)))

    async def statuses(self, directory: Path, names: Sequence[str]) -> list[FileStatus | ReadError | None]:
        """What is there, of several."""
        return [await self.status(directory / name) for name in names]

    async def fresh_status(self, path: Path) -> FileStatus | None:
        """There is one host, whose answers are not old."""
        return await self.run("fresh_status", path, ReadError, lambda: _status(self.at(path)))

    async def first_link(self, *paths: Path) -> Path | None:
        """There are no links."""
        return await self.run("first_link", paths[0], ReadError, lambda: None)

    async def free_bytes(self, path: Path) -> int:
        """Room for all that is saved here."""
        return await self.run("free_bytes", path, ReadError, lambda: 1 << 40)

    async def touch(self, path: Path) -> None:
        """Now."""

        def act() -> None:
            node = self.at(path)
            if node is None:
                raise _system_error(errno.ENOENT, path)
            node.modified = self._threads.now()

        await self.run("touch", path, WriteError, act)

    async def set_mode(self, path: Path, mode: int) -> None:
        """There are no permissions."""
        await self.run("set_mode", path, WriteError, lambda: self.at(path))

    async def rename(self, src: Path, dst: Path) -> None:
        """Never over another."""
        await self.run("rename", dst, WriteError, lambda: self._move(src, dst, replaces=False))

    async def replace(self, src: Path, dst: Path) -> None:
        """Over another."""
        await self.run("replace", dst, WriteError, lambda: self._move(src, dst, replaces=True))

    async def remove_file(self, path: Path) -> None:
        """Nothing if it is not there."""
        await self.run("remove_file", path, WriteError, lambda: self._remove(path))

    async def remove_tree(self, path: Path) -> None:
        """All below."""
        await self.run("remove_tree", path, WriteError, lambda: self._remove(path))

    def lock(self, path: Path) -> RootLock:
        """There is nobody else."""
        return SimLock()

    @contextlib.asynccontextmanager
    async def locked(self, path: Path, *, release_secs: float) -> AsyncIterator[None]:
        """There is nobody else."""
        yield

    def _move(self, src: Path, dst: Path, *, replaces: bool) -> None:
        node = self.at(src)
        if node is None:
            raise _system_error(errno.ENOENT, src)
        if not replaces and self.at(dst) is not None:
            raise _system_error(errno.EEXIST, dst)
        _unname(self.at(dst))
        self.directory(src.parent).put(src.name, None)
        self.directory(dst.parent).put(dst.name, node)

    def _remove(self, path: Path) -> None:
        node = self.at(path)
        if node is not None:
            _unname(node)
            self.directory(path.parent).put(path.name, None)


class HostStorage(SimStorage):
    """The disk as a host sees it over a network: what it has seen once, it may believe for 60 s.

    As over NFS, a name that is not found is asked for anew, and so is a name that is opened. A file that another host
    removes after it was opened cannot be read any more (ESTALE).
    """

    _OLD_SECS = 60.0

    def __init__(self, threads: SimThreads, rng: random.Random, chances: Chances, top: Directory, root: Path) -> None:
        super().__init__(threads, rng, chances, top, root)
        self._seen: dict[Path, tuple[float, Node]] = {}
        self.old_answers = 0
        """Answers that were not true any more, and handles that were stale."""

    def at(self, path: Path) -> Node:
        """What is at ``path``, if the directories on the way are where this host has seen them."""
        node: Node = self._top
        place = self._root
        for part in path.relative_to(self._root).parts:
            place /= part
            node = node.now(part) if isinstance(node, Directory) else None
            when, seen = self._seen.get(place, (0.0, None))
            is_kept = (
                isinstance(seen, Directory) and not seen.is_removed and self._threads.now() - when < self._OLD_SECS
            )
            if is_kept and seen is not node:
                if self._rng.random() < 0.7:
                    self.old_answers += 1
                    node = seen  # which was renamed
                else:
                    self._see(place, node)  # once a host has learnt of that, it does not believe the old answer again
        return node

    def check_handle(self, file: File, path: Path) -> None:
        """Refuse to read what another host has removed."""
        if file.is_removed:
            self.old_answers += 1
            raise _system_error(errno.ESTALE, path)

    async def status(self, path: Path) -> FileStatus | None:
        """What is there, or what was seen there within 60 s."""

        def act() -> FileStatus | None:
            node, (when, seen) = self.at(path), self._seen.get(path, (0.0, None))
            if seen is not None and self._threads.now() - when < self._OLD_SECS and self._rng.random() < 0.7:
                self.old_answers += seen is not node
                return _status(seen)
            return _status(self._see(path, node))

        return await self.run("status", path, ReadError, act)

    async def list_dir(self, path: Path) -> list[str]:
        """The names now, as an open of the directory tells. What they name is seen, too."""

        def act() -> list[str]:
            names = sorted(self.directory(path).listing())
            for name in names:
                self._see(path / name, self.directory(path).now(name))
            return names

        return await self.run("list_dir", path, ReadError, act)

    async def exists(self, path: Path) -> bool:
        """From :meth:`status`."""
        return await self.status(path) is not None

    async def read_file(self, path: Path, *, max_bytes: int) -> bytes:
        """Open, then read."""
        file = await self.run("open", path, ReadError, lambda: self._file(path))
        return await self.run("read_file", path, ReadError, lambda: self._content(file, path)[: max_bytes + 1])

    async def read_end(self, path: Path, nbytes: int) -> bytes:
        """Open, then read the end."""
        file = await self.run("open", path, ReadError, lambda: self._file(path))
        return await self.run("read_end", path, ReadError, lambda: self._content(file, path)[-nbytes:])

    def _content(self, file: File, path: Path) -> bytes:
        self.check_handle(file, path)
        return bytes(file.data)

    async def fresh_status(self, path: Path) -> FileStatus | None:
        """What is there, as an open tells."""
        return await self.run("fresh_status", path, ReadError, lambda: _status(self._see(path, self.at(path))))

    def _move(self, src: Path, dst: Path, *, replaces: bool) -> None:
        super()._move(src, dst, replaces=replaces)
        self._forget(src)
        self._forget(dst)

    def _remove(self, path: Path) -> None:
        super()._remove(path)
        self._forget(path)

    def _forget(self, path: Path) -> None:
        """A host knows what it has changed itself."""
        self._seen = {place: seen for place, seen in self._seen.items() if not place.is_relative_to(path)}

    def _see(self, path: Path, node: Node) -> Node:
        self._seen[path] = self._threads.now(), node
        return node


def _status(node: Node) -> FileStatus | None:
    return None if node is None else FileStatus(identity=(id(node), 0, 0), modified_unix=node.modified, mode=0o644)


def _unname(node: Node) -> None:
    """Note of all below that it has no name any more."""
    if node is None:
        return
    node.is_removed = True
    if isinstance(node, Directory):
        for name in node.listing():
            _unname(node.now(name))


class SimLock(RootLock):
    """A lock that nobody else wants."""

    def __init__(self) -> None:
        pass

    def discard(self) -> None:
        """Nothing is held."""


class SimDataFile(DataFile):
    """A file of :class:`SimStorage` that is written. The bytes are taken when the write ends, as late as can be."""

    mode: WriteMode = "buffered"

    def __init__(self, storage: SimStorage, path: Path, file: File) -> None:
        self._storage = storage
        self.path = path
        self._file = file

    async def write(self, offset: int, data: memoryview) -> None:
        """One range."""

        def act() -> None:
            if bytes(data[: len(_POISON)]) == _POISON:
                self._storage.poisoned.append(f"{self.path} at {offset}")
            self._file.data[offset : offset + len(data)] = data

        await self._storage.run(f"write {offset}", self.path, WriteError, act)

    async def sync(self) -> None:
        """fdatasync."""

        def act() -> None:
            self._file.durable = bytes(self._file.data)

        await self._storage.run("sync", self.path, WriteError, act)

    async def close(self) -> None:
        """Nothing is held."""


class SimReadFile(ReadFile):
    """A file of :class:`SimStorage` that is read."""

    is_direct = False

    def __init__(self, storage: SimStorage, path: Path, file: File) -> None:
        self._storage = storage
        self.path = path
        self.nbytes = len(file.data)
        self._file = file

    async def read_into(self, offset: int, *views: memoryview) -> int:
        """One range."""

        def act() -> int:
            self._storage.check_handle(self._file, self.path)
            at = offset
            for view in views:
                data = self._file.data[at : at + len(view)]
                view[: len(data)] = data
                at += len(data)
            return at - offset

        return await self._storage.run(f"read {offset}", self.path, ReadError, act)

    async def close(self) -> None:
        """Nothing is held."""


def _system_error(code: int, path: Path) -> OSError:
    return OSError(code, os.strerror(code), str(path))
