"""``torch.distributed.checkpoint`` with a URL: our writer and reader, and ``install()``, against a real S3 server."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_processes import Ranks
from torch.distributed.checkpoint.api import CheckpointException

import aio_ckpt
import aio_ckpt.dcp
from aio_ckpt import SyncCheckpointEngine
from aio_ckpt.dcp import Reader, Writer
from aio_ckpt.errors import CheckpointExistsError
from tests.remote.test_object_store import data_of, get, keys, put

TIMEOUT = 60.0


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings(action="ignore"):  # no_dist warns of itself
        yield


def state(value: float) -> dict[str, Any]:
    return {"w": torch.arange(50_000.0) + value, "n": {"b": torch.full((3,), value), "text": f"value {value}"}}


def zeros() -> dict[str, Any]:
    return {"w": torch.zeros(50_000), "n": {"b": torch.zeros(3), "text": ""}}


def check(loaded: dict[str, Any], value: float) -> None:
    assert torch.equal(loaded["w"], state(value)["w"])
    assert (loaded["n"]["b"].tolist(), loaded["n"]["text"]) == ([value] * 3, f"value {value}")


def test_a_save_by_our_writer_is_loaded_by_our_reader_and_by_the_engine(bucket: str) -> None:
    for value in (1.0, 2.0):
        dcp.save(state(value), storage_writer=Writer(f"{bucket}/ckpt"), no_dist=True)
        loaded = zeros()
        dcp.load(loaded, storage_reader=Reader(f"{bucket}/ckpt"), no_dist=True)
        check(loaded, value)
    names = keys(f"{bucket}/ckpt")
    assert len(names) == 4, f"nothing of the first save, no marker and no lock is left: {names}"
    with SyncCheckpointEngine(f"{bucket}/run") as engine:
        loaded = zeros()
        engine.load(loaded, path=f"{bucket}/ckpt")
        check(loaded, 2.0)
    assert aio_ckpt.read(f"{bucket}/ckpt")["n"]["text"] == "value 2.0"


def test_a_checkpoint_that_must_stay_is_not_replaced(bucket: str) -> None:
    dcp.save(state(1.0), storage_writer=Writer(f"{bucket}/ckpt", overwrite=False), no_dist=True)
    with pytest.raises(CheckpointException) as caught:
        dcp.save(state(2.0), storage_writer=Writer(f"{bucket}/ckpt", overwrite=False), no_dist=True)
    assert any(isinstance(error, CheckpointExistsError) for error, _ in caught.value.failures.values())
    loaded = zeros()
    dcp.load(loaded, storage_reader=Reader(f"{bucket}/ckpt"), no_dist=True)
    check(loaded, 1.0)


def test_a_changed_byte_is_found(bucket: str) -> None:
    dcp.save(state(1.0), storage_writer=Writer(f"{bucket}/ckpt"), no_dist=True)
    data = data_of(f"{bucket}/ckpt")
    content = get(data)
    put(data, content[:9000] + bytes([content[9000] ^ 1]) + content[9001:])
    with pytest.raises(CheckpointException, match=r"\.distcp"):
        dcp.load(zeros(), storage_reader=Reader(f"{bucket}/ckpt"), no_dist=True)


def test_what_a_killed_save_left_goes_with_the_next_one(bucket: str) -> None:
    place = f"{bucket}/ckpt"
    dcp.save(state(1.0), storage_writer=Writer(place), no_dist=True)
    for name in ("__dead_0_0.distcp", "aio_ckpt.dead.0.bin", "aio_ckpt.pending-dead", ".metadata.tmp-dead"):
        put(f"{place}/{name}", b"half")
    put(f"{place}/notes.txt", b"mine")
    loaded = zeros()
    dcp.load(loaded, storage_reader=Reader(place), no_dist=True)
    check(loaded, 1.0)
    dcp.save(state(2.0), storage_writer=Writer(place), no_dist=True)
    assert len(keys(place)) == 5
    assert "notes.txt" in keys(place)


def test_calls_without_a_writer_are_served_after_install(bucket: str) -> None:
    with aio_ckpt.dcp.default():
        dcp.save(state(1.0), checkpoint_id=f"{bucket}/ckpt", no_dist=True)
        loaded = zeros()
        dcp.load(loaded, checkpoint_id=f"{bucket}/ckpt", no_dist=True)
        check(loaded, 1.0)
    assert any(name.startswith("aio_ckpt.") for name in keys(f"{bucket}/ckpt")), "it was ours"


def save_and_load(rank: int, count: int, url: str, environment: dict[str, str]) -> list[float]:
    os.environ.update(environment)
    warnings.simplefilter("ignore")
    found = []
    with aio_ckpt.dcp.default():
        for value in (1.0, 2.0):
            saved = {"w": torch.full((1000,), value), f"own{rank}": torch.full((10,), value + rank)}
            if value == 1.0:
                dcp.save(saved, checkpoint_id=url)
            else:
                dcp.async_save(saved, checkpoint_id=url).result(TIMEOUT)
            dist.barrier()
            loaded = {"w": torch.zeros(1000), f"own{rank}": torch.zeros(10)}
            dcp.load(loaded, checkpoint_id=url)
            dist.barrier()
            found += [float(loaded["w"][0]), float(loaded[f"own{rank}"][0])]
    return found


def test_ranks_save_and_load_by_dcp(two: Ranks, bucket: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    found = two.run(save_and_load, f"{bucket}/ckpt", environment)
    assert found == [[1.0, 1.0 + rank, 2.0, 2.0 + rank] for rank in range(2)]
    assert len(keys(f"{bucket}/ckpt")) == 6
