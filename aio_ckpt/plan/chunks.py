"""Chunks of an image: their size, their cuts, and what is summed and patched in each. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from aio_ckpt.config import LEAST_BUDGET_BYTES
from aio_ckpt.format.constants import BLOCK_BYTES, align_up
from aio_ckpt.plan.tensor_item import TensorItem

_CHUNK_BYTES_MIN = 4 << 20
_CHUNK_BYTES_FEW = 32 << 20
_CHUNK_BYTES_MAX = 64 << 20
_FEW_CHUNKS = 8
"""Number of chunks of a small image, so that copies and writes of several chunks overlap."""
_MANY_CHUNKS = 128
"""Most chunks of an image; beyond, chunks get larger. Each chunk costs 0.5 ms of CPU and GIL hand-offs."""
_WAVE_CHUNKS = 8
"""Chunks that fit the budget if the image is larger: some are written while one is summed and one is captured."""


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
    """Position among the chunks of the whole image, those of objects included."""
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


NO_SUMS = _plan_sums((), (), (), 0)
"""Sums of a chunk of objects alone."""
