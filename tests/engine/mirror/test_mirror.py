"""The mirror: which steps are copied, when they may expire, which of both a load takes, and what a failure leaves."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
import torch.distributed.checkpoint as dcp
from builders import flip, weights
from saved_files import data_file
from waits import until
from warm_python import WarmPython

import aio_ckpt
from aio_ckpt import CheckpointEngine, EngineConfig, Mirror, SyncCheckpointEngine, copying
from aio_ckpt.commit import mirror_copies
from aio_ckpt.engine.state_save import StateSaves
from aio_ckpt.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    EngineClosedError,
    ReadError,
    RootError,
    StallError,
    StepOrderError,
    WriteError,
    WrongThreadError,
)
from aio_ckpt.format.root_names import ABANDONED_DIR
from aio_ckpt.mirror import mirror_queue
from aio_ckpt.mirror.copy_step import StepCopier
from aio_ckpt.mirror.pace import YIELD_SECS, Pace
from aio_ckpt.storage import local
from aio_ckpt.storage.local import Storage
from aio_ckpt.storage.small_files import save_of

TIMEOUT = 60.0


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "mirror"


@contextlib.contextmanager
def opened(
    root: Path, place: Path, *, every: int = 1, keep: int | None = None, **settings: Any
) -> Iterator[SyncCheckpointEngine]:
    config = EngineConfig(mirror=Mirror(place, every=every, keep_last=keep), **settings)
    with SyncCheckpointEngine(root, config) as engine:
        yield engine


def value_of(state: dict[str, Any]) -> float:
    return float(state["w"].flatten()[0])


def damage(checkpoint: Path) -> None:
    file = data_file(checkpoint)
    data = file.read_bytes()
    flip(file, data.index(weights(int(checkpoint.name[-1]))["w"].numpy().tobytes()))


def steps_in(root: Path) -> list[int]:
    with SyncCheckpointEngine(root) as engine:
        return engine.steps()


def mirrored(engine: SyncCheckpointEngine, *steps: int, **options: Any) -> list[Path | None]:
    """Save steps, each once the copy of the one before is there."""
    return [engine.save(weights(step), step, **options).mirrored.result(TIMEOUT) for step in steps]


def loaded(engine: SyncCheckpointEngine, step: int | None = None) -> tuple[int, Path]:
    state = weights(0)
    report = engine.load(state, step)
    assert value_of(state) == report.step
    return report.step, report.path.parent


class GatedCopies:
    """Copies to a disk, which stand still at their first file until the gate is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.gate, copy = threading.Event(), threading.Event(), copying._copy_file
        self.error: BaseException | None = None

        def gated(*arguments: Any) -> None:
            self.entered.set()
            self.gate.wait(TIMEOUT)
            if self.error is not None:
                raise self.error
            copy(*arguments)

        monkeypatch.setattr(copying, "_copy_file", gated)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[GatedCopies]:
    gated = GatedCopies(monkeypatch)
    yield gated
    gated.gate.set()


def lines(caplog: pytest.LogCaptureFixture, part: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if part in record.getMessage()]


# -- copying ----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_a_copy_is_a_checkpoint_of_its_own_that_stock_reads(root: Path, place: Path) -> None:
    with opened(root, place) as engine:
        assert mirrored(engine, 3) == [place / "step_000000003"]
        assert engine.stats().mirrored_step == 3
    shutil.rmtree(root)
    state = {"w": torch.zeros_like(weights(0)["w"])}
    dcp.load(state, checkpoint_id=place / "step_000000003")
    assert torch.equal(state["w"], weights(3)["w"])
    assert steps_in(place) == [3]


def test_steps_divisible_by_every_are_copied_and_the_newest_of_them_kept(root: Path, place: Path) -> None:
    with opened(root, place, every=2, keep=2) as engine:
        found = mirrored(engine, *range(1, 8))
    assert [path and path.name[-1] for path in found] == [None, "2", None, "4", None, "6", None]
    assert steps_in(place) == [4, 6]
    assert steps_in(root) == list(range(1, 8))


def test_a_protected_copy_stays(root: Path, place: Path) -> None:
    with opened(root, place, keep=1) as engine:
        mirrored(engine, 1)
        with SyncCheckpointEngine(place) as there:
            there.protect(1)
        mirrored(engine, 2, 3)
    assert steps_in(place) == [1, 3]


def test_the_caller_s_files_and_a_save_by_path(root: Path, place: Path, tmp_path: Path) -> None:
    with opened(root, place) as engine:
        mirrored(engine, 1, files={"config.json": b"{}"})
        assert engine.save(weights(2), path=root / "best").mirrored.result(TIMEOUT) is None
        assert engine.save_file(weights(2), tmp_path / "w.pt").mirrored.result(TIMEOUT) is None
    assert (place / "step_000000001" / "config.json").read_bytes() == b"{}"
    assert not (place / "best").exists()


