"""Types beside torch's own whose values come back without running code: one row a type, with encoder and decoder.

A value of such a type is stored as a dict ``{"__aio_ckpt__": kind}`` with the fields of its kind. A decoder gets fields
that anybody may have written. It calls only the constructor of its own row. It checks the types of the arguments,
unless the constructor does. It raises ValueError, TypeError or KeyError for wrong fields.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import enum
import fractions
import io
import math
import pathlib
import random
import sys
import types
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch.torch_version import TorchVersion

TAG = "__aio_ckpt__"
"""Key that marks a dict as the stored form of another value; the kind is its value."""

INT_BITS = 2000
"""Bits of the largest plain int. Above 255 bytes an int pickles as LONG4, an opcode that ``weights_only`` lacks."""

Recurse: TypeAlias = Callable[[Any], Any]
Fields: TypeAlias = "dict[str, Any]"
_T = TypeVar("_T")


class NotEncodableError(Exception):
    """A value of a harmless type that has no harmless encoding. Its text says why."""


class ClassNotImportedError(Exception):
    """A stored value names a class that this process has not imported. Its text is the class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HarmlessType:
    """Row of the table of harmless types: how their values are stored and read."""

    kind: str
    """Value of the key ``TAG``."""
    types: tuple[type, ...]
    """Exact types of the values. Empty if :func:`harmless_type` finds them by other means."""
    encode: Callable[[Any, Recurse], Fields]
    """Returns the fields of a value. Its parts go through the second argument."""
    decode: Callable[[Fields, Recurse], Any]
    """Returns the value; if ``fill`` is given, the empty value."""
    fill: Callable[[Any, Fields, Recurse], None] | None = None
    """Puts the parts into the empty value, which may be among its own parts. None: ``decode`` makes it whole."""


def is_short(value: int) -> bool:
    """Return whether ``weights_only`` reads this int."""
    return value.bit_length() <= INT_BITS


def _typed(value: Any, kind: type[_T]) -> _T:
    """Return ``value``, which must be exactly of this type."""
    if type(value) is not kind:
        raise TypeError(f"a {type(value).__name__} where a {kind.__name__} is stored")
    return value


# -- numpy and streams ------------------------------------------------------------------------------


def _byte_tensor(data: memoryview | bytes) -> torch.Tensor:
    return torch.from_numpy(np.array(memoryview(data), dtype=np.uint8))


