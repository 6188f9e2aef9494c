"""Steps: their order, discovery, rollback, overwrite, the names of their directories."""

from __future__ import annotations

import asyncio
import enum
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import listing, save, value, weights
from gated_storage import TIMEOUT, gated_engine
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples
from saved_files import data_file

from aio_ckpt import EngineConfig, SyncCheckpointEngine
from aio_ckpt.commit.quarantine import Quarantine
from aio_ckpt.commit.step_numbers import MAX_STEP
from aio_ckpt.engine.known_steps import KnownSteps, check_step_is_free
from aio_ckpt.errors import (
    BusyError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    RootError,
    SaveCancelledError,
    StepOrderError,
    WriteError,
)
from aio_ckpt.format.root_names import ABANDONED_DIR, ENGINE_DIR
from aio_ckpt.format.step_names import StepNames


@pytest.fixture
def engine(root: Path) -> Iterator[SyncCheckpointEngine]:
    with SyncCheckpointEngine(root) as engine:
        yield engine


# -- order ----------------------------------------------------------------------------------------


def test_a_step_that_does_not_exceed_every_committed_one_is_refused(engine: SyncCheckpointEngine, root: Path) -> None:
    save(engine, 5, 9)
    before = listing(root)
    ways = r"load\(\) resumes after step 9, rollback\(step\) .*, another root begins anew"
    for step, hint in ((9, r", save\(overwrite=True\)"), (5, r", save\(overwrite=True\)"), (7, "$"), (0, "$")):
        with pytest.raises(StepOrderError, match=rf"step={step} .* 9: {ways}{hint}"):
            engine.save(weights(0), step)
    assert listing(root) == before
    assert value(engine) == 9
    save(engine, 10)


def test_a_step_whose_directory_was_removed_by_hand_is_refused_and_the_error_says_so(
    engine: SyncCheckpointEngine, root: Path
) -> None:
    save(engine, 5, 9)
    shutil.rmtree(root / "step_000000009")
    with pytest.raises(StepOrderError, match=r"whose directory is gone: give step 10 or a later one, or open a new"):
        engine.save(weights(9), 9)
    save(engine, 10)


def test_a_step_that_does_not_exceed_a_pending_one_is_refused(root: Path) -> None:
    with gated_engine(root, max_in_flight=2) as (engine, storage):
        gate = storage.hold("sync", "*.distcp")
        first = engine.save(weights(5), 5)
        gate.wait_reached()
        for overwrite in (False, True):
            with pytest.raises(StepOrderError, match=r"pending step 5: .* await its ticket \(or engine.ready\(\)"):
                engine.save(weights(5), 5, overwrite=overwrite)
        with pytest.raises(StepOrderError, match="pending step 5"):
            engine.save(weights(4), 4, overwrite=True)
        second = engine.save(weights(6))
        gate.open()
        assert [first.result(TIMEOUT).step, second.result(TIMEOUT).step] == [5, 6]


def test_the_default_step_follows_the_newest_committed_or_pending_one(root: Path) -> None:
    with gated_engine(root, max_in_flight=3) as (engine, storage):
        assert engine.save(weights(1)).result(TIMEOUT).step == 1
        engine.save(weights(41), 41).result(TIMEOUT)
        gate = storage.hold("sync", "*.distcp")
        assert engine.save(weights(1)).step == 42
        gate.wait_reached()
        assert engine.save(weights(1)).step == 43
        gate.open()
    with SyncCheckpointEngine(root) as again:
        assert again.steps() == [1, 41, 42, 43]
        assert again.save(weights(1)).result(TIMEOUT).step == 44


def test_a_failed_save_gives_its_step_free(root: Path) -> None:
    with gated_engine(root) as (engine, storage):
        storage.fail("sync", "*", WriteError(errno.EIO, "broken", "x"))
        with pytest.raises(WriteError):
            engine.save(weights(7), 7).result(TIMEOUT)
        assert engine.save(weights(7), 7).result(TIMEOUT).step == 7


