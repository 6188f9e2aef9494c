"""fsync where a file system refuses it, and where a disk fails."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from aio_ckpt.storage import durability
from aio_ckpt.storage.durability import sync_data, sync_dir, sync_file


def refuse(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fail(_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    monkeypatch.setattr(os, "fdatasync", fail)
    durability.warn_of_unsynced_names.cache_clear()


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS])
@pytest.mark.parametrize("sync", [sync_file, sync_data])
def test_a_refused_fsync_of_a_file_says_what_it_means(
    monkeypatch: pytest.MonkeyPatch, sync: Callable[[int], None], code: int
) -> None:
    refuse(monkeypatch, code)
    with pytest.raises(OSError, match=r"this file system refuses fsync.*: save to a local disk") as caught:
        sync(0)
    assert caught.value.errno == code


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_refused_fsync_of_directories_is_told_once_with_the_mount(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    refuse(monkeypatch, code)
    (tmp_path / "below").mkdir()
    for path in (tmp_path, tmp_path / "below", tmp_path):
        sync_dir(path)
    (record,) = caplog.records
    mount = Path(record.getMessage().partition(":")[0])
    assert mount.is_dir()
    assert tmp_path.is_relative_to(mount)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fails_is_an_error_for_files_and_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    refuse(monkeypatch, code)
    for sync in (lambda: sync_file(0), lambda: sync_data(0), lambda: sync_dir(tmp_path)):
        with pytest.raises(OSError) as caught:
            sync()
        assert (caught.value.errno, caught.value.strerror) == (code, os.strerror(code))
    assert not caplog.records
