"""Objects (every leaf that is no tensor) to and from bytes, without running code when they are read.

The bytes are a ``torch.save`` zip that ``torch.load(weights_only=True)`` takes. What that refuses (numpy values,
``BytesIO``, ``frozenset``, empty ``bytes``, very large ``int``) is stored as a tagged dict ``{"__aio_ckpt__": kind}``
with the fields of that kind; a dict of the user's own that has this key is stored as tagged pairs, so it comes back
too.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

import numpy as np
import torch

from aio_ckpt.errors import CorruptCheckpointError, UnsafeObjectError, UnsupportedLeafError
from aio_ckpt.format.pickle_scan import check_calls
from aio_ckpt.format.tensor_pickle import STORAGE_ELEMENT_BYTES
from aio_ckpt.format.tensor_zip import records_of
from aio_ckpt.state.values import LeafKind

__all__ = [
    "MAX_DEPTH",
    "TORCH_ARRAY_DTYPES",
    "ObjectBytes",
    "ObjectEncoder",
    "as_tensor",
    "check_object",
    "decode_object",
    "encode_object",
    "from_tensor",
    "is_immutable",
    "type_name",
]

MAX_DEPTH = 200
"""Containers inside containers, at most: deeper is taken for a cycle."""

TORCH_ARRAY_DTYPES: frozenset[np.dtype[Any]] = frozenset(
    np.dtype(name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
)
"""numpy dtypes (native byte order) whose elements a tensor holds bit for bit."""

_TAG = "__aio_ckpt__"
_IMMUTABLE = frozenset({NoneType, bool, int, float, complex, str, bytes})
_CONTAINERS = frozenset({list, tuple, dict, OrderedDict, set, frozenset})
_ALWAYS_PLAIN = frozenset({NoneType, bool, float, complex, str, bytearray, torch.Size, torch.dtype, torch.device})
_INT_BITS = 2000
"""Larger ints pickle as LONG4 (above 255 bytes), an opcode that ``weights_only`` lacks."""


def is_immutable(value: object) -> bool:
    """Whether equal type and ``repr`` mean equal bytes, so that those of the last save may be used again.

    Flat tuples of such values count: AdamW's ``betas`` alone would be encoded once a parameter.
    """
    kind = type(value)
    return kind in _IMMUTABLE or (kind is tuple and _IMMUTABLE.issuperset(map(type, value)))  # type: ignore[call-overload]


def check_object(name: str, value: object, trusted: bool) -> None:
    """Refuse what :func:`encode_object` would refuse; with ``trusted`` only a cycle.

    Raises:
        UnsafeObjectError: something inside could be read back only by running code; names leaf and type.
        UnsupportedLeafError: nested deeper than ``MAX_DEPTH`` (a cycle), or a closed ``BytesIO``.
    """
    _Encoding(name, trusted).of(value)


def encode_object(name: str, value: object, *, trusted: bool) -> bytes:
    """The ``torch.save`` bytes of one object leaf. ``value`` may change as soon as this returns.

    Raises:
        UnsafeObjectError, UnsupportedLeafError: as :func:`check_object`; with ``trusted``, the first also for
            what cannot be pickled at all.
    """
    buffer = io.BytesIO()
    plain = _Encoding(name, trusted).of(value)
    try:
        torch.save(plain, buffer)
    except (pickle.PicklingError, TypeError, AttributeError) as exc:
        raise UnsafeObjectError(f"{name}: a {type_name(value)} that cannot be pickled: {exc}") from exc
    return buffer.getvalue()


def decode_object(data: bytes, *, name: str, trusted: bool) -> object:
    """What :func:`encode_object` was given. Runs no code unless ``trusted``.

    Raises:
        UnsafeObjectError: reading it needs code to run (and ``trusted`` is False), or a class not found here.
        CorruptCheckpointError: the bytes are no object of ours or of ``torch.save``.
    """
    if not trusted:
        _check_stored(data, name)
    try:
        value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=not trusted, mmap=False)
        return _Decoding().of(value)
    except pickle.UnpicklingError as exc:
        reason = _unsafe_reason(exc)
        if not reason:
            raise CorruptCheckpointError(f"{name}: the stored object does not unpickle: {_first_line(exc)}") from exc
        raise UnsafeObjectError(
            f"{name}: only running code can read this object back ({reason}); "
            "set trusted_objects=True if you trust whoever wrote the checkpoint"
        ) from exc
    except MemoryError:
        raise  # of this machine: what could take more than the bytes that are there was refused
    except (ImportError, AttributeError) as exc:
        raise UnsafeObjectError(f"{name}: the object needs a class that is not found here: {exc}") from exc
    except Exception as exc:  # torch raises many types for a damaged archive
        raise CorruptCheckpointError(f"{name}: the stored object does not read: {_first_line(exc)}") from exc


def _check_stored(data: bytes, name: str) -> None:
    """Refuse bytes that would crash or starve torch's reader."""
    try:
        records = records_of(data)
        sizes = {key: len(record) for key, (record, _) in records.items()}
        check_calls(records.get("data.pkl", (b"", 0))[0], lambda key: sizes.get(f"data/{key}"), STORAGE_ELEMENT_BYTES)
    except CorruptCheckpointError as exc:
        raise CorruptCheckpointError(f"{name}: the stored object does not read: {exc}") from exc
    except UnsafeObjectError as exc:
        raise UnsafeObjectError(f"{name}: {exc}; set trusted_objects=True if you trust whoever wrote it") from exc


