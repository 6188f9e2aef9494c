"""A state larger than the budget: it is captured and written in waves, and ``save()`` returns with the last."""

from __future__ import annotations

import dataclasses
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import listing
from image_files import MIB, assert_uniform, uniform
from tensor_bits import assert_same_tensor
from watched_writes import TIMEOUT, Gate, WatchedStorage, Write, watched_engine

from aio_ckpt import CheckpointEngine, EngineConfig, SyncCheckpointEngine
from aio_ckpt.engine.job import WriteJob
from aio_ckpt.errors import SaveCancelledError, WriteError
from aio_ckpt.memory import available
from aio_ckpt.memory.copies import Copies
from aio_ckpt.ticket import SaveTicket

BUDGET = MIB
COUNT = 6
"""Tensors of 1 MiB: six times what the budget holds."""


def state(value: float) -> dict[str, torch.Tensor]:
    return uniform(COUNT, MIB, value)


def fill(tensors: dict[str, torch.Tensor], value: float) -> None:
    for tensor in tensors.values():
        tensor.fill_(value)


class WaveStorage(WatchedStorage):
    """Holds the writes of the chunks from number ``first`` on at a gate."""

    def __init__(self, first: int) -> None:
        super().__init__(self._hold)
        self._first = first
        self.wave: Gate = self.gate()

    def _hold(self, write: Write) -> None:
        if write.file == 0 and write.number >= self._first:
            self.wave.hold()


def test_the_first_chunks_are_written_while_later_ones_are_still_to_be_captured(tmp_path: Path) -> None:
    """Else ``save()`` could never return. It returns when what is not yet written fits the budget."""
    storage, before = WatchedStorage(), state(1.0)
    with watched_engine(tmp_path, storage, budget_bytes=BUDGET) as engine:
        ticket = engine.save(before)
        written = sum(nbytes for *_, nbytes in storage.writes)
        fill(before, 2.0)
        report = ticket.result(TIMEOUT)
        assert written >= report.image_bytes - BUDGET
        assert ticket.staged.done()
        assert_uniform(report.path, 1.0, count=COUNT)
    assert storage.torn == []


def test_save_returns_before_the_last_wave_is_written(tmp_path: Path) -> None:
    storage, before = WaveStorage(first=45), state(1.0)  # of 49 chunks, eight of which are in memory
    with watched_engine(tmp_path, storage, budget_bytes=BUDGET, workers=1) as engine:
        ticket = engine.save(before)
        fill(before, 2.0)
        storage.wave.wait_held()
        assert not ticket.committed.done()
        storage.wave.open()
        assert_uniform(ticket.result(TIMEOUT).path, 1.0, count=COUNT)


def test_memory_for_images_never_exceeds_the_budget(tmp_path: Path) -> None:
    found: list[int] = []
    storage = WatchedStorage(lambda _: found.append(engine.lifetime.arena_bytes))
    with watched_engine(tmp_path, storage, budget_bytes=BUDGET, max_in_flight=2) as engine:
        tickets = [engine.save(state(float(step))) for step in (1, 2, 3)]
        reports = [ticket.result(TIMEOUT) for ticket in tickets]
    assert len(found) >= 3 * COUNT
    assert max(found) <= BUDGET
    for report in reports:
        assert_uniform(report.path, float(report.step), count=COUNT)
    assert [report.plan_hit for report in reports] == [False, True, True]


def test_every_kind_of_leaf_comes_back_bit_for_bit(tmp_path: Path) -> None:
    grid = torch.randn(900, 1100)
    kept: dict[str, Any] = {
        "plain": torch.randn(700_001),
        "dense": grid.t(),
        "holes": grid[::2, 1::3],
        "narrow": torch.randn(3, 5, 70_001)[:, 1:4, 3:],
        "expanded": torch.randn(1, 30_001).expand(20, -1),
        "conj": torch.randn(300, 700, dtype=torch.complex64).conj(),
        "neg": torch.randn(400_000, dtype=torch.complex64).conj().imag,
        "half": torch.randn(1000, 1001).bfloat16()[:, ::2],
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "array": np.arange(400_000, dtype=np.int16)[::-1],
        "many": {str(number): torch.randn(number % 50) for number in range(300)},
        "object": {"text": "x" * (3 * MIB), "n": [1, 2.5, None]},
    }
    kept["tied"] = kept["plain"]
    with watched_engine(tmp_path, WatchedStorage(), budget_bytes=256 << 10) as engine:
        for _ in range(2):
            report = engine.save(kept).result(TIMEOUT)
        assert report.plan_hit
        assert report.image_bytes > 40 * (256 << 10)
        back: Any = engine.read(report.step, only=None).result(TIMEOUT)
    assert back["object"] == kept["object"]
    for name, value in {**kept, **kept["many"]}.items():
        if name in ("many", "object"):
            continue
        found = back[name] if name in back else back["many"][name]
        if isinstance(value, np.ndarray):
            assert np.array_equal(found, value), name
        else:
            assert_same_tensor(found, value)


