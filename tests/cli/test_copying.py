"""``cp``: a copy in another root is whole, verified and durable, or there is none."""

from __future__ import annotations

import errno
import os
import re
import threading
from pathlib import Path

import pytest
import torch
from command_line import called, document, flip, save_by_dcp

import aio_ckpt
from aio_ckpt import copying
from aio_ckpt.errors import ConfigError, WriteError
from aio_ckpt.sync import SyncCheckpointEngine

STEP = "step_000000010"


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_cp_makes_the_same_checkpoint_in_a_new_root(root, tmp_path, capsys):
    (root / STEP / "notes").mkdir()
    (root / STEP / "notes/config.json").write_text("{}")
    code, told = document(capsys, "cp", root / STEP, tmp_path / "new")
    assert (code, told["step"], told["path"]) == (0, 10, str(tmp_path / "new" / STEP))
    assert contents(tmp_path / "new" / STEP) == contents(root / STEP)
    assert told["nbytes"] == sum(map(len, contents(root / STEP).values()))
    assert not list((tmp_path / "new/.aio_ckpt/pending").iterdir())
    with SyncCheckpointEngine(tmp_path / "new") as engine:
        assert engine.steps() == [10]


def test_cp_copies_files_of_the_caller_whatever_their_names_and_leaves_those_of_saves(root, tmp_path, capsys):
    with SyncCheckpointEngine(root) as engine:
        engine.save({"w": torch.ones(3)}, step=30, files={"data.replaced-1.json": b"{}"}).result()
    newest = root / "step_000000030"
    (newest / "below").mkdir()
    (newest / "below/aio_ckpt.lock").write_text("mine")
    (newest / "below/.metadata.replaced-x").write_text("mine")
    whole = contents(newest)
    for name in (
        "aio_ckpt.lock",
        "aio_ckpt.pending-x",
        ".metadata.tmp-x",
    ):
        (newest / name).write_text("a save under way")
    assert called(capsys, "cp", newest, tmp_path / "new")[0] == 0
    assert contents(tmp_path / "new/step_000000030") == whole


def test_cp_of_a_checkpoint_with_a_directory_that_cannot_be_listed_names_it_and_copies_nothing(
    root, tmp_path, capsys, monkeypatch
):
    (root / STEP / "below").mkdir()
    real = os.scandir

    def scandir(path):
        if os.fspath(path).endswith("below"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    code, _, err = called(capsys, "cp", root / STEP, tmp_path / "new")
    assert code == 1
    assert "Permission denied" in err
    assert f"{STEP}/below" in err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("/etc/passwd"), lambda path: os.mkfifo(path)])
@pytest.mark.parametrize("name", ["extra", "below/extra"])
def test_cp_refuses_a_link_and_a_pipe_in_a_checkpoint_by_name(root, tmp_path, capsys, make, name):
    (root / STEP / "below").mkdir()
    make(root / STEP / name)
    code, _, err = called(capsys, "cp", root / STEP, tmp_path / "new")
    assert code == 1
    assert f"{STEP}/{name}" in err
    assert "cp copies files alone" in err
    assert not (tmp_path / "new").exists()


def test_cp_of_a_step_that_is_a_link_copies_what_it_leads_to(root, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / STEP).symlink_to(root / STEP)
    assert called(capsys, "cp", tmp_path / "run", tmp_path / "new")[0] == 0
    assert contents(tmp_path / "new" / STEP) == contents(root / STEP)


def test_cp_of_a_root_takes_its_newest_step(root, tmp_path, capsys):
    assert called(capsys, "cp", root, tmp_path / "new")[0] == 0
    assert (tmp_path / "new/step_000000020").is_dir()


def test_cp_refuses_a_step_that_is_there(root, tmp_path, capsys):
    assert called(capsys, "cp", root, tmp_path / "new")[0] == 0
    before = contents(tmp_path / "new")
    code, _, err = called(capsys, "cp", root, tmp_path / "new")
    assert code == 1
    assert "step 20 is there already" in err
    assert contents(tmp_path / "new") == before


async def test_cp_of_a_damaged_checkpoint_makes_nothing_visible(root, tmp_path, capsys):
    await flip(root / STEP, "model.embed")
    code, _, err = called(capsys, "cp", root / STEP, tmp_path / "new")
    assert code == 1
    assert "does not verify: __" in err
    assert "_0_0.distcp 'model.embed': " in err
    assert not (tmp_path / "new").exists()


def test_cp_that_fails_midway_leaves_no_file(root, tmp_path, capsys, monkeypatch):
    def full(*_: object) -> None:
        raise WriteError(28, "No space left on device", str(tmp_path / "new"))

    monkeypatch.setattr(copying, "_sync_dirs", full)
    code, _, err = called(capsys, "cp", root / STEP, tmp_path / "new")
    assert code == 1
    assert "No space left" in err
    assert not (tmp_path / "new").exists()


