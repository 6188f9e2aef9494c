"""Read plan: which bytes of which file go where, and how they are proven. Touches no file.

Every tensor is cut into *pieces* (a block of raw bytes with its CRC32 and its destination); pieces that lie close to
each other become one *segment*, which one read moves. A piece is copied straight to its target where the target is
host memory laid out like the stored bytes; all else (a slice, another layout, a device) goes by a :class:`Landing`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import msgspec
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from aio_ckpt.catalog import Item, StoredObject
from aio_ckpt.envelope import is_dense
from aio_ckpt.errors import CorruptCheckpointError
from aio_ckpt.items import BLOCK_BYTES, PAGE_BYTES, align_up

__all__ = ["Landing", "Piece", "ReadPlan", "Segment", "bytes_of", "cut_segments"]

_GAP_BYTES = 64 << 10
"""Reading over so small a gap costs less than another read."""

# Two pages below, so that a segment whose ends were moved to pages still fits a buffer of whole huge pages.
_SEGMENT_BYTES_MIN = (4 << 20) - 2 * PAGE_BYTES
_SEGMENT_BYTES_MAX = (16 << 20) - 2 * PAGE_BYTES
_SEGMENTS_A_READER = 8
"""Wanted at least: fresh buffers are not free to touch, so a small load gets small ones."""


@dataclass(slots=True, eq=False, repr=False, kw_only=True)
class Landing:
    """Where pieces go that cannot be copied straight to their target, or whose sum covers all of them together.

    Used by the threads that fill it in any order; ``pieces_left`` belongs to the loop, which alone calls
    :meth:`finish`, after the last piece.
    """

    label: str
    """What lands here, for messages."""
    start: int
    """File offset of the first byte that lands."""
    nbytes: int
    """Length of what lands, gaps between pieces included."""
    address: int = 0
    """Host memory for it; 0: scratch memory, allocated by :meth:`open`."""
    device: torch.Tensor | None = None
    """Instead: the target's own bytes on a device."""
    crc32: int | None = None
    """CRC32 of everything that lands, if there is one; then the pieces have none of their own."""
    then: Callable[[torch.Tensor], None] | None = None
    """Is given the scratch bytes when they are complete."""
    sums: list[tuple[int, int]] = field(default_factory=list)
    """(CRC32, length) of each piece, if ``crc32``."""
    pieces_left: int = 0
    """Pieces that have not landed."""
    scratch: torch.Tensor | None = None
    """Allocated with the first piece, dropped with the last, so that few exist at once."""

    def open(self) -> None:
        """Make room for the first piece."""
        if not self.address and self.device is None and self.scratch is None:
            self.scratch = torch.empty(self.nbytes, dtype=torch.uint8)

    def base(self) -> int:
        """Host address of ``start``."""
        return self.address if self.scratch is None else self.scratch.data_ptr()

    def finish(self, combine: Callable[[int, int, int], int] | None) -> bool:
        """Prove the whole (by ``crc32_combine``, if given) and pass it on; whether there was a sum to prove it by.

        Raises:
            CorruptCheckpointError: the sum does not match; names file and tensor or object.
        """
        is_summed = False
        if combine is not None and self.crc32 is not None:
            total = 0
            for crc, nbytes in self.sums:
                total = combine(total, crc, nbytes)
            if total != self.crc32:
                raise CorruptCheckpointError(f"{self.label} does not match its CRC32")
            is_summed = True
        if self.then is not None and self.scratch is not None:
            self.then(self.scratch)
        self.scratch = None
        return is_summed


