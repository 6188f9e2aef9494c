"""A call is the same call on every rank (S10): its skip, its failure, its step, also if one rank refuses it."""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from log_lines import kept_lines
from rank_engines import acting_engine, held_engine, no_space
from rank_processes import Ranks, engine_on
from slow import slow

from aio_ckpt import EngineConfig, PerRank, SyncCheckpointEngine
from aio_ckpt.errors import AioCkptError, BusyError, PeerFailedError, UnsafeObjectError, WriteError
from aio_ckpt.ranks.messages import Topic

SECS = 30.0
SAVES = 100


def counted_state(rank: int, step: int) -> dict[str, Any]:
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
                ticket = engine.save(counted_state(rank, step), step=step)
            except BusyError as error:
                found.append("busy" if "raise max_in_flight" in str(error) else str(error))
                continue
            found.append("skipped" if ticket.skipped else "saved")
            if found[-1] == "saved":
                train(-step)  # a branch that only some calls take
        engine.close_blocking()
    return found


@pytest.mark.parametrize(("when_busy", "word"), [("skip", "skipped"), slow("raise", "busy")])
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
                engine.save(counted_state(rank, step), step=step, deadline_secs=SECS).result(SECS)
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
                storage.at, storage.act = ("write_file", "aio_ckpt.*.1.bin"), no_space
            ticket = engine.save(counted_state(rank, step))
            found.append((ticket.step, ticket.skipped))
            if rank == 0:
                time.sleep(0.01)
        engine.close_blocking()
    return found


@pytest.mark.parametrize("in_flight", [slow(1), 2])
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
            if rank == 1 and step == 3:  # the save before may not have ended
                storage.at, storage.act = ("write_file", "aio_ckpt.*-3.1.bin"), no_space
            try:
                engine.save(counted_state(rank, step), step=step)
            except (AioCkptError, OSError) as error:
                is_right = "No space" in str(error) and error.ticket.step == step
                found.append("raised" if is_right else f"raised {error}, with {error.ticket}")
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
    committed = sorted(int(path.name.removeprefix("step_")) for path in tmp_path.glob("step_*"))
    assert committed == [1, 2, 4, 5, 6, 7, 8], "a failed save takes no other one with it"


def refuse_where_a_failure_is_raised(rank: int, count: int, root: Path) -> list[str]:
    """Rank 1 gives a bad leaf to the call that reports the failure of step 1."""
    found = []
    with acting_engine(root, SECS) as (engine, storage):
        if rank == 1:
            storage.at, storage.act = ("write_file", "aio_ckpt.*.1.bin"), no_space
        for step in range(1, 5):
            state = counted_state(rank, step)
            if rank == 1 and step == 2:
                state["bad"] = lambda: None
            try:
                engine.save(state, step=step)
            except (AioCkptError, OSError) as error:
                told = "".join([str(error), *error.__notes__])
                found.append(f"step {step}: {type(error).__name__}, {'of step 1' in told and 'No space' in told}")
            dist.barrier()
        engine.close_blocking()
    return found


def test_a_rank_that_refuses_the_call_which_raises_a_failure_raises_it_no_later_than_the_others(
    two: Ranks, tmp_path: Path
) -> None:
    one, other = two.run(refuse_where_a_failure_is_raised, tmp_path)
    assert one == ["step 2: PeerFailedError, True"]
    assert other == ["step 2: UnsafeObjectError, True"]
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_000000003", "step_000000004"]


# -- the log -----------------------------------------------------------------------------------------