def _stored_bytes(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the bytes of a tensor of :func:`_byte_tensor`. An expanded tensor has more bytes than are stored."""
    if tensor.dtype != torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(f"bytes stored as {tensor.dtype} of shape {tuple(tensor.shape)}")
    return tensor.numpy()


def _describe(dtype: np.dtype[Any]) -> object:
    """Return the dtype as numpy's own file format spells it: a str, or a list of fields."""
    if not dtype.hasobject:
        descr = np.lib.format.dtype_to_descr(dtype)
        if np.lib.format.descr_to_dtype(descr) == dtype:
            return descr
    raise NotEncodableError(f"numpy dtype {dtype!r} could be read back only by running code; convert it")


def _encode_array(value: np.ndarray[Any, Any], _: Recurse) -> Fields:
    return {"dtype": _describe(value.dtype), "shape": tuple(value.shape), "data": _byte_tensor(value.tobytes())}


def _encode_scalar(value: Any, _: Recurse) -> Fields:
    array = np.array(value)
    if array.dtype.kind in "US" and array[()] != value:
        raise NotEncodableError("a numpy text that ends in NUL, which numpy drops")
    return {"dtype": _describe(array.dtype), "data": _byte_tensor(array.tobytes())}


def _decode_array(fields: Fields) -> np.ndarray[Any, Any]:
    """Return the stored array. Its length is checked first, as numpy takes a forged negative dimension."""
    dtype = np.lib.format.descr_to_dtype(fields["dtype"])
    shape = fields.get("shape", ())
    raw = _stored_bytes(fields["data"])
    if dtype.hasobject or min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != raw.nbytes:
        raise ValueError(f"shape {shape} of {dtype} over {raw.nbytes} bytes")
    return np.ndarray(shape, dtype=dtype, buffer=raw)


def _decode_dtype(fields: Fields) -> np.dtype[Any]:
    dtype: np.dtype[Any] = np.lib.format.descr_to_dtype(fields["dtype"])
    return dtype


def _decode_bytes_io(fields: Fields, _: Recurse) -> io.BytesIO:
    stream = io.BytesIO(_stored_bytes(fields["data"]).tobytes())
    stream.seek(fields["position"])
    return stream


# -- random generators ------------------------------------------------------------------------------

_BIT_GENERATORS: dict[str, Any] = {
    name: getattr(np.random, name) for name in ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
}
_POSITIONS: dict[str, tuple[str | None, str, int]] = {
    "MT19937": ("state", "pos", 624),
    "Philox": (None, "buffer_pos", 4),
}
"""Field that indexes a buffer of the generator, unchecked by numpy: its dict, its name, and its largest value."""
_MAX_POOL = 1 << 10
"""Most words of a seed's pool. numpy's own size is 4."""


def _encode_bit_generator(value: Any, recurse: Recurse) -> Fields:
    kind = type(value).__name__
    if _BIT_GENERATORS.get(kind) is not type(value):
        raise NotEncodableError(f"a bit generator {kind}")
    seed = getattr(value, "seed_seq", None)
    fields: Fields = {"generator": kind, "state": recurse(value.state)}
    if type(seed) is np.random.SeedSequence:  # spawn() continues from it.
        words = ("entropy", "spawn_key", "pool_size", "n_children_spawned")
        fields["seed"] = recurse({word: getattr(seed, word) for word in words})
    return fields


def _decode_bit_generator(fields: Fields, recurse: Recurse) -> Any:
    seed = recurse(fields["seed"]) if "seed" in fields else None
    if seed is not None:
        if not 0 <= _typed(seed["pool_size"], int) <= _MAX_POOL:
            raise ValueError(f"a seed with a pool of {seed['pool_size']} words")
        words: Any = {word: seed[word] for word in ("entropy", "spawn_key", "pool_size")}
        seed = np.random.SeedSequence(**words, n_children_spawned=_typed(seed["n_children_spawned"], int))
    generator = _BIT_GENERATORS[fields["generator"]](0 if seed is None else seed)
    generator.state = _checked_state(fields["generator"], recurse(fields["state"]))
    return generator


def _checked_state(generator: str, state: Any) -> Any:
    """Return the state of a bit generator, whose position is checked to lie inside its buffer."""
    if generator in _POSITIONS:
        held, name, largest = _POSITIONS[generator]
        position = _typed((state if held is None else state[held])[name], int)
        if not 0 <= position <= largest:
            raise ValueError(f"the position {position} of {generator}, at most {largest}")
    return state


def _encode_random_state(value: np.random.RandomState, recurse: Recurse) -> Fields:
    state: Any = value.get_state(legacy=False)
    if state["bit_generator"] not in _BIT_GENERATORS:
        raise NotEncodableError(f"a RandomState over {state['bit_generator']}")
    return {"state": recurse(state)}


def _decode_random_state(fields: Fields, recurse: Recurse) -> np.random.RandomState:
    state = _typed(recurse(fields["state"]), dict)
    made = np.random.RandomState(_BIT_GENERATORS[state["bit_generator"]](0))
    made.set_state(_checked_state(state["bit_generator"], state))
    return made


def _decode_random(fields: Fields, recurse: Recurse) -> random.Random:
    made = random.Random(0)
    made.setstate(_typed(recurse(fields["state"]), tuple))
    return made


def _encode_torch_generator(value: torch.Generator, _: Recurse) -> Fields:
    if value.device.type != "cpu":
        raise NotEncodableError(f"a torch.Generator of {value.device}; give its get_state()")
    return {"state": value.get_state()}


def _decode_torch_generator(fields: Fields, _: Recurse) -> torch.Generator:
    return torch.Generator().set_state(_typed(fields["state"], torch.Tensor))


# -- the standard library ---------------------------------------------------------------------------

FACTORIES: dict[str, Any] = {
    f"{kind.__module__}.{kind.__qualname__}": kind
    for kind in (
        *(bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset),
        *(collections.OrderedDict, collections.Counter, collections.deque),
    )
}
"""Types that are stored by name, and may be the factory of a defaultdict."""
_TYPES: dict[str, Any] = FACTORIES | {
    f"numpy.{kind.__name__}": kind for kind in np.sctypeDict.values() if kind is not np.object_
}
_TYPE_NAMES = {kind: name for name, kind in _TYPES.items()}


def _encode_type(value: type, _: Recurse) -> Fields:
    if value not in _TYPE_NAMES:
        raise NotEncodableError(f"the class {value.__module__}.{value.__qualname__}")
    return {"name": _TYPE_NAMES[value]}


def _encode_default_dict(value: Any, recurse: Recurse) -> Fields:
    factory = value.default_factory
    if factory is not None and _TYPE_NAMES.get(factory) not in FACTORIES:
        raise NotEncodableError("a defaultdict whose factory is no builtin type")
    name = None if factory is None else _TYPE_NAMES[factory]
    return {"factory": name, "pairs": [(recurse(key), recurse(item)) for key, item in list(value.items())]}


def _decode_default_dict(fields: Fields, _: Recurse) -> Any:
    name = fields["factory"]
    return collections.defaultdict(None if name is None else FACTORIES[name])


def _fill_pairs(made: Any, fields: Fields, recurse: Recurse) -> None:
    for key, item in fields["pairs"]:
        made[recurse(key)] = recurse(item)


def _encode_attributes(value: Any, recurse: Recurse) -> Fields:
    return {"pairs": [(key, recurse(item)) for key, item in list(vars(value).items())]}


def _fill_attributes(made: Any, fields: Fields, recurse: Recurse) -> None:
    for key, item in fields["pairs"]:
        vars(made)[_typed(key, str)] = recurse(item)


_PATHS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.WindowsPath)
}


