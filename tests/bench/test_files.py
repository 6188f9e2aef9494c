"""Dry run of ``python -m bench.files``: both formats, the rival first, and what was written is compared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from bench_run import run_bench
from safetensors.torch import load_file

from bench import files
from bench.common.measure import Contender


def test_each_format_is_a_table_of_the_rival_and_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interleave(contenders: list[Contender], rounds: int, **options: object) -> object:
        found = real(contenders, rounds, **options)
        for contender in contenders:
            path, state = contender._path, contender._state
            got = torch.load(path) if path.suffix == ".pt" else load_file(path)
            assert all(torch.equal(got[name], tensor) for name, tensor in state.items())
        return found

    real = files.interleave
    monkeypatch.setattr(files, "interleave", interleave)
    found = run_bench(files.main, tmp_path, monkeypatch, "--shapes", "small", "--small-count", "20", "--rounds", "1")
    names = {title.partition(":")[0]: [row["name"] for row in rows] for title, rows in found["shapes"].items()}
    assert names == {
        ".pt": ["torch.save", "aio_ckpt, save_file"],
        ".safetensors": ["safetensors", "aio_ckpt, save_file"],
    }
    assert all(rows[0]["ratio"] == 1.0 for rows in found["shapes"].values())
