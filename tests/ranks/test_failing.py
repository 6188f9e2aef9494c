"""A rank fails, dies, stops or comes late: all hear why, by their deadlines, and the next save works."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from builders import state_of
from rank_engines import acting_engine, held_engine, no_space, told
from rank_processes import Ranks, error_of, ranks
from rank_states import assert_same, mixed_state, zeroed
from slow import slow

from aio_ckpt import CheckpointEngine, EngineConfig, PerRank, SaveTicket, SyncCheckpointEngine
from aio_ckpt.errors import AioCkptError, PeerFailedError, StallError, StepOrderError, UnsafeObjectError
from aio_ckpt.format.root_names import ENGINE_DIR, PENDING_DIR
from aio_ckpt.ranks.messages import Topic

SECS = 30.0
SHORT_SECS = 4.0


def check_whole(rank: int, count: int, root: Path, step: int) -> None:
    """What is committed loads on this rank."""
    with SyncCheckpointEngine(root, EngineConfig(stall_timeout_secs=SECS, budget_bytes=64 << 20)) as engine:
        template = zeroed(mixed_state(rank, count))
        assert engine.load(template).step == step
        assert_same(template, mixed_state(rank, count, step))
        report = engine.save(mixed_state(rank, count, step + 10), step=step + 10).result(SECS)
        assert report is not None
        assert engine.steps()[-1] == step + 10


def visible(root: Path) -> list[str]:
    """Steps, and whatever else is no directory of the engine's own."""
    return sorted(path.name for path in root.iterdir() if path.is_dir() and path.name != ENGINE_DIR)


# -- a rank fails -----------------------------------------------------------------------------------


def fail_once(rank: int, count: int, root: Path, failing: int, at: tuple[str, str]) -> tuple[str, int | None, str]:
    with acting_engine(root, SECS) as (engine, storage):
        engine.save(mixed_state(rank, count, 1), step=1).result(SECS)
        if rank == failing:
            storage.at, storage.act = at, no_space
        error = engine.save(mixed_state(rank, count, 2), step=2).exception(SECS)
        assert engine.steps().result() == [1]
        dist.barrier()
        report = engine.save(mixed_state(rank, count, 3), step=3).result(SECS)
        assert report is not None
        assert not report.plan_hit, "what a failed save planned is not trusted"
        template = zeroed(mixed_state(rank, count))
        assert engine.load(template, None, **OPTIONS).result(SECS).step == 3
        assert_same(template, mixed_state(rank, count, 3))
        dist.barrier()
    return told(error)


OPTIONS = {"strict": False, "allow_missing": False, "fallback": True}


@pytest.mark.parametrize(
    ("failing", "at"),
    [
        slow(1, ("create_data_file", "*")),
        slow(1, ("write", "*")),
        slow(1, ("sync", "*")),
        (1, ("write_file", "aio_ckpt.*.1.bin")),
        (0, ("write", "*")),
        slow(0, ("write_file", "aio_ckpt.*.0.bin")),
        slow(0, ("write_file", ".metadata")),
        slow(0, ("write_file", "aio_ckpt.*.json")),
        (0, ("rename", "*")),
    ],
)
def test_a_full_disk_on_one_rank_fails_the_save_on_all_and_the_next_one_works(
    two: Ranks, tmp_path: Path, failing: int, at: tuple[str, str]
) -> None:
    outcomes = two.run(fail_once, tmp_path, failing, at)
    kind, _, text = outcomes[failing]
    assert kind in ("OSError", "WriteError")
    assert "No space" in text
    kind, rank, text = outcomes[1 - failing]
    assert (kind, rank) == ("PeerFailedError", failing)
    assert "No space" in text
    assert visible(tmp_path) == ["step_000000001", "step_000000003"]


