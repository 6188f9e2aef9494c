"""Whatever waits for long says what it waits for, and since when; whatever does not, says nothing."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from builders import weights
from gated_storage import TIMEOUT, Call, GatedStorage, gated_engine
from log_lines import LogLines, early_lines
from saved_files import RANK_MANIFEST, ROOT_MANIFEST

from aio_ckpt import CheckpointEngine, EngineConfig, SyncCheckpointEngine
from aio_ckpt.runtime.portal import Executor
from aio_ckpt.storage.root_lock import RootLock

T = TypeVar("T")
MIB = 1 << 20


@pytest.fixture
def lines() -> Iterator[LogLines]:
    with early_lines() as lines:
        yield lines


def slow(path: Path) -> str:
    return rf"\d+ s: the file system of {re.escape(str(path))} is slow, or does not answer"


# -- a save -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("activity", "name", "where"),
    [
        ("making its directory", "make_dir", "pending/*"),
        ("reserving room for its data", "create_data_file", "*"),
        ("writing its data", "write", "*.distcp"),
        (r"making its data durable", "sync", "*.distcp"),
        ("writing the rank's manifest", "write_file", RANK_MANIFEST),
        ("making its directory durable", "sync_dir", "pending/*"),
        (r"making it visible \(rename, fsync\)", "rename", "*"),
    ],
)
def test_a_save_that_makes_no_progress_says_what_it_does(
    root: Path, lines: LogLines, activity: str, name: str, where: str
) -> None:
    with gated_engine(root) as (engine, storage):
        gate = storage.hold(name, where)
        ticket = engine.save(weights(1), step=7)
        text = rf"the save of step 7 has made no progress for \d+ s: it is {activity} under {re.escape(str(root))}"
        found = lines.wait_for(text, 2)
        assert (found.levelname, found.step, found.rank) == ("WARNING", 7, 0)
        gate.open()
        ticket.result(TIMEOUT)


def test_a_save_that_waits_for_room_names_the_save_that_has_it(root: Path, lines: LogLines) -> None:
    with ThreadPoolExecutor(1) as pool, gated_engine(root) as (engine, storage):
        gate = storage.hold("sync", "*.distcp")
        first = engine.save(weights(1), step=1)
        second = pool.submit(engine.save, weights(2), step=2)
        busy = r"for the save of step 1, which is making its data durable \(max_in_flight=1\)"
        found = lines.wait_for(rf"save\(\) of step 2 has waited \d+ s {busy}", 2)
        assert (found.step, found.rank) == (2, 0)
        gate.open()
        assert first.result(TIMEOUT).step == 1
        assert second.result(TIMEOUT).result(TIMEOUT).step == 2


def test_a_save_that_waits_for_memory_says_how_much_is_held(root: Path, lines: LogLines) -> None:
    state = {"w": torch.zeros(3 * MIB)}
    with (
        ThreadPoolExecutor(1) as pool,
        gated_engine(root, max_in_flight=2, budget_bytes=16 * MIB) as (engine, storage),
    ):
        gate = storage.hold("write", "*.distcp")
        first = engine.save(state, step=1)
        second = pool.submit(engine.save, state, step=2)
        held = rf"earlier saves \(1\) hold \d+ of budget_bytes={16 * MIB}"
        found = lines.wait_for(rf"save\(\) of step 2 has waited \d+ s for \d+ bytes of staging memory: {held}", 2)
        assert (found.step, found.rank) == (2, 0)
        gate.open()
        assert first.result(TIMEOUT).step == 1
        assert second.result(TIMEOUT).result(TIMEOUT).step == 2


@pytest.mark.parametrize("name", ["ready", "close"])
def test_a_call_that_waits_for_a_save_names_it(root: Path, lines: LogLines, name: str) -> None:
    with ThreadPoolExecutor(1) as pool, gated_engine(root) as (engine, storage):
        gate = storage.hold("sync", "*.distcp")
        engine.save(weights(1), step=1)
        waiting = pool.submit({"ready": engine.wait_ready, "close": engine.close_blocking}[name])
        lines.wait_for(rf"{name}\(\) has waited \d+ s for the save of step 1, which is .*", 2)
        gate.open()
        waiting.result(TIMEOUT)


def test_a_close_that_waits_for_a_file_names_it(root: Path, lines: LogLines) -> None:
    with ThreadPoolExecutor(1) as pool, gated_engine(root) as (engine, storage):
        gate = storage.hold("sync", "*.pt")
        engine.save_file(weights(1), root.parent / "file.pt")
        waiting = pool.submit(engine.close_blocking)
        lines.wait_for(r"close\(\) has waited \d+ s for the save of \S+/file\.pt, which is .*", 2)
        gate.open()
        waiting.result(TIMEOUT)


@pytest.mark.parametrize("name", ["ready", "close"])
async def test_a_call_of_the_async_engine_that_waits_for_a_save_names_it(
    root: Path, lines: LogLines, name: str
) -> None:
    with gated_engine(root) as (engine, storage):
        gate = storage.hold("sync", "*.distcp")
        engine.save(weights(1), step=1)
        waiting = asyncio.create_task(getattr(engine, name)())
        await asyncio.to_thread(lines.wait_for, rf"{name}\(\) has waited \d+ s for the save of step 1, which is .*", 2)
        gate.open()
        await waiting


def test_whoever_waits_for_a_ticket_knows_it(root: Path, lines: LogLines) -> None:
    """The line tells of the save. ``result()`` is the caller's own wait."""
    with ThreadPoolExecutor(1) as pool, gated_engine(root) as (engine, storage):
        gate = storage.hold("sync", "*.distcp")
        waiting = pool.submit(engine.save(weights(1), step=1).result, TIMEOUT)
        lines.wait_for("the save of step 1 has made no progress .*", 3)
        gate.open()
        waiting.result(TIMEOUT)
    assert not any("result" in message for message in lines.messages)