def test_an_overwritten_step_is_copied_anew(root: Path, place: Path) -> None:
    with opened(root, place) as engine:
        mirrored(engine, 1)
        assert engine.save(weights(9), 1, overwrite=True).mirrored.result(TIMEOUT) == place / "step_000000001"
    with SyncCheckpointEngine(place) as engine:
        state = weights(0)
        engine.load(state)
    assert value_of(state) == 9


def test_the_copy_of_an_overwritten_step_stays_until_the_new_one_was_verified(
    root: Path, place: Path, copies: GatedCopies
) -> None:
    copies.gate.set()
    with opened(root, place) as engine:
        mirrored(engine, 1, files={"config.json": b"old", "notes": b"1"})
        copies.entered.clear()
        copies.gate.clear()
        ticket = engine.save(weights(9), 1, overwrite=True, files={"config.json": b"new"})
        assert copies.entered.wait(TIMEOUT)
        assert value_of(aio_ckpt.read(place / "step_000000001")) == 1
        copies.gate.set()
        ticket.mirrored.result(TIMEOUT)
    assert value_of(aio_ckpt.read(place / "step_000000001")) == 9
    assert (place / "step_000000001/config.json").read_bytes() == b"new"
    assert not (place / "step_000000001/notes").exists()
    assert len(os.listdir(place / "step_000000001")) == len(os.listdir(root / "step_000000001"))


def test_a_directory_of_the_user_in_an_overwritten_step_is_copied_anew(root: Path, place: Path) -> None:
    notes = "step_000000001/notes"
    with opened(root, place) as engine:
        mirrored(engine, 1)
        for number in (1, 2):
            (root / notes).mkdir(exist_ok=True)
            (root / notes / f"{number}.txt").write_text("mine")
            ticket = engine.save(weights(1 + number), 1, overwrite=True)
            assert ticket.mirrored.result(TIMEOUT) == place / "step_000000001"
    assert value_of(aio_ckpt.read(place / "step_000000001")) == 3
    assert sorted(os.listdir(place / notes)) == ["1.txt", "2.txt"]


