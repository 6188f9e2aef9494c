"""Copy descriptors: what is issued between any two offsets of an image, and from which addresses."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Set
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from image_files import MIB, pin_chunk_bytes
from property_examples import examples
from rings import TIMEOUT, image_of, issued
from slow import slow

from aio_ckpt.memory.arena_lifetimes import LifetimeManager
from aio_ckpt.memory.copies import Copies, CopyEvent
from aio_ckpt.memory.cuda import CopyStreams
from aio_ckpt.memory.host_copy import CopyVectors, copy_all
from aio_ckpt.plan.copy_plan import ChunkCopies, CopyPlan, CopyTable, GatherRun
from aio_ckpt.plan.save_plan import ImagePlan, PlannedImage
from aio_ckpt.runtime.portal import Executor
from aio_ckpt.snapshot.capture import Capture, CopyEngines, CopyOrder, capture
from aio_ckpt.snapshot.captured_chunks import CapturedRun
from aio_ckpt.snapshot.image import Image


def state_of(sizes: list[int]) -> dict[str, torch.Tensor]:
    generator = np.random.default_rng(len(sizes))
    return {f"t{i}": torch.from_numpy(generator.integers(0, 255, n, dtype=np.uint8)) for i, n in enumerate(sizes)}


@examples(60)
@given(
    st.lists(st.integers(0, 3_000_000), min_size=1, max_size=6),
    st.lists(st.floats(0, 1), max_size=5),
)
def test_however_an_image_is_cut_each_byte_is_issued_once_and_from_its_own_tensor(sizes, cuts):
    state = state_of(sizes)
    plan, _ = issued(state)
    tables = plan.copies.issued
    image = np.zeros(plan.layout.tensor_bytes, dtype=np.uint8)
    offsets = sorted({0, len(image), *(int(cut * len(image)) for cut in cuts)})
    for start, stop in pairwise(offsets):
        for table in tables.values():
            vectors = table.within(start, stop).vectors
            assert (vectors[:, 0] >= start).all()
            assert (vectors[:, 0] + vectors[:, 2] <= stop).all()
            assert (vectors[:, 2] > 0).all()
            copy_all(image.ctypes.data, vectors)
    assert sum(map(len, tables.values())) == sum(n > 0 for n in sizes)  # whole, one row each
    for item in plan.layout.items:
        (name,) = item.fqns
        got = image[item.raw_offset : item.raw_offset + item.raw_bytes]
        assert bytes(got) == ctypes.string_at(state[name].data_ptr(), state[name].nbytes)


def leaves_of(tables):
    return [table.leaves.tolist() for table in tables.values()]


def test_each_phase_has_its_leaves_and_the_first_has_all_others():
    plan, _ = issued(state_of([100, 200, 300, 400, 500]))
    copies = plan.copies.at([1000, 2000, 3000, 4000, 5000])
    copy_order = CopyOrder.of(copies, copies.issued, [{0, 3}, {4}])
    assert [leaves_of(tables) for tables in copy_order.tables[1:]] == [[[0, 3]], [[4]]]
    (first,) = copy_order.tables[0].values()
    assert (first.leaves.tolist(), first.vectors[:, 1].tolist()) == ([1, 2], [2000, 3000])


def test_the_order_is_computed_once_and_again_for_other_addresses_methods_or_guards():
    plan, _ = issued(state_of([100, 200]))
    first, second = (plan.copies.at(addresses) for addresses in ([1000, 2000], [1000, 5000]))
    engines, later = CopyEngines(), [frozenset({1})]
    copy_order = engines.order(first, first.issued, later)
    assert engines.order(first, first.issued, [frozenset({1})]) is copy_order
    (moved,) = engines.order(first, second.issued, later).tables[1].values()
    assert moved.vectors[:, 1].tolist() == [5000]
    assert leaves_of(engines.order(second, second.issued, [frozenset({0})]).tables[1]) == [[0]]
    assert leaves_of(engines.order(second, second.issued, []).tables[0]) == [[0, 1]]


def copies_of(start: int, *leaves: int) -> ChunkCopies:
    run = GatherRun(start=start, stop=start + 10, device=torch.device("cpu"), pieces=(), leaves=leaves)
    return ChunkCopies(gathered=(run,), packed=(), converted=(), is_issued=True)


def test_a_gather_run_belongs_to_the_first_phase_of_its_leaves():
    chunks = (copies_of(0, 0, 1), copies_of(100, 2, 3), copies_of(200, 4, 5))
    copies = CopyPlan(chunks=chunks, moved=CopyTable.of([]), issued={})
    assert CopyOrder.of(copies, {}, [{0, 2, 3, 4}, {5}]).run_phases == {0: 0, 100: 1, 200: 1}


@pytest.mark.parametrize(("start", "stop"), [(0, 10), (40, 50), (20, 20)])
def test_where_nothing_lies_nothing_is_issued(start, stop):
    vectors = np.array([(10, 1, 10), (20, 100, 20)], dtype=np.uint64)
    assert len(CopyTable(vectors, np.arange(2)).within(start, stop)) == 0


def test_addresses_of_the_upper_half_are_no_sign():
    vectors = np.array([(0, (1 << 64) - 100, 50)], dtype=np.uint64)
    assert CopyTable(vectors, np.arange(1)).within(10, 20).vectors.tolist() == [[10, (1 << 64) - 90, 10]]


class WatchedCopies(Copies):
    """The host's copies; what came in which order."""

    def __init__(self) -> None:
        self.order: list[str | int] = []

    def copy_vectors(self, base: int, vectors: CopyVectors) -> None:
        self.order += vectors[:, 1].tolist()
        super().copy_vectors(base, vectors)

    def record_event(self) -> CopyEvent:
        return WatchedMark(self)