def test_a_host_tensor_that_is_not_dense_is_never_packed_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copy would be memory beside the budget."""
    monkeypatch.delattr(Copies, "contiguous")
    holes = torch.randn(1000, 1000)[:, ::2]
    with SyncCheckpointEngine(tmp_path, EngineConfig(budget_bytes=256 << 10)) as engine:
        step = engine.save({"w": holes, "conj": torch.randn(200_000, dtype=torch.complex64).conj()}).result().step
        found: Any = engine.read(step)
    assert torch.equal(found["w"], holes)


def test_objects_beyond_the_budget_are_saved(tmp_path: Path) -> None:
    kept = {"w": torch.ones(100), "bytes": b"7" * (2 * MIB), "list": list(range(50_000))}
    with SyncCheckpointEngine(tmp_path, EngineConfig(budget_bytes=256 << 10)) as engine:
        engine.save(kept).result()
        found: Any = engine.read()
    assert (found["bytes"], found["list"]) == (kept["bytes"], kept["list"])


def test_one_log_line_says_that_a_state_goes_in_waves_and_what_to_raise(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with SyncCheckpointEngine(tmp_path, EngineConfig(budget_bytes=BUDGET)) as engine:
        engine.save({"w": torch.ones(3)}).result()
        assert caplog.records == []
        for _ in range(2):
            engine.save(state(1.0)).result()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("step 2: ")
    assert f"in waves, as budget_bytes={BUDGET} holds no more: save() returns when the last wave is captured" in line


# -- what ends early --------------------------------------------------------------------------------


def check_usable(engine: CheckpointEngine, root: Path) -> None:
    """Nothing is visible, pending or lent; the next save, of the same size, commits."""
    assert listing(root) == []
    assert engine.lifetime.leases == 0
    report = engine.save(state(3.0)).result(TIMEOUT)
    assert_uniform(report.path, 3.0, count=COUNT)


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_write_that_fails_in_a_wave_is_raised_by_save(tmp_path: Path, in_flight: int, quiet: None) -> None:
    root = tmp_path / "root"
    errors = [OSError(5, "Input/output error")]

    def fail(write: Write) -> None:
        if write.number == 20 and errors:
            raise errors.pop()

    with watched_engine(root, WatchedStorage(fail), budget_bytes=BUDGET, max_in_flight=in_flight) as engine:
        with pytest.raises(WriteError, match="Input/output error") as caught:
            engine.save(state(1.0))
        assert caught.value.errno == 5
        check_usable(engine, root)


def test_ctrl_c_in_a_wave_ends_the_save(tmp_path: Path) -> None:
    root, main = tmp_path / "root", threading.main_thread().ident
    assert main is not None
    storage = WaveStorage(first=20)

    def interrupt() -> None:
        storage.wave.wait_held()
        signal.pthread_kill(main, signal.SIGINT)
        storage.wave.open()

    with watched_engine(root, storage, budget_bytes=BUDGET) as engine, ThreadPoolExecutor(1) as other:
        interrupting = other.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.save(state(1.0))
        interrupting.result(TIMEOUT)
        storage.wait_idle()
        check_usable(engine, root)


def saved_while(root: Path, end: Callable[[CheckpointEngine, WaveStorage], object]) -> SaveTicket:
    """What ``save()`` gives or raises if ``end`` is called while it waits in a wave, by another thread."""
    storage = WaveStorage(first=20)
    with watched_engine(root, storage, budget_bytes=BUDGET) as engine, ThreadPoolExecutor(1) as trainer:
        saving = trainer.submit(engine.save, state(1.0))
        storage.wave.wait_held()
        end(engine, storage)
        return saving.result(TIMEOUT)


def test_an_engine_that_is_terminated_in_a_wave_ends_the_save(tmp_path: Path, quiet: None) -> None:
    def terminate(engine: CheckpointEngine, storage: WaveStorage) -> None:
        (pending,) = engine._queue.pending(WriteJob)
        assert pending.ticket.cancel()  # as terminate() does; then no thread is held any more
        storage.wave.open()
        engine.terminate()

    with pytest.raises(SaveCancelledError):
        saved_while(tmp_path / "root", terminate)
    assert listing(tmp_path / "root") == []


def test_an_engine_that_is_closed_in_a_wave_commits_the_save(tmp_path: Path) -> None:
    def close(engine: CheckpointEngine, storage: WaveStorage) -> None:
        with ThreadPoolExecutor(1) as closer:
            closing = closer.submit(engine.close_blocking)
            storage.wave.open()
            closing.result(TIMEOUT)

    ticket = saved_while(tmp_path / "root", close)
    assert_uniform(ticket.result(TIMEOUT).path, 1.0, count=COUNT)


# -- the default budget -----------------------------------------------------------------------------


@dataclasses.dataclass
class Memory:
    """A machine with so many bytes left."""

    available: int


def test_the_default_budget_is_what_the_machine_has_when_a_new_layout_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine is opened before the model is built, and the optimizer's state comes with the first step."""
    machine = Memory(available=400 * MIB)
    monkeypatch.setattr(available, "available_bytes", lambda: machine.available)
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.save(uniform(4, 5 * MIB, 1.0)).result()
        assert engine.lifetime.arena_bytes >= 20 * MIB
        machine.available = 40 * MIB  # beside the arena, which is lent again: half of 60 MiB and a bit
        for _ in range(2):
            report = engine.save(uniform(8, 5 * MIB, 2.0)).result()
            assert report is not None
            assert 24 * MIB < engine.lifetime.arena_bytes <= 32 * MIB
            machine.available = 0  # asked no more: the layout stays, and the arena with it
        assert report.plan_hit
        assert_uniform(report.path, 2.0, count=8)
    assert len([record for record in caplog.records if "in waves" in record.getMessage()]) == 1
