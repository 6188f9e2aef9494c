"""Plans: the structure shows every change of structure, the cache holds layout and never data."""

from __future__ import annotations

import contextlib
import gc
import io
import mmap
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from aio_ckpt import PerRank, SyncCheckpointEngine
from aio_ckpt.errors import SourceChangedError, UnsupportedLeafError
from aio_ckpt.plan import plan_cache, structure
from aio_ckpt.plan.assignment import Assignment
from aio_ckpt.plan.copy_plan import SMALL_COPY_BYTES
from aio_ckpt.plan.plan_cache import PlanCache
from aio_ckpt.plan.pointer_fingerprint import fingerprint_of
from aio_ckpt.plan.save_plan import Plan, PlannedSave, narrow
from aio_ckpt.plan.structure import Leaves, Structure
from aio_ckpt.plan.tied_tensors import partition
from aio_ckpt.state.flatten import FlatState, flatten

W = torch.arange(8.0)
OTHER = torch.arange(8.0)


def flat_of(state: object) -> FlatState:
    return flatten(state, rank=0)


def describe(state: object) -> tuple[Structure, list[int]]:
    flat = flat_of(state)
    leaves = Leaves.of(flat)
    structure = Structure.of(flat, leaves)
    return structure, partition(structure, fingerprint_of(leaves.tensors))


def is_of(structure: Structure, state: object) -> bool:
    flat = flat_of(state)
    return structure.is_of(flat, Leaves.of(flat))


def resolve(cache: PlanCache, state: object) -> PlannedSave:
    return cache.resolve(flat_of(state))


# -- the structure covers, in the order of DESIGN §7 ----------------------------------------------

pair = torch.arange(8.0).to(torch.complex64)
Point = type("Point", (), {"__module__": "one"})
OtherPoint = type("Point", (), {"__module__": "two"})

STRUCTURE_CASES: dict[str, tuple[object, object]] = {
    "names": ({"a": W}, {"b": W}),
    "name of an object": ({"a": 1}, {"b": 1}),
    "order of names": ({"a": W, "b": OTHER}, {"b": OTHER, "a": W}),
    "number of leaves": ({"a": W}, {"a": W, "b": OTHER}),
    "number of objects": ({"a": 1}, {"a": 1, "b": 1}),
    "nesting": ({"a": {"b": W}}, {"a.b": W}),
    "container type": ({"a": {"b": W}}, {"a": OrderedDict(b=W)}),
    "list or tuple": ({"a": [W]}, {"a": (W,)}),
    "key type": ({"a": {0: W}}, {"a": {"0": W}}),
    "key of equal value": ({"a": {1: W}}, {"a": {True: W}}),
    "empty container": ({"a": W}, {"a": W, "b": {}}),
    "per rank": ({"a": {"rank0": W}}, {"a": PerRank(W)}),
    "exact tensor type": ({"a": W}, {"a": torch.nn.Parameter(W)}),
    "tensor or array": ({"a": W}, {"a": W.numpy()}),
    "dtype": ({"a": W}, {"a": W.view(torch.int32)}),
    "local shape": ({"a": W}, {"a": W[:4]}),
    "number of dimensions": ({"a": W}, {"a": W.view(2, 4)}),
    "stride": ({"a": W[:4].view(2, 2)}, {"a": W[:4].view(2, 2).t()}),
    "requires_grad": ({"a": torch.zeros(8)}, {"a": torch.zeros(8, requires_grad=True)}),
    "conj bit": ({"a": pair}, {"a": pair.conj()}),
    "neg bit": ({"a": W}, {"a": torch._neg_view(W)}),
    "device kind": ({"a": W}, {"a": torch.empty(8, device="meta")}),
    "type of an object": ({"a": 1}, {"a": 1.0}),
    "type of an object of the same value": ({"a": 1}, {"a": True}),
    "class of the same name": ({"a": Point()}, {"a": OtherPoint()}),
    "tied": ({"a": W, "b": OTHER}, {"a": W, "b": W}),
    "which are tied": ({"a": W, "b": W, "c": OTHER}, {"a": W, "b": OTHER, "c": OTHER}),
    "how many are tied": ({"a": W, "b": W, "c": OTHER}, {"a": W, "b": W, "c": W}),
    "tied as views": ({"a": W[:4], "b": W[:4]}, {"a": W[:4], "b": W[4:]}),
}


@pytest.mark.parametrize("field", STRUCTURE_CASES)
def test_the_structure_covers(field: str):
    before, after = STRUCTURE_CASES[field]
    assert describe(before) != describe(after)


