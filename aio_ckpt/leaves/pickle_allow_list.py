"""Types beside torch's own whose values are read without running code: constructors that check their arguments.

A pickle that anybody may have written calls them. They raise ValueError, TypeError or KeyError for wrong arguments.

Sources: ``__reduce_ex__(2)`` of the types in Python 3.11 to 3.14, numpy 1.26 to 2.4 and torch 2.8 to 2.15.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import enum
import fractions
import functools
import io
import math
import pathlib
import random
import re
import sys
import types
import uuid
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch.torch_version import TorchVersion

from aio_ckpt.format.restricted_unpickler import Allowed, RefusedError, check_key, make_set

_T = TypeVar("_T")
_GENERATOR_BYTES = 4096
"""Bytes of a random generator."""


class ClassNotImportedError(Exception):
    """A stored value names a class that this process has not imported. Its text is the class."""


def _typed(value: Any, kind: type[_T]) -> _T:
    """Return ``value``, which must be exactly of this type."""
    if type(value) is not kind:
        raise TypeError(f"a {type(value).__name__} where a {kind.__name__} is stored")
    return value


# -- numpy and streams ------------------------------------------------------------------------------

_DTYPE = re.compile(r"[biufcSUVMm][0-9]{1,9}")
_ALIGNED_FLAG = 0x80
"""Flag of a structured dtype whose fields are aligned as in C."""


def _dtype(value: Any) -> np.dtype[Any]:
    if not isinstance(value, np.dtype):
        raise TypeError(f"a {type(value).__name__} where a dtype is stored")
    return value


def _make_dtype(text: str, _align: object = False, _copy: object = True) -> np.dtype[Any]:
    """Return a dtype of its own, which takes a state."""
    if _DTYPE.fullmatch(_typed(text, str)) is None:
        raise RefusedError(f"numpy.dtype {text[:40]!r}")
    made: np.dtype[Any] = np.dtype(text, False, True)
    return made


def _fill_dtype(value: Any, state: Any) -> None:
    """Give a dtype the state of the dtype that ``state`` describes. numpy checks the description, and never a state."""
    _, order, subarray, names, fields, nbytes, _, flags, *metadata = _typed(state, tuple)
    if subarray is not None:
        described = np.dtype((_dtype(subarray[0]), subarray[1]))
    elif names is not None:
        parts = [fields[_typed(name, str)] for name in names]
        formats, offsets = [_dtype(part[0]) for part in parts], [_typed(part[1], int) for part in parts]
        spec = {"names": [*names], "formats": formats, "offsets": offsets, "itemsize": nbytes}
        described = np.dtype(spec, align=bool(flags & _ALIGNED_FLAG))  # type: ignore[call-overload]
    elif metadata and metadata[0] is not None:
        unit, count, *_ = metadata[0][1]
        described = np.dtype(f"{value.kind}8[{_typed(count, int)}{unit.decode()}]").newbyteorder(order)
    else:
        described = value.newbyteorder(order)
    if described.itemsize != value.itemsize or described.hasobject:
        raise ValueError(f"the state of {described} for {value}")
    value.__setstate__(described.__reduce__()[2])


def _check_raw(shape: Any, dtype: Any, raw: Any) -> None:
    """Compare the length of an array's bytes with its shape, as numpy takes a forged negative dimension."""
    if not isinstance(dtype, np.dtype) or type(raw) is not bytes:
        raise RefusedError("a numpy array of objects")
    if not all(type(size) is int and size >= 0 for size in _typed(shape, tuple)) or dtype.subdtype is not None:
        raise ValueError(f"a numpy array of {dtype} whose shape is none")
    if dtype.hasobject or math.prod(shape) * dtype.itemsize != len(raw):
        raise ValueError(f"a numpy array of shape {shape} and {dtype} over {len(raw)} bytes")


def _make_array(kind: object, *_: object) -> np.ndarray[Any, Any]:
    if kind is not np.ndarray:
        raise RefusedError("a subclass of numpy.ndarray")
    return np.empty(0)


def _fill_array(value: Any, state: Any) -> None:
    version, shape, dtype, is_fortran, raw = _typed(state, tuple)
    _check_raw(shape, dtype, raw)
    value.__setstate__((_typed(version, int), shape, np.dtype(dtype, copy=True), bool(is_fortran), raw))


