"""Snapshot: capture into the image, in one arena or through a ring of slots."""

from __future__ import annotations

import ctypes
import errno
import io
import os
import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from image_files import MIB, uniform
from property_examples import examples
from rings import TIMEOUT, image_of, plan_of
from slow import slow
from watched_writes import WatchedStorage, watched_engine

from aio_ckpt import EngineConfig, SyncCheckpointEngine
from aio_ckpt.errors import SourceChangedError, StallError, UnsafeObjectError, WriteError
from aio_ckpt.leaves import objects
from aio_ckpt.leaves.objects import ObjectEncoder, decode_object
from aio_ckpt.memory import host_copy as moves
from aio_ckpt.memory.arena_lifetimes import LifetimeManager
from aio_ckpt.memory.copies import Copies
from aio_ckpt.memory.cuda import CopyStreams
from aio_ckpt.memory.staging_kind import StagingChoice
from aio_ckpt.plan.save_plan import PlannedSave
from aio_ckpt.runtime.portal import Executor
from aio_ckpt.snapshot.capture import CopyEngines, capture
from aio_ckpt.snapshot.captured_chunks import CapturedRun
from aio_ckpt.snapshot.image import Image, lease_image, ring_slots

pytestmark = pytest.mark.usefixtures("chunks_of_4_mib")


@pytest.fixture
def manager() -> Iterator[LifetimeManager]:
    executor = Executor("test", 2)
    manager = LifetimeManager(budget_bytes=256 * MIB, executor=executor, debug=True)
    yield manager
    manager.close()
    executor.close(TIMEOUT)


def captured(planned: PlannedSave, image: Image, slot_timeout_secs: float = TIMEOUT) -> list[int]:
    """Capture all; the chunks that the loop was told of."""
    told: list[int] = []
    work = capture(
        planned,
        image,
        CopyEngines(),
        guarded=frozenset(),
        on_captured=lambda runs: told.extend(index for indices, _ in runs for index in indices),
        slot_timeout_secs=slot_timeout_secs,
    )
    work.finish()
    return told


# -- what is captured -----------------------------------------------------------------------------


def raw_in(image: Image, planned: PlannedSave) -> dict[str, bytes]:
    """Name -> raw bytes in an image that holds every chunk."""
    memory = memoryview(image.lease.arena.memory)
    return {
        name: bytes(memory[item.raw_offset : item.raw_offset + item.raw_bytes])
        for item in planned.plan.layout.items
        for name in item.fqns
    }


def test_every_kind_of_source_stands_in_the_image_in_its_stored_order(manager: LifetimeManager) -> None:
    grid = torch.arange(40_000, dtype=torch.float32).reshape(200, 200)
    state = {
        "plain": grid,
        "dense": grid.t(),
        "holes": grid[::2, 1::3],
        "conj": torch.randn(300, 300, dtype=torch.complex64).conj(),
        "neg": torch.randn(9, dtype=torch.complex64).conj().imag,
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "bool": torch.tensor([True, False, True]),
        "half": torch.randn(7).bfloat16(),
        "parameter": torch.nn.Parameter(torch.randn(5)),
        "array": np.arange(6, dtype=np.int16)[::-1],
        "large": torch.randn(2 * MIB),
    }
    planned = plan_of(state)
    image = image_of(planned, manager)
    captured(planned, image)
    found = raw_in(image, planned)
    for item in planned.plan.layout.items:
        (name,) = item.fqns
        stored = torch.frombuffer(bytearray(found[name]), dtype=item.spec.dtype) if found[name] else torch.empty(0)
        got = torch.as_strided(stored, item.spec.shape, item.spec.stride)
        value = state[name]
        wanted = torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value.detach()
        assert torch.equal(got, wanted.resolve_conj().resolve_neg()), name


def test_changes_after_the_capture_do_not_reach_the_image(manager: LifetimeManager) -> None:
    state = {"small": torch.ones(5), "large": torch.ones(MIB), "holes": torch.ones(600, 600)[::2]}
    planned = plan_of(state)
    image = image_of(planned, manager)
    captured(planned, image)
    for value in state.values():
        value.fill_(2.0)
    for name, raw in raw_in(image, planned).items():
        assert set(np.frombuffer(raw, dtype=np.float32)) == {1.0}, name


def test_the_loop_is_told_of_each_chunk_once_in_order(manager: LifetimeManager) -> None:
    planned = plan_of(uniform(6, 4 * MIB, 1.0))
    image = image_of(planned, manager)
    assert captured(planned, image) == [chunk.index for chunk in image.chunks] == list(range(7))


