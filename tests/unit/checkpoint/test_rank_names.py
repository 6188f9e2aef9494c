"""Facts of a checkpoint that a load and a read ask for: skeletons, names, and what is stored."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gated_storage import TIMEOUT
from saved_files import rank_manifest
from torch import nn

import aio_ckpt
from aio_ckpt import SyncCheckpointEngine
from aio_ckpt.checkpoint import open as opening


def test_a_load_decodes_the_skeleton_of_a_rank_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    with SyncCheckpointEngine(tmp_path) as engine:
        path = engine.save({"model": model, "optimizer": optimizer, "more": {"n": 1}}).result(TIMEOUT).path
    decoded: list[str] = []
    decode = opening.decode_skeleton
    monkeypatch.setattr(
        opening, "decode_skeleton", lambda data, *, name: decoded.append(name) or decode(data, name=name)
    )
    aio_ckpt.load(path, {"model": model, "optimizer": optimizer, "more": {}})
    assert decoded == [rank_manifest(path).name]
    assert aio_ckpt.read(path, only=["more"]) == {"more": {"n": 1}}
    assert decoded == [rank_manifest(path).name] * 2
