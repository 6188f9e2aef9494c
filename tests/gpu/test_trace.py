"""A trace with copies from a device. Needs a GPU: skipped elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cuda_machine import MIB, TIMEOUT, ones
from trace_files import check_apart, check_nested, covered_secs, events_of

from aio_ckpt import SyncCheckpointEngine
from aio_ckpt.runtime.trace import CALLER, COPIES, STAGES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("is_guarded", [False, True], ids=["fenced", "guarded"])
def test_a_trace_shows_the_copies_from_the_device(tmp_path: Path, is_guarded: bool) -> None:
    state = ones(16, 32 * MIB, 1.0)
    optimizer = torch.optim.SGD([torch.nn.Parameter(tensor) for tensor in state.values()], lr=0.1)
    trace = tmp_path / "trace.json"
    with SyncCheckpointEngine(tmp_path / "root") as engine:
        if is_guarded:
            engine.guard(optimizer)
        engine.save(state).result(TIMEOUT)
        report = engine.save(state, trace=trace).result(TIMEOUT)
    assert report is not None
    lanes = events_of(trace)
    for lane, events in lanes.items():
        check_nested(events)
        if lane != CALLER:
            check_apart(events)
    issued = [event["name"].removeprefix("issue ") for event in lanes[CALLER] if event["name"].startswith("issue")]
    assert [event["name"] for event in lanes[COPIES]] == [f"copy {name}" for name in issued]
    assert sum(event["dur"] for event in lanes[COPIES]) > 0
    parts = [event for event in lanes[CALLER] if event["name"] != "save()"]
    assert covered_secs(lanes[STAGES] + parts) >= 0.95 * report.timings.committed_secs
