"""Copy vectors: many small copies within the memory of this process, in few system calls without the GIL.

Thousands of small copies that hold the GIL would starve the threads that write: a thread that wakes meanwhile gets the
GIL only after CPython's switch interval (5 ms).
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

CopyVectors: TypeAlias = npt.NDArray[np.uint64]
"""Rows of (target offset, source address, bytes). No row has 0 bytes."""
_IOVecs: TypeAlias = npt.NDArray[np.uint64]
"""Rows of struct iovec: (address, length)."""

_MAX_VECTORS = 1024
"""IOV_MAX of Linux."""
_REFUSALS = (errno.EPERM, errno.ENOSYS, errno.EACCES)
"""Error numbers with which a sandbox refuses the call."""

_LIBC = ctypes.CDLL(None, use_errno=True)
_readv = _LIBC.process_vm_readv
_readv.argtypes = (
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
)
_readv.restype = ctypes.c_ssize_t
_memmove_holding_gil = ctypes.PyDLL(None).memmove
memmove = ctypes.CDLL(None).memmove
"""``memmove(target, source, bytes)`` of the C library, which releases the GIL."""
for _function in (_memmove_holding_gil, memmove):
    _function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    _function.restype = ctypes.c_void_p


def copy_all(base: int, vectors: CopyVectors) -> None:
    """Copy all vectors. ``base`` is the address of target offset 0, and may itself lie outside of the target.

    Raises:
        OSError: with EFAULT, if a source or a target is not, or no longer, memory of this process.
    """
    if not len(vectors):
        return
    if _is_refused():
        for start, address, nbytes in vectors.tolist():
            _memmove_holding_gil(base + start, address, nbytes)
        return
    targets, sources = vectors[:, ::2].copy(), vectors[:, 1:].copy()
    targets[:, 0] += np.uint64(base % (1 << 64))
    for first in range(0, len(vectors), _MAX_VECTORS):
        part = slice(first, first + _MAX_VECTORS)
        _copy(targets[part], sources[part])


def first_unreadable(base: int, vectors: CopyVectors) -> int:
    """Return the first row whose source or target is not, or no longer, memory of this process; 0 if all rows are."""
    for row in range(len(vectors)):
        try:
            copy_all(base, vectors[row : row + 1])
        except OSError:
            return row
    return 0


def _copy(targets: _IOVecs, sources: _IOVecs) -> None:
    nbytes = int(targets[:, 1].sum())
    # A process needs no privilege to read its own memory: ptrace(2), "the calling thread and the target thread are in
    # the same thread group: access is always allowed".
    done = _readv(os.getpid(), targets.ctypes.data, len(targets), sources.ctypes.data, len(sources), 0)
    if done != nbytes:
        code = ctypes.get_errno() if done < 0 else errno.EFAULT
        raise OSError(code, f"{max(done, 0)} of {nbytes} bytes were copied: {os.strerror(code)}")


@functools.cache
def _is_refused() -> bool:
    source, target = (np.full(1, value, dtype=np.uint64) for value in (7, 0))
    try:
        _copy(*(np.array([[end.ctypes.data, 8]], dtype=np.uint64) for end in (target, source)))
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise
        return True
    return int(target[0]) != 7
