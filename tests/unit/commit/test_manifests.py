"""What a save reports as written, and the post-condition: written set == requested set."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from isal import isal_zlib
from property_examples import examples
from torch.distributed.checkpoint.metadata import MetadataIndex

from aio_ckpt.commit.manifests import (
    check_complete,
    object_entries,
    object_spans,
    render_metadata_file,
    render_rank,
    render_root,
    written_names,
)
from aio_ckpt.errors import PlanChangedError
from aio_ckpt.format.checkpoint_files import TRAILER_BYTES, save_of_metadata
from aio_ckpt.format.constants import PAGE_BYTES, align_up
from aio_ckpt.format.dcp_metadata_read import parse_metadata
from aio_ckpt.format.rank_manifest import decode_rank
from aio_ckpt.format.root_manifest import FileEntry, decode_root
from aio_ckpt.leaves.objects import ObjectBytes, ObjectEncoder, decode_object
from aio_ckpt.plan.layout import file_chunks
from aio_ckpt.plan.plan_cache import PlanCache
from aio_ckpt.plan.save_plan import Plan
from aio_ckpt.state.flatten import flatten
from aio_ckpt.state.names import skeleton_names
from aio_ckpt.state.skeleton import decode_skeleton
from aio_ckpt.write.result import WriteResult

TIED = torch.empty(300)
STATE = {
    "first": torch.empty(10),
    "spread": torch.empty(3 << 20),  # 12 MiB: over several chunks
    "empty": torch.empty(0),
    "tied": TIED,
    "also_tied": TIED,
    "last": torch.empty(1 << 20),
    "lr": 0.1,
    "same_lr": 0.1,
    "blob": b"x" * (9 << 20),
    "epoch": 3,
}


def planned(state: object) -> tuple[Plan, ObjectBytes]:
    found = PlanCache().resolve(flatten(state, rank=0))
    return found.plan, ObjectEncoder(trusted=False).encode(found.objects)


PLAN, OBJECTS = planned(STATE)
ENTRIES = object_entries(PLAN, OBJECTS)
IMAGE_BYTES = align_up(PLAN.layout.tensor_bytes + len(OBJECTS.region), PAGE_BYTES)
CHUNKS = file_chunks(PLAN.layout, IMAGE_BYTES)


def result(*, lost: frozenset[int] = frozenset(), unsealed: int = 0, sums: bytes = b"") -> WriteResult:
    return WriteResult(
        image_bytes=IMAGE_BYTES,
        file_crc32=7,
        sums=sums,
        mode="direct",
        chunks=len(CHUNKS),
        chunks_written=frozenset(range(len(CHUNKS))) - lost,
        items_patched=len(PLAN.layout.items) - unsealed,
    )


def spans() -> dict[str, tuple[int, int]]:
    """Where every name's bytes begin and end in the file, from its manifest entries."""
    found = {
        name: (item.item_offset, item.item_offset + item.envelope.item_bytes)
        for item in PLAN.layout.items
        for name in item.fqns
    }
    found |= {name: (entry.offset, entry.offset + entry.nbytes) for entry in ENTRIES for name in entry.fqns}
    return found


# -- written_names --------------------------------------------------------------------------------


def test_when_every_chunk_was_written_every_name_is():
    assert written_names(PLAN, ENTRIES, [result()]) == STATE.keys()


@examples(60)
@given(st.frozensets(st.integers(0, len(CHUNKS) - 1)))
def test_a_name_is_written_unless_one_of_its_bytes_lies_in_a_lost_chunk(lost: frozenset[int]):
    holes = {
        name
        for name, (start, stop) in spans().items()
        if any(start < CHUNKS[index].stop and CHUNKS[index].start < stop for index in lost)
    }
    assert written_names(PLAN, ENTRIES, [result(lost=lost)]) == STATE.keys() - holes


@pytest.mark.parametrize("index", range(len(CHUNKS)))
def test_no_chunk_can_be_lost_unnoticed(index: int):
    """Each chunk holds bytes of some name: the padding alone fills none."""
    written = written_names(PLAN, ENTRIES, [result(lost=frozenset({index}))])
    with pytest.raises(PlanChangedError, match="not written"):
        check_complete(frozenset(STATE), written)


def test_an_unsealed_item_makes_every_tensor_a_hole():
    """The write stage counts sealed items; which one it missed is not told."""
    assert written_names(PLAN, ENTRIES, [result(unsealed=1)]) == {"lr", "same_lr", "blob", "epoch"}


