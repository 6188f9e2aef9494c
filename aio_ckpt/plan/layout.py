"""Layout of one rank's data files: items, pieces and chunks, and the offset of each. Pure.

Sizes and offsets are bytes. *Image* offsets count from the start of the image, *item* offsets from the start of one
item inside it. An image holds the frozen file, if the rank has one, and then the main data file.

Borrowed fact: DCP accepts gaps between items (``_StorageInfo`` holds offset and length of each).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from aio_ckpt.config import LEAST_BUDGET_BYTES
from aio_ckpt.format.constants import BLOCK_BYTES, PAGE_BYTES, RAW_ALIGN_BYTES, Envelope, TensorSpec, align_up

_PAGE_ALIGNED_BYTES = 1 << 20
"""Least raw bytes of an item that begins at a page."""
_CHUNK_BYTES_MIN = 4 << 20
_CHUNK_BYTES_FEW = 32 << 20
_CHUNK_BYTES_MAX = 64 << 20
LEAST_FROZEN_BYTES = 1 << 20
"""Least raw bytes of a frozen file. For fewer, a file more costs more than it saves."""
_FEW_CHUNKS = 8
"""Number of chunks of a small image, so that copies and writes of several chunks overlap."""
_MANY_CHUNKS = 128
"""Most chunks of an image; beyond, chunks get larger. Each chunk costs 0.5 ms of CPU and GIL hand-offs."""
_WAVE_CHUNKS = 8
"""Chunks that fit the budget if the image is larger: some are written while one is summed and one is captured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorItem:
    """Item of a tensor, as laid out in the image."""

    leaf: int
    """Position in the flat state of the first leaf that the item stores. Tied leaves share the item."""
    fqns: tuple[str, ...]
    """Every name of the item."""
    offsets: tuple[int, ...]
    """Start of the shard in the global tensor, in elements per dimension."""
    spec: TensorSpec
    """dtype, local shape, stored stride."""
    envelope: Envelope
    """Header and trailer."""
    item_offset: int
    """Image offset of the header."""

    @property
    def placement(self) -> Placement:
        """What places the item in another layout."""
        return Placement(self.leaf, self.fqns, self.offsets, self.spec, self.envelope)

    @property
    def raw_offset(self) -> int:
        """Image offset of the raw bytes."""
        return self.item_offset + len(self.envelope.header)

    @property
    def raw_bytes(self) -> int:
        """Length of the raw bytes."""
        return self.envelope.raw_bytes

    @property
    def trailer_offset(self) -> int:
        """Image offset of the trailer."""
        return self.raw_offset + self.raw_bytes


