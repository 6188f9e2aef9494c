"""Compound tensors: every one comes back bit for bit from its parts, and parts of no tensor are told."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tensor_bits import assert_same_tensor, random_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore
from tree_states import build_below, round_trip, stored
from wrapper_tensors import Blockwise, Casting, Nested, Tagged, Token, blockwise, nested

from aio_ckpt.errors import CorruptCheckpointError, UnsafeObjectError, UnsupportedLeafError
from aio_ckpt.leaves.compound import difference, take_apart
from aio_ckpt.leaves.objects import encode_object
from aio_ckpt.leaves.tensor_memory import unwrapped
from aio_ckpt.leaves.values import PerRank
from aio_ckpt.state.build import build
from aio_ckpt.state.check_leaves import check_leaves
from aio_ckpt.state.flatten import flatten, read_template
from aio_ckpt.state.names import compound_notes
from aio_ckpt.state.skeleton import decode_skeleton, encode_skeleton

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.bool]


@st.composite
def coo(draw):
    """Sorted or not, with indices twice or not, with dense dimensions or not."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dense = draw(st.lists(st.integers(0, 2), max_size=2))
    rows = draw(st.lists(st.tuples(*(st.integers(0, size - 1) for size in shape)), max_size=5))
    indices = torch.tensor(rows, dtype=torch.int64).reshape(len(rows), len(shape)).T
    values = random_tensor((len(rows), *dense), draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99)))
    made = torch.sparse_coo_tensor(indices, values, (*shape, *dense), check_invariants=True)
    return made.coalesce() if draw(st.booleans()) and values.dtype is not torch.bool else made


def assert_same_compound(got, wanted):
    """Equal by notes (shape, layout, mark of coalesced) and, bit for bit, by parts."""
    assert type(got) is torch.Tensor
    one, other = take_apart(got, "x"), take_apart(wanted, "x")
    assert (one.notes, list(one.parts)) == (other.notes, list(other.parts))
    for name, part in one.parts.items():
        assert_same_tensor(part, other.parts[name])


@given(coo(), st.booleans())
def test_a_sparse_tensor_comes_back_bit_for_bit_from_its_parts(tensor, needs_grad):
    if needs_grad and (tensor.is_floating_point() or tensor.is_complex()):
        tensor.requires_grad_()
    made = round_trip({"a": [tensor, 1], "b": torch.ones(1)})
    assert_same_compound(made["a"][0], tensor)
    assert made["a"][0].requires_grad == tensor.requires_grad


def test_a_wrapper_inside_a_wrapper_has_parts_below_parts_and_a_trusted_reader_makes_them_all():
    flat = flatten({"n": nested(3)}, rank=0)
    assert flat.names == ["n.inner.codes", "n.inner.scale", "n.mask.indices", "n.mask.values"]
    made = round_trip({"n": nested(3)}, trusted=True)["n"]
    assert [type(made), type(made.inner)] == [Nested, Blockwise]
    assert (made.inner.codes.tolist(), made.mask.to_dense().diag().tolist()) == ([[3] * 8] * 4, [3] * 4)
    plain = []
    made = round_trip({"n": nested(3)}, plain=plain)["n"]
    assert (made["inner"]["scale"].tolist(), made["mask"].is_sparse) == ([3] * 4, True)
    assert plain == ["n.inner (wrapper_tensors.Blockwise)", "n (wrapper_tensors.Nested)"]


@pytest.mark.parametrize(
    ("local", "is_unwrapped"),
    [
        (Casting(torch.ones(2, 3)), True),
        (Casting(torch.ones(2, 3), torch.ones(())), True),
        (Casting(Casting(torch.ones(2, 3))), False),  # no case that anybody has
        (blockwise(3), False),  # its values are no inner tensor
        (nested(3), False),
        (torch.ones(2, 3).as_subclass(Tagged), False),
        (torch.nn.Parameter(torch.ones(2, 3)), False),
    ],
)
def test_only_a_wrapper_of_one_tensor_of_its_own_shape_and_dtype_is_unwrapped(local, is_unwrapped):
    assert unwrapped(local) is (local._tensor if is_unwrapped else local)


def test_a_dtensor_over_a_subclass_is_refused_with_a_remedy_that_works():
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        local = blockwise(3)
        mesh = init_device_mesh("cpu", (2,))
        tensor = DTensor.from_local(local, mesh, [Replicate()], run_check=False, shape=(4, 8), stride=(8, 1))
        with pytest.raises(
            UnsupportedLeafError, match=r"'t': a DTensor over a wrapper_tensors.Blockwise; give PerRank"
        ):
            check_leaves(flatten({"t": tensor}, rank=1))
    finally:
        dist.destroy_process_group()
    flat = flatten({"t": PerRank(local)}, rank=1)
    assert flat.names == ["t.rank1.codes", "t.rank1.scale"]
    assert type(round_trip({"t": PerRank(local)}, rank=1, trusted=True)["t"]) is Blockwise


def test_a_subclass_with_memory_of_its_own_keeps_its_attributes():
    tensor = torch.arange(3.0).as_subclass(Tagged)
    tensor.space = "RGB"
    tensor.requires_grad_()
    flat = flatten({"t": tensor}, rank=0)
    assert flat.values[0].data_ptr() == tensor.data_ptr()
    assert type(flat.values[0]) is torch.Tensor
    made = round_trip({"t": tensor}, trusted=True)["t"]
    assert (type(made), made.space, made.tolist(), made.requires_grad) == (Tagged, "RGB", [0, 1, 2], True)
    made = round_trip({"t": tensor})["t"]
    assert (type(made), made.tolist()) == (torch.Tensor, [0, 1, 2])