def fail_behind_the_votes(rank: int, count: int, root: Path) -> str:
    """The leader has learned where the objects of step 2 stand; those of step 3 stand where those of step 1 did."""

    def state(text: str) -> dict[str, Any]:
        return {"w": torch.ones(3), "text": [text], "last": [1], "mine": PerRank([text])}

    with acting_engine(root, SECS, max_in_flight=2) as (engine, storage):
        engine.save(state("short"), step=1).result(SECS)
        is_leader = rank == 0
        learned = storage.hold("write_file", ".metadata") if is_leader else None
        if is_leader:
            storage.fail("write_file", ".metadata", OSError(28, "No space left on device"))
        storage.calls.clear()
        failing = engine.save(state("much longer" * 1000), step=2)
        storage.wait_for("sync", "*.distcp")
        late = storage.hold("sync", "*.distcp")
        going_on = engine.save(state("short"), step=3)
        late.wait_reached()
        dist.barrier()
        if learned is not None:
            learned.open()
        error = failing.exception(SECS)
        late.open()
        report = going_on.result(SECS)
        assert report is not None
        assert report.plan_hit
    return str(error)


def test_a_save_that_failed_behind_the_votes_does_not_fail_the_save_beside_it(two: Ranks, tmp_path: Path) -> None:
    assert all("No space" in text for text in two.run(fail_behind_the_votes, tmp_path))
    assert visible(tmp_path) == ["step_000000001", "step_000000003"]


def fail_in_a_wave(rank: int, count: int, root: Path, failing: int) -> list[str]:
    """The state of one rank fits its budget: its save goes on in the background, and nobody awaits it."""
    found = []
    budget_bytes = 256 << 10 if rank == failing else 64 << 20
    with acting_engine(root, SECS, budget_bytes=budget_bytes) as (engine, storage):
        for step in (1, 2, 3):
            if rank == failing and step == 2:
                storage.at, storage.act = ("write", "*"), no_space
            try:
                ticket = engine.save({f"mine{rank}": torch.full((1 << 20,), float(step))}, step=step)
            except OSError as error:
                found.append(str(error))
            else:
                found.append("saved")
                if step != 2:
                    ticket.result(SECS)
        assert engine.steps().result() == [1, 3]
        back: Any = engine.read(3, only=None).result(SECS)
        found.append(str(back[f"mine{rank}"].unique().tolist()))
        dist.barrier()
    return found


@pytest.mark.parametrize("failing", [0, 1])
def test_a_write_that_fails_in_a_wave_is_raised_once_where_it_failed_and_the_next_save_works(
    two: Ranks, tmp_path: Path, failing: int
) -> None:
    """At the next call another rank would raise it where this one does not."""
    outcomes = two.run(fail_in_a_wave, tmp_path, failing)
    assert outcomes[1 - failing] == ["saved", "saved", "saved", "[3.0]"]
    first, text, *last = outcomes[failing]
    assert [first, *last] == ["saved", "saved", "[3.0]"]
    assert "No space" in text


def refuse_once(rank: int, count: int, root: Path) -> list[str]:
    found = []
    with acting_engine(root, SECS) as (engine, _):
        for step in (1, 2, 3):
            state = mixed_state(rank, count, step)
            if step == 2 and rank == 1:
                state["code"] = lambda: None
            try:
                engine.save(state, step=step).result(SECS)
                found.append("saved")
            except UnsafeObjectError:
                found.append("refused")
            except PeerFailedError as error:
                found.append(f"{error.rank} {error.stage} {'UnsafeObjectError' in str(error)}")
        dist.barrier()
        assert engine.steps().result() == [1, 3]
        dist.barrier()
    return found


def test_a_state_that_one_rank_refuses_is_saved_by_none_and_the_next_one_is(two: Ranks, tmp_path: Path) -> None:
    assert two.run(refuse_once, tmp_path) == [["saved", "1 capture True", "saved"], ["saved", "refused", "saved"]]


def refused_by_one(rank: int, count: int, root: Path) -> tuple[str, str]:
    with acting_engine(root, SECS) as (engine, _):
        state: dict[str, Any] = {"a": torch.ones(3), "code": (lambda: None) if rank == 2 else 1}
        with pytest.raises(UnsafeObjectError if rank == 2 else PeerFailedError) as caught:
            engine.save(state, step=1).result(SECS)
        dist.barrier()
    return str(caught.value), getattr(caught.value, "cause", "")


