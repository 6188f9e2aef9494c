"""A load that one rank cannot or will not join: no rank waits for ever, none holds another checkpoint than the rest."""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from gated_storage import TIMEOUT, Call, Gate
from rank_processes import Ranks, engine_on

from aio_ckpt import CheckpointEngine, EngineConfig, PerRank, SyncCheckpointEngine
from aio_ckpt.engine import group_load as joint
from aio_ckpt.engine.fallback import FallbackSearch, candidates
from aio_ckpt.engine.group_load import LoadMember, _Order
from aio_ckpt.errors import AioCkptError, CheckpointNotFoundError, MismatchError, PeerFailedError, ReadError
from aio_ckpt.ranks.store_coordinator import StoreCoordinator
from aio_ckpt.read import load as read
from aio_ckpt.reports import LoadReport
from aio_ckpt.storage.local import Storage
from tests.ranks.test_failing import ActingStorage, engine_over

SECS = 8.0
"""Longer than any wait here that ends by being told."""
ELEMENTS = 1000
OPTIONS = {"strict": False, "allow_missing": False, "fallback": True}


def state_of(value: float) -> dict[str, Any]:
    return {"w": torch.full((ELEMENTS,), float(value)), "k": value}


def submit(engine: CheckpointEngine, state: object, given_up: Future[None] | None = None) -> Future[LoadReport]:
    return engine.submit_load(state, None, given_up, **OPTIONS)


def told(error: BaseException | None) -> tuple[str, bool]:
    """Kind of an error, and whether it says that the template was filled."""
    return type(error).__name__, bool(getattr(error, "target_modified", False))


def failure_of(load: Callable[[], object]) -> AioCkptError:
    with pytest.raises(AioCkptError) as failure:
        load()
    return failure.value


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not holds():
        assert time.monotonic() < deadline, "it never came to hold"
        os.sched_yield()


def check_next_load(engine: CheckpointEngine | SyncCheckpointEngine, value: int) -> None:
    """Every rank calls it: the loads of all still meet."""
    state = state_of(0)
    report = engine.load(state) if isinstance(engine, SyncCheckpointEngine) else submit(engine, state).result(SECS)
    assert report.step == value
    assert state["k"] == value
    assert bool((state["w"] == value).all())


class LookStorage(ActingStorage):
    """A look at the root can be held."""

    async def list_dir(self, path: Path) -> list[str]:
        found = await self.run(Call("list_dir", path), lambda: self._inner.list_dir(path))
        assert found is not None
        return found


def looking_engine(root: Path, **settings: Any) -> AbstractContextManager[tuple[CheckpointEngine, LookStorage]]:
    return engine_over(LookStorage, root, SECS, **settings)


# -- behind a load that is whole ----------------------------------------------------------------------


