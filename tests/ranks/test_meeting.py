"""Which engines meet: each rank's n-th on a root, whatever their threads do; never those of another group or world."""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import anyio
import pytest
import torch.distributed as dist
from builders import weights
from hypothesis import given
from hypothesis import strategies as st
from rank_processes import Ranks, engine_on, ranks

from aio_ckpt import CheckpointEngine, EngineConfig, SyncCheckpointEngine
from aio_ckpt.errors import AioCkptError, ConfigError, PeerFailedError, ReadError
from aio_ckpt.ranks.exchange import Exchange
from aio_ckpt.ranks.messages import Topic
from aio_ckpt.ranks.store import Rendezvous, companions, without
from aio_ckpt.ranks.store_coordinator import StoreCoordinator
from aio_ckpt.runtime.portal import Executor
from aio_ckpt.storage.local import Storage

T = TypeVar("T")
SECS = 20.0
SHORT_SECS = 2.0
BYTES: Exchange[bytes, bytes] = Exchange(bytes, bytes, stage="agree")


# -- the queue ----------------------------------------------------------------------------------------


def test_engines_meet_in_the_order_in_which_each_rank_made_them() -> None:
    queue = "0 w a0\n1 v a1\n1 v b1\n0 w b0\n1 v c1\n"
    assert [companions(queue, name) for name in ("a0", "b1", "c1", "x")] == [
        {0: "a0", 1: "a1"},
        {0: "b0", 1: "b1"},
        {1: "c1"},
        {},
    ]


def test_what_a_rank_entered_in_an_earlier_world_counts_no_more() -> None:
    queue = "0 w old\n0 w older\n1 v a1\n0 again a0\n"
    assert companions(queue, "a1") == {0: "a0", 1: "a1"}
    assert companions(queue, "old") == {}


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), max_size=12))
def test_no_engine_meets_two_of_a_rank_and_whoever_meets_agrees_on_it(lines: list[tuple[int, int]]) -> None:
    queue = "".join(f"{rank} {world} n{number}\n" for number, (rank, world) in enumerate(lines))
    for number, (rank, _) in enumerate(lines):
        party = companions(queue, f"n{number}")
        assert not party or party[rank] == f"n{number}"
        assert all(companions(queue, other) == party for other in party.values())
        assert not set(companions(without(queue, party.values()), f"n{number}").values())


# -- two engines in one process -------------------------------------------------------------------------


class SlowCoordinator(StoreCoordinator):
    """Its portal's thread gets to the opening late."""

    def __init__(self, delay_secs: float) -> None:
        store = dist.distributed_c10d._get_default_store()
        super().__init__(store, rank=dist.get_rank(), world_size=dist.get_world_size())
        self._delay_secs = delay_secs

    async def open(self, name: str, *, stall_secs: float) -> None:
        await asyncio.sleep(self._delay_secs)  # a busy core
        await super().open(name, stall_secs=stall_secs)


def open_one(root: Path, delay_secs: float) -> SyncCheckpointEngine:
    config = EngineConfig(stall_timeout_secs=SHORT_SECS, budget_bytes=64 << 20)
    return SyncCheckpointEngine(root, config, coordinator=SlowCoordinator(delay_secs))


def in_turn(*makers: Callable[[], SyncCheckpointEngine]) -> list[SyncCheckpointEngine]:
    """Each makes its engine in a thread of its own, one after the other."""
    made: list[SyncCheckpointEngine] = []
    for make in makers:
        thread = threading.Thread(target=lambda make=make: made.append(make()))
        thread.start()
        thread.join(SECS)
    return made


def open_two_at_once(rank: int, count: int, root: Path) -> tuple[int, int]:
    delays = (0.5, 0.0) if rank == 1 else (0.0, 0.0)
    saver, loader = in_turn(*(lambda delay=delay: open_one(root, delay) for delay in delays))
    with saver, loader:
        saved = saver.save(weights(1), step=1).result(SECS).step
        return saved, loader.load(weights(0)).step


def test_two_engines_on_one_root_meet_in_the_order_of_their_making_not_of_their_threads(
    two: Ranks, tmp_path: Path
) -> None:
    assert two.run(open_two_at_once, tmp_path) == [(1, 1)] * 2


