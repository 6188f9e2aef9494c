"""A checkpoint directory that lies anywhere is loaded and read, with an engine and without one."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from builders import flip, save, steps_dir, weights
from gated_storage import TIMEOUT
from saved_files import data_file

import aio_ckpt
from aio_ckpt import EngineConfig, LoadReport, SyncCheckpointEngine
from aio_ckpt.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    RootError,
    UnsafeObjectError,
)

Load = Callable[..., LoadReport]


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A checkpoint of step 2 that was moved out of its root."""
    with SyncCheckpointEngine(tmp_path / "old") as engine:
        save(engine, 1, 2)
    shutil.move(steps_dir(tmp_path / "old", 2), tmp_path / "moved")
    return tmp_path / "moved"


@pytest.fixture(params=["engine", "without"])
def load(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """``aio_ckpt.load``, and the same by an engine on another root."""
    if request.param == "without":
        yield aio_ckpt.load
        return
    with SyncCheckpointEngine(tmp_path / "other") as engine:
        yield lambda path, state, **options: engine.load(state, path=path, **options)


def test_a_template_is_filled_from_a_directory(elsewhere: Path, load: Load) -> None:
    for path in (elsewhere, str(elsewhere)):
        report = load(path, template := weights(0))
        assert torch.equal(template["w"], weights(2)["w"])
        assert (report.step, report.path, report.skipped, report.verified) == (2, elsewhere, (), True)


def test_a_directory_is_read(elsewhere: Path, tmp_path: Path) -> None:
    assert torch.equal(aio_ckpt.read(elsewhere)["w"], weights(2)["w"])
    state, report = aio_ckpt.read(elsewhere, only=["w"], with_report=True)
    assert (list(state), report.step, report.path) == (["w"], 2, elsewhere)
    with SyncCheckpointEngine(tmp_path / "other") as engine:
        state, report = engine.read(path=elsewhere, with_report=True)
        assert (list(state), report.step, report.path) == (["w"], 2, elsewhere)


def test_a_checkpoint_of_stock_is_loaded_and_its_step_is_not_known(tmp_path: Path, load: Load) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(weights(3), checkpoint_id=tmp_path / "stock", no_dist=True)
    assert load(tmp_path / "stock", template := weights(0)).step == -1
    assert torch.equal(template["w"], weights(3)["w"])


def test_nothing_is_made_on_the_disk_without_an_engine(elsewhere: Path) -> None:
    before = sorted(elsewhere.parent.rglob("*"))
    aio_ckpt.load(elsewhere, weights(0))
    aio_ckpt.read(elsewhere)
    assert sorted(elsewhere.parent.rglob("*")) == before


def test_a_root_in_the_place_of_a_checkpoint_is_told_with_the_step_to_give(tmp_path: Path, load: Load) -> None:
    with SyncCheckpointEngine(tmp_path / "root") as engine:
        save(engine, 1)
    with pytest.raises(CheckpointNotFoundError, match=r"it is a root; give .*step_000000001"):
        load(tmp_path / "root", weights(0))
    with pytest.raises(CheckpointNotFoundError, match=r"no checkpoint: the directory does not exist"):
        load(tmp_path / "nowhere", weights(0))
    with pytest.raises(CheckpointNotFoundError, match=r"no checkpoint: there is no \.metadata"):
        load(tmp_path, weights(0))
    (tmp_path / "file.pt").touch()
    with pytest.raises(CheckpointNotFoundError, match="it is a file; give the directory of a checkpoint"):
        load(tmp_path / "file.pt", weights(0))
    assert not (tmp_path / "nowhere").exists()


def test_exchanged_arguments_are_told_apart(elsewhere: Path) -> None:
    for path in (elsewhere, str(elsewhere)):
        with pytest.raises(
            ConfigError, match=r"path=\{'w'.*: the first argument is the path, the second is the template"
        ):
            aio_ckpt.load(weights(0), path)  # type: ignore[arg-type]


def test_damage_of_a_directory_is_an_error_and_sets_nothing_aside(elsewhere: Path, load: Load) -> None:
    data = data_file(elsewhere)
    flip(data, data.read_bytes().index(weights(2)["w"].numpy().tobytes()))
    with pytest.raises(CorruptCheckpointError, match="'w'") as caught:
        load(elsewhere, template := weights(0))
    assert caught.value.target_modified
    assert not template["w"].any()
    assert data.exists()
    assert list(elsewhere.parent.rglob("corrupt/*")) == []


def test_the_settings_of_a_load_without_an_engine_are_those_of_a_config(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path / "root") as engine, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = engine.save({"f": shutil.rmtree, "w": torch.ones(2)}).result(TIMEOUT).path
    with pytest.raises(UnsafeObjectError, match=r"^f: "):
        aio_ckpt.read(path)
    assert aio_ckpt.read(path, config=EngineConfig(trusted_objects=True))["f"] is shutil.rmtree
    state = {"f": None, "w": torch.zeros(2)}
    assert aio_ckpt.load(path, state, skip_untrusted=True).untrusted == ("f",)
    aio_ckpt.load(path, state, config=EngineConfig(trusted_objects=True))
    assert state["f"] is shutil.rmtree


@pytest.mark.parametrize("odd", [3, "", "a\0b", b"x", None, 1.5, ["x"]])
def test_what_is_no_path_is_refused_by_name(odd: Any) -> None:
    for call in (lambda: aio_ckpt.load(odd, weights(0)), lambda: aio_ckpt.read(odd)):
        with pytest.raises(ConfigError, match="path="):
            call()


@pytest.mark.parametrize("flag", ["strict", "allow_missing", "skip_untrusted", "skip_mismatched", "cast"])
def test_what_is_no_flag_is_refused_by_name(elsewhere: Path, flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag}="):
        aio_ckpt.load(elsewhere, weights(0), **{flag: "no"})  # type: ignore[arg-type]


def test_a_step_and_a_path_together_are_refused(elsewhere: Path, tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path / "other") as engine:
        for call in (lambda: engine.load(weights(0), 1, path=elsewhere), lambda: engine.read(1, path=elsewhere)):
            with pytest.raises(ConfigError, match=r"step=1 and path="):
                call()


def test_a_checkpoint_in_the_place_of_a_root_is_refused_with_the_root_to_give(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path / "root") as engine:
        save(engine, 1)
    with pytest.raises(RootError, match=rf"itself a checkpoint: give its parent {tmp_path}/root as"):
        SyncCheckpointEngine(tmp_path / "root" / "step_000000001")


def test_a_root_in_which_another_program_saved_a_checkpoint_is_refused_with_what_to_move(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path / "root") as engine:
        save(engine, 1)
    shutil.copytree(tmp_path / "root/step_000000001", tmp_path / "root", dirs_exist_ok=True)
    with pytest.raises(RootError, match=r"has put \.metadata and data files beside the steps: move those out of it"):
        SyncCheckpointEngine(tmp_path / "root")


def test_damage_of_a_checkpoint_that_was_named_is_told_with_its_directory(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path / "root") as engine:
        save(engine, 1, 2)
        path = steps_dir(tmp_path / "root", 1)
        data = data_file(path)
        flip(data, data.read_bytes().index(weights(1)["w"].numpy().tobytes()))
        calls: list[Callable[[], object]] = [
            lambda: engine.load(weights(0), 1),
            lambda: engine.read(path=path),
        ]
        for call in calls:
            with pytest.raises(CorruptCheckpointError, match=rf"^{path}: __.*_0_0.distcp: tensor 'w'"):
                call()


def test_a_root_that_holds_nothing_or_is_gone_is_told(tmp_path: Path) -> None:
    (tmp_path / "rot").mkdir()
    with SyncCheckpointEngine(tmp_path / "rot") as engine:
        with pytest.raises(CheckpointNotFoundError, match="the directory is empty: check the path"):
            engine.read()
        (tmp_path / "rot").rmdir()
        with pytest.raises(CheckpointNotFoundError, match="the directory does not exist: check the path"):
            engine.read()