class Arming:
    """Once its value is put back, the storage cannot list the root."""

    def __init__(self, storage: LookStorage) -> None:
        self._storage = storage

    def state_dict(self) -> dict[str, Any]:
        return {"v": torch.ones(4)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        def refuse() -> None:
            raise ReadError(errno.EIO, "the disk is away", "root")

        self._storage.at, self._storage.act = ("list_dir", "*"), refuse


def load_as_the_disk_goes_away(rank: int, count: int, root: Path) -> tuple[int | None, int | None, bool]:
    with looking_engine(root) as (engine, storage):
        engine.save({**state_of(3), "m": Arming(storage)}, step=3).result(SECS)
        dist.barrier()
        state: dict[str, Any] = {**state_of(0), "m": Arming(storage)}
        report = submit(engine, state).result(SECS)
        was_refused, storage.act = storage.act is None, None
        return report.step, engine.latest_step(), was_refused


def test_a_load_that_is_whole_does_not_fail_because_the_root_cannot_be_listed(two: Ranks, tmp_path: Path) -> None:
    (step, newest, was_refused), other = two.run(load_as_the_disk_goes_away, tmp_path)
    assert (step, newest, was_refused) == (3, 3, True)
    assert other[:2] == (3, 3)


# -- given up ---------------------------------------------------------------------------------------


def give_up(rank: int, count: int, root: Path, leaving: int, when: str) -> tuple[str, bool]:
    with looking_engine(root) as (engine, storage):
        engine.save(state_of(1), step=1).result(SECS)
        dist.barrier()
        given_up: Future[None] = Future()
        if rank != leaving:
            gate = storage.hold("list_dir")
            if when == "before the others come":
                dist.barrier()
            load = submit(engine, state_of(0))
            if when == "while the leader looks":
                gate.wait_reached()  # it has the message of every rank
                dist.barrier()
                dist.barrier()
            gate.open()
        else:
            coordinator = engine._ctx.members.coordinator
            assert isinstance(coordinator, StoreCoordinator)
            sent = coordinator.messages_sent
            load = submit(engine, state_of(0), given_up)
            wait_until(lambda: coordinator.messages_sent > sent or rank == 0)  # that it takes part
            if when == "while the leader looks":
                dist.barrier()
            sent = coordinator.messages_sent
            given_up.set_result(None)
            wait_until(lambda: coordinator.messages_sent > sent or rank == 0)  # that it leaves
            dist.barrier()
        error = load.exception(SECS)
        check_next_load(engine, 1)
        dist.barrier()
        report = engine.save(state_of(2), step=2).result(SECS)
        assert report is not None
    return told(error)


@pytest.mark.parametrize(
    ("leaving", "when"), [(1, "before the others come"), (1, "while the leader looks"), (0, "before the others come")]
)
def test_a_load_given_up_on_one_rank_ends_on_all_and_the_next_one_works(
    two: Ranks, tmp_path: Path, leaving: int, when: str
) -> None:
    outcomes = two.run(give_up, tmp_path, leaving, when)
    assert outcomes[leaving] == ("SaveCancelledError", False)
    assert outcomes[1 - leaving] == ("PeerFailedError", False)  # its template waits until all have matched theirs


def give_up_unmet(rank: int, count: int, root: Path) -> tuple[str, bool]:
    given_up: Future[None] = Future()
    if rank == 0:
        dist.barrier()
    engine = CheckpointEngine(root, EngineConfig(stall_timeout_secs=SECS, budget_bytes=64 << 20))
    if rank == 1:
        load = submit(engine, state_of(0), given_up)
        given_up.set_result(None)
        dist.barrier()
    else:
        load = submit(engine, state_of(0))
    error = load.exception(SECS)
    engine.save(state_of(1), step=1).result(SECS)
    check_next_load(engine, 1)
    engine.close_blocking()
    return told(error)


def test_a_load_given_up_before_the_ranks_have_met_ends_on_all(two: Ranks, tmp_path: Path) -> None:
    assert two.run(give_up_unmet, tmp_path) == [("PeerFailedError", False), ("SaveCancelledError", False)]


# -- refused ----------------------------------------------------------------------------------------


def load_refused(rank: int, count: int, root: Path, refusing: int, odd: dict[str, Any]) -> str:
    with engine_on(root, SECS) as engine:
        engine.save(state_of(1), step=1).result(SECS)
        state = state_of(0)
        error = failure_of(lambda: engine.load(state, **(odd if rank == refusing else {})))
        assert not error.target_modified
        assert state["k"] == 0
        check_next_load(engine, 1)
        check_next_load(engine, 1)
    if isinstance(error, PeerFailedError):
        assert error.rank == refusing
    return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("refusing", [0, 1])
@pytest.mark.parametrize("odd", [{"strict": 1}, {"step": -1}], ids=["a flag", "a step"])
def test_a_load_refused_on_one_rank_is_so_on_all_and_the_next_one_works(
    two: Ranks, tmp_path: Path, refusing: int, odd: dict[str, Any]
) -> None:
    outcomes = two.run(load_refused, tmp_path, refusing, odd)
    own = "ConfigError" if "strict" in odd else "StepOrderError"
    assert outcomes[refusing].startswith(own)
    assert outcomes[1 - refusing].startswith("PeerFailedError")
    assert own in outcomes[1 - refusing]


def load_otherwise(rank: int, count: int, root: Path, calls: tuple[dict[str, Any], ...]) -> str:
    with engine_on(root, SECS) as engine:
        for step in (1, 2):
            engine.save(state_of(step), step=step).result(SECS)
        state = state_of(0)
        error = failure_of(lambda: engine.load(state, **calls[rank]))
        assert state["k"] == 0
        assert not state["w"].any()
        check_next_load(engine, 2)
    assert isinstance(error, PeerFailedError)
    assert error.rank == count - 1
    return str(error)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"step": 2}, "rank 3 loads step 2 where rank 0 loads step 1"),
        ({"step": None}, "rank 3 loads the newest checkpoint where rank 0 loads step 1"),
        ({"step": 1, "fallback": False}, "rank 3 loads step 1 with fallback=False where rank 0 loads step 1"),
    ],
    ids=["step", "newest", "fallback"],
)
def test_ranks_that_ask_for_different_checkpoints_load_none(
    four: Ranks, tmp_path: Path, other: dict[str, Any], text: str
) -> None:
    for found in four.run(load_otherwise, tmp_path, ({"step": 1}, {"step": 1}, {"step": 1}, other)):
        assert text in found


