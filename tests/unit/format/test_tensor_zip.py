"""The zip envelope of one tensor: what we render, stock torch reads; what stock torch writes, we parse."""

from __future__ import annotations

import io
import math
import os
import pickle
import resource
import struct
import tracemalloc
import zipfile
import zlib
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import example, given
from hypothesis import strategies as st
from overlapping_zip import overlapping
from property_examples import examples
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from aio_ckpt.errors import CorruptCheckpointError, UnsupportedLeafError
from aio_ckpt.format import zip_records
from aio_ckpt.format.constants import TensorSpec
from aio_ckpt.format.tensor_pickle import STORABLE_DTYPES
from aio_ckpt.format.tensor_zip import (
    HEAD_BYTES,
    TAIL_BYTES,
    ParsedItem,
    fill_crc,
    is_dense,
    parse,
    records_of,
    render,
    stored_stride,
)

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

ALL_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
STORABLE = [dtype for dtype in ALL_DTYPES if dtype in STORABLE_DTYPES]
QUICK = examples(150)
REFUSED = (CorruptCheckpointError, UnsupportedLeafError)


def raw_bytes(spec: TensorSpec) -> int:
    """Length of the raw bytes of a dense tensor."""
    return math.prod(spec.shape) * spec.dtype.itemsize


@st.composite
def dense_specs(draw: st.DrawFn) -> TensorSpec:
    """A permuted contiguous tensor; a dimension of size 1 may have any stride."""
    shape = draw(st.lists(st.integers(0, 5), max_size=5))
    order = draw(st.permutations(range(len(shape))))
    stride, slots = [0] * len(shape), 1
    for dim in order:
        stride[dim] = slots if shape[dim] != 1 or draw(st.booleans()) else draw(st.integers(0, 1 << 40))
        slots *= max(shape[dim], 1)
    if 0 in shape:
        stride = list(stored_stride(shape, stride))
    return TensorSpec(draw(st.sampled_from(STORABLE)), tuple(shape), tuple(stride))


def view_of(raw: bytes, spec: TensorSpec, offset: int = 0) -> torch.Tensor:
    storage = torch.UntypedStorage(len(raw))
    if raw:
        torch.empty(0, dtype=torch.uint8).set_(storage).copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
    return torch.empty(0, dtype=spec.dtype).set_(storage, offset, spec.shape, spec.stride)


def bytes_of(tensor: torch.Tensor) -> bytes:
    storage = tensor.untyped_storage()
    return bytes(torch.empty(0, dtype=torch.uint8).set_(storage).numpy())


def item_of(spec: TensorSpec, raw: bytes) -> bytes:
    envelope = render(spec)
    trailer = bytearray(envelope.trailer)
    fill_crc(trailer, envelope, zlib.crc32(raw))
    return envelope.header + raw + bytes(trailer)


def parse_whole(item: bytes) -> ParsedItem:
    return parse(item[:HEAD_BYTES], item[-TAIL_BYTES:], len(item))


def stock_item(value: object, **kwargs: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **kwargs)
    return buffer.getvalue()


def foreign_item(pickled: bytes, data: bytes = b"\0" * 8, method: int = zipfile.ZIP_STORED, **more: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, body in {"data.pkl": pickled, "byteorder": b"little", **more, "data/0": data}.items():
            archive.writestr(f"archive/{name}", body)
    return buffer.getvalue()


def tensor_pickle(slots: object, offset: object, shape: object, stride: object) -> bytes:
    """A pickle like torch's own with any numbers in it."""

    class Ref:
        pass

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: object) -> object:
            return ("storage", torch.FloatStorage, "0", "cpu", slots) if isinstance(value, Ref) else None

    class Tensor:
        def __reduce__(self) -> object:
            return torch._utils._rebuild_tensor_v2, (Ref(), offset, shape, stride, False, OrderedDict())

    buffer = io.BytesIO()
    Pickler(buffer, 2).dump(Tensor())
    return buffer.getvalue()


def check_invariant(parsed: ParsedItem, item_bytes: int) -> None:
    assert 0 < parsed.raw_offset <= parsed.raw_offset + parsed.raw_bytes < item_bytes
    assert math.prod(parsed.shape) * parsed.dtype.itemsize <= parsed.raw_bytes
    if 0 not in parsed.shape:
        steps = sum((size - 1) * step for size, step in zip(parsed.shape, parsed.stride, strict=True))
        assert (parsed.storage_offset + steps + 1) * parsed.dtype.itemsize <= parsed.raw_bytes


