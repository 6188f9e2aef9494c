"""Objects (every leaf that is no tensor and no array) to and from bytes, without running code when they are read.

The bytes are those of ``torch.save``, so stock ``dcp.load`` gives the very values. A restricted unpickler reads them:
it makes harmless values (:mod:`aio_ckpt.leaves.pickle_allow_list`), tensors, and values of types that the user allowed.
Any other value needs trust when it is read.
"""

from __future__ import annotations

import datetime
import io
import logging
import pickle
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

# numpy.ma is imported here, because numpy would import it at first use, on a thread. A fork during such an import would
# keep its locks for ever.
import numpy.ma
import torch

from aio_ckpt.errors import CorruptCheckpointError, UnsafeObjectError, UnsupportedLeafError
from aio_ckpt.format.restricted_unpickler import RefusedError
from aio_ckpt.format.scalar_zip import SCALAR_TYPES, NotScalarError, read_scalar, render_pickle, render_scalar
from aio_ckpt.format.tensor_zip import records_of
from aio_ckpt.leaves.object_unpickler import read_object_pickle
from aio_ckpt.message_texts import first_of

MAX_DEPTH = 200
"""Most containers inside each other. Deeper nesting counts as a cycle."""

_IMMUTABLE = frozenset({NoneType, bool, int, float, complex, str, bytes})
_REMEDY = (
    "give EngineConfig(trusted_objects=True) if you trust whoever wrote the checkpoint, allow its type with "
    "torch.serialization.add_safe_globals, or leave it out with skip_untrusted=True"
)

_MAX_RENDERED_BYTES = 1 << 31
"""A longer pickle needs a zip64, which ``torch.save`` writes."""

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
        UnsupportedLeafError: nested too deep for pickle.
    """
    return _encoded(name, value)[0]


class _Pickler(pickle.Pickler):
    """Pickler of protocol 2, as that of ``torch.save``. It notes what the pickle names, and leaves tensors out."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, 2)
        self.names: set[str] = set()
        """Full names of the classes and functions in the pickle, on which it depends whether it needs trust."""
        self.has_tensor = False

    def reducer_override(self, value: Any) -> Any:
        if callable(value) and (name := getattr(value, "__qualname__", getattr(value, "__name__", ""))):
            # NumPy's functions, which are of many types, are among them. Its ufuncs lack a module before NumPy 2.
            self.names.add(f"{getattr(value, '__module__', '')}.{name}")
        elif isinstance(value, numpy.ndarray) and value.dtype.hasobject:
            self.names.add("numpy.ndarray of objects")
        elif isinstance(value, torch.Tensor | torch.TypedStorage | torch.UntypedStorage):
            self.has_tensor = True
            return int, ()
        elif type(value) in (datetime.datetime, datetime.time) and value.fold:
            return value.__reduce_ex__(4)  # Protocol 2 leaves the fold out.
        return NotImplemented


def _encoded(name: str, value: object) -> tuple[bytes, frozenset[str]]:
    """Return the bytes as :func:`encode_object`, and the names of the classes and functions in the pickle."""
    if type(value) in SCALAR_TYPES:
        return render_scalar(value), frozenset()
    pickled = io.BytesIO()
    pickler = _Pickler(pickled)
    try:
        pickler.dump(value)
        names = frozenset(pickler.names)
        if not pickler.has_tensor and pickled.tell() < _MAX_RENDERED_BYTES:
            return render_pickle(pickled.getvalue()), names
        archive = io.BytesIO()
        torch.save(value, archive)
    except MemoryError:
        raise
    except RecursionError as exc:
        raise UnsupportedLeafError(f"{name}: a {type_name(value)} that is nested too deep for pickle") from exc
    except Exception as exc:  # A type's own __reduce__ raises any error.
        raise UnsafeObjectError(
            f"{name}: a {type_name(value)} that cannot be pickled: {_first_line(exc)}; give plain values, or leave it "
            "out"
        ) from exc
    return archive.getvalue(), names


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
    try:
        if trusted:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False, mmap=False)
        return _read_untrusted(data)
    except RefusedError as exc:
        raise UnsafeObjectError(f"{name}: only running code can read this object back ({exc}); {_REMEDY}") from exc
    except MemoryError:
        raise  # This machine lacks memory: bytes that would take more than their size were refused.
    except (ImportError, AttributeError) as exc:
        if not trusted:
            raise CorruptCheckpointError(f"{name}: the stored object does not read: {_first_line(exc)}") from exc
        raise UnsafeObjectError(f"{name}: the object needs a class that is not found here: {exc}") from exc
    except CorruptCheckpointError as exc:
        raise CorruptCheckpointError(f"{name}: the stored object does not read: {exc}") from exc
    except Exception as exc:  # A damaged pickle raises errors of many types.
        raise CorruptCheckpointError(f"{name}: the stored object does not read: {_first_line(exc)}") from exc


