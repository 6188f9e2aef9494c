"""The cap on writing: the token bucket, and the engine that keeps to it."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import torch
from gated_storage import TIMEOUT, Gate, gated_engine
from hypothesis import given
from hypothesis import strategies as st

from aio_ckpt import EngineConfig, SyncCheckpointEngine
from aio_ckpt.errors import ConfigError, SaveCancelledError, StallError
from aio_ckpt.write import throttle as throttle_module
from aio_ckpt.write.throttle import TokenBucket, WriteThrottle

MIB = 1 << 20
GB = 1e9
STATE = {f"w{i}": torch.arange(MIB, dtype=torch.float32) + i for i in range(8)}
"""32 MiB in chunks of 4 MiB."""


# -- the bucket -----------------------------------------------------------------------------------


@given(
    rate=st.floats(1.0, 1e9),
    arrivals=st.lists(st.tuples(st.floats(0, 5), st.integers(1, 10_000_000), st.booleans()), max_size=30),
)
def test_in_no_span_of_time_does_more_begin_than_the_rate_and_one_write(
    rate: float, arrivals: list[tuple[float, int, bool]]
) -> None:
    """Whatever comes when, in bursts or after idle time, and whoever gives up: no credit is saved up, none is lost."""
    bucket, now, begun = TokenBucket(), 0.0, list[tuple[float, int]]()
    for gap, nbytes, gives_up in arrivals:
        now += gap
        bucket.pay(now, rate)
        place = bucket.reserve(nbytes)
        if gives_up:
            bucket.leave(place, 0)
            continue
        now += bucket.wait_secs(place, rate)
        bucket.pay(now, rate)
        assert bucket.wait_secs(place, rate) < 1e-6 + 1e-6 * now
        bucket.leave(place, nbytes)
        begun.append((now, nbytes))
    for i, (first_at, _) in enumerate(begun):
        total = 0
        for at, nbytes in begun[i:]:
            assert total <= rate * (at - first_at) * (1 + 1e-6) + 2, "before this one: paid for"
            total += nbytes


def test_writes_begin_in_the_order_in_which_they_asked_and_one_given_up_costs_the_next_nothing() -> None:
    bucket = TokenBucket()
    places = [bucket.reserve(100) for _ in range(3)]
    assert [bucket.wait_secs(place, 10.0) for place in places] == [0.0, 10.0, 20.0]
    bucket.leave(places[0], 100)
    for place in places[1:]:
        bucket.leave(place, 0)
    assert bucket.wait_secs(bucket.reserve(100), 10.0) == 10.0


def test_a_new_rate_counts_at_once() -> None:
    bucket = TokenBucket()
    bucket.leave(bucket.reserve(100), 100)
    place = bucket.reserve(100)
    bucket.pay(5.0, 10.0)
    assert bucket.wait_secs(place, 10.0) == 5.0
    assert bucket.wait_secs(place, 50.0) == 1.0
    bucket.pay(5.0, None)
    assert bucket.wait_secs(place, 10.0) == 0.0


# -- the throttle, on a clock of its own ----------------------------------------------------------


class VirtualTime:
    """A clock that only a sleep moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def clock(self) -> float:
        return self.now

    async def sleep(self, secs: float) -> None:
        self.slept.append(secs)
        self.now += secs
        await anyio.sleep(0)


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    """Throttles keep to this clock."""
    virtual = VirtualTime()
    monkeypatch.setattr(throttle_module, "time", SimpleNamespace(monotonic=virtual.clock))
    monkeypatch.setattr(throttle_module, "anyio", SimpleNamespace(sleep=virtual.sleep))
    return virtual


async def admitted(throttle: WriteThrottle, time: VirtualTime, nbytes: int, *, is_hurried: bool = False) -> float:
    """When a write was let through, by the clock."""
    await throttle.admit(nbytes, is_hurried=is_hurried, on_wait=lambda: None)
    return time.now


async def test_a_fixed_cap_is_kept_and_waiting_is_told_now_and_then(time: VirtualTime) -> None:
    told = list[float]()
    throttle = WriteThrottle(100.0)
    for _ in range(4):
        await throttle.admit(50, is_hurried=False, on_wait=lambda: told.append(time.now))
    assert time.now == pytest.approx(1.5)
    assert max(b - a for a, b in zip([0.0, *told], [*told, time.now], strict=False)) <= 0.051


async def test_without_a_cap_nothing_waits_and_no_clock_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throttle_module, "time", None)
    throttle = WriteThrottle(None)
    await throttle.admit(1 << 40, is_hurried=False, on_wait=lambda: pytest.fail("it waits"))
    assert throttle.longest_wait_secs(1 << 40) == 0.0


