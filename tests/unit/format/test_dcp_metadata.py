from __future__ import annotations

import collections
import copyreg
import io
import pathlib
import pickle
import warnings
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples, gate_stride
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from aio_ckpt.errors import CorruptCheckpointError, FormatVersionError
from aio_ckpt.format.checkpoint_files import METADATA_FILE, data_file_name
from aio_ckpt.format.dcp_metadata_read import parse_metadata
from aio_ckpt.format.dcp_metadata_write import MetadataTable, MetadataTemplate, dump_metadata, render_metadata

# -- rendering .metadata --------------------------------------------------------------------------


def tensor_metadata(size: tuple[int, ...] = (2, 3)) -> TensorStorageMetadata:
    whole = ChunkStorageMetadata(torch.Size([0] * len(size)), torch.Size(size))
    return TensorStorageMetadata(TensorProperties(torch.bfloat16), torch.Size(size), [whole])


def make_metadata(
    names: list[str], objects: list[str], numbers: tuple[int, ...] = (), *, file: str = "__0_0.distcp"
) -> Metadata:
    described: dict = {name: tensor_metadata() for name in names} | {name: BytesStorageMetadata() for name in objects}
    places = {MetadataIndex(name, (0, 0), 0): _StorageInfo(file, 1000 * at, 900) for at, name in enumerate(names)}
    paths = {name: (name, *numbers) for name in described}
    return Metadata(described, planner_data=paths, storage_data=places)


def expected(
    metadata: Metadata,
    objects: list[str],
    spans: list,
    checkpoint_id: str,
    save_id: str,
    *,
    file: str = "__0_0.distcp",
) -> Metadata:
    places = metadata.storage_data | {
        MetadataIndex(name): _StorageInfo(file, *span) for name, span in zip(objects, spans, strict=True)
    }
    return replace(metadata, storage_data=places, storage_meta=StorageMeta(checkpoint_id, save_id))


def render(
    names: list[str],
    objects: list[str],
    numbers: tuple[int, ...] = (),
    *,
    files: int = 1,
    order: list[str] | None = None,
) -> MetadataTemplate:
    """The template of :func:`make_metadata`; ``order``: of the paths."""
    count = len(names)
    table = MetadataTable(
        names=names,
        dtypes=["bfloat16"] * count,
        sizes=[(2, 3)] * count,
        starts=np.arange(count + 1),
        offsets=np.zeros((count, 2), np.int64),
        shapes=np.array([[2, 3]] * count, np.int64).reshape(-1, 2),
        file=np.zeros(count, np.int64),
        places=np.array([(1000 * at, 900) for at in range(count)], np.int64).reshape(-1, 2),
        files=[(rank, False) for rank in range(files)],
        objects=[(name, min(at, files - 1)) for at, name in enumerate(objects)],
    )
    return render_metadata(table, {name: (name, *numbers) for name in order or [*names, *objects]})


odd_names = st.text(st.characters() | st.sampled_from("\0\x08X"), max_size=6) | st.sampled_from(
    ["\0name", "\0file", "\0chunks", "\0end", "\0000", "X\x05\0\0\0"]
)
holes = st.sampled_from([1 << 40, (1 << 40) + 100, (1 << 40) + 200, (1 << 40) + 202])
sizes = st.integers(0, 300) | st.integers(0, 1 << 62) | holes


@examples(150)
@given(
    st.lists(odd_names, unique=True, max_size=8),
    st.integers(0, 8),
    st.lists(sizes, max_size=3),
    st.data(),
    odd_names,
    st.text("0123456789abcdef-", min_size=1, max_size=40),
)
def test_a_filled_template_says_what_pickling_the_real_values_says(names, count, numbers, data, checkpoint_id, save_id):
    """Names, numbers and ids that equal what stands for a hole are as any other."""
    objects, tensors = names[:count], names[count:]
    spans = [data.draw(st.tuples(sizes, sizes)) for _ in objects]
    template = render(tensors, objects, tuple(numbers))
    file = data_file_name(save_id, 0)
    filled = b"".join(template.fill(spans, checkpoint_id=checkpoint_id, save_id=save_id))
    wanted = expected(
        make_metadata(tensors, objects, tuple(numbers), file=file), objects, spans, checkpoint_id, save_id, file=file
    )
    assert pickle.loads(filled) == wanted
    assert list(pickle.loads(filled).storage_data) == list(wanted.storage_data)
    assert parse_metadata(filled, name="m") == wanted


