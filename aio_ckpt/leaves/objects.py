"""Objects (every leaf that is no tensor) to and from bytes, without running code when they are read.

The bytes are a ``torch.save`` zip that ``torch.load(weights_only=True)`` takes. Harmless values that it refuses are
stored as tagged dicts (:mod:`aio_ckpt.leaves.harmless`). A user's dict that has the tag as a key is stored as tagged
pairs, so it comes back too. Any other value is stored as pickle stores it, and needs trust when it is read.
"""

from __future__ import annotations

import importlib
import io
import logging
import pickle
import struct
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

# numpy.ma is imported here, because numpy would import it at first use, on a thread. A fork during such an import would
# keep its locks for ever.
import numpy as np
import numpy.ma
import torch

from aio_ckpt.errors import AioCkptError, CorruptCheckpointError, UnsafeObjectError, UnsupportedLeafError
from aio_ckpt.format.pickle_scan import check_calls
from aio_ckpt.format.scalar_zip import SCALAR_TYPES, NotScalarError, read_scalar, render_scalar
from aio_ckpt.format.tensor_pickle import STORAGE_ELEMENT_BYTES
from aio_ckpt.format.tensor_zip import records_of
from aio_ckpt.leaves.harmless import (
    BY_KIND,
    TAG,
    ClassNotImportedError,
    Fields,
    NotEncodableError,
    harmless_type,
    is_short,
)
from aio_ckpt.leaves.values import LeafKind, Shard

MAX_DEPTH = 200
"""Most containers inside each other. Deeper nesting counts as a cycle."""

TORCH_ARRAY_DTYPES: frozenset[np.dtype[Any]] = frozenset(
    np.dtype(name)
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
)
"""numpy dtypes (native byte order) whose elements a tensor holds bit for bit."""

_IMMUTABLE = frozenset({NoneType, bool, int, float, complex, str, bytes})
_MAPPINGS = frozenset({dict, OrderedDict, Counter})
_CONTAINERS = frozenset({list, tuple, set, frozenset}) | _MAPPINGS
_ALWAYS_PLAIN = frozenset({NoneType, bool, float, complex, str, bytearray, torch.Size, torch.dtype, torch.device})
_MAX_HASHED = 1 << 22
"""Most values in one key, counted in every place."""
_REMEDY = (
    "give EngineConfig(trusted_objects=True) if you trust whoever wrote the checkpoint, allow its type with "
    "torch.serialization.add_safe_globals, or leave it out with skip_untrusted=True"
)

_log = logging.getLogger("aio_ckpt")


def is_immutable(value: object) -> bool:
    """Return whether equal type and ``repr`` mean equal bytes, so that the bytes of the last save can be reused.

    Flat tuples of such values count: otherwise AdamW's ``betas`` would be encoded once a parameter.
    """
    kind = type(value)
    return kind in _IMMUTABLE or (kind is tuple and _IMMUTABLE.issuperset(map(type, value)))  # type: ignore[call-overload]


def encode_object(name: str, value: object) -> bytes:
    """Return the ``torch.save`` bytes of one object leaf. ``value`` may change as soon as this returns.

    Raises:
        UnsafeObjectError: pickle cannot store it (a lambda, an open file); names leaf and type.
        UnsupportedLeafError: nested deeper than ``MAX_DEPTH``, or a closed ``BytesIO``.
    """
    return _encoded(name, value)[0]


def _encoded(name: str, value: object) -> tuple[bytes, list[str]]:
    """Return the bytes as :func:`encode_object`, and the unknown types, whose values pickle stores in its own way."""
    if type(value) in SCALAR_TYPES and (type(value) is not int or is_short(value)):
        return render_scalar(value), []
    buffer = io.BytesIO()
    encoding = _Encoding(name)
    plain = encoding.of(value)
    try:
        torch.save(plain, buffer)
    except MemoryError:
        raise
    except Exception as exc:  # A type's own __reduce__ raises any error.
        raise UnsafeObjectError(
            f"{name}: a {type_name(value)} that cannot be pickled: {_first_line(exc)}; give plain values, or leave it "
            "out"
        ) from exc
    return buffer.getvalue(), encoding.unknown