# -- another one in its place -----------------------------------------------------------------------


def later(gate: Gate, act: Callable[..., Any]) -> Any:
    """``act`` behind a gate."""

    async def act_later(*arguments: Any, **options: Any) -> Any:
        await gate.wait()
        return await act(*arguments, **options)

    return act_later


def is_matched(engine: CheckpointEngine) -> bool:
    """Whether this rank waits for the templates of the others."""
    coordinator = engine._ctx.members.coordinator
    assert isinstance(coordinator, StoreCoordinator)
    return any(topic.endswith(", turn 2") for topic in coordinator._waits)


def load_while_saving(
    rank: int, count: int, root: Path, step: int | None, saved: dict[str, Any], settings: dict[str, Any], late: str
) -> tuple[int, float, int]:
    """Rank 1 comes to the checkpoint, or to its data, only after ``saved``; rank 0 has come before."""
    with looking_engine(root, **settings) as (engine, _), pytest.MonkeyPatch.context() as patch:
        engine.save(state_of(1), step=1).result(SECS)
        dist.barrier()
        state, gate = state_of(0), Gate()
        if rank == 1 and late == "to match":  # the load's own look, apart from those of the saves beside it
            patch.setattr(joint, "candidates", later(gate, candidates))
        elif rank == 1:
            patch.setattr(read, "_fetch", later(gate, read._fetch))
        load = engine.submit_load(state, step, **OPTIONS)
        if rank == 1:
            gate.wait_reached()
        elif late == "to match":
            wait_until(lambda: is_matched(engine))
        else:
            wait_until(lambda: bool(state["w"].all()))
        dist.barrier()
        assert bool(state["w"].any()) == (rank == 0 and late == "to read"), "filled once the templates of all match"
        assert state["k"] == 0, "objects are set only once all ranks have read the checkpoint"
        engine.save(state_of(9), **saved).result(SECS)
        wait_until(lambda: len(list(root.glob("step_*"))) == 1)
        dist.barrier()
        gate.open()
        report = load.result(SECS)
        dist.barrier()
    return report.step, float(state["w"].min()), state["k"]


@pytest.mark.parametrize(("late", "value"), [("to match", 9), ("to read", 1)])
def test_a_checkpoint_replaced_between_two_ranks_is_one_for_both(
    two: Ranks, tmp_path: Path, late: str, value: int
) -> None:
    found = two.run(load_while_saving, tmp_path, 1, {"step": 1, "overwrite": True}, {}, late)
    assert found == [(1, value, value)] * 2


@pytest.mark.parametrize(("late", "step", "value"), [("to match", 2, 9), ("to read", 1, 1)])
def test_a_checkpoint_deleted_between_two_ranks_is_one_for_both_or_passed_by_for_the_newest(
    two: Ranks, tmp_path: Path, late: str, step: int, value: int
) -> None:
    found = two.run(load_while_saving, tmp_path, None, {"step": 2}, {"keep_last": 1}, late)
    assert found == [(step, value, value)] * 2


def load_stock(rank: int, count: int, root: Path) -> int:
    with engine_on(root, SECS) as engine:
        if rank == 0:
            torch.distributed.checkpoint.save(
                {"w": torch.ones(ELEMENTS), "k": 1}, checkpoint_id=str(root / "step_000000001"), no_dist=True
            )
        dist.barrier()
        check_next_load(engine, 1)
        with pytest.raises(CheckpointNotFoundError):
            engine.load(state_of(0), step=7)
    return rank


def test_what_stock_dcp_wrote_is_one_checkpoint_for_all_ranks(two: Ranks, tmp_path: Path) -> None:
    assert two.run(load_stock, tmp_path) == [0, 1]