# -- geometry ----------------------------------------------------------------------------------------------


@QUICK
@given(st.lists(st.integers(0, 4), max_size=5), st.data())
def test_dense_means_that_every_slot_is_used_exactly_once(shape, data):
    stride = data.draw(st.lists(st.integers(0, 30), min_size=len(shape), max_size=len(shape)))
    used = [0]
    for size, step in zip(shape, stride, strict=True):
        used = [slot + index * step for slot in used for index in range(size)]
    assert is_dense(shape, stride) == (sorted(used) == list(range(math.prod(shape))))


@QUICK
@given(dense_specs(), st.integers(2, 4))
def test_stored_stride_is_the_own_one_if_dense_else_that_of_contiguous(spec, gap):
    assert is_dense(spec.shape, spec.stride)
    assert stored_stride(spec.shape, spec.stride) == spec.stride
    spread = tuple(step * gap for step in spec.stride)
    if math.prod(spec.shape) > 1:
        assert not is_dense(spec.shape, spread)
        assert stored_stride(spec.shape, spread) == torch.empty(spec.shape, device="meta").stride()


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1, 0), (3, 4)])
def test_stored_stride_of_empty_and_scalar_is_what_torch_gives(shape):
    assert stored_stride(shape, (7,) * len(shape)) == torch.empty(shape).stride()


# -- what we render, stock tools read ----------------------------------------------------------------------


@QUICK
@given(dense_specs(), st.randoms(use_true_random=False))
def test_torch_load_gives_back_every_bit_with_dtype_shape_and_stride(spec, random):
    raw = random.randbytes(raw_bytes(spec))
    item = item_of(spec, raw)
    loaded = torch.load(io.BytesIO(item), weights_only=True)
    assert type(loaded) is torch.Tensor
    assert (loaded.dtype, tuple(loaded.shape), loaded.stride()) == (spec.dtype, spec.shape, spec.stride)
    assert bytes_of(loaded) == raw
    assert not loaded.requires_grad


@QUICK
@given(dense_specs(), st.randoms(use_true_random=False))
def test_zipfile_proves_an_item_and_finds_a_flipped_bit(spec, random):
    raw = random.randbytes(raw_bytes(spec))
    item = bytearray(item_of(spec, raw))
    assert zipfile.ZipFile(io.BytesIO(item)).testzip() is None
    if raw:
        item[parse_whole(item).raw_offset + random.randrange(len(raw))] ^= 1 << random.randrange(8)
        assert zipfile.ZipFile(io.BytesIO(item)).testzip() == "archive/data/0"


@QUICK
@given(dense_specs(), st.randoms(use_true_random=False))
def test_parse_finds_what_render_put_there(spec, random):
    raw = random.randbytes(raw_bytes(spec))
    item = item_of(spec, raw)
    assert parse_whole(item) == ParsedItem(
        dtype=spec.dtype,
        shape=spec.shape,
        stride=spec.stride,
        storage_offset=0,
        raw_offset=len(render(spec).header),
        raw_bytes=len(raw),
        crc32=zlib.crc32(raw),
    )


@QUICK
@given(dense_specs())
def test_raw_bytes_begin_at_a_multiple_of_64_and_the_envelope_is_below_one_kib(spec):
    envelope = render(spec)
    assert len(envelope.header) % 64 == 0
    assert len(envelope.header) + len(envelope.trailer) < 1024
    assert envelope.item_bytes == len(envelope.header) + raw_bytes(spec) + len(envelope.trailer)


def test_an_ordinary_envelope_is_as_small_as_designed():
    envelope = render(TensorSpec(torch.bfloat16, (4096, 4096), (4096, 1)))
    assert len(envelope.header) + len(envelope.trailer) == 668