CANNOT_BE_PLANNED = ("device kind",)


@pytest.mark.parametrize("field", [field for field in STRUCTURE_CASES if field not in CANNOT_BE_PLANNED])
def test_a_change_is_a_miss_and_so_is_the_way_back(field: str):
    before, after = STRUCTURE_CASES[field]
    cache = PlanCache()
    found = [resolve(cache, state) for state in (before, after, before, before)]
    assert [planned.plan_hit for planned in found] == [False, False, False, True]
    assert found[0].plan.structure == found[2].plan.structure == found[3].plan.structure
    assert (cache.hits, cache.misses) == (1, 3)


NOT_STRUCTURE: dict[str, tuple[object, object]] = {
    "values": ({"a": torch.zeros(8)}, {"a": torch.ones(8)}),
    "addresses": ({"a": W, "b": OTHER}, {"a": W.clone(), "b": OTHER.clone()}),
    "storage offset": ({"a": W[:2]}, {"a": W[2:4]}),
    "value of an object": ({"a": 1}, {"a": 1 << 4000}),
    "length of an object": ({"a": b"x"}, {"a": b"x" * 1000}),
    "what is inside an object": ({"a": [1, "b"]}, {"a": [None, {1.5}]}),
    "an array of objects": ({"a": np.array(["x"])}, {"a": np.array(["longer", "two"])}),
    "equal objects": ({"a": "x", "b": "y"}, {"a": "x", "b": "x"}),
    "empty tensors in common": ({"a": W[:0], "b": OTHER[:0]}, {"a": W[:0], "b": W[:0]}),
}


