"""``save_file(path="….safetensors")``: safetensors opens the file, and transformers the files of many."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gated_storage import TIMEOUT
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file
from tensor_bits import assert_same_tensor, random_tensor
from watched_writes import WatchedStorage, watched_engine

from aio_ckpt import SyncCheckpointEngine
from aio_ckpt.errors import ConfigError, CorruptCheckpointError, UnsupportedLeafError
from aio_ckpt.format.safetensors_file import PACKED, dtype_names, parse_header
from aio_ckpt.snapshot.capture import Capture

MIB = 1 << 20


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[SyncCheckpointEngine]:
    with SyncCheckpointEngine(tmp_path / "root") as opened:
        yield opened


def listing(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def metadata_of(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as opened:
        return dict(opened.metadata())


@st.composite
def states(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Tensors of all dtypes, some of them not row-major, conjugated, empty or without dimensions."""
    found = {}
    for seed, name in enumerate(draw(st.lists(st.text(min_size=1, max_size=4), unique=True, max_size=6))):
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        dtype = draw(st.sampled_from(sorted(dtype_names, key=str)))
        tensor = random_tensor(shape or (1,) if dtype is PACKED else shape, dtype, seed)
        kind = draw(st.sampled_from(("plain", "permuted", "conj", "param")))
        if kind == "permuted" and tensor.dim():
            tensor = tensor.permute(*reversed(range(tensor.dim())))
        elif kind == "conj":
            tensor = tensor.conj()
        elif kind == "param":
            tensor = torch.nn.Parameter(tensor, requires_grad=False)
        found[name] = tensor
    found.pop("__metadata__", None)
    return found


@given(state=states())
@examples(nightly=300)
def test_safetensors_reads_what_was_given(
    tmp_path_factory: pytest.TempPathFactory, state: dict[str, torch.Tensor]
) -> None:
    path = tmp_path_factory.mktemp("file") / "m.safetensors"
    with SyncCheckpointEngine(path.parent / "root") as engine:
        engine.save_file(state, path).result(TIMEOUT)
    got = load_file(path)
    assert got.keys() == state.keys()
    for name, tensor in got.items():
        assert_same_tensor(tensor, state[name])
    data = path.read_bytes()
    header_bytes = int.from_bytes(data[:8], "little")
    assert (8 + header_bytes) % 64 == 0
    stored, metadata = parse_header(data[8 : 8 + header_bytes], len(data))
    assert {tensor.name for tensor in stored} == state.keys()
    assert all(tensor.start % tensor.dtype.itemsize == 0 for tensor in stored)
    assert metadata == {"format": "pt"}


def test_of_tied_names_the_first_is_stored(engine: SyncCheckpointEngine, tmp_path: Path) -> None:
    def made() -> torch.nn.Module:
        model = torch.nn.ModuleDict({"z_emb": torch.nn.Linear(3, 3), "a_head": torch.nn.Linear(3, 3)})
        model["a_head"].weight = model["z_emb"].weight
        return model

    model = made()
    engine.save_file(model.state_dict(), tmp_path / "m.safetensors", metadata={"run": "7"}).result(TIMEOUT)
    assert load_file(tmp_path / "m.safetensors").keys() == {"z_emb.weight", "z_emb.bias", "a_head.bias"}
    assert metadata_of(tmp_path / "m.safetensors") == {"format": "pt", "run": "7", "a_head.weight": "z_emb.weight"}
    other = made()
    load_model(other, tmp_path / "m.safetensors")
    assert torch.equal(other["a_head"].weight, model["a_head"].weight)


def test_views_that_overlap_are_refused_and_others_are_not(engine: SyncCheckpointEngine, tmp_path: Path) -> None:
    whole = torch.arange(12.0)
    engine.save_file({"a": whole[:6], "b": whole[6:]}, tmp_path / "m.safetensors").result(TIMEOUT)
    assert load_file(tmp_path / "m.safetensors")["b"].tolist() == whole[6:].tolist()
    with pytest.raises(UnsupportedLeafError, match=r"'whole' and 'b' share memory.*clone\(\)"):
        engine.save_file({"b": whole[6:], "whole": whole}, tmp_path / "n.safetensors")
    assert listing(tmp_path) == ["m.safetensors"]


