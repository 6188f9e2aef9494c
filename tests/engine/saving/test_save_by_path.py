"""``engine.save(state, path=…)`` and ``engine.remove(path)``: any directory, in the order of the calls, never torn."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from builders import listing, weights
from gated_storage import TIMEOUT, Call, GatedStorage, gated_engine
from power_loss import check_deletion, check_root_mode
from saved_files import DATA_FILE, RANK_MANIFEST, ROOT_MANIFEST, without_save_id

import aio_ckpt
from aio_ckpt import EngineConfig, SyncCheckpointEngine
from aio_ckpt.commit.path_checkpoints import refusal
from aio_ckpt.errors import (
    BusyError,
    CheckpointNotFoundError,
    ConfigError,
    EngineClosedError,
    RootError,
    SaveCancelledError,
    WriteError,
)
from aio_ckpt.format.root_names import ENGINE_DIRS, PENDING_DIR, TRASH_DIR
from aio_ckpt.format.step_names import StepNames
from aio_ckpt.reports import SaveReport
from aio_ckpt.runtime.portal import Executor

T = TypeVar("T")
NAMES = StepNames("step_{step:09d}")
PLAIN = {"strict": False, "allow_missing": False, "fallback": True}


@pytest.fixture
def engine(root: Path) -> Iterator[SyncCheckpointEngine]:
    """An engine with room for two saves."""
    with SyncCheckpointEngine(root, EngineConfig(max_in_flight=2)) as opened:
        yield opened


def number_at(path: Path) -> float:
    """The number of the weights in the checkpoint at ``path``, which verifies."""
    aio_ckpt.load(path, template := weights(0))
    return float(template["w"][0])


# -- saved and read ---------------------------------------------------------------------------------


def test_a_state_is_saved_at_any_path_and_read_there(engine: SyncCheckpointEngine, tmp_path: Path) -> None:
    path = tmp_path / "ckpts" / "new" / "epoch=0-step=10.ckpt"
    ticket = engine.save(weights(1), path=path, extra={"epoch": 0})
    report = ticket.result(TIMEOUT)
    assert report is not None
    assert (report.path, report.step, report.extra, ticket.path, ticket.step) == (path, 0, {"epoch": 0}, path, 0)
    assert repr(ticket) == f"<SaveTicket {path}: committed>"
    loaded = engine.load(template := weights(0), path=path)
    assert torch.equal(template["w"], weights(1)["w"])
    assert (loaded.step, loaded.path, loaded.extra, loaded.verified) == (0, path, {"epoch": 0}, True)
    assert torch.equal(engine.read(path=str(path))["w"], weights(1)["w"])
    assert number_at(path) == 1
    assert sorted(without_save_id(file.name) for file in path.iterdir()) == [
        ".metadata",
        DATA_FILE,
        RANK_MANIFEST,
        ROOT_MANIFEST,
    ]
    assert listing(engine.root) == []


def test_the_integer_keys_of_an_optimizer_come_back(engine: SyncCheckpointEngine, tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    engine.save({"optimizers": [optimizer.state_dict()]}, path=tmp_path / "last.ckpt").result(TIMEOUT)
    found = aio_ckpt.read(tmp_path / "last.ckpt")["optimizers"][0]
    assert list(found["state"]) == [0, 1]
    fresh = torch.optim.AdamW(torch.nn.Linear(3, 2).parameters())
    fresh.load_state_dict(found)
    assert torch.equal(fresh.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


def test_a_relative_path_counts_from_the_directory_at_the_call(
    engine: SyncCheckpointEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ticket = engine.save(weights(1), path="last")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir("other")
    report = ticket.result(TIMEOUT)
    assert report is not None
    assert report.path == tmp_path / "last"
    assert number_at(tmp_path / "last") == 1


def test_a_later_save_replaces_the_checkpoint_and_leaves_nothing_of_it(
    engine: SyncCheckpointEngine, tmp_path: Path
) -> None:
    for number in (1, 2, 3):
        engine.save(weights(number), path=tmp_path / "last.ckpt")
    engine.ready()
    assert engine.load(weights(0), path=tmp_path / "last.ckpt").step == 0
    assert number_at(tmp_path / "last.ckpt") == 3
    assert listing(engine.root) == []


def test_a_path_inside_the_root_that_is_no_step_is_allowed(engine: SyncCheckpointEngine) -> None:
    engine.save(weights(1), path=engine.root / "best" / "step_1").result(TIMEOUT)
    assert number_at(engine.root / "best" / "step_1") == 1
    assert engine.steps() == []


# -- steps do not know of it ------------------------------------------------------------------------


def test_steps_go_on_as_if_there_were_no_save_by_path(root: Path, tmp_path: Path) -> None:
    with SyncCheckpointEngine(root, EngineConfig(keep_last=2)) as engine:
        for number in (1, 2, 3):
            assert engine.save(weights(number)).step == number
            engine.save(weights(10 * number), path=tmp_path / f"{number}.ckpt")
        engine.ready()
        assert engine.steps() == [2, 3]
        assert engine.latest_step() == 3
        assert engine.stats().newest_step == 3
        assert engine.stats().committed == 6
        assert engine.rollback(2) == [3]
        assert engine.save(weights(4)).step == 3
    assert [number_at(tmp_path / f"{number}.ckpt") for number in (1, 2, 3)] == [10, 20, 30]


def test_a_commit_by_path_lets_no_step_expire(root: Path, tmp_path: Path) -> None:
    """An old step that was overwritten last stays until the next commit of a step."""
    with SyncCheckpointEngine(root, EngineConfig(keep_last=1)) as engine:
        engine.save(weights(1), 1).result(TIMEOUT)
        engine.protect(1)
        engine.save(weights(2), 2).result(TIMEOUT)
        wait(engine._root_session.passes)
        engine.unprotect(1)
        engine.save(weights(3), 1, overwrite=True).result(TIMEOUT)
        engine.save(weights(4), path=tmp_path / "a").result(TIMEOUT)
    assert listing(root) == ["step_000000001", "step_000000002"]


def test_a_pending_save_by_path_takes_no_number(root: Path, tmp_path: Path) -> None:
    with gated_engine(root, max_in_flight=2) as (engine, storage):
        gate = storage.hold("rename")
        engine.save(weights(1), path=tmp_path / "a")
        gate.wait_reached()
        assert engine.save(weights(2), step=0).step == 0
        gate.open()
    assert listing(root) == ["step_000000000"]


def test_a_failed_save_by_path_disturbs_no_step(root: Path, tmp_path: Path) -> None:
    with gated_engine(root) as (engine, storage):
        engine.save(weights(1)).result(TIMEOUT)
        storage.fail("sync_dir", "pending/*", WriteError(errno.EIO, "the disk is gone", "x"))
        with pytest.raises(WriteError, match="the disk is gone"):
            engine.save(weights(2), path=tmp_path / "a").result(TIMEOUT)
        assert not (tmp_path / "a").exists()
        assert engine.save(weights(2)).step == 2
    assert listing(root) == ["step_000000001", "step_000000002"]


def test_a_skipped_and_a_refused_save_by_path_name_the_path(root: Path, tmp_path: Path) -> None:
    with gated_engine(root, when_busy="skip") as (engine, storage):
        storage.hold("rename")
        engine.save(weights(1), step=1)
        ticket = engine.save(weights(2), path=tmp_path / "a")
        assert (ticket.skipped, ticket.path, repr(ticket)) == (
            True,
            tmp_path / "a",
            f"<SaveTicket {tmp_path / 'a'}: skipped>",
        )
    with gated_engine(root, when_busy="raise") as (engine, storage):
        storage.hold("rename")
        engine.save(weights(1), path=tmp_path / "a")
        with pytest.raises(BusyError, match=rf"the save of {tmp_path / 'a'} is pending"):
            engine.save(weights(2), path=tmp_path / "b")


def test_a_cancelled_save_by_path_becomes_not_visible(root: Path, tmp_path: Path) -> None:
    with gated_engine(root) as (engine, storage):
        gate = storage.hold("write_file", "aio_ckpt.*.0.bin")
        ticket = engine.save(weights(1), path=tmp_path / "a")
        gate.wait_reached()
        assert ticket.cancel()
        gate.open()
        with pytest.raises(SaveCancelledError, match=str(tmp_path / "a")):
            ticket.result(TIMEOUT)
        assert not (tmp_path / "a").exists()


def test_log_and_failure_name_the_path(root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with gated_engine(root) as (engine, storage), caplog.at_level("INFO", "aio_ckpt"):
        engine.save(weights(1), path=tmp_path / "a").result(TIMEOUT)
        storage.fail("rename", "*", WriteError(errno.EIO, "the disk is gone", "x"))
        engine.save(weights(1), path=tmp_path / "b")
        with pytest.raises(WriteError) as caught:
            engine.save(weights(1), path=tmp_path / "c")
    assert caught.value.__notes__[0] == f"this is the background save of {tmp_path / 'b'}, which nobody awaited"
    assert f"{tmp_path / 'a'} committed: " in caplog.text
    assert f"the save of {tmp_path / 'b'} failed: WriteError" in caplog.text
    assert number_at(tmp_path / "c") == 1


# -- refused paths ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("/runs/ckpt", "holds the root"),
        ("/runs", "holds the root"),
        ("/runs/ckpt/.aio_ckpt/x", "belongs to the engine"),
        ("/runs/ckpt/step_000000005", "give step=5"),
        ("/runs/ckpt/checkpoint-500", "give step=500"),
        ("/runs/ckpt/step_000000005/x", "lies in the checkpoint step_000000005"),
        ("/runs/ckpt/best", ""),
        ("/runs/ckpt/a/step-5", ""),
        ("/runs/ckpt2/step-5", ""),
    ],
)
def test_the_places_of_the_engine_and_of_steps_are_not_named_by_path(place: str, words: str) -> None:
    why = refusal(Path(place), Path("/runs/ckpt"), NAMES)
    assert bool(why) == bool(words)
    assert words in why


@pytest.mark.parametrize(
    "path", ["{root}", "{root}/.aio_ckpt/x", "{root}/step-5", "{root}/../link/step-5", 5, "", "/", "s3://a/b"]
)
def test_a_refused_path_touches_nothing(root: Path, path: object) -> None:
    (root.parent / "link").symlink_to(root)
    given = path.format(root=root) if isinstance(path, str) else path
    with SyncCheckpointEngine(root) as engine:
        for call in (lambda: engine.save(weights(1), path=given), lambda: engine.remove(given)):  # type: ignore[arg-type]
            with pytest.raises(ConfigError, match="path="):
                call()
    assert not root.exists()


def test_a_step_and_a_path_are_not_both_given(engine: SyncCheckpointEngine, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"step=1 and path=.* give one of them"):
        engine.save(weights(1), step=1, path=tmp_path / "a")


def test_another_file_system_is_refused_with_both_names_and_the_remedy(
    engine: SyncCheckpointEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = {tmp_path: 2}
    monkeypatch.setattr("aio_ckpt.commit.path_checkpoints.device_of", lambda path: devices.get(path, 1))
    with pytest.raises(
        ConfigError, match=rf"{tmp_path / 'a'}.*another file system than the root {engine.root}.*open an engine"
    ):
        engine.save(weights(1), path=tmp_path / "a")
    assert not engine.root.exists()


def test_a_file_in_the_place_of_a_directory_is_named(engine: SyncCheckpointEngine, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="/file is a file: give a path in a directory"):
        engine.save(weights(1), path=tmp_path / "file/below/a")


def test_the_remedy_of_a_full_disk_is_one_for_paths(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with gated_engine(root) as (engine, storage):
        engine.save(weights(1), 1).result(TIMEOUT)
        storage.fail("create_data_file", "*", WriteError(errno.ENOSPC, "No space left on device", "x"))
        with pytest.raises(
            WriteError, match=r"free space, or delete an older checkpoint: engine\.remove\(path\): 'x'$"
        ):
            engine.save(weights(2), path=tmp_path / "a").result(TIMEOUT)
    assert caplog.messages[-1].endswith("; what was at its path is unchanged")


def test_a_file_system_that_shows_only_at_the_rename_is_named(root: Path, tmp_path: Path) -> None:
    with gated_engine(root) as (engine, storage):
        storage.fail("rename", "*", WriteError(errno.EXDEV, "Invalid cross-device link", "x"))
        with pytest.raises(WriteError, match=rf"another file system than the root {root}"):
            engine.save(weights(1), path=tmp_path / "a").result(TIMEOUT)


def test_a_link_is_refused(engine: SyncCheckpointEngine, tmp_path: Path) -> None:
    (tmp_path / "last").symlink_to(tmp_path / "best")
    for call in (lambda: engine.save(weights(1), path=tmp_path / "last"), lambda: engine.remove(tmp_path / "last")):
        with pytest.raises(ConfigError, match="symbolic link"):
            call()


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_what_is_no_checkpoint_is_neither_replaced_nor_removed(
    engine: SyncCheckpointEngine, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "mine"
    if kind == "file":
        path.write_text("mine")
    else:
        path.mkdir()
        (path / "notes.txt").write_text("mine")
    with pytest.raises(WriteError, match="is in the way and holds no checkpoint") as caught:
        engine.save(weights(1), path=path).result(TIMEOUT)
    assert caught.value.errno == errno.EEXIST
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint"):
        engine.remove(path).result(TIMEOUT)
    assert path.exists()
    assert listing(engine.root) == []


def test_a_checkpoint_is_replaced_and_files_of_others_in_it_stay(engine: SyncCheckpointEngine, tmp_path: Path) -> None:
    path = tmp_path / "a"
    engine.save(weights(1), path=path).result(TIMEOUT)
    (path / "notes.txt").write_text("mine")
    for number, overwrite in ((2, False), (3, True)):
        engine.save(weights(number), path=path, overwrite=overwrite).result(TIMEOUT)
        assert ((path / "notes.txt").read_text(), number_at(path)) == ("mine", number)


def test_an_empty_directory_is_taken(engine: SyncCheckpointEngine, tmp_path: Path) -> None:
    """Scripts make the directory first."""
    (tmp_path / "a").mkdir()
    engine.save(weights(1), path=tmp_path / "a").result(TIMEOUT)
    assert number_at(tmp_path / "a") == 1
    assert listing(engine.root / ".aio_ckpt/trash") == listing(engine.root / ".aio_ckpt/pending") == []


def test_a_checkpoint_with_files_of_others_is_not_removed(engine: SyncCheckpointEngine, tmp_path: Path) -> None:
    engine.save(weights(1), path=tmp_path / "best").result(TIMEOUT)
    engine.save(weights(2), path=tmp_path / "best/ema").result(TIMEOUT)
    with pytest.raises(WriteError, match=r"files of others \(ema\): move them away first"):
        engine.remove(tmp_path / "best").result(TIMEOUT)
    assert (number_at(tmp_path / "best"), number_at(tmp_path / "best/ema")) == (1, 2)


def test_files_that_a_save_put_there_are_its_own(engine: SyncCheckpointEngine, tmp_path: Path) -> None:
    path = tmp_path / "a"
    engine.save(weights(1), path=path, files={"a.md": b"a"}).result(TIMEOUT)
    engine.save(weights(2), path=path, files={"b.md": b"b"}).result(TIMEOUT)
    assert not (path / "a.md").exists()
    assert (path / "b.md").read_bytes() == b"b"
    engine.remove(path).result(TIMEOUT)
    assert not path.exists()


# -- removal, in the order of the calls -------------------------------------------------------------


def test_a_removal_waits_for_the_commits_before_it(root: Path, tmp_path: Path) -> None:
    with gated_engine(root) as (engine, storage):
        engine.save(weights(1), path=tmp_path / "old").result(TIMEOUT)
        gate = storage.hold("rename", "pending/*")
        ticket = engine.save(weights(2), path=tmp_path / "new")
        removal = engine.remove(tmp_path / "old")
        gate.wait_reached()
        assert (removal.done(), number_at(tmp_path / "old")) == (False, 1)
        gate.open()
        assert removal.result(TIMEOUT) is None
        assert ticket.committed.state == "reached"
        assert not (tmp_path / "old").exists()
        assert number_at(tmp_path / "new") == 2
    assert listing(root) == []


def test_one_path_saved_removed_and_saved_again_ends_as_the_last_call_says(root: Path, tmp_path: Path) -> None:
    path = tmp_path / "a"
    with gated_engine(root, max_in_flight=3) as (engine, storage):
        gate = storage.hold("sync_dir", "pending/*")
        engine.save(weights(1), path=path)
        first = engine.remove(path)
        last = engine.save(weights(2), path=path)
        gate.wait_reached()
        gate.open()
        last.result(TIMEOUT)
        first.result(TIMEOUT)
        moves = [call.name for call in storage.calls if path in (call.path, call.other) and "name" in call.name]
        assert moves == ["rename", "rename", "rename"], "saved, removed, saved: nothing was replaced"
        assert number_at(path) == 2


@pytest.mark.parametrize("fails", ["while it is pending", "before the call"])
def test_a_removal_after_a_save_that_fails_is_dropped(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, fails: str
) -> None:
    with gated_engine(root, on_failure="log") as (engine, storage):
        engine.save(weights(1), path=tmp_path / "old").result(TIMEOUT)
        gate = storage.hold("sync_dir", "pending/*")
        storage.fail("sync_dir", "pending/*", error := WriteError(errno.EIO, "the disk is gone", "x"))
        ticket = engine.save(weights(2), path=tmp_path / "new")
        gate.wait_reached()
        if fails == "before the call":
            gate.open()
            engine.wait_ready()
        removal = engine.remove(tmp_path / "old")
        gate.open()
        with pytest.raises(WriteError, match="the disk is gone"):
            removal.result(TIMEOUT)
        assert removal.exception() is error is ticket.exception()
        assert number_at(tmp_path / "old") == 1
        assert "dropped, and the checkpoint stays: the save of" in caplog.text
        assert engine.remove(tmp_path / "old").result(TIMEOUT) is None, "now the caller knows: it may make room"


def test_a_removal_by_another_name_of_the_directory_removes_it(engine: SyncCheckpointEngine, tmp_path: Path) -> None:
    engine.save(weights(1), path=tmp_path / "dir" / "a").result(TIMEOUT)
    (tmp_path / "link").symlink_to(tmp_path / "dir")
    engine.remove(tmp_path / "link" / "a").result(TIMEOUT)
    assert not (tmp_path / "dir" / "a").exists()


def test_a_missing_path_is_named_and_logged(
    engine: SyncCheckpointEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(CheckpointNotFoundError, match=f"does not exist.*{tmp_path / 'none'}"):
        engine.remove(tmp_path / "none").result(TIMEOUT)
    assert f"remove({tmp_path / 'none'}) failed" in caplog.text
    assert engine.save(weights(1), path=tmp_path / "a").result(TIMEOUT) is not None


def test_a_removal_whose_files_cannot_be_deleted_has_removed_the_checkpoint(root: Path, tmp_path: Path) -> None:
    with gated_engine(root) as (engine, storage):
        engine.save(weights(1), path=tmp_path / "a").result(TIMEOUT)
        storage.fail("remove_tree", "trash/*", WriteError(errno.EIO, "the disk is gone", "x"))
        engine.remove(tmp_path / "a").result(TIMEOUT)
        assert not (tmp_path / "a").exists()
        engine.save(weights(1), path=tmp_path / "b").result(TIMEOUT)
    assert listing(root) == [], "the next commit deletes what was left"


def test_close_finishes_removals(root: Path, tmp_path: Path) -> None:
    with gated_engine(root) as (engine, _):
        engine.save(weights(1), path=tmp_path / "a").result(TIMEOUT)
        engine.save(weights(2), path=tmp_path / "b")
        removal = engine.remove(tmp_path / "a")
        engine.close_blocking()
        assert removal.done()
        assert not (tmp_path / "a").exists()
        with pytest.raises(EngineClosedError):
            engine.remove(tmp_path / "b")


def test_terminate_drops_removals_and_settles_them(root: Path, tmp_path: Path) -> None:
    with gated_engine(root) as (engine, storage):
        engine.save(weights(1), path=tmp_path / "a").result(TIMEOUT)
        gate = storage.hold("write_file", "aio_ckpt.*.0.bin")
        engine.save(weights(2), path=tmp_path / "b")
        removal = engine.remove(tmp_path / "a")
        gate.wait_reached()
        engine.terminate()
        assert isinstance(removal.exception(TIMEOUT), (SaveCancelledError, EngineClosedError))
    assert number_at(tmp_path / "a") == 1


def test_removal_needs_the_lock_of_the_root(root: Path, tmp_path: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        engine.save(weights(1), path=tmp_path / "a").result(TIMEOUT)
        with SyncCheckpointEngine(root) as other, pytest.raises(RootError):
            other.remove(tmp_path / "a")
    assert number_at(tmp_path / "a") == 1


# -- a load waits -----------------------------------------------------------------------------------


def test_a_load_waits_for_the_pending_save_of_its_path(root: Path, tmp_path: Path) -> None:
    with gated_engine(root, max_in_flight=2) as (engine, storage):
        engine.save(weights(1), path=tmp_path / "a").result(TIMEOUT)
        gate = storage.hold("replace", ".metadata.tmp-*")
        engine.save(weights(2), path=tmp_path / "a")
        gate.wait_reached()
        loading = engine.load(template := weights(0), None, path=tmp_path / "a", **PLAIN)
        reading = engine.read(None, only=None, path=str(root / ".." / "a"))
        assert engine.read(None, only=None, path=tmp_path / "b").exception(TIMEOUT) is not None  # waits for nothing
        assert not loading.done()
        gate.open()
        loading.result(TIMEOUT)
        assert (float(template["w"][0]), float(reading.result(TIMEOUT)["w"][0])) == (2, 2)


def test_a_load_after_a_removal_finds_nothing(root: Path, tmp_path: Path) -> None:
    with gated_engine(root, max_in_flight=2) as (engine, storage):
        engine.save(weights(1), path=tmp_path / "a").result(TIMEOUT)
        gate = storage.hold("rename", "pending/*")
        engine.save(weights(2), path=tmp_path / "b")
        engine.remove(tmp_path / "a")
        loading = engine.load(weights(0), None, path=tmp_path / "a", **PLAIN)
        gate.open()
        with pytest.raises(CheckpointNotFoundError):
            loading.result(TIMEOUT)


# -- crash and power loss ---------------------------------------------------------------------------


class RecordedStorage(GatedStorage):
    """Copies everything below ``top`` before each change: what a crash there would leave."""

    top: Path | None = None
    copies: list[Path]

    async def run(self, call: Call, act: Callable[[], Awaitable[T]]) -> T | None:
        if self.top is not None and call.name not in ("touch", "write"):
            copy = self.top.with_name(f"{self.top.name} {len(self.copies)}")
            shutil.copytree(self.top, copy)
            self.copies.append(copy)
        return await super().run(call, act)


def crashes(top: Path, *, removes: bool) -> list[Path]:
    """What a crash before each call of a second save at ``top / "a"``, or of its removal, would leave."""
    executor = Executor("recorded", 4)
    storage = RecordedStorage(executor)
    storage.copies = []
    with SyncCheckpointEngine(top / "root", storage=storage) as engine:
        engine.save(weights(1), path=top / "a").result(TIMEOUT)
        storage.top = top
        if removes:
            engine.remove(top / "a").result(TIMEOUT)
        else:
            engine.save(weights(2), path=top / "a").result(TIMEOUT)
        storage.top = None
    assert executor.close(TIMEOUT)
    return storage.copies


def die(root: Path) -> None:
    """Let the names of all pending directories below ``root`` tell a process that has ended."""
    for pending in root.glob(f"{PENDING_DIR}/*"):
        owner, _, rest = pending.name.rpartition("-")
        process, _, started_ticks = owner.rpartition("-")
        pending.rename(pending.with_name(f"{process}-{int(started_ticks) + 1}-{rest}"))


def test_a_crash_at_any_call_leaves_the_old_checkpoint_or_the_new_one_and_the_next_writer_tidies(
    tmp_path: Path,
) -> None:
    (tmp_path / "top").mkdir()
    copies = crashes(tmp_path / "top", removes=False)
    found = [number_at(copy / "a") for copy in copies]
    assert found == sorted(found)
    assert {1.0, 2.0} == set(found)
    for copy in copies[-3:]:
        die(copy / "root")
        with SyncCheckpointEngine(copy / "root") as engine:
            engine.save(weights(3)).result(TIMEOUT)
        assert listing(copy / "root") == ["step_000000001"]
        assert number_at(copy / "a") == 2


def test_a_crash_at_any_call_of_a_removal_leaves_the_checkpoint_whole_or_gone(tmp_path: Path) -> None:
    (tmp_path / "top").mkdir()
    seen = set()
    for copy in crashes(tmp_path / "top", removes=True):
        seen.add(exists := (copy / "a").exists())
        assert not exists or number_at(copy / "a") == 1
        with SyncCheckpointEngine(copy / "root") as engine:
            engine.save(weights(3)).result(TIMEOUT)
        assert listing(copy / "root") == ["step_000000001"]
    assert seen == {True, False}


def test_a_power_loss_leaves_the_old_checkpoint_or_the_new_one_and_a_removed_one_stays_gone(tmp_path: Path) -> None:
    root, path = tmp_path / "root", tmp_path / "ckpts" / "a"
    for directory in (path.parent, *(root / name for name in ENGINE_DIRS)):  # made durably by a call of its own
        directory.mkdir(parents=True)
    with gated_engine(root) as (engine, storage):
        for number in (1, 2):
            engine.save(weights(number), path=path).result(TIMEOUT)
        check_root_mode(storage.calls, top=tmp_path, final=path)
        engine.remove(path).result(TIMEOUT)
        check_deletion(storage.calls, top=tmp_path, final=path)
        deletions = [call.name for call in storage.calls if root / TRASH_DIR in call.path.parents]
        assert deletions == ["remove_tree", "remove_file", "sync_dir", "remove_tree"]


def test_on_commit_gets_the_report_of_a_save_by_path(root: Path, tmp_path: Path) -> None:
    reports: list[SaveReport] = []
    with SyncCheckpointEngine(root, EngineConfig(on_commit=reports.append)) as engine:
        engine.save(weights(1), path=tmp_path / "a").result(TIMEOUT)
    assert [report.path for report in reports] == [tmp_path / "a"]


def test_a_removal_whose_fsync_fails_leaves_the_checkpoint_at_its_path_and_no_trash(root: Path, tmp_path: Path) -> None:
    with gated_engine(root) as (engine, storage):
        path = tmp_path / "a"
        engine.save(weights(1), path=path).result(TIMEOUT)
        storage.fail("sync_dir", "*", WriteError(errno.EIO, "no fsync", str(path)))
        with pytest.raises(WriteError, match="no fsync"):
            engine.remove(path).result(TIMEOUT)
        assert not listing(root / TRASH_DIR)
        assert engine.load(weights(0), path=path).result(TIMEOUT).step is not None
        engine.remove(path).result(TIMEOUT)
        assert not path.exists()