def _make_scalar(dtype: Any, raw: Any) -> object:
    _check_raw((), dtype, raw)
    return np.ndarray((), dtype=np.dtype(dtype, copy=True), buffer=raw).copy()[()]


def _fill_stream(value: Any, state: Any) -> None:
    content, position, _ = _typed(state, tuple)
    value.__setstate__((_typed(content, bytes), _typed(position, int), None))


# -- random generators ------------------------------------------------------------------------------

_BIT_GENERATORS: dict[str, Any] = {
    name: getattr(np.random, name) for name in ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
}
_POSITIONS: dict[str, tuple[str | None, str, int]] = {
    "MT19937": ("state", "pos", 624),
    "Philox": (None, "buffer_pos", 4),
}
"""Field that indexes a buffer of the generator, unchecked by numpy: its dict, its name, and its largest value."""


def _make_bit_generator(kind: Any) -> Any:
    made = _BIT_GENERATORS[kind if type(kind) is str else kind.__name__]
    if kind not in (made, made.__name__):
        raise TypeError(f"{kind} is no bit generator")
    return made(0)


def _checked_state(generator: object, state: Any) -> dict[str, Any]:
    """Return the state of a bit generator, whose position is checked to lie inside its buffer."""
    fields: dict[str, Any] = _typed(state, dict)
    kind = _typed(fields["bit_generator"], str)
    if kind != type(generator).__name__:
        raise ValueError(f"the state of {kind} for {type(generator).__name__}")
    if kind in _POSITIONS:
        held, name, largest = _POSITIONS[kind]
        position = _typed((fields if held is None else fields[held])[name], int)
        if not 0 <= position <= largest:
            raise ValueError(f"the position {position} of {kind}, at most {largest}")
    return fields


def _fill_bit_generator(value: Any, state: Any) -> None:
    if type(state) is dict:  # numpy 1
        value.state = _checked_state(value, state)
        return
    fields, seed = _typed(state, tuple)
    value.__setstate__((_checked_state(value, fields), None if seed is None else _typed(seed, np.random.SeedSequence)))


def _fill_seed(value: Any, state: Any) -> None:
    """Give a SeedSequence its state: spawn() continues from it."""
    entropy, spawned, pool, pool_words, key = _typed(state, tuple)
    if type(entropy) not in (int, list, types.NoneType) or not all(type(word) is int for word in _typed(key, tuple)):
        raise TypeError("a seed of other values than numbers")
    if _typed(pool, np.ndarray).dtype != np.uint32 or pool.shape != (_typed(pool_words, int),):
        raise ValueError(f"a seed of {pool_words} words with a pool of shape {pool.shape}")
    value.__setstate_cython__((entropy, _typed(spawned, int), pool, pool_words, key))


def _bit_generator(value: Any) -> Any:
    if type(value) is str:  # numpy 1
        return _make_bit_generator(value)
    if type(value) not in _BIT_GENERATORS.values():
        raise TypeError(f"a {type(value).__name__} where a bit generator is stored")
    return value


def _fill_generator(value: np.random.Generator, state: Any) -> None:
    if state is not None:  # numpy 1
        value.bit_generator.state = _checked_state(value.bit_generator, state)


def _fill_random_state(value: Any, state: Any) -> None:
    value.set_state(_checked_state(value._bit_generator, state))


def _make_torch_generator(device: torch.device) -> torch.Generator:
    if device.type != "cpu":
        raise RefusedError(f"a torch.Generator of {device}")
    return torch.Generator()


# -- the standard library ---------------------------------------------------------------------------

FACTORIES: dict[str, Any] = {
    f"{kind.__module__}.{kind.__qualname__}": kind
    for kind in (
        *(bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset),
        *(collections.OrderedDict, collections.Counter, collections.deque),
    )
}
"""Types that are stored by name, and may be the factory of a defaultdict."""


def _bytes_of(text: str, codec: str) -> bytes:
    """Return the bytes that protocol 2 stores as a text."""
    if _typed(codec, str) not in ("latin1", "latin-1", "utf-8"):
        raise RefusedError(f"_codecs.encode with {codec[:40]!r}")
    return _typed(text, str).encode(codec)


def _make_bytearray(content: Any = b"", codec: str = "latin1") -> bytearray:
    return bytearray(_bytes_of(content, codec) if type(content) is str else _typed(content, bytes))