# -- the disk -----------------------------------------------------------------------------------------


class GatedReads(GatedStorage):
    """Reads are held, too; and the lock, as a file server without its lock daemon holds it."""

    def __init__(self, executor: Executor) -> None:
        super().__init__(executor)
        self.may_lock = threading.Event()
        self.may_lock.set()

    async def run_read(self, call: Call, act: Callable[[], Awaitable[T]]) -> T:
        found = await self.run(call, act)
        assert found is not None or call.name == "status"
        return found  # type: ignore[return-value]

    def lock(self, path: Path) -> RootLock:
        assert self.may_lock.wait(TIMEOUT)
        return super().lock(path)


@contextmanager
def engine_with_reads(root: Path) -> Iterator[tuple[CheckpointEngine, GatedReads]]:
    executor = Executor("gated reads", 4)
    storage = GatedReads(executor)
    engine = CheckpointEngine(root, EngineConfig(), storage=storage)
    try:
        yield engine, storage
    finally:
        storage.open_gates()
        storage.may_lock.set()
        engine.close_blocking()
        executor.close(TIMEOUT)


def test_a_lock_that_hangs_is_told_of(root: Path, lines: LogLines) -> None:
    with ThreadPoolExecutor(1) as pool, engine_with_reads(root) as (engine, storage):
        storage.may_lock.clear()
        saving = pool.submit(engine.save, weights(1))
        assert lines.wait_for(f"taking the lock has taken {slow(root)}", 2).rank == 0
        storage.may_lock.set()
        assert saving.result(TIMEOUT).result(TIMEOUT).step == 1


def test_a_root_that_does_not_answer_is_told_of(root: Path, lines: LogLines) -> None:
    with engine_with_reads(root) as (engine, storage):
        gate = storage.hold("list_dir", root.name)
        steps = engine.steps()
        assert lines.wait_for(f"reading the steps has taken {slow(root)}", 2).rank == 0
        gate.open()
        assert steps.result(TIMEOUT) == []


@pytest.mark.parametrize(
    ("doing", "name", "where"),
    [
        ("looking for checkpoints has taken", "list_dir", "root"),
        ("opening a checkpoint has taken", "read_file", ROOT_MANIFEST),
        ("opening a checkpoint has taken", "read_file", ".metadata"),
        (r"opening __.*_0_0\.distcp has taken", "open_data_file", "*.distcp"),
        ("reading has made no progress for", "read_into", "*.distcp"),
    ],
)
def test_a_load_that_waits_for_the_disk_is_told_of(
    root: Path, lines: LogLines, doing: str, name: str, where: str
) -> None:
    with engine_with_reads(root) as (engine, storage):
        engine.save(weights(1)).result(TIMEOUT)
        gate = storage.hold(name, where)
        template = weights(0)
        loading = engine.load(template, None, strict=False, allow_missing=False, fallback=True)
        lines.wait_for(rf"{doing} \d+ s: the file system of {re.escape(str(root))}\S* is slow, or does not answer", 2)
        gate.open()
        assert loading.result(TIMEOUT).step == 1
        assert template["w"][0] == 1


# -- nothing waits ------------------------------------------------------------------------------------


def test_an_engine_that_waits_for_nothing_says_nothing(root: Path) -> None:
    with early_lines(TIMEOUT) as lines, SyncCheckpointEngine(root, EngineConfig(max_in_flight=1)) as engine:
        for step in range(1, 6):
            engine.save(weights(step), step=step)
        engine.ready()
        engine.load(weights(0))
    assert [record.getMessage() for record in lines.records if record.levelname == "WARNING"] == []
