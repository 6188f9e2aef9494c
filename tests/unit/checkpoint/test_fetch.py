"""A fetch into host memory: each block is proven in a buffer before a byte of its tensor changes."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
import torch
from builders import flip
from checkpoint_maker import save_state
from saved_files import data_file
from slow import slow

from aio_ckpt.checkpoint import read_plan as readplan
from aio_ckpt.checkpoint.open import open_checkpoint
from aio_ckpt.checkpoint.read_context import ReadContext
from aio_ckpt.config import EngineConfig
from aio_ckpt.errors import CorruptCheckpointError, MismatchError
from aio_ckpt.format.constants import BLOCK_BYTES, PAGE_BYTES
from aio_ckpt.match.options import LoadOptions
from aio_ckpt.restore.load import match_checkpoint
from aio_ckpt.runtime.portal import Executor
from aio_ckpt.storage.data_file import ReadFile
from aio_ckpt.storage.direct_io import PageCache
from aio_ckpt.storage.local import Storage

NBYTES = 9 * BLOCK_BYTES + 12345
READERS = 4
SECS = 30.0


@pytest.fixture(scope="module")
def executor():
    made = Executor("test", 8)
    yield made
    made.close(10)


@pytest.fixture
def storage(executor):
    return Storage(executor, "auto")


@pytest.fixture(autouse=True)
def short_reads(monkeypatch):
    """Two blocks a read, so that a small tensor takes several."""
    monkeypatch.setattr(readplan, "_REQUEST_BYTES_MIN", 2 * BLOCK_BYTES)
    monkeypatch.setattr(readplan, "REQUEST_BYTES_MAX", 2 * BLOCK_BYTES)


def random_bytes(count: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8))


def placed(count: int, lead: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory full of sevens, and ``count`` bytes of it that begin ``lead`` bytes behind a page."""
    memory = torch.full((count + 4 * PAGE_BYTES,), 7, dtype=torch.uint8)
    start = -memory.data_ptr() % PAGE_BYTES + PAGE_BYTES + lead
    return memory, memory[start : start + count]


def context(storage, *, verify=True):
    config = EngineConfig(workers=READERS, verify="load" if verify else "never")
    return ReadContext(config=config, storage=storage, executor=storage._executor)


async def load(storage, path, state, *, verify=True):
    async with match_checkpoint(
        context(storage, verify=verify), path, state, step=None, options=LoadOptions()
    ) as matched:
        outcome = await matched.fetch()
    await outcome.apply()


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("lead", [0, 1, slow(64), PAGE_BYTES - 1])
@pytest.mark.parametrize("count", [slow(2 * BLOCK_BYTES), slow(8 * BLOCK_BYTES), 8 * BLOCK_BYTES + 1, NBYTES])
async def test_a_target_at_any_address_is_filled_and_nothing_beside_it(storage, tmp_path, count, lead, verify):
    stored = random_bytes(count)
    path = save_state(tmp_path / "c", {"t": stored, "small": torch.arange(9)})
    memory, target = placed(count, lead)
    first = target.data_ptr() - memory.data_ptr()
    await load(storage, path, {"t": target, "small": torch.zeros(9, dtype=torch.int64)}, verify=verify)
    assert torch.equal(target, stored)
    assert (memory[:first] == 7).all()
    assert (memory[first + count :] == 7).all()


# -- nothing is touched before it is proven -----------------------------------------------------------


def mixed_state() -> dict[str, torch.Tensor]:
    """Tensors of many blocks, of one block, of a few bytes, and one that a template wants in another layout."""
    return {
        "large": random_bytes(NBYTES, 1),
        "one block": random_bytes(BLOCK_BYTES, 2),
        "few bytes": random_bytes(100, 3),
        "by columns": random_bytes(3 * BLOCK_BYTES, 4).view(3 * 1024, 1024),
    }


def sevens() -> dict[str, torch.Tensor]:
    """A template of :func:`mixed_state`, the large one off a page."""
    return {
        "large": placed(NBYTES, 64)[1],
        "one block": torch.full((BLOCK_BYTES,), 7, dtype=torch.uint8),
        "few bytes": torch.full((100,), 7, dtype=torch.uint8),
        "by columns": torch.full((1024, 3 * 1024), 7, dtype=torch.uint8).t(),
    }


