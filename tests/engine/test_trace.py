"""The trace of one save: valid, whole, nested, and never the reason that a save fails."""

from __future__ import annotations

import itertools
import json
import logging
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from gated_storage import TIMEOUT, gated_engine
from hypothesis import given
from hypothesis import strategies as st
from trace_files import check_apart, check_nested, covered_secs, error_in, events_of

from aio_ckpt import SyncCheckpointEngine
from aio_ckpt.engine import in_flight as inflight
from aio_ckpt.errors import ConfigError, SaveCancelledError, SourceChangedError, WriteError
from aio_ckpt.runtime.trace import CALLER, STAGES, SUMS, Span, SpanRecorder, render

MIB = 1 << 20
STATE = {f"w{i}": torch.arange(MIB, dtype=torch.float32) + i for i in range(8)}
"""32 MiB: nine chunks, the objects' included."""


@pytest.mark.parametrize("step", [1, 2], ids=["first", "later"])
def test_a_trace_covers_the_save_and_its_lanes_nest_and_do_not_overlap(tmp_path: Path, step: int) -> None:
    trace = tmp_path / "trace.json"
    with SyncCheckpointEngine(tmp_path / "root") as engine:
        for before in range(1, step):
            engine.save(STATE, step=before).result(TIMEOUT)
        report = engine.save({**STATE, "step": step}, step=step, trace=trace).result(TIMEOUT)
    assert report is not None
    lanes = events_of(trace)
    for events in lanes.values():
        check_nested(events)
    for lane in lanes.keys() - {CALLER}:
        check_apart(lanes[lane])
    parts = [event for event in lanes[CALLER] if event["name"] != "save()"]
    assert covered_secs(lanes[STAGES] + parts) >= 0.95 * report.timings.committed_secs
    about = json.loads(trace.read_text())["otherData"]
    assert (about["step"], about["image_bytes"]) == (step, report.image_bytes)
    assert sorted(os.listdir(tmp_path)) == ["root", "trace.json"]