def test_the_crc_stands_in_the_trailer_only_and_twice():
    spec = TensorSpec(torch.float32, (3,), (1,))
    envelope = render(spec)
    trailer = bytearray(envelope.trailer)
    fill_crc(memoryview(trailer), envelope, 0xFFFFFFFF)
    changed = [at for at, (old, new) in enumerate(zip(envelope.trailer, trailer, strict=True)) if old != new]
    assert changed == [offset + byte for offset in envelope.crc_offsets for byte in range(4)]
    descriptor, entry = envelope.crc_offsets
    assert envelope.trailer[descriptor - 4 : descriptor] == b"PK\7\10"
    assert envelope.trailer[entry - 16 : entry - 12] == b"PK\1\2"


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_storable_is_every_dtype_that_torch_itself_saves_and_loads_as_plain_tensor(dtype):
    if dtype.is_floating_point or dtype.is_complex or not str(dtype).startswith(("torch.q", "torch.uint", "torch.int")):
        expected = True
    else:
        expected = str(dtype) in {f"torch.{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
    assert (dtype in STORABLE_DTYPES) == expected
    spec = TensorSpec(dtype, (2, 3), (1, 2))
    if not expected:
        with pytest.raises(UnsupportedLeafError, match=str(dtype)):
            render(spec)
        return
    raw = bytes(range(6 * dtype.itemsize))
    assert bytes_of(torch.load(io.BytesIO(item_of(spec, raw)), weights_only=True)) == raw
    stock = parse_whole(stock_item(view_of(raw, spec)))
    assert (stock.dtype, stock.shape, stock.stride, stock.raw_bytes) == (dtype, (2, 3), (1, 2), len(raw))


def test_a_stride_that_is_not_dense_is_refused():
    with pytest.raises(ValueError, match="stored_stride"):
        render(TensorSpec(torch.float32, (2, 3), (6, 2)))


def test_more_dimensions_than_a_manifest_holds_are_refused_rather_than_written_unreadable():
    shape = (1,) * 64
    spec = TensorSpec(torch.float32, shape, stored_stride(shape, shape))
    assert parse_whole(item_of(spec, b"\0\0\x80\x3f")).shape == shape
    for dims in (65, 10_000):
        with pytest.raises(UnsupportedLeafError, match="dimensions"):
            render(TensorSpec(torch.float32, (1,) * dims, (1,) * dims))


def test_the_same_spec_is_rendered_once_and_to_the_same_bytes():
    spec = TensorSpec(torch.float16, (7, 5), (5, 1))
    first = render(spec)
    assert render(TensorSpec(torch.float16, (7, 5), (5, 1))) is first
    render.cache_clear()
    assert render(spec) == first


@pytest.mark.filterwarnings("ignore:torch.distributed is ")
def test_dcp_reads_an_item_through_a_slice_of_a_file(tmp_path: Path):
    specs = {
        "a": TensorSpec(torch.float32, (4, 3), (1, 4)),
        "b": TensorSpec(torch.bfloat16, (), ()),
        "c": TensorSpec(torch.float8_e4m3fn, (5, 2), (2, 1)),
    }
    raws = {name: bytes(range(40, 40 + raw_bytes(spec))) for name, spec in specs.items()}
    image, tensors, places = b"\xab" * 64, {}, {}
    for name, spec in specs.items():
        item = item_of(spec, raws[name])
        chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(spec.shape)), sizes=torch.Size(spec.shape))
        size = torch.Size(spec.shape)
        tensors[name] = TensorStorageMetadata(TensorProperties(dtype=spec.dtype), size, [chunk])
        places[MetadataIndex(name, chunk.offsets)] = _StorageInfo("__0_0.distcp", len(image), len(item))
        image += item + bytes(-len(item) % 64)
    (tmp_path / "__0_0.distcp").write_bytes(image)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Metadata(tensors, storage_data=places)))
    target = {name: torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype) for name, spec in specs.items()}
    dcp.load(target, storage_reader=dcp.FileSystemReader(tmp_path))
    assert {name: bytes_of(tensor) for name, tensor in target.items()} == raws


# -- above 4 GiB -------------------------------------------------------------------------------------------

U32 = 0xFFFFFFFF


