"""Reading: what comes back is what was stored, bit for bit; what was damaged is found and named."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import itertools
import math
import re
import warnings
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from builders import flip
from checkpoint_maker import RankContent, Shard, content_of, forge, reseal, save_state, write_checkpoint
from dcp_states import StreamTransformExtension
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples
from saved_files import data_file, root_manifest
from tensor_bits import bytes_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor import Shard as ShardPlacement

from aio_ckpt.checkpoint import read_plan as readplan
from aio_ckpt.checkpoint.catalog import Item
from aio_ckpt.checkpoint.data_files import Files
from aio_ckpt.checkpoint.fetch import fetch
from aio_ckpt.checkpoint.open import open_checkpoint
from aio_ckpt.checkpoint.read_context import ReadContext
from aio_ckpt.checkpoint.read_plan import ReadPlan
from aio_ckpt.config import EngineConfig
from aio_ckpt.dcp import Writer
from aio_ckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    MismatchError,
    MissingNameError,
    ReadError,
    TemplateMismatchError,
    UnexpectedNameError,
    UnsafeObjectError,
    UnsupportedLeafError,
)
from aio_ckpt.format.constants import BLOCK_BYTES
from aio_ckpt.leaves.values import PerRank
from aio_ckpt.match.options import LoadOptions
from aio_ckpt.memory.copies import Copies
from aio_ckpt.restore.load import match_checkpoint
from aio_ckpt.restore.read_state import read_state
from aio_ckpt.runtime.portal import Executor
from aio_ckpt.state.flatten import flatten
from aio_ckpt.storage.data_file import ReadFile
from aio_ckpt.storage.local import Storage

FEW = examples(40)
DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.bool),
    *(torch.complex64, torch.complex128),
]


@pytest.fixture(scope="module")
def executor():
    made = Executor("test", 6)
    yield made
    made.close(10)


@pytest.fixture(params=["auto", "off"])
def storage(request, executor):
    return Storage(executor, request.param)


@pytest.fixture
def direct(executor):
    return Storage(executor, "auto")


def opened(storage, path):
    return open_checkpoint(storage, path, executor=storage._executor)


def context(storage, *, rank=0, world_size=1, **settings):
    config, executor = EngineConfig(workers=3, **settings), storage._executor
    return ReadContext(config=config, storage=storage, executor=executor, rank=rank, world_size=world_size)


async def load(storage, path, state, *, strict=False, allow_missing=False, **changed):
    options = LoadOptions(strict=strict, allow_missing=allow_missing)
    async with match_checkpoint(context(storage, **changed), path, state, step=None, options=options) as matched:
        outcome = await matched.fetch()
    await outcome.apply()
    return outcome


async def read(storage, path, *, only=None, **changed):
    return (await read_state(context(storage, **changed), path, step=None, only=only)).state


def stock_save(path, state):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=str(path), no_dist=True)


def stock_load(path, state):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=str(path), no_dist=True)


def bits(tensor):
    """dtype, shape and the elements in row-major order; NaNs and signed zeros kept apart."""
    plain = torch.empty(tensor.shape, dtype=tensor.dtype)
    plain.copy_(tensor.detach().resolve_conj().resolve_neg())
    return tensor.dtype, tuple(tensor.shape), bytes_of(plain).numpy().tobytes()


def random_tensor(dtype, shape, seed=0):
    """Random bytes seen as ``dtype``: every NaN there is."""
    made = torch.empty(shape, dtype=dtype)
    raw = np.random.default_rng(seed).integers(0, 256, made.numel() * made.itemsize, dtype=np.uint8)
    bytes_of(made).copy_(torch.from_numpy(raw % 2 if dtype is torch.bool else raw))
    return made


def zeros_like(tensor):
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    bytes_of(made).zero_()
    return made


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 7), max_size=4))
    made = random_tensor(draw(st.sampled_from(DTYPES)), shape, draw(st.integers(0, 1 << 30)))
    return made.permute(draw(st.permutations(range(len(shape)))))


# -- bit for bit ------------------------------------------------------------------------------------


@FEW
@given(made=st.lists(tensors(), min_size=1, max_size=6), order=st.randoms())
async def test_what_is_loaded_and_read_is_what_was_stored_bit_for_bit(direct, tmp_path_factory, made, order):
    path = tmp_path_factory.mktemp("c") / "c"
    state = {f"t{i}": tensor for i, tensor in enumerate(made)}
    save_state(path, state)
    wanted = {name: bits(tensor) for name, tensor in state.items()}
    found = await read(direct, path)
    assert {name: bits(tensor) for name, tensor in found.items()} == wanted
    assert all(found[name].stride() == state[name].stride() for name in found if state[name].numel() > 1)
    same = {name: zeros_like(tensor) for name, tensor in state.items()}
    await load(direct, path, same)
    assert {name: bits(tensor) for name, tensor in same.items()} == wanted
    other = {}
    for name, tensor in state.items():  # a target laid out in another way than the stored bytes
        dims = list(range(tensor.dim()))
        order.shuffle(dims)
        other[name] = torch.empty([tensor.shape[d] for d in dims], dtype=tensor.dtype)
        other[name] = other[name].permute([dims.index(d) for d in range(tensor.dim())])
    await load(direct, path, other)
    assert {name: bits(tensor) for name, tensor in other.items()} == wanted
    stock = {name: zeros_like(tensor) for name, tensor in state.items()}
    stock_load(path, stock)
    assert {name: bits(tensor) for name, tensor in stock.items()} == wanted


@FEW
@given(made=st.lists(tensors(), min_size=1, max_size=6))
async def test_what_stock_dcp_stored_is_read_bit_for_bit(direct, tmp_path_factory, made):
    path = tmp_path_factory.mktemp("c") / "c"
    state = {f"t{i}": tensor for i, tensor in enumerate(made)}
    stock_save(path, state)
    wanted = {name: bits(tensor) for name, tensor in state.items()}
    assert {name: bits(tensor) for name, tensor in (await read(direct, path)).items()} == wanted
    same = {name: zeros_like(tensor) for name, tensor in state.items()}
    await load(direct, path, same)
    assert {name: bits(tensor) for name, tensor in same.items()} == wanted


def nested_state():
    shared = torch.randn(40, 30)
    return {
        "model": {"w": shared, "head": shared, "0": torch.arange(7)},
        "lists": [torch.randn(3).bfloat16(), {"k": (1, 2.5), "none": None}, torch.tensor(4.5)],
        "empty": {},
        "array": np.arange(6.0).reshape(2, 3),
        "scalar": np.float32(2.5),
        "ordered": OrderedDict(b=1, a="x"),
        3: {"io": io.BytesIO(b"abc"), "names": ["a", "b"]},
        "hollow": torch.empty(0, 5),
        "big": torch.randn(3 * BLOCK_BYTES // 4 + 17),
        "rng": PerRank({"seed": 11, "state": torch.arange(5)}),
    }


async def test_a_nested_state_comes_back_with_its_containers_keys_and_ties(storage, tmp_path):
    state = nested_state()
    path = save_state(tmp_path / "c", state)
    found = await read(storage, path)
    assert list(found) == list(state)
    assert found["model"]["w"] is found["model"]["head"]
    assert torch.equal(found["model"]["w"], state["model"]["w"])
    assert found["empty"] == {}
    assert type(found["ordered"]) is OrderedDict
    assert found["ordered"] == state["ordered"]
    assert found["lists"][1] == {"k": (1, 2.5), "none": None}
    assert isinstance(found["array"], np.ndarray)
    assert (found["array"] == state["array"]).all()
    assert type(found["scalar"]) is np.float32
    assert found["scalar"] == 2.5
    assert found[3]["io"].getvalue() == b"abc"
    assert found["hollow"].shape == (0, 5)
    assert torch.equal(found["big"], state["big"])
    assert found["rng"]["seed"] == 11


async def test_a_load_fills_tensors_and_arrays_in_place_and_replaces_the_rest(storage, tmp_path):
    state = nested_state()
    path = save_state(tmp_path / "c", state)
    frozen_array = np.zeros(2)
    frozen_array.flags.writeable = False
    save_state(tmp_path / "d", {"frozen": np.array([1.0, 2.0])})
    target = nested_state()
    target["model"]["head"] = target["model"]["w"].clone()  # untied in the template
    kept = target["array"], target["big"], target["model"]["w"]
    for tensor in (target["model"]["w"], target["model"]["head"], target["big"], target["lists"][0]):
        tensor.zero_()
    target["array"][:] = 0
    target["scalar"], target["lists"][1], target["ordered"]["a"] = np.float32(0), {"k": None, "none": 1}, None
    target["rng"].value["seed"] = 0
    outcome = await load(storage, path, target)
    assert (outcome.found.missing, outcome.found.unexpected, outcome.fetched.has_unchecked) == ((), (), False)
    assert kept[0] is target["array"]
    assert kept[1] is target["big"]
    assert kept[2] is target["model"]["w"]
    assert (target["array"] == state["array"]).all()
    assert torch.equal(target["model"]["head"], state["model"]["w"])
    assert torch.equal(target["big"], state["big"])
    assert torch.equal(target["lists"][0], state["lists"][0])
    assert target["lists"][1] == {"k": (1, 2.5), "none": None}
    assert target["scalar"] == 2.5
    assert target["rng"].value["seed"] == 11
    fixed = {"frozen": frozen_array}
    await load(storage, tmp_path / "d", fixed)
    assert fixed["frozen"].tolist() == [1.0, 2.0]


def trained(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.ReLU(), torch.nn.BatchNorm1d(6))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 5)).sum().backward()
    optimizer.step()
    return model, optimizer


def as_values(state_dict):
    flat = flatten(state_dict, rank=0)
    return {n: bits(v) if isinstance(v, torch.Tensor) else v for n, v in zip(flat.names, flat.values, strict=True)}


@pytest.mark.parametrize("save", [save_state, stock_save])
async def test_modules_and_optimizers_are_given_to_their_load_state_dict(storage, tmp_path, save):
    model, optimizer = trained(1)
    save(tmp_path / "c", {"model": model, "optim": optimizer, "inner": {"relu": 1}})
    fresh = torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.ReLU(), torch.nn.BatchNorm1d(6))
    state = {"model": fresh, "optim": torch.optim.AdamW(fresh.parameters()), "inner": {"relu": 0}}
    await load(storage, tmp_path / "c", state)
    assert as_values(fresh.state_dict()) == as_values(model.state_dict())
    assert as_values(state["optim"].state_dict()) == as_values(optimizer.state_dict())
    assert list(state["optim"].state_dict()["state"]) == list(optimizer.state_dict()["state"])
    state["optim"].step()


async def test_a_stateful_state_is_loaded_as_a_whole(direct, tmp_path):
    model, _ = trained(1)
    save_state(tmp_path / "c", model)
    other, _ = trained(2)
    await load(direct, tmp_path / "c", other)
    assert as_values(other.state_dict()) == as_values(model.state_dict())


async def test_a_plain_dcp_checkpoint_gives_its_nested_state(storage, tmp_path):
    state = {"a": {"b": torch.randn(4), "n": 3}, "l": [torch.randn(2), {"s": "x"}]}
    stock_save(tmp_path / "c", state)
    found = await read(storage, tmp_path / "c")
    assert torch.equal(found["a"]["b"], state["a"]["b"])
    assert found["a"]["n"] == 3
    assert found["l"][1] == {"s": "x"}
    target = {"a": {"b": torch.zeros(4), "n": 0}, "l": [torch.zeros(2), {"s": ""}]}
    outcome = await load(storage, tmp_path / "c", target)
    assert not outcome.fetched.has_unchecked
    assert torch.equal(target["l"][0], state["l"][0])
    assert (target["a"]["n"], target["l"][1]["s"]) == (3, "x")


def numpy_state(dtype=np.int64):
    scalar, flags = np.float32(3), np.ones((2, 2), dtype=np.bool_)
    return {"v": np.arange(3, dtype=dtype), "s": scalar, "l": [{"b": flags}], "e": np.empty((0, 3)), "w": torch.ones(2)}


def writer_save(path, state):
    with Writer(path) as writer, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=writer)


@pytest.mark.parametrize("save", [stock_save, writer_save])
async def test_numpy_that_dcp_pickled_comes_back_as_dcp_gives_it_where_it_is_trusted(direct, tmp_path, save):
    save(tmp_path / "c", numpy_state())
    found, wanted = ({"v": np.zeros(5), "s": np.float32(0), "l": [{"b": 0}], "e": 1, "w": torch.zeros(2)} for _ in "ab")
    stock_load(tmp_path / "c", wanted)
    await load(direct, tmp_path / "c", found, trusted_objects=True)
    assert repr(found) == repr(wanted) == repr(numpy_state())
    template = numpy_state()
    template["w"].zero_()
    remedy = r"'v' is an array .* dcp\.save pickles numpy: set trusted_objects=True, or .*aio_ckpt\.dcp\.Reader.*'s'"
    with pytest.raises(TemplateMismatchError, match=remedy) as caught:
        await load(direct, tmp_path / "c", template)
    assert not caught.value.target_modified
    assert not template["w"].any()


async def test_an_array_takes_no_object_of_ours_and_a_tensor_none_at_all(direct, tmp_path):
    save_state(tmp_path / "ours", {"v": 5})
    stock_save(tmp_path / "stock", {"v": np.arange(3)})
    with pytest.raises(TemplateMismatchError, match=r"'v' is an array in .*: give None there"):
        await load(direct, tmp_path / "ours", {"v": np.arange(3)}, trusted_objects=True)
    with pytest.raises(TemplateMismatchError, match=r"'v' is a tensor in .*: give None there"):
        await load(direct, tmp_path / "stock", {"v": torch.ones(3)}, trusted_objects=True)


@pytest.mark.parametrize("kind", [np.memmap, ">i8"])
async def test_an_array_of_another_kind_in_a_template_is_told_what_to_give(direct, tmp_path, kind):
    save_state(tmp_path / "c", {"v": np.arange(3)})
    given = np.zeros(3, kind) if kind == ">i8" else np.memmap(tmp_path / "m", np.int64, "w+", shape=3)
    remedy = r"'v' is a numpy\.(memmap|ndarray) of '.i8' .* give numpy\.asarray\(\.\.\., 'int64'\) of it"
    with pytest.raises(TemplateMismatchError, match=remedy):
        await load(direct, tmp_path / "c", {"v": given})
    plain = np.asarray(given, "int64")
    await load(direct, tmp_path / "c", {"v": plain})
    assert plain.tolist() == [0, 1, 2]
    assert kind == ">i8" or given.tolist() == [0, 1, 2], "the file itself is filled"


async def test_lazily_conjugated_and_negated_targets_get_the_values(direct, tmp_path):
    stored = {"conj": torch.randn(50, dtype=torch.complex64), "neg": torch.randn(50)}
    for name, save in (("ours", save_state), ("stock", stock_save)):
        save(tmp_path / name, stored)
        state = {"conj": torch.zeros(50, dtype=torch.complex64).conj(), "neg": torch._neg_view(torch.zeros(50))}
        await load(direct, tmp_path / name, state)
        assert torch.equal(state["conj"].resolve_conj(), stored["conj"]), name
        assert torch.equal(state["neg"].resolve_neg(), stored["neg"]), name


def lazy_state():
    """Tensors that stock stores as they lie, with a bit that says how they are meant."""
    pair = random_tensor(torch.complex64, (40, 30))
    many = random_tensor(torch.complex128, (1 << 18, 2), seed=1)  # of which a box is read in parts
    real = random_tensor(torch.float32, (6, 5), seed=2)
    both = torch._neg_view(random_tensor(torch.complex64, (7,), seed=3)).conj()
    views = {"h": pair.mH, "row": pair.conj()[3], "imag": pair.conj().imag, "neg": torch._neg_view(real).t()}
    return {"conj": pair.conj(), "many": many.conj(), "both": both, "empty": pair[:0].conj(), "plain": real, **views}


async def test_lazy_conjugates_and_negatives_of_stock_are_read_as_dcp_reads_them(direct, tmp_path):
    state = lazy_state()
    stock_save(tmp_path / "c", state)
    wanted, same, found = (
        {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in state.items()} for _ in range(3)
    )
    stock_load(tmp_path / "c", wanted)
    assert {name: bits(tensor) for name, tensor in wanted.items()} == {name: bits(t) for name, t in state.items()}
    await load(direct, tmp_path / "c", same)
    found |= await read(direct, tmp_path / "c")
    lazy = {"conj": torch.zeros(40, 30, dtype=torch.complex64).conj(), "neg": torch._neg_view(torch.zeros(5, 6))}
    await load(direct, tmp_path / "c", lazy)
    for got in (same, found, lazy):
        for name, tensor in got.items():
            assert bits(tensor) == bits(wanted[name]), name


async def test_autograd_sees_that_a_loaded_parameter_changed(direct, tmp_path):
    save_state(tmp_path / "c", {"w": torch.ones(3)})
    weight = torch.nn.Parameter(torch.zeros(3))
    loss = (weight * weight).sum()
    await load(direct, tmp_path / "c", {"w": weight})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


async def test_a_page_aligned_target_is_read_into_and_proven_in_place(storage, tmp_path):
    import mmap

    stored = torch.randn(5 * BLOCK_BYTES // 4 + 100)
    path = save_state(tmp_path / "c", {"t": stored})
    target = torch.frombuffer(mmap.mmap(-1, stored.numel() * 4), dtype=torch.float32)
    await load(storage, path, {"t": target})
    assert torch.equal(target, stored)
    flip(data_file(path), (await opened(storage, path)).ranks[0].tensors[0].raw_offset + BLOCK_BYTES)
    with pytest.raises(CorruptCheckpointError, match="'t'"):
        await load(storage, path, {"t": target})


# -- the template -----------------------------------------------------------------------------------


@pytest.mark.parametrize("save", [save_state, stock_save])
@pytest.mark.parametrize(
    ("template", "error", "message"),
    [
        ({"t": torch.zeros(4), "absent": torch.zeros(1)}, MissingNameError, "absent"),
        ({"t": torch.zeros(4), "m": torch.nn.Linear(1, 1)}, MissingNameError, "'m'"),
        ({"t": torch.zeros(5)}, TemplateMismatchError, r"\(5,\).*\(4,\)"),
        ({"t": torch.zeros(4, dtype=torch.float64)}, TemplateMismatchError, "float64.*float32"),
        ({"n": torch.zeros(4)}, TemplateMismatchError, "tensor in the template"),
        ({"t": torch.zeros(4, device="meta")}, TemplateMismatchError, "meta"),
        ({"t": torch.zeros(4).to_sparse()}, TemplateMismatchError, "sparse"),
    ],
)
async def test_a_template_that_does_not_fit_is_refused_before_a_byte_is_read(
    direct, tmp_path, save, template, error, message
):
    save(tmp_path / "c", {"t": torch.ones(4), "n": 3})
    data_file(tmp_path / "c").unlink()
    with pytest.raises(error, match=message) as caught:
        await load(direct, tmp_path / "c", template)
    assert not caught.value.target_modified


async def test_missing_names_are_left_alone_when_allowed_and_unexpected_ones_refused_when_strict(storage, tmp_path):
    path = save_state(tmp_path / "c", {"t": torch.ones(4), "n": 3, "m": torch.nn.Linear(1, 1)})
    state = {"t": torch.zeros(4), "more": torch.full((2,), 9.0)}
    outcome = await load(storage, path, state, allow_missing=True)
    assert outcome.found.missing == ("more",)
    assert outcome.found.unexpected == ("m.bias", "m.weight", "n")
    assert state["more"].tolist() == [9, 9]
    assert state["t"].tolist() == [1] * 4
    with pytest.raises(UnexpectedNameError, match="'n'"):
        await load(storage, path, {"t": torch.zeros(4)}, strict=True)


async def test_only_selects_names_and_what_lies_below_them(storage, tmp_path):
    path = save_state(tmp_path / "c", nested_state())
    found = await read(storage, path, only=["model.w", "lists", "empty"])
    assert list(found) == ["model", "lists", "empty"]
    assert list(found["model"]) == ["w"]
    with pytest.raises(MissingNameError, match="nothing"):
        await read(storage, path, only=["model", "nothing"])


async def test_no_metadata_is_a_damaged_checkpoint_and_no_manifest_either_is_none(storage, tmp_path):
    path = save_state(tmp_path / "c", {"t": torch.ones(4)})
    (path / ".metadata").unlink()
    with pytest.raises(MismatchError, match=r"\.metadata: missing"):
        await opened(storage, path)
    root_manifest(path).unlink()
    with pytest.raises(CheckpointNotFoundError, match="metadata"):
        await opened(storage, path)


async def test_an_object_that_needs_code_is_refused_by_name_unless_trusted(storage, tmp_path):
    stock_save(tmp_path / "c", {"obj": {"x": re.compile("a+")}})
    with pytest.raises(UnsafeObjectError, match=r"obj\.x.*trusted_objects=True"):
        await read(storage, tmp_path / "c")
    found = await read(storage, tmp_path / "c", trusted_objects=True)
    assert found["obj"]["x"] == re.compile("a+")


async def test_harmless_objects_that_stock_saved_need_no_trust(storage, tmp_path):
    stock_save(tmp_path / "c", {"obj": {"x": np.arange(3), "at": Path("/a"), "none": b""}})
    found = (await read(storage, tmp_path / "c"))["obj"]
    assert (found["x"].tolist(), found["at"], found["none"]) == ([0, 1, 2], Path("/a"), b"")


# -- slices and other layouts of ranks ----------------------------------------------------------------


@FEW
@given(data=st.data(), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.complex128, torch.uint8]))
async def test_any_box_of_a_tensor_equals_the_slice(direct, tmp_path_factory, data, dtype):
    shape = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    stored = random_tensor(dtype, shape).permute(data.draw(st.permutations(range(len(shape)))))
    starts = [data.draw(st.integers(0, size - 1)) for size in stored.shape]
    lengths = [data.draw(st.integers(1, size - start)) for start, size in zip(starts, stored.shape, strict=True)]
    path = save_state(tmp_path_factory.mktemp("c") / "c", {"t": stored})
    found, _ = await read_box(direct, path, "t", starts, lengths)
    wanted = stored[tuple(slice(a, a + n) for a, n in zip(starts, lengths, strict=True))]
    assert bits(found) == bits(wanted)


@pytest.mark.parametrize("shape", [(64, 3000), (3000, 64), (7, 40, 333), (1 << 17,)])
async def test_a_box_is_read_in_parts_and_no_block_twice(storage, tmp_path, monkeypatch, shape):
    monkeypatch.setattr(readplan, "_BOX_BYTES", 40_000)
    stored = torch.arange(math.prod(shape), dtype=torch.int32).reshape(shape)
    path = save_state(tmp_path / "c", {"t": stored})
    starts, lengths = [1] * len(shape), [size - 2 for size in shape]
    found, bytes_read = await read_box(storage, path, "t", starts, lengths)
    assert torch.equal(found, stored[tuple(slice(1, size - 1) for size in shape)])
    assert bytes_read <= stored.nbytes + 8192


@pytest.mark.parametrize(
    ("shape", "start", "lengths", "rows"),
    [
        ((4096, 2048), (0, 1024), (4096, 1024), [1024] * 4),  # 8 KiB each: cut where 8 MiB end
        ((4096, 2048), (100, 0), (3000, 2048), [924, 1024, 1024, 28]),  # where blocks end
        ((4096, 3072), (0, 0), (4096, 1536), [512] * 8),  # not 682: inside of one
        ((4096, 3000), (0, 0), (4096, 1500), [699] * 5 + [601]),  # no row ends where a block does
        ((64,), (8,), (32,), [32]),
    ],
)
def test_large_boxes_are_cut_where_blocks_end(shape, start, lengths, rows):
    stride = tuple(torch.empty(shape, device="meta").stride())
    item = Item("t", "f", torch.float32, shape, stride, (0,) * len(shape), 0, 0, 0, BLOCK_BYTES, (), None)
    parts = list(readplan._parts(item, start, torch.empty(lengths, device="meta")))
    assert [len(view) for _, view in parts] == rows
    edges = itertools.accumulate(rows[:-1], initial=start[0])
    assert [begin for begin, _ in parts] == [(edge, *start[1:]) for edge in edges]


async def read_box(storage, path, name, starts, lengths):
    """Call the box reader directly: the box and the bytes that were read for it."""
    checkpoint = await opened(storage, path)
    items = checkpoint.catalog.shards[name]
    target = torch.empty(lengths, dtype=items[0].dtype)
    async with Files(storage, path, page_cache="pass") as files:
        await files.measure({item.file for item in items}, checkpoint.catalog.files)
        plan = ReadPlan()
        plan.add_tensor(items, starts, target)
        bytes_read = await fetch(files, plan.requests(2), executor=storage._executor, readers=2, verify=True)
    return target, bytes_read


@pytest.mark.parametrize(
    ("starts", "lengths", "blocks"),
    [
        ((3, 0), (1, 1 << 20), 4),  # one row of 4 MiB
        ((0, 5), (6, 3), 6),  # a narrow column: one block of each row
        ((2, (1 << 18) - 2), (1, 4), 2),  # across a block's edge
        ((0, 0), (6, 1 << 20), 24),
    ],
)
async def test_a_slice_reads_only_the_blocks_that_it_touches(storage, tmp_path, starts, lengths, blocks):
    stored = torch.arange(6 << 20, dtype=torch.int32).reshape(6, 1 << 20)
    path = save_state(tmp_path / "c", {"t": stored})
    found, bytes_read = await read_box(storage, path, "t", starts, lengths)
    assert torch.equal(found, stored[tuple(slice(a, a + n) for a, n in zip(starts, lengths, strict=True))])
    assert blocks * BLOCK_BYTES <= bytes_read <= blocks * (BLOCK_BYTES + 8192)


@pytest.mark.parametrize(
    ("shape", "copied"),
    [
        ((1 << 10, 3, 1024), 0),  # 8 and 4 MiB, each in one read
        ((1 << 10, 3, 1000), 8 << 20),  # a block belongs to two parts: cut before the second, it would be read twice
    ],
)
async def test_a_part_that_one_read_brings_is_copied_out_of_what_was_read(
    storage, tmp_path, monkeypatch, shape, copied
):
    monkeypatch.setattr(readplan, "_REQUEST_BYTES_MIN", (8 << 20) + (1 << 16))
    stored = torch.arange(math.prod(shape), dtype=torch.int32).reshape(shape)
    path = save_state(tmp_path / "c", {"t": stored})
    buffers, buffer = [], Copies.allocate
    monkeypatch.setattr(Copies, "allocate", lambda self, nbytes: buffers.append(nbytes) or buffer(self, nbytes))
    found, bytes_read = await read_box(storage, path, "t", (0, 0, 0), (shape[0], 1, shape[2]))
    assert torch.equal(found, stored[:, :1])
    assert sum(buffers) <= copied
    assert bool(buffers) is bool(copied)
    assert bytes_read <= stored.nbytes + 4 * 8192


async def test_what_lies_between_the_names_that_are_wanted_is_not_read(storage, tmp_path):
    state = {"a": torch.ones(10), "between": torch.zeros(1 << 20, dtype=torch.uint8), "z": torch.ones(10)}
    path = save_state(tmp_path / "c", state)
    outcome = await load(storage, path, {"a": torch.zeros(10), "z": torch.zeros(10)})
    assert outcome.fetched.bytes_read <= 16384


def sharded(stored, cuts, ranks, name="t"):
    """Rows of ``stored`` cut at ``cuts``, shard by shard to the ranks in turn."""
    contents = [RankContent([], [], flatten({name: stored}, rank=rank).skeleton, {name: (name,)}) for rank in ranks]
    edges = [0, *cuts, len(stored)]
    for number, (low, high) in enumerate(itertools.pairwise(edges)):
        offsets = (low,) + (0,) * (stored.dim() - 1)
        contents[number % len(contents)].shards.append(Shard((name,), stored[low:high], offsets))
    return contents


@FEW
@given(cuts=st.lists(st.integers(0, 12), max_size=4), box=st.tuples(st.integers(0, 11), st.integers(1, 12)))
async def test_shards_of_several_ranks_make_up_any_box(direct, tmp_path_factory, cuts, box):
    stored = torch.arange(60).reshape(12, 5)
    path = tmp_path_factory.mktemp("c") / "c"
    write_checkpoint(path, sharded(stored, sorted({*cuts} - {0, 12}), range(3)))
    assert torch.equal((await read(direct, path))["t"], stored)
    low, high = box[0], min(12, box[0] + box[1])
    found, _ = await read_box(direct, path, "t", (low, 1), (high - low, 3))
    assert torch.equal(found, stored[low:high, 1:4])


@pytest.mark.parametrize("rows", [(0, 12), (4, 12), (4, 8)])
async def test_shards_that_lie_whole_in_a_box_go_straight_there(storage, tmp_path, monkeypatch, rows):
    stored = torch.arange(12 * 3000).reshape(12, 3000)
    write_checkpoint(tmp_path / "c", sharded(stored, [4, 8], range(3)))
    monkeypatch.setattr(Copies, "fill", None)
    low, high = rows
    found, _ = await read_box(storage, tmp_path / "c", "t", (low, 0), (high - low, 3000))
    assert torch.equal(found, stored[low:high])


async def test_a_hole_between_the_shards_is_found(direct, tmp_path):
    contents = sharded(torch.arange(60).reshape(12, 5), [4, 8], range(3))
    contents[1].shards.clear()
    write_checkpoint(tmp_path / "c", contents)
    with pytest.raises(CorruptCheckpointError, match="'t'"):
        await read(direct, tmp_path / "c")
    with pytest.raises(CorruptCheckpointError, match=r"'t'.*40 of 60"):
        await load(direct, tmp_path / "c", {"t": torch.zeros(12, 5, dtype=torch.int64)})


async def test_a_shard_that_stands_alone_is_not_taken_for_the_whole_tensor(direct, tmp_path):
    path = save_state(tmp_path / "c", {"t": torch.arange(50.0).reshape(5, 10)})
    forge(path, offsets=(5, 0))
    before = torch.full((5, 10), 7.0)
    template = {"t": before.clone()}
    with pytest.raises(TemplateMismatchError, match=r"\(5, 10\).*\(10, 10\)"):
        await load(direct, path, template)
    assert torch.equal(template["t"], before)


async def test_tied_tensors_of_a_later_rank_are_read_from_their_own_item(direct, tmp_path):
    first, other = torch.arange(6.0), torch.arange(6.0) + 10
    contents = [content_of({"a": first, "b": first + 1}, 0), content_of({"x": first + 5, "y": other, "z": other}, 1)]
    path = write_checkpoint(tmp_path / "c", contents)
    state = {name: torch.zeros(6) for name in "abxyz"}
    await load(direct, path, state)
    assert [state[name][0].item() for name in "abxyz"] == [0, 1, 5, 10, 10]


@pytest.fixture
def fake_world(request):
    """A process group of 4 ranks in which this process is rank 1; nothing is sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


