"""Reader of DCP's ``.metadata``. Pure: no file, no thread.

The file is a pickle. The unpickler knows only the globals that stock DCP writes, so a crafted pickle runs no code.
"""

from __future__ import annotations

import functools
import itertools
import logging
import pickle
import pickletools
import reprlib
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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
from aio_ckpt.format.dtypes import DTYPES
from aio_ckpt.format.restricted_unpickler import Allowed, RefusedError, RestrictedUnpickler, check_key, make_set

_log = logging.getLogger("aio_ckpt")


def parse_metadata(data: bytes, *, name: str) -> Metadata:
    """Read a ``.metadata`` of ours or of stock DCP. ``name`` is the file, for messages.

    Raises:
        CorruptCheckpointError: no such pickle, or numbers and types that no checkpoint has.
        FormatVersionError: the pickle asks for a class, a dtype or another global that no ``.metadata`` of a known
            torch holds; the message names it. It was not run.
    """
    try:
        found = _MetadataUnpickler(data).read_all()
        fault = _metadata_fault(found)
    except MemoryError:
        raise  # this machine has no memory left, because lengths beyond the data were refused before
    except (RefusedError, _UnknownError) as exc:
        if not _is_whole(data):  # an unknown class in half a file tells nothing
            raise CorruptCheckpointError(f"{name}: the pickle does not end where the file ends") from exc
        raise FormatVersionError(f"{name}: {exc}; a newer torch or a newer aio_ckpt may read it") from exc
    except Exception as exc:  # crafted bytes can raise anything, from hash() of an odd key to AttributeError
        raise CorruptCheckpointError(f"{name}: {str(exc) or type(exc).__name__}") from exc
    if fault:
        raise CorruptCheckpointError(f"{name}: {fault}")
    metadata: Metadata = found
    vars(metadata).pop(_PLANS, None)
    _log_unknown_fields(metadata, name)
    return metadata


def _is_whole(data: bytes) -> bool:
    """Return whether the pickle ends where the data ends."""
    try:
        ((_, _, end),) = deque(pickletools.genops(data), maxlen=1)
    except Exception:  # noqa: BLE001 - damaged arguments of opcodes raise errors of many types
        return False
    return end == len(data) - 1


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


# -- the unpickler ----------------------------------------------------------------------------------


class _Dropped:
    """Stand-in for a part of a plan, which no load needs. It keeps nothing."""


def _fill_fields(value: object, state: object) -> None:
    """Give an instance of a dataclass its fields."""
    if type(state) is not dict:
        raise _UnknownError("the pickle holds an object whose state is no dict of its fields, as of one with slots")
    for item in state.values():
        if type(item) is tuple:  # the hash of the instance covers it
            check_key(item)
    vars(value).update(state)


def _fill_properties(value: TensorProperties, state: Any) -> None:
    """Give a ``TensorProperties`` its fields; its own ``__setstate__`` needs the enum's real members.

    If the file holds ``strides``, they are set on every torch, also on those before 2.15, which know no such field.
    """
    if type(state) is not tuple or len(state) < OLDEST_FIELDS:
        raise _UnknownError(f"TensorProperties pickled as {reprlib.repr(state)}")
    dtype, layout, requires_grad, memory_format, pin_memory, *newer = state
    made = TensorProperties(dtype, layout, requires_grad, memory_format, pin_memory)
    strides, *unknown = newer or (None,)
    if strides is not None and not (type(strides) in (tuple, torch.Size) and _are_sizes(strides)):
        raise _UnknownError(f"TensorProperties with strides {reprlib.repr(strides)}")
    vars(value).update(vars(made))
    if newer:
        vars(value)["strides"] = strides
    if unknown:
        vars(value)[_UNKNOWN_FIELDS] = tuple(unknown)


def _fill_index(value: MetadataIndex, state: Any) -> None:
    """Give a ``MetadataIndex`` its fields, checked, as it is hashed."""
    _fill_fields(value, state)
    offset, number = state.get("offset"), state.get("index")
    if type(offset) is tuple and _are_sizes(offset):
        vars(value)["offset"] = offset = torch.Size(offset)
    if type(offset) is list:
        raise _UnknownError("MetadataIndex with a list as its offset")
    if type(state.get("fqn")) is not str or type(offset) not in (torch.Size, type(None)):
        raise pickle.UnpicklingError(f"an index of a {type(state.get('fqn')).__name__} and {type(offset).__name__}")
    if type(number) not in (int, type(None)):
        raise pickle.UnpicklingError(f"an index with a {type(number).__name__} as its number")


def _memory_format(value: int) -> torch.memory_format:
    if type(value) is not int or value not in _MEMORY_FORMATS:
        raise _UnknownError(f"the memory format {reprlib.repr(value)}")
    return _MEMORY_FORMATS[value]


