"""Columns: the tensor items of a rank's manifest, field by field. Pure: no file, no thread.

Columns are decoded and checked all at once. An entry a tensor would cost 0.5 us to decode and as much to check.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from aio_ckpt.format.constants import MAX_DIMS
from aio_ckpt.format.dcp_metadata_read import DTYPES, MAX_BYTES

__all__ = [
    "IntArray",
    "Names",
    "Size",
    "StoredColumns",
    "TensorColumns",
    "TensorEntry",
    "TensorSignature",
    "are_sizes",
    "columns_fault",
    "columns_of",
    "entries_of",
    "read_columns",
    "stored_columns",
]

Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)]
"""A length or an offset."""
Names: TypeAlias = Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
"""At least one."""
_Dims: TypeAlias = Annotated[tuple[Size, ...], msgspec.Meta(max_length=MAX_DIMS)]
TensorSignature: TypeAlias = tuple[str, _Dims, _Dims, Size, Size]
"""dtype, shape, stride, number of offsets and ``raw_bytes`` of a :class:`TensorEntry`."""
IntArray: TypeAlias = npt.NDArray[np.int64]
_QUANTIZED = ("qint", "quint")
"""Beginnings of names of dtypes that no item holds: their tensors are more than their bytes."""


class TensorEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A tensor item in the rank's data file. Offsets into the file are image offsets."""

    fqns: Names
    """Every name stored here; tied tensors share the item."""
    dtype: str
    """``str(torch.dtype)`` without ``torch.``."""
    shape: _Dims
    """Shape of the shard."""
    stride: _Dims
    """Stride of the stored bytes, in elements; dense."""
    offsets: _Dims
    """Where the shard begins in the global tensor."""
    item_offset: Size
    """Where the item's header begins."""
    item_bytes: Size
    """Length of header, raw bytes and trailer."""
    raw_offset: Size
    """Where the raw bytes begin."""
    raw_bytes: Size
    """Length of the raw bytes."""


class TensorColumns(NamedTuple):
    """The fields of many :class:`TensorEntry`."""

    names: Sequence[str]
    """First of ``fqns``."""
    ties: Mapping[int, tuple[str, ...]]
    """By row, the rest of ``fqns`` where there is any."""
    signature_numbers: Sequence[int]
    """Position in ``signatures``."""
    signatures: Sequence[TensorSignature]
    """A model has few signatures and many tensors."""
    shards: Mapping[int, tuple[int, ...]]
    """By row, ``offsets`` that are not all 0."""
    item_offsets: IntArray
    """``item_offset``."""
    item_bytes: IntArray
    """``item_bytes``."""
    raw_offsets: IntArray
    """``raw_offset``."""
    raw_bytes: IntArray
    """``raw_bytes``."""


class StoredColumns(msgspec.Struct, frozen=True, array_like=True):
    """:class:`TensorColumns` as a manifest holds them; ``raw_bytes`` follow from the signatures."""

    names: tuple[str, ...]
    """As there."""
    ties: dict[Size, Names]
    """As there."""
    signature_numbers: bytes
    """u32 little-endian each."""
    signatures: tuple[TensorSignature, ...]
    """As there."""
    shards: dict[Size, _Dims]
    """As there."""
    item_offsets: bytes
    """i64 little-endian each, as the others."""
    item_bytes: bytes
    """As there."""
    raw_offsets: bytes
    """As there."""


def columns_of(entries: Sequence[TensorEntry]) -> TensorColumns:
    """The same by column."""
    signatures: dict[TensorSignature, int] = {}
    return TensorColumns(
        names=[entry.fqns[0] for entry in entries],
        ties={row: entry.fqns[1:] for row, entry in enumerate(entries) if len(entry.fqns) > 1},
        signature_numbers=[
            signatures.setdefault((e.dtype, e.shape, e.stride, len(e.offsets), e.raw_bytes), len(signatures))
            for e in entries
        ],
        signatures=list(signatures),
        shards={row: entry.offsets for row, entry in enumerate(entries) if any(entry.offsets)},
        item_offsets=np.array([entry.item_offset for entry in entries], np.int64),
        item_bytes=np.array([entry.item_bytes for entry in entries], np.int64),
        raw_offsets=np.array([entry.raw_offset for entry in entries], np.int64),
        raw_bytes=np.array([entry.raw_bytes for entry in entries], np.int64),
    )