@pytest.mark.parametrize("save", [save_state, stock_save])
async def test_a_dtensor_gets_its_own_shard(direct, tmp_path, fake_world, save):
    stored = torch.randn(10, 6)
    save(tmp_path / "c", {"t": stored})
    for placement, local in (
        (ShardPlacement(0), stored[3:6]),
        (ShardPlacement(1), stored[:, 2:4]),
        (Replicate(), stored),
    ):
        shard = torch.zeros(local.shape)
        target = DTensor.from_local(shard, fake_world, [placement], run_check=False, shape=(10, 6), stride=(6, 1))
        await load(direct, tmp_path / "c", {"t": target})
        assert torch.equal(shard, local), placement


@pytest.mark.parametrize(
    ("local", "placement", "message"),
    [
        (torch.zeros(10, 6), Partial(), r"'t' has a Partial placement .* give \.redistribute\(\)"),
        (torch.zeros(4, 6), ShardPlacement(0), r"'t' holds a shard of shape \(4, 6\) .* cuts one of \(3, 6\)"),
    ],
)
async def test_a_dtensor_that_no_shard_fits_is_no_damage(direct, tmp_path, fake_world, local, placement, message):
    save_state(tmp_path / "c", {"t": torch.randn(10, 6)})
    target = DTensor.from_local(local, fake_world, [placement], run_check=False, shape=(10, 6), stride=(6, 1))
    with pytest.raises(TemplateMismatchError, match=message) as caught:
        await load(direct, tmp_path / "c", {"t": target})
    assert not caught.value.target_modified
    assert not local.any()


