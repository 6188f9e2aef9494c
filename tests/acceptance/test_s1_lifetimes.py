"""S1: staging buffers are never recycled under a writer (Megatron-LM #2288, TemporalAsyncCaller).

Each engine here poisons released buffers (``debug=True``), and the gated storage notices every write whose bytes
changed while a thread had them.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import shutil
import signal
import threading
from concurrent.futures import wait
from pathlib import Path

import pytest
import torch
from builders import steps_dir
from image_files import MIB, assert_uniform, uniform
from trained_states import KEPT, Training, check_a_save_every_step, weigh
from watched_writes import TIMEOUT, Gate, WatchedStorage, Write, watched_engine

from aio_ckpt import CheckpointEngine, EngineConfig
from aio_ckpt.config import Staging
from aio_ckpt.engine import failed_save
from aio_ckpt.errors import SaveCancelledError, StallError, WriteError
from aio_ckpt.format.root_names import PENDING_DIR
from aio_ckpt.memory.arena import POISON

pytestmark = pytest.mark.usefixtures("chunks_of_4_mib")

COUNT = 5
"""Tensors of 4 MiB: six chunks."""


def state_of(value: float) -> dict[str, torch.Tensor]:
    return uniform(COUNT, 4 * MIB, value)


def churn(nbytes: int) -> None:
    """Allocate and free four times ``nbytes`` in the same size class, filled with 0xAB."""
    for _ in range(4):
        torch.full((nbytes,), 0xAB, dtype=torch.uint8)


def hold_in_first_file(storage: WatchedStorage, *, first: int) -> Gate:
    """A gate for the writes ``first``, ``first + 1``... of the first save."""
    gate = storage.gate()

    def on_write(write: Write) -> None:
        if write.file == 0 and write.number >= first:
            gate.hold()

    storage.on_write = on_write
    return gate


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed save does not wait for its threads before it reports; its lease waits all the same."""
    monkeypatch.setattr(failed_save, "THREAD_WAIT_SECS", 0.05)


def test_a_save_keeps_its_own_bytes_while_the_next_one_is_captured_and_the_trainer_churns_memory(
    tmp_path: Path,
) -> None:
    storage = WatchedStorage()
    gate = hold_in_first_file(storage, first=1)
    with watched_engine(tmp_path, storage, max_in_flight=2) as engine:
        state = state_of(1.0)
        ticket = engine.save(state, step=1)
        gate.wait_held(engine.config.workers)
        del state, ticket
        gc.collect()
        churn(engine.lifetime.arena_bytes)
        second = engine.save(state_of(2.0), step=2)
        churn(engine.lifetime.arena_bytes)
        gate.open()
        assert second.result(TIMEOUT) is not None
    assert storage.torn == []
    assert_uniform(steps_dir(tmp_path, 1), 1.0, count=COUNT)
    assert_uniform(steps_dir(tmp_path, 2), 2.0, count=COUNT)


def save_beside_a_thread_that_is_left_behind(engine: CheckpointEngine, storage: WatchedStorage, gate: Gate) -> None:
    """The first save has ended badly while its threads are held: the next must not get their bytes.

    Nor may their directory go before they have ended; then it does, behind the next commit.
    """
    held = gate.held
    assert held
    assert engine.lifetime.leases == 1
    second = engine.save(state_of(2.0), step=2)
    assert second.result(TIMEOUT) is not None
    wait(engine._root_session.passes, TIMEOUT)
    assert len(pending_in(engine.root)) == 1
    assert gate.held == held
    assert engine.lifetime.leases == 1
    gate.open()
    storage.wait_idle()
    assert storage.torn == []
    assert engine.steps().result() == [2]
    third = engine.save(state_of(3.0), step=3)
    assert third.result(TIMEOUT) is not None
    wait(engine._root_session.passes, TIMEOUT)
    assert pending_in(engine.root) == []


def pending_in(root: Path) -> list[str]:
    return [path.name for path in (root / PENDING_DIR).iterdir()]


@pytest.mark.usefixtures("impatient")
def test_a_cancelled_save_lends_its_buffer_to_nobody_while_a_chunk_is_inside_a_thread(tmp_path: Path) -> None:
    storage = WatchedStorage()
    gate = hold_in_first_file(storage, first=1)
    with watched_engine(tmp_path, storage) as engine:
        ticket = engine.save(state_of(1.0), step=1)
        gate.wait_held(engine.config.workers)
        assert ticket.cancel()
        assert isinstance(ticket.exception(TIMEOUT), SaveCancelledError)
        save_beside_a_thread_that_is_left_behind(engine, storage, gate)
    assert_uniform(steps_dir(tmp_path, 2), 2.0, count=COUNT)
    assert_uniform(steps_dir(tmp_path, 3), 3.0, count=COUNT)