def as_tensor(value: object, kind: LeafKind) -> torch.Tensor:
    """The tensor that stores a TENSOR, ARRAY or SCALAR_ARRAY leaf; same shape and elements.

    An array shares its memory with the result unless it is read-only, unaligned or has strides that torch lacks
    (negative, or no multiple of the element): those are copied. A scalar is copied.
    """
    if kind is LeafKind.TENSOR and isinstance(value, torch.Tensor):
        return value
    if kind is LeafKind.SCALAR_ARRAY and isinstance(value, np.generic):
        return torch.from_numpy(np.array(value))
    if kind is LeafKind.ARRAY and isinstance(value, np.ndarray):
        odd = any(stride < 0 or stride % value.itemsize for stride in value.strides)
        return torch.from_numpy(value.copy() if odd or not value.flags.behaved else value)
    raise UnsupportedLeafError(f"a {type_name(value)} is no {kind.name} leaf")


def from_tensor(tensor: torch.Tensor, kind: LeafKind) -> object:
    """Inverse of :func:`as_tensor`: the tensor itself, an array over its memory, or a numpy scalar."""
    if kind is LeafKind.TENSOR:
        return tensor
    array = tensor.detach().cpu().resolve_conj().resolve_neg().numpy()
    return array if kind is LeafKind.ARRAY else array[()]


# -- to plain values --------------------------------------------------------------------------------

_Recurse = Callable[[object], object]


class _Encoding:
    """One object in types that ``weights_only`` reads back; a container is rebuilt, never changed.

    A container that stands in several places is rebuilt for each of them.
    """

    def __init__(self, name: str, trusted: bool) -> None:
        self._name = name
        self._trusted = trusted
        self._depth = 0

    def of(self, value: object) -> object:
        """What stands for ``value``, a part of the object."""
        kind = type(value)
        if kind in _ALWAYS_PLAIN or ((kind is list or kind is tuple) and _is_plain(value)):  # type: ignore[arg-type]
            return value
        if kind not in _CONTAINERS:
            return self._anew(value)
        if self._depth > MAX_DEPTH:
            raise UnsupportedLeafError(f"{self._name}: an object nested deeper than {MAX_DEPTH} (does it hold itself?)")
        self._depth += 1
        plain = self._anew(value)
        self._depth -= 1
        return plain

    def _anew(self, value: object) -> object:
        encoder = _ENCODERS.get(type(value))
        if encoder is None and isinstance(value, np.generic):
            encoder = _encode_scalar
        if encoder is not None:
            try:
                return encoder(value, self.of)
            except _NotEncodableError as exc:
                if not self._trusted:
                    raise UnsafeObjectError(f"{self._name}: {exc}") from None
            except ValueError as exc:
                raise UnsupportedLeafError(f"{self._name}: a {type_name(value)} that cannot be read: {exc}") from exc
        elif not self._trusted:
            remedy = "convert it to plain values (numbers, str, bytes, list, tuple, dict, set, numpy)"
            if isinstance(value, np.ndarray):
                remedy = "give its numpy.asarray(), which has the elements and nothing else"
            what = f"a {type_name(value)} could be read back only by running code"
            raise UnsafeObjectError(f"{self._name}: {what}; {remedy}, or set trusted_objects=True")
        return value


class _NotEncodableError(Exception):
    """A numpy value without an encoding of its own."""


def _tagged(kind: str, **fields: object) -> dict[str, object]:
    return {_TAG: kind, **fields}