def _make_counter(counts: Any = None) -> Any:
    return collections.Counter() if counts is None else collections.Counter(_typed(counts, dict))


def _make_default_dict(factory: Any = None) -> Any:
    if factory is not None and factory not in FACTORIES.values():
        raise RefusedError("a defaultdict whose factory is no builtin type")
    return collections.defaultdict(factory)


def _make_deque(items: Any = (), maxlen: Any = None) -> Any:
    return collections.deque([] if items == () else _typed(items, list), maxlen)


def _make_slice(*parts: Any) -> slice:
    """Return the slice. Its parts are plain: the hash of a tuple in it would be checked by nobody."""
    if not all(type(part) in (types.NoneType, bool, int, float, str) for part in parts):
        raise RefusedError("a slice of other values than numbers and texts")
    return slice(*parts)


def _fill_attributes(value: Any, state: Any) -> None:
    vars(value).update({_typed(name, str): item for name, item in _typed(state, dict).items()})


_PATHS = (pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.WindowsPath)


def _make_path(kind: type[pathlib.PurePath], *parts: Any) -> pathlib.PurePath:
    """Return the stored path. A path of another system comes back pure, without the methods that access a disk."""
    if issubclass(kind, pathlib.Path) and kind is not type(pathlib.Path()):
        kind = pathlib.PurePosixPath if issubclass(kind, pathlib.PurePosixPath) else pathlib.PureWindowsPath
    return kind(*(_typed(part, str) for part in parts))


def _make_dated(kind: Any, state: Any, *zone: Any) -> Any:
    """Return a date, datetime or time. Its constructor takes any bytes; ``replace`` checks them."""
    return kind(_typed(state, bytes), *(_typed(part, datetime.timezone) for part in zone if part is not None)).replace()


def _make_timezone(offset: Any, *name: Any) -> datetime.timezone:
    return datetime.timezone(_typed(offset, datetime.timedelta), *(_typed(part, str) for part in name))


_MAX_FRACTION_BITS = 1 << 16
"""Most bits of a numerator or denominator. A common divisor of larger numbers takes long."""


def _make_fraction(*numbers: Any) -> fractions.Fraction:
    if max(_typed(number, int).bit_length() for number in numbers) > _MAX_FRACTION_BITS:
        raise RefusedError(f"a Fraction of more than {_MAX_FRACTION_BITS} bits")
    return fractions.Fraction(*numbers)


def _fill_uuid(value: uuid.UUID, state: Any) -> None:
    if not 0 <= _typed(_typed(state, dict)["int"], int) < 1 << 128 or not state.keys() <= {"int", "is_safe"}:
        raise ValueError("no state of a UUID")
    value.__setstate__(state)  # type: ignore[attr-defined]


def _of(kinds: type | tuple[type, ...], made: Callable[..., object]) -> Callable[..., object]:
    """Return ``made``, which gets arguments of these types only."""
    allowed = kinds if isinstance(kinds, tuple) else (kinds,)

    def make(*arguments: Any) -> object:
        if not all(type(argument) in allowed for argument in arguments):
            raise TypeError(f"arguments of {[type(argument).__name__ for argument in arguments]}")
        return made(*arguments)

    return make


# -- classes of other modules -----------------------------------------------------------------------


def namespace(owner: object) -> Mapping[str, object]:
    """Return the namespace of a module or class, without calling a ``__getattribute__`` of its own."""
    if isinstance(owner, types.ModuleType):
        held: Mapping[str, object] = types.ModuleType.__getattribute__(owner, "__dict__")
        return held
    return type.__dict__["__dict__"].__get__(owner) if isinstance(owner, type) else {}


def imported_class(module: object, qualname: object) -> type:
    """Return the imported class of this name. No code runs, not even a module's ``__getattr__``.

    Raises:
        ClassNotImportedError: no imported class has this name.
    """
    found: Any = sys.modules.get(module) if type(module) is str else None
    parts = qualname.split(".") if type(qualname) is str else ()
    for part in parts:
        found = namespace(found).get(part)
    if not parts or not isinstance(found, type):
        raise ClassNotImportedError(f"{module}.{qualname}")
    return found


def is_enum(kind: type) -> bool:
    return isinstance(kind, enum.EnumMeta) and issubclass(kind, enum.Enum)