def open_beside_a_dead_one(rank: int, count: int, root: Path) -> int:
    """The leader finds the entry of a rank that was killed before, and the rank that takes its place comes later."""
    store = dist.distributed_c10d._get_default_store()
    keys = dist.PrefixStore(f"aio_ckpt/{count}", store)
    dead = Rendezvous(keys, world_size=count, name="dead")
    if rank == 1:
        dead.enter(1, "before")
    dist.barrier()
    if rank == 1:
        keys.wait(["dead/out"], timedelta(seconds=SECS))
    config = EngineConfig(stall_timeout_secs=SECS, budget_bytes=64 << 20)
    coordinator = StoreCoordinator(store, rank=rank, world_size=count)
    with SyncCheckpointEngine(root, config, coordinator=coordinator) as engine:
        step = engine.save(weights(1), step=1).result(SECS / 2).step
    if rank == 1:
        dead.withdraw()
    return step


def test_ranks_that_are_started_again_on_the_store_of_dead_ones_meet(two: Ranks, tmp_path: Path) -> None:
    assert two.run(open_beside_a_dead_one, tmp_path) == [1, 1]


# -- a root that cannot be looked at ----------------------------------------------------------------------


class BadLooks(Storage):
    """The first looks at the root fail."""

    failing = 0

    def _look(self, path: Path) -> None:
        if self.failing:
            self.failing -= 1
            raise ReadError(errno.EIO, "the disk is away", str(path))

    async def list_dir(self, path: Path) -> list[str]:
        self._look(path)
        return await super().list_dir(path)

    async def exists(self, path: Path) -> bool:
        self._look(path)
        return await super().exists(path)


def meet_over_bad_looks(rank: int, count: int, root: Path, at: int, failing: int) -> tuple[object, list[str]]:
    executor = Executor("looks", 4)
    storage = BadLooks(executor)
    storage.failing = failing if rank == at else 0
    engine = CheckpointEngine(root, EngineConfig(stall_timeout_secs=SECS, budget_bytes=64 << 20), storage=storage)
    try:
        return engine.save(weights(1), step=1).result(SECS).step, []
    except AioCkptError as error:
        return str(error), getattr(error, "__notes__", [])
    finally:
        engine.terminate()
        executor.close(SECS)


@pytest.mark.parametrize("at", [0, 1])
def test_ranks_meet_although_a_look_at_the_root_fails_once(two: Ranks, tmp_path: Path, at: int) -> None:
    assert two.run(meet_over_bad_looks, tmp_path, at, 1) == [(1, [])] * 2


@pytest.mark.parametrize("at", [0, 1])
def test_where_the_root_cannot_be_looked_at_all_know_why_and_what_to_do(two: Ranks, tmp_path: Path, at: int) -> None:
    """Rank 0 looks at it when the ranks meet, the others at the first save."""
    for rank, (text, notes) in enumerate(two.run(meet_over_bad_looks, tmp_path, at, 99)):
        assert "the disk is away" in str(text)
        assert rank == at or f"rank {at} failed" in str(text)
        assert at == 1 or any("open them anew" in note for note in notes)


# -- two worlds on one store ----------------------------------------------------------------------------


def restart(rank: int, count: int, root: Path, is_swapped: bool) -> tuple[int, int]:
    """The same store for the engines of both worlds; in the first one a rank opens engines that meet nobody."""
    store = dist.distributed_c10d._get_default_store()
    config = EngineConfig(stall_timeout_secs=SECS, budget_bytes=64 << 20)

    def engine(rank: int) -> SyncCheckpointEngine:
        return SyncCheckpointEngine(root, config, coordinator=StoreCoordinator(store, rank=rank, world_size=count))

    again = 1 - rank if is_swapped else rank
    old = engine(rank)
    first = old.save(weights(1), step=1).result(SECS).step
    lonely = [engine(rank) for _ in range(2 * (1 - rank))]
    old.terminate()
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=again, world_size=count)
    if not lonely:
        new = engine(again)  # before any other of the new world
    dist.barrier()
    for each in lonely:
        with pytest.raises(PeerFailedError, match="another process group now"):
            each.load(weights(0))
    if lonely:
        new = engine(again)
    with new:
        assert new.load(weights(0)).step == 1
        second = new.save(weights(2)).result(SECS).step
        dist.barrier()
    for each in lonely:
        each.terminate()
    return first, second


@pytest.mark.parametrize("is_swapped", [False, True])
def test_a_new_group_in_the_same_process_meets_nothing_of_the_old_one_on_the_same_store(
    tmp_path: Path, is_swapped: bool
) -> None:
    with ranks(2) as two:
        assert two.run(restart, tmp_path, is_swapped) == [(1, 2)] * 2


# -- two groups on one store ----------------------------------------------------------------------------