def test_files_are_copied_at_once_and_a_failure_waits_for_those_under_way(root, tmp_path, capsys, monkeypatch):
    all_begun, copy = threading.Barrier(3), copying._copy_file
    failed, ended = threading.Event(), []

    def copy_or_fail(source: Path, *rest: object) -> None:
        if all_begun.wait(60) == 0:
            failed.set()
            raise WriteError(28, "No space left on device", str(source))
        assert failed.wait(60)
        copy(source, *rest)
        ended.append(source.name)

    monkeypatch.setattr(copying, "_copy_file", copy_or_fail)
    code, _, err = called(capsys, "cp", root / STEP, tmp_path / "new")
    assert code == 1
    assert "No space left" in err
    assert len(ended) == 2
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("has_root", [True, False])
def test_cp_to_a_full_disk_names_both_files_and_removes_the_root_it_made(root, tmp_path, capsys, monkeypatch, has_root):
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    if has_root:
        (tmp_path / "new").mkdir()
    monkeypatch.setattr(os, "sendfile", full)
    code, _, err = called(capsys, "cp", root / STEP, tmp_path / "new")
    assert code == 1
    assert err.startswith(f"aio-ckpt: {tmp_path}/new/.aio_ckpt/pending/")
    assert f": No space left on device, copying {root / STEP}/" in err
    assert (tmp_path / "new").exists() == has_root
    assert not has_root or not list((tmp_path / "new/.aio_ckpt/pending").iterdir())


def test_cp_below_a_missing_parent_names_it(root, tmp_path, capsys):
    code, _, err = called(capsys, "cp", root, tmp_path / "none/deep")
    assert code == 1
    assert f"{tmp_path}/none/deep: {tmp_path}/none does not exist either: make it first" in err


def test_every_file_and_directory_of_a_copy_is_fsynced_before_it_is_visible(root, tmp_path, capsys, monkeypatch):
    synced, fsync = list[str](), os.fsync

    def watched(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    assert called(capsys, "cp", root / STEP, tmp_path / "new")[0] == 0
    pending = {path for path in synced if "/pending/" in path}
    assert {os.path.basename(path) for path in pending} >= {*os.listdir(root / STEP)}
    assert any(os.path.dirname(path).endswith("/pending") for path in pending)  # the directory itself
    assert synced.index(max(pending, key=synced.index)) < len(synced) - 1 - synced[::-1].index(str(tmp_path / "new"))


def test_cp_of_plain_dcp_needs_a_step_if_its_name_tells_none(tmp_path, capsys):
    save_by_dcp({"w": torch.ones(3)}, tmp_path / "plain")
    code, _, err = called(capsys, "cp", tmp_path / "plain", tmp_path / "new")
    assert code == 1
    assert "give --step" in err
    assert not (tmp_path / "new").exists()
    assert called(capsys, "cp", tmp_path / "plain", tmp_path / "new", "--step", 7)[0] == 0
    assert aio_ckpt.read(tmp_path / "new/step_000000007")["w"].tolist() == [1, 1, 1]


def test_cp_gives_no_checkpoint_another_step(root, tmp_path, capsys):
    code, _, err = called(capsys, "cp", root / STEP, tmp_path / "new", "--step", 11)
    assert code == 1
    assert "is step 10 by its manifest" in err
    assert not (tmp_path / "new").exists()


def test_cp_names_the_trainer_that_holds_the_other_root(root, tmp_path, capsys):
    with SyncCheckpointEngine(tmp_path / "new") as engine:
        engine.save({"w": torch.ones(2)}, step=1).result()
        code, _, err = called(capsys, "cp", root / STEP, tmp_path / "new")
    assert code == 1
    assert "close it first" in err


@pytest.mark.parametrize("name", ["aio_ckpt.pending-x", "aio_ckpt.lock", ".metadata.replaced-x"])
def test_cp_leaves_what_a_save_under_way_has_there(root, tmp_path, capsys, name):
    (root / STEP / name).write_text("")
    assert called(capsys, "cp", root / STEP, tmp_path / "new")[0] == 0
    assert not (tmp_path / "new" / STEP / name).exists()


def test_cp_takes_roots_alone_as_the_other_place(root, tmp_path, capsys):
    """``cp -r`` takes the new directory itself."""
    before = contents(root / STEP)
    for place, why in [
        (
            tmp_path / "new" / STEP,
            f"has the name of a step: give a root, the directory that holds steps: {tmp_path}/new",
        ),
        (root / STEP / "x", "is a checkpoint or lies in one"),
    ]:
        place.parent.mkdir(exist_ok=True)
        code, _, err = called(capsys, "cp", root / STEP, place)
        assert (code, why in err) == (2, True), err
        with pytest.raises(ConfigError, match=re.escape(why)):
            aio_ckpt.copy(root / STEP, place)
    with pytest.raises(ConfigError, match="is a checkpoint or lies in one"):
        aio_ckpt.copy(root / STEP, root / "step_000000020")
    assert contents(root / STEP) == before
    assert not list((tmp_path / "new").iterdir())


def test_what_was_saved_at_a_path_is_the_step_that_its_directory_is_named_for(tmp_path, capsys):
    with SyncCheckpointEngine(tmp_path / "root") as engine:
        engine.save({"w": torch.ones(3)}, path=tmp_path / "runs/checkpoint-500").result()
        engine.save({"w": torch.ones(3)}, path=tmp_path / "runs/last").result()
    assert document(capsys, "inspect", tmp_path / "runs/checkpoint-500")[1]["step"] == 500
    assert called(capsys, "cp", tmp_path / "runs/checkpoint-500", tmp_path / "new")[0] == 0
    code, _, err = called(capsys, "cp", tmp_path / "runs/last", tmp_path / "new")
    assert (code, "nothing tells its step: give --step" in err) == (1, True), err
    assert called(capsys, "cp", tmp_path / "runs/last", tmp_path / "new", "--step", 600)[0] == 0
    assert called(capsys, "verify", tmp_path / "new")[0] == 0
    with SyncCheckpointEngine(tmp_path / "new") as engine:
        assert engine.steps() == [500, 600]
        assert engine.load({"w": torch.zeros(3)}).step == 600