BLOCKS = [("large", 0), ("large", 4), ("large", 8), ("large", 9), ("one block", 0), ("few bytes", 0)]
"""Blocks of :func:`mixed_state`, by name and number; the last of ``large`` is short."""


@pytest.mark.parametrize(("name", "block"), BLOCKS)
async def test_a_flipped_bit_leaves_the_bytes_of_its_block_untouched(storage, tmp_path, name, block):
    path = save_state(tmp_path / "c", mixed_state())
    checkpoint = await open_checkpoint(storage, path, executor=storage._executor)
    (entry,) = (entry for entry in checkpoint.ranks[0].tensors if entry.fqns == (name,))
    flip(data_file(path), entry.raw_offset + block * BLOCK_BYTES + 17)
    state = sevens()
    with pytest.raises(MismatchError, match=repr(name)) as caught:
        await asyncio.wait_for(load(storage, path, state), SECS)
    assert caught.value.target_modified
    assert (state[name][block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES] == 7).all()


async def test_a_flipped_bit_leaves_a_tensor_that_is_laid_out_anew_untouched(storage, tmp_path):
    path = save_state(tmp_path / "c", mixed_state())
    checkpoint = await open_checkpoint(storage, path, executor=storage._executor)
    (entry,) = (entry for entry in checkpoint.ranks[0].tensors if entry.fqns == ("by columns",))
    flip(data_file(path), entry.raw_offset + BLOCK_BYTES + 17)
    state = sevens()
    with pytest.raises(MismatchError, match="'by columns'"):
        await asyncio.wait_for(load(storage, path, state), SECS)
    assert (state["by columns"] == 7).all()