def test_a_later_save_is_never_visible_before_an_earlier_one(root: Path) -> None:
    with gated_engine(root, max_in_flight=2) as (engine, storage):
        gate = storage.hold("write_file", "aio_ckpt.*.0.bin")
        first = engine.save(weights(1), 1)
        gate.wait_reached()
        storage.release(gate)  # later calls pass, the first still waits
        second = engine.save(weights(2), 2)
        storage.wait_for("write_file", "aio_ckpt.*.0.bin")  # the second's
        assert engine.steps().result() == []
        assert not second.done()
        gate.open()
        second.result(TIMEOUT)
        assert first.done()
        renamed = [call.other.name for call in storage.calls if call.name == "rename" and call.other]
        assert renamed == ["step_000000001", "step_000000002"]


async def turns() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


def test_a_save_waits_for_all_earlier_ones_also_when_the_one_before_it_failed(root: Path) -> None:
    with gated_engine(root, max_in_flight=3) as (engine, storage):
        gate = storage.hold("write_file", "aio_ckpt.*.0.bin")
        first = engine.save(weights(1), 1)
        gate.wait_reached()
        storage.release(gate)
        held = storage.hold("write_file", "aio_ckpt.*.0.bin")
        second = engine.save(weights(2), 2)
        held.wait_reached()
        storage.release(held)
        third = engine.save(weights(3), 3)
        storage.wait_for("write_file", "aio_ckpt.*.0.bin")  # the third's
        assert second.cancel()
        assert isinstance(second.exception(TIMEOUT), SaveCancelledError)
        engine._portal.call(turns, timeout=TIMEOUT, what="turns")  # in which it would go on if it did not wait
        assert not [call for call in storage.begun if call.matches("write_file", "aio_ckpt.*.json")]
        gate.open()
        third.result(TIMEOUT)
        assert first.done()
        renamed = [call.other.name for call in storage.calls if call.name == "rename" and call.other]
        assert renamed == ["step_000000001", "step_000000003"]


class Named(enum.IntEnum):
    THREE = 3


BAD_STEPS = [-1, True, False, "3", 3.0, np.float64(3), np.bool_(True), np.int64(-1), np.array(3), torch.tensor(3), [3]]
WHOLE_NUMBERS = [np.int64(3), np.uint8(3), np.array([3])[0], Named.THREE]


@pytest.mark.parametrize("step", BAD_STEPS, ids=repr)
def test_a_step_that_is_no_whole_number_from_zero_is_refused(engine: SyncCheckpointEngine, root: Path, step) -> None:
    with pytest.raises(StepOrderError, match=r"give a whole number from 0 to .* such as int"):
        engine.save(weights(1), step)
    assert not root.exists()


@pytest.mark.parametrize("step", WHOLE_NUMBERS, ids=repr)
def test_a_step_may_be_any_kind_of_whole_number(engine: SyncCheckpointEngine, root: Path, step) -> None:
    save(engine, 1)
    ticket = engine.save(weights(3), step)
    assert type(ticket.step) is type(ticket.result(TIMEOUT).step) is int
    save(engine, 4)
    assert [ticket.step, *engine.steps()] == [3, 1, 3, 4]
    engine.protect(step)
    assert engine.protected_steps() == [3]
    engine.unprotect(step)
    assert engine.protected_steps() == []
    assert engine.load(weights(0), step).step == 3
    assert engine.read(step)["w"][0] == 3
    assert engine.rollback(step) == [4]
    assert engine.save(weights(3), step, overwrite=True).result(TIMEOUT).step == 3
    assert [name for name in listing(root) if "abandoned/" not in name] == ["step_000000001", "step_000000003"]