# -- what is left of a load that failed -------------------------------------------------------------


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)


def fail_elsewhere(rank: int, count: int, root: Path, how: str, odd: int = 1) -> tuple[tuple[str, bool], float, int]:
    with engine_on(root, SECS) as engine:
        engine.save({"w": PerRank(torch.full((ELEMENTS,), 5.0)), "k": PerRank(5)}, step=1).result(SECS)
        dist.barrier()
        template = {"w": PerRank(torch.zeros(ELEMENTS)), "k": PerRank(0)}
        if rank == odd and how == "damaged":
            damage(root / "step_000000001" / "__1_0.distcp")
        elif rank == odd:
            template["absent"] = PerRank(1)
        dist.barrier()
        error = failure_of(lambda: engine.load(template))
    return told(error), float(template["w"].value.max()), template["k"].value


def test_a_rank_whose_template_was_filled_is_told_so_by_the_error_of_another(two: Ranks, tmp_path: Path) -> None:
    found = two.run(fail_elsewhere, tmp_path, "damaged")[0]
    assert found == (("CorruptCheckpointError", True), 5.0, 0), "tensors filled, and said so; objects as they were"


@pytest.mark.parametrize("odd", [0, 1])
def test_no_template_is_touched_before_those_of_all_ranks_match(two: Ranks, tmp_path: Path, odd: int) -> None:
    found = two.run(fail_elsewhere, tmp_path, "missing", odd)
    assert found[odd] == (("MissingNameError", False), 0.0, 0)
    assert found[1 - odd] == (("PeerFailedError", False), 0.0, 0)


class Stateful:
    """Notes what it was given."""

    def __init__(self, value: int, *, is_odd: bool = False) -> None:
        self.value = value
        self.given: list[int] = []
        self.is_odd = is_odd

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.is_odd:
            raise ValueError("this rank's will not")
        self.given.append(state["value"])


def fall_back(rank: int, count: int, root: Path) -> tuple[int, int, list[int]]:
    def made(value: int) -> dict[str, Any]:
        return {"w": PerRank(torch.full((ELEMENTS,), float(value))), "k": PerRank(value), "s": Stateful(value)}

    with engine_on(root, SECS) as engine:
        engine.save(made(1), step=1).result(SECS)
        engine.save({**made(2), "late": PerRank(2)}, step=2).result(SECS)
        dist.barrier()
        if rank == 1:
            damage(root / "step_000000002" / "__1_0.distcp")
        dist.barrier()
        template = {**made(0), "late": PerRank(0)}
        report = engine.load(template, allow_missing=True)
        assert report.step == 1
        assert template["k"].value == 1
        assert len(report.missing) == 1
    return template["late"].value, int(template["w"].value[0]), template["s"].given


def test_objects_of_a_checkpoint_that_another_rank_finds_damaged_are_never_set(two: Ranks, tmp_path: Path) -> None:
    assert two.run(fall_back, tmp_path) == [(0, 1, [1])] * 2


def find_damaged(rank: int, count: int, root: Path, finding: int) -> tuple[float, float]:
    """Step 2 cannot be opened on one rank, and is whole on the other."""
    with engine_on(root, SECS) as engine, pytest.MonkeyPatch.context() as patch:
        engine.save({"w": torch.ones(ELEMENTS)}, step=1).result(SECS)
        engine.save({"w": torch.full((ELEMENTS,), 2.0), "late": torch.ones(3)}, step=2).result(SECS)
        dist.barrier()
        opened = read.open_checkpoint

        async def damaged(storage: Storage, path: Path, **options: Any) -> read.Checkpoint:
            if path.name == "step_000000002":
                raise MismatchError("as this rank sees it")
            return await opened(storage, path, **options)

        if rank == finding:
            patch.setattr(read, "open_checkpoint", damaged)
        template = {"w": torch.zeros(ELEMENTS), "late": torch.zeros(3)}
        report = engine.load(template, allow_missing=True)
        assert (report.step, report.missing) == (1, ("late",))
        assert len(report.skipped) == 1
        dist.barrier()
    return float(template["w"].mean()), float(template["late"].max())


@pytest.mark.parametrize("finding", [0, 1])
def test_a_template_that_matches_what_another_rank_finds_damaged_is_not_filled_from_it(
    two: Ranks, tmp_path: Path, finding: int
) -> None:
    assert two.run(find_damaged, tmp_path, finding) == [(1.0, 0.0)] * 2


