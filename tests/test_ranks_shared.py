"""What all ranks of a host read whole is read from its disk once; what each reads for itself is not."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from gated_storage import GatedStorage
from rank_processes import Ranks, engine_on
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from aio_ckpt import CheckpointEngine, EngineConfig
from aio_ckpt.portal import Executor
from aio_ckpt.storage import LocalStorage, ReadFile

SECS = 60.0
MIB = 1 << 20
TENSORS = 10
"""Of 4 MiB: more than is read ahead."""


class WatchedOpens(GatedStorage):
    """Which data files were opened to be shared."""

    def __init__(self, executor: Executor) -> None:
        super().__init__(executor)
        self.shared: list[bool] = []

    async def open_data_file(self, path: Path, *, readers: int, shared: bool = False) -> ReadFile:
        self.shared.append(shared)
        return await super().open_data_file(path, readers=readers, shared=shared)


def state_of(kind: str, rank: int, count: int, *, fill: bool = True) -> dict[str, Any]:
    plain = {f"w{i}": torch.full((MIB,), float(i) if fill else -1.0) for i in range(TENSORS)}
    if kind == "shards":
        mesh = init_device_mesh("cpu", (count,))
        return {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in plain.items()}
    if kind == "stages":
        return {f"{name}.{rank}": tensor for name, tensor in plain.items()}
    return plain


def save(rank: int, count: int, root: Path, kind: str) -> None:
    with engine_on(root, SECS) as engine:
        engine.save(state_of(kind, rank, count), step=1).result(SECS)


def forget(root: Path) -> None:
    """Drop what was saved from the page cache."""
    for path in root.glob("step_*/*.distcp"):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def load(rank: int, count: int, root: Path, kind: str) -> tuple[list[bool], int]:
    """Whether files were opened to be shared, and the bytes that this rank had the disk read."""
    executor = Executor("opens", 4)
    storage = WatchedOpens(executor)
    template, wanted = state_of(kind, rank, count, fill=False), state_of(kind, rank, count)
    engine = CheckpointEngine(root, EngineConfig(stall_timeout_secs=SECS), storage=storage)
    before = _disk_bytes()
    try:
        asyncio.run(engine.load(template))  # type: ignore[arg-type]
        read = _disk_bytes() - before
    finally:
        engine.terminate()
        executor.close(SECS)
    for name, value in wanted.items():
        found = template[name]
        pair = (found.to_local(), value.to_local()) if kind == "shards" else (found, value)
        assert torch.equal(*pair), name
    return storage.shared, read


def _disk_bytes() -> int:
    rows = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(rows["read_bytes"])


@pytest.mark.parametrize("kind", ["copies", "shards", "stages"])
def test_only_what_every_rank_wants_whole_is_shared(four: Ranks, tmp_path: Path, kind: str) -> None:
    four.run(save, tmp_path, kind)
    forget(tmp_path)
    found = four.run(load, tmp_path, kind)
    assert {shared for opens, _ in found for shared in opens} == {kind == "copies"}
    if kind == "copies":  # each by itself: four times as much
        assert sum(read for _, read in found) < 2 * TENSORS * 4 * MIB


def test_two_ranks_read_by_themselves(two: Ranks, tmp_path: Path) -> None:
    two.run(save, tmp_path, "copies")
    assert {shared for opens, _ in two.run(load, tmp_path, "copies") for shared in opens} == {False}


async def test_a_storage_that_must_read_directly_does(tmp_path: Path) -> None:
    executor = Executor("direct", 2)
    (tmp_path / "d").write_bytes(bytes(1 << 16))
    try:
        for direct_io, shared in (("auto", True), ("auto", False), ("on", True)):
            storage = LocalStorage(executor, direct_io, read_probe=lambda *_: None)  # type: ignore[arg-type]
            file = await storage.open_data_file(tmp_path / "d", readers=1, shared=shared)
            assert file.direct is (not shared or direct_io == "on")
            await file.close()
    finally:
        executor.close(SECS)