@pytest.mark.parametrize("nbytes", [U32 - 1024, U32 - 400, U32 - 300, U32 - 1, U32, U32 + 1, 5 << 30])
def test_an_item_around_and_above_4_gib_is_read_by_zipfile_torch_and_parse(tmp_path: Path, nbytes: int):
    spec = TensorSpec(torch.uint8, (nbytes,), (1,))
    envelope = render(spec)
    trailer = bytearray(envelope.trailer)
    fill_crc(trailer, envelope, 0x12345678)
    path = tmp_path / "big"
    with path.open("wb") as file:
        file.write(envelope.header + b"first")
        file.seek(len(envelope.header) + nbytes - 4)
        file.write(b"last" + trailer)
    assert path.stat().st_size == envelope.item_bytes
    assert path.stat().st_blocks * 512 < 1 << 20, "the hole took disk"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with zipfile.ZipFile(path) as archive, archive.open("archive/data/0") as record:
        info = archive.getinfo("archive/data/0")
        assert (info.file_size, info.compress_size, info.CRC) == (nbytes, nbytes, 0x12345678)
        assert record.read(5) == b"first"
        assert archive.read("archive/version") == b"3\n"
    with path.open("rb") as file:
        head = file.read(HEAD_BYTES)
        file.seek(-TAIL_BYTES, os.SEEK_END)
        parsed = parse(head, file.read(), envelope.item_bytes)
    assert (parsed.raw_offset, parsed.raw_bytes, parsed.crc32) == (len(envelope.header), nbytes, 0x12345678)
    loaded = torch.load(path, mmap=True, weights_only=True)
    assert loaded.shape == (nbytes,)
    assert (bytes(loaded[:5].tolist()), bytes(loaded[-4:].tolist())) == (b"first", b"last")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10, "the hole was read"


# -- what stock torch writes, we parse ---------------------------------------------------------------------


@QUICK
@given(dense_specs(), st.integers(0, 3), st.integers(0, 3), st.randoms(use_true_random=False))
def test_parse_finds_the_raw_bytes_of_stock_items(spec, before, after, random):
    raw = random.randbytes(raw_bytes(spec) + (before + after) * spec.dtype.itemsize)
    item = stock_item(view_of(raw, spec, before))
    parsed = parse_whole(item)
    assert item[parsed.raw_offset :][: parsed.raw_bytes] == raw
    assert (parsed.dtype, parsed.shape, parsed.stride) == (spec.dtype, spec.shape, spec.stride)
    assert (parsed.storage_offset, parsed.crc32) == (before, zlib.crc32(raw))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("wrap", [torch.nn.Parameter, lambda tensor: tensor], ids=["Parameter", "Tensor"])
def test_parse_reads_tensors_and_parameters_of_any_protocol(wrap, protocol):
    item = stock_item(wrap(torch.arange(6.0).reshape(2, 3)), pickle_protocol=protocol)
    parsed = parse_whole(item)
    assert (parsed.dtype, parsed.shape, parsed.stride) == (torch.float32, (2, 3), (3, 1))
    assert item[parsed.raw_offset :][:24] == struct.pack("<6f", *range(6))


def test_parse_needs_only_the_two_ends_of_a_large_stock_item():
    tensor = torch.arange(100_000)
    item = stock_item(tensor)
    parsed = parse_whole(item)
    assert parsed.raw_bytes == 800_000
    assert item[parsed.raw_offset :][: parsed.raw_bytes] == bytes_of(tensor)


@pytest.mark.parametrize("alignment", [512, 4096])
def test_parse_reads_a_stock_item_whose_records_are_aligned(alignment):
    config = pytest.importorskip("torch.utils.serialization", reason="torch 2.6 has no such setting").config
    if not hasattr(config.save, "storage_alignment"):
        pytest.skip("this torch has no such setting")
    with config.patch({"save.storage_alignment": alignment}):
        item = stock_item(torch.arange(100_000))
    assert parse_whole(item).raw_offset % alignment == 0


def test_parse_reads_a_stock_item_without_sums_and_says_so():
    torch.serialization.set_crc32_options(False)
    try:
        item = stock_item(torch.ones(5))
    finally:
        torch.serialization.set_crc32_options(True)
    assert parse_whole(item).crc32 == 0


@pytest.mark.parametrize(
    "value",
    [
        {"a": torch.ones(2)},
        [torch.ones(2), torch.ones(3)],
        3.5,
        torch._neg_view(torch.ones(3, dtype=torch.bool)),
        torch.ones(1).expand(1000),
        torch.eye(3).to_sparse(),
        torch.ones(2, device="meta"),
        torch.nn.Buffer(torch.ones(2)),
        torch.ones(2).untyped_storage(),
        {f"{name:05}": torch.ones(2) for name in range(2000)},
    ],
    ids=["dict", "list", "float", "neg bool", "expanded", "sparse", "meta", "buffer", "storage", "many"],
)
def test_a_stock_file_that_is_no_plain_tensor_is_unsupported_not_corrupt(value):
    with pytest.raises(UnsupportedLeafError):
        parse_whole(stock_item(value))


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("wrap", [lambda tensor: tensor, torch.nn.Parameter], ids=["tensor", "parameter"])
@pytest.mark.parametrize(("is_conj", "is_neg"), [(True, False), (False, True), (True, True), (False, False)])
def test_parse_finds_lazy_conjugates_and_negatives(is_conj, is_neg, wrap, protocol):
    tensor = torch.ones(3, dtype=torch.complex64)
    tensor = torch._neg_view(tensor) if is_neg else tensor
    found = parse_whole(stock_item(wrap(tensor.conj() if is_conj else tensor), pickle_protocol=protocol))
    assert (found.is_conj, found.is_neg) == (is_conj, is_neg)


