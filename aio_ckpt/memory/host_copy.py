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
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Moves", "PreparedMoves", "copy_all", "memmove", "unreadable"]

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


@dataclass(frozen=True, slots=True, eq=False)
class PreparedMoves:
    """Moves made ready, those whose sources nearly follow each other to be read as one.

    20,000 pieces of 64 bytes that lie in one heap take 2.2 ms so and 10.4 by :func:`copy_all`, 5,000 of 4 KiB 2.9 and
    5.0. To make 20,000 ready takes 1.1 ms.
    """

    moves: Moves
    """As given."""
    targets: _Vectors
    """Offset and length of each, and of each gap between two."""
    is_gap: npt.NDArray[np.bool_]
    """Of each target."""
    sources: _Vectors
    """Address and length of what is read as one."""
    calls: tuple[tuple[slice, slice], ...]
    """Targets and sources of one system call."""

    @classmethod
    def of(cls, moves: Moves) -> PreparedMoves:
        """Of these."""
        order = np.argsort(moves[:, 1], kind="stable")
        targets, starts, stops = moves[order, ::2], moves[order, 1], moves[order, 1:].sum(axis=1)
        gaps = (starts[1:] - stops[:-1]).astype(np.int64)
        is_near = (gaps >= 0) & (gaps <= _GAP_BYTES)
        is_near[_MOVES_A_CALL - 1 :: _MOVES_A_CALL] = False
        fillers = np.flatnonzero(is_near & (gaps > 0))
        gap_rows = fillers + np.arange(1, len(fillers) + 1)
        targets = np.insert(targets, fillers + 1, 0, axis=0)
        targets[gap_rows, 1] = gaps[fillers]
        is_gap = np.zeros(len(targets), dtype=np.bool_)
        is_gap[gap_rows] = True
        firsts = np.flatnonzero(np.append(True, ~is_near)[: len(moves)])
        lasts = np.append(firsts, len(moves))[1:] - 1
        cuts = np.arange(0, len(moves), _MOVES_A_CALL)
        return cls(
            moves=moves,
            targets=targets,
            is_gap=is_gap,
            sources=np.stack([starts[firsts], stops[lasts] - starts[firsts]], axis=1),
            calls=tuple(
                zip(
                    _slices(cuts + np.searchsorted(fillers, cuts), len(targets)),
                    _slices(np.searchsorted(firsts, cuts), len(firsts)),
                    strict=True,
                )
            ),
        )

    def copy(self, base: int) -> None:
        """As :func:`copy_all`."""
        if _is_refused():
            copy_all(base, self.moves)
            return
        dropped, targets = np.empty(_GAP_BYTES, np.uint8), self.targets.copy()
        targets[:, 0] += np.where(self.is_gap, np.uint64(dropped.ctypes.data), np.uint64(base % (1 << 64)))
        for written, read in self.calls:
            _copy(targets[written], self.sources[read])


def unreadable(base: int, moves: Moves) -> int:
    """Which of the moves has a source or target that is no memory of this process (any more); the first if none has."""
    for row in range(len(moves)):
        try:
            copy_all(base, moves[row : row + 1])
        except OSError:
            return row
    return 0


def _slices(starts: npt.NDArray[np.int64], end: int) -> Iterator[slice]:
    """From each to the next."""
    return map(slice, starts.tolist(), [*starts[1:].tolist(), end])


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
