"""Progress of saves, by their tickets, and of loads and reads, by a function of the caller."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import saved_files
import torch
from builders import TIMEOUT, broken, flip, steps_dir, weights
from gated_storage import GatedStorage, gated_engine
from image_files import MIB, uniform
from watched_writes import WatchedStorage, Write, watched_engine

import aio_ckpt
from aio_ckpt import CheckpointEngine, Progress, SaveTicket, SyncCheckpointEngine
from aio_ckpt.checkpoint import load_progress as restore_progress
from aio_ckpt.checkpoint import read_plan
from aio_ckpt.engine.job import WriteJob
from aio_ckpt.errors import ConfigError, MissingNameError, SaveCancelledError
from aio_ckpt.storage import data_file

COUNT = 6
"""Tensors of 1 MiB, each of which is a read of its own."""


# -- saves ------------------------------------------------------------------------------------------


def held_at(engine: CheckpointEngine, storage: GatedStorage, name: str, where: str = "*") -> SaveTicket:
    """A save that is held at a call of the storage."""
    gate = storage.hold(name, where)
    ticket = engine.save(weights(1))
    gate.wait_reached()
    return ticket


@pytest.mark.parametrize(
    ("call", "where", "stage", "has_written"),
    [
        ("write", "*.distcp", "write", False),
        ("sync", "*.distcp", "write", True),
        ("rename", "*", "commit", True),
    ],
)
def test_a_ticket_tells_the_stage_and_the_bytes_written(
    root: Path, call: str, where: str, stage: str, has_written: bool
) -> None:
    with gated_engine(root) as (engine, storage):
        ticket = held_at(engine, storage, call, where)
        now = ticket.progress
        assert (now.stage, now.bytes_done, now.has_ended) == (stage, now.bytes_total * has_written, False)
        storage.open_gates()
        nbytes = ticket.result(TIMEOUT).image_bytes
        assert nbytes == now.bytes_total > 0
        assert ticket.progress == Progress(stage="done", bytes_done=nbytes, bytes_total=nbytes)


def test_a_state_that_is_still_captured_tells_so_and_counts_what_is_written(tmp_path: Path) -> None:
    """The state goes in waves: ``save()`` has not returned when the last write is held."""
    gates: list[Any] = []

    def hold(write: Write) -> None:
        if write.number == 2:
            gates[0].hold()

    storage = WatchedStorage(hold)
    gates.append(storage.gate())
    with watched_engine(tmp_path, storage, budget_bytes=MIB, workers=1) as engine, ThreadPoolExecutor(1) as pool:
        saving = pool.submit(engine.save, uniform(COUNT, MIB, 1.0))
        gates[0].wait_held()
        (pending,) = engine._queue.pending(WriteJob)
        now = pending.ticket.progress
        assert now.stage == "capture"
        assert 0 < now.bytes_done < now.bytes_total
        gates[0].open()
        ticket = saving.result(TIMEOUT)
        ticket.result(TIMEOUT)
        assert ticket.progress.bytes_done == ticket.progress.bytes_total == now.bytes_total


def test_a_save_that_fails_or_is_cancelled_has_failed_with_the_bytes_written_until_then(root: Path) -> None:
    with gated_engine(root) as (engine, storage):
        storage.fail("sync", "*.distcp", broken())
        ticket = engine.save(weights(1))
        assert ticket.exception(TIMEOUT) is not None
        assert ticket.progress.stage == "failed"
        assert ticket.progress.has_ended
        assert ticket.progress.bytes_done == ticket.progress.bytes_total > 0
        ticket = held_at(engine, storage, "write", "*.distcp")
        ticket.cancel()
        storage.open_gates()
        assert isinstance(ticket.exception(TIMEOUT), SaveCancelledError)
        assert ticket.progress.stage == "failed"


def test_a_skipped_save_is_done_with_no_bytes(root: Path) -> None:
    with gated_engine(root, when_busy="skip") as (engine, storage):
        held_at(engine, storage, "sync", "*.distcp")
        ticket = engine.save(weights(2))
        assert ticket.skipped
        assert ticket.progress == Progress(stage="done", bytes_done=0, bytes_total=0)


# -- loads and reads --------------------------------------------------------------------------------


@pytest.fixture
def many_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read of 1 MiB at a time, so that a small state takes several."""
    monkeypatch.setattr(read_plan, "_REQUEST_BYTES_MIN", MIB)
    monkeypatch.setattr(read_plan, "REQUEST_BYTES_MAX", MIB)


