"""The ``torch.save`` zip around one tensor: rendered without ``torch.save``, parsed without ``torch.load``.

An item is ``[header][raw bytes][trailer]``::

    header    local records data.pkl, byteorder, version; local header of data/0, its extra field padded so
              that the raw bytes begin at a multiple of 64 counted from the item's start
    trailer   data descriptor of data/0, central directory, end record (zip64 ones near 4 GiB and above)

Header and trailer follow from dtype, shape and stride alone, except for the CRC32 of the raw bytes. The trailer holds
it twice: flag bit 3 moves it out of the header, so that the header can be written before the sum is known. This file
changes no process-global setting of torch, and parsing runs no code.

Sources: PKWARE APPNOTE 6.3.10 (§4.3, §4.5.3); ``torch/_utils.py`` and ``torch/serialization.py`` of 2.6 to 2.13.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from aio_ckpt.errors import UnsupportedLeafError
from aio_ckpt.format import zip_records
from aio_ckpt.format.constants import MAX_DIMS, RAW_ALIGN_BYTES, Envelope, TensorSpec, align_up
from aio_ckpt.format.tensor_pickle import STORABLE_DTYPES, TensorView, read_pickle, render_pickle
from aio_ckpt.format.zip_directory import body_offset, corrupt, read_directory, read_record
from aio_ckpt.format.zip_records import MAX_U32

HEAD_BYTES = 32768
"""Most bytes that :func:`parse` reads from an item's beginning. torch aligns each record to
``torch.utils.serialization.config.save.storage_alignment``: with 4096 the raw bytes begin at 20480."""

TAIL_BYTES = 8192
"""Most bytes that :func:`parse` reads from an item's end."""

_ZIP64_SLACK = 512
"""Upper bound of the bytes between the small records and the central directory, without the raw bytes."""
_DATA_NAME = b"archive/data/0"

# -- geometry ---------------------------------------------------------------------------------------------


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether the elements occupy exactly ``numel`` slots; True for an empty tensor.

    A permuted contiguous tensor is dense.
    """
    if 0 in shape:
        return True
    slots = 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size != 1):
        if step != slots:
            return False
        slots *= size
    return True


def stored_stride(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Return the stride of the stored bytes, in elements.

    It is ``stride`` if that is dense and the tensor is not empty. Otherwise, it is the contiguous one.
    """
    if 0 not in shape and is_dense(shape, stride):
        return tuple(stride)
    return row_major_stride(shape)


def row_major_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the stride of a contiguous tensor, in elements, as torch gives it."""
    steps = [1] * len(shape)
    for dim in range(len(shape) - 1, 0, -1):
        steps[dim - 1] = steps[dim] * max(shape[dim], 1)
    return tuple(steps)


# -- render -----------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def render(spec: TensorSpec) -> Envelope:
    """Return header and trailer around the raw bytes of a tensor; CRC fields are zero until :func:`fill_crc`.

    Raises:
        UnsupportedLeafError: a dtype that ``torch.save`` does not store as a plain tensor; more than ``MAX_DIMS`` dims.
        ValueError: ``spec.stride`` is not dense: the caller forgot :func:`stored_stride`.
    """
    if spec.dtype not in STORABLE_DTYPES:
        raise UnsupportedLeafError(f"{spec.dtype} cannot be stored as a plain tensor: convert it first")
    if len(spec.shape) > MAX_DIMS:
        raise UnsupportedLeafError(f"a tensor of {len(spec.shape)} dimensions has too many: reshape it")
    if not is_dense(spec.shape, spec.stride):
        raise ValueError(f"stride {spec.stride} of shape {spec.shape} is not dense: give stored_stride()")
    nbytes = math.prod(spec.shape) * spec.dtype.itemsize
    header, central = zip_records.small_records(render_pickle(spec))
    zip64 = len(header) + nbytes + _ZIP64_SLACK > MAX_U32
    crc_in_central = len(central) + 16
    central += zip_records.deferred_entry(_DATA_NAME, nbytes, len(header), zip64=zip64)
    unpadded = len(header) + len(zip_records.deferred_header(_DATA_NAME, zip64=zip64, padding=0))
    padding = align_up(unpadded, RAW_ALIGN_BYTES) - unpadded
    header += zip_records.deferred_header(_DATA_NAME, zip64=zip64, padding=padding)
    descriptor = zip_records.deferred_descriptor(nbytes, zip64=zip64)
    count, stop = zip_records.SMALL_RECORDS + 1, len(header) + nbytes + len(descriptor)
    end = zip_records.end_of_zip(count, len(central), stop, zip64=zip64)
    trailer, crc_offsets = descriptor + central + end, (4, len(descriptor) + crc_in_central)
    return Envelope(header=bytes(header), trailer=trailer, crc_offsets=crc_offsets, raw_bytes=nbytes)


def fill_crc(trailer_view: memoryview | bytearray, envelope: Envelope, crc32: int) -> None:
    """Write the CRC32 of the raw bytes into a trailer. The view begins where the trailer begins."""
    for offset in envelope.crc_offsets:
        struct.pack_into("<I", trailer_view, offset, crc32)


# -- parse ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedItem:
    """Place of the raw bytes in an item, and the tensor view of them.

    Invariant: the raw bytes lie inside the item, every element lies inside the raw bytes, and there are no more
    elements than the raw bytes have room for. No number here exceeds the length of the file.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    """Shape of the shard, not of the global tensor."""
    stride: tuple[int, ...]
    """In elements."""
    storage_offset: int
    """Elements of the storage before the first one of the tensor; 0 in our own items."""
    raw_offset: int
    """Offset of the storage, in bytes from the item's start."""
    raw_bytes: int
    """Length of the whole storage."""
    crc32: int
    """CRC32 of the whole storage; 0 where ``torch.serialization.set_crc32_options(False)`` was in force."""
    is_conj: bool = False
    """See :class:`~aio_ckpt.format.tensor_pickle.TensorView`. False for our own items, as is ``is_neg``."""
    is_neg: bool = False


