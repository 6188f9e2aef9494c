"""Write: constants, sums and concurrent chunk writes, against real files and the standard library's CRC32."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import random
import struct
import sys
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from image_files import MIB, uniform
from property_examples import examples
from rings import TIMEOUT, image_of, plan_of, save_image
from watched_writes import WatchedStorage, Write

from aio_ckpt.errors import WriteError
from aio_ckpt.format import tensor_zip
from aio_ckpt.format.constants import BLOCK_BYTES, PAGE_BYTES, TensorSpec, align_up
from aio_ckpt.memory.arena import POISON
from aio_ckpt.memory.arena_lifetimes import LifetimeManager
from aio_ckpt.plan import chunks
from aio_ckpt.plan.chunks import Chunk
from aio_ckpt.plan.layout import ImageLayout, file_chunks, lay_out
from aio_ckpt.plan.save_plan import PlannedSave
from aio_ckpt.plan.tensor_item import Placement
from aio_ckpt.runtime.portal import Executor
from aio_ckpt.storage.data_file import DataFile
from aio_ckpt.storage.local import Storage
from aio_ckpt.write.result import WriteResult
from aio_ckpt.write.writer import ChunkPreparer

pytestmark = pytest.mark.usefixtures("chunks_of_4_mib")


@pytest.fixture
def executor() -> Iterator[Executor]:
    executor = Executor("test", 6)
    yield executor
    assert executor.close(TIMEOUT)


@pytest.fixture
def manager(executor: Executor) -> Iterator[LifetimeManager]:
    manager = LifetimeManager(budget_bytes=256 * MIB, executor=executor, debug=True)
    yield manager
    manager.close()


@pytest.fixture
def watched(executor: Executor) -> Iterator[WatchedStorage]:
    storage = WatchedStorage()
    storage.bind(executor)
    yield storage
    storage.open_all()
    storage.wait_idle()


def mixed_state(seed: int = 0) -> dict[str, torch.Tensor]:
    """Tensors of many sizes, 21 MiB in all: six chunks."""
    torch.manual_seed(seed)
    sizes = [7 * MIB, 1, 0, 3 * MIB + 4, MIB, 700_000, 5 * MIB, 12, MIB + 4, 3 * MIB]
    return {f"w{i}": torch.randn(nbytes // 4) for i, nbytes in enumerate(sizes)}


def assert_holds(path: Path, planned: PlannedSave, result: WriteResult, state: dict[str, torch.Tensor]) -> None:
    """The file is the image of ``state``, and every sum of the result is what zlib says."""
    data = path.read_bytes()
    assert (len(data), zlib.crc32(data)) == (result.image_bytes, result.file_crc32)
    sums = iter(struct.iter_unpack("<I", result.sums))
    for item in planned.plan.layout.items:
        (name,) = item.fqns
        raw = data[item.raw_offset : item.raw_offset + item.raw_bytes]
        assert raw == state[name].numpy().tobytes(), name
        for at in range(0, len(raw), BLOCK_BYTES):
            assert next(sums) == (zlib.crc32(raw[at : at + BLOCK_BYTES]),), (name, at)
        whole = data[item.item_offset : item.item_offset + item.envelope.item_bytes]
        assert torch.equal(torch.load(io.BytesIO(whole), weights_only=True), state[name]), name
    assert list(sums) == []
    assert result.items_patched == len(planned.plan.layout.items)
    assert result.chunks_written == frozenset(range(result.chunks))


# -- sums and constants ---------------------------------------------------------------------------


def small_layout(sizes: list[int], chunk_bytes: int) -> ImageLayout:
    """Items of bytes in chunks far smaller than the engine's."""
    placements = []
    for index, nbytes in enumerate(sizes):
        spec = TensorSpec(torch.uint8, (nbytes,), (1,))
        placements.append(Placement(index, (f"t{index}",), (0,), spec, tensor_zip.render(spec)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "chunk_bytes_for", lambda raw_bytes: chunk_bytes)
        return lay_out(placements, budget_bytes=sys.maxsize)


SIZES = st.one_of(
    st.integers(0, 300_000), st.sampled_from([0, 1, 64, 65_536, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1])
)


@examples(60)
@given(
    sizes=st.lists(SIZES, max_size=8),
    chunk_bytes=st.sampled_from([1 << 16, 1 << 17, 3 << 16, 1 << 20]),
    objects=st.integers(0, 200_000).map(lambda n: random.Random(n).randbytes(n)),
    seed=st.integers(0, 99),
)
def test_prepared_chunks_are_whole_items_with_true_sums_whatever_the_memory_held(
    sizes: list[int], chunk_bytes: int, objects: bytes, seed: int
) -> None:
    plan = small_layout(sizes, chunk_bytes)
    image_bytes = align_up(max(plan.tensor_bytes + len(objects), 1), PAGE_BYTES)
    image = bytearray([POISON]) * image_bytes
    raws = [random.Random(seed + index).randbytes(nbytes) for index, nbytes in enumerate(sizes)]
    for item, raw in zip(plan.items, raws, strict=True):
        image[item.raw_offset : item.trailer_offset] = raw
    preparer = ChunkPreparer(plan, objects, renders_constants=True)
    for chunk in file_chunks(plan, image_bytes):
        preparer.prepare(chunk, memoryview(image)[chunk.start : chunk.stop])
    assert preparer.file_crc32 == zlib.crc32(image)
    blocks = [raw[at : at + BLOCK_BYTES] for raw in raws for at in range(0, len(raw), BLOCK_BYTES)]
    assert preparer.sums == struct.pack(f"<{len(blocks)}I", *map(zlib.crc32, blocks))
    assert preparer.items_patched == len(sizes)
    end = 0
    for item, raw in zip(plan.items, raws, strict=True):
        assert not any(image[end : item.item_offset])
        end = item.item_offset + item.envelope.item_bytes
        with zipfile.ZipFile(io.BytesIO(image[item.item_offset : end])) as archive:
            assert archive.testzip() is None
            assert archive.read(archive.namelist()[-1]) == raw
    assert image[plan.tensor_bytes : plan.tensor_bytes + len(objects)] == objects
    assert not any(image[plan.tensor_bytes + len(objects) :])


# -- real files -----------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("slots", [1, 2, 3, None])
@pytest.mark.parametrize("workers", [1, 4])
async def test_a_ring_smaller_than_the_image_writes_the_same_file(
    tmp_path: Path, executor: Executor, manager: LifetimeManager, slots: int | None, workers: int
) -> None:
    state, objects = mixed_state(), random.Random(1).randbytes(5 * MIB)
    planned = plan_of(state)
    image = image_of(planned, manager, slots, objects)
    storage, path = Storage(executor), tmp_path / "data"
    result = await save_image(planned, image, storage, executor, path, objects=objects, workers=workers)
    assert len(image.chunks) == 7
    assert image.is_whole == (slots is None)
    assert_holds(path, planned, result, state)
    begin = planned.plan.layout.tensor_bytes
    assert path.read_bytes()[begin : begin + len(objects)] == objects
    assert manager.stats.leases == 0


async def test_a_second_save_into_the_same_memory_needs_no_constants_rendered(
    tmp_path: Path, executor: Executor, manager: LifetimeManager
) -> None:
    manager._debug = False  # poison would wipe them
    storage = Storage(executor)
    first = mixed_state()
    for number, state in enumerate([first, {name: value + 1 for name, value in first.items()}]):
        planned = plan_of(state)
        image = image_of(planned, manager, objects=b"x" * (3 - number))
        result = await save_image(
            planned,
            image,
            storage,
            executor,
            tmp_path / str(number),
            objects=b"x" * (3 - number),
            renders_constants=not number,
        )
        assert_holds(tmp_path / str(number), planned, result, state)
        end = planned.plan.layout.tensor_bytes + 3 - number
        assert not any((tmp_path / str(number)).read_bytes()[end:])


async def test_chunks_may_be_written_in_any_order(
    tmp_path: Path, executor: Executor, manager: LifetimeManager, watched: WatchedStorage
) -> None:
    """Of four in flight the last to begin ends first."""
    began, turns = threading.Semaphore(0), [threading.Event() for _ in range(4)]

    def on_write(write: Write) -> None:
        if write.number < 4:
            began.release()
            if write.number == 3:
                for _ in range(4):
                    assert began.acquire(timeout=TIMEOUT)
                turns[3].set()
            assert turns[write.number].wait(TIMEOUT)
            turns[write.number - 1].set()

    watched.on_write = on_write
    state = mixed_state()
    planned = plan_of(state)
    image = image_of(planned, manager)
    result = await save_image(planned, image, watched, executor, tmp_path / "data", workers=4)
    assert watched.most_in_flight == 4
    assert_holds(tmp_path / "data", planned, result, state)


async def test_as_many_chunks_as_are_written_at_once_are_summed_ahead(
    tmp_path: Path, executor: Executor, manager: LifetimeManager, watched: WatchedStorage, monkeypatch
) -> None:
    """Writes that end together, as on a disk they share, are followed by as many at once."""
    prepared, prepare, gate = threading.Semaphore(0), ChunkPreparer.prepare, watched.gate()

    def noted(self: ChunkPreparer, chunk: Chunk, view: memoryview) -> None:
        prepare(self, chunk, view)
        prepared.release()

    monkeypatch.setattr(ChunkPreparer, "prepare", noted)
    watched.on_write = lambda write: gate.hold()
    planned = plan_of(mixed_state())
    image = image_of(planned, manager)
    assert len(image.chunks) == 6
    saving = asyncio.create_task(save_image(planned, image, watched, executor, tmp_path / "data", workers=2))
    for _ in range(5):  # two are being written, two lie ready, one waits to
        assert await asyncio.to_thread(prepared.acquire, timeout=TIMEOUT)
    await asyncio.to_thread(gate.wait_held, 2)
    assert not prepared.acquire(blocking=False)
    gate.open()
    assert_holds(tmp_path / "data", planned, await saving, mixed_state())


class SlowToCreate(Storage):
    """Creates a data file, or fails to, once ``until`` returned."""

    def __init__(self, executor: Executor, until: Callable[[], object]) -> None:
        super().__init__(executor)
        self._until = until

    async def create_data_file(self, path: Path, nbytes: int) -> DataFile:
        await asyncio.to_thread(self._until)
        return await super().create_data_file(path, nbytes)


@pytest.mark.parametrize("fails", [False, True])
async def test_the_first_chunks_are_summed_while_the_file_is_created(
    tmp_path: Path, executor: Executor, manager: LifetimeManager, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    prepared, prepare = threading.Semaphore(0), ChunkPreparer.prepare

    def noted(self: ChunkPreparer, chunk: Chunk, view: memoryview) -> None:
        prepare(self, chunk, view)
        prepared.release()

    def until() -> None:
        for _ in range(3):  # two lie ready, one waits to
            assert prepared.acquire(timeout=TIMEOUT)
        if fails:
            raise WriteError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "data"))

    monkeypatch.setattr(ChunkPreparer, "prepare", noted)
    planned = plan_of(mixed_state())
    image = image_of(planned, manager)
    saving = save_image(planned, image, SlowToCreate(executor, until), executor, tmp_path / "data", workers=2)
    if fails:
        with pytest.raises(ExceptionGroup) as caught:
            await saving
        assert [type(error) for error in leaves(caught.value)] == [WriteError]
        assert not (tmp_path / "data").exists()
        await asyncio.wait_for(asyncio.wrap_future(image.lease.ended), TIMEOUT)
    else:
        assert_holds(tmp_path / "data", planned, await saving, mixed_state())


