"""A checkpoint is replaced in its directory: the order of the writes, and what a crash or a power loss leaves."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest
from gated_storage import TIMEOUT, Call, GatedStorage
from power_loss import Generation, NotDurableError, check_in_place, dropped

from aio_ckpt.commit.in_place import (
    LOCK,
    begin_save,
    commit_save,
    hold_directory,
    pending_saves,
    remove_leftovers,
    replace_by_pending,
    unclaimed,
    undo_save,
)
from aio_ckpt.errors import ReadError, RootError, WriteError
from aio_ckpt.format.checkpoint_files import data_file_name, rank_manifest_name, root_manifest_name, trailer
from aio_ckpt.runtime.portal import Executor
from aio_ckpt.storage.local import Storage
from aio_ckpt.storage.root_lock import RootLock

T = TypeVar("T")
META = ".metadata"
DURABILITY = ("write_file", "sync_dir", "replace")


class Crashed(BaseException):
    """Stands for the end of the process."""


class DyingStorage(GatedStorage):
    """Ends at the call before which no life is left."""

    lives: int | None = None

    async def run(self, call: Call, act: Callable[[], Awaitable[T]]) -> T | None:
        if self.lives == 0:
            raise Crashed
        if self.lives is not None:
            self.lives -= 1
        return await super().run(call, act)


@pytest.fixture
async def storage() -> AsyncIterator[DyingStorage]:
    executor = Executor("test", 2)
    yield DyingStorage(executor)
    assert executor.close(TIMEOUT)


def shown(calls: Sequence[Call]) -> list[str]:
    """The calls as text."""
    return [f"{call.name} {' -> '.join(part.name for part in (call.path, call.other) if part)}" for call in calls]


def names_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def generation(number: int) -> Generation:
    save_id = f"s{number}"
    names = data_file_name(save_id, 0), rank_manifest_name(save_id, 0), root_manifest_name(save_id)
    return Generation(metadata=b"pickle of save %d" % number + trailer(save_id), files=frozenset(names))


async def save_into_directory(storage: GatedStorage, directory: Path, number: int) -> None:
    """What ``dcp.Writer`` does around the calls of the commit."""
    made = generation(number)
    await begin_save(storage, directory, f"s{number}")
    for name in sorted(made.files):
        await storage.write_file(directory / name, b"abc")
    await storage.write_file(directory / f"{META}.tmp-s{number}", made.metadata)
    await commit_save(storage, directory, f"s{number}")


async def log_of_two_saves(storage: GatedStorage, directory: Path) -> list[Call]:
    await storage.make_dir(directory)
    await storage.sync_dir(directory.parent)
    for number in (1, 2):
        await save_into_directory(storage, directory, number)
    return list(storage.calls)


SAVE = [
    "write_file aio_ckpt.pending-s2",
    "write_file __s2_0_0.distcp",
    "write_file aio_ckpt.s2.0.bin",
    "write_file aio_ckpt.s2.json",
    f"write_file {META}.tmp-s2",
    "sync_dir mine",
    f"replace {META}.tmp-s2 -> {META}",
    "sync_dir mine",
    "remove_file aio_ckpt.pending-s2",
    "remove_file __s1_0_0.distcp",
    "remove_file aio_ckpt.s1.0.bin",
    "remove_file aio_ckpt.s1.json",
]
COMMIT = SAVE.index(f"replace {META}.tmp-s2 -> {META}")


def check_whole(directory: Path, number: int) -> None:
    """The directory holds this save and nothing else."""
    made = generation(number)
    assert names_in(directory) == {META, *made.files}
    assert (directory / META).read_bytes() == made.metadata


async def test_the_new_metadata_takes_the_place_of_the_old_one_in_one_rename_once_all_else_is_durable(
    storage: GatedStorage, tmp_path: Path
) -> None:
    directory = tmp_path / "top" / "mine"
    directory.parent.mkdir()
    calls = await log_of_two_saves(storage, directory)
    assert shown(calls)[-len(SAVE) :] == SAVE
    check_in_place(calls, top=tmp_path, directory=directory, generations=[generation(1), generation(2)])


@pytest.mark.parametrize("position", [n for n, line in enumerate(SAVE) if line.startswith(DURABILITY) and n > 0])
async def test_without_any_one_fsync_or_rename_a_power_loss_breaks_a_directory(
    storage: GatedStorage, tmp_path: Path, position: int
) -> None:
    directory = tmp_path / "top" / "mine"
    directory.parent.mkdir()
    calls = await log_of_two_saves(storage, directory)
    index = len(calls) - len(SAVE) + position
    with pytest.raises(NotDurableError):
        check_in_place(
            dropped(calls, index), top=tmp_path, directory=directory, generations=[generation(1), generation(2)]
        )


@pytest.mark.parametrize("position", range(len(SAVE)))
async def test_a_save_that_dies_before_any_of_its_calls_leaves_the_old_or_the_new_checkpoint_in_place(
    storage: DyingStorage, tmp_path: Path, position: int
) -> None:
    await save_into_directory(storage, tmp_path, 1)
    storage.lives = position
    with pytest.raises(Crashed):
        await save_into_directory(storage, tmp_path, 2)
    storage.lives = None
    made = generation(2 if position > COMMIT else 1)
    assert (tmp_path / META).read_bytes() == made.metadata
    assert made.files <= names_in(tmp_path)
    await save_into_directory(storage, tmp_path, 3)
    check_whole(tmp_path, 3)


@pytest.mark.parametrize("position", range(4))
async def test_a_removal_of_leftovers_that_dies_is_finished_by_the_next(
    storage: DyingStorage, tmp_path: Path, position: int
) -> None:
    await save_into_directory(storage, tmp_path, 1)
    storage.lives = COMMIT
    with pytest.raises(Crashed):
        await save_into_directory(storage, tmp_path, 2)
    storage.lives = position
    with pytest.raises(Crashed):
        await remove_leftovers(storage, tmp_path)
    storage.lives = None
    await remove_leftovers(storage, tmp_path)
    check_whole(tmp_path, 1)


async def test_foreign_files_stay_in_a_callers_directory(storage: GatedStorage, tmp_path: Path) -> None:
    foreign = {"notes.txt": b"mine", "__9_0.distcp": b"somebody's", "aio_ckpt.notes": b"too", "aio_ckpt.json": b"{}"}
    for name, data in foreign.items():
        (tmp_path / name).write_bytes(data)
    for number in (1, 2):
        await save_into_directory(storage, tmp_path, number)
    assert {name: (tmp_path / name).read_bytes() for name in foreign} == foreign
    assert names_in(tmp_path) == {META, *generation(2).files, *foreign}


async def test_a_checkpoint_of_plain_dcp_is_replaced_and_its_data_files_stay(
    storage: GatedStorage, tmp_path: Path
) -> None:
    (tmp_path / META).write_bytes(b"of dcp")
    (tmp_path / "__0_0.distcp").write_bytes(b"of dcp, too")
    await save_into_directory(storage, tmp_path, 1)
    assert (tmp_path / META).read_bytes() == generation(1).metadata
    assert (tmp_path / "__0_0.distcp").read_bytes() == b"of dcp, too"


async def test_a_failed_save_leaves_the_checkpoint_and_nothing_of_its_own(
    storage: GatedStorage, tmp_path: Path
) -> None:
    await save_into_directory(storage, tmp_path, 1)
    storage.fail("replace", f"{META}.tmp-*", WriteError(errno.ENOSPC, "full", "x"))
    with pytest.raises(WriteError, match="full") as failed:
        await save_into_directory(storage, tmp_path, 2)
    assert not failed.value.in_doubt
    await undo_save(storage, tmp_path, "s2")
    check_whole(tmp_path, 1)


async def test_an_error_after_the_rename_is_in_doubt(
    storage: GatedStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await save_into_directory(storage, tmp_path, 1)
    storage.calls.clear()
    run = storage.run

    async def run_until_the_rename(call: Call, act: Callable[[], Awaitable[T]]) -> T | None:
        if call.name == "sync_dir" and any(done.name == "replace" for done in storage.calls):
            raise WriteError(errno.EIO, "the disk failed", "x")
        return await run(call, act)

    monkeypatch.setattr(storage, "run", run_until_the_rename)
    with pytest.raises(WriteError, match="the disk failed") as failed:
        await save_into_directory(storage, tmp_path, 2)
    assert failed.value.in_doubt
    assert (tmp_path / META).read_bytes() == generation(2).metadata
    assert generation(1).files | generation(2).files <= names_in(tmp_path)  # a power loss may leave either


async def test_a_commit_of_which_nothing_tells_whether_it_is_visible_is_in_doubt(
    storage: GatedStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await save_into_directory(storage, tmp_path, 1)
    storage.calls.clear()
    run = storage.run

    async def run_until_the_rename(call: Call, act: Callable[[], Awaitable[T]]) -> T | None:
        if call.name == "sync_dir" and any(done.name == "replace" for done in storage.calls):
            monkeypatch.setattr(storage, "read_end", fail_to_read)
            raise WriteError(errno.EIO, "the disk failed", "x")
        return await run(call, act)

    async def fail_to_read(*_: object) -> bytes:
        raise ReadError(errno.EIO, "the disk failed to read", "x")

    monkeypatch.setattr(storage, "run", run_until_the_rename)
    with pytest.raises(WriteError, match="the disk failed") as failed:
        await save_into_directory(storage, tmp_path, 2)
    assert failed.value.in_doubt
    assert generation(1).files | generation(2).files <= names_in(tmp_path)


async def test_a_save_whose_marker_is_gone_commits_nothing(storage: GatedStorage, tmp_path: Path) -> None:
    await begin_save(storage, tmp_path, "s1")
    await begin_save(storage, tmp_path, "s2")
    assert await pending_saves(storage, tmp_path) == ["s2"]
    (tmp_path / f"{META}.tmp-s1").write_bytes(generation(1).metadata)
    with pytest.raises(RootError, match="another save into this directory has begun"):
        await commit_save(storage, tmp_path, "s1")
    assert not (tmp_path / META).exists()


async def test_a_save_that_another_one_overtook_removes_none_of_its_files(
    storage: GatedStorage, tmp_path: Path
) -> None:
    await begin_save(storage, tmp_path, "s1")
    await begin_save(storage, tmp_path, "s2")
    for name in sorted({*generation(1).files, *generation(2).files}):
        (tmp_path / name).write_bytes(b"abc")
    await undo_save(storage, tmp_path, "s1")
    assert names_in(tmp_path) == {*generation(2).files, "aio_ckpt.pending-s2"}


async def test_a_writer_that_was_taken_over_removes_no_file_of_the_next_one(
    storage: GatedStorage, tmp_path: Path
) -> None:
    """Those of an overwrite that is under way look like leftovers until its commit."""
    await save_into_directory(storage, tmp_path, 1)
    for name in generation(2).files:
        (tmp_path / name).write_bytes(b"abc")

    async def taken_over() -> None:
        raise RootError(errno.EBUSY, "taken over", "x")

    with pytest.raises(RootError, match="taken over"):
        await remove_leftovers(storage, tmp_path, taken_over)
    assert generation(2).files <= names_in(tmp_path)
    with pytest.raises(RootError, match="taken over"):
        await begin_save(storage, tmp_path, "s3", taken_over)
    assert names_in(tmp_path) == {META, *generation(1).files, *generation(2).files}


async def test_if_the_end_of_metadata_is_damaged_no_file_is_removed(
    storage: GatedStorage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await save_into_directory(storage, tmp_path, 1)
    data = bytearray((tmp_path / META).read_bytes())
    data[-1] ^= 1
    (tmp_path / META).write_bytes(data)
    await remove_leftovers(storage, tmp_path)
    assert generation(1).files <= names_in(tmp_path)
    assert "nothing tells which are of its checkpoint" in caplog.text


async def test_a_pending_directory_replaces_a_checkpoint_and_the_callers_files_of_both(
    storage: GatedStorage, tmp_path: Path
) -> None:
    final, pending = tmp_path / "final", tmp_path / "pending"
    final.mkdir()
    await save_into_directory(storage, final, 1)
    (final / "notes.txt").write_bytes(b"mine")
    pending.mkdir()
    made = generation(2)
    for name in made.files:
        (pending / name).write_bytes(b"abc")
    (pending / META).write_bytes(made.metadata)
    (pending / "model_card.md").write_bytes(b"new")
    (final / "model_card.md").write_bytes(b"old")
    await replace_by_pending(storage, pending, final, "s2", unclaimed)
    assert names_in(final) == {META, "notes.txt", "model_card.md", *made.files}
    assert (final / META).read_bytes() == made.metadata
    assert (final / "model_card.md").read_bytes() == b"new"
    assert names_in(pending) == set()


async def test_a_pending_directory_waits_for_nobody_who_holds_the_place(storage: GatedStorage, tmp_path: Path) -> None:
    final, pending = tmp_path / "final", tmp_path / "pending"
    for directory in (final, pending):
        directory.mkdir()
    await save_into_directory(storage, final, 1)
    async with hold_directory(storage, final):
        with pytest.raises(RootError, match="let one at a time save into it"):
            await replace_by_pending(storage, pending, final, "s2", unclaimed)
    assert not (final / LOCK).exists()
    check_whole(final, 1)


async def test_a_lock_that_hangs_does_not_hold_the_loop(
    storage: GatedStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop has the heartbeats and the deadlines of all other saves."""
    entered, gate, lock = threading.Event(), threading.Event(), Storage.lock

    def hung(self: Storage, path: Path) -> RootLock:
        entered.set()
        assert gate.wait(TIMEOUT), "the loop did not go on"
        return lock(self, path)

    monkeypatch.setattr(Storage, "lock", hung)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(begin(storage, tmp_path))
        await asyncio.to_thread(entered.wait, TIMEOUT)
        gate.set()
    assert not (tmp_path / LOCK).exists()


async def begin(storage: Storage, directory: Path) -> None:
    async with hold_directory(storage, directory):
        await begin_save(storage, directory, "s1")
