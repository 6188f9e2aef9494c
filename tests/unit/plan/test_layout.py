"""The image layout: every byte of the file has one owner, and chunks can be written on their own."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples

from aio_ckpt.format.constants import BLOCK_BYTES, PAGE_BYTES, RAW_ALIGN_BYTES, TensorSpec, align_up
from aio_ckpt.format.tensor_zip import render
from aio_ckpt.plan.chunks import chunk_bytes_for, chunk_bytes_within
from aio_ckpt.plan.layout import ImageLayout, file_chunks, lay_out
from aio_ckpt.plan.tensor_item import Placement

MIB = 1 << 20


def spec_of(nbytes: int, *, dims: int = 1) -> TensorSpec:
    shape = (*(1,) * (dims - 1), nbytes)
    return TensorSpec(torch.uint8, shape, (1,) * dims)


def laid_out(sizes: list[int], budget_bytes: int = sys.maxsize, *, dims: int = 1, frozen: int = 0) -> ImageLayout:
    specs = [spec_of(nbytes, dims=dims) for nbytes in sizes]
    placements = [Placement(leaf, (f"n{leaf}",), (0,) * dims, spec, render(spec)) for leaf, spec in enumerate(specs)]
    return lay_out(placements, budget_bytes=budget_bytes, frozen=frozen)


near_boundaries = st.builds(
    lambda base, delta: max(base + delta, 0),
    st.sampled_from([0, 64, PAGE_BYTES, 256 << 10, MIB, 4 * MIB, 8 * MIB, 32 * MIB]),
    st.integers(-1500, 1500),
)
sizes = st.lists(st.integers(0, 5000) | st.integers(0, 40 * MIB) | near_boundaries, max_size=60)


def brim(first: int) -> list[int]:
    """Items whose headers and trailers come to lie on the first chunk boundary, here or there with ``first``."""
    return [first, *[MIB - 900] * 3, *[50] * 20, 9 * MIB - first, MIB, 3]


frozen_layouts = st.builds(laid_out, sizes, frozen=st.integers(0, 60))
layouts = st.one_of(
    frozen_layouts,
    st.one_of(sizes, st.integers(MIB - 20_000, MIB).map(brim)).map(laid_out),
    st.builds(laid_out, st.lists(st.integers(0, 2 * MIB), max_size=8), st.integers(64 << 10, 4 * MIB)),
)


@examples(150)
@given(layouts)
def test_raw_bytes_are_aligned_and_items_stand_in_order_without_overlap(layout: ImageLayout):
    position = 0
    for index, item in enumerate(layout.items):
        if index == layout.frozen_items:
            position = layout.main_start
        assert item.item_offset >= position
        assert item.raw_offset % (PAGE_BYTES if item.raw_bytes >= BLOCK_BYTES else RAW_ALIGN_BYTES) == 0
        position = item.item_offset + item.envelope.item_bytes
    assert max(position, layout.main_start) == layout.tensor_bytes
    assert layout.raw_bytes == sum(item.raw_bytes for item in layout.items)


@examples(150)
@given(layouts)
def test_no_header_or_trailer_straddles_a_chunk_boundary(layout: ImageLayout):
    """Else a chunk could not be sealed, or reused as rendered, on its own."""
    assert_none_straddles(layout)


def assert_none_straddles(layout: ImageLayout) -> None:
    size = layout.chunk_bytes
    for item in layout.items:
        offset, raw_offset, trailer_offset = map(
            layout.file_offset, (item.item_offset, item.raw_offset, item.trailer_offset)
        )
        assert offset // size == (raw_offset - 1) // size
        assert trailer_offset // size == (offset + item.envelope.item_bytes - 1) // size


@pytest.mark.parametrize("align", [0, 4096], ids=["after a small item", "after a large item"])
def test_nothing_straddles_wherever_the_boundary_falls(align: int):
    """A sweep: the boundary passes through header, raw bytes and trailer of an item and of the next."""
    for delta in range(0, 2400, 8):
        first = 4 * MIB - 2400 + delta - align
        layout = laid_out([first, 40, 1, MIB, 300])
        assert layout.chunk_bytes == 4 * MIB
        assert_none_straddles(layout)
        assert layout.items[1].item_offset < layout.items[2].item_offset


@examples(150)
@given(layouts, st.integers(0, 80 * MIB))
def test_chunks_cover_the_file_exactly(layout: ImageLayout, objects_bytes: int):
    image_bytes = align_up(max(layout.tensor_bytes + objects_bytes, layout.main_start + 1), PAGE_BYTES)
    chunks = file_chunks(layout, image_bytes)
    frozen = chunks[: layout.frozen_chunks]
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    for file, start in ((frozen, 0), (chunks[len(frozen) :], layout.main_start)):
        assert [chunk.start - start for chunk in file] == [index * layout.chunk_bytes for index in range(len(file))]
        assert [chunk.stop for chunk in file[:-1]] == [chunk.start for chunk in file[1:]]
    assert chunks[len(frozen)].start == layout.main_start
    assert chunks[-1].stop == image_bytes
    assert all(0 < chunk.stop - chunk.start <= layout.chunk_bytes for chunk in chunks)
    assert all(chunk.stop % PAGE_BYTES == 0 for chunk in chunks)


@examples(150)
@given(layouts)
def test_pieces_and_constants_tile_every_chunk_of_the_tensors(layout: ImageLayout):
    """No byte is left as the last user of the arena left it, none has two sources."""
    for chunk in layout.chunks:
        spans = [(piece.image_start, piece.image_start + piece.nbytes) for piece in chunk.pieces]
        spans += [(start, start + len(data)) for start, data in chunk.constants]
        position = chunk.start
        for start, stop in sorted(span for span in spans if span[0] < span[1]):
            assert start == position
            position = stop
        assert position == chunk.stop


@examples(100)
@given(layouts)
def test_pieces_name_the_right_bytes_of_the_right_item(layout: ImageLayout):
    found = [0] * len(layout.items)
    for chunk in layout.chunks:
        for piece in chunk.pieces:
            assert piece.raw_start == found[piece.item]
            assert piece.image_start == layout.items[piece.item].raw_offset + piece.raw_start
            found[piece.item] += piece.nbytes
    assert found == [item.raw_bytes for item in layout.items]


@examples(100)
@given(layouts)
def test_constants_are_the_headers_the_trailers_and_zeros(layout: ImageLayout):
    wanted: dict[int, bytes] = {}
    for item in layout.items:
        wanted[item.item_offset] = item.envelope.header
        wanted[item.trailer_offset] = item.envelope.trailer
    for chunk in layout.chunks:
        for start, data in chunk.constants:
            rest = bytearray(data)
            for offset, body in wanted.items():
                if start <= offset < start + len(data):
                    assert data[offset - start : offset - start + len(body)] == body
                    rest[offset - start : offset - start + len(body)] = bytes(len(body))
            assert not any(rest)


@examples(150)
@given(layouts)
def test_the_image_is_not_larger_than_promised(layout: ImageLayout):
    """Raw bytes + 1 KiB an item + alignment: a page for each item of a mebibyte, and what a boundary displaces."""
    pages = sum(item.raw_bytes >= BLOCK_BYTES for item in layout.items)
    displaced = (len(layout.chunks) + 1) * 1024
    gap = PAGE_BYTES if layout.frozen_items else 0
    assert layout.tensor_bytes <= layout.raw_bytes + 1024 * len(layout.items) + PAGE_BYTES * pages + displaced + gap


@examples(150)
@given(frozen_layouts)
def test_the_frozen_file_and_the_main_one_are_laid_out_as_if_each_were_alone(layout: ImageLayout):
    """Else the bytes of frozen leaves would change with the others, and could not be cloned."""
    frozen, main = layout.items[: layout.frozen_items], layout.items[layout.frozen_items :]
    for items, start in ((frozen, 0), (main, layout.main_start)):
        placements = [Placement(item.leaf, item.fqns, item.offsets, item.spec, item.envelope) for item in items]
        alone = lay_out(placements, budget_bytes=sys.maxsize, chunk_bytes=layout.chunk_bytes)
        assert [layout.file_offset(item.item_offset) for item in items] == [item.item_offset for item in alone.items]
        assert [item.item_offset - start for item in items] == [item.item_offset for item in alone.items]


def test_a_frozen_file_of_less_than_a_mebibyte_is_not_worth_its_while():
    assert laid_out([MIB - 1, 8 * MIB], frozen=1).frozen_items == 0
    layout = laid_out([MIB, 8 * MIB], frozen=1)
    assert (layout.frozen_items, layout.frozen_chunks) == (1, 1)
    assert layout.main_start == layout.chunks[0].stop
    assert layout.chunks[0].stop == align_up(
        layout.items[0].trailer_offset + len(layout.items[0].envelope.trailer), PAGE_BYTES
    )


def test_if_all_is_frozen_the_main_file_holds_the_objects_alone():
    layout = laid_out([8 * MIB], frozen=1)
    *frozen, last = file_chunks(layout, layout.main_start + PAGE_BYTES)
    assert len(frozen) == layout.frozen_chunks == len(layout.chunks)
    assert (last.start, last.stop, last.pieces) == (layout.main_start, layout.main_start + PAGE_BYTES, ())


@examples(100)
@given(st.integers(0, 1 << 40))
def test_a_chunk_is_a_whole_number_of_blocks_and_bounded(raw_bytes: int):
    size = chunk_bytes_for(raw_bytes)
    assert size % BLOCK_BYTES == 0
    assert 4 * MIB <= size <= 64 * MIB


@examples(200)
@given(st.integers(0, 1 << 40), st.integers(64 << 10, 1 << 40))
def test_no_chunk_is_larger_than_the_budget_and_of_a_larger_image_eight_fit(raw_bytes: int, budget_bytes: int):
    size = chunk_bytes_within(raw_bytes, budget_bytes)
    assert size % PAGE_BYTES == 0
    assert 64 << 10 <= size <= min(budget_bytes, chunk_bytes_for(raw_bytes))
    if raw_bytes > budget_bytes >= 1 * MIB:
        assert size * 8 <= budget_bytes
    if budget_bytes >= 512 * MIB or budget_bytes >= max(raw_bytes, 64 * MIB):
        assert size == chunk_bytes_for(raw_bytes)


def test_a_small_image_has_some_chunks_to_overlap_and_a_large_one_few():
    assert len(laid_out([MIB] * 64).chunks) in range(8, 11)
    assert len(laid_out([64 * MIB] * 16).chunks) in range(32, 35)
    assert [chunk_bytes_for(raw << 30) // MIB for raw in (1, 4, 6, 8, 100)] == [32, 32, 48, 64, 64]


def test_every_item_is_sealed_in_the_chunk_of_its_trailer():
    layout = laid_out([3 * MIB, 0, 100, 9 * MIB, 4 * MIB - 700, 64])
    sealed = [(int(item), chunk.index) for chunk in layout.chunks for item in chunk.sums.crc_patches]
    assert sealed == [(index, item.trailer_offset // layout.chunk_bytes) for index, item in enumerate(layout.items)]


def test_a_layout_of_nothing_holds_only_objects():
    layout = laid_out([])
    assert (layout.items, layout.chunks, layout.tensor_bytes, layout.raw_bytes) == ((), (), 0, 0)
    (chunk,) = file_chunks(layout, PAGE_BYTES)
    assert (chunk.start, chunk.stop, chunk.pieces, chunk.constants) == (0, PAGE_BYTES, (), ())


@pytest.mark.parametrize("nbytes", [(4 << 30) - 1, 4 << 30, (4 << 30) + 1, 20 << 30])
def test_an_item_above_4_gib_is_laid_out(nbytes: int):
    layout = laid_out([10, nbytes, 10])
    assert layout.items[2].item_offset >= layout.items[1].trailer_offset + len(layout.items[1].envelope.trailer)
    assert sum(piece.nbytes for chunk in layout.chunks for piece in chunk.pieces) == nbytes + 20


def test_items_of_many_dimensions_keep_to_the_rules():
    layout = laid_out([4 * MIB - 300, 10, 4 * MIB - 2000, 10], dims=60)
    for item in layout.items:
        assert item.raw_offset % RAW_ALIGN_BYTES == 0
        assert item.item_offset // layout.chunk_bytes == (item.raw_offset - 1) // layout.chunk_bytes


@examples(60)
@given(frozen_layouts, st.integers(0, 1 << 40))
def test_the_chunk_of_a_byte_is_the_one_that_holds_it(layout: ImageLayout, byte: int):
    for chunk in file_chunks(layout, align_up(layout.tensor_bytes + 1, PAGE_BYTES)):
        for offset in (chunk.start, chunk.stop - 1, chunk.start + byte % (chunk.stop - chunk.start)):
            assert layout.chunk_at(offset) == chunk.index
