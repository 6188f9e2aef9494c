"""S4: a cached plan never copies from an address of an earlier save (nvidia-resiliency-ext #314).

Named mutation: take the cached copy descriptors without comparing the fingerprint.
"""

from __future__ import annotations

import errno
import gc
import mmap
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
from gated_storage import gated_engine
from tensor_bits import assert_same_tensor
from torch.distributed.tensor import DeviceMesh, DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from aio_ckpt import SaveReport, SoloCoordinator, SyncCheckpointEngine
from aio_ckpt.commit.manifests import object_entries
from aio_ckpt.errors import SourceChangedError, UnsupportedLeafError, WriteError
from aio_ckpt.leaves.objects import ObjectBytes
from aio_ckpt.plan.copy_plan import SMALL_COPY_BYTES
from aio_ckpt.plan.pointer_fingerprint import fingerprint_of
from aio_ckpt.plan.structure import Leaves, Structure
from aio_ckpt.plan.tied_tensors import partition
from aio_ckpt.state.flatten import flatten

SMALL, LARGE = 1000, SMALL_COPY_BYTES  # floats: copied by address, and by torch
SIZES = pytest.mark.parametrize("numel", [SMALL, LARGE], ids=["by address", "by torch"])


@pytest.fixture
def engine(tmp_path):
    with SyncCheckpointEngine(tmp_path) as engine:
        yield engine


def save(engine: SyncCheckpointEngine, state: object) -> SaveReport:
    return engine.save(state).result(60)


def assert_stored(engine: SyncCheckpointEngine, report: SaveReport, **wanted: torch.Tensor) -> None:
    found = engine.read(report.step)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert_same_tensor(found[name], tensor)


def hits(report: SaveReport) -> tuple[bool, bool]:
    return report.plan_hit, report.fingerprint_hit


MISS, MOVED, SAME = (False, False), (True, False), (True, True)


@SIZES
def test_fresh_allocations_of_the_same_structure_are_each_saved_with_their_own_values(engine, numel: int):
    states = [{"w": torch.full((numel,), float(value))} for value in range(3)]
    assert len({state["w"].data_ptr() for state in states}) == 3
    reports = [save(engine, state) for state in states]
    assert [hits(report) for report in reports] == [MISS, MOVED, MOVED]
    assert (engine.plan_hits, engine.plan_misses) == (2, 1)
    for value, report in enumerate(reports):
        assert_stored(engine, report, w=torch.full((numel,), float(value)))
    template = {"w": torch.zeros(numel)}
    engine.load(template)
    assert template["w"].unique().tolist() == [2.0]


@SIZES
def test_a_memory_that_is_freed_and_allocated_again_at_the_same_address_is_read_anew(engine, numel: int):
    """(a) The fingerprint rightly hits: it is the bytes that must not be cached."""
    pool = mmap.mmap(-1, 4 * numel)  # an allocator that gives the same block twice
    first = torch.frombuffer(pool, dtype=torch.float32).fill_(1)
    address, gone = first.data_ptr(), weakref.ref(first)
    assert hits(save(engine, {"w": first})) == MISS
    del first
    assert gone() is None
    second = torch.frombuffer(pool, dtype=torch.float32).fill_(2)
    assert second.data_ptr() == address
    report = save(engine, {"w": second})
    assert hits(report) == SAME
    assert_stored(engine, report, w=torch.full((numel,), 2.0))


@SIZES
def test_a_storage_resized_to_nothing_is_refused_and_saved_when_it_is_back(engine, numel: int):
    """(b) As FSDP does between forward and backward."""
    state = {"w": torch.full((numel,), 1.0), "other": torch.ones(2)}
    storage = state["w"].untyped_storage()
    assert hits(save(engine, state)) == MISS
    storage.resize_(0)
    with pytest.raises(SourceChangedError, match=r"'w': .* freed or resized"):
        engine.save(state)
    assert engine.steps() == [1]
    storage.resize_(4 * numel)
    state["w"].fill_(2)
    report = save(engine, state)
    assert report.step == 2
    assert_stored(engine, report, w=torch.full((numel,), 2.0), other=torch.ones(2))