def leaves(error: BaseException) -> list[BaseException]:
    """The errors in nested groups."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in leaves(inner)]
    return [error]


@pytest.mark.parametrize("failing", range(6))
@pytest.mark.parametrize("slots", [2, None])
async def test_the_error_of_any_chunk_is_raised_once_and_no_more_are_begun(
    tmp_path: Path,
    executor: Executor,
    manager: LifetimeManager,
    watched: WatchedStorage,
    failing: int,
    slots: int | None,
) -> None:
    begun: list[int] = []

    def on_write(write: Write) -> None:
        begun.append(write.number)
        if write.number == failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(write.path))

    watched.on_write = on_write
    planned = plan_of(mixed_state())
    image = image_of(planned, manager, slots)
    with pytest.raises(ExceptionGroup) as caught:
        await save_image(planned, image, watched, executor, tmp_path / "data", workers=2)
    (error,) = leaves(caught.value)
    assert isinstance(error, WriteError)
    assert error.errno == errno.EIO
    watched.wait_idle()
    assert max(begun) <= failing + 2
    assert watched.torn == []
    image.lease.ended.result(TIMEOUT)


async def test_a_failed_write_leaves_the_lease_to_the_threads_that_are_still_in_theirs(
    tmp_path: Path, executor: Executor, manager: LifetimeManager, watched: WatchedStorage
) -> None:
    gate = watched.gate()

    def on_write(write: Write) -> None:
        if write.number == 2:
            gate.wait_held(2)
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(write.path))
        gate.hold()

    watched.on_write = on_write
    planned = plan_of(mixed_state())
    image = image_of(planned, manager)
    with pytest.raises(ExceptionGroup) as caught:
        await save_image(planned, image, watched, executor, tmp_path / "data", workers=3)
    assert [type(error) for error in leaves(caught.value)] == [WriteError]
    assert (gate.held, manager.stats.leases) == (2, 1)
    arena = image.lease.arena
    assert not bool((arena.tensor == POISON).all())
    gate.open()
    await asyncio.wait_for(asyncio.wrap_future(image.lease.ended), TIMEOUT)
    assert bool((arena.tensor == POISON).all())
    assert watched.torn == []


async def test_a_cancelled_write_leaves_the_lease_to_its_threads(
    tmp_path: Path, executor: Executor, manager: LifetimeManager, watched: WatchedStorage
) -> None:
    gate = watched.gate()
    watched.on_write = lambda write: gate.hold()
    planned = plan_of(uniform(2, 4 * MIB, 1.0))
    image = image_of(planned, manager)
    saving = asyncio.create_task(save_image(planned, image, watched, executor, tmp_path / "data", workers=2))
    await asyncio.to_thread(gate.wait_held, 2)
    saving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await saving
    assert (gate.held, manager.stats.leases) == (2, 1)
    gate.open()
    await asyncio.wait_for(asyncio.wrap_future(image.lease.ended), TIMEOUT)
    assert watched.torn == []


async def test_preparing_a_chunk_holds_the_lease(
    tmp_path: Path, executor: Executor, manager: LifetimeManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums are taken in a thread as well: cancelled there, the bytes must not be lent again."""
    entered, gate = threading.Event(), threading.Event()
    prepare = ChunkPreparer.prepare

    def slow(self: ChunkPreparer, *args: object) -> None:
        entered.set()
        assert gate.wait(TIMEOUT)
        prepare(self, *args)

    monkeypatch.setattr(ChunkPreparer, "prepare", slow)
    planned = plan_of(uniform(2, 4 * MIB, 1.0))
    image = image_of(planned, manager)
    storage = Storage(executor)
    saving = asyncio.create_task(save_image(planned, image, storage, executor, tmp_path / "data"))
    assert await asyncio.to_thread(entered.wait, TIMEOUT)
    saving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await saving
    assert manager.stats.leases == 1
    gate.set()
    await asyncio.wait_for(asyncio.wrap_future(image.lease.ended), TIMEOUT)