@pytest.mark.parametrize("step", [2**62 + 1, 10**30, pytest.param(10**5000, id="huge")])
def test_a_step_that_no_manifest_holds_is_refused(engine: SyncCheckpointEngine, root: Path, step: int) -> None:
    for call in (
        lambda: engine.save(weights(1), step),
        lambda: engine.load(weights(1), step),
        lambda: engine.read(step),
    ):
        with pytest.raises(StepOrderError, match="give a whole number from 0 to 4611686018427387904"):
            call()
    assert not root.exists()


def test_step_zero_is_a_step(engine: SyncCheckpointEngine) -> None:
    save(engine, 0)
    assert engine.steps() == [0]
    assert engine.latest_step() == 0
    assert engine.save(weights(1)).result(TIMEOUT).step == 1


def test_without_checkpoints_there_is_no_latest_step(engine: SyncCheckpointEngine) -> None:
    assert engine.steps() == []
    assert engine.latest_step() is None
    with pytest.raises(CheckpointNotFoundError, match=r"no committed checkpoint under .*; committed steps: \[\]"):
        engine.read()


# -- what many ranks know ---------------------------------------------------------------------------


class Rank:
    """What one of several ranks knows of the steps; the saves that are pending here."""

    def __init__(self) -> None:
        self.steps = KnownSteps(Quarantine(), counts_calls=True)
        self.pending: dict[int, int] = {}
        self.newest: int | None = None
        self.steps.learn(list)

    def call(self, number: int, given: int | None = None) -> int:
        step = self.steps.claim(number, given, list(self.pending.values()), agreed=self.newest)
        self.pending[number] = step
        return step

    def end(self, number: int, *, is_committed: bool) -> None:
        step = self.pending.pop(number)
        self.steps.finish(step, is_committed=is_committed)
        if is_committed:
            self.newest = max(step, self.newest or 0)


def test_a_step_that_failed_here_and_is_pending_there_counts_on_both() -> None:
    early, late = Rank(), Rank()
    assert [rank.call(1) for rank in (early, late)] == [1, 1]
    early.end(1, is_committed=False)  # the other has not heard of it yet
    assert [rank.call(2) for rank in (early, late)] == [2, 2]
    late.end(1, is_committed=False)
    early.end(2, is_committed=False)
    assert [rank.call(3) for rank in (early, late)] == [3, 3]


def test_many_ranks_leave_out_the_step_of_a_save_that_failed_until_they_go_back() -> None:
    rank = Rank()
    for number in (1, 2, 3):
        assert rank.call(number) == number
        rank.end(number, is_committed=number == 1)
    assert rank.call(4, 2) == 2, "a step that the caller gives may be that of a save that failed"
    rank.end(4, is_committed=True)
    assert rank.call(5) == 4
    rank.end(5, is_committed=True)
    rank.steps.change(2)
    rank.newest = 2
    assert rank.call(6) == 3


def test_a_step_that_is_no_step_counts_as_not_given_on_every_rank() -> None:
    refusing, other = Rank(), Rank()
    assert [refusing.call(1, -1), other.call(1)] == [1, 1]
    assert [refusing.call(2, MAX_STEP + 1), other.call(2)] == [2, 2]
    assert [refusing.call(3), other.call(3)] == [3, 3]


@given(
    max_in_flight=st.integers(1, 4),
    calls=st.lists(st.tuples(st.booleans(), st.none() | st.integers(0, 30)), min_size=1, max_size=10),
    lags=st.lists(st.lists(st.integers(0, 3), min_size=10, max_size=10), min_size=2, max_size=3),
)
@examples(300)
def test_calls_without_a_step_get_the_same_ones_however_early_each_rank_learns_of_failures(
    max_in_flight: int, calls: list[tuple[bool, int | None]], lags: list[list[int]]
) -> None:
    """``calls``: whether each is committed, and the step that it was given; what was given in no order is refused."""
    ranks = [Rank() for _ in lags]
    for number, (_, asked) in enumerate(calls):
        for rank, lag in zip(ranks, lags, strict=True):
            ended = number - max_in_flight + 1 + min(lag[number], max_in_flight - 1)  # calls below have ended here
            for other in [other for other in rank.pending if other < ended]:
                rank.end(other, is_committed=calls[other][0] and calls[other][1] is None)
        found = {rank.call(number, asked) for rank in ranks}
        assert len(found) == 1
        assert asked is not None or found.pop() > max(rank.steps.newest(()) or 0 for rank in ranks)


