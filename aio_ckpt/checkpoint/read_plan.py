"""Read plan: the byte ranges to read, their checksums and their targets. Touches no file.

Every tensor is cut into pieces (:mod:`aio_ckpt.checkpoint.read_requests`). If the target is laid out as the stored
bytes, each piece is copied to it once it is verified. Otherwise (a slice, another layout), its pieces are put together
in a ``ReassemblyBuffer`` first.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from aio_ckpt._torch import neg_view
from aio_ckpt.checkpoint.catalog import Item, StoredObject
from aio_ckpt.checkpoint.read_requests import (
    REQUEST_BYTES_MAX,
    ReadRequest,
    ReassemblyBuffer,
    Row,
    block_rows,
    group_into_requests,
)
from aio_ckpt.errors import CorruptCheckpointError
from aio_ckpt.format.constants import BLOCK_BYTES, PAGE_BYTES, align_up
from aio_ckpt.format.tensor_zip import is_dense
from aio_ckpt.memory.copies import Copies
from aio_ckpt.memory.cuda import can_copy_by_address, is_host_memory
from aio_ckpt.memory.read_buffers import address_of

_REQUEST_BYTES_MIN = (3 << 20) + 2 * PAGE_BYTES
"""Shortest read, in bytes. It holds three blocks, at whatever offset in a page they begin."""
_BOX_BYTES = 8 << 20
"""Bytes of an item that one part of a box covers. One read reads a part, which is copied while others are read.
Boxes of 128 MiB in one part took 1.1 to 1.6 times as long."""
_REQUESTS_A_READER = 8
"""Least number of requests for each reader, if they do not get too short. So a small load has small buffers."""


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class ObjectMemory:
    """Memory that objects are read into, one after the other."""

    memory: memoryview
    begins: Mapping[StoredObject, int]
    """Offset of each object in the memory."""

    def bytes_of(self, stored: StoredObject) -> bytes:
        """Return the bytes of an object, once the requests have ended."""
        begin = self.begins[stored]
        return bytes(self.memory[begin : begin + stored.nbytes])


@dataclass(slots=True, repr=False, kw_only=True)
class ReadPlan:
    """Pieces of one load, while they are collected."""

    rows: defaultdict[str, list[Row]] = field(default_factory=lambda: defaultdict(list))
    """Pieces by data file."""
    filled: list[torch.Tensor] = field(default_factory=list)
    """Targets that are written without an operation of torch, so that their version must be incremented."""
    devices: list[torch.device] = field(default_factory=list)
    """Devices of the targets outside of host memory."""
    has_unchecked: bool = False
    """Whether bytes of a tensor are read that no checksum covers: plain DCP has none, or one for the whole item."""

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
        """Fill host tensors that have the same bytes as their items. ``targets``: (item, tensor, address).

        Takes 0.5 us each.
        """
        fill = self.filled.append
        for item, target, address in targets:
            fill(target)
            rows = self.rows[item.file]
            if len(item.sums) == 1:
                rows.append((item.raw_offset, item.raw_bytes, item.sums[0], address, 0, item.name, None, 0))
            else:
                rows += block_rows(item, address, 0)

    def add_part(self, item: Item, start: Sequence[int], target: torch.Tensor) -> None:
        """Fill ``target``, of any dtype, from the box of its shape that begins at ``start`` inside ``item``."""
        if 0 in target.shape:
            return
        if type(target) is torch.Tensor and (target.dtype, target.shape) == (item.dtype, item.shape):
            self._add_whole(item, target)
        else:
            self._add_box(item, start, target)

    def add_objects(self, objects: Iterable[StoredObject]) -> ObjectMemory:
        """Read objects, each once. Return the memory that they are read into, which the caller keeps until then.

        Takes 1 us each.
        """
        begins: dict[StoredObject, int] = {}
        nbytes = 0
        for stored in dict.fromkeys(objects):
            begins[stored] = nbytes
            nbytes += stored.nbytes
        memory = memoryview(bytearray(nbytes))
        base = address_of(memory) if memory else 0
        for stored, begin in begins.items():
            if stored.nbytes <= BLOCK_BYTES:
                crc = -1 if stored.crc32 is None else stored.crc32
                row = (stored.offset, stored.nbytes, crc, base + begin, 0, stored, None, 0)
                self.rows[stored.file].append(row)
            else:
                buffer = ReassemblyBuffer(
                    label=str(stored), start=stored.offset, nbytes=stored.nbytes, crc32=stored.crc32
                )
                runs = [(0, stored.nbytes)]
                self._add_reassembly(stored.file, buffer, runs, BLOCK_BYTES, (), base + begin)
        return ObjectMemory(memory=memory, begins=begins)

    def add_bytes(self, file: str, start: int, target: bytearray, label: str) -> None:
        """Fill ``target`` with the bytes of ``file`` that begin at ``start``, of which nothing has a checksum."""
        address = address_of(memoryview(target)) if target else 0
        self.rows[file].append((start, len(target), -1, address, 0, label, None, 0))

    @property
    def total_bytes(self) -> int:
        """Sum of the bytes of all pieces."""
        return sum(nbytes for rows in self.rows.values() for _, nbytes, *_ in rows)

    def requests(self, readers: int) -> list[ReadRequest]:
        """Return all reads, ascending by file and offset. ``readers`` of them will be in flight."""
        size = min(max(self.total_bytes // (_REQUESTS_A_READER * readers), _REQUEST_BYTES_MIN), REQUEST_BYTES_MAX)
        found = [request for file, rows in self.rows.items() for request in group_into_requests(file, rows, size)]
        return sorted(found, key=lambda request: (request.file, request.start))

    # -- one item -----------------------------------------------------------------------------------

    def _add_whole(self, item: Item, target: torch.Tensor) -> None:
        device = self._number_of(target)
        if not _is_laid_out_like(item, target) or (device and not can_copy_by_address(target.device)):
            self._add_box(item, (0,) * len(item.shape), target.detach())
            return
        self.filled.append(target)
        if item.sums:
            self.rows[item.file] += block_rows(item, target.data_ptr(), device)
        else:
            self._add_raw(item, target, device)

    def _add_raw(self, item: Item, target: torch.Tensor, device: int) -> None:
        """Fill ``target`` from an item that has one checksum for all blocks, or none."""
        if item.raw_bytes:
            self.has_unchecked |= item.record_crc32 is None
            buffer = ReassemblyBuffer(
                label=_label(item), start=item.raw_offset, nbytes=item.raw_bytes, crc32=item.record_crc32
            )
            runs = [(0, item.raw_bytes)]
            self._add_reassembly(item.file, buffer, runs, item.block_bytes, (), target.data_ptr(), device)

    def _add_box(self, item: Item, start: Sequence[int], view: torch.Tensor) -> None:
        """Fill ``view`` from the box of its shape that begins at ``start`` inside the item."""
        if item.sums or item.record_crc32 is None:  # otherwise one checksum covers the whole item
            for part_start, part in _parts(item, start, view):
                self._add_box_part(item, part_start, part)
        else:
            self._add_box_part(item, start, view)

    def _add_box_part(self, item: Item, start: Sequence[int], view: torch.Tensor) -> None:
        """Fill ``view`` from the blocks that the box touches."""
        runs = _touched_blocks(item, start, view.shape)
        low, high = runs[0][0], runs[-1][1]
        first = item.storage_offset + sum(a * b for a, b in zip(start, item.stride, strict=True))
        crc32 = item.record_crc32 if runs == [(0, item.raw_bytes)] else None
        self.has_unchecked |= not item.sums and crc32 is None
        buffer = ReassemblyBuffer(
            label=_label(item),
            start=item.raw_offset + low,
            nbytes=high - low,
            crc32=None if item.sums else crc32,
            then=functools.partial(_copy_box, view, item, first - low // item.dtype.itemsize),
            device=self._number_of(view),
        )
        self._add_reassembly(item.file, buffer, runs, item.block_bytes, item.sums)

    def _add_reassembly(
        self,
        file: str,
        buffer: ReassemblyBuffer,
        runs: Iterable[tuple[int, int]],
        block: int,
        sums: Sequence[int],
        address: int = 0,
        device: int = 0,
    ) -> None:
        """Cut ``runs`` into pieces of one block, and add them.

        Args:
            runs: ascending ranges of the raw bytes. ``buffer`` begins where the first one does.
            block: length of a block, in bytes.
            sums: CRC32 of each block of the raw bytes; empty if they have none.
            address: target of the first piece; 0 if the pieces go to the scratch memory of ``buffer``.
            device: number of the target's device.
        """
        rows = self.rows[file]
        base = None
        for low, high in runs:
            base = low if base is None else base
            for at in range(low, high, block):
                crc = sums[at // block] if sums else -1
                start, nbytes = buffer.start + at - base, min(block, high - at)
                place = address and address + at - base
                rows.append((start, nbytes, crc, place, device, buffer.label, buffer, buffer.pieces_left))
                buffer.pieces_left += 1
        if buffer.crc32 is not None:
            buffer.sums = [(0, 0)] * buffer.pieces_left

    def _number_of(self, target: torch.Tensor) -> int:
        """Return the number of the target's device; see ``Pieces.devices``."""
        if is_host_memory(target):
            return 0
        if target.device not in self.devices:
            self.devices.append(target.device)
        return 1 + self.devices.index(target.device)


def _is_laid_out_like(item: Item, target: torch.Tensor) -> bool:
    """Return whether the stored raw bytes are the bytes of ``target``, which has the item's shape."""
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


# -- ranges -----------------------------------------------------------------------------------------


def _parts(item: Item, start: Sequence[int], view: torch.Tensor) -> Iterator[tuple[Sequence[int], torch.Tensor]]:
    """Cut a box into parts of about ``_BOX_BYTES`` of the item. Yield the start in the item and the view of each part.

    If a row ends at the end of a block at least once per part, all cuts are at the ends of blocks.
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
    """Return the ascending ranges of raw bytes, in whole blocks, that hold the elements of a box (not empty)."""
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
    """Yield the byte ranges that hold a box. A range spans the dimensions whose byte stride is below ``skip``.

    ``dims``: (byte stride, length) of each dimension, strides descending. As the starts of two ranges are at least
    ``skip`` apart, there are no more ranges than the item has blocks.
    """
    extent = size + sum(step * (length - 1) for step, length in dims)
    if not dims or dims[0][0] < skip:
        yield first, first + extent
        return
    (step, length), inner = dims[0], dims[1:]
    for index in range(length):
        yield from _byte_runs(first + index * step, inner, size, skip)
