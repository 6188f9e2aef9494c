"""What the logger ``aio_ckpt`` says of saves and loads, with step and rank in each record."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import torch
from builders import weights
from gated_storage import TIMEOUT

import aio_ckpt
from aio_ckpt import SyncCheckpointEngine
from aio_ckpt.engine import capture_resources
from aio_ckpt.engine.outcome_log import duration


def test_a_commit_a_load_and_a_read_log_one_line_each(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aio_ckpt")
    with SyncCheckpointEngine(root) as engine:
        engine.save(weights(1), step=5).result(TIMEOUT)
        engine.load(weights(0))
        engine.read()
    of_steps = [record for record in caplog.records if hasattr(record, "step")]
    size, secs, rate = r"[\d.]+ kB", r"[\d.]+ m?s", r"\([\d.]+ [kMG]?B/s\)"
    patterns = (
        rf"step 5 committed: {size} durable after {secs} {rate}; save\(\) blocked {secs}, staged after {secs}",
        rf"step 5 loaded: {size} in {secs} {rate}, verified",
        rf"step 5 read: {size} in {secs} {rate}, verified",
    )
    assert len(of_steps) == len(patterns)
    for record, pattern in zip(of_steps, patterns, strict=True):
        assert re.fullmatch(pattern, record.getMessage())
        assert (record.levelno, record.name, record.step, record.rank) == (logging.INFO, "aio_ckpt", 5, 0)  # type: ignore[attr-defined]


def test_a_load_and_a_read_without_an_engine_log_one_line_each(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with SyncCheckpointEngine(root) as engine:
        path = engine.save(weights(1)).result(TIMEOUT).path
    caplog.set_level(logging.INFO, "aio_ckpt")
    aio_ckpt.load(path, weights(0))
    aio_ckpt.read(path)
    loaded, read = caplog.messages
    assert loaded.startswith("step 1 loaded: ")
    assert read.startswith("step 1 read: ")


def test_a_load_of_a_checkpoint_at_a_path_is_logged_with_the_path(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with SyncCheckpointEngine(root) as engine:
        path = engine.save(weights(1), path=root / "best").result(TIMEOUT).path
        caplog.set_level(logging.INFO, "aio_ckpt")
        engine.load(weights(0), path=path)
    assert caplog.messages[-1].startswith(f"{path} loaded: ")


def test_the_stages_of_a_save_are_logged_at_debug_in_their_order(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "aio_ckpt")
    with SyncCheckpointEngine(root) as engine:
        engine.save(weights(1)).result(TIMEOUT)
    stages = [
        match[1]
        for record in caplog.records
        if (match := re.fullmatch(r"step 1, \d+\.\d{3} s after save\(\): (.*)", record.getMessage()))
    ]
    own_thread = {"save() returns", "everything is staged"}
    assert own_thread <= set(stages)
    assert [stage for stage in stages if stage not in own_thread] == [
        "looking at the lock of the root",
        "making its directory",
        "reserving room for its data",
        "writing its data",
        "making its data durable",
        "writing its .metadata",
        "writing the rank's manifest",
        "waiting for the other ranks",
        "waiting for the commit of the save before",
        "making its directory durable",
        "waiting while other checkpoints are renamed",
        "making it visible (rename, fsync)",
        "ending",
    ]


def test_without_debug_no_stage_is_formatted(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def log_step(*args: object) -> None:
        raise AssertionError("a line was made that nobody asked for")

    monkeypatch.setattr("aio_ckpt.engine.job.log_step", log_step)
    with SyncCheckpointEngine(root) as engine:
        engine.save({"w": torch.ones(2)}).result(TIMEOUT)


@pytest.mark.parametrize(
    ("secs", "text"),
    [(0.0, "0 ms"), (0.0041, "4 ms"), (0.9994, "999 ms"), (0.9996, "1.00 s"), (3.207, "3.21 s"), (125.2, "125 s")],
)
def test_a_duration_has_a_unit_that_fits(secs: float, text: str) -> None:
    assert duration(secs) == text


def test_a_state_of_very_many_values_is_told_of_once(
    root: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_resources, "_MANY_OBJECTS", 10)
    with SyncCheckpointEngine(root) as engine:
        history = [{"loss": 0.5, "step": number} for number in range(4)]
        for _ in range(3):
            engine.save({"w": torch.ones(1), "step": 1, "history": history}).result(TIMEOUT)
            history.append({"loss": 0.5, "step": len(history)})
    (line,) = [message for message in caplog.messages if "no tensors" in message]
    assert line.startswith("the state holds 11 values that are no tensors, most of them below 'history'")
