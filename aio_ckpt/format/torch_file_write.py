"""A ``torch.save`` file of any object: its pickle, its storages as deferred records, and the records behind them.

The storages come first and all small records last::

    data/0 .. data/N    local header, raw bytes of a whole storage, data descriptor; the headers fill the gaps
    the rest            data.pkl, byteorder, version, central directory, end record

Each tensor of the object is pickled as ``torch.save`` pickles it. So views and tied tensors share a storage there, too.
Sources: ``torch/serialization.py`` (``_save``, ``_load``) of 2.8 to 2.15.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from aio_ckpt import _torch
from aio_ckpt.errors import UnsupportedLeafError
from aio_ckpt.format import zip_records
from aio_ckpt.format.constants import Envelope

_PROTOCOL = 2
"""The pickle protocol of ``torch.save``, which ``weights_only=True`` reads."""


def pickle_object(obj: object) -> tuple[bytes, Sequence[torch.UntypedStorage]]:
    """Return the content of ``data.pkl`` for ``obj``, and the storages that it names, in the order of their keys.

    No byte of a storage is read.

    Raises:
        UnsupportedLeafError: two tensors view the same bytes as different dtypes, which no torch.save file can hold.
        Exception: any error of pickle, as ``torch.save`` raises it.
    """
    out = io.BytesIO()
    pickler = _Pickler(out)
    pickler.dump(obj)
    return out.getvalue(), pickler.storages


class _Pickler(pickle.Pickler):
    """Pickler that puts the key of a storage in its place."""

    def __init__(self, out: io.BytesIO) -> None:
        super().__init__(out, protocol=_PROTOCOL)
        self.storages: list[torch.UntypedStorage] = []
        self._keys: dict[int, str] = {}
        self._dtypes: dict[int, torch.dtype] = {}

    def persistent_id(self, value: object) -> tuple[object, ...] | None:
        """Return what stands in the pickle for a storage; None for any other value."""
        found = _torch.pickled_storage(value)
        if found is None:
            return None
        address = found.storage.data_ptr()
        if address and self._dtypes.setdefault(address, found.dtype) != found.dtype:
            raise UnsupportedLeafError(
                f"two tensors view the same bytes as {self._dtypes[address]} and as {found.dtype}, which no torch.save "
                "file can hold: give a clone() of one"
            )
        if found.identity not in self._keys:
            self._keys[found.identity] = str(len(self.storages))
            self.storages.append(found.storage)  # keeps the storage, so that no other one gets its identity
        return ("storage", found.kind, self._keys[found.identity], found.location, found.slots)


def storage_envelope(key: int, nbytes: int, *, padding: int = 0) -> Envelope:
    """Return header and descriptor around the raw bytes of storage ``key``; the header has ``padding`` more bytes."""
    zip64 = nbytes >= zip_records.MAX_U32
    header = zip_records.deferred_header(_data_name(key), zip64=zip64, padding=padding)
    trailer = zip_records.deferred_descriptor(nbytes, zip64=zip64)
    return Envelope(header=header, trailer=trailer, crc_offsets=(4,), raw_bytes=nbytes)


def _data_name(key: int) -> bytes:
    return b"archive/data/%d" % key


@dataclass(frozen=True, slots=True, kw_only=True)
class ZipTail:
    """Everything behind the storages of a file. Only the CRC32s of the storages are unknown before they are written."""

    pickle: bytes
    """Content of ``data.pkl``."""
    start: int
    """Offset of the tail in the file."""
    keys: Sequence[int]
    """Key of each storage, in the order of the file."""
    offsets: Sequence[int]
    """Offset of the local header of each storage."""
    lengths: Sequence[int]
    """Length of each storage, in bytes."""

    def render(self, crc32s: Sequence[int]) -> bytes:
        """Return the tail. Its length is the same for all CRC32s."""
        records, entries = zip_records.small_records(self.pickle, self.start)
        rows = sorted(zip(self.keys, self.lengths, self.offsets, crc32s, strict=True))
        for key, nbytes, offset, crc32 in rows:
            zip64 = nbytes >= zip_records.MAX_U32
            entries += zip_records.deferred_entry(_data_name(key), nbytes, offset, crc32=int(crc32), zip64=zip64)
        count, begin = zip_records.SMALL_RECORDS + len(rows), self.start + len(records)
        zip64 = zip_records.needs_zip64(count, begin)
        return bytes(records + entries) + zip_records.end_of_zip(count, len(entries), begin, zip64=zip64)

    @property
    def nbytes(self) -> int:
        return len(self.render([0] * len(self.keys)))
