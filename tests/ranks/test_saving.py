"""Many ranks save one checkpoint: who writes what, what stock DCP reads of it, and what a later save sends."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import anyio
import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from builders import listing
from gated_storage import Call
from log_lines import kept_lines
from rank_engines import ActingStorage, acting_engine, engine_over
from rank_processes import Ranks, engine_on
from rank_states import assert_same, mixed_state, whole, zeroed
from saved_files import without_save_id
from slow import slow
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from aio_ckpt import EngineConfig, PerRank, SyncCheckpointEngine
from aio_ckpt.engine import root_session as engine_root
from aio_ckpt.engine import state_pipeline
from aio_ckpt.errors import DuplicateNameError, PeerFailedError, PlanChangedError
from aio_ckpt.plan.assignment import Assignment, Boxes, assign
from aio_ckpt.plan.shard_table import LocalPlan, ShardInfo, ShardTable, TensorSignature
from aio_ckpt.ranks.store_coordinator import StoreCoordinator
from aio_ckpt.storage.mounts import Mount

SECS = 30.0
T = TypeVar("T")
_SLEEP = anyio.sleep
HEAD_START_SECS = 1 / 17
"""No other sleep is that long."""


def config(**settings: Any) -> EngineConfig:
    return EngineConfig(stall_timeout_secs=SECS, budget_bytes=64 << 20, **settings)


# -- the directory of a save ------------------------------------------------------------------------


class Meeting(ActingStorage):
    """The first rank makes the directory of a save once the other one has come; the other one then goes on."""

    come, made = Path(), Path()

    async def run(self, call: Call, act: Callable[[], Awaitable[T]]) -> T | None:
        is_directory = call.matches("make_dir", "pending/*-2")
        if is_directory and dist.get_rank() == 0:
            await _appears(self.come)
        found = await super().run(call, act)
        if is_directory:
            self.made.touch()
        return found


async def _appears(path: Path) -> None:
    with anyio.fail_after(SECS):
        while not path.exists():
            await _SLEEP(0.005)


def makers(rank: int, count: int, root: Path) -> list[str]:
    """Save on a shared file system. Returns the directories that this rank made."""

    async def head_start(secs: float) -> None:
        if secs != HEAD_START_SECS:
            return await _SLEEP(secs)
        Meeting.come.touch()
        await _appears(Meeting.made)

    Meeting.come, Meeting.made = root / "come", root / "made"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_root, "mount_of", lambda _: Mount("nfs4", frozenset()))
        patch.setattr(state_pipeline, "_HEAD_START_SECS", HEAD_START_SECS)
        with engine_over(Meeting, root, SECS, stale_after_secs=600.0) as (engine, storage):
            # The ranks plan in the first save: the first one makes its directory before.
            engine.save(mixed_state(rank, count, 1), step=1).result(SECS)
            patch.setattr(anyio, "sleep", head_start)
            engine.save(mixed_state(rank, count, 2), step=2).result(SECS)
            return [call.path.parent.name for call in storage.begun if call.matches("make_dir", "pending/*-2")]


def test_on_a_shared_file_system_the_first_rank_alone_makes_the_directory_of_a_save(two: Ranks, tmp_path: Path) -> None:
    assert two.run(makers, tmp_path) == [["pending"], []]


# -- one checkpoint of many ranks -------------------------------------------------------------------


def save_and_load(rank: int, count: int, root: Path) -> tuple[bool, ...]:
    hits = []
    with SyncCheckpointEngine(root, config()) as engine:
        for step in (1, 2, 3):
            report = engine.save(mixed_state(rank, count, step), step=step).result(SECS)
            assert report is not None
            hits.append(report.plan_hit)
        template = zeroed(mixed_state(rank, count))
        assert engine.load(template).step == 3
        assert_same(template, mixed_state(rank, count, 3))
        template = zeroed(mixed_state(rank, count))
        assert engine.load(template, step=1).step == 1
        assert_same(template, mixed_state(rank, count, 1))
    return tuple(hits)


@pytest.mark.parametrize("count", [slow(2), 4])
def test_what_many_ranks_saved_each_of_them_loads(request: pytest.FixtureRequest, count: int, tmp_path: Path) -> None:
    running: Ranks = request.getfixturevalue({2: "two", 4: "four"}[count])
    assert running.run(save_and_load, tmp_path) == [(False, True, True)] * count
    for step in (1, 2, 3):
        names = sorted(without_save_id(path.name) for path in (tmp_path / f"step_{step:09d}").iterdir())
        assert names == sorted(
            [".metadata", "aio_ckpt.*.json"]
            + [f"__*_{rank}_0.distcp" for rank in range(count)]
            + [f"aio_ckpt.*.{rank}.bin" for rank in range(count)]
        )
    assert listing(tmp_path) == [f"step_{n:09d}" for n in (1, 2, 3)]


def load_by_dcp(rank: int, count: int, path: Path, step: int) -> None:
    given = mixed_state(rank, count, step)
    names = ("rows", "uneven", "short", "columns", "copy", "replica", "tied")
    template = {name: torch.zeros_like(given[name]) for name in names}
    template |= {"nested": {"0": torch.zeros(11), "names": [None, None]}, "mine": zeroed(given["mine"]), "step": None}
    dcp.load(template, checkpoint_id=str(path))
    for name in names:
        assert_same(template[name], given[name])
    assert torch.equal(template["nested"]["0"], given["nested"][0])
    assert template["step"] == step
    assert_same(template["mine"], given["mine"])


def test_stock_dcp_reads_what_many_ranks_saved(two: Ranks, tmp_path: Path) -> None:
    two.run(save_and_load, tmp_path)
    two.run(load_by_dcp, tmp_path / "step_000000003", 3)


def move_a_shard(rank: int, count: int, root: Path) -> list[tuple[bool, bool]]:
    local = torch.arange(6.0).view(2, 3) + 6 * rank
    found = []
    with SyncCheckpointEngine(root, config()) as engine:
        for order in ([0, 1], [1, 0]):
            spread = DTensor.from_local(local, DeviceMesh("cpu", order), [Shard(0)], run_check=False)
            report = engine.save({"w": spread}).result(SECS)
            assert report is not None
            read = engine.read()
            assert isinstance(read, dict)
            parts = [torch.arange(6.0).view(2, 3) + 6 * r for r in order]
            found.append((report.plan_hit, torch.equal(read["w"], torch.cat(parts))))
    return found


def test_a_shard_that_moved_in_its_global_tensor_is_a_miss(two: Ranks, tmp_path: Path) -> None:
    """S4 (e): same local shape, same memory; the mesh gives each rank another row block."""
    assert two.run(move_a_shard, tmp_path) == [[(False, True), (False, True)]] * 2


# -- plans ------------------------------------------------------------------------------------------

# -- who writes what: pure ---------------------------------------------------------------------------


def holding(*names: str, rows: int = 4, at: int = 0, of: int | None = None) -> ShardInfo:
    return ShardInfo(names, (at, 0), TensorSignature((rows, 8), (of or rows, 8), "float32"))


def plan(*tensors: ShardInfo, objects: tuple[str, ...] = ()) -> LocalPlan:
    return LocalPlan.of(tensors, objects, b"")


Shared = tuple[list[tuple[int, tuple[str, ...]]], tuple[str, ...]]
"""(item, the names of it that are written), objects."""


def assigned(plans: list[LocalPlan], kept: dict[int, Assignment] | None = None) -> list[Shared]:
    """What each rank writes."""
    held = ShardTable.of(plans)
    boxes = Boxes.of_rows(held)
    shares = [of_rank.share for of_rank in assign(held, boxes, kept or {}, np.zeros(boxes.count, np.bool_))]
    items = [msgspec.msgpack.decode(plan.names) for plan in plans]
    return [
        ([(item, tuple(names)) for item, names in share.items(fqns)], share.object_names(own))
        for share, fqns, own in zip(shares, items, held.objects, strict=True)
    ]


def names_of(shared: Shared) -> list[str]:
    return [name for _, names in shared[0] for name in names]


def test_every_box_is_written_once_and_replicas_are_spread() -> None:
    tensors = [holding(f"t{number}", rows=3000 + number % 7) for number in range(40)]
    shares = assigned([plan(*tensors) for _ in range(4)])
    written = [name for share in shares for name in names_of(share)]
    assert sorted(written) == sorted(f"t{number}" for number in range(40))
    loads = [sum(32 * tensors[index].signature.shape[0] for index, _ in items) for items, _ in shares]
    assert max(loads) <= 1.1 * sum(loads) / 4


def test_tied_names_stay_together_and_objects_go_to_the_lowest_rank() -> None:
    first = plan(holding("a", "b"), holding("c"), objects=("n",))
    second = plan(holding("a", "b"), holding("c"), objects=("n", "m"))
    shares = assigned([first, second])
    assert sorted(names for items, _ in shares for _, names in items) == [("a", "b"), ("c",)]
    assert [objects for _, objects in shares] == [("n",), ("m",)]


def test_a_rank_that_kept_its_plan_is_given_nothing_that_it_did_not_capture() -> None:
    plans = [plan(holding("a"), holding("b")), plan(holding("a"), holding("b"), holding("new"))]
    zero, one = assigned(plans, {0: Assignment.of([True, False], [])})
    assert names_of(zero) == ["a"]
    assert names_of(one) == ["b", "new"]


def test_what_nobody_captured_is_an_error() -> None:
    plans = [plan(holding("a"), holding("b")), plan(holding("b"))]
    with pytest.raises(PlanChangedError, match="'a'"):
        assigned(plans, {0: Assignment.of([False, True], [])})


def test_one_name_for_two_things_is_an_error() -> None:
    for other in (plan(holding("a", rows=5)), plan(objects=("a",))):
        with pytest.raises(DuplicateNameError, match="rank 1"):
            assigned([plan(holding("a")), other])


# -- and with real ranks -----------------------------------------------------------------------------


def save_replicas(rank: int, count: int, root: Path) -> list[int]:
    sizes = []
    with engine_on(root, SECS) as engine:
        state = {f"t{number}": whole(f"t{number}", 200, 100) for number in range(64)}
        for step in (1, 2):
            report = engine.save(state, step=step).result(SECS)
            assert report is not None
            sizes.append(report.raw_bytes)
        assert engine.lifetime.arena_bytes < 64 * 200 * 100 * 4 * 1.2
    return sizes


def test_replicas_are_written_once_and_spread_over_the_ranks(four: Ranks, tmp_path: Path) -> None:
    for sizes in zip(*four.run(save_replicas, tmp_path), strict=True):
        assert sum(sizes) == 64 * 200 * 100 * 4
        assert max(sizes) <= 1.1 * sum(sizes) / 4


def count_messages(rank: int, count: int, root: Path) -> list[tuple[int, int]]:
    found = []
    with acting_engine(root, SECS) as (engine, _):
        coordinator = engine._ctx.members.coordinator
        assert isinstance(coordinator, StoreCoordinator)
        engine._ctx.members.opened.result(SECS)
        for step in range(1, 7):
            before = coordinator.messages_sent, coordinator.bytes_sent
            state = {
                "w": whole("w", 100),
                "mine": PerRank({"rng": torch.ones(4), "text": "x" * (1000 if step > 4 else 10), "last": step}),
                "step": step,
            }
            engine.save(state, step=step).result(SECS)
            found.append((coordinator.messages_sent - before[0], coordinator.bytes_sent - before[1]))
        dist.barrier()
    return found


def test_a_save_of_an_unchanged_structure_is_one_small_message_a_rank(four: Ranks, tmp_path: Path) -> None:
    leader, *others = four.run(count_messages, tmp_path)
    assert leader == [(0, 0)] * 6
    for found in others:
        assert [messages for messages, _ in found] == [2, 1, 1, 1, 1, 1]
        assert all(nbytes <= 100 for _, nbytes in found[1:4])
        assert found[4][1] <= 100 + 2 * 16  # an object has grown: it and the one behind it stand elsewhere


def changed(rank: int, step: int) -> dict[str, Any]:
    """S5, with the changes on rank 1 only."""
    a, b = whole("a", 64, 8), whole("b", 32)
    mine: dict[str, Any] = {"t": torch.full((8,), float(rank + step))}
    state: dict[str, Any] = {"a": a, "b": b, f"of {rank}": mine, "n": 3}
    if rank == 0:
        return state
    if step >= 2:
        mine["object"] = [1, 2]
    if step >= 3:
        mine["t"] = torch.full((16,), float(step))
    if step >= 4:
        mine["t"] = mine["t"].to(torch.bfloat16)
    if step >= 6:
        mine = state["of 1"] = dict(reversed(list(mine.items())))
    if step >= 8:
        mine["object"] = list(range(1000))
    if step == 9:
        mine["x"] = {"y": torch.ones(3)}
    if step == 10:
        mine["x.y"] = torch.ones(3)
    if step >= 11:
        mine["one"] = mine["other"] = torch.full((9,), 4.0)
    if step >= 12:
        mine["other"] = torch.full((9,), 5.0)
    if step in (13, 15):
        mine["comes and goes"] = "here"
    return state


def save_many_tensors(rank: int, count: int, root: Path, tensors: int) -> tuple[int, int]:
    memory = torch.arange(2.0 * tensors)
    name = "model.layers.{}.block_sparse_moe.experts.{}.feed_forward.w1.weight.moments.of_rank_{}"
    state = {name.format(i // 100, i % 100, rank): memory[2 * i : 2 * i + 2] for i in range(tensors)}
    with SyncCheckpointEngine(root, EngineConfig(stall_timeout_secs=10 * SECS)) as engine:
        coordinator = engine._ctx.members.coordinator
        assert isinstance(coordinator, StoreCoordinator)
        engine.save(state, step=1).result(10 * SECS)
        sent, received = coordinator.bytes_sent, coordinator.bytes_received
        last = name.format((tensors - 1) // 100, (tensors - 1) % 100, rank)
        assert engine.read(only=[last])[last].tolist() == [2 * tensors - 2, 2 * tensors - 1]
    return sent, received


@pytest.mark.parametrize("tensors", [2_000, slow(200_000)])
def test_the_first_save_of_many_tensors_sends_a_fifth_of_their_names(two: Ranks, tmp_path: Path, tensors: int) -> None:
    """200,000 are more than a request to the store takes, as names alone."""
    (_, plan_bytes), (sent, _) = two.run(save_many_tensors, tmp_path, tensors, timeout=600)
    assert plan_bytes > 150 * tensors
    assert sent < plan_bytes / 5


def change_on_one_rank(rank: int, count: int, root: Path) -> list[bool]:
    hits = []
    with engine_on(root, SECS) as engine:
        for step in range(1, 17):
            if rank == step % 2:
                time.sleep(0.02)  # ranks come at different times
            state = changed(rank, step)
            report = engine.save(state, step=step).result(SECS)
            assert report is not None
            hits.append(report.plan_hit)
            template = zeroed(state)
            assert engine.load(template).step == step
            assert_same(template, state)
    return hits


def test_a_structure_that_changes_on_one_rank_only_is_saved_as_it_is(two: Ranks, tmp_path: Path) -> None:
    still, changing = two.run(change_on_one_rank, tmp_path)
    assert still == [False] + [True] * 15
    # Only 5 (as 4), 7 (as 6), 8 (an object grew) and 12 to 16 alternating: untied, an object comes and goes.
    assert changing == [step in (5, 7, 8) for step in range(1, 17)]


def drop_a_replica(rank: int, count: int, root: Path) -> list[str]:
    found = []
    with engine_on(root, SECS) as engine:
        for step in range(1, 5):
            state = {f"t{number}": whole(f"t{number}", 10, 2000) for number in range(4)} | {"of": PerRank(rank)}
            if step >= 2 and rank == 1:
                for number in range(4):
                    del state[f"t{number}"]
            try:
                engine.save(state, step=step).result(SECS)
            except PlanChangedError as error:
                assert "no rank captured" in str(error)  # noqa: PT017
                found.append("changed")
            except PeerFailedError as error:
                found.append(f"peer {error.rank}")
            else:
                found.append("saved")
            dist.barrier()
        template = zeroed(state)
        assert engine.load(template).step == 4
        assert_same(template, state)
        dist.barrier()
    return found


def test_a_replica_that_its_writer_dropped_is_never_missing_from_a_checkpoint(two: Ranks, tmp_path: Path) -> None:
    assert two.run(drop_a_replica, tmp_path) == [
        ["saved", "changed", "saved", "saved"],
        ["saved", "peer 0", "saved", "saved"],
    ]


def save_nearly_nothing(rank: int, count: int, root: Path) -> None:
    with engine_on(root, SECS) as engine:
        state: dict[str, Any] = {"n": 3} if rank else {"n": 3, "w": torch.ones(40)}
        for step in (1, 2):
            assert engine.save(state, step=step).result(SECS) is not None
        template = zeroed(state)
        engine.load(template)
        assert_same(template, state)


def test_a_rank_may_have_nothing_to_write(two: Ranks, tmp_path: Path) -> None:
    two.run(save_nearly_nothing, tmp_path)


def save_unequal(rank: int, count: int, root: Path) -> tuple[set[float], list[str]]:
    names = [f"stat{number}" for number in range(6)]
    with kept_lines() as lines, engine_on(root, SECS, differing_replicas="rank0") as engine:
        state: dict[str, Any] = {name: torch.full((3,), float(rank)) for name in names}
        state |= {
            "order": torch.arange(100).roll(rank),
            "same": torch.arange(100),
            "note": [rank],
            "lr": 0.1 * (rank + 1),
            "wd": 0.1,
            "own": PerRank(rank),
        }
        engine.save(state, step=1).result(SECS)
        engine.save(state, step=2).result(SECS)
        loaded = {name: torch.zeros(3) - 1 for name in names} | {"note": None}
        engine.load(loaded, strict=False)
    assert loaded["note"] == [0]
    return {float(loaded[name][0]) for name in names}, [text for text in lines.messages if "values differ" in text]


def test_of_replicas_that_differ_those_of_rank_0_are_saved_and_named_if_they_are_meant(
    two: Ranks, tmp_path: Path
) -> None:
    (zeros, warned), (zeros_too, silent) = two.run(save_unequal, tmp_path)
    assert zeros == zeros_too == {0.0}
    assert not silent
    (warning,) = warned
    assert warning.startswith(
        "values differ between ranks that hold the same part of them (9 names: 'lr', 'note', 'order', 'stat0'"
    )


def prepare_replicated(rank: int, count: int, root: Path) -> list[int]:
    nbytes, found = 8 << 20, []
    state = {f"w{number}": torch.ones(nbytes // 32, dtype=torch.uint8) for number in range(32)}
    with engine_on(root, SECS) as engine:
        engine.prepare(state, step=1).result(SECS)
        found.append(engine.stats().memory_bytes)
        engine.save(state, step=1).result(SECS)
        found.append(engine.stats().memory_bytes)
        engine.prepare(state).result(SECS)
        found.append(engine.stats().memory_bytes)
    return [round(count * mapped / nbytes) for mapped in found]


def test_prepare_maps_no_memory_for_what_other_ranks_will_write(two: Ranks, tmp_path: Path) -> None:
    assert two.run(prepare_replicated, tmp_path) == [[0, 1, 1]] * 2


# -- saves side by side (S7) -------------------------------------------------------------------------


def save_two_at_once(rank: int, count: int, root: Path) -> list[bool]:
    with (
        engine_on(root / "model", SECS, max_in_flight=2) as model,
        engine_on(root / "ema", SECS, max_in_flight=2) as ema,
    ):
        tickets = []
        for step in range(1, 7):
            if rank == step % 2:
                time.sleep(0.02)
            tickets.append(model.save({"w": torch.full((1000,), float(step)), "of": PerRank(rank + step)}, step=step))
            tickets.append(ema.save({"e": torch.full((500,), -float(step))}, step=step))
        reports = [ticket.result(SECS) for ticket in tickets]
        for step in range(1, 7):
            state = {"w": torch.zeros(1000), "of": PerRank(0)}
            model.load(state, step=step)
            assert torch.equal(state["w"], torch.full((1000,), float(step)))
            assert state["of"] == PerRank(rank + step)
            average = {"e": torch.zeros(500)}
            ema.load(average, step=step)
            assert torch.equal(average["e"], torch.full((500,), -float(step)))
    return [report is not None and report.plan_hit for report in reports][-4:]


def test_saves_in_flight_and_engines_side_by_side_never_mix(two: Ranks, tmp_path: Path) -> None:
    assert two.run(save_two_at_once, tmp_path) == [[True] * 4] * 2


def save_beyond_the_budget(rank: int, count: int, root: Path, budgets: tuple[int, int]) -> list[bool]:
    config = EngineConfig(stall_timeout_secs=SECS, budget_bytes=budgets[rank])
    state = {f"t{number}": whole(f"t{number}", 1 << 18) for number in range(8)} | {"n": 3, "of": PerRank(rank)}
    hits = []
    with SyncCheckpointEngine(root, config) as engine:
        for step in (1, 2):
            report = engine.save(state, step=step).result(SECS)
            assert report is not None
            hits.append(report.plan_hit)
        template = zeroed(state)
        engine.load(template)
        assert_same(template, state)
    return hits


@pytest.mark.parametrize(
    "budgets",
    [
        pytest.param((6 << 20, 6 << 20), id="each holds its share"),
        slow((1 << 20, 256 << 10), id="both go in waves"),
        pytest.param((64 << 20, 256 << 10), id="one goes in waves"),
    ],
)
def test_replicas_beyond_the_budget_are_captured_once_it_is_agreed_who_writes_what(
    two: Ranks, tmp_path: Path, budgets: tuple[int, int]
) -> None:
    assert two.run(save_beyond_the_budget, tmp_path, budgets) == [[False, True]] * 2