def test_a_newer_step_overtakes_one_that_waits_and_neither_expires(
    root: Path, place: Path, copies: GatedCopies, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(root, place, keep_last=1) as engine:
        first = engine.save(weights(1), 1)
        assert copies.entered.wait(TIMEOUT)
        others = [engine.save(weights(step), step) for step in (2, 3, 4)]
        assert [other.mirrored.result(TIMEOUT) for other in others[:2]] == [None, None]
        others[2].result(TIMEOUT)
        engine.save(weights(5), path=root / "other").result(TIMEOUT)  # behind the passes of retention
        until(lambda: engine.steps() == [1, 4])
        copies.gate.set()
        assert [ticket.mirrored.result(TIMEOUT) for ticket in (first, others[2])] == [
            place / "step_000000001",
            place / "step_000000004",
        ]
        mirrored(engine, 6)
    assert steps_in(root) == [6]
    assert steps_in(place) == [1, 4, 6]
    assert lines(caplog, "came before its turn") == [
        f"step {step} is not copied to {place}: step {step + 1} came before its turn" for step in (2, 3)
    ]


def test_close_waits_for_the_copy_and_says_so(
    root: Path, place: Path, copies: GatedCopies, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aio_ckpt.runtime.waiting.FIRST_LINE_SECS", 0.05)

    def open_when_told() -> None:
        until(lambda: bool(lines(caplog, "has waited")))
        copies.gate.set()

    with opened(root, place) as engine:
        ticket = engine.save(weights(1), 1)
        assert copies.entered.wait(TIMEOUT)
        opener = threading.Thread(target=open_when_told)
        opener.start()
    opener.join()
    assert ticket.mirrored.result(0) == place / "step_000000001"
    assert f"for the copy of step 1 to {place}" in lines(caplog, "has waited")[0]


def test_what_terminate_leaves_the_next_engine_copies(
    root: Path, place: Path, copies: GatedCopies, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(root, place) as engine:
        ticket = engine.save(weights(1), 1)
        ticket.result(TIMEOUT)
        assert copies.entered.wait(TIMEOUT)
        threading.Timer(0.2, copies.gate.set).start()
        engine.terminate()
        with pytest.raises(EngineClosedError, match="before step 1 was copied"):
            ticket.mirrored.result(TIMEOUT)
    assert lines(caplog, "the next engine with this mirror copies the newest step")
    with opened(root, place):
        pass  # close() waits
    assert steps_in(place) == [1]


KILLED = """
    import os, sys, threading
    from pathlib import Path
    from builders import weights
    from aio_ckpt import CheckpointEngine, EngineConfig, Mirror, SyncCheckpointEngine, copying

    copy, copied, saved = copying._copy_file, [], threading.Event()

    def second_file_hangs(*arguments):
        if copied:
            saved.wait()
            os.write(1, b"held\\n")  # print() of two threads mixes their lines
            threading.Event().wait()
        copied.append(arguments)
        copy(*arguments)

    copying._copy_file = second_file_hangs
    root, place = map(Path, sys.argv[1:])
    with SyncCheckpointEngine(root, EngineConfig(mirror=Mirror(place))) as engine:
        for step in (1, 2):
            engine.save(weights(step), step).result(60)
        saved.set()
        threading.Event().wait()
"""


def test_a_copy_that_a_kill_ended_is_made_by_the_next_run(root: Path, place: Path) -> None:
    with WarmPython(KILLED, str(root), str(place), stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        child.send_signal(signal.SIGKILL)
    assert steps_in(place) == []
    with opened(root, place):
        pass
    assert steps_in(place) == [2]
    assert os.listdir(place / ".aio_ckpt" / "pending") == []


def test_a_copy_looks_at_its_own_step_alone_however_many_the_mirror_holds(
    root: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a store, each look is a request."""
    looks, real = list[Path](), local._status
    monkeypatch.setattr(local, "_status", lambda path: (looks.append(path), real(path))[1])
    counts, held = [], 1
    for many in (20, 80):
        with opened(root, place) as engine:
            first = engine.save(weights(1), many * 10).mirrored.result(TIMEOUT)
            for step in range(held + 1, many):
                shutil.copytree(first, place / f"step_{step:09d}")
            held = many
            looks.clear()
            engine.save(weights(2), many * 10 + 1).mirrored.result(TIMEOUT)
            counts.append(sum(path.is_relative_to(place) for path in looks))
    assert counts[0] == counts[1]


# -- failures ---------------------------------------------------------------------------------------


def test_a_copy_that_fails_is_tried_again_and_fails_no_save(
    root: Path, place: Path, copies: GatedCopies, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mirror_queue, "_FIRST_PAUSE_SECS", 0.01)
    monkeypatch.setattr(mirror_queue, "_LONGEST_PAUSE_SECS", 0.01)
    copies.error = WriteError(errno.ENOSPC, "No space left on device", "x")
    copies.gate.set()
    with opened(root, place) as engine:
        ticket = engine.save(weights(1), 1)
        until(lambda: len(lines(caplog, "step 1 was not copied")) >= 3)
        copies.error = None
        assert ticket.mirrored.result(TIMEOUT) == place / "step_000000001"


def test_a_copy_that_fails_until_the_end_is_the_error_of_its_milestone(
    root: Path, place: Path, copies: GatedCopies
) -> None:
    copies.error = WriteError(errno.ENOSPC, "No space left on device", "x")
    copies.gate.set()
    with opened(root, place) as engine:
        ticket = engine.save(weights(1), 1)
    assert isinstance(ticket.mirrored.exception(TIMEOUT), WriteError)
    assert steps_in(place) == []


def test_a_damaged_step_is_not_copied(root: Path, place: Path, copies: GatedCopies) -> None:
    with opened(root, place) as engine:
        ticket = engine.save(weights(1), 1)
        assert copies.entered.wait(TIMEOUT)
        damage(root / "step_000000001")
        copies.gate.set()
    assert isinstance(ticket.mirrored.exception(TIMEOUT), CorruptCheckpointError)
    assert steps_in(place) == []


def test_a_mirror_that_hangs_is_given_up_after_a_while(
    root: Path, place: Path, copies: GatedCopies, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mirror_queue, "longest_silence", lambda _: 0.0)
    with opened(root, place, stall_timeout_secs=0.5) as engine:
        ticket = engine.save(weights(1), 1)
        assert copies.entered.wait(TIMEOUT)
        until(lambda: bool(lines(caplog, "has not moved for 0.5 s")))
        copies.gate.set()
        assert ticket.mirrored.state == "pending"
    assert ticket.mirrored.exception(TIMEOUT) is None or isinstance(ticket.mirrored.exception(0), StallError)


def test_a_handler_of_the_log_that_raises_ends_no_mirror(root: Path, place: Path) -> None:
    class Raises(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if " is in " in record.getMessage():
                raise OSError(errno.ENOSPC, "no room for the log")

    handler, logger = Raises(), logging.getLogger("aio_ckpt")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        with opened(root, place) as engine:
            assert mirrored(engine, 1, 2) == [place / f"step_00000000{step}" for step in (1, 2)]
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def test_a_callback_of_a_copy_that_waits_for_another_copy_is_told_so(root: Path, place: Path) -> None:
    told: list[BaseException | None] = []
    with opened(root, place) as engine:

        def save_and_wait(_: object) -> None:
            try:
                engine.save(weights(2), 2).mirrored.result(TIMEOUT)
            except BaseException as error:  # noqa: BLE001
                told.append(error)

        engine.save(weights(1), 1).mirrored.add_done_callback(save_and_wait)
        until(lambda: bool(told))
    assert [type(error) for error in told] == [WrongThreadError]
    assert steps_in(place) == [1, 2]


def test_an_engine_that_cannot_be_opened_leaves_no_thread_of_its_mirror(
    root: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: StateSaves) -> None:
        raise StallError("the ranks have not met")

    monkeypatch.setattr(StateSaves, "meet", fail)
    with pytest.raises(StallError, match="have not met"), opened(root, place):
        pass
    assert [thread.name for thread in threading.enumerate() if "mirror" in thread.name] == []


def test_another_writer_of_the_mirror_is_left_alone(root: Path, place: Path) -> None:
    with SyncCheckpointEngine(place) as other:
        other.save(weights(7), 7).result(TIMEOUT)
        with opened(root, place) as engine:
            ticket = engine.save(weights(8), 8)
    error = ticket.mirrored.exception(TIMEOUT)
    assert isinstance(error, RootError)
    assert steps_in(place) == [7]


# -- loading ----------------------------------------------------------------------------------------


def test_a_root_that_is_lost_is_loaded_from_the_mirror(root: Path, place: Path) -> None:
    with opened(root, place) as engine:
        mirrored(engine, 1, 2)
    shutil.rmtree(root)
    with opened(root, place) as engine:
        assert loaded(engine) == (2, place)
        assert loaded(engine, 1) == (1, place)
        assert value_of(engine.read()) == 2
        mirrored(engine, 3)
        assert loaded(engine) == (3, root)
    assert steps_in(place) == [1, 2, 3]


def test_the_step_of_a_copy_counts_for_what_comes_next(root: Path, place: Path) -> None:
    with opened(root, place) as engine:
        mirrored(engine, 10, 20)
    shutil.rmtree(root)
    with opened(root, place) as engine:
        assert engine.latest_step() == 20  # the loop of README asks this before it loads
        assert loaded(engine) == (20, place)
        with pytest.raises(StepOrderError, match="newest committed or pending step 20"):
            engine.save(weights(5), 5)
        ticket = engine.save(weights(21))
        assert (ticket.step, ticket.mirrored.result(TIMEOUT)) == (21, place / "step_000000021")


def test_a_damaged_root_costs_no_copy(root: Path, place: Path) -> None:
    with opened(root, place, keep=1) as engine:
        mirrored(engine, 1)
    (root / "step_000000001" / ".metadata").write_bytes(b"")
    with opened(root, place, keep=1) as engine:
        state = weights(0)
        assert engine.load(state).path == place / "step_000000001"
    assert steps_in(place) == [1]


def test_a_step_of_another_run_in_the_mirror_is_not_replaced(root: Path, place: Path, tmp_path: Path) -> None:
    with opened(root, place) as engine, opened(tmp_path / "other", place) as other:
        mirrored(engine, 1)
        other.save(weights(7), 2).mirrored.result(TIMEOUT)
        error = engine.save(weights(2), 2).mirrored.exception(TIMEOUT)
    assert isinstance(error, CheckpointExistsError)
    with SyncCheckpointEngine(place) as there:
        assert value_of(there.read(2)) == 7


def test_a_rollback_counts_for_copies_of_steps_that_the_root_has_deleted(root: Path, place: Path) -> None:
    with opened(root, place, keep_last=1, keep_every=5) as engine:
        mirrored(engine, *range(4, 9))
        until(lambda: engine.steps() == [5, 8])
        assert engine.rollback(5) == [8]
        assert loaded(engine) == (5, root)
        mirrored(engine, 6)
    assert steps_in(place) == [4, 5, 6]


async def test_the_last_save_of_an_async_engine_is_copied(root: Path, place: Path) -> None:
    for step in range(1, 11):
        async with CheckpointEngine(root, EngineConfig(mirror=Mirror(place))) as engine:
            ticket = engine.save(weights(step), step)
            await ticket
        assert await ticket.mirrored == place / f"step_{step:09d}"


def test_an_overwritten_older_step_does_not_take_the_place_of_the_newest(
    root: Path, place: Path, copies: GatedCopies
) -> None:
    with opened(root, place) as engine:
        first = engine.save(weights(1), 1)
        assert copies.entered.wait(TIMEOUT)
        newest = engine.save(weights(2), 2)
        newest.result(TIMEOUT)
        assert engine.save(weights(9), 1, overwrite=True).mirrored.result(TIMEOUT) is None
        copies.gate.set()
        assert newest.mirrored.result(TIMEOUT) == place / "step_000000002"
        first.mirrored.exception(TIMEOUT)


def test_after_a_rollback_a_step_that_waits_does_not_pass_over_the_next(
    root: Path, place: Path, copies: GatedCopies
) -> None:
    with opened(root, place) as engine:
        engine.save(weights(1), 1).result(TIMEOUT)
        assert copies.entered.wait(TIMEOUT)
        dropped = engine.save(weights(9), 9)
        dropped.result(TIMEOUT)
        engine.rollback(1)
        with pytest.raises(CheckpointNotFoundError, match=r"step 9 is not copied: rollback\(1\) abandoned it"):
            dropped.mirrored.result(TIMEOUT)
        later = engine.save(weights(5), 5)
        copies.gate.set()
        assert later.mirrored.result(TIMEOUT) == place / "step_000000005"
        assert engine.stats().mirrored_step == 5
        engine.rollback(1)
        assert engine.stats().mirrored_step is None
    assert steps_in(place) == [1]


def test_a_copy_that_ends_after_a_rollback_has_abandoned_its_step_counts_for_nothing(
    root: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, is_there, gate = StepCopier.copy, threading.Event(), threading.Event()

    async def copied(self: StepCopier, step: int, *arguments: Any, **options: Any) -> Path:
        path = await real(self, step, *arguments, **options)
        if step == 2:
            is_there.set()
            assert await anyio.to_thread.run_sync(gate.wait, TIMEOUT)
        return path

    monkeypatch.setattr(StepCopier, "copy", copied)
    with opened(root, place) as engine:
        mirrored(engine, 1)
        second = engine.save(weights(2), 2)
        assert is_there.wait(TIMEOUT)
        engine.rollback(1)
        gate.set()
        assert second.mirrored.result(TIMEOUT) == place / "step_000000002"
        assert engine.stats().mirrored_step == 1
        assert mirrored(engine, 2) == [place / "step_000000002"]
        assert loaded(engine) == (2, root)


def test_a_copy_that_a_rollback_breaks_off_is_not_tried_again(root: Path, place: Path, copies: GatedCopies) -> None:
    copies.gate.set()
    with opened(root, place) as engine:
        mirrored(engine, 1)
        copies.entered.clear()
        copies.gate.clear()
        second = engine.save(weights(2), 2)
        assert copies.entered.wait(TIMEOUT)
        engine.rollback(1)
        copies.error = OSError(errno.EIO, "the mirror")
        copies.gate.set()
        assert second.mirrored.exception(TIMEOUT) is copies.error
        copies.error = None
        assert mirrored(engine, 2) == [place / "step_000000002"]


def of_an_older_run(root: Path, place: Path) -> None:
    """Step 100 in the mirror, of a root that is gone."""
    with opened(root, place) as engine:
        mirrored(engine, 100)
    shutil.rmtree(root)


def test_after_a_failed_save_steps_go_on_behind_those_of_the_mirror(
    root: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of a lower number would be older than the mirror's, which the next load would then take."""
    of_an_older_run(root, place)
    with opened(root, place) as engine:
        assert loaded(engine) == (100, place)
        with monkeypatch.context() as patched:
            patched.setattr(Storage, "write_file", refuse)
            with pytest.raises(WriteError):
                engine.save(weights(1)).result(TIMEOUT)
        assert engine.save(weights(1)).result(TIMEOUT).step == 101


def test_after_a_deletion_steps_go_on_behind_those_of_the_mirror(root: Path, place: Path) -> None:
    of_an_older_run(root, place)
    with opened(root, place) as engine:
        assert engine.save(weights(1)).result(TIMEOUT).step == 101
        engine.delete(101, allow_newest=True)
        assert engine.save(weights(1)).result(TIMEOUT).step > 100


def test_a_mirror_is_read_once_and_keeps_no_later_call(
    root: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that does not answer would keep each save that follows one that failed, and each deletion."""
    real, asked = os.listdir, list[str]()

    def listed(path: Any) -> list[str]:
        thread = threading.current_thread().name
        if str(path) == str(place) and not thread.startswith("aio_ckpt-mirror"):  # its own copies read it
            asked.append(thread)
        return real(path)

    monkeypatch.setattr(os, "listdir", listed)
    with opened(root, place) as engine:
        mirrored(engine, 1, 2)
        assert asked
        asked.clear()
        with monkeypatch.context() as patched:
            patched.setattr(Storage, "write_file", refuse)
            with pytest.raises(WriteError):
                engine.save(weights(3)).result(TIMEOUT)
        assert engine.save(weights(3)).mirrored.result(TIMEOUT) == place / "step_000000003"
        engine.delete(1)
        assert not asked
        engine.delete(3, allow_newest=True)
        assert engine.save(weights(4)).result(TIMEOUT).step == 4, "the mirror holds a copy of step 3"
        assert not asked
        assert engine.latest_step() == 4
        assert asked


@pytest.mark.slow
def test_a_dropped_engine_keeps_the_root_no_longer_than_its_saves_take(
    root: Path, place: Path, copies: GatedCopies, caplog: pytest.LogCaptureFixture
) -> None:
    """A copy may take minutes, and a cell of a notebook is run again in seconds."""
    engine = SyncCheckpointEngine(root, EngineConfig(mirror=Mirror(place)))
    first = engine.save(weights(1))
    copies.entered.wait(TIMEOUT)
    del engine
    with opened(root, place) as engine:
        second = engine.save(weights(2))
        assert second.result(TIMEOUT).step == 2
        assert not first.mirrored.done()
        copies.gate.set()
        assert first.mirrored.result(TIMEOUT) == place / "step_000000001"
        assert second.mirrored.result(TIMEOUT) == place / "step_000000002"
    assert not lines(caplog, "was not copied")


async def refuse(self: Storage, path: Path, *parts: bytes) -> None:
    raise WriteError(5, "disk", str(path))


def test_a_mirror_that_vanishes_is_not_made_anew(root: Path, place: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its file system was unmounted: a copy would fill the disk below, and be lost with the root's."""
    with opened(root, place) as engine:
        mirrored(engine, 1)
        place.rename(place.with_name("elsewhere"))
        ticket = engine.save(weights(2))
        until(lambda: bool(lines(caplog, "step 2 was not copied")))
        assert not place.exists()
        place.with_name("elsewhere").rename(place)
        engine.close()
        assert ticket.mirrored.result(TIMEOUT) == place / "step_000000002"
    (line,) = lines(caplog, "step 2 was not copied")
    assert "the mirror is gone (its directory was removed or unmounted)" in line


def test_a_mirror_that_was_made_by_hand_is_one(root: Path, place: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        engine.save(weights(1)).result(TIMEOUT)
    shutil.copytree(root / "step_000000001", place / "step_000000001")
    with opened(root, place) as engine:
        until(lambda: engine.stats().mirrored_step == 1)
        assert engine.save(weights(2)).mirrored.result(TIMEOUT) == place / "step_000000002"


def test_a_step_that_is_gone_is_not_tried_again(root: Path, place: Path, copies: GatedCopies) -> None:
    with opened(root, place) as engine:
        first = engine.save(weights(1), 1)
        assert copies.entered.wait(TIMEOUT)
        second = engine.save(weights(2), 2)
        second.result(TIMEOUT)
        engine.rollback(1)
        copies.gate.set()
        assert first.mirrored.result(TIMEOUT) == place / "step_000000001"
        assert isinstance(second.mirrored.exception(TIMEOUT), CheckpointNotFoundError)


def test_each_part_of_a_copy_waits_for_its_turn(root: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[bool] = []
    monkeypatch.setattr(Pace, "wait", lambda self, *, gives_way: waits.append(gives_way))
    with opened(root, place) as engine:
        mirrored(engine, 1)
    assert {True, False} == set(waits), "data gives way to saves, and the heartbeat does not"


def test_the_newest_step_of_both_is_loaded_and_the_root_s_own_first(root: Path, place: Path) -> None:
    with opened(root, place) as engine:
        mirrored(engine, 1, 2)
        assert loaded(engine) == (2, root)
    shutil.rmtree(root / "step_000000002")  # an older image of the disk
    with opened(root, place) as engine:
        assert loaded(engine) == (2, place)
        assert loaded(engine, 1) == (1, root)


def test_a_damaged_step_is_loaded_from_the_mirror_and_set_aside(root: Path, place: Path) -> None:
    with opened(root, place) as engine:
        mirrored(engine, 1, 2)
    damage(root / "step_000000002")
    with opened(root, place) as engine:
        state = weights(0)
        report = engine.load(state)
        assert (report.path, value_of(state)) == (place / "step_000000002", 2)
        assert [skipped.path for skipped in report.skipped] == [root / "step_000000002"]
    assert steps_in(place) == [1, 2]


def test_damaged_copies_stay_where_they_are(root: Path, place: Path) -> None:
    with opened(root, place) as engine:
        mirrored(engine, 1, 2)
    shutil.rmtree(root / "step_000000002")
    damage(place / "step_000000002")
    with opened(root, place) as engine:
        assert loaded(engine) == (1, root)
        mirrored(engine, 3)
    assert (place / "step_000000002").exists()


def test_a_mirror_that_cannot_be_read_stops_no_load_but_of_an_empty_root(
    root: Path, place: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.listdir

    def fails(path: Any) -> list[str]:
        if str(path) == str(place):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path)

    with opened(root, place) as engine:
        mirrored(engine, 1)
        monkeypatch.setattr(os, "listdir", fails)
        assert loaded(engine) == (1, root)
        assert lines(caplog, "the mirror cannot be read, and a newer step may be there")
    shutil.rmtree(root)
    with opened(root, place) as engine, pytest.raises(OSError, match=r"Input/output error.*leave mirror= out"):
        engine.load(weights(0))


def test_no_checkpoint_in_either_is_told_as_before(root: Path, place: Path) -> None:
    with opened(root, place) as engine, pytest.raises(CheckpointNotFoundError, match=str(root)):
        engine.load(weights(0))
    assert not place.exists()


def test_a_rollback_counts_for_the_mirror_too(root: Path, place: Path) -> None:
    with opened(root, place) as engine:
        mirrored(engine, 1, 2, 3)
        assert engine.rollback(1) == [3, 2]
        assert loaded(engine) == (1, root)
        until(lambda: steps_in(place) == [1])
        assert engine.save(weights(20), 2).mirrored.result(TIMEOUT) == place / "step_000000002"
    assert steps_in(place) == [1, 2]
    shutil.rmtree(root)
    with opened(root, place) as engine:
        state = weights(0)
        assert engine.load(state).step == 2
        assert value_of(state) == 20


def test_no_abandoned_step_comes_back_if_the_root_is_lost_before_the_next_copy(root: Path, place: Path) -> None:
    with opened(root, place) as engine:
        mirrored(engine, 1, 2, 3)
        engine.rollback(1)
    shutil.rmtree(root)
    with opened(root, place) as engine:
        assert loaded(engine) == (1, place)


async def broken(copier: StepCopier) -> None:
    """Roll the mirror back, which does not answer."""
    raise ReadError(errno.EIO, "mirror", str(copier.place))


def test_a_mirror_that_was_not_rolled_back_is_by_the_next_engine(
    root: Path, place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(root, place, every=2) as engine:
        mirrored(engine, 2, 4)
        engine.save(weights(5), 5).result(TIMEOUT)
        with monkeypatch.context() as patched:
            patched.setattr(StepCopier, "set_abandoned_aside", broken)
            engine.rollback(2)
            engine.close()
    told = f"{place}: steps that a rollback has abandoned are still there, and come back if {root} is lost: "
    assert {*lines(caplog, "come back if")} == {f"{told}[Errno 5] mirror: '{place}'"}
    assert steps_in(place) == [2, 4]
    shutil.rmtree(root / "step_000000002")  # no step of the root is one that the mirror would get
    opened(root, place, every=2).__enter__().close()
    assert steps_in(place) == [2]


def test_a_mirror_that_was_away_at_a_rollback_is_rolled_back_before_the_next_copy(root: Path, place: Path) -> None:
    away = place.with_name("away")
    with opened(root, place) as engine:
        mirrored(engine, 1, 2, 3)
        place.rename(away)
        engine.rollback(1)
        until(lambda: not engine._mirror_queue._is_ahead)  # type: ignore[attr-defined]
        away.rename(place)
        assert mirrored(engine, 2) == [place / "step_000000002"]
    assert steps_in(place) == [1, 2]


def test_a_rollback_counts_for_the_mirror_although_what_it_set_aside_was_deleted(root: Path, place: Path) -> None:
    with opened(root, place) as engine:
        mirrored(engine, 1, 2, 3)
        assert engine.rollback(1) == [3, 2]
    shutil.rmtree(root / ABANDONED_DIR)  # as ls and the docs advise, to free its space
    with opened(root, place) as engine:
        assert engine.latest_step() == 1
        assert loaded(engine) == (1, root)
        assert engine.save(weights(20), 2).mirrored.result(TIMEOUT) == place / "step_000000002"


def test_after_a_rollback_copies_of_other_steps_are_not_looked_into(
    root: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_into = set[Path]()

    async def read(storage: Storage, checkpoint: Path) -> str | None:
        looked_into.add(checkpoint)
        return await save_of(storage, checkpoint)

    with opened(root, place) as engine:
        mirrored(engine, 1, 2, 3)
        monkeypatch.setattr(mirror_copies, "save_of", read)
        engine.rollback(2)
        assert engine.latest_step() == 2
        assert loaded(engine) == (2, root)
        mirrored(engine, 4, 5)
    in_mirror = {path.name for path in looked_into if path.parent == place}
    assert in_mirror == {"step_000000003"}
    assert steps_in(place) == [1, 2, 4, 5]


def test_a_copy_that_is_set_aside_while_the_mirror_is_looked_at_does_not_count(
    root: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def read(storage: Storage, checkpoint: Path) -> str | None:
        shutil.rmtree(checkpoint, ignore_errors=True)
        return await save_of(storage, checkpoint)

    with opened(root, place) as engine:
        mirrored(engine, 1, 2, 3)
        monkeypatch.setattr(StepCopier, "set_abandoned_aside", broken)
        engine.rollback(2)
        monkeypatch.setattr(mirror_copies, "save_of", read)
        assert engine.latest_step() == 2


def test_a_mirror_that_cannot_be_read_brings_no_abandoned_step_back(
    root: Path, place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(storage: Storage, checkpoint: Path) -> str | None:
        raise ReadError(errno.EIO, os.strerror(errno.EIO), str(checkpoint))

    with opened(root, place) as engine:
        mirrored(engine, 1, 2, 3)
        monkeypatch.setattr(StepCopier, "set_abandoned_aside", broken)
        engine.rollback(2)
        monkeypatch.setattr(mirror_copies, "save_of", fail)
        assert engine.latest_step() == 2
    assert "the mirror cannot be read, and a newer step may be there" in caplog.text


def test_a_step_that_was_set_aside_under_another_step_dir_stays_abandoned(root: Path, place: Path) -> None:
    with opened(root, place, step_dir="model_{step}") as engine:
        engine.save(weights(1), 1).result(TIMEOUT)
        engine.save(weights(2), 2).result(TIMEOUT)
    for step in (1, 2):
        aio_ckpt.copy(root / f"model_{step}", place)
    shutil.rmtree(root / "model_1")
    aio_ckpt.copy(place / "step_000000001", root)
    (root / "model_2").rename(root / ABANDONED_DIR / "5-model_2")
    with opened(root, place) as engine:
        assert engine.latest_step() == 1


def test_a_step_that_the_mirror_alone_holds_is_told_as_such(root: Path, place: Path) -> None:
    with opened(root, place) as engine:
        mirrored(engine, 2)
    shutil.rmtree(root)
    with opened(root, place) as engine:
        for call in (engine.save, engine.prepare):
            with pytest.raises(
                StepOrderError,
                match=f"step 2, which may be in the mirror {place} alone: load.* passes step 2 by as damaged",
            ):
                call(weights(0), step=1)
        with pytest.raises(CheckpointNotFoundError, match=f"{place} holds steps up to 2, and 'aio-ckpt cp'"):
            engine.rollback(2)


# -- settings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"every": 0}, "Mirror(every)"),
        ({"keep_last": 0}, "Mirror(keep_last)"),
        ({"max_bytes_per_sec": 1000}, "Mirror(max_bytes_per_sec)"),
        ({"place": "https://host/x"}, "Mirror(place)"),
        ({"place": "s3://key:secret@bucket/x"}, "credentials"),
    ],
)
def test_bad_settings_are_refused_by_name(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Mirror(**({"place": "/x"} | settings))
    assert told in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("place", [".", "below", ".."])
def test_a_mirror_that_overlaps_its_root_is_refused(root: Path, place: str) -> None:
    with pytest.raises(ConfigError, match="give a directory beside it"), opened(root, root / place):
        pass
    assert not root.exists()


def test_a_mirror_is_a_mirror() -> None:
    with pytest.raises(ConfigError, match="give a Mirror"):
        EngineConfig(mirror="s3://bucket/run")  # type: ignore[arg-type]


# -- the pace ---------------------------------------------------------------------------------------


def test_a_pace_waits_until_what_was_moved_is_paid_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now = FakeTime(monkeypatch)
    pace = Pace(100.0, lambda: False)
    pace.wait(gives_way=True)
    assert now.secs == 0
    pace.pay(50)
    pace.pay(150)
    pace.wait(gives_way=True)
    assert now.secs == pytest.approx(2.0, abs=0.1)
    now.secs = 10.0  # idle time earns no credit
    pace.pay(100)
    pace.wait(gives_way=True)
    assert now.secs == pytest.approx(11.0, abs=0.1)


def test_a_pace_without_a_cap_waits_for_a_pending_save_alone_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    now, saving = FakeTime(monkeypatch), True
    pace = Pace(None, lambda: saving)
    pace.pay(1 << 60)
    pace.wait(gives_way=True)
    assert now.secs == pytest.approx(YIELD_SECS, abs=0.1)
    saving, now.secs = False, 0.0
    pace.wait(gives_way=True)
    assert now.secs == 0
    saving = True
    pace.lift()
    pace.wait(gives_way=True)
    assert now.secs == 0


class FakeTime:
    """Time of a pace: it passes while a thread waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.secs = 0.0
        monkeypatch.setattr("aio_ckpt.mirror.pace.time.monotonic", lambda: self.secs)
        monkeypatch.setattr("aio_ckpt.mirror.pace.Condition", lambda: PassingCondition(self))


class PassingCondition:
    def __init__(self, time: FakeTime) -> None:
        self._time = time

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def notify_all(self) -> None: ...

    def wait(self, secs: float) -> None:
        self._time.secs += secs
