"""A file system that does not answer: each call of an engine ends by its limit, and says what it waited for."""

from __future__ import annotations

import asyncio
import gc
import tempfile
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import listing, weights
from gated_storage import TIMEOUT, Call, GatedStorage
from log_lines import LogLines, early_lines
from warm_python import run_warm

from aio_ckpt import CheckpointEngine, EngineConfig, SyncCheckpointEngine
from aio_ckpt.commit.trash import THREAD_WAIT_SECS
from aio_ckpt.engine import file_save
from aio_ckpt.engine import root_session as root_module
from aio_ckpt.errors import StallError
from aio_ckpt.rescue import hooks
from aio_ckpt.runtime.portal import Executor
from aio_ckpt.storage.root_lock import RootLock

STALL_SECS = 0.3


class Disk:
    """Gate for the threads of system calls. It is open, until :meth:`hang`."""

    def __init__(self) -> None:
        self._answers = threading.Event()
        self._answers.set()
        self.threads: list[threading.Thread] = []

    def hang(self) -> None:
        self.threads.clear()
        self._answers.clear()

    def answer(self) -> None:
        self._answers.set()

    def wait(self) -> None:
        self.threads.append(threading.current_thread())
        assert self._answers.wait(TIMEOUT)

    def after(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call`` that waits for the disk first."""

        def waiting(*args: Any, **named: Any) -> Any:
            self.wait()
            return call(*args, **named)

        return waiting


class HangingStorage(GatedStorage):
    """Storage whose lock is on a disk that may hang."""

    def __init__(self, executor: Executor, disk: Disk) -> None:
        super().__init__(executor)
        self._disk = disk

    async def run_read(self, call: Call, act: Callable[[], Awaitable[Any]]) -> Any:
        return await self.run(call, act)

    def lock(self, path: Path) -> RootLock:
        self._disk.wait()
        lock = super().lock(path)
        lock.renew = self._disk.after(lock.renew)  # type: ignore[method-assign]
        lock.release = self._disk.after(lock.release)  # type: ignore[method-assign]
        return lock


@pytest.fixture
def root() -> Iterator[Path]:
    """Root in memory: a disk that other tests keep busy may take longer than ``STALL_SECS`` for one fsync."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder, "root")


@pytest.fixture
def disk() -> Iterator[Disk]:
    disk = Disk()
    yield disk
    disk.answer()


@pytest.fixture
def storage(disk: Disk) -> Iterator[HangingStorage]:
    executor = Executor("hanging", 4)
    storage = HangingStorage(executor, disk)
    yield storage
    storage.open_gates()
    disk.answer()
    assert executor.close(TIMEOUT)


@pytest.fixture
def lines() -> Iterator[LogLines]:
    with early_lines() as lines:
        yield lines


def opened(root: Path, storage: HangingStorage, **config: Any) -> SyncCheckpointEngine:
    return SyncCheckpointEngine(root, EngineConfig(**{"stall_timeout_secs": STALL_SECS, **config}), storage=storage)


@pytest.mark.parametrize("limits", [{"deadline_secs": 0.2}, {}], ids=["deadline_secs", "stall_timeout_secs"])
def test_a_first_save_ends_by_its_limit_while_the_lock_hangs_and_the_next_one_works(
    root: Path, disk: Disk, storage: HangingStorage, lines: LogLines, limits: dict[str, float]
) -> None:
    with opened(root, storage) as engine:
        disk.hang()
        for _ in range(2):  # the second one waits for the thread of the first
            began = time.monotonic()
            with pytest.raises(StallError, match="taking the lock"):
                engine.save(weights(2), 2, **limits)
            assert time.monotonic() - began < 5
        assert len(disk.threads) == 1
        assert threading.current_thread() not in disk.threads
        lines.wait_for("taking the lock has taken .* does not answer")
        disk.answer()
        assert engine.save(weights(2), 2).result(TIMEOUT).step == 2
        engine.close()
    with SyncCheckpointEngine(root) as other:  # the thread that came late keeps no lock
        assert other.save(weights(3), 3).result(TIMEOUT).step == 3


@pytest.mark.parametrize("limits", [{"deadline_secs": 1.0}, {}], ids=["deadline_secs", "stall_timeout_secs"])
def test_a_later_save_blocks_nobody_while_the_lock_hangs_and_the_next_one_works(
    root: Path, disk: Disk, storage: HangingStorage, limits: dict[str, float]
) -> None:
    with opened(root, storage) as engine:
        engine.save(weights(1), 1).result(TIMEOUT)
        disk.hang()
        for _ in range(2):  # the second one waits for the thread of the first
            began = time.monotonic()
            ticket = engine.save(weights(2), 2, **limits)
            with pytest.raises(StallError, match="looking at the lock of the root"):
                ticket.result(TIMEOUT)
            assert time.monotonic() - began < THREAD_WAIT_SECS  # no save waits for that thread
        assert len(disk.threads) == 1
        disk.answer()
        assert engine.save(weights(2), 2).result(TIMEOUT).step == 2


def test_a_lock_that_was_taken_after_the_end_of_its_engine_is_released(
    root: Path, disk: Disk, storage: HangingStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aio_ckpt.engine.engine.STOP_SECS", 0.2)
    engine = opened(root, storage)
    disk.hang()
    with pytest.raises(StallError):
        engine.save(weights(1), 1)
    engine.close()
    disk.answer()
    disk.threads[0].join(TIMEOUT)
    with SyncCheckpointEngine(root) as other:
        assert other.save(weights(1), 1).result(TIMEOUT).step == 1


@pytest.mark.parametrize("is_async", [False, True])
async def test_the_end_of_an_engine_has_a_limit_and_says_what_it_waited_for(
    root: Path,
    disk: Disk,
    storage: HangingStorage,
    lines: LogLines,
    monkeypatch: pytest.MonkeyPatch,
    is_async: bool,
) -> None:
    monkeypatch.setattr(root_module, "STOP_SECS", 0.3)
    engine_class = CheckpointEngine if is_async else SyncCheckpointEngine
    engine = engine_class(root, EngineConfig(), storage=storage)
    engine.save(weights(1), 1).result(TIMEOUT)
    monkeypatch.setattr(engine._rescue, "forget", disk.after(engine._rescue.forget))
    disk.hang()
    began = time.monotonic()
    if isinstance(engine, CheckpointEngine):
        await engine.close()
    else:
        engine.close()
    assert time.monotonic() - began < 5
    assert threading.current_thread() not in disk.threads
    lines.wait_for("releasing the lock has taken .* does not answer")
    lines.wait_for(f"{root}: the lock was not released within .* does not answer. No engine can write .*")
    disk.answer()
    disk.threads[0].join(TIMEOUT)
    with SyncCheckpointEngine(root) as other:
        assert other.latest_step() == 1
        assert other.save(weights(2), 2).result(TIMEOUT).step == 2


def test_the_constructor_ends_by_the_limit(root: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(root_module, "_check_root", disk.after(root_module._check_root))
    disk.hang()
    with pytest.raises(StallError, match=f"looking at the root .* file system of {root} does not answer"):
        SyncCheckpointEngine(root, EngineConfig(stall_timeout_secs=STALL_SECS))


def test_looking_for_what_dead_trainers_have_staged_ends_by_the_limit(
    root: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hooks, "segment_directories", disk.after(hooks.segment_directories))
    disk.hang()
    engine = SyncCheckpointEngine(root, EngineConfig(stall_timeout_secs=STALL_SECS))
    assert "could not be compared with its steps: looking for what dead trainers have staged" in caplog.text
    disk.answer()
    engine.close()


@pytest.mark.parametrize("where", ["the link", "the place"])
def test_save_file_ends_by_the_limit_before_anything_is_captured(
    root: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    file = root.with_name("w.pt")  # in memory, where no fsync takes as long as the limit
    if where == "the link":
        monkeypatch.setattr(file_save, "file_target", disk.after(file_save.file_target))
    else:
        monkeypatch.setattr(file_save, "file_refusal", disk.after(file_save.file_refusal))
    with SyncCheckpointEngine(root, EngineConfig(stall_timeout_secs=STALL_SECS)) as engine:
        disk.hang()
        with pytest.raises(StallError, match=r"looking at the file .* does not answer"):
            engine.save_file(weights(1), file)
        disk.answer()
        engine.save_file(weights(1), file).result(TIMEOUT)
    assert listing(file.parent) == ["w.pt"]


# -- the async engine ---------------------------------------------------------------------------------


CALLS: dict[str, tuple[str, str, Callable[[CheckpointEngine], Any], Any]] = {
    "steps": ("list_dir", "root", lambda engine: engine.steps(), [1, 2]),
    "latest_step": ("list_dir", "root", lambda engine: engine.latest_step(), 2),
    "protected_steps": ("list_dir", "protected", lambda engine: engine.protected_steps(), []),
    "protect": ("write_file", "protected/1", lambda engine: engine.protect(1), None),
    "unprotect": ("exists", "protected/1", lambda engine: engine.unprotect(1), None),
    "rollback": ("rename", "*", lambda engine: engine.rollback(1), [2]),
    "delete": ("remove_tree", "*", lambda engine: engine.delete(1), None),
    "close": ("sync", "*", lambda engine: engine.close(), None),
}


@pytest.mark.parametrize("name", CALLS)
async def test_the_loop_of_an_async_trainer_goes_on_while_the_disk_hangs(
    root: Path, storage: HangingStorage, name: str
) -> None:
    call, where, use, expected = CALLS[name]
    async with CheckpointEngine(root, storage=storage) as engine:
        for step in (1, 2):
            await engine.save(weights(step), step)
        gate = storage.hold(call, where)
        if name == "close":
            engine.save(weights(3), 3)
        waiting = asyncio.ensure_future(_awaited(use(engine)))
        async with asyncio.timeout(TIMEOUT):
            while not gate.reached.is_set():
                await asyncio.sleep(0.001)
        assert not waiting.done()
        gate.open()
        assert await asyncio.wait_for(waiting, TIMEOUT) == expected


async def _awaited(call: Any) -> Any:
    return await call


async def test_a_call_that_is_not_awaited_is_no_value_and_says_so(root: Path) -> None:
    async with CheckpointEngine(root) as engine:
        await engine.save(weights(1), 1)
        newest = engine.latest_step()
        for use in (bool, lambda newest: newest == 1, lambda newest: newest > 0, lambda newest: newest != 1):
            with pytest.raises(TypeError, match=r"latest_step\(\) of the async engine is no value yet: write await in"):
                use(newest)
        assert newest.result(TIMEOUT) == await newest == 1


async def test_a_call_that_nobody_ever_awaits_warns(root: Path) -> None:
    async with CheckpointEngine(root) as engine:
        with pytest.warns(RuntimeWarning, match=r"latest_step\(\) was never awaited: write await in front"):
            call_and_forget(engine)


def call_and_forget(engine: CheckpointEngine) -> None:
    newest = weakref.ref(engine.latest_step())
    while newest() is not None:  # its thread holds it until the end of the call
        gc.collect()


def test_a_thread_that_the_disk_holds_does_not_stop_the_interpreters_exit(root: Path) -> None:
    ended = run_warm(
        """
        import sys, threading, torch
        from aio_ckpt import EngineConfig, SyncCheckpointEngine
        from aio_ckpt.engine import engine as engines, root_session
        from aio_ckpt.storage.root_lock import RootLock
        engine = SyncCheckpointEngine(sys.argv[1], EngineConfig(stall_timeout_secs=0.3))
        engine.save({"w": torch.ones(3)}, 1).result()
        root_session.STOP_SECS = engines.STOP_SECS = 0.3
        RootLock.renew = RootLock.release = lambda lock: threading.Event().wait()
        try:
            engine.save({"w": torch.ones(3)}, 2).result()
        except TimeoutError as error:
            print(error)
        """,
        str(root),
    )
    assert ended.returncode == 0, ended.stderr
    assert "looking at the lock" in ended.stdout
    assert "the lock was not released within" in ended.stderr
