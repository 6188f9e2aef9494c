"""The engine: busy policies, cancelling, waiting from anywhere, deadlines, closing."""

from __future__ import annotations

import asyncio
import errno
import fnmatch
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import uvloop
from builders import broken, listing, value, weights
from gated_storage import TIMEOUT, Gate, GatedStorage, gated_engine
from saved_files import RANK_MANIFEST

from aio_ckpt import CheckpointEngine, EngineConfig, SaveReport, SaveTicket, SyncCheckpointEngine
from aio_ckpt.commit import trash
from aio_ckpt.errors import (
    BusyError,
    SaveCancelledError,
    StallError,
    WriteError,
    WrongThreadError,
)
from aio_ckpt.storage import local as local_storage


def held_save(engine: CheckpointEngine, storage: GatedStorage) -> tuple[SaveTicket, Gate]:
    """A save whose data is written but not yet synced."""
    gate = storage.hold("sync", "*.distcp")
    ticket = engine.save(weights(1))
    gate.wait_reached()
    return ticket, gate


# -- busy -----------------------------------------------------------------------------------------


def test_wait_blocks_the_caller_until_there_is_room_and_the_ticket_says_how_long(root: Path) -> None:
    with gated_engine(root) as (engine, storage), ThreadPoolExecutor(1) as pool:
        first, gate = held_save(engine, storage)
        entered = threading.Event()

        def save() -> SaveTicket:
            entered.set()
            return engine.save(weights(2))

        waiting = pool.submit(save)
        assert entered.wait(TIMEOUT)
        assert not first.done()
        assert not waiting.done()
        gate.open()
        second = waiting.result(TIMEOUT)
        assert first.done(), "save() returned while max_in_flight others were pending"
        report = second.result(TIMEOUT)
        assert report is not None
        assert second.step == 2
        assert 0 < second.waited_secs == report.timings.waited_secs <= report.timings.blocked_secs
        assert first.waited_secs < second.waited_secs


def test_skip_returns_at_once_with_a_ticket_that_says_so(root: Path) -> None:
    with ThreadPoolExecutor(1) as pool, gated_engine(root, when_busy="skip") as (engine, storage):
        first, gate = held_save(engine, storage)
        ticket = pool.submit(engine.save, weights(2)).result(TIMEOUT)
        assert ticket.skipped
        assert ticket.done()
        assert ticket.result() is None
        assert ticket.staged.done()
        assert "skipped" in repr(ticket)
        assert not first.skipped
        gate.open()
        assert first.result(TIMEOUT).step == 1
        assert engine.save(weights(3)).result(TIMEOUT).step == 2, "a skipped save uses up no step"
        assert engine.steps().result() == [1, 2]


def test_raise_raises_and_says_what_to_do(root: Path) -> None:
    with ThreadPoolExecutor(1) as pool, gated_engine(root, when_busy="raise") as (engine, storage):
        first, gate = held_save(engine, storage)
        with pytest.raises(BusyError, match=r"step 1 is pending: await engine.ready\(\) first, or raise max_in_flight"):
            pool.submit(engine.save, weights(2)).result(TIMEOUT)
        gate.open()
        first.result(TIMEOUT)
        assert engine.save(weights(2)).result(TIMEOUT).step == 2


@pytest.mark.parametrize("when_busy", ["wait", "skip", "raise"])
def test_as_many_saves_as_max_in_flight_enter_without_waiting(root: Path, when_busy: str) -> None:
    with gated_engine(root, when_busy=when_busy, max_in_flight=3) as (engine, storage):
        gate = storage.hold("sync", "*.distcp")
        tickets = [engine.save(weights(number)) for number in (1, 2, 3)]
        assert not any(ticket.done() for ticket in tickets)
        gate.open()
        assert [ticket.result(TIMEOUT).step for ticket in tickets] == [1, 2, 3]
        assert [value(engine, step) for step in (1, 2, 3)] == [1, 2, 3]


async def test_ready_returns_once_there_is_room_and_does_not_block_the_loop(root: Path) -> None:
    with gated_engine(root, when_busy="raise") as (engine, storage):
        _, gate = held_save(engine, storage)
        ready = asyncio.create_task(engine.ready())
        asyncio.get_running_loop().call_soon(gate.open)  # would never run if ready() blocked this loop
        async with asyncio.timeout(TIMEOUT):
            await ready
            await engine.save(weights(2))