async def test_a_sharded_module_and_its_new_optimizer_read_only_their_shards(direct, tmp_path, fake_world):
    model, optimizer = trained(1)
    state = {"model": model, "optim": optimizer, "pad": torch.zeros(3 << 20)}
    path = save_state(tmp_path / "c", state)
    fresh, _ = trained(2)
    for layer in (fresh[0], fresh[2]):
        for name, parameter in list(layer.named_parameters()):
            local = parameter.detach()[2:4].clone()
            sizes = {"shape": parameter.shape, "stride": parameter.stride()}
            shard = DTensor.from_local(local, fake_world, [ShardPlacement(0)], run_check=False, **sizes)
            setattr(layer, name, torch.nn.Parameter(shard))
    new = torch.optim.AdamW(fresh.parameters())
    await load(direct, path, {"model": fresh, "optim": new})
    for wanted, parameter in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(parameter.to_local(), wanted[2:4])
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(new.state[parameter][key].to_local(), optimizer.state[wanted][key][2:4])


async def test_a_dtensor_of_a_real_group_is_loaded(direct, tmp_path):
    stored = torch.randn(10, 6)
    save_state(tmp_path / "c", {"t": stored})
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        target = distribute_tensor(torch.zeros(10, 6), init_device_mesh("cpu", (1,)), [ShardPlacement(0)])
        await load(direct, tmp_path / "c", {"t": target})
        assert torch.equal(target.to_local(), stored)
    finally:
        dist.destroy_process_group()


