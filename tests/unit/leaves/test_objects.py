"""Objects and arrays to bytes and back: by exact type and value, and without running code."""

from __future__ import annotations

import argparse
import codecs
import collections
import datetime
import decimal
import enum
import fractions
import io
import math
import os
import pickle
import platform
import random
import re
import subprocess
import sys
import threading
import types
import uuid
from collections import OrderedDict
from pathlib import Path, PurePosixPath, PureWindowsPath

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples
from tree_states import Ordered, Point, round_trip, same, through_bytes
from warm_python import run_warm

from aio_ckpt.errors import (
    CorruptCheckpointError,
    UnsafeObjectError,
    UnsupportedLeafError,
)
from aio_ckpt.format.scalar_zip import render_pickle
from aio_ckpt.leaves.arrays import as_tensor, from_tensor
from aio_ckpt.leaves.objects import ObjectEncoder, decode_object, encode_object, is_immutable
from aio_ckpt.leaves.values import LeafKind
from aio_ckpt.state.flatten import flatten

ODD_VALUES = [
    None, True, 0, -1, 2**63, -(2**2000), 2**5000, -(3**4000), 0.1, -0.0, math.inf, 1 + 2j, "", "x\ud800", b"",
    b"\x00\xff",
    bytearray(b"ab"), bytearray(), [], (), {}, set(), frozenset(), [1, [2, (3, None)]], [2**5000, 1], {1, "a"},
    {b"", 2**3000}, frozenset({1, frozenset({2})}), {np.float32(1.5), "x"}, OrderedDict(b=1, a=[np.int64(3)]),
    {(1, b""): 2, 2**4000: np.zeros(2)}, OrderedDict({"a": 1, 2: b""}),
    torch.Size([1, 2]), torch.Size([]), torch.device("cuda:1"),
    np.array(["ab", "c"]), np.array([b"x"]), np.array([], dtype="U4"), np.zeros((0, 3)), np.array(5.0),
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
    assert same(through_bytes(value), value)
    assert same(through_bytes([value, (value,)]), [value, (value,)])


@pytest.mark.parametrize("code", ["?", *"bBhHiIlLefdgFDG", "S3", "U3", "M8[s]", "m8[2D]"])
def test_numpy_values_of_every_dtype_come_back_bit_for_bit(code):
    values = np.array([0, 1, 2, 3, 4, 5]).reshape(2, 3).astype(code)
    for value in (values, values.T, values[:, ::2], values[:0], values[1, 1], values.dtype):
        assert same(through_bytes([value]), [value])


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
    | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=4)
    | st.dictionaries(st.text(max_size=3), inner, max_size=3).map(OrderedDict),
    max_leaves=12,
)  # fmt: skip


@examples(100)
@given(plain)
def test_any_nest_of_plain_values_is_an_object_that_comes_back(value):
    assert same(through_bytes(value), value)


def test_what_the_caller_changes_after_encoding_does_not_reach_the_bytes():
    value = [np.zeros(3), io.BytesIO(b"old"), [1]]
    data = encode_object("x", value)
    value[0][:] = 9
    value[1].write(b"new")
    value[2].append(2)
    back = decode_object(data, name="x", trusted=False)
    assert same(back[0], np.zeros(3))
    assert back[1].getvalue() == b"old"
    assert back[2] == [1]


# -- refusals --------------------------------------------------------------------------------------
class Custom:
    def __eq__(self, other):
        return isinstance(other, Custom)

    __hash__ = None


class Color(enum.Enum):
    RED = "red"
    CRIMSON = "red"


class Outer:
    class Inner(enum.IntEnum):
        ONE = 1


class Unnamed(enum.Flag):
    A = 1
    B = 2


class Bits(enum.IntFlag):
    HIGH = 4
    LOW = 1


class Guarded(enum.Flag):
    A = 1
    B = 2

    @classmethod
    def _missing_(cls, value):
        return super()._missing_(value)


