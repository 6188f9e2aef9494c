"""Dry runs of ``python -m bench.adapters``: ratios stand first, and a door that cannot be measured is a line."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from bench import adapters


def run(tmp_path: Path, *options: str) -> dict[str, Any]:
    out = tmp_path / "out"
    given = ["--mib", "1", "--rounds", "1", "--steps", "1", "--device", "cpu", "--ranks", "1"]
    adapters.main([*given, "--dir", str(tmp_path), "--out", str(out), *options])
    (path,) = out.iterdir()
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "nothing else is left"
    document: dict[str, Any] = json.loads(path.read_text())
    return document


@pytest.mark.slow
@pytest.mark.parametrize("door", ["files", "dcp"])
def test_a_door_has_its_ratios_first_and_every_figure_in_milliseconds(tmp_path: Path, door: str) -> None:
    found = run(tmp_path, door)
    assert found["settings"]["not measured"] == []
    units = [row["unit"] for row in found["figures"]]
    assert units == ["x"] * 3 + ["ms"] * 7
    by_text = {row["text"]: row["values"]["median"] for row in found["figures"]}
    calls = {way: by_text[f"{door}: the call ({way})"] for way in ("stock", "ours")}
    assert by_text[f"{door}: the call, ours / stock"] == pytest.approx(calls["ours"] / calls["stock"])
    for way, secs in calls.items():
        assert 0 < secs <= by_text[f"{door}: until done ({way})"]


def test_a_door_whose_package_is_missing_is_left_out_with_what_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = run(tmp_path, "torchtitan")
    assert found["figures"] == []
    assert "not measured: torchtitan: pip install torchtitan" in capsys.readouterr().err


def test_a_save_below_the_noise_of_the_steps_has_a_ratio_all_the_same() -> None:
    samples = {f"{way} {name}": [1.0] for way in ("stock", "ours") for name in ("call", "done", "step")}
    rows = adapters.table("dcp", samples | {"stock lost": [4.0], "ours lost": [-1.0]})
    assert rows[0].values.median == -0.25
