"""All ranks load the same save, or none does; ranks of one host read each byte once."""

from __future__ import annotations

import errno
import functools
import os
import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import rank_states
import saved_files
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from builders import state_of, steps_dir, weights
from gated_storage import TIMEOUT, Call, Gate, GatedStorage
from rank_engines import ActingStorage, engine_over
from rank_processes import Ranks, engine_on
from rank_states import assert_same, whole
from slow import slow
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import aio_ckpt
from aio_ckpt import CheckpointEngine, EngineConfig, PerRank, SyncCheckpointEngine
from aio_ckpt.checkpoint import read_context
from aio_ckpt.checkpoint.data_files import Files
from aio_ckpt.commit import discovery
from aio_ckpt.dcp import Reader
from aio_ckpt.engine.group_load import LoadMember, _Action, _Instruction
from aio_ckpt.engine.loader import PendingLoad
from aio_ckpt.engine.newest_good import FallbackSearch, WantedCheckpoint
from aio_ckpt.errors import (
    AioCkptError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    MismatchError,
    MissingNameError,
    PeerFailedError,
    ReadError,
    TemplateMismatchError,
)
from aio_ckpt.leaves.tensor_memory import memory_of
from aio_ckpt.ranks.store_coordinator import StoreCoordinator
from aio_ckpt.restore import load as restore
from aio_ckpt.restore.plan_fills import FillPlan
from aio_ckpt.runtime.portal import Executor
from aio_ckpt.storage.data_file import ReadFile
from aio_ckpt.storage.direct_io import PageCache
from aio_ckpt.storage.local import Storage

SECS = 30.0
SHAPE = (1024, 512)
"""2 MiB: two blocks."""


@functools.cache
def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape)


def spread(count: int, placements: tuple[Placement, ...], *, step: int = 0, fill: bool = True) -> dict[str, Any]:
    """One matrix of several, in one layout."""
    mesh = mesh_of((count,) if len(placements) == 1 else (2, count // 2))
    given = whole("matrix", *SHAPE, step=step) if fill else torch.zeros(SHAPE)
    odd = whole("odd", 37, 11, step=step) if fill else torch.zeros(37, 11)
    return {
        "matrix": rank_states.spread(given, mesh, *placements),
        "odd": rank_states.spread(odd, mesh, *placements),
        "plain": whole("plain", 5, step=step) if fill else torch.zeros(5),
        "step": step,
    }


def save_spread(rank: int, count: int, root: Path, placements: tuple[Placement, ...], steps: tuple[int, ...]) -> None:
    with engine_on(root, SECS) as engine:
        for step in steps:
            engine.save(spread(count, placements, step=step), step=step).result(SECS)


def load_spread(rank: int, count: int, root: Path, placements: tuple[Placement, ...]) -> int:
    with engine_on(root, SECS) as engine:
        template = spread(count, placements, fill=False)
        report = engine.load(template)
        assert report.step == 3
        assert_same(template, spread(count, placements, step=3))
    stock = spread(count, placements, fill=False)
    dcp.load({name: stock[name] for name in ("matrix", "odd", "plain")}, checkpoint_id=str(root / "step_000000003"))
    for name in ("matrix", "odd"):
        assert isinstance(template[name], DTensor)
        assert torch.equal(template[name].to_local(), stock[name].to_local())
    assert torch.equal(template["plain"], stock["plain"])
    return report.bytes_read


ROWS, COLUMNS = (Shard(0),), (Shard(1),)
BOTH, HYBRID = (Shard(0), Shard(1)), (Replicate(), Shard(0))


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        pytest.param(ROWS, COLUMNS, id="FSDP to TP"),
        slow(COLUMNS, ROWS, id="TP to FSDP"),
        pytest.param(HYBRID, BOTH, id="HSDP to FSDP and TP"),
        slow(BOTH, HYBRID, id="FSDP and TP to HSDP"),
        pytest.param(ROWS, (Replicate(),), id="FSDP to copies"),
    ],
)
def test_four_ranks_load_another_layout_bit_for_bit_as_dcp_does(
    four: Ranks, tmp_path: Path, saved: tuple[Placement, ...], loaded: tuple[Placement, ...]
) -> None:
    four.run(save_spread, tmp_path, saved, (3,))
    four.run(load_spread, tmp_path, loaded)


