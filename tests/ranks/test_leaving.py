"""A rank leaves a save midway: the others hear why, at once, and keep what may still become visible."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gated_storage import Gate
from rank_processes import Ranks, engine_on, error_of

from aio_ckpt import CheckpointEngine, EngineConfig
from aio_ckpt.errors import PeerFailedError
from aio_ckpt.ranks.messages import Decision, Reply
from aio_ckpt.ranks.store_coordinator import StoreCoordinator
from aio_ckpt.runtime.portal import Executor
from tests.ranks.test_failing import ActingStorage, no_space, told

SECS = 24.0
SHORT_SECS = 2.0


class HeldCoordinator(StoreCoordinator):
    """Real ranks over a real store; one of them is held where a test wants it, on one topic."""

    topic = ""
    is_mute = False

    def __init__(self) -> None:
        store = dist.distributed_c10d._get_default_store()
        super().__init__(store, rank=dist.get_rank(), world_size=dist.get_world_size())
        self.gate = Gate()

    async def _tell(self, topic: str, decision: Decision) -> None:
        if topic == self.topic:
            await self.gate.wait()
        await super()._tell(topic, decision)

    async def _await_word(self, topic: str, stage: str) -> Reply:
        word = await super()._await_word(topic, stage)
        if topic == self.topic:
            await self.gate.wait()
        return word

    async def abort(self, topic: str, error: BaseException, *, stage: str) -> PeerFailedError | None:
        if self.is_mute:
            raise PeerFailedError("the store of the ranks cannot be reached", rank=0, stage="agree")
        return await super().abort(topic, error, stage=stage)


@contextlib.contextmanager
def held_engine(
    root: Path, stall_secs: float, **settings: Any
) -> Iterator[tuple[CheckpointEngine, HeldCoordinator, ActingStorage]]:
    executor, coordinator = Executor("held", 4), HeldCoordinator()
    storage = ActingStorage(executor)
    config = EngineConfig(stall_timeout_secs=stall_secs, budget_bytes=64 << 20, **settings)
    engine = CheckpointEngine(root, config, storage=storage, coordinator=coordinator)
    try:
        yield engine, coordinator, storage
    finally:
        storage.open_gates()
        coordinator.gate.open()
        engine.terminate()
        executor.close(SECS)


def state_of(step: int) -> dict[str, Any]:
    """Another structure at each step: each save is planned anew."""
    return {"w": torch.full((100 + step,), float(step)), "step": step}


def pending_files(root: Path) -> list[str]:
    return sorted(path.name for directory in root.glob(".aio_ckpt/pending/*") for path in directory.iterdir())


# -- a rank that fails unheard -------------------------------------------------------------------------


def go_on_untold(rank: int, count: int, root: Path) -> list[tuple[str, int | None, str]]:
    with held_engine(root, SHORT_SECS, on_failure="log") as (engine, coordinator, storage):
        engine.save(state_of(1), step=1).result(SECS)
        if rank == 1:
            coordinator.is_mute = True
            storage.at, storage.act = ("write", "*"), no_space
        dist.barrier()
        found = []
        for step in (2, 3):
            found.append(told(engine.save(state_of(step), step=step).exception(4 * SHORT_SECS)))
            coordinator.is_mute = False
        dist.barrier()
        assert engine.steps() == [1, 3]
        dist.barrier()
    return found


def test_a_rank_that_went_on_to_its_next_save_without_a_word_is_not_waited_for(two: Ranks, tmp_path: Path) -> None:
    (failed, saved), others = two.run(go_on_untold, tmp_path)
    assert failed[:2] == ("PeerFailedError", 1)
    assert "rank 1 does not come to save 2" in failed[2]
    assert "is elsewhere" in failed[2]
    assert saved[0] == "NoneType"
    assert [kind for kind, *_ in others] == ["OSError", "NoneType"]


# -- the cause ----------------------------------------------------------------------------------------


def end_by_deadline(rank: int, count: int, root: Path) -> tuple[str, int | None, str]:
    with held_engine(root, SECS) as (engine, _, _):
        engine.save(state_of(1), step=1).result(SECS)
        dist.barrier()
        if rank == 0:
            error = error_of(lambda: engine.save(state_of(2), step=2, deadline_secs=0.5), SECS)
            dist.barrier()
        else:
            dist.barrier()
            error = error_of(lambda: engine.save(state_of(2), step=2), SECS)
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
        found = told(engine.save(state_of(1), step=1).exception(SECS))
        dist.barrier()
    return found


def test_metadata_of_many_ranks_may_take_longer_to_render_than_a_stall(two: Ranks, tmp_path: Path) -> None:
    assert [kind for kind, *_ in two.run(render_slowly, tmp_path)] == ["NoneType"] * 2


# -- a commit in doubt --------------------------------------------------------------------------------


def commit_in_doubt(rank: int, count: int, root: Path) -> tuple[str, bool, list[str]]:
    with held_engine(root, SHORT_SECS) as (engine, _, storage):
        engine.save(state_of(1), step=1).result(SECS)
        if rank == 0:
            storage.hold("rename")
        dist.barrier()
        error = engine.save(state_of(2), step=2).exception(SECS)
        dist.barrier()
        found = pending_files(root)
        dist.barrier()
    return type(error).__name__, getattr(error, "in_doubt", False), found


def test_no_rank_removes_what_a_commit_in_doubt_may_still_make_visible(two: Ranks, tmp_path: Path) -> None:
    leader, other = two.run(commit_in_doubt, tmp_path)
    assert leader[:2] == ("StallError", True)
    assert other[:2] == ("PeerFailedError", True)
    files = {".metadata", "__0_0.distcp", "__1_0.distcp", "aio_ckpt.0.bin", "aio_ckpt.1.bin", "aio_ckpt.json"}
    assert files <= set(leader[2])
    assert leader[2] == other[2]


def save_behind_a_closed_leader(rank: int, count: int, root: Path, structure: int) -> tuple[str, bool, list[str]]:
    found = "", False
    with engine_on(root, SHORT_SECS) as engine:
        engine.save(state_of(1), step=1).result(SECS)
        dist.barrier()
        if rank:  # rank 0 goes on to close
            error = error_of(lambda: engine.save(state_of(structure), step=2), SECS)
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
    assert "rank 0 does not come to save 2, it has closed its engine" in text
    assert (in_doubt, left) == (False, [])
