"""``prepare()`` and what a save maps ahead for the next: the first save costs what the tenth does."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from image_files import MIB, uniform
from watched_writes import TIMEOUT, Gate, WatchedCondition, WatchedStorage, watched_engine

from aio_ckpt import CheckpointEngine, EngineConfig, SyncCheckpointEngine
from aio_ckpt.config import Staging
from aio_ckpt.errors import (
    BudgetExceededError,
    EngineClosedError,
    RootError,
    UnsupportedLeafError,
    WrongThreadError,
)
from aio_ckpt.format.root_names import LOCK_FILE
from aio_ckpt.memory import arena_lifetimes
from aio_ckpt.memory.arena_lifetimes import ArenaSpec, LifetimeManager
from aio_ckpt.plan import gathering


class Mappings:
    """Every arena that is mapped, and by which thread; ``hold`` keeps whoever maps one until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: list[str] = []
        self.memories: list[weakref.ref[Any]] = []
        self.ahead: list[Future[None]] = []
        self.hold: Gate | None = None
        real, map_ahead = arena_lifetimes._make_arena, LifetimeManager.map_ahead

        def make(*arguments: Any) -> Any:
            self.threads.append(threading.current_thread().name)
            if self.hold is not None:
                self.hold.hold()
            arena = real(*arguments)
            self.memories.append(weakref.ref(arena.memory))
            return arena

        def spied(manager: LifetimeManager, spec: ArenaSpec, *, arenas: int) -> Future[None] | None:
            work = map_ahead(manager, spec, arenas=arenas)
            if work is not None:
                self.ahead.append(work)
            return work

        monkeypatch.setattr(arena_lifetimes, "_make_arena", make)
        monkeypatch.setattr(LifetimeManager, "map_ahead", spied)

    @property
    def alive(self) -> int:
        gc.collect()
        return sum(memory() is not None for memory in self.memories)


@pytest.fixture
def mappings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mappings]:
    found = Mappings(monkeypatch)
    yield found
    if found.hold is not None:
        found.hold.open()


def state(value: float) -> dict[str, Any]:
    return {**uniform(3, 4 * MIB, value), "lr": 1e-3, "name": "x" * 1000}


def test_saves_and_files_that_take_turns_map_their_memory_once(tmp_path: Path, mappings: Mappings) -> None:
    with SyncCheckpointEngine(tmp_path / "root") as engine:
        for _ in range(4):
            engine.save(state(1.0)).result(TIMEOUT)
            engine.save_file(uniform(1, 4 * MIB, 1.0), tmp_path / "weights.pt").result(TIMEOUT)
        assert (len(mappings.threads), mappings.alive) == (2, 2)
    assert mappings.alive == 0


# -- the first save -------------------------------------------------------------------------------


@pytest.mark.parametrize("staging", ["pageable", "shm", "auto"])
def test_the_first_save_behind_prepare_is_a_hit_and_maps_nothing(
    tmp_path: Path, mappings: Mappings, staging: Staging
) -> None:
    given = state(1.0)
    with SyncCheckpointEngine(tmp_path, EngineConfig(staging=staging)) as engine:
        engine.prepare(given).result(TIMEOUT)
        assert len(mappings.threads) == 1
        assert "-io" in mappings.threads[0], "mapped by the engine's threads"
        assert (engine.lifetime.arenas, engine.lifetime.leases, engine.plan_misses) == (1, 0, 1)
        given["w0"].fill_(2.0)  # nothing was captured
        report = engine.save(given).result(TIMEOUT)
        assert report is not None
        assert (report.plan_hit, report.fingerprint_hit) == (True, True)
        assert len(mappings.threads) == 1
        back = engine.read()
        assert isinstance(back, dict)
        assert bool((back["w0"] == 2.0).all())
    assert mappings.alive == 0


async def test_prepare_is_awaited_in_any_loop(tmp_path: Path, mappings: Mappings) -> None:
    async with CheckpointEngine(tmp_path) as engine:
        await engine.prepare(state(1.0))
        assert engine.lifetime.arenas == 1
        await engine.save(state(1.0))
    assert len(mappings.threads) == 1


