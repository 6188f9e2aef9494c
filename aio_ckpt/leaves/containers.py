"""Containers of other types than dict, list and tuple: their parts, their notes, and how they are made again.

A skeleton stores the name of such a container's type. A load makes a container of this type in three cases:

- No code of the type runs: for named tuples, ``torch.return_types`` and a few types of the standard library.
- The user allows it: by ``torch.utils._pytree`` or ``torch.serialization.add_safe_globals``.
- The checkpoint is trusted.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
import importlib
import types
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Literal, TypeAlias

import msgspec
import torch

from aio_ckpt._torch import PYTREE_NODES
from aio_ckpt.errors import AioCkptError, CorruptCheckpointError, SourceChangedError
from aio_ckpt.leaves.objects import decode_object, encode_object, type_name
from aio_ckpt.leaves.pickle_allow_list import (
    FACTORIES,
    ClassNotImportedError,
    imported_class,
    is_named_tuple,
    named_tuple,
)

Notes: TypeAlias = "tuple[tuple[str, Any], ...]"
"""Notes of a container in a skeleton, such as its type: (name, value) pairs in a fixed order.

A value is a str, int, bytes or None."""

_NAMESPACES = (argparse.Namespace, types.SimpleNamespace)
_HARMLESS = frozenset((*_NAMESPACES, collections.defaultdict, collections.deque, types.MappingProxyType))
"""Types beside tuples whose values are made without running foreign code."""
_OPAQUE = (str, bytes, bytearray, memoryview, range, array, torch.Size)
"""Sequences that are leaves."""
_FACTORY_NAMES = {kind: name for name, kind in FACTORIES.items()}
_KEY, _VALUE = itemgetter(0), itemgetter(1)


class UnreadableError(Exception):
    """A mapping whose entries cannot be read, such as one with missing values."""


# -- parts ------------------------------------------------------------------------------------------


def _cached(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return a test of types that keeps its answers."""
    return functools.lru_cache(maxsize=4096)(test)


@_cached
def is_transparent(kind: type) -> bool:
    """Return whether values of this type are entered if they hold a tensor: sequences, dataclasses, namespaces."""
    if issubclass(kind, _OPAQUE) or issubclass(kind, torch.Tensor):
        return False
    return issubclass(kind, (Sequence, collections.deque)) or has_fields(kind)


_MAPPING_LIKE = frozenset({"ml_collections.config_dict.config_dict:ConfigDict"})
"""Types of mappings that do not derive from ``Mapping``. They are named here, because methods prove nothing: a table of
columns, such as a DataFrame, has the methods of a mapping too."""


@_cached
def is_mapping(kind: type) -> bool:
    """Return whether values of this type are taken apart by their keys."""
    names = {f"{base.__module__}:{base.__qualname__}" for base in kind.__mro__}
    return issubclass(kind, Mapping) or not names.isdisjoint(_MAPPING_LIKE)


def has_fields(kind: type) -> bool:
    """Return whether values of this type are taken apart by their attributes."""
    return dataclasses.is_dataclass(kind) or issubclass(kind, _NAMESPACES)


def is_frozen(kind: type) -> bool:
    """Return whether values of this type are dataclasses that refuse a change of their fields."""
    return bool(getattr(getattr(kind, "__dataclass_params__", None), "frozen", False))


Form: TypeAlias = Literal["mapping", "fields", "tuple", "list"]


def form_of(kind: Any) -> Form | None:
    """Return how values of this type are taken apart and made again; None for a type whose values are leaves."""
    if is_mapping(kind):
        return "mapping"
    if not is_transparent(kind):
        return None
    if has_fields(kind):
        return "fields"
    return "tuple" if issubclass(kind, tuple) else "list"


_READ_AS_OBJECT: frozenset[type] = frozenset((list, tuple, collections.deque, *_NAMESPACES))


def _pickling_of(kind: type) -> tuple[object, ...]:
    return tuple(getattr(kind, name, None) for name in ("__reduce_ex__", "__reduce__", "__getstate__"))


@dataclass(frozen=True, slots=True)
class _FrozenSlots:
    """Dataclass whose pickling ``dataclasses`` itself defines, as it does for all that are frozen and have slots."""


_PLAIN_PICKLING, _FROZEN_SLOTS_PICKLING = _pickling_of(object), _pickling_of(_FrozenSlots)


@_cached
def is_opened(kind: type) -> bool:
    """Return whether values of this transparent type are taken apart even without a tensor in them.

    Stored as one object, they could be read only with trust. If a type with fields pickles in its own way, its values
    are stored as one object: it may leave out fields on purpose.
    """
    is_plain = _pickling_of(kind) in (_PLAIN_PICKLING, _FROZEN_SLOTS_PICKLING)
    return kind not in _READ_AS_OBJECT and (is_plain or not has_fields(kind))


