"""Layout of one rank's data files: the offset of each item. Pure.

Sizes and offsets are bytes. *Image* offsets count from the start of the image. An image holds the frozen file, if the
rank has one, and then the main data file.

Borrowed fact: DCP accepts gaps between items (``_StorageInfo`` holds offset and length of each).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from aio_ckpt.format.constants import PAGE_BYTES, RAW_ALIGN_BYTES, align_up
from aio_ckpt.plan.chunks import NO_SUMS, Chunk, chunk_bytes_within, cut_chunks
from aio_ckpt.plan.tensor_item import Placement, TensorItem

_PAGE_ALIGNED_BYTES = 1 << 20
"""Least raw bytes of an item that begins at a page."""
LEAST_FROZEN_BYTES = 1 << 20
"""Least raw bytes of a frozen file. For fewer, a file more costs more than it saves."""


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
        chunks.append(Chunk(index=len(chunks), start=start, stop=stop, pieces=(), constants=(), sums=NO_SUMS))
    return tuple(chunks)