@pytest.fixture
def all_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time passes between two calls in one stage."""
    monkeypatch.setattr(restore_progress, "_INTERVAL_SECS", 0.0)


def state(value: float) -> dict[str, Any]:
    return {**uniform(COUNT, MIB, float(value)), "module": torch.nn.Linear(4, 4), "step": int(value)}


@pytest.fixture
def saved(root: Path) -> Path:
    with SyncCheckpointEngine(root) as engine:
        for step in (1, 2):
            engine.save(state(step), step=step).result(TIMEOUT)
    return root


def async_call(root: Path, name: str, *args: Any, **options: Any) -> object:
    async def run() -> object:
        async with CheckpointEngine(root) as engine:
            return await getattr(engine, name)(*args, **options)

    return asyncio.run(run())


def sync_call(root: Path, name: str, *args: Any, **options: Any) -> object:
    with SyncCheckpointEngine(root) as engine:
        return getattr(engine, name)(*args, **options)


def standalone_call(root: Path, name: str, *args: Any, **options: Any) -> object:
    return getattr(aio_ckpt, name)(steps_dir(root, 2), *args, **options)


CALLS: list[Callable[..., object]] = [async_call, sync_call, standalone_call]


@pytest.mark.usefixtures("many_reads", "all_told")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("name", "stages"), [("load", ["read", "apply", "done"]), ("read", ["read", "done"])])
def test_the_caller_gets_each_stage_in_order_and_at_last_all_bytes(
    saved: Path, call: Callable[..., object], name: str, stages: list[str]
) -> None:
    told: list[Progress] = []
    threads: set[str] = set()

    def note(now: Progress) -> None:
        told.append(now)
        threads.add(threading.current_thread().name)

    call(saved, name, *([state(0)] if name == "load" else []), progress=note)
    assert list(dict.fromkeys(now.stage for now in told)) == stages
    assert [now.stage for now in told if now.stage != "read"] == stages[1:], "the other stages are told once"
    total = told[0].bytes_total
    assert total > COUNT * MIB
    assert {now.bytes_total for now in told} == {total}
    done = [now.bytes_done for now in told]
    assert done == sorted(done)
    assert done[0] < MIB
    assert any(MIB < nbytes < total for nbytes in done)
    assert told[-1] == Progress(stage="done", bytes_done=total, bytes_total=total)
    assert all("-io_" in name for name in threads), "the loop's thread serves all saves: it may not wait"


@pytest.mark.usefixtures("many_reads")
def test_between_stages_the_function_is_called_once_an_interval(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restore_progress, "_INTERVAL_SECS", 1e9)
    told: list[Progress] = []
    sync_call(saved, "load", state(0), progress=told.append)
    assert [now.stage for now in told] == ["read", "apply", "done"]


@pytest.mark.usefixtures("many_reads", "all_told")
def test_calls_do_not_overlap_and_the_caller_goes_on_after_the_last_one(saved: Path) -> None:
    running, most, ended = 0, 0, list[str]()

    def slow(now: Progress) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        threading.Event().wait(0.002)
        running -= 1
        ended.append(now.stage)

    with SyncCheckpointEngine(saved) as engine:
        for call in (lambda: engine.load(state(0), progress=slow), lambda: engine.read(progress=slow)):
            ended.clear()
            call()
            assert (most, running, ended[-1]) == (1, 0, "done")


@pytest.mark.usefixtures("many_reads", "all_told")
@pytest.mark.parametrize("error", [ValueError("no terminal"), SystemExit(3), KeyboardInterrupt()])
def test_an_error_of_the_function_is_logged_once_and_breaks_no_load(
    saved: Path, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[Progress] = []

    def fail(now: Progress) -> None:
        calls.append(now)
        raise error

    template = state(0)
    with caplog.at_level(logging.WARNING, "aio_ckpt"):
        assert sync_call(saved, "load", template, progress=fail).step == 2
    assert template["step"] == 2
    assert len(calls) == 1
    (record,) = caplog.records
    assert record.getMessage() == f"progress= raised, it is not called again: {type(error).__name__}: {error}"


@pytest.mark.usefixtures("many_reads", "all_told", "quiet")
def test_if_a_damaged_step_is_passed_by_the_bytes_begin_anew_and_the_last_call_has_all(saved: Path) -> None:
    flip(saved_files.data_file(steps_dir(saved, 2)), 5 * MIB // 2)
    told: list[Progress] = []
    assert sync_call(saved, "load", state(0), progress=told.append).step == 1
    starts = [at for at, now in enumerate(told) if at == 0 or now.bytes_done < told[at - 1].bytes_done]
    assert len(starts) == 3, "step 2 twice, then step 1"
    assert [now.stage for now in told[starts[-1] :] if now.stage != "read"] == ["apply", "done"]
    assert told[-1].bytes_done == told[-1].bytes_total > COUNT * MIB


@pytest.mark.parametrize("call", CALLS)
def test_a_load_that_fails_before_it_reads_is_told_as_failed(saved: Path, call: Callable[..., object]) -> None:
    told: list[Progress] = []
    with pytest.raises(MissingNameError):
        call(saved, "load", {"other": torch.ones(1)}, progress=told.append)
    with pytest.raises(MissingNameError):
        call(saved, "read", only=["other"], progress=told.append)
    assert told == [Progress(stage="failed", bytes_done=0, bytes_total=0)] * 2


async def test_a_load_that_is_given_up_ends_as_failed_before_the_caller_goes_on(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Progress] = []
    begun, goes_on, read = asyncio.Event(), threading.Event(), data_file.ReadFile._read
    loop = asyncio.get_running_loop()

    def held(*arguments: Any) -> int:
        loop.call_soon_threadsafe(begun.set)
        assert goes_on.wait(TIMEOUT)
        return read(*arguments)

    async with CheckpointEngine(saved) as engine:
        monkeypatch.setattr(data_file.ReadFile, "_read", held)
        load = asyncio.ensure_future(engine.load(uniform(COUNT, MIB, 0.0), progress=told.append))
        async with asyncio.timeout(TIMEOUT):
            await begun.wait()
            load.cancel()
            loop.call_soon(goes_on.set)
            with pytest.raises(asyncio.CancelledError):
                await load
    *before, last = [now.stage for now in told]
    assert ({*before}, last) == ({"read"}, "failed")


async def a_coroutine_function(_: Progress) -> None: ...


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("wrong", [5, "bar", a_coroutine_function])
def test_a_progress_that_is_no_plain_function_is_refused_by_name(
    saved: Path, call: Callable[..., object], wrong: object
) -> None:
    template = state(0)
    for name, args in (("load", [template]), ("read", [])):
        with pytest.raises(ConfigError, match=r"^progress=.*: give a plain function"):
            call(saved, name, *args, progress=wrong)
    assert template["step"] == 0
