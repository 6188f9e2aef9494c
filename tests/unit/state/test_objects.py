"""Objects and arrays to bytes and back: by exact type and value, and without running code."""

from __future__ import annotations

import io
import math
import os
import pickle
import types
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples
from tree_states import Ordered, Point, round_trip, same, through_bytes

from aio_ckpt.errors import (
    CorruptCheckpointError,
    UnsafeObjectError,
    UnsupportedLeafError,
)
from aio_ckpt.state import flatten as tree
from aio_ckpt.state.values import LeafKind

ODD_VALUES = [
    None, True, 0, -1, 2**63, -(2**2000), 2**5000, -(3**4000), 0.1, -0.0, math.inf, 1 + 2j, "", "x\ud800", b"",
    b"\x00\xff",
    bytearray(b"ab"), bytearray(), [], (), {}, set(), frozenset(), [1, [2, (3, None)]], [2**5000, 1], {1, "a"},
    {b"", 2**3000}, frozenset({1, frozenset({2})}), {np.float32(1.5), "x"}, OrderedDict(b=1, a=[np.int64(3)]),
    {(1, b""): 2, 2**4000: np.zeros(2)}, {"__aio_ckpt__": "ndarray", "data": 1},
    [{"__aio_ckpt__": {"__aio_ckpt__": 1}}],
    OrderedDict({"__aio_ckpt__": 1, 2: b""}), torch.Size([1, 2]), torch.Size([]), torch.device("cuda:1"),
    np.array(["ab", "c"]), np.array([b"x"]), np.array([], dtype="U4"), np.zeros((0, 3)), np.array(5.0),
    np.arange(4, dtype=">i4"),
    np.array(["2020-01-01"], dtype="datetime64[D]"), np.zeros(2, dtype=[("a", "f4"), ("b", "i8", (2,))]),
    np.float64(0.1),
    np.bool_(True), np.str_("ab"), np.bytes_(b"x"), np.datetime64("2020-01-01", "s"), np.longdouble(1.5),
    [np.float16(2), np.uint16(3)],
    np.zeros(1, dtype=[("a", "f4")])[0], np.asfortranarray(np.arange(6).reshape(2, 3)), np.arange(6)[::-2],
    *(getattr(torch, name) for name in ("float32", "bfloat16", "int8", "uint16", "bool", "complex64",
    "float8_e4m3fn")),
]  # fmt: skip


@pytest.mark.parametrize("value", ODD_VALUES, ids=lambda value: type(value).__name__)
def test_every_plain_value_comes_back_through_a_reader_that_runs_no_code(value):
    tree.check_object("leaf", value, False)
    assert same(through_bytes(value), value)
    assert same(through_bytes([value, (value,)]), [value, (value,)])


def test_a_bytes_io_keeps_content_and_position_and_is_not_moved():
    stream = io.BytesIO(bytes(range(256)) * 9)
    stream.seek(100)
    back = through_bytes({"s": stream, "empty": io.BytesIO()})
    assert same(back["s"], stream)
    assert stream.tell() == 100
    assert back["empty"].getvalue() == b""


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
    | st.builds(io.BytesIO, st.binary(max_size=9)) | st.floats(width=32, allow_nan=False).map(np.float32)
    | st.lists(st.integers(-9, 9)).map(np.array),
    lambda inner: st.lists(inner, max_size=4) | st.lists(inner, max_size=3).map(tuple)
    | st.dictionaries(st.text(max_size=3) | st.just("__aio_ckpt__") | st.integers(), inner, max_size=4)
    | st.dictionaries(st.text(max_size=3), inner, max_size=3).map(OrderedDict),
    max_leaves=12,
)  # fmt: skip


@examples(100)
@given(plain)
def test_any_nest_of_plain_values_is_an_object_that_comes_back(value):
    assert same(through_bytes(value), value)


def test_what_the_caller_changes_after_encoding_does_not_reach_the_bytes():
    value = [np.zeros(3), io.BytesIO(b"old"), [1]]
    data = tree.encode_object("x", value, trusted=False)
    value[0][:] = 9
    value[1].write(b"new")
    value[2].append(2)
    back = tree.decode_object(data, name="x", trusted=False)
    assert same(back[0], np.zeros(3))
    assert back[1].getvalue() == b"old"
    assert back[2] == [1]


