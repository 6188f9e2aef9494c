"""Reader of DCP's ``.metadata``. Pure: no file, no thread.

The file is a pickle. The unpickler knows only the globals that stock DCP writes, so a crafted pickle runs no code.
"""

from __future__ import annotations

import io
import itertools
import logging
import pickle
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from aio_ckpt._torch import StorageInfo
from aio_ckpt.errors import CorruptCheckpointError, FormatVersionError
from aio_ckpt.format.constants import MAX_BYTES
from aio_ckpt.format.pickle_scan import scan

_log = logging.getLogger("aio_ckpt")

DTYPES: dict[str, torch.dtype] = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
"""Every dtype of this torch by its name without ``torch.``."""


def parse_metadata(data: bytes, *, name: str) -> Metadata:
    """Read a ``.metadata`` of ours or of stock DCP. ``name`` is the file, for messages.

    Raises:
        CorruptCheckpointError: no such pickle, or numbers and types that no checkpoint has.
        FormatVersionError: the pickle asks for a class, a dtype or another global that no ``.metadata`` of a known
            torch holds; the message names it. It was not run.
    """
    try:
        _check_opcodes(data)
        found = _Unpickler(io.BytesIO(data)).load()
        fault = _metadata_fault(found)
    except MemoryError:
        raise  # this machine has no memory left, because lengths beyond the data were refused before
    except _UnknownError as exc:
        raise FormatVersionError(f"{name}: {exc}; a newer torch or a newer aio_ckpt may read it") from exc
    except pickle.UnpicklingError as exc:
        if str(exc) != _NO_DICT:
            raise CorruptCheckpointError(f"{name}: {exc}") from exc
        what = "the pickle holds an object whose state is no dict of its fields, as of a dataclass with slots"
        raise FormatVersionError(f"{name}: {what}; a newer torch or a newer aio_ckpt may read it") from exc
    except Exception as exc:  # crafted bytes can raise anything, from hash() of an odd key to AttributeError
        raise CorruptCheckpointError(f"{name}: {str(exc) or type(exc).__name__}") from exc
    if fault:
        raise CorruptCheckpointError(f"{name}: {fault}")
    metadata: Metadata = found
    vars(metadata).pop(_PLANS, None)
    _log_unknown_fields(metadata, name)
    return metadata


_NO_DICT = "state is not a dictionary"
"""Message of pickle for the state of an object without ``__setstate__`` that is no dict."""


class _UnknownError(Exception):
    """The pickle holds something that no ``.metadata`` of a known torch holds."""


OLDEST_FIELDS = 5
"""Fields of ``TensorProperties`` up to torch 2.14: dtype, layout, requires_grad, memory_format, pin_memory."""
_UNKNOWN_FIELDS = "fields_of_a_newer_torch"
"""Attribute of ``TensorProperties`` that keeps the fields after ``strides``, which no known torch writes."""
_KNOWN_FIELDS: dict[type, frozenset[str]] = {
    Metadata: frozenset(
        {"state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version", "mcore_data"}
    ),
    StorageMeta: frozenset({"checkpoint_id", "save_id", "load_id", "modules"}),
    TensorStorageMetadata: frozenset({"properties", "size", "chunks"}),
    TensorProperties: frozenset({"dtype", "layout", "requires_grad", "memory_format", "pin_memory", "strides"}),
    ChunkStorageMetadata: frozenset({"offsets", "sizes"}),
    BytesStorageMetadata: frozenset(),
    MetadataIndex: frozenset({"fqn", "offset", "index"}),
    StorageInfo: frozenset({"relative_path", "offset", "length", "transform_descriptors"}),
}
"""Fields that torch 2.6 to 2.15 and Megatron write."""
_PLANS = "all_local_plans"
"""Field that Megatron adds: the plan of each rank, as a hint for its next save. It is dropped."""


def _log_unknown_fields(metadata: Metadata, name: str) -> None:
    """Log the fields of known classes that no known torch writes. They are kept and otherwise ignored."""
    values: list[object] = [metadata, metadata.storage_meta]
    for entry in metadata.state_dict_metadata.values():
        values.append(entry)
        if isinstance(entry, TensorStorageMetadata):
            values += (entry.properties, *entry.chunks[:1])
    for index, info in itertools.islice((metadata.storage_data or {}).items(), 1):
        values += (index, info)
    unknown = {
        f"{type(value).__name__}.{field}"
        for value in values
        if value is not None
        for field in vars(value).keys() - _KNOWN_FIELDS[type(value)]
    }
    if unknown:
        fields = ", ".join(sorted(unknown))
        _log.info("%s: a newer torch wrote fields that this aio_ckpt does not know; they are ignored: %s", name, fields)


class _FrozenType(type):
    """Metaclass of classes that a pickle cannot change. BUILD on a class would set attributes for the whole process."""

    def __setattr__(cls, key: str, value: object) -> None:
        raise pickle.UnpicklingError(f"the pickle sets {key!r} of a class")


