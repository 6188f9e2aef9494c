"""Many small copies by address: by one system call for many, or one by one where that is refused."""

from __future__ import annotations

import ctypes
import errno
import mmap

import numpy as np
import pytest

from aio_ckpt.memory import host_copy as vectors
from aio_ckpt.memory.host_copy import CopyVectors, copy_all, first_unreadable


@pytest.fixture(params=["at once", "one by one"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(vectors, "_is_refused", lambda: request.param == "one by one")
    return request.param


def scattered(count: int) -> tuple[np.ndarray, np.ndarray, list[tuple[int, int, int]]]:
    """Source, target filled with zeros, and moves of 0 to 6,000 bytes that lie apart in both."""
    rng = np.random.default_rng(count)
    source = rng.integers(1, 256, 9000 * count, dtype=np.uint8)
    target = np.zeros(8000 * count, dtype=np.uint8)
    rows = [(8000 * i + int(rng.integers(0, 2000)), int(rng.integers(0, 9000 * count - 6000))) for i in range(count)]
    nbytes = [int(value) for value in rng.integers(0, 6000, count)]
    return source, target, [(start, offset, n) for (start, offset), n in zip(rows, nbytes, strict=True)]


def as_moves(rows: list[tuple[int, int, int]]) -> CopyVectors:
    """Rows of (target offset, source address, bytes) as an array; those of 0 bytes are left out."""
    made = np.array(rows, dtype=np.uint64).reshape(-1, 3)
    return made[made[:, 2] > 0]


@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 1025, 2500])
def test_each_stretch_lands_where_it_belongs_and_nothing_else_is_touched(way: str, count: int) -> None:
    source, target, rows = scattered(count)
    wanted = target.copy()
    for start, offset, nbytes in rows:
        wanted[start : start + nbytes] = source[offset : offset + nbytes]
    base = 1 << 20  # offsets count from an address before the target
    made = as_moves([(start + base, source.ctypes.data + offset, nbytes) for start, offset, nbytes in rows])
    copy_all(target.ctypes.data - base, made)
    assert np.array_equal(target, wanted)


def test_a_source_that_is_no_memory_any_more_is_an_error_and_no_crash() -> None:
    if vectors._is_refused():
        pytest.skip("process_vm_readv is refused here")
    memory = mmap.mmap(-1, 1 << 16)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    target = np.zeros(1 << 16, dtype=np.uint8)
    rows = as_moves([(0, target.ctypes.data, 8), (64, address, 4096)])
    ctypes.CDLL(None).munmap(ctypes.c_void_p(address), ctypes.c_size_t(1 << 16))
    try:
        with pytest.raises(OSError, match=r"of 4104 bytes were copied") as caught:
            copy_all(target.ctypes.data, rows)
        assert first_unreadable(target.ctypes.data, rows) == 1
    finally:  # so that what unmaps the object later unmaps nothing of others
        ctypes.CDLL(None).mmap(
            ctypes.c_void_p(address), ctypes.c_size_t(1 << 16), 3, 0x32, -1, ctypes.c_long(0)
        )  # PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED
    assert caught.value.errno == errno.EFAULT


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
def test_a_sandbox_that_refuses_the_call_is_found_out(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def refuse(*_: object) -> int:
        ctypes.set_errno(code)
        return -1

    monkeypatch.setattr(vectors, "_readv", refuse)
    assert vectors._is_refused.__wrapped__()


def test_process_vm_readv_is_not_refused_unless_a_sandbox_is_in_the_way() -> None:
    print(f"process_vm_readv of one's own process: {'refused' if vectors._is_refused() else 'works'} here")
    source, target = np.full(1, 7, dtype=np.uint64), np.zeros(1, dtype=np.uint64)
    copy_all(target.ctypes.data, as_moves([(0, source.ctypes.data, 8)]))
    assert target[0] == 7


def test_sources_that_overlap_or_lie_apart_are_read_each_for_itself() -> None:
    source = np.arange(1, 9001, dtype=np.uint16).view(np.uint8)
    spans = [(0, 100), (50, 100), (50, 100), (2199, 10), (4258, 10), (4268, 5), (120, 1)]
    targets = [1000 * number for number in range(len(spans))]
    target, wanted = (np.zeros(1000 * len(spans), dtype=np.uint8) for _ in range(2))
    for start, (offset, nbytes) in zip(targets, spans, strict=True):
        wanted[start : start + nbytes] = source[offset : offset + nbytes]
    rows = [
        (target.ctypes.data + start, source.ctypes.data + offset, n)
        for start, (offset, n) in zip(targets, spans, strict=True)
    ]
    copy_all(0, as_moves(rows))
    assert np.array_equal(target, wanted)
