"""``python -m bench.waves``: a save that is larger than its budget, in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import waves


@pytest.mark.slow
def test_memory_at_the_peak_stays_within_the_budget_plus_5_percent(tmp_path: Path) -> None:
    """2 GB with 256 MB, every fourth tensor with gaps in its memory, read back and compared."""
    waves.main(["--dir", str(tmp_path), "--out", str(tmp_path / "out")])
    (goal,) = json.loads((tmp_path / "out" / "waves.json").read_text())["goals"]
    assert goal["bound"] == 1.05 * 256
    assert goal["is_met"], goal
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "nothing else is left"
