from __future__ import annotations

import struct

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples

from aio_ckpt.errors import CorruptCheckpointError, FormatVersionError
from aio_ckpt.format.checkpoint_files import data_file_name
from aio_ckpt.format.constants import BLOCK_BYTES
from aio_ckpt.format.rank_manifest import FrozenOut, ObjectEntry, decode_rank, encode_rank, encode_static
from aio_ckpt.format.root_manifest import (
    FORMAT_MAJOR,
    FORMAT_MINOR,
    FROZEN_FORMAT,
    FileEntry,
    data_files_of,
    decode_root,
)
from aio_ckpt.format.tensor_columns import StoredColumns, TensorEntry

TENSOR = TensorEntry(("a", "tied"), "bfloat16", (3, 1 << 20), (1, 3), (0, 7), 0, 6 << 20 | 1024, 512, 6 << 20)
SMALL = TensorEntry(("b",), "int64", (), (), (), 7 << 20, 600, (7 << 20) + 512, 8)
EMPTY = TensorEntry(("c",), "float32", (0, 4), (4, 1), (0, 0), 8 << 20, 600, (8 << 20) + 512, 0)
OBJECT = ObjectEntry(("step",), 9 << 20, 400, 5)
FILE = FileEntry(data_file_name("s", 1), 10 << 20, 0xFFFFFFFF)
SUMS = struct.pack("<7I", *range(7))


def encoded(**changes: object) -> bytes:
    values = {"save_id": "s", "step": 4, "rank": 1, "world_size": 2, "file": FILE, "skeleton": b"sk"}
    values |= {"tensors": encode_static([TENSOR, SMALL, EMPTY]), "sums": SUMS, "objects": [OBJECT]} | changes
    return encode_rank(**values)


def raw_rank(**changes: object) -> bytes:
    return msgspec.msgpack.encode(fields_of(encoded()) | changes)


def fields_of(data: bytes) -> dict:
    return msgspec.msgpack.decode(data, strict=False)


def test_a_rank_manifest_comes_back_as_it_was():
    found = decode_rank(encoded(), name="m")
    assert found.tensors == (TENSOR, SMALL, EMPTY)
    assert (found.objects, found.file, found.sums, found.skeleton) == ((OBJECT,), FILE, SUMS, b"sk")
    assert (found.save_id, found.step, found.rank, found.world_size) == ("s", 4, 1, 2)
    assert (found.format, found.block_bytes) == ((FORMAT_MAJOR, FORMAT_MINOR), BLOCK_BYTES)


FROZEN = FrozenOut(
    file=FileEntry(data_file_name("s", 1, is_frozen=True), 1 << 20, 7),
    sums=b"four",
    columns=msgspec.Raw(encode_static([msgspec.structs.replace(SMALL, fqns=("f",), item_offset=0, raw_offset=64)])),
)


def test_a_frozen_file_has_a_table_of_its_own_and_a_version_that_older_readers_refuse():
    found = decode_rank(encoded(frozen=FROZEN), name="m")
    main, frozen = found.data_files
    assert found.format == FROZEN_FORMAT == (2, 0)
    assert (main.file, main.tensors, main.objects, main.sums) == (FILE, (TENSOR, SMALL, EMPTY), (OBJECT,), SUMS)
    assert (frozen.file, frozen.objects, frozen.block_bytes) == (FROZEN.file, (), BLOCK_BYTES)
    assert [(entry.fqns, entry.raw_offset) for entry in frozen.tensors] == [(("f",), 64)]
    assert frozen.block_sums() == [struct.unpack("<I", b"four")]
    assert found.tensors == (*main.tensors, *frozen.tensors)
    assert data_files_of(encoded(frozen=FROZEN), name="m") == [FILE, FROZEN.file]
    assert data_files_of(encoded(), name="m") == [FILE]


def test_numbers_of_a_frozen_file_are_checked_like_those_of_the_other():
    short = msgspec.structs.replace(FROZEN, file=FileEntry("f", 71, 7))
    with pytest.raises(
        CorruptCheckpointError, match=r"m: tensor 'f': .* data file of 71 bytes do not lie in each other"
    ):
        decode_rank(encoded(frozen=short), name="m")
    with pytest.raises(CorruptCheckpointError, match="m: 8 bytes of sums for 1 blocks"):
        decode_rank(encoded(frozen=msgspec.structs.replace(FROZEN, sums=b"twice 4.")), name="m")


def test_a_rank_that_stored_nothing_has_a_manifest():
    found = decode_rank(encoded(file=None, tensors=encode_static([]), sums=b"", objects=()), name="m")
    assert found.file is None
    assert found.data_files == ()


def test_block_sums_are_split_by_item_and_an_empty_tensor_has_none():
    assert decode_rank(encoded(), name="m").data_files[0].block_sums() == [(0, 1, 2, 3, 4, 5), (6,), ()]


def test_fields_of_a_newer_minor_version_are_ignored():
    data = raw_rank(format=[FORMAT_MAJOR, FORMAT_MINOR + 9], news={"x": 1}, file=[FILE.name, FILE.nbytes, 3, "new"])
    found = decode_rank(data, name="m")
    assert found.format == (FORMAT_MAJOR, FORMAT_MINOR + 9)
    assert found.tensors[0] == TENSOR


