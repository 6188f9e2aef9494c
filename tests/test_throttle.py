"""The cap on writing: the token bucket, the control of its rate by step times, and the engine that keeps to them."""

from __future__ import annotations

import asyncio
import functools
import random
import signal
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from gated_storage import TIMEOUT, Gate, gated_engine
from hypothesis import given
from hypothesis import strategies as st

from aio_ckpt import EngineConfig, SyncCheckpointEngine
from aio_ckpt.engine import engine as engine_module
from aio_ckpt.errors import ConfigError, SaveCancelledError, StallError
from aio_ckpt.write.rate_limit import StepControl, TokenBucket
from aio_ckpt.write.throttle import WriteThrottle

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
        bucket.advance(now, rate)
        place = bucket.reserve(nbytes)
        if gives_up:
            bucket.leave(place, 0)
            continue
        now += bucket.wait_secs(place, rate)
        bucket.advance(now, rate)
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
    bucket.advance(5.0, 10.0)
    assert bucket.wait_secs(place, 10.0) == 5.0
    assert bucket.wait_secs(place, 50.0) == 1.0
    bucket.advance(5.0, None)
    assert bucket.wait_secs(place, 10.0) == 0.0


# -- the control ----------------------------------------------------------------------------------


def simulate(
    slowing: Callable[[int], float],
    *,
    noise: float = 0.005,
    step_secs: float = 0.1,
    disk: float = 3 * GB,
    state_bytes: float = 8.5 * GB,
    saves: int = 30,
    seed: int = 0,
) -> tuple[list[float], list[float]]:
    """Per save: median step beside it as a share of the baseline, and its seconds.

    At full speed of the disk a step takes ``1 + slowing(save)`` times as long; at half the rate half of that.
    """
    rng, control = random.Random(seed), StepControl()
    shares, durations = [], []
    for save in range(saves):
        for _ in range(100):
            control.free_step(step_secs * (1 + abs(rng.gauss(0, noise))))
        left, steps = state_bytes, list[float]()
        while left > 0:
            rate = min(control.rate or disk, disk)
            secs = step_secs * (1 + abs(rng.gauss(0, noise)) + slowing(save) * rate / disk)
            written = min(left, rate * secs)
            left -= written
            steps.append(secs)
            control.loaded_step(secs, int(written))
        shares.append(statistics.median(steps) / (control.baseline_secs or step_secs))
        durations.append(sum(steps))
    return shares, durations


@pytest.mark.parametrize("slowing", [0.0, 0.01, 0.03, 0.1, 0.3])
@pytest.mark.parametrize("noise", [0.0, 0.005, 0.02])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_median_step_stays_within_two_percent_and_nothing_is_slowed_down_for_nothing(
    slowing: float, noise: float, seed: int
) -> None:
    shares, durations = simulate(lambda _: slowing, noise=noise, seed=seed)
    assert statistics.median(shares[5:]) <= StepControl.target
    # At the rate where a step takes just 2 % more the save would take this long; AIMD gets half of that and more.
    least = 8.5 / 3 * max(1.0, slowing / (StepControl.target - 1))
    assert statistics.median(durations[5:]) <= 2 * least


def test_a_rate_that_was_cut_comes_back_when_steps_are_no_longer_slowed() -> None:
    shares, durations = simulate(lambda save: 0.2 if save < 10 else 0.0)
    assert statistics.median(shares[3:10]) <= StepControl.target
    assert durations[9] > 2 * durations[-1]
    assert durations[-1] == pytest.approx(8.5 / 3, rel=0.1)


@pytest.mark.parametrize("step_secs", [0.002, 0.02, 1.0, 10.0])
def test_short_and_long_steps_are_controlled_too(step_secs: float) -> None:
    shares, _ = simulate(lambda _: 0.1, step_secs=step_secs, saves=60)
    assert statistics.median(shares[40:]) <= StepControl.target


def test_without_a_baseline_nothing_is_slowed_down_and_never_below_the_floor() -> None:
    control = StepControl()
    for _ in range(100):
        control.loaded_step(1.0, 10**9)
    assert control.rate is None
    for _ in range(StepControl.least_baseline_steps):
        control.free_step(0.1)
    for _ in range(1000):
        control.loaded_step(1.0, 10**9)
    assert control.rate == StepControl.floor_bytes_per_sec


