"""Commit: what is fsynced and renamed in which order, what a power loss leaves."""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from builders import listing, value, weights
from gated_storage import TIMEOUT, Call, GatedStorage, gated_engine
from power_loss import CHECKPOINT, NotDurableError, check_root_mode, dropped
from saved_files import DATA_FILE, RANK_MANIFEST, ROOT_MANIFEST, without_save_id

from aio_ckpt.commit import discovery, rollback, trash
from aio_ckpt.commit.in_place import unclaimed
from aio_ckpt.commit.owner import Owner, owner_by_name
from aio_ckpt.errors import CheckpointNotFoundError, WriteError
from aio_ckpt.format.root_names import ABANDONED_DIR, ENGINE_DIR, ENGINE_DIRS, PENDING_DIR
from aio_ckpt.format.step_names import StepNames
from aio_ckpt.runtime.portal import Executor

STEP = "step_000000005"
DATA, RANK, META, ROOT = DATA_FILE, RANK_MANIFEST, ".metadata", ROOT_MANIFEST
DURABILITY = ("sync", "write_file", "sync_dir", "rename", "exchange", "replace")


@pytest.fixture
async def storage() -> AsyncIterator[GatedStorage]:
    executor = Executor("test", 2)
    yield GatedStorage(executor)
    assert executor.close(TIMEOUT)


def shown(calls: Sequence[Call]) -> list[str]:
    """The calls as text; the number of writes of a file does not matter."""
    lines = []
    for call in calls:
        names = [
            f"{part.parent.name}/*" if part.parent.parent.name == ENGINE_DIR else without_save_id(part.name)
            for part in (call.path, call.other)
            if part
        ]
        line = f"{call.name} {' -> '.join(names)}"
        if lines[-1:] != [line] or call.name != "write":
            lines.append(line)
    return lines


def labelled(calls: Sequence[Call]) -> dict[str, int]:
    """Every fsync and rename of the log that a checkpoint's durability rests on."""
    lines = [(f"{shown([call])[0]}", index) for index, call in enumerate(calls) if call.name in DURABILITY]
    return {line: index for line, index in lines if "trash" not in line}


# -- root mode ------------------------------------------------------------------------------------

BESIDE = [f"write_file {META}"]
"""Written while the data is, in any order: nothing of a pending directory counts before the rename."""
ROOT_MODE = [
    "make_dir pending/*",
    *BESIDE,
    f"create_data_file {DATA}",
    f"write {DATA}",
    f"sync {DATA}",
    f"write_file {RANK}",
    f"write_file {ROOT}",
    "sync_dir pending/*",
    f"rename pending/* -> {STEP}",
    "sync_dir root",
    "sync_dir pending",
]
ROOT_STEPS = [line for line in ROOT_MODE if line.startswith(DURABILITY)]


def make_engine_dirs(root: Path) -> None:
    """As the first writer of a root does: the log of a save is without it."""
    for name in ENGINE_DIRS:
        (root / name).mkdir(parents=True, exist_ok=True)


def log_of_a_save(path: Path, *, overwrite: bool = False) -> list[Call]:
    make_engine_dirs(path / "root")
    with gated_engine(path / "root") as (engine, storage):
        if overwrite:
            engine.save(weights(1), step=5).result(TIMEOUT)
            storage.calls.clear(), storage.begun.clear()
        engine.save(weights(2), step=5, overwrite=overwrite).result(TIMEOUT)
        assert in_turn(storage.begun) == in_turn(storage.calls), "two calls overlapped: their order would be open"
        return [call for call in storage.calls if call.name != "make_dirs" and call.path.name != "claim.json"]


def in_turn(calls: Sequence[Call]) -> list[str]:
    """The calls as text, those that may come at any time while the data is written at their place in ``ROOT_MODE``."""
    lines = shown(calls)
    until = lines.index(f"write_file {ROOT}")
    for line in BESIDE:
        assert line in lines[1:until], f"{line!r} must have ended before the directory is made durable"
    return [lines[0], *BESIDE, *(line for line in lines[1:until] if line not in BESIDE), *lines[until:]]