def test_large_states_are_split_with_an_index(engine: SyncCheckpointEngine, tmp_path: Path) -> None:
    state = {f"w{n}": torch.full((n + 1, 1000), float(n)) for n in range(6)}
    report = engine.save_file(state, tmp_path / "model.safetensors", max_shard_bytes=25_000).result(TIMEOUT)
    assert report is not None
    assert report.path == tmp_path / "model.safetensors.index.json"
    index = json.loads(report.path.read_text())
    assert index["metadata"] == {"total_size": 4 * 21 * 1000}
    assert list(index["weight_map"].values()) == [f"model-{n:05d}-of-00004.safetensors" for n in (1, 1, 1, 2, 3, 4)]
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name], state[name])
    engine.save_file(state, tmp_path / "one.safetensors", max_shard_bytes=MIB).result(TIMEOUT)
    assert "one.safetensors" in listing(tmp_path), "what fits one file has no index"


def test_dtypes_and_names_are_changed_on_the_way(engine: SyncCheckpointEngine, tmp_path: Path) -> None:
    state = {"a.w": torch.full((9,), 0.3), "a.n": torch.arange(3)}
    path = tmp_path / "m.safetensors"
    engine.save_file(state, path, dtype=torch.bfloat16, rename={"a.w": "model.w"}).result(TIMEOUT)
    assert torch.equal(load_file(path)["model.w"], state["a.w"].bfloat16())
    assert load_file(path)["a.n"].dtype is torch.int64
    engine.save_file(state, path, rename=lambda name: f"model.{name}").result(TIMEOUT)
    assert load_file(path).keys() == {"model.a.w", "model.a.n"}


@pytest.mark.skipif(PACKED is None, reason="torch 2.8 brought the dtype")
def test_block_scales_and_packed_numbers_are_stored_as_safetensors_stores_them(
    engine: SyncCheckpointEngine, tmp_path: Path
) -> None:
    """The header counts packed numbers, and the sizes count bytes, whatever the version of safetensors."""
    state = {"w": random_tensor((2, 4), PACKED), "s": torch.ones(4).to(torch.float8_e8m0fnu)}
    save_file(state, tmp_path / "theirs.safetensors")
    report = engine.save_file(state, tmp_path / "ours.safetensors").result(TIMEOUT)
    assert report is not None
    assert report.raw_bytes == 12
    ours, theirs = (header_of(tmp_path / f"{name}.safetensors") for name in ("ours", "theirs"))
    assert [{key: ours[name][key] for key in ("dtype", "shape")} for name in state] == [
        {"dtype": "F4", "shape": [2, 8]},
        {"dtype": "F8_E8M0", "shape": [4]},
    ]
    assert all(ours[name]["shape"] == theirs[name]["shape"] for name in state)
    split = engine.save_file(state, tmp_path / "m.safetensors", max_shard_bytes=8).result(TIMEOUT)
    assert split is not None
    assert json.loads(split.path.read_text())["metadata"] == {"total_size": 12}
    cast = engine.save_file(state | {"f": torch.ones(2)}, tmp_path / "c.safetensors", dtype=torch.bfloat16)
    cast.result(TIMEOUT)
    assert_same_tensor(load_file(tmp_path / "c.safetensors")["w"], state["w"])


def header_of(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return dict(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]))


@pytest.mark.skipif(PACKED is None, reason="torch 2.8 brought the dtype")
def test_packed_numbers_that_no_file_can_hold_are_refused(engine: SyncCheckpointEngine, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedLeafError, match=r"'w' is a torch.float4_e2m1fn_x2 without dimensions.*reshape\(1\)"):
        engine.save_file({"w": random_tensor((), PACKED)}, tmp_path / "m.safetensors")
    with pytest.raises(ConfigError, match=r"dtype=.*float4_e2m1fn_x2: give a floating-point dtype"):
        engine.save_file({"w": torch.ones(2)}, tmp_path / "m.safetensors", dtype=PACKED)
    for shape in ("[]", "[2,3]"):
        header = f'{{"a":{{"dtype":"F4","shape":{shape},"data_offsets":[0,3]}}}}'.encode()
        with pytest.raises(CorruptCheckpointError, match="'a' has an odd number of packed numbers"):
            parse_header(header, len(header) + 11)


