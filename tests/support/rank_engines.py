"""Engines of one of several ranks, with which something happens at a call."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from gated_storage import Call, Gate, GatedStorage

from aio_ckpt import CheckpointEngine, EngineConfig
from aio_ckpt.errors import PeerFailedError
from aio_ckpt.ranks.coordinator import CallEnd
from aio_ckpt.ranks.failure import Failure
from aio_ckpt.ranks.messages import Reply, Topic
from aio_ckpt.ranks.store_coordinator import StoreCoordinator
from aio_ckpt.runtime.portal import Executor

T = TypeVar("T")


SECS = 30.0


class ActingStorage(GatedStorage):
    """Once armed, something happens to this rank at a call."""

    act: Callable[[], None] | None = None
    at = ("", "")

    async def run(self, call: Call, act: Callable[[], Awaitable[T]]) -> T | None:
        if self.act is not None and call.matches(*self.at):
            action, self.act = self.act, None
            action()
        return await super().run(call, act)


S = TypeVar("S", bound=ActingStorage)


@contextlib.contextmanager
def engine_over(kind: type[S], root: Path, stall_secs: float, **settings: Any) -> Iterator[tuple[CheckpointEngine, S]]:
    executor = Executor("acting", 4)
    storage = kind(executor)
    config = EngineConfig(**{"stall_timeout_secs": stall_secs, "budget_bytes": 64 << 20, **settings})
    engine = CheckpointEngine(root, config, storage=storage)
    try:
        yield engine, storage
    finally:
        engine.terminate()
        executor.close(SECS)


def acting_engine(
    root: Path, stall_secs: float, **settings: Any
) -> AbstractContextManager[tuple[CheckpointEngine, ActingStorage]]:
    return engine_over(ActingStorage, root, stall_secs, **settings)


def no_space() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "disk of one rank")


def told(error: BaseException | None) -> tuple[str, int | None, str]:
    return type(error).__name__, getattr(error, "rank", None), str(error)


class HeldCoordinator(StoreCoordinator):
    """Real ranks over a real store; one of them is held where a test wants it, on one topic."""

    topic = Topic("")
    is_mute = False
    """It tells the others of no failure."""
    is_silent = False
    """It gives no sign of life."""

    def __init__(self) -> None:
        store = dist.distributed_c10d._get_default_store()
        super().__init__(store, rank=dist.get_rank(), world_size=dist.get_world_size())
        self.gate = Gate()

    async def _send_replies(self, topic: Topic, replies: Sequence[bytes], then: Topic | None) -> None:
        if topic == self.topic:
            await self.gate.wait()
        await super()._send_replies(topic, replies, then)

    async def _await_reply(self, topic: Topic, stage: str) -> Reply:
        reply = await super()._await_reply(topic, stage)
        if topic == self.topic:
            await self.gate.wait()
        return reply

    async def beat(self, *, has_left: bool = False) -> None:
        if not self.is_silent:
            await super().beat(has_left=has_left)

    async def _leave_topics(self, topic: Topic, failure: Failure) -> CallEnd:
        if self.is_mute:
            raise PeerFailedError("the store of the ranks cannot be reached", rank=0, stage="agree")
        return await super()._leave_topics(topic, failure)


@contextlib.contextmanager
def held_engine(
    root: Path, stall_secs: float, **settings: Any
) -> Iterator[tuple[CheckpointEngine, HeldCoordinator, ActingStorage]]:
    executor, coordinator = Executor("held", 4), HeldCoordinator()
    storage = ActingStorage(executor)
    config = EngineConfig(**{"stall_timeout_secs": stall_secs, "budget_bytes": 64 << 20, **settings})
    engine = CheckpointEngine(root, config, storage=storage, coordinator=coordinator)
    try:
        yield engine, coordinator, storage
    finally:
        storage.open_gates()
        coordinator.gate.open()
        engine.terminate()
        executor.close(SECS)