def test_each_fsync_and_rename_of_a_save_comes_in_this_order(tmp_path: Path) -> None:
    calls = log_of_a_save(tmp_path)
    assert in_turn(calls) == ROOT_MODE
    assert sorted(labelled(calls)) == sorted(ROOT_STEPS)


def test_a_power_loss_at_any_point_leaves_a_step_whole_or_invisible(tmp_path: Path) -> None:
    check_root_mode(log_of_a_save(tmp_path), top=tmp_path, final=tmp_path / "root" / STEP)


@pytest.mark.parametrize("left_out", ROOT_STEPS)
def test_without_any_one_fsync_or_rename_a_power_loss_breaks_the_save(tmp_path: Path, left_out: str) -> None:
    calls = log_of_a_save(tmp_path)
    with pytest.raises(NotDurableError):
        check_root_mode(dropped(calls, labelled(calls)[left_out]), top=tmp_path, final=tmp_path / "root" / STEP)


def test_a_rename_before_what_it_shows_is_durable_breaks_the_save(tmp_path: Path) -> None:
    calls = log_of_a_save(tmp_path)
    where = labelled(calls)
    synced, renamed = where["sync_dir pending/*"], where[f"rename pending/* -> {STEP}"]
    late = dataclasses.replace(calls[synced], path=tmp_path / "root" / STEP)
    swapped = [*calls[:synced], calls[renamed], late, *calls[renamed + 1 :]]
    with pytest.raises(NotDurableError):
        check_root_mode(swapped, top=tmp_path, final=tmp_path / "root" / STEP)


def test_a_root_that_the_engine_makes_is_durable_with_all_its_parents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    fsync = os.fsync

    def record(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    with gated_engine(tmp_path / "runs" / "today" / "ckpt") as (engine, _):
        engine.save(weights(1)).result(TIMEOUT)
        assert {str(tmp_path), str(tmp_path / "runs"), str(tmp_path / "runs" / "today")} <= set(synced)


def test_a_failed_fsync_of_the_parent_undoes_the_rename(tmp_path: Path) -> None:
    with gated_engine(tmp_path / "root") as (engine, storage):
        storage.fail("sync_dir", "root", WriteError(errno.EIO, "the disk is gone", str(tmp_path / "root")))
        with pytest.raises(WriteError, match="the disk is gone"):
            engine.save(weights(1), step=5).result(TIMEOUT)
        assert engine.steps().result() == []
        assert listing(tmp_path / "root") == []
        engine.save(weights(2), step=5).result(TIMEOUT)
        assert value(engine) == 2


@pytest.mark.parametrize("where", [DATA, RANK, META, ROOT, "pending/*"])
def test_a_failed_fsync_is_never_tried_again_and_nothing_becomes_visible(tmp_path: Path, where: str) -> None:
    with gated_engine(tmp_path / "root") as (engine, storage):
        name = "sync" if where == DATA else "sync_dir" if where == "pending/*" else "write_file"
        storage.fail(name, where, WriteError(errno.EIO, "the disk is gone", where))
        with pytest.raises(WriteError, match="the disk is gone") as caught:
            engine.save(weights(1), step=5).result(TIMEOUT)
        assert caught.value.errno == errno.EIO
        assert len([call for call in storage.begun if call.matches(name, where)]) == 1
        assert not [call for call in storage.calls if call.name == "rename"]
        assert listing(tmp_path / "root") == []


def test_a_directory_that_is_no_checkpoint_is_never_renamed_over(tmp_path: Path) -> None:
    foreign = tmp_path / "root" / STEP
    foreign.mkdir(parents=True)
    (foreign / "notes.txt").write_text("mine")
    with gated_engine(tmp_path / "root") as (engine, _):
        with pytest.raises(WriteError) as caught:
            engine.save(weights(1), step=5).result(TIMEOUT)
        assert caught.value.errno == errno.EEXIST
        assert "move it away, or save another step" in str(caught.value)
        assert listing(tmp_path / "root") == [STEP]
    assert (foreign / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("point", ["write_file", "sync_dir", "rename"])
async def test_until_it_is_visible_a_pending_save_says_whose_it_is(tmp_path: Path, point: str) -> None:
    """Whatever point a crash comes at, the next writer can tell that the owner is dead."""
    with gated_engine(tmp_path / "root") as (engine, storage):
        gate = storage.hold(point, {"write_file": ROOT}.get(point, "pending/*"))
        ticket = engine.save(weights(1), step=5)
        gate.wait_reached()
        (pending,) = (tmp_path / "root").glob(f"{PENDING_DIR}/*")
        owner = owner_by_name(pending.name, Owner.of_this_process("another"))
        assert owner is not None
        assert owner.pid == os.getpid()
        gate.open()
        ticket.result(TIMEOUT)
        assert {without_save_id(path.name) for path in (tmp_path / "root" / STEP).iterdir()} == CHECKPOINT


@pytest.mark.parametrize("call", [("rename", "pending/*"), ("remove_tree", "trash/*")])
def test_what_cannot_be_removed_after_the_commit_fails_no_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, call: tuple[str, str]
) -> None:
    with gated_engine(tmp_path / "root") as (engine, storage):
        engine.save(weights(1), step=5).result(TIMEOUT)
        storage.fail(*call, WriteError(errno.EIO, "the disk is gone", "x"))
        engine.save(weights(2), step=5, overwrite=True).result(TIMEOUT)
        assert "is committed, but" in caplog.text
        assert (engine.steps().result(), value(engine)) == ([5], 2)


def test_a_disk_that_stalls_behind_the_commit_of_an_overwrite_fails_no_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trash, "TIDY_SECS", 0.4)
    with gated_engine(tmp_path / "root", stall_timeout_secs=0.2) as (engine, storage):
        engine.save(weights(1), step=5).result(TIMEOUT)
        gate = storage.hold("remove_file", "*.distcp")
        assert engine.save(weights(2), step=5, overwrite=True).result(TIMEOUT).step == 5
        assert "is committed, but what it replaced is still there: too slow" in caplog.text
        storage.release(gate)
        gate.open()
        assert value(engine) == 2