def save_fail_and_load(rank: int, count: int, root: Path) -> tuple[list[str], list[int]]:
    """The lines at INFO and above, and the steps that ``on_commit`` was told of."""
    told = list[int]()
    settings: dict[str, Any] = {"on_failure": "log", "on_commit": lambda report: told.append(report.step)}
    with kept_lines(logging.DEBUG) as lines, acting_engine(root, SECS, **settings) as (engine, storage):
        engine.save(counted_state(rank, 1), step=1).result(SECS)
        if rank == 1:
            storage.fail("write_file", "aio_ckpt.*.1.bin", WriteError(errno.ENOSPC, "No space", "disk of one rank"))
        engine.save(counted_state(rank, 2), step=2).exception(SECS)
        engine.load(counted_state(rank, 0)).result(SECS)
        engine.close_blocking()
    of_steps = [record for record in lines.records if hasattr(record, "step")]
    assert {record.rank for record in of_steps} == {rank}
    assert [record.getMessage() for record in of_steps if "committed:" in record.getMessage()]
    return [f"{record.levelname} {record.getMessage()}" for record in of_steps if record.levelno > logging.DEBUG], told


def test_rank_0_alone_logs_a_commit_and_a_load_and_every_rank_logs_a_failure(two: Ranks, tmp_path: Path) -> None:
    (one, told_one), (other, told_other) = two.run(save_fail_and_load, tmp_path)
    commit, failure, load = one
    assert re.match(r"INFO step 1 committed: [\d.]+ kB by rank 0 of 2 durable after .*B/s\); save", commit)
    assert failure.startswith("ERROR the save of step 2 failed: PeerFailedError: rank 1 failed")
    assert "No space: this save of rank 1 of 2 needs " in failure
    assert failure.endswith("; the newest committed step is 1")
    assert re.match(r"INFO step 1 loaded: [\d.]+ kB by rank 0 of 2 in .*B/s\), verified", load)
    (failure,) = other
    assert re.match(r"ERROR the save of step 2 failed: .*No space.* \(rank 1, stage write\); the newest ", failure)
    assert told_one == told_other == [1]


# -- (d) ---------------------------------------------------------------------------------------------


def save_without_steps(rank: int, count: int, root: Path) -> list[int]:
    with SyncCheckpointEngine(root, EngineConfig(stall_timeout_secs=SECS, budget_bytes=64 << 20)) as engine:
        found = []
        for number in range(4):
            if rank == number % 2:
                time.sleep(0.1)
            ticket = engine.save(counted_state(rank, number))
            ticket.result(SECS)
            found.append(ticket.step)
        assert engine.rollback(found[1]) == found[:1:-1]
        ticket = engine.save(counted_state(rank, 9))
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
            engine.save(counted_state(rank, step), step=step).result(SECS)
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


# -- refused ----------------------------------------------------------------------------------------

SHORT_SECS = 2.0

REFUSED: list[dict[str, Any]] = [
    {"deadline_secs": -0.5},
    {"metrics": {"loss": "x"}},
    {"extra": {"loss": float("nan")}},
    {"overwrite": "no"},
    {"step": -1},
]


def state_at(iteration: int) -> dict[str, Any]:
    return {"w": torch.full((300,), float(iteration)), "iteration": PerRank(iteration)}


def kind_of(error: BaseException | None) -> str:
    return type(error).__name__


# -- save() ------------------------------------------------------------------------------------------


def save_on(
    rank: int, count: int, root: Path, refused: dict[str, Any], at: int, in_flight: int
) -> tuple[list[str], list[tuple[int, int]]]:
    """Iterations whose tickets nobody awaits; what was raised, and which iteration each checkpoint holds here."""
    raised, tickets = [], []
    with engine_on(root, SECS, max_in_flight=in_flight) as engine:
        for iteration in range(1, 7):
            options = refused if rank == 1 and iteration == at else {}
            try:
                tickets.append(engine.save(state_at(iteration), **options))
            except AioCkptError as error:
                raised.append(f"{iteration} {kind_of(error)}")
        tickets[-1].result(SECS)  # commits keep the order of the calls
        dist.barrier()
        held = []
        for step in engine.steps():
            tree = engine.read(step)
            assert isinstance(tree, dict)
            held.append((step, tree["iteration"]))
        dist.barrier()
    return raised, held


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("refused", "in_flight"),
    [(REFUSED[0], 1), *((refused, 2) for refused in REFUSED), *(slow(refused, 1) for refused in REFUSED[1:])],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else None,
)
def test_no_checkpoint_mixes_iterations_after_one_rank_was_refused_an_argument(
    two: Ranks, tmp_path: Path, refused: dict[str, Any], in_flight: int
) -> None:
    (raised, held), (raised_there, held_there) = two.run(save_on, tmp_path, refused, 2, in_flight)
    assert held == held_there
    assert [iteration for _, iteration in held] == [1, 3, 4, 5, 6]
    assert raised == [], "it was raised once, by the rank that was refused"
    assert len(raised_there) == 1
    assert raised_there[0].startswith("2 ")


