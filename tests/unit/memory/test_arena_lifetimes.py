"""The lifetime manager: who may touch which bytes until when, within a byte budget."""

from __future__ import annotations

import errno
import gc
import random
import resource
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples
from watched_writes import TIMEOUT, Gate, WatchedCondition

from aio_ckpt.errors import BudgetExceededError, ConfigError, EngineClosedError, StallError
from aio_ckpt.format.constants import PAGE_BYTES
from aio_ckpt.memory import arena as arenas
from aio_ckpt.memory import arena_lifetimes, available
from aio_ckpt.memory.arena import HUGE_PAGE_BYTES, POISON, ArenaKind
from aio_ckpt.memory.arena_lifetimes import ArenaSpec, Lease, LifetimeManager
from aio_ckpt.memory.available import default_budget_bytes
from aio_ckpt.runtime.portal import Executor

KIB = 1 << 10
MIB = 1 << 20
BUDGET = 64 * MIB
GPU = torch.device("cuda", 0)
"""Never touched."""


@pytest.fixture(scope="module")
def executor() -> Iterator[Executor]:
    executor = Executor("test", 2)
    yield executor
    executor.close(TIMEOUT)


@pytest.fixture
def manager(executor: Executor) -> LifetimeManager:
    return LifetimeManager(budget_bytes=BUDGET, executor=executor, debug=False)


def take(manager: LifetimeManager, nbytes: int, kind: ArenaKind = "pageable", timeout_secs: float = TIMEOUT) -> Lease:
    return manager.acquire(spec(nbytes, kind), timeout_secs=timeout_secs)


def spec(nbytes: int, kind: ArenaKind = "pageable", *, source: torch.device | None = None) -> ArenaSpec:
    return ArenaSpec(nbytes=nbytes, kind=kind, source=source)


def watch_waits(manager: LifetimeManager) -> WatchedCondition:
    """Before anything waits: tells when a thread begins to."""
    manager._changed = WatchedCondition()
    return manager._changed


# -- a lease --------------------------------------------------------------------------------------


class Ends:
    """Counts how often the arena was given back."""

    def __init__(self, manager: LifetimeManager, monkeypatch: pytest.MonkeyPatch) -> None:
        self.leases: list[Lease] = []
        give_back = manager._give_back

        def counted(lease: Lease) -> None:
            self.leases.append(lease)
            give_back(lease)

        monkeypatch.setattr(manager, "_give_back", counted)


def test_a_lease_ends_when_it_was_closed_and_its_last_future_resolved(manager: LifetimeManager) -> None:
    lease = take(manager, MIB)
    first, second = Future[object](), Future[object]()
    lease.hold_until(first)
    lease.hold_until(second)
    lease.close()
    first.set_result(None)
    assert (lease.ended.done(), manager.stats.leases) == (False, 1)
    second.set_exception(OSError(errno.EIO, "a failed write has let go as well"))
    assert (lease.ended.done(), manager.stats.leases) == (True, 0)


def test_a_lease_that_was_not_closed_goes_on_when_no_thread_uses_it(manager: LifetimeManager) -> None:
    lease = take(manager, MIB)
    future = Future[object]()
    lease.hold_until(future)
    future.set_result(None)
    assert manager.stats.leases == 1
    lease.close()
    assert manager.stats.leases == 0


def test_a_queued_call_that_is_cancelled_lets_go(manager: LifetimeManager) -> None:
    lease = take(manager, MIB)
    future = Future[object]()
    lease.hold_until(future)
    lease.close()
    assert future.cancel()
    assert manager.stats.leases == 0


def test_an_ended_lease_refuses_to_be_held(manager: LifetimeManager) -> None:
    lease = take(manager, MIB)
    running = Future[object]()
    lease.hold_until(running)
    lease.close()
    lease.hold_until(last := Future())  # still held: its bytes are nobody else's
    running.set_result(None)
    assert manager.stats.leases == 1
    last.set_result(None)
    with pytest.raises(EngineClosedError, match="may belong to another save"):
        lease.hold_until(Future())


