"""Verifying: every byte is read, every fault is listed with its file and, where one is known, its tensor."""

from __future__ import annotations

import asyncio
import io
import warnings
import zipfile

import numpy as np
import pytest
import saved_files
import torch
import torch.distributed.checkpoint as dcp
from builders import flip
from checkpoint_maker import content_of, forge, save_state, write_checkpoint, write_small
from hypothesis import given
from hypothesis import strategies as st
from isal import isal_zlib
from property_examples import examples
from saved_files import data_file, rank_manifest

from aio_ckpt.checkpoint import open as open_module
from aio_ckpt.checkpoint import verify as scrub
from aio_ckpt.checkpoint.data_files import Files
from aio_ckpt.checkpoint.verify import verify_checkpoint, verify_files
from aio_ckpt.errors import CheckpointNotFoundError
from aio_ckpt.format import rank_manifest as manifest
from aio_ckpt.format import root_manifest
from aio_ckpt.format.constants import BLOCK_BYTES, PAGE_BYTES
from aio_ckpt.leaves.values import PerRank
from aio_ckpt.runtime.portal import Executor
from aio_ckpt.storage.local import Storage

FEW = examples(60)


@pytest.fixture(scope="module")
def executor():
    made = Executor("test", 4)
    yield made
    made.close(10)


async def verify(executor, path, on_progress=lambda nbytes: None, by=verify_checkpoint):
    storage = Storage(executor, "auto")
    return await by(storage, path, executor=executor, readers=2, on_progress=on_progress)


by_either = pytest.mark.parametrize("by", [verify_checkpoint, verify_files])


def some_state():
    return {
        "big": torch.arange(5 * BLOCK_BYTES // 4 + 99.0),
        "small": torch.arange(50.0).reshape(5, 10).t(),
        "tied": (shared := torch.ones(7)),
        "again": shared,
        "hollow": torch.empty(0, 3),
        "obj": list(range(50)),
        "n": np.float32(1),
    }


def stock_save(path, state):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=str(path), no_dist=True)
    return path


@by_either
@pytest.mark.parametrize("save", [save_state, stock_save])
async def test_a_sound_checkpoint_has_no_fault_and_every_byte_was_read(executor, tmp_path, save, by):
    path = save(tmp_path / "c", some_state() | {"n": 1})
    seen = []
    assert await verify(executor, path, seen.append, by) == ()
    assert sum(seen) == data_file(path).stat().st_size


async def test_the_files_of_many_tensors_are_verified_without_a_look_at_each(executor, tmp_path, monkeypatch):
    """A copy is read back beside training, and ``.metadata`` of 20,000 tensors takes two seconds of the interpreter."""
    path = save_state(tmp_path / "c", some_state())
    monkeypatch.setattr(open_module, "parse_metadata", None)
    monkeypatch.setattr(scrub, "parse_item", None)
    monkeypatch.setattr(scrub, "read_ends", None)
    assert await verify(executor, path, by=verify_files) == ()


async def test_a_sound_checkpoint_of_several_ranks_has_no_fault(executor, tmp_path):
    contents = [content_of({f"t{rank}": torch.ones(rank), "rng": PerRank(rank)}, rank) for rank in range(3)]
    assert await verify(executor, write_checkpoint(tmp_path / "c", contents)) == ()


@FEW
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
async def test_a_flipped_bit_anywhere_in_a_data_file_is_found(executor, tmp_path_factory, place, bit):
    path = save_state(tmp_path_factory.mktemp("c") / "c", some_state())
    file = data_file(path)
    offset = int(place * file.stat().st_size)
    flip(file, offset, 1 << bit)
    faults = await verify(executor, path)
    rank = manifest.decode_rank(rank_manifest(path).read_bytes(), name="m")
    inside = [e.fqns[0] for e in rank.tensors if e.item_offset <= offset < e.item_offset + e.item_bytes]
    inside += [e.fqns[0] for e in rank.objects if e.offset <= offset < e.offset + e.nbytes]
    assert {fault.file for fault in faults} == {"__save-1_0_0.distcp"}
    assert faults[0].tensor == (inside[0] if inside else None)
    (fault,) = await verify(executor, path, by=verify_files)
    assert fault.file == "__save-1_0_0.distcp"
    assert fault.tensor in (faults[0].tensor, None)