def test_the_first_call_may_be_refused_while_the_ranks_have_not_met(two: Ranks, tmp_path: Path) -> None:
    (raised, held), (raised_there, held_there) = two.run(save_on, tmp_path, REFUSED[0], 1, 1)
    assert held == held_there
    assert [iteration for _, iteration in held] == [2, 3, 4, 5, 6]
    assert (raised, raised_there) == (["1 PeerFailedError"], ["1 ConfigError"]), "all agree before they capture"


def save_steps(rank: int, count: int, root: Path, refused: dict[str, Any]) -> list[str]:
    found = []
    with engine_on(root, SECS) as engine:
        for step in range(1, 5):
            options: dict[str, Any] = {"step": step, **(refused if rank == 1 and step == 2 else {})}
            try:
                engine.save(state_at(step), **options).result(SECS)
                found.append("saved")
            except PeerFailedError as error:
                found.append(f"told of rank {error.rank} in {error.stage}: {'ConfigError' in str(error)}")
            except AioCkptError as error:
                found.append(kind_of(error))
        assert engine.steps() == [1, 3, 4]
        dist.barrier()
    return found


def test_a_refused_argument_fails_that_save_on_all_ranks_which_are_told_why(two: Ranks, tmp_path: Path) -> None:
    one, other = two.run(save_steps, tmp_path, {"metrics": {"loss": "x"}})
    assert one == ["saved", "told of rank 1 in capture: True", "saved", "saved"]
    assert other == ["saved", "ConfigError", "saved", "saved"]


def refuse_a_state(rank: int, count: int, root: Path) -> list[str]:
    raised = []
    with engine_on(root, SECS) as engine:
        for step in range(1, 9):
            state = state_at(step)
            if rank == 1 and step == 2:
                state["code"] = lambda: None
            try:
                engine.save(state, step=step)
            except AioCkptError as error:
                raised.append(f"{step} {kind_of(error)}")
            engine.ready()
            dist.barrier()
        assert engine.steps() == [1, 3, 4, 5, 6, 7, 8]
        dist.barrier()
    return raised


def test_what_save_raised_on_one_rank_is_not_raised_by_turns_for_ever(two: Ranks, tmp_path: Path) -> None:
    assert two.run(refuse_a_state, tmp_path) == [[], ["2 UnsafeObjectError"]]


def await_on_one_rank(rank: int, count: int, root: Path) -> list[str]:
    raised = []
    with acting_engine(root, SECS) as (engine, storage):
        for step in range(1, 7):
            if rank == 1 and step == 2:
                storage.at, storage.act = ("write", "*"), no_space
            try:
                ticket = engine.save(state_at(step), step=step)
                if rank == 0 and step == 2:
                    assert ticket.exception(SECS) is not None
            except (AioCkptError, OSError):
                raised.append(step)
            engine.wait_ready()
            dist.barrier()
        assert engine.steps().result() == [1, 3, 4, 5, 6], "the save whose call told rank 1 of the failure is made, too"
        dist.barrier()
    return raised