def entries_of(columns: TensorColumns) -> tuple[TensorEntry, ...]:
    """The same by tensor, of columns without a fault."""
    numbers = (columns.item_offsets, columns.item_bytes, columns.raw_offsets, columns.raw_bytes)
    entries = []
    for row, (name, signature, *places) in enumerate(
        zip(columns.names, columns.signature_numbers, *(column.tolist() for column in numbers), strict=True)
    ):
        dtype, shape, stride, dims, _ = columns.signatures[signature]
        offsets = columns.shards.get(row) or (0,) * dims
        entries.append(TensorEntry((name, *columns.ties.get(row, ())), dtype, shape, stride, offsets, *places))
    return tuple(entries)


def stored_columns(columns: TensorColumns) -> StoredColumns:
    """As a manifest holds them."""
    return StoredColumns(
        names=tuple(columns.names),
        ties=dict(columns.ties),
        signature_numbers=np.array(columns.signature_numbers, "<u4").tobytes(),
        signatures=tuple(columns.signatures),
        shards=dict(columns.shards),
        item_offsets=columns.item_offsets.astype("<i8").tobytes(),
        item_bytes=columns.item_bytes.astype("<i8").tobytes(),
        raw_offsets=columns.raw_offsets.astype("<i8").tobytes(),
    )


def read_columns(stored: StoredColumns) -> TensorColumns:
    """Columns from a manifest: as long as each other, every number one that an entry may hold.

    Raises:
        ValueError: they are not.
    """
    count = len(stored.names)
    item_offsets, item_bytes, raw_offsets = places = [
        _numbers(column, "<i8", count) for column in (stored.item_offsets, stored.item_bytes, stored.raw_offsets)
    ]
    signature_numbers = _numbers(stored.signature_numbers, "<u4", count)
    if count and signature_numbers.max() >= len(stored.signatures):
        raise ValueError(f"a tensor with signature {signature_numbers.max()} of {len(stored.signatures)}")
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
        shards=stored.shards,
        item_offsets=item_offsets,
        item_bytes=item_bytes,
        raw_offsets=raw_offsets,
        raw_bytes=np.array([signature[4] for signature in stored.signatures], np.int64)[signature_numbers],
    )


def are_sizes(numbers: IntArray) -> bool:
    """Whether each may be a length or an offset."""
    return bool(((numbers >= 0) & (numbers <= MAX_BYTES)).all())


def _numbers(data: bytes, dtype: str, count: int) -> IntArray:
    found = np.frombuffer(data, dtype).astype(np.int64)  # ValueError unless it is a number of whole numbers
    if len(found) != count:
        raise ValueError(f"a column of {len(found)} numbers for {count} tensors")
    return found


def columns_fault(columns: TensorColumns, file_bytes: int) -> str:
    """What is wrong with tensors in a data file of this length, or ''."""
    for number, signature in enumerate(columns.signatures):
        if fault := _signature_fault(*signature):
            return f"tensor {_named(columns, number)}: {fault}"
    for row, offsets in columns.shards.items():
        _, shape, *_ = columns.signatures[columns.signature_numbers[row]]
        if any(start + size > MAX_BYTES for start, size in zip(offsets, shape, strict=True)):
            return f"tensor {columns.names[row]!r}: a shard of {shape} at {offsets}, beyond what a tensor has"
    # Two of MAX_BYTES add up inside 64 bits only without a sign.
    item_starts, item_bytes, raw_starts, raw_bytes = (column.astype(np.uint64) for column in columns[5:])
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
    dtype_name: str, shape: tuple[int, ...], stride: tuple[int, ...], dims: int, raw_bytes: int
) -> str:
    dtype = DTYPES.get(dtype_name)
    if dtype is None or dtype_name.startswith(_QUANTIZED):
        return f"unknown dtype {dtype_name!r}"
    if dims != len(shape):
        return f"shape {shape} and offsets of {dims} dimensions differ in length"
    if len(shape) != len(stride):
        return f"shape {shape} and stride {stride} differ in length"
    numel = math.prod(shape)
    if raw_bytes != numel * dtype.itemsize:
        return f"{raw_bytes} raw bytes for shape {shape} of {dtype_name}"
    # A reader builds a view with this stride over exactly the raw bytes; a forged one would leave them.
    extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if numel and extent != numel:
        return f"stride {stride} is not dense for shape {shape}"
    return ""