@examples(100)
@given(st.lists(st.sampled_from(["hold", "resolve", "close"]), max_size=30), st.randoms(use_true_random=False))
def test_whatever_the_order_a_lease_ends_exactly_once_and_never_while_held(
    executor: Executor, steps: list[str], rng: random.Random
) -> None:
    manager = LifetimeManager(budget_bytes=BUDGET, executor=executor, debug=False)
    with pytest.MonkeyPatch.context() as monkeypatch:
        ends = Ends(manager, monkeypatch)
        lease = take(manager, 1)
        held: list[Future[object]] = []
        is_closed = False
        for step in [*steps, "close", *["resolve"] * len(steps)]:
            if step == "hold" and not ends.leases:
                lease.hold_until(future := Future())
                held.append(future)
            elif step == "resolve" and held:
                held.pop(rng.randrange(len(held))).set_result(None)
            elif step == "close":
                lease.close()
                is_closed = True
            assert len(ends.leases) == (is_closed and not held)
        assert lease.ended.done()
    manager.close()


def test_threads_that_let_go_while_the_lease_is_closed_end_it_once(
    manager: LifetimeManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = Ends(manager, monkeypatch)
    with ThreadPoolExecutor(3) as threads:
        for _ in range(200):
            lease = take(manager, MIB)
            together = threading.Barrier(3)
            for act in (first := Future(), second := Future()):
                lease.hold_until(act)

            def race(act: Callable[[], object], together: threading.Barrier = together) -> None:
                together.wait(TIMEOUT)
                act()

            for act in (lease.close, lambda f=first: f.set_result(None), lambda f=second: f.set_result(None)):
                threads.submit(race, act)
            lease.ended.result(TIMEOUT)
    assert len(ends.leases) == 200
    assert manager.stats.leases == 0


# -- arenas ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["pageable", "shm"])
@pytest.mark.parametrize("nbytes", [1, 64 * KIB, 5 * MIB + 1, 17 * MIB])
def test_an_arena_is_page_aligned_zeroed_and_hardly_larger_than_asked_for(
    manager: LifetimeManager, kind: ArenaKind, nbytes: int
) -> None:
    arena = take(manager, nbytes, kind).arena
    assert arena.address % PAGE_BYTES == 0
    assert nbytes <= arena.capacity == len(arena.memory) == arena.tensor.numel()
    assert arena.capacity - nbytes < (HUGE_PAGE_BYTES if nbytes >= 16 * MIB else 64 * KIB)
    assert not arena.tensor.any()
    arena.tensor[-1] = 7
    assert memoryview(arena.memory)[-1] == 7


def mapping_at(address: int) -> dict[str, list[str]]:
    """What the kernel says of the mapping at an address, by name; the last of it is ``VmFlags:``."""
    told = dict[str, list[str]]()
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, *values = line.split()
        if "-" in head and not head.endswith(":"):
            begin, end = (int(part, 16) for part in head.split("-"))
            inside = begin <= address < end
        elif inside:
            told[head] = values
            if head == "VmFlags:":
                return told
    raise AssertionError("no mapping there")


def resident_bytes(address: int) -> int:
    """Of the mapping at an address: the process's own sum moves with every other test's garbage."""
    return int(mapping_at(address)["Rss:"][0]) * KIB


@pytest.mark.parametrize("kind", ["pageable", "shm"])
def test_an_arena_is_resident_when_it_is_lent_and_is_no_part_of_a_fork(
    manager: LifetimeManager, kind: ArenaKind
) -> None:
    arena = take(manager, 16 * MIB, kind).arena
    assert resident_bytes(arena.address) >= 15 * MIB, "but for pages that the kernel moves at this moment"
    assert "dc" in mapping_at(arena.address)["VmFlags:"]


def test_an_arena_is_lent_again_and_keeps_its_address(manager: LifetimeManager) -> None:
    first = take(manager, 8 * MIB)
    address = first.arena.address
    first.close()
    second = take(manager, 8 * MIB - 5)
    assert second.arena.address == address
    assert (manager.stats.arenas, manager.stats.leases) == (1, 1)


def test_two_leases_never_share_an_arena(manager: LifetimeManager) -> None:
    first, second = take(manager, MIB), take(manager, MIB)
    assert first.arena is not second.arena
    assert (manager.stats.arenas, manager.stats.leases) == (2, 2)
    first.close()
    assert take(manager, MIB).arena is not second.arena


@pytest.mark.parametrize(
    ("nbytes", "kind"),
    [(24 * MIB, "pageable"), (4 * MIB, "pageable"), (16 * MIB, "shm")],
    ids=["grown", "shrunk", "another kind"],
)
def test_an_idle_arena_that_the_last_leases_did_not_use_is_unmapped(
    manager: LifetimeManager, nbytes: int, kind: ArenaKind
) -> None:
    old = take(manager, 16 * MIB)
    memory = weakref.ref(old.arena.memory)
    old.close()
    for _ in range(arena_lifetimes._KEPT_LEASES):
        assert memory() is not None
        new = take(manager, nbytes, kind)
        new.close()
        gc.collect()
    assert memory() is None
    assert (manager.stats.arenas, manager.stats.arena_bytes) == (1, new.arena.capacity)


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the arenas that are mapped, in their order."""
    sizes: list[int] = []
    real = arena_lifetimes._make_arena

    def counted(spec: ArenaSpec, segments: Any) -> Any:
        sizes.append(spec.nbytes)
        return real(spec, segments)

    monkeypatch.setattr(arena_lifetimes, "_make_arena", counted)
    return sizes


def test_leases_of_two_sizes_that_take_turns_map_one_arena_each(manager: LifetimeManager, mapped: list[int]) -> None:
    for _ in range(4):
        take(manager, 16 * MIB).close()
        take(manager, 4 * MIB).close()
    assert mapped == [16 * MIB, 4 * MIB]
    assert manager.stats.arenas == 2


def test_shared_memory_that_does_not_fit_the_next_lease_is_unmapped_at_once(
    manager: LifetimeManager, mapped: list[int]
) -> None:
    for nbytes in (16 * MIB, 4 * MIB, 16 * MIB):
        take(manager, nbytes, "shm").close()
        assert manager.stats.arenas == 1
    assert mapped == [16 * MIB, 4 * MIB, 16 * MIB]


def test_the_budget_evicts_the_arena_that_was_used_least_recently(manager: LifetimeManager, mapped: list[int]) -> None:
    for nbytes in (30 * MIB, 20 * MIB, 30 * MIB, 4 * MIB, 24 * MIB):
        take(manager, nbytes).close()
    assert mapped == [30 * MIB, 20 * MIB, 4 * MIB, 24 * MIB]
    assert {arena_lifetimes.arena_capacity(nbytes) for nbytes in (30 * MIB, 4 * MIB, 24 * MIB)} == {
        arena.capacity for arena in manager._arenas
    }


def test_a_lease_that_waits_for_a_lent_arena_evicts_no_idle_one(manager: LifetimeManager, mapped: list[int]) -> None:
    waits = watch_waits(manager)
    take(manager, 4 * MIB).close()
    first = take(manager, 40 * MIB)
    with ThreadPoolExecutor(1) as trainer:
        second = trainer.submit(take, manager, 40 * MIB)
        assert waits.waiting.wait(TIMEOUT)
        first.close()
        second.result(TIMEOUT)
    take(manager, 4 * MIB)
    assert mapped == [4 * MIB, 40 * MIB]


def test_memory_that_the_system_refuses_is_asked_for_again_without_the_idle_arenas(
    manager: LifetimeManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = arena_lifetimes.map_arena
    take(manager, 16 * MIB).close()

    def only_one(*arguments: Any) -> Any:
        if manager.stats.arenas:
            raise OSError(errno.ENOMEM, "refused")
        return real(*arguments)

    monkeypatch.setattr(arena_lifetimes, "map_arena", only_one)
    assert take(manager, 24 * MIB).arena.capacity == 24 * MIB
    with pytest.raises(BudgetExceededError, match="refused"):
        take(manager, 4 * MIB)
    assert manager._reserved_bytes == 0


def test_a_lease_whose_return_fails_ends_and_its_arena_is_lent_to_nobody(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a save that waits for it would wait for ever."""
    manager = LifetimeManager(budget_bytes=BUDGET, executor=executor, debug=True)
    lease = take(manager, MIB)

    def fail() -> None:
        raise MemoryError("refused")

    monkeypatch.setattr(lease.arena, "poison", fail)
    with pytest.raises(MemoryError):
        lease.close()
    assert lease.ended.done()
    assert (manager.stats.arenas, manager.stats.leases) == (0, 0)
    take(manager, BUDGET)


def test_an_arena_a_little_too_large_is_kept_so_that_objects_of_changing_size_map_nothing(
    manager: LifetimeManager,
) -> None:
    first = take(manager, 16 * MIB)
    first.close()
    assert take(manager, 15 * MIB).arena is first.arena


def test_a_view_keeps_the_memory_of_an_arena_that_was_released(manager: LifetimeManager) -> None:
    """A thread that is left behind at close would else write from unmapped memory."""
    lease = take(manager, MIB)
    lease.arena.tensor.fill_(3)
    view = memoryview(lease.arena.memory)[5:10]
    lease.close()
    manager.close()
    assert bytes(view) == bytes([3] * 5)


@pytest.mark.parametrize("debug", [True, False])
def test_released_bytes_are_poisoned_in_debug_mode_only(executor: Executor, debug: bool) -> None:
    manager = LifetimeManager(budget_bytes=BUDGET, executor=executor, debug=debug)
    lease = take(manager, MIB)
    arena = lease.arena
    arena.tensor.fill_(1)
    layout = object()
    arena.keep_constants(layout)
    lease.hold_until(writing := Future())
    lease.close()
    assert bool((arena.tensor == 1).all())
    writing.set_result(None)
    assert bool((arena.tensor == (POISON if debug else 1)).all())
    assert arena.take_constants(layout) is not debug


# -- the budget -----------------------------------------------------------------------------------


def test_more_than_the_budget_is_refused_at_once_and_says_what_to_do(manager: LifetimeManager) -> None:
    with pytest.raises(BudgetExceededError, match=f"{BUDGET + 1} bytes exceeds budget_bytes={BUDGET}: raise it"):
        take(manager, BUDGET + 1)
    assert manager.stats.arenas == 0


def test_without_room_the_next_lease_waits_for_the_thread_that_holds_the_first(manager: LifetimeManager) -> None:
    waits = watch_waits(manager)
    first = take(manager, 40 * MIB)
    first.hold_until(writing := Future())
    with ThreadPoolExecutor(1) as trainer:
        second = trainer.submit(take, manager, 40 * MIB)
        assert waits.waiting.wait(TIMEOUT)
        first.close()
        assert not second.done()
        assert manager.stats.leases == 1
        writing.set_result(None)
        assert second.result(TIMEOUT).arena is first.arena
        assert second.result().waited_secs > 0
    assert first.waited_secs < TIMEOUT


def test_leases_that_fit_the_budget_together_do_not_wait(manager: LifetimeManager) -> None:
    waits = watch_waits(manager)
    leases = [take(manager, 32 * MIB), take(manager, 32 * MIB)]
    assert not waits.waiting.is_set()
    assert manager.stats.arena_bytes == BUDGET
    assert all(lease.waited_secs < TIMEOUT for lease in leases)


def test_idle_arenas_never_stand_in_the_way_of_a_lease(manager: LifetimeManager) -> None:
    waits = watch_waits(manager)
    for lease in [take(manager, 20 * MIB), take(manager, 20 * MIB), take(manager, 20 * MIB)]:
        lease.close()
    assert manager.stats.arena_bytes == 60 * MIB
    take(manager, 60 * MIB)
    assert not waits.waiting.is_set()
    assert manager.stats.arena_bytes == 60 * MIB


def test_concurrent_leases_stay_within_the_budget(executor: Executor) -> None:
    manager = LifetimeManager(budget_bytes=2 * MIB, executor=executor, debug=True)
    over: list[int] = []

    def use(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(50):
            lease = take(manager, rng.choice([64, 256, 512, 1024]) * KIB)
            over.extend(held for held in [manager.stats.arena_bytes] if held > 2 * MIB)
            lease.arena.tensor.fill_(seed)
            assert bool((lease.arena.tensor == seed).all())
            lease.close()

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(use, seed) for seed in range(1, 5)]:
            done.result(TIMEOUT)
    assert over == []
    assert manager.stats.leases == 0


class Clock:
    """Time that passes only in ``wait``; ``script`` holds what happens during each wait and how long it takes."""

    def __init__(self, manager: LifetimeManager, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.script: list[tuple[float, Callable[[], object]]] = []
        clock = self

        class Scripted(WatchedCondition):
            def wait(self, timeout: float | None = None) -> None:
                assert timeout is not None
                assert timeout > 0, "waits although the time is over"
                secs, happens = clock.script.pop(0) if clock.script else (timeout, lambda: None)
                clock.now += min(secs, timeout)
                self.release()  # as a real wait does
                happens()
                self.acquire()

        for module in (arena_lifetimes, arenas):
            monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=lambda: self.now))
        manager._changed = Scripted()