@pytest.mark.parametrize("field", NOT_STRUCTURE)
def test_the_structure_does_not_cover(field: str):
    before, after = NOT_STRUCTURE[field]
    assert describe(before) == describe(after)
    cache = PlanCache()
    assert [resolve(cache, state).plan_hit for state in (before, after)] == [False, True]


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """Rank 0 of 2, without a peer: what meshes and placements are made of."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def assign_replicas(
    order: list[int], placement: object, shape: tuple[int, ...] = (4, 2), **mesh: object
) -> dict[str, DTensor]:
    found = DeviceMesh("cpu", order, **mesh)
    local = W[:4].view(2, 2)
    return {"a": DTensor.from_local(local, found, [placement], run_check=False, shape=torch.Size(shape), stride=(2, 1))}


SHARD_CASES: dict[str, Callable[[], dict[str, DTensor]]] = {
    "global shape": lambda: assign_replicas([0, 1], Shard(0), (3, 2)),
    "offset": lambda: assign_replicas([1, 0], Shard(0)),
    "placement": lambda: assign_replicas([0, 1], Shard(1)),
    "kind of placement": lambda: assign_replicas([0, 1], Replicate()),
    "kind of shard": lambda: assign_replicas([0, 1], _StridedShard(0, split_factor=2)),
    "mesh": lambda: assign_replicas([0], Shard(0)),
    "names of the mesh": lambda: assign_replicas([0, 1], Shard(0), mesh_dim_names=("dp",)),
    "a plain tensor": lambda: {"a": W[:4].view(2, 2)},
}


@pytest.mark.parametrize("field", SHARD_CASES)
def test_the_structure_covers_of_a_dtensor(two_ranks: None, field: str):
    before, again, after = assign_replicas([0, 1], Shard(0)), assign_replicas([0, 1], Shard(0)), SHARD_CASES[field]()
    assert describe(before) == describe(again)
    assert describe(before) != describe(after)
    assert is_of(describe(before)[0], again)
    assert not is_of(describe(before)[0], after)


def test_a_sum_that_no_rank_holds_is_refused_by_name(two_ranks: None) -> None:
    state = {"grad": DTensor.from_local(torch.ones(2), DeviceMesh("cpu", [0, 1]), [Partial()], run_check=False)}
    with pytest.raises(UnsupportedLeafError, match=r"'grad': a DTensor with a Partial placement.*redistribute"):
        resolve(PlanCache(world_size=2), state)


@pytest.mark.skipif(
    not hasattr(DeviceMesh, "mesh"), reason="a mesh of torch before 2.10 holds its ranks: nothing is made to read them"
)
def test_the_ranks_of_a_mesh_are_read_once_however_many_tensors_lie_on_it_and_however_often_it_is_saved(
    two_ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structure, "_MESH_KEYS", weakref.WeakKeyDictionary())  # those of other tests look the same
    mesh, other = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 0])
    local = torch.ones(2, 2)
    state = {f"{i}": DTensor.from_local(local, mesh, [Shard(0)], run_check=False) for i in range(5)}
    state["other"] = DTensor.from_local(local, other, [Shard(0)], run_check=False)
    read = list[DeviceMesh]()

    def mesh_of(self: DeviceMesh) -> torch.Tensor:
        read.append(self)
        return torch.tensor([0, 1] if self is mesh else [1, 0])

    monkeypatch.setattr(DeviceMesh, "mesh", property(mesh_of))
    shards = describe(state)[0].shards
    assert describe(state)[0].shards == shards
    assert read == [mesh, other]
    assert len({shard[1] for shard in shards.values()}) == 2


def test_a_dtensor_of_the_same_placement_is_a_hit_whatever_mesh_object_it_has(two_ranks: None):
    cache = PlanCache(world_size=2)
    first = resolve(cache, assign_replicas([0, 1], Shard(0)))
    assert not first.plan_hit
    assert not resolve(cache, assign_replicas([0, 1], Shard(0))).plan_hit, "not before the ranks have agreed"
    cache.adopt(replace(first.plan, share_id=b"agreed"))
    assert [resolve(cache, assign_replicas([0, 1], Shard(0))).plan_hit for _ in range(2)] == [True, True]


def test_what_was_agreed_is_saved_again_without_a_new_look_at_each_source() -> None:
    memory, cache = bytearray(64), PlanCache(world_size=2)
    long, short = (torch.frombuffer(memory, dtype=torch.float32, count=count)[:4] for count in (16, 4))
    plan = resolve(cache, {"a": long}).plan
    cache.adopt(narrow(plan, Assignment.of([True], []), b"agreed", b"\0", None))
    assert resolve(cache, {"a": long}).fingerprint_hit
    assert not resolve(cache, {"a": short}).fingerprint_hit, "its address holds less now"
    assert resolve(cache, {"a": short}).fingerprint_hit


keys = st.sampled_from(["a", "b", 0, 1, True])
leaves = st.sampled_from([W, OTHER, W[:4], W.numpy(), 1, 1.0, "x", None])
states = st.dictionaries(
    keys, leaves | st.dictionaries(keys, leaves, max_size=2) | st.lists(leaves, max_size=2), min_size=1, max_size=3
)


@examples(100)
@given(states, states)
def test_a_state_has_a_structure_exactly_when_its_own_equals_it(one, two):
    try:
        (structure, _), (other, _) = describe(one), describe(two)
    except ValueError:  # names equal as text, or no leaf
        return
    assert is_of(structure, two) == (structure == other)


# -- hits, misses and what drops the cache --------------------------------------------------------


def test_hits_and_misses_are_counted_and_one_plan_only_is_kept():
    cache = PlanCache()
    states = [{"a": W}, {"a": W}, {"b": W}, {"a": W}, {"a": W}]
    assert [resolve(cache, state).plan_hit for state in states] == [False, True, False, False, True]
    assert (cache.hits, cache.misses) == (2, 3)


def test_a_cleared_cache_misses_once():
    cache = PlanCache()
    resolve(cache, {"a": W})
    cache.clear()
    cache.clear()
    assert [resolve(cache, {"a": W}).plan_hit for _ in range(2)] == [False, True]


def test_a_refused_state_leaves_the_next_one_a_miss_or_right():
    cache = PlanCache()
    resolve(cache, {"a": W})
    with pytest.raises(UnsupportedLeafError, match="'a'"):
        resolve(cache, {"a": W.to_mkldnn()})
    with pytest.raises(UnsupportedLeafError, match="'a'"):
        resolve(cache, {"a": torch.empty(8, device="meta")})
    found = resolve(cache, {"a": W})
    assert found.plan.copies.moved.vectors[:, 2].tolist() == [32]


def test_a_hit_resolves_the_tensors_of_this_very_save():
    cache = PlanCache()
    first, second = {"a": W.clone(), "o": [1]}, {"a": W.clone(), "o": [2]}
    resolve(cache, first)
    found = resolve(cache, second)
    assert found.plan_hit
    assert found.tensors[0] is second["a"]
    assert found.objects == [("o", [2])]
    assert found.plan.fingerprint == [second["a"].data_ptr()]


# -- the cache holds layout, never data -----------------------------------------------------------

DATA = (torch.Tensor, torch.UntypedStorage, np.ndarray, memoryview, mmap.mmap, io.IOBase, bytearray)
STOPS = (type, ModuleType, FunctionType)


def reachable(root: object) -> Iterator[object]:
    """Everything that ``root`` keeps alive, but for classes, modules and functions."""
    seen, queue = {id(root)}, [root]
    while queue:
        found = queue.pop()
        yield found
        for inner in gc.get_referents(found):
            if id(inner) not in seen and not isinstance(inner, STOPS):
                seen.add(id(inner))
                queue.append(inner)


def rich_state() -> dict[str, object]:
    parameter = torch.nn.Parameter(torch.ones(5))
    return {
        "small": torch.ones(9),
        "large": torch.ones(SMALL_COPY_BYTES),
        "strided": torch.ones(8, 8)[:, ::2],
        "array": np.ones(7),
        "scalar": np.float32(2),
        "tied": [parameter, parameter],
        "stream": io.BytesIO(b"x"),
        "bytes": bytearray(b"x"),
        "objects": [np.ones(2), {"k": 1}],
    }


class ClearedAtEachLook(PlanCache):
    """A save that fails in the background clears the cache between any two steps of a trainer's thread."""

    def __getattribute__(self, name: str) -> object:
        value = super().__getattribute__(name)
        if name == "_plan":
            self._plan = None
        return value


