"""``engine.delete(step)``: what is deleted and what is refused, durably, and whole or gone at any instant."""

from __future__ import annotations

import asyncio
import errno
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from builders import listing, save, steps_dir, weights
from gated_storage import TIMEOUT, Call, gated_engine
from power_loss import NotDurableError, check_deletion, dropped

from aio_ckpt import CheckpointEngine, EngineConfig, SyncCheckpointEngine
from aio_ckpt.errors import (
    AioCkptError,
    BusyError,
    CheckpointNotFoundError,
    EngineClosedError,
    ProtectedStepError,
    ReadError,
    RootError,
    StallError,
    StepOrderError,
    WriteError,
)
from aio_ckpt.format.root_names import ENGINE_DIRS, TRASH_DIR
from aio_ckpt.storage.local import Storage

TRASH = f"trash/{steps_dir(Path(), 1).name}"


def delete(engine: CheckpointEngine, step: int, *, allow_newest: bool = False) -> None:
    """Delete on an async engine, from a thread without a loop."""
    engine.delete(step, allow_newest=allow_newest).result()


# -- what is deleted --------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 2])
async def test_a_deleted_step_is_gone_and_the_others_load(root: Path, step: int) -> None:
    async with CheckpointEngine(root) as engine:
        for each in (1, 2, 3):
            await engine.save(weights(each), each)
        await engine.delete(step)
        left = sorted({1, 2, 3} - {step})
        assert (await engine.steps()) == left
        assert listing(root) == [f"step_{each:09d}" for each in left]
        with pytest.raises(CheckpointNotFoundError):
            await engine.load(weights(0), step)
        for each in left:
            assert (await engine.load(weights(0), each)).step == each