def test_steps_that_vary_by_themselves_are_not_taken_for_slowed_ones() -> None:
    rng, control = random.Random(3), StepControl()
    uncapped = 0
    for _ in range(50):
        for _ in range(64):
            control.free_step(0.1 * rng.uniform(1.0, 1.3))
        for _ in range(27):
            control.loaded_step(0.1 * rng.uniform(1.0, 1.3), 3 * 10**8)
            uncapped += control.rate is None or control.rate > GB
    assert uncapped > 0.8 * 50 * 27


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


class Ticks:
    """Step lengths as the test gives them."""

    def __init__(self) -> None:
        self.lengths: list[float] = []

    def tick(self) -> list[float]:
        taken, self.lengths = self.lengths, []
        return taken


def throttle_on(time: VirtualTime, limit: Any, **options: Any) -> WriteThrottle:
    return WriteThrottle(limit, clock=time.clock, sleep=time.sleep, **options)


async def admitted(throttle: WriteThrottle, time: VirtualTime, nbytes: int, *, is_hurried: bool = False) -> float:
    """When a write was let through, by the clock."""
    await throttle.admit(nbytes, is_hurried=is_hurried, on_wait=lambda: None)
    return time.now


async def test_a_fixed_cap_is_kept_and_waiting_is_told_now_and_then() -> None:
    time, told = VirtualTime(), list[float]()
    throttle = throttle_on(time, 100.0)
    for _ in range(4):
        await throttle.admit(50, is_hurried=False, on_wait=lambda: told.append(time.now))
    assert time.now == pytest.approx(1.5)
    assert max(b - a for a, b in zip([0.0, *told], [*told, time.now], strict=False)) <= 0.051


async def test_without_a_cap_nothing_waits_and_no_clock_is_read() -> None:
    throttle = WriteThrottle(None, clock=lambda: pytest.fail("a clock was read"), sleep=anyio.sleep)
    await throttle.admit(1 << 40, is_hurried=False, on_wait=lambda: pytest.fail("it waits"))
    assert throttle.longest_wait_secs(1 << 40) == 0.0


async def test_a_hurried_save_a_preemption_and_the_end_of_the_process_lift_the_cap() -> None:
    time, urgent = VirtualTime(), False
    throttle = throttle_on(time, 1.0, is_urgent=lambda: urgent)
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


async def test_a_write_that_is_given_up_leaves_its_place() -> None:
    time = VirtualTime()
    throttle = throttle_on(time, 100.0)
    await admitted(throttle, time, 100)
    with anyio.move_on_after(0):
        await admitted(throttle, time, 10_000)
    before = time.now
    await admitted(throttle, time, 100)
    assert time.now <= max(1.0, before) + 0.05


def auto_with_cap(time: VirtualTime, ticks: Ticks, **options: Any) -> WriteThrottle:
    """Steps of 0.1 s, slowed to 0.2 s while a save writes 1 GB/s: the cap is half of that."""
    throttle = throttle_on(time, "auto", steps=ticks, **options)
    train(throttle, time, ticks, secs=0.1, steps=20)
    with throttle.drain():
        train(throttle, time, ticks, secs=0.2, steps=1 + StepControl.window_steps, written=2 * 10**8)
    return throttle


def train(
    throttle: WriteThrottle, time: VirtualTime, ticks: Ticks, *, secs: float, steps: int, written: int = 0
) -> None:
    for _ in range(steps):
        time.now += secs
        throttle.wrote(written)
        ticks.lengths.append(secs)
        throttle.guarded_step()


async def test_auto_paces_writes_by_the_steps_that_it_is_told() -> None:
    time, ticks = VirtualTime(), Ticks()
    throttle = auto_with_cap(time, ticks)
    before = time.now
    await admitted(throttle, time, 10**8)
    assert await admitted(throttle, time, 10**8) == pytest.approx(before + 0.2)


async def test_auto_paces_nothing_while_training_stands_still() -> None:
    time, ticks = VirtualTime(), Ticks()
    throttle = auto_with_cap(time, ticks)
    time.now += 10.0
    await admitted(throttle, time, 10**9)
    before = time.now
    assert await admitted(throttle, time, 10**9) == before