def test_two_ranks_and_one_process_load_what_four_saved_and_four_what_two_saved(
    two: Ranks, four: Ranks, tmp_path: Path
) -> None:
    four.run(save_spread, tmp_path / "of four", ROWS, (3,))
    needed = 4 * SHAPE[0] * SHAPE[1] // 2
    small = 2 << 20  # the other leaves and what they share a block with
    for bytes_read in two.run(load_spread, tmp_path / "of four", ROWS):
        assert bytes_read <= 1.05 * needed + 4 * 37 * 11 * 2 + 8192 < needed + small
    with engine_on(tmp_path / "of four", SECS) as engine:
        state = {"matrix": torch.zeros(SHAPE), "odd": torch.zeros(37, 11), "plain": torch.zeros(5), "step": 0}
        engine.load(state)
        assert torch.equal(state["matrix"], whole("matrix", *SHAPE, step=3))
        assert torch.equal(state["odd"], whole("odd", 37, 11, step=3))
        assert state["step"] == 3
        read = engine.read(only=["odd"])
        assert isinstance(read, dict)
        assert torch.equal(read["odd"], whole("odd", 37, 11, step=3))
    two.run(save_spread, tmp_path / "of two", ROWS, (3,))
    four.run(load_spread, tmp_path / "of two", ROWS)


def save_per_rank(rank: int, count: int, root: Path) -> None:
    with engine_on(root, SECS) as engine:
        engine.save({"rng": PerRank(torch.full((4,), float(rank))), "w": torch.ones(3)}, step=1).result(SECS)


def load_per_rank(rank: int, count: int, root: Path) -> list[str]:
    found = []
    with engine_on(root, SECS) as engine:
        for allow in (False, True):
            state = {"rng": PerRank(torch.full((4,), -1.0)), "w": torch.zeros(3)}
            try:
                engine.load(state, allow_missing=allow)
            except (MissingNameError, PeerFailedError) as error:
                found.append(type(error).__name__)
            else:
                found.append(f"{state['rng'].value[0]:g} {state['w'][0]:g}")
            dist.barrier()
    return found


def test_values_of_each_rank_come_back_on_it_and_are_missed_where_no_such_rank_saved(
    two: Ranks, four: Ranks, tmp_path: Path
) -> None:
    two.run(save_per_rank, tmp_path)
    assert two.run(load_per_rank, tmp_path) == [["0 1", "0 1"], ["1 1", "1 1"]]
    first, second, *others = four.run(load_per_rank, tmp_path)
    assert [first, second] == [["PeerFailedError", "0 1"], ["PeerFailedError", "1 1"]]
    for found in others:
        assert found[0] in ("MissingNameError", "PeerFailedError")
        assert found[1] == "-1 1"
    assert "MissingNameError" in [found[0] for found in others]


# -- one that is damaged ----------------------------------------------------------------------------


def damage(path: Path) -> None:
    """Every byte of the tensors changes: nobody reads it as what it was."""
    data = bytearray(path.read_bytes())
    data[2048:-2048] = bytes(byte ^ 0xFF for byte in data[2048:-2048])
    path.write_bytes(data)


def load_past_damage(rank: int, count: int, root: Path, broken: int) -> tuple[int, list[int], bool, list[int]]:
    with engine_on(root, SECS) as engine:
        engine.save(spread(count, ROWS, step=2), step=2).result(SECS)
        engine.save(spread(count, ROWS, step=3), step=3).result(SECS)
        if rank == 0:
            damage(saved_files.data_file(root / "step_000000003", broken))
        dist.barrier()
        with pytest.raises(CorruptCheckpointError, match="distcp"):
            engine.load(spread(count, ROWS, fill=False), fallback=False)
        template = spread(count, ROWS, fill=False)
        report = engine.load(template)
        assert_same(template, spread(count, ROWS, step=2))
        assert "distcp" in str(report.skipped[0].error)
        dist.barrier()
        steps = engine.steps()
        dist.barrier()
        ticket = engine.save(spread(count, ROWS, step=9))
        assert ticket.result(SECS) is not None
    return (
        report.step,
        [found.step for found in report.skipped],
        report.skipped[0].quarantined is None,
        [*steps, ticket.step],
    )