def test_values_are_described_in_the_order_of_their_paths():
    """What ``dcp_to_torch_save`` makes of a checkpoint then has the order of the state."""
    template = render(["b", "a"], ["o"], order=["o", "a", "b"])
    found = parse_metadata(b"".join(template.fill([(1, 2)], checkpoint_id="c", save_id="s")), name="m")
    assert list(found.state_dict_metadata) == list(found.planner_data) == ["o", "a", "b"]


def test_a_template_serves_many_saves():
    template = render(["w"], ["o"])
    for span in ((5, 6), (1 << 62, 1 << 40), (0, 0)):
        filled = b"".join(template.fill([span], checkpoint_id="a" * span[0].bit_length(), save_id="é"))
        found = parse_metadata(filled, name="m")
        place = found.storage_data[MetadataIndex("o")]
        assert (place.offset, place.length, found.storage_meta.save_id) == (*span, "é")


def test_each_object_may_lie_in_the_file_of_its_rank():
    template = render([], ["rng.rank0", "rng.rank1"], files=2)
    found = parse_metadata(b"".join(template.fill([(1, 2), (3, 4)], checkpoint_id="c", save_id="s")), name="m")
    assert [found.storage_data[MetadataIndex(f"rng.rank{rank}")] for rank in (0, 1)] == [
        _StorageInfo("__s_0_0.distcp", 1, 2),
        _StorageInfo("__s_1_0.distcp", 3, 4),
    ]


def test_a_template_refuses_another_number_of_places():
    template = render(["w"], ["o"])
    for spans in ([], [(1, 2), (3, 4)]):
        with pytest.raises(ValueError, match="1 objects"):
            template.fill(spans, checkpoint_id="c", save_id="s")


def test_dcp_reads_the_filled_bytes(tmp_path):
    filled = render(["w"], ["o"]).fill([(7, 8)], checkpoint_id="here", save_id="id")
    (tmp_path / METADATA_FILE).write_bytes(b"".join(filled))
    found = dcp.FileSystemReader(tmp_path).read_metadata()
    file = "__id_0_0.distcp"
    wanted = expected(make_metadata(["w"], ["o"], file=file), ["o"], [(7, 8)], "here", "id", file=file)
    assert found.storage_data == wanted.storage_data
    assert (found.storage_meta.checkpoint_id, found.storage_meta.save_id) == ("here", "id")


# -- reading .metadata ----------------------------------------------------------------------------


@pytest.fixture
def stock(tmp_path) -> bytes:
    state = {
        "model": {"w": torch.ones(2, 3), "list": [torch.ones(1), 1], "f8": torch.ones(4).to(torch.float8_e4m3fn)},
        "optim": {0: {"step": torch.tensor(1.0)}, "lr": 0.1},
        "empty": torch.empty(0, 3, dtype=torch.complex64),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP warns that no process group is there
        dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path), no_dist=True)
    return (tmp_path / METADATA_FILE).read_bytes()


@pytest.mark.parametrize("protocol", [None, 2, 3, 4, 5])
def test_what_stock_dcp_saved_is_read_as_pickle_reads_it(stock, protocol):
    wanted = pickle.loads(stock)
    data = stock if protocol is None else pickle.dumps(wanted, protocol=protocol)
    found = parse_metadata(data, name="m")
    assert found == wanted
    assert type(found.storage_meta.checkpoint_id) is type(wanted.storage_meta.checkpoint_id)
    assert [vars(info) for info in found.storage_data.values()] == [vars(info) for info in wanted.storage_data.values()]
    assert all(
        type(entry) is type(wanted.state_dict_metadata[name]) for name, entry in found.state_dict_metadata.items()
    )


def test_the_fields_of_torch_2_6_suffice(stock):
    old = pickle.loads(stock)
    for owner, newer in ((old, "version"), (old.storage_meta, "modules")):
        vars(owner).pop(newer, None)
    assert b"transform_descriptors" not in pickle.dumps(old)
    found = parse_metadata(pickle.dumps(old), name="m")
    assert found.storage_data == old.storage_data
    assert found.storage_meta == replace(found.storage_meta, save_id=old.storage_meta.save_id)
    assert found.state_dict_metadata == old.state_dict_metadata
    assert "StorageMeta" in repr(found)


# -- what other versions of torch write -----------------------------------------------------------


class Properties:
    """Pickles as the ``TensorProperties`` of another torch, with the fields in ``state``."""

    def __init__(self, *state: object, module: str = "torch.distributed.checkpoint.metadata") -> None:
        self.state = state
        self.module = module

    def __reduce__(self):
        return copyreg.__newobj__, (Properties,), self.state


