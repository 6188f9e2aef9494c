"""One run of a bench in tests, with the options of a smoke test."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest


def run_bench(main: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> dict[str, Any]:
    """Return the document that a bench writes, and check that it leaves nothing else."""
    out = tmp_path / "out"
    monkeypatch.setattr(sys, "argv", ["bench", "--quick", "--dir", str(tmp_path), "--out", str(out), *options])
    main()
    (path,) = out.iterdir()
    document: dict[str, Any] = json.loads(path.read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["out"], "nothing else is left"
    return document
