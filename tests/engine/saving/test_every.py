"""``Every``: when a save is due, by steps, by the clock, and before the process is to end."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from gated_storage import TIMEOUT
from hypothesis import given
from hypothesis import strategies as st

from aio_ckpt import CheckpointEngine, Every, SyncCheckpointEngine
from aio_ckpt.commit.owner import Owner
from aio_ckpt.errors import ConfigError, StepOrderError
from aio_ckpt.every import passes_multiple
from aio_ckpt.ranks.coordinator import SoloCoordinator
from aio_ckpt.ranks.membership import Membership
from aio_ckpt.ranks.polls import AgreedTimer
from aio_ckpt.runtime.portal import Portal

LONG = 1e6
"""Minutes that no test lasts."""


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30, unique=True).map(sorted), st.integers(1, 20))
def test_between_two_saves_that_are_due_lies_one_multiple_whatever_steps_are_asked_for(
    steps: list[int], every: int
) -> None:
    last: int | None = None
    for step in steps:
        since = range(step if last is None else last + 1, step + 1)
        assert passes_multiple(last, step, every) == any(each % every == 0 for each in since)
        last = step


@pytest.mark.parametrize(("last", "step", "is_due"), [(None, 0, False), (0, 10, True), (30, 10, True), (10, 10, True)])
def test_step_0_is_never_due_and_steps_that_begin_anew_count_anew(last: int, step: int, is_due: bool) -> None:
    assert passes_multiple(last, step, 10) == is_due


def test_a_save_is_due_at_every_multiple_and_after_a_resume_between_two(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        every = Every(engine, steps=100)
        assert [step for step in range(1, 301) if every.due(step)] == [100, 200, 300]
        resumed = Every(engine, steps=100, minutes=LONG)
        assert [step for step in range(123, 301) if resumed.due(step)] == [200, 300]
        strided = Every(engine, steps=100)
        assert [step for step in range(7, 400, 7) if strided.due(step)] == [105, 203, 301]


def test_the_clock_starts_at_the_first_question_and_anew_at_every_save() -> None:
    now = 1000.0
    owner = Owner.of_this_process("x")
    members = Membership(SoloCoordinator(), owner, stall_secs=TIMEOUT)
    timer = AgreedTimer(members, Portal("unused", 1), 60.0, name="x", now=lambda: now)
    now += 100.0
    assert not timer.poll()
    now += 59.0
    assert not timer.poll()
    now += 1.0
    assert timer.poll()
    timer.restart()
    assert not timer.poll()
    now += 59.0
    timer.restart()  # a save was due by its step
    now += 59.0
    assert not timer.poll()


async def test_minutes_make_a_save_due_inside_a_running_loop(tmp_path: Path) -> None:
    async with CheckpointEngine(tmp_path) as engine:
        at_once, never = Every(engine, minutes=1e-9), Every(engine, minutes=LONG)
        assert sum(at_once.due(step) for step in range(10)) >= 9
        assert not any(never.due(step) for step in range(10))


def test_a_signal_makes_one_save_due_and_tells_the_loop_to_end(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.on_preemption()
        every, deaf = Every(engine, steps=1000), Every(engine, steps=1000, on_preemption=False)
        assert not every.due(1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert not every.preempted, "a signal behind due() does not end the loop without a save"
        assert every.due(2)
        assert every.preempted
        assert not every.due(3)
        assert every.preempted
        assert not deaf.due(3)
        assert not deaf.preempted


@pytest.mark.parametrize(
    "settings",
    [
        {},
        *({"steps": value} for value in (0, -1, 1.5, True, "9")),
        *({"minutes": value} for value in (0, -1, float("nan"), float("inf"), True, "9", torch.ones(1))),
        {"steps": 1, "on_preemption": 1},
        {"steps": 1, "engine": "runs/ckpt"},
    ],
)
def test_what_is_no_schedule_is_refused_by_name(tmp_path: Path, settings: dict[str, Any]) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        name = next(reversed(settings), "steps")
        with pytest.raises(ConfigError, match=rf"^{name}=.*give"):
            Every(**{"engine": engine, **settings})
        with pytest.raises(StepOrderError):
            Every(engine, steps=1).due(-1)
