"""Every tensor that torch can save goes through the engine and comes back bit for bit, by us and by stock torch."""

from __future__ import annotations

import collections
import datetime
import enum
import io
import re
import tempfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples
from tensor_bits import assert_is_sound_zip, assert_same_tensor, bits, cut_items, random_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from tree_states import same

from aio_ckpt import CheckpointEngine, EngineConfig, PerRank, SyncCheckpointEngine
from aio_ckpt.errors import UnsupportedLeafError
from aio_ckpt.format.tensor_pickle import STORABLE_DTYPES
from aio_ckpt.plan.chunks import chunk_bytes_for

ALL_DTYPES = sorted({dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}, key=str)
OPAQUE_DTYPES = [dtype for dtype in ALL_DTYPES if re.search(r"\.(u?int[1-7]$|bits)", str(dtype))]
UNCOPIED = [dtype for dtype in ALL_DTYPES if "float4" in str(dtype) and torch.__version__.startswith("2.8")]
"""torch 2.8 copies none of these, and so stock loads none."""
DTYPES = [dtype for dtype in ALL_DTYPES if dtype in STORABLE_DTYPES and dtype not in (*OPAQUE_DTYPES, *UNCOPIED)]
MIB = 1 << 20

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # dcp.load without a process group
]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def views() -> dict[str, torch.Tensor]:
    """Tensors that are not simply their storage from its first byte to its last."""
    base = random_tensor((6, 4, 5), torch.float32)
    pair = random_tensor((3, 4), torch.complex64)
    image = random_tensor((2, 3, 4, 5), torch.bfloat16)
    big = random_tensor((1100, 1024), torch.float32)
    shared = random_tensor((7,), torch.float64)
    return {
        "zero_dim": torch.tensor(2.5),
        "empty": torch.empty(0),
        "empty_with_dims": torch.empty(3, 0, 2, dtype=torch.int16),
        "empty_transposed": torch.empty(0, 3).t(),
        "size_one_dims": base[:1, :1],
        "row_slice": base[2:4],
        "column_slice": base[:, 1:3],
        "strided_slice": base[::2, :, ::3],
        "transposed": base.transpose(0, 2),
        "permuted": base.permute(1, 2, 0),
        "expanded": base[:, :1, :].expand(6, 9, 5),
        "expanded_scalar": torch.tensor(1.5).expand(3, 3),
        "overlapping_windows": torch.arange(10.0).unfold(0, 4, 1),
        "channels_last": image.to(memory_format=torch.channels_last),
        "channels_last_slice": image.to(memory_format=torch.channels_last)[:, :2],
        "conj": pair.conj(),
        "conj_transposed": pair.mH,
        "neg": torch._neg_view(base),
        "imag_of_conj": pair.conj().imag,
        "parameter": torch.nn.Parameter(random_tensor((5,), torch.float32)),
        "needs_grad": torch.ones(3, requires_grad=True) * 2,
        "tied_a": shared,
        "tied_b": shared,
        "tied_parameter": torch.nn.Parameter(shared).data,
        "overlaps_tied": shared[1:4],
        "many_dims": random_tensor((1, 2, 1, 2, 1, 2, 1, 2), torch.int8),
        "over_a_mebibyte": big,
        "over_a_mebibyte_rows": big[20:],
        "over_a_mebibyte_transposed": big.t(),
        "over_a_mebibyte_strided": big[:, ::2],
        "over_several_chunks": random_tensor((3 * MIB + 17,), torch.int32),
    }


def every_tensor() -> dict[str, torch.Tensor]:
    dtypes = {f"dtype_{name_of(dtype)}": random_tensor((3, 5), dtype, seed) for seed, dtype in enumerate(DTYPES)}
    zero_dim = {f"zero_dim_{name_of(dtype)}": random_tensor((1,), dtype)[0] for dtype in DTYPES}
    return {**dtypes, **zero_dim, **views()}


