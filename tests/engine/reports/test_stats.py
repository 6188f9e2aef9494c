"""``stats()``: what an engine has done, and what it holds now."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from builders import TIMEOUT, broken, save, weights
from gated_storage import gated_engine

from aio_ckpt import EngineConfig, SyncCheckpointEngine


def test_each_outcome_of_a_save_is_counted_with_its_bytes_and_its_seconds(root: Path) -> None:
    with gated_engine(root, when_busy="skip", max_in_flight=1) as (engine, storage):
        before = engine.stats()
        assert (before.committed, before.failed, before.skipped, before.pending, before.memory_bytes) == (0,) * 5
        assert (before.newest_step, before.newest_age_secs) == (None, None)
        report = engine.save(weights(1)).result(TIMEOUT)
        storage.fail("sync", "*.distcp", broken())
        assert engine.save(weights(2)).exception(TIMEOUT) is not None
        gate = storage.hold("rename")
        ticket = engine.save(weights(2))
        gate.wait_reached()
        assert engine.save(weights(3)).skipped
        stats = engine.stats()
        assert (stats.committed, stats.failed, stats.skipped, stats.pending) == (1, 1, 1, 1)
        assert (stats.plan_hits, stats.plan_misses) == (engine.plan_hits, engine.plan_misses) == (1, 2)
        assert stats.memory_bytes == engine.lifetime.arena_bytes > 0
        assert stats.committed_bytes == report.image_bytes
        assert stats.blocked_secs == report.timings.blocked_secs
        assert math.isclose(sum(stats.stage_secs.values()), report.timings.committed_secs)
        assert (stats.rank, stats.newest_step) == (0, 1)
        gate.open()
        ticket.result(TIMEOUT)
        after = engine.stats()
        assert (after.committed, after.pending, after.newest_step) == (2, 0, 2)
        assert after.committed_bytes == 2 * report.image_bytes
        age_secs = after.newest_age_secs
        assert age_secs is not None
        assert 0 <= age_secs < TIMEOUT
    assert engine.stats().committed == 2, "a closed engine shows its last numbers"


def test_a_cancelled_save_is_no_failure(root: Path) -> None:
    with gated_engine(root) as (engine, storage):
        gate = storage.hold("write", "*.distcp")
        ticket = engine.save(weights(1))
        gate.wait_reached()
        assert ticket.cancel()
        gate.open()
        ticket.exception(TIMEOUT)
        assert (engine.stats().failed, engine.stats().committed) == (0, 0)


def test_the_newest_step_is_that_of_the_root_from_the_first_save_on_and_a_rollback_takes_it_back(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        save(engine, 1, 2)
    with SyncCheckpointEngine(root) as engine:
        assert engine.stats().newest_step is None
        save(engine, 3, 4)
        assert engine.stats().newest_step == 4
        assert engine.stats().newest_age_secs is not None
        engine.rollback(2)
        assert engine.stats().newest_step == 2
        assert engine.stats().newest_age_secs is None, "another engine has committed it"
        save(engine, 3)
        assert engine.stats().newest_step == 3
        engine.delete(3, allow_newest=True)
        assert engine.stats().newest_step == 2


def test_a_first_save_shows_the_newest_step_of_the_root_while_it_is_pending(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        save(engine, 7)
    with gated_engine(root) as (engine, storage):
        gate = storage.hold("rename")
        engine.save(weights(8))
        gate.wait_reached()
        assert engine.stats().newest_step == 7
        assert engine.stats().newest_age_secs is None


def test_stats_wait_for_no_lock_of_the_engine(root: Path) -> None:
    """A signal handler may interrupt the thread that holds one."""
    with SyncCheckpointEngine(root) as engine:
        save(engine, 1)
        locks = [
            engine._call_lock.mutex,
            engine._queue._changed,
            engine._queue.steps._lock,
            engine._resources.lifetime._changed,
            engine._recorder.statistics._lock,
        ]
        for lock in locks:
            with lock, ThreadPoolExecutor(1) as other:
                assert other.submit(engine.stats).result(TIMEOUT).committed == 1


def test_the_numbers_are_flat_and_leave_out_what_is_unknown(root: Path) -> None:
    with SyncCheckpointEngine(root, EngineConfig(keep_last=2)) as engine:
        assert "newest_step" not in engine.stats().numbers()
        save(engine, 1)
        stats = engine.stats()
        numbers = stats.numbers()
        assert (numbers["committed"], numbers["newest_step"]) == (1, 1)
        assert numbers["write_secs"] == stats.stage_secs["write"]
        assert {type(value) for value in numbers.values()} == {int, float}


def test_the_stages_of_a_report_end_in_order(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        times = engine.save(weights(1)).result(TIMEOUT).timings
    ends = [times.written_secs, times.synced_secs, times.agreed_secs, times.dir_synced_secs, times.committed_secs]
    assert ends[0] > 0
    assert ends == sorted(ends)