def test_a_cache_that_is_cleared_meanwhile_is_a_hit_or_a_miss_and_no_error():
    cache = ClearedAtEachLook()
    state = {"a": torch.ones(3)}
    for _ in range(3):
        assert resolve(cache, state).plan.stored_names == {"a"}
        cache.__dict__["_plan"] = resolve(PlanCache(), state).plan


def assert_holds_no_data(plan: Plan) -> None:
    found = list(reachable(plan))
    assert len(found) > 100  # it did look
    # The two index arrays of a chunk are layout: where its sums go.
    allowed = {id(getattr(chunk.sums, name)) for chunk in plan.layout.chunks for name in chunk.sums.__slots__}
    # Numbers, whose arrays are their own: addresses, and where they go.
    tables = [plan.copies.moved, *plan.copies.issued.values()]
    numbers = [array for table in tables for array in (table.vectors, table.leaves)]
    assert all(array.base is None for array in numbers)
    allowed |= {id(array) for array in numbers}
    assert [type(thing) for thing in found if isinstance(thing, DATA) and id(thing) not in allowed] == []


def test_a_cached_plan_holds_no_tensor_storage_handle_or_view():
    cache = PlanCache()
    for _ in range(2):
        assert_holds_no_data(resolve(cache, rich_state()).plan)


def test_a_cached_plan_of_dtensors_holds_no_tensor_storage_handle_or_view(two_ranks: None):
    state = {**assign_replicas([0, 1], Shard(0)), "b": assign_replicas([0, 1], Replicate())["a"]}
    assert_holds_no_data(resolve(PlanCache(world_size=2), state).plan)


def test_nothing_that_was_saved_is_kept_alive_by_the_engine(tmp_path):
    def weak(value: object) -> list[weakref.ref]:
        if isinstance(value, (torch.Tensor, np.ndarray, io.BytesIO)):
            return [weakref.ref(value)]
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return [ref for item in inner for ref in weak(item)]

    with SyncCheckpointEngine(tmp_path) as engine:
        for _ in range(2):
            state = rich_state()
            refs = weak(state)
            assert len(refs) == 8
            engine.save(state).result(60)
            del state
            gc.collect()
            assert [ref() for ref in refs if ref() is not None] == []


# -- aliases --------------------------------------------------------------------------------------


def aliases_of(*tensors: torch.Tensor) -> list[int]:
    state = {f"n{index}": tensor for index, tensor in enumerate(tensors)}
    return describe(state)[1]


PARTITIONS: dict[str, tuple[list[torch.Tensor], list[int]]] = {
    "different tensors": ([W, OTHER], [0, 1]),
    "the same tensor": ([W, OTHER, W, OTHER, W], [0, 1, 0, 1, 0]),
    "the same view": ([W[2:], W[2:]], [0, 0]),
    "a parameter and its data": ([torch.nn.Parameter(W), W], [0, 0]),
    "another length": ([W, W[:4]], [0, 1]),
    "another shape": ([W, W.view(2, 4)], [0, 1]),
    "another stride": ([W[:4].view(2, 2), W[:4].view(2, 2).t()], [0, 1]),
    "another dtype": ([W, W.view(torch.int32)], [0, 1]),
    "another offset": ([W[:4], W[4:]], [0, 1]),
    "conjugate": ([pair, pair.conj(), pair.conj()], [0, 1, 1]),
    "negative": ([W, torch._neg_view(W)], [0, 1]),
    "empty": ([W[:0], W[:0], OTHER[:0]], [0, 1, 2]),
}