def _read_untrusted(data: bytes) -> object:
    records = {key: record for key, (record, _) in records_of(data).items()}

    def storage_of(key: str) -> torch.UntypedStorage:
        record = records.get(f"data/{key}")
        if record is None:
            raise CorruptCheckpointError(f"it has no record data/{key[:40]!r}")
        if bytes(records.get("byteorder", b"little")) != sys.byteorder.encode():
            raise CorruptCheckpointError("a tensor in another byte order")
        return torch.frombuffer(bytearray(record), dtype=torch.uint8).untyped_storage() if record else _NO_STORAGE

    return read_object_pickle(bytes(records.get("data.pkl", b"")), storage_of)


def type_name(value: object) -> str:
    """Return module and name of a value's type, for messages."""
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def _first_line(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {str(exc).partition(chr(10))[0][:200]}"


_NO_STORAGE = torch.empty(0, dtype=torch.uint8).untyped_storage()
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
        self._refused: dict[frozenset[str], str] = {}
        """By the names in a pickle: the type in it that needs trust; '' if none does."""
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
        unsafe: dict[str, str] = {}
        end = 0
        for name, value in leaves:
            key: tuple[object, ...] | bytes
            if is_immutable(value):
                key, data = _identity(value), b""
            else:
                data, names = _encoded(name, value)
                key = data
                self._add_if_unsafe(name, data, names, unsafe)
            span = span_of.get(key)
            if span is None:
                data = data or self._known.get(key) or encode_object(name, value)
                span = span_of[key] = end, len(data)
                parts.append(data)
                end += len(data)
            spans.append(span)
        self._known = {key: data for key, data in zip(span_of, parts, strict=True) if type(key) is tuple}
        for name, data in noted:
            self._add_if_unsafe(name, data, frozenset({name}), unsafe)
        if unsafe:
            self._warned.update(unsafe.values())
            _warn([f"{name!r} ({refused})" for name, refused in unsafe.items()])
        return ObjectBytes(region=b"".join(parts), spans=tuple(spans))

    def _add_if_unsafe(self, name: str, data: bytes, names: frozenset[str], unsafe: dict[str, str]) -> None:
        """Add an object to ``unsafe`` if a warning must say that it needs trust. ``names``: those in its pickle."""
        if self._trusted or not names:
            return
        if names not in self._refused:
            self._refused[names] = _refused_type(name, data)
        refused = self._refused[names]
        if refused and refused not in self._warned:
            unsafe[name] = refused


def _refused_type(name: str, data: bytes) -> str:
    """Return the name of the type that needs trust, as the user has allowed types so far; '' if none does."""
    try:
        decode_object(data, name=name, trusted=False)
    except UnsafeObjectError as exc:
        return str(exc.__cause__)
    return ""


def _warn(unsafe: list[str]) -> None:
    _log.warning(
        "stored, but only running code can read it back: %s; to load it %s. Everything else of the checkpoint needs "
        "no trust; logged once for each type",
        first_of(unsafe),
        _REMEDY,
    )


def _identity(value: Any) -> tuple[object, ...]:
    """Return a key that is equal for values of equal bytes only: 1 and True, 0.0 and -0.0 and unequal nans differ."""
    kind = type(value)
    if kind is float:
        return (float, _DOUBLE.pack(value))
    if kind is complex:
        return (complex, _DOUBLE.pack(value.real), _DOUBLE.pack(value.imag))
    return (tuple, *map(_identity, value)) if kind is tuple else (kind, value)
