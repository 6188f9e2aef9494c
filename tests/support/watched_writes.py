"""A storage on the local disk whose data writes can be held, failed and watched inside the engine's I/O threads."""

from __future__ import annotations

import contextlib
import os
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aio_ckpt import CheckpointEngine, EngineConfig
from aio_ckpt.errors import WriteError
from aio_ckpt.ranks.coordinator import Coordinator
from aio_ckpt.runtime.ctrl_c import Condition
from aio_ckpt.runtime.portal import Executor, run_blocking
from aio_ckpt.storage.data_file import DataFile
from aio_ckpt.storage.local import Storage
from aio_ckpt.storage.os_errors import translate_errors

TIMEOUT = 20.0
"""Deadline of every wait in a test; none is reached unless something is wrong."""


@dataclass(frozen=True)
class Write:
    """One chunk inside a thread. Files and, within a file, writes are counted from 0 in the order they begin."""

    file: int
    number: int
    path: Path
    offset: int
    data: memoryview


class Gate:
    """Holds the threads that come to it until :meth:`open`, or :meth:`let_through` for those that wait now."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._round = 0
        self._is_open = False
        self.held = 0
        """Threads that wait here now."""

    def hold(self) -> None:
        """In an I/O thread: wait. A thread that nobody lets through fails the write."""
        with self._changed:
            if self._is_open:
                return
            self.held += 1
            self._changed.notify_all()
            arrived = self._round
            if not self._changed.wait_for(lambda: self._round > arrived, 3 * TIMEOUT):
                raise TimeoutError("nobody opened the gate")

    def wait_held(self, count: int = 1) -> None:
        """Until ``count`` threads are held."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.held >= count, TIMEOUT):
                raise AssertionError(f"{self.held} threads at the gate after {TIMEOUT} s, expected {count}")

    def let_through(self) -> None:
        """Those that wait now."""
        with self._changed:
            self._round += 1
            self.held = 0
            self._changed.notify_all()

    def open(self) -> None:
        """Now and from now on."""
        with self._changed:
            self._is_open = True
        self.let_through()


class WatchedStorage(Storage):
    """Storage, but each chunk is written by one thread that first runs ``on_write``.

    A thread that is held there still writes its bytes afterwards, awaited or not, as a slow ``pwrite`` would.
    ``torn`` lists the writes whose bytes changed while a thread had them.
    """

    def __init__(self, on_write: Callable[[Write], object] = lambda write: None) -> None:
        self.on_write = on_write
        self.files: list[Path] = []
        self.writes: list[tuple[int, int, int]] = []
        """(file, offset, length) in the order they ended without an error."""
        self.torn: list[tuple[int, int]] = []
        """(file, offset)."""
        self.most_in_flight = 0
        self._in_flight = 0
        self._began: dict[int, int] = {}
        self._gates: list[Gate] = []
        self._changed = threading.Condition()

    def bind(self, executor: Executor) -> None:
        """Use the threads of the engine under test, which exist only once it was made."""
        Storage.__init__(self, executor)

    def gate(self) -> Gate:
        """A new gate, opened at the latest by :meth:`open_all`."""
        self._gates.append(Gate())
        return self._gates[-1]

    def open_all(self) -> None:
        """So that no thread outlives a failed test."""
        for gate in self._gates:
            gate.open()

    def wait_idle(self) -> None:
        """Until no thread is in a write."""
        with self._changed:
            assert self._changed.wait_for(lambda: not self._in_flight, TIMEOUT), (
                f"{self._in_flight} threads still write"
            )

    async def create_data_file(self, path: Path, nbytes: int) -> DataFile:
        inner = await super().create_data_file(path, nbytes)
        self.files.append(path)
        return WatchedDataFile(self, inner, len(self.files) - 1, self._executor)

    def write_in_thread(self, file: int, path: Path, offset: int, data: memoryview) -> None:
        with self._changed:
            number = self._began.setdefault(file, 0)
            self._began[file] += 1
            self._in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self._in_flight)
        try:
            # Opened first: a file that is removed meanwhile is written to all the same.
            with path.open("r+b", buffering=0) as target:
                before = zlib.crc32(data)
                self.on_write(Write(file, number, path, offset, data))
                done = 0
                while done < data.nbytes:
                    done += os.pwrite(target.fileno(), data[done:], offset + done)
                if zlib.crc32(data) != before:
                    self.torn.append((file, offset))
            self.writes.append((file, offset, data.nbytes))
        finally:
            with self._changed:
                self._in_flight -= 1
                self._changed.notify_all()


class WatchedDataFile(DataFile):
    """A data file whose writes go through :meth:`WatchedStorage.write_in_thread`."""

    def __init__(self, storage: WatchedStorage, inner: DataFile, file: int, executor: Executor) -> None:
        self.path = inner.path
        self.mode = inner.mode
        self._storage = storage
        self._inner = inner
        self._file = file
        self._executor = executor

    async def write(self, offset: int, data: memoryview) -> None:
        with translate_errors(WriteError, self.path):
            await run_blocking(self._executor, self._storage.write_in_thread, self._file, self.path, offset, data)

    async def sync(self) -> None:
        await self._inner.sync()

    async def close(self) -> None:
        await self._inner.close()


class WatchedCondition(Condition):
    """Tells when a thread begins to wait on it, which nothing else shows from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = threading.Event()

    def wait(self, timeout: float | None = None) -> None:
        self.waiting.set()
        super().wait(timeout)


@contextlib.contextmanager
def watched_engine(
    root: Path, storage: WatchedStorage, coordinator: Coordinator | None = None, **settings: Any
) -> Iterator[CheckpointEngine]:
    """The real engine over ``storage``, with poisoned buffers; gates are opened before it is closed."""
    config = EngineConfig(**{"debug": True, "stall_timeout_secs": TIMEOUT, **settings})
    engine = CheckpointEngine(root, config, coordinator=coordinator, storage=storage)
    storage.bind(engine._portal.executor)
    try:
        yield engine
        storage.open_all()
        engine.close_blocking()
    except BaseException:
        storage.open_all()
        engine.terminate()
        raise
