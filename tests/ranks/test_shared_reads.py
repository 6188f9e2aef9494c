"""What several ranks of a host read is read from its disk once; what each reads for itself is not."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from gated_storage import GatedStorage
from rank_processes import Ranks, engine_on
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from aio_ckpt import CheckpointEngine, EngineConfig
from aio_ckpt.dcp import Reader
from aio_ckpt.errors import TemplateMismatchError
from aio_ckpt.read.data_files import Files
from aio_ckpt.read.plan import covering_bytes
from aio_ckpt.runtime.portal import Executor
from aio_ckpt.state.tensor_memory import memory_of
from aio_ckpt.storage.local import LocalStorage, ReadFile

SECS = 60.0
SIDE = 1 << 10
TENSORS = 10
"""Of 4 MiB: more than is read ahead."""
STATE_BYTES = TENSORS * 4 * SIDE * SIDE


class WatchedOpens(GatedStorage):
    """Which data files were opened to be shared."""

    def __init__(self, executor: Executor) -> None:
        super().__init__(executor)
        self.shared: list[bool] = []

    async def open_data_file(self, path: Path, *, readers: int, shared: bool = False) -> ReadFile:
        self.shared.append(shared)
        return await super().open_data_file(path, readers=readers, shared=shared)


def state_of(kind: str, rank: int, count: int, *, fill: bool = True) -> dict[str, Any]:
    plain = {f"w{i}": torch.full((SIDE, SIDE), float(i) if fill else -1.0) for i in range(TENSORS)}
    if kind in ("rows", "columns"):
        mesh = init_device_mesh("cpu", (count,))
        cut = Shard(("rows", "columns").index(kind))
        return {name: distribute_tensor(tensor, mesh, [cut]) for name, tensor in plain.items()}
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


def load(
    rank: int, count: int, root: Path, kind: str, over: type[WatchedOpens] = WatchedOpens
) -> tuple[list[bool], int]:
    """Whether files were opened to be shared, and the bytes that this rank had the disk read."""
    executor = Executor("opens", 4)
    storage = over(executor)
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
        assert torch.equal(memory_of(found), memory_of(value)), name
    return storage.shared, read


def _disk_bytes() -> int:
    rows = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(rows["read_bytes"])


SAVED_AND_LOADED = [("copies", "copies", True), ("rows", "columns", True), ("columns", "rows", False)]
SAVED_AND_LOADED += [("rows", "rows", False), ("columns", "columns", False), ("stages", "stages", False)]


@pytest.mark.parametrize(("saved", "loaded", "is_shared"), SAVED_AND_LOADED)
def test_what_several_ranks_read_is_shared(
    four: Ranks, tmp_path: Path, saved: str, loaded: str, is_shared: bool
) -> None:
    four.run(save, tmp_path, saved)
    forget(tmp_path)
    found = four.run(load, tmp_path, loaded)
    assert {shared for opens, _ in found for shared in opens} == {is_shared}
    if is_shared:  # each by itself: four times as much; each its own file by itself: twice
        assert sum(read for _, read in found) < 1.5 * STATE_BYTES


async def test_what_is_open_is_opened_anew_to_be_shared(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(bytes(9000))
    executor = Executor("opens", 4)
    storage = WatchedOpens(executor)
    try:
        async with Files(storage, tmp_path, readers=1) as opened:
            await opened.measure(["data"], {})
            await opened.share()
            await opened.measure(["data"], {})
            assert storage.shared == [False, True]
    finally:
        executor.close(SECS)


@pytest.mark.parametrize(("kind", "is_shared"), [("copies", True), ("rows", False)])
def test_two_ranks_share_what_both_read(two: Ranks, tmp_path: Path, kind: str, is_shared: bool) -> None:
    two.run(save, tmp_path, kind)
    assert {shared for opens, _ in two.run(load, tmp_path, kind) for shared in opens} == {is_shared}


def load_a_flat_shard(rank: int, count: int, root: Path) -> str:
    mesh = init_device_mesh("cpu", (count,))
    flat = torch.zeros(SIDE * SIDE // count)
    odd = DTensor.from_local(flat, mesh, [Shard(0)], run_check=False, shape=torch.Size((SIDE, SIDE)), stride=(SIDE, 1))
    with engine_on(root, SECS) as engine, pytest.raises(TemplateMismatchError) as failure:
        engine.load({"w0": odd})
    return str(failure.value)


def test_a_shard_of_another_number_of_dimensions_is_a_mismatch(two: Ranks, tmp_path: Path) -> None:
    two.run(save, tmp_path, "rows")
    assert all("'w0' holds a shard of shape" in told for told in two.run(load_a_flat_shard, tmp_path))


def load_by_dcp(rank: int, count: int, root: Path, kind: str) -> list[bool]:
    """Whether files were opened to be shared, behind those that are opened to be measured."""
    executor = Executor("opens", 4)
    storage = WatchedOpens(executor)
    template, wanted = state_of(kind, rank, count, fill=False), state_of(kind, rank, count)
    dcp.load(template, storage_reader=Reader(root / "step_000000001", storage=storage))
    executor.close(SECS)
    assert all(torch.equal(memory_of(template[name]), memory_of(value)) for name, value in wanted.items())
    return storage.shared[len(storage.shared) // 2 :]


@pytest.mark.parametrize(("kind", "is_shared"), [("columns", True), ("copies", True), ("rows", False)])
def test_so_does_the_reader_for_dcp(two: Ranks, tmp_path: Path, kind: str, is_shared: bool) -> None:
    two.run(save, tmp_path, "rows")
    for opens in two.run(load_by_dcp, tmp_path, kind):
        assert set(opens) == {is_shared}


@pytest.mark.parametrize(
    ("chunk", "box", "nbytes"),
    [
        ((), (), 4),
        ((8, 1024), (2, 1024), 2 * 4096),
        ((8, 1024), (8, 256), 7 * 4096 + 1024),  # gaps of 3 KiB
        ((8, 256), (8, 256), 8 * 1024),  # the same layout
        ((8, 256), (8, 1024), 4 * 8 * 1024),  # from several chunks
        ((2, 1024), (8, 256), 4 * (4096 + 1024)),
        ((8, 256), (2, 1024), 4 * 2 * 1024),
        ((4, 1 << 20), (4, 1 << 18), 4 << 20),  # gaps of 3 MiB
        ((3, 4, 1024), (3, 1, 1024), 2 * 4 * 4096 + 4096),
        ((8, 1024), (0, 1024), 0),
        ((8, 0), (8, 1024), 0),
    ],
)
def test_gaps_below_a_block_are_read_through(chunk: tuple[int, ...], box: tuple[int, ...], nbytes: int) -> None:
    assert covering_bytes(chunk, box, 4) == nbytes


class BadTransfer(WatchedOpens):
    """What is read through the page cache is wrong, as often as it is read."""

    async def open_data_file(self, path: Path, *, readers: int, shared: bool = False) -> ReadFile:
        file = await super().open_data_file(path, readers=readers, shared=shared)
        return Garbling(file) if shared else file


class Garbling:
    def __init__(self, inner: ReadFile) -> None:
        self._inner = inner
        self.path, self.nbytes, self.direct = inner.path, inner.nbytes, inner.direct

    async def read_into(self, offset: int, *views: memoryview) -> int:
        got = await self._inner.read_into(offset, *views)
        for view in views:
            view[:] = bytes(view.nbytes)
        return got

    async def close(self) -> None:
        await self._inner.close()


def load_what_is_cached_wrong(rank: int, count: int, root: Path) -> list[bool]:
    return load(rank, count, root, "copies", BadTransfer)[0]


def test_what_the_page_cache_has_wrong_is_no_damage_of_the_disk(two: Ranks, tmp_path: Path) -> None:
    two.run(save, tmp_path, "copies")
    for opens in two.run(load_what_is_cached_wrong, tmp_path):
        assert set(opens) == {True, False}
    assert [path.name for path in tmp_path.glob("*corrupt*")] == []


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