@pytest.mark.sampled
@pytest.mark.parametrize("broken", [0, 1])
def test_what_one_rank_finds_damaged_all_pass_by(two: Ranks, tmp_path: Path, broken: int) -> None:
    leader, other = two.run(load_past_damage, tmp_path, broken)
    assert leader == (2, [3], False, [2, 4]), "many ranks leave out the step of a save that this engine made"
    assert other[:2] == (2, [3])
    assert other[3] == [2, 4]
    assert list(tmp_path.glob(".aio_ckpt/corrupt/step_000000003-*"))


def load_nothing(rank: int, count: int, root: Path) -> list[str]:
    found = []
    with engine_on(root, SECS) as engine:
        if rank == 1:
            time.sleep(0.3)  # ranks come at different times
        for step in (None, 7):
            try:
                engine.load({"a": torch.zeros(3)}, step=step)
            except AioCkptError as error:
                found.append(type(error).__name__)
    return found


def test_all_ranks_are_told_that_there_is_no_checkpoint(two: Ranks, tmp_path: Path) -> None:
    assert two.run(load_nothing, tmp_path) == [["CheckpointNotFoundError"] * 2] * 2


def load_other_template(rank: int, count: int, root: Path) -> str:
    with engine_on(root, SECS) as engine:
        engine.save({"a": torch.ones(3)}, step=1).result(SECS)
        try:
            engine.load({"a": torch.zeros(3 + rank)})
        except TemplateMismatchError:
            found = "own"
        except PeerFailedError as error:
            found = f"{error.rank} {error.stage} {'TemplateMismatchError' in str(error)}"
        state = {"a": torch.zeros(3)}
        assert engine.load(state).step == 1
        assert torch.equal(state["a"], torch.ones(3))
    return found


def test_a_template_that_fits_not_on_one_rank_is_loaded_by_none(two: Ranks, tmp_path: Path) -> None:
    assert two.run(load_other_template, tmp_path) == ["1 load True", "own"]


# -- group load -------------------------------------------------------------------------------------

TURN_SECS = 8.0
"""Longer than any wait here that ends by being told."""
ELEMENTS = 300
OPTIONS = {"strict": False, "allow_missing": False, "fallback": True}


def submit(engine: CheckpointEngine, state: Any) -> PendingLoad:
    loading = engine.load(state, None, **OPTIONS)
    assert isinstance(loading, PendingLoad)
    return loading


def kind_and_touched(error: BaseException | None) -> tuple[str, bool]:
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
    report = engine.load(state) if isinstance(engine, SyncCheckpointEngine) else submit(engine, state).result(TURN_SECS)
    assert report.step == value
    assert state["step"] == value
    assert bool((state["w"] == value).all())


class LookStorage(ActingStorage):
    """A look at the root can be held."""

    async def list_dir(self, path: Path) -> list[str]:
        found = await self.run(Call("list_dir", path), lambda: self._inner.list_dir(path))
        assert found is not None
        return found


def looking_engine(root: Path, **settings: Any) -> AbstractContextManager[tuple[CheckpointEngine, LookStorage]]:
    return engine_over(LookStorage, root, TURN_SECS, **settings)


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
        engine.save({**state_of(3), "m": Arming(storage)}, step=3).result(TURN_SECS)
        dist.barrier()
        state: dict[str, Any] = {**state_of(0), "m": Arming(storage)}
        report = submit(engine, state).result(TURN_SECS)
        was_refused, storage.act = storage.act is None, None
        return report.step, engine.latest_step().result(), was_refused


def test_a_load_that_is_whole_does_not_fail_because_the_root_cannot_be_listed(two: Ranks, tmp_path: Path) -> None:
    (step, newest, was_refused), other = two.run(load_as_the_disk_goes_away, tmp_path)
    assert (step, newest, was_refused) == (3, 3, True)
    assert other[:2] == (3, 3)


# -- given up ---------------------------------------------------------------------------------------


def give_up(rank: int, count: int, root: Path, leaving: int, when: str) -> tuple[str, bool]:
    with looking_engine(root) as (engine, storage):
        engine.save(state_of(1), step=1).result(TURN_SECS)
        dist.barrier()
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
            load = submit(engine, state_of(0))
            wait_until(lambda: coordinator.messages_sent > sent or rank == 0)  # that it takes part
            if when == "while the leader looks":
                dist.barrier()
            sent = coordinator.messages_sent
            load._give_up()
            wait_until(lambda: coordinator.messages_sent > sent or rank == 0)  # that it leaves
            dist.barrier()
        error = load.exception(TURN_SECS)
        check_next_load(engine, 1)
        dist.barrier()
        report = engine.save(state_of(2), step=2).result(TURN_SECS)
        assert report is not None
    return kind_and_touched(error)


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
    if rank == 0:
        dist.barrier()
    engine = CheckpointEngine(root, EngineConfig(stall_timeout_secs=TURN_SECS, budget_bytes=64 << 20))
    if rank == 1:
        load = submit(engine, state_of(0))
        load._give_up()
        dist.barrier()
    else:
        load = submit(engine, state_of(0))
    error = load.exception(TURN_SECS)
    engine.save(state_of(1), step=1).result(TURN_SECS)
    check_next_load(engine, 1)
    engine.close_blocking()
    return kind_and_touched(error)


