"""Large tensors are read into their own memory, whatever its address: shifted to a page, proven, moved into place."""

from __future__ import annotations

import asyncio
import functools
import mmap
from collections.abc import Awaitable, Callable
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
import torch
from builders import flip
from checkpoint_maker import save_state
from hypothesis import given
from hypothesis import strategies as st

from aio_ckpt import SyncCheckpointEngine
from aio_ckpt.errors import CorruptCheckpointError
from aio_ckpt.format.constants import BLOCK_BYTES, PAGE_BYTES, align_up
from aio_ckpt.memory.read_buffers import address_of
from aio_ckpt.read import fetch, mappings
from aio_ckpt.read import in_place as inplace
from aio_ckpt.read import plan as readplan
from aio_ckpt.read.data_files import Files
from aio_ckpt.read.load import load_checkpoint, open_checkpoint
from aio_ckpt.read.mappings import are_private, shared_mappings
from aio_ckpt.read.match import match_template
from aio_ckpt.read.plan import ReadPlan
from aio_ckpt.read.requests import PieceRows, Segment
from aio_ckpt.runtime.portal import Executor
from aio_ckpt.storage.local import LocalStorage, ReadFile

NBYTES = 9 * BLOCK_BYTES + 12345
READERS = 4
SECS = 30.0
OPTIONS = {"rank": 0, "world_size": 1, "strict": False, "allow_missing": False, "trusted": False}
"""What a template is matched with."""


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
    monkeypatch.setattr(inplace, "_IN_PLACE_BYTES_MIN", 2 * BLOCK_BYTES)
    monkeypatch.setattr(inplace, "_IN_PLACE_BYTES_MAX", 2 * BLOCK_BYTES)


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
        readers=READERS,
        verify=verify,
        **OPTIONS,
    )
    outcome.put_back()


async def segments_of(storage, path, target, *, is_apart):
    checkpoint = await open_checkpoint(storage, path, executor=storage._executor)
    items = checkpoint.catalog.chunks["t"]
    async with Files(storage, path, readers=READERS) as files:
        await files.measure({item.file for item in items}, checkpoint.catalog.files)
        plan = ReadPlan(is_direct=files.is_direct, apart={target.data_ptr()} if is_apart else set())
        plan.add_tensor(items, (0,), target)
        if not files.is_direct[items[0].file]:
            pytest.skip("the file system of the temporary folder takes no O_DIRECT")
        return plan.segments(READERS)


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
    segments = await segments_of(storage, path, target, is_apart=True)
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
    segments = await segments_of(storage, path, target, is_apart=False)
    assert all(segment.target is None and segment.after is None for segment in segments)
    checkpoint = await open_checkpoint(storage, path, executor=storage._executor)
    copy = target.clone()
    found = match_template(checkpoint, {"t": target, "tied": copy}, **OPTIONS)
    assert found.apart == {target.data_ptr(), copy.data_ptr()}
    assert not match_template(checkpoint, {"t": target, "tied": target, "none": target[:0]}, **OPTIONS).apart
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


@pytest.fixture
def twice():
    """Two arrays off a page over the same memory, which is mapped twice."""
    one = SharedMemory(create=True, size=NBYTES + PAGE_BYTES)
    other = SharedMemory(name=one.name)
    yield [np.ndarray((NBYTES,), np.uint8, memory.buf, 64) for memory in (one, other)]
    for memory in (one, other):
        memory.close()
    one.unlink()


async def test_memory_that_may_be_mapped_twice_is_not_moved_in(storage, tmp_path, twice):
    """Here or in another process, whoever mapped it."""
    path = save_state(tmp_path / "c", {"t": random_bytes(NBYTES)})
    checkpoint = await open_checkpoint(storage, path, executor=storage._executor)
    mapped = np.memmap(tmp_path / "m", np.uint8, "w+", shape=(NBYTES + 64,))
    for shared in (*twice, torch.empty(NBYTES + 1, dtype=torch.uint8).share_memory_()[1:], np.asarray(mapped)[64:]):
        assert not match_template(checkpoint, {"t": shared}, **OPTIONS).apart
    assert match_template(checkpoint, {"t": np.zeros(NBYTES, np.uint8)}, **OPTIONS).apart
    twice.clear()