def enum_member(kind: Any, value: Any) -> enum.Enum:
    """Return the member with this value, or a sum of flags. No code of the class runs."""
    check_key(value)
    try:
        member = type.__getattribute__(kind, "_value2member_map_").get(value)
    except TypeError:
        raise RefusedError(f"{kind.__qualname__}, whose values have no hash") from None
    named = type.__getattribute__(kind, "_member_map_").values()
    if member in named and type(object.__getattribute__(member, "_value_")) is type(value):
        return member  # type: ignore[no-any-return]
    if not issubclass(kind, enum.Flag) or type(value) is not int:
        raise KeyError(f"no member of {kind.__qualname__}")
    if not _combines_plainly(kind):
        raise RefusedError(f"{kind.__qualname__}, whose sums its own code makes")
    made = enum.Flag.__dict__["_missing_"].__func__(kind, value) if member is None else member
    if not isinstance(made, kind):
        raise TypeError(f"no value of the Flag {kind.__qualname__}")
    return made  # type: ignore[no-any-return]


_RUN_BY_SUMS = frozenset(
    {"_missing_", "_iter_member_", "_iter_member_by_value_", "_iter_member_by_def_", "_numeric_repr_"}
    | {"__eq__", "__hash__", "__getattr__", "__getattribute__", "__setattr__"}
)
"""Methods of a Flag that run when a sum of flags is made."""
_ITER_MEMBER = tuple(enum.Flag.__dict__[f"_iter_member_by_{order}_"].__func__ for order in ("value", "def"))
"""Functions of the standard library. ``EnumMeta`` sets one of them in some classes of Flag."""


def _combines_plainly(kind: type) -> bool:
    """Return whether a sum of flags of this class is made by code of the standard library alone."""
    if type(kind) is not enum.EnumMeta:
        return False
    own = (namespace(base) for base in kind.__mro__ if base.__module__ not in ("enum", "builtins"))
    methods = [methods[name] for methods in own for name in _RUN_BY_SUMS & methods.keys()]
    has_plain_members = _attribute(kind, "_member_type_") in (object, int)
    return has_plain_members and all(getattr(method, "__func__", None) in _ITER_MEMBER for method in methods)


def is_named_tuple(kind: type) -> bool:
    """Return whether the class is made by ``namedtuple``, or a subclass: a tuple with a name for each item."""
    names = _attribute(kind, "_fields")
    return issubclass(kind, tuple) and type(names) is tuple and all(type(name) is str for name in names)


def _attribute(kind: type, name: str) -> object:
    """Return a class attribute, by the namespaces of its classes alone; None if there is none."""
    return next((namespace(base)[name] for base in kind.__mro__ if name in namespace(base)), None)


def named_tuple(kind: Any, *parts: object) -> Any:
    """Return a namedtuple, made without a ``__new__`` of its class."""
    if len(parts) != len(kind._fields):
        raise TypeError(f"{len(parts)} items for a {kind.__qualname__}")
    return tuple.__new__(kind, parts)


# -- the tables -------------------------------------------------------------------------------------

_LAYOUTS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}


def _layout(text: Any) -> torch.layout:
    return _LAYOUTS[_typed(text, str)]


_NUMPY_TYPES = {kind.__name__: kind for kind in np.sctypeDict.values() if kind is not np.object_}