async def test_a_cancelled_await_leaves_the_save_and_its_buffer_alone(tmp_path: Path) -> None:
    storage = WatchedStorage()
    gate = hold_in_first_file(storage, first=1)
    with watched_engine(tmp_path, storage, max_in_flight=2) as engine:
        ticket = engine.save(state_of(1.0), step=1)

        async def wait() -> None:
            await ticket

        waiting = asyncio.create_task(wait())
        await asyncio.to_thread(gate.wait_held, engine.config.workers)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        second = engine.save(state_of(2.0), step=2)
        gate.open()
        for waited in (ticket, second):
            assert await waited is not None
    assert storage.torn == []
    assert_uniform(steps_dir(tmp_path, 1), 1.0, count=COUNT)
    assert_uniform(steps_dir(tmp_path, 2), 2.0, count=COUNT)


@pytest.mark.usefixtures("impatient")
def test_a_failed_chunk_does_not_free_the_buffer_under_a_later_one_in_flight(tmp_path: Path) -> None:
    storage = WatchedStorage()
    gate = storage.gate()

    def on_write(write: Write) -> None:
        if write.file:
            return
        if write.number == 2:
            gate.wait_held(2)
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(write.path))
        if write.number > 2:
            gate.hold()

    storage.on_write = on_write
    with watched_engine(tmp_path, storage, workers=3) as engine:
        ticket = engine.save(state_of(1.0), step=1)
        error = ticket.exception(TIMEOUT)
        assert isinstance(error, WriteError)
        assert error.errno == errno.EIO
        save_beside_a_thread_that_is_left_behind(engine, storage, gate)
    assert_uniform(steps_dir(tmp_path, 2), 2.0, count=COUNT)
    assert_uniform(steps_dir(tmp_path, 3), 3.0, count=COUNT)


@pytest.mark.usefixtures("impatient")
def test_with_no_room_for_a_second_buffer_the_next_save_waits_for_the_thread(tmp_path: Path) -> None:
    storage = WatchedStorage()
    gate = hold_in_first_file(storage, first=1)
    with watched_engine(tmp_path, storage, budget_bytes=24 * MIB, stall_timeout_secs=0.5) as engine:
        ticket = engine.save(state_of(1.0), step=1)
        gate.wait_held(engine.config.workers)
        ticket.cancel()
        assert isinstance(ticket.exception(TIMEOUT), SaveCancelledError)
        with pytest.raises(StallError, match=r"an earlier save keeps its arena and made no progress for 0\.5 s"):
            engine.save(state_of(2.0), step=2)
        gate.open()
        storage.wait_idle()
        assert storage.torn == []
        assert engine.save(state_of(3.0), step=3).result(TIMEOUT) is not None
    assert_uniform(steps_dir(tmp_path, 3), 3.0, count=COUNT)


def test_a_save_outlives_the_loop_that_began_it(tmp_path: Path) -> None:
    storage = WatchedStorage()
    gate = hold_in_first_file(storage, first=1)
    with watched_engine(tmp_path, storage, max_in_flight=2) as engine:

        async def begin_and_leave() -> None:
            ticket = engine.save(state_of(1.0), step=1)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(asyncio.shield(asyncio.ensure_future(ticket.committed)), 0.05)

        loop = asyncio.new_event_loop()
        loop.run_until_complete(begin_and_leave())
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        gc.collect()
        gate.wait_held(engine.config.workers)
        second = engine.save(state_of(2.0), step=2)
        gate.open()
        assert second.result(TIMEOUT) is not None
    assert storage.torn == []
    assert_uniform(steps_dir(tmp_path, 1), 1.0, count=COUNT)
    assert_uniform(steps_dir(tmp_path, 2), 2.0, count=COUNT)


def interrupting_when_held(gate: Gate, count: int) -> threading.Thread:
    """To be started where KeyboardInterrupt is expected: Ctrl-C once ``count`` threads are at the gate."""

    def interrupt() -> None:
        gate.wait_held(count)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    return threading.Thread(target=interrupt)


