"""A bounded part of ``python -m tests.campaigns.soak``: what a process holds does not grow with the saves."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.campaigns.soak.saves import Limits, Outcome, soak, verdict

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saves", "every", "first"), [(100, 10, 30), pytest.param(200, 10, 40, marks=pytest.mark.campaign)]
)
def test_some_hundred_saves_that_change_and_fail_leave_files_threads_and_disk_flat(
    tmp_path: Path, saves: int, every: int, first: int
) -> None:
    """Coarse bounds: a retention pass in the background may hold a descriptor, and memory settles over the first
    thousands of saves only, which the command measures."""
    outcome = soak(tmp_path / "root", saves, every=every, first=first)
    met = (outcome.committed > 0.6 * saves, outcome.failed > 0.1 * saves, outcome.plan_misses > 0.125 * saves)
    assert met == (True, True, True)
    limits = dataclasses.replace(Limits(), rss_bytes=32 << 10, files=0.05, threads=0.01)
    assert verdict(outcome, limits) == []
    assert outcome.left == []


def test_what_grows_is_named() -> None:
    outcome = soak_outcome(rss_bytes=2000.0, files=0.0, threads=0.1, disk_bytes=0.0)
    assert [fault.split(":")[0] for fault in verdict(outcome, Limits())] == ["rss_bytes", "threads"]


def test_what_is_left_is_named() -> None:
    outcome = dataclasses.replace(soak_outcome(**dataclasses.asdict(Limits())), left=["step_000000001"])
    assert verdict(outcome, Limits()) == ["step_000000001 is left"]


def soak_outcome(**slopes: float) -> Outcome:
    return Outcome(
        saves=10_000, committed=1, failed=0, plan_misses=0, wall_secs=0.0, first=0, slopes=slopes, samples=[], left=[]
    )