@pytest.mark.parametrize("case", PARTITIONS)
def test_leaves_share_an_item_exactly_when_they_show_the_same_bytes_the_same_way(case: str):
    tensors, wanted = PARTITIONS[case]
    assert aliases_of(*tensors) == wanted


@examples(60)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=12))
def test_tied_weights_are_stored_once_under_all_their_names(picks: list[int]):
    pool = [torch.empty(3) for _ in range(5)]
    plan = resolve(PlanCache(), {f"n{index}": pool[pick] for index, pick in enumerate(picks)}).plan
    groups: dict[int, list[str]] = {}
    for index, pick in enumerate(picks):
        groups.setdefault(pick, []).append(f"n{index}")
    assert [list(item.fqns) for item in plan.layout.items] == list(groups.values())
    assert plan.stored_names == {f"n{index}" for index in range(len(picks))}


# -- sources that are gone ------------------------------------------------------------------------


@pytest.mark.parametrize("is_cached", [False, True], ids=["on a miss", "on a hit"])
@pytest.mark.parametrize("left", [0, 28], ids=["freed", "shrunk"])
@pytest.mark.parametrize("offset", [0, 2], ids=["whole", "view"])
def test_a_tensor_whose_storage_was_freed_or_shrunk_is_refused_by_name(is_cached: bool, left: int, offset: int):
    cache = PlanCache()
    tensor = torch.arange(10.0)[offset:]
    state = {"object": 1, "model": {"w": tensor}}
    if is_cached:
        resolve(cache, state)
    tensor.untyped_storage().resize_(left)
    with pytest.raises(SourceChangedError, match=r"'model\.w': .* needs 40 bytes of its storage, which has"):
        resolve(cache, state)
    tensor.untyped_storage().resize_(40)
    assert resolve(cache, state).tensors[0] is tensor


def test_a_storage_that_came_back_shorter_at_its_old_address_is_refused():
    """Fingerprints are equal then: the length must be looked at, or the copy reads past the end."""
    cache = PlanCache()
    tensor = torch.empty(10 << 20)  # mapped on its own, so that the same place is free again
    storage = tensor.untyped_storage()
    address = storage.data_ptr()
    resolve(cache, {"w": tensor})
    for less in range(4, 2000, 4):
        storage.resize_(0)
        storage.resize_((40 << 20) - less)
        if storage.data_ptr() == address:
            break
    assert storage.data_ptr() == address
    with pytest.raises(SourceChangedError, match="'w'"):
        resolve(cache, {"w": tensor})


def test_an_empty_view_of_a_freed_storage_is_fine():
    tensor = torch.arange(10.0)
    view = tensor[:0]
    tensor.untyped_storage().resize_(0)
    assert resolve(PlanCache(), {"w": view}).plan.layout.raw_bytes == 0


@pytest.mark.parametrize("is_on", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_planning_anew_pauses_the_garbage_collector_and_leaves_it_as_it_was(
    monkeypatch: pytest.MonkeyPatch, is_on: bool, fails: bool
) -> None:
    inside, inner = list[bool](), plan_cache.make_plan

    def watched(*arguments: Any, **options: Any) -> Plan:
        inside.append(gc.isenabled())
        if fails:
            raise SourceChangedError("while it is planned")
        return inner(*arguments, **options)

    monkeypatch.setattr(plan_cache, "make_plan", watched)
    (gc.enable if is_on else gc.disable)()
    try:
        with pytest.raises(SourceChangedError) if fails else contextlib.nullcontext():
            resolve(PlanCache(), {"a": W})
        assert (inside, gc.isenabled()) == ([False], is_on)
    finally:
        gc.enable()


def test_new_addresses_are_looked_at_with_the_garbage_collector_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, inside = PlanCache(), list[bool]()
    resolve(cache, {"a": W})

    def watched(*arguments: Any) -> list[int]:
        inside.append(gc.isenabled())
        return partition(*arguments)

    monkeypatch.setattr(plan_cache, "partition", watched)
    found = resolve(cache, {"a": W.clone()})
    assert (found.plan_hit, found.fingerprint_hit, inside, gc.isenabled()) == (True, False, [False], True)
