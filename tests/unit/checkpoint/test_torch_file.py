"""Checksums of ``torch.save`` files: any changed byte of a record is named, and torch's own files pass."""

from __future__ import annotations

import errno
import itertools
import os
import zipfile
from pathlib import Path

import pytest
import torch

from aio_ckpt.checkpoint.torch_file import check_torch_file
from aio_ckpt.errors import CorruptCheckpointError, MismatchError, ReadError, UnsupportedLeafError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    torch.save({"a": torch.full((300_000,), 3.0), "b": torch.ones(2), "n": 5}, tmp_path / "a.pt")
    return tmp_path / "a.pt"


@pytest.mark.parametrize(("value", "record"), [(3.0, "a/data/0"), (1.0, "a/data/1")])
def test_a_changed_byte_is_named_with_its_record(path: Path, value: float, record: str) -> None:
    check_torch_file(path)
    data = bytearray(path.read_bytes())
    data[data.index(torch.full((2,), value).numpy().tobytes()) + 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(MismatchError, match=f"{path} is damaged: the CRC32 of {record} differs"):
        check_torch_file(path)


def test_a_file_that_torch_wrote_without_checksums_passes(path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.ones(1000)}, path)
    finally:
        torch.serialization.set_crc32_options(True)
    check_torch_file(path)


def test_a_file_that_was_cut_off_is_no_zip(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(CorruptCheckpointError, match="is damaged"):
        check_torch_file(path)


def test_a_compressed_file_is_refused_with_the_remedy(path: Path, tmp_path: Path) -> None:
    packed = tmp_path / "packed.pt"
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry))
    assert torch.load(packed)["n"] == 5
    with pytest.raises(
        UnsupportedLeafError, match=rf"{packed}: .*compressed.*: write .* torch\.save\(torch\.load\(f\), f\)"
    ):
        check_torch_file(packed)


def test_the_places_of_the_records_are_told(path: Path) -> None:
    found = check_torch_file(path)
    assert (found.places["data/0"][1], found.places["data/1"][1]) == (1_200_000, 8)
    start, nbytes = found.places["data.pkl"]
    assert path.read_bytes()[start : start + nbytes] == found.pickle


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("failing", range(4))
def test_a_disk_that_fails_is_no_damage(path: Path, monkeypatch: pytest.MonkeyPatch, failing: int, code: int) -> None:
    """The end record, the locator, the directory, a local header: each read."""
    stock, calls = os.pread, itertools.count()

    def pread(number: int, nbytes: int, offset: int) -> bytes:
        if next(calls) == failing:
            raise OSError(code, os.strerror(code))
        return stock(number, nbytes, offset)

    monkeypatch.setattr(os, "pread", pread)
    with pytest.raises(ReadError, match=str(path)) as raised:
        check_torch_file(path)
    assert (raised.value.errno, raised.value.filename) == (code, str(path))


def test_any_changed_byte_of_a_header_is_damage(tmp_path: Path) -> None:
    torch.save({"n": 5}, tmp_path / "a.pt")
    data = (tmp_path / "a.pt").read_bytes()
    found = 0
    for at in range(data.index(b"PK\x01\x02"), len(data)):
        for bit in (2, 7):
            changed = bytearray(data)
            changed[at] ^= 1 << bit
            (tmp_path / "a.pt").write_bytes(changed)
            try:
                check_torch_file(tmp_path / "a.pt")
            except CorruptCheckpointError as error:
                assert str(error).startswith(f"{tmp_path}/a.pt is damaged: ")  # noqa: PT017 - not all bytes matter
                assert not str(error).endswith(": ")  # noqa: PT017
                found += 1
    assert found > 400