def test_a_load_given_up_before_the_ranks_have_met_ends_on_all(two: Ranks, tmp_path: Path) -> None:
    assert two.run(give_up_unmet, tmp_path) == [("PeerFailedError", False), ("SaveCancelledError", False)]


# -- refused ----------------------------------------------------------------------------------------


def load_refused(rank: int, count: int, root: Path, refusing: int, odd: dict[str, Any]) -> str:
    with engine_on(root, TURN_SECS) as engine:
        engine.save(state_of(1), step=1).result(TURN_SECS)
        state = state_of(0)
        error = failure_of(lambda: engine.load(state, **(odd if rank == refusing else {})))
        assert not error.target_modified
        assert state["step"] == 0
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
    with engine_on(root, TURN_SECS) as engine:
        for step in (1, 2):
            engine.save(state_of(step), step=step).result(TURN_SECS)
        state = state_of(0)
        error = failure_of(lambda: engine.load(state, **calls[rank]))
        assert state["step"] == 0
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


def tensors_later(gate: Gate) -> Any:
    """``fetch_values`` behind a gate where it reads tensors; objects are read before the ranks agree."""
    act = restore.fetch_values

    async def fetch_later(ctx: Any, files: Any, checkpoint: Any, plan: FillPlan, *rest: Any, **options: Any) -> None:
        if plan.pieces.filled:
            await gate.wait()
        await act(ctx, files, checkpoint, plan, *rest, **options)

    return fetch_later


def is_matched(engine: CheckpointEngine) -> bool:
    """Whether this rank waits for the templates of the others."""
    coordinator = engine._ctx.members.coordinator
    assert isinstance(coordinator, StoreCoordinator)
    return any(topic.part == "round 2" for topic in coordinator._waits)


def load_while_saving(
    rank: int, count: int, root: Path, step: int | None, saved: dict[str, Any], settings: dict[str, Any], late: str
) -> tuple[int, float, int]:
    """Rank 1 comes to the checkpoint, or to its data, only after ``saved``; rank 0 has come before."""
    with looking_engine(root, **settings) as (engine, _), pytest.MonkeyPatch.context() as patch:
        engine.save(state_of(1), step=1).result(TURN_SECS)
        dist.barrier()
        state, gate = state_of(0), Gate()
        if rank == 1 and late == "to match":  # the load's own look, apart from those of the saves beside it
            patch.setattr(discovery, "step_at", later(gate, discovery.step_at))
        elif rank == 1:
            patch.setattr(restore, "fetch_values", tensors_later(gate))
        load = engine.load(state, step, **OPTIONS)
        if rank == 1:
            gate.wait_reached()
        elif late == "to match":
            wait_until(lambda: is_matched(engine))
        else:
            wait_until(lambda: bool(state["w"].all()))
        dist.barrier()
        assert bool(state["w"].any()) == (rank == 0 and late == "to read"), "filled once the templates of all match"
        assert state["step"] == 0, "objects are set only once all ranks have read the checkpoint"
        engine.save(state_of(9), **saved).result(TURN_SECS)
        wait_until(lambda: len(list(root.glob("step_*"))) == 1)
        dist.barrier()
        gate.open()
        report = load.result(TURN_SECS)
        dist.barrier()
    return report.step, float(state["w"].min()), state["step"]


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
    with engine_on(root, TURN_SECS) as engine:
        if rank == 0:
            torch.distributed.checkpoint.save(
                {"w": torch.ones(ELEMENTS), "step": 1}, checkpoint_id=str(root / "step_000000001"), no_dist=True
            )
        dist.barrier()
        check_next_load(engine, 1)
        with pytest.raises(CheckpointNotFoundError):
            engine.load(state_of(0), step=7)
    return rank