NAMES = sorted(every_tensor())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory):
    """(what was saved, the checkpoint's directory, what read() gives, the engine)."""
    state = every_tensor()
    with SyncCheckpointEngine(tmp_path_factory.mktemp("root")) as engine:
        report = engine.save(state, step=1).result(60)
        yield state, report.path, engine.read(1), engine


# -- by us ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_read_gives_the_tensor_back_bit_for_bit(saved, name: str):
    state, _, found, _ = saved
    assert_same_tensor(found[name], state[name])


def test_read_gives_the_names_in_the_order_of_the_state(saved):
    state, _, found, _ = saved
    assert list(found) == list(state)


def test_read_keeps_the_stride_of_every_dense_tensor(saved):
    _, _, found, _ = saved
    assert found["channels_last"].is_contiguous(memory_format=torch.channels_last)
    assert found["permuted"].stride() == (5, 1, 20)
    assert found["column_slice"].is_contiguous()


OVERLAPPING = ("expanded", "expanded_scalar", "overlapping_windows")
"""Several elements share an address: nothing can be loaded into a template of these strides."""


def blank_like(tensor: torch.Tensor, *, strides: bool) -> torch.Tensor:
    """Zeros of the same dtype and shape; some dtypes have no fill."""
    shape, stride = tensor.shape, tensor.stride()
    extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if tensor.numel() else 0
    slots = extent if strides else tensor.numel()
    flat = torch.zeros(slots * tensor.itemsize, dtype=torch.uint8).view(tensor.dtype)
    return flat.as_strided(shape, stride) if strides else flat.reshape(shape)


@pytest.mark.parametrize("strides", [False, True], ids=["contiguous", "own strides"])
def test_load_fills_a_template_of_any_stride_bit_for_bit(saved, strides: bool):
    state, _, _, engine = saved
    wanted = {name: tensor for name, tensor in state.items() if not strides or name not in OVERLAPPING}
    template = {name: blank_like(tensor, strides=strides) for name, tensor in wanted.items()}
    report = engine.load(template, 1)
    assert report.verified
    assert not report.missing
    for name, tensor in wanted.items():
        assert_same_tensor(template[name], tensor)


def test_load_resolves_into_conjugate_and_negative_templates(saved):
    state, _, _, engine = saved
    template = {"conj": torch.zeros(3, 4, dtype=torch.complex64).conj(), "neg": torch._neg_view(torch.zeros(6, 4, 5))}
    engine.load(template, 1)
    assert bits(template["conj"]) == bits(state["conj"])
    assert bits(template["neg"]) == bits(state["neg"])


def test_a_tied_weight_is_stored_once_and_comes_back_as_one_tensor(saved):
    _, path, found, _ = saved
    assert found["tied_a"] is found["tied_b"] is found["tied_parameter"]
    metadata = dcp.FileSystemReader(path).read_metadata()
    places = {index.fqn: place.offset for index, place in metadata.storage_data.items()}
    assert places["tied_a"] == places["tied_b"] == places["tied_parameter"] != places["overlaps_tied"]


# -- by stock torch and the standard library ------------------------------------------------------