def fields_of(value: Any) -> tuple[list[str], list[object]]:
    """Return names and values of the attributes of a dataclass or namespace."""
    held = dict(getattr(value, "__dict__", {}))
    if dataclasses.is_dataclass(value):  # A dataclass with slots has no __dict__.
        for slot in dataclasses.fields(value):
            if slot.name not in held and hasattr(value, slot.name):
                held[slot.name] = getattr(value, slot.name)
    return list(held), list(held.values())


@_cached
def _is_config(kind: type) -> bool:
    """Return whether reading values of this type resolves interpolations: ``${lr}`` would become a number."""
    return "omegaconf.basecontainer:BaseContainer" in {f"{base.__module__}:{base.__name__}" for base in kind.__mro__}


def items_of(value: Any) -> list[tuple[Any, Any]]:
    """Return keys and values of a mapping; for a config of omegaconf, unresolved values."""
    if not _is_config(type(value)):
        return list(value.items())
    return [(key, _unresolved(item)) for key, item in value.items_ex(resolve=False)]


def parts_of(value: Any) -> list[object]:
    """Return the parts of a transparent container."""
    if has_fields(type(value)):
        return fields_of(value)[1]
    return list(value) if not _is_config(type(value)) else list(map(_unresolved, value._iter_ex(resolve=False)))


def entries_of(value: Mapping[Any, object], name: str | None) -> tuple[tuple[Any, ...], list[object]]:
    """Return keys and values of a mapping, read in one step: another thread cannot separate a value from its key.

    Raises:
        SourceChangedError: another thread changed the mapping.
        UnreadableError: the mapping cannot be read.
    """
    if type(value) is dict:  # Copying a dict is one step, and faster than its pairs.
        still = value.copy()
        return tuple(still), list(still.values())
    try:
        items = items_of(value)
    except RuntimeError as error:
        raise SourceChangedError(
            f"{name or 'the state'}: another thread changed this {type_name(value)} while it was read ({error}): keep "
            "the state still until save() returns"
        ) from error
    except Exception as error:  # A type's own code raises any error.
        raise UnreadableError from error
    return tuple(map(_KEY, items)), list(map(_VALUE, items))


def _unresolved(item: Any) -> Any:
    """Return an entry of a config as it stands there: a value or a container.

    For a container that is None, missing or an interpolation, that is None, ``"???"`` or the text of the interpolation.
    """
    while callable(getattr(type(item), "_is_interpolation", None)):
        if _is_config(type(item)) and not (item._is_none() or item._is_missing() or item._is_interpolation()):
            break
        item = item._value()
    return item


# -- notes ------------------------------------------------------------------------------------------

_PLAIN = frozenset({dict, collections.OrderedDict, collections.Counter, list, tuple})


def notes_of(value: Any, name: str) -> Notes:
    """Return the notes of a container: its type, if it is no plain one, and the versions of a ``state_dict()``."""
    kind = type(value)
    notes: list[tuple[str, Any]] = []
    metadata = vars(value).get("_metadata") if isinstance(value, collections.OrderedDict) else None
    if isinstance(metadata, Mapping):
        with contextlib.suppress(AioCkptError):  # Versions that pickle cannot store are left out.
            notes.append(("metadata", encode_metadata(metadata, name)))
    if kind not in _PLAIN:
        notes.append(("type", f"{kind.__module__}:{kind.__qualname__}"))
        if kind is collections.deque and value.maxlen is not None:
            notes.append(("maxlen", value.maxlen))
        if isinstance(value, collections.defaultdict) and value.default_factory is not None:
            notes += _factory_note(value.default_factory, name)
    return tuple(notes)


def objects_of(notes: Notes) -> list[bytes]:
    """Return the versions of a ``state_dict()`` that are stored as an object."""
    return [data for note, data in notes if note == "metadata" and _is_object(data)]


def _is_object(data: bytes) -> bool:
    return data[:1] == b"P"  # A zip begins with it.


def _factory_note(factory: Any, name: str) -> list[tuple[str, Any]]:
    """Return the note of a factory; none if pickle cannot store it, as a defaultdict without it holds the same."""
    if isinstance(factory, type) and factory in _FACTORY_NAMES:
        return [("factory", _FACTORY_NAMES[factory])]
    try:
        return [("factory", encode_object(name, factory))]
    except AioCkptError:
        return []


def encode_metadata(metadata: Mapping[Any, Any], name: str) -> bytes:
    """Return ``state_dict()._metadata`` as msgpack, or as an object if msgpack would change it."""
    try:
        data = msgspec.msgpack.encode(metadata)
        if _unpacked(data) == metadata:
            return data
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError):
        pass
    return encode_object(f"{name}._metadata", dict(metadata))


