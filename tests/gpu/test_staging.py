"""S1, S3, S4 and S6 of the acceptance recipes for every kind of staging memory, and what ``prepare`` does ahead.

With a GPU the states are on it. Without one they are in host memory, where every kind but ``pinned`` works as well.
"""

from __future__ import annotations

import gc
import io
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cuda_machine import MIB, TIMEOUT
from watched_writes import WatchedStorage, watched_engine

from aio_ckpt import CheckpointEngine, SyncCheckpointEngine
from aio_ckpt.memory import arena_lifetimes

HAS_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if HAS_CUDA else "cpu"
PART_BYTES = (4 if HAS_CUDA else 1) * MIB
SAVES = 20 if HAS_CUDA else 5
"""In which memory that grew from save to save would have grown."""
pinned = pytest.param("pinned", marks=pytest.mark.gpu)  # memory that is registered with it
pytestmark = pytest.mark.gpu(0)


@dataclass(frozen=True)
class Mode:
    """Settings of one way of staging."""

    settings: dict[str, Any]


@pytest.fixture(params=[pinned, "shm", "pageable", "auto", "shm_path"])
def mode(request: pytest.FixtureRequest) -> Iterator[Mode]:
    if request.param != "shm_path":
        yield Mode({"staging": request.param})
        return
    with named_segments() as place:
        yield Mode({"shm_path": place})
        assert list(place.iterdir()) == [], "closed engines leave nothing"


@contextmanager
def named_segments() -> Iterator[Path]:
    """A directory for segments with room for all that is staged here."""
    if shutil.disk_usage("/dev/shm").free < 2 << 30:
        pytest.skip("/dev/shm has less than 2 GiB")
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="test-") as place:
        yield Path(place)


@contextmanager
def engine_of(root: Path, mode: Mode, storage: WatchedStorage | None = None, **more: Any) -> Iterator[CheckpointEngine]:
    with watched_engine(
        root, storage or WatchedStorage(), **{"stall_timeout_secs": TIMEOUT, **mode.settings, **more}
    ) as made:
        yield made


