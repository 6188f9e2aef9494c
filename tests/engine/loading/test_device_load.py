"""Loads to a device, with host memory in its place: the same path, through the real copies of the host."""

from __future__ import annotations

import asyncio
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from gated_storage import TIMEOUT
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples
from tensor_bits import bytes_of

from aio_ckpt import CheckpointEngine, EngineConfig, SyncCheckpointEngine
from aio_ckpt.checkpoint import deliver_pieces as place
from aio_ckpt.checkpoint import fetch
from aio_ckpt.checkpoint import read_plan as readplan
from aio_ckpt.errors import MismatchError
from aio_ckpt.format.constants import BLOCK_BYTES, align_up
from aio_ckpt.match import tensors
from aio_ckpt.memory import cuda as device
from aio_ckpt.memory import read_buffers as bounce
from aio_ckpt.memory.copies import Copies, CopyEvent
from aio_ckpt.memory.host_copy import CopyVectors
from aio_ckpt.storage import data_file as datafile

MIB = 1 << 20
RING_BYTES = 16 * MIB


class WatchedCopies(Copies):
    """The host's copies, noted; an event may be held."""

    def __init__(self) -> None:
        self.runs: list[int] = []
        self.issued: list[tuple[int, int]] = []
        self.unmarked: list[tuple[int, int]] = []
        self.events = 0
        self.reached = threading.Event()
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.on_issue: Callable[[], None] = lambda: None
        self.room = torch.empty(256 * MIB, dtype=torch.uint8)
        self.taken = 0
        self.most_bytes = 1 << 40
        self.filled_from: list[int] = []
        self.on_synchronize: Callable[[], None] = lambda: None

    def copy_vectors(self, base: int, vectors: CopyVectors) -> None:
        self.on_issue()
        self.runs += vectors[:, 2].tolist()
        self.issued += [(base + target, nbytes) for target, _, nbytes in vectors.tolist()]
        self.unmarked += [(source, source + nbytes) for _, source, nbytes in vectors.tolist()]
        super().copy_vectors(base, vectors)

    def record_event(self) -> CopyEvent:
        return WatchedMark(self)

    def allocate(self, nbytes: int) -> torch.Tensor | None:
        """One right behind the other, as a device may hand them out, with room for so many bytes each."""
        if nbytes > self.most_bytes:
            return None
        start, self.taken = self.taken, align_up(self.taken + nbytes, 16)
        return self.room[start : start + nbytes]

    def fill(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.filled_from.append(source.untyped_storage().data_ptr())
        super().fill(target, source)

    def has(self, address: int) -> bool:
        """Whether it is in memory of the device."""
        return self.room.data_ptr() <= address < self.room.data_ptr() + self.room.nbytes

    def bytes_issued_to_room(self) -> int:
        return sum(nbytes for target, nbytes in self.issued if self.has(target))

    def make_apart(self) -> list[weakref.ref[Any]]:
        """Make each buffer memory of its own from now on: what becomes of it."""
        made: list[weakref.ref[Any]] = []

        def allocate(nbytes: int) -> torch.Tensor:
            memory = np.empty(nbytes, np.uint8)
            made.append(weakref.ref(memory))
            return torch.from_numpy(memory)

        self.allocate = allocate  # type: ignore[method-assign]
        return made


class WatchedMark:
    def __init__(self, copies: WatchedCopies) -> None:
        self.copies = copies

    def query(self) -> bool:
        return self.copies.goes_on.is_set()

    def synchronize(self) -> None:
        self.copies.reached.set()
        assert self.copies.goes_on.wait(TIMEOUT)
        self.copies.on_synchronize()
        self.copies.unmarked.clear()
        self.copies.events += 1

    def fence(self, stream: object = None) -> None:
        raise AssertionError("a load waits by itself")


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> WatchedCopies:
    """Host memory is filled as if it were a device's."""
    watched = WatchedCopies()
    monkeypatch.setattr(tensors, "is_host_memory", lambda _: False)
    monkeypatch.setattr(readplan, "is_host_memory", lambda _: False)
    monkeypatch.setattr(place, "is_host_memory", lambda memory: not watched.has(memory.data_ptr()))
    monkeypatch.setattr(fetch, "begin_uploads", lambda _: watched)
    return watched


class Registered:
    """What was page-locked."""

    def __init__(self) -> None:
        self.now: dict[int, int] = {}
        self.sizes: list[int] = []
        self.error: RuntimeError | None = None

    def register(self, address: int, nbytes: int) -> None:
        if self.error is not None:
            raise self.error
        self.now[address] = nbytes
        self.sizes.append(nbytes)

    def unregister(self, address: int) -> None:
        del self.now[address]


@pytest.fixture
def registered(copies: WatchedCopies, monkeypatch: pytest.MonkeyPatch) -> Registered:
    """The device wants page-locked memory."""
    found = Registered()
    monkeypatch.setattr(fetch, "prefers_page_locked", lambda _: True)
    monkeypatch.setattr(bounce, "register_host_memory", found.register)
    monkeypatch.setattr(bounce, "unregister_host_memory", found.unregister)
    return found


@functools.cache
def made() -> dict[str, torch.Tensor]:
    torch.manual_seed(2)
    shared = torch.randn(400_000)
    return {
        "large": torch.randn(10 * MIB),
        "strided": torch.randn(900, 500).t(),
        "half": torch.randn(600_000).bfloat16(),
        "complex": torch.randn(300_000, dtype=torch.complex64),
        "tied": shared,
        "again": shared,
        "empty": torch.empty(0, 3),
    }


def templates() -> dict[str, torch.Tensor]:
    """Of which some are laid out in another way than what is stored."""
    found = {name: torch.zeros_like(value) for name, value in made().items()}
    found["again"] = torch.zeros(400_000)
    found["strided"] = torch.zeros(500, 900)
    found["complex"] = torch.zeros(300_000, dtype=torch.complex64).conj()
    return found


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[SyncCheckpointEngine]:
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.save(made()).result(TIMEOUT)
        yield engine


def check_equal(state: dict[str, torch.Tensor]) -> None:
    for name, value in made().items():
        assert torch.equal(state[name], value), name


def test_every_layout_comes_back_and_blocks_of_a_tensor_go_in_one_copy(
    engine: SyncCheckpointEngine, copies: WatchedCopies
) -> None:
    state = templates()
    before = state["large"]._version
    assert engine.load(state).verified
    check_equal(state)
    assert max(copies.runs) >= 3 * BLOCK_BYTES
    assert state["large"]._version > before, "autograd must see that the target was written to"


def test_no_buffer_is_read_into_before_its_copies_are_done(
    engine: SyncCheckpointEngine, copies: WatchedCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker and a ring of few buffers, so that each is used again and again."""
    inner, seen = datafile.ReadFile._read, []

    def read(file: datafile.ReadFile, offset: int, views: list[memoryview]) -> int:
        (view,) = views
        start = bounce.address_of(view)
        seen.append(start)
        assert not any(low < start + view.nbytes and start < high for low, high in list(copies.unmarked))
        return inner(file, offset, views)

    monkeypatch.setattr(datafile.ReadFile, "_read", read)
    monkeypatch.setattr(readplan, "_REQUEST_BYTES_MIN", 2 * MIB)
    monkeypatch.setattr(readplan, "REQUEST_BYTES_MAX", 2 * MIB)
    state = templates()
    engine.load(state)
    check_equal(state)
    assert len(seen) > 2 * len(set(seen))
    assert copies.events


def columns(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Room for each wide tensor as it is stored, in memory that is laid out by columns."""
    return {name: torch.zeros(value.shape[::-1]).t() for name, value in state.items()}


@functools.cache
def wide() -> dict[str, torch.Tensor]:
    """20 MiB each, which are read in three parts."""
    return {f"w{i}": torch.arange(5 * MIB, dtype=torch.float32).add_(i).view(1280, 4096) for i in range(2)}


def test_what_must_be_laid_out_anew_is_so_on_the_device(tmp_path: Path, copies: WatchedCopies) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.save(wide()).result(TIMEOUT)
        state = columns(wide())
        assert engine.load(state).verified
    assert all(torch.equal(state[name], value) for name, value in wide().items())
    assert copies.bytes_issued_to_room() == sum(value.nbytes for value in wide().values())
    assert len(copies.filled_from) == 6
    assert set(copies.filled_from) == {copies.room.data_ptr()}


def test_no_copy_reaches_from_one_memory_of_the_device_into_the_next(tmp_path: Path, copies: WatchedCopies) -> None:
    """Though both its ends follow each other: a driver refuses it where they were allocated apart."""
    made: list[tuple[int, int]] = []
    inner = copies.allocate

    def noted(nbytes: int) -> torch.Tensor | None:
        memory = inner(nbytes)
        assert memory is not None
        made.append((memory.data_ptr(), memory.data_ptr() + nbytes))
        return memory

    copies.allocate = noted  # type: ignore[method-assign]
    with SyncCheckpointEngine(tmp_path, config=EngineConfig(workers=1)) as engine:
        engine.save(wide()).result(TIMEOUT)
        engine.load(columns(wide()))
    into_room = [(target, target + nbytes) for target, nbytes in copies.issued if copies.has(target)]
    assert into_room
    for low, high in into_room:
        assert any(first <= low and high <= last for first, last in made)


@pytest.mark.slow
def test_memory_of_the_device_is_let_go_of_when_its_copies_are_done(tmp_path: Path, copies: WatchedCopies) -> None:
    """Its allocator gives it to the trainer's stream at once, which knows nothing of ours."""
    made = copies.make_apart()
    filled_of: list[int] = []

    def fill(target: torch.Tensor, source: torch.Tensor) -> None:
        Copies.fill(copies, target, source)
        copies.on_synchronize = lambda: filled_of.append(sum(memory() is not None for memory in made))

    copies.fill = fill  # type: ignore[method-assign]
    state = {f"{name} {i}": value for name, value in wide().items() for i in range(4)}
    state = {name: value.clone() for name, value in state.items()}
    with SyncCheckpointEngine(tmp_path, config=EngineConfig(workers=1)) as engine:
        engine.save(state).result(TIMEOUT)
        engine.load(columns(state))
    assert len(made) == 24
    assert 0 < min(filled_of) <= max(filled_of) <= 8
    assert not any(memory() is not None for memory in made)


def test_who_keeps_the_error_of_a_load_keeps_no_memory_of_the_device(tmp_path: Path, copies: WatchedCopies) -> None:
    made = copies.make_apart()
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.save(wide()).result(TIMEOUT)
        (path,) = tmp_path.glob("step_*/*.distcp")
        data = bytearray(path.read_bytes())
        data[-6 * MIB] ^= 1
        path.write_bytes(data)
        with pytest.raises(MismatchError) as caught:
            engine.load(columns(wide()), step=1)
        assert made
        assert caught.value is not None
        assert not any(memory() is not None for memory in made)


def test_copies_that_go_by_no_address_take_no_memory_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """ROCm: there the host lays out anew, and torch copies."""
    uploads = object.__new__(device.CudaUploads)
    uploads._device, uploads._is_full = torch.device("cuda"), False
    monkeypatch.setattr(device, "_driver_is_there", lambda: False)
    assert uploads.allocate(100) is None


def test_a_device_that_is_full_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def refused(nbytes: int, **_: object) -> torch.Tensor:
        asked.append(nbytes)
        raise torch.OutOfMemoryError("full")

    uploads = object.__new__(device.CudaUploads)
    uploads._device, uploads._is_full = torch.device("cuda"), False
    monkeypatch.setattr(device, "_driver_is_there", lambda: True)
    monkeypatch.setattr(torch, "empty", refused)
    assert uploads.allocate(100) is None
    assert uploads.allocate(100) is None
    assert asked == [100]


def test_a_device_without_room_only_costs_time(tmp_path: Path, copies: WatchedCopies) -> None:
    copies.most_bytes = 6 * MIB
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.save(wide()).result(TIMEOUT)
        state = columns(wide())
        engine.load(state)
    assert all(torch.equal(state[name], value) for name, value in wide().items())
    assert 0 < copies.bytes_issued_to_room() < sum(value.nbytes for value in wide().values())
    assert copies.bytes_issued_to_room() == sum(copies.runs), "what is the host's the host copies"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_part_that_cannot_be_cut_takes_no_memory_of_the_device(tmp_path: Path, copies: WatchedCopies) -> None:
    """What stock DCP stores has one sum, so that it is proven as a whole, however large it is."""
    asked: list[int] = []
    copies.allocate = asked.append  # type: ignore[method-assign,assignment]
    state = {"w": torch.randn(3, 3 * MIB)}  # 36 MiB
    dcp.save(state, checkpoint_id=str(tmp_path / "step_000000001"), no_dist=True)
    back = columns(state)
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.load(back)
    assert torch.equal(back["w"], state["w"])
    assert not asked


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_tensor_of_stock_dcp_is_proven_as_a_whole(tmp_path: Path, copies: WatchedCopies) -> None:
    state = {"w": torch.randn(2 * MIB), "b": torch.randn(7)}
    dcp.save(state, checkpoint_id=str(tmp_path / "step_000000001"), no_dist=True)
    back = {name: torch.zeros_like(value) for name, value in state.items()}
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.load(back)
    assert all(torch.equal(back[name], value) for name, value in state.items())
    assert sum(copies.runs) == sum(value.nbytes for value in state.values())


def test_a_corrupt_block_is_named_and_not_copied(engine: SyncCheckpointEngine, copies: WatchedCopies) -> None:
    (path,) = engine.root.glob("step_*/*.distcp")
    data = bytearray(path.read_bytes())
    place = data.index(bytes_of(made()["large"])[5 * MIB :][:64].numpy().tobytes())
    data[place] ^= 1
    path.write_bytes(data)
    state = templates()
    with pytest.raises(MismatchError, match="'large'") as caught:
        engine.load(state, step=1)
    assert path.name in str(caught.value)
    assert caught.value.target_modified
    assert float(state["large"][5 * MIB // 4]) == 0


def test_memory_is_page_locked_once_a_load_bounded_and_let_go_of(
    engine: SyncCheckpointEngine, registered: Registered, copies: WatchedCopies
) -> None:
    copies.on_issue = lambda: check(len(registered.now) == 1)
    state = templates()
    engine.load(state)
    check_equal(state)
    assert not registered.now
    (nbytes,) = registered.sizes
    assert nbytes <= (4 + 2) * RING_BYTES
    copies.on_issue = lambda: check(False)
    with pytest.raises(RuntimeError, match="refused"):
        engine.load(templates())
    assert not registered.now


def check(is_so: bool) -> None:
    if not is_so:
        raise RuntimeError("refused")


def test_a_driver_that_refuses_to_lock_pages_only_costs_time(
    engine: SyncCheckpointEngine, registered: Registered
) -> None:
    registered.error = RuntimeError("no more")
    state = templates()
    engine.load(state)
    check_equal(state)


def test_a_host_state_locks_no_pages(engine: SyncCheckpointEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounce, "register_host_memory", lambda *_: check(False))
    state = templates()
    engine.load(state)
    check_equal(state)


async def test_a_load_that_is_given_up_returns_when_no_copy_is_under_way(tmp_path: Path, copies: WatchedCopies) -> None:
    async with CheckpointEngine(tmp_path) as engine:
        await engine.save(made())
        copies.goes_on.clear()
        load = asyncio.ensure_future(engine.load(templates()))
        await asyncio.to_thread(copies.reached.wait, TIMEOUT)
        load.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not load.done()
        copies.goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await load
        assert not copies.unmarked
        issued = len(copies.runs)
        await asyncio.sleep(0)
        assert len(copies.runs) == issued


@examples(50)
@given(lengths=st.lists(st.integers(1, 5), min_size=1, max_size=12), data=st.data())
def test_joined_runs_move_the_same_bytes(lengths: list[int], data: Any) -> None:
    gaps = [data.draw(st.tuples(st.integers(0, 1), st.integers(0, 1))) for _ in lengths]
    vectors, target, source = [], 100, 1000
    for nbytes, (skip, gap) in zip(lengths, gaps, strict=True):
        target, source = target + skip, source + gap
        vectors.append((target, source, nbytes))
        target, source = target + nbytes, source + nbytes
    runs = place._runs(np.array(vectors, np.int64)).tolist()
    assert bytes_moved(runs) == bytes_moved(vectors)
    assert len(runs) == 1 + sum(1 for gap in gaps[1:] if any(gap))


def bytes_moved(vectors: Iterable[Iterable[int]]) -> list[tuple[int, int]]:
    return [(target + i, source + i) for target, source, nbytes in vectors for i in range(nbytes)]