def test_what_stock_dcp_wrote_is_one_checkpoint_for_all_ranks(two: Ranks, tmp_path: Path) -> None:
    assert two.run(load_stock, tmp_path) == [0, 1]


# -- what is left of a load that failed -------------------------------------------------------------


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)


def fail_elsewhere(rank: int, count: int, root: Path, how: str, odd: int = 1) -> tuple[tuple[str, bool], float, int]:
    with engine_on(root, TURN_SECS) as engine:
        engine.save({"w": PerRank(torch.full((ELEMENTS,), 5.0)), "step": PerRank(5)}, step=1).result(TURN_SECS)
        dist.barrier()
        template = {"w": PerRank(torch.zeros(ELEMENTS)), "step": PerRank(0)}
        if rank == odd and how == "damaged":
            flip_a_byte(saved_files.data_file(root / "step_000000001", 1))
        elif rank == odd:
            template["absent"] = PerRank(1)
        dist.barrier()
        error = failure_of(lambda: engine.load(template))
    return kind_and_touched(error), float(template["w"].value.max()), template["step"].value


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
        return {"w": PerRank(torch.full((ELEMENTS,), float(value))), "step": PerRank(value), "s": Stateful(value)}

    with engine_on(root, TURN_SECS) as engine:
        engine.save(made(1), step=1).result(TURN_SECS)
        engine.save({**made(2), "late": PerRank(2)}, step=2).result(TURN_SECS)
        dist.barrier()
        if rank == 1:
            flip_a_byte(saved_files.data_file(root / "step_000000002", 1))
        dist.barrier()
        template = {**made(0), "late": PerRank(0)}
        report = engine.load(template, allow_missing=True)
        assert report.step == 1
        assert template["step"].value == 1
        assert len(report.missing) == 1
    return template["late"].value, int(template["w"].value[0]), template["s"].given


def test_objects_of_a_checkpoint_that_another_rank_finds_damaged_are_never_set(two: Ranks, tmp_path: Path) -> None:
    assert two.run(fall_back, tmp_path) == [(0, 1, [1])] * 2


def find_damaged(rank: int, count: int, root: Path, finding: int) -> tuple[float, float]:
    """Step 2 cannot be opened on one rank, and is whole on the other."""
    with engine_on(root, TURN_SECS) as engine, pytest.MonkeyPatch.context() as patch:
        engine.save({"w": torch.ones(ELEMENTS)}, step=1).result(TURN_SECS)
        engine.save({"w": torch.full((ELEMENTS,), 2.0), "late": torch.ones(3)}, step=2).result(TURN_SECS)
        dist.barrier()
        opened = read_context.open_checkpoint

        async def damaged(storage: Storage, path: Path, **options: Any) -> read_context.Checkpoint:
            if path.name == "step_000000002":
                raise MismatchError("as this rank sees it")
            return await opened(storage, path, **options)

        if rank == finding:
            patch.setattr(read_context, "open_checkpoint", damaged)
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
    with engine_on(root, TURN_SECS) as engine:
        for step in (1, 2, 3):
            engine.save(state_of(step), step=step).result(TURN_SECS)
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
    with engine_on(root, TURN_SECS) as engine:
        engine.save({"w": torch.ones(3)}, step=1).result(TURN_SECS)
        engine.save({"w": torch.ones(ELEMENTS)}, step=2).result(TURN_SECS)
        dist.barrier()
        if rank == 1:
            flip_a_byte(saved_files.data_file(root / "step_000000002"))
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
        assert kind_and_touched(error)[1] == is_modified


def refuse_state(rank: int, count: int, root: Path) -> tuple[str, bool]:
    with engine_on(root, TURN_SECS) as engine:
        engine.save({"s": Stateful(1), "w": torch.ones(3)}, step=1).result(TURN_SECS)
        template = {"s": Stateful(0, is_odd=rank == 1), "w": torch.zeros(3)}
        with pytest.raises((ValueError, PeerFailedError)) as failure:
            engine.load(template)
        template = {"s": Stateful(0), "w": torch.zeros(3)}
        assert engine.load(template).step == 1
    return kind_and_touched(failure.value)


def test_a_load_state_dict_that_raises_on_one_rank_fails_the_load_on_all(two: Ranks, tmp_path: Path) -> None:
    assert two.run(refuse_state, tmp_path) == [("PeerFailedError", True), ("ValueError", True)]


