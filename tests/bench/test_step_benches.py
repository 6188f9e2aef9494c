"""Dry runs of ``python -m bench.uring`` and ``bench.step_time``: rows are there, and what was written is compared."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench_run import run_bench

from bench import frozen, step_time, uring


def test_threads_and_io_uring_write_the_same_bytes_or_it_says_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--ram", "", "--mib", "9", "--chunk-mib", "2", "--depths", "1,4", "--rounds", "1")
    found = run_bench(uring.main, tmp_path, monkeypatch, *options)
    assert len(found["rows"]) == 6
    for row in found["rows"]:
        assert (row["durable_gb_per_sec"] is None) == bool(row["note"])
    assert len(found["verdict"]) == 1


def test_a_kernel_without_io_uring_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(depth: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(uring, "Ring", forbidden)
    options = ("--ram", "", "--mib", "1", "--chunk-mib", "1", "--depths", "1", "--rounds", "1")
    found = run_bench(uring.main, tmp_path, monkeypatch, *options)
    assert [row["note"] for row in found["rows"]] == ["", *["cannot run here: Operation not permitted"] * 2]
    assert "cannot run here" in found["verdict"][0]


def test_steps_beside_a_save_are_compared_with_those_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--gb", "0.003", "--batch", "2", "--steps", "3", "--device", "cpu")
    found = run_bench(step_time.main, tmp_path, monkeypatch, *options)
    assert [row["name"] for row in found["rows"]] == ["no cap"]
    for turns in found["drains"].values():
        for drain in turns[0]:
            assert drain["steps"] >= 1
            assert drain["baseline_secs"] > 0
            assert drain["durable_secs"] > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected an existing checkpoint")
def test_a_lora_run_writes_what_changes_and_the_bench_says_how_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run_bench(frozen.main, tmp_path, monkeypatch, "--mb", "24", "--rounds", "1", "--device", "cpu")
    assert [len(rows) for rows in found["shapes"].values()] == [6, 2]
    assert [goal["text"].partition(":")[0] for goal in found["goals"]] == [
        "bytes written / bytes changed", "durable", "durable", "save()", "save()", "all changes"
    ]  # fmt: skip
