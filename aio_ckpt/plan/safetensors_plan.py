"""Plan of safetensors files: names, tied tensors, casts, the files by size, and the places in each file.

Tied tensors follow the rule of transformers and of ``safetensors.torch.save_model``: of several names of one tensor,
the first is stored. The metadata of the file holds ``{other name: first name}``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from aio_ckpt.errors import ConfigError, UnsupportedLeafError
from aio_ckpt.format.constants import Envelope, TensorSpec
from aio_ckpt.format.safetensors_file import (
    MAX_HEADER_BYTES,
    METADATA,
    PACKED,
    SafetensorsIndex,
    StoredTensor,
    dtype_names,
    render_header,
    split,
)
from aio_ckpt.format.tensor_zip import row_major_stride
from aio_ckpt.leaves.tensor_memory import PLAIN_TYPES, signature_of, span_of
from aio_ckpt.message_texts import shown
from aio_ckpt.plan.chunks import chunk_bytes_within, cut_chunks
from aio_ckpt.plan.file_plan import FileContent, FilePart, FilePlans
from aio_ckpt.plan.layout import ImageLayout
from aio_ckpt.plan.structure import Structure
from aio_ckpt.plan.tensor_item import TensorItem

FileRename: TypeAlias = Mapping[str, str] | Callable[[str], str]
"""Maps the name of a tensor to its name in the file; a mapping leaves other names as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsOptions:
    """Options of ``save_file()`` for safetensors files."""

    metadata: Mapping[str, str] | None = None
    """Texts for the metadata of each file."""
    max_shard_bytes: int | None = None
    """Most bytes of tensors in a file; None: one file."""
    dtype: torch.dtype | None = None
    """Dtype to which floating-point tensors are cast; None: as they are."""
    rename: FileRename | None = None

    def check(self) -> None:
        """Raise ConfigError if an option has a wrong type or is out of range."""
        metadata, limit, dtype, rename = self.metadata, self.max_shard_bytes, self.dtype, self.rename
        if metadata is not None and not (
            isinstance(metadata, Mapping) and all(isinstance(text, str) for pair in metadata.items() for text in pair)
        ):
            raise ConfigError(f"metadata={shown(metadata)}: give a dict of texts")
        if limit is not None and (type(limit) is not int or limit < 1):
            raise ConfigError(f"max_shard_bytes={shown(limit)}: give a number of bytes above 0")
        is_number = isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype is not PACKED
        if dtype is not None and not is_number:
            raise ConfigError(f"dtype={shown(dtype)}: give a floating-point dtype of torch that is not packed")
        is_function = callable(rename) and not isinstance(rename, type)
        if rename is not None and not (isinstance(rename, Mapping) or is_function):
            raise ConfigError(f"rename={shown(rename)}: give a mapping of names, or a function")


def safetensors_content(tensors: object, name: str, options: SafetensorsOptions, plans: FilePlans) -> FileContent:
    """Return the safetensors files of ``tensors``, the first of which is ``name`` if there is one.

    Raises:
        UnsupportedLeafError: a value is no plain tensor, has a dtype that such a file lacks, or overlaps another one.
        ConfigError: ``tensors`` is no dict, or two names become one.
    """
    named = _renamed(_checked(tensors), options.rename)
    if METADATA in named:
        raise ConfigError(f"{METADATA!r} is the name of the metadata in a safetensors file: rename the tensor")
    kept, tied = _without_tied(named)
    cast = functools.partial(_stored_dtype, dtype=options.dtype)
    sizes = {key: tensor.numel() * cast(tensor).itemsize for key, tensor in kept.items()}
    shards = split(sizes, options.max_shard_bytes)
    plans.drop_beyond(len(shards))
    numbers = {key: number for number, names in enumerate(shards) for key in names}
    index = SafetensorsIndex(single=name, files=numbers, count=len(shards), total_bytes=sum(sizes.values()))
    files = [name] if len(shards) == 1 else index.names(taken=frozenset())
    parts = [
        functools.partial(
            _plan,
            file,
            {key: kept[key] for key in names},
            {"format": "pt", **(options.metadata or {})} | {old: new for old, new in tied.items() if new in names},
            cast,
            plans,
            number,
        )
        for number, (file, names) in enumerate(zip(files, shards, strict=True))
    ]
    return FileContent(parts=parts, index=index if len(shards) > 1 else None)


def _checked(tensors: object) -> dict[str, torch.Tensor]:
    if not isinstance(tensors, Mapping):
        raise ConfigError(
            f"a safetensors file holds a dict of tensors, no {type(tensors).__name__}: give a state_dict()"
        )
    found: dict[str, torch.Tensor] = {}
    for key, value in tensors.items():
        if not isinstance(key, str):
            raise ConfigError(f"{shown(key)} is no name: a safetensors file holds a dict of tensors by name")
        if not isinstance(value, torch.Tensor):
            raise UnsupportedLeafError(
                f"{key!r} is a {type(value).__name__}: a safetensors file holds tensors alone; leave it out, or "
                "save a .pt file"
            )
        if type(value) not in PLAIN_TYPES or value.layout is not torch.strided or value.is_meta:
            raise UnsupportedLeafError(
                f"{key!r} is no plain tensor (type {type(value).__name__}, layout {value.layout}): give a plain one, "
                "such as a DTensor's full_tensor()"
            )
        if value.dtype not in dtype_names:
            raise UnsupportedLeafError(f"{key!r}: a safetensors file has no {value.dtype}: convert it first")
        if value.dtype is PACKED and not value.dim():
            raise UnsupportedLeafError(
                f"{key!r} is a {value.dtype} without dimensions, which no safetensors file can hold: give .reshape(1)"
            )
        found[key] = value.detach()
    return found