@by_either
@pytest.mark.parametrize("place", [0.01, 0.5, 0.99])
@pytest.mark.parametrize("name", [".metadata", "aio_ckpt.save-1.0.bin"])
async def test_a_flipped_bit_in_a_small_file_is_found_and_the_data_is_still_checked(
    executor, tmp_path, name, place, by
):
    path = save_state(tmp_path / "c", some_state())
    flip(path / name, int(place * (path / name).stat().st_size))
    faults = await verify(executor, path, by=by)
    assert [fault.file for fault in faults] == [name]
    flip(data_file(path), 2 * BLOCK_BYTES)
    files = {fault.file for fault in await verify(executor, path, by=by)}
    assert files == ({name, "__save-1_0_0.distcp"} if name == ".metadata" else {name})


async def test_all_faults_of_all_ranks_are_listed(executor, tmp_path):
    contents = [content_of({f"t{rank}": torch.ones(100 + rank), f"o{rank}": "x"}, rank) for rank in range(4)]
    path = write_checkpoint(tmp_path / "c", contents)
    for rank, at in ((0, "tensors"), (1, "objects")):
        found = manifest.decode_rank((path / f"aio_ckpt.save-1.{rank}.bin").read_bytes(), name="m")
        entry = getattr(found, at)[0]
        flip(path / f"__save-1_{rank}_0.distcp", entry.raw_offset if at == "tensors" else entry.offset)
    data_file(path, 2).unlink()
    with data_file(path, 3).open("r+b") as file:
        file.truncate(100)
    faults = await verify(executor, path)
    assert [(fault.file, fault.tensor) for fault in faults] == [
        ("__save-1_0_0.distcp", "t0"),
        ("__save-1_1_0.distcp", "o1"),
        ("__save-1_2_0.distcp", None),
        ("__save-1_3_0.distcp", None),
    ]


@pytest.mark.parametrize("nbytes", [1, 3000, 1 << 20])
async def test_objects_of_stock_are_verified_however_many_are_in_memory_at_once(
    executor, tmp_path, monkeypatch, nbytes
):
    monkeypatch.setattr(scrub, "_OBJECT_BYTES", nbytes)
    path = tmp_path / "x"
    stock_save(path, {f"o{number}": f"value {number}" for number in range(9)})
    assert not await verify(executor, path)
    data = (path / "__0_0.distcp").read_bytes()
    for number in (0, 4, 8):
        flip(path / "__0_0.distcp", data.index(f"value {number}".encode()))
    assert [fault.tensor for fault in await verify(executor, path)] == ["o0", "o4", "o8"]


async def test_metadata_that_tells_another_place_than_the_manifest_is_found(executor, tmp_path):
    path = save_state(tmp_path / "c", {"a": torch.ones(10), "b": torch.zeros(10)})
    data = (path / ".metadata").read_bytes()
    changed = data.replace(b"__save-1_0_0.distcp", b"__save-1_7_0.distcp")
    assert changed != data
    root = root_manifest.decode_root(saved_files.root_manifest(path).read_bytes(), name="r")
    fields = {name: getattr(root, name) for name in root.__struct_fields__}
    fields["metadata"] = write_small(path / ".metadata", changed)
    saved_files.root_manifest(path).write_bytes(root_manifest.encode_root(root_manifest.RootManifest(**fields)))
    assert [(fault.file, fault.tensor) for fault in await verify(executor, path)] == [
        (".metadata", "a"),
        (".metadata", "b"),
    ]


async def test_a_manifest_that_describes_another_item_than_the_zip_is_found(executor, tmp_path):
    path = save_state(tmp_path / "c", {"t": torch.arange(50.0).reshape(5, 10)})
    forge(path, stride=(1, 5))
    faults = await verify(executor, path)
    assert [(fault.file, fault.tensor) for fault in faults] == [("__save-1_0_0.distcp", "t")]
    assert "disagree" in faults[0].message


async def test_a_manifest_that_describes_another_place_than_the_zip_is_found(executor, tmp_path):
    path = save_state(tmp_path / "c", {"empty": torch.empty(0, 10)})
    (entry,) = manifest.decode_rank(rank_manifest(path).read_bytes(), name="m").tensors
    forge(path, raw_offset=entry.raw_offset + 1)
    (fault,) = await verify(executor, path)
    assert (fault.tensor, "disagree" in fault.message) == ("empty", True)