def test_ctrl_c_while_waiting_leaves_the_save_and_its_buffer_alone(tmp_path: Path) -> None:
    storage = WatchedStorage()
    gate = hold_in_first_file(storage, first=1)
    with watched_engine(tmp_path, storage, max_in_flight=2) as engine:
        ticket = engine.save(state_of(1.0), step=1)
        interrupting = interrupting_when_held(gate, engine.config.workers)
        with pytest.raises(KeyboardInterrupt):
            interrupting.start()
            ticket.result(TIMEOUT)
        interrupting.join(TIMEOUT)
        second = engine.save(state_of(2.0), step=2)
        gate.open()
        assert second.result(TIMEOUT) is not None
    assert storage.torn == []
    assert_uniform(steps_dir(tmp_path, 1), 1.0, count=COUNT)
    assert_uniform(steps_dir(tmp_path, 2), 2.0, count=COUNT)


@pytest.mark.usefixtures("impatient")
def test_ctrl_c_inside_save_cancels_it_and_the_engine_goes_on(tmp_path: Path) -> None:
    """A ring smaller than the image: ``save()`` waits for slots while the first chunks are held."""
    storage = WatchedStorage()
    gate = hold_in_first_file(storage, first=0)
    with watched_engine(tmp_path, storage, budget_bytes=20 * MIB, workers=2) as engine:
        interrupting = interrupting_when_held(gate, 2)
        with pytest.raises(KeyboardInterrupt):
            interrupting.start()
            engine.save(state_of(1.0), step=1)
        interrupting.join(TIMEOUT)
        assert engine.lifetime.leases == 1
        gate.open()
        storage.wait_idle()
        assert storage.torn == []
        assert engine.save(state_of(2.0), step=2).result(TIMEOUT) is not None
        assert engine.steps().result() == [2]
    assert_uniform(steps_dir(tmp_path, 2), 2.0, count=COUNT)


def test_a_released_buffer_is_poisoned_and_the_poison_reaches_no_file(tmp_path: Path) -> None:
    storage = WatchedStorage()
    with watched_engine(tmp_path, storage) as engine:
        for step in range(1, 5):
            assert engine.save(state_of(float(step)), step=step).result(TIMEOUT) is not None
            (arena,) = engine._resources.lifetime._idle
            assert bool((arena.tensor == POISON).all())
    assert storage.torn == []
    for step in range(1, 5):
        assert_uniform(steps_dir(tmp_path, step), float(step), count=COUNT)


@pytest.mark.usefixtures("impatient")
def test_after_a_hundred_saves_arena_bytes_and_open_files_are_back_at_the_baseline(tmp_path: Path) -> None:
    """One save in ten fails in its second chunk and one in ten is cancelled there."""
    storage = WatchedStorage()
    gate = storage.gate()

    def on_write(write: Write) -> None:
        if write.number == 1 and write.file % 10 == 3:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(write.path))
        if write.number == 1 and write.file % 10 == 7:
            gate.hold()

    storage.on_write = on_write
    small = uniform(3, 2 * MIB, 1.0)
    outcomes: list[type] = []
    with watched_engine(tmp_path, storage, relink_limit=1) as engine:  # a save writes one data file
        for number in range(100):
            ticket = engine.save(small)
            if number % 10 == 7:
                gate.wait_held()
                assert ticket.cancel()
                gate.let_through()
            outcomes.append(type(ticket.exception(TIMEOUT)))
            storage.wait_idle()
            shutil.rmtree(steps_dir(tmp_path, ticket.step - 1), ignore_errors=True)
            if number == 0:
                baseline = held_by_process(engine)
        assert [outcomes.count(kind) for kind in (type(None), WriteError, SaveCancelledError)] == [80, 10, 10]
        assert held_by_process(engine) == baseline
    assert storage.torn == []


def held_by_process(engine: CheckpointEngine) -> tuple[object, ...]:
    gc.collect()
    return engine.lifetime, len(os.listdir("/proc/self/fd")), threading.active_count()


def test_a_weight_tells_one_bit_and_two_words_that_changed_places() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        values = torch.arange(1, 36).to(dtype)
        flipped, swapped = values.clone(), values.clone()
        flipped.view(torch.uint8)[-1] ^= 1
        swapped[4], swapped[20] = values[20], values[4]
        assert weigh(values.clone()) == weigh(values)
        assert len({int(weigh(each)) for each in (values, flipped, swapped)}) == 3, dtype


@pytest.mark.sampled
@pytest.mark.parametrize("staging", ["shm", "pageable"])
def test_each_checkpoint_of_a_training_run_is_the_state_before_its_update(tmp_path: Path, staging: Staging) -> None:
    """(f) without a GPU; with one, and more steps: test_cuda_recipes.py."""
    settings = EngineConfig(staging=staging, debug=True, max_in_flight=2, keep_last=KEPT, stall_timeout_secs=TIMEOUT)
    training = Training("cpu", width=32, layers=1)
    assert check_a_save_every_step(tmp_path, settings, training, steps=20, timeout=TIMEOUT) == 20