def _is_plain(values: list[object] | tuple[object, ...]) -> bool:
    """Whether no element needs a look: a random state is 625 ints, and looking at each costs more than its pickle."""
    kinds = set(map(type, values))
    if kinds == {int}:
        numbers: Any = values
        return int(max(-min(numbers), max(numbers))).bit_length() <= _INT_BITS
    return kinds <= _ALWAYS_PLAIN


def _encode_int(value: int, _: _Recurse) -> object:
    return value if value.bit_length() <= _INT_BITS else _tagged("int", hex=hex(value))


def _encode_bytes(value: bytes, _: _Recurse) -> object:
    return value or _tagged("bytes")


def _encode_list(value: list[object], recurse: _Recurse) -> object:
    return [recurse(item) for item in value]


def _encode_tuple(value: tuple[object, ...], recurse: _Recurse) -> object:
    return tuple([recurse(item) for item in value])


def _encode_dict(value: dict[object, object], recurse: _Recurse) -> object:
    """As itself where the keys allow it; a key that itself needs a tag cannot be a key."""
    kind = type(value)
    if _TAG not in value and set(map(type, value)) <= _ALWAYS_PLAIN:
        return kind((key, recurse(item)) for key, item in value.items())
    pairs = [(recurse(key), recurse(item)) for key, item in value.items()]
    return _tagged("dict", ordered=kind is OrderedDict, pairs=pairs)


def _encode_set(value: set[object], recurse: _Recurse) -> object:
    if set(map(type, value)) <= _ALWAYS_PLAIN:
        return value
    return _tagged("set", items=[recurse(item) for item in value])


def _encode_frozenset(value: frozenset[object], recurse: _Recurse) -> object:
    return _tagged("frozenset", items=[recurse(item) for item in value])


def _encode_bytes_io(value: io.BytesIO, _: _Recurse) -> object:
    return _tagged("BytesIO", data=_byte_tensor(value.getbuffer()), position=value.tell())


def _encode_array(value: np.ndarray[Any, Any], _: _Recurse) -> object:
    descr = _describe(value.dtype)
    return _tagged("ndarray", dtype=descr, shape=tuple(value.shape), data=_byte_tensor(memoryview(value.tobytes())))


def _encode_scalar(value: Any, _: _Recurse) -> object:
    array = np.array(value)
    if array.dtype.kind in "US" and array[()] != value:
        raise _NotEncodableError(f"a {type_name(value)} that ends in NUL, which numpy drops; convert it to str")
    data = _byte_tensor(memoryview(array.tobytes()))
    return _tagged("scalar", dtype=_describe(array.dtype), data=data)


def _describe(dtype: np.dtype[Any]) -> object:
    """The dtype as numpy's own file format spells it: a str, or a list of fields."""
    if not dtype.hasobject:
        descr = np.lib.format.dtype_to_descr(dtype)
        if np.lib.format.descr_to_dtype(descr) == dtype:
            return descr
    raise _NotEncodableError(
        f"numpy dtype {dtype!r} could be read back only by running code; convert it to plain values"
    )


def _byte_tensor(data: memoryview) -> torch.Tensor:
    return torch.from_numpy(np.array(data, dtype=np.uint8))


_ENCODERS: dict[type, Callable[[Any, _Recurse], object]] = {
    int: _encode_int,
    bytes: _encode_bytes,
    list: _encode_list,
    tuple: _encode_tuple,
    dict: _encode_dict,
    OrderedDict: _encode_dict,
    set: _encode_set,
    frozenset: _encode_frozenset,
    io.BytesIO: _encode_bytes_io,
    np.ndarray: _encode_array,
}


# -- and back ---------------------------------------------------------------------------------------


class _Decoding:
    """Replaces tagged dicts by what they stand for, each container once; every other type is passed through."""

    def __init__(self) -> None:
        self._known: dict[int, object] = {}

    def of(self, value: Any) -> object:
        """Return what ``value``, a part of what was read, stands for."""
        kind = type(value)
        if kind not in _CONTAINERS or (kind in (list, tuple) and _is_plain(value)):
            return value
        known = self._known.get(id(value), self)
        if known is self:
            self._known[id(value)] = known = self._anew(value, kind)
        return known

    def _anew(self, value: Any, kind: Any) -> object:
        if kind is dict and _TAG in value:
            return _DECODERS[value[_TAG]](value, self.of)
        if kind is dict or kind is OrderedDict:
            return kind((key, self.of(item)) for key, item in value.items())
        return kind(map(self.of, value)) if kind in (list, tuple) else value


