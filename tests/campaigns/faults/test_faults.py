"""Fail everything once: a bounded part of ``python -m tests.campaigns.faults``, which runs it all."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from property_examples import gate_limit, gate_stride
from slow import slow
from warm_python import WarmPython

from aio_ckpt import CheckpointEngine, SyncCheckpointEngine
from aio_ckpt.errors import SaveCancelledError, ThreadDiedError
from aio_ckpt.ranks.coordinator import SoloCoordinator
from aio_ckpt.ranks.messages import Topic
from tests.campaigns.faults import work
from tests.campaigns.faults.campaign import (
    FAULTS,
    LOADS,
    SAVES,
    Loading,
    Point,
    Saving,
    cancel_now,
    load_points,
    save_points,
)
from tests.campaigns.faults.store import Fault
from tests.campaigns.faults.syscalls import INJECTIONS, strace_refusal, syscall_points
from tests.campaigns.faults.upkeep import UPKEEPS, short_reads, upkeep_points

FAULTS_BY_NAME = {fault.name: fault for fault in FAULTS}
EIO = FAULTS_BY_NAME["EIO"]
LATER = next(saving for saving in SAVES if saving.name == "later save")
SHORT = {"later save", "ENOSPC", "fsync fails once", "rename fails", "cancel"}
"""Of the kinds of saves and of faults, those that the gate tries; all others are part of the campaign."""
RENAME = "rename,renameat,renameat2 EIO"
ALL_CALLS = {"write,pwrite64,pwritev,pwritev2 ENOSPC", "fsync,fdatasync EIO", RENAME}
"""Injections of system calls that a bounded campaign tries."""
AT_LEAST = {"fsync fails once": 7, "rename fails": 1}
"""How many calls of each kind a save has; of all kinds, at least 15."""
HALF = gate_stride(2)
"""The gate tries every second call where calls of all kinds fail. Between them, EIO and ENOSPC hit each call."""


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "aio_ckpt")


def assert_survived(points: Iterator[Point], *, at_least: int) -> None:
    tried = list(points)
    lost = [f"{point.name}: {'; '.join(point.problems)}" for point in tried if point.problems]
    assert not lost, f"{len(lost)} of {len(tried)} fault points were not survived:\n" + "\n".join(lost)
    assert len(tried) >= at_least, "the campaign met fewer calls than there are: it proves nothing"


def with_marks(kinds: Iterable[Saving | Fault]) -> list[Any]:
    """Parameters, all marked as of the campaign but the short ones."""
    campaign = pytest.mark.campaign
    return [pytest.param(kind, id=kind.name, marks=() if kind.name in SHORT else campaign) for kind in kinds]


@pytest.mark.parametrize("saving", with_marks(SAVES))
def test_a_save_whose_nth_call_fails_loses_nothing_and_leaves_nothing(tmp_path: Path, saving: Saving) -> None:
    assert_survived(save_points(tmp_path, saving, EIO, stride=HALF), at_least=15 // HALF)


@pytest.mark.sampled
@pytest.mark.parametrize("fault", with_marks(fault for fault in FAULTS if fault != EIO))
def test_whatever_happens_to_the_nth_call_of_a_save_nothing_is_lost(tmp_path: Path, fault: Fault) -> None:
    stride = HALF if fault.counts is None else 1
    points = save_points(tmp_path, LATER, fault, start=stride, stride=stride)
    assert_survived(points, at_least=AT_LEAST.get(fault.name, 15 // stride))


@pytest.mark.sampled
@pytest.mark.parametrize(
    "name", ["rename fails", "fsync fails once", pytest.param("cancel", marks=pytest.mark.campaign)]
)
def test_an_overwrite_that_fails_leaves_the_old_checkpoint(tmp_path: Path, name: str) -> None:
    fault, overwrite = FAULTS_BY_NAME[name], SAVES[-1]
    assert overwrite.overwrites
    assert_survived(save_points(tmp_path, overwrite, fault), at_least=AT_LEAST.get(name, 20))


@pytest.mark.campaign
def test_a_store_that_hangs_while_expired_steps_are_deleted_keeps_nobody_waiting_for_ever(tmp_path: Path) -> None:
    slow, retention = FAULTS_BY_NAME["slow"], SAVES[3]
    assert dict(retention.config) == {"keep_last": 2}
    assert_survived(save_points(tmp_path, retention, slow), at_least=20)


@pytest.mark.sampled
@pytest.mark.parametrize("loading", LOADS, ids=[loading.name for loading in LOADS])
def test_a_disk_that_cannot_be_read_is_no_corrupt_checkpoint(tmp_path: Path, loading: Loading) -> None:
    """Neither skipped nor called corrupt: the error of the system comes, and the next load is whole."""
    assert_survived(load_points(tmp_path, loading, EIO), at_least=8)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "fault", "stride", "at_least"),
    [
        ("verify", "EIO", HALF, 8 // HALF),
        ("protect", "EIO", HALF, 6 // HALF),
        slow("unprotect", "EIO", 1, 2),
        ("rollback", "EIO", gate_stride(3), 4),
        slow("rollback", "fsync fails once", 1, 3),
        slow("delete", "EIO", gate_stride(3), 2),
        ("delete", "rename fails", 1, 1),
        ("load that sets damage aside", "EIO", gate_stride(3) * 3, 3),
        ("load that sets damage aside", "rename fails", 1, 1),
    ],
)
def test_whatever_fails_beside_saves_is_told_and_loses_nothing(
    tmp_path: Path, name: str, fault: str, stride: int, at_least: int
) -> None:
    (upkeep,) = (upkeep for upkeep in UPKEEPS if upkeep.name == name)
    points = upkeep_points(tmp_path, upkeep, FAULTS_BY_NAME[fault], stride=stride)
    assert_survived(points, at_least=at_least)


def test_a_read_that_falls_short_is_continued_or_done_anew_and_proves_no_damage(tmp_path: Path) -> None:
    assert_survived(short_reads(tmp_path, stride=HALF), at_least=4 // HALF)


# -- threads, tasks, memory -----------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("points", "at_least"),
    [
        (work.short_writes, 6),
        (partial(work.dying_work, stride=gate_stride(3)), 5),
        (partial(work.shut_down_executors, stride=gate_stride(3)), 5),
        (partial(work.cancelled_steps, stride=3 * gate_stride(2)), 5),
        (partial(work.memory_in_growth, most=gate_limit(1)), 7),
        (partial(work.memory_in_stages, most=gate_limit(1)), 7),
    ],
    ids=["short writes", "dying work", "no threads", "cancelled steps", "no arena", "no memory"],
)
def test_what_happens_to_threads_tasks_and_memory_loses_nothing(
    tmp_path: Path, points: Callable[[Path], Iterator[Point]], at_least: int
) -> None:
    assert_survived(points(tmp_path), at_least=at_least)


class CancelsLast(SoloCoordinator):
    """Cancels the pending saves at the last instant before a commit, where nothing waits any more."""

    engine: CheckpointEngine

    async def gather(self, topic: Topic, message: bytes, *, stage: str) -> tuple[bytes, ...]:
        self.accepted = cancel_now(self.engine)
        return await super().gather(topic, message, stage=stage)


def test_a_cancellation_that_was_accepted_holds_though_nothing_waits_before_the_commit(tmp_path: Path) -> None:
    coordinator = CancelsLast()
    engine = CheckpointEngine(tmp_path, coordinator=coordinator)
    coordinator.engine = engine
    try:
        error = engine.save({"a": 1}).exception(20)
        assert coordinator.accepted == [True]
        assert isinstance(error, SaveCancelledError)
        assert engine.steps().result() == []
    finally:
        engine.terminate()


def test_a_trainer_that_exits_while_its_state_is_loaded_does_not_end_the_engine(tmp_path: Path) -> None:
    """``load_state_dict`` runs in a thread of the engine; SystemExit in a task would end the engine's loop."""

    class Exits:
        def state_dict(self) -> dict[str, int]:
            return {"a": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise SystemExit(3)

    with SyncCheckpointEngine(tmp_path) as engine:
        engine.save({"model": Exits()}).result(20)
        with pytest.raises(ThreadDiedError, match="SystemExit: 3"):
            engine.load({"model": Exits()})
        assert engine.read(1) == {"model": {"a": 1}}


def start_warm(root: str) -> WarmPython:
    child = "from tests.campaigns.faults.child import main; main()"
    return WarmPython(child, root, options=(), stdin=subprocess.PIPE, stdout=subprocess.PIPE)


@pytest.mark.slow
@pytest.mark.skipif(strace_refusal() is not None, reason=str(strace_refusal()))
@pytest.mark.parametrize(
    ("overwrite", "chosen", "at_least"),
    [
        pytest.param(False, ALL_CALLS, 12, id="new step", marks=pytest.mark.campaign),
        pytest.param(True, ALL_CALLS, 14, id="overwrite", marks=pytest.mark.campaign),
        pytest.param(True, {RENAME}, 2, id="overwrite, renames"),
    ],
)
def test_the_nth_system_call_of_a_real_process_fails_and_nothing_is_lost(
    tmp_path: Path, overwrite: bool, chosen: set[str], at_least: int
) -> None:
    injections = [injection for injection in INJECTIONS if injection.name in chosen]
    assert len(injections) == len(chosen)
    points = syscall_points(tmp_path / "save", injections, overwrite=overwrite, start=start_warm)
    assert_survived(points, at_least=at_least)


@pytest.mark.slow
def test_no_memory_in_any_call_of_save_keeps_no_later_save_waiting(tmp_path: Path) -> None:
    """A few of some hundred places; ``python -m tests.campaigns.faults`` tries more of them."""
    assert_survived(work.memory_in_save(tmp_path, start=150, stride=9 * gate_stride(3)), at_least=3)