async def test_each_rank_gets_its_own_value_and_does_not_expect_that_of_others(direct, tmp_path):
    contents = [
        content_of({"rng": PerRank(rank), **({"w": torch.ones(2)} if not rank else {})}, rank) for rank in range(2)
    ]
    path = write_checkpoint(tmp_path / "c", contents)
    for rank in range(2):
        state = {"rng": PerRank(None)}
        outcome = await load(direct, path, state, rank=rank, world_size=2)
        assert state["rng"].value == rank
        assert outcome.found.unexpected == (("w",) if rank == 0 else ())
    assert await read(direct, path, rank=1, world_size=2) == {"rng": 1}
    outcome = await load(direct, path, {"rng": PerRank(None)}, rank=0, world_size=1)
    assert outcome.found.unexpected == ("w",)
    with pytest.raises(MissingNameError, match="rank2"):
        await load(direct, path, {"rng": PerRank(None)}, rank=2, world_size=3)


async def test_an_empty_template_takes_what_its_rank_saved(direct, tmp_path):
    stages = [{f"stage{rank}": {"w": torch.full((2,), rank + 1.0)}, "rng": PerRank(rank)} for rank in range(2)]
    path = write_checkpoint(tmp_path / "c", [content_of(stage, rank) for rank, stage in enumerate(stages)])
    for rank in range(2):
        state, other = {}, {f"stage{1 - rank}": {}, "rng": PerRank(None)}
        outcome = await load(direct, path, state, rank=rank, world_size=2, strict=True)
        assert outcome.found.unexpected == ()
        assert list(state) == [f"stage{rank}", "rng"]
        assert state["rng"] == rank
        assert state[f"stage{rank}"]["w"].tolist() == [rank + 1.0] * 2
        await load(direct, path, other, rank=rank, world_size=2)
        assert other[f"stage{1 - rank}"]["w"].tolist() == [2.0 - rank] * 2, "a stage that another rank saved"
    with pytest.raises(MissingNameError, match=r"'rng\.rank2'"):
        await load(direct, path, {}, rank=2, world_size=3)
    state = {"stage0": {}, "rng": None}
    assert (await load(direct, path, state, rank=2, world_size=3, allow_missing=True)).found.missing == ("rng.rank2",)
    assert state["rng"] is None
    assert state["stage0"]["w"].tolist() == [1.0, 1.0]


