"""Large tensors are read into their own memory, whatever its address: shifted to a page, proven, moved into place."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from checkpoint_maker import save_state
from test_read import flip

from aio_ckpt import SyncCheckpointEngine, readplan
from aio_ckpt.bounce import address_of
from aio_ckpt.errors import CorruptCheckpointError
from aio_ckpt.files import Files
from aio_ckpt.items import BLOCK_BYTES, PAGE_BYTES
from aio_ckpt.match import match_template
from aio_ckpt.portal import Executor
from aio_ckpt.read import load_checkpoint, open_checkpoint
from aio_ckpt.readplan import ReadPlan
from aio_ckpt.storage import LocalStorage, ReadFile

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
    return LocalStorage(executor, "auto")


@pytest.fixture(autouse=True)
def short_reads(monkeypatch):
    """Two blocks a read, so that a small tensor takes several."""
    monkeypatch.setattr(readplan, "_SHIFTED_BYTES_MIN", 2 * BLOCK_BYTES)
    monkeypatch.setattr(readplan, "_IN_PLACE_BYTES_MIN", 2 * BLOCK_BYTES)
    monkeypatch.setattr(readplan, "_IN_PLACE_BYTES_MAX", 2 * BLOCK_BYTES)


def random_bytes(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def placed(count: int, lead: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory full of sevens, and ``count`` bytes of it that begin ``lead`` bytes behind a page."""
    memory = torch.full((count + 4 * PAGE_BYTES,), 7, dtype=torch.uint8)
    start = -memory.data_ptr() % PAGE_BYTES + PAGE_BYTES + lead
    return memory, memory[start : start + count]


async def load(storage, path, state, *, verify=True):
    outcome = await load_checkpoint(
        storage,
        path,
        state,
        step=None,
        executor=storage._executor,
        rank=0,
        world_size=1,
        readers=READERS,
        verify=verify,
        strict=False,
        allow_missing=False,
        trusted=False,
    )
    outcome.put_back()


async def segments_of(storage, path, target, *, is_apart):
    checkpoint = await open_checkpoint(storage, path, executor=storage._executor)
    items = checkpoint.catalog.chunks["t"]
    async with Files(storage, path, readers=READERS) as files:
        await files.measure({item.file for item in items}, checkpoint.catalog.files)
        plan = ReadPlan(is_direct=files.is_direct, apart={target.data_ptr()} if is_apart else set())
        plan.add_tensor(items, (0,), target)
        return plan.segments(READERS), files.is_direct[items[0].file]


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("lead", [0, 1, 64, PAGE_BYTES - 1])
@pytest.mark.parametrize("count", [2 * BLOCK_BYTES, 8 * BLOCK_BYTES, 8 * BLOCK_BYTES + 1, NBYTES])
async def test_a_target_at_any_address_is_filled_and_nothing_beside_it(storage, tmp_path, count, lead, verify):
    stored = random_bytes(count)
    path = save_state(tmp_path / "c", {"t": stored, "small": torch.arange(9)})
    memory, target = placed(count, lead)
    first = target.data_ptr() - memory.data_ptr()
    await load(storage, path, {"t": target, "small": torch.zeros(9, dtype=torch.int64)}, verify=verify)
    assert torch.equal(target, stored)
    assert (memory[:first] == 7).all()
    assert (memory[first + count :] == 7).all()


@pytest.mark.parametrize("lead", [0, 1, 64])
async def test_all_but_the_end_is_read_without_a_buffer_and_the_end_by_the_last_read(storage, tmp_path, lead):
    """A read of its own for the end would stand behind large ones and keep one of them from beginning."""
    path = save_state(tmp_path / "c", {"t": random_bytes(NBYTES)})
    _, target = placed(NBYTES, lead)
    segments, is_direct = await segments_of(storage, path, target, is_apart=True)
    if not is_direct:
        pytest.skip("the file system of the temporary folder takes no O_DIRECT")
    assert [segment.after for segment in segments] == ([None, *segments[:-1]] if lead else [None] * len(segments))
    *others, last = segments
    assert [segment.rest for segment in others] == [None] * len(others)
    assert last.rest.target is None
    assert last.rest.start == last.stop
    assert sum(segment.target.nbytes for segment in segments) >= NBYTES - 2 * BLOCK_BYTES
    begin, end = target.data_ptr(), target.data_ptr() + NBYTES
    for segment in segments:
        address = address_of(segment.target)
        assert not address % PAGE_BYTES
        assert begin <= address <= address + segment.target.nbytes <= end
        assert segment.stop - segment.start == segment.target.nbytes


async def test_a_target_that_others_share_is_read_through_a_buffer(storage, tmp_path):
    """Two reads of one memory would move each other's bytes."""
    stored = random_bytes(NBYTES)
    path = save_state(tmp_path / "c", {"t": stored, "tied": stored.clone(), "none": stored[:0]})
    _, target = placed(NBYTES, 64)
    segments, is_direct = await segments_of(storage, path, target, is_apart=False)
    assert not is_direct or all(segment.target is None and segment.after is None for segment in segments)
    checkpoint = await open_checkpoint(storage, path, executor=storage._executor)
    options = {"rank": 0, "world_size": 1, "strict": False, "allow_missing": False}
    copy = target.clone()
    found = match_template(checkpoint, {"t": target, "tied": copy}, **options)
    assert found.apart == {target.data_ptr(), copy.data_ptr()}
    assert not match_template(checkpoint, {"t": target, "tied": target, "none": target[:0]}, **options).apart
    await load(storage, path, {"t": target, "tied": target})
    assert torch.equal(target, stored)


Inner: TypeAlias = Callable[..., Awaitable[int]]


