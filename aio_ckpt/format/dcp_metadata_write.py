"""Writer of DCP's ``.metadata``, which it renders from columns. Pure.

Pickling ten million shards as DCP's objects takes ten minutes, most of it to make the objects. Their pickles differ in
a few numbers only. So pickle itself pickles one instance of each of DCP's classes, its numbers and names become holes,
and numpy fills the holes of a million copies at a time. A field that a later torch adds is written as pickle writes it;
a pickle of another form is refused.

A rendered ``.metadata`` is a template: each save fills in the names of its files, the place of each object and the two
ids.

Sources: ``torch/distributed/checkpoint/metadata.py``, ``filesystem.py`` (2.6 to 2.15), ``pickletools``.
"""

from __future__ import annotations

import copyreg
import functools
import io
import itertools
import pickle
import pickletools
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
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
from aio_ckpt.format.checkpoint_files import data_file_name
from aio_ckpt.format.checksum import crc32_of
from aio_ckpt.format.dcp_metadata_read import OLDEST_FIELDS
from aio_ckpt.format.dtypes import DTYPES
from aio_ckpt.format.tensor_columns import IntArray

Rows: TypeAlias = "npt.NDArray[np.uint8]"
Hole: TypeAlias = "str | int"
"""Placeholder of a value in a pickled instance: a text or a number that occurs nowhere else in it."""

_ROWS_AT_ONCE = 1 << 16
"""Most shards of a batch. Bounds the memory beside the result, and the stack of the unpickler."""
_NAMES_AT_ONCE = 1000
"""Most names that one SETITEMS adds to a dict, as in :mod:`pickle`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataTable:
    """Table of the tensors and objects of all ranks. Shards are ordered by the name of their tensor, then by rank."""

    names: Sequence[str]
    dtypes: Sequence[str]
    """Per name, ``str(torch.dtype)`` without ``torch.``."""
    sizes: Sequence[tuple[int, ...]]
    """Per name, the global shape."""
    starts: IntArray
    """Per name, the index of its first shard; then the number of all shards."""
    offsets: IntArray
    """(shards, dims): offsets in the global tensor; 0 after the tensor's own dimensions."""
    shapes: IntArray
    """(shards, dims): shape; 0 after the tensor's own dimensions."""
    file: IntArray
    """Per shard, number of its file."""
    places: IntArray
    """(shards, 2): offset and length in the file."""
    files: Sequence[tuple[int, bool]]
    """(rank, whether it is the frozen one) of each data file."""
    objects: Sequence[tuple[str, int]]
    """(name, number of its file) of each object."""

    def rank(self, shard: int) -> int:
        """Return the rank that stores a shard."""
        rank, _ = self.files[int(self.file[shard])]
        return rank


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataTemplate:
    """``.metadata`` of one plan, without the names of the files, the place of each object and the two ids.

    The names of the files are pushed once, at the beginning. Then come the tensors, which most of the bytes describe.
    """

    files: tuple[tuple[int, bool, bytes], ...]
    """Per file, its rank, whether it is frozen, and the opcodes that store its name, which stands before them, in the
    memo."""
    fixed: bytes
    """Bytes from there to the first hole. If there are no objects, bytes up to the checkpoint id."""
    fixed_crc32: int
    head: bytes
    """Bytes from the end of ``fixed`` to the checkpoint id."""
    holes: tuple[tuple[int, int], ...]
    """Per object, the two positions in ``head`` of its offset and its length, 8 bytes each, little-endian."""
    middle: bytes
    """Bytes between the checkpoint id and the save id."""
    tail: bytes
    """Bytes after the save id."""

    def fill(self, spans: Sequence[tuple[int, int]], *, checkpoint_id: str, save_id: str) -> tuple[bytes, bytes, bytes]:
        """Return the pickle of ``.metadata`` in three parts; the second is ``fixed``.

        ``spans[i]`` is (offset, length) of the i-th object of the :class:`MetadataTable`, each below 2**63.

        Raises:
            ValueError: the number of spans is not the number of objects.
        """
        if len(spans) != len(self.holes):
            raise ValueError(f"{len(spans)} spans for {len(self.holes)} objects")
        names = (_text(data_file_name(save_id, rank, is_frozen=frozen)) + store for rank, frozen, store in self.files)
        start = b"".join(names)
        head = bytearray(self.head)
        put = _I64.pack_into
        for (offset_at, length_at), (offset, length) in zip(self.holes, spans, strict=True):
            put(head, offset_at, offset)
            put(head, length_at, length)
        ids = _text(checkpoint_id), _text(save_id)
        return _PROTO + start, self.fixed, b"".join((head, ids[0], self.middle, ids[1], self.tail))


