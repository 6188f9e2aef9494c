"""A rank that lets the others wait is named, with the call that it misses and where it was last seen."""

from __future__ import annotations

import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist
from builders import state_of, weights
from log_lines import LogLines, early_lines
from rank_engines import acting_engine
from rank_processes import Ranks, engine_on, ranks
from slow import slow
from waits import until

from aio_ckpt.ranks.missing_ranks import REMEDY

SECS = 30.0
FIRST_SECS = 0.2
"""Lines come at 0.2 s, 0.4 s and so on; heartbeats of a call from 0.1 s on. Lines say "0 s"."""


Told = tuple[str, int | None, int, str]


def told(lines: LogLines, *words: str) -> set[Told]:
    """Level, step, rank and message of the records about ``words``, without the durations and what to do."""
    return {
        (record.levelname, getattr(record, "step", None), record.rank, re.sub(r"\b\d+ s\b", "N s", message))
        for record in lines.records
        if any(word in (message := record.getMessage().removesuffix(REMEDY)) for word in words)
    }


# -- a rank misses a save ---------------------------------------------------------------------------


def come_late(rank: int, count: int, root: Path, late: tuple[int, ...], call: str) -> set[Told]:
    """All ranks save step 199, or load it. Then the ``late`` ones train, while the others save step 200."""
    with early_lines(FIRST_SECS) as lines, engine_on(root, SECS) as engine:
        engine.save(state_of(199), step=199).result(SECS)
        if call == "load":
            engine.load(state_of(0))
        dist.barrier()
        lines.records.clear()
        if rank in late:
            dist.barrier()  # stands for training that does not come to an end
            engine.save(state_of(200), step=200).result(SECS)
        else:
            ticket = engine.save(state_of(200), step=200)
            lines.wait_for(".*(not called|for other ranks).*", 2)
            dist.barrier()
            ticket.result(SECS)
        return told(lines, "not called", "for other ranks")


@pytest.mark.parametrize(("call", "seen"), [("load", "load()"), ("save", "save() of step 199")])
@pytest.mark.parametrize("late", [slow(0), 1])
def test_a_rank_that_does_not_call_save_is_named_with_the_call_where_it_was_last_seen(
    two: Ranks, tmp_path: Path, late: int, call: str, seen: str
) -> None:
    found = two.run(come_late, tmp_path, (late,), call)
    line = f"rank {late} has not called save() of step 200 for N s; it was last seen in {seen}"
    assert found[1 - late] == {("WARNING", 200, 1 - late, line)}


def test_the_leader_names_the_missing_ranks_and_the_others_name_the_leader(four: Ranks, tmp_path: Path) -> None:
    found = four.run(come_late, tmp_path, (2, 3), "save")
    missing = "ranks 2, 3 have not called save() of step 200 for N s; each was last seen in save() of step 199"
    waits = "save() of step 200 has waited N s for other ranks: rank 0 logs which"
    assert ("WARNING", 200, 0, missing) in found[0]
    assert ("WARNING", 200, 1, waits) in found[1]


# -- a rank is in another call ------------------------------------------------------------------------


def cross(rank: int, count: int, root: Path) -> set[Told]:
    """One rank saves step 2, the other loads; then each makes the call of the other."""
    with early_lines(FIRST_SECS) as lines, ThreadPoolExecutor(1) as pool, engine_on(root, SECS) as engine:
        engine.save(state_of(1), step=1).result(SECS)
        dist.barrier()
        if rank == 0:
            ticket = engine.save(state_of(2))
            lines.wait_for(".*waits in load.*")
            dist.barrier()
            engine.load(state_of(0))
            ticket.result(SECS)
        else:
            loading = pool.submit(engine.load, state_of(0))
            lines.wait_for(".*waits in save.*")
            dist.barrier()
            engine.save(state_of(2)).result(SECS)
            loading.result(SECS)
        return told(lines, "not called")


def test_a_rank_that_waits_in_another_call_is_named_with_that_call(two: Ranks, tmp_path: Path) -> None:
    saving, loading = two.run(cross, tmp_path)
    assert ("WARNING", 2, 0, "rank 1 has not called save() of step 2 for N s; it waits in load()") in saving
    assert ("WARNING", None, 1, "rank 0 has not called load() for N s; it waits in save() of step 2") in loading


