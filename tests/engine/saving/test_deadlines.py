"""``deadline_secs``: whatever a save waits for is given up in time, nothing is left and the next one works."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from builders import listing, value, weights
from gated_storage import TIMEOUT, gated_engine
from saved_files import RANK_MANIFEST, data_file

from aio_ckpt.errors import StallError

MIB = 1 << 20
STAGES = {
    "making its directory": ("make_dir", "pending/*"),
    "writing its data": ("write", "*.distcp"),
    "making its data durable": ("sync", "*.distcp"),
    "writing its .metadata": ("write_file", ".metadata"),
    "writing the rank's manifest": ("write_file", RANK_MANIFEST),
    "making its directory durable": ("sync_dir", "pending/*"),
}


@pytest.mark.sampled
@pytest.mark.parametrize("activity", STAGES)
def test_a_save_that_misses_its_deadline_says_where_leaves_nothing_and_the_next_one_works(
    root: Path, activity: str
) -> None:
    with gated_engine(root) as (engine, storage):
        engine.save(weights(1)).result(TIMEOUT)
        gate = storage.hold(*STAGES[activity])
        ticket = engine.save(weights(2), deadline_secs=0.5)  # time enough to come to the gate
        with pytest.raises(
            StallError, match=rf"step 2 did not end within deadline_secs=0.5: it was {activity}"
        ) as caught:
            ticket.result(TIMEOUT)
        assert isinstance(caught.value, TimeoutError)
        assert listing(root) == ["step_000000001"]
        assert engine.lifetime.leases == 0
        gate.open()
        assert engine.save(weights(3)).result(TIMEOUT).step == 2
        assert value(engine) == 3


def test_a_deadline_counts_from_the_call_while_an_earlier_save_is_waited_for(root: Path) -> None:
    with ThreadPoolExecutor(1) as pool, gated_engine(root) as (engine, storage):
        gate = storage.hold("sync", "*.distcp")
        first = engine.save(weights(1))
        gate.wait_reached()
        waiting = pool.submit(engine.save, weights(2), deadline_secs=0.1)
        with pytest.raises(StallError, match=r"the next step .*=0.1: it was waiting for the save of step 1 to end"):
            waiting.result(TIMEOUT)
        gate.open()
        assert first.result(TIMEOUT).step == 1
        assert engine.save(weights(3), deadline_secs=TIMEOUT).result(TIMEOUT).step == 2
    assert listing(root) == ["step_000000001", "step_000000002"]


def test_a_deadline_ends_the_wait_for_the_commit_of_an_earlier_save(root: Path) -> None:
    with gated_engine(root, max_in_flight=2) as (engine, storage):
        gate = storage.hold("sync_dir", "root")
        first = engine.save(weights(1))
        gate.wait_reached()
        second = engine.save(weights(2), deadline_secs=0.5)
        with pytest.raises(StallError, match=r"step 2 .* it was waiting for the commit of the save before"):
            second.result(TIMEOUT)
        gate.open()
        assert first.result(TIMEOUT).step == 1
    assert listing(root) == ["step_000000001"]


def test_a_deadline_ends_the_wait_for_a_buffer_that_an_earlier_save_keeps(root: Path) -> None:
    with gated_engine(root, max_in_flight=2, budget_bytes=64 << 10) as (engine, storage):
        gate = storage.hold("write", "*.distcp")
        first = engine.save(weights(1))
        gate.wait_reached()
        with pytest.raises(StallError, match="an earlier save kept its arena"):
            engine.save(weights(2), deadline_secs=0.1)
        gate.open()
        assert first.result(TIMEOUT).step == 1
        assert engine.save(weights(3)).result(TIMEOUT).step == 2


@pytest.mark.parametrize(
    ("call", "activity"), [("remove_tree", "clearing leftovers"), ("rename", "setting damaged checkpoints aside")]
)
def test_a_deadline_ends_the_wait_for_what_the_first_save_tidies(root: Path, call: str, activity: str) -> None:
    with gated_engine(root) as (engine, _):
        for number in (1, 2):
            engine.save(weights(number)).result(TIMEOUT)
    file = data_file(root / "step_000000002")
    file.write_bytes(file.read_bytes().replace(weights(2)["w"].numpy().tobytes(), weights(9)["w"].numpy().tobytes()))
    (root / ".aio_ckpt/trash/old").mkdir()
    with gated_engine(root, stall_timeout_secs=TIMEOUT) as (engine, storage):
        loading = engine.load(weights(0), None, strict=False, allow_missing=False, fallback=True)
        assert loading.result(TIMEOUT).step == 1
        gate = storage.hold(call)
        with pytest.raises(StallError, match=rf"did not end within deadline_secs=0.2: it was {activity}"):
            engine.save(weights(3), deadline_secs=0.2)
        gate.open()
        assert engine.save(weights(3)).result(TIMEOUT).step == 2
        assert value(engine) == 3


def test_a_deadline_that_passes_while_save_captures_is_raised_by_save(root: Path) -> None:
    """The budget holds five chunks of six: the capture of the last waits until the first was written."""
    state = {str(number): torch.ones(MIB) for number in range(5)}
    with gated_engine(root, budget_bytes=20 * MIB) as (engine, storage):
        gate = storage.hold("write", "*.distcp")
        with pytest.raises(StallError, match=r"step 1 did not end within deadline_secs=0.5: it was writing its data"):
            engine.save(state, deadline_secs=0.5)
        assert listing(root) == []
        assert engine.lifetime.leases == 0
        gate.open()
        assert engine.save(state, deadline_secs=TIMEOUT).result(TIMEOUT).step == 1


def test_a_save_that_waits_for_a_slow_one_before_it_is_not_stalled(root: Path) -> None:
    """Five writes of a third of the stall timeout each: no longer than that without progress, but in all."""
    state = {str(number): torch.ones(MIB) for number in range(5)}
    with gated_engine(root, max_in_flight=2, workers=1, stall_timeout_secs=1.5) as (engine, storage):
        storage.slow("write", secs=0.5)
        first, second = engine.save(state), engine.save(weights(2))
        assert first.result(TIMEOUT).step == 1
        assert second.result(TIMEOUT).step == 2


def test_a_deadline_ends_the_wait_for_a_rename_beside_it_and_nothing_is_in_doubt(root: Path) -> None:
    with gated_engine(root) as (engine, _):
        engine.save(weights(1)).result(TIMEOUT)
        renames = engine._quarantine.renames
        engine._portal.call(renames.acquire, timeout=TIMEOUT)
        ticket = engine.save(weights(2), deadline_secs=0.5)
        with pytest.raises(StallError, match="it was waiting while other checkpoints are renamed") as caught:
            ticket.result(TIMEOUT)
        assert not caught.value.in_doubt
        assert listing(root) == ["step_000000001"]
