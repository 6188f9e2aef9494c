"""The engines of a process that saves at the paths of a framework, and its pending saves."""

from __future__ import annotations

import logging
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import weights
from gated_storage import TIMEOUT, GatedStorage

import aio_ckpt
from aio_ckpt import EngineConfig, RootError, SoloCoordinator, SyncCheckpointEngine, WriteError
from aio_ckpt.integrations import path_saves
from aio_ckpt.integrations.path_saves import PathSaves
from aio_ckpt.runtime.portal import Executor


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[GatedStorage]:
    """The storage of all engines of the test."""
    executor = Executor("gated", 4)
    storage = GatedStorage(executor)

    def opened(*args: Any, **options: Any) -> SyncCheckpointEngine:
        return SyncCheckpointEngine(*args, storage=storage, **options)

    monkeypatch.setattr(path_saves, "SyncCheckpointEngine", opened)
    yield storage
    storage.open_gates()
    assert executor.close(TIMEOUT)


@pytest.fixture
def saves() -> Iterator[PathSaves]:
    """Of a process alone."""
    made = PathSaves(None, None, SoloCoordinator)
    yield made
    made.close()


def number_at(path: Path) -> float:
    return float(aio_ckpt.read(path)["w"][0])


def save(saves: PathSaves, path: Path, number: float = 0.0, *, waits: bool = False) -> None:
    saves.save(weights(number), path, files={}, waits=waits)


def test_a_save_is_pending_until_its_commit(disk: GatedStorage, saves: PathSaves, tmp_path: Path) -> None:
    path, gate = tmp_path / "a", disk.hold("rename")
    save(saves, path)
    assert saves.is_pending(path)
    assert not saves.is_pending(tmp_path / "b")
    saves.wait(tmp_path / "b")
    gate.open()
    saves.wait(path)
    assert not saves.is_pending(path)
    assert number_at(path) == 0


def test_a_save_that_waits_is_durable_when_it_returns(saves: PathSaves, tmp_path: Path) -> None:
    save(saves, tmp_path / "a", 2.0, waits=True)
    assert number_at(tmp_path / "a") == 2


def test_two_saves_are_pending_without_blocking_and_the_last_of_one_path_stays(
    disk: GatedStorage, saves: PathSaves, tmp_path: Path
) -> None:
    gate = disk.hold("rename")
    for number in (1.0, 2.0):
        save(saves, tmp_path / "a", number)
    gate.open()
    saves.flush()
    assert number_at(tmp_path / "a") == 2


def test_a_removal_waits_for_pending_commits(disk: GatedStorage, saves: PathSaves, tmp_path: Path) -> None:
    save(saves, tmp_path / "old", waits=True)
    gate = disk.hold("rename")
    save(saves, tmp_path / "new")
    saves.remove(tmp_path / "old")
    gate.wait_reached()
    assert number_at(tmp_path / "old") == 0
    gate.open()
    saves.close()
    assert number_at(tmp_path / "new") == 0
    assert not (tmp_path / "old").exists()


def test_if_the_save_fails_the_removal_is_dropped(
    disk: GatedStorage, saves: PathSaves, tmp_path: Path, quiet: None
) -> None:
    save(saves, tmp_path / "old", waits=True)
    disk.fail("rename", "*", WriteError(5, "disk", "x"))
    save(saves, tmp_path / "new")
    saves.remove(tmp_path / "old")
    with pytest.raises(WriteError):
        saves.close()
    assert number_at(tmp_path / "old") == 0


def test_the_next_save_raises_a_failure_and_is_made_all_the_same(
    disk: GatedStorage, tmp_path: Path, quiet: None
) -> None:
    saves = PathSaves(EngineConfig(max_in_flight=1), None, SoloCoordinator)  # so that a save waits for the one before
    disk.fail("rename", "*", WriteError(5, "disk", "x"))
    save(saves, tmp_path / "a")
    with pytest.raises(WriteError):
        save(saves, tmp_path / "b", 1.0, waits=True)
    assert number_at(tmp_path / "b") == 1
    saves.close()


def test_close_frees_the_root_and_the_next_save_opens_an_engine_again(saves: PathSaves, tmp_path: Path) -> None:
    for number in (1.0, 2.0):
        save(saves, tmp_path / "a", number)
        saves.close()
        with SyncCheckpointEngine(tmp_path) as other:  # the lock is free
            other.save(weights(0)).result(TIMEOUT)
        assert number_at(tmp_path / "a") == number


def test_while_another_error_is_handled_close_only_logs(
    disk: GatedStorage, saves: PathSaves, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk.fail("rename", "*", WriteError(5, "disk", "x"))
    save(saves, tmp_path / "a")
    with pytest.raises(RuntimeError, match="training"), caplog.at_level(logging.ERROR):
        try:
            raise RuntimeError("training")
        except RuntimeError:
            saves.close()
            raise
    assert any("while the trainer was failing" in record.message for record in caplog.records)


def test_each_file_system_has_an_engine(saves: PathSaves, tmp_path: Path) -> None:
    shm = Path("/dev/shm") / f"test-{tmp_path.name}"
    try:
        for path in (tmp_path / "a", shm / "b"):
            save(saves, path, waits=True)
        assert len(saves._engines) == len({tmp_path.stat().st_dev, Path("/dev/shm").stat().st_dev})
    finally:
        saves.close()
        shutil.rmtree(shm, ignore_errors=True)


def test_two_trainers_of_one_directory_are_told_to_have_roots_of_their_own(saves: PathSaves, tmp_path: Path) -> None:
    save(saves, tmp_path / "a", waits=True)
    other = PathSaves(None, None, SoloCoordinator)
    with pytest.raises(RootError) as raised:
        save(other, tmp_path / "b")
    other.close()
    assert any("give each a root" in note for note in raised.value.__notes__)
    own = PathSaves(None, tmp_path / "pending", SoloCoordinator)
    save(own, tmp_path / "b", waits=True)
    own.close()


def test_a_root_that_is_a_file_gets_no_advice_about_two_trainers(tmp_path: Path) -> None:
    (tmp_path / "root").touch()
    saves = PathSaves(None, tmp_path / "root", SoloCoordinator)
    with pytest.raises(RootError) as raised:
        save(saves, tmp_path / "a")
    assert getattr(raised.value, "__notes__", []) == []


def test_a_pickled_copy_has_the_settings_and_no_engine(saves: PathSaves, tmp_path: Path) -> None:
    given = PathSaves(EngineConfig(workers=3), tmp_path / "r", SoloCoordinator)
    save(given, tmp_path / "a")
    copy = pickle.loads(pickle.dumps(given))
    given.close()
    assert copy.config.workers == 3
    assert not copy.is_pending(tmp_path / "a")
    save(copy, tmp_path / "b", waits=True)
    copy.close()
    assert number_at(tmp_path / "b") == 0


def test_a_forked_process_opens_its_own_engines(
    saves: PathSaves, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(saves, tmp_path / "a", waits=True)
    (parents,) = saves._engines.values()
    saves._pid = -1  # as in a child, which has another number than its parent
    saves.close()
    assert parents.stats().pending == 0  # it is still open
    parents.close()
    save(saves, tmp_path / "b", waits=True)
    assert number_at(tmp_path / "b") == 0
