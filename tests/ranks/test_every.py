"""``Every`` on real ranks: each gets the same answer to its n-th question, whatever its clock says."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_processes import Ranks, engine_on

from aio_ckpt import Every
from aio_ckpt.errors import PeerFailedError

SECS = 30.0
TIMED = 3
"""Least saves that are to be due by the clock alone."""
STEPS = 400
"""More than pass between two of them."""


def ask_until_timed(rank: int, count: int, root: Path) -> list[int]:
    found: list[int] = []
    with engine_on(root, SECS) as engine:
        both = Every(engine, steps=STEPS, minutes=0.05 / 60)
        other = Every(engine, minutes=1e6)  # a second schedule, whose timer is another
        for step in range(1, 100_000):
            if both.due(step):
                found.append(step)
            assert not other.due(step)
            if sum(due % STEPS != 0 for due in found) >= TIMED and step > STEPS:
                return found
            if rank == step % count:
                time.sleep(0.002)  # ranks are never at quite the same place
    return found


def test_the_clock_of_the_leader_makes_a_save_due_at_the_same_step_on_all_ranks(four: Ranks, tmp_path: Path) -> None:
    first, *others = four.run(ask_until_timed, tmp_path)
    assert others == [first] * 3
    assert sum(due % STEPS != 0 for due in first) >= TIMED
    assert set(range(STEPS, first[-1] + 1, STEPS)) <= set(first)
    assert STEPS in first


def keys_after_periods(rank: int, count: int, root: Path) -> list[int]:
    store, found = dist.distributed_c10d._get_default_store(), []
    with engine_on(root, SECS) as engine:
        every = Every(engine, minutes=0.001 / 60)
        for periods in (2, 10):
            while periods:
                periods -= every.due(1)
            dist.barrier()
            found.append(store.num_keys())
            dist.barrier()
    return found


def test_a_timer_leaves_nothing_in_the_store_however_often_it_is_over(two: Ranks, tmp_path: Path) -> None:
    (early, late), others = two.run(keys_after_periods, tmp_path)
    assert [early, late] == others
    assert late <= early + 2, "heartbeats may have come"


def train_until_preempted(rank: int, count: int, root: Path) -> tuple[list[int], int]:
    with engine_on(root, SECS) as engine:
        engine.on_preemption()
        every, saved = Every(engine, steps=400, minutes=1e6), []
        for step in range(1, 100_000):
            if rank == 3 and step == 20:
                os.kill(os.getpid(), signal.SIGTERM)
            if every.due(step):
                engine.save({"step": step}, step=step).result(SECS)
                saved.append(step)
            if every.preempted:
                return saved, step
            if rank == 2:
                time.sleep(0.001)
    raise AssertionError("the signal was lost")


def test_a_signal_to_one_rank_makes_a_last_save_due_on_all_at_the_same_step(four: Ranks, tmp_path: Path) -> None:
    (saved, ended), *others = four.run(train_until_preempted, tmp_path)
    assert others == [(saved, ended)] * 3
    assert ended >= 20
    assert saved[-1] == ended, "no rank ends without the save that was due"


def wait_for_no_signal(rank: int, count: int, root: Path) -> tuple[list[str], float, list[str]]:
    def watches() -> list[str]:
        return [thread.name for thread in threading.enumerate() if "-flags-" in thread.name]

    engine = engine_on(root, SECS)
    engine.on_preemption()
    every = Every(engine, minutes=1e6)
    assert not every.due(1)
    engine.save({"w": torch.ones(3)}, step=1).result(SECS)
    dist.barrier()
    while not watches():
        os.sched_yield()
    during, began = watches(), time.monotonic()
    engine.close()
    return during, time.monotonic() - began, watches()


def test_one_thread_waits_for_all_signals_and_timers_and_ends_with_its_engine(two: Ranks, tmp_path: Path) -> None:
    for during, secs, after in two.run(wait_for_no_signal, tmp_path):
        assert len(during) == 1
        assert secs < 2.0
        assert not after


def depth_of(poll: Callable[[], object]) -> int:
    """Number of frames in the traceback of the error that a poll raises."""
    with pytest.raises(PeerFailedError) as raised:
        poll()
    return len(traceback.extract_tb(raised.value.__traceback__))


def ask_alone(rank: int, count: int, root: Path) -> str:
    with engine_on(root, 1.0) as engine:
        every = Every(engine, minutes=0.01 / 60)
        if rank == 1:
            every.due(1)
            engine.latest_step()
            return "left"
        try:
            for step in range(1, 100_000):
                every.due(step)
                time.sleep(0.001)
        except PeerFailedError as error:
            depths = {depth_of(functools.partial(every.due, step)) for step in range(100_000, 100_020)}
            return f"rank {error.rank}, {len(depths)} depths"
    return "never told"


def test_a_rank_whose_ranks_are_gone_is_told_and_does_not_go_by_its_own_clock(two: Ranks, tmp_path: Path) -> None:
    assert two.run(ask_alone, tmp_path) == ["rank 1, 1 depths", "left"]
