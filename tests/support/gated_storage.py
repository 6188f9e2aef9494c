"""A real storage that records its calls, holds them at gates, fails them or leaves them out."""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from aio_ckpt.config import EngineConfig
from aio_ckpt.engine.engine import CheckpointEngine
from aio_ckpt.reports import WriteMode
from aio_ckpt.runtime.portal import Executor
from aio_ckpt.storage.local import DataFile, FileStatus, LocalStorage, ReadFile, RootLock

T = TypeVar("T")
TIMEOUT = 20.0


@dataclass(frozen=True)
class Call:
    """One call of the storage, or of a data file (``write``, ``sync``)."""

    name: str
    path: Path
    other: Path | None = None
    data: bytes = field(default=b"", repr=False)

    def matches(self, name: str, where: str) -> bool:
        last = self.path.name if "/" not in where else f"{self.path.parent.name}/{self.path.name}"
        return self.name == name and fnmatch.fnmatch(last, where)


class Gate:
    """Holds every call that comes to it until it is opened; ``reached`` is set by the first."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._lock = threading.Lock()
        self._is_open = False
        self._waiting: list[Future[None]] = []

    async def wait(self) -> None:
        waiter: Future[None] = Future()
        with self._lock:
            if not self._is_open:
                self._waiting.append(waiter)
            else:
                waiter.set_result(None)
        self.reached.set()
        await asyncio.wrap_future(waiter)

    def open(self) -> None:
        with self._lock:
            self._is_open = True
            waiting, self._waiting = self._waiting, []
        for waiter in waiting:
            if waiter.set_running_or_notify_cancel():
                waiter.set_result(None)

    def wait_reached(self) -> None:
        assert self.reached.wait(TIMEOUT), "no call came to the gate"


class GatedStorage:
    """``LocalStorage`` under test control. ``where`` is a pattern for the last part of the (first) path, or
    for its last two.

    ``calls`` holds the calls that ended well, in the order of their ends, ``begun`` all, in that of their starts.
    """

    def __init__(self, executor: Executor) -> None:
        self._inner = LocalStorage(executor)
        self._gates: list[tuple[str, str, Gate]] = []
        self.failures: list[tuple[str, str, BaseException]] = []
        self._dropped: list[tuple[str, str]] = []
        self._released: list[Gate] = []
        self._delays: dict[str, float] = {}
        self._ended = threading.Condition()
        self.begun: list[Call] = []
        self.calls: list[Call] = []

    def hold(self, name: str, where: str = "*") -> Gate:
        """Calls ``name`` wait at the gate that is returned."""
        gate = Gate()
        self._gates.append((name, where, gate))
        return gate

    def fail(self, name: str, where: str, error: BaseException) -> None:
        """The next such call raises ``error`` instead of doing anything."""
        self.failures.append((name, where, error))

    def drop(self, name: str, where: str = "*") -> None:
        """Such calls do nothing and report success."""
        self._dropped.append((name, where))

    def release(self, gate: Gate) -> None:
        """Later calls pass; those that wait at the gate go on waiting until it is opened."""
        self._gates = [entry for entry in self._gates if entry[2] is not gate]
        self._released.append(gate)

    def wait_for(self, name: str, where: str = "*") -> None:
        """Until such a call has ended well, now or before."""
        with self._ended:
            assert self._ended.wait_for(lambda: any(call.matches(name, where) for call in self.calls), TIMEOUT)

    def open_gates(self) -> None:
        for gate in [*self._released, *(gate for _, _, gate in self._gates)]:
            gate.open()

    def slow(self, name: str, *, secs: float) -> None:
        """Such calls take ``secs`` longer: a slow disk, no means to synchronise."""
        self._delays[name] = secs

    async def run(self, call: Call, act: Callable[[], Awaitable[T]]) -> T | None:
        self.begun.append(call)
        for name, where, gate in self._gates:
            if call.matches(name, where):
                await gate.wait()
        await asyncio.sleep(self._delays.get(call.name, 0))
        for failure in self.failures:
            if call.matches(*failure[:2]):
                self.failures.remove(failure)
                raise failure[2]
        if any(call.matches(*dropped) for dropped in self._dropped):
            return None
        result = await act()
        with self._ended:
            self.calls.append(call)
            self._ended.notify_all()
        return result

    async def create_data_file(self, path: Path, nbytes: int, *, writers: int) -> DataFile:
        made = await self.run(
            Call("create_data_file", path), lambda: self._inner.create_data_file(path, nbytes, writers=writers)
        )
        assert made is not None
        return GatedDataFile(self, made)

    async def open_data_file(self, path: Path, *, readers: int, shared: bool = False) -> ReadFile:
        return await self._inner.open_data_file(path, readers=readers, shared=shared)

    async def write_file(self, path: Path, *parts: bytes) -> None:
        await self.run(Call("write_file", path, data=b"".join(parts)), lambda: self._inner.write_file(path, *parts))

    async def read_file(self, path: Path, *, max_bytes: int) -> bytes:
        return await self._inner.read_file(path, max_bytes=max_bytes)

    async def make_dir(self, path: Path, *, parents: bool = False) -> None:
        await self.run(Call("make_dir", path), lambda: self._inner.make_dir(path, parents=parents))

    async def sync_dir(self, path: Path) -> None:
        await self.run(Call("sync_dir", path), lambda: self._inner.sync_dir(path))

    async def list_dir(self, path: Path) -> list[str]:
        return await self._inner.list_dir(path)

    async def exists(self, path: Path) -> bool:
        return await self._inner.exists(path)

    async def status(self, path: Path) -> FileStatus | None:
        return await self._inner.status(path)

    async def touch(self, path: Path) -> None:
        await self.run(Call("touch", path), lambda: self._inner.touch(path))

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


class GatedDataFile:
    """A data file of :class:`GatedStorage`."""

    def __init__(self, storage: GatedStorage, inner: DataFile) -> None:
        self._storage = storage
        self._inner = inner

    @property
    def path(self) -> Path:
        return self._inner.path

    @property
    def mode(self) -> WriteMode:
        return self._inner.mode

    async def write(self, offset: int, data: memoryview) -> None:
        await self._storage.run(Call("write", self.path), lambda: self._inner.write(offset, data))

    async def sync(self) -> None:
        await self._storage.run(Call("sync", self.path), self._inner.sync)

    async def close(self) -> None:
        await self._inner.close()


@contextlib.contextmanager
def gated_engine(root: Path, **config: Any) -> Iterator[tuple[CheckpointEngine, GatedStorage]]:
    """An engine over a :class:`GatedStorage`; at the end gates are opened and the engine is closed."""
    executor = Executor("gated", 4)
    storage = GatedStorage(executor)
    engine = CheckpointEngine(root, EngineConfig(**config), storage=storage)
    try:
        yield engine, storage
    finally:
        storage.open_gates()
        try:
            engine.close_blocking()
        finally:
            assert executor.close(TIMEOUT)
