"""Agreed work on real ranks: it ends, and fails, at the same poll on all of them."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist
from log_lines import early_lines
from rank_processes import Ranks, engine_on

from aio_ckpt import SyncCheckpointEngine
from aio_ckpt.errors import EngineClosedError, PeerFailedError, WriteError
from aio_ckpt.ranks.failure import Failure
from aio_ckpt.ranks.polls import AgreedWork
from aio_ckpt.runtime.portal import Executor
from aio_ckpt.storage.local import Storage

SECS = 30.0
FULL = WriteError(28, "full", "/disk")


class Leader:
    """What the leader is called with, and what it raises."""

    def __init__(self, error: Exception | None = None) -> None:
        self.found: list[Failure | None] = []
        self.error = error

    async def __call__(self, executor: Executor, storage: Storage, failure: Failure | None) -> None:
        self.found.append(failure)
        if self.error is not None:
            raise self.error


def polls_until_done(agreed: AgreedWork, work: Future[None], rank: int, error: Exception | None) -> int:
    """The first poll that returns True. One rank ends its work at its fifth poll, the other at its ninth."""
    for poll in range(1, 1_000_000):
        if poll == (5, 9)[rank]:
            work.set_result(None) if error is None else work.set_exception(error)
        if agreed.is_done(blocking=False):
            return poll
    raise AssertionError("never done")


def ended_together(rank: int, count: int, root: Path) -> list[object]:
    told: list[object] = []
    with engine_on(root, SECS) as engine:
        for case, error in enumerate((None, FULL if rank == 1 else None)):
            work: Future[None] = Future()
            leader = Leader()
            agreed = engine.agree([work], on_leader=leader, what=f"case {case}")
            told += [polls_until_done(agreed, work, rank, error), agreed.failure()]
            assert leader.found == [agreed.failure()] * (rank == 0)
            dist.barrier()
        done: Future[None] = Future()
        done.set_result(None)
        refused = engine.agree([done], on_leader=Leader(FULL), what="the leader fails")
        assert refused.is_done(blocking=True)
        told.append(refused.failure())
        assert (refused.leaders_error is FULL) == (rank == 0)
    return told


def test_work_ends_at_the_same_poll_and_with_the_same_failure_on_all_ranks(tmp_path: Path, two: Ranks) -> None:
    first, second = two.run(ended_together, tmp_path / "root")
    assert first == second
    assert first[1] is None
    assert first[3] == Failure(1, "write", f"WriteError: {FULL}")
    assert first[4] == Failure(0, "write", f"WriteError: {FULL}")


def left_alone(rank: int, count: int, root: Path) -> None:
    with engine_on(root, 1.0) as engine:
        if rank == 1:
            engine.latest_step()
            return
        done: Future[None] = Future()
        done.set_result(None)
        agreed = engine.agree([done], on_leader=Leader(), what="nobody else comes")
        assert agreed.is_done(blocking=True)
        with pytest.raises(PeerFailedError, match="rank 1"):
            agreed.failure()


def test_a_rank_that_takes_no_part_is_named(tmp_path: Path, two: Ranks) -> None:
    two.run(left_alone, tmp_path / "root")


def test_closing_waits_for_the_agreement_and_its_leader(tmp_path: Path) -> None:
    leader, work = Leader(), Future[None]()
    with SyncCheckpointEngine(tmp_path / "root") as engine:
        agreed = engine.agree([work], on_leader=leader, what="files")
        work.set_result(None)
    assert leader.found == [None]
    assert agreed.failure() is None
    assert agreed.is_done(blocking=False) or agreed.is_done(blocking=False)


def test_a_close_that_waits_for_the_agreement_names_it(tmp_path: Path) -> None:
    work = Future[None]()
    with ThreadPoolExecutor(1) as pool, SyncCheckpointEngine(tmp_path / "root") as engine, early_lines() as lines:
        engine.agree([work], on_leader=Leader(), what="files")
        closing = pool.submit(engine.close)
        lines.wait_for(r"close\(\) has waited \d+ s for other ranks: agreement 1 on files", 2)
        work.set_result(None)
        closing.result(SECS)


def test_an_exit_that_gives_the_agreement_up_names_it(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path / "root") as engine, early_lines() as lines:
        engine.agree([Future()], on_leader=Leader(), what="files")
        engine._shutdown.drain_secs = 0.0
        engine._shutdown.drain()
    assert "interpreter exit: other ranks did not end in drain_timeout_secs: agreement 1 on files" in lines.messages


def test_work_of_an_engine_that_was_terminated_has_no_outcome(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path / "root") as engine:
        agreed = engine.agree([Future()], on_leader=Leader(), what="files")
        engine.terminate()
        assert agreed.is_done(blocking=True)
        with pytest.raises(EngineClosedError):
            agreed.failure()


def test_a_blocking_poll_names_what_it_waits_for(tmp_path: Path) -> None:
    work = Future[None]()
    with ThreadPoolExecutor(1) as pool, SyncCheckpointEngine(tmp_path / "root") as engine, early_lines() as lines:
        agreed = engine.agree([work], on_leader=Leader(), what="files")
        polling = pool.submit(agreed.is_done, blocking=True)
        lines.wait_for(r"agreement 1 on files has waited \d+ s for 1 of 1 works of this rank", 2)
        work.set_result(None)
        assert polling.result(SECS)