class Piece(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Bytes of one file that are copied and proven together. A msgspec struct for its price, as ``Item``."""

    start: int
    """File offset."""
    nbytes: int
    """Length."""
    crc32: int
    """CRC32 of them; -1 if they have none of their own."""
    address: int
    """Host memory they are copied to; 0 if they go to the landing."""
    label: str
    """What they are part of, for messages."""
    landing: Landing | None
    """Whose piece it is, if any."""
    number: int
    """Position in ``landing.sums``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One read."""

    file: str
    """Data file, relative to the checkpoint."""
    start: int
    """File offset, a multiple of the page (direct I/O)."""
    stop: int
    """File offset; the last page may be cut short by the end of the file."""
    pieces: tuple[Piece, ...]
    """Ascending."""
    target: memoryview | None = None
    """Where the read itself goes, if straight to the tensor; else a bounce buffer, and the pieces are copied."""


@dataclass(slots=True, repr=False, kw_only=True)
class ReadPlan:
    """Collects the pieces of one load."""

    is_direct: Mapping[str, bool]
    """Per file, whether reads must be page-aligned in file and memory (O_DIRECT)."""
    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    """By file."""
    straight: list[Segment] = field(default_factory=list)
    """Reads that need no bounce buffer."""
    filled: list[torch.Tensor] = field(default_factory=list)
    """Host targets that are written behind torch's back."""

    def add_tensor(self, items: Sequence[Item], offsets: Sequence[int], target: torch.Tensor) -> None:
        """Fill ``target``, the box of the global tensor that begins at ``offsets``, from the shards that cover it.

        Raises:
            CorruptCheckpointError: the shards leave a hole in the box.
        """
        shape = target.shape
        if 0 in shape:
            return
        for item in items:
            if item.shape == shape and item.offsets == tuple(offsets):
                self._add_whole(item, target)
                return
        found = create_read_items_for_chunk_list(
            items[0].name, _dcp_metadata(items), [ChunkStorageMetadata(torch.Size(offsets), shape)]
        )
        covered = 0
        for part in found:
            index = part.storage_index.index
            if 0 in part.lengths or index is None:
                continue
            covered += math.prod(part.lengths)
            view = target.detach()
            for dim, (start, length) in enumerate(zip(part.dest_offsets, part.lengths, strict=True)):
                view = view.narrow(dim, start, length)
            self._add_box(items[index], part.storage_offsets, view)
        if covered != math.prod(shape):
            raise CorruptCheckpointError(
                f"{items[0].name!r}: the stored shards cover {covered} of {math.prod(shape)} elements"
            )

    def add_whole(self, pairs: Iterable[tuple[Item, torch.Tensor]]) -> None:
        """Fill plain host tensors, each from an item of ours (dense) that has its dtype and shape.

        The hot loop: 0.7 us a tensor.
        """
        for item, target in pairs:
            if (
                len(item.sums) == 1
                and target.stride() == item.stride
                and not (item.dtype.is_complex or target.is_neg())
            ):
                pieces = self.pieces.get(item.file)
                if pieces is None:
                    pieces = self.pieces[item.file] = []
                pieces.append(
                    Piece(item.raw_offset, item.raw_bytes, item.sums[0], target.data_ptr(), item.name, None, 0)
                )
                self.filled.append(target)
            elif item.raw_bytes:
                self._add_whole(item, target)

    def add_object(self, stored: StoredObject, then: Callable[[bytes], None]) -> None:
        """Give the bytes of an object to ``then``, once they are proven."""
        label = f"{stored.file}: object {stored.name!r}"
        if not stored.nbytes:
            raise CorruptCheckpointError(f"{label} has no bytes")
        landing = Landing(
            label=label,
            start=stored.offset,
            nbytes=stored.nbytes,
            crc32=stored.crc32,
            then=lambda scratch: then(scratch.numpy().tobytes()),
        )
        self._add_landing(stored.file, landing, [(0, stored.nbytes)], BLOCK_BYTES, ())

    def segments(self, readers: int) -> list[Segment]:
        """All reads: file by file, ascending. ``readers`` of them will be in flight."""
        total = sum(piece.nbytes for pieces in self.pieces.values() for piece in pieces)
        size = min(max(total // (_SEGMENTS_A_READER * readers), _SEGMENT_BYTES_MIN), _SEGMENT_BYTES_MAX)
        found = [segment for file, pieces in self.pieces.items() for segment in cut_segments(file, pieces, size)]
        return sorted([*found, *self.straight], key=lambda segment: (segment.file, segment.start))

    # -- one item -----------------------------------------------------------------------------------

    def _add_whole(self, item: Item, target: torch.Tensor) -> None:
        is_same = (
            target.stride() == item.stride
            and (target.is_contiguous() or is_dense(item.shape, item.stride))
            and not (item.storage_offset or target.is_conj() or target.is_neg())
            and item.raw_bytes == target.numel() * item.dtype.itemsize
        )
        if not is_same:
            self._add_box(item, (0,) * len(item.shape), target.detach())
        elif not target.is_cpu:
            self._land_raw(item, device=bytes_of(target))
        else:
            self.filled.append(target)
            self._add_host(item, target)

    def _add_host(self, item: Item, target: torch.Tensor) -> None:
        """Blocks straight to memory: read in place where alignment allows it, else copied."""
        address, block = target.data_ptr(), item.block_bytes
        if not item.sums:
            self._land_raw(item, address=address)
            return
        is_aligned = not (address % PAGE_BYTES or item.raw_offset % PAGE_BYTES)
        in_place = item.raw_bytes // block * block if is_aligned or not self.is_direct[item.file] else 0
        pieces = [
            Piece(item.raw_offset + at, min(block, item.raw_bytes - at), crc, address + at, item.name, None, 0)
            for at, crc in zip(range(0, item.raw_bytes, block), item.sums, strict=True)
        ]
        count = in_place // block
        self._pieces_of(item.file).extend(pieces[count:])
        view = bytes_of(target).numpy().data if count else memoryview(b"")
        step = max(_SEGMENT_BYTES_MAX // block, 1)
        for first in range(0, count, step):
            last = min(first + step, count)
            start, stop = first * block, last * block
            self.straight.append(
                Segment(
                    file=item.file,
                    start=item.raw_offset + start,
                    stop=item.raw_offset + stop,
                    pieces=tuple(pieces[first:last]),
                    target=view[start:stop],
                )
            )

    def _land_raw(self, item: Item, *, address: int = 0, device: torch.Tensor | None = None) -> None:
        if item.raw_bytes:
            landing = Landing(
                label=_label(item),
                start=item.raw_offset,
                nbytes=item.raw_bytes,
                address=address,
                device=device,
                crc32=None if item.sums else item.record_crc32,
            )
            self._add_landing(item.file, landing, [(0, item.raw_bytes)], item.block_bytes, item.sums)

    def _add_box(self, item: Item, start: Sequence[int], view: torch.Tensor) -> None:
        """The box of ``view``'s shape that begins at ``start`` inside the item; only blocks that it touches."""
        runs = _touched_blocks(item, start, view.shape)
        low, high = runs[0][0], runs[-1][1]
        first = item.storage_offset + sum(a * b for a, b in zip(start, item.stride, strict=True))
        is_all = runs == [(0, item.raw_bytes)]
        landing = Landing(
            label=_label(item),
            start=item.raw_offset + low,
            nbytes=high - low,
            crc32=item.record_crc32 if is_all and not item.sums else None,
            then=functools.partial(_copy_box, view, item.dtype, item.stride, first - low // item.dtype.itemsize),
        )
        self._add_landing(item.file, landing, runs, item.block_bytes, item.sums)

    def _add_landing(
        self, file: str, landing: Landing, runs: Iterable[tuple[int, int]], block: int, sums: Sequence[int]
    ) -> None:
        """Cut ``runs`` (ranges of raw bytes; the landing begins where the first one does) into pieces of a block."""
        pieces = self._pieces_of(file)
        base = None
        for low, high in runs:
            base = low if base is None else base
            for at in range(low, high, block):
                crc = sums[at // block] if sums else -1
                start, nbytes = landing.start + at - base, min(block, high - at)
                pieces.append(Piece(start, nbytes, crc, 0, landing.label, landing, landing.pieces_left))
                landing.pieces_left += 1
        if landing.crc32 is not None:
            landing.sums = [(0, 0)] * landing.pieces_left

    def _pieces_of(self, file: str) -> list[Piece]:
        found = self.pieces.get(file)
        if found is None:
            found = self.pieces[file] = []
        return found


def _label(item: Item) -> str:
    return f"{item.file}: tensor {item.name!r}"


def _dcp_metadata(items: Sequence[Item]) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(item.offsets), torch.Size(item.shape)) for item in items]
    # DCP's own box arithmetic reads nothing but the chunks.
    return TensorStorageMetadata(TensorProperties(dtype=items[0].dtype), torch.Size(items[0].shape), chunks)


def _copy_box(view: torch.Tensor, dtype: torch.dtype, stride: Sequence[int], first: int, scratch: torch.Tensor) -> None:
    """Copy a box out of scratch bytes; ``first`` is the element of ``scratch`` where the box begins."""
    typed = torch.empty(0, dtype=dtype).set_(scratch.untyped_storage(), first, view.shape, tuple(stride))
    with torch.no_grad():
        view.copy_(typed)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor, shape ``(nbytes,)``, sharing its memory."""
    nbytes = tensor.numel() * tensor.itemsize
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.detach().untyped_storage(), tensor.storage_offset() * tensor.itemsize, (nbytes,), (1,))


# -- ranges -----------------------------------------------------------------------------------------


def _touched_blocks(item: Item, start: Sequence[int], lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Ranges of raw bytes, whole blocks, ascending and disjoint, that hold the elements of a box (not empty)."""
    size, block = item.dtype.itemsize, item.block_bytes
    first = (item.storage_offset + sum(a * b for a, b in zip(start, item.stride, strict=True))) * size
    dims = sorted(
        ((step * size, length) for step, length in zip(item.stride, lengths, strict=True) if length > 1), reverse=True
    )
    # A stride that is not dense (plain DCP only) may give ranges that do not ascend: those are read as one.
    skip = 2 * block if is_dense(item.shape, item.stride) else item.raw_bytes + 1
    runs: list[tuple[int, int]] = []
    for low, high in _byte_runs(first, dims, size, skip):
        low, high = low // block * block, min(align_up(high, block), item.raw_bytes)
        if runs and low <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(high, runs[-1][1]))
        else:
            runs.append((low, high))
    return runs


def _byte_runs(first: int, dims: Sequence[tuple[int, int]], size: int, skip: int) -> Iterator[tuple[int, int]]:
    """Byte ranges of a box with ``dims`` (byte stride, length), strides descending; gaps below ``skip`` are kept.

    Ranges are at least ``skip`` apart, so there are no more of them than the item has blocks.
    """
    extent = size + sum(step * (length - 1) for step, length in dims)
    if not dims or dims[0][0] < skip:
        yield first, first + extent
        return
    (step, length), inner = dims[0], dims[1:]
    for index in range(length):
        yield from _byte_runs(first + index * step, inner, size, skip)


def cut_segments(file: str, pieces: Iterable[Piece], segment_bytes: int) -> list[Segment]:
    """Group pieces into reads of about ``segment_bytes``: page-aligned, small gaps read over. Never splits a piece."""
    segments: list[Segment] = []
    group: list[Piece] = []
    start = stop = 0
    for piece in sorted(pieces, key=attrgetter("start")):
        end = piece.start + piece.nbytes
        if group and (piece.start - stop > _GAP_BYTES or end - start > segment_bytes):
            segments.append(_segment(file, group, start, stop))
            group = []
        if not group:
            start = stop = piece.start
        group.append(piece)
        stop = max(stop, end)
    if group:
        segments.append(_segment(file, group, start, stop))
    return segments


def _segment(file: str, group: list[Piece], start: int, stop: int) -> Segment:
    aligned = start // PAGE_BYTES * PAGE_BYTES, align_up(stop, PAGE_BYTES)
    return Segment(file=file, start=aligned[0], stop=aligned[1], pieces=tuple(group))