# -- a rank is in the call, and slow ------------------------------------------------------------------


def hang_once(rank: int, count: int, root: Path, slow: int) -> set[Told]:
    """The disk of one rank hangs while step 2 is saved."""
    with early_lines(FIRST_SECS) as lines, acting_engine(root, SECS) as (engine, storage):
        engine.save(state_of(1), step=1).result(SECS)
        dist.barrier()
        lines.records.clear()
        gate = storage.hold("sync", "*.distcp") if rank == slow else None
        ticket = engine.save(state_of(2), step=2)
        lines.wait_for(".*(made no progress|not finished).*", 2)
        dist.barrier()
        if gate is not None:
            gate.open()
        ticket.result(SECS)
        return told(lines, "made no progress", "not finished")


@pytest.mark.parametrize("slow", [0, 1])
def test_a_rank_whose_disk_hangs_is_named_by_the_others_and_says_why(two: Ranks, tmp_path: Path, slow: int) -> None:
    found = two.run(hang_once, tmp_path, slow)
    why = f"the save of step 2 on rank {slow} has made no progress for N s: it is making its data durable"
    assert ("WARNING", 2, slow, f"{why} under {tmp_path}") in found[slow]
    line = f"rank {slow} has not finished the part of save() of step 2 for N s"
    assert ("WARNING", 2, 1 - slow, line) in found[1 - slow]


# -- the engines meet ---------------------------------------------------------------------------------


def open_late(rank: int, count: int, root: Path, late: int) -> set[Told]:
    """One rank opens its engine later than the other."""
    with early_lines(FIRST_SECS) as lines:
        if rank == late:
            dist.barrier()
        with engine_on(root, SECS) as engine:
            if rank != late:
                lines.wait_for(".*opened.*", 2)
                dist.barrier()
            engine.save(state_of(1)).result(SECS)
        return told(lines, "opened")


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_opens_no_engine_is_named_with_the_root(two: Ranks, tmp_path: Path, late: int) -> None:
    found = two.run(open_late, tmp_path, late)
    line = f"rank {late} has not opened an engine on {tmp_path} for N s"
    assert found[1 - late] == {("WARNING", None, 1 - late, line)}


# -- a rank is dead -----------------------------------------------------------------------------------


def save_until_killed(rank: int, count: int, root: Path) -> set[Told]:
    with early_lines(FIRST_SECS) as lines, engine_on(root, 1.0) as engine:
        engine.save(state_of(1), step=1).result(SECS)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        engine.save(state_of(2), step=2).exception(SECS)
        return told(lines, "not called")


def test_a_dead_rank_is_named_with_its_last_call(tmp_path: Path) -> None:
    with ranks(2) as running:
        for rank in range(2):
            running.start(rank, save_until_killed, tmp_path)
        running.wait_until_dead(1)
        line = "rank 1 has not called save() of step 2 for N s; it was last seen in save() of step 1"
        assert ("WARNING", 2, 0, line) in running.finish(0)


def save_once_told(rank: int, count: int, root: Path) -> int:
    """Rank 1 comes later."""
    with engine_on(root / "run", 6.0) as engine:
        engine.save(weights(1), step=1).result(SECS)
        (root / f"saves {rank}").touch()
        if rank:
            until(lambda: (root / "go on").exists())
        return engine.save(weights(2), step=2).result(SECS).step


@pytest.mark.slow
def test_ranks_that_were_suspended_for_longer_than_the_limit_still_wait_for_each_other(tmp_path: Path) -> None:
    with ranks(2) as two:
        for rank in range(2):
            two.start(rank, save_once_told, tmp_path)
        two.wait_until(lambda: (tmp_path / "saves 0").exists() and (tmp_path / "saves 1").exists())
        time.sleep(0.5)  # rank 0 waits for rank 1
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for rank in range(2):
                two.signal(rank, number)
            time.sleep(9 if number == signal.SIGSTOP else 0.5)
        (tmp_path / "go on").touch()
        assert [two.finish(rank) for rank in range(2)] == [2, 2]
