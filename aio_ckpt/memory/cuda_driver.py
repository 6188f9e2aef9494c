"""Batches: many copies from a device in one call of the CUDA driver, which torch does not wrap."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from aio_ckpt.memory.host_copy import CopyVectors

Batch: TypeAlias = Callable[[CopyVectors, int, int], int]
"""Function of (vectors, base address of their target offsets, stream) that returns the driver's error number, or 0."""

_SOURCE_ORDER_STREAM = 1
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: a source is read in the order of the stream, as a single copy reads it."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """Struct ``CUmemcpyAttributes`` of the driver."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", ctypes.c_uint),
    )


@functools.cache
def batch_copy() -> Batch | None:
    """Return a call of ``cuMemcpyBatchAsync``, or None if the driver is older than 12.8.

    The call holds the GIL and returns when all copies are issued. The stream orders a batch as a whole, but not the
    copies inside it.
    """
    try:
        driver = ctypes.PyDLL("libcuda.so.1")
    except OSError:
        return None
    latest, first = (getattr(driver, name, None) for name in ("cuMemcpyBatchAsync_v2", "cuMemcpyBatchAsync"))
    call = latest or first
    if call is None:
        return None
    attributes, zero, failed = _Attributes(source_order=_SOURCE_ORDER_STREAM), ctypes.c_size_t(), ctypes.c_size_t()
    same_for_all = (ctypes.byref(attributes), ctypes.byref(zero), ctypes.c_size_t(1))
    failed_index = () if latest else (ctypes.byref(failed),)  # the first version also reports the copy that failed

    def copy(vectors: CopyVectors, base: int, stream: int) -> int:
        columns = vectors.T.copy()
        columns[0] += np.uint64(base % (1 << 64))
        start, column_bytes = columns.ctypes.data, columns.strides[0]
        targets, sources, sizes = (ctypes.c_void_p(start + index * column_bytes) for index in range(3))
        count = ctypes.c_size_t(len(vectors))
        return int(call(targets, sources, sizes, count, *same_for_all, *failed_index, ctypes.c_void_p(stream)))

    return copy