# -- refusals --------------------------------------------------------------------------------------
class Custom:
    def __eq__(self, other):
        return isinstance(other, Custom)

    __hash__ = None


UNSAFE = [
    Custom(), [1, (Custom(),)], Path("/x"), range(3), slice(1), len, Custom, types.SimpleNamespace(a=1), Point(1, 2),
    np.array([object()], dtype=object), np.ma.masked_array([1], [True]), np.str_("a\x00"), {torch.ones(1)},
    {"k": Ordered()},
    LeafKind.ARRAY,
]  # fmt: skip


@pytest.mark.parametrize("value", UNSAFE, ids=lambda value: type(value).__name__)
def test_an_object_that_needs_code_is_refused_naming_leaf_and_type(value):
    with pytest.raises(UnsafeObjectError, match=r"^some\.leaf: "):
        tree.check_object("some.leaf", value, False)
    with pytest.raises(UnsafeObjectError, match=r"^some\.leaf: "):
        tree.encode_object("some.leaf", value, trusted=False)


def test_the_refusal_names_the_type_and_the_way_out():
    with pytest.raises(UnsafeObjectError, match=r"pathlib.*trusted_objects=True"):
        tree.check_object("cfg", {"out": Path("/x")}, False)


def test_the_way_out_for_a_subclass_of_ndarray_is_a_plain_array(tmp_path):
    mapped = np.memmap(tmp_path / "m", np.int64, "w+", shape=3)
    with pytest.raises(UnsafeObjectError, match=r"^leaf: a numpy\.memmap .*give its numpy\.asarray\(\).*trusted"):
        tree.encode_object("leaf", mapped, trusted=False)
    tree.encode_object("leaf", np.asarray(mapped), trusted=False)


def test_a_closed_stream_is_refused_by_name():
    stream = io.BytesIO()
    stream.close()
    with pytest.raises(UnsupportedLeafError, match="leaf: "):
        tree.encode_object("leaf", stream, trusted=False)


def test_trusted_objects_come_back_only_to_a_trusting_reader():
    data = tree.encode_object("c", [Custom(), np.zeros(2), Path("/x")], trusted=True)
    back = tree.decode_object(data, name="c", trusted=True)
    assert same(back[1], np.zeros(2))
    assert back[0] == Custom()
    assert back[2] == Path("/x")
    with pytest.raises(UnsafeObjectError, match=r"c: .*trusted_objects=True"):
        tree.decode_object(data, name="c", trusted=False)
    with pytest.raises(UnsafeObjectError, match="pickled"):
        tree.encode_object("c", lambda: None, trusted=True)


class Bomb:
    def __reduce__(self):
        return os.mkdir, (os.environ["BOMB_DIR"],)


def test_reading_an_object_runs_no_code(tmp_path, monkeypatch):
    monkeypatch.setenv("BOMB_DIR", str(tmp_path / "ran"))
    bomb = io.BytesIO()
    torch.save([1, Bomb()], bomb)
    for data in (bomb.getvalue(), pickle.dumps(Bomb())):
        with pytest.raises((UnsafeObjectError, CorruptCheckpointError), match="leaf: "):
            tree.decode_object(data, name="leaf", trusted=False)
    tagged = io.BytesIO()
    torch.save(
        {"__aio_ckpt__": "ndarray", "dtype": "|O", "shape": (1,), "data": torch.zeros(8, dtype=torch.uint8)}, tagged
    )
    with pytest.raises(CorruptCheckpointError, match="leaf: "):
        tree.decode_object(tagged.getvalue(), name="leaf", trusted=False)
    assert not (tmp_path / "ran").exists()


def test_the_list_of_safe_globals_is_never_touched():
    before = list(torch.serialization.get_safe_globals())
    through_bytes([np.zeros(2), io.BytesIO(b"x"), frozenset({1})])
    assert torch.serialization.get_safe_globals() == before


