"""What steers a trainer is the same on every rank at the same call (S10): skips, failures, preemption, steps."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import Ranks

from aio_ckpt import EngineConfig, PerRank, SyncCheckpointEngine
from aio_ckpt.errors import AioCkptError, BusyError
from tests.ranks.test_failing import acting_engine, no_space

SECS = 30.0
SAVES = 100


def state_at(rank: int, step: int) -> dict[str, Any]:
    return {"w": torch.full((500,), float(step)), "rng": PerRank(torch.tensor([rank, step])), "step": step}


def train(step: int) -> None:
    """A step whose collective finds out whether all ranks are at the same one."""
    seen = torch.tensor([step, -step])
    dist.all_reduce(seen, op=dist.ReduceOp.MAX)
    assert seen.tolist() == [step, -step]


# -- (a) ---------------------------------------------------------------------------------------------


def save_when_busy(rank: int, count: int, root: Path, when_busy: str) -> list[str]:
    found = []
    with acting_engine(root, SECS, when_busy=when_busy) as (engine, storage):
        if rank == 1:
            storage.slow("sync", secs=0.03)
        for step in range(1, SAVES + 1):
            train(step)
            try:
                ticket = engine.save(state_at(rank, step), step=step)
            except BusyError:
                found.append("busy")
                continue
            found.append("skipped" if ticket.skipped else "saved")
            if found[-1] == "saved":
                train(-step)  # a branch that only some calls take
        engine.close_blocking()
    return found


@pytest.mark.parametrize(("when_busy", "word"), [("skip", "skipped"), ("raise", "busy")])
def test_a_slow_disk_on_one_rank_skips_or_refuses_the_same_calls_on_all(
    two: Ranks, tmp_path: Path, when_busy: str, word: str
) -> None:
    one, other = two.run(save_when_busy, tmp_path, when_busy)
    assert one == other
    assert one.count(word) > 0
    assert one.count("saved") > 1
    committed = {int(path.name.removeprefix("step_")) for path in tmp_path.iterdir() if path.name.startswith("step_")}
    assert committed == {step for step, what in enumerate(one, 1) if what == "saved"}


# -- (b) ---------------------------------------------------------------------------------------------


def train_until_preempted(rank: int, count: int, root: Path, signalled: int, at: int) -> int:
    with SyncCheckpointEngine(root, EngineConfig(stall_timeout_secs=SECS, budget_bytes=64 << 20)) as engine:
        engine.on_preemption()
        for step in range(1, 2000):
            train(step)
            if rank == signalled and step == at:
                os.kill(os.getpid(), signal.SIGTERM)
            if engine.preempted:
                engine.save(state_at(rank, step), step=step, deadline_secs=SECS).result(SECS)
                assert engine.preempted
                return step
            if rank == 2:
                time.sleep(0.001)  # ranks are never at quite the same place
    return -1


@pytest.mark.parametrize("signalled", [0, 3])
def test_a_signal_to_one_of_four_ranks_ends_all_at_the_same_step(four: Ranks, tmp_path: Path, signalled: int) -> None:
    steps = four.run(train_until_preempted, tmp_path, signalled, 20)
    assert len(set(steps)) == 1
    assert steps[0] >= 20
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("step_")] == [f"step_{steps[0]:09d}"]


# -- (c) ---------------------------------------------------------------------------------------------


def go_on_after_failures(rank: int, count: int, root: Path, in_flight: int) -> list[tuple[int, bool]]:
    found = []
    with acting_engine(root, SECS, on_failure="log", max_in_flight=in_flight) as (engine, storage):
        for step in range(1, 13):
            train(step)
            if rank == 1 and step in (3, 7):
                storage.at, storage.act = ("write_file", "aio_ckpt.1.bin"), no_space
            ticket = engine.save(state_at(rank, step))
            found.append((ticket.step, ticket.skipped))
            if rank == 0:
                time.sleep(0.01)
        engine.close_blocking()
    return found


@pytest.mark.parametrize("in_flight", [1, 2])
def test_failures_that_are_logged_leave_the_ranks_at_the_same_steps(two: Ranks, tmp_path: Path, in_flight: int) -> None:
    one, other = two.run(go_on_after_failures, tmp_path, in_flight)
    assert one == other
    committed = [path.name for path in tmp_path.iterdir() if path.name.startswith("step_")]
    assert len(committed) >= 12 - 2 * in_flight


def raise_what_nobody_awaited(rank: int, count: int, root: Path, in_flight: int) -> list[str]:
    found = []
    with acting_engine(root, SECS, max_in_flight=in_flight) as (engine, storage):
        for step in range(1, 9):
            train(step)
            if rank == 1 and step == 3:
                storage.at, storage.act = ("write_file", "aio_ckpt.1.bin"), no_space
            try:
                engine.save(state_at(rank, step), step=step)
            except (AioCkptError, OSError) as error:
                found.append("raised" if "No space" in str(error) else f"raised {error}")
            else:
                found.append("saved")
            if rank == 0:
                time.sleep(0.05)  # one rank knows what became of its saves sooner than the other
        engine.close_blocking()
    return found


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_failure_that_nobody_awaited_is_raised_by_the_same_call_on_all(
    two: Ranks, tmp_path: Path, in_flight: int
) -> None:
    one, other = two.run(raise_what_nobody_awaited, tmp_path, in_flight)
    assert one == other
    assert sorted(set(one)) == ["raised", "saved"]
    assert one.count("raised") == 1


# -- (d) ---------------------------------------------------------------------------------------------


def save_without_steps(rank: int, count: int, root: Path) -> list[int]:
    with SyncCheckpointEngine(root, EngineConfig(stall_timeout_secs=SECS, budget_bytes=64 << 20)) as engine:
        found = []
        for number in range(4):
            if rank == number % 2:
                time.sleep(0.1)
            ticket = engine.save(state_at(rank, number))
            ticket.result(SECS)
            found.append(ticket.step)
        assert engine.rollback(found[1]) == found[:1:-1]
        ticket = engine.save(state_at(rank, 9))
        ticket.result(SECS)
        found.append(ticket.step)
        dist.barrier()
        assert engine.steps()[-3:] == [found[0], found[1], found[4]]
        dist.barrier()
    return found


def test_steps_that_nobody_gave_are_the_same_on_all_ranks(two: Ranks, tmp_path: Path) -> None:
    assert two.run(save_without_steps, tmp_path) == [[1, 2, 3, 4, 3]] * 2
    assert two.run(save_without_steps, tmp_path) == [[4, 5, 6, 7, 6]] * 2


# -- retention -----------------------------------------------------------------------------------------


def save_five(rank: int, count: int, root: Path, keep_last: tuple[int | None, int | None]) -> list[str]:
    """What this rank renamed under the root."""
    with acting_engine(root, SECS, keep_last=keep_last[rank]) as (engine, storage):
        for step in range(1, 6):
            engine.save(state_at(rank, step), step=step).result(SECS)
        engine.close_blocking()  # behind the last deletion
        return [call.path.name for call in storage.begun if call.name == "rename"]


@pytest.mark.parametrize(("keep_last", "kept"), [((2, 2), [4, 5]), ((None, 1), [1, 2, 3, 4, 5]), ((1, None), [5])])
def test_the_leader_alone_deletes_what_expires_by_its_own_settings(
    two: Ranks, tmp_path: Path, keep_last: tuple[int | None, int | None], kept: list[int]
) -> None:
    by_leader, by_other = two.run(save_five, tmp_path, keep_last)
    assert len(by_leader) == 5 + 5 - len(kept)
    assert by_other == []
    assert sorted(path.name for path in tmp_path.glob("step_*")) == [f"step_{step:09d}" for step in kept]
    assert not list(tmp_path.glob(".trash*"))