def dump_metadata(metadata: Metadata) -> bytes:
    """Return the pickle of ``metadata`` as :func:`_pickler` writes it."""
    file = io.BytesIO()
    _pickler(file).dump(metadata)
    return file.getvalue()


def render_metadata(table: MetadataTable, paths: Mapping[str, tuple[str | int, ...]]) -> MetadataTemplate:
    """Return ``.metadata`` with holes for the places of the objects; ``paths`` become its ``planner_data``.

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
    objects = [name for name, _ in table.objects]
    described += [_key(name, number) + stencils.an_object for number, name in enumerate(objects, first_object)]
    described = _ordered(described, [*table.names, *objects], paths)
    start = (*memo.head(), opening, b"}", *_batched(described), before_paths, _plain(dict(paths)))
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
    return MetadataTemplate(
        files=tuple((*file, _put(index) + _POP) for index, file in enumerate(table.files, files)),
        fixed=fixed,
        fixed_crc32=crc32_of(fixed),
        head=head,
        holes=tuple((begin + offset_at, begin + length_at) for begin in begins),
        middle=before_save_id,
        tail=ending,
    )


# -- instances with holes ---------------------------------------------------------------------------

_NAME, _FILE, _CHUNKS, _END = "\0name", "\0file", "\0chunks", "\0end"
_HINT, _AT, _LENGTH = (1 << 40) + 200, (1 << 40) + 201, (1 << 40) + 202


def _offset(dim: int) -> int:
    """Return the hole of a shard's offset in dimension ``dim``, 0 to 63."""
    return (1 << 40) + dim


def _side(dim: int) -> int:
    """Return the hole of a shard's length in dimension ``dim``."""
    return (1 << 40) + 100 + dim


def _pickler(file: io.BytesIO) -> pickle.Pickler:
    """Return a pickler whose ``.metadata`` every torch from 2.6 on reads.

    Torch 2.15 added ``strides`` to ``TensorProperties`` as a sixth field, which older versions refuse. This pickler
    leaves it out: no version of ``dcp.load`` uses it, and each stored item holds its own stride.

    Protocol 3 has no frames, whose lengths would forbid to replace a string by one of another length.
    """
    pickler = pickle.Pickler(file, protocol=3)
    pickler.dispatch_table = {**copyreg.dispatch_table, TensorProperties: _reduce_properties}
    return pickler


def _reduce_properties(value: TensorProperties) -> tuple[Any, ...]:
    state = value.__getstate__()  # type: ignore[no-untyped-call]
    return copyreg.__newobj__, (TensorProperties,), state[:OLDEST_FIELDS]  # type: ignore[attr-defined]


def _plain(value: object) -> bytes:
    """Return the pickle of ``value`` without PROTO, STOP and memo, to be put into another pickle."""
    file = io.BytesIO()
    pickler = _pickler(file)
    pickler.fast = True
    pickler.dump(value)
    return file.getvalue()[2:-1]


def _number(value: int) -> bytes:
    return b"J" + _I32.pack(value) if value < 1 << 31 else b"\x8a\x08" + _I64.pack(value)


