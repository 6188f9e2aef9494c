"""``python -m bench.gpu`` as a dry run without a GPU: it keeps what was measured, and nothing hangs it."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import psutil
import pytest
from torch.distributed.checkpoint import staging

if not hasattr(staging, "DefaultStager"):
    pytest.skip("bench.gpu measures DCP's stagers, which this torch has none of", allow_module_level=True)

from bench.gpu.__main__ import run
from bench.gpu.options import GpuOptions, parse
from bench.gpu.results import row_of, shares
from bench.gpu.supervise import EventReader, Outcome, Processes, Ranks, free_port
from bench.gpu.tables import render
from bench.gpu.trial import contender_keys

READY = {"event": "ready", "nbytes": 2_000_000_000, "tensors": 3, "step_secs": 0.07}


def options(folder: Path, *more: str) -> GpuOptions:
    return parse(["--dir", str(folder), "--gb", "0.005", "--repeats", "1", "--step-ms", "2", *more])


@pytest.mark.slow
def test_every_contender_is_a_row_also_one_that_cannot_run(tmp_path: Path) -> None:
    run(options(tmp_path, "--only", "aio-default,nvrx-tuned", "--without", "raw", "--label", "dry"))
    [path] = (tmp_path / "bench-results").iterdir()
    document = json.loads(path.read_text())
    rows = {row["contender"]: row for row in document["rows"]}
    assert {key: row["status"] for key, row in rows.items()} == {"aio-default": "ok", "nvrx-tuned": "not run"}
    ours = rows["aio-default"]
    assert {"first_blocked_secs", "blocked_secs", "staged_secs", "durable_secs", "lost_secs"} <= ours["figures"].keys()
    assert ours["tensors"] == 432
    assert ours["figures"]["blocked_secs"] <= ours["figures"]["staged_secs"] <= ours["figures"]["durable_secs"]
    assert "nvidia-resiliency-ext" in rows["nvrx-tuned"]["error"]
    assert "| aio_ckpt: default |" in render(document)
    assert not list(tmp_path.glob("aio_ckpt-bench-gpu-*"))


def test_a_contender_that_hangs_is_killed_and_keeps_what_it_measured(tmp_path: Path) -> None:
    (tmp_path / "trial").mkdir()
    trial = options(tmp_path).trial("aio-default", "blocks", 0.005, str(tmp_path / "trial"), world=1)
    # What it had reported before: the file is read, whoever wrote it.
    (tmp_path / "trial-events-0.jsonl").write_text('{"event": "alone", "blocked_secs": 1.0, "durable_secs": 2.0}\n')
    begin = time.monotonic()
    outcome = Processes(Ranks()).run(trial, free_port(), limit_secs=0.3, has_next=False)
    assert time.monotonic() - begin < 10
    assert (outcome.status, outcome.error) == ("failed", "killed after 0 s")
    assert [event["event"] for event in outcome.events] == ["alone"]
    assert not [child for child in psutil.Process().children() if "bench.gpu.trial" in " ".join(child.cmdline())]


def test_workers_of_a_contender_that_hangs_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trial").mkdir()
    stub = tmp_path / "stub"
    stub.write_text(f"#!/bin/sh\nsleep 1000 &\necho $! > {tmp_path}/worker\nwait\n")
    stub.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stub))
    trial = options(tmp_path).trial("aio-default", "blocks", 0.005, str(tmp_path / "trial"), world=1)
    outcome = Processes(Ranks()).run(trial, free_port(), limit_secs=1.0, has_next=False)
    assert outcome.error == "killed after 1 s"
    worker = int((tmp_path / "worker").read_text())
    assert not psutil.pid_exists(worker) or psutil.Process(worker).status() == psutil.STATUS_ZOMBIE


def test_supervisors_agree_through_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = []
    for rank in ("0", "1"):
        for name, value in (environment | {"RANK": rank}).items():
            monkeypatch.setenv(name, value)
        ranks.append(Ranks())
    for trial in range(2):
        decided = [ranks[0].decide({"left": trial}, 1), ranks[1].decide(None, 1)]
        assert decided == [{"left": trial}] * 2
        assert not ranks[0].has_failure()
        ranks[1].tell_failure()
        assert ranks[1].has_failure()  # its answer comes behind what this connection set, which all can see then
        assert ranks[0].has_failure()
        assert ranks[1].gather(Outcome(status="failed", error="b")) == []
        assert [outcome.error for outcome in ranks[0].gather(Outcome(status="ok", error="a"))] == ["a", "b"]


def test_what_has_not_begun_when_the_time_is_over_is_a_row(tmp_path: Path) -> None:
    run(options(tmp_path, "--only", "aio", "--secs", "0", "--label", "late"))
    [path] = (tmp_path / "bench-results").iterdir()
    rows = json.loads(path.read_text())["rows"]
    assert [row["contender"] for row in rows] == [
        "raw",
        *(key for key in contender_keys("save") if key.startswith("aio")),
        "raw",
    ]
    assert {(row["status"], row["error"]) for row in rows} == {("not run", "the time of the run was over")}


def test_lost_time_is_what_the_steps_took_beyond_as_many_without_a_save() -> None:
    beside = {
        "event": "beside",
        "blocked_secs": 0.01,
        "done_secs": 0.5,
        "durable_secs": 0.6,
        "staged_secs": 0.01,
        "cpu_secs": 0.2,
        "base_secs": [0.1, 0.1],
        "steps_secs": [0.25, 0.1, 0.1, 0.11, 0.1, 0.1, 0.1],
    }
    row = row_of("torch-save", "blocks", 8, [Outcome(status="ok", events=[READY, beside])])
    assert row.figures["lost_secs"] == pytest.approx(0.16)
    assert row.figures["worst_step_secs"] == 0.25
    assert row.figures["drain_step_ratio"] == pytest.approx(1.0)
    assert row.figures["cpu_secs_per_gb"] == pytest.approx(0.1)
    assert shares(row.figures, [{"disk_secs": 0.2}, {"disk_secs": 0.4}])["disk_share"] == pytest.approx(0.5)


def test_a_row_of_several_ranks_has_the_slowest_and_the_failure_of_the_first_that_failed() -> None:
    def alone(secs: float) -> list[dict[str, object]]:
        names = ("blocked_secs", "staged_secs", "done_secs", "durable_secs", "cpu_secs")
        return [READY, *({"event": "alone", **dict.fromkeys(names, secs)} for _ in range(2))]

    ranks = [
        Outcome(status="failed", error="another rank failed", events=alone(1.0), peaks={"system": 600, "tree": 500}),
        Outcome(status="failed", error="OSError: full", events=alone(2.0), peaks={"system": 800, "tree": 100}),
    ]
    row = row_of("aio-default", "blocks", 8, ranks)
    assert row.figures["durable_secs"] == 2.0
    assert (row.figures["system_bytes"], row.figures["tree_bytes"]) == (400, 500)
    assert (row.status, row.error) == ("failed", "OSError: full")


def test_a_line_that_is_not_whole_yet_is_read_when_it_is(tmp_path: Path) -> None:
    path = tmp_path / "events"
    reader = EventReader(path)
    assert reader.read() == []
    path.write_text('{"event": "a"}\n{"eve')
    assert reader.read() == [{"event": "a"}]
    with path.open("a") as file:
        file.write('nt": "b"}\n')
    assert reader.read() == [{"event": "b"}]
