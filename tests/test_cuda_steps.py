"""Step times by CUDA events, and a trace with copies from a device. Needs a GPU: skipped elsewhere."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from cuda_machine import MIB, TIMEOUT, ones
from trace_files import check_apart, check_nested, covered_secs, events_of

from aio_ckpt import EngineConfig, SyncCheckpointEngine
from aio_ckpt.memory.cuda import StepClock
from aio_ckpt.runtime.trace import CALLER, COPIES, STAGES

pytestmark = pytest.mark.gpu


def work(times: int, matrix: torch.Tensor) -> None:
    for _ in range(times):
        torch.mm(matrix, matrix)


def test_steps_are_timed_on_the_device_while_the_host_runs_ahead() -> None:
    matrix = torch.ones(4096, 4096, device="cuda")
    work(20, matrix)
    torch.cuda.synchronize()
    clock, began = StepClock(), time.perf_counter()
    known = clock.tick()
    for times in (10, 10, 40, 40):
        work(times, matrix)
        known += clock.tick()
    host_secs = time.perf_counter() - began
    torch.cuda.synchronize()
    device_secs = time.perf_counter() - began
    known += clock.tick()  # ends a step of no work, whose own end may or may not be known yet
    assert len(known) in (4, 5)
    short, long = sum(known[:2]), sum(known[2:4])
    assert 2.5 < long / short < 6
    assert sum(known[:4]) <= device_secs
    assert host_secs < 0.5 * device_secs, "no call waited for the device"


def test_a_step_inside_a_graph_capture_is_left_out() -> None:
    matrix, clock = torch.ones(64, 64, device="cuda"), StepClock()
    work(1, matrix)
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        work(1, matrix)
        assert clock.tick() == []


def test_auto_learns_the_baseline_from_a_guarded_optimizer(tmp_path: Path) -> None:
    model = torch.nn.Linear(1024, 1024, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    with SyncCheckpointEngine(tmp_path, EngineConfig(max_write_bytes_per_sec="auto")) as engine:
        engine.guard(optimizer)
        for step in range(60):
            model(torch.ones(64, 1024, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()
            if step == 40:
                ticket = engine.save({"model": model, "optimizer": optimizer})
        ticket.result(TIMEOUT)
        control = engine._engine._throttle._control
        assert control is not None
        assert control.baseline_secs is not None
        assert 0 < control.baseline_secs < 1.0


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
