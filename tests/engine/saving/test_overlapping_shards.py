"""Shards of one tensor that overlap are refused: they could hide elements that no shard holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_maker import Shard, content_of, write_checkpoint
from command_line import called
from torch.distributed.checkpoint.api import CheckpointException

import aio_ckpt
from aio_ckpt.dcp import Reader
from aio_ckpt.errors import CorruptCheckpointError
from aio_ckpt.format.checkpoint_files import TRAILER_BYTES

OVERLAPPING = [(0, 2), (1, 1), (3, 1)]
"""(begin, length) of the shards of 4 elements: as many elements as the tensor has, and none for element 2."""


@pytest.fixture(params=["ours", "plain DCP"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    made = written(tmp_path / "step_000000007", OVERLAPPING)
    if request.param == "plain DCP":
        for manifest in made.glob("aio_ckpt*"):
            manifest.unlink()
        metadata = made / ".metadata"
        metadata.write_bytes(metadata.read_bytes()[:-TRAILER_BYTES])
    return made


def written(path: Path, boxes: list[tuple[int, int]]) -> Path:
    content = content_of({"w": torch.ones(4)})
    shards = [Shard(("w",), torch.ones(length), (begin,)) for begin, length in boxes]
    return write_checkpoint(path, [replace(content, shards=shards)])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    "call",
    [
        lambda path, state: aio_ckpt.load(path, state),
        lambda path, _: aio_ckpt.read(path),
        lambda path, state: dcp.load(state, storage_reader=Reader(path), no_dist=True),
    ],
)
def test_overlapping_shards_are_refused_before_anything_is_read(path: Path, call: Any) -> None:
    state = {"w": torch.zeros(4)}
    with pytest.raises((CorruptCheckpointError, CheckpointException), match="the shards of 'w' overlap"):
        call(path, state)
    assert not state["w"].any()


def test_verify_names_shards_that_overlap(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = called(capsys, "verify", path)
    assert code == 1
    assert "the shards of 'w' overlap" in out + err


def test_shards_that_only_touch_are_loaded(tmp_path: Path) -> None:
    path = written(tmp_path / "x", [(2, 2), (0, 1), (1, 1)])
    assert aio_ckpt.load(path, state := {"w": torch.zeros(4)}).verified
    assert torch.equal(state["w"], torch.ones(4))
