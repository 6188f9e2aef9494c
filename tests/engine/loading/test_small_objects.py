"""Many plain values in one state: they are read together, each is proven, and none becomes another's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from builders import flip, steps_dir
from saved_files import data_file, rank_manifest

from aio_ckpt import SyncCheckpointEngine
from aio_ckpt.errors import MismatchError
from aio_ckpt.format.constants import BLOCK_BYTES
from aio_ckpt.format.rank_manifest import decode_rank

LONG = "x" * (2 * BLOCK_BYTES)


def history(count: int = 300) -> dict[str, Any]:
    rows = [{"loss": number / 7, "lr": 1e-3, "at": [number, "step"], "betas": (0.9, 0.999)} for number in range(count)]
    return {"rows": rows, "one": {1, 2}, "other": {1, 2}, "long": LONG, "w": torch.ones(3)}


@pytest.fixture
def checkpoint(root: Path) -> Path:
    with SyncCheckpointEngine(root) as engine:
        engine.save(history()).result()
    return steps_dir(root, 1)


def place_of(checkpoint: Path, name: str) -> int:
    manifest = decode_rank(rank_manifest(checkpoint).read_bytes(), name="m")
    [entry] = [entry for entry in manifest.objects if name in entry.fqns]
    return entry.offset


def test_they_come_back_equal_and_values_that_can_change_stay_apart(root: Path, checkpoint: Path) -> None:
    loaded = history()
    loaded |= {"one": set(), "other": set(), "long": ""}
    for row in loaded["rows"]:
        row |= {"loss": 0.0, "lr": 0.0, "at": [], "betas": ()}
    with SyncCheckpointEngine(root) as engine:
        assert engine.load(loaded).verified
    saved = history()
    assert all(loaded[name] == saved[name] for name in ("rows", "one", "other", "long"))
    loaded["one"].add(3)
    assert loaded["other"] == {1, 2}


def test_a_value_of_many_names_is_read_once(root: Path) -> None:
    text = "y" * 100_000
    with SyncCheckpointEngine(root) as engine:
        engine.save({f"t{number}": text for number in range(50)}).result()
        report = engine.load({f"t{number}": "" for number in range(50)})
    assert report.bytes_read < 2 * len(text)


@pytest.mark.parametrize("name", ["rows.0.loss", "rows.299.at", "rows.7.lr", "long"])
def test_a_flipped_byte_of_any_is_found_and_named(root: Path, checkpoint: Path, name: str) -> None:
    flip(data_file(checkpoint), place_of(checkpoint, name) + 5)
    loaded = history()
    with SyncCheckpointEngine(root) as engine, pytest.raises(MismatchError, match=r"object '") as caught:
        engine.load(loaded, fallback=False)
    assert data_file(checkpoint).name in str(caught.value)
    assert not caught.value.target_modified or loaded["rows"] == history()["rows"]