class Equal(enum.Flag):
    A = 1
    B = 2

    def __eq__(self, other):
        return self is other

    __hash__ = enum.Flag.__hash__


UNSAFE = [
    Custom(),
    [1, (Custom(),)],
    len,
    Custom,
    np.array([object()], dtype=object),
    np.ma.masked_array([1], [True]),
    {"k": Ordered()},
    collections.defaultdict(Point),
    Guarded.A | Guarded.B,
    Equal.A | Equal.B,
]


@pytest.mark.parametrize("value", UNSAFE, ids=lambda value: type(value).__name__)
def test_an_object_that_needs_code_is_stored_and_refused_by_a_reader_without_trust(value):
    data = encode_object("some.leaf", value)
    with pytest.raises(
        UnsafeObjectError, match=r"^some\.leaf: .*trusted_objects=True.*add_safe_globals.*skip_untrusted"
    ):
        decode_object(data, name="some.leaf", trusted=False)
    back = decode_object(data, name="some.leaf", trusted=True)
    assert type(back) is type(value)


@pytest.mark.parametrize("value", [lambda: None, [open], io.StringIO, threading.Lock(), (i for i in "a")])
def test_what_pickle_cannot_store_is_refused_naming_leaf_and_type(value):
    if value in ([open], io.StringIO):
        encode_object("some.leaf", value)
        return
    with pytest.raises(UnsafeObjectError, match=r"^some\.leaf: a .* that cannot be pickled"):
        encode_object("some.leaf", value)


def test_a_type_that_the_user_allowed_needs_no_trust():
    data = encode_object("leaf", [Custom()])
    with torch.serialization.safe_globals([Custom]):
        assert decode_object(data, name="leaf", trusted=False) == [Custom()]


class Another:
    """As Custom."""


@pytest.mark.parametrize("value", [np.array(["a", 1], dtype=object), np.mean, np.log, [{"of": np.add}]])
def test_what_needs_trust_is_told_beside_harmless_values_of_the_same_types(value, caplog):
    encoder = ObjectEncoder(trusted=False)
    with caplog.at_level("WARNING", "aio_ckpt"):
        encoder.encode([("texts", np.array(["a", "b"])), ("it", value)])
    assert [re.search(r"'(\w+)' \(numpy", record.getMessage())[1] for record in caplog.records] == ["it"]


@pytest.mark.slow
def test_numpy_ma_is_imported_with_the_package_and_not_on_a_thread():
    assert run_warm("import aio_ckpt.leaves.objects, sys; assert 'numpy.ma' in sys.modules").returncode == 0


def test_what_only_code_reads_is_told_once_with_leaf_and_remedy(caplog):
    encoder = ObjectEncoder(trusted=False)
    leaves = [("cfg", Custom()), ("lr", 0.1), ("path", Path("/x"))]
    with caplog.at_level("WARNING", "aio_ckpt"):
        encoder.encode(leaves)
        encoder.encode(leaves)
        (record,) = caplog.records
        assert re.search(r"'cfg' \(\S*Custom\).*trusted_objects=True.*add_safe_globals", record.getMessage())
        assert "path" not in record.getMessage()
        encoder.encode([*leaves, ("more", [Custom()]), ("other", [Another()])])
        assert "'other'" in caplog.records[1].getMessage()
        assert "'more'" not in caplog.records[1].getMessage()
        ObjectEncoder(trusted=True).encode(leaves)
        with torch.serialization.safe_globals([Custom]):
            ObjectEncoder(trusted=False).encode(leaves)
    assert len(caplog.records) == 2


# -- harmless types ---------------------------------------------------------------------------------