async def test_every_block_is_intact_or_untouched_after_damage_to_all_tensors(storage, tmp_path):
    """No block of the template ever holds a byte that was not proven, whichever error ended the load."""
    stored = mixed_state()
    path = save_state(tmp_path / "c", stored)
    checkpoint = await open_checkpoint(storage, path, executor=storage._executor)
    for entry in checkpoint.ranks[0].tensors:
        flip(data_file(path), entry.raw_offset + entry.raw_bytes // 2)
    state = sevens()
    with pytest.raises(MismatchError):
        await asyncio.wait_for(load(storage, path, state), SECS)
    for name in ("large", "one block", "few bytes"):
        for want, have in zip(stored[name].split(BLOCK_BYTES), state[name].split(BLOCK_BYTES), strict=True):
            assert torch.equal(have, want) or (have == 7).all(), name


@pytest.mark.parametrize("block", [0, 3, 8, 9])
async def test_damage_is_found_wherever_it_is(storage, tmp_path, block):
    path = save_state(tmp_path / "c", {"t": random_bytes(NBYTES)})
    checkpoint = await open_checkpoint(storage, path, executor=storage._executor)
    at = checkpoint.ranks[0].tensors[0].raw_offset + block * BLOCK_BYTES + 17
    flip(data_file(path), at)
    with pytest.raises(CorruptCheckpointError, match="'t'") as caught:
        await asyncio.wait_for(load(storage, path, {"t": placed(NBYTES, 64)[1]}), SECS)
    assert caught.value.target_modified


# -- targets that share memory --------------------------------------------------------------------------


async def test_tied_names_of_a_template_are_filled(storage, tmp_path):
    stored = random_bytes(NBYTES)
    path = save_state(tmp_path / "c", {"t": stored, "tied": stored.clone()})
    _, target = placed(NBYTES, 64)
    await load(storage, path, {"t": target, "tied": target})
    assert torch.equal(target, stored)


@pytest.fixture
def twice():
    """Two arrays off a page over the same memory, which is mapped twice."""
    one = SharedMemory(create=True, size=NBYTES + PAGE_BYTES)
    other = SharedMemory(name=one.name)
    yield [np.ndarray((NBYTES,), np.uint8, memory.buf, 64) for memory in (one, other)]
    for memory in (one, other):
        memory.close()
    one.unlink()


async def test_names_whose_memory_is_mapped_twice_are_filled(storage, tmp_path, twice):
    stored = random_bytes(NBYTES)
    path = save_state(tmp_path / "c", {"t": stored, "tied": stored.clone()})
    for _ in range(5):
        twice[0][:] = 0
        await load(storage, path, dict(zip(("t", "tied"), twice, strict=True)), verify=False)
        assert np.array_equal(twice[0], stored.numpy())
    twice.clear()


async def test_pieces_that_follow_each_other_in_memory_but_not_in_the_file_are_copied_apart(storage, tmp_path):
    stored = {name: random_bytes(200_000, seed) for seed, name in enumerate("abc")}
    path = save_state(tmp_path / "c", stored)
    flat = torch.zeros(600_000, dtype=torch.uint8)
    await load(storage, path, dict(zip("abc", flat.split(200_000), strict=True)))
    assert torch.equal(flat, torch.cat(list(stored.values())))


# -- reads that end late, short or not at all -----------------------------------------------------------


Inner: TypeAlias = Callable[..., Awaitable[int]]


class OddReads(Storage):
    """Each read of a data file goes through ``read_into``."""

    def __init__(self, executor: Executor) -> None:
        super().__init__(executor, "auto")

    async def open_data_file(self, path: Path, *, page_cache: PageCache = "pass") -> ReadFile:
        file = await super().open_data_file(path, page_cache=page_cache)
        file.read_into = functools.partial(self.read_into, file.read_into)  # type: ignore[method-assign]
        return file

    async def read_into(self, inner: Inner, offset: int, *views: memoryview) -> int:
        raise NotImplementedError


class Cut(OddReads):
    """The last read ends a page too soon, though the file is as long as it should be."""

    async def read_into(self, inner: Inner, offset: int, *views: memoryview) -> int:
        return await inner(offset, *views) - PAGE_BYTES * (views[0].nbytes < 2 * BLOCK_BYTES)


@pytest.mark.parametrize("lead", [0, 64])
async def test_a_file_that_ends_inside_a_tensor_is_told(executor, tmp_path, lead):
    nbytes = 8 * BLOCK_BYTES + 100
    path = save_state(tmp_path / "c", {"t": random_bytes(nbytes)})
    with pytest.raises(CorruptCheckpointError, match=r"tensor 't': the file ends"):
        await load(Cut(executor), path, {"t": placed(nbytes, lead)[1]}, verify=False)


class LateFirst(OddReads):
    """The first large read ends once ``others`` large ones have; or fails."""

    def __init__(self, executor: Executor, others: int, error: OSError | None = None) -> None:
        super().__init__(executor)
        self.others, self.error = others, error
        self.ended = 0
        self.is_time = asyncio.Event()
        self.has_begun = False

    async def read_into(self, inner: Inner, offset: int, *views: memoryview) -> int:
        if views[0].nbytes < 2 * BLOCK_BYTES:
            return await inner(offset, *views)
        is_first, self.has_begun = not self.has_begun, True
        if is_first:
            await self.is_time.wait()
            if self.error is not None:
                raise self.error
        got = await inner(offset, *views)
        self.ended += 1
        if self.ended >= self.others:
            self.is_time.set()
        return got


async def test_a_read_that_ends_behind_later_ones_fills_its_part(executor, tmp_path):
    stored = random_bytes(NBYTES)
    path = save_state(tmp_path / "c", {"t": stored})
    _, target = placed(NBYTES, 64)
    await asyncio.wait_for(load(LateFirst(executor, READERS - 1), path, {"t": target}), SECS)
    assert torch.equal(target, stored)


async def test_a_read_that_fails_fails_the_load(executor, tmp_path):
    path = save_state(tmp_path / "c", {"t": random_bytes(NBYTES)})
    storage = LateFirst(executor, READERS - 1, OSError(5, "Input/output error"))
    with pytest.raises(OSError, match="Input/output error"):
        await asyncio.wait_for(load(storage, path, {"t": placed(NBYTES, 64)[1]}), SECS)


async def test_a_load_that_is_cancelled_between_reads_ends(executor, tmp_path):
    path = save_state(tmp_path / "c", {"t": random_bytes(NBYTES)})
    storage = LateFirst(executor, 1 << 30)
    _, target = placed(NBYTES, 64)
    task = asyncio.create_task(load(storage, path, {"t": target}))
    async with asyncio.timeout(SECS):
        while storage.ended < READERS - 1:
            await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0)
    storage.is_time.set()  # a read that has begun is waited for
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, SECS)
    before = target.clone()
    await asyncio.sleep(0)
    assert torch.equal(target, before)