def _stand_in(real: type) -> type:
    """Return a class whose instances are of class ``real``. The pickle gets this class and never ``real``."""

    def new(cls: type) -> object:
        # An older torch wrote fewer fields of StorageMeta. A default_factory leaves no default on the class.
        return StorageMeta() if real is StorageMeta else object.__new__(real)

    return _FrozenType(real.__name__, (), {"__new__": new, "__slots__": ()})


class _Properties(metaclass=_FrozenType):
    """Stand-in that turns into a ``TensorProperties``, whose own ``__setstate__`` needs the enum's real members.

    If the file holds ``strides``, they are set on every torch, also on those before 2.15, which know no such field.
    """

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if type(state) is not tuple or len(state) < OLDEST_FIELDS:
            raise _UnknownError(f"TensorProperties pickled as {state!r:.80}")
        dtype, layout, requires_grad, memory_format, pin_memory, *newer = state
        made = TensorProperties(dtype, layout, requires_grad, memory_format, pin_memory)
        strides, *unknown = newer or (None,)
        if strides is not None and not (type(strides) in (tuple, torch.Size) and _are_sizes(strides)):
            raise _UnknownError(f"TensorProperties with strides {strides!r:.80}")
        self.__dict__.update(vars(made))
        if newer:
            self.__dict__["strides"] = strides
        if unknown:
            self.__dict__[_UNKNOWN_FIELDS] = tuple(unknown)
        self.__class__ = TensorProperties  # type: ignore[assignment]


class _Index(metaclass=_FrozenType):
    """Stand-in that turns into a ``MetadataIndex``.

    Its fields are checked first: the index is hashed, and the hash of a forged field could recurse for ever.
    """

    def __setstate__(self, state: dict[str, object]) -> None:
        if type(state) is not dict:
            raise _UnknownError(f"MetadataIndex pickled as {type(state).__name__}, no dict of its fields")
        offset, number = state.get("offset"), state.get("index")
        if type(offset) is tuple and _are_sizes(offset):
            state["offset"] = offset = torch.Size(offset)
        if type(offset) is list:
            raise _UnknownError("MetadataIndex with a list as its offset")
        if type(state.get("fqn")) is not str or type(offset) not in (torch.Size, type(None)):
            raise pickle.UnpicklingError(f"an index of {state.get('fqn')!r} and {type(offset).__name__}")
        if type(number) not in (int, type(None)):
            raise pickle.UnpicklingError(f"an index with the number {number!r}")
        self.__dict__.update(state)
        self.__class__ = MetadataIndex  # type: ignore[assignment]


class _Dropped(metaclass=_FrozenType):
    """Stand-in for a part of a plan, which no load needs. It takes any arguments and keeps none."""

    def __new__(cls, *args: object) -> Self:
        return object.__new__(cls)

    def __setstate__(self, state: object) -> None:
        """Keep nothing."""


class _MemoryFormat(metaclass=_FrozenType):
    def __new__(cls, value: int) -> torch.memory_format:  # type: ignore[misc]
        if value not in _MEMORY_FORMATS:
            raise _UnknownError(f"the memory format {value!r}")
        return _MEMORY_FORMATS[value]


class _Layout(metaclass=_FrozenType):
    def __new__(cls, text: str) -> torch.layout:  # type: ignore[misc]
        if text not in _LAYOUTS:
            raise _UnknownError(f"the layout {text!r}")
        return _LAYOUTS[text]


class _Path(metaclass=_FrozenType):
    def __new__(cls, *parts: str) -> Path:  # type: ignore[misc]
        return Path(*parts)


_MEMORY_FORMATS = {0: torch.contiguous_format, 1: torch.channels_last, 2: torch.preserve_format}
_LAYOUTS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}
_SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.metadata"
_PLAIN = (Metadata, StorageMeta, TensorStorageMetadata, BytesStorageMetadata, ChunkStorageMetadata)