def pickled_with(*state: object, module: str = "torch.distributed.checkpoint.metadata", enum: str = "") -> bytes:
    """A ``.metadata`` whose one tensor ``w`` has these fields, in classes of ``module``."""
    metadata = make_metadata(["w"], [])
    metadata.state_dict_metadata["w"].properties = Properties(*state)
    data = pickle.dumps(metadata, protocol=2)
    mine = f"c{Properties.__module__}\nProperties\n".encode()
    assert data.count(mine) == 1
    data = data.replace(mine, f"c{module}\nTensorProperties\n".encode())
    return data.replace(b"_MEM_FORMAT_ENCODING", enum.encode()) if enum else data


FIELDS = (torch.bfloat16, torch.strided, True, dcp_metadata._MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST, False)


@pytest.mark.parametrize("strides", [None, (1, 2), (3, 1)])
def test_the_sixth_field_of_torch_2_15_is_read_and_kept(strides):
    properties = parse_metadata(pickled_with(*FIELDS, strides), name="m").state_dict_metadata["w"].properties
    assert type(properties) is TensorProperties
    assert (properties.dtype, properties.requires_grad, properties.strides) == (torch.bfloat16, True, strides)
    assert properties.memory_format is torch.channels_last


def test_the_five_fields_of_older_torch_have_no_strides():
    properties = parse_metadata(pickled_with(*FIELDS), name="m").state_dict_metadata["w"].properties
    assert getattr(properties, "strides", None) is None
    assert vars(properties).keys() == vars(TensorProperties()).keys()


def test_fields_that_no_known_torch_writes_are_kept_and_logged(caplog):
    data = pickled_with(*FIELDS, (3, 1), "new", 7)
    metadata = pickle.loads(pickle.dumps(make_metadata(["v"], [])))
    with caplog.at_level("INFO", logger="aio_ckpt"):
        properties = parse_metadata(data, name="m.md").state_dict_metadata["w"].properties
        vars(metadata)["later"] = 5
        found = parse_metadata(pickle.dumps(metadata), name="m2.md")
    assert properties.fields_of_a_newer_torch == ("new", 7)
    assert found.later == 5
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]
    assert "m.md" in caplog.messages[0]
    assert "TensorProperties.fields_of_a_newer_torch" in caplog.messages[0]
    assert "Metadata.later" in caplog.messages[1]


def test_the_plans_that_megatron_stores_are_dropped(caplog):
    metadata = make_metadata(["weight"], ["object"])
    plain = metadata.state_dict_metadata["weight"]
    data = TensorWriteData(plain.chunks[0], plain.properties, plain.size)
    items = [
        WriteItem(MetadataIndex("weight", (0, 0)), WriteItemType.SHARD, tensor_data=data),
        WriteItem(MetadataIndex("object"), WriteItemType.BYTE_IO, bytes_io_data=BytesIOWriteData(1)),
    ]
    metadata.all_local_plans = [SavePlan(items, storage_data="a", planner_data={}), SavePlan([])]
    metadata.mcore_data = {"weight": {}}
    with caplog.at_level("INFO"):
        found = parse_metadata(pickle.dumps(metadata), name=METADATA_FILE)
    assert vars(found) == {name: value for name, value in vars(metadata).items() if name != "all_local_plans"}
    assert not caplog.messages


def test_what_known_versions_write_is_not_logged(stock, caplog):
    with caplog.at_level("DEBUG", logger="aio_ckpt"):
        parse_metadata(stock, name="m")
        parse_metadata(pickled_with(*FIELDS, (3, 1)), name="m")
    assert not caplog.messages


