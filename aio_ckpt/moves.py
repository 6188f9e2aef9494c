"""Moves: many small copies within this process's memory by few system calls, the GIL released.

Copied one by one with the GIL held, thousands of small tensors starve the threads that write: a thread that wakes
meanwhile gets the GIL only after CPython's switch interval (5 ms).
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Moves", "copy_all", "copy_near", "memmove"]

Moves: TypeAlias = npt.NDArray[np.uint64]
"""Rows of (target offset, source address, bytes), of which none is 0 bytes long."""
_Vectors: TypeAlias = npt.NDArray[np.uint64]
"""Rows of struct iovec: address, length."""

_MOST_VECTORS = 1024
"""IOV_MAX of Linux."""
_MOVES_A_CALL = _MOST_VECTORS // 2
"""Where each may need a vector for the gap behind it, too."""
_GAP_BYTES = 2048
"""So much between two sources is read, too, and dropped: finding out where the pages of another source are costs more.
Less than a page, it lies in the last page of the one or in the first page of the other, so that it can be read."""
_REFUSALS = (errno.EPERM, errno.ENOSYS, errno.EACCES)
"""What a sandbox that filters the call answers."""

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
"""Of the C library, the GIL released: (target, source, bytes)."""
for _function in (_memmove_holding_gil, memmove):
    _function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    _function.restype = ctypes.c_void_p


def copy_all(base: int, moves: Moves) -> None:
    """Copy each; ``base`` is the address of target offset 0, which may itself lie outside of the target.

    Raises:
        OSError: EFAULT: a source or target is no memory of this process (any more).
    """
    if not len(moves):
        return
    if _is_refused():
        for start, address, nbytes in moves.tolist():
            _memmove_holding_gil(base + start, address, nbytes)
        return
    targets, sources = moves[:, ::2].copy(), moves[:, 1:].copy()
    targets[:, 0] += np.uint64(base % (1 << 64))
    for first in range(0, len(moves), _MOST_VECTORS):
        part = slice(first, first + _MOST_VECTORS)
        _copy(targets[part], sources[part])


def copy_near(moves: Moves) -> None:
    """As :func:`copy_all` from address 0, for sources that mostly lie near each other, as what one read has brought in.

    20 MB in pieces of 4 KiB take 2.8 ms so, and 5.2 by themselves; sources that lie anywhere take longer so.
    """
    if not len(moves) or _is_refused():
        copy_all(0, moves)
        return
    order = np.argsort(moves[:, 1], kind="stable")
    dropped = np.empty(_GAP_BYTES, np.uint8)
    for pair in _calls(moves[order, ::2], moves[order, 1:], dropped.ctypes.data):
        _copy(*pair)


def _calls(targets: _Vectors, sources: _Vectors, dropped: int) -> Iterator[tuple[_Vectors, _Vectors]]:
    """The same copies, those joined whose sources nearly follow each other; what is between goes to ``dropped``."""
    stops = sources[:, 0] + sources[:, 1]
    gaps = (sources[1:, 0] - stops[:-1]).astype(np.int64)
    is_near = (gaps >= 0) & (gaps <= _GAP_BYTES)
    is_near[_MOVES_A_CALL - 1 :: _MOVES_A_CALL] = False
    fillers = np.flatnonzero(is_near & (gaps > 0))
    targets = np.insert(targets, fillers + 1, dropped, axis=0)
    targets[fillers + np.arange(1, len(fillers) + 1), 1] = gaps[fillers]
    firsts = np.append(0, np.flatnonzero(~is_near) + 1)
    lasts = np.append(firsts[1:], len(sources)) - 1
    sources = np.column_stack([sources[firsts, 0], stops[lasts] - sources[firsts, 0]])
    starts = np.arange(_MOVES_A_CALL, len(stops), _MOVES_A_CALL)
    parts = (
        np.split(targets, starts + np.searchsorted(fillers, starts)),
        np.split(sources, np.searchsorted(firsts, starts)),
    )
    return zip(*parts, strict=True)


def _copy(targets: _Vectors, sources: _Vectors) -> None:
    nbytes = int(targets[:, 1].sum())
    # Of one's own process this needs no privilege: ptrace(2), "the calling thread and the target thread are in the
    # same thread group: access is always allowed".
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