_DCP_CLASSES: dict[tuple[str, str], object] = {
    **{("metadata", real.__name__): _stand_in(real) for real in _PLAIN},
    ("metadata", "TensorProperties"): _Properties,
    ("metadata", "MetadataIndex"): _Index,
    ("metadata", "_MEM_FORMAT_ENCODING"): _MemoryFormat,
    ("filesystem", "_StorageInfo"): _stand_in(StorageInfo),
    **{
        ("planner", name): _Dropped
        for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
    },
}
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_GLOBALS: dict[tuple[str, str], object] = {
    # Megatron up to 0.15 derived classes of its own.
    (_MEGATRON, "MCoreMetadata"): _stand_in(Metadata),
    (_MEGATRON, "MCoreSavePlan"): _Dropped,
    # Torch before 2.0 called the package torch.distributed._shard.checkpoint, and torch still finds it by that name.
    **{
        (f"{package}.{module}", name): found
        for package in ("torch.distributed.checkpoint", "torch.distributed._shard.checkpoint")
        for (module, name), found in _DCP_CLASSES.items()
    },
    # Torch before 2.3 pickled the properties of a tensor as a class of sharded tensors.
    (_SHARDED_TENSOR, "TensorProperties"): _Properties,
    (_SHARDED_TENSOR, "MEM_FORMAT_ENCODING"): _MemoryFormat,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _Layout,
    **{("torch", text): dtype for text, dtype in DTYPES.items()},
    ("collections", "OrderedDict"): OrderedDict,
    **{("builtins", kind.__name__): kind for kind in (dict, list, tuple, set, frozenset)},
    # Python 3.13 calls the module pathlib._local.
    **{
        (module, kind): _Path
        for module in ("pathlib", "pathlib._local")
        for kind in ("PosixPath", "PurePosixPath", "Path")
    },
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        try:
            return _GLOBALS[module, name]
        except KeyError:
            raise _refused(f"{module}.{name}") from None


def _refused(what: str) -> _UnknownError:
    return _UnknownError(f"the pickle asks for {what}, which no .metadata known here holds; it was not run")


_OPCODES = frozenset(
    b"(012NR]a})eldtsub\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x93\x94Kqh\x80MJjrG\x95\x8c\x8aCX\x8bB\x8d\x8eci"
)
"""Opcodes that a ``.metadata`` needs, of protocols 2 to 5."""


def _check_opcodes(data: bytes) -> None:
    """Refuse opcodes that no ``.metadata`` needs; see :func:`aio_ckpt.format.pickle_scan.scan`.

    Raises:
        pickle.UnpicklingError: such an opcode, or the pickle does not end where the data ends.
        _UnknownError: the pickle is whole and asks for a global that no known ``.metadata`` holds.
        CorruptCheckpointError: tuples nested too deep, or a forged memo index.
    """
    unknown: list[str] = []

    def note(module: str, name: str) -> None:
        if (module, name) not in _GLOBALS:
            unknown.append(f"{module}.{name}")

    stop = scan(data, _OPCODES, on_global=note)
    if data[-1:] == pickle.STOP and unknown:  # the rest of the pickle may be arguments of the unknown global
        raise _refused(unknown[0])
    if data[-1:] == pickle.STOP and stop < len(data) - 1 and data[stop] != pickle.STOP[0]:
        raise pickle.UnpicklingError(
            f"the pickle holds the opcode {data[stop]:#04x} at byte {stop}, which DCP does not use"
        )
    if data[-1:] != pickle.STOP or stop != len(data) - 1:
        raise pickle.UnpicklingError("the pickle does not end where the file ends")


_DICTS = (dict, OrderedDict)


def _metadata_fault(found: object) -> str:
    """Return what is wrong with the unpickled object, or ''."""
    if type(found) is not Metadata:
        return f"holds no Metadata but a {type(found).__name__}"
    if type(found.state_dict_metadata) not in _DICTS or type(found.storage_data) not in (*_DICTS, type(None)):
        return "state_dict_metadata and storage_data are no dicts"
    if type(found.storage_meta) not in (StorageMeta, type(None)):
        return f"storage_meta is a {type(found.storage_meta).__name__}"
    for fqn, entry in found.state_dict_metadata.items():
        if type(fqn) is not str or not (type(entry) is BytesStorageMetadata or _is_tensor_metadata(entry)):
            return f"{fqn!r}: no description of a tensor or an object"
    safe_paths: set[str] = set()
    for index, info in (found.storage_data or {}).items():
        if type(index) is not MetadataIndex or type(info) is not StorageInfo:
            return "storage_data maps something else than an index to a place"
        if type(index.fqn) is not str or not (index.offset is None or _is_size(index.offset)):
            return f"storage_data has the index {index.fqn!r}, {index.offset!r}"
        path = info.relative_path
        if path not in safe_paths:
            if type(path) is not str or path.startswith("/") or "\0" in path or ".." in path.split("/"):
                return f"{index.fqn!r}: {path!r} is no file inside the checkpoint"
            safe_paths.add(path)
        if not _are_sizes((info.offset, info.length)):
            return f"{index.fqn!r}: offset {info.offset!r} and length {info.length!r}"
    return ""


def _is_tensor_metadata(entry: object) -> bool:
    if type(entry) is not TensorStorageMetadata or type(entry.properties) is not TensorProperties:
        return False
    if (
        type(entry.properties.dtype) is not torch.dtype
        or not _normalize_sizes(entry, "size")
        or type(entry.chunks) is not list
    ):
        return False
    dims = len(entry.size)
    return all(
        type(chunk) is ChunkStorageMetadata
        and _normalize_sizes(chunk, "offsets")
        and _normalize_sizes(chunk, "sizes")
        and len(chunk.offsets) == len(chunk.sizes) == dims
        for chunk in entry.chunks
    )


def _normalize_sizes(owner: object, field: str) -> bool:
    """Return whether a field holds sizes. In the object, replace a plain tuple of them by the equal ``torch.Size``.

    Raises:
        _UnknownError: it is a list.
    """
    value = getattr(owner, field)
    if type(value) is tuple and _are_sizes(value):
        object.__setattr__(owner, field, torch.Size(value))
    elif type(value) is list:
        raise _UnknownError(f"{type(owner).__name__} with a list as its {field}")
    else:
        return _is_size(value)
    return True


def _is_size(value: object) -> bool:
    return type(value) is torch.Size and _are_sizes(value)


def _are_sizes(values: Sequence[object]) -> bool:
    return all(type(value) is int and 0 <= value <= MAX_BYTES for value in values)