async def test_a_zip_whose_own_sum_is_not_that_of_its_blocks_is_found(executor, tmp_path):
    path = save_state(tmp_path / "c", {"t": torch.arange(400_000.0)})
    file = data_file(path)
    item = manifest.decode_rank(rank_manifest(path).read_bytes(), name="m").tensors[0]
    data = file.read_bytes()
    with zipfile.ZipFile(io.BytesIO(data[item.item_offset : item.item_offset + item.item_bytes])) as archive:
        (info,) = (info for info in archive.infolist() if info.filename.endswith("data/0"))
    at = data.rindex(info.CRC.to_bytes(4, "little"))
    flip(file, at)
    forge(path, crc32=isal_zlib.crc32(file.read_bytes()))
    faults = await verify(executor, path)
    assert [(fault.file, fault.tensor) for fault in faults] == [("__save-1_0_0.distcp", "t")]
    assert "blocks" in faults[0].message


async def test_a_name_that_only_the_metadata_knows_is_found(executor, tmp_path):
    path = save_state(tmp_path / "c", {"a": torch.ones(10), "b": torch.empty(0)})
    forge(path)  # drops "b", which has no sums, from the manifest
    assert [(fault.file, fault.tensor) for fault in await verify(executor, path)] == [(".metadata", None)]


async def test_damage_in_a_plain_dcp_checkpoint_is_found_and_named(executor, tmp_path):
    path = stock_save(tmp_path / "c", some_state() | {"n": 1})
    file = data_file(path)
    data = file.read_bytes()
    flip(file, data.index(np.arange(100.0, 200.0, dtype=np.float32).tobytes()))
    flip(file, data.index(bytes([35, 75, 36, 75, 37])))
    assert {(fault.file, fault.tensor) for fault in await verify(executor, path)} == {
        ("__0_0.distcp", "big"),
        ("__0_0.distcp", "obj"),
    }
    file.unlink()
    assert "missing" in (await verify(executor, path))[0].message
    (path / ".metadata").write_bytes(b"garbage")
    assert [fault.file for fault in await verify(executor, path)] == [".metadata"]


class Tagged(torch.Tensor):
    """What only running code could bring back as it was."""


def odd_tensors():
    lazy = {"conj": torch.randn(300, dtype=torch.complex64).conj(), "neg": torch._neg_view(torch.arange(200.0))}
    return lazy | {"tagged": torch.arange(300.0).as_subclass(Tagged), "buffer": torch.nn.Buffer(torch.arange(400.0))}


async def test_tensors_that_are_not_plain_are_no_fault_and_damage_in_them_is(executor, tmp_path):
    path = stock_save(tmp_path / "c", odd_tensors())
    assert await verify(executor, path) == ()
    file = data_file(path)
    starts = {index.fqn: info.offset for index, info in dcp.FileSystemReader(path).read_metadata().storage_data.items()}
    data = file.read_bytes()
    for name, start in starts.items():
        raw = data.index(np.arange(100.0, 150.0, dtype=np.float32).tobytes(), start) if name != "conj" else start + 1000
        flip(file, raw)
        assert [(fault.file, fault.tensor) for fault in await verify(executor, path)] == [(file.name, name)]
        file.write_bytes(data)


async def test_what_is_no_checkpoint_is_an_error_not_a_fault(executor, tmp_path):
    with pytest.raises(CheckpointNotFoundError):
        await verify(executor, tmp_path)


# -- ranges that are summed -----------------------------------------------------------------------------


@FEW
@given(
    nbytes=st.integers(0, 100_000),
    edges=st.lists(st.tuples(st.integers(0, 99_999), st.integers(0, 30_000)), max_size=12),
)
def test_ranges_and_the_whole_file_are_summed_whether_ranges_overlap_or_not(executor, tmp_path_factory, nbytes, edges):
    folder = tmp_path_factory.mktemp("file")
    data = np.random.default_rng(nbytes).bytes(nbytes)
    (folder / "f").write_bytes(data)
    ranges = [(start, min(length, nbytes - start)) for start, length in edges if start < nbytes]
    wrong = {number for number, (_, length) in enumerate(ranges) if length and number % 3 == 0}
    spans = [
        scrub._CheckedRange(
            start, length, isal_zlib.crc32(data[start : start + length]) ^ (number in wrong), str(number)
        )
        for number, (start, length) in enumerate(ranges)
    ]
    faults, read = [], []

    async def run():
        async with Files(Storage(executor, "auto"), folder, page_cache="pass") as files:
            await files.measure(["f"], {})
            found = scrub._Verification(files, executor, 2, read.append, faults=faults)
            return await found._check_ranges("f", spans)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scrub, "_PART_BYTES", 4 * PAGE_BYTES)
        assert asyncio.run(run()) == isal_zlib.crc32(data)
    assert {fault.tensor for fault in faults} == {str(number) for number in wrong}
    assert sum(read) == nbytes
