"""A safetensors file: the length of a JSON header, the header, and the raw bytes of all tensors without a gap.

Source: the section "Format" of https://github.com/huggingface/safetensors (0.8). The index of several files is the one
that transformers and huggingface_hub write.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import torch

from aio_ckpt.errors import CorruptCheckpointError
from aio_ckpt.format.constants import RAW_ALIGN_BYTES, align_up
from aio_ckpt.format.dtypes import SAFETENSORS_NAMES, known_dtypes

SUFFIX = ".safetensors"
"""End of the names of safetensors files."""
LENGTH_BYTES = 8
"""Length of the number before the header."""
MAX_HEADER_BYTES = 100_000_000
"""Longest header that safetensors reads."""
METADATA = "__metadata__"
"""Key of the metadata in the header, which no tensor may have."""
_ALTERNATE = "-alternate"
"""Mark in the alternate names of several files. It keeps the begin and the end by which tools find them."""
_DTYPES: Mapping[str, torch.dtype] = {
    SAFETENSORS_NAMES[own]: dtype for own, dtype in known_dtypes(SAFETENSORS_NAMES).items()
}
PACKED: torch.dtype | None = _DTYPES.get("F4")
"""Dtype whose elements hold two numbers each; None if this torch lacks it. The header counts numbers, so that its last
dimension is twice as long as that of the tensor."""

dtype_names: Mapping[torch.dtype, str] = {dtype: name for name, dtype in _DTYPES.items()}
"""Names of the dtypes that such a file can hold and safetensors' torch module reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Entry of one tensor in the header."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Shape of the tensor, in elements of ``dtype``."""
    start: int
    """Offset of the raw bytes: from the end of the header if it is to be rendered, else from the start of the file."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def render_header(tensors: Sequence[StoredTensor], metadata: Mapping[str, str]) -> bytes:
    """Return all that comes before the raw bytes, padded with spaces so that these begin at a multiple of 64."""
    header: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    for tensor in tensors:
        offsets = [tensor.start, tensor.start + tensor.nbytes]
        shape = list(tensor.shape)
        if tensor.dtype is PACKED:
            shape[-1] *= 2
        header[tensor.name] = {"dtype": dtype_names[tensor.dtype], "shape": shape, "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(align_up(LENGTH_BYTES + len(text), RAW_ALIGN_BYTES) - LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def parse_header(text: bytes, file_bytes: int) -> tuple[list[StoredTensor], dict[str, str]]:
    """Return the tensors, ascending by offset, and the metadata. ``text`` is the header without its length.

    Raises:
        CorruptCheckpointError: the header is malformed, or its tensors do not fill the file exactly.
    """
    begin = LENGTH_BYTES + len(text)
    try:
        header = json.loads(text)
        metadata = {str(key): str(value) for key, value in header.pop(METADATA, {}).items()}
        tensors = [_parse_entry(name, entry, begin) for name, entry in header.items()]
    except KeyError as error:
        raise CorruptCheckpointError(f"its safetensors header lacks or does not know {error}") from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptCheckpointError(f"its safetensors header is malformed: {error}") from error
    tensors.sort(key=lambda tensor: (tensor.start, tensor.nbytes))
    end = begin
    for tensor in tensors:
        if tensor.start != end:
            raise CorruptCheckpointError(f"its safetensors header has a gap or an overlap before {tensor.name!r}")
        end += tensor.nbytes
    if end != file_bytes:
        raise CorruptCheckpointError(f"its safetensors header speaks of {end} bytes, and the file has {file_bytes}")
    return tensors, metadata


def _parse_entry(name: str, entry: Any, begin: int) -> StoredTensor:
    first, last = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(type(size) is int and size >= 0 for size in (*shape, first, last)):
        raise ValueError(f"{name!r} has a size or an offset that is none")
    dtype = _DTYPES[entry["dtype"]]
    if dtype is PACKED:
        if not shape or shape[-1] % 2:
            raise ValueError(f"{name!r} has an odd number of packed numbers in its last dimension")
        shape = (*shape[:-1], shape[-1] // 2)
    stored = StoredTensor(name=name, dtype=dtype, shape=shape, start=begin + first)
    if last - first != stored.nbytes:
        raise ValueError(f"{name!r} has {last - first} bytes, and shape and dtype need {stored.nbytes}")
    return stored


# -- several files --------------------------------------------------------------------------------


def split(sizes: Mapping[str, int], max_shard_bytes: int | None) -> list[list[str]]:
    """Return the names of each file, in the order of ``sizes``. A tensor beyond the limit has a file of its own."""
    shards: list[list[str]] = [[]]
    used = 0
    for name, nbytes in sizes.items():
        if max_shard_bytes is not None and shards[-1] and used + nbytes > max_shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += nbytes
    return shards


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsIndex:
    """Index of several files, before these have their names."""

    single: str
    """Name of the single file that the files stand for."""
    files: Mapping[str, int]
    """Number, from 0, of the file of each tensor."""
    count: int
    """Number of files."""
    total_bytes: int
    """Length of all tensors, in bytes."""

    def names(self, *, taken: Set[str]) -> Sequence[str]:
        """Return the names of the files, none of which is ``taken``: the usual ones, or the alternate ones.

        Readers take the names from the index. If each save replaces the one before, the names alternate.
        """
        usual = self._names("")
        return usual if taken.isdisjoint(usual) else self._names(_ALTERNATE)

    def _names(self, mark: str) -> Sequence[str]:
        stem = PurePath(self.single).stem + mark
        return [f"{stem}-{number + 1:05d}-of-{self.count:05d}{SUFFIX}" for number in range(self.count)]

    def render(self, names: Sequence[str]) -> bytes:
        """Return the bytes of the index of files with these names."""
        files = {tensor: names[number] for tensor, number in sorted(self.files.items())}
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": files}
        return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()


def index_name(name: str) -> str:
    """Return the name of the index of the files that belong to ``name``."""
    return f"{name}.index.json"


def replaced_names(name: str, index: bytes | None) -> frozenset[str]:
    """Return the names of the files that a save at ``name`` replaces or removes; ``index``: its index, if there is one.

    A safetensors file takes the place of the index of its name, and of the shards that this names.
    """
    if not name.endswith(SUFFIX):
        return frozenset({name})
    shards = frozenset[str]() if index is None else parse_index(index, name)
    return shards | {name, index_name(name)}


def parse_index(data: bytes, name: str) -> frozenset[str]:
    """Return the shards of ``name`` that an index names. Other names are left out; a malformed index names none."""
    stem, suffix = re.escape(PurePath(name).stem), re.escape(SUFFIX)
    pattern = re.compile(rf"{stem}({_ALTERNATE})?-\d{{5}}-of-\d{{5}}{suffix}")
    try:
        files = set(json.loads(data)["weight_map"].values())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return frozenset()
    return frozenset(file for file in files if isinstance(file, str) and pattern.fullmatch(file))
