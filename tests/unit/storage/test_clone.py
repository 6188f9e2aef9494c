"""Clones of files on this host's file systems."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from aio_ckpt.storage import clone
from aio_ckpt.storage.clone import clone_file, file_stamp


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(b"bytes")
    return path


@pytest.fixture(params=["as the file system can", "hard link"])
def target(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if request.param == "hard link":
        monkeypatch.setattr(clone.fcntl, "ioctl", refuse)
    return tmp_path / "target"


def refuse(*_: object, **__: object) -> None:
    raise OSError(errno.EOPNOTSUPP, "Operation not supported")


def test_a_clone_has_the_bytes_and_its_mark_serves_the_next_clone(source: Path, target: Path):
    stamp = clone_file(source, target, file_stamp(source))
    assert target.read_bytes() == b"bytes"
    assert stamp == file_stamp(target)
    assert clone_file(target, target.with_name("third"), stamp) is not None
    source.unlink()
    assert target.read_bytes() == b"bytes"


def test_a_file_that_somebody_has_edited_is_not_cloned(source: Path, target: Path):
    stamp = file_stamp(source)
    with source.open("r+b") as file:
        file.write(b"edit")
    os.utime(source, ns=(stamp[0] + 1, stamp[0] + 1))  # the clock of a file system may stand still for 4 ms
    assert clone_file(source, target, stamp) is None
    assert not target.exists()


def test_a_file_that_is_gone_or_was_replaced_by_something_else_is_not_cloned(source: Path, target: Path):
    stamp = file_stamp(source)
    source.unlink()
    assert clone_file(source, target, stamp) is None
    os.mkfifo(source)
    assert clone_file(source, target, stamp) is None
    assert not target.exists()


def test_a_file_system_that_can_do_neither_gets_no_file(
    source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clone.fcntl, "ioctl", refuse)
    monkeypatch.setattr(clone.os, "link", refuse)
    assert clone_file(source, target, file_stamp(source)) is None
    assert not target.exists()


def test_links_do_not_change_the_mark(source: Path, tmp_path: Path):
    stamp = file_stamp(source)
    for number in range(3):
        os.link(source, tmp_path / f"{number}")
    assert file_stamp(source) == stamp