def _decode_path(fields: Fields, _: Recurse) -> pathlib.PurePath:
    """Return the stored path. A path of another system comes back pure, without the methods that access a disk."""
    kind = _typed(fields["type"], str)
    if kind != type(pathlib.Path()).__name__ and not kind.startswith("Pure"):
        kind = f"Pure{kind}"
    path: pathlib.PurePath = _PATHS[kind](_typed(fields["path"], str))
    return path


def _encode_datetime(value: datetime.datetime, recurse: Recurse) -> Fields:
    return {"text": value.replace(tzinfo=None).isoformat(), "fold": value.fold, "zone": recurse(value.tzinfo)}


def _decode_datetime(fields: Fields, recurse: Recurse) -> datetime.datetime:
    made = datetime.datetime.fromisoformat(_typed(fields["text"], str))
    return made.replace(tzinfo=recurse(fields["zone"]), fold=fields["fold"])


def _encode_time(value: datetime.time, recurse: Recurse) -> Fields:
    return {"text": value.replace(tzinfo=None).isoformat(), "fold": value.fold, "zone": recurse(value.tzinfo)}


def _decode_time(fields: Fields, recurse: Recurse) -> datetime.time:
    made = datetime.time.fromisoformat(_typed(fields["text"], str))
    return made.replace(tzinfo=recurse(fields["zone"]), fold=fields["fold"])


def _encode_timezone(value: datetime.timezone, recurse: Recurse) -> Fields:
    made: Any = value.__reduce__()
    offset, *name = made[1]
    return {"offset": recurse(offset), "name": name[0] if name else None}


def _decode_timezone(fields: Fields, recurse: Recurse) -> datetime.timezone:
    offset, name = _typed(recurse(fields["offset"]), datetime.timedelta), fields["name"]
    if name is None:
        return datetime.timezone(offset) if offset else datetime.UTC
    return datetime.timezone(offset, _typed(name, str))


def _decode_timedelta(fields: Fields, _: Recurse) -> datetime.timedelta:
    return datetime.timedelta(*(_typed(fields[word], int) for word in ("days", "seconds", "microseconds")))


def _decode_deque(fields: Fields, _: Recurse) -> Any:
    maxlen = fields["maxlen"]
    return collections.deque(maxlen=None if maxlen is None else _typed(maxlen, int))