VIEWS = {
    "storage offset": (lambda base: base[16:32].view(4, 4), MOVED),
    "stride": (lambda base: base[:16].view(4, 4).t(), MISS),
    "gaps": (lambda base: base[:32].view(4, 8)[:, ::2], MISS),
    "dtype": (lambda base: base[:16].view(torch.int32).view(4, 4), MISS),
    "half as wide": (lambda base: base[:8].view(torch.int16).view(4, 4), MISS),
    "shape": (lambda base: base[:16].view(2, 8), MISS),
    "neg": (lambda base: torch._neg_view(base[:16].view(4, 4)), MISS),
}


@pytest.mark.parametrize("change", VIEWS)
def test_another_view_of_the_same_storage_is_saved_as_that_view(engine, change: str):
    """(c)"""
    base = torch.arange(64.0)
    make, expected = VIEWS[change]
    save(engine, {"w": base[:16].view(4, 4)})
    view = make(base)
    assert view.untyped_storage().data_ptr() == base.data_ptr()
    report = save(engine, {"w": view})
    assert hits(report) == expected
    assert_stored(engine, report, w=view)


def test_the_same_address_under_another_storage_offset_is_checked_anew(engine):
    """(c) Two storages over one memory."""
    memory = bytearray(4096)
    whole = torch.frombuffer(memory, dtype=torch.float32)
    inner = torch.frombuffer(memory, dtype=torch.float32, offset=256)
    whole.copy_(torch.arange(1024.0))
    assert whole[64:128].data_ptr() == inner[:64].data_ptr()
    assert whole[64:128].storage_offset() != inner[:64].storage_offset()
    save(engine, {"w": whole[64:128]})
    report = save(engine, {"w": inner[:64]})
    assert hits(report) == MOVED
    assert_stored(engine, report, w=torch.arange(64.0, 128.0))


@SIZES
def test_two_names_swapped_to_each_others_storage_are_saved_swapped(engine, numel: int):
    """(d)"""
    a, b = torch.full((numel,), 1.0), torch.full((numel,), 2.0)
    save(engine, {"a": a, "b": b})
    report = save(engine, {"a": b, "b": a})
    assert hits(report) == MOVED
    assert_stored(engine, report, a=b, b=a)