class WatchedMark:
    def __init__(self, copies: WatchedCopies) -> None:
        self.copies = copies
        self.after = [entry for entry in copies.order if entry != "fence"]

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def fence(self, stream: object = None) -> None:
        self.copies.order.append("fence")


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A capture from a device that is the host, and what it did."""

    plan: ImagePlan
    image: Image
    work: Capture
    copies: WatchedCopies
    reported: list[CapturedRun]


@contextlib.contextmanager
def watched_capture(
    monkeypatch: pytest.MonkeyPatch, state: dict[str, torch.Tensor], guarded: Set[int], max_copy_bytes: int | None
) -> Iterator[Watched]:
    """Capture ``state`` in chunks of 4 MiB, in runs of 1, 8 and 64. ``max_copy_bytes``: see :class:`CopyEngines`."""
    pin_chunk_bytes(monkeypatch)
    watched, reported = WatchedCopies(), list[CapturedRun]()
    monkeypatch.setattr(CopyStreams, "begin", lambda *_, **__: watched)
    plan, tensors = issued(state)
    planned = PlannedImage(plan=plan, tensors=tensors, objects=[])
    executor = Executor("test", 1)
    manager = LifetimeManager(budget_bytes=256 * MIB, executor=executor, debug=True)
    image = image_of(planned, manager)
    work = capture(
        planned,
        image,
        CopyEngines(max_copy_bytes),
        guarded=guarded,
        on_captured=reported.extend,
        slot_timeout_secs=TIMEOUT,
    )
    yield Watched(plan=plan, image=image, work=work, copies=watched, reported=reported)
    work.finish()
    image.lease.close()
    manager.close()
    executor.close(TIMEOUT)


@pytest.mark.parametrize("copied", [slow(frozenset[int]()), frozenset({0, 1, 3, 4})])
@pytest.mark.parametrize("guarded", [set[int](), {0, 2, 3}, {0, 1, 2, 3, 4, 5}])
def test_what_nobody_guards_is_copied_first_and_it_alone_is_awaited(
    monkeypatch: pytest.MonkeyPatch, guarded: set[int], copied: frozenset[int]
) -> None:
    """``copied``: leaves that are large enough for a device copy. A guarded ``step()`` waits for the others alone."""
    sizes = [3 * MIB, 9 * MIB, 100, 20 * MIB, MIB, 5000]
    state = state_of(sizes)
    with watched_capture(monkeypatch, state, guarded, None if copied else 0) as seen:
        raw = {item.leaf: item.raw_offset for item in seen.plan.layout.items}
        memory = seen.image.lease.arena.memory
        got = [bytes(memory[raw[leaf] : raw[leaf] + size]) for leaf, size in enumerate(sizes)]
    assert got == [bytes(tensor.numpy()) for tensor in state.values()]
    assert [index for indices, _ in seen.reported for index in indices] == list(range(len(seen.image.chunks)))
    order = seen.copies.order
    awaited = order[: order.index("fence")] if "fence" in order else []
    addresses = seen.plan.fingerprint
    begun = {leaf for leaf, address in enumerate(addresses) if address in awaited}
    assert begun == (set(range(6)) - guarded - copied)
    assert order.count("fence") == (bool(copied) or len(guarded) < 6)
    (event,) = seen.work.source_events
    moved = order[len(event.after) + order.count("fence") :]
    assert {address in moved for address in addresses} == {False}  # from a device copy, whose address is another
    assert bool(moved) == bool(copied)


@pytest.mark.parametrize("guarded", [frozenset[int](), frozenset({0, *range(2, 50)})])
def test_no_chunk_is_written_before_the_copies_into_it_though_they_were_issued_before_its_run(
    monkeypatch: pytest.MonkeyPatch, guarded: frozenset[int]
) -> None:
    """The last runs hold small tensors, which are issued before the large ones of the first run."""
    small = 200 << 10
    with watched_capture(monkeypatch, state_of([9 * MIB, 26 * MIB, *[small] * 400]), guarded, None) as seen:
        pass
    found, chunks = dict.fromkeys(range(2, 402), 0), seen.image.chunks
    for indices, events in seen.reported:
        before = {entry for event in events for entry in event.after}  # type: ignore[attr-defined]
        start, stop = chunks[indices[0]].start, chunks[indices[-1]].stop
        for item in seen.plan.layout.items:
            if item.leaf in found and item.raw_offset < stop and start < item.raw_offset + small:
                assert seen.plan.fingerprint[item.leaf] in before, (indices, item.fqns)
                found[item.leaf] += 1
    assert len(seen.reported) > 2
    assert all(found.values())


def test_a_cut_is_made_once_and_cannot_be_changed() -> None:
    table = CopyTable(np.array([[0, 100, 10], [10, 200, 10]], dtype=np.uint64), np.array([7, 3]))
    cut = table.within(5, 15)
    assert (cut.leaves.tolist(), table.within(10, 15).leaves.tolist()) == ([7, 3], [3])
    assert table.within(5, 15) is cut
    assert table.within(0, 15) is not cut
    with pytest.raises(ValueError, match="read-only"):
        cut.vectors[0, 0] = 1