async def test_names_whose_memory_is_mapped_twice_are_filled(storage, tmp_path, twice):
    stored = random_bytes(NBYTES)
    path = save_state(tmp_path / "c", {"t": stored, "tied": stored.clone()})
    for _ in range(5):
        twice[0][:] = 0
        await load(storage, path, dict(zip(("t", "tied"), twice, strict=True)), verify=False)
        assert np.array_equal(twice[0], stored.numpy())
    twice.clear()


def test_memory_counts_as_shared_where_the_system_does_not_tell(monkeypatch):
    address = np.array([torch.zeros(4).data_ptr()], np.int64)
    assert are_private(address, np.array([16], np.int64), shared_mappings()).all()
    monkeypatch.setattr(mappings, "_MAPS", Path("/nowhere"))
    assert not are_private(address, np.array([16], np.int64), shared_mappings()).any()


@given(st.lists(st.integers(0, 40), max_size=8, unique=True).map(sorted), st.integers(0, 40), st.integers(1, 12))
def test_a_range_is_private_that_has_no_byte_of_a_shared_mapping(bounds, address, nbytes):
    shared = list(zip(bounds[::2], bounds[1::2], strict=False))
    rows = np.array(shared, np.int64).reshape(-1, 2)
    (found,) = are_private(np.array([address], np.int64), np.array([nbytes], np.int64), rows)
    assert found == (not any(low < address + nbytes and address < high for low, high in shared))


def test_a_file_that_is_read_ahead_is_placed_from_there(tmp_path):
    state = {f"p{number}": torch.full((20,), float(number)) for number in range(1500)}
    large = random_bytes(NBYTES)
    target = torch.frombuffer(mmap.mmap(-1, NBYTES), dtype=torch.uint8)
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.save({**state, "t": large}).result(SECS)
        engine.load({**{name: torch.zeros(20) for name in state}, "t": target})
    assert torch.equal(target, large)


class Cut(OddReads):
    """What a read left over ends a page too soon, though the file is as long as it should be."""

    async def read_into(self, inner: Inner, offset: int, *views: memoryview) -> int:
        return await inner(offset, *views) - PAGE_BYTES * (len(views) > 1)


@pytest.mark.parametrize("lead", [0, 64])
async def test_a_file_that_ends_inside_what_the_last_read_left_over_is_told(executor, tmp_path, lead):
    nbytes = 8 * BLOCK_BYTES + 100
    path = save_state(tmp_path / "c", {"t": random_bytes(nbytes)})
    with pytest.raises(CorruptCheckpointError, match=r"tensor 't': the file ends"):
        await load(Cut(executor), path, {"t": placed(nbytes, lead)[1]}, verify=False)


class Noted(OddReads):
    """Remembers how long the first view of each read was."""

    def __init__(self, executor: Executor) -> None:
        super().__init__(executor)
        self.lengths: list[int] = []

    async def read_into(self, inner: Inner, offset: int, *views: memoryview) -> int:
        self.lengths.append(views[0].nbytes)
        return await inner(offset, *views)


def test_tensors_that_read_makes_are_read_to_their_own_memory(executor, tmp_path):
    storage, stored = Noted(executor), random_bytes(NBYTES)
    with SyncCheckpointEngine(tmp_path, storage=storage) as engine:
        engine.save({"t": stored}).result(SECS)
        assert torch.equal(engine.read()["t"], stored)
    assert storage.lengths.count(2 * BLOCK_BYTES) >= NBYTES // (2 * BLOCK_BYTES) - 1


async def test_pieces_that_follow_each_other_in_memory_but_not_in_the_file_are_copied_apart(storage, tmp_path):
    stored = {name: random_bytes(200_000, seed) for seed, name in enumerate("abc")}
    path = save_state(tmp_path / "c", stored)
    flat = torch.zeros(600_000, dtype=torch.uint8)
    await load(storage, path, dict(zip("abc", flat.split(200_000), strict=True)))
    assert torch.equal(flat, torch.cat(list(stored.values())))