def test_prepare_keeps_nothing_of_the_state(tmp_path: Path) -> None:
    given = {"w": torch.ones(1000)}
    source = weakref.ref(given["w"])
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.prepare(given).result(TIMEOUT)
        del given
        gc.collect()
        assert source() is None


def test_a_save_that_comes_before_the_memory_waits_for_it_and_maps_none_of_its_own(
    tmp_path: Path, mappings: Mappings
) -> None:
    mappings.hold = Gate()
    with SyncCheckpointEngine(tmp_path) as engine, ThreadPoolExecutor(1) as trainer:
        manager = engine._resources.lifetime
        waits = manager._changed = WatchedCondition()
        prepared = engine.prepare(state(1.0))
        mappings.hold.wait_held()
        saving = trainer.submit(engine.save, state(1.0))
        assert waits.waiting.wait(TIMEOUT)
        assert not prepared.done()
        mappings.hold.open()
        assert saving.result(TIMEOUT).result(TIMEOUT) is not None
        prepared.result(TIMEOUT)
    assert len(mappings.threads) == 1


def test_a_second_call_and_one_beside_a_save_do_nothing(tmp_path: Path, mappings: Mappings) -> None:
    storage = WatchedStorage()
    gate = storage.gate()
    storage.on_write = lambda write: gate.hold()
    with watched_engine(tmp_path, storage) as engine:
        engine.prepare(state(1.0)).result(TIMEOUT)
        assert engine.prepare(state(1.0)).done()
        engine.save(state(1.0))
        gate.wait_held()
        assert engine.prepare(state(2.0)).done()
    assert len(mappings.threads) == 1


def test_another_structure_is_prepared_in_place_of_the_old_one_if_the_budget_holds_one_alone(
    tmp_path: Path, mappings: Mappings
) -> None:
    with SyncCheckpointEngine(tmp_path, EngineConfig(budget_bytes=44 * MIB)) as engine:
        engine.prepare(uniform(2, 4 * MIB, 1.0)).result(TIMEOUT)
        engine.prepare(uniform(5, 8 * MIB, 1.0)).result(TIMEOUT)
        assert mappings.alive == 1
        report = engine.save(uniform(5, 8 * MIB, 1.0)).result(TIMEOUT)
        assert report is not None
        assert report.plan_hit
    assert len(mappings.threads) == 2


def test_gather_buffers_are_made_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "gathered_below_bytes", lambda _: 1 << 20)
    monkeypatch.setattr(gathering, "LEAST_ITEMS", 4)
    given = {f"t{i}": torch.full((100,), float(i)) for i in range(50)}

    def buffers(engine: SyncCheckpointEngine) -> list[int]:
        targets = engine._resources.copy_engines.gathers._targets.values()
        return [target.memory.untyped_storage().data_ptr() for found in targets for target in (found or {}).values()]

    with SyncCheckpointEngine(tmp_path, EngineConfig(gather_bytes=50_000)) as engine:
        engine.prepare(given).result(TIMEOUT)
        made = buffers(engine)
        assert made
        engine.save(given).result(TIMEOUT)
        assert buffers(engine) == made
        back = engine.read()
        assert isinstance(back, dict)
        assert all(torch.equal(back[name], value) for name, value in given.items())


# -- what is refused ------------------------------------------------------------------------------


def test_what_save_refuses_prepare_refuses_before_anything_is_touched(tmp_path: Path, mappings: Mappings) -> None:
    with SyncCheckpointEngine(tmp_path / "root") as engine:
        with pytest.raises(UnsupportedLeafError):
            engine.prepare({"w": torch.ones(3, device="meta")})
        assert not (tmp_path / "root").exists()
    assert mappings.threads == []
    with pytest.raises(EngineClosedError):
        engine.prepare(state(1.0))