async def test_a_hurried_save_a_preemption_and_the_end_of_the_process_lift_the_cap(time: VirtualTime) -> None:
    urgent = False
    throttle = WriteThrottle(1.0, is_urgent=lambda: urgent)
    await admitted(throttle, time, 1000)
    assert await admitted(throttle, time, 1000, is_hurried=True) == 0.0

    async with anyio.create_task_group() as group:
        group.start_soon(admitted, throttle, time, 10)
        await anyio.sleep(0)
        urgent = True
    assert time.now < 1.0, "one that waits already hears of it"
    urgent = False
    await admitted(throttle, time, 1000)
    throttle.lift()
    before = time.now
    assert await admitted(throttle, time, 1000) == before


async def test_a_write_that_is_given_up_leaves_its_place(time: VirtualTime) -> None:
    throttle = WriteThrottle(100.0)
    await admitted(throttle, time, 100)
    with anyio.move_on_after(0):
        await admitted(throttle, time, 10_000)
    before = time.now
    await admitted(throttle, time, 100)
    assert time.now <= max(1.0, before) + 0.05


# -- the engine -----------------------------------------------------------------------------------


def test_an_engine_keeps_to_its_cap_with_one_writer_and_with_many(tmp_path: Path, time: VirtualTime) -> None:
    for workers in (1, 4):
        begun: list[float] = []
        before = time.now
        config = {"workers": workers, "max_write_bytes_per_sec": 4 * MIB}
        with gated_engine(tmp_path / str(workers), **config) as (engine, storage):
            run = storage.run

            async def watched(call: Any, act: Any, run: Any = run, begun: list[float] = begun) -> Any:
                begun.extend([time.now] if call.name == "write" else [])
                return await run(call, act)

            storage.run = watched  # type: ignore[method-assign]
            report = engine.save(STATE).result(TIMEOUT)
        assert report is not None
        assert len(begun) == 9
        for i, at in enumerate(sorted(begun)):
            assert at - before >= i * 1.0 - 1e-6, "chunk i begins when the i before it, 4 MiB each, are paid for"
        assert time.now - before == pytest.approx(8.0, abs=0.5)


def test_a_deadline_lifts_the_cap(tmp_path: Path, time: VirtualTime) -> None:
    with SyncCheckpointEngine(tmp_path, EngineConfig(max_write_bytes_per_sec=MIB)) as engine:
        engine.save(STATE, deadline_secs=TIMEOUT).result(TIMEOUT)
    assert time.slept == []


def test_a_preemption_lifts_the_cap(tmp_path: Path, time: VirtualTime) -> None:
    with SyncCheckpointEngine(tmp_path, EngineConfig(max_write_bytes_per_sec=MIB)) as engine:
        engine.on_preemption([signal.SIGUSR1])
        signal.raise_signal(signal.SIGUSR1)
        engine.save(STATE).result(TIMEOUT)
    assert time.slept == []


def held_throttle(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """Writes that wait for the cap wait at this gate."""
    gate = Gate()

    async def sleep(secs: float) -> None:
        await gate.wait()

    monkeypatch.setattr(throttle_module, "anyio", SimpleNamespace(sleep=sleep))
    return gate


def test_a_save_that_waits_for_the_cap_is_cancelled_at_once_and_the_next_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = held_throttle(monkeypatch)
    with SyncCheckpointEngine(tmp_path, EngineConfig(max_write_bytes_per_sec=MIB)) as engine:
        ticket = engine.save(STATE)
        gate.wait_reached()
        assert ticket.cancel()
        with pytest.raises(SaveCancelledError):
            ticket.result(TIMEOUT)
        assert engine.steps() == []
        assert engine.save(STATE, deadline_secs=TIMEOUT).result(TIMEOUT) is not None


def test_waiting_for_the_cap_is_no_stall(tmp_path: Path) -> None:
    """The second chunk may begin after 2 s; nothing may stand still for longer than 1 s."""
    config = EngineConfig(max_write_bytes_per_sec=2 * MIB, stall_timeout_secs=1.0)
    with SyncCheckpointEngine(tmp_path, config) as engine:
        report = engine.save({"w": torch.ones(MIB)}).result(TIMEOUT)
    assert report is not None
    assert report.timings.committed_secs > 2.0


def test_a_write_that_hangs_under_a_cap_is_a_stall(tmp_path: Path) -> None:
    config = {"max_write_bytes_per_sec": 1e12, "stall_timeout_secs": 0.5, "on_failure": "log"}
    with gated_engine(tmp_path, **config) as (engine, storage):
        storage.hold("write")
        with pytest.raises(StallError):
            engine.save(STATE).result(TIMEOUT)


@pytest.mark.parametrize("value", [0, -1, 1024, True, float("nan"), float("inf"), 10**400, "fast", "auto", [1]])
def test_a_cap_that_cannot_be_kept_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="max_write_bytes_per_sec"):
        EngineConfig(max_write_bytes_per_sec=value)


@pytest.mark.parametrize("value", [None, MIB, 2.5e9])
def test_caps(value: Any) -> None:
    assert EngineConfig(max_write_bytes_per_sec=value).max_write_bytes_per_sec == value