@pytest.fixture
def two_ranks():
    """Rank 0 of 2, without a peer: what placements and offsets are made of."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def test_one_rank_alone_does_not_pass_its_shard_off_as_the_tensor(tmp_path, two_ranks):
    spread = DTensor.from_local(torch.ones(2, 3), DeviceMesh("cpu", [0, 1]), [Shard(0)], run_check=False)
    with SyncCheckpointEngine(tmp_path, coordinator=SoloCoordinator()) as engine:
        with pytest.raises(UnsupportedLeafError, match=r"'w': a shard of shape \(2, 3\) of a tensor of shape \(4, 3\)"):
            engine.save({"w": spread})
        assert engine.steps() == []


def test_lists_of_unequal_length_raise_and_never_truncate(engine):
    """(f)"""
    flat = flatten({"a": torch.ones(2), "b": torch.ones(2), "c": 1, "d": 2}, rank=0)
    leaves = Leaves.of(flat)
    structure = Structure.of(flat, leaves)
    fingerprint = fingerprint_of(leaves.tensors)
    with pytest.raises(ValueError, match=r"zip\(\)"):
        partition(structure, fingerprint[:-1])
    with pytest.raises(ValueError, match=r"zip\(\)"):
        partition(structure, [*fingerprint, 1])
    save(engine, {"a": torch.ones(2), "c": 1, "d": 2})
    plan = engine._resources.cache._plan
    one_object = ObjectBytes(region=b"abc", spans=((0, 3),))
    with pytest.raises(ValueError, match=r"zip\(\)"):
        object_entries(plan, one_object)
    with pytest.raises(ValueError, match="1 spans for 2 objects"):
        plan.metadata.fill(one_object.spans, checkpoint_id="c", save_id="s")


@SIZES
def test_values_changed_in_place_are_saved_from_the_same_addresses(engine, numel: int):
    """(g)"""
    state = {"w": torch.zeros(numel), "n": np.zeros(numel)}
    reports = []
    for value in range(3):
        state["w"].fill_(value)
        state["n"].fill(value)
        reports.append(save(engine, state))
    assert [hits(report) for report in reports] == [MISS, SAME, SAME]
    for value, report in enumerate(reports):
        found = engine.read(report.step)
        assert found["w"].unique().tolist() == [value]
        assert np.unique(found["n"]).tolist() == [value]


@SIZES
def test_a_parameter_given_other_data_is_saved_with_that_data(engine, numel: int):
    """(h)"""
    parameter = torch.nn.Parameter(torch.full((numel,), 1.0))
    old = parameter.data
    save(engine, {"w": parameter})
    parameter.data = torch.full((numel,), 2.0)
    report = save(engine, {"w": parameter})
    assert hits(report) == MOVED
    assert_stored(engine, report, w=torch.full((numel,), 2.0))
    assert old.unique().tolist() == [1.0]


@SIZES
def test_no_generation_of_tensors_is_kept_alive(engine, numel: int):
    """(i) Released when the save is done, not only after the next one, and without the garbage collector."""
    gc.disable()
    try:
        for value in range(3):
            state = {"w": torch.full((numel,), float(value)), "nested": [{"x": torch.ones(3)}], "o": value}
            gone = [weakref.ref(state["w"]), weakref.ref(state["nested"][0]["x"])]
            ticket = engine.save(state)
            ticket.result(60)
            del state
            assert [ref() for ref in gone] == [None, None]
    finally:
        gc.enable()


def test_a_memory_of_the_old_generation_can_be_unmapped_after_the_save(engine):
    """(i) A buffer that somebody still exports refuses to close."""
    for value in range(2):
        memory = mmap.mmap(-1, 1 << 16)
        array = np.frombuffer(memory, np.float32)
        array[:] = value
        report = save(engine, {"w": array})
        del array
        memory.close()
        assert np.unique(engine.read(report.step)["w"]).tolist() == [value]


@pytest.mark.parametrize("stage", ["make_dir", "create_data_file", "write", "sync", "write_file", "rename"])
def test_after_a_failed_save_the_next_is_a_miss(tmp_path, stage: str):
    """(j)"""
    state = {"w": torch.ones(SMALL), "o": [1]}
    with gated_engine(tmp_path) as (engine, storage):
        assert hits(engine.save(state).result(60)) == MISS
        assert hits(engine.save(state).result(60)) == SAME
        storage.fail(stage, "*", WriteError(errno.ENOSPC, "no room", "f"))
        ticket = engine.save(state)
        with pytest.raises(WriteError):
            ticket.result(60)
        assert hits(engine.save(state).result(60)) == MISS
        assert hits(engine.save(state).result(60)) == SAME
        assert engine.plan_hits == 3
        assert engine.plan_misses == 2


def test_after_clear_cache_the_next_save_is_a_miss(engine):
    """(j)"""
    state = {"w": torch.ones(SMALL)}
    save(engine, state)
    engine.clear_cache()
    assert hits(save(engine, state)) == MISS
    assert hits(save(engine, state)) == SAME


def test_descriptors_are_of_one_fingerprint_only(engine):
    """The addresses in the cache are those of the newest save, never a mix of two."""
    small = [{"a": torch.ones(8), "b": torch.ones(8)} for _ in range(3)]
    for state in (small[0], {"a": small[1]["a"], "b": small[0]["b"]}, small[2]):
        report = save(engine, state)
        plan = engine._resources.cache._plan
        addresses = [tensor.data_ptr() for tensor in state.values()]
        assert plan.fingerprint == addresses
        assert plan.copies.moved.vectors[:, 1].tolist() == addresses
        assert_stored(engine, report, **state)