@pytest.mark.parametrize(
    ("module", "enum"),
    [
        ("torch.distributed.checkpoint.metadata", ""),
        ("torch.distributed._shard.sharded_tensor.metadata", ""),
    ],
)
def test_the_class_names_of_old_torch_are_read(module, enum):
    data = pickled_with(*FIELDS, module=module)
    old = data.replace(b"ctorch.distributed.checkpoint.metadata\n_MEM", f"c{module}\n_MEM".encode())
    old = old.replace(b"_MEM_FORMAT", b"MEM_FORMAT") if "_shard" in module else old
    assert parse_metadata(old, name="m") == parse_metadata(pickled_with(*FIELDS), name="m")
    package = old.replace(b"ctorch.distributed.checkpoint.", b"ctorch.distributed._shard.checkpoint.")
    assert parse_metadata(package, name="m") == parse_metadata(pickled_with(*FIELDS), name="m")


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (pickled_with(*FIELDS).replace(b"bfloat16", b"float4x2"), r"torch\.float4x2"),
        (pickled_with(*FIELDS).replace(b"ChunkStorageMetadata", b"CrumbStorageMetadata"), "CrumbStorageMetadata"),
        (pickled_with(*FIELDS[:4]), "TensorProperties pickled as"),
        (pickled_with(*FIELDS, [3, {}]), "TensorProperties with strides"),
        (pickled_with(*FIELDS).replace(b"strided", b"stroked"), "layout 'torch.stroked'"),
        (pickled_with(*FIELDS).replace(b"K\x01\x85", b"K\x09\x85"), "memory format 9"),
    ],
)
def test_what_a_newer_torch_may_have_added_is_named_and_is_no_corruption(data, name):
    with pytest.raises(FormatVersionError, match=rf"m\.md: .*{name}.*a newer torch or a newer aio_ckpt may read it"):
        parse_metadata(data, name="m.md")


class SlotsPickler(pickle.Pickler):
    """Pickles one class as a dataclass with slots pickles: its state is a list, or goes by names to its slots."""

    def __init__(self, file, kind, state):
        super().__init__(file, 2)
        self.kind, self.state = kind, state

    def reducer_override(self, value):
        return (copyreg.__newobj__, (self.kind,), self.state(value)) if type(value) is self.kind else NotImplemented


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        (MetadataIndex, lambda value: [*vars(value).values()]),
        (MetadataIndex, lambda value: (None, vars(value))),
        (ChunkStorageMetadata, lambda value: [*vars(value).values()]),
    ],
)
def test_a_class_that_is_pickled_by_slots_is_no_corruption(kind, state):
    buffer = io.BytesIO()
    SlotsPickler(buffer, kind, state).dump(make_metadata(["w"], []))
    with pytest.raises(FormatVersionError, match=r"m\.md: .*no dict of its fields.*a newer torch"):
        parse_metadata(buffer.getvalue(), name="m.md")
    for stop in range(len(buffer.getvalue())):
        with pytest.raises(CorruptCheckpointError):
            parse_metadata(buffer.getvalue()[:stop], name="m.md")


def test_ordered_dicts_and_plain_tuples_are_read_as_what_they_stand_for():
    wanted = make_metadata(["w"], ["o"])
    entry = replace(tensor_metadata(), size=(2, 3), chunks=[ChunkStorageMetadata((0, 0), (2, 3))])
    described = collections.OrderedDict(wanted.state_dict_metadata | {"w": entry})
    places = collections.OrderedDict(wanted.storage_data)
    found = parse_metadata(pickle.dumps(replace(wanted, state_dict_metadata=described, storage_data=places)), name="m")
    assert found == wanted
    read = found.state_dict_metadata["w"]
    (chunk,) = read.chunks
    assert [type(size) for size in (read.size, chunk.offsets, chunk.sizes)] == [torch.Size] * 3
    assert MetadataIndex("w", torch.Size((0, 0))) in found.storage_data


def test_a_list_for_a_size_is_named_and_is_no_corruption():
    entry = replace(tensor_metadata(), chunks=[ChunkStorageMetadata([0, 0], torch.Size((2, 3)))])
    with pytest.raises(FormatVersionError, match=r"m\.md: ChunkStorageMetadata with a list as its offsets"):
        parse_metadata(pickle.dumps(replace(make_metadata([], []), state_dict_metadata={"w": entry})), name="m.md")


def test_a_damaged_file_with_an_unknown_class_is_corrupt():
    data = pickled_with(*FIELDS).replace(b"bfloat16", b"float4x2")
    with pytest.raises(CorruptCheckpointError):
        parse_metadata(data[:-1], name="m")


def test_what_is_written_has_the_five_fields_that_every_torch_reads():
    metadata = make_metadata(["w"], [])
    metadata.state_dict_metadata["w"].properties = properties = TensorProperties(torch.int8)
    vars(properties)["strides"] = (3, 1)
    for data in (dump_metadata(metadata), b"".join(render(["w"], []).fill([], checkpoint_id="c", save_id="s"))):
        FieldCount.seen.clear()
        pickle.loads(data.replace(b"ctorch.distributed.checkpoint.metadata\nTensorProperties\n", COUNTING))
        assert [len(state) for state in FieldCount.seen] == [5]


