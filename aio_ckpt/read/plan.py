"""Read plan: which bytes of which file go where, and how they are proven. Touches no file.

Every tensor is cut into pieces (:mod:`aio_ckpt.read.requests`). Where the target is laid out like the stored bytes, a
piece is copied to it once it is proven; all else (a slice, another layout) goes by a landing.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from aio_ckpt._torch import neg_view
from aio_ckpt.errors import CorruptCheckpointError
from aio_ckpt.format.constants import BLOCK_BYTES, PAGE_BYTES, align_up
from aio_ckpt.format.tensor_zip import is_dense
from aio_ckpt.memory.copies import Copies
from aio_ckpt.memory.cuda import copies_by_address, is_host
from aio_ckpt.read.catalog import Catalog, Item, Shards, StoredObject, global_shape
from aio_ckpt.read.match import Match, shard_like
from aio_ckpt.read.requests import SEGMENT_BYTES_MAX, PieceRows, ReadRequest, ReassemblyBuffer, cut_requests
from aio_ckpt.state.tensor_memory import memory_of

__all__ = ["ReadPlan", "ReadRequest", "bytes_of", "covering_bytes", "is_read_by_several", "wanted_bytes"]

_SEGMENT_BYTES_MIN = (3 << 20) + 2 * PAGE_BYTES
"""Three blocks, wherever they begin in a page."""
_BOX_BYTES = 8 << 20
"""Of an item, that one part of a box is cut from: one read brings it, and it is copied out of that while others are
read. Boxes of 128 MiB in one part took 1.1 to 1.6 times as long."""
_SEGMENTS_A_READER = 8
"""Wanted at least: fresh buffers are not free to touch, so a small load gets small ones."""


_SHARING_PAYS_READERS = 1.5
"""Readers a byte from which on the page cache, which serves all but the first, beats O_DIRECT for each. 2 GiB on 32
cores and a disk of 2.2 GB/s: two readers take 0.60 to 0.63 of the time, four 0.34 to 0.38
(``bench/results/2-cores/load-shared.txt``); where two cores read 1 GiB at 3.5 GB/s, 0.95 to 1.4 of it."""


@dataclass(slots=True, repr=False, kw_only=True)
class ReadPlan:
    """Collects the pieces of one load."""

    pieces: dict[str, PieceRows] = field(default_factory=dict)
    """By file."""
    filled: list[torch.Tensor] = field(default_factory=list)
    """Targets that are written behind torch's back."""
    devices: list[torch.device] = field(default_factory=list)
    """Where targets are that the host cannot write to."""

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
            if view.shape == items[index].shape:
                self._add_whole(items[index], view)
            else:
                self._add_box(items[index], part.storage_offsets, view)
        if covered != math.prod(shape):
            raise CorruptCheckpointError(
                f"{items[0].name!r}: the stored shards cover {covered} of {math.prod(shape)} elements"
            )

    def add_whole(self, targets: Iterable[tuple[Item, torch.Tensor, int]]) -> None:
        """Fill host tensors, each of the same bytes as its item, at the address given with it: 0.5 us each."""
        fill, rows = self.filled.append, {}
        for item, target, address in targets:
            fill(target)
            if item.file not in rows:
                rows[item.file] = self._rows_of(item.file)
            if len(item.sums) == 1:
                rows[item.file].rows.append(
                    (item.raw_offset, item.raw_bytes, item.sums[0], address, 0, item.name, None, 0)
                )
            else:
                rows[item.file].add_blocks(item, address, 0)

    def add_part(self, item: Item, start: Sequence[int], target: torch.Tensor) -> None:
        """Fill ``target``, of any dtype, from the box of its shape that begins at ``start`` inside ``item``."""
        if 0 in target.shape:
            return
        if type(target) is torch.Tensor and (target.dtype, target.shape) == (item.dtype, item.shape):
            self._add_whole(item, target)
        else:
            self._add_box(item, start, target)

    def add_object(self, stored: StoredObject, then: Callable[[bytes], None]) -> None:
        """Give the bytes of an object to ``then``, once they are proven."""
        label = f"{stored.file}: object {stored.name!r}"
        landing = ReassemblyBuffer(
            label=label,
            start=stored.offset,
            nbytes=stored.nbytes,
            crc32=stored.crc32,
            then=lambda scratch, _: then(scratch.numpy().tobytes()),
        )
        self._add_landing(stored.file, landing, [(0, stored.nbytes)], BLOCK_BYTES, ())

    @property
    def total_bytes(self) -> int:
        """Of all blocks that are wanted."""
        return sum(rows.total_bytes() for rows in self.pieces.values())

    def segments(self, readers: int) -> list[ReadRequest]:
        """All reads: file by file, ascending. ``readers`` of them will be in flight."""
        size = min(max(self.total_bytes // (_SEGMENTS_A_READER * readers), _SEGMENT_BYTES_MIN), SEGMENT_BYTES_MAX)
        found: list[ReadRequest] = []
        for file, rows in self.pieces.items():
            found += cut_requests(file, rows.ascending(), size)
        return sorted(found, key=lambda segment: (segment.file, segment.start))

    # -- one item -----------------------------------------------------------------------------------

    def _add_whole(self, item: Item, target: torch.Tensor) -> None:
        device = self._number_of(target)
        if not _is_laid_out_like(item, target) or (device and not copies_by_address(target.device)):
            self._add_box(item, (0,) * len(item.shape), target.detach())
            return
        self.filled.append(target)
        if item.sums:
            self._rows_of(item.file).add_blocks(item, target.data_ptr(), device)
        else:
            self._land_raw(item, target, device)

    def _land_raw(self, item: Item, target: torch.Tensor, device: int) -> None:
        """Blocks that are copied to memory and have one sum together, or none."""
        if item.raw_bytes:
            landing = ReassemblyBuffer(
                label=_label(item), start=item.raw_offset, nbytes=item.raw_bytes, crc32=item.record_crc32
            )
            runs = [(0, item.raw_bytes)]
            self._add_landing(item.file, landing, runs, item.block_bytes, (), target.data_ptr(), device)

    def _add_box(self, item: Item, start: Sequence[int], view: torch.Tensor) -> None:
        """The box of ``view``'s shape that begins at ``start`` inside the item."""
        if item.sums or item.record_crc32 is None:  # else one sum proves all of it together
            for part_start, part in _parts(item, start, view):
                self._land_box(item, part_start, part)
        else:
            self._land_box(item, start, view)

    def _land_box(self, item: Item, start: Sequence[int], view: torch.Tensor) -> None:
        """Only blocks that it touches."""
        runs = _touched_blocks(item, start, view.shape)
        low, high = runs[0][0], runs[-1][1]
        first = item.storage_offset + sum(a * b for a, b in zip(start, item.stride, strict=True))
        is_all = runs == [(0, item.raw_bytes)]
        landing = ReassemblyBuffer(
            label=_label(item),
            start=item.raw_offset + low,
            nbytes=high - low,
            crc32=item.record_crc32 if is_all and not item.sums else None,
            then=functools.partial(_copy_box, view, item, first - low // item.dtype.itemsize),
            device=self._number_of(view),
        )
        self._add_landing(item.file, landing, runs, item.block_bytes, item.sums)

    def _add_landing(
        self,
        file: str,
        landing: ReassemblyBuffer,
        runs: Iterable[tuple[int, int]],
        block: int,
        sums: Sequence[int],
        address: int = 0,
        device: int = 0,
    ) -> None:
        """Cut ``runs`` (ranges of raw bytes; the landing begins where the first one does) into pieces of a block."""
        rows = self._rows_of(file).rows
        base = None
        for low, high in runs:
            base = low if base is None else base
            for at in range(low, high, block):
                crc = sums[at // block] if sums else -1
                start, nbytes = landing.start + at - base, min(block, high - at)
                place = address and address + at - base
                rows.append((start, nbytes, crc, place, device, landing.label, landing, landing.pieces_left))
                landing.pieces_left += 1
        if landing.crc32 is not None:
            landing.sums = [(0, 0)] * landing.pieces_left

    def _number_of(self, target: torch.Tensor) -> int:
        """As in :class:`~aio_ckpt.read.requests.Pieces`."""
        if is_host(target):
            return 0
        if target.device not in self.devices:
            self.devices.append(target.device)
        return 1 + self.devices.index(target.device)

    def _rows_of(self, file: str) -> PieceRows:
        found = self.pieces.get(file)
        if found is None:
            found = self.pieces[file] = PieceRows()
        return found


def _is_laid_out_like(item: Item, target: torch.Tensor) -> bool:
    """Whether the bytes of a target of the item's shape are those that are stored."""
    return (
        target.dtype is item.dtype
        and target.stride() == item.stride
        and target.nbytes == item.raw_bytes
        and not (item.storage_offset or item.is_conj or item.is_neg or target.is_conj() or target.is_neg())
        and (target.is_contiguous() or is_dense(item.shape, item.stride))
    )


def _label(item: Item) -> str:
    return f"{item.file}: tensor {item.name!r}"


def _dcp_metadata(items: Sequence[Item]) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(item.offsets), torch.Size(item.shape)) for item in items]
    # DCP's own box arithmetic reads nothing but the chunks.
    return TensorStorageMetadata(TensorProperties(dtype=items[0].dtype), torch.Size(items[0].shape), chunks)


def _copy_box(view: torch.Tensor, item: Item, first: int, scratch: torch.Tensor, copies: Copies) -> None:
    """Copy a box out of scratch bytes; ``first`` is the element of ``scratch`` where the box begins."""
    start = scratch.storage_offset() // item.dtype.itemsize + first
    empty = torch.empty(0, dtype=item.dtype, device=scratch.device)
    source = empty.set_(scratch.untyped_storage(), start, view.shape, item.stride)
    source = neg_view(source) if item.is_neg else source
    copies.fill(view, source.conj() if item.is_conj else source)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor, shape ``(nbytes,)``, sharing its memory."""
    nbytes = tensor.numel() * tensor.itemsize
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.detach().untyped_storage(), tensor.storage_offset() * tensor.itemsize, (nbytes,), (1,))


# -- ranges -----------------------------------------------------------------------------------------


def _parts(item: Item, start: Sequence[int], view: torch.Tensor) -> Iterator[tuple[Sequence[int], torch.Tensor]]:
    """A box cut so that about ``_BOX_BYTES`` of the item hold each part: where it begins in the item, and its view.

    Cuts are at the ends of blocks, if rows end there at all.
    """
    strides = [step if length > 1 else 0 for step, length in zip(item.stride, view.shape, strict=True)]
    row_bytes = max(strides, default=0) * item.dtype.itemsize
    if not row_bytes:
        yield start, view
        return
    dim = strides.index(max(strides))
    rows, rows_a_block = max(_BOX_BYTES // row_bytes, 1), item.block_bytes // math.gcd(item.block_bytes, row_bytes)
    if rows_a_block <= rows:
        rows -= rows % rows_a_block
    cuts = range(rows - start[dim] % rows, view.shape[dim], rows)
    for first, stop in itertools.pairwise((0, *cuts, view.shape[dim])):
        yield (*start[:dim], start[dim] + first, *start[dim + 1 :]), view.narrow(dim, first, stop - first)


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


# -- whether ranks of a host read the same bytes ---------------------------------------------------------


def is_read_by_several(wanted: int, stored: int, *, ranks_on_host: int) -> bool:
    """Whether a byte has several readers, if each of these ranks, two or more, wants so many of the bytes stored."""
    return ranks_on_host * wanted >= _SHARING_PAYS_READERS * stored > 0


def wanted_bytes(found: Match, catalog: Catalog) -> int:
    """Bytes of data files that this rank will read for its tensors, about."""
    wanted = sum(item.raw_bytes for item, _, _ in found.whole)
    wanted += sum(
        _bytes_for(memory_of(tensor).shape, catalog.shards[name]) for name, tensor in (*found.tensors, *found.shared)
    )
    below = (name for _, _, names in found.stateful for name in catalog.shards.keys() & set(names))
    for name in (*(name for name, *_ in found.arrays), *below):
        shards = catalog.shards[name]
        target = found.live.get(name, shard_like(found.layouts.get(name), shards))
        wanted += _bytes_for(global_shape(shards) if target is None else memory_of(target).shape, shards)
    return wanted


def _bytes_for(box: Sequence[int], shards: Shards) -> int:
    """The first chunk stands for all: that is how torch cuts."""
    return covering_bytes(shards[0].shape, box, shards[0].dtype.itemsize)


def covering_bytes(chunk: Sequence[int], box: Sequence[int], itemsize: int) -> int:
    """Bytes that are read for a box of a tensor stored in dense shards of one shape, about.

    Gaps that no block fits into are read, too. The box is taken to begin where a chunk does.
    """
    if 0 in chunk or 0 in box:
        return 0
    extent = stride = itemsize
    count = 1
    for size, wanted in zip(reversed(chunk), reversed(box), strict=False):  # a shard that fits nothing is told later
        count *= -(-wanted // size)
        length = min(wanted, size)
        is_read_through = stride - extent < BLOCK_BYTES
        extent = extent + (length - 1) * stride if is_read_through else extent * length
        stride *= size
    return count * extent