@dataclass(frozen=True, slots=True)
class _TwoEnds:
    """Bytes of an item, of which only the two ends were read."""

    head: bytes
    tail: bytes
    nbytes: int

    def get(self, start: int, nbytes: int) -> bytes | None:
        """Return ``nbytes`` bytes from ``start``; None if neither end holds all of them."""
        if start + nbytes <= len(self.head):
            return self.head[start : start + nbytes]
        first = self.nbytes - len(self.tail)
        return self.tail[start - first : start - first + nbytes] if start >= first else None


@dataclass(frozen=True, slots=True)
class _Whole:
    """Bytes of a whole zip. Its parts are views."""

    data: memoryview

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    def get(self, start: int, nbytes: int) -> memoryview:
        return self.data[start : start + nbytes]


def parse(head: bytes, tail: bytes, item_bytes: int) -> ParsedItem:
    """Read an item of ours, or of stock ``torch.save(tensor)``, from its two ends. Runs no code of the pickle.

    ``head`` is the first min(``item_bytes``, ``HEAD_BYTES``) bytes of the item, ``tail`` the last
    min(``item_bytes``, ``TAIL_BYTES``).

    Raises:
        CorruptCheckpointError: the zip is malformed or compressed, or a number points outside the item.
        UnsupportedLeafError: the zip is sound, but holds no plain strided tensor (an object, a sparse or quantized
            tensor, a subclass, several storages, the other byte order).
    """
    if len(head) != min(item_bytes, HEAD_BYTES) or len(tail) != min(item_bytes, TAIL_BYTES):
        corrupt(f"{len(head)} and {len(tail)} bytes were read of its {item_bytes}")
    item = _TwoEnds(head, tail, item_bytes)
    records = read_directory(item)
    if "byteorder" in records and read_record(item, records["byteorder"]) != sys.byteorder.encode():
        raise UnsupportedLeafError(f"a tensor item is not {sys.byteorder}-endian")
    if "data.pkl" not in records:
        corrupt("it has no data.pkl")
    view = read_pickle(read_record(item, records["data.pkl"]))
    data = records.get(f"data/{view.storage.key}")
    if data is None:
        corrupt(f"it has no record data/{view.storage.key[:40]!r}")
    raw_offset = body_offset(item, data)
    check_bounds(view, data.nbytes)
    if math.prod(view.shape) * view.dtype.itemsize > data.nbytes:
        raise UnsupportedLeafError("a tensor item holds an expanded tensor, whose elements share their bytes")
    place: dict[str, Any] = {"raw_offset": raw_offset, "raw_bytes": data.nbytes, "crc32": data.crc32}
    bits: dict[str, Any] = {"is_conj": view.is_conj, "is_neg": view.is_neg}
    return ParsedItem(
        dtype=view.dtype, shape=view.shape, stride=view.stride, storage_offset=view.offset, **place, **bits
    )


def records_of(data: bytes) -> dict[str, tuple[memoryview, int]]:
    """Return the records of a ``torch.save`` zip: views of their bytes, and CRC32, by name without the archive's own.

    The CRC32 is 0 if torch stored none.

    Raises:
        CorruptCheckpointError: the zip is malformed or compressed, a number points outside of ``data``, or two records
            overlap.
    """
    item = _Whole(memoryview(data))
    found = ((name, record, body_offset(item, record)) for name, record in read_directory(item).items())
    return {name: (item.get(at, record.nbytes), record.crc32) for name, record, at in found}


def check_bounds(view: TensorView, nbytes: int) -> None:
    """Check that a view stays inside its storage of ``nbytes`` bytes: the invariant of :class:`ParsedItem`."""
    slot_bytes = 1 if view.storage.dtype is None else view.storage.dtype.itemsize
    if view.storage.slots * slot_bytes != nbytes:
        corrupt(f"its pickle speaks of {view.storage.slots} slots, its record has {nbytes} bytes")
    numbers = (view.offset, *view.shape, *view.stride)
    if len(view.shape) != len(view.stride) or not all(type(number) is int and number >= 0 for number in numbers):
        corrupt("its shape, stride or offset is none")
    if max(numbers) >= 1 << 63:
        corrupt("its shape, stride or offset does not fit 64 bits")
    if 0 in view.shape:
        return
    last = view.offset + sum((size - 1) * step for size, step in zip(view.shape, view.stride, strict=True))
    if (last + 1) * view.dtype.itemsize > nbytes:
        corrupt("elements lie outside its storage")
