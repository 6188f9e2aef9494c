"""numpy scalars, arrays and dtypes of a plain pickle, made without numpy's own constructors, which trust their numbers.

``torch.load(weights_only=True)`` refuses what numpy pickles. In ``NUMPY_GLOBALS``, a stand-in of this file stands for
each global of such a pickle, and checks its arguments. :func:`real_values` then puts the arrays in the places of the
stand-ins. Arrays of objects and structured dtypes are refused: they need code, or may.

Source: ``numpy/_core/src/multiarray`` of 1.26 to 2.4 (``array_reduce``, ``arraydescr_reduce``, ``gentype_reduce``).
"""

from __future__ import annotations

import math
import re
from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from aio_ckpt.errors import UnsafeObjectError

_PLAIN_DTYPE = re.compile(r"[biufc][0-9]{1,2}|[SU][0-9]{1,9}")
_MAPPINGS = (dict, OrderedDict, Counter, defaultdict)


class _StandIn:
    """Stand-in for a numpy value. One that :func:`real_values` did not find, as in a key, cannot be stored."""

    def __reduce__(self) -> str:
        raise UnsafeObjectError("it holds an array or dtype of numpy in a key or an attribute")


class _PickledDtype(_StandIn):
    """Stand-in for ``numpy.dtype(text, align, copy)`` and its state."""

    def __init__(self, text: object, *_: object) -> None:
        if type(text) is not str or _PLAIN_DTYPE.fullmatch(text) is None:
            raise UnsafeObjectError(f"numpy dtype {text!r} is none of plain numbers or texts")
        self.real: np.dtype[Any] = np.dtype(text)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, order, *fields = state
        if fields[:3] != [None, None, None] or order not in ("<", ">", "|", "="):
            raise UnsafeObjectError("a structured numpy dtype is none of plain numbers or texts")
        if order in ("<", ">"):
            self.real = self.real.newbyteorder(order)


class _PickledArray(_StandIn):
    """Stand-in for an array: ``_reconstruct(ndarray, (0,), b"b")`` makes it empty, and its state fills it."""

    def __init__(self, kind: object, *_: object) -> None:
        if kind is not _PickledArray:
            raise UnsafeObjectError("a subclass of numpy.ndarray")
        self.real: np.ndarray[Any, Any] = np.empty(0)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, is_fortran, raw = state
        self.real = _array(shape, dtype, raw, "F" if is_fortran else "C")


@dataclass(frozen=True, slots=True)
class _PickledType(_StandIn):
    """Stand-in for a class of numbers, which nothing can call."""

    real: type


def _array(shape: Any, dtype: Any, raw: Any, order: Any) -> np.ndarray[Any, Any]:
    """Return a read-only array over ``raw``, whose length is checked first, as numpy takes a negative dimension."""
    if type(dtype) is not _PickledDtype or type(raw) is not bytes:
        raise UnsafeObjectError("a numpy array of objects")
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.real.itemsize != len(raw):
        raise ValueError(f"a numpy array of shape {shape} and {dtype.real} over {len(raw)} bytes")
    return np.ndarray(shape, dtype=dtype.real, buffer=raw, order=order)


def _scalar(dtype: object, raw: object = b"") -> object:
    return _array((), dtype, raw, "C")[()]


def _no_bytes() -> bytes:
    """Stand in for ``bytes()``, as pickle stores the content of an empty array."""
    return b""


NUMPY_GLOBALS: list[Any] = [
    (_no_bytes, "builtins.bytes"),
    (_PickledDtype, "numpy.dtype"),
    (_PickledArray, "numpy.ndarray"),
    *((_PickledArray, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
    *((_scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
    *((_PickledType(kind), f"numpy.{kind.__name__}") for kind in np.sctypeDict.values() if issubclass(kind, np.number)),
]
"""What ``torch.serialization.safe_globals`` takes: stand-in and name of the global that it stands for."""


def real_values(value: Any) -> Any:
    """Return ``value`` with the real arrays, dtypes and types in place of the stand-ins. Containers are changed."""
    return _real(value, {})


def _real(value: Any, known: dict[int, tuple[Any, Any]]) -> Any:
    """``known``: by id, a container, kept alive so that its id stays valid, and what it becomes."""
    kind = type(value)
    if kind in (_PickledArray, _PickledDtype, _PickledType):
        return value.real
    if id(value) in known:
        return known[id(value)][1]
    if kind is tuple:
        parts = tuple(_real(part, known) for part in value)
        made = value if all(part is old for part, old in zip(parts, value, strict=True)) else parts
        return known.setdefault(id(value), (value, made))[1]
    if kind is list:
        known[id(value)] = value, value
        value[:] = [_real(part, known) for part in value]
    elif kind in _MAPPINGS:
        known[id(value)] = value, value
        for key, part in list(value.items()):
            value[key] = _real(part, known)
    return value
