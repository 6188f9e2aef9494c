"""A background save that fails: the log and ``on_error`` tell it at once, one ``save()`` or ``close()`` raises it."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anyio
import pytest
import torch
from builders import broken, listing, weights
from gated_storage import TIMEOUT, GatedStorage, gated_engine

from aio_ckpt import CheckpointEngine, SaveTicket
from aio_ckpt.engine.full_disk_remedy import step_remedy
from aio_ckpt.engine.statistics import Statistics
from aio_ckpt.errors import (
    CheckpointNotFoundError,
    EngineClosedError,
    ReadError,
    UnsafeObjectError,
    WriteError,
    WrongThreadError,
)
from aio_ckpt.format.step_names import StepNames
from aio_ckpt.storage.local import Storage
from aio_ckpt.write.full_disk import explained


def fail_unseen(
    engine: CheckpointEngine, storage: GatedStorage, error: BaseException | None = None, where: str = "sync"
) -> SaveTicket:
    """A save that has failed, whose ticket nobody waits for."""
    storage.fail(where, "*", error or broken())
    ticket = engine.save(weights(1))
    wait_unseen(ticket)
    return ticket


def wait_unseen(ticket: SaveTicket) -> None:
    """Until the save is settled, without a look at its failure."""
    settled = threading.Event()
    ticket.committed.add_done_callback(lambda _: settled.set())
    assert settled.wait(TIMEOUT)


# -- raised once, by a call that saves all the same -----------------------------------------------


def test_a_failure_that_nobody_awaited_is_raised_once_by_the_next_save_which_is_made(root: Path) -> None:
    with gated_engine(root) as (engine, storage):
        fail_unseen(engine, storage)
        with pytest.raises(WriteError, match="the disk is gone") as caught:
            engine.save(weights(2))
        assert "background save of step 1, which nobody awaited" in "".join(caught.value.__notes__)
        assert caught.value.ticket is not None
        assert caught.value.ticket.result(TIMEOUT).step == 1
        assert listing(root) == ["step_000000001"]
        assert engine.save(weights(3)).result(TIMEOUT).step == 2
        state = engine.read(1, only=None).result(TIMEOUT)
        assert state["w"][0] == 2, "the save of the call that raised holds the state of that call"


def test_a_failure_of_a_foreign_type_is_raised_with_its_ticket(root: Path) -> None:
    with gated_engine(root) as (engine, storage):
        fail_unseen(engine, storage, RuntimeError("odd"))
        with pytest.raises(RuntimeError, match="odd") as caught:
            engine.save(weights(2))
        assert caught.value.ticket.result(TIMEOUT).step == 1  # type: ignore[attr-defined]


class Mute(Exception):
    """An error whose text cannot be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_an_error_that_cannot_be_shown_fails_its_save_and_nothing_else(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with gated_engine(root) as (engine, storage):
        fail_unseen(engine, storage, Mute())
        assert "failed: Mute (its text cannot be shown) (rank 0, stage write)" in caplog.text
        with pytest.raises(Mute):
            engine.save(weights(2))
        engine.save(weights(3)).result(TIMEOUT)


def test_a_failure_found_while_save_waits_for_room_is_raised_by_that_save(root: Path) -> None:
    with gated_engine(root) as (engine, storage), ThreadPoolExecutor(1) as pool:
        gate = storage.hold("sync", "*.distcp")
        storage.fail("sync", "*", broken())
        engine.save(weights(1))
        gate.wait_reached()
        waiting = pool.submit(engine.save, weights(2))
        gate.open()
        with pytest.raises(WriteError, match="the disk is gone") as caught:
            waiting.result(TIMEOUT)
        assert caught.value.ticket is not None
        assert caught.value.ticket.result(TIMEOUT).step == 1


def test_if_the_new_save_is_refused_its_error_is_raised_and_tells_of_the_failure(root: Path) -> None:
    with gated_engine(root) as (engine, storage):
        fail_unseen(engine, storage)
        with pytest.raises(UnsafeObjectError) as caught:
            engine.save({"f": lambda: None})
        assert caught.value.__notes__ == [
            f"before this call, the background save of step 1 had failed, which nobody awaited: WriteError: {broken()}"
        ]
        assert caught.value.ticket is None
        assert engine.save(weights(2)).result(TIMEOUT).step == 1


def test_a_failure_that_nobody_awaited_is_raised_by_close_and_the_engine_is_closed(root: Path) -> None:
    with gated_engine(root) as (engine, storage):
        fail_unseen(engine, storage)
        with pytest.raises(WriteError, match="the disk is gone") as caught:
            engine.close_blocking()
        assert caught.value.ticket is None
        engine.close_blocking()
        with pytest.raises(EngineClosedError):
            engine.save(weights(2))


def test_a_failure_is_not_raised_again_once_a_waiter_was_given_it(root: Path) -> None:
    with gated_engine(root) as (engine, storage):
        ticket = fail_unseen(engine, storage)
        with pytest.raises(WriteError):
            ticket.result(TIMEOUT)
        engine.save(weights(2)).result(TIMEOUT)


def test_a_failure_whose_ticket_was_dropped_is_raised_by_the_next_save(root: Path) -> None:
    with gated_engine(root) as (engine, storage):
        del (ticket := [fail_unseen(engine, storage)])[:]
        assert not ticket
        gc.collect()
        with pytest.raises(WriteError, match="the disk is gone"):
            engine.save(weights(2))


def test_every_failure_that_nobody_awaited_is_raised_one_after_the_other(root: Path) -> None:
    with gated_engine(root, max_in_flight=2) as (engine, storage):
        gate = storage.hold("sync", "*.distcp")
        storage.fail("sync", "*", broken())
        storage.fail("sync", "*", broken())
        tickets = engine.save(weights(1)), engine.save(weights(2))
        gate.open()
        for ticket in tickets:
            wait_unseen(ticket)
        notes, made = [], []
        for number in (3, 4):
            with pytest.raises(WriteError) as caught:
                engine.save(weights(number))
            notes += caught.value.__notes__
            made.append(caught.value.ticket)
        assert sorted(note.split()[-4] for note in notes) == ["1,", "2,"]
        assert [ticket.result(TIMEOUT).step for ticket in made] == [1, 2]
        assert engine.save(weights(5)).result(TIMEOUT).step == 3


def test_a_save_that_raises_an_earlier_failure_and_fails_itself_is_raised_by_the_call_after(root: Path) -> None:
    with gated_engine(root) as (engine, storage):
        fail_unseen(engine, storage)
        storage.fail("sync", "*", WriteError(errno.EIO, "the disk is gone again", "x"))
        with pytest.raises(WriteError, match="the disk is gone") as caught:
            engine.save(weights(2))
        assert caught.value.ticket is not None
        wait_unseen(caught.value.ticket)
        with pytest.raises(WriteError, match="the disk is gone again"):
            engine.save(weights(3))
        engine.save(weights(4)).result(TIMEOUT)


# -- the log --------------------------------------------------------------------------------------


def only_error(caplog: pytest.LogCaptureFixture) -> logging.LogRecord:
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    return record


def test_a_failure_is_logged_at_once_with_its_cause_and_what_is_still_good(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with gated_engine(root, on_failure="log") as (engine, storage):
        fail_unseen(engine, storage)
        record = only_error(caplog)
        assert record.getMessage() == (
            f"the save of step 1 failed: WriteError: {broken()} (rank 0, stage write); no step is committed yet"
        )
        assert (record.name, record.step, record.rank) == ("aio_ckpt", 1, 0)  # type: ignore[attr-defined]
        engine.save(weights(2), step=400).result(TIMEOUT)
        caplog.clear()
        fail_unseen(engine, storage, where="rename")
        told = only_error(caplog).getMessage()
        assert "the save of step 401 failed: " in told
        assert told.endswith("(rank 0, stage commit); the newest committed step is 400")


def test_a_failure_in_doubt_says_that_the_step_may_be_there(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with gated_engine(root, on_failure="log") as (engine, storage):
        engine.save(weights(1), step=7).result(TIMEOUT)
        error = broken()
        error.in_doubt = True
        fail_unseen(engine, storage, error, where="rename")
        assert (
            only_error(caplog)
            .getMessage()
            .endswith("step 8 may still become visible; without it, the newest committed step is 7")
        )


def test_with_log_a_failure_is_only_logged(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with gated_engine(root, on_failure="log") as (engine, storage):
        ticket = fail_unseen(engine, storage)
        assert "save of step 1 failed: WriteError" in caplog.text
        engine.save(weights(2)).result(TIMEOUT)
        with pytest.raises(WriteError):
            ticket.result(TIMEOUT)


def test_a_cancelled_save_is_no_failure(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    told: list[Exception] = []
    with gated_engine(root, on_error=told.append) as (engine, storage):
        gate = storage.hold("sync", "*")
        ticket = engine.save(weights(1))
        gate.wait_reached()
        assert ticket.cancel()
        gate.open()
        wait_unseen(ticket)
    assert not told
    assert not caplog.records


class BadHandler(logging.Handler):
    """A handler that fails for every record."""

    def handle(self, record: logging.LogRecord) -> bool:
        raise RuntimeError("no log today")


def test_a_log_handler_that_raises_breaks_no_save(root: Path) -> None:
    logger, handler = logging.getLogger("aio_ckpt"), BadHandler()
    with gated_engine(root, on_failure="log") as (engine, storage):
        engine.save(weights(1)).result(TIMEOUT)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        try:
            fail_unseen(engine, storage)
            engine.save(weights(2)).result(TIMEOUT)
        finally:
            logger.setLevel(logging.NOTSET)
            logger.removeHandler(handler)
    assert listing(root) == ["step_000000001", "step_000000002"]


# -- callbacks ------------------------------------------------------------------------------------


class Told:
    """What a callback was given, and by which thread."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.values: list[object] = []
        self.threads: list[str] = []
        self.was_called = threading.Semaphore(0)
        self._error = error

    def __call__(self, value: object) -> None:
        self.values.append(value)
        self.threads.append(threading.current_thread().name)
        self.was_called.release()
        if self._error is not None:
            raise self._error

    def wait(self) -> object:
        assert self.was_called.acquire(timeout=TIMEOUT)
        return self.values[-1]


def test_on_error_gets_the_error_and_on_commit_the_report_on_an_engine_thread(root: Path) -> None:
    failed, committed = Told(), Told()
    with gated_engine(root, on_error=failed, on_commit=committed, on_failure="log") as (engine, storage):
        ticket = fail_unseen(engine, storage)
        assert failed.wait() is ticket.committed.peek()
        assert not ticket.committed.observed, "a callback awaits nothing: the failure is raised all the same"
        report = engine.save(weights(2)).result(TIMEOUT)
        assert committed.wait() is report
        assert all(name.startswith("aio_ckpt-") for name in failed.threads + committed.threads)
    assert (len(failed.values), len(committed.values)) == (1, 1)


@pytest.mark.parametrize("error", [ValueError("mine"), SystemExit(3), KeyboardInterrupt()])
def test_a_callback_that_raises_is_logged_and_breaks_nothing(
    root: Path, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    failed, committed = Told(error), Told(error)
    with gated_engine(root, on_error=failed, on_commit=committed, on_failure="log") as (engine, storage):
        fail_unseen(engine, storage)
        for number in (2, 3):
            engine.save(weights(number)).result(TIMEOUT)
            committed.wait()
    assert [record.getMessage() for record in caplog.records if "raised at step" in record.getMessage()] == [
        f"{name} raised at step {step}, which changes nothing for the save: {type(error).__name__}: {error}"
        for name, step in (("on_error", 1), ("on_commit", 1), ("on_commit", 2))
    ]
    assert listing(root) == ["step_000000001", "step_000000002"]


@pytest.mark.parametrize("kind", [ValueError, asyncio.CancelledError, SystemExit, KeyboardInterrupt, GeneratorExit])
def test_a_done_callback_that_raises_anything_is_logged_and_ends_nothing(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: type[BaseException]
) -> None:
    told, place = Told(kind("mine")), tmp_path / "place"
    with gated_engine(root) as (engine, storage):
        engine.save(weights(1), path=place).result(TIMEOUT)
        gate = storage.hold("sync")
        ticket, file = engine.save(weights(1)), engine.save_file(weights(1), tmp_path / "w.pt")
        removal, loading = engine.remove(place), engine.read(None, only=None, path=place)
        for work in (ticket.committed, file.committed, removal, loading):
            work.add_done_callback(told)
        gate.open()
        ticket.result(TIMEOUT)
        for _ in range(4):
            told.wait()
        assert isinstance(loading.exception(TIMEOUT), CheckpointNotFoundError)
        ticket.committed.add_done_callback(told if kind is not KeyboardInterrupt else lambda _: None)  # at once, here
        assert engine.save(weights(2)).result(TIMEOUT).step == 2
        removal.result(TIMEOUT)
    assert sum("a callback of a finished wait raised" in record.getMessage() for record in caplog.records) >= 4


def test_ctrl_c_during_a_done_callback_of_the_main_thread_is_raised(root: Path) -> None:
    with gated_engine(root) as (engine, _):
        ticket = engine.save(weights(1))
        ticket.result(TIMEOUT)
        with pytest.raises(KeyboardInterrupt):
            ticket.committed.add_done_callback(Told(KeyboardInterrupt()))


def test_an_error_while_an_outcome_is_recorded_is_logged_and_loses_no_ticket(
    root: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with gated_engine(root, on_failure="log") as (engine, storage):

        def count(*_: object) -> None:
            raise MemoryError("none left")

        monkeypatch.setattr(Statistics, "count", count)
        assert engine.save(weights(1)).result(TIMEOUT).step == 1
        storage.fail("sync", "*", broken())
        with pytest.raises(WriteError, match="the disk is gone"):
            engine.save(weights(2)).result(TIMEOUT)
        monkeypatch.undo()
        assert engine.save(weights(2)).result(TIMEOUT).step == 2
        engine.close_blocking()
    assert "the outcome of the save of step 1 was not recorded" in caplog.text
    assert "none left" in caplog.text


def test_a_log_handler_that_raises_loses_no_removal(root: Path, tmp_path: Path) -> None:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError("no log")

    handler = Broken()
    logging.getLogger("aio_ckpt").addHandler(handler)
    try:
        with gated_engine(root) as (engine, _), pytest.raises(CheckpointNotFoundError):
            engine.remove(tmp_path / "missing").result(TIMEOUT)
    finally:
        logging.getLogger("aio_ckpt").removeHandler(handler)


def test_a_callback_that_waits_for_its_engine_is_told_so(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    engines: list[CheckpointEngine] = []
    with gated_engine(root, on_commit=lambda report: engines[0].save({"w": torch.ones(1)})) as (engine, _):
        engines.append(engine)
        engine.save(weights(1)).result(TIMEOUT)
    assert "on_commit raised at step 1" in caplog.text
    assert WrongThreadError.__name__ in caplog.text


# -- a full disk ----------------------------------------------------------------------------------


def full(code: int = errno.ENOSPC) -> WriteError:
    return WriteError(code, os.strerror(code), "/disk/file")


@pytest.mark.parametrize(
    ("code", "remedy"), [(errno.ENOSPC, "free space"), (errno.EDQUOT, "raise the quota, free space")]
)
def test_a_full_disk_is_told_with_what_is_needed_and_free_and_what_helps(
    root: Path, caplog: pytest.LogCaptureFixture, code: int, remedy: str
) -> None:
    with gated_engine(root, on_failure="log") as (engine, storage):
        ticket = fail_unseen(engine, storage, full(code), where="write")
        error = ticket.exception()
        assert isinstance(error, WriteError)
        assert (error.errno, error.filename, error.stage) == (code, "/disk/file", "write")
        sizes = r"needs [\d.]+ kB, [\d.]+ [MGTP]B are free on its file system( \(it may be out of inodes: df -i\))?"
        room = r"keep_last=N needs room for N \+ 2 steps, as one is deleted while the next is written"
        told = (
            rf"{os.strerror(code)}: this save {sizes}; {remedy}, or save to another disk: there is no older step to "
            rf"delete, and {room}; `aio-ckpt du {re.escape(str(root))}` shows what else is there: '/disk/file'"
        )
        assert re.search(told, str(error))
        assert re.search(told, caplog.text)


@pytest.mark.parametrize("is_late", [False, True])
def test_a_file_system_that_does_not_tell_what_is_free_changes_nothing_else(
    root: Path, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aio_ckpt.write.full_disk.LOOK_SECS", 0.01 if is_late else TIMEOUT)

    async def free_bytes(self: Storage, path: Path) -> int:
        if is_late:
            await anyio.sleep_forever()
        raise ReadError(errno.EIO, "gone", str(path))

    monkeypatch.setattr(Storage, "free_bytes", free_bytes)
    with gated_engine(root, on_failure="log") as (engine, storage):
        error = fail_unseen(engine, storage, full()).exception()
        assert re.search(r"No space left on device: this save needs [\d.]+ kB; free space, or", str(error))
        engine.save(weights(2)).result(TIMEOUT)


def test_errors_of_a_disk_that_is_not_full_stay_as_they_are(root: Path) -> None:
    with gated_engine(root, on_failure="log") as (engine, storage):
        assert str(fail_unseen(engine, storage).exception()) == str(broken())


def test_a_disk_that_is_full_with_room_for_the_bytes_may_lack_inodes() -> None:
    told = explained("No space left on device", 8_000, 25_000_000, whose="", is_quota=False, remedy="less")
    assert "25 MB are free on its file system (it may be out of inodes: df -i)" in told


def test_the_remedy_of_a_full_disk_names_what_works_without_a_commit() -> None:
    remedy = step_remedy(Path("/runs/my run"), StepNames("step_{step}"), 2, 3)
    told = explained("No space", 8_530_000_000, 12, whose=" of rank 3 of 8", is_quota=False, remedy=remedy)
    assert told == (
        "No space: this save of rank 3 of 8 needs 8.53 GB, 12 B are free on its file system; free space, or delete an "
        "older step: engine.delete(step), or `aio-ckpt prune '/runs/my run' --keep-last 1 --yes` once the trainer has "
        "ended; keep_last=3 needs room for 5 steps, as one is deleted while the next is written"
    )


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_full_disk_offers_to_delete_a_step_only_if_there_is_an_older_one(root: Path, steps: int) -> None:
    with gated_engine(root, on_failure="log") as (engine, storage):
        for number in range(steps):
            engine.save(weights(number)).result(TIMEOUT)
        error = str(fail_unseen(engine, storage, full()).exception())
    assert ("or delete an older step: engine.delete(step)" in error) == (steps == 2)
    assert ("or save to another disk: there is no older step to delete" in error) == (steps < 2)


def test_delete_makes_room_on_a_full_disk_for_the_next_save(root: Path) -> None:
    with gated_engine(root, on_failure="log") as (engine, storage):
        for step in (1, 2):
            engine.save(weights(step), step).result(TIMEOUT)
        writes = ("write", "write_file", "make_dir", "create_data_file")
        storage.failures += [(name, "*", full()) for name in writes * 20]
        with pytest.raises(WriteError, match=r"engine\.delete\(step\)"):
            engine.save(weights(3), 3).result(TIMEOUT)
        anyio.run(engine.delete, 1)
        assert listing(root) == ["step_000000002"]
        storage.failures.clear()
        engine.save(weights(3), 3).result(TIMEOUT)
        assert listing(root) == ["step_000000002", "step_000000003"]
