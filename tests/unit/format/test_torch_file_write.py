"""The tail of a torch.save file at any size, and the pickle of an object without its bytes."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest
import torch
from isal import isal_zlib

from aio_ckpt.errors import UnsupportedLeafError
from aio_ckpt.format.torch_file_write import ZipTail, pickle_object, storage_envelope

GIB = 1 << 30


def write_sparse(path: Path, sizes: list[int]) -> torch.Tensor:
    """A file of storages that are all holes, but for the first bytes of the last one."""
    lines = [torch.empty(size, dtype=torch.uint8) for size in sizes]  # never touched
    pickled, storages = pickle_object(lines)
    assert [storage.nbytes() for storage in storages] == sizes
    end, offsets, crc32s = 0, [], []
    first = b"the last storage"
    with path.open("wb") as file:
        for key, size in enumerate(sizes):
            header = len(storage_envelope(key, size).header)
            envelope = storage_envelope(key, size, padding=-(end + header) % 64)
            offsets.append(end)
            file.seek(end)
            file.write(envelope.header)
            raw_start = file.tell()
            head = first.ljust(size, b"\0") if key == len(sizes) - 1 else b""
            file.write(head)
            crc32s.append(isal_zlib.crc32(head))  # of a hole, any: nobody reads gigabytes here
            file.seek(raw_start + size)
            trailer = bytearray(envelope.trailer)
            trailer[4:8] = crc32s[-1].to_bytes(4, "little")
            file.write(trailer)
            end = file.tell()
        tail = ZipTail(pickle=pickled, start=end, keys=range(len(sizes)), offsets=offsets, lengths=sizes)
        file.write(tail.render(crc32s))
        assert file.tell() == end + tail.nbytes
    return torch.frombuffer(bytearray(first), dtype=torch.uint8)


@pytest.mark.parametrize(
    "sizes",
    [[100], [3 * GIB, 2 * GIB, 64], [5 * GIB, 64], [(1 << 32) - 1, 64], [(1 << 32) - 200, 64]],
    ids=["small", "offset", "size", "limit", "nearly"],
)
def test_files_beyond_4_gib_are_read(tmp_path: Path, sizes: list[int]) -> None:
    first = write_sparse(tmp_path / "t.pt", sizes)
    with zipfile.ZipFile(tmp_path / "t.pt") as archive:
        infos = {info.filename: info for info in archive.infolist()}
        assert [infos[f"archive/data/{key}"].file_size for key in range(len(sizes))] == sizes
        assert archive.read("archive/version") == b"3\n"
        assert archive.read(f"archive/data/{len(sizes) - 1}")[: len(first)] == first.numpy().tobytes()
    got = torch.load(tmp_path / "t.pt", weights_only=True, mmap=True)
    assert [line.nbytes for line in got] == sizes
    assert torch.equal(got[-1][: len(first)], first)
    assert os.stat(tmp_path / "t.pt").st_blocks * 512 < 1 << 20, "the test writes holes"


def test_more_storages_than_a_small_directory_counts(tmp_path: Path) -> None:
    count = 66_000
    pickled, _ = pickle_object([])
    tail = ZipTail(pickle=pickled, start=0, keys=range(count), offsets=[0] * count, lengths=[0] * count)
    (tmp_path / "t.zip").write_bytes(tail.render([0] * count))
    with zipfile.ZipFile(tmp_path / "t.zip") as archive:
        assert len(archive.namelist()) == count + 3


def test_the_pickle_is_that_of_torch_save(tmp_path: Path) -> None:
    base = torch.arange(12.0)
    obj = {"base": base, "view": base[3:], "t": base.view(3, 4).t(), "p": torch.nn.Parameter(base), "n": [1, None]}
    torch.save(obj, tmp_path / "stock.pt")
    with zipfile.ZipFile(tmp_path / "stock.pt") as archive:
        assert pickle_object(obj)[0] == archive.read("stock/data.pkl")


def test_storages_themselves_are_stored() -> None:
    tensor = torch.arange(4)
    _, storages = pickle_object([tensor.untyped_storage(), torch.arange(4, dtype=torch.uint8)])
    assert [storage.nbytes() for storage in storages] == [32, 4]


def test_two_dtypes_of_one_storage_are_named() -> None:
    base = torch.zeros(2)
    with pytest.raises(UnsupportedLeafError, match=r"torch.float32 and as torch.int32.*clone\(\)"):
        pickle_object((base, base.view(torch.int32)))