def test_after_a_failed_save_the_next_one_plans_anew(root: Path) -> None:
    with gated_engine(root) as (engine, storage):
        engine.save(weights(1)).result(TIMEOUT)
        assert engine.save(weights(1)).result(TIMEOUT).plan_hit
        storage.fail("sync", "*", broken())
        assert isinstance(engine.save(weights(1)).exception(TIMEOUT), WriteError)
        assert not engine.save(weights(1)).result(TIMEOUT).plan_hit
        engine.clear_cache()
        assert not engine.save(weights(1)).result(TIMEOUT).plan_hit


# -- cancelling -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [("create_data_file", "*"), ("write", "*"), ("sync", "*"), ("write_file", "*.bin")])
def test_a_save_cancelled_before_its_commit_leaves_nothing(root: Path, stage: tuple[str, str]) -> None:
    with gated_engine(root) as (engine, storage):
        gate = storage.hold(*stage)
        ticket = engine.save(weights(1))
        gate.wait_reached()
        assert ticket.cancel() is True
        with pytest.raises(SaveCancelledError, match="step 1 was cancelled; nothing became visible"):
            ticket.result(TIMEOUT)
        assert "cancelled" in repr(ticket)
        assert ticket.cancel() is False
        gate.open()
        assert listing(root) == []
        assert engine.lifetime.leases == 0
        assert engine.save(weights(2)).result(TIMEOUT).step == 1, "a cancelled save raises nothing and uses up no step"