def test_what_one_rank_fails_with_is_told_once_in_the_errors_of_the_others(four: Ranks, tmp_path: Path) -> None:
    (first, cause), *others = four.run(refused_by_one, tmp_path)
    (refused, _) = others.pop(1)
    assert cause == f"UnsafeObjectError: {refused}"
    assert first == f"rank 2 failed in the save of step 1: {cause}"
    assert others == [(first, cause)] * 2, "who hears it from rank 0 hears the same"


def save_another_step(rank: int, count: int, root: Path) -> str:
    with acting_engine(root, SECS) as (engine, _):
        error = error_of(lambda: engine.save({"a": torch.ones(3)}, step=1 + rank), SECS)
        assert isinstance(error, PeerFailedError)
        dist.barrier()
        assert engine.steps().result() == []
        assert engine.save({"a": torch.ones(3)}, step=5).result(SECS) is not None
        with pytest.raises(StepOrderError):
            engine.save({"a": torch.ones(3)}, step=5)
        dist.barrier()
    return str(error)


def test_ranks_that_save_different_steps_are_told(two: Ranks, tmp_path: Path) -> None:
    for text in two.run(save_another_step, tmp_path):
        assert "rank 1 saves step 2 where rank 0 saves step 1" in text


def come_late(rank: int, count: int, root: Path) -> float:
    with acting_engine(root, SHORT_SECS) as (engine, _):
        engine.save(mixed_state(rank, count, 1), step=1).result(SECS)
        state = mixed_state(rank, count, 2)
        dist.barrier()
        if rank == 1:
            time.sleep(SHORT_SECS / 2)  # the time that passes is what is tested
        began = time.monotonic()
        ticket = engine.save(state, step=2)
        blocked = time.monotonic() - began
        assert ticket.result(SECS) is not None
        dist.barrier()
    return blocked


def test_a_rank_that_comes_later_to_save_keeps_nobody_in_it(two: Ranks, tmp_path: Path) -> None:
    assert max(two.run(come_late, tmp_path)) < SHORT_SECS / 2


def be_slow(rank: int, count: int, root: Path) -> None:
    with acting_engine(root, SHORT_SECS / 2) as (engine, storage):
        engine.save(mixed_state(rank, count, 1), step=1).result(SECS)
        if rank == 1:
            storage.slow("write", secs=0.3 * SHORT_SECS)
            storage.slow("sync", secs=0.3 * SHORT_SECS)
        assert engine.save(mixed_state(rank, count, 2), step=2).result(SECS) is not None
        dist.barrier()


def test_a_disk_that_is_slower_than_the_deadline_but_moves_is_waited_for(two: Ranks, tmp_path: Path) -> None:
    two.run(be_slow, tmp_path)


# -- a rank dies ------------------------------------------------------------------------------------


def die_at(
    rank: int, count: int, root: Path, dying: int, at: tuple[str, str], sign: int
) -> tuple[str, int | None, str]:
    with acting_engine(root, SHORT_SECS) as (engine, storage):
        engine.save(mixed_state(rank, count, 1), step=1).result(SECS)
        dist.barrier()
        if rank == dying:
            storage.at, storage.act = at, lambda: os.kill(os.getpid(), sign)
        ticket = engine.save(mixed_state(rank, count, 2), step=2)
        began = time.monotonic()
        error = ticket.exception(SECS)
        assert time.monotonic() - began < SECS
        assert error is None or isinstance(error, AioCkptError)
    return told(error)


DEATHS = [
    (1, ("create_data_file", "*"), 1),
    (1, ("write", "*"), 1),
    (1, ("write_file", "aio_ckpt.*.1.bin"), 1),
    (0, ("write", "*"), 1),
    (0, ("write_file", ".metadata"), 1),
    (0, ("rename", "*"), 1),
    (0, ("sync_dir", "pending"), 2),
]
"""Who dies, at which call, and which step is the newest afterwards."""
SLOW_DEATHS = [DEATHS[0], DEATHS[3]]


