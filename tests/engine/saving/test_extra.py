"""``save(extra=)``: the user's own JSON beside a step, in the reports of saves, loads and reads, and on the disk."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch.distributed.checkpoint as dcp
from builders import save, steps_dir, weights
from format_reader import read_checkpoint
from gated_storage import TIMEOUT, gated_engine
from saved_files import root_manifest

import aio_ckpt
from aio_ckpt import SyncCheckpointEngine
from aio_ckpt.errors import ConfigError, CorruptCheckpointError
from aio_ckpt.format.root_manifest import add_checksum, decode_root

EXTRA: dict[str, Any] = {"loss": 1.25, "epoch": 4, "run": "é\n\x00", "best": None, "done": True, "lr": [1e-3, {"w": 0}]}


def test_the_blocking_engine_and_the_calls_without_an_engine_report_extra(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        saved = engine.save(weights(1), extra=EXTRA).result(TIMEOUT)
        loaded = engine.load(weights(0))
        _, read = engine.read(with_report=True)
    alone = aio_ckpt.load(saved.path, weights(0))
    _, read_alone = aio_ckpt.read(saved.path, with_report=True)
    assert saved.extra == loaded.extra == read.extra == alone.extra == read_alone.extra == EXTRA


def test_each_step_has_its_own_extra(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        engine.save(weights(1), 1, extra={"n": 1}).result(TIMEOUT)
        engine.save(weights(2), 2, extra={"n": 2}).result(TIMEOUT)
        engine.save(weights(3), 3).result(TIMEOUT)
        engine.save(weights(2), 2, overwrite=True, extra={"n": 20}).result(TIMEOUT)
        assert [engine.load(weights(0), step).extra for step in (1, 2, 3)] == [{"n": 1}, {"n": 20}, {}]


def test_extra_is_what_it_was_at_the_call(root: Path) -> None:
    with gated_engine(root) as (engine, storage):
        gate = storage.hold("sync", "*")
        extra = {"losses": [1.0]}
        ticket = engine.save(weights(1), extra=extra)
        gate.wait_reached()
        extra["losses"].append(2.0)
        extra["new"] = []
        gate.open()
        assert ticket.result(TIMEOUT).extra == {"losses": [1.0]}
    with SyncCheckpointEngine(root) as reader:
        assert reader.load(weights(0)).extra == {"losses": [1.0]}


def test_a_bad_extra_is_refused_before_anything_is_touched(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        with pytest.raises(ConfigError, match=r"extra\['loss'\]"):
            engine.save(weights(1), extra={"loss": float("nan")})
        assert engine.plan_misses == 0
        assert not root.exists()
        assert engine.save(weights(1)).result(TIMEOUT).step == 1


def test_extra_is_a_key_of_the_root_manifest_which_is_absent_without_any(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        engine.save(weights(1), 1, extra=EXTRA).result(TIMEOUT)
        engine.save(weights(2), 2, extra={}).result(TIMEOUT)
    data = root_manifest(steps_dir(root, 1)).read_bytes()
    assert json.loads(data)["extra"] == EXTRA == decode_root(data, name="root").extra
    assert "extra" not in json.loads(root_manifest(steps_dir(root, 2)).read_bytes())
    read_checkpoint(steps_dir(root, 1))  # the reader that was written from docs/format.md


def test_a_changed_byte_of_extra_is_damage(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        path = root_manifest(engine.save(weights(1), extra={"loss": 1.25}).result(TIMEOUT).path)
        path.write_bytes(path.read_bytes().replace(b"1.25", b"1.26"))
        with pytest.raises(CorruptCheckpointError, match=path.name):
            engine.load(weights(0))


def test_a_manifest_whose_extra_is_no_object_is_damaged(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        path = root_manifest(engine.save(weights(1), extra={"a": 1}).result(TIMEOUT).path)
        document = json.loads(path.read_bytes()) | {"extra": [1]}
        del document["blake2b"]
        path.write_bytes(add_checksum(msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"))
        with pytest.raises(CorruptCheckpointError, match="extra"):
            engine.load(weights(0))


def test_plain_dcp_and_older_checkpoints_have_an_empty_extra(root: Path, tmp_path: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        save(engine, 1)
        assert engine.load(weights(0)).extra == {}
    with warnings.catch_warnings(action="ignore"):  # of one process being alone
        dcp.save(weights(1), checkpoint_id=tmp_path / "stock", no_dist=True)
    assert aio_ckpt.load(tmp_path / "stock", weights(0)).extra == {}
    assert aio_ckpt.read(tmp_path / "stock", with_report=True)[1].extra == {}