HARMLESS = [
    argparse.Namespace(lr=0.1, layers=[1, 2], out=Path("/x")),
    types.SimpleNamespace(a={1: Path("b")}),
    collections.deque([1, [2]], maxlen=3),
    collections.deque(),
    collections.defaultdict(list, {1: [2]}),
    collections.defaultdict(None, a=1),
    collections.defaultdict(collections.OrderedDict),
    range(3),
    range(9, -2, -3),
    range(2**3000),
    slice(1),
    slice(None, 2, "x"),
    Path("/x/y"),
    PurePosixPath("a"),
    PureWindowsPath("c:/x"),
    datetime.date(2026, 11, 24),
    datetime.datetime(2026, 11, 24, 1, 2, 3, 4, fold=1),
    datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
    datetime.time(1, 2, 3, tzinfo=datetime.UTC),
    datetime.timedelta(-3, 4, 5),
    datetime.UTC,
    datetime.timezone(datetime.timedelta(hours=2), "X"),
    datetime.timezone(datetime.timedelta(seconds=1)),
    decimal.Decimal("1.230"),
    decimal.Decimal("-Infinity"),
    fractions.Fraction(-3, 7),
    uuid.UUID(int=5),
    torch.__version__,
    torch.strided,
    torch.sparse_coo,
    torch.per_tensor_affine,
    Color.RED,
    Color.CRIMSON,
    Outer.Inner.ONE,
    LeafKind.ARRAY,
    Unnamed.A,
    Unnamed.A | Unnamed.B,
    Unnamed(0),
    Bits.HIGH | Bits.LOW,
    Bits(8) | Bits.LOW,
    np.dtype("f4"),
    np.dtype([("a", ">i2"), ("b", "U3")]),
    np.float32,
    np.bool_,
    int,
    dict,
    ...,
    collections.Counter("abca"),
    {Path("/x"): 1, Color.RED: 2, np.int64(3): 4, datetime.date(2026, 1, 1): [5]},
    {Color.RED, 1},
    frozenset({Path("a")}),
]


@pytest.mark.parametrize("value", HARMLESS, ids=lambda value: type(value).__name__)
def test_a_harmless_type_comes_back_without_trust(value):
    for wrapped in (value, [value], {"a": (value,)}):
        assert same(through_bytes(wrapped), wrapped)


def test_attributes_of_a_deque_and_a_datetime_come_back():
    back = through_bytes([collections.deque([1], maxlen=3), datetime.datetime(2026, 1, 1, fold=1)])
    assert back[0].maxlen == 3
    assert back[1].fold == 1
    assert through_bytes(collections.defaultdict(list))["new"] == []