def test_a_newer_major_version_is_refused_by_name_even_if_nothing_else_is_known():
    data = msgspec.msgpack.encode({"format": [3, 3], "all_else": "is new"})
    with pytest.raises(FormatVersionError, match=r"m\.bin.* 3\.3.* 2\.0"):
        decode_rank(data, name="m.bin")
    with pytest.raises(FormatVersionError, match=r"r\.json.* 3\.3.* 2\.0"):
        decode_root(b'{"format": [3, 3]}', name="r.json")


def test_a_major_version_that_never_was_is_corrupt():
    with pytest.raises(CorruptCheckpointError, match=r"0\.1"):
        decode_rank(raw_rank(format=[0, 1]), name="m")


BAD_FIELDS = {
    "step": (-1, 1 << 63, 1.5, None, "1", True),
    "rank": (-1, 2, 1 << 70 - 8),
    "world_size": (0, -1, 1),
    "block_bytes": (0, -1, BLOCK_BYTES * 2),
    "format": ([1], [1, 0, 0], [1, -1], "1.0"),
    "save_id": (1, None),
    "skeleton": (None, 1),
    "sums": (SUMS[:-1], SUMS[:-4], SUMS + bytes(4), None),
    "file": (
        None,
        ["x", -1, 0],
        ["x", 10 << 20, -1],
        ["x", 10 << 20, 1 << 32],
        ["x", 9 << 20, 0],
        ["x", 1 << 63, 0],
        ["../x", 10 << 20, 0],
        ["..", 10 << 20, 0],
        ["", 10 << 20, 0],
        ["a\0", 10 << 20, 0],
        ["x" * 256, 10 << 20, 0],
    ),
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in BAD_FIELDS for value in BAD_FIELDS[field]])
def test_every_field_of_a_rank_manifest_is_checked(field, value):
    with pytest.raises(CorruptCheckpointError, match=r"m\.bin"):
        decode_rank(raw_rank(**{field: value}), name="m.bin")


BAD_TENSOR = {
    "dtype": ("nothing", "float32", "load"),
    "shape": ((3, 1 << 19), (-3, -(1 << 20)), (3 << 20,), (0, 1 << 20), (True, 1 << 20), (1,) * 65),
    "stride": ((1, 4), (1,), (-1, 3), (1 << 62, 1 << 62), (0, 0), (2, 3)),
    "offsets": ((0,), (0, -1), (0, 1 << 63)),
    "item_offset": (-1, 513, 10 << 20),
    "item_bytes": (-1, 512, 6 << 20, 11 << 20, 1 << 62),
    "raw_offset": (-1, 1025, 1 << 62),
    "raw_bytes": (-1, 0, (6 << 20) - 1, (6 << 20) + 1, 1 << 62),
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in BAD_TENSOR for value in BAD_TENSOR[field]])
def test_every_number_of_a_tensor_entry_is_checked(field, value):
    entry = msgspec.structs.replace(TENSOR, **{field: value})
    with pytest.raises(CorruptCheckpointError, match=r"m\.bin"):
        decode_rank(encoded(tensors=encode_static([entry, SMALL, EMPTY])), name="m.bin")


def columns(**changes: object) -> bytes:
    """A manifest whose columns were changed."""
    fields = fields_of(encoded())
    stored = dict(zip(StoredColumns.__struct_fields__, fields["columns"], strict=True)) | changes
    return msgspec.msgpack.encode(fields | {"columns": list(stored.values())})


def i64(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}q", *numbers)


SIGNATURES = [
    ["bfloat16", [3, 1 << 20], [1, 3], 2, 6 << 20],
    ["int64", [], [], 0, 8],
    ["float32", [0, 4], [4, 1], 2, 0],
]
BAD_COLUMNS = {
    "names": (("a", "b"), ("a", "b", "c", "d"), ("a", "b", 3), (), None),
    "ties": ({3: ("x",)}, {-1: ("x",)}, {0: ()}, {0: (1,)}, {"0": ("x",)}, None),
    "signature_numbers": (
        struct.pack("<3I", 0, 1, 3),
        struct.pack("<3I", 0, 1, 0xFFFFFFFF),
        struct.pack("<3I", 1, 0, 2),
        struct.pack("<2I", 0, 1),
        struct.pack("<3I", 0, 1, 2)[:-1],
        b"",
        [0, 1, 2],
    ),
    "signatures": (
        (),
        SIGNATURES[:2],
        *([[name, *SIGNATURES[0][1:]], *SIGNATURES[1:]] for name in ("nothing", "float32", 5)),
        *(
            [[name, [3, count], [1, 3], 2, 6 << 20], *SIGNATURES[1:]]
            for name, count in (("quint8", 2 << 20), ("qint32", 1 << 19))
        ),
        *([["bfloat16", *look], *SIGNATURES[1:]] for look in ([[3], [1], 1, 6], [[3, 1 << 20], [1, 4], 2, 6 << 20])),
        *(
            [["bfloat16", [3, 1 << 20], [1, 3], dims, raw], *SIGNATURES[1:]]
            for dims, raw in ((1, 6 << 20), (2, 7), (2, -1))
        ),
        [*SIGNATURES, ["nothing", [], [], 0, 0]],
    ),
    "global_shapes": (
        [None],
        *([whole, None, None] for whole in ([3], [2, 1 << 20], [3, 1 << 20], [3, -1], [3, 1 << 63], "x")),
    ),
    "shards": ({0: (0, 1 << 62)}, {0: (7,)}, {0: (0, -1)}, {0: (0, 1 << 63)}, {3: (0, 1)}, {1: (1,)}),
    "item_offsets": (i64(-1, 7 << 20, 8 << 20), i64(513, 7 << 20, 8 << 20), i64(1 << 62, 1, 1), i64(0, 1), b"x" * 23),
    "item_bytes": (i64(512, 600, 600), i64(11 << 20, 600, 600), i64(-(1 << 63), 600, 600), b""),
    "raw_offsets": (
        i64(512, -8, (8 << 20) + 512),
        i64(1025, 7 << 20, 8 << 20),
        i64((1 << 63) - 1, 1, 1),
        i64(1, 2, 3, 4),
    ),
}