def filled(count: int, nbytes: int, value: float) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.full((nbytes // 4,), value, device=DEVICE) for i in range(count)}


def read(engine: CheckpointEngine, step: int) -> dict[str, Any]:
    found = engine.read(step, only=None).result(TIMEOUT)
    assert isinstance(found, dict)
    return found


def assert_all(found: dict[str, torch.Tensor], value: float, count: int) -> None:
    assert len(found) == count
    for name, tensor in found.items():
        assert bool((tensor == value).all()), f"{name}: {tensor.unique()[:3].tolist()}, not {value}"


# -- S1: buffers recycled under the writer --------------------------------------------------------


def test_s1_memory_that_a_writer_still_reads_is_nobody_elses(tmp_path: Path, mode: Mode) -> None:
    """The writer of save 1 is held after its first chunk; everything else is dropped, churned and saved anew."""
    storage = WatchedStorage()
    gate = storage.gate()
    storage.on_write = lambda write: gate.hold() if write.file == 0 and write.number else None
    with engine_of(tmp_path, mode, storage, max_in_flight=2) as engine:
        state = filled(6, PART_BYTES, 1.0)
        engine.save(state, step=1)
        gate.wait_held()
        del state
        gc.collect()
        for _ in range(4):
            junk = [torch.full((PART_BYTES,), 0xAB, dtype=torch.uint8, device=DEVICE) for _ in range(6)]
            junk += [torch.full((PART_BYTES,), 0xAB, dtype=torch.uint8, pin_memory=HAS_CUDA) for _ in range(6)]
            del junk
        second = engine.save(filled(6, PART_BYTES, 2.0), step=2)
        gate.open()
        second.result(TIMEOUT)
        assert storage.torn == []
        assert_all(read(engine, 1), 1.0, 6)
        assert_all(read(engine, 2), 2.0, 6)


def test_s1_memory_does_not_grow_from_save_to_save(tmp_path: Path, mode: Mode) -> None:
    state, seen = filled(4, PART_BYTES, 0.0), set()
    with engine_of(tmp_path, mode, keep_last=1) as engine:
        for _ in range(SAVES):
            torch._foreach_add_(list(state.values()), 1.0)
            ticket = engine.save(state)
            torch._foreach_mul_(list(state.values()), -1.0)
            ticket.result(TIMEOUT)
            torch._foreach_mul_(list(state.values()), -1.0)
            (arena,) = engine._resources.lifetime._arenas
            seen.add((arena.address, arena.capacity, engine.lifetime.leases))
        assert_all(read(engine, SAVES), float(SAVES), 4)
    assert len(seen) == 1


# -- S3: values changed in place, structure changed -----------------------------------------------


@pytest.mark.sampled
def test_s3_each_file_holds_its_own_step_also_where_the_structure_changed(tmp_path: Path, mode: Mode) -> None:
    states: list[dict[str, torch.Tensor]] = [
        filled(2, PART_BYTES, 1.0),
        filled(2, PART_BYTES, 2.0),
        {**filled(2, PART_BYTES, 3.0), "moved": torch.full((MIB,), 3.0), "added": torch.full((7,), 3.0, device=DEVICE)},
        {**filled(2, 9 * MIB, 4.0), "moved": torch.full((MIB,), 4.0, device=DEVICE)},
    ]
    with engine_of(tmp_path, mode) as engine:
        for step, state in enumerate(states, start=1):
            ticket = engine.save(state, step=step)
            for tensor in state.values():
                tensor.fill_(-1.0)
            report = ticket.result(TIMEOUT)
            assert report is not None
            assert engine.lifetime.leases == 0
        for step, state in enumerate(states, start=1):
            assert_all(read(engine, step), float(step), len(state))


# -- S4: the memory of the state that was given ---------------------------------------------------


def test_s4_fresh_allocations_are_what_is_saved(tmp_path: Path, mode: Mode) -> None:
    states = [filled(3, PART_BYTES, float(value)) for value in range(3)]
    assert len({state["w0"].data_ptr() for state in states}) == 3
    with engine_of(tmp_path, mode) as engine:
        reports = [engine.save(state).result(TIMEOUT) for state in states]
        assert [report.fingerprint_hit for report in reports if report] == [False, False, False]
        assert [report.plan_hit for report in reports if report] == [False, True, True]
        for value, report in enumerate(reports):
            assert report is not None
            assert_all(read(engine, report.step), float(value), 3)


# -- S6: host values in the same state ------------------------------------------------------------


def test_s6_host_values_changed_right_after_save_are_not_in_the_file(tmp_path: Path, mode: Mode) -> None:
    storage = WatchedStorage()
    gate = storage.gate()
    storage.on_write = lambda write: gate.hold()
    state: dict[str, Any] = {
        **filled(2, PART_BYTES, 5.0),
        "step": torch.tensor(5.0),
        "large": torch.full((2 * MIB,), 5.0),
        "array": np.full((1000,), 5.0),
        "file": io.BytesIO(b"55555"),
        "nested": {"list": [5, {"deep": [5]}]},
    }
    with engine_of(tmp_path, mode, storage) as engine:
        ticket = engine.save(state)
        for name in ("w0", "w1", "step", "large"):
            state[name].fill_(6.0)
        state["array"][:] = 6.0
        state["file"].seek(0)
        state["file"].write(b"66666")
        state["nested"]["list"][0] = 6
        state["nested"]["list"][1]["deep"].append(6)
        gate.open()
        report = ticket.result(TIMEOUT)
        assert report is not None
        found = read(engine, report.step)
    assert_all({name: found[name] for name in ("w0", "w1", "step", "large")}, 5.0, 4)
    assert (found["array"] == 5.0).all()
    assert found["file"].getvalue() == b"55555"
    assert found["nested"] == {"list": [5, {"deep": [5]}]}


# -- prepare --------------------------------------------------------------------------------------


def test_the_first_save_behind_prepare_maps_and_registers_nothing(
    tmp_path: Path, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapped = []
    real = arena_lifetimes._make_arena
    monkeypatch.setattr(arena_lifetimes, "_make_arena", lambda *given: mapped.append(given) or real(*given))
    state = {
        **filled(4, (256 if HAS_CUDA else 1) * MIB, 1.0),
        **{f"s{i}": torch.ones(100, device=DEVICE) for i in range(100)},
    }
    with engine_of(tmp_path, mode, keep_last=1, relink_limit=1, debug=False) as engine:
        engine.prepare(state).result(TIMEOUT)
        (arena,) = engine._resources.lifetime._arenas
        assert arena.is_registered == (HAS_CUDA and arena.kind != "pageable")
        blocked = []
        for _ in range(SAVES):
            report = engine.save(state).result(TIMEOUT)
            assert report is not None
            assert report.plan_hit
            blocked.append(report.timings.blocked_secs)
        assert len(mapped) == 1
        told = ", ".join(f"{secs * 1e3:.1f}" for secs in blocked)
        print(f"{mode.settings}: save() blocks {told} ms (the first to the last)")
        assert_all({name: value for name, value in read(engine, SAVES).items() if name[0] == "w"}, 1.0, 4)


@pytest.mark.gpu
def test_auto_takes_registered_memory_for_the_device(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.save(filled(2, PART_BYTES, 1.0)).result(TIMEOUT)
        (arena,) = engine._resources.lifetime._arenas
        assert (arena.kind, arena.is_registered) == ("pinned", True)