class OddReads(LocalStorage):
    """Each read of a data file goes through ``read_into``."""

    def __init__(self, executor: Executor) -> None:
        super().__init__(executor, "auto")

    async def open_data_file(self, path: Path, *, readers: int, shared: bool = False) -> ReadFile:
        file = await super().open_data_file(path, readers=readers, shared=shared)
        file.read_into = functools.partial(self.read_into, file.read_into)  # type: ignore[method-assign]
        return file

    async def read_into(self, inner: Inner, offset: int, *views: memoryview) -> int:
        raise NotImplementedError


class Gated(OddReads):
    """Of the reads of two blocks, the first and the third wait for a gate each."""

    def __init__(self, executor: Executor) -> None:
        super().__init__(executor)
        self.gates = {0: asyncio.Event(), 2: asyncio.Event()}
        self.begun = self.ended = 0
        self.both_ended = asyncio.Event()

    async def read_into(self, inner: Inner, offset: int, *views: memoryview) -> int:
        if views[0].nbytes != 2 * BLOCK_BYTES:
            return await inner(offset, *views)
        number, self.begun = self.begun, self.begun + 1
        if number in self.gates:
            await self.gates[number].wait()
        got = await inner(offset, *views)
        self.ended += 1
        if self.ended == 2:
            self.both_ended.set()
        return got


async def test_tied_names_of_a_template_are_filled_whichever_read_ends_first(executor, tmp_path):
    """Read in place, the second name's bytes would be replaced by the first's before they are moved."""
    stored = random_bytes(4 * BLOCK_BYTES + 12345)
    path = save_state(tmp_path / "c", {"t": stored, "tied": stored.clone()})
    storage = Gated(executor)
    _, target = placed(len(stored), 64)
    task = asyncio.create_task(load(storage, path, {"t": target, "tied": target}))
    both = asyncio.create_task(storage.both_ended.wait())
    await asyncio.wait({task, both}, timeout=SECS, return_when=asyncio.FIRST_COMPLETED)
    storage.gates[0].set()
    async with asyncio.timeout(SECS):
        while not task.done() and not torch.equal(target[-100:], stored[-100:]):
            await asyncio.sleep(0)
        storage.gates[2].set()
        await task
    both.cancel()
    assert torch.equal(target, stored)


async def test_memory_that_other_processes_may_have_is_read_to_through_a_buffer(storage, tmp_path):
    path = save_state(tmp_path / "c", {"t": random_bytes(NBYTES)})
    target = torch.empty(NBYTES + 1, dtype=torch.uint8).share_memory_()[1:]
    segments, is_direct = await segments_of(storage, path, target, is_apart=True)
    assert not is_direct or all(segment.target is None for segment in segments)


async def test_a_tensor_below_the_size_that_pays_is_read_through_a_buffer(storage, tmp_path, monkeypatch):
    path = save_state(tmp_path / "c", {"t": random_bytes(NBYTES)})
    _, target = placed(NBYTES, 64)
    for least, is_in_place in ((NBYTES, True), (NBYTES + 1, False)):
        monkeypatch.setattr(readplan, "_SHIFTED_BYTES_MIN", least)
        segments, is_direct = await segments_of(storage, path, target, is_apart=True)
        assert not is_direct or (segments[0].target is not None) is is_in_place


@pytest.mark.parametrize("block", [0, 3, 8, 9])
async def test_damage_is_found_wherever_it_is(storage, tmp_path, block):
    path = save_state(tmp_path / "c", {"t": random_bytes(NBYTES)})
    checkpoint = await open_checkpoint(storage, path, executor=storage._executor)
    at = checkpoint.ranks[0].tensors[0].raw_offset + block * BLOCK_BYTES + 17
    flip(path / "__0_0.distcp", at)
    with pytest.raises(CorruptCheckpointError, match="'t'") as caught:
        await asyncio.wait_for(load(storage, path, {"t": placed(NBYTES, 64)[1]}), SECS)
    assert caught.value.target_modified


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


async def test_a_read_that_ends_behind_later_ones_is_still_placed_before_them(executor, tmp_path):
    stored = random_bytes(NBYTES)
    path = save_state(tmp_path / "c", {"t": stored})
    _, target = placed(NBYTES, 64)
    await asyncio.wait_for(load(LateFirst(executor, READERS - 1), path, {"t": target}), SECS)
    assert torch.equal(target, stored)


async def test_who_waits_for_a_read_that_fails_does_not_hang(executor, tmp_path):
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


class Scribbled(OddReads):
    """Somebody else writes to the caller's tensors whenever they are read to."""

    def __init__(self, executor: Executor) -> None:
        super().__init__(executor)
        self.target = torch.empty(0)
        self.times = 0

    async def read_into(self, inner: Inner, offset: int, *views: memoryview) -> int:
        got = await inner(offset, *views)
        if 0 <= address_of(views[0]) - self.target.data_ptr() < self.target.nbytes:
            self.times += 1
            views[0][:100] = bytes(100)
        return got


@pytest.mark.parametrize("lead", [0, 64])
def test_what_others_write_to_a_target_is_no_damage_of_the_checkpoint(executor, tmp_path, lead):
    storage, stored = Scribbled(executor), random_bytes(NBYTES)
    with SyncCheckpointEngine(tmp_path, storage=storage) as engine:
        engine.save({"t": random_bytes(NBYTES, 1)}, step=1).result(SECS)
        engine.save({"t": stored}, step=2).result(SECS)
        storage.target = placed(NBYTES, lead)[1]
        report = engine.load({"t": storage.target})
        steps = engine.steps()
    assert storage.times
    assert (report.step, report.skipped, steps) == (2, (), [1, 2])
    assert torch.equal(storage.target, stored)