def _layout(text: str) -> torch.layout:
    if type(text) is not str or text not in _LAYOUTS:
        raise _UnknownError(f"the layout {reprlib.repr(text)}")
    return _LAYOUTS[text]


def _plain(real: type) -> Allowed:
    """Return a class whose instances are made without its ``__init__``."""
    return Allowed(real, functools.partial(object.__new__, real))


_MEMORY_FORMATS = {0: torch.contiguous_format, 1: torch.channels_last, 2: torch.preserve_format}
_LAYOUTS = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}
_SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.metadata"
_DROPPED = Allowed(_Dropped, lambda *_: _Dropped())
_FORMAT = Allowed(_memory_format, _memory_format)

_DCP_CLASSES: dict[str, Allowed] = {
    **{
        f"metadata.{real.__name__}": _plain(real)
        for real in (Metadata, TensorStorageMetadata, BytesStorageMetadata, ChunkStorageMetadata)
    },
    # An older torch wrote fewer fields of StorageMeta. A default_factory leaves no default on the class.
    "metadata.StorageMeta": Allowed(StorageMeta, lambda: StorageMeta()),
    "metadata.TensorProperties": _plain(TensorProperties),
    "metadata.MetadataIndex": _plain(MetadataIndex),
    "metadata._MEM_FORMAT_ENCODING": _FORMAT,
    "filesystem._StorageInfo": _plain(StorageInfo),
    **{
        f"planner.{name}": _DROPPED
        for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
    },
}
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_ALLOWED: dict[str, Allowed] = {
    # Megatron up to 0.15 derived classes of its own.
    f"{_MEGATRON}.MCoreMetadata": _plain(Metadata),
    f"{_MEGATRON}.MCoreSavePlan": _DROPPED,
    # Torch before 2.0 called the package torch.distributed._shard.checkpoint, and torch still finds it by that name.
    **{
        f"{package}.{name}": found
        for package in ("torch.distributed.checkpoint", "torch.distributed._shard.checkpoint")
        for name, found in _DCP_CLASSES.items()
    },
    # Torch before 2.3 pickled the properties of a tensor as a class of sharded tensors.
    f"{_SHARDED_TENSOR}.TensorProperties": _plain(TensorProperties),
    f"{_SHARDED_TENSOR}.MEM_FORMAT_ENCODING": _FORMAT,
    "torch.Size": Allowed(torch.Size, torch.Size),
    "torch.serialization._get_layout": Allowed(_layout, _layout),
    **{f"torch.{text}": Allowed(dtype) for text, dtype in DTYPES.items()},
    "collections.OrderedDict": Allowed(OrderedDict, lambda: OrderedDict()),
    **{f"builtins.{kind.__name__}": Allowed(kind) for kind in (dict, list, tuple)},
    **{f"builtins.{kind.__name__}": Allowed(kind, functools.partial(make_set, kind)) for kind in (set, frozenset)},
    # Python 3.13 calls the module pathlib._local.
    **{
        f"{module}.{kind}": Allowed(Path, Path)
        for module in ("pathlib", "pathlib._local")
        for kind in ("PosixPath", "PurePosixPath", "Path")
    },
}
_FILLS: dict[type, Callable[[Any, Any], None]] = {
    **dict.fromkeys(_KNOWN_FIELDS, _fill_fields),
    TensorProperties: _fill_properties,
    MetadataIndex: _fill_index,
    _Dropped: lambda value, state: None,
}


class _MetadataUnpickler(RestrictedUnpickler):
    def allowed(self, module: str, name: str) -> Allowed:
        found = _ALLOWED.get(f"{module}.{name}")
        if found is None:
            what = f"the pickle asks for {module}.{name}, which no .metadata known here holds"
            raise _UnknownError(f"{what}; it was not run")
        return found

    def fill(self, value: Any, state: Any) -> None:
        if type(value) not in _FILLS:
            raise pickle.UnpicklingError(f"the pickle sets attributes of a {type(value).__name__}")
        _FILLS[type(value)](value, state)


# -- what the file must hold ------------------------------------------------------------------------

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
            return f"{reprlib.repr(fqn)}: no description of a tensor or an object"
    safe_paths: set[str] = set()
    for index, info in (found.storage_data or {}).items():
        if type(index) is not MetadataIndex or type(info) is not StorageInfo:
            return "storage_data maps something else than an index to a place"
        if type(index.fqn) is not str or not (index.offset is None or _is_size(index.offset)):
            return f"storage_data has the index {index.fqn!r}, {reprlib.repr(index.offset)}"
        path = info.relative_path
        if path not in safe_paths:
            if type(path) is not str or path.startswith("/") or "\0" in path or ".." in path.split("/"):
                return f"{index.fqn!r}: {reprlib.repr(path)} is no file inside the checkpoint"
            safe_paths.add(path)
        if not _are_sizes((info.offset, info.length)):
            return f"{index.fqn!r}: offset {reprlib.repr(info.offset)} and length {reprlib.repr(info.length)}"
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