def decode_object(data: bytes, *, name: str, trusted: bool) -> object:
    """Return the value that :func:`encode_object` was given. Runs no code unless ``trusted``.

    Raises:
        UnsafeObjectError: reading it needs code to run (and ``trusted`` is False), or a class not found here.
        CorruptCheckpointError: the bytes are no object of ours or of ``torch.save``.
    """
    try:
        return read_scalar(data)
    except NotScalarError:
        pass
    if not trusted:
        _check_stored(data, name)
    try:
        value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=not trusted, mmap=False)
        return _Decoding(trusted=trusted).of(value)
    except pickle.UnpicklingError as exc:
        reason = unsafe_reason(exc)
        if not reason:
            raise CorruptCheckpointError(f"{name}: the stored object does not unpickle: {_first_line(exc)}") from exc
        raise UnsafeObjectError(f"{name}: only running code can read this object back ({reason}); {_REMEDY}") from exc
    except MemoryError:
        raise  # This machine lacks memory: bytes that would take more than their size were refused.
    except ClassNotImportedError as exc:
        raise UnsafeObjectError(
            f"{name}: the object needs the class {exc}, which is not imported here: import its module before, or leave "
            "the object out with skip_untrusted=True"
        ) from exc
    except (ImportError, AttributeError) as exc:
        raise UnsafeObjectError(f"{name}: the object needs a class that is not found here: {exc}") from exc
    except Exception as exc:  # Torch raises errors of many types for a damaged archive.
        raise CorruptCheckpointError(f"{name}: the stored object does not read: {_first_line(exc)}") from exc


def _check_stored(data: bytes, name: str) -> None:
    """Refuse bytes that would crash or starve torch's reader."""
    try:
        records = records_of(data)
        sizes = {key: len(record) for key, (record, _) in records.items()}
        pickled = bytes(records.get("data.pkl", (b"", 0))[0])
        check_calls(pickled, lambda key: sizes.get(f"data/{key}"), STORAGE_ELEMENT_BYTES)
    except CorruptCheckpointError as exc:
        raise CorruptCheckpointError(f"{name}: the stored object does not read: {exc}") from exc
    except UnsafeObjectError as exc:
        raise UnsafeObjectError(f"{name}: {exc}; {_REMEDY}") from exc


def as_tensor(value: object, kind: LeafKind) -> torch.Tensor:
    """Return the tensor that stores a TENSOR, ARRAY or SCALAR_ARRAY leaf, with equal shape and elements.

    An array shares its memory with the result. It is copied if it is read-only or unaligned, or if torch lacks its
    strides (negative, or no multiple of the element). A scalar is copied. For a Shard, the result is its tensor.
    """
    if kind is LeafKind.TENSOR and isinstance(value, (torch.Tensor, Shard)):
        return value.tensor if isinstance(value, Shard) else value
    if kind is LeafKind.SCALAR_ARRAY and isinstance(value, np.generic):
        return torch.from_numpy(np.array(value))
    if kind is LeafKind.ARRAY and isinstance(value, np.ndarray):
        odd = any(stride < 0 or stride % value.itemsize for stride in value.strides)
        return torch.from_numpy(value.copy() if odd or not value.flags.behaved else value)
    raise UnsupportedLeafError(f"a {type_name(value)} is no {kind.name} leaf")


def from_tensor(tensor: torch.Tensor, kind: LeafKind) -> object:
    """Return the leaf that a tensor stores: the tensor itself, an array over its memory, or a numpy scalar."""
    if kind is LeafKind.TENSOR:
        return tensor
    array = tensor.detach().cpu().resolve_conj().resolve_neg().numpy()
    return array if kind is LeafKind.ARRAY else array[()]


# -- to plain values --------------------------------------------------------------------------------


