"""S2: one process, ``workers`` writes at once, and every failure is raised (Megatron-LM #3424)."""

from __future__ import annotations

import errno
import gc
import multiprocessing.process
import os
import subprocess
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from builders import listing, steps_dir
from image_files import MIB, assert_uniform, uniform
from killed_trainer import named_segments, train_until_killed
from saved_files import DATA_FILE, without_save_id
from slow import slow
from waits import until
from watched_writes import TIMEOUT, WatchedStorage, Write, watched_engine

from aio_ckpt import EngineConfig, SyncCheckpointEngine
from aio_ckpt.engine import failed_save
from aio_ckpt.errors import SaveCancelledError, WriteError

pytestmark = pytest.mark.usefixtures("chunks_of_4_mib")

COUNT = 8
CHUNKS = 9
"""Of a state of eight tensors of 4 MiB: their envelopes spill into one more."""


def state_of(value: float) -> dict[str, torch.Tensor]:
    return uniform(COUNT, 4 * MIB, value)


# -- 1: no other process --------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_saves_and_loads_start_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a process was started")

    for owner, name in (
        (os, "fork"),
        (os, "forkpty"),
        (os, "posix_spawn"),
        (os, "posix_spawnp"),
        (subprocess, "Popen"),
        (multiprocessing.process.BaseProcess, "start"),
    ):
        monkeypatch.setattr(owner, name, refuse)
    before = psutil.Process().children(recursive=True)
    state = {"weights": uniform(4, 3 * MIB, 1.5), "array": np.arange(9), "step": 3}
    with SyncCheckpointEngine(tmp_path, EngineConfig(workers=workers)) as engine:
        report = engine.save(state, step=3).result(TIMEOUT)
        assert report is not None
        target = {"weights": uniform(4, 3 * MIB, 0.0), "array": np.zeros(9, dtype=np.int64), "step": 0}
        assert engine.load(target).verified
    assert psutil.Process().children(recursive=True) == before
    assert all(torch.equal(target["weights"][name], value) for name, value in state["weights"].items())
    assert (target["array"].tolist(), target["step"]) == (list(range(9)), 3)


# -- 2: as many writes at once as asked for -------------------------------------------------------


@pytest.mark.parametrize("workers", [1, slow(2), 3, slow(8), slow(16)])
def test_a_slow_store_takes_chunks_over_workers_rounds(tmp_path: Path, workers: int) -> None:
    """Each round lets through what is in flight, so that a round is the time of one write."""
    storage = WatchedStorage()
    gate = storage.gate()
    storage.on_write = lambda write: gate.hold()
    with watched_engine(tmp_path, storage, workers=workers) as engine:
        ticket = engine.save(state_of(1.0), step=1)
        rounds = 0
        left = CHUNKS
        while left:
            in_flight = min(workers, left)
            gate.wait_held(in_flight)
            left -= in_flight
            rounds += 1
            gate.let_through()
        assert ticket.result(TIMEOUT) is not None
    assert rounds == -(-CHUNKS // workers)
    assert storage.most_in_flight == min(workers, CHUNKS)
    assert len(storage.writes) == CHUNKS
    assert_uniform(steps_dir(tmp_path, 1), 1.0, count=COUNT)


# -- 3: a full disk -------------------------------------------------------------------------------


def raise_enospc(write: Write) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(write.path))


def assert_is_full_disk(error: BaseException | None) -> None:
    assert isinstance(error, WriteError)
    assert error.errno == errno.ENOSPC
    assert error.strerror.startswith(f"{os.strerror(errno.ENOSPC)}: this save needs ")
    assert without_save_id(Path(error.filename).name) == DATA_FILE
    assert type(error.__cause__) is OSError