@pytest.mark.parametrize("kind", ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"])
def test_a_generator_of_numpy_goes_on_where_it_was(kind):
    generator = np.random.Generator(getattr(np.random, kind)(7))
    generator.standard_normal(3)
    generator.integers(9, dtype=np.uint32)
    back = through_bytes({"g": generator, "same": generator.bit_generator})
    assert np.array_equal(back["g"].standard_normal(5), generator.standard_normal(5))
    if np.lib.NumpyVersion(np.__version__) >= "2.0.0":  # numpy 1 stores neither its bit generator nor its seed
        assert back["g"].bit_generator is back["same"]
        assert np.array_equal(back["g"].spawn(2)[1].random(3), generator.spawn(2)[1].random(3))


def test_generators_of_random_numpy_and_torch_go_on_where_they_were():
    old, own, ours = np.random.RandomState(3), random.Random(4), torch.Generator().manual_seed(5)
    old.standard_normal(), own.gauss(0, 1), torch.rand(3, generator=ours)
    a, b, c = through_bytes([old, own, ours])
    assert np.array_equal(a.standard_normal(9), old.standard_normal(9))
    assert [b.gauss(0, 1) for _ in range(3)] == [own.gauss(0, 1) for _ in range(3)]
    assert torch.equal(torch.rand(3, generator=c), torch.rand(3, generator=ours))


def test_a_sum_of_flags_is_the_one_of_its_class_and_made_where_it_is_new(monkeypatch):
    value = Unnamed.A | Unnamed.B
    assert through_bytes(value) is value
    data = encode_object("leaf", value)

    class Fresh(enum.Flag):
        A = 1
        B = 2

    monkeypatch.setattr(sys.modules[__name__], "Unnamed", Fresh)
    assert decode_object(data, name="leaf", trusted=False) is Fresh.A | Fresh.B


def test_an_enum_is_read_only_where_its_class_was_imported_already(monkeypatch):
    data = encode_object("leaf", Color.RED)
    monkeypatch.setitem(sys.modules, __name__, types.ModuleType(__name__))
    with pytest.raises(UnsafeObjectError, match=r"^leaf: .*Color, which is not imported here"):
        decode_object(data, name="leaf", trusted=False)


def loop_of_lists():
    value = [1]
    value.append((value, {"x": value}))
    return value


def test_a_list_that_holds_itself_comes_back_holding_itself():
    back = through_bytes(loop_of_lists())
    assert back[0] == 1
    assert back[1][0] is back
    assert back[1][1]["x"] is back
    odd = collections.deque([1])
    odd.append(odd)
    back = through_bytes([odd])
    assert back[0][1] is back[0]


def test_containers_that_are_shared_stay_shared():
    inner, odd = [{}, 1], {b"": 1}
    back = through_bytes([inner, inner, (odd,), odd, {"a": inner}])
    assert back[0] is back[1] is back[4]["a"]
    assert back[2][0] is back[3]


class Calls:
    """Pickles as a call of a function, with a state if one is given."""

    def __init__(self, function, *args, state=None):
        self.parts = (function, args) if state is None else (function, args, state)

    def __reduce__(self):
        return self.parts


def saved(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


class Pool:
    """Pickles as the state of a SeedSequence."""

    def __init__(self, *state):
        self.state = state

    def __reduce__(self):
        function, args, _ = np.random.SeedSequence(1).__reduce__()
        return function, args, self.state


def generator(name, change):
    """A bit generator whose pickled state is changed."""
    function, args, state = getattr(np.random, name)(1).__reduce__()
    change(state[0] if isinstance(state, tuple) else state)  # numpy 1 stores no seed
    return Calls(function, *args, state=state)


RECONSTRUCT = np.zeros(1).__reduce__()[0]
SCALAR = np.float64(1).__reduce__()[0]
BIT_GENERATOR = np.random.MT19937().__reduce__()[0]
GENERATOR = np.random.Generator(np.random.MT19937()).__reduce__()[0]
F8 = np.dtype("f8")


def array(*state):
    return Calls(RECONSTRUCT, np.ndarray, (0,), b"b", state=state)


HOSTILE = [
    Calls(platform.uname_result, 1),
    Calls(subprocess.Popen, ["true"]),
    Calls(Path, ["/x"]),
    Calls(Path, 1),
    Calls(bytes, 1 << 33),
    Calls(bytearray, 1 << 33),
    Calls(bytearray, bytearray(b"x")),
    Calls(complex, "1"),
    Calls(set, "ab"),
    Calls(set, {1: 2}),
    Calls(collections.Counter, "abc"),
    Calls(collections.OrderedDict, [(1, 2)]),
    Calls(collections.defaultdict, eval),
    Calls(collections.defaultdict, np.float32),
    Calls(collections.defaultdict, list, {1: 2}),
    Calls(np.float64, 1),
    Calls(np.ndarray, (1 << 30,)),
    Calls(np.dtype, "O", False, True),
    Calls(np.dtype, "|O|O", False, True),
    Calls(np.dtype, "f8", False, True, state=(3, "|", None, ("a",), {"a": (F8, 8)}, 16, 1, 0)),
    Calls(np.dtype, "V8", False, True, state=(3, "|", None, ("a",), {"a": (F8, 8)}, 16, 1, 0)),
    Calls(np.dtype, "V8", False, True, state=(3, "|", None, ("a",), {"a": (F8, 8)}, 8, 1, 0)),
    Calls(np.dtype, "V8", False, True, state=(3, "|", None, ("a",), {"a": ("f8", 0)}, 8, 1, 0)),
    Calls(np.dtype, "V8", False, True, state=(3, "|", ("f8", (2,)), None, None, 16, 1, 0)),
    Calls(np.dtype, "f8", False, True, state=(3, 5, None, None, None, -1, -1, 0)),
    Calls(np.dtype, "f8", False, True, state=(3, "<")),
    array(1, (2,), F8, False, bytes(8)),
    array(1, (-1, -1), F8, False, bytes(8)),
    array(1, (1 << 40,), F8, False, bytes(8)),
    array(1, (1 << 62, 4), F8, False, b""),
    array(1, ("1",), F8, False, bytes(8)),
    array(1, 1, F8, False, bytes(8)),
    array(1, (1,), F8, False, [1.0]),
    array(1, (1,), None, False, bytes(8)),
    array(1, (1,), np.dtype(("f4", (2,))), False, bytes(8)),
    Calls(RECONSTRUCT, np.matrix, (0,), b"b"),
    Calls(SCALAR, F8, bytes(4)),
    Calls(SCALAR, F8),
    Calls(BIT_GENERATOR, np.random.RandomState),
    Calls(BIT_GENERATOR, "eval"),
    generator("MT19937", lambda state: state["state"].update(pos=625)),
    generator("MT19937", lambda state: state["state"].update(pos=-1)),
    generator("MT19937", lambda state: state["state"].update(key=np.zeros(3, np.uint32))),
    generator("Philox", lambda state: state.update(buffer_pos=-1)),
    generator("Philox", lambda state: state.update(buffer_pos=5)),
    generator("PCG64", lambda state: state.update(bit_generator="SFC64")),
    Calls(GENERATOR, 1),
    Calls(GENERATOR, {}),
    Pool(1, 0, np.zeros(4, np.uint32), 1 << 31, ()),
    Pool(1, 0, np.zeros(4), 4, ()),
    Pool(1, 0, np.zeros(4, np.uint32), 4, ("x",)),
    Calls(random.Random, state=(3, (1,), None)),
    Calls(random.Random, state=[1]),
    Calls(random.Random, 1),
    Calls(torch.Generator, torch.device("cpu"), state=(1, None, torch.zeros(3, dtype=torch.uint8))),
    Calls(torch.Generator, torch.device("cpu"), state=(1, None, 1)),
    Calls(torch.Tensor, 1 << 33),
    Calls(torch.FloatTensor, 1 << 33),
    Calls(torch.Size, 1 << 33),
    Calls(torch._utils._rebuild_device_tensor_from_cpu_tensor, torch.ones(1), torch.float64, "cpu", False),
    Calls(argparse.Namespace, state={1: 2}),
    Calls(argparse.Namespace, state=3),
    Calls(collections.deque, [], "x"),
    Calls(collections.deque, [], -1),
    Calls(collections.deque, "ab"),
    Calls(range, 0.5, 1, 1),
    Calls(range, 0, 1, 0),
    Calls(slice, (1,)),
    Calls(datetime.date, 5),
    Calls(datetime.date, b"\x07\xea\x01\x00"),
    Calls(datetime.datetime, b"\x07\xea\x01\x01\xff\x00\x00\x00\x00\x00"),
    Calls(datetime.datetime, b"\x07\xea\x01\x01\x00\x00\x00\x00\x00\x00", "utc"),
    Calls(datetime.timedelta, 10**10, 0, 0),
    Calls(datetime.timedelta, "1"),
    Calls(datetime.timezone, 3),
    Calls(decimal.Decimal, (0, (1,), 0)),
    Calls(decimal.Decimal, "x"),
    Calls(fractions.Fraction, 1, 0),
    Calls(fractions.Fraction, "1e1000000000"),
    Calls(fractions.Fraction, 1 << 70_000, 3),
    Calls(uuid.UUID, state={"int": 1 << 128}),
    Calls(uuid.UUID, state={"int": 1, "hex": 2}),
    Calls(type(torch.__version__), 1),
    Calls(LeafKind, "mro"),
    Calls(LeafKind, []),
    Calls(LeafKind, 99),
    Calls(getattr, LeafKind, "mro"),
    Calls(getattr, Path, "home"),
    *(Calls(Unnamed, value) for value in (4, "1", 1.0, True, [])),
    *(Calls(kind, 3) for kind in (Guarded, Equal)),
    Calls(io.BytesIO, state=(b"", -1, None)),
    Calls(io.BytesIO, state=("x", 0, None)),
    Calls(codecs.encode, "a", "punycode"),
    Calls(codecs.encode, "a", "rot13"),
    Calls(Outer),
    Outer,
]


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: getattr(value, "parts", [type(value)])[0].__name__)
def test_a_crafted_call_is_refused_and_named(value):
    for wrapped in (value, [value]):
        with pytest.raises((CorruptCheckpointError, UnsafeObjectError), match=r"^some\.leaf: "):
            decode_object(saved(wrapped), name="some.leaf", trusted=False)


def test_a_state_cannot_be_given_to_what_the_process_shares():
    """BUILD would set attributes of a class or of a function of ours, for the whole process."""
    state = b"N}X\x03\x00\x00\x00fooK\x01s\x86b."
    for name in (
        b"fractions\nFraction",
        b"pathlib\nPosixPath",
        b"torch\nfloat32",
        b"_codecs\nencode",
        b"random\nRandom",
    ):
        with pytest.raises((CorruptCheckpointError, UnsafeObjectError), match="leaf: "):
            decode_object(render_pickle(b"\x80\x02c" + name + b"\n" + state), name="leaf", trusted=False)
    assert not any(hasattr(kind, "foo") for kind in (fractions.Fraction, Path, torch.float32, random.Random))


def test_the_state_of_a_dtype_changes_no_dtype_of_the_process():
    back = through_bytes([np.dtype(">f8"), np.zeros(2, ">f8")])
    assert back[0].str == ">f8"
    assert np.dtype("f8").str == "<f8"


@pytest.mark.parametrize(("module", "name"), [("os", "system"), ("no.such.module", "X"), ("os", "path.join"),
    ("enum", "Enum.__call__"), ("aio_ckpt", "LeafKind"), ("this", "s")])  # fmt: skip
def test_a_crafted_name_imports_nothing_and_calls_nothing(module, name):
    pickled = b"\x80\x04\x8c%c%s\x8c%c%s\x93." % (len(module), module.encode(), len(name), name.encode())
    before = set(sys.modules)
    with pytest.raises(UnsafeObjectError, match=rf"^leaf: .*{module}\.{name}"):
        decode_object(render_pickle(pickled), name="leaf", trusted=False)
    assert set(sys.modules) == before


def test_a_module_that_loads_lazily_is_not_loaded(monkeypatch):
    module = types.ModuleType("lazy_one")
    module.__getattr__ = lambda name: pytest.fail(f"{name} was asked for")
    monkeypatch.setitem(sys.modules, "lazy_one", module)
    with pytest.raises(UnsafeObjectError, match="not imported"):
        decode_object(render_pickle(b"\x80\x02clazy_one\nX\n."), name="leaf", trusted=False)


def key_of_pairs():
    key = (1,)
    for _ in range(60):
        key = (key, key)
    return key


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["set", "frozenset", "dict", "defaultdict"])
def test_a_crafted_key_that_would_be_hashed_for_ever_is_corrupt(kind):
    if "set" in kind:
        value = Calls(set if kind == "set" else frozenset, [key_of_pairs()])
    else:  # the pickle of a list of pairs becomes one of their keys and values
        value = None
        before = {"dict": b"}", "defaultdict": b"ccollections\ndefaultdict\n)R"}[kind]
        key = pickle.dumps(key_of_pairs(), 2)[2:-1]
        data = render_pickle(b"\x80\x02" + before + key + b"K\x01s.")
    with pytest.raises(CorruptCheckpointError, match="a key of more than"):
        decode_object(data if value is None else saved(value), name="leaf", trusted=False)


