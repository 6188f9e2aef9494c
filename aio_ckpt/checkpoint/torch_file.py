"""Checks of a ``torch.save`` file: its format, the checksums that ``torch.load`` does not compare, its records."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from aio_ckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    MismatchError,
    ReadError,
    UnsupportedLeafError,
)
from aio_ckpt.format.checksum import crc32_of
from aio_ckpt.format.zip_directory import CompressedError, ZipRecord, body_offset, read_directory, read_record
from aio_ckpt.storage.os_errors import translate_errors

_BLOCK_BYTES = 1 << 20
_MAGIC = b"PK\x03\x04"
_OLD_MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""Start of the files of torch before 1.6: a pickled number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFile:
    """A ``torch.save`` file whose checksums were compared."""

    pickle: bytes
    """Content of ``data.pkl``; empty if there is none."""
    byteorder: bytes
    """Byte order of the elements, such as ``little``."""
    places: Mapping[str, tuple[int, int]]
    """Offset and length of the bytes of each record by its name, such as ``data/0``."""


def is_zip(path: Path) -> bool:
    """Return whether the file at ``path`` begins as a zip does.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def check_is_torch_file(path: Path) -> None:
    """Raise CheckpointNotFoundError if ``path`` does not begin as a ``torch.save`` file does, or is of an old format.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        begin = file.read(len(_OLD_MAGIC))
    if begin == _OLD_MAGIC:
        raise CheckpointNotFoundError(
            f"{path}: has the format of torch before 1.6: load it by torch.load and save it by torch.save first"
        )
    if not begin.startswith(_MAGIC):
        raise CheckpointNotFoundError(f"{path}: no torch.save file")


def check_torch_file(path: Path) -> TorchFile:
    """Compare the CRC32 of each record of the zip at ``path``. A record that torch stored without one passes.

    Raises:
        MismatchError: a record does not match its CRC32.
        CorruptCheckpointError: ``path`` is no zip, or a damaged one, or two of its records overlap.
        UnsupportedLeafError: a record is compressed. torch.load(mmap=True) would take its bytes for those of a tensor.
        OSError: the file cannot be read.
    """
    with path.open("rb", buffering=0) as file:
        number = file.fileno()
        data = _OpenFile(path, number, os.fstat(number).st_size)
        try:
            records = read_directory(data)
            places = {name: (_check_record(data, record), record.nbytes) for name, record in records.items()}
            pickled = read_record(data, records["data.pkl"]) if "data.pkl" in records else b""
            byteorder = read_record(data, records["byteorder"]) if "byteorder" in records else b"little"
        except MismatchError:
            raise
        except CompressedError as error:
            raise UnsupportedLeafError(
                f"{path}: {error}: write the file anew by torch.save(torch.load(f), f)"
            ) from error
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"{path} is damaged: {error}") from error
    return TorchFile(pickle=pickled, byteorder=byteorder, places=places)


@dataclass(frozen=True, slots=True)
class _OpenFile:
    """Bytes of an open file."""

    path: Path
    number: int
    nbytes: int

    def get(self, start: int, nbytes: int) -> bytes:
        """Return ``nbytes`` bytes from ``start``.

        Raises:
            ReadError: the disk failed.
            CorruptCheckpointError: the file has become shorter.
        """
        blocks = []
        while nbytes:
            with translate_errors(ReadError, self.path):
                block = os.pread(self.number, nbytes, start)
            if not block:
                raise CorruptCheckpointError("it ends too early")
            blocks.append(block)
            start, nbytes = start + len(block), nbytes - len(block)
        return b"".join(blocks)


def _check_record(data: _OpenFile, record: ZipRecord) -> int:
    """Compare a record with its CRC32, and return the offset of its bytes."""
    begin, found = body_offset(data, record), 0
    if not record.crc32:
        return begin
    for at in range(begin, begin + record.nbytes, _BLOCK_BYTES):
        found = crc32_of(data.get(at, min(_BLOCK_BYTES, begin + record.nbytes - at)), found)
    if found != record.crc32:
        raise MismatchError(f"{data.path} is damaged: the CRC32 of {record.title} differs")
    return begin