async def test_a_name_of_another_rank_is_said_to_be_so_where_each_rank_reads_its_own_state(direct, tmp_path):
    path = staged(tmp_path)
    for only in ("stage1", "stage1.w", "rng.rank1"):
        with pytest.raises(MissingNameError, match=rf"'{only}' is what rank 1 saved.* rank 0 did: load\(\).*rank 1$"):
            await read(direct, path, only=[only], world_size=2)
    state = {"stage1": {"w": torch.zeros(2)}}
    await load(direct, path, state)
    assert state["stage1"]["w"].tolist() == [2, 2]
    assert "stage0" not in await read(direct, path, rank=1, world_size=2, only=["stage1"])
    with pytest.raises(MissingNameError, match="holds nothing named or below 'stage2'; aio-ckpt inspect"):
        await read(direct, path, only=["stage2"])


def staged(tmp_path):
    """A checkpoint of two stages of a pipeline, with a name and a PerRank value of their own each."""
    stages = [
        {
            f"stage{rank}": {"w": torch.full((2,), rank + 1.0)},
            "net": {f"{rank}.w": torch.full((1,), rank + 1.0)},
            "rng": PerRank(rank),
            f"own{rank}": [PerRank(rank)],
        }
        for rank in range(2)
    ]
    return write_checkpoint(tmp_path / "c", [content_of(stage, rank) for rank, stage in enumerate(stages)])