@functools.lru_cache(maxsize=16)
def _unpacked(data: bytes) -> Any:
    return msgspec.msgpack.decode(data, strict=False)


def decode_metadata(data: bytes, *, name: str, trusted: bool) -> Any:
    """Return the versions that :func:`encode_metadata` was given.

    Raises:
        UnsafeObjectError, CorruptCheckpointError: as :func:`aio_ckpt.leaves.objects.decode_object`.
    """
    name = f"{name}._metadata"
    if _is_object(data):
        found: Any = decode_object(data, name=name, trusted=trusted)
    else:
        try:
            found = msgspec.msgpack.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise CorruptCheckpointError(f"{name}: the versions of a module are damaged: {error}") from error
    try:
        return collections.OrderedDict(found)
    except (ValueError, TypeError) as error:
        raise CorruptCheckpointError(f"{name}: these are no versions of a module: {error}") from error


# -- making -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """A container of a noted type, before it gets its parts."""

    value: Any
    """Empty container; None if it is made of all its parts at once."""
    finish: Callable[[Any], Any]
    """Returns the container with these parts, a dict or a list. Raises any error of its type's code."""


_UNNAMED: dict[str, Any] = {"mappingproxy": types.MappingProxyType}
"""Types that their module does not hold under their name."""


def named_type(notes: Mapping[str, Any], *, trusted: bool) -> Any:
    """Return the type that ``notes`` name; None if it is not imported. If ``trusted``, its module is imported first."""
    module, _, qualname = str(notes.get("type")).partition(":")
    if trusted:
        try:
            importlib.import_module(module)
        except Exception:  # noqa: BLE001 - whatever importing a module raises
            return None
    try:
        return _UNNAMED.get(qualname) or imported_class(module, qualname)
    except ClassNotImportedError:
        return None


def open_container(notes: Mapping[str, Any], *, form: Form | None, trusted: bool) -> Opened | None:
    """Return an opened container of the type that ``notes`` name.

    None if that type is not imported, may not be made, or is of another form than the stored parts.
    """
    kind = named_type(notes, trusted=trusted)
    if kind is None or form is None or not _may_make(kind, form, trusted) or form_of(kind) != form:
        return None
    if form == "tuple":
        return Opened(value=None, finish=functools.partial(remade, kind))
    if form == "fields":
        return _filled(kind.__new__(kind), _set_fields, None)
    if kind is collections.defaultdict:
        if isinstance(notes.get("factory"), bytes) and not trusted:
            return None
        return _filled(collections.defaultdict(_factory(notes.get("factory"), trusted)), _set_items, None)
    if kind is collections.deque:
        return _filled(collections.deque(maxlen=notes.get("maxlen")), _add_items, None)
    if issubclass(kind, dict):
        return _filled(kind.__new__(kind), _set_items, kind)  # Pickle makes it in the same way.
    if issubclass(kind, list):
        return _filled(kind.__new__(kind), _add_items, kind)
    return Opened(value=None, finish=kind)


def _is_return_type(kind: type) -> bool:
    return vars(torch.return_types).get(kind.__name__) is kind


def _may_make(kind: type, form: Form, trusted: bool) -> bool:
    """Return whether a container of this form may be made of this type.

    A named tuple needs no permission: :func:`remade` makes it without code of its class.
    """
    return (
        trusted
        or kind in _HARMLESS
        or (form == "tuple" and (is_named_tuple(kind) or _is_return_type(kind)))
        or kind in PYTREE_NODES
        or kind in torch.serialization.get_safe_globals()
    )


def _filled(made: Any, fill: Callable[[Any, Any], None], kind: Any) -> Opened:
    """Return an opened container that takes its parts one by one. If it refuses them, ``kind`` is called with all."""

    def finish(parts: Any) -> Any:
        try:
            fill(made, parts)
        except Exception:
            if kind is None:
                raise
            return kind(parts)
        return made

    return Opened(value=made, finish=finish)


def _set_items(made: Any, parts: Mapping[Any, Any]) -> None:
    for key, item in parts.items():
        made[key] = item


def _add_items(made: Any, parts: Sequence[Any]) -> None:
    for item in parts:
        made.append(item)


def _set_fields(made: Any, parts: Mapping[str, Any]) -> None:
    for name, item in parts.items():
        object.__setattr__(made, name, item)


def remade(kind: Any, items: Sequence[object]) -> Any:
    """Return a tuple of this type. A namedtuple is made without a ``__new__`` of its own."""
    if _is_return_type(kind):
        return kind(items)
    return named_tuple(kind, *items) if is_named_tuple(kind) else tuple.__new__(kind, items)


def _factory(note: Any, trusted: bool) -> Any:
    if isinstance(note, bytes):
        return decode_object(note, name="the factory of a defaultdict", trusted=trusted)
    return None if note is None else FACTORIES[note]
