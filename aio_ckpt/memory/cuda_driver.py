"""Batches: many copies from a device by one call of the CUDA driver, which torch has no name for."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from aio_ckpt.memory.host_copy import CopyVectors

__all__ = ["Batch", "batch_copy"]

Batch: TypeAlias = Callable[[CopyVectors, int, int], int]
"""(vectors, base of their target offsets, stream) to the driver's error number, 0 for none."""

_SOURCE_ORDER_STREAM = 1
"""CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources are read in the order of the stream, as by single copies."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", ctypes.c_uint),
    )


@functools.cache
def batch_copy() -> Batch | None:
    """``cuMemcpyBatchAsync`` with the GIL held: it returns when all are issued. None: the driver is older than 12.8.

    The copies of a batch are in no order among themselves; the batch is, in its stream.
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
    tell_failed = () if latest else (ctypes.byref(failed),)  # where the first one that failed is told

    def copy(vectors: CopyVectors, base: int, stream: int) -> int:
        columns = vectors.T.copy()
        columns[0] += np.uint64(base % (1 << 64))
        start, column_bytes = columns.ctypes.data, columns.strides[0]
        targets, sources, sizes = (ctypes.c_void_p(start + index * column_bytes) for index in range(3))
        count = ctypes.c_size_t(len(vectors))
        return int(call(targets, sources, sizes, count, *same_for_all, *tell_failed, ctypes.c_void_p(stream)))

    return copy