def test_a_new_engine_deletes_what_an_earlier_run_saved(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        save(engine, 1, 2)
    with SyncCheckpointEngine(root) as engine:
        engine.delete(1)
        save(engine, 3)
        assert engine.steps() == [2, 3]


def test_a_step_that_stands_under_two_names_is_deleted_under_both(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        save(engine, 1, 2)
        shutil.copytree(steps_dir(root, 1), root / "step-1")
        engine.delete(1)
        assert (engine.steps(), listing(root)) == ([2], ["step_000000002"])


def test_the_newest_is_deleted_if_that_is_allowed_and_its_number_is_free_again(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        save(engine, 1, 2, 9)
        engine.delete(9, allow_newest=True)
        assert engine.load(weights(0)).step == 2
        assert engine.save(weights(3)).result(TIMEOUT).step == 3
        save(engine, 9)
        for step in (9, 3, 2, 1):
            engine.delete(step, allow_newest=True)
        assert (engine.steps(), engine.latest_step(), listing(root)) == ([], None, [])
        assert engine.save(weights(1)).result(TIMEOUT).step == 1


def test_a_step_between_others_may_not_be_saved_again(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        save(engine, 1, 2, 3)
        engine.delete(2)
        with pytest.raises(StepOrderError):
            engine.save(weights(2), 2)
        with pytest.raises(StepOrderError):
            engine.save(weights(2), 2, overwrite=True)


# -- what is refused --------------------------------------------------------------------------------


def refused(engine: SyncCheckpointEngine, step: int, kind: type[AioCkptError], words: str) -> None:
    """``delete(step)`` raises ``kind``, and nothing under the root is touched."""
    before = listing(engine.root)
    with pytest.raises(kind, match=words):
        engine.delete(step)
    assert listing(engine.root) == before


def test_the_newest_step_is_refused(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        save(engine, 1)
        refused(engine, 1, StepOrderError, r"delete\(1\).*newest.*allow_newest=True")
        save(engine, 2)
        refused(engine, 2, StepOrderError, r"delete\(2\).*newest.*allow_newest=True")
        engine.delete(1)
        refused(engine, 2, StepOrderError, "allow_newest=True")


def test_a_step_that_is_not_committed_is_refused(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        save(engine, 1, 2)
        refused(
            engine, 7, CheckpointNotFoundError, r"delete\(7\): no such committed step under .*committed are \[1, 2\]"
        )
        engine.delete(1)
        refused(engine, 1, CheckpointNotFoundError, r"delete\(1\)")


def test_a_protected_step_is_refused_until_it_is_no_longer_protected(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        save(engine, 1, 2)
        engine.protect(1)
        refused(engine, 1, ProtectedStepError, r"delete\(1\).*protected.*unprotect\(1\)")
        engine.protect(2)
        with pytest.raises(ProtectedStepError):
            engine.delete(2, allow_newest=True)
        engine.unprotect(1)
        engine.delete(1)
        assert engine.steps() == [2]


def test_a_protected_step_is_not_even_renamed(root: Path) -> None:
    """Put back at once, it would still be gone for whoever reads it then."""
    with gated_engine(root) as (engine, storage):
        for step in (1, 2):
            engine.save(weights(step), step).result(TIMEOUT)
        engine.protect(1).result()
        storage.calls.clear()
        with pytest.raises(ProtectedStepError):
            delete(engine, 1)
        assert "rename" not in {call.name for call in storage.calls}


def test_a_pending_save_refuses_the_deletion(root: Path) -> None:
    with gated_engine(root) as (engine, storage):
        for step in (1, 2):
            engine.save(weights(step), step).result(TIMEOUT)
        gate = storage.hold("sync", "*")
        ticket = engine.save(weights(3), 3)
        gate.wait_reached()
        with pytest.raises(
            BusyError, match=r"delete\(1\): saves are pending; await their tickets first \(error\.ticket, if"
        ):
            delete(engine, 1)
        gate.open()
        ticket.result(TIMEOUT)
        delete(engine, 1)
        assert engine.steps().result() == [2, 3]


def test_only_the_writer_of_a_root_deletes_in_it(root: Path) -> None:
    with SyncCheckpointEngine(root) as writer, SyncCheckpointEngine(root) as other:
        save(writer, 1, 2)
        refused(other, 1, RootError, "another engine of this process writes here")


async def test_a_closed_engine_deletes_nothing(root: Path) -> None:
    async with CheckpointEngine(root) as engine:
        await engine.save(weights(1))
    with pytest.raises(EngineClosedError):
        await engine.delete(1, allow_newest=True)
    assert listing(root) == ["step_000000001"]


# -- durability -------------------------------------------------------------------------------------


def log_of_a_deletion(top: Path) -> list[Call]:
    """Every call of the storage from the save of step 1 on."""
    root = top / "root"
    for name in ENGINE_DIRS:  # as the first writer of a root does
        (root / name).mkdir(parents=True)
    with gated_engine(root) as (engine, storage):
        for step in (1, 2):
            engine.save(weights(step), step).result(TIMEOUT)
        delete(engine, 1)
        return list(storage.calls)


def test_a_deletion_is_a_rename_that_is_durable_before_a_file_is_deleted(tmp_path: Path) -> None:
    root = tmp_path / "root"
    old, trash = steps_dir(root, 1), root / TRASH_DIR / steps_dir(root, 1).name
    assert [(call.name, call.path) for call in log_of_a_deletion(tmp_path)[-6:]] == [
        ("rename", old),
        ("sync_dir", trash.parent),
        ("sync_dir", root),
        ("remove_file", trash / ".metadata"),
        ("sync_dir", trash),
        ("remove_tree", trash),
    ]


def test_a_power_loss_at_any_point_leaves_the_step_whole_or_gone_and_at_the_end_it_is_gone(tmp_path: Path) -> None:
    calls = log_of_a_deletion(tmp_path)
    check_deletion(calls, top=tmp_path, final=steps_dir(tmp_path / "root", 1))
    synced = max(index for index, call in enumerate(calls) if call == Call("sync_dir", tmp_path / "root"))
    with pytest.raises(NotDurableError):
        check_deletion(dropped(calls, synced), top=tmp_path, final=steps_dir(tmp_path / "root", 1))


POINTS = [
    ("rename", "step_000000001", [1, 2]),
    ("sync_dir", "trash", [2]),
    ("sync_dir", "root", [2]),
    ("remove_file", ".metadata", [2]),
    ("sync_dir", TRASH, [2]),
    ("remove_tree", TRASH, [2]),
]
"""The calls of a deletion in their order, and the steps that are listed once it ended before each."""


@pytest.mark.parametrize(("name", "where", "left"), POINTS)
def test_a_kill_at_any_point_leaves_the_step_whole_or_gone_and_the_next_writer_clears_up(
    root: Path, tmp_path: Path, name: str, where: str, left: list[int]
) -> None:
    killed = tmp_path / "killed"
    with ThreadPoolExecutor(1) as pool, gated_engine(root) as (engine, storage):
        for step in (1, 2):
            engine.save(weights(step), step).result(TIMEOUT)
        gate = storage.hold(name, where)
        deletion = pool.submit(delete, engine, 1)
        gate.wait_reached()
        shutil.copytree(root, killed)  # a process that is killed leaves the disk as it is
        gate.open()
        deletion.result(TIMEOUT)
    with SyncCheckpointEngine(killed) as engine:
        assert engine.steps() == left
        assert [engine.load(weights(0), step).step for step in left] == left
        save(engine, 3)
        assert listing(killed) == [f"step_{step:09d}" for step in (*left, 3)]


def test_trash_whose_next_listing_fails_is_deleted_by_the_pass_after_that(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed, list_dir = threading.Event(), Storage.list_dir

    async def fails_once(self: Storage, path: Path) -> list[str]:
        if path.name == TRASH_DIR.split("/")[-1] and not failed.is_set():
            failed.set()
            raise ReadError(errno.EIO, "broken", str(path))
        return await list_dir(self, path)

    with gated_engine(root) as (engine, storage):
        for step in (1, 2):
            engine.save(weights(step), step).result(TIMEOUT)
        storage.fail("remove_tree", "trash/*", WriteError(errno.EIO, "broken", "x"))
        with pytest.raises(WriteError, match="broken"):
            delete(engine, 1)
        monkeypatch.setattr(Storage, "list_dir", fails_once)
        engine.save(weights(3), 3).result(TIMEOUT)
        assert failed.wait(TIMEOUT)
        engine.save(weights(4), 4).result(TIMEOUT)
        storage.wait_for("remove_tree", "trash/*")
    assert not [*(root / TRASH_DIR).iterdir()]


@pytest.mark.parametrize(("name", "where", "left"), POINTS)
def test_a_disk_that_fails_midway_is_told_and_what_is_left_is_deleted_later(
    root: Path, name: str, where: str, left: list[int]
) -> None:
    with gated_engine(root) as (engine, storage):
        for step in (1, 2):
            engine.save(weights(step), step).result(TIMEOUT)
        storage.fail(name, where, WriteError(errno.EIO, "broken", "x"))
        with pytest.raises(WriteError, match="broken"):
            delete(engine, 1)
        assert engine.steps().result() == left
        engine.save(weights(3)).result(TIMEOUT)
    with SyncCheckpointEngine(root) as engine:
        save(engine, 4)
    assert listing(root) == [f"step_{step:09d}" for step in (*left, 3, 4)]


async def unreadable(path: Path) -> bool:
    raise ReadError(errno.EIO, "broken", str(path))


def test_a_step_whose_protection_cannot_be_looked_up_again_stays(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(1) as pool, gated_engine(root) as (engine, storage):
        for step in (1, 2):
            engine.save(weights(step), step).result(TIMEOUT)
        gate = storage.hold("rename", "step_000000001")
        deletion = pool.submit(delete, engine, 1)
        gate.wait_reached()
        monkeypatch.setattr(storage, "exists", unreadable)
        gate.open()
        with pytest.raises(ReadError, match="broken"):
            deletion.result(TIMEOUT)
        monkeypatch.undo()
        assert engine.steps().result() == [1, 2]


def test_a_deletion_that_hangs_ends_by_its_deadline(root: Path) -> None:
    with gated_engine(root, stall_timeout_secs=0.5) as (engine, storage):
        for step in (1, 2):
            engine.save(weights(step), step).result(TIMEOUT)
        storage.hold("remove_tree", "*")
        with pytest.raises(StallError, match=r"delete\(\)"):
            delete(engine, 1)


# -- beside others ----------------------------------------------------------------------------------


def test_a_step_that_is_protected_while_it_is_being_deleted_stays(root: Path) -> None:
    with ThreadPoolExecutor(1) as pool, gated_engine(root) as (engine, storage):
        for step in (1, 2):
            engine.save(weights(step), step).result(TIMEOUT)
        gate = storage.hold("rename", "step_000000001")
        deletion = pool.submit(delete, engine, 1)
        gate.wait_reached()
        with SyncCheckpointEngine(root) as other:
            other.protect(1)
        gate.open()
        with pytest.raises(ProtectedStepError, match=r"unprotect\(1\)"):
            deletion.result(TIMEOUT)
        assert (engine.steps().result(), engine.protected_steps().result()) == ([1, 2], [1])
        assert engine.read(1, only=None).result(TIMEOUT)["w"][0] == 1


def test_a_deletion_waits_for_that_of_expired_steps(root: Path) -> None:
    with ThreadPoolExecutor(1) as pool, gated_engine(root, keep_last=2) as (engine, storage):
        for step in (1, 2):
            engine.save(weights(step), step).result(TIMEOUT)
        gate = storage.hold("remove_tree", TRASH)
        engine.save(weights(3), 3).result(TIMEOUT)
        gate.wait_reached()
        deletion = pool.submit(delete, engine, 2)
        while engine.steps().result() != [3]:
            assert not deletion.done(), "it would clear the trash of the pass, too"
        gate.open()
        deletion.result(TIMEOUT)
        assert (engine.steps().result(), engine.undeleted_steps) == ([3], {})


def test_saves_commit_while_the_files_of_a_deleted_step_are_deleted_once(root: Path) -> None:
    with ThreadPoolExecutor(1) as pool, gated_engine(root, keep_last=2) as (engine, storage):
        for step in (1, 2):
            engine.save(weights(step), step).result(TIMEOUT)
        gate = storage.hold("remove_tree", TRASH)
        deletion = pool.submit(delete, engine, 1)
        gate.wait_reached()
        for step in (3, 4):  # their passes wait for the deletion
            engine.save(weights(step), step).result(TIMEOUT)
        assert engine.steps().result() == [2, 3, 4]
        assert not deletion.done()
        storage.release(gate)
        gate.open()
        deletion.result(TIMEOUT)
        storage.wait_for("remove_tree", "trash/*2*")
        assert [call.path.name for call in storage.calls if call.name == "remove_tree"] == [
            steps_dir(root, step).name for step in (1, 2)
        ]
        assert engine.steps().result() == [3, 4]


def test_retention_goes_on_after_a_deletion(root: Path) -> None:
    with SyncCheckpointEngine(root, EngineConfig(keep_last=2)) as engine:
        save(engine, 1, 2)
        engine.delete(2, allow_newest=True)
        save(engine, 3, 4)
    with SyncCheckpointEngine(root) as engine:
        assert engine.steps() == [3, 4]


async def test_the_loop_of_the_caller_goes_on_and_a_cancelled_wait_does_not_stop_the_deletion(root: Path) -> None:
    with gated_engine(root) as (engine, storage):
        for step in (1, 2):
            await engine.save(weights(step), step)
        gate = storage.hold("rename", "step_000000001")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await engine.delete(1)
        gate.open()
        await asyncio.to_thread(storage.wait_for, "remove_tree", TRASH)
        assert (await engine.steps()) == [2]


def test_a_deletion_whose_fsync_fails_is_completed_after_the_next_commit(root: Path) -> None:
    with gated_engine(root) as (engine, storage):
        for step in (1, 2):
            engine.save(weights(step), step=step).result(TIMEOUT)
        storage.fail("sync_dir", "*", WriteError(errno.EIO, "no fsync", str(root)))
        with pytest.raises(WriteError, match="no fsync"):
            engine.delete(1).result(TIMEOUT)
        assert listing(root / TRASH_DIR) == ["step_000000001"]
        engine.save(weights(3), step=3).result(TIMEOUT)
    assert not listing(root / TRASH_DIR)
    assert CheckpointEngine(root).steps().result(TIMEOUT) == [2, 3]
