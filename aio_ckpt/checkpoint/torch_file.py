"""The checksums of a ``torch.save`` file, which ``torch.load`` does not compare."""

from __future__ import annotations

import errno
import zipfile
import zlib
from pathlib import Path

from isal import isal_zlib

from aio_ckpt.errors import CorruptCheckpointError, MismatchError

__all__ = ["check_torch_file"]

_BLOCK_BYTES = 1 << 20
_FAULTS = (zipfile.BadZipFile, zlib.error, EOFError, UnicodeDecodeError, RuntimeError)
"""What zipfile raises for changed bytes in the headers of a zip."""


def check_torch_file(path: Path) -> None:
    """Compare the CRC32 of each record of the zip at ``path``. A record that torch stored without one passes.

    Raises:
        MismatchError: a record does not match its CRC32.
        CorruptCheckpointError: ``path`` is no zip, or a damaged one.
        OSError: the file cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            for record in archive.infolist():
                _check_record(archive, record, path)
    except _FAULTS as error:
        raise CorruptCheckpointError(f"{path} is damaged: {str(error) or 'it ends too early'}") from error
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        raise CorruptCheckpointError(f"{path} is damaged: a header tells a place before its begin") from error


def _check_record(archive: zipfile.ZipFile, record: zipfile.ZipInfo, path: Path) -> None:
    expected = record.CRC
    if expected == 0:
        return
    record.CRC = None  # type: ignore[assignment]  # zipfile would compute the sum too, several times slower
    found = 0
    with archive.open(record) as file:
        while block := file.read(_BLOCK_BYTES):
            found = isal_zlib.crc32(block, found)
    if found != expected:
        raise MismatchError(f"{path} is damaged: the CRC32 of {record.filename} differs")