@pytest.mark.parametrize(
    ("obj", "error", "text"),
    [
        ([1], ConfigError, "holds a dict of tensors, no list"),
        ({1: torch.ones(1)}, ConfigError, "1 is no name"),
        ({"n": 1}, UnsupportedLeafError, "'n' is a int"),
        ({"s": torch.eye(2).to_sparse()}, UnsupportedLeafError, "'s' is no plain tensor"),
        ({"m": torch.empty(2, device="meta")}, UnsupportedLeafError, "'m' is no plain tensor"),
        ({"c": torch.ones(1, dtype=torch.complex128)}, UnsupportedLeafError, "has no torch.complex128"),
    ],
)
def test_what_the_format_cannot_hold_is_refused_by_name(
    engine: SyncCheckpointEngine, tmp_path: Path, obj: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        engine.save_file(obj, tmp_path / "m.safetensors")
    assert listing(tmp_path) == []


@pytest.mark.parametrize(
    "options",
    [
        {"metadata": {"n": 1}},
        {"max_shard_bytes": 0},
        {"max_shard_bytes": "5GB"},
        {"dtype": "bfloat16"},
        {"dtype": torch.int8},
        {"rename": "x"},
        {"rename": {"missing": "x"}},
        {"rename": lambda _: "same"},
    ],
)
def test_bad_options_are_refused(engine: SyncCheckpointEngine, tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))}="):
        engine.save_file({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "m.safetensors", **options)


def test_options_of_safetensors_are_refused_for_other_files(engine: SyncCheckpointEngine, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'m.pt'.*end in .safetensors"):
        engine.save_file({"a": torch.ones(1)}, tmp_path / "m.pt", metadata={"a": "b"})


@pytest.mark.parametrize(
    ("header", "text"),
    [
        (b"{", "malformed"),
        (b"[]", "malformed"),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,8]}}', "need 4"),
        (b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}', "none"),
        (b'{"a":{"dtype":"X","shape":[1],"data_offsets":[0,4]}}', "does not know 'X'"),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', "gap"),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', "speaks of"),
    ],
)
def test_a_damaged_header_is_named(header: bytes, text: str) -> None:
    with pytest.raises(CorruptCheckpointError, match=text):
        parse_header(header, 10_000)


def test_from_pretrained_reads_the_files(engine: SyncCheckpointEngine, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=64, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    config.save_pretrained(tmp_path / "hf")
    engine.save_file(model.state_dict(), tmp_path / "hf" / "model.safetensors", max_shard_bytes=8192).result(TIMEOUT)
    other = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf")
    for (name, mine), theirs in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), name
    assert other.lm_head.weight is other.transformer.wte.weight


def test_a_tensor_with_the_name_of_the_metadata_is_refused(engine: SyncCheckpointEngine, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is the name of the metadata"):
        engine.save_file({"__metadata__": torch.ones(2)}, tmp_path / "m.safetensors")


# -- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("are_copies_pending", [False, True])
def test_files_that_together_exceed_the_budget_are_saved_within_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, are_copies_pending: bool
) -> None:
    """The memory of each file returns when its own copies and writes end. Those from a GPU end in a thread."""
    if are_copies_pending:
        monkeypatch.setattr(Capture, "is_done", False)
    state = {f"w{number}": torch.full((500_000,), float(number)) for number in range(8)}
    held: list[int] = []
    storage = WatchedStorage(lambda _: held.append(engine.lifetime.arena_bytes))
    with watched_engine(tmp_path, storage, budget_bytes=5 * MIB, stall_timeout_secs=TIMEOUT) as engine:
        ticket = engine.save_file(state, tmp_path / "m.safetensors", max_shard_bytes=4_000_000)
        ticket.staged.result(TIMEOUT)
        ticket.result(TIMEOUT)
        assert engine.lifetime.leases == 0
    assert 4_000_000 <= max(held) <= 5 * MIB
    for number in range(8):
        file = load_file(tmp_path / f"m-{number // 2 + 1:05d}-of-00004.safetensors")
        assert torch.equal(file[f"w{number}"], state[f"w{number}"])