class FieldCount:
    """Stands for ``TensorProperties`` in a pickle and notes its state."""

    seen: ClassVar[list] = []

    def __setstate__(self, state):
        self.seen.append(state)


COUNTING = f"c{FieldCount.__module__}\nFieldCount\n".encode()


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last, torch.preserve_format])
def test_a_layout_memory_format_and_ordered_dict_are_read(memory_format):
    metadata = make_metadata(["w"], [])
    odd = TensorProperties(torch.int8, torch.sparse_coo, True, memory_format, True)
    metadata.state_dict_metadata["w"].properties = odd
    metadata.planner_data = collections.OrderedDict(x=({1}, frozenset([2.5]), b"bytes", None, -(1 << 80)))
    assert parse_metadata(pickle.dumps(metadata), name="m") == metadata


class Runs:
    """Unpickling it would call a function that raises."""

    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


def never() -> None:
    raise AssertionError("code of the pickle was run")


HOSTILE_GLOBALS = [
    (Runs(never), "never"),
    (Runs(exec, "raise SystemExit"), "exec"),
    (Runs(eval, "1"), "eval"),
    (Runs(getattr, "x", "upper"), "getattr"),
    (Runs(bytearray, 1 << 50), "bytearray"),
    (Runs(torch.load, "x"), "load"),
    (Runs(torch.zeros, 1), "zeros|getattr"),
    (Runs(io.BytesIO, b""), "BytesIO"),
    (Runs(dcp_metadata._MEM_FORMAT_ENCODING.mro), "getattr"),
]


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(("value", "text"), HOSTILE_GLOBALS)
def test_a_crafted_pickle_runs_nothing_and_is_refused_by_name(value, text, protocol):
    metadata = replace(make_metadata(["w"], []), planner_data={"w": value})
    with pytest.raises(FormatVersionError, match=rf"m\.md: .* asks for .*({text}|copyreg).* was not run"):
        parse_metadata(pickle.dumps(metadata, protocol=protocol), name="m.md")


def test_old_style_opcodes_are_refused_by_name():
    for data in (b"cos\nsystem\n(S'true'\ntR.", b"\x80\x04\x8c\x02os\x8c\x06system\x93."):
        with pytest.raises(FormatVersionError, match=r"os\.system"):
            parse_metadata(data, name="m")


@pytest.mark.parametrize(
    "op", [b"I1\n.", b"Px\n.", b"(ios\nsystem\n.", b"\x80\x02\x82\x01.", b"\x80\x05\x97.", b"Np1\n.", b"\x80\x04)\x92."]
)
def test_opcodes_that_no_metadata_needs_are_refused(op):
    with pytest.raises(CorruptCheckpointError, match="opcode"):
        parse_metadata(op, name="m")


CLASS = "ctorch.distributed.checkpoint.metadata\n%s\n"


@pytest.mark.parametrize("name", ["Metadata", "TensorProperties", "_MEM_FORMAT_ENCODING", "MetadataIndex"])
def test_a_pickle_cannot_change_a_class(name):
    state = b"N}X\x0c\x00\x00\x00__setstate__K\x01s\x86"
    with pytest.raises(CorruptCheckpointError, match="the pickle sets attributes of a"):
        parse_metadata(b"\x80\x02" + (CLASS % name).encode() + state + b"b.", name="m")
    assert getattr(getattr(dcp_metadata, name), "__setstate__", None) != 1


@pytest.mark.parametrize(
    "target",
    [
        "ctorch.serialization\n_get_layout\n",
        "cpathlib\nPosixPath\n",
        "ctorch\nSize\n",
        "ctorch\nfloat32\n",
        "cbuiltins\ndict\n",
        "ccollections\nOrderedDict\n",
        "ctorch.distributed.checkpoint.filesystem\n_StorageInfo\n",
    ],
)
@pytest.mark.parametrize("state", [b"N}X\x03\x00\x00\x00fooK\x01s\x86", b"}X\x03\x00\x00\x00fooK\x01s"])
def test_a_pickle_cannot_change_anything_shared(target, state):
    with pytest.raises(CorruptCheckpointError):
        parse_metadata(b"\x80\x02" + target.encode() + state + b"b.", name="m")
    shared = (torch.serialization._get_layout, pathlib.PosixPath, torch.Size, torch.float32, dict, _StorageInfo)
    assert not any(hasattr(thing, "foo") for thing in shared)


def test_a_forged_memo_index_takes_no_memory():
    with pytest.raises(CorruptCheckpointError, match="holds no Metadata"):
        parse_metadata(b"\x80\x02Nr\xff\xff\xff\xff.", name="m")