async def test_ranks_of_another_number_read_and_load_what_all_ranks_saved(direct, tmp_path):
    path = staged(tmp_path)
    for rank, world_size in ((0, 1), (1, 3)):
        found = await read(direct, path, rank=rank, world_size=world_size)
        assert (found["stage0"]["w"].tolist(), found["stage1"]["w"].tolist()) == ([1, 1], [2, 2])
        assert sorted(found["net"]) == ["0.w", "1.w"]
        assert found["rng"] == rank, "of this rank"
        assert found[f"own{1 - rank}"] == [{f"rank{1 - rank}": 1 - rank}]
    assert list(await read(direct, path, only=["stage1"])) == ["stage1"]
    net = torch.nn.ModuleDict({name: torch.nn.Module() for name in "01"})
    for module in net.values():
        module.w = torch.nn.Parameter(torch.zeros(1))
    outcome = await load(direct, path, state := {"net": net, "stage0": {}, "stage1": None, "rng": PerRank(None)})
    assert [module.w.item() for module in net.values()] == [1, 2]
    assert (state["stage0"]["w"].tolist(), state["stage1"]["w"].tolist()) == ([1, 1], [2, 2])
    assert outcome.found.dropped == ("own1.0.rank1", "rng.rank1")
    assert outcome.found.unexpected == ()


async def test_as_many_ranks_as_saved_drop_nothing(direct, tmp_path):
    outcome = await load(direct, staged(tmp_path), {"rng": PerRank(None)}, rank=0, world_size=2)
    assert outcome.found.dropped == ()