_MAX_FRACTION_BITS = 1 << 16
"""Most bits of a numerator or denominator. A common divisor of larger numbers takes long."""


def _encode_fraction(value: fractions.Fraction, recurse: Recurse) -> Fields:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MAX_FRACTION_BITS:
        raise NotEncodableError(f"a Fraction of more than {_MAX_FRACTION_BITS} bits")
    return {"numerator": recurse(value.numerator), "denominator": recurse(value.denominator)}


def _decode_fraction(fields: Fields, recurse: Recurse) -> fractions.Fraction:
    numbers = [_typed(recurse(fields[word]), int) for word in ("numerator", "denominator")]
    if max(number.bit_length() for number in numbers) > _MAX_FRACTION_BITS:
        raise ValueError("too large a Fraction")
    return fractions.Fraction(*numbers)


def _parts(names: str) -> Callable[[Any, Recurse], Fields]:
    """Return the encoder of a value by its attributes of these names."""
    words = names.split()
    return lambda value, recurse: {word: recurse(getattr(value, word)) for word in words}


# -- torch ------------------------------------------------------------------------------------------

_CONSTANTS: dict[str, Any] = {
    name: value
    for name, value in vars(torch).items()
    if isinstance(value, (torch.layout, torch.qscheme, torch.memory_format))
}


def _encode_constant(value: Any, _: Recurse) -> Fields:
    name = str(value).removeprefix("torch.")
    if _CONSTANTS.get(name) is not value:
        raise NotEncodableError(f"the torch constant {value}")
    return {"name": name}


# -- enumerations -----------------------------------------------------------------------------------


def _namespace(owner: object) -> Mapping[str, object]:
    """Return the namespace of a module or class, without calling a ``__getattribute__`` of its own."""
    if isinstance(owner, types.ModuleType):
        held: Mapping[str, object] = types.ModuleType.__getattribute__(owner, "__dict__")
        return held
    return type.__dict__["__dict__"].__get__(owner) if isinstance(owner, type) else {}


def find_class(module: object, qualname: object) -> type:
    """Return the imported class of this name. No code runs, not even a module's ``__getattr__``.

    Raises:
        ClassNotImportedError: no imported class has this name.
    """
    found: Any = sys.modules.get(module) if type(module) is str else None
    parts = qualname.split(".") if type(qualname) is str else ()
    for part in parts:
        found = _namespace(found).get(part)
    if not parts or not isinstance(found, type):
        raise ClassNotImportedError(f"{module}.{qualname}")
    return found


def _encode_enum(value: enum.Enum, recurse: Recurse) -> Fields:
    kind = type(value)
    names = {"module": kind.__module__, "class": kind.__qualname__}
    if kind._member_map_.get(value.name) is value:  # The name of a sum of flags may be None.
        return names | {"name": value.name}
    if not _combines_plainly(kind):
        raise NotEncodableError(f"a member without a name of {kind.__qualname__}")
    return names | {"value": recurse(int(value.value))}


def _decode_enum(fields: Fields, recurse: Recurse) -> enum.Enum:
    kind = find_class(fields["module"], fields["class"])
    if not isinstance(kind, enum.EnumMeta) or not issubclass(kind, enum.Enum):
        raise TypeError(f"{kind.__qualname__} is no Enum")
    if "value" in fields:
        return _combined(kind, _typed(recurse(fields["value"]), int))
    member = type.__getattribute__(kind, "_member_map_")[_typed(fields["name"], str)]
    if not isinstance(member, enum.Enum):
        raise TypeError("no member of an Enum")
    return member


_RUN_BY_SUMS = frozenset(
    {"_missing_", "_iter_member_", "_iter_member_by_value_", "_iter_member_by_def_", "_numeric_repr_"}
    | {"__eq__", "__hash__", "__getattr__", "__getattribute__", "__setattr__"}
)
"""Methods of a Flag that run when a sum of flags is made."""
_ITER_MEMBER = tuple(enum.Flag.__dict__[f"_iter_member_by_{order}_"].__func__ for order in ("value", "def"))
"""Functions of the standard library. ``EnumMeta`` sets one of them in some classes of Flag."""