def test_a_lease_that_nobody_lets_go_of_is_an_error_after_the_stall_timeout(
    manager: LifetimeManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(manager, monkeypatch)
    take(manager, 40 * MIB)
    with pytest.raises(StallError, match=r"an earlier save keeps its arena and made no progress for 10\.0 s"):
        take(manager, 40 * MIB, timeout_secs=10.0)
    assert clock.now == 1010.0
    assert manager.stats.leases == 1


def test_a_slow_earlier_save_is_waited_for_as_long_as_its_threads_let_go_of_chunks(
    manager: LifetimeManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(manager, monkeypatch)
    first = take(manager, 40 * MIB)
    chunks = [Future[object]() for _ in range(5)]
    for chunk in chunks:
        first.hold_until(chunk)
    clock.script = [(9.0, lambda chunk=chunk: chunk.set_result(None)) for chunk in chunks] + [(9.0, first.close)]
    second = take(manager, 40 * MIB, timeout_secs=10.0)
    assert second.waited_secs == 54.0


def test_memory_that_the_system_refuses_is_an_error_and_leaves_the_budget_alone(executor: Executor) -> None:
    manager = LifetimeManager(budget_bytes=1 << 60, executor=executor, debug=False)
    with pytest.raises(BudgetExceededError, match="lower budget_bytes"):
        take(manager, 1 << 59)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        with pytest.raises(BudgetExceededError, match='use staging="pageable"'):
            take(manager, 2 * MIB, "shm")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (manager.stats.arenas, manager._reserved_bytes) == (0, 0)
    take(manager, MIB, "shm")


def test_an_arena_that_the_driver_does_not_register_is_given_back(
    manager: LifetimeManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(address: int, nbytes: int) -> None:
        raise ConfigError(f"{nbytes} bytes at {address}: refused")

    monkeypatch.setattr(arenas.device, "register_host_memory", refuse)
    with pytest.raises(ConfigError):
        manager.acquire(spec(MIB, "pinned", source=GPU), timeout_secs=TIMEOUT)
    assert (manager.stats.arenas, manager.stats.leases) == (1, 0)
    manager.acquire(spec(MIB, source=GPU), timeout_secs=TIMEOUT)
    manager.acquire(spec(MIB, "pinned"), timeout_secs=TIMEOUT)


def test_an_arena_that_ctrl_c_left_registered_is_registered_again(
    manager: LifetimeManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: set[int] = set()

    def register(address: int, nbytes: int) -> None:
        if address in registered:
            raise RuntimeError("CUDA error: part or all of the requested memory range is already mapped")
        registered.add(address)
        if not interrupts:
            interrupts.append(address)
            raise KeyboardInterrupt

    interrupts: list[int] = []
    monkeypatch.setattr(arenas.device, "register_host_memory", register)
    monkeypatch.setattr(arenas.device, "unregister_host_memory", registered.remove)
    with pytest.raises(KeyboardInterrupt):
        manager.acquire(spec(MIB, "pinned", source=GPU), timeout_secs=TIMEOUT)
    lease = manager.acquire(spec(MIB, "pinned", source=GPU), timeout_secs=TIMEOUT)
    assert [lease.arena.address] == list(registered) == interrupts
    lease.close()
    manager.close()
    assert registered == set()


def test_the_default_budget_is_shared_among_the_ranks_of_a_host() -> None:
    available = psutil.virtual_memory().available
    alone = default_budget_bytes(ranks_on_host=1)
    assert 0 < alone <= available * 0.55
    assert default_budget_bytes(ranks_on_host=4) == pytest.approx(alone / 4, rel=0.2)


def test_memory_that_the_ranks_of_a_host_hold_for_images_counts_as_available(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the budget would shrink with every layout that is planned."""
    machine = types.SimpleNamespace(available=400 * MIB)
    monkeypatch.setattr(available, "available_bytes", lambda: machine.available)
    first = default_budget_bytes(ranks_on_host=4)
    assert first == 50 * MIB
    machine.available -= 4 * first
    assert default_budget_bytes(ranks_on_host=4, held_bytes=first) == first
    machine.available = 0
    assert default_budget_bytes(ranks_on_host=4) > 0


# -- closing --------------------------------------------------------------------------------------


def test_a_closed_manager_lends_nothing_and_holds_nothing(manager: LifetimeManager) -> None:
    idle = take(manager, MIB)
    memory = weakref.ref(idle.arena.memory)
    idle.close()
    manager.close()
    gc.collect()
    assert memory() is None
    assert manager.stats.arenas == 0
    with pytest.raises(EngineClosedError):
        take(manager, MIB)
    manager.close()


def test_an_arena_that_a_thread_uses_at_close_is_released_when_the_thread_lets_go(manager: LifetimeManager) -> None:
    lease = take(manager, MIB)
    memory = weakref.ref(lease.arena.memory)
    lease.hold_until(writing := Future())
    lease.close()
    manager.close()
    assert memory() is not None
    writing.set_result(None)
    gc.collect()
    assert memory() is None
    assert manager.stats.arenas == 0


def test_whoever_waits_for_room_is_told_of_the_end(manager: LifetimeManager) -> None:
    waits = watch_waits(manager)
    take(manager, BUDGET)
    with ThreadPoolExecutor(1) as trainer:
        second = trainer.submit(take, manager, MIB, timeout_secs=10 * TIMEOUT)
        assert waits.waiting.wait(TIMEOUT)
        manager.close()
        with pytest.raises(EngineClosedError):
            second.result(TIMEOUT)


# -- mapping ahead --------------------------------------------------------------------------------


@pytest.fixture
def held(manager: LifetimeManager, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Keeps every thread that maps an arena."""
    gate, real = Gate(), arena_lifetimes._make_arena

    def make(*arguments: Any) -> object:
        gate.hold()
        return real(*arguments)

    monkeypatch.setattr(arena_lifetimes, "_make_arena", make)
    yield gate
    gate.open()
    manager.close()


def test_an_arena_mapped_ahead_is_the_one_that_is_lent(manager: LifetimeManager) -> None:
    ahead = manager.map_ahead(spec(8 * MIB), arenas=1)
    assert ahead is not None
    ahead.result(TIMEOUT)
    assert (manager.stats.arenas, manager.stats.leases) == (1, 0)
    take(manager, 8 * MIB)
    assert (manager.stats.arenas, manager.stats.leases) == (1, 1)
    assert manager.map_ahead(spec(8 * MIB), arenas=1) is None
    more = manager.map_ahead(spec(8 * MIB), arenas=2)
    assert more is not None
    more.result(TIMEOUT)
    assert manager.stats.arenas == 2


def test_what_is_still_being_mapped_counts_in_the_budget(manager: LifetimeManager, held: Gate) -> None:
    waits = watch_waits(manager)
    ahead = manager.map_ahead(spec(40 * MIB, "shm"), arenas=1)
    assert ahead is not None
    held.wait_held()
    assert manager.map_ahead(spec(40 * MIB), arenas=1) is None
    with ThreadPoolExecutor(1) as trainer:
        other = trainer.submit(take, manager, 40 * MIB)  # another kind: what comes is of no use to it
        assert waits.waiting.wait(TIMEOUT)
        assert not other.done()
        held.open()
        assert other.result(TIMEOUT).arena.kind == "pageable"
    assert manager.stats.arena_bytes <= BUDGET


def test_who_waits_for_an_arena_that_does_not_come_maps_one(
    manager: LifetimeManager, held: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = watch_waits(manager)
    made, real = [], arena_lifetimes.map_arena

    def arena(*arguments: Any) -> Any:
        made.append(arguments)
        if len(made) == 1:
            raise OSError(errno.ENOMEM, "refused")
        return real(*arguments)

    monkeypatch.setattr(arena_lifetimes, "map_arena", arena)
    ahead = manager.map_ahead(spec(40 * MIB), arenas=1)
    assert ahead is not None
    held.wait_held()
    with ThreadPoolExecutor(1) as trainer:
        waiting = trainer.submit(take, manager, 40 * MIB)
        assert waits.waiting.wait(TIMEOUT)
        held.open()
        assert waiting.result(TIMEOUT).arena.capacity == 40 * MIB
    with pytest.raises(BudgetExceededError, match="refused"):
        ahead.result(TIMEOUT)
    assert len(made) == 2


def test_an_arena_that_the_driver_does_not_register_ahead_is_not_kept(
    manager: LifetimeManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(address: int, nbytes: int) -> None:
        raise RuntimeError(f"{nbytes} bytes at {address}: refused")

    monkeypatch.setattr(arenas.device, "register_host_memory", refuse)
    ahead = manager.map_ahead(spec(MIB, "pinned", source=GPU), arenas=1)
    assert ahead is not None
    with pytest.raises(RuntimeError, match="refused"):
        ahead.result(TIMEOUT)
    assert (manager.stats.arenas, manager._being_mapped) == (0, [])


def test_ctrl_c_in_a_save_loses_no_arena_that_is_being_mapped(manager: LifetimeManager, held: Gate) -> None:
    ahead = manager.map_ahead(spec(MIB), arenas=1)
    assert ahead is not None
    held.wait_held()
    manager.close_lost([])
    held.open()
    ahead.result(TIMEOUT)
    assert (manager.stats.arenas, manager.stats.leases) == (1, 0)


@pytest.mark.parametrize("threads", ["many", "none to be had"])
def test_every_page_is_touched(threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    if threads != "many":

        def refuse(*_: object) -> Executor:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(arenas, "Executor", refuse)
    monkeypatch.setattr(arenas, "_POPULATE_STEP_BYTES", MIB)
    monkeypatch.setattr(arenas.os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    real = arenas._LIBC

    class Libc:
        @staticmethod
        def madvise(*arguments: Any) -> int:
            steps.append(threading.current_thread().name)
            return int(real.madvise(*arguments))

    monkeypatch.setattr(arenas, "_LIBC", Libc)
    arena = arenas.map_arena(40 * MIB, "pageable", None)
    assert len(steps) == 40
    assert all("touch" in step for step in steps) is (threads == "many")
    assert resident_bytes(arena.address) >= 40 * MIB
    assert not [thread for thread in threading.enumerate() if "touch" in thread.name]
    arena.release()


def test_an_arena_that_comes_after_the_end_is_no_longer_registered(
    manager: LifetimeManager, held: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: set[int] = set()
    monkeypatch.setattr(arenas.device, "register_host_memory", lambda address, nbytes: registered.add(address))
    monkeypatch.setattr(arenas.device, "unregister_host_memory", registered.remove)
    ahead = manager.map_ahead(spec(MIB, "pinned", source=GPU), arenas=1)
    assert ahead is not None
    held.wait_held()
    manager.close()
    held.open()
    ahead.result(TIMEOUT)
    assert (registered, manager.stats.arenas) == (set(), 0)