@pytest.mark.sampled
@pytest.mark.parametrize("failing", [0, CHUNKS // 2, CHUNKS - 1], ids=["first", "middle", "last"])
def test_a_full_disk_at_any_chunk_is_raised_and_leaves_nothing_behind(tmp_path: Path, failing: int) -> None:
    storage = WatchedStorage()
    storage.on_write = lambda write: raise_enospc(write) if (write.file, write.number) == (0, failing) else None
    with watched_engine(tmp_path, storage, workers=3) as engine:
        ticket = engine.save(state_of(1.0), step=1)
        assert_is_full_disk(ticket.exception(TIMEOUT))
        assert engine.lifetime.leases == 0
        assert engine.steps().result() == []
        assert listing(tmp_path) == []
        assert engine.save(state_of(2.0), step=1).result(TIMEOUT) is not None
        assert engine.steps().result() == [1]
    assert storage.torn == []
    assert_uniform(steps_dir(tmp_path, 1), 2.0, count=COUNT)


@pytest.mark.sampled
@pytest.mark.parametrize("failing", [0, CHUNKS // 2], ids=["first", "middle"])
def test_the_buffer_is_lent_to_nobody_before_the_other_writes_of_a_full_disk_settle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    monkeypatch.setattr(failed_save, "THREAD_WAIT_SECS", 0.05)
    storage = WatchedStorage()
    gate = storage.gate()

    def on_write(write: Write) -> None:
        if write.number == failing:
            gate.wait_held(2)
            raise_enospc(write)
        if write.number > failing:
            gate.hold()

    storage.on_write = on_write
    with watched_engine(tmp_path, storage, workers=3) as engine:
        ticket = engine.save(state_of(1.0), step=1)
        assert_is_full_disk(ticket.exception(TIMEOUT))
        assert gate.held == 2
        assert engine.lifetime.leases == 1
        storage.on_write = lambda write: None
        assert engine.save(state_of(2.0), step=1).result(TIMEOUT) is not None
        assert engine.lifetime.leases == 1
        gate.open()
        storage.wait_idle()
        assert engine.save(state_of(3.0), step=2).result(TIMEOUT) is not None
        assert engine.lifetime.leases == 0
    assert storage.torn == []
    assert_uniform(steps_dir(tmp_path, 1), 2.0, count=COUNT)
    assert_uniform(steps_dir(tmp_path, 2), 3.0, count=COUNT)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 12 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    if os.geteuid():
        pytest.skip("mounting a small tmpfs needs root")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", place], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


def test_a_really_full_disk_is_raised_before_a_byte_is_written(small_disk: Path) -> None:
    storage = WatchedStorage()
    with watched_engine(small_disk, storage) as engine:
        assert_is_full_disk(engine.save(uniform(4, 4 * MIB, 1.0), step=1).exception(TIMEOUT))
        assert storage.writes == []
        assert listing(small_disk) == []
        assert engine.save(uniform(2, 4 * MIB, 2.0), step=1).result(TIMEOUT) is not None
    assert_uniform(steps_dir(small_disk, 1), 2.0, count=2)


def test_a_disk_with_room_for_the_data_but_not_for_the_manifests_fails_the_save_by_name(small_disk: Path) -> None:
    state = uniform(2, 4 * MIB, 1.0)
    ballast = small_disk / "ballast"
    with SyncCheckpointEngine(small_disk) as engine:
        report = engine.save(state, step=1).result(TIMEOUT)
        assert report is not None
        engine.rollback(1)
        for path in sorted(report.path.iterdir()):
            path.unlink()
        report.path.rmdir()
        free = os.statvfs(small_disk)
        page = free.f_bsize
        ballast.write_bytes(bytes(free.f_bavail * page - report.image_bytes - page))  # .metadata
        error = engine.save(state, step=2).exception(TIMEOUT)
        assert isinstance(error, WriteError)
        assert error.errno == errno.ENOSPC
        assert without_save_id(Path(error.filename).name) != DATA_FILE
        assert engine.steps() == []
        ballast.unlink()
        assert engine.save(state, step=2).result(TIMEOUT) is not None
    assert_uniform(steps_dir(small_disk, 2), 1.0, count=2)


# -- 4: nothing is kept ---------------------------------------------------------------------------


def sources() -> tuple[dict[str, object], list[weakref.ref[object]]]:
    """A state of tensors of every kind of copy, and weak references to them."""
    state: dict[str, object] = {
        "large": torch.ones(MIB),
        "small": torch.ones(7),
        "strided": torch.ones(64, 64)[::2, ::3],
        "conj": torch.ones(600, 600, dtype=torch.complex64).conj(),
        "array": np.ones(9),
        "bytes": bytearray(b"mutable"),
    }
    return state, [weakref.ref(value) for value in state.values() if isinstance(value, (torch.Tensor, np.ndarray))]


def alive(references: list[weakref.ref[object]]) -> list[object]:
    gc.collect()
    return [type(value) for reference in references if (value := reference()) is not None]


def test_no_source_is_kept_alive_by_a_save_that_ended(tmp_path: Path) -> None:
    """The engine and the ticket are still there."""
    storage = WatchedStorage()
    with watched_engine(tmp_path, storage) as engine:
        state, references = sources()
        committed = engine.save(state)
        del state
        assert committed.result(TIMEOUT) is not None
        assert alive(references) == []

        def fail(write: Write) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(write.path))

        storage.on_write = fail
        state, references = sources()
        failed = engine.save(state)
        del state
        assert isinstance(failed.exception(TIMEOUT), WriteError)
        assert alive(references) == []

        gate = storage.gate()
        storage.on_write = lambda write: gate.hold()
        state, references = sources()
        cancelled = engine.save(state)
        del state
        gate.wait_held()
        assert cancelled.cancel()
        gate.open()
        assert isinstance(cancelled.exception(TIMEOUT), SaveCancelledError)
        assert alive(references) == []


def test_sources_are_let_go_as_soon_as_they_are_copied(tmp_path: Path) -> None:
    storage = WatchedStorage()
    gate = storage.gate()
    storage.on_write = lambda write: gate.hold()
    with watched_engine(tmp_path, storage) as engine:
        state, references = sources()
        ticket = engine.save(state)
        del state
        gate.wait_held()
        ticket.staged.result(TIMEOUT)
        assert not ticket.done()
        assert alive(references) == []


def test_a_save_that_raises_keeps_no_source_once_its_error_is_dropped(tmp_path: Path) -> None:
    """The error is raised by ``save()`` itself: the disk fails while a ring is captured."""
    storage = WatchedStorage()

    def fail(write: Write) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(write.path))

    storage.on_write = fail
    with watched_engine(tmp_path, storage, budget_bytes=32 * MIB) as engine:

        def attempt() -> list[weakref.ref[object]]:
            state = state_of(1.0)
            with pytest.raises(WriteError):
                engine.save(state)
            return [weakref.ref(value) for value in state.values()]

        references = attempt()
        until(lambda: alive(references) == [])  # the thread that finished the save may leave its frames later


# -- 5: the trainer is killed ---------------------------------------------------------------------


def test_a_killed_trainer_leaves_no_process_and_the_next_engine_clears_its_directory(tmp_path: Path) -> None:
    before = named_segments()
    killed = train_until_killed(tmp_path, "pageable")
    assert killed.children == []
    assert not psutil.pid_exists(killed.pid)
    assert named_segments() <= before
    assert len(list(tmp_path.glob(".aio_ckpt/pending/*"))) == 1
    with SyncCheckpointEngine(tmp_path) as engine:
        assert engine.steps() == [1]
        assert engine.save(uniform(4, 4 * MIB, 3.0)).result(TIMEOUT) is not None
        assert engine.steps() == [1, 2]
    assert list(tmp_path.glob(".aio_ckpt/pending/*")) == []
    assert_uniform(steps_dir(tmp_path, 1), 1.0, count=4)
    assert_uniform(steps_dir(tmp_path, 2), 3.0, count=4)


def test_only_the_engines_own_threads_are_left_after_saves(tmp_path: Path) -> None:
    before = threading.active_count()
    with SyncCheckpointEngine(tmp_path, EngineConfig(workers=3)) as engine:
        started = threading.active_count()
        for value in range(3):
            assert engine.save(uniform(2, 4 * MIB, value)).result(TIMEOUT) is not None
        assert threading.active_count() == started
    assert threading.active_count() == before
