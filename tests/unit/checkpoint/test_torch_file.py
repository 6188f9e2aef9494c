"""Checksums of ``torch.save`` files: any changed byte of a record is named, and torch's own files pass."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from aio_ckpt.checkpoint.torch_file import check_torch_file
from aio_ckpt.errors import CorruptCheckpointError, MismatchError


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