BITS_AT = tensor_pickle(2, 0, (2,), (1,)).rindex(b"t")
"""Where the last argument of a tensor ends."""
DEEP = b")" + b"\x85" * 20_000
"""A tuple whose hash leaves the stack."""


def with_bits(crafted: bytes) -> bytes:
    """The pickle of a tensor of 2 floats with one argument more."""
    plain = tensor_pickle(2, 0, (2,), (1,))
    return plain[:BITS_AT] + crafted + plain[BITS_AT:]


def test_a_false_bit_is_none_and_a_negative_of_floats_is_read():
    assert parse_whole(foreign_item(with_bits(b"}X\x03\0\0\0neg\x88s"))).is_neg
    assert not parse_whole(foreign_item(with_bits(b"}X\x03\0\0\0neg\x89s"))).is_neg


@pytest.mark.parametrize(
    "crafted",
    [
        b"}",
        b"}X\x03\0\0\0nag\x88s",
        b"}X\x03\0\0\0negNs",
        b"}X\x03\0\0\0negK\x01s",
        b"}(X\x03\0\0\0neg\x88X\x01\0\0\0x\x88u",
        b"}X\x04\0\0\0conj\x88s",
    ],
    ids=["empty", "name", "none", "int", "more", "no complex"],
)
def test_a_dict_that_is_no_lazy_bit_is_refused(crafted):
    with pytest.raises(UnsupportedLeafError):
        parse_whole(foreign_item(with_bits(crafted)))


@pytest.mark.parametrize(
    "crafted",
    [b"}" + DEEP + b"\x88s", DEEP + b"}X\x03\0\0\0neg\x88ss", b"}q\x7f" + DEEP + b"h\x7fs"],
    ids=["deep", "below", "memo"],
)
def test_a_key_whose_hash_would_leave_the_stack_is_refused_before_it_is_made(crafted):
    with pytest.raises(CorruptCheckpointError, match="deeper"):
        parse_whole(foreign_item(with_bits(crafted)))


def test_an_item_of_the_other_byte_order_is_unsupported():
    item = stock_item(torch.ones(2))
    swapped = item.replace(b"little", b"gibtel").replace(struct.pack("<I", zlib.crc32(b"little")), b"\0\0\0\0")
    with pytest.raises(UnsupportedLeafError, match="endian"):
        parse_whole(swapped)


# -- forged and damaged ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slots", "offset", "shape", "stride"),
    [
        (1 << 40, 0, (2,), (1,)),
        (1, 0, (1,), (1,)),
        (2, 0, (3,), (1,)),
        (2, 1, (2,), (1,)),
        (2, 0, (2,), (2,)),
        (2, 0, (1 << 40,), (0,)),
        (2, 0, (1 << 62, 1 << 62), (0, 0)),
        (2, 0, (2,), (1 << 70,)),
        (2, 1 << 70, (0,), (1,)),
        (2, -1, (2,), (1,)),
        (2, 0, (-2,), (1,)),
        (2, 2, (2,), (-1,)),
        (2, 0, (2,), (1, 1)),
        (2, 0, (2.0,), (1,)),
        (2, 0, (True,), (1,)),
        (2, 0, [2], (1,)),
        (2, None, (2,), (1,)),
        (-2, 0, (0,), (1,)),
        ("2", 0, (2,), (1,)),
    ],
)
def test_forged_numbers_of_the_pickle_are_refused(slots, offset, shape, stride):
    check_invariant(parse_whole(foreign_item(tensor_pickle(2, 0, (2,), (1,)))), 10_000)
    with pytest.raises(REFUSED):
        parse_whole(foreign_item(tensor_pickle(slots, offset, shape, stride)))


