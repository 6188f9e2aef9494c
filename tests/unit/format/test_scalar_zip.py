from __future__ import annotations

import io
import math
import zipfile
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aio_ckpt.format.scalar_zip import NotScalarError, read_scalar, render_scalar
from aio_ckpt.leaves.objects import decode_object, encode_object

EDGES = [None, True, False, 0, 255, 256, 65535, 65536, -1, 2**31 - 1, -(2**31), 2**31, -(2**63), 2**200, -(2**1999)]
EDGES += [0.0, -0.0, math.inf, math.nan, "", "\0", "é" * 200, "\ud800", "x" * 5000]

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None), max_size=300)


def same(one: object, other: object) -> bool:
    return type(one) is type(other) and repr(one) == repr(other)


@pytest.mark.parametrize("value", EDGES, ids=lambda value: repr(value)[:20])
def test_an_edge_value_comes_back(value: object) -> None:
    data = encode_object("x", value)
    assert same(decode_object(data, name="x", trusted=False), value)
    assert same(decode_object(data, name="x", trusted=True), value)
    assert same(torch.load(io.BytesIO(data), weights_only=True), value)


@given(scalars)
def test_a_scalar_comes_back_and_torch_and_zipfile_read_it(value: object) -> None:
    data = render_scalar(value)
    assert same(torch.load(io.BytesIO(data), weights_only=True), value)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
    if len(data) < 1000:
        assert same(read_scalar(data), value)


@given(scalars, st.data())
def test_a_changed_byte_is_never_read_as_another_value(value: object, drawn: st.DataObject) -> None:
    data = bytearray(render_scalar(value))
    place = drawn.draw(st.integers(0, len(data) - 1))
    data[place] ^= drawn.draw(st.integers(1, 255))
    with pytest.raises(NotScalarError):
        read_scalar(bytes(data))


class Marked(int):
    pass


@pytest.mark.parametrize("value", [Marked(3), (1, 2), b"x", [1], 2**4000, 1j])
def test_values_that_are_no_scalars_are_left_to_torch(value: Any) -> None:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    with pytest.raises(NotScalarError):
        read_scalar(buffer.getvalue())


@pytest.mark.parametrize("cut", [0, 1, 30, 46, 60, -1])
def test_cut_bytes_are_no_scalar(cut: int) -> None:
    with pytest.raises(NotScalarError):
        read_scalar(render_scalar(7)[:cut])


@pytest.mark.parametrize(
    "body", [b"", b"N", b"\x80\x02", b"\x80\x02.", b"\x80\x02Kx", b"\x80\x02X\5\0\0\0abq\0.", b"\x80\x02cos\nsystem\n."]
)
def test_a_forged_pickle_in_a_sound_frame_is_no_scalar(body: bytes) -> None:
    from aio_ckpt.format import scalar_zip

    with pytest.raises(NotScalarError):
        read_scalar(scalar_zip._filled(body))