def test_a_failure_that_only_one_rank_awaited_costs_no_other_save(two: Ranks, tmp_path: Path) -> None:
    assert two.run(await_on_one_rank, tmp_path) == [[], [3]]


# -- steps that nobody gave --------------------------------------------------------------------------


def refuse_a_state_between_steps(rank: int, count: int, root: Path, in_flight: int) -> list[int]:
    found = []
    with engine_on(root, SECS, max_in_flight=in_flight) as engine:
        for iteration in range(1, 8):
            state = state_at(iteration)
            if rank == 1 and iteration == 3:
                state["code"] = lambda: None
            try:
                ticket = engine.save(state)
                ticket.result(SECS)
                found.append(ticket.step)
            except (UnsafeObjectError, PeerFailedError):
                assert iteration == 3
        dist.barrier()
    return found


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_steps_that_nobody_gave_stay_the_same_after_one_rank_refused_a_state(
    two: Ranks, tmp_path: Path, in_flight: int
) -> None:
    one, other = two.run(refuse_a_state_between_steps, tmp_path, in_flight)
    assert one == other
    assert len(one) == 6


def miss_a_commit(rank: int, count: int, root: Path) -> tuple[str, bool, list[int]]:
    with held_engine(root, SHORT_SECS) as (engine, coordinator, _):
        engine.save(state_at(1)).result(SECS)
        dist.barrier()
        if rank == 0:  # it has committed, and says nothing for longer than the other waits
            coordinator.topic, coordinator.is_silent = Topic("save", 2), True
        ticket = engine.save(state_at(2))
        if rank == 1:
            assert ticket.exception(SECS) is not None
        dist.barrier()
        coordinator.is_silent = False
        coordinator.gate.open()
        error = ticket.exception(SECS)
        dist.barrier()
        found = []
        for iteration in (3, 4, 5):
            ticket = engine.save(state_at(iteration))
            ticket.result(SECS)
            found.append(ticket.step)
        dist.barrier()
    return repr(error), isinstance(error, PeerFailedError) and error.in_doubt, found


def test_a_rank_that_missed_what_the_leader_committed_names_the_same_steps_later(two: Ranks, tmp_path: Path) -> None:
    leader, other = two.run(miss_a_commit, tmp_path)
    assert leader == ("None", False, [3, 4, 5])
    assert other[1:] == (True, [3, 4, 5]), other[0]


def retry_a_step(rank: int, count: int, root: Path, in_flight: int) -> list[int]:
    with acting_engine(root, SECS, max_in_flight=in_flight) as (engine, storage):
        engine.save(state_at(1), step=1).result(SECS)
        dist.barrier()
        if rank == 1:
            storage.at, storage.act = ("write", "*"), no_space
        assert engine.save(state_at(2), step=2).exception(SECS) is not None
        dist.barrier()
        engine.save(state_at(2), step=2).result(SECS)
        ticket = engine.save(state_at(3))
        ticket.result(SECS)
        dist.barrier()
        found = [*engine.steps().result(), ticket.step]
        dist.barrier()
    return found


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_step_that_failed_may_be_saved_again(two: Ranks, tmp_path: Path, in_flight: int) -> None:
    assert two.run(retry_a_step, tmp_path, in_flight) == [[1, 2, 3, 3]] * 2


# -- extra ------------------------------------------------------------------------------------------


def save_with_extra(rank: int, count: int, root: Path) -> list[Any]:
    with engine_on(root, SECS) as engine:
        first = engine.save(state_at(1), step=1, extra={"rank": rank}).result(SECS)
        second = engine.save(state_at(2), step=2, extra={"n": 2} if rank == 0 else None).result(SECS)
        third = engine.save(state_at(3), step=3, extra=None if rank == 0 else {"rank": rank}).result(SECS)
        loaded = engine.load(state_at(0), 1)
        dist.barrier()
    return [first.extra, second.extra, third.extra, loaded.extra]