@examples(600)
@given(st.sampled_from(["ours", "stock", "zip64"]), st.data())
def test_a_damaged_envelope_is_refused_or_still_points_inside_the_item(kind, data):
    spec = TensorSpec(torch.float32, (4, 3), (3, 1))
    if kind == "zip64":  # only its ends exist
        envelope = render(TensorSpec(torch.uint8, (5 << 30,), (1,)))
        item, nbytes = bytearray(envelope.header + bytes(HEAD_BYTES) + envelope.trailer), envelope.item_bytes
    else:
        item = bytearray(item_of(spec, bytes(48)) if kind == "ours" else stock_item(view_of(bytes(48), spec)))
        nbytes = len(item)
    for _ in range(data.draw(st.integers(1, 3))):
        end = data.draw(st.booleans())
        at = data.draw(st.integers(0, min(len(item) - 8, 800)))
        patch = data.draw(st.binary(min_size=1, max_size=8) | st.sampled_from([b"\xff" * 4, b"\xff" * 8, bytes(8)]))
        at = len(item) - 8 - at if end else at
        item[at : at + len(patch)] = patch
    try:
        parsed = parse(bytes(item[:HEAD_BYTES]), bytes(item[-TAIL_BYTES:]), nbytes)
    except REFUSED:
        return
    check_invariant(parsed, nbytes)


@QUICK
@given(st.binary(max_size=300))
@example(b"")
@example(b"PK\5\6" + bytes(18))
@example(b"PK\6\7" + bytes(16) + b"PK\5\6" + bytes(18))
def test_arbitrary_bytes_are_corrupt(data):
    with pytest.raises(CorruptCheckpointError):
        parse_whole(data)


@QUICK
@given(st.binary(max_size=60))
def test_an_arbitrary_pickle_is_refused(data):
    with pytest.raises(REFUSED):
        parse_whole(foreign_item(data))


def test_every_truncation_is_corrupt():
    item = item_of(TensorSpec(torch.float32, (4, 3), (3, 1)), bytes(48))
    for length in range(len(item)):
        with pytest.raises(CorruptCheckpointError):
            parse_whole(item[:length])


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
def test_a_compressed_item_is_corrupt(method):
    with pytest.raises(CorruptCheckpointError, match="compressed"):
        parse_whole(foreign_item(tensor_pickle(2, 0, (2,), (1,)), method=method))


@pytest.mark.parametrize(
    ("magic", "at", "patch", "message"),
    [
        (b"PK\1\2", 10, b"\x08", "local header"),  # method
        (b"PK\1\2", 8, b"\x01", "local header"),  # flags
        (b"PK\1\2", 20, b"\0", "two lengths"),
        (b"PK\3\4", 8, b"\x08", "local header"),
        (b"PK\5\6", 12, b"\0\0", "does not end where"),  # length of the directory
        (b"PK\5\6", 12, b"\xff\xff", "is damaged"),
        (b"PK\5\6", 16, b"\0\0", "does not end where"),  # where the directory begins
    ],
)
def test_a_zip_field_that_disagrees_is_corrupt(magic, at, patch, message):
    item = bytearray(item_of(TensorSpec(torch.float32, (5,), (1,)), bytes(20)))
    at += item.index(magic)
    item[at : at + len(patch)] = patch
    with pytest.raises(CorruptCheckpointError, match=message):
        parse_whole(item)


def test_records_that_overlap_are_refused_before_any_is_read():
    for data in (overlapping(2, bytes(10)), overlapping(5000, bytes(100_000))):
        with pytest.raises(CorruptCheckpointError, match="runs into another"):
            records_of(data)
        with pytest.raises(REFUSED, match=r"runs into another|so many records"):
            parse_whole(data)
    assert records_of(overlapping(1, b"abc"))["data/0"][0] == b"abc"


def test_a_local_header_that_is_longer_than_the_directory_tells_runs_into_no_other_record():
    item = bytearray(item_of(TensorSpec(torch.float32, (5,), (1,)), bytes(20)))
    at = item.index(b"PK\3\4archive/version"[:4], item.index(b"archive/byteorder"))
    struct.pack_into("<H", item, at + 28, 40)
    with pytest.raises(CorruptCheckpointError, match="'archive/version' runs into another"):
        records_of(bytes(item))