def test_lengths_beyond_the_file_are_refused():
    for data in (b"\x80\x02X\xff\xff\xff\x7fa.", b"\x80\x04\x8d" + b"\xff" * 8 + b".", b"\x80\x04\x95" + b"\xff" * 8):
        with pytest.raises(CorruptCheckpointError, match="m"):
            parse_metadata(data, name="m")


def test_a_truncated_or_padded_metadata_is_corrupt(stock):
    for data in [stock[:stop] for stop in range(0, len(stock), gate_stride(7))] + [stock + b"\0", stock + stock]:
        with pytest.raises(CorruptCheckpointError):
            parse_metadata(data, name="m")


@examples(400)
@given(st.data())
def test_a_metadata_with_damaged_bytes_is_read_or_refused_as_corrupt(data):
    damaged = bytearray(pickle.dumps(make_metadata(["w", "v"], ["o"]), protocol=data.draw(st.integers(2, 5))))
    for at in data.draw(st.lists(st.integers(0, len(damaged) - 1), min_size=1, max_size=3)):
        damaged[at] = data.draw(st.integers(0, 255))
    try:
        found = parse_metadata(bytes(damaged), name="m")
    except (CorruptCheckpointError, FormatVersionError):  # a damaged name of a class may be that of a newer torch
        return
    assert all(info.offset >= 0 and info.length >= 0 for info in (found.storage_data or {}).values())


def bad_chunk(offsets: object, sizes: object) -> TensorStorageMetadata:
    return replace(tensor_metadata(), chunks=[ChunkStorageMetadata(offsets, sizes)])


GOOD = make_metadata(["w"], ["o"])
INDEX = MetadataIndex("w", (0, 0), 0)
BAD_METADATA = [
    {"w": 1},
    None,
    replace(GOOD, state_dict_metadata=None),
    replace(GOOD, state_dict_metadata=[]),
    replace(GOOD, state_dict_metadata={1: BytesStorageMetadata()}),
    replace(GOOD, state_dict_metadata={"w": None}),
    replace(GOOD, state_dict_metadata={"w": replace(tensor_metadata(), size=(2, 3.0))}),
    replace(GOOD, state_dict_metadata={"w": replace(tensor_metadata(), size=torch.Size((2, -3)))}),
    replace(GOOD, state_dict_metadata={"w": replace(tensor_metadata(), chunks=None)}),
    replace(GOOD, state_dict_metadata={"w": replace(tensor_metadata(), properties=None)}),
    replace(GOOD, state_dict_metadata={"w": replace(tensor_metadata(), properties=TensorProperties(dtype=1))}),
    replace(GOOD, state_dict_metadata={"w": bad_chunk(torch.Size((0, 0)), torch.Size((2,)))}),
    replace(GOOD, state_dict_metadata={"w": bad_chunk(torch.Size((0,)), torch.Size((2,)))}),
    replace(GOOD, state_dict_metadata={"w": bad_chunk(torch.Size((-1, 0)), torch.Size((2, 3)))}),
    replace(GOOD, state_dict_metadata={"w": bad_chunk(torch.Size((0, 0)), torch.Size((2, -3)))}),
    replace(GOOD, storage_data=[]),
    replace(GOOD, storage_meta={}),
    replace(GOOD, storage_data={"w": _StorageInfo("f", 0, 1)}),
    replace(GOOD, storage_data={INDEX: ("f", 0, 1)}),
    replace(GOOD, storage_data={MetadataIndex(1): _StorageInfo("f", 0, 1)}),
    *(
        replace(GOOD, storage_data={INDEX: _StorageInfo(*place)})
        for place in [
            ("f", -1, 1),
            ("f", 0, -1),
            ("f", 1.5, 1),
            ("f", 0, None),
            ("f", 0, 1 << 63),
            ("f", True, 1),
            ("../f", 0, 1),
            ("/etc/f", 0, 1),
            ("a/../../f", 0, 1),
            (3, 0, 1),
        ]
    ),
]


@pytest.mark.parametrize("metadata", BAD_METADATA)
def test_numbers_and_types_that_no_checkpoint_has_are_corrupt(metadata):
    with pytest.raises(CorruptCheckpointError, match=r"m\.md: "):
        parse_metadata(pickle.dumps(metadata), name="m.md")


def test_metadata_without_storage_data_is_read():
    assert parse_metadata(pickle.dumps(replace(GOOD, storage_data=None)), name="m").storage_data is None