def find_all_damaged(rank: int, count: int, root: Path, options: dict[str, Any]) -> tuple[str, str, bool]:
    with engine_on(root, SECS) as engine:
        for step in (1, 2, 3):
            engine.save(state_of(step), step=step).result(SECS)
        dist.barrier()
        if rank == 1:
            for path in root.glob("step_*/.metadata"):
                path.write_bytes(path.read_bytes()[:10])
        dist.barrier()
        error = failure_of(lambda: engine.load(state_of(0), **options))
        assert engine.steps() == [1, 2, 3], "nothing was moved"
    return type(error).__name__, str(error), error.target_modified


@pytest.mark.parametrize(("options", "steps"), [({}, [3, 2, 1]), ({"step": 2}, [2]), ({"fallback": False}, [3])])
def test_where_no_checkpoint_verifies_every_rank_is_told_of_each(
    two: Ranks, tmp_path: Path, options: dict[str, Any], steps: list[int]
) -> None:
    first, second = two.run(find_all_damaged, tmp_path, options)
    assert first == second
    kind, text, is_modified = first
    assert (kind, is_modified) == ("CorruptCheckpointError", False)
    assert str(tmp_path) in text
    assert [int(step) for step in re.findall(r"step (\d)", text)] == steps


def fall_back_to_another_shape(rank: int, count: int, root: Path) -> tuple[str, bool, list[str]]:
    with engine_on(root, SECS) as engine:
        engine.save({"w": torch.ones(3)}, step=1).result(SECS)
        engine.save({"w": torch.ones(ELEMENTS)}, step=2).result(SECS)
        dist.barrier()
        if rank == 1:
            damage(root / "step_000000002" / "__0_0.distcp")
        dist.barrier()
        error = failure_of(lambda: engine.load({"w": torch.zeros(ELEMENTS)}))
    return type(error).__name__, error.target_modified, error.__notes__


def test_an_error_behind_a_fallback_says_what_was_tried_before(two: Ranks, tmp_path: Path) -> None:
    for kind, is_modified, notes in two.run(fall_back_to_another_shape, tmp_path):
        assert kind in ("TemplateMismatchError", "PeerFailedError")
        assert is_modified, "the template was filled from step 2"
        assert any(note.startswith("step 2 was tried before and does not verify: ") for note in notes)


@pytest.mark.parametrize("is_modified", [False, True])
def test_errors_of_any_type_say_whether_the_template_was_filled(is_modified: bool) -> None:
    for error in (MemoryError("none left"), OSError(5, "broken"), AioCkptError("ours")):
        FallbackSearch(ctx=cast("Any", None), quarantine=cast("Any", None), is_modified=is_modified).complete(error)
        assert told(error)[1] == is_modified


def refuse_state(rank: int, count: int, root: Path) -> tuple[str, bool]:
    with engine_on(root, SECS) as engine:
        engine.save({"s": Stateful(1), "w": torch.ones(3)}, step=1).result(SECS)
        template = {"s": Stateful(0, is_odd=rank == 1), "w": torch.zeros(3)}
        with pytest.raises((ValueError, PeerFailedError)) as failure:
            engine.load(template)
        template = {"s": Stateful(0), "w": torch.zeros(3)}
        assert engine.load(template).step == 1
    return told(failure.value)


def test_a_load_state_dict_that_raises_on_one_rank_fails_the_load_on_all(two: Ranks, tmp_path: Path) -> None:
    assert two.run(refuse_state, tmp_path) == [("PeerFailedError", True), ("ValueError", True)]


@pytest.mark.parametrize(
    ("beside", "told", "newest"), [(None, 3, 3), (None, 2, 2), (None, None, None), (4, 3, 4), (4, None, 4), (4, 5, 5)]
)
def test_a_save_committed_beside_a_load_stays_the_newest(
    beside: int | None, told: int | None, newest: int | None
) -> None:
    members = SimpleNamespace(newest=3)
    own: LoadMember[Any] = LoadMember(
        cast("Any", SimpleNamespace(ctx=SimpleNamespace(members=members))), cast("Any", None), cast("Any", None)
    )
    members.newest = beside or members.newest
    own._learn_newest(_Order("done", newest=told))
    assert members.newest == newest