# -- overwrite ------------------------------------------------------------------------------------

OVERWRITE = [
    *ROOT_MODE[:-3],
    "write_file aio_ckpt.pending-*",
    f"replace {DATA} -> {DATA}",
    f"replace {RANK} -> {RANK}",
    f"replace {ROOT} -> {ROOT}",
    f"replace {META} -> {META}.tmp-*",
    f"sync_dir {STEP}",
    f"replace {META}.tmp-* -> {META}",
    f"sync_dir {STEP}",
]
OVERWRITE_STEPS = [line for line in OVERWRITE if line.startswith(DURABILITY)]
OVERWRITE += [
    "remove_file aio_ckpt.pending-*",
    f"remove_file {DATA}",
    f"remove_file {RANK}",
    f"remove_file {ROOT}",
    "rename pending/* -> trash/*",
    "remove_tree trash/*",
]


def test_an_overwrite_adds_its_files_renames_its_metadata_over_the_old_and_removes_the_old_files_last(
    tmp_path: Path,
) -> None:
    calls = log_of_a_save(tmp_path, overwrite=True)
    assert in_turn(calls) == OVERWRITE
    assert listing(tmp_path / "root") == [STEP]
    check_root_mode(log_of_two_saves(tmp_path / "b"), top=tmp_path / "b", final=tmp_path / "b" / "root" / STEP)


def log_of_two_saves(path: Path) -> list[Call]:
    make_engine_dirs(path / "root")
    with gated_engine(path / "root") as (engine, storage):
        engine.save(weights(1), step=5).result(TIMEOUT)
        engine.save(weights(2), step=5, overwrite=True).result(TIMEOUT)
        assert value(engine) == 2
        assert engine.steps().result() == [5]
        return list(storage.calls)


