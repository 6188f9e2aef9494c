"""A rank leaves a call midway, or comes to it late: the others hear why, and keep what may still become visible."""

from __future__ import annotations

import errno
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from builders import flip, state_of
from rank_engines import acting_engine, held_engine, no_space, told
from rank_processes import Ranks, engine_on, error_of, needs_list_keys
from saved_files import data_file, without_save_id
from slow import slow

from aio_ckpt import CheckpointEngine, SoloCoordinator, SyncCheckpointEngine
from aio_ckpt.commit.owner import pending_path
from aio_ckpt.errors import AioCkptError, BusyError, ConfigError, PeerFailedError, StallError, WriteError
from aio_ckpt.ranks import store_coordinator
from aio_ckpt.ranks.messages import Topic
from aio_ckpt.ranks.store_coordinator import StoreCoordinator

LEAVE_SECS = 24.0
SHORT_SECS = 2.0


def resized(step: int) -> dict[str, Any]:
    """Another structure at each step: each save is planned anew."""
    return state_of(step, 100 + step)


def pending_files(root: Path) -> list[str]:
    return sorted(path.name for directory in root.glob(".aio_ckpt/pending/*") for path in directory.iterdir())


# -- a rank that fails unheard -------------------------------------------------------------------------


def go_on_untold(rank: int, count: int, root: Path) -> list[tuple[str, int | None, str]]:
    with held_engine(root, SHORT_SECS, on_failure="log") as (engine, coordinator, storage):
        engine.save(resized(1), step=1).result(LEAVE_SECS)
        if rank == 1:
            coordinator.is_mute = True
            storage.at, storage.act = ("write", "*"), no_space
        dist.barrier()
        found = []
        for step in (2, 3):
            found.append(told(engine.save(resized(step), step=step).exception(4 * SHORT_SECS)))
            coordinator.is_mute = False
        dist.barrier()
        assert engine.steps().result() == [1, 3]
        dist.barrier()
    return found


def test_a_rank_that_went_on_to_its_next_save_without_a_word_is_not_waited_for(two: Ranks, tmp_path: Path) -> None:
    (failed, saved), others = two.run(go_on_untold, tmp_path)
    assert failed[:2] == ("PeerFailedError", 1)
    assert "rank 1 does not come to the save of step 2" in failed[2]
    assert "is elsewhere" in failed[2]
    assert saved[0] == "NoneType"
    assert [kind for kind, *_ in others] == ["OSError", "NoneType"]


# -- the cause ----------------------------------------------------------------------------------------


def end_by_deadline(rank: int, count: int, root: Path) -> tuple[str, int | None, str]:
    with held_engine(root, LEAVE_SECS) as (engine, _, _):
        engine.save(resized(1), step=1).result(LEAVE_SECS)
        dist.barrier()
        if rank == 0:
            error = error_of(lambda: engine.save(resized(2), step=2, deadline_secs=0.5), LEAVE_SECS)
            dist.barrier()
        else:
            dist.barrier()
            error = error_of(lambda: engine.save(resized(2), step=2), LEAVE_SECS)
        dist.barrier()
    return told(error)


def test_the_deadline_of_the_leader_is_named_as_what_ended_the_save(two: Ranks, tmp_path: Path) -> None:
    leader, other = two.run(end_by_deadline, tmp_path)
    assert leader[0] == "StallError"
    assert other[:2] == ("PeerFailedError", 0)
    assert "StallError" in other[2]
    assert "deadline_secs=0.5" in other[2]


def render_slowly(rank: int, count: int, root: Path) -> tuple[str, int | None, str]:
    with held_engine(root, SHORT_SECS) as (engine, _, _):
        ledger = engine._ctx.members.ledger
        template = ledger.template

        def slow(written: Any) -> Any:
            time.sleep(1.5 * SHORT_SECS)  # the time that passes is what is tested
            return template(written)

        ledger.template = slow  # type: ignore[method-assign]
        found = told(engine.save(resized(1), step=1).exception(LEAVE_SECS))
        dist.barrier()
    return found


@pytest.mark.slow
def test_metadata_of_many_ranks_may_take_longer_to_render_than_a_stall(two: Ranks, tmp_path: Path) -> None:
    assert [kind for kind, *_ in two.run(render_slowly, tmp_path)] == ["NoneType"] * 2


# -- a commit in doubt --------------------------------------------------------------------------------