@pytest.mark.parametrize(
    ("beside", "told", "newest"),
    [(None, 3, 3), (None, 2, 2), (None, None, None), (4, 3, 4), (4, None, 4), (4, 5, 5)],
)
def test_a_save_committed_beside_a_load_stays_the_newest(
    beside: int | None, told: int | None, newest: int | None
) -> None:
    members = SimpleNamespace(newest_step=3)
    own: LoadMember[Any] = LoadMember(
        cast("Any", SimpleNamespace(ctx=SimpleNamespace(members=members))),
        cast("Any", None),
        cast("Any", None),
        WantedCheckpoint(),
    )
    members.newest_step = beside or members.newest_step
    own._learn_newest(_Instruction(_Action.DONE, newest=told))
    assert members.newest_step == newest


# -- shared reads -----------------------------------------------------------------------------------

READ_SECS = 60.0
SIDE = 1 << 10
TENSORS = 4
"""Of 4 MiB: more than is read ahead."""
STATE_BYTES = TENSORS * 4 * SIDE * SIDE


class WatchedOpens(GatedStorage):
    """Which data files were opened to be shared."""

    def __init__(self, executor: Executor) -> None:
        super().__init__(executor)
        self.shared: list[bool] = []

    async def open_data_file(self, path: Path, *, page_cache: PageCache = "pass") -> ReadFile:
        self.shared.append(page_cache == "fill")
        return await super().open_data_file(path, page_cache=page_cache)