def test_a_source_that_is_freed_while_it_is_captured_is_an_error(manager: LifetimeManager) -> None:
    state = {"kept": torch.ones(5), "freed": torch.ones(MIB)}
    planned = plan_of(state)
    image = image_of(planned, manager)
    with pytest.raises(SourceChangedError, match="keep the state still until save"):
        capture(
            planned,
            image,
            CopyEngines(),
            guarded=frozenset(),
            on_captured=lambda *_: state["freed"].untyped_storage().resize_(0),
            slot_timeout_secs=TIMEOUT,
        )
    assert planned.tensors == []


# -- the ring -------------------------------------------------------------------------------------


@examples(300)
@given(
    chunk_bytes=st.sampled_from([4 * MIB, 5 * MIB, 32 * MIB]),
    image_chunks=st.floats(0.01, 12),
    budget_share=st.sampled_from([0.1, 0.3, 0.5, 0.77, 0.999, 1.0, 2.0]),
)
def test_the_ring_fits_the_budget_and_leaves_less_than_a_chunk_of_it(
    chunk_bytes: int, image_chunks: float, budget_share: float
) -> None:
    image_bytes = int(image_chunks * chunk_bytes)
    budget_bytes = max(int(image_bytes * budget_share), chunk_bytes)  # as the layout cuts it
    chunks = -(-image_bytes // chunk_bytes)
    slots = ring_slots(image_bytes, chunk_bytes, budget_bytes)
    assert (slots is None) is (image_bytes <= budget_bytes)
    slots = chunks if slots is None else slots
    assert min(1, chunks) <= slots <= chunks
    assert min(slots * chunk_bytes, image_bytes) <= budget_bytes
    assert slots == chunks or (slots + 1) * chunk_bytes > budget_bytes


def test_an_image_within_the_budget_is_whole_and_a_larger_one_is_a_ring() -> None:
    executor = Executor("test", 2)
    planned = plan_of(uniform(4, 4 * MIB, 1.0))
    for budget_bytes, slots, arena_bytes in ((32 * MIB, 5, 18 * MIB), (16 * MIB, 4, 16 * MIB)):
        manager = LifetimeManager(budget_bytes=budget_bytes, executor=executor, debug=False)
        image = lease_image(planned, 0, manager, StagingChoice("pageable"), timeout_secs=TIMEOUT, limit_secs=TIMEOUT)
        assert (image.slots, len(image.chunks), image.is_whole) == (slots, 5, slots == 5)
        assert image.lease.arena.kind == "pageable"
        assert manager.stats.arena_bytes == arena_bytes
        assert [image.slot_offset(chunk) for chunk in image.chunks] == [
            index % slots * 4 * MIB for index in range(len(image.chunks))
        ]
        image.lease.close()
        manager.close()
    executor.close(TIMEOUT)


def test_a_long_run_from_the_host_is_told_of_at_once_and_a_brief_one_at_the_end(manager: LifetimeManager) -> None:
    planned = plan_of(uniform(2, 4 * MIB, 1.0) | {"z": torch.ones(10)})
    told: list[object] = []
    capture(
        planned,
        image_of(planned, manager),
        CopyEngines(),
        guarded=frozenset(),
        on_captured=lambda runs: told.append([index for indices, _ in runs for index in indices]),
        on_issued=lambda _: told.append("all issued"),
        slot_timeout_secs=TIMEOUT,
    ).finish()
    assert told == [[0], [1], "all issued", [2]]


@pytest.mark.parametrize("slots", [1, slow(2), 3, slow(5), slow(7)])
def test_a_slot_is_filled_again_only_after_its_chunk_was_written(manager: LifetimeManager, slots: int) -> None:
    """Chunks are written in an order of chance, of those that are in the ring; each must still be itself then."""
    state = {f"w{i}": torch.full((MIB,), float(i)) for i in range(6)}
    planned = plan_of(state)
    whole = image_of(planned, manager)
    captured(plan_of(state), whole)
    image = image_of(planned, manager, slots)
    told: list[int] = []
    changed = threading.Condition()

    def on_captured(runs: Sequence[CapturedRun]) -> None:
        with changed:
            told.extend(index for indices, _ in runs for index in indices)
            changed.notify_all()

    rng = random.Random(slots)
    written: set[int] = set()
    with ThreadPoolExecutor(1) as trainer:
        capturing = trainer.submit(
            capture,
            planned,
            image,
            CopyEngines(),
            guarded=frozenset(),
            on_captured=on_captured,
            slot_timeout_secs=TIMEOUT,
        )
        while len(written) < len(image.chunks):
            with changed:
                assert changed.wait_for(lambda: len(told) > len(written), TIMEOUT), f"told of {told} only"
                waiting = [index for index in told if index not in written]
            assert len(waiting) <= slots
            chunk = image.chunks[rng.choice(waiting)]
            for piece in chunk.pieces:
                start = piece.image_start - chunk.start
                wanted = memoryview(whole.lease.arena.memory)[piece.image_start : piece.image_start + piece.nbytes]
                assert image.view(chunk)[start : start + piece.nbytes] == wanted, (chunk.index, told)
            written.add(chunk.index)
            if chunk.index < len(image.written):
                image.written[chunk.index].set_result(None)
        capturing.result(TIMEOUT).finish()
    assert sorted(told) == list(range(len(image.chunks)))


def test_a_capture_that_waits_for_a_slot_too_long_names_the_chunks_and_lets_go_of_the_sources(
    manager: LifetimeManager,
) -> None:
    planned = plan_of(uniform(4, 4 * MIB, 1.0))
    image = image_of(planned, manager, slots=2)
    with pytest.raises(StallError, match=r"chunk 0 was not written within 0\.05 s, so chunk 2 cannot be captured"):
        captured(planned, image, slot_timeout_secs=0.05)
    assert planned.tensors == []


def test_a_capture_that_waits_for_a_slot_ends_with_the_error_of_the_write(manager: LifetimeManager) -> None:
    planned = plan_of(uniform(4, 4 * MIB, 1.0))
    image = image_of(planned, manager, slots=2)
    image.written[0].set_result(None)
    image.written[1].set_exception(WriteError(5, "Input/output error", "file"))
    with pytest.raises(WriteError, match="Input/output error"):
        captured(planned, image)


@pytest.mark.parametrize("budget_mib", [8, slow(12), slow(16), 32])
def test_a_state_as_large_as_the_budget_goes_through_a_ring(tmp_path, budget_mib: int) -> None:
    """The envelopes make the image larger than the budget. Of the smaller ones less is captured than told at once."""
    state = {f"w{i}": torch.full((MIB,), float(i)) for i in range(budget_mib // 4)}
    with watched_engine(tmp_path, WatchedStorage(), budget_bytes=budget_mib * MIB) as engine:
        for _ in range(2):
            assert engine.save(state).result(TIMEOUT) is not None
        assert engine.lifetime.arena_bytes <= budget_mib * MIB
        back = engine.read(2, only=None).result(TIMEOUT)
    assert isinstance(back, dict)
    assert all(torch.equal(back[name], value) for name, value in state.items())


# -- objects --------------------------------------------------------------------------------------


def decoded(encoder: ObjectEncoder, leaves: list[tuple[str, object]]) -> list[object]:
    encoded = encoder.encode(leaves)
    return [
        decode_object(encoded.region[start : start + nbytes], name=name, trusted=False)
        for (name, _), (start, nbytes) in zip(leaves, encoded.spans, strict=True)
    ]


def test_equal_immutable_values_stand_once_and_unequal_ones_never_share() -> None:
    encoder = ObjectEncoder(trusted=False)
    values = [1, True, 1.0, 0.0, -0.0, float("nan"), "1", b"1", None, 1 + 0j, 1, "1", float("nan")]
    leaves = [(f"o{i}", value) for i, value in enumerate(values)]
    spans = encoder.encode(leaves).spans
    assert len(set(spans)) == 10
    assert (spans[0], spans[6], spans[5]) == (spans[10], spans[11], spans[12])
    for _ in range(2):  # from the bytes of the save before as well
        found = decoded(encoder, leaves)
        assert [(type(value), repr(value)) for value in found] == [(type(value), repr(value)) for value in values]


def test_the_bytes_of_an_unchanged_value_are_encoded_once_and_forgotten_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encode = objects.encode_object
    encodings: list[object] = []

    def counted(name: str, value: object) -> bytes:
        encodings.append(value)
        return encode(name, value)

    monkeypatch.setattr(objects, "encode_object", counted)
    encoder = ObjectEncoder(trusted=False)
    for values in ([0.1, "a"], [0.1, "b"], [0.1], [0.1, "a"]):
        encoder.encode([(f"o{i}", value) for i, value in enumerate(values)])
    assert encodings == [0.1, "a", "b", "a"]


def test_a_mutable_value_is_captured_by_encoding_it_at_every_save() -> None:
    encoder = ObjectEncoder(trusted=False)
    inner = {"list": [1, [2]], "bytes": bytearray(b"ab"), "file": io.BytesIO(b"cd")}
    first = encoder.encode([("o", inner)])
    inner["list"][1].append(3)
    inner["bytes"][0] = 0
    inner["file"].write(b"xy")
    (before,) = [decode_object(first.region, name="o", trusted=False)]
    assert (before["list"], before["bytes"], before["file"].getvalue()) == ([1, [2]], bytearray(b"ab"), b"cd")
    (after,) = decoded(encoder, [("o", inner)])
    assert (after["list"], bytes(after["bytes"]), after["file"].getvalue()) == ([1, [2, 3]], b"\0b", b"xy")


def test_an_object_that_pickle_cannot_store_is_refused_by_name() -> None:
    class Thing:
        pass

    for value in (Thing(), lambda: None):
        with pytest.raises(UnsafeObjectError, match=r"nested\.thing.*pickled"):
            ObjectEncoder(trusted=False).encode([("nested.thing", value)])


def test_an_image_of_objects_alone_has_chunks(manager: LifetimeManager) -> None:
    planned = plan_of({"text": "x"})
    image = lease_image(planned, 9 * MIB, manager, StagingChoice("pageable"), timeout_secs=TIMEOUT, limit_secs=TIMEOUT)
    assert image.chunks[-1].stop == 9 * MIB
    assert captured(planned, image) == [0, 1, 2]
    assert all(isinstance(future, Future) and not future.done() for future in image.written)


@pytest.mark.parametrize("inside", [True, False])
def test_memory_that_was_mapped_in_inference_mode_serves_outside_of_it(tmp_path: Path, inside: bool) -> None:
    state = {"odd": torch.arange(1000.0)[::2], "large": torch.ones(1 << 18), "small": torch.ones(3)}
    with SyncCheckpointEngine(tmp_path, EngineConfig(debug=True)) as engine:
        for is_inference in (inside, not inside, inside):
            with torch.inference_mode(mode=is_inference):
                step = engine.save(state).result(60).step
            found: Any = engine.read(step)
            assert all(torch.equal(found[name], value) for name, value in state.items())


class OddCopies(Copies):
    """Copies of a device whose stream cannot be waited for once they are issued."""

    waiters: list[threading.Thread]

    def __init__(self) -> None:
        type(self).waiters = []

    def record_event(self) -> Any:
        return self

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self.waiters.append(threading.current_thread())  # the pipeline may wait for a chunk, too

    def fence(self, stream: object = None) -> None:
        raise KeyboardInterrupt


def test_a_capture_that_is_interrupted_at_its_very_end_waits_for_its_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CopyStreams, "begin", lambda self, device, is_registered: OddCopies())
    with SyncCheckpointEngine(tmp_path) as engine:
        with pytest.raises(KeyboardInterrupt):
            engine.save({"large": torch.ones(1 << 18)})
        assert threading.current_thread() in OddCopies.waiters
        assert engine.lifetime.leases == 0


def test_no_tensor_is_blamed_where_the_system_cannot_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> int:
        ctypes.set_errno(errno.ENOMEM)
        return -1

    moves._is_refused()
    with SyncCheckpointEngine(tmp_path) as engine:
        monkeypatch.setattr(moves, "_readv", no_memory)
        with pytest.raises(OSError, match="Cannot allocate memory") as caught:
            engine.save({"plain": torch.ones(3)})
        assert not isinstance(caught.value, SourceChangedError)
        monkeypatch.undo()
        assert engine.save({"plain": torch.ones(3)}).result(60).step == 1


def test_a_mapped_file_that_was_truncated_is_an_error_that_names_its_tensor(tmp_path: Path) -> None:
    if moves._is_refused():
        pytest.skip("process_vm_readv is refused here: the system ends the process instead")
    file = tmp_path / "mapped"
    file.write_bytes(bytes(1 << 16))
    mapped = torch.from_numpy(np.memmap(file, dtype=np.uint8, mode="r+"))
    os.truncate(file, 4096)
    with SyncCheckpointEngine(tmp_path / "root") as engine:
        with pytest.raises(SourceChangedError, match="'lost': its memory cannot be read any more"):
            engine.save({"kept": mapped[:100], "lost": mapped[8192:8292], "plain": torch.ones(3)})
        assert engine.save({"plain": torch.ones(3)}).result(60).step == 1
