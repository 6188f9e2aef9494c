"""A real storage that records its calls, holds them at gates, fails them or leaves them out."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from forwarding_storage import Call, ForwardingStorage

from aio_ckpt.config import EngineConfig
from aio_ckpt.engine.engine import CheckpointEngine
from aio_ckpt.runtime.portal import Executor
from aio_ckpt.storage.local import Storage

T = TypeVar("T")
TIMEOUT = 20.0


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


class GatedStorage(ForwardingStorage):
    """``Storage`` under test control. ``where`` is a pattern for the last part of the (first) path, or
    for its last two.

    ``calls`` holds the calls that ended well, in the order of their ends, ``begun`` all, in that of their starts.
    """

    def __init__(self, executor: Executor) -> None:
        super().__init__(Storage(executor))
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