def test_stock_dcp_loads_every_tensor_bit_for_bit(saved):
    state, path, _, _ = saved
    template = {name: blank_like(tensor, strides=False) for name, tensor in state.items()}
    dcp.load(template, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    for name, tensor in state.items():
        assert_same_tensor(template[name], tensor)


def test_every_item_cut_out_of_the_data_file_is_a_sound_torch_save_zip(saved):
    state, path, _, _ = saved
    items = cut_items(path)
    assert items.keys() == state.keys()
    for name, item in items.items():
        assert_is_sound_zip(item)
        assert_same_tensor(torch.load(io.BytesIO(item), weights_only=True), state[name])


@pytest.mark.parametrize("dtype", OPAQUE_DTYPES, ids=name_of)
def test_an_opaque_dtype_that_dcp_cannot_plan_is_refused_by_name(tmp_path, dtype: torch.dtype):
    with SyncCheckpointEngine(tmp_path) as engine:
        with pytest.raises(UnsupportedLeafError, match=rf"'a\.w': .*{dtype}"):
            engine.save({"a": {"w": torch.zeros(8, dtype=torch.uint8).view(dtype)}})
        assert engine.steps() == []


def test_the_image_is_small(saved):
    state, path, _, _ = saved
    size = sum(file.stat().st_size for file in path.glob("*.distcp"))
    items = {id(state[name]): state[name] for name in state if name not in ("tied_b", "tied_parameter")}
    raw = sum(tensor.numel() * tensor.itemsize for tensor in items.values())
    pages = sum(tensor.numel() * tensor.itemsize >= MIB for tensor in items.values()) + 1
    assert size <= raw + 1024 * len(items) + 4096 * pages
    assert size % 4096 == 0


# -- everything else that a state may hold --------------------------------------------------------


def mixed_state() -> dict[str, object]:
    return {
        "model": OrderedDict(w=torch.arange(16.0).view(4, 4), empty={}),
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 1e-3, "params": [0]}]},
        "array": np.arange(12.0).reshape(3, 4).T,
        "reversed": np.arange(5)[::-1],
        "scalar": np.float32(1.5),
        "text": "é",
        "nothing": None,
        "pair": (torch.ones(2), [1, {"deep": b"\0"}]),
        "stream": io.BytesIO(b"abc"),
        "mine": PerRank({"rng": random_tensor((16,), torch.uint8)}),
        "numbers": {0: 1, "one": True, 2.0: 1 << 5000},
    }


async def test_a_mixed_state_comes_back_with_containers_keys_and_types(tmp_path):
    async with CheckpointEngine(tmp_path) as engine:
        report = await engine.save(mixed_state())
        found = await engine.read()
    wanted = mixed_state()
    wanted["mine"] = wanted["mine"].value
    assert list(found) == list(wanted)
    assert [name for name in wanted if not same(found[name], wanted[name])] == []
    for item in cut_items(report.path).values():
        assert_is_sound_zip(item)


async def test_a_state_of_objects_alone_is_a_checkpoint(tmp_path):
    async with CheckpointEngine(tmp_path) as engine:
        report = await engine.save({"epoch": 3, "names": ["a"] * 1000})
        assert report.raw_bytes == 0
        assert await engine.read() == {"epoch": 3, "names": ["a"] * 1000}
        template = {"epoch": 0, "names": []}
        await engine.load(template)
    assert template == {"epoch": 3, "names": ["a"] * 1000}