def test_a_trace_names_every_stage_and_every_chunk(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    with SyncCheckpointEngine(tmp_path / "root") as engine:
        engine.save(STATE, trace=trace).result(TIMEOUT)
    lanes = events_of(trace)
    names = {lane: [event["name"] for event in events] for lane, events in lanes.items()}
    assert {"save()", "walk and plan", "lease memory", "capture"} <= set(names[CALLER])
    chunks = range(9)
    assert [name for name in names[CALLER] if name.startswith("copy")] == [f"copy chunk {i}" for i in chunks]
    assert [name for name in names[SUMS] if name.startswith("sum")] == [f"sum chunk {i}" for i in chunks]
    writers = [lane for lane in lanes if lane.startswith("writer")]
    assert 1 <= len(writers) <= 4
    written = sorted(name for lane in writers for name in names[lane] if name.startswith("write"))
    assert written == [f"write chunk {i}" for i in chunks]
    stages = names[STAGES]
    order = ["writing its data", "making its data durable (fdatasync)", "writing the rank's manifest"]
    order += ["making its directory durable", "making it visible (rename, fsync)"]
    assert [stage for stage in stages if stage in order] == order


def test_the_stages_of_every_report_end_in_order(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        report = engine.save(STATE).result(TIMEOUT)
    assert report is not None
    times = report.timings
    ends = [times.written_secs, times.synced_secs, times.agreed_secs, times.dir_synced_secs, times.committed_secs]
    assert ends[0] > 0
    assert ends == sorted(ends)


def test_a_save_that_fails_leaves_what_was_done_and_the_error(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    with gated_engine(tmp_path / "root", on_failure="log") as (engine, storage):
        storage.fail("sync", "*.distcp", WriteError(5, "the disk is broken", "x"))
        with pytest.raises(WriteError, match="the disk is broken"):
            engine.save(STATE, trace=trace).result(TIMEOUT)
        assert "the disk is broken" in error_in(trace)
        assert engine.steps().result() == []
    lanes = events_of(trace)
    for events in lanes.values():
        check_nested(events)
    names = [event["name"] for event in lanes[STAGES]]
    assert names[-1] == "making its data durable (fdatasync)"
    assert sum(event["name"].startswith("write chunk") for events in lanes.values() for event in events) == 9


def test_a_cancelled_save_leaves_its_trace_with_the_write_that_went_on(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    with gated_engine(tmp_path / "root", workers=1) as (engine, storage):
        gate = storage.hold("write")
        ticket = engine.save(STATE, trace=trace)
        gate.wait_reached()
        assert ticket.cancel()
        with pytest.raises(SaveCancelledError):
            ticket.result(TIMEOUT)
        assert "SaveCancelledError" in error_in(trace)
        assert events_of(trace)["writer 0"][-1]["args"]["error"] == "CancelledError"


def test_a_capture_that_fails_leaves_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = tmp_path / "trace.json"

    def broken(*_: object, **__: object) -> None:
        raise SourceChangedError("moved away")

    monkeypatch.setattr(inflight, "capture", broken)
    with SyncCheckpointEngine(tmp_path / "root") as engine:
        with pytest.raises(SourceChangedError):
            engine.save(STATE, trace=trace)
        assert "moved away" in error_in(trace)
        going_on = [event["name"] for event in events_of(trace)[CALLER]]
        assert {"save()", "capture"} <= set(going_on), "what had not ended is shown up to the end"


def test_a_trace_that_cannot_be_written_is_logged_and_fails_no_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    with gated_engine(tmp_path / "root") as (engine, storage):
        gate = storage.hold("write")
        ticket = engine.save(STATE, trace=folder / "trace.json")
        gate.wait_reached()
        folder.rmdir()
        gate.open()
        with caplog.at_level(logging.WARNING, logger="aio_ckpt"):
            report = ticket.result(TIMEOUT)
        assert report is not None
        assert engine.steps().result() == [report.step]
    assert [record.getMessage() for record in caplog.records if "was not written" in record.getMessage()]


def test_a_trace_takes_the_place_of_the_one_before_at_once(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text("old")
    before = trace.open()
    with SyncCheckpointEngine(tmp_path / "root") as engine:
        engine.save(STATE, trace=trace).result(TIMEOUT)
    with before:
        assert before.read() == "old", "whoever had it open reads it whole"
    assert json.loads(trace.read_text())["otherData"]["step"] == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["root", "trace.json"]


@pytest.mark.parametrize("bad", [7, b"trace.json", "", "no/such/folder/trace.json", ".", "a\0b", "x" * 300 + "/t"])
def test_a_bad_path_is_refused_before_anything_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with SyncCheckpointEngine(tmp_path / "root") as engine:
        with pytest.raises(ConfigError, match="trace="):
            engine.save(STATE, trace=bad)
        assert engine.lifetime.leases == 0
        assert not (tmp_path / "root").exists()
        report = engine.save(STATE).result(TIMEOUT)
        assert report is not None
        assert report.step == 1


@pytest.mark.parametrize("kind", ["device", "pipe", "link to a device", ".metadata", "beside it"])
def test_what_is_no_plain_file_or_lies_in_a_checkpoint_is_never_replaced(tmp_path: Path, kind: str) -> None:
    with SyncCheckpointEngine(tmp_path / "root") as engine:
        report = engine.save(STATE).result(TIMEOUT)
        assert report is not None
        path = tmp_path / "special"  # not /dev/null itself: a defect would take it from the whole machine
        if kind == "pipe":
            os.mkfifo(path)
        elif kind.endswith("device"):
            try:
                os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
            except PermissionError as error:
                pytest.skip(f"cannot make a device node here: {error}")
            if kind == "link to a device":
                path = tmp_path / "link"
                path.symlink_to("special")
        else:
            path = report.path / (kind if kind == ".metadata" else "trace.json")
        with pytest.raises(ConfigError, match="trace="):
            engine.save(STATE, trace=path)
        assert engine.load({name: torch.zeros_like(value) for name, value in STATE.items()}).step == 1
    assert not (tmp_path / "special").is_file()


def test_a_link_stays_and_the_file_behind_it_is_replaced(tmp_path: Path) -> None:
    link, file = tmp_path / "link", tmp_path / "trace.json"
    link.symlink_to(file)
    with SyncCheckpointEngine(tmp_path / "root") as engine:
        engine.save(STATE, trace=link).result(TIMEOUT)
    assert link.readlink() == file
    assert json.loads(file.read_text())["otherData"]["step"] == 1


def test_nothing_is_recorded_of_a_save_that_did_not_ask_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr(SpanRecorder, "__init__", lambda self, *_: made.append(self))
    monkeypatch.setattr(Span, "__init__", lambda self, **_: made.append(self))
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.save(STATE).result(TIMEOUT)
    assert made == []


@given(
    cuts=st.lists(st.floats(0, 1e4, allow_nan=False), min_size=2, max_size=12),
    origin=st.floats(0, 1e7, allow_nan=False),
)
def test_rendered_spans_nest_whatever_the_clock_shows(cuts: list[float], origin: float) -> None:
    """Rounding moves no end behind the end of what it lies in."""
    at = sorted(origin + cut for cut in cuts)
    spans = [Span(name="all", lane="a", began=at[0], ended=at[-1], details={})]
    spans += [
        Span(name=f"{i}", lane="a", began=b, ended=e, details={}) for i, (b, e) in enumerate(itertools.pairwise(at))
    ]
    document = json.loads(render(spans[::-1], origin=origin, rank=2, about={}, error=None))
    complete = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert all(event["pid"] == 2 for event in document["traceEvents"])
    whole, parts = complete[0], complete[1:]
    assert whole["name"] == "all"
    for part in parts:
        assert part["ts"] >= whole["ts"]
        assert part["ts"] + part["dur"] <= whole["ts"] + whole["dur"] + 2e-3


def test_a_span_that_goes_on_is_shown_up_to_now_and_stages_follow_each_other_without_a_gap() -> None:
    now = 0.0
    recorder = SpanRecorder(lambda: now)
    recorder.stage("first")
    now = 1.0
    recorder.stage("second")
    now = 3.0
    with recorder.span("open", "lane"):
        now = 4.0
        found = {span.name: (span.began, span.ended) for span in recorder.spans()}
    assert found == {"first": (0.0, 1.0), "second": (1.0, 4.0), "open": (3.0, 4.0)}