def test_unchanged_columns_are_read_as_they_were():
    assert decode_rank(columns(signatures=SIGNATURES), name="m").tensors == (TENSOR, SMALL, EMPTY)


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in BAD_COLUMNS for value in BAD_COLUMNS[field]])
def test_every_number_of_the_columns_is_checked(field, value):
    with pytest.raises(CorruptCheckpointError, match=r"m\.bin"):
        decode_rank(columns(**{field: value}), name="m.bin")


def test_items_without_a_data_file_are_corrupt_even_if_they_are_empty():
    empty = ObjectEntry(("o",), 0, 0, 0)
    with pytest.raises(CorruptCheckpointError, match="no data file"):
        decode_rank(encoded(file=None, tensors=encode_static([]), sums=b"", objects=[empty]), name="m")


@pytest.mark.parametrize("dims", [64, 65])
def test_a_tensor_has_at_most_64_dimensions(dims):
    ones = (1,) * dims
    data = encoded(tensors=encode_static([TensorEntry(("d",), "int8", ones, ones, ones, 0, 9, 0, 1)]), sums=bytes(4))
    if dims == 64:
        assert decode_rank(data, name="m").tensors[0].shape == ones
    else:
        with pytest.raises(CorruptCheckpointError, match="64"):
            decode_rank(data, name="m")


def test_a_tensor_beyond_the_data_file_is_named():
    entry = msgspec.structs.replace(SMALL, item_offset=10 << 20, raw_offset=10 << 20)
    with pytest.raises(CorruptCheckpointError, match="'b'"):
        decode_rank(encoded(tensors=encode_static([TENSOR, entry, EMPTY])), name="m")


@pytest.mark.parametrize(
    "change", [{"fqns": ()}, {"offset": -1}, {"offset": 10 << 20}, {"nbytes": 2 << 20}, {"nbytes": -1}, {"crc32": -1}]
)
def test_every_number_of_an_object_entry_is_checked(change):
    with pytest.raises(CorruptCheckpointError, match=r"m\.bin"):
        decode_rank(encoded(objects=[msgspec.structs.replace(OBJECT, **change)]), name="m.bin")


def test_a_truncated_rank_manifest_is_corrupt_at_every_length():
    data = encoded()
    for stop in range(len(data)):
        with pytest.raises(CorruptCheckpointError):
            decode_rank(data[:stop], name="m")


@examples(300)
@given(st.data())
def test_a_rank_manifest_with_damaged_bytes_is_read_or_refused_as_corrupt(data):
    damaged = bytearray(encoded())
    for at in data.draw(st.lists(st.integers(0, len(damaged) - 1), min_size=1, max_size=3)):
        damaged[at] = data.draw(st.integers(0, 255))
    try:
        found = decode_rank(bytes(damaged), name="m")
    except (CorruptCheckpointError, FormatVersionError):
        return
    for entry in found.tensors:
        assert entry.raw_offset + entry.raw_bytes <= found.file.nbytes


@examples(50)
@given(st.lists(st.tuples(st.text(max_size=8), st.lists(st.integers(0, 9), max_size=4))))
def test_any_contiguous_tensors_come_back_as_they_were(drawn):
    entries, at, sums = [], 0, b""
    for name, shape in drawn:
        tensor = torch.empty(shape, dtype=torch.float64)
        nbytes = tensor.numel() * 8
        entries.append(
            TensorEntry(
                (name,), "float64", tuple(shape), tensor.stride(), (0,) * len(shape), at, nbytes + 600, at + 512, nbytes
            )
        )
        at += nbytes + 600
        sums += bytes(4) if nbytes else b""
    data = encoded(file=FileEntry("f", at, 0), tensors=encode_static(entries), sums=sums, objects=())
    assert decode_rank(data, name="m").tensors == tuple(entries)