@given(
    step=st.integers(-3, 12),
    newest=st.none() | st.integers(0, 10),
    committed=st.sets(st.integers(0, 10)),
    pending=st.sets(st.integers(0, 10)),
    overwrite=st.booleans(),
)
@examples(300)
def test_a_step_is_taken_only_if_it_is_new_or_replaces_itself(
    step: int, newest: int | None, committed: set[int], pending: set[int], overwrite: bool
) -> None:
    may = step >= 0 and (newest is None or step > newest or (overwrite and step in committed))
    try:
        taken = check_step_is_free(step, newest=newest, committed=committed, pending=pending, overwrite=overwrite)
        assert taken == step
    except StepOrderError:
        assert not may
    else:
        assert may


def test_a_step_that_another_writer_committed_meanwhile_counts(root: Path) -> None:
    with SyncCheckpointEngine(root) as mine:
        with SyncCheckpointEngine(root) as other:
            save(other, 1)
            with pytest.raises(RootError, match="another engine"):
                mine.save(weights(2), 2)  # it knows of step 1 now
            save(other, 5)
        with pytest.raises(StepOrderError, match="newest committed or pending step 5"):
            mine.save(weights(3), 3)
        assert mine.save(weights(6)).result(TIMEOUT).step == 6


# -- overwrite and rollback -----------------------------------------------------------------------


def test_overwrite_replaces_that_step_only(engine: SyncCheckpointEngine, root: Path) -> None:
    save(engine, 1, 2, 3)
    assert engine.save(weights(20), 2, overwrite=True).result(TIMEOUT).step == 2
    assert [value(engine, step) for step in (1, 2, 3)] == [1, 20, 3]
    assert engine.steps() == [1, 2, 3]
    assert len(listing(root)) == 3


def test_overwrite_replaces_no_directory_that_never_was_a_checkpoint(engine: SyncCheckpointEngine, root: Path) -> None:
    save(engine, 1)
    (root / "step_000000005").mkdir()
    (root / "step_000000005" / "notes").write_text("mine")
    with pytest.raises(WriteError, match="holds no checkpoint"):
        engine.save(weights(5), 5, overwrite=True).result(TIMEOUT)
    assert (root / "step_000000005" / "notes").read_text() == "mine"


def test_overwrite_of_a_step_that_is_not_there_must_exceed_every_step(engine: SyncCheckpointEngine) -> None:
    save(engine, 3)
    with pytest.raises(StepOrderError, match=r"rollback\(step\) goes back"):
        engine.save(weights(2), 2, overwrite=True)
    assert engine.save(weights(4), 4, overwrite=True).result(TIMEOUT).step == 4


def test_rollback_puts_later_steps_aside_and_deletes_nothing(engine: SyncCheckpointEngine, root: Path) -> None:
    save(engine, 1, 2, 3)
    assert engine.rollback(1) == [3, 2]
    assert engine.steps() == [1]
    aside = list((root / ABANDONED_DIR).iterdir())
    assert sorted(path.name.rpartition("-")[2] for path in aside) == ["step_000000002", "step_000000003"]
    assert all((path / ".metadata").exists() and data_file(path).exists() for path in aside)
    save(engine, 2)
    assert engine.rollback(1) == [2]  # the second time too: names of abandoned steps do not collide
    assert engine.save(weights(9)).result(TIMEOUT).step == 2


def test_rollback_sets_every_directory_of_a_later_step_aside(engine: SyncCheckpointEngine, root: Path) -> None:
    save(engine, 1, 2, 3)
    shutil.copytree(root / "step_000000003", root / "step-3")
    assert engine.rollback(2) == [3]
    assert engine.steps() == [1, 2]
    save(engine, 3)


