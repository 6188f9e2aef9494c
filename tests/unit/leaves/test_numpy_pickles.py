"""numpy values of a plain pickle: bit for bit, and forged arguments are refused before numpy sees them."""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from aio_ckpt.errors import UnsafeObjectError
from aio_ckpt.leaves.numpy_pickles import NUMPY_GLOBALS, real_values

STAND_INS = {name: made for made, name in NUMPY_GLOBALS}
DTYPE, SCALAR = STAND_INS["numpy.dtype"], STAND_INS["numpy.core.multiarray.scalar"]
ARRAY, RECONSTRUCT = STAND_INS["numpy.ndarray"], STAND_INS["numpy._core.multiarray._reconstruct"]


def loaded(value: object) -> Any:
    made = io.BytesIO()
    torch.save(value, made)
    made.seek(0)
    with torch.serialization.safe_globals(NUMPY_GLOBALS):
        return real_values(torch.load(made, weights_only=True))


def filled(*state: object) -> Any:
    made = RECONSTRUCT(ARRAY, (0,), b"b")
    made.__setstate__(state)
    return made.real


@pytest.mark.parametrize("code", ["?", *"bBhHiIlLefdgFDG", "S3", "U3", ">i4", ">f8", ">U2"])
def test_scalars_and_arrays_of_every_plain_dtype_come_back_bit_for_bit(code: str) -> None:
    array = np.array([0, 1, 2, 3, 4, 5]).reshape(2, 3).astype(code)
    for value in (array, array.T, array[:, ::2], array[:0], array[1, 1], array[0, 0]):
        got = loaded({"value": [value]})["value"][0]
        assert (type(got), got.dtype, got.shape) == (type(value), value.dtype, value.shape)
        assert got.tobytes() == value.tobytes()


def test_a_container_that_holds_itself_and_one_that_holds_no_array_stay_what_they_are() -> None:
    inner: list[object] = [np.ones(2)]
    inner.append((inner, np.int8(1)))
    got = loaded(OrderedDict(a=inner, b=(1, (2, 3)), c=inner, d=np.dtype("f4"), e=np.float64))
    assert got["a"] is got["c"] is got["a"][1][0]
    assert got["a"][0].tolist() == [1, 1]
    assert (type(got), got["b"], got["d"], got["e"]) == (OrderedDict, (1, (2, 3)), np.dtype("f4"), np.float64)
    plain = (1, (2, [3]))
    assert real_values(plain) is plain


@pytest.mark.parametrize(
    "text", ["O8", "O", "V8", "i4,f4", "M8[s]", "m8", "object", "int32", "f4" * 1000, "", 8, None, [("a", "O")]]
)
def test_a_dtype_that_is_none_of_plain_numbers_needs_trust(text: object) -> None:
    with pytest.raises(UnsafeObjectError):
        DTYPE(text, False, True)


@pytest.mark.parametrize(
    "state",
    [(3, "|", None, ("a",), {"a": 1}, 8, 1, 0), (3, "<", ("f4", 2), None, None, 8, 1, 0), (3, 5, None, None, None)],
)
def test_the_state_of_a_structured_dtype_needs_trust(state: tuple[object, ...]) -> None:
    with pytest.raises(UnsafeObjectError):
        DTYPE("f8").__setstate__(state)


def test_the_state_of_a_dtype_changes_no_dtype_of_the_process() -> None:
    made = DTYPE("f8", False, False)
    made.__setstate__((3, ">", None, None, None, -1, -1, 0))
    assert (made.real.str, np.dtype("f8").str) == (">f8", "<f8")


@pytest.mark.parametrize(
    ("shape", "raw"),
    [
        ((2,), bytes(8)),
        ((2,), bytes(24)),
        ((-1,), bytes(8)),
        ((-1, -2), bytes(16)),
        ((1 << 62, 4), b""),
        ((1 << 62,), bytes(8)),
        (("2",), bytes(16)),
        (2, bytes(16)),
    ],
)
def test_an_array_that_is_not_as_long_as_its_bytes_is_refused(shape: object, raw: bytes) -> None:
    with pytest.raises((ValueError, TypeError)):
        filled(1, shape, DTYPE("f8"), False, raw)


def test_objects_in_the_place_of_bytes_or_dtypes_need_trust() -> None:
    for dtype, raw in ((DTYPE("f8"), [1.0]), (np.dtype("f8"), bytes(8)), (DTYPE("f8"), bytearray(8)), (None, bytes(8))):
        with pytest.raises(UnsafeObjectError):
            filled(1, (1,), dtype, False, raw)
        with pytest.raises(UnsafeObjectError):
            SCALAR(dtype, raw)
    with pytest.raises(UnsafeObjectError):
        RECONSTRUCT(np.matrix, (0,), b"b")
    with pytest.raises(ValueError, match="over 4 bytes"):
        SCALAR(DTYPE("f8"), bytes(4))


def test_nothing_calls_a_class_of_numbers() -> None:
    """``numpy.bytes_(2 ** 33)`` takes 8 GiB; a class of numbers is a value and no more."""
    assert not any(name in STAND_INS for name in ("numpy.bytes_", "numpy.void", "numpy.str_", "numpy.object_"))
    with pytest.raises(TypeError, match="not callable"):
        STAND_INS["numpy.float64"](1)


def test_many_arrays_over_one_text_take_its_memory_once() -> None:
    raw = bytes(1 << 20)
    arrays = [filled(1, (1 << 17,), DTYPE("f8"), False, raw) for _ in range(5)]
    assert len({array.__array_interface__["data"][0] for array in arrays}) == 1