def _combines_plainly(kind: type) -> bool:
    """Return whether a sum of flags of this class is made by code of the standard library alone."""
    if type(kind) is not enum.EnumMeta or not issubclass(kind, enum.Flag):
        return False
    own = (_namespace(base) for base in kind.__mro__ if base.__module__ not in ("enum", "builtins"))
    methods = [methods[name] for methods in own for name in _RUN_BY_SUMS & methods.keys()]
    has_plain_members = _attribute(kind, "_member_type_") in (object, int)
    return has_plain_members and all(getattr(method, "__func__", None) in _ITER_MEMBER for method in methods)


def _combined(kind: Any, value: int) -> enum.Enum:
    """Return the sum of flags with this value."""
    if not _combines_plainly(kind):
        raise TypeError(f"{kind.__qualname__} is no plain Flag")
    found = kind._value2member_map_.get(value)
    made = enum.Flag.__dict__["_missing_"].__func__(kind, value) if found is None else found
    if not isinstance(made, kind):
        raise TypeError(f"no value of the Flag {kind.__qualname__}")
    return made  # type: ignore[no-any-return]


def is_named_tuple(kind: type) -> bool:
    """Return whether the class is made by ``namedtuple``, or a subclass: a tuple with a name for each item."""
    names = _attribute(kind, "_fields")
    return issubclass(kind, tuple) and type(names) is tuple and all(type(name) is str for name in names)


def _attribute(kind: type, name: str) -> object:
    """Return a class attribute, by the namespaces of its classes alone; None if there is none."""
    return next((_namespace(base)[name] for base in kind.__mro__ if name in _namespace(base)), None)


def _encode_named_tuple(value: Any, recurse: Recurse) -> Fields:
    kind = type(value)
    return {"module": kind.__module__, "class": kind.__qualname__, "parts": [recurse(item) for item in value]}


def _decode_named_tuple(fields: Fields, recurse: Recurse) -> Any:
    """Return the stored namedtuple, made without a ``__new__`` of its class."""
    kind: Any = find_class(fields["module"], fields["class"])
    parts = list(map(recurse, fields["parts"]))
    if not is_named_tuple(kind) or len(parts) != len(kind._fields):
        raise TypeError(f"{kind.__qualname__} is no namedtuple of {len(parts)} items")
    return tuple.__new__(kind, parts)


# -- the table --------------------------------------------------------------------------------------


def _row(kind: str, types_of: Any, encode: Any, decode: Any, fill: Any = None) -> HarmlessType:
    made = types_of if isinstance(types_of, tuple) else (types_of,)
    return HarmlessType(kind=kind, types=made, encode=encode, decode=decode, fill=fill)