def test_a_context_that_pickle_cannot_store_is_told_by_name():
    tensor = blockwise(1)
    tensor.signed = lambda: None
    with pytest.raises(UnsafeObjectError, match=r"a\.0: the context"):
        flatten({"a": [tensor]}, rank=0)


@pytest.mark.parametrize(("first", "second"), [(True, 1), ([1], (1,)), (0.0, -0.0), ({"a": 1}, {"a": 2})])
def test_contexts_that_differ_are_stored_apart(first, second):
    found = [dict(take_apart(blockwise(1, signed=signed), "t").notes)["context"] for signed in (first, second, first)]
    assert found[0] != found[1]
    assert found[0] is found[2]


@pytest.mark.parametrize(
    ("own", "stored", "word"),
    [
        (blockwise(1), blockwise(2), None),
        (blockwise(1), blockwise(1, signed=False), "other settings"),
        (blockwise(1), blockwise(1, Token), "is a Blockwise in the template and a Token in the checkpoint"),
        (blockwise(1, Token), blockwise(1, Token, signed=False), None),  # no reader without trust knows
    ],
)
def test_a_template_must_have_the_settings_that_are_stored(own, stored, word):
    found = difference(take_apart(own, "t").notes, take_apart(stored, "t").notes)
    assert found is None if word is None else word in found


def test_settings_of_another_device_are_the_same():
    own, stored = (dict(take_apart(blockwise(1), "t").notes) for _ in range(2))
    stored["context"] = encode_object("t", [True, torch.float32, torch.device("cuda:1")])
    assert difference(tuple(own.items()), tuple(stored.items())) is None


class Failing(Blockwise):
    @classmethod
    def __tensor_unflatten__(cls, *_):
        raise ArithmeticError


def test_a_type_that_raises_when_it_is_made_comes_back_as_its_parts():
    plain = []
    made = round_trip({"t": blockwise(1, Failing)}, trusted=True, plain=plain)["t"]
    assert (list(made), len(plain)) == (["codes", "scale"], 1)


def test_a_tensor_whose_values_another_rank_still_sends_is_refused():
    tensor = torch.distributed._functional_collectives.AsyncCollectiveTensor(torch.ones(1))
    with pytest.raises(UnsupportedLeafError, match=r"'t': an AsyncCollectiveTensor.*wait"):
        check_leaves(flatten({"t": tensor}, rank=0))


def test_a_name_has_the_parts_below_it_in_every_mapping():
    state = {str(number): torch.ones(1) for number in range(20)} | {"s": torch.eye(2).to_sparse(), "deep": {}}
    state["deep"] = {"t": torch.eye(2).to_sparse(), "n": 1}
    flat = flatten(state, rank=0)
    assert flat.names[20:] == ["s.indices", "s.values", "deep.t.indices", "deep.t.values", "deep.n"]
    assert compound_notes(flat.skeleton, rank=0).keys() == {"s", "deep.t"}
    assert read_template(state, rank=0).names == flat.names
    assert round_trip(state, only=["s.values"])["s"]["values"].tolist() == [1, 1]
    assert round_trip(state, only=["deep.t"])["deep"]["t"].is_sparse


def test_containers_keep_their_numbers_behind_a_compound_tensor():
    shared = {"w": torch.ones(1)}
    made = round_trip({"s": torch.eye(2).to_sparse(), "one": (shared,), "two": [shared]})
    assert made["one"][0] is made["two"][0]
    holding, last = {"s": torch.eye(2).to_sparse(), "empty": {}}, [{"w": torch.ones(1)}]
    state = {"s": torch.eye(2).to_sparse(), "one": holding, "two": (holding,), "in": {"one": last, "two": [last]}}
    made = round_trip(state)
    assert made["one"] is made["two"][0]
    assert made["in"]["one"] is made["in"]["two"][0]
    flat = flatten(state, rank=0)
    below = build_below(flat.skeleton, "in", stored(flat), rank=0)
    assert below["one"] is below["two"][0]


def test_a_tensor_with_two_names_is_one_tensor():
    tensor = torch.eye(2).to_sparse()
    flat = flatten({"a": tensor, "b": tensor}, rank=0)
    parts = {"indices": torch.zeros(2, 1, dtype=torch.int64), "values": torch.ones(1)}
    made = build(flat.skeleton, {name: parts[name.partition(".")[2]] for name in flat.names}, rank=0)
    assert made["a"] is made["b"]


@pytest.mark.parametrize("change", [{"indices": torch.tensor([[0, 9], [0, 1]])}, {"values": torch.ones(3)}])
def test_parts_of_no_tensor_are_told_before_any_memory_is_read_by_them(change):
    flat = flatten({"s": torch.eye(2).to_sparse()}, rank=0)
    parts = {"s.indices": torch.tensor([[0, 1], [0, 1]]), "s.values": torch.ones(2)}
    with pytest.raises(CorruptCheckpointError, match="'s': its parts are of no tensor"):
        build(flat.skeleton, parts | {f"s.{name}": part for name, part in change.items()}, rank=0)


@pytest.mark.parametrize(
    "node",
    [
        [25, [], [], [["layout", "sparse_coo"]]],
        [25, ["values"], [0]],
        [25, [["i", "1"]], [0], [["layout", "sparse_coo"]]],
        [25, ["values"], [0], [["layout", 1]]],
        [25, ["values"], [0], [["shape", ["a"]]]],
        [25, ["values"], [0], [["shape", 3]]],
    ],
)
def test_a_node_that_no_writer_makes_is_damage(node):
    data = encode_skeleton((16, ("s",), (node,)))
    with pytest.raises(CorruptCheckpointError, match="skeleton"):
        decode_skeleton(data, name="m.bin")