def test_rollback_sets_a_later_step_aside_that_has_lost_its_metadata(engine: SyncCheckpointEngine, root: Path) -> None:
    save(engine, 1, 2, 3)
    (root / "step_000000002" / ".metadata").unlink()
    assert engine.rollback(1) == [3, 2]
    save(engine, 2)
    assert engine.steps() == [1, 2]


def test_rollback_to_a_step_that_is_not_there_says_which_are(engine: SyncCheckpointEngine) -> None:
    save(engine, 1, 3)
    with pytest.raises(CheckpointNotFoundError, match=r"rollback\(2\).*committed are \[1, 3\]"):
        engine.rollback(2)
    assert engine.steps() == [1, 3]


def test_rollback_to_the_newest_step_changes_nothing(engine: SyncCheckpointEngine, root: Path) -> None:
    save(engine, 1, 2)
    before = listing(root)
    assert engine.rollback(2) == []
    assert listing(root) == before


def test_after_a_rollback_that_failed_midway_the_steps_are_read_anew(root: Path) -> None:
    with gated_engine(root) as (engine, storage):
        for step in range(1, 6):
            engine.save(weights(step), step).result(TIMEOUT)
        storage.fail("rename", "step_000000003", WriteError(errno.EIO, "Input/output error"))
        with pytest.raises(WriteError):
            engine.rollback(1).result()
        assert engine.steps().result() == [1, 2, 3]
        assert engine.save(weights(4)).result(TIMEOUT).step == 4


def test_rollback_while_a_save_is_pending_is_refused(root: Path) -> None:
    with gated_engine(root) as (engine, storage):
        engine.save(weights(1), 1).result(TIMEOUT)
        gate = storage.hold("sync", "*.distcp")
        ticket = engine.save(weights(2), 2)
        with pytest.raises(BusyError, match=r"rollback\(1\).*await"):
            engine.rollback(1).result()
        gate.open()
        ticket.result(TIMEOUT)
        assert engine.rollback(1).result() == [2]


# -- names of directories -------------------------------------------------------------------------

FOREIGN = ["step-7", "iter_0000007", "checkpoint-7", "global_step7"]


@pytest.mark.parametrize("name", FOREIGN)
def test_a_checkpoint_under_another_tools_name_is_found_and_read(
    engine: SyncCheckpointEngine, root: Path, name: str
) -> None:
    save(engine, 7)
    engine.close()
    (root / "step_000000007").rename(root / name)
    with SyncCheckpointEngine(root) as again:
        assert again.steps() == [7]
        assert value(again) == 7
        with pytest.raises(StepOrderError):
            again.save(weights(7), 7)


@pytest.mark.parametrize(
    "name",
    [
        ".aio_ckpt/pending/step_000000007",
        ".aio_ckpt/abandoned/1-step_000000007",
        ".aio_ckpt/trash/step_000000007",
        ".step_000000007",
        "step_000000007.tmp",
        "xstep_7",
        "step_",
        "step_-7",
        "step_7x",
        "checkpoint-",
        "iter-7",
        "epoch_7",
    ],
)
def test_what_has_no_name_of_a_step_is_no_checkpoint(engine: SyncCheckpointEngine, root: Path, name: str) -> None:
    save(engine, 7)
    (root / "step_000000007").rename(root / name)
    assert engine.steps() == []
    assert StepNames("step_{step:09d}").step(name) is None


def test_a_directory_without_metadata_is_no_checkpoint(engine: SyncCheckpointEngine, root: Path) -> None:
    save(engine, 6, 7)
    (root / "step_000000007" / ".metadata").unlink()
    (root / "step_000000008").mkdir()
    (root / "step_000000009").write_text("a file")
    assert engine.steps() == [6]
    assert engine.latest_step() == 6


