"""DCP's ``.metadata`` of many ranks, rendered from columns. Pure.

Pickling ten million shards as DCP's objects takes ten minutes, most of it to make the objects. Their pickles differ in
a few numbers only: one instance of each of DCP's classes is pickled by pickle itself, its numbers and names become
holes, and numpy fills the holes of a million copies at a time. A field that a later torch adds is so written as pickle
would write it; what this cannot do it refuses.

Sources: ``torch/distributed/checkpoint/metadata.py``, ``filesystem.py`` (2.6 to 2.15), ``pickletools``.
"""

from __future__ import annotations

import io
import itertools
import pickletools
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from aio_ckpt.format.dcp_metadata_read import DTYPES, MetadataTemplate, metadata_pickler
from aio_ckpt.format.tensor_table import IntArray

__all__ = ["ShardTable", "render_columns"]

Rows: TypeAlias = "npt.NDArray[np.uint8]"
Hole: TypeAlias = "str | int"
"""What stands in a pickled instance where a value will go: a text or a number that nothing else has."""

_ROWS_AT_ONCE = 1 << 16
"""Bounds what is taken beside the result, and the stack of whoever unpickles it."""
_NAMES_AT_ONCE = 1000
"""As pickle itself does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTable:
    """What all ranks together store, tensors shard by shard, ordered by name and of one name by rank."""

    names: Sequence[str]
    """Names of tensors."""
    dtypes: Sequence[str]
    """Per name, ``str(torch.dtype)`` without ``torch.``."""
    sizes: Sequence[tuple[int, ...]]
    """Per name, the global shape."""
    starts: IntArray
    """Per name its first shard, then the number of shards."""
    offsets: IntArray
    """Per shard, where it begins; zeros behind its tensor's own dimensions."""
    shapes: IntArray
    """Per shard, its shape, likewise."""
    file: IntArray
    """Per shard, which file."""
    places: IntArray
    """Per shard, offset and length in that file."""
    files: Sequence[str]
    """Names of files."""
    objects: Sequence[tuple[str, int]]
    """Names of objects with the file of each."""


def render_columns(table: ShardTable, paths: Mapping[str, tuple[str | int, ...]]) -> MetadataTemplate:
    """``.metadata`` with holes for the places of the objects; ``paths`` become its ``planner_data``.

    Raises:
        NotImplementedError: the running torch pickles its classes as no torch known here does.
    """
    memo = _Memo()
    opening, before_paths, before_places, before_checkpoint_id, before_save_id, ending = _whole(memo)
    stencils = _Stencils(memo, table)
    files = memo.reserve(len(table.files))
    first_name = memo.reserve(len(table.names))
    first_object = memo.reserve(len(table.objects))
    described, placed = _tensors(table, stencils, files=files, names=first_name)
    described += [
        _key(name, first_object + number) + stencils.an_object for number, (name, _) in enumerate(table.objects)
    ]
    start = (*memo.head(table.files, files), opening, b"}", *_batched(described), before_paths, _plain(dict(paths)))
    rows = stencils.object_place.rows(
        {
            _NAME: first_object + np.arange(len(table.objects)),
            _FILE: files + np.array([file for _, file in table.objects], np.int64),
        },
        len(table.objects),
    )
    fixed = b"".join((*start, before_places, b"}", *placed, *(() if len(rows) else (before_checkpoint_id,))))
    head = b"".join((b"(", rows.tobytes(), b"u", before_checkpoint_id)) if len(rows) else b""
    offset_at, length_at = stencils.object_place.at[_AT], stencils.object_place.at[_LENGTH]
    begins = range(1, 1 + rows.size, max(rows.shape[1], 1))
    return MetadataTemplate.of(
        fixed=fixed,
        head=head,
        holes=tuple((begin + offset_at, begin + length_at) for begin in begins),
        middle=before_save_id,
        tail=ending,
    )


# -- instances with holes ---------------------------------------------------------------------------

_NAME, _FILE, _CHUNKS, _END = "\0name", "\0file", "\0chunks", "\0end"
_HINT, _AT, _LENGTH = (1 << 40) + 200, (1 << 40) + 201, (1 << 40) + 202


def _offset(dim: int) -> int:
    """The hole of a shard's offset in a dimension, of which torch has 64."""
    return (1 << 40) + dim


def _side(dim: int) -> int:
    """The hole of a length in a dimension."""
    return (1 << 40) + 100 + dim


def _plain(value: object) -> bytes:
    """The pickle of ``value`` without PROTO, STOP and memo, to stand inside of another. Protocol 3 has no frames."""
    file = io.BytesIO()
    pickler = metadata_pickler(file)
    pickler.fast = True
    pickler.dump(value)
    return file.getvalue()[2:-1]