def commit_in_doubt(rank: int, count: int, root: Path) -> tuple[str, bool, list[str]]:
    with pytest.MonkeyPatch.context() as patch, held_engine(root, SHORT_SECS) as (engine, _, storage):
        patch.setattr(store_coordinator, "_LEAVE_SECS", 1.0)
        engine.save(resized(1), step=1).result(LEAVE_SECS)
        if rank == 0:
            storage.hold("rename")
        dist.barrier()
        error = engine.save(resized(2), step=2).exception(LEAVE_SECS)
        dist.barrier()
        found = pending_files(root)
        dist.barrier()
    return type(error).__name__, getattr(error, "in_doubt", False), found


def test_no_rank_removes_what_a_commit_in_doubt_may_still_make_visible(two: Ranks, tmp_path: Path) -> None:
    leader, other = two.run(commit_in_doubt, tmp_path)
    assert leader[:2] == ("StallError", True)
    assert other[:2] == ("PeerFailedError", True)
    files = {".metadata", "__*_0_0.distcp", "__*_1_0.distcp", "aio_ckpt.*.0.bin", "aio_ckpt.*.1.bin", "aio_ckpt.*.json"}
    assert files <= set(map(without_save_id, leader[2]))
    assert leader[2] == other[2]


def save_behind_a_closed_leader(rank: int, count: int, root: Path, structure: int) -> tuple[str, bool, list[str]]:
    found = "", False
    with engine_on(root, SHORT_SECS) as engine:
        engine.save(resized(1), step=1).result(LEAVE_SECS)
        dist.barrier()
        if rank:  # rank 0 goes on to close
            error = error_of(lambda: engine.save(resized(structure), step=2), LEAVE_SECS)
            assert isinstance(error, PeerFailedError)
            found = str(error), error.in_doubt
    dist.barrier()
    left = sorted(path.name for path in root.iterdir() if path.name.startswith(".pending"))
    dist.barrier()
    return *found, left


@pytest.mark.parametrize("structure", [1, 2], ids=["planned before", "another structure"])
def test_a_save_that_begins_behind_a_closed_leader_has_failed_for_certain_and_leaves_nothing(
    two: Ranks, tmp_path: Path, structure: int
) -> None:
    (_, _, left), (text, in_doubt, _) = two.run(save_behind_a_closed_leader, tmp_path, structure)
    assert "rank 0 does not come to the save of step 2, it has closed its engine" in text
    assert (in_doubt, left) == (False, [])


# -- late -------------------------------------------------------------------------------------------

SECS = 30.0
CALLS = 40


def coordinator_of(engine: CheckpointEngine | SyncCheckpointEngine) -> StoreCoordinator:
    coordinator = engine._ctx.members.coordinator
    assert isinstance(coordinator, StoreCoordinator)
    return coordinator


def left_of(ranks: Ranks) -> list[str]:
    """Keys of the engines of these ranks, less their prefix."""
    prefix = f"engines/aio_ckpt/{ranks.count}/"
    return sorted(key.partition(prefix)[2] for key in ranks.store.list_keys() if prefix in key)


# -- the leader is far ahead --------------------------------------------------------------------------


def call_often(engine: SyncCheckpointEngine, first: int) -> list[str]:
    found = []
    for step in range(first, first + CALLS):
        try:
            found.append("skipped" if engine.save(state_of(step), step=step).skipped else "saved")
        except BusyError:
            found.append("busy")
    return found


def come_late(rank: int, count: int, root: Path, when_busy: str) -> list[str]:
    with engine_on(root, SECS, when_busy=when_busy) as engine:
        engine.save(state_of(1), step=1).result(SECS)
        if rank == 1:
            dist.barrier()
        found = call_often(engine, 2)
        if rank == 0:
            dist.barrier()
        engine.ready()
        dist.barrier()
        engine.save(state_of(100), step=100).result(SECS)
        dist.barrier()
        assert engine.steps() == [1, 2, 100]
        dist.barrier()
    return found


@pytest.mark.parametrize(("when_busy", "word"), [("skip", "skipped"), ("raise", "busy")])
def test_a_rank_that_is_late_by_many_calls_skips_or_refuses_the_same_ones(
    two: Ranks, tmp_path: Path, when_busy: str, word: str
) -> None:
    assert two.run(come_late, tmp_path, when_busy) == [["saved", *[word] * (CALLS - 1)]] * 2