def test_of_two_directories_of_one_step_ours_is_taken(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        save(engine, 7)
    (root / "step_000000007").rename(root / "checkpoint-7")
    with SyncCheckpointEngine(root, EngineConfig(step_dir="z-{step}")) as other:
        other.save(weights(70), 7, overwrite=True).result(TIMEOUT)
        assert listing(root) == ["checkpoint-7", "z-7"]
        assert other.steps() == [7]
        assert value(other) == 70


@pytest.mark.parametrize("step_dir", ["ckpt.{step}", "{step}", "{step:04d}-model", "run[1]_{step}", "run_{step:d}"])
def test_a_step_dir_of_ones_own_is_written_and_found(root: Path, step_dir: str) -> None:
    with SyncCheckpointEngine(root, EngineConfig(step_dir=step_dir)) as engine:
        save(engine, 12)
        assert listing(root) == [step_dir.format(step=12)]
        assert engine.steps() == [12]
        assert value(engine) == 12


NOT_FOUND_AGAIN = [
    "{step:x}",
    "{step:+d}",
    "{step:>8}",
    "{{a}}{step}",
    "{step:.2f}",
    "{step:08b}",
    "{step:zz}",
    "x\0{step}",
    5,
    None,
]


@pytest.mark.parametrize("step_dir", NOT_FOUND_AGAIN)
def test_a_step_dir_whose_names_could_not_be_found_again_is_refused(step_dir: object) -> None:
    with pytest.raises(ConfigError, match="step_dir="):
        EngineConfig(step_dir=step_dir)  # type: ignore[arg-type]


def test_the_longest_step_dir_has_room_for_the_largest_step_and_for_a_rollback(root: Path) -> None:
    with SyncCheckpointEngine(root, EngineConfig(step_dir="x" * 216 + "{step}")) as engine:
        save(engine, 1, MAX_STEP)
        engine.rollback(1)
        assert [len(path.name) for path in root.iterdir() if path.name != ENGINE_DIR] == [217]
        (aside,) = (root / ABANDONED_DIR).iterdir()
        assert len(aside.name) == 255


def test_a_save_without_a_step_after_the_largest_one_names_the_remedy(engine: SyncCheckpointEngine) -> None:
    save(engine, 1, MAX_STEP)
    with pytest.raises(StepOrderError, match=rf"no step exceeds step {MAX_STEP}, the newest: rollback\(step\)"):
        engine.save(weights(2))
    engine.rollback(1)
    assert engine.save(weights(2)).result(TIMEOUT).step == 2


def test_a_directory_beyond_the_largest_step_is_no_checkpoint(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        save(engine, MAX_STEP)
        (root / f"step_{MAX_STEP}").rename(root / f"step_{MAX_STEP}0")
        assert engine.steps() == []
    with SyncCheckpointEngine(root) as again:
        assert again.save(weights(1)).result(TIMEOUT).step == 1


def test_directories_that_exchanged_their_names_are_refused(engine: SyncCheckpointEngine, root: Path) -> None:
    save(engine, 1, 2)
    one, two, aside = root / "step_000000001", root / "step_000000002", root / "aside"
    for source, target in ((one, aside), (two, one), (aside, two)):
        os.rename(source, target)
    with pytest.raises(CorruptCheckpointError, match="holds step 2 by its manifest"):
        engine.read(1)


def test_steps_written_before_step_dir_was_changed_are_still_found(engine: SyncCheckpointEngine, root: Path) -> None:
    save(engine, 3)
    with SyncCheckpointEngine(root, EngineConfig(step_dir="ckpt-{step}")) as changed:
        assert changed.steps() == [3]
        assert value(changed) == 3


@given(step=st.integers(0, 10**12), step_dir=st.sampled_from(["step_{step:09d}", "{step}", "a.{step:03d}+"]))
def test_the_name_of_a_step_gives_the_step_again(step: int, step_dir: str) -> None:
    names = StepNames(step_dir)
    assert names.step(names.name(step)) == step
