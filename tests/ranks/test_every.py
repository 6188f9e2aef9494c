"""``Every`` on real ranks: each gets the same answer to its n-th question, whatever its clock says."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from rank_processes import Ranks, engine_on

from aio_ckpt import Every
from aio_ckpt.errors import PeerFailedError

SECS = 30.0
TIMED = 3
"""Saves that are to be due by the clock alone."""


def ask_until_timed(rank: int, count: int, root: Path) -> list[int]:
    found: list[int] = []
    with engine_on(root, SECS) as engine:
        both = Every(engine, steps=100, minutes=0.05 / 60)
        other = Every(engine, minutes=1e6)  # a second schedule, whose timer is another
        for step in range(1, 100_000):
            if both.due(step):
                found.append(step)
            assert not other.due(step)
            if sum(due % 100 != 0 for due in found) == TIMED:
                return found
            if rank == step % count:
                time.sleep(0.002)  # ranks are never at quite the same place
    return found


def test_the_clock_of_the_leader_makes_a_save_due_at_the_same_step_on_all_ranks(four: Ranks, tmp_path: Path) -> None:
    first, *others = four.run(ask_until_timed, tmp_path)
    assert others == [first] * 3
    assert sum(due % 100 != 0 for due in first) == TIMED
    assert set(range(100, first[-1] + 1, 100)) <= set(first)


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
            return f"rank {error.rank}"
    return "never told"


def test_a_rank_whose_ranks_are_gone_is_told_and_does_not_go_by_its_own_clock(two: Ranks, tmp_path: Path) -> None:
    assert two.run(ask_alone, tmp_path) == ["rank 1", "left"]
