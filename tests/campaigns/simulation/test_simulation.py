"""The pipeline on a virtual clock: seeds of ``python -m tests.campaigns.simulation``, and what they can see."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from aio_ckpt.commit import publish
from aio_ckpt.commit.root_claim import Claim
from aio_ckpt.engine.job_queue import JobQueue
from aio_ckpt.format.checkpoint_files import root_manifest_name
from aio_ckpt.memory.arena_lifetimes import Lease
from tests.campaigns.simulation import __main__ as simulation
from tests.campaigns.simulation import hosts
from tests.campaigns.simulation.hosts import simulate_a_reader, simulate_a_takeover
from tests.campaigns.simulation.runs import BrokenPromiseError, simulate
from tests.campaigns.simulation.world import DeadlockError, HostStorage, SimStorage, virtual_loop

pytestmark = pytest.mark.usefixtures("quiet")

SEEDS = 60
SHORT = range(12)
"""Seeds that the gate tries."""


def failure_of(seeds: range, run: Callable[[int], object] = simulate) -> BaseException | None:
    """The first broken promise."""
    for seed in seeds:
        try:
            run(seed)
        except BaseExceptionGroup as error:
            return simulation.deepest(error)
        except (BrokenPromiseError, DeadlockError) as error:
            return error
    return None


@pytest.mark.parametrize(
    "seeds",
    [pytest.param(SHORT, id="few"), pytest.param(range(SHORT.stop, SEEDS), id="more", marks=pytest.mark.campaign)],
)
def test_whatever_the_order_the_faults_and_the_power_losses_nothing_that_was_promised_breaks(seeds: range) -> None:
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        outcomes.update(simulate(seed).outcomes)
    assert outcomes.keys() >= {"committed", "WriteError", "SaveCancelledError", "StallError"}, "it shows too little"


def test_a_seed_replays_what_it_did() -> None:
    for seed in range(4):
        first, again = simulate(seed), simulate(seed)
        assert first == again


def test_a_loop_where_nobody_will_do_anything_any_more_is_found() -> None:
    with virtual_loop() as loop, pytest.raises(DeadlockError):
        loop.run_until_complete(loop.create_future())


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds",
    [pytest.param(range(13), id="few"), pytest.param(range(13, SEEDS), id="more", marks=pytest.mark.campaign)],
)
def test_a_reader_on_another_host_gets_whole_steps_however_old_its_answers_are(seeds: range) -> None:
    runs = [simulate_a_reader(seed) for seed in seeds]
    assert sum(loads for loads, _ in runs), "it shows too little"
    assert sum(old_answers for _, old_answers in runs), "it shows too little"


@pytest.mark.parametrize(
    "seeds",
    [pytest.param(range(12), id="few"), pytest.param(range(12, SEEDS), id="more", marks=pytest.mark.campaign)],
)
def test_a_writer_that_was_taken_over_changes_nothing_any_more_and_says_why(seeds: range) -> None:
    assert {simulate_a_takeover(seed) for seed in seeds} == {"committed", "RootError"}


# -- the simulation fails for an engine that is wrong -----------------------------------------------


def test_the_simulation_finds_a_lease_that_ends_with_the_task_and_not_with_the_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Lease, "hold_until", lambda self, future: None)
    assert failure_of(range(SEEDS)) is not None


@pytest.mark.parametrize("call", ["sync_dir", "sync"])
def test_the_simulation_finds_an_fsync_that_is_missing(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    run = SimStorage.run

    async def drop(self: SimStorage, name: str, path: Any, kind: Any, act: Any) -> Any:
        return await run(self, name, path, kind, (lambda: None) if name == call else act)

    monkeypatch.setattr(SimStorage, "run", drop)
    assert failure_of(range(SEEDS)) is not None


def test_the_simulation_finds_a_directory_that_is_visible_before_it_is_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    async def write_only(storage: Any, pending: Any, save_id: str, root_manifest: bytes) -> None:
        await storage.write_file(pending / root_manifest_name(save_id), root_manifest)

    monkeypatch.setattr(publish, "sync_pending", write_only)
    assert failure_of(range(SEEDS)) is not None


def test_the_simulation_finds_a_save_that_is_committed_before_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assign_ticket = JobQueue.assign_ticket

    def waits_for_nobody(*args: Any, **kwargs: Any) -> Any:
        save = assign_ticket(*args, **kwargs)
        save.earlier = ()
        return save

    monkeypatch.setattr(JobQueue, "assign_ticket", waits_for_nobody)
    assert "before one that came earlier" in str(failure_of(range(SEEDS)))


def test_the_simulation_finds_a_search_that_believes_old_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostStorage, "fresh_status", HostStorage.status)
    assert failure_of(range(SEEDS), simulate_a_reader) is not None


def test_the_simulation_finds_a_writer_that_was_taken_over_and_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    async def clear_nothing(*args: Any, **kwargs: Any) -> None:
        pass

    monkeypatch.setattr(hosts, "clear_leftovers", clear_nothing)
    monkeypatch.setattr(Claim, "check", clear_nothing)
    assert "changed the root of the second one" in str(failure_of(range(SEEDS), simulate_a_takeover))


def test_the_command_replays_one_seed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["simulate", "--seed", "3"])
    simulation.main()
    assert "seed 3: " in "".join(capsys.readouterr())
