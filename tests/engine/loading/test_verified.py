"""``verified`` of a report says of every source whether all bytes that were read were compared with checksums."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import aio_ckpt
from aio_ckpt import EngineConfig, Shard, SyncCheckpointEngine

UNVERIFIED = EngineConfig(verify="never")


@pytest.fixture
def state() -> dict[str, Any]:
    return {"t": torch.arange(600.0).view(30, 20), "o": ["an object"]}


@pytest.fixture
def empty() -> dict[str, Any]:
    return {"t": torch.zeros(30, 20), "o": None}


def by_stock(state: dict[str, Any], path: Path) -> Path:
    with warnings.catch_warnings(action="ignore"):
        dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


@pytest.fixture
def without_checksums() -> Iterator[None]:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    yield
    torch.serialization.set_crc32_options(before)


def test_a_checkpoint_of_stock_is_verified_by_the_checksums_of_torch_save(
    tmp_path: Path, state: dict[str, Any], empty: dict[str, Any]
) -> None:
    path = by_stock(state, tmp_path / "x")
    assert aio_ckpt.load(path, empty).verified
    assert aio_ckpt.read(path, with_report=True)[1].verified
    assert not aio_ckpt.load(path, empty, config=UNVERIFIED).verified


@pytest.mark.usefixtures("without_checksums")
def test_a_checkpoint_of_stock_without_checksums_is_not_verified(
    tmp_path: Path, state: dict[str, Any], empty: dict[str, Any]
) -> None:
    path = by_stock(state, tmp_path / "x")
    assert not aio_ckpt.load(path, {"t": empty["t"]}).verified
    assert not aio_ckpt.load(path, {"o": None}).verified
    assert not aio_ckpt.read(path, with_report=True)[1].verified


def test_a_part_of_a_tensor_of_stock_has_no_checksum_and_one_of_aio_ckpt_has(tmp_path: Path) -> None:
    state = {"t": torch.arange(600_000.0).view(3000, 200)}  # several blocks
    template = {"t": Shard(torch.zeros(10, 200), offsets=(5, 0), global_shape=(3000, 200))}
    assert not aio_ckpt.load(by_stock(state, tmp_path / "x"), template).verified
    with SyncCheckpointEngine(tmp_path / "root") as engine:
        path = engine.save(state).result(20).path
    assert aio_ckpt.load(path, template).verified


def test_nothing_that_is_read_needs_no_checksum(tmp_path: Path, state: dict[str, Any]) -> None:
    path = by_stock(state, tmp_path / "x")
    assert aio_ckpt.load(path, {}).verified