def test_the_extra_of_the_leader_counts_and_every_rank_reports_it(two: Ranks, tmp_path: Path) -> None:
    assert two.run(save_with_extra, tmp_path) == [[{"rank": 0}, {"n": 2}, {}, {"rank": 0}]] * 2


# -- rollback() --------------------------------------------------------------------------------------


def roll_back_while_one_is_busy(rank: int, count: int, root: Path) -> list[str]:
    found = []
    with acting_engine(root, SHORT_SECS) as (engine, storage):
        for step in (1, 2):
            engine.save(state_at(step), step=step).result(SECS)
        dist.barrier()
        gate = storage.hold("write" if rank == 0 else "sync", "*")
        if rank == 0:
            storage.fail("write", "*", WriteError(errno.EIO, "broken", "x"))
        ticket = engine.save(state_at(3), step=3)
        gate.wait_reached()
        dist.barrier()  # before rank 0 fails, which rank 1 is told
        if rank == 0:
            storage.release(gate)
            gate.open()
            assert ticket.exception(SECS) is not None  # settled here, pending there
        dist.barrier()
        try:
            engine.rollback(1).result()
        except BusyError as error:
            found.append(str(error))
        dist.barrier()
        if rank == 1:
            storage.release(gate)
            gate.open()
            assert ticket.exception(SECS) is not None
        dist.barrier()
        assert engine.steps().result() == [1, 2]
        engine.save(state_at(5), step=np.int64(5)).result(SECS)
        found.append(str(engine.rollback(np.int64(1)).result()))
        engine.save(state_at(6)).result(SECS)
        dist.barrier()
        found.append(str(engine.steps().result()))
        dist.barrier()
    return found


def test_saves_that_are_pending_on_one_rank_refuse_the_rollback_on_all(two: Ranks, tmp_path: Path) -> None:
    one, other = two.run(roll_back_while_one_is_busy, tmp_path)
    assert one == other
    assert one[0].startswith("rollback(1): saves of rank 1 are pending")
    assert one[1:] == ["[5, 2]", "[1, 2]"]


def roll_back_apart(rank: int, count: int, root: Path, steps: tuple[Any, Any]) -> list[str]:
    found = []
    with engine_on(root, SHORT_SECS) as engine:
        for step in (1, 2, 3):
            engine.save(state_at(step), step=step).result(SECS)
        dist.barrier()
        try:
            engine.rollback(steps[rank])
        except AioCkptError as error:
            found.append(kind_of(error))
        dist.barrier()
        assert engine.steps() == [1, 2, 3]
        engine.save(state_at(4), step=4).result(SECS)
        dist.barrier()
    return found


@pytest.mark.parametrize(
    ("steps", "raised"),
    [
        ((2, 1), ("PeerFailedError", "PeerFailedError")),
        slow((2, -1), ("PeerFailedError", "StepOrderError")),
        (("2", 2), ("StepOrderError", "PeerFailedError")),
        ((9, 9), ("CheckpointNotFoundError", "PeerFailedError")),
    ],
)
def test_a_rollback_that_one_rank_refuses_is_done_by_none(
    two: Ranks, tmp_path: Path, steps: tuple[Any, Any], raised: tuple[str, str]
) -> None:
    assert two.run(roll_back_apart, tmp_path, steps) == [[raised[0]], [raised[1]]]


# -- delete() ----------------------------------------------------------------------------------------


def delete_on_all(rank: int, count: int, root: Path) -> tuple[list[str], list[object]]:
    found: list[object] = []
    with acting_engine(root, SECS) as (engine, storage):
        for step in (1, 2, 9):
            engine.save(state_at(step), step=step).result(SECS)
        dist.barrier()
        storage.calls.clear()
        engine.delete(np.int64(1)).result()
        found.append(engine.steps().result())
        engine.delete(9, allow_newest=True).result()
        found.append(engine.steps().result())
        changed = sorted({call.name for call in storage.calls} & {"rename", "remove_tree"})
        found.append(engine.save(state_at(3)).result(SECS).step)
        engine.delete(2).result()
        dist.barrier()
        found.append(engine.steps().result())
        dist.barrier()
    return changed, found