class _Memo:
    """What the pickle says once, at its beginning, and then refers to: classes, names of fields, names of files."""

    def __init__(self) -> None:
        self._entries: dict[bytes, int] = {}
        self._size = 0

    def reference(self, entry: bytes) -> bytes:
        """The opcode that pushes what ``entry``, an opcode, pushes."""
        if entry not in self._entries:
            self._entries[entry] = self.reserve(1)
        index = self._entries[entry]
        return b"h" + bytes([index]) if index < 256 else b"j" + _U32.pack(index)

    def reserve(self, count: int) -> int:
        """The first of so many places."""
        self._size += count
        return self._size - count

    def head(self, files: Sequence[str], first_file: int) -> Iterator[bytes]:
        """The beginning of the pickle."""
        yield b"\x80\x03"
        texts = ((_plain(file), first_file + number) for number, file in enumerate(files))
        for entry, index in itertools.chain(self._entries.items(), texts):
            yield entry + _put(index) + b"0"


_U32 = struct.Struct("<I")


def _put(index: int) -> bytes:
    return b"r" + _U32.pack(index)


def _tokens(instance: object, memo: _Memo, *holes: Hole) -> list[bytes | Hole]:
    """The pickle of ``instance``: opcodes, and between them the holes.

    Raises:
        NotImplementedError: not each of ``holes`` occurs once.
    """
    data = _plain(instance) + b"."
    found: list[bytes | Hole] = [b""]
    operations = [(opcode.name, value, at) for opcode, value, at in pickletools.genops(data)]
    for (name, value, at), (_, _, stop) in itertools.pairwise(operations):
        if isinstance(value, str | int) and value in holes:
            found += [value, b""]
            continue
        if "PUT" in name or "GET" in name or name == "MEMOIZE":
            raise NotImplementedError("this Python pickles with a memo where it was told not to")
        opcodes = memo.reference(data[at:stop]) if name in ("GLOBAL", "BINUNICODE") else data[at:stop]
        found[-1] = _joined(found[-1], opcodes)
    if sorted(map(str, found[1::2])) != sorted(map(str, holes)):
        raise NotImplementedError(
            f"this torch pickles a {type(instance).__name__} without a field that it had, or twice"
        )
    return found


def _joined(*tokens: bytes | Hole) -> bytes:
    return b"".join(token for token in tokens if isinstance(token, bytes))


def _whole(memo: _Memo) -> list[bytes]:
    """What stands before, between and behind the parts of the whole."""
    parts: list[Any] = [f"\0{number}" for number in range(5)]
    described, paths, places, checkpoint_id, save_id = parts
    meta = StorageMeta(checkpoint_id=checkpoint_id, save_id=save_id)
    whole = Metadata(state_dict_metadata=described, planner_data=paths, storage_data=places, storage_meta=meta)
    tokens = _tokens(whole, memo, *parts)
    if tokens[1::2] != parts:
        raise NotImplementedError("this torch pickles the parts of Metadata in another order")
    return [_joined(token) for token in tokens[:-1:2]] + [_joined(tokens[-1], b".")]


class _Stencil:
    """The opcodes of an entry, all of one length, whose holes numpy fills a column at a time."""

    def __init__(self, tokens: Sequence[bytes | Hole], wide: frozenset[Hole]) -> None:
        row = bytearray()
        self.at: dict[Hole, int] = {}
        formats = []
        for token in tokens:
            if isinstance(token, bytes):
                row += token
                continue
            opcode, kind = (b"j", "<u4") if isinstance(token, str) else _LONG if token in wide else _INT
            row += opcode
            self.at[token] = len(row)
            formats.append(kind)
            row += bytes(np.dtype(kind).itemsize)
        self._row = np.frombuffer(bytes(row), np.uint8)
        self._dtype = np.dtype(
            {
                "names": [str(hole) for hole in self.at],
                "formats": formats,
                "offsets": list(self.at.values()),
                "itemsize": len(row),
            }
        )

    def rows(self, columns: Mapping[Hole, IntArray], count: int) -> Rows:
        """``count`` entries; a hole without a column stays 0."""
        rows = np.empty((count, len(self._row)), np.uint8)
        rows[:] = self._row
        view = rows.reshape(-1).view(self._dtype)
        for hole in self.at:
            if hole in columns:
                view[str(hole)] = columns[hole]
        return rows


_INT, _LONG = (b"J", "<i4"), (b"\x8a\x08", "<i8")
"""BININT, and LONG1 of 8 bytes."""


