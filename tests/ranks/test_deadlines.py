"""``deadline_secs`` on a rank that does not lead: the save ends for its caller in time, and no rank commits another."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_processes import Ranks, error_of

from aio_ckpt import SaveTicket
from aio_ckpt.errors import AioCkptError, PeerFailedError, StallError
from tests.ranks.test_failing import acting_engine, told
from tests.ranks.test_leaving import held_engine

SECS = 24.0
DEADLINE_SECS = 1.0
LATE_SECS = 3.0
"""How much later a save may end on a busy machine; all that it could wait for is far longer."""


def state_at(step: int, size: int = 300) -> dict[str, Any]:
    return {"w": torch.full((size,), float(step)), "step": step}


def kind_of(error: BaseException | None) -> str:
    return type(error).__name__


def stop_for_a_while() -> None:
    subprocess.Popen(["sh", "-c", f"sleep {2 * (DEADLINE_SECS + LATE_SECS)}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


# -- the leader is stopped or slow --------------------------------------------------------------------


def stop_the_leader(rank: int, count: int, root: Path, size: int) -> tuple[str, bool, float, list[int], int]:
    """``size``: of the state of the save in question; another one than before is planned anew."""
    with acting_engine(root, SECS, on_failure="log") as (engine, storage):
        engine.save(state_at(1), step=1).result(SECS)
        dist.barrier()
        if rank == 0:
            storage.at, storage.act = ("write", "*"), stop_for_a_while
        began = time.monotonic()
        error = engine.save(state_at(2, size), step=2, deadline_secs=DEADLINE_SECS).exception(SECS)
        secs = time.monotonic() - began
        dist.barrier()
        steps = engine.steps()
        dist.barrier()
        ticket = engine.save(state_at(3))
        ticket.result(SECS)
        dist.barrier()
    return kind_of(error), getattr(error, "in_doubt", False), secs, steps, ticket.step


@pytest.mark.parametrize("size", [300, 400])
def test_a_save_ends_by_its_deadline_while_the_leader_stands_still(two: Ranks, tmp_path: Path, size: int) -> None:
    leader, other = two.run(stop_the_leader, tmp_path, size)
    assert leader[0] == "StallError"
    assert other[0] in ("StallError", "PeerFailedError")
    assert other[1], "all was written: the leader may have committed, for all that this rank knows"
    assert other[2] < DEADLINE_SECS + LATE_SECS
    assert leader[3] == other[3] == [1]
    assert leader[4] == other[4]


def ended(rank: int, ticket: SaveTicket, began: float) -> tuple[BaseException | None, float]:
    """What the save of a rank ended with and when; rank 0 goes on once that of rank 1 has ended, and then both do."""
    error = ticket.exception(SECS)
    secs = time.monotonic() - began
    if rank == 1:
        dist.barrier()
    dist.barrier()
    return error, secs


def hold_the_shares(rank: int, count: int, root: Path) -> tuple[str, bool, float]:
    with held_engine(root, SECS, on_failure="log") as (engine, coordinator, _):
        engine.save(state_at(1), step=1).result(SECS)
        dist.barrier()
        if rank == 0:
            coordinator.topic = "save 2"
        began = time.monotonic()
        error = error_of(lambda: engine.save(state_at(2, 400), step=2, deadline_secs=DEADLINE_SECS), SECS)
        secs = time.monotonic() - began
        dist.barrier()
        coordinator.gate.open()
        dist.barrier()
        assert engine.steps() == [1]
        engine.save(state_at(3), step=3).result(SECS)
        dist.barrier()
    return kind_of(error), getattr(error, "in_doubt", False), secs


def test_a_save_ends_by_its_deadline_while_the_leader_assigns_shares(two: Ranks, tmp_path: Path) -> None:
    leader, (kind, in_doubt, secs) = two.run(hold_the_shares, tmp_path)
    assert leader[0] in ("StallError", "PeerFailedError")
    assert (kind, in_doubt) == ("StallError", False), "nothing of this rank was told that could be committed"
    assert secs < DEADLINE_SECS + LATE_SECS


def commit_late(rank: int, count: int, root: Path) -> tuple[str, bool, float, list[int], int]:
    with acting_engine(root, SECS, on_failure="log") as (engine, storage):
        engine.save(state_at(1), step=1).result(SECS)
        dist.barrier()
        gate = storage.hold("rename") if rank == 0 else None
        began = time.monotonic()
        ticket = engine.save(state_at(2), step=2, deadline_secs=DEADLINE_SECS)
        if gate is not None:
            gate.wait_reached()
            dist.barrier()
            storage.release(gate)
            gate.open()
        error, secs = ended(rank, ticket, began)
        steps = engine.steps()
        ticket = engine.save(state_at(3))
        ticket.result(SECS)
        dist.barrier()
    return kind_of(error), getattr(error, "in_doubt", False), secs, steps, ticket.step


def test_a_rank_whose_deadline_passes_while_the_leader_renames_is_in_doubt_and_goes_on_with_the_same_steps(
    two: Ranks, tmp_path: Path
) -> None:
    leader, (kind, in_doubt, secs, steps, step) = two.run(commit_late, tmp_path)
    assert (leader[0], leader[3], leader[4]) == ("NoneType", [1, 2], 3), "a rename that was begun is waited for"
    assert (kind, in_doubt) == ("StallError", True)
    assert secs < DEADLINE_SECS + LATE_SECS
    assert (steps, step) == ([1, 2], 3)


# -- in save() itself ---------------------------------------------------------------------------------


def agree_before_the_capture(rank: int, count: int, root: Path) -> tuple[str, float]:
    """More than the budget: save() agrees with the others before it captures anything."""
    with held_engine(root, SECS, on_failure="log") as (engine, _, _):
        engine.save(state_at(1), step=1).result(SECS)
        dist.barrier()
        large = {f"w{number}": torch.full((1 << 20,), float(number)) for number in range(24)}
        if rank == 0:
            dist.barrier()  # it comes when the other has given up
        began = time.monotonic()
        error: BaseException | None = None
        try:
            error = engine.save(large, step=2, deadline_secs=DEADLINE_SECS).exception(SECS)
        except AioCkptError as raised:
            error = raised
        secs = time.monotonic() - began
        if rank == 1:
            dist.barrier()
        dist.barrier()
        assert engine.steps() == [1]
        engine.save(state_at(3), step=3).result(SECS)
        dist.barrier()
    return " ".join(map(str, told(error))), secs


def test_a_save_that_agrees_before_its_capture_gives_up_at_its_deadline(two: Ranks, tmp_path: Path) -> None:
    (leader, _), (other, secs) = two.run(agree_before_the_capture, tmp_path)
    assert leader.startswith(PeerFailedError.__name__)
    assert other.startswith(StallError.__name__)
    assert "waiting for the plans of the other ranks" in other
    assert secs < DEADLINE_SECS + LATE_SECS
