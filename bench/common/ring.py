"""A small io_uring by ctypes: positioned writes, for measuring alone. One thread, no loop, no eventfd.

Borrowed facts: layout of the rings and numbers of the calls as in io_uring_setup(2), io_uring_enter(2) and
io_uring_register(2).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

__all__ = ["Ring"]

_SETUP, _ENTER, _REGISTER = 425, 426, 427
_OFF_SQ_RING, _OFF_CQ_RING, _OFF_SQES = 0, 0x8000000, 0x10000000
_FEAT_SINGLE_MMAP = 1
_ENTER_GETEVENTS = 1
_REGISTER_BUFFERS = 0
_OP_WRITE_FIXED, _OP_WRITE = 5, 23
_SQE = struct.Struct("<BBHiQQIIQHHiQQ")
_CQE = struct.Struct("<QiI")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class Ring:
    """Room for ``depth`` writes in flight.

    The caller keeps the memory and the file alive until the completion of each write was seen.

    Raises:
        OSError: the kernel has no io_uring, or forbids it (seccomp, ``kernel.io_uring_disabled``).
    """

    def __init__(self, depth: int) -> None:
        params = (ctypes.c_uint32 * 30)()
        self._fd = _call(_SETUP, depth, params)
        entries, completions, features = params[0], params[1], params[5]
        sq, cq = params[10:20], params[20:30]
        sq_bytes, cq_bytes = sq[6] + 4 * entries, cq[5] + _CQE.size * completions
        both = max(sq_bytes, cq_bytes)
        self._sq = mmap.mmap(self._fd, both if features & _FEAT_SINGLE_MMAP else sq_bytes, offset=_OFF_SQ_RING)
        one = features & _FEAT_SINGLE_MMAP
        self._cq = self._sq if one else mmap.mmap(self._fd, cq_bytes, offset=_OFF_CQ_RING)
        self._sqes = mmap.mmap(self._fd, 64 * entries, offset=_OFF_SQES)
        self._sq_tail, self._sq_mask, self._sq_array = sq[1], _get(self._sq, sq[2]), sq[6]
        self._cq_head, self._cq_tail, self._cq_mask, self._cqes = cq[0], cq[1], _get(self._cq, cq[2]), cq[5]
        self._unsubmitted = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)
        for area in {self._sq, self._cq, self._sqes}:
            area.close()

    def register(self, spans: Sequence[tuple[int, int]]) -> None:
        """Pin memory, (address, bytes) each of at most 1 GiB, so that writes from it need not pin it each time.

        Raises:
            OSError: ENOMEM beyond the user's memlock limit.
        """
        vectors = (_Vector * len(spans))(*(_Vector(*span) for span in spans))
        _call(_REGISTER, self._fd, _REGISTER_BUFFERS, ctypes.byref(vectors), len(spans))

    def write(self, file: int, address: int, nbytes: int, offset: int, *, buffer: int | None, flags: int) -> None:
        """Queue a write; ``buffer`` is the number of the registered memory that it lies in. Its tag is ``offset``."""
        tail = _get(self._sq, self._sq_tail)
        slot = tail & self._sq_mask
        code = _OP_WRITE if buffer is None else _OP_WRITE_FIXED
        _SQE.pack_into(
            self._sqes, 64 * slot, code, 0, 0, file, offset, address, nbytes, flags, offset, buffer or 0, 0, 0, 0, 0
        )
        struct.pack_into("<I", self._sq, self._sq_array + 4 * slot, slot)
        struct.pack_into("<I", self._sq, self._sq_tail, (tail + 1) & 0xFFFFFFFF)
        self._unsubmitted += 1

    def completed(self) -> Iterator[tuple[int, int]]:
        """Submit what is queued, block for at least one completion: (tag, bytes written) each.

        Raises:
            OSError: a write failed.
        """
        while True:
            try:
                self._unsubmitted -= _call(_ENTER, self._fd, self._unsubmitted, 1, _ENTER_GETEVENTS, None, 0)
                break
            except InterruptedError:
                continue
        head, tail = _get(self._cq, self._cq_head), _get(self._cq, self._cq_tail)
        while head != tail:
            tag, result, _ = _CQE.unpack_from(self._cq, self._cqes + _CQE.size * (head & self._cq_mask))
            head = (head + 1) & 0xFFFFFFFF
            struct.pack_into("<I", self._cq, self._cq_head, head)
            if result < 0:
                raise OSError(-result, os.strerror(-result))
            yield tag, result


def _get(area: mmap.mmap, offset: int) -> int:
    (value,) = struct.unpack_from("<I", area, offset)
    return int(value)


def _call(number: int, *arguments: object) -> int:
    result = int(_libc.syscall(ctypes.c_long(number), *map(_as_long, arguments)))
    if result < 0:
        code = ctypes.get_errno() or errno.EIO
        raise OSError(code, os.strerror(code))
    return result


def _as_long(argument: object) -> object:
    return ctypes.c_long(argument) if isinstance(argument, int) else argument