class _Stencils:
    """One of each kind of entry that a table has."""

    def __init__(self, memo: _Memo, table: ShardTable) -> None:
        longest = max((side for size in table.sizes for side in size), default=0)
        furthest = int(table.places.max(initial=0))
        dims_of = {len(size) for size in table.sizes}
        wide: set[Hole] = {hole(dim) for hole in (_offset, _side) for dim in range(64) if longest >= 1 << 31}
        wide |= {_AT, _LENGTH} if furthest >= 1 << 31 else set()
        widths = frozenset(wide)
        place = _tokens(_StorageInfo(_FILE, _AT, _LENGTH), memo, _FILE, _AT, _LENGTH)
        self.chunk: dict[int, _Stencil] = {}
        """By dimensions: a chunk of a tensor."""
        self.place: dict[int, _Stencil] = {}
        """By dimensions: the index of a shard and its place."""
        for dims in dims_of:
            begins, sides = [_offset(dim) for dim in range(dims)], [_side(dim) for dim in range(dims)]
            chunk = ChunkStorageMetadata(torch.Size(begins), torch.Size(sides))
            self.chunk[dims] = _Stencil(_tokens(chunk, memo, *begins, *sides), widths)
            index = MetadataIndex(_NAME, torch.Size(begins), _HINT)
            self.place[dims] = _Stencil([*_tokens(index, memo, _NAME, *begins, _HINT), *place], widths)
        self.tensor = {
            kind: _tensor_tokens(*kind, memo)
            for kind in {(dtype, len(size)) for dtype, size in zip(table.dtypes, table.sizes, strict=True)}
        }
        """By dtype and dimensions: a tensor."""
        self.object_place = _Stencil([*_tokens(MetadataIndex(_NAME), memo, _NAME), *place], frozenset((_AT, _LENGTH)))
        """The index of an object and its place."""
        self.an_object = _joined(*_tokens(BytesStorageMetadata(), memo))
        """The description of an object."""


def _tensor_tokens(dtype: str, dims: int, memo: _Memo) -> list[bytes | Hole]:
    sides = [_side(dim) for dim in range(dims)]
    chunks: list[Any] = [_CHUNKS, _END]  # of two, as of many
    tensor = TensorStorageMetadata(TensorProperties(dtype=DTYPES[dtype]), torch.Size(sides), chunks)
    return _tokens(tensor, memo, *sides, *chunks)


# -- the entries ------------------------------------------------------------------------------------


def _key(name: str, index: int) -> bytes:
    """A name as a key, to be referred to."""
    return _plain(name) + _put(index)


def _batched(entries: Sequence[bytes]) -> Iterator[bytes]:
    """SETITEMS over entries of a dict."""
    for batch in range(0, len(entries), _NAMES_AT_ONCE):
        yield b"("
        yield from entries[batch : batch + _NAMES_AT_ONCE]
        yield b"u"


def _tensors(table: ShardTable, stencils: _Stencils, *, files: int, names: int) -> tuple[list[bytes], list[bytes]]:
    """The entry of every tensor in ``state_dict_metadata``, and those of its shards in ``storage_data``."""
    described = [b""] * len(table.names)
    placed: list[bytes] = []
    lengths = np.diff(table.starts)
    for dims, members in _batches(table, lengths):
        counts = lengths[members]
        hint = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        rows = np.repeat(table.starts[members], counts) + hint
        columns: dict[Hole, IntArray] = {_offset(dim): table.offsets[rows, dim] for dim in range(dims)}
        columns |= {_side(dim): table.shapes[rows, dim] for dim in range(dims)}
        chunks = memoryview(stencils.chunk[dims].rows(columns, len(rows)).tobytes())
        columns |= {_NAME: names + np.repeat(members, counts), _FILE: files + table.file[rows], _HINT: hint}
        columns |= {_AT: table.places[rows, 0], _LENGTH: table.places[rows, 1]}
        placed += [b"(", stencils.place[dims].rows(columns, len(rows)).tobytes(), b"u"]
        width, begin = len(chunks) // max(len(rows), 1), 0
        for name, count in zip(members.tolist(), counts.tolist(), strict=True):
            end = begin + count * width
            described[name] = _tensor(table, stencils, name, names + name, chunks[begin:end])
            begin = end
    return described, placed


def _tensor(table: ShardTable, stencils: _Stencils, name: int, index: int, chunks: memoryview) -> bytes:
    size = table.sizes[name]
    values: dict[Hole, bytes | memoryview] = {_side(dim): _plain(side) for dim, side in enumerate(size)}
    values |= {_CHUNKS: chunks, _END: b""}
    tokens = stencils.tensor[table.dtypes[name], len(size)]
    filled = (token if isinstance(token, bytes) else values[token] for token in tokens)
    return b"".join((_key(table.names[name], index), *filled))


def _batches(table: ShardTable, lengths: IntArray) -> Iterator[tuple[int, IntArray]]:
    """(dimensions, names) of a bounded number of shards each."""
    dims_of = np.array([len(size) for size in table.sizes], np.int64)
    for dims in np.unique(dims_of).tolist():
        members = np.flatnonzero(dims_of == dims)
        batch = np.cumsum(lengths[members]) // _ROWS_AT_ONCE
        for group in np.split(members, np.flatnonzero(np.diff(batch)) + 1):
            yield dims, group