def save_in_groups(rank: int, count: int, root: Path) -> tuple[int, str]:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine, other = groups[rank // 2], groups[1 - rank // 2]
    with pytest.raises(ConfigError, match="no rank of the group"):
        StoreCoordinator.of_group(other)
    coordinator = StoreCoordinator.of_group(mine)
    config = EngineConfig(stall_timeout_secs=SECS, budget_bytes=64 << 20)
    with SyncCheckpointEngine(root / f"of {rank // 2}", config, coordinator=coordinator) as engine:
        step = engine.save(weights(rank // 2), step=10 + rank // 2).result(SECS).step
        assert engine.steps() == [10 + rank // 2]
    return step, asyncio.run(meet_under_one_name(mine, rank))


async def meet_under_one_name(group: dist.ProcessGroup, rank: int) -> str:
    """As on two hosts with a disk each, at the same path."""

    async def in_order(messages: Sequence[bytes]) -> bytes:
        return b" ".join(messages)

    coordinator = StoreCoordinator.of_group(group)
    if rank in (1, 2):
        dist.barrier()  # the first of one group and the last of the other come first
    coordinator.register("/local/checkpoints", stall_secs=SECS)
    if rank in (0, 3):
        dist.barrier()
    await coordinator.open("/local/checkpoints", stall_secs=SECS)
    try:
        return (await BYTES.run(coordinator, Topic("t"), b"%d" % rank, in_order)).decode()
    finally:
        await coordinator.leave()
        coordinator.close()


def test_two_groups_on_one_store_never_meet_on_different_roots_or_the_same(four: Ranks, tmp_path: Path) -> None:
    for _ in range(2):  # groups that are made anew
        assert four.run(save_in_groups, tmp_path) == [(10, "0 1"), (10, "0 1"), (11, "2 3"), (11, "2 3")]
        tmp_path = tmp_path / "again"


def open_unequal_numbers(rank: int, count: int, root: Path) -> int:
    for _ in range(rank):
        engine_on(root, SECS).close()  # before the other has come
    dist.barrier()
    with engine_on(root, SECS) as engine:
        return engine.save(weights(1), step=1).result(SECS).step


def test_engines_that_were_closed_before_the_ranks_met_shift_nobody(two: Ranks, tmp_path: Path) -> None:
    assert two.run(open_unequal_numbers, tmp_path) == [1, 1]


# -- a rank that goes while they meet -------------------------------------------------------------------


class GoingCoordinator(StoreCoordinator):
    """It is cancelled as it puts a question to the store, which the thread answers all the same."""

    def __init__(self, store: dist.Store, *, rank: int, at: int) -> None:
        super().__init__(store, rank=rank, world_size=2)
        self.scope = anyio.CancelScope()
        self._left = at

    async def _ask(self, question: Callable[[], T]) -> T:
        self._left -= 1
        if not self._left:
            self.scope.cancel()
        return await super()._ask(question)


async def agree_once(coordinator: StoreCoordinator) -> None:
    async def nothing(_: Sequence[bytes]) -> bytes:
        return b""

    try:
        await coordinator.open("x", stall_secs=SHORT_SECS)
        await BYTES.run(coordinator, Topic("t"), b"", nothing)
    finally:
        with anyio.CancelScope(shield=True):
            await coordinator.leave()


@pytest.mark.sampled
@pytest.mark.parametrize("at", range(1, 9))
@pytest.mark.parametrize("going", [0, 1])
def test_a_rank_that_goes_at_any_moment_of_the_meeting_is_found_out_and_leaves_nothing(going: int, at: int) -> None:
    async def main() -> tuple[list[BaseException], float]:
        store, errors = dist.HashStore(), []
        one = GoingCoordinator(store, rank=going, at=at)
        other = StoreCoordinator(store, rank=1 - going, world_size=2)

        async def go() -> None:
            with one.scope:
                await agree_once(one)

        async def stay() -> None:
            try:
                await agree_once(other)
            except PeerFailedError as error:
                errors.append(error)

        began = time.monotonic()
        try:
            async with asyncio.timeout(4 * SHORT_SECS), anyio.create_task_group() as group:
                group.start_soon(go)
                group.start_soon(stay)
            assert store.num_keys() == 1, "the queue, empty"
        finally:
            one.close()
            other.close()
        return errors, time.monotonic() - began

    errors, secs = asyncio.run(main())
    assert all(isinstance(error, PeerFailedError) for error in errors)
    assert secs < 2 * SHORT_SECS