HARMLESS: dict[str, Allowed] = {
    **{name: Allowed(kind) for name, kind in FACTORIES.items()},
    **{f"torch.{name}": Allowed(value) for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    **{str(value): Allowed(value) for value in vars(torch).values() if isinstance(value, torch.qscheme)},
    **{f"numpy.{name}": Allowed(kind) for name, kind in (_NUMPY_TYPES | {"bool_": np.bool_, "bool": np.bool_}).items()},
    "builtins.Ellipsis": Allowed(...),
    "builtins.bytes": Allowed(bytes, _of((), bytes)),
    "builtins.bytearray": Allowed(bytearray, _make_bytearray),
    "builtins.complex": Allowed(complex, _of(float, complex)),
    "builtins.set": Allowed(set, functools.partial(make_set, set)),
    "builtins.frozenset": Allowed(frozenset, functools.partial(make_set, frozenset)),
    "builtins.range": Allowed(range, _of(int, range)),
    "builtins.slice": Allowed(slice, _make_slice),
    "_codecs.encode": Allowed(_bytes_of, _bytes_of),
    "collections.OrderedDict": Allowed(collections.OrderedDict, _of((), collections.OrderedDict)),
    "collections.Counter": Allowed(collections.Counter, _make_counter),
    "collections.defaultdict": Allowed(collections.defaultdict, _make_default_dict),
    "collections.deque": Allowed(collections.deque, _make_deque, nbytes=512),
    "argparse.Namespace": Allowed(argparse.Namespace, _of((), argparse.Namespace)),
    "types.SimpleNamespace": Allowed(types.SimpleNamespace, _of((), types.SimpleNamespace)),
    "_io.BytesIO": Allowed(io.BytesIO, _of((), io.BytesIO)),
    **{
        f"{module}.{kind.__name__}": Allowed(kind, functools.partial(_make_path, kind))
        for module in ("pathlib", "pathlib._local")  # of Python 3.13
        for kind in _PATHS
    },
    **{
        f"datetime.{kind.__name__}": Allowed(kind, functools.partial(_make_dated, kind))
        for kind in (datetime.date, datetime.datetime, datetime.time)
    },
    "datetime.timedelta": Allowed(datetime.timedelta, _of(int, datetime.timedelta)),
    "datetime.timezone": Allowed(datetime.timezone, _make_timezone),
    "decimal.Decimal": Allowed(decimal.Decimal, _of(str, decimal.Decimal)),
    "fractions.Fraction": Allowed(fractions.Fraction, _make_fraction),
    "uuid.UUID": Allowed(uuid.UUID, lambda: uuid.UUID.__new__(uuid.UUID)),
    "random.Random": Allowed(random.Random, lambda: random.Random(0), nbytes=_GENERATOR_BYTES),
    "numpy.dtype": Allowed(np.dtype, _make_dtype),
    "numpy.ndarray": Allowed(np.ndarray),
    **{f"numpy.{core}.multiarray._reconstruct": Allowed(_make_array, _make_array) for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": Allowed(_make_scalar, _make_scalar) for core in ("core", "_core")},
    **{f"{kind.__module__}.{name}": Allowed(kind) for name, kind in _BIT_GENERATORS.items()},
    **{
        f"numpy.random._pickle.__{name}_ctor": Allowed(make, make, nbytes=_GENERATOR_BYTES)
        for name, make in {
            "bit_generator": _make_bit_generator,
            "generator": lambda bits, *_: np.random.Generator(_bit_generator(bits)),
            "randomstate": lambda bits, *_: np.random.RandomState(_bit_generator(bits)),
        }.items()
    },
    "numpy.random.bit_generator.SeedSequence": Allowed(np.random.SeedSequence),
    "numpy.random.bit_generator.__pyx_unpickle_SeedSequence": Allowed(
        _fill_seed, lambda *_: np.random.SeedSequence.__new__(np.random.SeedSequence)
    ),
    "torch._C.Generator": Allowed(torch.Generator, _make_torch_generator, nbytes=_GENERATOR_BYTES),
    "torch.Size": Allowed(torch.Size, _of(tuple, torch.Size)),
    "torch.device": Allowed(torch.device, _of((str, int), torch.device)),
    "torch.serialization._get_layout": Allowed(_layout, _layout),
    "torch.torch_version.TorchVersion": Allowed(TorchVersion, _of(str, TorchVersion)),
}
"""By full name, the classes and functions that the pickles of harmless values name."""

FILLS: dict[type, Callable[[Any, Any], None]] = {
    io.BytesIO: _fill_stream,
    collections.OrderedDict: _fill_attributes,
    argparse.Namespace: _fill_attributes,
    types.SimpleNamespace: _fill_attributes,
    uuid.UUID: _fill_uuid,
    random.Random: lambda value, state: value.setstate(_typed(state, tuple)),
    np.ndarray: _fill_array,
    **{type(np.dtype(code)): _fill_dtype for code in (*np.typecodes["All"].replace("O", ""),)},
    **dict.fromkeys(_BIT_GENERATORS.values(), _fill_bit_generator),
    np.random.SeedSequence: _fill_seed,
    np.random.Generator: _fill_generator,
    np.random.RandomState: _fill_random_state,
    torch.Generator: lambda value, state: value.set_state(_typed(state[2], torch.Tensor)),
}
"""By exact type, what gives a value the state of its pickle."""
