"""``recover``: a caller's directory in which a save died."""

from __future__ import annotations

import torch
from command_line import called, document, save_by_dcp

import aio_ckpt.dcp


def save(path, value):
    save_by_dcp({"w": torch.full((3,), value)}, path, aio_ckpt.dcp.Writer(path))


def test_recover_brings_the_checkpoint_before_the_save_that_died_back(tmp_path, capsys):
    path = tmp_path / "c"
    save(path, 1.0)
    assert document(capsys, "recover", path)[1] == {"path": str(path), "came_back": False, "has_checkpoint": True}
    # As after a kill between the two renames and the commit of a second save.
    (path / "aio_ckpt.pending-x").write_text("")
    (path / ".metadata").rename(path / ".metadata.replaced-x")
    (path / "aio_ckpt.json").rename(path / "aio_ckpt.json.replaced-x")
    (path / "__x_0.distcp").write_text("half")
    code, out, _ = called(capsys, "recover", path)
    assert code == 0
    assert "is back" in out
    assert not list(path.glob("*x*"))
    assert aio_ckpt.read(path)["w"].tolist() == [1.0, 1.0, 1.0]


def test_recover_of_a_directory_whose_only_save_died_removes_its_files(tmp_path, capsys):
    (tmp_path / "aio_ckpt.pending-x").write_text("")
    (tmp_path / "__x_0.distcp").write_text("half")
    assert "there is no checkpoint" in called(capsys, "recover", tmp_path)[1]
    assert not list(tmp_path.iterdir())
