"""Columns: the tensor items of a rank's manifest, field by field. Pure: no file, no thread.

Columns are decoded and checked all at once. An entry a tensor would cost 0.5 us to decode and as much to check.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from operator import add, gt
from typing import Annotated, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from aio_ckpt.format.constants import MAX_BYTES, MAX_DIMS, Size

Names: TypeAlias = Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
"""One name or several."""
_Dims: TypeAlias = Annotated[tuple[Size, ...], msgspec.Meta(max_length=MAX_DIMS)]
TensorSignature: TypeAlias = tuple[str, _Dims, _Dims, Size, Size]
"""dtype, shape, stride, number of offsets and ``raw_bytes`` of a :class:`TensorEntry`."""
IntArray: TypeAlias = npt.NDArray[np.int64]
_QUANTIZED = ("qint", "quint")
"""Prefixes of dtypes that no item holds: a quantized tensor is more than its raw bytes."""


class TensorEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A tensor item in the rank's data file. Offsets into the file are image offsets."""

    fqns: Names
    """Every name of the tensor: tied tensors share one item."""
    dtype: str
    """``str(torch.dtype)`` without ``torch.``."""
    shape: _Dims
    """Shape of the shard, not of the global tensor."""
    stride: _Dims
    """Stride of the stored bytes, in elements: dense."""
    offsets: _Dims
    """Offset of the shard in the global tensor, in elements per dimension."""
    item_offset: Size
    """Offset of the item's header."""
    item_bytes: Size
    """Length of header, raw bytes and trailer."""
    raw_offset: Size
    raw_bytes: Size
    global_shape: _Dims | None = None
    """Shape of the global tensor of a shard; None if the item is the whole tensor, or if it is not known."""


class TensorColumns(NamedTuple):
    """The fields of many :class:`TensorEntry`, one column a field. A row is one tensor."""

    names: Sequence[str]
    """First name of each tensor."""
    ties: Mapping[int, tuple[str, ...]]
    """By row, the other names of a tied tensor. Other rows are absent."""
    signature_numbers: Sequence[int]
    """Index in ``signatures`` of each tensor."""
    signatures: Sequence[TensorSignature]
    """Distinct signatures: a model has few of them and many tensors."""
    global_shapes: Sequence[tuple[int, ...] | None]
    """By signature, ``global_shape`` of its entries. Two signatures may differ in it alone."""
    shards: Mapping[int, tuple[int, ...]]
    """By row, ``offsets`` of the shard. Rows whose offsets are all 0 are absent."""
    item_offsets: IntArray
    item_bytes: IntArray
    raw_offsets: IntArray
    raw_bytes: IntArray


class StoredColumns(msgspec.Struct, frozen=True, array_like=True):
    """:class:`TensorColumns` as a manifest holds them; ``raw_bytes`` follow from the signatures."""

    names: tuple[str, ...]
    ties: dict[Size, Names]
    signature_numbers: bytes
    """uint32, little-endian."""
    signatures: tuple[TensorSignature, ...]
    shards: dict[Size, _Dims]
    item_offsets: bytes
    """int64, little-endian, as ``item_bytes`` and ``raw_offsets``."""
    item_bytes: bytes
    raw_offsets: bytes
    global_shapes: tuple[_Dims | None, ...] = ()
    """Empty if no entry has one, or if an older version wrote the manifest."""


def entries_of(columns: TensorColumns) -> tuple[TensorEntry, ...]:
    """Return columns as entries, one a tensor. :func:`columns_fault` must find no fault in them."""
    numbers = (columns.item_offsets, columns.item_bytes, columns.raw_offsets, columns.raw_bytes)
    entries = []
    for row, (name, signature, *places) in enumerate(
        zip(columns.names, columns.signature_numbers, *(column.tolist() for column in numbers), strict=True)
    ):
        dtype, shape, stride, dims, _ = columns.signatures[signature]
        whole, offsets = columns.global_shapes[signature], columns.shards.get(row)
        offsets = offsets or (0,) * dims
        entry = TensorEntry((name, *columns.ties.get(row, ())), dtype, shape, stride, offsets, *places)
        entries.append(entry if whole is None else msgspec.structs.replace(entry, global_shape=whole))
    return tuple(entries)


def stored_columns(entries: Sequence[TensorEntry]) -> StoredColumns:
    """Return the entries as the columns that a manifest stores."""
    numbers: dict[tuple[TensorSignature, tuple[int, ...] | None], int] = {}
    signature_numbers = [
        numbers.setdefault(((e.dtype, e.shape, e.stride, len(e.offsets), e.raw_bytes), e.global_shape), len(numbers))
        for e in entries
    ]
    global_shapes = tuple(whole for _, whole in numbers)
    return StoredColumns(
        names=tuple(entry.fqns[0] for entry in entries),
        ties={row: entry.fqns[1:] for row, entry in enumerate(entries) if len(entry.fqns) > 1},
        signature_numbers=np.array(signature_numbers, "<u4").tobytes(),
        signatures=tuple(signature for signature, _ in numbers),
        shards={row: entry.offsets for row, entry in enumerate(entries) if any(entry.offsets)},
        item_offsets=np.array([entry.item_offset for entry in entries], "<i8").tobytes(),
        item_bytes=np.array([entry.item_bytes for entry in entries], "<i8").tobytes(),
        raw_offsets=np.array([entry.raw_offset for entry in entries], "<i8").tobytes(),
        global_shapes=global_shapes if any(global_shapes) else (),
    )