@pytest.fixture(scope="module")
def dead(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[int, tuple[Ranks, Path]]]:
    """Two ranks and their root for each of ``DEATHS`` that runs: one has died, the other waits out its deadline.

    One after the other to that point, so that nobody is starved, and together from there on.
    """
    tests = [item for item in request.session.items if isinstance(item, pytest.Function)]
    cases = sorted({item.callspec.params["case"] for item in tests if "dead" in item.fixturenames})
    with contextlib.ExitStack() as stack:
        found = {}
        for case in cases:
            dying, at, _ = DEATHS[case]
            two, root = stack.enter_context(ranks(2)), tmp_path_factory.mktemp("death")
            for rank in range(2):
                two.start(rank, die_at, root, dying, at, signal.SIGKILL)
            two.wait_until_dead(dying)
            found[case] = two, root
        yield found


@pytest.mark.sampled
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{death[0]}-{' '.join(death[1])}", marks=[pytest.mark.slow] * (death in SLOW_DEATHS))
        for case, death in enumerate(DEATHS)
    ],
)
def test_after_the_death_of_a_rank_the_others_name_it_and_the_next_run_goes_on(
    dead: dict[int, tuple[Ranks, Path]], two: Ranks, case: int
) -> None:
    (those, root), (dying, _, newest) = dead[case], DEATHS[case]
    kind, rank, text = those.finish(1 - dying)
    assert (kind, rank) == ("PeerFailedError", dying), text
    assert f"rank {dying} gave no sign of life" in text
    two.run(check_whole, root, newest)
    assert [name for name in visible(root) if name.startswith(".pending")] == []


def stop_at(rank: int, count: int, root: Path, at: tuple[str, str]) -> tuple[str, int | None, str]:
    outcome = die_at(rank, count, root, 1, at, signal.SIGSTOP)
    return outcome


@pytest.mark.slow
def test_a_rank_that_is_stopped_longer_than_the_deadline_hears_that_the_save_failed(tmp_path: Path) -> None:
    with ranks(2) as two:
        for rank in range(2):
            two.start(rank, stop_at, tmp_path, ("write", "*"))
        kind, named, _ = two.finish(0)
        assert (kind, named) == ("PeerFailedError", 1)
        two.signal(1, signal.SIGCONT)
        kind, named, text = two.finish(1)
        assert kind == "PeerFailedError", text
        assert named == 1
        two.run(check_whole, tmp_path, 1)
    assert visible(tmp_path) == ["step_000000001", "step_000000011"]


# -- groups and restarts ----------------------------------------------------------------------------


def end_group_first(rank: int, count: int, root: Path) -> None:
    engine = SyncCheckpointEngine(root, EngineConfig(stall_timeout_secs=SECS, budget_bytes=64 << 20))
    state = mixed_state(rank, count, 1)
    engine.save(state, step=1).result(SECS)
    ticket = engine.save(mixed_state(rank, count, 2), step=2)
    dist.destroy_process_group()
    assert ticket.result(SECS) is not None
    assert engine.steps() == [1, 2]
    engine.close()


def test_the_process_group_may_go_before_the_engine(tmp_path: Path) -> None:
    with ranks(2) as two:
        two.run(end_group_first, tmp_path)


def restart_in_process(rank: int, count: int, root: Path) -> None:
    engine = CheckpointEngine(root, EngineConfig(stall_timeout_secs=SECS, budget_bytes=64 << 20))
    engine.save(mixed_state(rank, count, 1), step=1).result(SECS)
    engine.terminate()
    store = dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=count)
    check_whole(rank, count, root, 1)


def test_a_new_group_and_a_new_engine_go_on_in_the_same_process(tmp_path: Path) -> None:
    with ranks(2) as two:
        two.run(restart_in_process, tmp_path)