_ROWS = (
    _row("int", int, lambda value, _: {"hex": hex(value)}, lambda fields, _: int(_typed(fields["hex"], str), 16)),
    _row("bytes", bytes, lambda *_: {}, lambda *_: b""),
    _row("frozenset", frozenset, lambda value, recurse: {"items": [recurse(item) for item in value]},
         lambda fields, recurse: frozenset(map(recurse, fields["items"]))),
    _row("set", set, lambda value, recurse: {"items": [recurse(item) for item in value]},
         lambda *_: set(), lambda made, fields, recurse: made.update(map(recurse, fields["items"]))),
    _row("BytesIO", io.BytesIO, lambda value, _: {"data": _byte_tensor(value.getbuffer()), "position": value.tell()},
         _decode_bytes_io),
    _row("ndarray", np.ndarray, _encode_array, lambda fields, _: _decode_array(fields)),
    _row("scalar", (), _encode_scalar, lambda fields, _: _decode_array(fields)[()]),
    _row("numpy.dtype", (), lambda value, _: {"dtype": _describe(value)}, lambda fields, _: _decode_dtype(fields)),
    _row("numpy.random", tuple(_BIT_GENERATORS.values()), _encode_bit_generator, _decode_bit_generator),
    _row("numpy.Generator", np.random.Generator,
         lambda value, recurse: {"bits": recurse(value.bit_generator)},
         lambda fields, recurse: np.random.Generator(_bit_generator(recurse(fields["bits"])))),
    _row("numpy.RandomState", np.random.RandomState, _encode_random_state, _decode_random_state),
    _row("random.Random", random.Random, lambda value, recurse: {"state": recurse(value.getstate())}, _decode_random),
    _row("torch.Generator", torch.Generator, _encode_torch_generator, _decode_torch_generator),
    _row("torch", (torch.layout, torch.qscheme, torch.memory_format), _encode_constant,
         lambda fields, _: _CONSTANTS[fields["name"]]),
    _row("TorchVersion", TorchVersion, lambda value, _: {"text": str(value)},
         lambda fields, _: TorchVersion(_typed(fields["text"], str))),
    _row("Namespace", argparse.Namespace, _encode_attributes, lambda *_: argparse.Namespace(), _fill_attributes),
    _row("SimpleNamespace", types.SimpleNamespace, _encode_attributes, lambda *_: types.SimpleNamespace(),
         _fill_attributes),
    _row("deque", collections.deque,
         lambda value, recurse: {"maxlen": value.maxlen, "items": [recurse(item) for item in value]},
         _decode_deque, lambda made, fields, recurse: made.extend(map(recurse, fields["items"]))),
    _row("defaultdict", collections.defaultdict, _encode_default_dict, _decode_default_dict, _fill_pairs),
    _row("range", range, _parts("start stop step"), lambda fields, recurse:
         range(*(_typed(recurse(fields[word]), int) for word in ("start", "stop", "step")))),
    _row("slice", slice, _parts("start stop step"), lambda fields, recurse:
         slice(*(recurse(fields[word]) for word in ("start", "stop", "step")))),
    _row("Ellipsis", type(...), lambda *_: {}, lambda *_: ...),
    _row("type", type, _encode_type, lambda fields, _: _TYPES[fields["name"]]),
    _row("Path", tuple(_PATHS.values()), lambda value, _: {"type": type(value).__name__, "path": str(value)},
         _decode_path),
    _row("date", datetime.date, lambda value, _: {"text": value.isoformat()},
         lambda fields, _: datetime.date.fromisoformat(_typed(fields["text"], str))),
    _row("datetime", datetime.datetime, _encode_datetime, _decode_datetime),
    _row("time", datetime.time, _encode_time, _decode_time),
    _row("timedelta", datetime.timedelta, _parts("days seconds microseconds"), _decode_timedelta),
    _row("timezone", datetime.timezone, _encode_timezone, _decode_timezone),
    _row("Decimal", decimal.Decimal, lambda value, _: {"text": str(value)},
         lambda fields, _: decimal.Decimal(_typed(fields["text"], str))),
    _row("Fraction", fractions.Fraction, _encode_fraction, _decode_fraction),
    _row("UUID", uuid.UUID, lambda value, _: {"hex": value.hex},
         lambda fields, _: uuid.UUID(_typed(fields["hex"], str))),
    _row("Enum", (), _encode_enum, _decode_enum),
    _row("namedtuple", (), _encode_named_tuple, _decode_named_tuple),
)  # fmt: skip


def _bit_generator(value: Any) -> Any:
    if not isinstance(value, np.random.BitGenerator):
        raise TypeError(f"a {type(value).__name__} where a bit generator is stored")
    return value


BY_KIND: dict[str, HarmlessType] = {row.kind: row for row in _ROWS}
"""Rows by the value of the key ``TAG``."""
_BY_TYPE: dict[type, HarmlessType] = {kind: row for row in _ROWS for kind in row.types}
_BY_BASE = ((np.generic, BY_KIND["scalar"]), (np.dtype, BY_KIND["numpy.dtype"]), (enum.Enum, BY_KIND["Enum"]))


def harmless_type(value: object) -> HarmlessType | None:
    """Return the row of a value's type; None if there is none."""
    row = _BY_TYPE.get(type(value))
    if row is not None:
        return row
    if isinstance(value, tuple) and is_named_tuple(type(value)) and not hasattr(value, "__dict__"):
        return BY_KIND["namedtuple"]
    return next((row for base, row in _BY_BASE if isinstance(value, base)), None)