class _Encoding:
    """Encoding of one object in types that ``weights_only`` reads back. Containers are rebuilt, never changed.

    A container that stands in several places, or in itself, is rebuilt once.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._depth = 0
        self._known: dict[int, tuple[object, object]] = {}
        """By id: a value, kept alive so that its id stays valid, and the value that is stored for it."""
        self.unknown: list[str] = []
        """Names of unknown types, whose values are stored as they are."""

    def of(self, value: Any) -> object:
        """Return the value that is stored for ``value``, a part of the object."""
        kind = type(value)
        if kind in _ALWAYS_PLAIN or ((kind is list or kind is tuple) and _is_plain(value)):
            return value
        if (kind is int and is_short(value)) or (kind is bytes and value):
            return value
        known = self._known.get(id(value))
        if known is not None:
            return known[1]
        if self._depth > MAX_DEPTH:
            raise UnsupportedLeafError(f"{self._name}: an object nested deeper than {MAX_DEPTH}")
        self._depth += 1
        plain = self._anew(value, kind)
        self._depth -= 1
        return self._known.setdefault(id(value), (value, plain))[1]

    def _anew(self, value: Any, kind: type) -> object:
        """Return the stored form of a value that is not plain and was not met before."""
        if kind is list:
            return self._filled(value, [])
        if kind is tuple:
            return tuple([self.of(item) for item in value])
        if kind in _MAPPINGS:
            return self._mapping(value, kind)
        if kind is set and all(map(_is_plain_key, value)):
            return value
        return self._tagged(value)

    def _filled(self, value: list[object], plain: list[object]) -> object:
        self._known[id(value)] = value, plain
        plain += map(self.of, list(value))
        return plain

    def _mapping(self, value: dict[object, object], kind: Any) -> object:
        """Return a mapping of the same type if all keys are plain; otherwise tagged pairs, as a dict is no key."""
        items = list(value.items())
        if TAG not in value and all(_is_plain_key(key) for key, _ in items):
            plain = kind()
            self._known[id(value)] = value, plain
            for key, item in items:
                plain[key] = self.of(item)
            return plain
        tagged: Fields = {TAG: "dict", "ordered": kind is OrderedDict}
        if kind is Counter:
            tagged["counter"] = True
        self._known[id(value)] = value, tagged
        tagged["pairs"] = [(self.of(key), self.of(item)) for key, item in items]
        return tagged

    def _tagged(self, value: Any) -> object:
        row = harmless_type(value)
        if row is not None:
            tagged: Fields = {TAG: row.kind}
            self._known[id(value)] = value, tagged
            try:
                tagged.update(row.encode(value, self.of))
            except NotEncodableError:
                del self._known[id(value)]
            except ValueError as exc:
                raise UnsupportedLeafError(f"{self._name}: a {type_name(value)} that cannot be read: {exc}") from exc
            else:
                return tagged
        self.unknown.append(type_name(value))
        return value


def _is_plain(values: list[object] | tuple[object, ...]) -> bool:
    """Return whether all elements are plain, by their types: a random state has 625 ints."""
    kinds = set(map(type, values))
    if kinds == {int}:
        numbers: Any = values
        return is_short(int(max(-min(numbers), max(numbers))))
    return kinds <= _ALWAYS_PLAIN


def _is_plain_key(key: Any) -> bool:
    kind = type(key)
    if kind is tuple:
        return all(map(_is_plain_key, key))
    return kind in _ALWAYS_PLAIN or (kind is int and is_short(key)) or (kind is bytes and bool(key))


# -- from plain values ------------------------------------------------------------------------------


class _Decoding:
    """Decoding of one object: tagged dicts are replaced by the values that they stand for, each once, in place."""

    def __init__(self, *, trusted: bool) -> None:
        self._trusted = trusted
        self._known: dict[int, tuple[object, object]] = {}
        """By id: a stored value, kept alive so that its id stays valid, and the value that it stands for."""
        self._hashed: dict[int, int] = {}
        """By id: how many values the hash of a part of a key visits."""

    def of(self, value: Any) -> Any:
        """Return the value that ``value``, a part of the stored object, stands for."""
        kind = type(value)
        if kind not in _CONTAINERS or (kind in (list, tuple) and _is_plain(value)):
            return value
        known = self._known.get(id(value))
        if known is None:
            made = self._anew(value, kind)
            known = self._known.setdefault(id(value), (value, made))  # A tuple may have been decoded within itself.
        return known[1]

    def key(self, value: Any) -> Any:
        """Return the value that ``value`` stands for, to be hashed.

        Raises:
            ValueError: its hash would take too long.
        """
        _places(value, self._hashed)
        return self.of(value)

    def _anew(self, value: Any, kind: Any) -> object:
        """Return the value of a stored container that was not met before."""
        if kind is tuple:
            return tuple(map(self.of, value))
        if kind is dict and TAG in value:
            return self._untagged(value)
        self._known[id(value)] = value, value
        if kind is list:
            value[:] = map(self.of, list(value))
        elif kind in _MAPPINGS:
            for key, item in list(value.items()):
                value[key] = self.of(item)
        return value

    def _untagged(self, fields: Fields) -> object:
        """Return the value that a tagged dict stands for."""
        kind = fields[TAG]
        if kind == "dict":
            made: Any = OrderedDict() if fields["ordered"] else Counter() if fields.get("counter") else {}
            self._known[id(fields)] = fields, made
            for key, item in fields["pairs"]:
                made[self.key(key)] = self.of(item)
            return made
        row = BY_KIND[kind]
        if self._trusted and "module" in fields:
            importlib.import_module(fields["module"])
        for key, _ in fields.get("pairs", ()):
            _places(key, self._hashed)
        recurse = self.key if "items" in fields or kind == "slice" else self.of
        made = row.decode(fields, recurse)
        if row.fill is not None:
            self._known[id(fields)] = fields, made
            row.fill(made, fields, recurse)
        return made


def check_key(value: Any) -> None:
    """Raise TypeError for a value that cannot be hashed, ValueError for one whose hash takes too long."""
    _places(value, {})
    hash(value)


def _places(value: Any, known: dict[int, int]) -> int:
    """Return how many values a hash of ``value`` visits, counted in every place.

    Raises:
        ValueError: more than ``_MAX_HASHED``.
    """
    if type(value) not in (tuple, list, dict):
        return 1
    if id(value) not in known:
        known[id(value)] = 1
        parts: Iterable[Any] = value.values() if type(value) is dict else value
        known[id(value)] = 1 + sum(_places(part, known) for part in parts)
        if known[id(value)] > _MAX_HASHED:
            raise ValueError(f"a key of more than {_MAX_HASHED} values")
    return known[id(value)]


def type_name(value: object) -> str:
    """Return module and name of a value's type, for messages."""
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _first_line(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {str(exc).partition(chr(10))[0][:200]}"


def unsafe_reason(exc: BaseException) -> str:
    """Return the line of torch's message that names the refused global, call or opcode; empty if none was refused."""
    lines = (line.strip() for line in str(exc).splitlines())
    found = next((line for line in lines if any(word in line for word in _REFUSALS)), "")
    return found.partition(" Please use")[0][:200]  # Torch's remedy follows; the error has its own.


_REFUSALS = ("nsupported", "unrecognized function", "Can only create new object", "Can only build")


_DOUBLE = struct.Struct("<d")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectBytes:
    """Encoded objects of one save. Equal bytes are stored once."""

    region: bytes
    """Bytes that follow the tensors in the image."""
    spans: tuple[tuple[int, int], ...]
    """Per object, (offset in the region, length)."""


class ObjectEncoder:
    """Encoder of the object leaves of a save. It reuses the bytes of the last save's immutable values.

    It warns once of each type that only running code can read back.
    """

    def __init__(self, *, trusted: bool) -> None:
        self._trusted = trusted
        self._known: dict[tuple[object, ...] | bytes, bytes] = {}
        self._readable: set[str] = set()
        """Names of leaves of unknown types that can be read without trust."""
        self._warned: set[str] = set()
        """Names of types that a warning named."""

    def encode(self, leaves: Sequence[tuple[str, object]], noted: Sequence[tuple[str, bytes]] = ()) -> ObjectBytes:
        """Encode leaves given as (name, value). Mutable values may change afterwards.

        ``noted``: (name, bytes) of objects that the skeleton holds. A warning names them, too.

        Raises:
            UnsafeObjectError, UnsupportedLeafError: a leaf cannot be stored.
        """
        span_of: dict[tuple[object, ...] | bytes, tuple[int, int]] = {}
        parts: list[bytes] = []
        spans: list[tuple[int, int]] = []
        unsafe: dict[str, list[str]] = {}
        end = 0
        for name, value in leaves:
            key: tuple[object, ...] | bytes
            if is_immutable(value):
                key, data = _identity(value), b""
            else:
                data, unknown = _encoded(name, value)
                key = data
                self._add_if_unsafe(name, data, unknown, unsafe)
            span = span_of.get(key)
            if span is None:
                data = data or self._known.get(key) or encode_object(name, value)
                span = span_of[key] = end, len(data)
                parts.append(data)
                end += len(data)
            spans.append(span)
        self._known = {key: data for key, data in zip(span_of, parts, strict=True) if type(key) is tuple}
        for name, data in noted:
            self._add_if_unsafe(name, data, [name], unsafe)
        if unsafe:
            self._warned.update(*unsafe.values())
            _warn([f"{name!r} (a {types[0]})" if types != [name] else repr(name) for name, types in unsafe.items()])
        return ObjectBytes(region=b"".join(parts), spans=tuple(spans))

    def _add_if_unsafe(self, name: str, data: bytes, unknown: list[str], unsafe: dict[str, list[str]]) -> None:
        """Add an object with values of ``unknown`` types to ``unsafe`` if a warning must say that it needs trust."""
        if not unknown or self._trusted or name in self._readable or self._warned.issuperset(unknown):
            return
        if _is_readable(name, data):
            self._readable.add(name)
        else:
            unsafe[name] = unknown


def _is_readable(name: str, data: bytes) -> bool:
    """Return whether the object can be read without trust, with the types that the user has allowed so far."""
    try:
        decode_object(data, name=name, trusted=False)
    except AioCkptError:
        return False
    return True


def _warn(unsafe: list[str]) -> None:
    more = f" and {len(unsafe) - _SHOWN} more" if len(unsafe) > _SHOWN else ""
    _log.warning(
        "stored, but only running code can read it back: %s%s; to load it %s. Everything else of the checkpoint needs "
        "no trust; told once for each type",
        ", ".join(unsafe[:_SHOWN]),
        more,
        _REMEDY,
    )


_SHOWN = 5
"""Most leaves that a warning names."""


def _identity(value: Any) -> tuple[object, ...]:
    """Return a key that is equal for values of equal bytes only: 1 and True, 0.0 and -0.0 and unequal nans differ."""
    kind = type(value)
    if kind is float:
        return (float, _DOUBLE.pack(value))
    if kind is complex:
        return (complex, _DOUBLE.pack(value.real), _DOUBLE.pack(value.imag))
    return (tuple, *map(_identity, value)) if kind is tuple else (kind, value)
