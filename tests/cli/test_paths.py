"""A mistyped path fails by its name, with exit code 1, and makes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import called

OF_ROOTS = {
    "ls": ["ls", "ROOT"],
    "du": ["du", "ROOT"],
    "protect": ["protect", "ROOT", "10"],
    "unprotect": ["unprotect", "ROOT", "10"],
    "rm": ["rm", "ROOT", "10"],
    "prune": ["prune", "ROOT", "--keep-last", "1", "--yes"],
    "rollback": ["rollback", "ROOT", "10"],
    "rescue": ["rescue", "ROOT"],
}
OF_PATHS = {
    "inspect": ["inspect", "ROOT"],
    "verify": ["verify", "ROOT"],
    "diff": ["diff", "GOOD", "ROOT"],
    "cp": ["cp", "ROOT", "NEW"],
}
ALL = OF_ROOTS | OF_PATHS


def tree(path: Path) -> list[str]:
    return sorted(str(each) for each in path.rglob("*"))


def refused(capsys, arguments: list[str], wrong: object, root: Path) -> str:
    """Call a command with a wrong path; what it says."""
    before = tree(root.parent)
    words = {"ROOT": wrong, "GOOD": root, "NEW": root.parent / "new"}
    code, out, err = called(capsys, *(words.get(word, word) for word in arguments))
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert str(wrong) in err
    assert tree(root.parent) == before
    return err


@pytest.mark.parametrize("name", ALL)
def test_a_path_that_does_not_exist(root, capsys, name):
    assert "no such directory" in refused(capsys, ALL[name], root.parent / "zzz", root)


def test_a_path_that_almost_exists_is_proposed(root, capsys):
    assert f"did you mean {root}?" in refused(capsys, ALL["ls"], root.parent / "roto", root)


@pytest.mark.parametrize("name", ALL)
def test_a_file(root, capsys, name):
    (root.parent / "file").write_text("")
    assert "is a file" in refused(capsys, ALL[name], root.parent / "file", root)


@pytest.mark.parametrize("name", ALL)
def test_an_empty_directory(root, capsys, name):
    (root.parent / "empty").mkdir()
    refused(capsys, ALL[name], root.parent / "empty", root)


@pytest.mark.parametrize("name", ALL)
def test_a_url(root, capsys, name, monkeypatch):
    monkeypatch.chdir(root.parent)
    refused(capsys, ALL[name], "s3://bucket/ckpt", root)


@pytest.mark.parametrize("name", OF_ROOTS)
def test_a_step_where_a_root_is_needed(root, capsys, name):
    assert "is a checkpoint, no root" in refused(capsys, ALL[name], root / "step_000000010", root)


def test_a_directory_of_other_things(root, capsys):
    (root.parent / "other").mkdir()
    (root.parent / "other/notes.txt").write_text("")
    assert "holds no step" in refused(capsys, ALL["ls"], root.parent / "other", root)


@pytest.mark.parametrize("target", ["none/new", "step"])
def test_cp_refuses_a_mistyped_target(root, capsys, target):
    wrong = root / "step_000000010" if target == "step" else root.parent / target
    before = tree(root.parent)
    code, _, err = called(capsys, "cp", root, wrong)
    assert code == 1
    assert str(wrong) in err
    assert tree(root.parent) == before


@pytest.mark.parametrize("name", ["protect", "rm", "rollback"])
def test_a_mistyped_step_fails_by_name_and_makes_nothing(root, capsys, name):
    before = tree(root)
    code, _, err = called(capsys, name, root, 11)
    assert code == 1
    assert "step 11" in err
    assert "10, 20" in err
    assert tree(root) == before