def _decode_dict(fields: dict[str, Any], recurse: _Recurse) -> object:
    pairs: Iterable[tuple[object, object]] = ((recurse(key), recurse(item)) for key, item in fields["pairs"])
    return OrderedDict(pairs) if fields["ordered"] else dict(pairs)


def _decode_bytes_io(fields: dict[str, Any], _: _Recurse) -> object:
    stream = io.BytesIO(_stored_bytes(fields["data"]).tobytes())
    stream.seek(fields["position"])
    return stream


def _stored_bytes(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """What :func:`_byte_tensor` made; an expanded one would be more bytes than are stored."""
    if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(f"bytes stored as {tensor.dtype} of shape {tuple(tensor.shape)}")
    return tensor.numpy()


def _decode_array(fields: dict[str, Any]) -> np.ndarray[Any, Any]:
    """The length is checked first: numpy takes a forged negative dimension."""
    dtype = np.lib.format.descr_to_dtype(fields["dtype"])
    shape = fields.get("shape", ())
    raw = _stored_bytes(fields["data"])
    if dtype.hasobject or min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != raw.nbytes:
        raise ValueError(f"shape {shape} of {dtype} over {raw.nbytes} bytes")
    return np.ndarray(shape, dtype=dtype, buffer=raw)


_DECODERS: dict[str, Callable[[dict[str, Any], _Recurse], object]] = {
    "int": lambda fields, _: int(fields["hex"], 16),
    "bytes": lambda *_: b"",
    "dict": _decode_dict,
    "set": lambda fields, recurse: set(map(recurse, fields["items"])),
    "frozenset": lambda fields, recurse: frozenset(map(recurse, fields["items"])),
    "BytesIO": _decode_bytes_io,
    "ndarray": lambda fields, _: _decode_array(fields),
    "scalar": lambda fields, _: _decode_array(fields)[()],
}


def type_name(value: object) -> str:
    """Module and name of a value's type, for messages."""
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _first_line(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {str(exc).partition(chr(10))[0][:200]}"


def _unsafe_reason(exc: BaseException) -> str:
    """The line of torch's long message that names the refused global, call or opcode; empty if it refused none."""
    lines = (line.strip() for line in str(exc).splitlines())
    return next((line for line in lines if any(word in line for word in _REFUSALS)), "")[:200]


_REFUSALS = ("nsupported", "unrecognized function", "Can only create new object", "Can only build")


_DOUBLE = struct.Struct("<d")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectBytes:
    """The objects of one save, encoded; equal immutable values stand there once."""

    region: bytes
    """What follows the tensors in the image."""
    spans: tuple[tuple[int, int], ...]
    """Per object, (offset in the region, length)."""


class ObjectEncoder:
    """Encodes the object leaves of a save; the bytes of the last save's immutable values are used again.

    Borrowed fact: ``torch.save(1e-3)`` costs 39 us (FACTS), 4,000 hyperparameters 150 ms.
    """

    def __init__(self, *, trusted: bool) -> None:
        self._trusted = trusted
        self._known: dict[tuple[object, ...], bytes] = {}

    def encode(self, leaves: Sequence[tuple[str, object]]) -> ObjectBytes:
        """Encode leaves given as (name, value); mutable values are captured by it.

        Raises:
            UnsafeObjectError: names a leaf that could be read back only by running code.
        """
        seen: dict[tuple[object, ...], bytes] = {}
        parts: dict[bytes, int] = {}
        spans: list[tuple[int, int]] = []
        end = 0
        for name, value in leaves:
            data = self._bytes(name, value, seen)
            start = parts.setdefault(data, end)
            if start == end:
                end += len(data)
            spans.append((start, len(data)))
        self._known = seen
        return ObjectBytes(region=b"".join(parts), spans=tuple(spans))

    def _bytes(self, name: str, value: object, seen: dict[tuple[object, ...], bytes]) -> bytes:
        if not is_immutable(value):
            return encode_object(name, value, trusted=self._trusted)
        key = _identity(value)
        data = seen.get(key)
        if data is None:
            data = self._known.get(key)
            seen[key] = data = encode_object(name, value, trusted=self._trusted) if data is None else data
        return data


def _identity(value: object) -> tuple[object, ...]:
    """Equal for immutable values of equal bytes only: 1 and True, 0.0 and -0.0, two nans of other bits all differ."""
    if isinstance(value, float):
        return (float, _DOUBLE.pack(value))
    if isinstance(value, complex):
        return (complex, _DOUBLE.pack(value.real), _DOUBLE.pack(value.imag))
    return (tuple, *map(_identity, value)) if isinstance(value, tuple) else (type(value), value)