def test_a_closed_stream_is_refused_by_name():
    stream = io.BytesIO()
    stream.close()
    with pytest.raises(UnsafeObjectError, match=r"^leaf: a _io\.BytesIO that cannot be pickled"):
        encode_object("leaf", stream)


def test_trusted_objects_come_back_only_to_a_trusting_reader():
    data = encode_object("c", [Custom(), np.zeros(2), Path("/x")])
    back = decode_object(data, name="c", trusted=True)
    assert same(back[1], np.zeros(2))
    assert back[0] == Custom()
    assert back[2] == Path("/x")
    with pytest.raises(UnsafeObjectError, match=r"c: .*trusted_objects=True"):
        decode_object(data, name="c", trusted=False)
    with pytest.raises(UnsafeObjectError, match="pickled"):
        encode_object("c", lambda: None)


class Bomb:
    def __reduce__(self):
        return os.mkdir, (os.environ["BOMB_DIR"],)


def test_reading_an_object_runs_no_code(tmp_path, monkeypatch):
    monkeypatch.setenv("BOMB_DIR", str(tmp_path / "ran"))
    bomb = io.BytesIO()
    torch.save([1, Bomb()], bomb)
    for data in (bomb.getvalue(), pickle.dumps(Bomb())):
        with pytest.raises((UnsafeObjectError, CorruptCheckpointError), match="leaf: "):
            decode_object(data, name="leaf", trusted=False)
    assert not (tmp_path / "ran").exists()