@dataclass(frozen=True, slots=True)
class Piece:
    """Raw bytes of one item that lie in one chunk."""

    item: int
    """Index into ``ImageLayout.items``."""
    raw_start: int
    """First byte, counted from the start of the item's raw bytes."""
    image_start: int
    """Image offset of the first byte."""
    nbytes: int
    """Length, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChunkSums:
    """Checksums of one chunk: the bytes to sum and the places of the sums. In arrays, to save a Python step an item."""

    spans: tuple[tuple[int, int], ...]
    """(start, stop) in the chunk of the raw bytes of each item that has at most one block and lies wholly in it."""
    span_items: npt.NDArray[np.intp]
    """Item of each span."""
    parts: tuple[Piece, ...]
    """All other pieces."""
    crc_patches: npt.NDArray[np.intp]
    """Items whose trailer lies in the chunk."""
    patch_offsets: npt.NDArray[np.intp]
    """Positions in the chunk of their CRC32 fields, byte by byte: shape (items, fields, 4)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chunk:
    """Part of the image that one write moves, from ``start`` to ``stop``."""

    index: int
    """Position in ``ImageLayout.chunks``."""
    start: int
    """Image offset. In its file, the chunk begins at a multiple of the chunk size."""
    stop: int
    """Image offset after the last byte."""
    pieces: tuple[Piece, ...]
    """Raw bytes inside it, ascending."""
    constants: tuple[tuple[int, bytes], ...]
    """(image offset, bytes) of the headers and trailers inside it, ascending."""
    sums: ChunkSums
    """Checksums of the chunk. A trailer inside it is filled once its item is summed, so the chunk is written then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLayout:
    """Places of one rank's tensors in its image.

    Objects follow at ``tensor_bytes``. Their length changes from save to save, so the layout does not hold them.
    No header or trailer straddles a multiple of ``chunk_bytes`` of its file.
    """

    items: tuple[TensorItem, ...]
    """Items, ascending by offset."""
    chunk_bytes: int
    """Size of every chunk but the last, a multiple of the page."""
    chunks: tuple[Chunk, ...]
    """Chunks that hold tensor bytes; the last ends at ``tensor_bytes``."""
    tensor_bytes: int
    """Offset at which the tensors end and the objects begin."""
    raw_bytes: int
    """Raw bytes of all items together."""
    file_alignment: int = PAGE_BYTES
    """Number of bytes of which the length of the file is a multiple."""
    frozen_items: int = 0
    """Number of items at the beginning that the frozen file holds."""
    main_start: int = 0
    """Image offset at which the main data file begins, a multiple of the page. The frozen file is before it."""

    @property
    def frozen_chunks(self) -> int:
        """Number of chunks of the frozen file."""
        return -(-self.main_start // self.chunk_bytes)

    def has_frozen_file_of(self, other: ImageLayout) -> bool:
        """Return whether the frozen files of both layouts are laid out alike."""
        count = self.frozen_items
        return self is other or (
            (count, self.chunk_bytes) == (other.frozen_items, other.chunk_bytes)
            and self.items[:count] == other.items[:count]
        )

    def chunk_at(self, image_offset: int) -> int:
        """Return the index of the chunk that holds the byte at ``image_offset``."""
        number = self.file_offset(image_offset) // self.chunk_bytes
        return number if image_offset < self.main_start else self.frozen_chunks + number

    def file_offset(self, image_offset: int) -> int:
        """Return the offset in its file of what lies at ``image_offset``."""
        return image_offset if image_offset < self.main_start else image_offset - self.main_start


@dataclass(frozen=True, slots=True)
class Placement:
    """Item that is to be placed in an image."""

    leaf: int
    """First leaf that the item stores."""
    fqns: tuple[str, ...]
    """Every name of the item."""
    offsets: tuple[int, ...]
    """Start of the shard in the global tensor, in elements per dimension."""
    spec: TensorSpec
    """dtype, local shape, stored stride."""
    envelope: Envelope
    """Envelope, rendered for ``spec``."""


def chunk_bytes_for(raw_bytes: int) -> int:
    """Return the chunk size for an image of ``raw_bytes``: a multiple of 1 MiB."""
    wanted = max(min(raw_bytes // _FEW_CHUNKS, _CHUNK_BYTES_FEW), raw_bytes // _MANY_CHUNKS, _CHUNK_BYTES_MIN)
    return min(align_up(wanted, 1 << 20), _CHUNK_BYTES_MAX)


def chunk_bytes_within(raw_bytes: int, budget_bytes: int) -> int:
    """Return :func:`chunk_bytes_for`, or less if the budget then holds too few chunks.

    The budget holds two chunks at least, and more if the image is saved in waves.
    """
    most = budget_bytes // (_WAVE_CHUNKS if raw_bytes > budget_bytes else 2)
    # No chunk cuts a header or trailer: these are far shorter than the shortest chunk.
    return min(chunk_bytes_for(raw_bytes), max(most - most % LEAST_BUDGET_BYTES, LEAST_BUDGET_BYTES))


def lay_out(
    placements: Sequence[Placement], *, budget_bytes: int, chunk_bytes: int | None = None, frozen: int = 0
) -> ImageLayout:
    """Place one item after the other.

    Raw bytes are aligned to 64 bytes, those of a mebibyte or more to a page. If a header or trailer would straddle a
    chunk boundary, the item is moved behind the boundary.

    Args:
        budget_bytes: memory for the image.
        chunk_bytes: chunk size of the layout that ``placements`` are a part of; None to choose it. With equal chunks,
            no item of the part begins later than in the whole.
        frozen: number of placements at the beginning that go to the frozen file. If they are short, there is none.
    """
    raw_bytes = sum(placement.envelope.raw_bytes for placement in placements)
    chunk_bytes = chunk_bytes or chunk_bytes_within(raw_bytes, budget_bytes)
    if sum(placement.envelope.raw_bytes for placement in placements[:frozen]) < LEAST_FROZEN_BYTES:
        frozen = 0
    frozen_items, end = _place_all(placements[:frozen], chunk_bytes)
    main_start = align_up(end, PAGE_BYTES)
    main_items, main_bytes = _place_all(placements[frozen:], chunk_bytes)
    items = (*frozen_items, *(replace(item, item_offset=main_start + item.item_offset) for item in main_items))
    frozen_chunks = cut_chunks(frozen_items, chunk_bytes, main_start)
    main_chunks = cut_chunks(
        items, chunk_bytes, main_start + main_bytes, start=main_start, first=frozen, index=len(frozen_chunks)
    )
    return ImageLayout(
        items=items,
        chunk_bytes=chunk_bytes,
        chunks=(*frozen_chunks, *main_chunks),
        tensor_bytes=main_start + main_bytes,
        raw_bytes=raw_bytes,
        frozen_items=frozen,
        main_start=main_start,
    )


def _place_all(placements: Sequence[Placement], chunk_bytes: int) -> tuple[list[TensorItem], int]:
    """Return the items of one file, and where they end."""
    items: list[TensorItem] = []
    end = 0
    for placement in placements:
        items.append(_place(placement, end, chunk_bytes))
        end = items[-1].item_offset + items[-1].envelope.item_bytes
    return items, end


def _place(placement: Placement, cursor: int, chunk_bytes: int) -> TensorItem:
    rendered = placement.envelope
    header_bytes, trailer_bytes = len(rendered.header), len(rendered.trailer)
    alignment = PAGE_BYTES if rendered.raw_bytes >= _PAGE_ALIGNED_BYTES else RAW_ALIGN_BYTES
    start = align_up(cursor + header_bytes, alignment)
    while _straddles(start - header_bytes, start, chunk_bytes) or _straddles(
        start + rendered.raw_bytes, start + rendered.raw_bytes + trailer_bytes, chunk_bytes
    ):
        start += alignment
    return TensorItem(
        leaf=placement.leaf,
        fqns=placement.fqns,
        offsets=placement.offsets,
        spec=placement.spec,
        envelope=rendered,
        item_offset=start - header_bytes,
    )


def _straddles(start: int, stop: int, boundary: int) -> bool:
    return start // boundary != (stop - 1) // boundary


def cut_chunks(
    items: Sequence[TensorItem], chunk_bytes: int, stop: int, *, start: int = 0, first: int = 0, index: int = 0
) -> tuple[Chunk, ...]:
    """Divide the tensors of one file at the multiples of ``chunk_bytes``. Bytes after them, up to ``stop``, are zeros.

    ``start``, ``stop``: where the file begins and ends in the image. ``first``: index of its first item in ``items``.
    ``index``: that of its first chunk.
    """
    count = -(-(stop - start) // chunk_bytes)
    pieces: list[list[Piece]] = [[] for _ in range(count)]
    patched: list[list[int]] = [[] for _ in range(count)]
    constants: list[list[tuple[int, bytes]]] = [[] for _ in range(count)]
    position = start
    pending: list[bytes] = []
    for item_index, item in enumerate(items[first:], first):
        pending += [bytes(item.item_offset - position - sum(map(len, pending))), item.envelope.header]
        _cut_bytes(b"".join(pending), position, chunk_bytes, start, constants)
        cursor, raw_stop = item.raw_offset, item.trailer_offset
        while cursor < raw_stop:
            number = (cursor - start) // chunk_bytes
            nbytes = min(raw_stop, start + (number + 1) * chunk_bytes) - cursor
            pieces[number].append(Piece(item_index, cursor - item.raw_offset, cursor, nbytes))
            cursor += nbytes
        if item.envelope.crc_offsets:
            patched[(raw_stop - start) // chunk_bytes].append(item_index)
        position, pending = raw_stop, [item.envelope.trailer]
    pending.append(bytes(stop - position - sum(map(len, pending))))
    _cut_bytes(b"".join(pending), position, chunk_bytes, start, constants)
    starts = range(start, stop, chunk_bytes)
    return tuple(
        Chunk(
            index=index + number,
            start=chunk_start,
            stop=min(chunk_start + chunk_bytes, stop),
            pieces=tuple(pieces[number]),
            constants=tuple(constants[number]),
            sums=_plan_sums(items, pieces[number], patched[number], chunk_start),
        )
        for number, chunk_start in enumerate(starts)
    )


def _plan_sums(
    items: Sequence[TensorItem], pieces: Sequence[Piece], patched: Sequence[int], chunk_start: int
) -> ChunkSums:
    def is_whole(piece: Piece) -> bool:
        return piece.nbytes == items[piece.item].raw_bytes <= BLOCK_BYTES

    wholes = [piece for piece in pieces if is_whole(piece)]
    fields = [
        [items[index].trailer_offset - chunk_start + offset for offset in items[index].envelope.crc_offsets]
        for index in patched
    ]
    return ChunkSums(
        spans=tuple(
            (piece.image_start - chunk_start, piece.image_start - chunk_start + piece.nbytes) for piece in wholes
        ),
        span_items=np.array([piece.item for piece in wholes], dtype=np.intp),
        parts=tuple(piece for piece in pieces if not is_whole(piece)),
        crc_patches=np.array(patched, dtype=np.intp),
        patch_offsets=np.array(fields, dtype=np.intp).reshape(len(patched), len(fields[0]) if fields else 0, 1)
        + np.arange(4),
    )


def _cut_bytes(data: bytes, position: int, chunk_bytes: int, start: int, into: list[list[tuple[int, bytes]]]) -> None:
    while data:
        number = (position - start) // chunk_bytes
        room = start + (number + 1) * chunk_bytes - position
        into[number].append((position, data[:room]))
        position, data = position + room, data[room:]


def file_chunks(layout: ImageLayout, image_bytes: int) -> tuple[Chunk, ...]:
    """Return the chunks of the whole image, with the objects after the tensors.

    The last chunk of the main data file is extended over the objects. If they are longer, further chunks follow.
    """
    chunks = list(layout.chunks)
    size = layout.chunk_bytes
    if len(chunks) > layout.frozen_chunks:
        last = chunks[-1]
        chunks[-1] = replace(last, stop=min(last.start + size, image_bytes))
    main_chunks = len(chunks) - layout.frozen_chunks
    for start in range(layout.main_start + main_chunks * size, image_bytes, size):
        stop = min(start + size, image_bytes)
        chunks.append(Chunk(index=len(chunks), start=start, stop=stop, pieces=(), constants=(), sums=_NO_SUMS))
    return tuple(chunks)


_NO_SUMS = _plan_sums((), (), (), 0)