def test_stock_dcp_loads_objects(tmp_path):
    with SyncCheckpointEngine(tmp_path) as engine:
        path = engine.save({"a": {"w": torch.ones(2)}, "lr": 0.5, "l": [1, 2], "t": "x"}).result(60).path
    template = {"a": {"w": torch.zeros(2)}, "lr": 0.0, "l": [], "t": ""}
    dcp.load(template, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    assert same(template, {"a": {"w": torch.ones(2)}, "lr": 0.5, "l": [1, 2], "t": "x"})


class Mode(enum.Enum):
    TRAIN = "train"


def test_stock_dcp_gives_the_very_objects(tmp_path):
    generator = np.random.Generator(np.random.PCG64(3))
    state = {
        "when": datetime.datetime(2026, 11, 26, 1, 2, tzinfo=datetime.UTC),
        "path": Path("/data"),
        "frozen": frozenset({1, "a"}),
        "texts": np.array(["ab", "c"]),
        "large": 10**700,
        "none": b"",
        "mode": Mode.TRAIN,
        "last": collections.deque([1, 2], maxlen=3),
        "generator": generator.bit_generator.state["state"]["state"],
        "mt": np.random.RandomState(3),
        "fold": datetime.time(1, fold=1),
    }
    with SyncCheckpointEngine(tmp_path) as engine:
        path = engine.save(state).result(60).path
        found = [dict.fromkeys(state), engine.read()]
    dcp.load(found[0], storage_reader=dcp.FileSystemReader(path), no_dist=True)
    for values in found:
        assert values.pop("mt").random() == np.random.RandomState(3).random()
        assert same(values, {name: value for name, value in state.items() if name != "mt"})
        assert values["last"].maxlen == 3
        assert values["fold"].fold == 1


def test_a_host_image_larger_than_a_chunk_of_objects_comes_back(tmp_path):
    """Objects that begin in the last tensor chunk and fill several of their own."""
    state = {"w": torch.arange(1000.0), "blob": bytes(range(256)) * (5 * 4096)}
    assert len(state["blob"]) > chunk_bytes_for(4000)
    with SyncCheckpointEngine(tmp_path, EngineConfig(workers=3)) as engine:
        path = engine.save(state).result(60).path
        assert same(engine.read(), state)
    assert all(assert_is_sound_zip(item) is None for item in cut_items(path).values())


shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def any_view(draw) -> torch.Tensor:
    """A tensor of any storable dtype with any sizes, strides and offset."""
    shape = draw(shapes)
    stride = tuple(draw(st.integers(0, 7)) for _ in shape)
    offset = draw(st.integers(0, 9))
    extent = offset + 1 + sum(max(size - 1, 0) * step for size, step in zip(shape, stride, strict=True))
    storage = random_tensor((extent,), draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99)))
    return storage.as_strided(shape, stride, offset)


@examples(40)
@given(st.lists(st.dictionaries(st.sampled_from("abcde"), any_view(), min_size=1), min_size=1, max_size=3))
def test_any_sequence_of_states_of_any_views_comes_back(states):
    with tempfile.TemporaryDirectory() as root, SyncCheckpointEngine(root) as engine:
        for state in states:
            engine.save(state).result(60)
        for step, state in enumerate(states, 1):
            found = engine.read(step)
            assert list(found) == list(state)
            for name, tensor in state.items():
                assert_same_tensor(found[name], tensor)


# -- DTensor --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mesh():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


PLACEMENTS = {
    "rows": [Replicate(), Shard(0)],
    "columns": [Shard(1), Replicate()],
    "both": [Shard(0), Shard(1)],
    "replica": [Replicate(), Replicate()],
}


def dtensors(mesh) -> dict[str, DTensor]:
    return {
        name: distribute_tensor(random_tensor((4, 6), torch.float32, seed), mesh, placements)
        for seed, (name, placements) in enumerate(PLACEMENTS.items())
    }


def blank_dtensors(mesh) -> dict[str, DTensor]:
    return {name: distribute_tensor(torch.zeros(4, 6), mesh, found) for name, found in PLACEMENTS.items()}


def test_a_dtensor_of_one_rank_comes_back_by_read_load_and_stock_dcp(tmp_path, mesh):
    state = dtensors(mesh)
    with SyncCheckpointEngine(tmp_path) as engine:
        path = engine.save(state).result(60).path
        found, template = engine.read(), blank_dtensors(mesh)
        assert engine.load(template).verified
    by_dcp = blank_dtensors(mesh)
    dcp.load(by_dcp, storage_reader=dcp.FileSystemReader(path))
    for name, tensor in state.items():
        assert_same_tensor(found[name], tensor.to_local())
        for target in (template[name], by_dcp[name]):
            assert type(target) is DTensor
            assert target.placements == tensor.placements
            assert_same_tensor(target.to_local(), tensor.to_local())


def test_a_dtensor_loads_from_a_plain_tensor_and_the_other_way_round(tmp_path, mesh):
    plain, spread = random_tensor((4, 6), torch.float32), dtensors(mesh)["both"]
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.save({"a": plain, "b": spread}).result(60)
        template = {"a": blank_dtensors(mesh)["rows"], "b": torch.zeros(4, 6)}
        engine.load(template)
    assert_same_tensor(template["a"].to_local(), plain)
    assert_same_tensor(template["b"], spread.to_local())