def test_the_leader_deletes_a_step_which_is_gone_for_all_when_the_call_returns(two: Ranks, tmp_path: Path) -> None:
    (by_leader, one), (by_other, other) = two.run(delete_on_all, tmp_path)
    assert one == other == [[2, 9], [2], 3, [3]], "the number of a deleted newest step is free on all ranks"
    assert (by_leader, by_other) == (["remove_tree", "rename"], [])


def delete_the_last(rank: int, count: int, root: Path) -> list[int]:
    with engine_on(root, SECS) as engine:
        engine.save(state_at(5), step=5).result(SECS)
        engine.delete(5, allow_newest=True)
        saved = [engine.save(state_at(1)).result(SECS).step, engine.save(state_at(2)).result(SECS).step]
        dist.barrier()
    return saved


def test_after_the_deletion_of_the_only_step_all_ranks_begin_anew(two: Ranks, tmp_path: Path) -> None:
    assert two.run(delete_the_last, tmp_path) == [[1, 2]] * 2


def delete_on_a_broken_disk(rank: int, count: int, root: Path) -> tuple[str, list[int], int]:
    with acting_engine(root, SHORT_SECS) as (engine, storage):
        for step in (1, 2):
            engine.save(state_at(step), step=step).result(SECS)
        dist.barrier()
        storage.fail("remove_tree", "trash/*", WriteError(errno.EIO, "broken", "trash"))
        with pytest.raises(AioCkptError) as raised:
            engine.delete(1).result(SECS)
        dist.barrier()
        step = engine.save(state_at(3)).result(SECS).step
        return kind_of(raised.value), engine.steps().result(), step


def test_files_that_cannot_be_deleted_are_told_to_all_ranks_and_the_next_save_commits(
    two: Ranks, tmp_path: Path
) -> None:
    found = two.run(delete_on_a_broken_disk, tmp_path)
    assert found == [("WriteError", [2, 3], 3), ("PeerFailedError", [2, 3], 3)]


def delete_apart(rank: int, count: int, root: Path, calls: tuple[Any, Any]) -> list[str]:
    found = []
    with acting_engine(root, SHORT_SECS) as (engine, _):
        for step in (1, 2, 3):
            engine.save(state_at(step), step=step).result(SECS)
        if rank == 0:
            engine.protect(2).result()
        dist.barrier()
        step, allow_newest = calls[rank]
        try:
            engine.delete(step, allow_newest=allow_newest).result()
        except AioCkptError as error:
            found.append(kind_of(error))
        dist.barrier()
        assert engine.steps().result() == [1, 2, 3]
        engine.save(state_at(4), step=4).result(SECS)
        dist.barrier()
    return found


@pytest.mark.parametrize(
    ("calls", "raised"),
    [
        (((1, False), (2, False)), ("PeerFailedError", "PeerFailedError")),
        slow(((3, True), (3, False)), ("PeerFailedError", "PeerFailedError")),
        (((1, False), (1, "yes")), ("PeerFailedError", "ConfigError")),
        slow(((1, False), (-1, False)), ("PeerFailedError", "StepOrderError")),
        (((9, False), (9, False)), ("CheckpointNotFoundError", "PeerFailedError")),
        (((3, False), (3, False)), ("StepOrderError", "PeerFailedError")),
        slow(((2, False), (2, False)), ("ProtectedStepError", "PeerFailedError")),
    ],
)
def test_a_deletion_that_one_rank_refuses_is_done_by_none(
    two: Ranks, tmp_path: Path, calls: tuple[Any, Any], raised: tuple[str, str]
) -> None:
    assert two.run(delete_apart, tmp_path, calls) == [[raised[0]], [raised[1]]]