def close_early(rank: int, count: int, root: Path) -> tuple[list[str], str, float]:
    with (
        pytest.MonkeyPatch.context() as patch,
        acting_engine(root, SHORT_SECS, when_busy="skip", on_failure="log") as (engine, _),
    ):
        patch.setattr(store_coordinator, "_LEAVE_SECS", 1.0)
        engine.save(state_of(1), step=1).result(SECS)
        if rank == 1:
            dist.barrier()
        found = []
        for step in range(2, 2 + CALLS):
            found.append("skipped" if engine.save(state_of(step), step=step).skipped else "saved")
        if rank == 0:
            engine.terminate()
            dist.barrier()
            return found, "", 0.0
        began = time.monotonic()
        with pytest.raises(PeerFailedError) as raised:
            engine.save(state_of(100), step=100)
        return found, str(raised.value), time.monotonic() - began


@needs_list_keys
def test_a_leader_that_closes_early_leaves_its_words_to_whoever_is_late(two: Ranks, tmp_path: Path) -> None:
    (found, *_), (late, text, secs) = two.run(close_early, tmp_path)
    assert late == found
    assert "rank 0 does not come to the save of step 100 (whether there is room), it has closed its engine" in text
    assert secs < SHORT_SECS
    assert left_of(two) == ["queue"], "the last to leave clears the board"


# -- the ranks lose count ---------------------------------------------------------------------------


def roll_back_where_the_other_skips(rank: int, count: int, root: Path) -> tuple[str, float]:
    with acting_engine(root, SHORT_SECS, when_busy="skip", on_failure="log") as (engine, storage):
        engine.save(state_of(1), step=1).result(SECS)
        gate = storage.hold("sync", "*") if rank == 0 else None
        ticket = engine.save(state_of(2), step=2)
        if gate is not None:
            assert engine.save(state_of(3), step=3).skipped
            storage.release(gate)
            gate.open()
        ticket.result(SECS)
        began = time.monotonic()
        with pytest.raises(PeerFailedError) as raised:
            engine.rollback(1).result() if rank else engine.load(state_of(0)).result(SECS)
        secs = time.monotonic() - began
        dist.barrier()
    return str(raised.value), secs


def test_a_rank_that_rolls_back_where_another_skipped_a_save_and_loads_keeps_nobody_waiting(
    two: Ranks, tmp_path: Path
) -> None:
    (load, load_secs), (rollback, rollback_secs) = two.run(roll_back_where_the_other_skips, tmp_path)
    assert "rank 0 does not come to rollback() (call 3), it is elsewhere: that call has ended there" in rollback
    assert (
        load.startswith("rank 1 does not come to load() (call 1")
        or "rank 1 gave no sign of life in load() (call 1" in load
    )
    assert max(load_secs, rollback_secs) < 2 * SHORT_SECS


def save_where_the_other_loads(rank: int, count: int, root: Path) -> str:
    with acting_engine(root, SHORT_SECS, on_failure="log") as (engine, _):
        engine.save(state_of(1), step=1).result(SECS)
        with pytest.raises(PeerFailedError) as raised:
            engine.load(state_of(0)).result(SECS) if rank else engine.save(state_of(2), step=2).result(SECS)
    return str(raised.value)


@needs_list_keys
def test_ranks_that_found_each_other_elsewhere_clear_the_board_when_they_close(two: Ranks, tmp_path: Path) -> None:
    _, load = two.run(save_where_the_other_loads, tmp_path)
    assert "rank 0 does not come to load() (call 1" in load
    assert left_of(two) == ["queue"]


def fail_on_the_leader(rank: int, count: int, root: Path, stage: str) -> list[str]:
    with acting_engine(root, SECS, on_failure="log") as (engine, storage):
        engine.save(state_of(1), step=1).result(SECS)
        if stage == "write" and rank == 0:
            storage.fail("sync", "*", WriteError(errno.EIO, "the disk is gone", "/x"))
        options: dict[str, Any] = {"metrics": {"loss": "x"}} if stage == "capture" and rank == 0 else {}
        with pytest.raises((AioCkptError, OSError)):
            engine.save(state_of(2), step=2, **options).result(SECS)
        pending = pending_path(root, engine._ctx.members.owner, 2)
        if rank == 1:
            engine.terminate()
            pending.mkdir()  # as by one of its threads that was stuck in the system until now
        dist.barrier()
        if rank == 0:
            engine.close_blocking()
    dist.barrier()
    return sorted(path.name for path in root.iterdir() if path.name.startswith(".pending"))