@pytest.mark.parametrize(
    "fields",
    [
        {"__aio_ckpt__": "no such kind"},
        {"__aio_ckpt__": []},
        {"__aio_ckpt__": "ndarray"},
        {"__aio_ckpt__": "ndarray", "dtype": "<f4", "shape": (1 << 40,), "data": torch.zeros(4, dtype=torch.uint8)},
        {"__aio_ckpt__": "ndarray", "dtype": "<f4", "shape": (-1, -1), "data": torch.zeros(4, dtype=torch.uint8)},
        {"__aio_ckpt__": "BytesIO", "data": torch.zeros(1, dtype=torch.uint8), "position": -1},
        {"__aio_ckpt__": "dict", "ordered": False, "pairs": [([], 1)]},
    ],
)
def test_a_damaged_object_is_corrupt_and_named(fields):
    buffer = io.BytesIO()
    torch.save([fields], buffer)
    with pytest.raises(CorruptCheckpointError, match=r"some\.leaf"):
        tree.decode_object(buffer.getvalue(), name="some.leaf", trusted=False)


@pytest.mark.parametrize("cut", [0, 3, 50, -30])
def test_a_truncated_object_is_corrupt_and_named(cut):
    data = tree.encode_object("x", [1, "two"], trusted=False)
    with pytest.raises(CorruptCheckpointError, match=r"some\.leaf"):
        tree.decode_object(data[:cut], name="some.leaf", trusted=False)


@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_a_container_that_stands_in_two_places_comes_back_in_both(kind):
    inner = [1, b"", {"a": None}]
    value = kind([inner, inner]) if kind is not dict else {"a": inner, "b": inner}
    assert through_bytes(value) == value


def test_what_stands_in_another_place_too_counts_for_the_depth():
    chain = [[1, "x", {}]]
    for _ in range(300):
        chain.append([chain[-1]])
    with pytest.raises(UnsupportedLeafError, match=r"^leaf: .*deeper than 200"):
        tree.encode_object("leaf", chain, trusted=False)
    tree.encode_object("leaf", chain[:190], trusted=False)


def test_only_immutable_builtins_may_reuse_their_bytes():
    assert all(map(tree.is_immutable, [None, True, 1, 1.5, 1j, "x", b"x", (), (0.9, 1, "a")]))
    mutable = [
        [],
        {},
        bytearray(),
        np.float64(1),
        LeafKind.ARRAY,
        io.BytesIO(),
        ([],),
        (0.9, bytearray()),
        (0.9, (1, "a")),
    ]
    assert not any(map(tree.is_immutable, mutable))


# -- arrays ----------------------------------------------------------------------------------------


def readonly(array):
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int16).reshape(2, 3), np.asfortranarray(np.ones((2, 3))), readonly(np.arange(3)),
        np.arange(9)[::-2],
        np.array(3.5), np.zeros((0, 2), np.uint64), np.zeros(3, dtype=[("a", "i1"), ("b", "f4")])["b"],
        np.array([True, False]),
        np.broadcast_to(np.float32(2), (3, 2)), np.array([1 + 2j]), np.arange(2, dtype=np.longlong), np.ones(3,
        np.float16),
    ],
    ids=lambda a: f"{a.dtype}{a.shape}{a.strides}",
)  # fmt: skip
def test_an_array_is_stored_as_a_tensor_and_comes_back_without_a_warning(array):
    assert tree.flatten({"a": array}, rank=0).kinds == [LeafKind.ARRAY]
    tensor = tree.as_tensor(array, LeafKind.ARRAY)
    back = tree.from_tensor(tensor.clone(), LeafKind.ARRAY)
    assert type(back) is np.ndarray
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()


def test_an_ordinary_array_is_not_copied():
    array = np.zeros(4)
    tree.as_tensor(array, LeafKind.ARRAY)[1] = 7
    assert array[1] == 7


@pytest.mark.parametrize("value", [np.float32(1.5), np.int8(-3), np.bool_(True), np.complex128(1j), np.uint64(2**63)])
def test_a_numpy_scalar_is_stored_as_a_tensor_and_comes_back_a_scalar(value):
    assert same(round_trip({"s": value})["s"], value)


def test_a_leaf_of_another_kind_is_refused():
    with pytest.raises(UnsupportedLeafError):
        tree.as_tensor([1], LeafKind.ARRAY)