def _renamed(tensors: dict[str, torch.Tensor], rename: FileRename | None) -> dict[str, torch.Tensor]:
    if rename is None:
        return tensors
    if isinstance(rename, Mapping):
        missing = [key for key in rename if key not in tensors]
        if missing:
            raise ConfigError(f"rename= names {missing[0]!r}, and there is no such tensor")
    renamed: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        new = rename.get(key, key) if isinstance(rename, Mapping) else rename(key)
        if not isinstance(new, str) or new in renamed:
            raise ConfigError(f"rename= makes {shown(new)} of {key!r}: give each tensor a name of its own")
        renamed[new] = tensor
    return renamed


def _without_tied(tensors: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors without second names, and the first name of each second one.

    Raises:
        UnsupportedLeafError: two tensors share a part of their bytes.
    """
    first: dict[tuple[object, ...], str] = {}
    tied: dict[str, str] = {}
    spans: list[tuple[str, int, int, str]] = []
    for key, tensor in tensors.items():
        start, extent = span_of(tensor)
        if not extent:
            continue
        kept = first.setdefault((tensor.device, *signature_of(tensor)), key)
        if kept != key:
            tied[key] = kept
        else:
            spans.append((str(tensor.device), start, start + extent, key))
    spans.sort()
    for (device, _, end, one), (other_device, start, _, other) in itertools.pairwise(spans):
        if device == other_device and start < end:
            raise UnsupportedLeafError(
                f"{one!r} and {other!r} share memory and are not one tensor, which no safetensors file can hold: give "
                "a clone() of one"
            )
    return {key: tensor for key, tensor in tensors.items() if key not in tied}, tied


def _stored_dtype(tensor: torch.Tensor, *, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of a tensor in the file. Packed numbers cannot be cast."""
    if dtype is None or not tensor.is_floating_point() or tensor.dtype is PACKED:
        return tensor.dtype
    return dtype


def _plan(
    file: str,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str],
    cast: Callable[[torch.Tensor], torch.dtype],
    plans: FilePlans,
    number: int,
) -> FilePart:
    """Plan file ``number`` of a call. Tensors that are not stored as they lie are copied now, row by row."""
    with torch.no_grad():
        names = sorted(tensors, key=lambda key: -cast(tensors[key]).itemsize)
        lines = [tensors[key].to(cast(tensors[key])).resolve_conj().resolve_neg().contiguous() for key in names]
    lay_out = functools.partial(_lay_out, metadata)
    planned, is_hit = plans.plan(("safetensors", number), names, lines, lay_out, header=metadata)
    if lines:
        return FilePart(name=file, planned=planned, plan_hit=is_hit, tail_bytes=0, render_tail=None)
    header = render_header([], metadata)
    return FilePart(name=file, planned=planned, plan_hit=is_hit, tail_bytes=len(header), render_tail=lambda _: header)


def _lay_out(metadata: Mapping[str, str], structure: Structure, budget_bytes: int) -> ImageLayout:
    """Place one tensor after the other, those with longer elements first: so each begins at a multiple of its own."""
    end, stored = 0, []
    for name, dtype, shape in zip(structure.names, structure.dtypes, structure.shapes, strict=True):
        stored.append(StoredTensor(name=name, dtype=dtype, shape=tuple(shape), start=end))
        end += stored[-1].nbytes
    header = render_header(stored, metadata)
    if len(header) > MAX_HEADER_BYTES:
        raise UnsupportedLeafError(f"{len(stored)} tensors need a header of {len(header)} bytes: set max_shard_bytes")
    items = []
    for leaf, entry in enumerate(stored):
        before = header if leaf == 0 else b""
        items.append(
            TensorItem(
                leaf=leaf,
                fqns=(entry.name,),
                offsets=(0,) * len(entry.shape),
                spec=TensorSpec(entry.dtype, entry.shape, row_major_stride(entry.shape)),
                envelope=Envelope(header=before, trailer=b"", crc_offsets=(), raw_bytes=entry.nbytes),
                item_offset=len(header) + entry.start - len(before),
            )
        )
    length = len(header) + end if items else 0
    chunk_bytes = chunk_bytes_within(end, budget_bytes)
    chunks = cut_chunks(items, chunk_bytes, length)
    return ImageLayout(
        items=tuple(items),
        chunk_bytes=chunk_bytes,
        chunks=chunks,
        tensor_bytes=length,
        raw_bytes=end,
        file_alignment=1,
    )