@pytest.mark.parametrize("stage", ["capture", "write"])
def test_what_a_late_rank_makes_of_a_save_that_failed_on_the_leader_is_removed(
    two: Ranks, tmp_path: Path, stage: str
) -> None:
    assert two.run(fail_on_the_leader, tmp_path, stage) == [[], []]


# -- a call is refused here and skipped there ---------------------------------------------------------


def refuse_a_skipped_call(rank: int, count: int, root: Path, when_busy: str) -> tuple[list[str], list[int], list[str]]:
    with acting_engine(root, SECS, when_busy=when_busy, max_in_flight=2) as (engine, storage):
        engine.save(state_of(1)).result(SECS)
        gate = storage.hold("sync", "*") if rank == 0 else None
        tickets = [engine.save(state_of(step)) for step in (2, 3)]
        dist.barrier()
        found = []
        try:
            options: dict[str, Any] = {"metrics": {"loss": "x"}} if rank == 1 else {}
            found.append("skipped" if engine.save(state_of(4), **options).skipped else "saved")
        except (ConfigError, BusyError) as error:
            found.append(type(error).__name__)
        engine._portal.call(coordinator_of(engine).beat, timeout=SECS)  # behind whatever the call has begun
        engine._portal.call(coordinator_of(engine).beat, timeout=SECS)
        waits = [topic for topic in coordinator_of(engine)._waits if topic not in (Topic("save", 2), Topic("save", 3))]
        dist.barrier()
        if gate is not None:
            storage.release(gate)
            gate.open()
        steps = [ticket.result(SECS).step for ticket in tickets]
        for _ in range(2):
            ticket = engine.save(state_of(5))
            ticket.result(SECS)
            steps.append(ticket.step)
        dist.barrier()
    return found, steps, waits


@pytest.mark.parametrize(("when_busy", "word"), [("skip", "skipped"), ("raise", "BusyError")])
def test_a_call_refused_here_that_the_leader_skips_waits_for_no_word_and_takes_its_step(
    two: Ranks, tmp_path: Path, when_busy: str, word: str
) -> None:
    (leaders, steps, waits), (others, steps_there, waits_there) = two.run(refuse_a_skipped_call, tmp_path, when_busy)
    assert (leaders, others) == ([word], ["ConfigError" if when_busy == "skip" else word])
    assert steps == steps_there == [2, 3, 5, 6]
    assert waits == waits_there == []


def give_up_before_the_leader_speaks(rank: int, count: int, root: Path, has_room: bool) -> list[str]:
    found = []
    with acting_engine(root, SECS, when_busy="skip", on_failure="log") as (engine, storage):
        engine.save(state_of(1)).result(SECS)
        gate = storage.hold("sync", "*") if rank == 0 and not has_room else None
        first = None if has_room else engine.save(state_of(2))
        dist.barrier()
        if rank == 1:
            with pytest.raises(StallError, match="whether rank 0 has room"):
                engine.save(state_of(3), deadline_secs=0.2)
            dist.barrier()
        else:
            dist.barrier()
            ticket = engine.save(state_of(3))
            found.append("skipped" if ticket.skipped else type(ticket.exception(SECS)).__name__)
            if gate is not None:
                storage.release(gate)
                gate.open()
        if first is not None:
            first.result(SECS)
        dist.barrier()
        for _ in range(2):
            ticket = engine.save(state_of(4))
            ticket.result(SECS)
            found.append(str(ticket.step))
        dist.barrier()
    return found


@pytest.mark.parametrize(("has_room", "word", "steps"), [(True, "PeerFailedError", "3 4"), (False, "skipped", "4 5")])
def test_a_call_given_up_before_the_leader_speaks_ends_as_that_call_on_both(
    two: Ranks, tmp_path: Path, has_room: bool, word: str, steps: str
) -> None:
    leader, other = two.run(give_up_before_the_leader_speaks, tmp_path, has_room)
    assert leader == [word, *steps.split()]
    assert other == steps.split()


def give_up_before_the_ranks_have_met(rank: int, count: int, root: Path) -> list[int]:
    if rank == 1:
        with acting_engine(root, SECS, on_failure="log") as (engine, _):
            with pytest.raises(StallError, match="to open their engines"):
                engine.save(state_of(3, 3000), deadline_secs=0.2)
            dist.barrier()
            return [engine.load(state_of(0, 3000)).result(SECS).step, engine.save(state_of(4, 3000)).result(SECS).step]
    dist.barrier()
    with acting_engine(root, SECS, on_failure="log") as (engine, _):
        with pytest.raises(PeerFailedError):
            engine.save(state_of(3, 3000)).result(SECS)
        return [engine.load(state_of(0, 3000)).result(SECS).step, engine.save(state_of(4, 3000)).result(SECS).step]