def _text(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogatepass")
    return _TEXT.pack(pickle.BINUNICODE, len(raw)) + raw


class _Memo:
    """Memo of the pickle: names of files, classes and names of fields, pushed once at the beginning."""

    def __init__(self) -> None:
        self._entries: dict[bytes, int] = {}
        self._size = 0

    def reference(self, entry: bytes) -> bytes:
        """Return the opcode that pushes the same value as the opcode ``entry``, from the memo."""
        if entry not in self._entries:
            self._entries[entry] = self.reserve(1)
        index = self._entries[entry]
        return b"h" + bytes([index]) if index < 256 else b"j" + _U32.pack(index)

    def reserve(self, count: int) -> int:
        """Reserve ``count`` indexes of the memo and return the first."""
        self._size += count
        return self._size - count

    def head(self) -> Iterator[bytes]:
        """Return the opcodes that fill the memo, but for the names of the files."""
        for entry, index in self._entries.items():
            yield entry + _put(index) + _POP


_PROTO, _POP = b"\x80\x03", b"0"
_U32, _I32, _I64, _TEXT = struct.Struct("<I"), struct.Struct("<i"), struct.Struct("<q"), struct.Struct("<cI")


def _put(index: int) -> bytes:
    return b"r" + _U32.pack(index)


@dataclass(frozen=True, slots=True)
class _Shared:
    """An opcode that pushes a class or the name of a field: the memo holds its value."""

    entry: bytes


_Parsed: TypeAlias = "tuple[bytes | _Shared | Hole, ...]"


def _parsed(instance: object, *holes: Hole) -> _Parsed:
    """Return the pickle of ``instance``, cut at its holes and at the values that the memo holds.

    Raises:
        NotImplementedError: not each of ``holes`` occurs once.
    """
    data = _plain(instance) + b"."
    found: list[bytes | _Shared | Hole] = []
    operations = [(opcode.name, value, at) for opcode, value, at in pickletools.genops(data)]
    for (name, value, at), (_, _, stop) in itertools.pairwise(operations):
        if "PUT" in name or "GET" in name or name == "MEMOIZE":
            raise NotImplementedError("this Python pickles with a memo where it was told not to")
        if isinstance(value, str | int) and value in holes:
            found.append(value)
        elif name in ("GLOBAL", "BINUNICODE"):
            found.append(_Shared(data[at:stop]))
        elif found and isinstance(found[-1], bytes):
            found[-1] += data[at:stop]
        else:
            found.append(data[at:stop])
    if sorted(str(part) for part in found if isinstance(part, str | int)) != sorted(map(str, holes)):
        raise NotImplementedError(
            f"this torch pickles a {type(instance).__name__} without a field that it had, or twice"
        )
    return tuple(found)


def _tokens(parsed: _Parsed, memo: _Memo) -> list[bytes | Hole]:
    """Return opcodes and holes in their order, with references to ``memo`` for shared values."""
    found: list[bytes | Hole] = []
    opcodes = b""
    for part in parsed:
        if isinstance(part, _Shared):
            opcodes += memo.reference(part.entry)
        elif isinstance(part, bytes):
            opcodes += part
        else:
            found += [opcodes, part]
            opcodes = b""
    return [*found, opcodes]


_PARTS: list[Any] = [f"\0{number}" for number in range(5)]


@functools.cache
def _parsed_whole() -> _Parsed:
    described, paths, places, checkpoint_id, save_id = _PARTS
    meta = StorageMeta(checkpoint_id=checkpoint_id, save_id=save_id)
    whole = Metadata(state_dict_metadata=described, planner_data=paths, storage_data=places, storage_meta=meta)
    return _parsed(whole, *_PARTS)


def _whole(memo: _Memo) -> list[bytes]:
    """Return the opcodes before, between and after the parts of ``Metadata``."""
    tokens = _tokens(_parsed_whole(), memo)
    if tokens[1::2] != _PARTS:
        raise NotImplementedError("this torch pickles the parts of Metadata in another order")
    *opcodes, last = (token for token in tokens if isinstance(token, bytes))
    return [*opcodes, last + b"."]


@functools.cache
def _parsed_place() -> _Parsed:
    return _parsed(StorageInfo(_FILE, _AT, _LENGTH), _FILE, _AT, _LENGTH)


@functools.cache
def _parsed_chunk(dims: int) -> _Parsed:
    begins, sides = [_offset(dim) for dim in range(dims)], [_side(dim) for dim in range(dims)]
    return _parsed(ChunkStorageMetadata(torch.Size(begins), torch.Size(sides)), *begins, *sides)


@functools.cache
def _parsed_index(dims: int) -> _Parsed:
    begins = [_offset(dim) for dim in range(dims)]
    return _parsed(MetadataIndex(_NAME, torch.Size(begins), _HINT), _NAME, *begins, _HINT)


@functools.cache
def _parsed_object() -> tuple[_Parsed, _Parsed]:
    """Return the storage metadata of an object, and its ``MetadataIndex``."""
    return _parsed(BytesStorageMetadata()), _parsed(MetadataIndex(_NAME), _NAME)


@functools.cache
def _parsed_tensor(dtype: str, dims: int) -> _Parsed:
    sides = [_side(dim) for dim in range(dims)]
    chunks: list[Any] = [_CHUNKS, _END]  # a list of two chunks is pickled as a longer one
    tensor = TensorStorageMetadata(TensorProperties(dtype=DTYPES[dtype]), torch.Size(sides), chunks)
    return _parsed(tensor, *sides, *chunks)


class _EntryTemplate:
    """Opcodes of one kind of entry, all of one length. Numpy fills a hole of all entries at once, from a column."""

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
        """Return ``count`` entries; a hole without a column stays 0."""
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
    """A :class:`_EntryTemplate` for each kind of entry that a table has."""

    def __init__(self, memo: _Memo, table: MetadataTable) -> None:
        longest = max((side for size in table.sizes for side in size), default=0)
        furthest = int(table.places.max(initial=0))
        dims_of = {len(size) for size in table.sizes}
        wide: set[Hole] = {hole(dim) for hole in (_offset, _side) for dim in range(64) if longest >= 1 << 31}
        wide |= {_AT, _LENGTH} if furthest >= 1 << 31 else set()
        widths = frozenset(wide)
        place = _tokens(_parsed_place(), memo)
        self.chunk: dict[int, _EntryTemplate] = {}
        """By number of dimensions: ``ChunkStorageMetadata`` of a shard."""
        self.place: dict[int, _EntryTemplate] = {}
        """By number of dimensions: index and place of a shard, an entry of ``storage_data``."""
        for dims in dims_of:
            self.chunk[dims] = _EntryTemplate(_tokens(_parsed_chunk(dims), memo), widths)
            self.place[dims] = _EntryTemplate([*_tokens(_parsed_index(dims), memo), *place], widths)
        self.tensor = {
            kind: _tokens(_parsed_tensor(*kind), memo)
            for kind in {(dtype, len(size)) for dtype, size in zip(table.dtypes, table.sizes, strict=True)}
        }
        """By dtype and number of dimensions: ``TensorStorageMetadata``, without its chunks."""
        described, index = _parsed_object()
        self.object_place = _EntryTemplate([*_tokens(index, memo), *place], frozenset((_AT, _LENGTH)))
        """Index and place of an object, an entry of ``storage_data``."""
        (self.an_object,) = (token for token in _tokens(described, memo) if isinstance(token, bytes))
        """``BytesStorageMetadata``, the same for every object."""


# -- the entries ------------------------------------------------------------------------------------


def _key(name: str, index: int) -> bytes:
    """Return the opcodes that push a name as a key and store it in the memo at ``index``."""
    return _text(name) + _put(index)


def _ordered(entries: Sequence[bytes], names: Sequence[str], paths: Mapping[str, object]) -> list[bytes]:
    """Return the entries of ``names`` in the order of ``paths``, the order of the state."""
    entry_of = dict(zip(names, entries, strict=True))
    return [entry_of.pop(name) for name in paths if name in entry_of] + list(entry_of.values())


def _batched(entries: Sequence[bytes]) -> Iterator[bytes]:
    """Return the entries of a dict, with a SETITEMS after each batch."""
    for batch in range(0, len(entries), _NAMES_AT_ONCE):
        yield b"("
        yield from entries[batch : batch + _NAMES_AT_ONCE]
        yield b"u"


def _tensors(table: MetadataTable, stencils: _Stencils, *, files: int, names: int) -> tuple[list[bytes], list[bytes]]:
    """Return the entries of all tensors in ``state_dict_metadata``, and of all shards in ``storage_data``."""
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


def _tensor(table: MetadataTable, stencils: _Stencils, name: int, index: int, chunks: memoryview) -> bytes:
    size = table.sizes[name]
    values: dict[Hole, bytes | memoryview] = {_side(dim): _number(side) for dim, side in enumerate(size)}
    values |= {_CHUNKS: chunks, _END: b""}
    tokens = stencils.tensor[table.dtypes[name], len(size)]
    filled = (token if isinstance(token, bytes) else values[token] for token in tokens)
    return b"".join((_key(table.names[name], index), *filled))


def _batches(table: MetadataTable, lengths: IntArray) -> Iterator[tuple[int, IntArray]]:
    """Yield (number of dimensions, names), each for a bounded number of shards."""
    dims_of = np.array([len(size) for size in table.sizes], np.int64)
    for dims in np.unique(dims_of).tolist():
        members = np.flatnonzero(dims_of == dims)
        batch = np.cumsum(lengths[members]) // _ROWS_AT_ONCE
        for group in np.split(members, np.flatnonzero(np.diff(batch)) + 1):
            yield dims, group
