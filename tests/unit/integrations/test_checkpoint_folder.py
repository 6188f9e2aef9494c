"""Drafts of checkpoints, their checksums, and the rename."""

from __future__ import annotations

import errno
import logging
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from aio_ckpt import CorruptCheckpointError, ReadError, RootError, WriteError
from aio_ckpt.integrations import checkpoint_folder
from aio_ckpt.integrations.checkpoint_folder import (
    SUMS_FILE,
    check,
    newest_verified,
    publish,
    restore_replaced,
    sync_files,
    write_checksums,
)

STATE = "trainer_state.json"


def draft(place: Path, *, sealed: bool = True) -> Path:
    """A checkpoint with one file of each kind."""
    (place / "sub").mkdir(parents=True)
    (place / STATE).write_text("{}")
    (place / "sub" / "a name.txt").write_text("text")
    torch.save({"a": torch.arange(9)}, place / "optimizer.pt")
    save_file({"a": torch.arange(9)}, place / "model.safetensors")
    if sealed:
        write_checksums(place, {})
    return place


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_the_checksums_are_those_of_all_files(tmp_path: Path) -> None:
    folder = draft(tmp_path / "d", sealed=False)
    (folder / ".aio_ckpt-file-1").mkdir()
    (folder / ".aio_ckpt-file-1" / "model.safetensors").write_text("not committed")
    write_checksums(folder, {folder / "optimizer.pt": 0xAB})
    lines = (folder / SUMS_FILE).read_text().splitlines()
    assert lines.pop().startswith("; 4 files, ")
    names = [line.rpartition(" ")[0] for line in lines]
    assert names == ["model.safetensors", "optimizer.pt", "sub/a name.txt", STATE]
    assert "optimizer.pt 000000ab" in lines
    assert lines[2].endswith(" 3b8ba7c7")  # zlib.crc32(b"text")


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "sub/a name.txt", STATE, SUMS_FILE])
@pytest.mark.parametrize("act", [damage, Path.unlink])
def test_each_damaged_or_missing_file_is_found(tmp_path: Path, name: str, act: object) -> None:
    folder = draft(tmp_path / "d")
    check(folder, STATE)
    act(folder / name)  # type: ignore[operator]
    if (name, act) == (SUMS_FILE, Path.unlink):
        check(folder, STATE)  # as a checkpoint of stock
        return
    with pytest.raises(CorruptCheckpointError):
        check(folder, STATE)