def test_a_call_given_up_before_the_ranks_have_met_takes_its_step_as_they_meet(two: Ranks, tmp_path: Path) -> None:
    """The load finds an older step than the one that was the newest then."""
    with SyncCheckpointEngine(tmp_path, coordinator=SoloCoordinator()) as engine:
        for step in (1, 2):
            engine.save(state_of(step, 3000), step=step).result(SECS)
    flip(data_file(tmp_path / "step_000000002"), 5000)
    assert two.run(give_up_before_the_ranks_have_met, tmp_path) == [[1, 4], [1, 4]]


# -- different calls ----------------------------------------------------------------------------------


def call_different_things(rank: int, count: int, root: Path, kinds: tuple[str, str]) -> tuple[str, float]:
    with acting_engine(root, SHORT_SECS, on_failure="log") as (engine, _):
        engine.save(state_of(1), step=1).result(SECS)
        dist.barrier()
        began = time.monotonic()
        with pytest.raises(PeerFailedError) as raised:
            if kinds[rank] == "save":
                engine.save(state_of(2), step=2).result(SECS)
            elif kinds[rank] == "load":
                engine.load(state_of(0), None, strict=False, allow_missing=True, fallback=True).result(SECS)
            elif kinds[rank] == "delete":
                engine.delete(1).result()
            else:
                engine.rollback(1).result()
        secs = time.monotonic() - began
        dist.barrier()
    return str(raised.value), secs


@pytest.mark.sampled
@pytest.mark.parametrize(
    "kinds",
    [
        ("save", "load"),
        slow(("load", "save")),
        slow(("rollback", "save")),
        slow(("load", "rollback")),
        ("delete", "save"),
    ],
)
def test_ranks_that_wait_in_different_calls_are_told_of_both_before_a_stall_is_over(
    two: Ranks, tmp_path: Path, kinds: tuple[str, str]
) -> None:
    outcomes = two.run(call_different_things, tmp_path, kinds)
    assert max(secs for _, secs in outcomes) < 1.5 * SHORT_SECS
    named = [text for text, _ in outcomes if "waits in" in text]
    assert named
    assert all(kind in named[0] for kind in kinds)


# -- what is left in the store ------------------------------------------------------------------------


def open_and_close(rank: int, count: int, root: Path, times: int) -> None:
    for number in range(times):
        with acting_engine(root, SECS) as (engine, _):
            step = 10 * number
            engine.save(state_of(step), step=step + 1).result(SECS)
            engine.save({"x": torch.ones(number + 1), **state_of(step)}, step=step + 2).result(SECS)
            with pytest.raises(AioCkptError):
                engine.save(state_of(step), step=1).result(SECS)
            engine.load(state_of(0), None, strict=False, allow_missing=True, fallback=True).result(SECS)
            engine.rollback(step + 1).result()
            dist.barrier()


@pytest.mark.slow
@needs_list_keys
def test_engines_that_were_opened_and_closed_leave_no_keys(four: Ranks, tmp_path: Path) -> None:
    four.run(open_and_close, tmp_path, 1)
    before = four.store.num_keys()
    four.run(open_and_close, tmp_path / "other", 3)
    assert four.store.num_keys() <= before + 1
    assert left_of(four) == ["queue"], "the queue in which the engines meet stays, empty"


def open_and_leave_at_once(rank: int, count: int, root: Path, leaving: int) -> str:
    with acting_engine(root, SHORT_SECS) as (engine, _):
        if rank == leaving:
            engine.terminate()
            dist.barrier()
            return ""
        dist.barrier()
        with pytest.raises(AioCkptError) as raised:
            engine.save(state_of(1), step=1).result(SECS)
        return type(raised.value).__name__


@pytest.mark.sampled
@needs_list_keys
@pytest.mark.parametrize("leaving", [0, 1])
def test_a_rank_that_closes_before_the_others_come_hangs_nobody_and_leaves_no_keys(
    two: Ranks, tmp_path: Path, leaving: int
) -> None:
    assert two.run(open_and_leave_at_once, tmp_path, leaving)[1 - leaving] == "PeerFailedError"
    assert left_of(two) == ["queue"]