def to_read(opens: list[bool]) -> list[bool]:
    """The opens behind those to measure: files are measured before a rank knows how much it reads of them."""
    return opens[len(opens) // 2 :]


def shared_state_of(kind: str, rank: int, count: int, *, fill: bool = True) -> dict[str, Any]:
    plain = {f"w{i}": torch.full((SIDE, SIDE), float(i) if fill else -1.0) for i in range(TENSORS)}
    if kind in ("rows", "columns"):
        mesh = init_device_mesh("cpu", (count,))
        cut = Shard(("rows", "columns").index(kind))
        return {name: rank_states.spread(tensor, mesh, cut) for name, tensor in plain.items()}
    if kind == "stages":
        return {f"{name}.{rank}": tensor for name, tensor in plain.items()}
    return plain


def save(rank: int, count: int, root: Path, kind: str) -> None:
    with engine_on(root, READ_SECS) as engine:
        engine.save(shared_state_of(kind, rank, count), step=1).result(READ_SECS)


def forget(root: Path) -> None:
    """Drop what was saved from the page cache."""
    for path in root.glob("step_*/*.distcp"):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def load(
    rank: int, count: int, root: Path, kind: str, over: type[WatchedOpens] = WatchedOpens
) -> tuple[list[bool], int]:
    """Whether files were opened to be shared, and the bytes that this rank had the disk read."""
    executor = Executor("opens", 4)
    storage = over(executor)
    template, wanted = shared_state_of(kind, rank, count, fill=False), shared_state_of(kind, rank, count)
    engine = CheckpointEngine(root, EngineConfig(stall_timeout_secs=READ_SECS), storage=storage)
    before = _disk_bytes()
    try:
        engine.load(template).result(TURN_SECS)  # type: ignore[arg-type]
        read = _disk_bytes() - before
    finally:
        engine.terminate()
        executor.close(READ_SECS)
    for name, value in wanted.items():
        found = template[name]
        assert torch.equal(memory_of(found), memory_of(value)), name
    return storage.shared, read


def _disk_bytes() -> int:
    rows = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(rows["read_bytes"])


SAVED_AND_LOADED = [
    ("copies", "copies", True),
    ("rows", "columns", True),
    ("columns", "rows", True),  # a rank reads whole blocks of 1 MiB, which hold rows of all ranks
    slow("rows", "rows", False),  # two ranks do so below
    slow("columns", "columns", False),
    ("stages", "stages", False),
]


@pytest.mark.sampled
@pytest.mark.parametrize(("saved", "loaded", "is_shared"), SAVED_AND_LOADED)
def test_what_several_ranks_read_is_shared(
    four: Ranks, tmp_path: Path, saved: str, loaded: str, is_shared: bool
) -> None:
    four.run(save, tmp_path, saved)
    forget(tmp_path)
    found = four.run(load, tmp_path, loaded)
    assert {shared for opens, _ in found for shared in to_read(opens)} == {is_shared}
    if is_shared:  # each by itself: four times as much; each its own file by itself: twice
        assert sum(read for _, read in found) < 1.5 * STATE_BYTES


async def test_what_is_open_is_opened_anew_to_be_shared(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(9000))
    executor = Executor("opens", 4)
    storage = WatchedOpens(executor)
    try:
        async with Files(storage, tmp_path, page_cache="pass") as opened:
            await opened.measure(["data"], {})
            await opened.share()
            await opened.measure(["data"], {})
            assert storage.shared == [False, True]
    finally:
        executor.close(READ_SECS)


@pytest.mark.parametrize(("kind", "is_shared"), [("copies", True), ("rows", False)])
def test_two_ranks_share_what_both_read(two: Ranks, tmp_path: Path, kind: str, is_shared: bool) -> None:
    two.run(save, tmp_path, kind)
    assert {shared for opens, _ in two.run(load, tmp_path, kind) for shared in to_read(opens)} == {is_shared}


def load_a_flat_shard(rank: int, count: int, root: Path) -> str:
    mesh = init_device_mesh("cpu", (count,))
    flat = torch.zeros(SIDE * SIDE // count)
    odd = DTensor.from_local(flat, mesh, [Shard(0)], run_check=False, shape=torch.Size((SIDE, SIDE)), stride=(SIDE, 1))
    with engine_on(root, READ_SECS) as engine, pytest.raises(TemplateMismatchError) as failure:
        engine.load({"w0": odd})
    return str(failure.value)


def test_a_shard_of_another_number_of_dimensions_is_a_mismatch(two: Ranks, tmp_path: Path) -> None:
    two.run(save, tmp_path, "rows")
    assert all("'w0' holds a shard of shape" in told for told in two.run(load_a_flat_shard, tmp_path))


def load_by_dcp(rank: int, count: int, root: Path, kind: str) -> list[bool]:
    """Whether files were opened to be shared."""
    executor = Executor("opens", 4)
    storage = WatchedOpens(executor)
    template, wanted = shared_state_of(kind, rank, count, fill=False), shared_state_of(kind, rank, count)
    dcp.load(template, storage_reader=Reader(root / "step_000000001", storage=storage))
    executor.close(READ_SECS)
    assert all(torch.equal(memory_of(template[name]), memory_of(value)) for name, value in wanted.items())
    return storage.shared


@pytest.mark.parametrize(("kind", "is_shared"), [("columns", True), ("copies", True), ("rows", False)])
def test_the_reader_for_dcp_opens_files_shared_where_ranks_read_the_same(
    two: Ranks, tmp_path: Path, kind: str, is_shared: bool
) -> None:
    two.run(save, tmp_path, "rows")
    for opens in two.run(load_by_dcp, tmp_path, kind):
        assert set(to_read(opens)) == {is_shared}


class BadTransfer(WatchedOpens):
    """What is read through the page cache is wrong, as often as it is read."""

    async def open_data_file(self, path: Path, *, page_cache: PageCache = "pass") -> ReadFile:
        file = await super().open_data_file(path, page_cache=page_cache)
        return Garbling(file) if page_cache == "fill" else file


class Garbling:
    def __init__(self, inner: ReadFile) -> None:
        self._inner = inner
        self.path, self.nbytes, self.is_direct = inner.path, inner.nbytes, inner.is_direct

    async def read_into(self, offset: int, *views: memoryview) -> int:
        got = await self._inner.read_into(offset, *views)
        for view in views:
            view[:] = bytes(view.nbytes)
        return got

    async def close(self) -> None:
        await self._inner.close()


def load_what_is_cached_wrong(rank: int, count: int, root: Path) -> list[bool]:
    return load(rank, count, root, "copies", BadTransfer)[0]


def test_what_the_page_cache_has_wrong_is_no_damage_of_the_disk(two: Ranks, tmp_path: Path) -> None:
    two.run(save, tmp_path, "copies")
    for opens in two.run(load_what_is_cached_wrong, tmp_path):
        assert set(opens) == {True, False}
    assert [path.name for path in tmp_path.glob("*corrupt*")] == []


async def test_a_storage_that_must_read_directly_does(tmp_path: Path) -> None:
    executor = Executor("direct", 2)
    (tmp_path / "d").write_bytes(bytes(1 << 16))
    try:
        for direct_io, page_cache in (("auto", "fill"), ("auto", "pass"), ("auto", "take"), ("on", "fill")):
            storage = Storage(executor, direct_io)  # type: ignore[arg-type]
            file = await storage.open_data_file(tmp_path / "d", page_cache=page_cache)  # type: ignore[arg-type]
            assert file.is_direct is (page_cache != "fill" or direct_io == "on")
            await file.close()
    finally:
        executor.close(READ_SECS)


# -- a directory --------------------------------------------------------------------------------------


def load_directory(rank: int, count: int, root: Path, names: list[str]) -> Any:
    with engine_on(root, TURN_SECS) as engine:
        try:
            report = engine.load(template := weights(0), path=root.parent / names[rank])
        except PeerFailedError as error:
            return str(error)
        return report.step, template["w"].tolist()


def test_all_ranks_load_one_directory_and_none_loads_where_they_name_two(two: Ranks, tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path / "old") as engine:
        moved = engine.save(weights(2), 2).result(TURN_SECS).path.rename(tmp_path / "moved")
    assert two.run(load_directory, tmp_path / "root", [moved.name] * 2) == [(2, [2.0] * 10)] * 2
    for message in two.run(load_directory, tmp_path / "root", [moved.name, "other"]):
        assert "rank 1 loads" in message
        assert "the same step, path and fallback" in message


# -- beside a save ------------------------------------------------------------------------------------


def load_beside_saves(rank: int, count: int, root: Path) -> tuple[list[int | None], float]:
    """Both ranks load while step 2 is pending; rank 1 loads a committed step meanwhile, in another order of ends."""
    with engine_over(ActingStorage, root, SECS, max_in_flight=2) as (engine, storage):
        engine.save(weights(1), step=1).result(SECS)
        gate = storage.hold("rename", "pending/*")  # the leader alone comes here
        engine.save(weights(2), step=2)
        newest = engine.load(template := weights(0), None, **OPTIONS)
        first = engine.load(weights(0), 1, **OPTIONS)
        assert first.result(SECS).step == 1
        assert not newest.done()
        dist.barrier()
        gate.open()
        return [newest.result(SECS).step, engine.latest_step().result(SECS)], float(template["w"][0])


def test_ranks_that_load_beside_a_pending_save_load_it_all(two: Ranks, tmp_path: Path) -> None:
    assert two.run(load_beside_saves, tmp_path) == [([2, 2], 2.0)] * 2


def load_what_rank_0_saved(rank: int, count: int, root: Path) -> tuple[tuple[str, ...], float]:
    module = torch.nn.Linear(2, 2)
    with engine_on(root, SECS) as engine, torch.no_grad():
        module.weight.fill_(7.0)
        report = engine.load({"m": PerRank(module)}, allow_missing=True)
        return report.missing, float(module.weight[0, 0])


def test_a_module_per_rank_keeps_its_values_on_a_rank_that_did_not_save(two: Ranks, tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 2)
    with SyncCheckpointEngine(tmp_path) as engine, torch.no_grad():
        module.weight.fill_(1.0)
        engine.save({"m": PerRank(module)}, step=1).result(SECS)
    assert two.run(load_what_rank_0_saved, tmp_path) == [((), 1.0), (("m.rank1",), 7.0)]


# -- names of their own -------------------------------------------------------------------------------


def read_stages(rank: int, count: int, root: Path) -> tuple[list[str], list[str]]:
    with engine_on(root, SECS) as engine:
        path = engine.save({"model": {f"layer{rank}": torch.ones(2)}}, step=1).result(SECS).path
        own = engine.read(1)
    dist.barrier()
    return sorted(own["model"]), sorted(aio_ckpt.read(path)["model"])


def test_a_read_of_one_process_tells_of_the_per_rank_values_that_it_leaves_out(
    two: Ranks, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    two.run(save_per_rank, tmp_path)
    state: Any = aio_ckpt.read(steps_dir(tmp_path, 1))
    assert state["rng"].tolist() == [0.0] * 4
    assert "and 1 read: the PerRank values of the others are left out: 1 name: 'rng.rank1'" in caplog.text


def test_the_engine_reads_the_stage_of_its_rank_and_a_read_of_a_directory_all_stages(
    two: Ranks, tmp_path: Path
) -> None:
    assert two.run(read_stages, tmp_path) == [([f"layer{rank}"], ["layer0", "layer1"]) for rank in range(2)]