@pytest.mark.parametrize(
    "shorten",
    [
        lambda text: b"",
        lambda text: text[: len(text) // 2],
        lambda text: text[: text.rindex(b"\n;") + 1],
        lambda text: text[:-1],
        lambda text: text[text.index(b"\n") + 1 :],
        lambda text: text.replace(b"; 4", b"; 3"),
        lambda text: text[text.rindex(b";") :],
    ],
)
def test_a_list_of_checksums_that_lost_a_line_proves_nothing(tmp_path: Path, shorten: Callable[[bytes], bytes]) -> None:
    folder = draft(tmp_path / "d")
    text = (folder / SUMS_FILE).read_bytes()
    (folder / SUMS_FILE).write_bytes(shorten(text))
    with pytest.raises(CorruptCheckpointError, match=f"{SUMS_FILE} is damaged"):
        check(folder, STATE)


def test_a_file_that_the_user_added_is_no_fault(tmp_path: Path) -> None:
    folder = draft(tmp_path / "d")
    (folder / "README.md").write_text("mine")
    check(folder, STATE)


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("sealed", [True, False])
def test_a_disk_that_fails_is_no_damage_and_no_older_checkpoint_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, *, sealed: bool
) -> None:
    draft(tmp_path / "checkpoint-1")
    folder = draft(tmp_path / "checkpoint-2", sealed=sealed)
    stock = Path.open

    def fail(self: Path, *args: object, **options: object) -> object:
        if self == folder / "optimizer.pt":
            raise OSError(code, os.strerror(code), str(self))
        return stock(self, *args, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(ReadError, match=r"optimizer\.pt") as raised:
        newest_verified(tmp_path, "checkpoint", STATE)
    assert raised.value.errno == code


def test_a_zip_of_another_program_beside_the_state_is_no_damage(tmp_path: Path) -> None:
    folder = draft(tmp_path / "d", sealed=False)
    with zipfile.ZipFile(folder / "script.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("script/code/model.py", "pass\n" * 1000)
    check(folder, STATE)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt"])
def test_without_checksums_a_file_that_is_cut_off_is_found(tmp_path: Path, name: str) -> None:
    folder = draft(tmp_path / "d", sealed=False)
    check(folder, STATE)
    os.truncate(folder / name, (folder / name).stat().st_size - 10)
    with pytest.raises(CorruptCheckpointError, match=name):
        check(folder, STATE)


def test_without_checksums_torch_files_tell_a_changed_byte(tmp_path: Path) -> None:
    folder = draft(tmp_path / "d", sealed=False)
    data = (folder / "optimizer.pt").read_bytes()
    at = data.index(torch.arange(9).numpy().tobytes()) + 8
    (folder / "optimizer.pt").write_bytes(data[:at] + b"\xff" + data[at + 1 :])
    with pytest.raises(CorruptCheckpointError, match="CRC32"):
        check(folder, STATE)


def test_the_newest_that_verifies_is_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert newest_verified(tmp_path / "missing", "checkpoint", STATE) is None
    for step in (9, 10, 11):
        draft(tmp_path / f"checkpoint-{step}")
    (tmp_path / "checkpoint-99-old").mkdir()
    damage(tmp_path / "checkpoint-11" / "model.safetensors")
    with caplog.at_level(logging.WARNING, "aio_ckpt"):
        assert newest_verified(tmp_path, "checkpoint", STATE) == tmp_path / "checkpoint-10"
    assert "checkpoint-11 is passed over" in caplog.text
    for step in (9, 10):
        (tmp_path / f"checkpoint-{step}" / STATE).unlink()
    with pytest.raises(CorruptCheckpointError, match=r"checkpoint-11: .*checkpoint-10: .*checkpoint-9: "):
        newest_verified(tmp_path, "checkpoint", STATE)


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_draft_takes_the_place_of_an_older_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, exchanges: bool
) -> None:
    def refuse(a: Path, b: Path) -> None:
        raise RootError(errno.EINVAL, "this file system cannot exchange two directories", str(b))

    if not exchanges:
        monkeypatch.setattr(checkpoint_folder, "exchange_directories", refuse)
    final = draft(tmp_path / "checkpoint-1", sealed=False)
    (final / "old").touch()
    write_checksums(final, {})
    (final / "sub" / "mine").write_text("mine")
    (final / "scheduler.pt").touch()  # as a killed save leaves it
    new = draft(tmp_path / "drafts" / "checkpoint-1")
    publish(new, final, STATE, ["scheduler.pt"])
    assert not (final / "old").exists()
    assert not (final / "scheduler.pt").exists()
    assert (final / "sub" / "mine").read_text() == "mine"
    assert os.listdir(tmp_path / "drafts") == []
    check(final, STATE)


class Killed(BaseException):
    """End of the process."""


@pytest.mark.parametrize("renames", [1, 2])
def test_a_kill_beside_the_renames_loses_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    def refuse(a: Path, b: Path) -> None:
        raise RootError(errno.EINVAL, "this file system cannot exchange two directories", str(b))

    def kill(folder: Path) -> None:
        if folder == tmp_path:
            raise Killed

    def rename(self: Path, target: Path) -> Path:
        done = stock(self, target)
        if renames == 1:
            raise Killed
        return done

    final, new = draft(tmp_path / "checkpoint-1", sealed=False), draft(tmp_path / "drafts" / "checkpoint-1")
    (final / "old").touch()
    write_checksums(final, {})
    stock = Path.rename
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(checkpoint_folder, "exchange_directories", refuse)
        patch.setattr(checkpoint_folder, "sync_dir", kill)
        patch.setattr(Path, "rename", rename)
        publish(new, final, STATE, [])
    assert final.exists() == (renames == 2)
    restore_replaced(tmp_path / "drafts", tmp_path)
    check(final, STATE)
    assert (final / "old").exists() == (renames == 1)


def test_a_failing_disk_is_a_write_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    folder = draft(tmp_path / "d")
    sync_files(folder)
    monkeypatch.setattr(os, "fsync", fail)
    sync_files(folder, but=frozenset(path for path in folder.rglob("*") if path.is_file()))
    with pytest.raises(WriteError, match="Input/output error"):
        sync_files(folder)