def read_columns(stored: StoredColumns) -> TensorColumns:
    """Return the columns of a manifest. They have one length, and every number is one that an entry may hold.

    Raises:
        ValueError: a column has another length, or a number that no entry may hold.
    """
    count = len(stored.names)
    item_offsets, item_bytes, raw_offsets = places = [
        _numbers(column, "<i8", count) for column in (stored.item_offsets, stored.item_bytes, stored.raw_offsets)
    ]
    signature_numbers = _numbers(stored.signature_numbers, "<u4", count)
    if count and signature_numbers.max() >= len(stored.signatures):
        raise ValueError(f"a tensor with signature {signature_numbers.max()} of {len(stored.signatures)}")
    if len(stored.global_shapes) not in (0, len(stored.signatures)):
        raise ValueError(f"{len(stored.global_shapes)} global shapes for {len(stored.signatures)} signatures")
    if not all(map(are_sizes, places)):
        raise ValueError("offsets or lengths of tensors that no file has")
    for row in (*stored.ties, *stored.shards):
        if row >= count:
            raise ValueError(f"tells of tensor {row} of {count}")
    for row, offsets in stored.shards.items():
        if len(offsets) != stored.signatures[signature_numbers[row]][3]:
            raise ValueError(f"tensor {stored.names[row]!r}: offsets of {len(offsets)} dimensions")
    return TensorColumns(
        names=stored.names,
        ties=stored.ties,
        signature_numbers=signature_numbers.tolist(),
        signatures=stored.signatures,
        global_shapes=stored.global_shapes or (None,) * len(stored.signatures),
        shards=stored.shards,
        item_offsets=item_offsets,
        item_bytes=item_bytes,
        raw_offsets=raw_offsets,
        raw_bytes=np.array([signature[4] for signature in stored.signatures], np.int64)[signature_numbers],
    )


def are_sizes(numbers: IntArray) -> bool:
    """Return whether each number may be a length or an offset."""
    return bool(((numbers >= 0) & (numbers <= MAX_BYTES)).all())


def _numbers(data: bytes, dtype: str, count: int) -> IntArray:
    found = np.frombuffer(data, dtype).astype(np.int64)  # ValueError if a number is cut off at the end
    if len(found) != count:
        raise ValueError(f"a column of {len(found)} numbers for {count} tensors")
    return found


def columns_fault(columns: TensorColumns, file_bytes: int) -> str:
    """Return what is wrong with tensors in a data file of ``file_bytes`` bytes, or ''."""
    for number, signature in enumerate(columns.signatures):
        if fault := _signature_fault(*signature, columns.global_shapes[number]):
            return f"tensor {_named(columns, number)}: {fault}"
    for row, offsets in columns.shards.items():
        number = columns.signature_numbers[row]
        (_, shape, *_), whole = columns.signatures[number], columns.global_shapes[number]
        if any(start + size > MAX_BYTES for start, size in zip(offsets, shape, strict=True)):
            return f"tensor {columns.names[row]!r}: a shard of {shape} at {offsets}, beyond what a tensor has"
        stops = map(add, offsets, shape)
        if whole is not None and any(map(gt, stops, whole)):
            return f"tensor {columns.names[row]!r}: a shard of {shape} at {offsets} of a tensor of {whole}"
    # The sum of two numbers up to MAX_BYTES may exceed int64, but not uint64.
    item_starts, item_bytes, raw_starts, raw_bytes = (column.astype(np.uint64) for column in columns[6:])
    raw_stops, item_stops = raw_starts + raw_bytes, item_starts + item_bytes
    bad = np.flatnonzero((raw_starts < item_starts) | (raw_stops > item_stops) | (item_stops > file_bytes))
    if len(bad):
        name = columns.names[bad[0]]
        return f"tensor {name!r}: raw bytes, item and data file of {file_bytes} bytes do not lie in each other"
    return ""


def _named(columns: TensorColumns, signature: int) -> str:
    return (
        repr(columns.names[columns.signature_numbers.index(signature)])
        if signature in columns.signature_numbers
        else "of no name"
    )


def _signature_fault(
    dtype_name: str,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dims: int,
    raw_bytes: int,
    whole: tuple[int, ...] | None,
) -> str:
    from aio_ckpt.format.dtypes import DTYPES

    dtype = DTYPES.get(dtype_name)
    if dtype is None or dtype_name.startswith(_QUANTIZED):
        return f"unknown dtype {dtype_name!r}"
    if dims != len(shape):
        return f"shape {shape} and offsets of {dims} dimensions differ in length"
    if len(shape) != len(stride):
        return f"shape {shape} and stride {stride} differ in length"
    if whole is not None and (len(whole) != dims or any(map(gt, shape, whole))):
        return f"a shard of {shape} of a tensor of {whole}"
    numel = math.prod(shape)
    if raw_bytes != numel * dtype.itemsize:
        return f"{raw_bytes} raw bytes for shape {shape} of {dtype_name}"
    # A reader builds a view with this stride over the raw bytes; a forged stride would reach beyond them.
    extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if numel and extent != numel:
        return f"stride {stride} is not dense for shape {shape}"
    return ""