def save_and_die(rank: int, count: int, root: Path) -> tuple[str, int | None, str]:
    with acting_engine(root, SHORT_SECS) as (engine, storage):
        engine.save({"a": torch.arange(10.0), "n": 3}, step=1).result(SECS)
        dist.barrier()
        if rank == 0:
            storage.at, storage.act = ("write", "*"), lambda: os.kill(os.getpid(), signal.SIGKILL)
        return told(engine.save({"a": torch.arange(10.0), "n": 4}, step=2).exception(SECS))


def load_mixed(rank: int, count: int, root: Path) -> None:
    with SyncCheckpointEngine(root, EngineConfig(stall_timeout_secs=SECS, budget_bytes=64 << 20)) as engine:
        state = {"a": torch.zeros(10), "n": 0}
        assert engine.load(state).step == 1
        assert torch.equal(state["a"], torch.arange(10.0))
        engine.save(state).result(SECS)


@pytest.mark.slow
def test_what_two_ranks_left_pending_does_not_hinder_four(tmp_path: Path, four: Ranks) -> None:
    with ranks(2) as two:
        for rank in range(2):
            two.start(rank, save_and_die, tmp_path)
        two.finish(1)
    assert any((tmp_path / PENDING_DIR).iterdir())
    four.run(load_mixed, tmp_path)
    assert visible(tmp_path) == ["step_000000001", "step_000000002"]


def open_elsewhere(rank: int, count: int, root: Path, stall_secs: float) -> str:
    try:
        with SyncCheckpointEngine(root / f"of {rank}", EngineConfig(stall_timeout_secs=stall_secs)) as engine:
            engine.save({"a": 1}).result(SECS)
    except AioCkptError as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def test_ranks_that_open_different_roots_are_told_in_time(two: Ranks, tmp_path: Path) -> None:
    for text in two.run(open_elsewhere, tmp_path, SHORT_SECS):
        assert "the ranks have different roots" in text
        assert f"rank 0 on {os.uname().nodename}, {tmp_path / 'of 0'}: give a directory" in text


def open_otherwise(rank: int, count: int, root: Path, setting: str) -> str:
    odd = {"when_busy": "skip"} if setting == "when_busy" else {"step_dir": "step-{step}"}
    config = EngineConfig(stall_timeout_secs=SECS, **(odd if rank == count - 1 else {}))  # type: ignore[arg-type]
    try:
        with SyncCheckpointEngine(root, config) as engine:
            engine.save({"a": 1})
    except AioCkptError as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


@pytest.mark.parametrize("setting", ["when_busy", "step_dir"])
def test_ranks_whose_settings_must_not_differ_are_all_told_which_one_does(
    two: Ranks, tmp_path: Path, setting: str
) -> None:
    """One that skips while the others wait would wait for a word that nobody says."""
    for text in two.run(open_otherwise, tmp_path, setting):
        assert text.startswith(f"ConfigError: the settings of the ranks differ: {setting} is ")
        assert "on rank 0 and" in text
        assert text.endswith("open anew")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(("step", ".pending"))] == []


# -- deadlines --------------------------------------------------------------------------------------

STALL_SECS = 24.0
DEADLINE_SECS = 1.0
LATE_SECS = 3.0
"""How much later a save may end on a busy machine; all that it could wait for is far longer."""


def kind_of(error: BaseException | None) -> str:
    return type(error).__name__