def test_names_with_equal_bytes_are_written_together():
    assert {entry.fqns for entry in ENTRIES} == {("lr", "same_lr"), ("blob",), ("epoch",)}
    assert {item.fqns for item in PLAN.layout.items if len(item.fqns) > 1} == {("tied", "also_tied")}


def test_object_entries_hold_the_place_and_the_sum_of_each_object():
    image = bytes(PLAN.layout.tensor_bytes) + OBJECTS.region
    for entry in ENTRIES:
        stored = image[entry.offset : entry.offset + entry.nbytes]
        assert entry.crc32 == isal_zlib.crc32(stored)
        for name in entry.fqns:
            assert decode_object(stored, name=name, trusted=False) == STATE[name]


# -- check_complete -------------------------------------------------------------------------------

names = st.frozensets(st.sampled_from("abcdefgh"))


@given(names, names)
def test_the_post_condition_holds_only_for_equal_sets(requested: frozenset[str], written: frozenset[str]):
    if requested == written:
        check_complete(requested, written)
        return
    with pytest.raises(PlanChangedError) as caught:
        check_complete(requested, written)
    missing, extra = sorted(requested - written)[:5], sorted(written - requested)[:5]
    assert f"not written {missing}, not asked for {extra}" in str(caught.value)


# -- the manifests that are rendered from it ------------------------------------------------------


def test_the_rank_manifest_holds_what_was_written():
    blocks = [max(-(-item.raw_bytes >> 20), 0) for item in PLAN.layout.items]
    sums = [tuple(range(100 * index, 100 * index + count)) for index, count in enumerate(blocks)]
    packed = b"".join(value.to_bytes(4, "little") for row in sums for value in row)
    data = render_rank(PLAN, ENTRIES, result(sums=packed), step=4, save_id="s-1", rank=0, world_size=1)
    found = decode_rank(data, name="aio_ckpt.0.bin")
    assert (found.step, found.save_id, found.rank, found.world_size) == (4, "s-1", 0, 1)
    assert found.file == FileEntry("__s-1_0_0.distcp", IMAGE_BYTES, 7)
    assert [entry.fqns for entry in found.tensors] == [item.fqns for item in PLAN.layout.items]
    assert [entry.raw_offset for entry in found.tensors] == [item.raw_offset for item in PLAN.layout.items]
    assert list(map(tuple, found.data_files[0].block_sums())) == sums
    assert list(found.objects) == ENTRIES
    assert skeleton_names(decode_skeleton(found.skeleton, name="m"), rank=0) == list(STATE)


def test_the_root_manifest_vouches_for_metadata_and_rank_manifests():
    ranks = [FileEntry("aio_ckpt.0.bin", 10, 1), FileEntry("aio_ckpt.1.bin", 20, 2)]
    objects = ObjectBytes(region=b"", spans=tuple((0, 8) for _ in PLAN.object_names))
    metadata = render_metadata_file(
        PLAN.metadata, object_spans(PLAN, objects), checkpoint_id="root/step", save_id="s-1"
    )
    found = decode_root(
        render_root(metadata, ranks, step=4, save_id="s-1", created_unix=5.0, metrics={}, extra={}),
        name="aio_ckpt.json",
    )
    assert (found.step, found.save_id, found.world_size, found.ranks) == (4, "s-1", 2, tuple(ranks))
    data = b"".join(metadata.parts)
    assert found.metadata == FileEntry(".metadata", len(data), isal_zlib.crc32(data))
    assert found.written_by["torch"] == str(torch.__version__)
    assert save_of_metadata(data) == "s-1"
    stored = parse_metadata(data[:-TRAILER_BYTES], name=".metadata")
    assert stored.storage_meta.save_id == "s-1"
    begin = PLAN.layout.tensor_bytes
    assert all(stored.storage_data[MetadataIndex(name)].offset == begin for name in PLAN.object_names)


@pytest.mark.parametrize("state", [STATE, {"w": torch.empty(3)}, {"n": 1}], ids=["mixed", "no objects", "no tensors"])
def test_sums_of_metadata_cover_all_its_bytes_in_every_save_of_a_plan(state):
    plan, objects = planned(state)
    ids = ("s-1", "s-20", "s-1")
    files = [
        render_metadata_file(plan.metadata, object_spans(plan, objects), checkpoint_id="c" * len(name), save_id=name)
        for name in ids
    ]
    for name, file in zip(ids, files, strict=True):
        data = b"".join(file.parts)
        assert file.entry == FileEntry(".metadata", len(data), isal_zlib.crc32(data))
        assert save_of_metadata(data) == name
        assert file.parts[1] is plan.metadata.fixed  # copied by no save
    assert files[0] == files[2] != files[1]