@pytest.mark.parametrize("wide", [False, True])
def test_a_directory_that_another_reader_would_find_elsewhere_is_refused(wide: bool):
    """zipfile shifts all offsets by bytes before the zip, and torch does not."""
    item = item_of(TensorSpec(torch.float32, (5,), (1,)), bytes(20))
    if wide:
        _, count, _, size, start = zip_records.END.unpack(item[-22:])
        item = item[:-22] + zip_records.end_of_zip(count, size, start, zip64=True)
        assert records_of(item).keys() >= {"data.pkl", "data/0"}
    with pytest.raises(CorruptCheckpointError, match=r"does not end where|is elsewhere"):
        records_of(b"before" + item)


def test_a_length_beyond_the_item_is_corrupt_even_in_a_record_that_nobody_reads():
    item = bytearray(item_of(TensorSpec(torch.float32, (5,), (1,)), bytes(20)))
    entry = item.rindex(b"archive/version") - 46
    item[entry + 20 : entry + 28] = struct.pack("<2I", 1 << 30, 1 << 30)
    with pytest.raises(CorruptCheckpointError, match="runs into"):
        parse_whole(item)


def test_a_small_record_that_does_not_match_its_sum_is_corrupt():
    item = item_of(TensorSpec(torch.float32, (5,), (1,)), bytes(20))
    with pytest.raises(CorruptCheckpointError, match="CRC32"):
        parse_whole(item.replace(b"K\x05\x85", b"K\x04\x85"))


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_record_named_twice_is_corrupt():
    buffer = io.BytesIO(foreign_item(tensor_pickle(2, 0, (2,), (1,))))
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.writestr("archive/data/0", b"x" * 8)
    with pytest.raises(CorruptCheckpointError, match="twice"):
        parse_whole(buffer.getvalue())


def test_too_little_read_is_refused_rather_than_guessed():
    item = item_of(TensorSpec(torch.float32, (5,), (1,)), bytes(20))
    with pytest.raises(CorruptCheckpointError, match="were read"):
        parse(item[:100], item, len(item))


# -- crafted pickles ---------------------------------------------------------------------------------------


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", [0, 1, 2, 4])
def test_a_crafted_pickle_runs_nothing(tmp_path: Path, protocol: int):
    proof = tmp_path / "ran"
    with pytest.raises(UnsupportedLeafError):
        parse_whole(foreign_item(pickle.dumps(Evil(proof), protocol)))
    assert not proof.exists()


@pytest.mark.parametrize(
    "crafted",
    [
        b"\x80\x02cbuiltins\neval\nX\x01\x00\x00\x001\x85R.",
        b"\x80\x02ctorch._utils\n_rebuild_qtensor\n)R.",
        b"\x80\x02ctorch\nFloatStorage\n)R.",
        b"\x80\x02ccollections\nOrderedDict\nK\x01\x85R.",
        b"\x80\x04\x8c\x08builtins\x8c\x04exec\x93\x8c\x01x\x85R.",
        b"\x80\x02ctorch._utils\n_rebuild_parameter\nK\x01\x89K\x01\x87R.",
        b"\x80\x02K\x01Q.",
        b"\x80\x02h\x07.",
        b"\x80\x02).",
        b"\x80\x02.",
        b"\x80\x02ctorch\nfloat8_e5m2\n.",
        b"\x80\x02ios\nsystem\n.",
        b"\x80\x02\x82\x01.",
    ],
)
def test_names_and_calls_that_no_tensor_needs_are_refused(crafted):
    with pytest.raises(REFUSED):
        parse_whole(foreign_item(crafted))


@pytest.mark.parametrize(
    "crafted",
    [
        b"\x80\x02K\x01r\x00\x00\x00\x08.",  # LONG_BINPUT: the C unpickler sizes its memo by this number
        b"\x80\x05\x96" + struct.pack("<Q", 1 << 33) + b".",  # BYTEARRAY8
        b"\x80\x04\x95" + struct.pack("<Q", 1 << 33) + b"N.",  # FRAME
        b"\x80\x02X" + struct.pack("<I", 1 << 31) + b"x.",  # BINUNICODE
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 33) + b".",  # BINBYTES8
        b"\x80\x02\x8b" + struct.pack("<I", (1 << 31) - 1) + b".",  # LONG4
    ],
    ids=["memo", "bytearray", "frame", "unicode", "bytes", "long"],
)
def test_a_forged_length_in_the_pickle_allocates_nothing(crafted):
    item = foreign_item(crafted)
    tracemalloc.start()
    try:
        with pytest.raises(REFUSED):
            parse_whole(item)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