def stop_for_a_while() -> None:
    subprocess.Popen(["sh", "-c", f"sleep {DEADLINE_SECS + LATE_SECS + 1.0}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


# -- the leader is stopped or slow --------------------------------------------------------------------


def stop_the_leader(rank: int, count: int, root: Path, size: int) -> tuple[str, bool, float, list[int], int]:
    """``size``: of the state of the save in question; another one than before is planned anew."""
    with acting_engine(root, STALL_SECS, on_failure="log") as (engine, storage):
        engine.save(state_of(1), step=1).result(STALL_SECS)
        dist.barrier()
        if rank == 0:
            storage.at, storage.act = ("write", "*"), stop_for_a_while
        began = time.monotonic()
        error = engine.save(state_of(2, size), step=2, deadline_secs=DEADLINE_SECS).exception(STALL_SECS)
        secs = time.monotonic() - began
        dist.barrier()
        steps = engine.steps().result()
        dist.barrier()
        ticket = engine.save(state_of(3))
        ticket.result(STALL_SECS)
        dist.barrier()
    return kind_of(error), getattr(error, "in_doubt", False), secs, steps, ticket.step


@pytest.mark.slow
@pytest.mark.parametrize("size", [slow(300), 400])
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
    error = ticket.exception(STALL_SECS)
    secs = time.monotonic() - began
    if rank == 1:
        dist.barrier()
    dist.barrier()
    return error, secs


def hold_the_shares(rank: int, count: int, root: Path) -> tuple[str, bool, float]:
    with held_engine(root, STALL_SECS, on_failure="log") as (engine, coordinator, _):
        engine.save(state_of(1), step=1).result(STALL_SECS)
        dist.barrier()
        if rank == 0:
            coordinator.topic = Topic("save", 2)
        began = time.monotonic()
        error = error_of(lambda: engine.save(state_of(2, 400), step=2, deadline_secs=DEADLINE_SECS), STALL_SECS)
        secs = time.monotonic() - began
        dist.barrier()
        coordinator.gate.open()
        dist.barrier()
        assert engine.steps().result() == [1]
        engine.save(state_of(3), step=3).result(STALL_SECS)
        dist.barrier()
    return kind_of(error), getattr(error, "in_doubt", False), secs


def test_a_save_ends_by_its_deadline_while_the_leader_assigns_shares(two: Ranks, tmp_path: Path) -> None:
    leader, (kind, in_doubt, secs) = two.run(hold_the_shares, tmp_path)
    assert leader[0] in ("StallError", "PeerFailedError")
    assert kind in ("StallError", "PeerFailedError"), "its own deadline, or the leader's, which may be told first"
    assert not in_doubt, "nothing of this rank was told that could be committed"
    assert secs < DEADLINE_SECS + LATE_SECS


def commit_late(rank: int, count: int, root: Path) -> tuple[str, bool, float, list[int], int]:
    with acting_engine(root, STALL_SECS, on_failure="log") as (engine, storage):
        engine.save(state_of(1), step=1).result(STALL_SECS)
        dist.barrier()
        gate = storage.hold("rename") if rank == 0 else None
        began = time.monotonic()
        ticket = engine.save(state_of(2), step=2, deadline_secs=DEADLINE_SECS)
        if gate is not None:
            gate.wait_reached()
            dist.barrier()
            storage.release(gate)
            gate.open()
        error, secs = ended(rank, ticket, began)
        steps = engine.steps().result()
        ticket = engine.save(state_of(3))
        ticket.result(STALL_SECS)
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
    with held_engine(root, STALL_SECS, on_failure="log") as (engine, _, _):
        engine.save(state_of(1), step=1).result(STALL_SECS)
        dist.barrier()
        large = {f"w{number}": torch.full((1 << 20,), float(number)) for number in range(24)}
        if rank == 0:
            dist.barrier()  # it comes when the other has given up
        began = time.monotonic()
        error: BaseException | None = None
        try:
            error = engine.save(large, step=2, deadline_secs=DEADLINE_SECS).exception(STALL_SECS)
        except AioCkptError as raised:
            error = raised
        secs = time.monotonic() - began
        if rank == 1:
            dist.barrier()
        dist.barrier()
        assert engine.steps().result() == [1]
        engine.save(state_of(3), step=3).result(STALL_SECS)
        dist.barrier()
    return " ".join(map(str, told(error))), secs


def test_a_save_that_agrees_before_its_capture_gives_up_at_its_deadline(two: Ranks, tmp_path: Path) -> None:
    (leader, _), (other, secs) = two.run(agree_before_the_capture, tmp_path)
    assert leader.startswith(PeerFailedError.__name__)
    assert other.startswith(StallError.__name__)
    assert "waiting for the plans of the other ranks" in other
    assert secs < DEADLINE_SECS + LATE_SECS