# -- damage -----------------------------------------------------------------------------------------


def two_sizes():
    return {"small": torch.arange(50.0), "big": torch.arange(2 * BLOCK_BYTES // 4 + 99.0), "obj": list(range(50))}


@FEW
@given(name=st.sampled_from(["small", "big", "obj"]), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
async def test_a_flipped_bit_in_any_tensor_or_object_is_found_and_named(direct, tmp_path_factory, name, place, bit):
    path = save_state(tmp_path_factory.mktemp("c") / "c", two_sizes())
    rank = (await opened(direct, path)).ranks[0]
    spans = {entry.fqns[0]: (entry.raw_offset, entry.raw_bytes) for entry in rank.tensors}
    spans |= {entry.fqns[0]: (entry.offset, entry.nbytes) for entry in rank.objects}
    offset, nbytes = spans[name]
    flip(data_file(path), offset + math.floor(place * nbytes), 1 << bit)
    state = {"small": torch.zeros(50), "big": torch.zeros(2 * BLOCK_BYTES // 4 + 99), "obj": "untouched"}
    with pytest.raises(CorruptCheckpointError, match=rf"__save-1_0_0.distcp.*'{name}'") as caught:
        await load(direct, path, state)
    assert caught.value.target_modified == (name != "obj"), "objects are read before a tensor is touched"
    assert state["big"].any() <= caught.value.target_modified
    assert state["obj"] == "untouched"
    with pytest.raises(CorruptCheckpointError, match=rf"__save-1_0_0.distcp.*'{name}'"):
        await read(direct, path)


@FEW
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@pytest.mark.parametrize("file", [".metadata", "aio_ckpt.save-1.json", "aio_ckpt.save-1.0.bin"])
async def test_a_flipped_bit_in_any_small_file_is_found(direct, tmp_path_factory, file, place, bit):
    path = save_state(tmp_path_factory.mktemp("c") / "c", two_sizes())
    size = (path / file).stat().st_size
    before = await opened(direct, path)
    flip(path / file, math.floor(place * size), 1 << bit)
    if file.endswith(".json"):  # fields that prove nothing (who wrote it, when, the minor version) may change
        with contextlib.suppress(CorruptCheckpointError, ValueError):
            assert (await opened(direct, path)).ranks == before.ranks
    else:
        with pytest.raises(CorruptCheckpointError, match=file):
            await opened(direct, path)


@pytest.mark.parametrize("save", [save_state, stock_save])
async def test_a_flipped_bit_in_a_plain_record_or_object_is_found(storage, tmp_path, save):
    save(tmp_path / "c", {"t": torch.arange(50000.0), "obj": list(range(200))})
    data = data_file(tmp_path / "c").read_bytes()
    for offset in (data.index(torch.arange(100.0, 200.0).numpy().tobytes()) + 5, data.index(bytes([75, 100, 75, 101]))):
        flip(data_file(tmp_path / "c"), offset)
        with pytest.raises(CorruptCheckpointError, match=r"'t'|'obj'"):
            await read(storage, tmp_path / "c")
        data_file(tmp_path / "c").write_bytes(data)


async def test_without_verification_damage_passes_and_is_said_to_be_unverified(storage, tmp_path):
    path = save_state(tmp_path / "c", {"t": torch.zeros(50)})
    flip(data_file(path), (await opened(storage, path)).ranks[0].tensors[0].raw_offset + 3)
    state = {"t": torch.zeros(50)}
    outcome = await load(storage, path, state, verify="never")
    assert outcome.fetched.has_unchecked
    assert state["t"][0] != 0


@pytest.mark.parametrize("save", [save_state, stock_save])
async def test_a_missing_or_truncated_data_file_is_named(storage, tmp_path, save):
    save(tmp_path / "c", {"t": torch.arange(50000.0)})
    file = data_file(tmp_path / "c")
    data = file.read_bytes()
    file.write_bytes(data[:100_000])
    with pytest.raises(CorruptCheckpointError, match=r"_0\.distcp"):
        await read(storage, tmp_path / "c")
    file.unlink()
    with pytest.raises(CorruptCheckpointError, match=r"_0\.distcp: missing"):
        await load(storage, tmp_path / "c", {"t": torch.zeros(50000)})


@pytest.mark.parametrize("change", [-1, 1])
async def test_a_data_file_of_another_length_is_refused_even_where_nothing_is_read(direct, tmp_path, change):
    path = save_state(tmp_path / "c", {"a": torch.ones(10), "z": torch.ones(5000)})
    with data_file(path).open("r+b") as file:
        file.truncate(data_file(path).stat().st_size + change)
    with pytest.raises(CorruptCheckpointError, match=r"__save-1_0_0\.distcp: .*bytes long"):
        await read(direct, path, only=["a"])


async def test_a_plain_item_that_is_not_what_the_metadata_says_is_refused(direct, tmp_path):
    stock_save(tmp_path / "c", {"t": torch.ones(5)})
    data = (tmp_path / "c" / ".metadata").read_bytes()
    assert b"float32" in data
    (tmp_path / "c" / ".metadata").write_bytes(data.replace(b"float32", b"float64"))
    with pytest.raises(CorruptCheckpointError, match=r"'t' is torch\.float32.*float64"):
        await read(direct, tmp_path / "c")


@pytest.mark.parametrize("file", ["aio_ckpt.save-1.0.bin", "aio_ckpt.save-1.1.bin"])
async def test_a_missing_or_swapped_manifest_is_named(direct, tmp_path, file):
    path = write_checkpoint(tmp_path / "c", sharded(torch.arange(60).reshape(12, 5), [6], range(2)))
    data = (path / file).read_bytes()
    (path / file).unlink()
    with pytest.raises(CorruptCheckpointError, match=file):
        await opened(direct, path)
    other = write_checkpoint(tmp_path / "d", sharded(torch.arange(60).reshape(12, 5), [6], range(2)), save_id="other")
    reseal(path, int(file[-5]), (other / file.replace("save-1", "other")).read_bytes())
    with pytest.raises(CorruptCheckpointError, match=f"{file}: of another save"):
        await opened(direct, path)
    reseal(path, int(file[-5]), data)
    await opened(direct, path)


async def test_swapped_data_files_are_found(direct, tmp_path):
    path = write_checkpoint(tmp_path / "c", sharded(torch.arange(60).reshape(12, 5), [6], range(2)))
    first, second = data_file(path).read_bytes(), data_file(path, 1).read_bytes()
    data_file(path).write_bytes(second)
    data_file(path, 1).write_bytes(first)
    with pytest.raises(CorruptCheckpointError, match="'t'"):
        await read(direct, path)


@pytest.mark.parametrize(
    "changed", [{"offsets": (1 << 45,)}, {"shape": (1 << 45,), "raw_bytes": 1 << 47}, {"stride": (1 << 40,)}]
)
async def test_forged_sizes_are_refused_before_anything_is_allocated(direct, tmp_path, changed):
    path = save_state(tmp_path / "c", {"t": torch.zeros(50)})
    forge(path, **changed)
    with pytest.raises(CorruptCheckpointError):
        await read(direct, path)


async def test_a_forged_plain_metadata_allocates_nothing(direct, tmp_path):
    import pickle

    stock_save(tmp_path / "c", {"t": torch.zeros(50)})
    found = pickle.loads((tmp_path / "c" / ".metadata").read_bytes())
    entry = found.state_dict_metadata["t"]
    entry.size = entry.chunks[0].sizes = torch.Size([1 << 45])
    object.__setattr__(entry.chunks[0], "sizes", torch.Size([1 << 45]))
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(CorruptCheckpointError, match="'t'"):
        await read(direct, tmp_path / "c")
    info = next(iter(found.storage_data.values()))
    info.length = 1 << 50
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(CorruptCheckpointError, match="not inside the file"):
        await read(direct, tmp_path / "c")


async def test_a_stock_save_into_a_directory_of_ours_is_read_as_what_it_is(direct, tmp_path):
    path = save_state(tmp_path / "c", {"t": torch.zeros(5)})
    stock_save(path, {"t": torch.ones(5)})
    assert (await opened(direct, path)).is_plain_dcp
    assert (await read(direct, path))["t"].tolist() == [1] * 5


# -- how it is read -----------------------------------------------------------------------------------


class CountingStorage(Storage):
    """The local storage, with a count of the reads in flight and a gate before each."""

    def __init__(self, executor):
        super().__init__(executor)
        self.in_flight = self.most = self.done = self.closed = 0
        self.gate = asyncio.Event()
        self.entered = asyncio.Event()

    async def open_data_file(self, path, *, page_cache="pass"):
        return CountingFile(self, await super().open_data_file(path, page_cache=page_cache))


class CountingFile:
    def __init__(self, owner, inner):
        self._owner, self._inner = owner, inner
        self.path, self.nbytes, self.is_direct = inner.path, inner.nbytes, inner.is_direct

    async def read_into(self, offset, *views):
        owner = self._owner
        owner.in_flight += 1
        owner.most = max(owner.most, owner.in_flight)
        if owner.in_flight == 3:
            owner.entered.set()
        await owner.gate.wait()
        owner.in_flight -= 1
        owner.done += 1
        return await self._inner.read_into(offset, *views)

    async def close(self):
        self._owner.closed += 1
        await self._inner.close()


async def test_as_many_reads_are_in_flight_as_there_are_readers(executor, tmp_path):
    path = save_state(tmp_path / "c", {f"t{i}": torch.zeros(5 << 20, dtype=torch.uint8) for i in range(20)})
    storage = CountingStorage(executor)
    task = asyncio.create_task(
        load(storage, path, {f"t{i}": torch.ones(5 << 20, dtype=torch.uint8) for i in range(20)})
    )
    await storage.entered.wait()
    storage.gate.set()
    await task
    assert storage.most == 3
    assert storage.closed == 1


async def test_a_cancelled_load_returns_when_nothing_touches_the_target_any_more(executor, tmp_path):
    path = save_state(tmp_path / "c", {f"t{i}": torch.ones(5 << 20, dtype=torch.uint8) for i in range(20)})
    storage = CountingStorage(executor)
    task = asyncio.create_task(
        load(storage, path, {f"t{i}": torch.zeros(5 << 20, dtype=torch.uint8) for i in range(20)})
    )
    await storage.entered.wait()
    task.cancel()
    _, pending = await asyncio.wait({task}, timeout=0.05)
    assert pending, "returned while reads were in flight"
    storage.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (storage.in_flight, storage.done, storage.closed) == (0, 3, 1)


async def test_load_state_dict_runs_only_after_everything_was_proven(direct, tmp_path):
    model, _ = trained(1)
    path = save_state(tmp_path / "c", {"model": model, "z": torch.ones(9)})
    rank = (await opened(direct, path)).ranks[0]
    flip(data_file(path), rank.tensors[-1].raw_offset)
    other, _ = trained(2)
    before = as_values(other.state_dict())
    with pytest.raises(CorruptCheckpointError, match="'z'"):
        await load(direct, path, {"model": other, "z": torch.zeros(9)})
    assert as_values(other.state_dict()) == before


async def test_items_written_through_a_stream_extension_are_refused_by_name(direct, tmp_path, monkeypatch):
    from torch.distributed.checkpoint._extension import ZStandard

    class Flipped(StreamTransformExtension):
        registry_name = staticmethod(lambda: "stream.zstd")
        from_descriptor = staticmethod(lambda version: Flipped())

        def get_descriptor(self):
            return "stream.zstd/1"

        def transform_to(self, output):
            class Writer(io.BytesIO):
                def close(self):
                    output.write(bytes(byte ^ 0xFF for byte in self.getvalue()))

            return Writer()

        def transform_from(self, input):
            return io.BytesIO(bytes(byte ^ 0xFF for byte in input.read(-1)))

    monkeypatch.setattr(ZStandard, "from_descriptor", Flipped.from_descriptor)
    writer = dcp.FileSystemWriter(str(tmp_path / "c"), _extensions=[Flipped()])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"t": torch.ones(5), "n": 3}, storage_writer=writer, no_dist=True)
    state = {"t": torch.zeros(5), "n": 0}
    message = r"'[tn]' was written through a stream extension of DCP.*dcp\.load with an aio_ckpt\.dcp\.Reader"
    with pytest.raises(UnsupportedLeafError, match=message):
        await load(direct, tmp_path / "c", state, trusted_objects=True)
    with pytest.raises(UnsupportedLeafError, match=message):
        await read(direct, tmp_path / "c", only=["t"], trusted_objects=True)
    assert not state["t"].any()


async def test_an_error_of_closing_the_data_file_says_that_the_template_was_filled(direct, tmp_path, monkeypatch):
    path = save_state(tmp_path / "c", {"t": torch.ones(50)})
    close = ReadFile.close

    async def failing(self):
        await close(self)
        raise ReadError(errno.EIO, "the disk is gone", str(self.path))

    monkeypatch.setattr(ReadFile, "close", failing)
    state = {"t": torch.zeros(50)}
    with pytest.raises(ReadError) as caught:
        await load(direct, path, state)
    assert state["t"].all()
    assert caught.value.target_modified
