"""Memory that loads read through: kept from load to load, and for one at a time, until its last thread has ended."""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from aio_ckpt import CheckpointEngine
from aio_ckpt.errors import SaveCancelledError
from aio_ckpt.memory import read_buffers as bounce
from aio_ckpt.memory.read_buffers import BounceLoan, BounceRing
from aio_ckpt.read import load as read
from aio_ckpt.storage import data_file as datafile
from tests.engine.test_read_ahead import TIMEOUT, check_equal, engine_with_step, load, made, zeros

MIB = 1 << 20


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[CheckpointEngine]:
    with engine_with_step(tmp_path) as engine:
        yield engine


def test_the_next_load_reads_through_the_same_memory_until_a_save_or_the_end_releases_it(
    engine: CheckpointEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring = engine._ctx.ring
    assert not ring.kept_bytes
    load(engine, zeros())
    kept = ring.kept_bytes
    assert kept
    with monkeypatch.context() as patched:
        patched.setattr(bounce, "_map", lambda _: pytest.fail("memory was mapped again"))
        state = zeros()
        load(engine, state)
        check_equal(state)
    assert ring.kept_bytes == kept
    engine.save(made()).result(TIMEOUT)
    assert not ring.kept_bytes
    load(engine, zeros())
    assert ring.kept_bytes
    engine.close_blocking()
    assert not ring.kept_bytes


def test_memory_that_a_thread_of_a_given_up_load_still_reads_to_is_lent_to_no_other(
    engine: CheckpointEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, goes_on, inner = threading.Event(), threading.Event(), datafile._read_fully
    held: list[memoryview] = []

    def held_once(numbers: tuple[int, ...], offset: int, views: list[memoryview]) -> int:
        if not begun.is_set():
            held.extend(views)
            begun.set()
            assert goes_on.wait(TIMEOUT)
        return inner(numbers, offset, views)

    monkeypatch.setattr(datafile, "_read_fully", held_once)
    given_up: Future[None] = Future()
    first = engine.submit_load(zeros(), None, given_up, strict=False, allow_missing=False, fallback=True)
    assert begun.wait(TIMEOUT)
    given_up.set_result(None)
    try:
        state = zeros()
        load(engine, state)
        check_equal(state)
        assert not any(held[0].tobytes()[:4096]), "the memory of the thread that still reads"
    finally:
        goes_on.set()
    with pytest.raises(SaveCancelledError):
        first.result(TIMEOUT)


def test_a_loan_ends_with_its_last_thread_not_with_its_load() -> None:
    ring = BounceRing()
    loan = BounceLoan(ring)
    (view,) = loan.buffers(MIB, 1)
    threads: list[Future[Any]] = [Future(), Future()]
    for future in threads:
        loan.hold_until(future)
    loan.close()
    for future in threads:
        assert not ring.kept_bytes
        future.set_result(None)
    assert ring.kept_bytes >= view.nbytes


def test_two_loads_have_memory_of_their_own_and_the_smallest_that_is_enough_is_taken() -> None:
    ring = BounceRing()
    loans = [BounceLoan(ring) for _ in range(2)]
    (small,), (large,) = loans[0].buffers(MIB, 1), loans[1].buffers(8 * MIB, 1)
    small[:1], large[:1] = b"s", b"l"
    for loan in loans:
        loan.close()
    again = BounceLoan(ring)
    assert [bytes(view[:1]) for nbytes in (MIB, MIB) for view in again.buffers(nbytes, 1)] == [b"s", b"l"]
    assert not ring.kept_bytes


@pytest.mark.parametrize(("sizes", "kept"), [((100, 64), 100), ((64, 100), 100), ((64, 60), 124), ((129,), 0)])
def test_no_more_is_kept_than_a_large_load_takes(sizes: tuple[int, ...], kept: int) -> None:
    ring = BounceRing()
    ring.give_back(mmap.mmap(-1, size * MIB) for size in sizes)
    assert ring.kept_bytes == kept * MIB


def test_a_closed_ring_keeps_nothing_of_a_load_that_ends_later() -> None:
    ring = BounceRing()
    loan = BounceLoan(ring)
    loan.buffers(MIB, 1)
    ring.close()
    loan.close()
    assert not ring.kept_bytes


def test_what_was_read_of_the_small_files_is_freed_behind_the_load(
    engine: CheckpointEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[weakref.ref[read.Checkpoint]] = []
    inner = read.open_checkpoint

    async def noted(*arguments: Any, **options: Any) -> read.Checkpoint:
        checkpoint = await inner(*arguments, **options)
        opened.append(weakref.ref(checkpoint))
        return checkpoint

    monkeypatch.setattr(read, "open_checkpoint", noted)
    state = {"layer.0.bias": torch.zeros_like(made()["layer.0.bias"])}
    load(engine, state)
    engine.close_blocking()
    assert [checkpoint() for checkpoint in opened] == [None]