def test_the_list_of_safe_globals_is_never_touched():
    before = list(torch.serialization.get_safe_globals())
    through_bytes([np.zeros(2), io.BytesIO(b"x"), frozenset({1})])
    assert torch.serialization.get_safe_globals() == before


@pytest.mark.parametrize("cut", [0, 3, 50, -30])
def test_a_truncated_object_is_corrupt_and_named(cut):
    data = encode_object("x", [1, "two"])
    with pytest.raises(CorruptCheckpointError, match=r"some\.leaf"):
        decode_object(data[:cut], name="some.leaf", trusted=False)


@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_a_container_that_stands_in_two_places_comes_back_in_both(kind):
    inner = [1, b"", {"a": None}]
    value = kind([inner, inner]) if kind is not dict else {"a": inner, "b": inner}
    assert through_bytes(value) == value


def test_what_is_nested_too_deep_is_refused_by_name():
    chain = []
    for _ in range(100_000):
        chain = [chain]
    with pytest.raises(UnsupportedLeafError, match=r"^leaf: .*nested too deep"):
        encode_object("leaf", chain)
    for _ in range(100_000 - 190):
        chain = chain[0]
    assert through_bytes(chain) == chain


def test_only_immutable_builtins_may_reuse_their_bytes():
    assert all(map(is_immutable, [None, True, 1, 1.5, 1j, "x", b"x", (), (0.9, 1, "a")]))
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
    assert not any(map(is_immutable, mutable))


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
    assert flatten({"a": array}, rank=0).kinds == [LeafKind.ARRAY]
    tensor = as_tensor(array, LeafKind.ARRAY)
    back = from_tensor(tensor.clone(), LeafKind.ARRAY)
    assert type(back) is np.ndarray
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()


def test_an_ordinary_array_is_not_copied():
    array = np.zeros(4)
    as_tensor(array, LeafKind.ARRAY)[1] = 7
    assert array[1] == 7


@pytest.mark.parametrize("value", [np.float32(1.5), np.int8(-3), np.bool_(True), np.complex128(1j), np.uint64(2**63)])
def test_a_numpy_scalar_is_stored_as_a_tensor_and_comes_back_a_scalar(value):
    assert same(round_trip({"s": value})["s"], value)


def test_a_leaf_of_another_kind_is_refused():
    with pytest.raises(UnsupportedLeafError):
        as_tensor([1], LeafKind.ARRAY)
