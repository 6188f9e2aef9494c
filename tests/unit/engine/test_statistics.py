"""Counters of an engine: what a save adds, and that its stages add up to its whole time."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from builders import report_of

from aio_ckpt.engine.statistics import Counters, Statistics, stage_secs
from aio_ckpt.errors import SaveCancelledError, WriteError
from aio_ckpt.reports import StageTimings

TIMINGS = StageTimings(
    blocked_secs=3.5,
    waited_secs=1.0,
    plan_secs=0.5,
    staged_secs=4.0,
    written_secs=6.0,
    synced_secs=7.0,
    agreed_secs=9.0,
    dir_synced_secs=9.5,
    committed_secs=10.0,
)
REPORT = report_of(200, TIMINGS)


def test_the_stages_of_a_save_follow_each_other_and_add_up_to_its_whole_time() -> None:
    assert stage_secs(TIMINGS) == {
        "wait": 1.0,
        "plan": 0.5,
        "capture": 2.5,
        "write": 3.0,
        "agree": 2.0,
        "commit": 1.0,
    }


@pytest.mark.parametrize(
    "timings",
    [
        StageTimings(),
        TIMINGS,
        replace(TIMINGS, agreed_secs=0.0, dir_synced_secs=0.0),  # a rank that does not lead
        replace(TIMINGS, staged_secs=7.5),  # the copies are known to be done only after the last write
    ],
)
def test_no_stage_is_negative_and_none_is_counted_twice(timings: StageTimings) -> None:
    secs = stage_secs(timings)
    assert min(secs.values()) >= 0.0
    assert math.isclose(sum(secs.values()), timings.committed_secs)


def test_all_after_the_sync_is_agreement_on_a_rank_that_does_not_lead() -> None:
    secs = stage_secs(replace(TIMINGS, agreed_secs=0.0, dir_synced_secs=0.0))
    assert (secs["agree"], secs["commit"]) == (3.0, 0.0)


def test_commits_failures_and_skips_are_counted_and_a_cancelled_save_is_not() -> None:
    statistics = Statistics()
    statistics.count(REPORT, 200)
    statistics.count(replace(REPORT, step=300), 300)
    statistics.count(WriteError(5, "the disk is gone", "/x"), 400)
    statistics.count(SaveCancelledError("cancelled"), 500)
    statistics.skip()
    counters = statistics.counters
    assert (counters.committed, counters.failed, counters.skipped) == (2, 1, 1)
    assert (counters.committed_bytes, counters.blocked_secs) == (8192, 7.0)
    assert counters.stage_secs["write"] == 6.0
    assert counters.last_commit is not None
    assert counters.last_commit[0] == 300


def test_only_the_step_of_the_last_commit_has_an_age() -> None:
    statistics = Statistics()
    assert statistics.counters.age_secs(None) is None
    statistics.count(REPORT, 200)
    age_secs = statistics.counters.age_secs(200)
    assert age_secs is not None
    assert 0.0 <= age_secs < 60.0
    assert statistics.counters.age_secs(100) is None, "a rollback went back behind it"
    statistics.count(replace(REPORT, step=0), None)
    assert statistics.counters.age_secs(200) is not None, "a save by path has no step"


def test_an_engine_without_saves_shows_every_stage() -> None:
    assert set(Counters().stage_secs) == {"wait", "plan", "capture", "write", "agree", "commit"}