@pytest.mark.parametrize("name", [".metadata", RANK_MANIFEST])
def test_a_cancelled_save_is_cleared_away_after_its_last_thread_is_done(
    root: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancelled await does not stop its thread, which would make its file anew in a directory being removed."""
    reached, goes_on, write = threading.Event(), threading.Event(), local_storage._write_file

    def held_write(path: Path, data: bytes) -> None:
        if fnmatch.fnmatch(path.name, name):
            reached.set()
            assert goes_on.wait(TIMEOUT)
        write(path, data)

    monkeypatch.setattr(local_storage, "_write_file", held_write)
    with gated_engine(root) as (engine, storage):
        ticket = engine.save(weights(1))
        assert reached.wait(TIMEOUT)
        assert ticket.cancel()
        goes_on.set()
        with pytest.raises(SaveCancelledError):
            ticket.result(TIMEOUT)
        removed = [call for call in storage.begun if call.name == "remove_tree"]
        assert len(removed) == 1
        assert listing(root) == []


@pytest.mark.parametrize("stage", [("rename", "pending/*"), ("sync_dir", "root")])
def test_a_save_cancelled_once_its_commit_began_is_committed(root: Path, stage: tuple[str, str]) -> None:
    with gated_engine(root) as (engine, storage):
        gate = storage.hold(*stage)
        ticket = engine.save(weights(1))
        gate.wait_reached()
        assert ticket.cancel() is False
        gate.open()
        assert ticket.result(TIMEOUT).step == 1
        assert listing(root) == ["step_000000001"]


def test_cancelling_one_save_leaves_the_others_alone(root: Path) -> None:
    with gated_engine(root, max_in_flight=3) as (engine, storage):
        gate = storage.hold("sync", "*.distcp")
        tickets = [engine.save(weights(number)) for number in (1, 2, 3)]
        assert tickets[1].cancel()
        gate.open()
        assert [tickets[n].result(TIMEOUT).step for n in (0, 2)] == [1, 3]
        assert isinstance(tickets[1].committed.peek(), SaveCancelledError)  # which is no await
        engine.save(weights(4)).result(TIMEOUT)  # raises nothing: a cancelled save is no failure
        assert engine.steps().result() == [1, 3, 4]


# -- waiting --------------------------------------------------------------------------------------


def wait_in_thread(ticket: SaveTicket) -> SaveReport | None:
    return ticket.result(TIMEOUT)


def wait_in_asyncio(ticket: SaveTicket) -> SaveReport | None:
    async def main() -> SaveReport | None:
        async with asyncio.timeout(TIMEOUT):
            return await ticket

    return asyncio.run(main())


def wait_in_uvloop(ticket: SaveTicket) -> SaveReport | None:
    async def main() -> SaveReport | None:
        async with asyncio.timeout(TIMEOUT):
            await ticket.staged
            return await ticket

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


def test_several_threads_and_loops_may_wait_for_one_save_at_once(root: Path) -> None:
    waiters: list[Callable[[SaveTicket], SaveReport | None]] = [wait_in_thread, wait_in_asyncio, wait_in_uvloop] * 2
    with gated_engine(root) as (engine, storage), ThreadPoolExecutor(len(waiters)) as pool:
        ticket, gate = held_save(engine, storage)
        waiting = [pool.submit(waiter, ticket) for waiter in waiters]
        gate.open()
        reports = [future.result(TIMEOUT) for future in waiting]
        assert [report is ticket.result() for report in reports] == [True] * len(waiters)


def test_every_waiter_of_a_failed_save_gets_the_failure(root: Path) -> None:
    with gated_engine(root) as (engine, storage), ThreadPoolExecutor(3) as pool:
        storage.fail("write_file", "aio_ckpt.*.json", broken())
        ticket, gate = held_save(engine, storage)
        waiting = [pool.submit(waiter, ticket) for waiter in (wait_in_thread, wait_in_asyncio, wait_in_uvloop)]
        gate.open()
        assert [type(future.exception(TIMEOUT)) for future in waiting] == [WriteError] * 3


@pytest.mark.parametrize("loop_factory", [None, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_an_async_trainer_saves_and_loads_in_its_own_loop(
    root: Path, loop_factory: Callable[[], asyncio.AbstractEventLoop] | None
) -> None:
    async def train() -> None:
        async with CheckpointEngine(root) as engine:
            report = await engine.save(weights(3))
            assert report is not None
            assert report.path == root / "step_000000001"
            target = weights(0)
            assert (await engine.load(target)).step == 1
            assert torch.equal(target["w"], weights(3)["w"])
            state: Any = await engine.read()
            assert torch.equal(state["w"], weights(3)["w"])

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(train())


async def test_giving_up_a_wait_does_not_cancel_the_save(root: Path) -> None:
    with gated_engine(root) as (engine, storage):
        ticket, gate = held_save(engine, storage)
        waits = [asyncio.ensure_future(_wait(ticket)) for _ in range(3)]
        for _ in range(3):
            await asyncio.sleep(0)  # until each has come to its await
        waits[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits[0]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await ticket
        with pytest.raises(StallError, match="committed of step 1: not reached within 0 s; it goes on"):
            ticket.result(0)
        assert not ticket.done()
        gate.open()
        assert (await waits[1]) is (await waits[2]) is (await ticket)
        assert (await engine.steps()) == [1]


async def _wait(ticket: SaveTicket) -> SaveReport | None:
    return await ticket


def test_a_caller_whose_loop_was_closed_meanwhile_does_no_harm(root: Path) -> None:
    with gated_engine(root) as (engine, storage):
        ticket, gate = held_save(engine, storage)

        async def leave() -> None:
            waiting = asyncio.ensure_future(_wait(ticket))
            await asyncio.sleep(0)
            assert not waiting.done()

        asyncio.run(leave())
        gate.open()
        assert ticket.result(TIMEOUT).step == 1


def test_the_callers_loop_runs_on_while_the_disk_stands_still(root: Path) -> None:
    async def main() -> bool:
        with gated_engine(root) as (engine, storage):
            ticket, gate = held_save(engine, storage)
            waiting = asyncio.ensure_future(_wait(ticket))
            for _ in range(100):
                await asyncio.sleep(0)  # turns of this loop, which a blocking wait would not give
            is_waiting = not waiting.done()
            gate.open()
            await waiting
            return is_waiting

    assert asyncio.run(main())


def test_waiting_on_the_engines_own_thread_is_refused(root: Path) -> None:
    with gated_engine(root) as (engine, storage):
        ticket, gate = held_save(engine, storage)
        calls: list[Callable[[], object]] = [
            ticket.result,
            engine.steps,
            engine.wait_ready,
            lambda: engine.rollback(1).result(),
            lambda: engine.save(weights(2)),
            lambda: engine.load({}, None, strict=False, allow_missing=False, fallback=True),
            engine.close_blocking,
            engine.terminate,
        ]
        outcomes: list[str] = []
        attempted = threading.Event()

        def attempt(_: object) -> None:
            for call in calls:
                try:
                    call()
                except WrongThreadError as error:
                    outcomes.append(type(error).__name__)
            attempted.set()

        ticket.committed.add_done_callback(attempt)  # runs on the engine's loop
        gate.open()
        assert attempted.wait(TIMEOUT)
        assert engine.save(weights(2)).result(TIMEOUT).step == 2, "a close that was refused must not close"
        assert outcomes == ["WrongThreadError"] * (len(calls) - 1), "only a ticket that is settled may be asked there"


# -- deadlines ------------------------------------------------------------------------------------


def test_a_store_that_stands_still_fails_the_save_with_who_and_where(root: Path) -> None:
    with gated_engine(root, stall_timeout_secs=1.0) as (engine, storage):
        storage.hold("write", "*.distcp")
        ticket = engine.save(weights(1))
        with pytest.raises(StallError, match=r"step 1 made no progress for 1.0 s: storage under .*root"):
            ticket.result(TIMEOUT)
    with gated_engine(root) as (engine, _):
        assert engine.save(weights(2)).result(TIMEOUT).step == 1


def test_a_save_that_goes_on_moving_is_never_stalled(root: Path) -> None:
    """Each write takes most of the stall timeout, all together a multiple of it."""
    with gated_engine(root, stall_timeout_secs=1.0, workers=1) as (engine, storage):
        storage.slow("write", secs=0.5)
        assert engine.save({"w": torch.ones(5 << 20)}).result(TIMEOUT).step == 1
        assert len([call for call in storage.calls if call.name == "write"]) >= 3


@pytest.mark.sampled
@pytest.mark.parametrize("stage", [("rename", "pending/*"), ("sync_dir", "root")])
def test_a_store_that_stands_still_during_the_commit_ends_the_wait(root: Path, stage: tuple[str, str]) -> None:
    with gated_engine(root, stall_timeout_secs=1.0) as (engine, storage):
        gate = storage.hold(*stage)
        ticket = engine.save(weights(1))
        with pytest.raises(StallError, match=r"commit of step 1 did not end .*may still become visible, whole"):
            ticket.result(TIMEOUT)
        gate.open()
        assert 1 + len(engine.steps().result()) == engine.save(weights(2)).step, "the disk was not looked at again"


def test_a_rename_that_was_not_durable_is_taken_back_durably_before_its_files_go(root: Path) -> None:
    with gated_engine(root) as (engine, storage):
        storage.fail("sync_dir", "root", broken())
        ticket = engine.save(weights(1))
        with pytest.raises(WriteError, match="the disk is gone") as caught:
            ticket.result(TIMEOUT)
        assert not caught.value.in_doubt
        assert listing(root) == []
        calls = [(call.name, call.path.relative_to(root).parent.name or call.path.name) for call in storage.calls]
        assert calls[-4:] == [
            ("rename", "step_000000001"),
            ("sync_dir", ".aio_ckpt"),
            ("sync_dir", "root"),
            ("remove_tree", "pending"),
        ]


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ENOTEMPTY, errno.EIO])
def test_a_directory_that_another_rank_clears_or_still_fills_is_no_leftover(
    root: Path, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    """ENOENT: it is gone. ENOTEMPTY: removed once more. Else it stays, and the log says so."""
    with gated_engine(root) as (engine, storage):
        storage.fail("create_data_file", "*", broken())
        storage.fail("remove_tree", "pending/*", WriteError(code, os.strerror(code), "/x"))
        with pytest.raises(WriteError, match="the disk is gone"):
            engine.save(weights(1)).result(TIMEOUT)
        assert bool(listing(root)) is (code != errno.ENOTEMPTY)
        assert ("stays until it is cleared" in caplog.text) is (code == errno.EIO)


@pytest.mark.parametrize("behind", ["a later commit", "close()"])
def test_what_could_not_be_removed_at_once_is_removed_later(root: Path, behind: str) -> None:
    with gated_engine(root) as (engine, storage):
        storage.fail("create_data_file", "*", broken())
        storage.fail("remove_tree", "pending/*", WriteError(errno.EIO, os.strerror(errno.EIO), "/x"))
        with pytest.raises(WriteError, match="the disk is gone"):
            engine.save(weights(1)).result(TIMEOUT)
        assert [name.partition("/")[0] for name in listing(root)] == ["pending"]
        if behind == "close()":
            engine.close_blocking()
        else:
            engine.save(weights(2)).result(TIMEOUT)
            wait(engine._root_session.passes, TIMEOUT)
        assert listing(root) == (["step_000000001"] if behind == "a later commit" else [])


@pytest.mark.parametrize(("call", "where"), [("rename", "pending/*"), ("remove_tree", "trash/*")])
def test_what_was_replaced_and_could_not_be_removed_is_removed_behind_the_commit(
    root: Path, call: str, where: str
) -> None:
    with gated_engine(root) as (engine, storage):
        engine.save(weights(1), step=1).result(TIMEOUT)
        if call == "rename":  # that of the next commit is an exchange
            storage.fail("rename", where, WriteError(errno.EIO, os.strerror(errno.EIO), "/x"))
        else:
            storage.fail("remove_tree", where, WriteError(errno.EBUSY, os.strerror(errno.EBUSY), "/x"))
        engine.save(weights(2), step=1, overwrite=True).result(TIMEOUT)
        wait(engine._root_session.passes, TIMEOUT)
        assert not storage.failures, "the call that was to fail was never made"
        assert listing(root) == ["step_000000001"]
        assert value(engine, 1) == 2


def test_a_directory_that_is_filled_again_and_again_is_left_to_the_next_engine(
    root: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trash, "THREAD_WAIT_SECS", 0.3)
    with gated_engine(root) as (engine, storage):
        storage.fail("create_data_file", "*", broken())
        for _ in range(20):
            storage.fail("remove_tree", "pending/*", WriteError(errno.ENOTEMPTY, "full again", "/x"))
        with pytest.raises(WriteError, match="the disk is gone"):
            engine.save(weights(1)).result(TIMEOUT)
        assert "stays until it is cleared: too slow" in caplog.text
        assert 2 <= [call.name for call in storage.begun].count("remove_tree") <= 10


def test_a_commit_that_ends_well_after_the_deadline_is_no_failure(root: Path) -> None:
    with gated_engine(root) as (engine, storage):
        engine.save(weights(1)).result(TIMEOUT)
        gate = storage.hold("sync_dir", "root")
        ticket = engine.save(weights(2), deadline_secs=1.5)
        gate.wait_reached()
        with pytest.raises(StallError, match=r"not reached within 1\.6 s; it goes on"):
            ticket.result(1.6)
        gate.open()
        assert ticket.exception(TIMEOUT) is None, "a failure was reported although the step is visible"
        assert engine.steps().result() == [1, 2]


# -- the sync engine --------------------------------------------------------------------------------


def test_the_sync_face_is_the_same_engine_for_a_classic_loop(root: Path) -> None:
    with SyncCheckpointEngine(root, EngineConfig(workers=2)) as engine:
        assert (engine.root, engine.config.workers) == (root, 2)
        ticket = engine.save(weights(1), step=200)
        ticket.staged.result(TIMEOUT)
        assert ticket.result(TIMEOUT).step == 200
        engine.ready()
        target = weights(0)
        assert engine.load(target).step == 200
        assert torch.equal(target["w"], weights(1)["w"])
        engine.save(weights(2), step=200, overwrite=True).result(TIMEOUT)
        assert float(engine.read(200, only=["w"])["w"][0]) == 2
        assert (engine.steps(), engine.latest_step()) == ([200], 200)
        assert (engine.plan_hits, engine.plan_misses) == (1, 1)
        engine.clear_cache()
        engine.save(weights(3), step=300, deadline_secs=TIMEOUT).result(TIMEOUT)
        assert (engine.plan_hits, engine.plan_misses) == (1, 2)
        assert engine.rollback(200) == [300]
        assert engine.lifetime.leases == 0


async def test_the_sync_face_works_inside_a_running_loop(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        engine.save(weights(1)).result(TIMEOUT)
        assert engine.load(weights(0)).step == 1