async def test_a_tensor_below_the_size_that_pays_is_read_through_a_buffer(storage, tmp_path, monkeypatch):
    path = save_state(tmp_path / "c", {"t": random_bytes(NBYTES)})
    _, target = placed(NBYTES, 64)
    for least, is_in_place in ((NBYTES, True), (NBYTES + 1, False)):
        monkeypatch.setattr(readplan, "_SHIFTED_BYTES_MIN", least)
        segments = await segments_of(storage, path, target, is_apart=True)
        assert (segments[0].target is not None) is is_in_place


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


class Timed(OddReads):
    """By a clock that moves with what is read: so many seconds a block in place, so many through a buffer."""

    def __init__(self, executor: Executor, target: torch.Tensor, in_place_secs: float, bounced_secs: float) -> None:
        super().__init__(executor)
        self.target = target
        self.secs = {True: in_place_secs, False: bounced_secs}
        self.now = 0.0
        self.ways: list[bool] = []

    def perf_counter(self) -> float:
        return self.now

    async def read_into(self, inner: Inner, offset: int, *views: memoryview) -> int:
        got = await inner(offset, *views)
        is_in_place = 0 <= address_of(views[0]) - self.target.data_ptr() < self.target.nbytes
        self.now += self.secs[is_in_place] * (got // BLOCK_BYTES)
        self.ways.append(is_in_place)
        return got


@pytest.fixture
def trials(monkeypatch):
    """A trial of two reads of a block each way, whatever there is to gain."""
    monkeypatch.setattr(inplace, "_TRIED_FROM_BYTES", 1)
    monkeypatch.setattr(inplace, "_TRIAL_BYTES", BLOCK_BYTES)


@pytest.mark.parametrize("lead", [0, 64])
@pytest.mark.parametrize(("in_place_secs", "is_in_place"), [(1.0, True), (1.4, True), (1.6, False), (9.0, False)])
async def test_a_trial_tells_whether_the_rest_is_read_in_place(
    executor, tmp_path, trials, monkeypatch, in_place_secs, is_in_place, lead
):
    count = 20 * BLOCK_BYTES + 12345
    stored = random_bytes(count)
    path = save_state(tmp_path / "c", {"t": stored})
    memory, target = placed(count, lead)
    first = target.data_ptr() - memory.data_ptr()
    storage = Timed(executor, target, in_place_secs, 1.0)
    monkeypatch.setattr(fetch, "time", storage)
    await load(storage, path, {"t": target})
    assert torch.equal(target, stored)
    assert (memory[:first] == 7).all()
    assert (memory[first + count :] == 7).all()
    trial, rest = storage.ways[: 2 * READERS], storage.ways[2 * READERS :]
    assert trial == [False] * READERS + [True] * READERS
    assert len(rest) > READERS
    assert set(rest) == {is_in_place}


async def test_a_trial_of_unequal_halves_counts_by_the_byte(executor, tmp_path, trials, monkeypatch):
    monkeypatch.setattr(inplace, "_TRIAL_BYTES", 2 * BLOCK_BYTES)
    stored = random_bytes(15 * BLOCK_BYTES)  # seven of the trial, three against four, and one behind
    path = save_state(tmp_path / "c", {"t": stored})
    _, target = placed(len(stored), 0)
    storage = Timed(executor, target, 1.4, 1.0)
    monkeypatch.setattr(fetch, "time", storage)
    await load(storage, path, {"t": target})
    assert storage.ways == [False] * 3 + [True] * 4 + [True]
    assert torch.equal(target, stored)


@pytest.mark.parametrize("blocks", [1, 2, 3, 9])
@pytest.mark.parametrize("lead", [0, 64])
async def test_what_is_too_little_for_a_trial_each_way_is_read_all_the_same(executor, tmp_path, trials, blocks, lead):
    stored = random_bytes(blocks * BLOCK_BYTES + 100)
    path = save_state(tmp_path / "c", {"t": stored})
    _, target = placed(len(stored), lead)
    await load(Timed(executor, target, 1.0, 1.0), path, {"t": target})
    assert torch.equal(target, stored)


@given(
    blocks=st.integers(1, 70),
    block=st.sampled_from([PAGE_BYTES, 100_001, BLOCK_BYTES, 5 * BLOCK_BYTES, 16 * BLOCK_BYTES, 40 * BLOCK_BYTES]),
    start=st.integers(0, 3 * PAGE_BYTES),
    rest=st.integers(0, 2),
)
def test_what_is_not_read_in_place_fits_its_buffer_part_by_part(blocks, block, start, rest):
    """Whatever the size of a block: a manifest tells it."""

    def pieces(first, stop):
        rows = PieceRows()
        for number in range(first, stop):
            rows.add(start + number * block, block, 0, 1 + number * block, "t")
        return rows.ascending()

    end = start + blocks * block
    behind = Segment(
        file="f",
        start=end // PAGE_BYTES * PAGE_BYTES,
        stop=align_up(end + rest * block, PAGE_BYTES),
        pieces=pieces(blocks, blocks + rest),
    )
    segment = Segment(
        file="f",
        start=start,
        stop=end,
        pieces=pieces(0, blocks),
        target=memoryview(b""),
        rest=behind if rest else None,
    )
    parts = segment.bounced()
    assert all(part.stop - part.start <= segment.bounced_bytes for part in parts)
    assert all(part.target is None for part in parts)
    assert [at for part in parts for at in part.pieces.starts.tolist()] == [
        start + number * block for number in range(blocks + rest)
    ]
    assert segment.bounced_bytes <= max(16 * BLOCK_BYTES, block + 2 * PAGE_BYTES, behind.stop - behind.start)


async def test_a_trial_is_a_small_part_of_what_there_is_to_gain(storage, tmp_path):
    path = save_state(tmp_path / "c", {"t": random_bytes(NBYTES)})
    segments = await segments_of(storage, path, placed(NBYTES, 0)[1], is_apart=True)
    assert not any(segment.is_trial for segment in segments)
    assert 2 * 4 * inplace._TRIAL_BYTES <= inplace._TRIED_FROM_BYTES / 4


async def test_small_tensors_before_do_not_take_the_place_of_a_trial(storage, tmp_path, trials, monkeypatch):
    monkeypatch.setattr(inplace, "_TRIAL_BYTES", 2 * BLOCK_BYTES)
    state = {f"a{i}": random_bytes(BLOCK_BYTES, i) for i in range(9)} | {"t": random_bytes(NBYTES)}
    path = save_state(tmp_path / "c", state)
    checkpoint = await open_checkpoint(storage, path, executor=storage._executor)
    plan = ReadPlan(is_direct={"__0_0.distcp": False})
    for name, value in state.items():
        plan.add_tensor(checkpoint.catalog.chunks[name], (0,), torch.empty_like(value))
    assert sum(segment.is_trial for segment in plan.segments(READERS)) == NBYTES // (2 * BLOCK_BYTES)


async def test_a_trial_of_several_tensors_is_no_longer_than_of_one(storage, tmp_path, trials):
    state = {name: random_bytes(NBYTES) for name in "ab"}
    path = save_state(tmp_path / "c", state)
    checkpoint = await open_checkpoint(storage, path, executor=storage._executor)
    plan = ReadPlan(is_direct={"__0_0.distcp": False})
    for name, value in state.items():
        plan.add_tensor(checkpoint.catalog.chunks[name], (0,), torch.empty_like(value))
    assert sum(segment.is_trial for segment in plan.segments(READERS)) == 2 * READERS


async def test_damage_is_found_in_a_trial_and_behind_it(executor, tmp_path, trials, monkeypatch):
    count = 20 * BLOCK_BYTES
    path = save_state(tmp_path / "c", {"t": random_bytes(count)})
    checkpoint = await open_checkpoint(LocalStorage(executor, "auto"), path, executor=executor)
    for block in (0, 5, 12, 19):
        at = checkpoint.ranks[0].tensors[0].raw_offset + block * BLOCK_BYTES + 17
        flip(path / "__0_0.distcp", at)
        _, target = placed(count, 64)
        storage = Timed(executor, target, 9.0, 1.0)
        monkeypatch.setattr(fetch, "time", storage)
        with pytest.raises(CorruptCheckpointError, match="'t'"):
            await asyncio.wait_for(load(storage, path, {"t": target}), SECS)
        flip(path / "__0_0.distcp", at)