@pytest.mark.parametrize("left_out", [line for line in OVERWRITE_STEPS if "pending" not in line])
def test_without_any_one_fsync_a_power_loss_breaks_an_overwrite(tmp_path: Path, left_out: str) -> None:
    calls = log_of_two_saves(tmp_path)
    where = labelled(calls)  # the later of two calls of the same name: the overwrite's
    with pytest.raises(NotDurableError):
        check_root_mode(dropped(calls, where[left_out]), top=tmp_path, final=tmp_path / "root" / STEP)


def test_an_overwrite_whose_rename_is_visible_and_not_durable_is_in_doubt_and_both_saves_stay(tmp_path: Path) -> None:
    with gated_engine(tmp_path / "root") as (engine, storage):
        engine.save(weights(1), step=5).result(TIMEOUT)
        gate = storage.hold("replace", f"{META}.tmp-*")
        ticket = engine.save(weights(2), step=5, overwrite=True)
        gate.wait_reached()
        storage.fail("sync_dir", STEP, WriteError(errno.EIO, "the disk is gone", "root"))
        gate.open()
        with pytest.raises(WriteError, match="the disk is gone") as failed:
            ticket.result(TIMEOUT)
        assert failed.value.in_doubt
        assert engine.steps().result() == [5]
        assert value(engine) == 2
        assert len(list((tmp_path / "root" / STEP).glob(DATA))) == 2


# -- rollback -------------------------------------------------------------------------------------


async def test_a_power_loss_during_a_rollback_leaves_no_gap_in_the_steps(storage: GatedStorage, tmp_path: Path) -> None:
    names = StepNames("step_{step}")
    (tmp_path / ABANDONED_DIR).mkdir(parents=True)
    for step in (1, 2, 3):
        (tmp_path / f"step_{step}").mkdir()
        (tmp_path / f"step_{step}" / META).touch()
    assert await rollback.abandon_after(storage, tmp_path, names, 1, "tag", unclaimed) == [3, 2]
    assert shown(storage.calls) == [
        "rename step_3 -> abandoned/*",
        "sync_dir abandoned",
        f"sync_dir {tmp_path.name}",
        "rename step_2 -> abandoned/*",
        "sync_dir abandoned",
        f"sync_dir {tmp_path.name}",
    ]


async def test_a_directory_that_lost_its_metadata_counts_only_where_its_step_has_no_other(
    tmp_path: Path, storage: GatedStorage
) -> None:
    for name, files in (
        ("step_000000005", (META, "aio_ckpt.s-1.json")),
        ("step-5", ("aio_ckpt.s-1.json",)),
        ("step-6", ("aio_ckpt.s-1.json",)),
        ("step-7", ("notes.txt",)),
        ("step-8", ("aio_ckpt.s-1.json", f"{META}.tmp-s-2")),
    ):
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).touch()
    committed, torn, _ = await discovery.discover_all(storage, tmp_path, StepNames("step_{step:09d}"))
    assert [(found.step, found.path.name) for found in committed] == [(5, "step_000000005")]
    assert [(found.step, found.path.name) for found in torn] == [(6, "step-6")]
    assert await discovery.discover(storage, tmp_path, StepNames("step_{step:09d}")) == committed


async def test_a_rollback_takes_nothing_for_a_step_that_only_has_the_name_of_one(
    tmp_path: Path, storage: GatedStorage
) -> None:
    names = StepNames("step_{step:09d}")
    (tmp_path / ABANDONED_DIR).mkdir(parents=True)
    for step in (2, 3):
        (tmp_path / names.name(step)).mkdir()
        (tmp_path / names.name(step) / META).touch()
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-500").mkdir()
    (tmp_path / "iter_7").touch()
    for step in (1, 7, 500):
        with pytest.raises(CheckpointNotFoundError, match=r"committed are \[2, 3\]"):
            await rollback.abandon_after(storage, tmp_path, names, step, "tag", unclaimed)
    assert await rollback.abandon_after(storage, tmp_path, names, 2, "tag", unclaimed) == [3]
    left = {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")}
    assert left == {names.name(2), "checkpoint-1", "checkpoint-500", "iter_7"}
