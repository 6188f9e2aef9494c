"""What is not found on a file system that may be shared is asked for once more, after its directory was opened."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from aio_ckpt.storage import freshness
from aio_ckpt.storage.freshness import found_afresh


class OldAnswers:
    """A client that keeps "not found" until the directory of a name is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: int, *, shared: bool = True) -> None:
        self.opened: list[Path] = []
        self.asked = 0
        self._code = code
        really_open = os.open

        def noted(path: Path, flags: int, **others: Any) -> int:  # pytest removes its directories by os.open, too
            descriptor = really_open(path, flags, **others)
            self.opened.append(Path(path))
            return descriptor

        monkeypatch.setattr(freshness.os, "open", noted)
        monkeypatch.setattr(freshness, "is_shared", lambda device: shared)

    def find(self, path: Path) -> str:
        self.asked += 1
        if path.parent not in self.opened:
            raise OSError(self._code, os.strerror(self._code), str(path))
        return "found"


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ENOTDIR, errno.ESTALE])
def test_a_name_that_the_client_believes_missing_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int
) -> None:
    client = OldAnswers(monkeypatch, code)
    assert found_afresh(client.find, tmp_path / "step_000000001") == "found"


def test_the_nearest_directory_that_exists_is_opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    client = OldAnswers(monkeypatch, errno.ENOENT)
    with pytest.raises(FileNotFoundError):
        found_afresh(client.find, tmp_path / "missing" / "below" / "file")
    assert client.opened[-1] == tmp_path


def test_a_local_file_system_is_asked_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    client = OldAnswers(monkeypatch, errno.ENOENT, shared=False)
    with pytest.raises(FileNotFoundError):
        found_afresh(client.find, tmp_path / "file")
    assert client.asked == 1


def test_what_another_host_removed_is_not_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def stale(path: Path) -> None:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    OldAnswers(monkeypatch, errno.ESTALE)
    with pytest.raises(FileNotFoundError, match="file"):
        found_afresh(stale, tmp_path / "file")


def test_other_errors_are_not_asked_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    client = OldAnswers(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        found_afresh(client.find, tmp_path / "file")
    assert client.asked == 1
