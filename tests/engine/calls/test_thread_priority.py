"""The priority of the engine's I/O threads, as the kernel tells it."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path
from typing import Any

import pytest
import torch

from aio_ckpt import EngineConfig, SyncCheckpointEngine
from aio_ckpt.errors import ConfigError
from aio_ckpt.runtime import thread_priority
from aio_ckpt.runtime.portal import Portal

TIMEOUT = 20.0
IOPRIO_GET = {"x86_64": 252, "aarch64": 31}
BEST_EFFORT = 2
LIBC = ctypes.CDLL(None, use_errno=True)


def priorities() -> tuple[int, int]:
    """Niceness and I/O priority (class and level) of this thread."""
    return os.getpriority(os.PRIO_PROCESS, 0), int(LIBC.syscall(IOPRIO_GET[platform.machine()], 1, 0))


@pytest.fixture
def portals(monkeypatch: pytest.MonkeyPatch) -> list[Portal]:
    """Every portal that is started."""
    started: list[Portal] = []
    start = Portal.start
    monkeypatch.setattr(Portal, "start", lambda self: (started.append(self), start(self))[1])
    return started


def test_io_threads_stand_behind_the_trainers_and_no_other_thread_does(tmp_path: Path, portals: list[Portal]) -> None:
    before = priorities()
    with SyncCheckpointEngine(tmp_path, EngineConfig(thread_nice=7, thread_ioprio=6)):
        (portal,) = portals
        for _ in range(20):
            assert portal.executor.submit(priorities).result(TIMEOUT) == (max(before[0], 7), BEST_EFFORT << 13 | 6)

        async def on_the_loop() -> tuple[int, int]:
            return priorities()

        assert portal.call(on_the_loop, timeout=TIMEOUT) == before
    assert priorities() == before


def test_priorities_may_be_left_alone(tmp_path: Path, portals: list[Portal]) -> None:
    before = priorities()
    with SyncCheckpointEngine(tmp_path, EngineConfig(thread_nice=0, thread_ioprio=None)):
        assert portals[0].executor.submit(priorities).result(TIMEOUT) == before


def test_an_engine_works_where_no_priority_may_be_set(
    tmp_path: Path, portals: list[Portal], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "setpriority", refuse)
    monkeypatch.setattr(thread_priority, "_IOPRIO_SET", {platform.machine(): 99_999})
    before = priorities()
    with SyncCheckpointEngine(tmp_path) as engine:
        assert portals[0].executor.submit(priorities).result(TIMEOUT) == before
        assert engine.save({"w": torch.ones(3)}).result(TIMEOUT) is not None


@pytest.mark.parametrize("bad", [{"thread_nice": value} for value in (-1, 20, 1.5, None, True)])
def test_a_niceness_out_of_range_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="thread_nice"):
        EngineConfig(**bad)


@pytest.mark.parametrize("bad", [{"thread_ioprio": value} for value in (-1, 8, 1.5, "7", True)])
def test_an_io_priority_out_of_range_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="thread_ioprio"):
        EngineConfig(**bad)