async def test_a_step_that_was_partly_beside_a_save_counts_for_neither() -> None:
    time, ticks = VirtualTime(), Ticks()
    throttle = throttle_on(time, "auto", steps=ticks)
    train(throttle, time, ticks, secs=0.1, steps=20)
    for _ in range(50):
        with throttle.drain():
            train(throttle, time, ticks, secs=5.0, steps=1, written=10**9)
        train(throttle, time, ticks, secs=5.0, steps=1)
    await admitted(throttle, time, 10**12)
    before = time.now
    assert await admitted(throttle, time, 1) == before, "nothing is known to slow the steps down"
    with throttle.drain():
        train(throttle, time, ticks, secs=0.2, steps=1 + StepControl.window_steps, written=2 * 10**8)
    await admitted(throttle, time, 10**8)
    before = time.now
    assert await admitted(throttle, time, 10**8) > before, "the baseline is still that of the first steps"


async def test_steps_told_by_hand_take_the_place_of_the_guarded_optimizers() -> None:
    time, ticks = VirtualTime(), Ticks()
    throttle = throttle_on(time, "auto", steps=ticks)
    throttle.step_done()
    ticks.lengths = [7.0]
    throttle.guarded_step()
    assert ticks.lengths == [7.0]


# -- the engine -----------------------------------------------------------------------------------


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> VirtualTime:
    """Engines throttle by this clock."""
    virtual = VirtualTime()
    paced = functools.partial(WriteThrottle, clock=virtual.clock, sleep=virtual.sleep)
    monkeypatch.setattr(engine_module, "WriteThrottle", paced)
    return virtual


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

    monkeypatch.setattr(engine_module, "WriteThrottle", functools.partial(WriteThrottle, sleep=sleep))
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
    """The second chunk may begin after 4 s; nothing may stand still for longer than 2 s."""
    config = EngineConfig(max_write_bytes_per_sec=MIB, stall_timeout_secs=2.0)
    with SyncCheckpointEngine(tmp_path, config) as engine:
        report = engine.save({"w": torch.ones(MIB)}).result(TIMEOUT)
    assert report is not None
    assert report.timings.committed_secs > 4.0


def test_a_write_that_hangs_is_a_stall_under_a_cap_too(tmp_path: Path) -> None:
    config = {"max_write_bytes_per_sec": 1e12, "stall_timeout_secs": 0.5, "on_failure": "log"}
    with gated_engine(tmp_path, **config) as (engine, storage):
        storage.hold("write")
        with pytest.raises(StallError):
            engine.save(STATE).result(TIMEOUT)


def test_steps_of_the_first_guarded_optimizer_are_told_to_the_throttle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = Ticks()
    monkeypatch.setattr(engine_module, "WriteThrottle", functools.partial(WriteThrottle, steps=ticks))
    parameters = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    first, second = (torch.optim.SGD([parameter], lr=0.1) for parameter in parameters)
    with SyncCheckpointEngine(tmp_path, EngineConfig(max_write_bytes_per_sec="auto")) as engine:
        engine.guard(first)
        engine.guard(second)
        ticks.lengths = [1.0]
        second.step()
        assert ticks.lengths == [1.0]
        first.step()
        assert ticks.lengths == []
        ticks.lengths = [1.0]
        engine.step_done()
        assert ticks.lengths == []


async def test_the_async_engine_takes_steps_too(tmp_path: Path) -> None:
    async with engine_module.CheckpointEngine(tmp_path, EngineConfig(max_write_bytes_per_sec="auto")) as engine:
        for _ in range(3):
            engine.step_done()
            await asyncio.sleep(0)
        await engine.save(STATE)


@pytest.mark.parametrize("value", [0, -1, 1024, True, float("nan"), float("inf"), 10**400, "fast", [1], b"auto"])
def test_a_cap_that_cannot_be_kept_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="max_write_bytes_per_sec"):
        EngineConfig(max_write_bytes_per_sec=value)


@pytest.mark.parametrize("value", [None, "auto", MIB, 2.5e9])
def test_caps(value: Any) -> None:
    assert EngineConfig(max_write_bytes_per_sec=value).max_write_bytes_per_sec == value