def test_prepare_makes_the_engine_the_writer(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine, SyncCheckpointEngine(tmp_path) as other:
        engine.prepare(state(1.0)).result(TIMEOUT)
        assert (tmp_path / LOCK_FILE).exists()
        with pytest.raises(RootError):
            other.prepare(state(1.0))


def test_prepare_on_a_thread_of_the_engine_is_an_error(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:

        async def inside() -> None:
            engine.prepare(state(1.0))

        with pytest.raises(WrongThreadError):
            engine._portal.submit(inside).result(TIMEOUT)


def test_memory_that_cannot_be_had_is_told_by_what_is_returned_and_the_save_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = arena_lifetimes.map_arena
    refusals = [OSError(12, "Cannot allocate memory")]

    def arena(*arguments: Any) -> Any:
        if refusals:
            raise refusals.pop()
        return real(*arguments)

    monkeypatch.setattr(arena_lifetimes, "map_arena", arena)
    with SyncCheckpointEngine(tmp_path) as engine:
        prepared = engine.prepare(state(1.0))
        with pytest.raises(BudgetExceededError, match="lower budget_bytes"):
            prepared.result(TIMEOUT)
        assert engine.lifetime.arenas == 0
        assert engine.save(state(1.0)).result(TIMEOUT) is not None


# -- the end --------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["close", "terminate"])
def test_what_is_being_mapped_when_the_engine_ends_is_released(tmp_path: Path, mappings: Mappings, end: str) -> None:
    mappings.hold = Gate()
    engine = SyncCheckpointEngine(tmp_path)
    prepared = engine.prepare(state(1.0))
    mappings.hold.wait_held()
    with ThreadPoolExecutor(1) as trainer:
        ending = trainer.submit(getattr(engine, end))
        assert not prepared.done()
        mappings.hold.open()
        ending.result(TIMEOUT)
    prepared.result(TIMEOUT)
    assert (len(mappings.memories), mappings.alive, engine.lifetime.arenas) == (1, 0, 0)


def test_what_was_not_begun_when_the_engine_ends_fails_and_nobody_waits_for_ever(
    tmp_path: Path, mappings: Mappings
) -> None:
    engine = SyncCheckpointEngine(tmp_path, EngineConfig(workers=1))
    executor = engine._portal.executor
    gate = Gate()
    busy = [executor.submit(gate.hold) for _ in executor._threads]
    gate.wait_held(len(busy))  # what no thread took up yet would be cancelled by the end
    engine._root_session.become_writer = lambda *_: None  # needs a thread
    prepared = engine.prepare(state(1.0))
    with ThreadPoolExecutor(1) as trainer:
        ending = trainer.submit(engine.close)
        with pytest.raises(EngineClosedError):
            prepared.result(TIMEOUT)
        gate.open()
        ending.result(TIMEOUT)
    assert all(work.result(TIMEOUT) is None for work in busy)
    assert mappings.threads == []


# -- ahead of the next save -----------------------------------------------------------------------


def test_beside_the_first_save_the_arena_of_the_second_is_mapped_in_the_background(
    tmp_path: Path, mappings: Mappings
) -> None:
    storage = WatchedStorage()
    gate = storage.gate()
    storage.on_write = lambda write: gate.hold()
    with watched_engine(tmp_path, storage, max_in_flight=2) as engine:
        engine.save(uniform(3, 4 * MIB, 1.0))
        gate.wait_held()
        (second,) = mappings.ahead
        second.result(TIMEOUT)
        assert [("-io" in thread) for thread in mappings.threads] == [False, True]
        engine.save(uniform(3, 4 * MIB, 2.0))
        assert len(mappings.threads) == 2
        gate.open()
        for value in range(3, 6):
            engine.save(uniform(3, 4 * MIB, float(value))).result(TIMEOUT)
        assert (len(mappings.threads), engine.lifetime.arenas) == (2, 2)
    assert mappings.alive == 0


@pytest.mark.parametrize("settings", [{}, {"max_in_flight": 2, "budget_bytes": 24 * MIB}], ids=["alone", "no room"])
def test_nothing_is_mapped_ahead_that_no_save_may_use(
    tmp_path: Path, mappings: Mappings, settings: dict[str, Any]
) -> None:
    with SyncCheckpointEngine(tmp_path, EngineConfig(**settings)) as engine:
        engine.save(uniform(4, 4 * MIB, 1.0)).result(TIMEOUT)
        assert (mappings.ahead, engine.lifetime.arenas) == ([], 1)
