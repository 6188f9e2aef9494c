"""``export``, ``import``, ``convert``: what comes out is what went in, whole or not at all, and not held in memory."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import struct
import warnings
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_maker import content_of, write_checkpoint
from command_line import called, document, flip, save_by_dcp, state
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tensor_bits import assert_same_tensor, random_tensor
from warm_python import run_warm

import aio_ckpt
from aio_ckpt.cli import converting
from aio_ckpt.config import EngineConfig
from aio_ckpt.format import zip_records
from aio_ckpt.format.safetensors_file import PACKED
from aio_ckpt.leaves.values import PerRank
from aio_ckpt.memory import arena_lifetimes
from aio_ckpt.sync import SyncCheckpointEngine

STEP = "step_000000010"
MIB = 1 << 20


def test_export_to_torch_gives_the_nested_state(root, tmp_path, capsys):
    code, told = document(capsys, "export", root / STEP, "--to", "torch", tmp_path / "out.pt")
    assert (code, told["step"], told["path"]) == (0, 10, str(tmp_path / "out.pt"))
    wanted, got = aio_ckpt.read(root / STEP), torch.load(tmp_path / "out.pt", weights_only=True, mmap=True)
    assert torch.equal(got["model"]["embed"], wanted["model"]["embed"])
    assert got["model"]["embed"].data_ptr() == got["model"]["head"].data_ptr()
    assert got["lr"] == 1e-3
    assert got["model"]["bias"].dtype is torch.bfloat16


def test_export_to_safetensors_takes_a_branch(root, tmp_path, capsys):
    code, out, _ = called(
        capsys, "export", root, "--branch", "model", "--to", "safetensors", tmp_path / "m.safetensors"
    )
    assert code == 0
    assert "m.safetensors" in out
    got = load_file(tmp_path / "m.safetensors")
    assert got.keys() == {"embed", "bias"}, "head is tied to embed"
    assert torch.equal(got["embed"], state()["model"]["embed"])
    code, _, err = called(capsys, "export", root, tmp_path / "all.safetensors")
    assert code == 1
    assert "'lr' is no tensor" in err
    assert "--branch model" in err
    (tmp_path / "s").mkdir()
    torch.save({"te": {"w": torch.ones(2), "_extra_state": None}}, tmp_path / "s/s.pt")
    code, _, err = called(capsys, "convert", tmp_path / "s/s.pt", tmp_path / "y.safetensors", "--branch", "te")
    assert (code, "give a branch below te, or an OUT that ends in .pt" in err) == (1, True), err
    code, _, err = called(capsys, "export", root, tmp_path / "x.pt", "--branch", "modle")
    assert (code, "'modle'; aio-ckpt inspect lists its names" in err) == (1, True)


@pytest.mark.parametrize("by", ["ours", "dcp", "file"])
def test_a_branch_may_end_inside_of_a_key(tmp_path, capsys, by):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Sequential(torch.nn.Linear(2, 2)))
    source, values = tmp_path / "source", {"model": model.state_dict(), "ema.model": [torch.ones(2)]}
    if by == "ours":
        with SyncCheckpointEngine(source) as engine:
            engine.save(values, step=1).result()
    elif by == "dcp":
        save_by_dcp(values, source)
    else:
        source = tmp_path / "source.pt"
        torch.save(values, source)
    wanted = {"model.1": {"0.weight", "0.bias"}, "model.1.0": {"weight", "bias"}, "ema": {"model.0"}}
    for branch, names in wanted.items():
        assert called(capsys, "convert", source, tmp_path / "o.safetensors", "--branch", branch)[0] == 0
        assert load_file(tmp_path / "o.safetensors").keys() == names
    assert called(capsys, "convert", source, tmp_path / "o.pt", "--branch", "model.1.0.weight")[0] == 0
    assert torch.equal(torch.load(tmp_path / "o.pt"), model[1][0].weight)
    code, _, err = called(capsys, "convert", source, tmp_path / "o.pt", "--branch", "model.1.0.w")
    assert (code, "nothing named or below 'model.1.0.w'" in err) == (1, True), err


def test_a_value_of_rank_0_is_a_branch(tmp_path, capsys):
    with SyncCheckpointEngine(tmp_path / "root") as engine:
        engine.save({"rng": PerRank(torch.arange(3)), "it": PerRank({"at": torch.ones(2)})}, step=1).result()
    for branch, wanted in (("rng.rank0", [0, 1, 2]), ("it.rank0.at", [1, 1]), ("rng", [0, 1, 2])):
        assert called(capsys, "export", tmp_path / "root", tmp_path / "o.pt", "--branch", branch)[0] == 0
        assert torch.load(tmp_path / "o.pt").tolist() == wanted


def test_tensors_with_attributes_are_imported_and_keep_them(tmp_path, capsys):
    """A compiled optimizer marks each tensor of its state."""
    tensor = torch.ones(3)
    tensor._dynamo_static_input_type = "guarded"
    torch.save({"exp_avg": tensor}, tmp_path / "s.pt")
    assert called(capsys, "convert", tmp_path / "s.pt", tmp_path / "o.pt")[0] == 0
    assert vars(torch.load(tmp_path / "o.pt")["exp_avg"]) == {"_dynamo_static_input_type": "guarded"}
    assert called(capsys, "import", tmp_path / "s.pt", tmp_path / "root")[0] == 0


def test_a_file_in_a_checkpoint_is_refused_before_anything_is_read(root, tmp_path, capsys, read):
    out = root / "step_000000010" / "x.pt"
    code, _, err = called(capsys, "export", root, out)
    assert (code, f"{out}: lies in a checkpoint: give OUT in another directory" in err) == (2, True), err
    assert not read


def test_a_branch_of_several_values_is_whole_or_refused(tmp_path, capsys):
    source, out = tmp_path / "s.pt", tmp_path / "o.safetensors"
    torch.save({"a": {"x": torch.ones(1)}, "a.y": torch.ones(1), "b": torch.ones(1), "b.y": torch.ones(1)}, source)
    assert called(capsys, "convert", source, out, "--branch", "a")[0] == 0
    assert load_file(out).keys() == {"x", "y"}
    code, _, err = called(capsys, "convert", source, out, "--branch", "b")
    assert (code, "several values lie at 'b'" in err) == (1, True), err


def test_an_option_that_the_result_cannot_have_is_refused(root, tmp_path, capsys):
    for option in (("--branch", "model"), ("--dtype", "bfloat16"), ("--max-shard-bytes", 5)):
        code, _, err = called(capsys, "convert", root, tmp_path / "other", *option)
        assert (code, f"{option[0]} is for files, and other is a root" in err) == (2, True), err
    code, _, err = called(capsys, "convert", root, tmp_path / "o.pt", "--step", 3)
    assert (code, "--step is for a root, and o.pt is a file" in err) == (2, True), err
    assert not {"other", "o.pt"} & set(os.listdir(tmp_path))


@pytest.mark.parametrize(
    ("out", "code", "text"),
    [
        ("dir.pt", 2, "dir.pt': is a directory"),
        ("all.safetensors", 1, "'lr' is no tensor"),
        ("{root}", 1, "step 10 does not exceed step 20, the newest in {root}: give --step 21"),
    ],
)
def test_what_cannot_be_made_is_refused_before_tensors_are_read(root, tmp_path, capsys, read, out, code, text):
    (tmp_path / "dir.pt").mkdir()
    place = tmp_path / out.format(root=root)
    got, _, err = called(capsys, "convert", root / STEP, place)
    assert (got, text.format(root=root) in err) == (code, True), err
    assert not [name for name in read if name.startswith("model")]


@pytest.mark.parametrize("command", ["import", "convert"])
def test_a_file_becomes_no_step_below_the_newest(root, tmp_path, capsys, command):
    (tmp_path / "m.pt").write_bytes(b"not looked at before the step is checked")
    code, _, err = called(capsys, command, tmp_path / "m.pt", root, "--step", 3)
    assert (code, f"the newest in {root}: give --step 21 or a higher one" in err) == (1, True), err


def test_export_of_a_file_names_convert(tmp_path, capsys):
    torch.save({"a": torch.ones(1)}, tmp_path / "a.pt")
    code, _, err = called(capsys, "export", tmp_path / "a.pt", tmp_path / "b.safetensors")
    assert (code, "a.pt: is a file: give a checkpoint, or take 'aio-ckpt convert'" in err) == (1, True), err


def test_export_casts_and_splits(root, tmp_path, capsys):
    options = ("--branch", "model", "--dtype", "float16", "--max-shard-bytes", "1000")
    code, told = document(capsys, "export", root, tmp_path / "m.safetensors", *options)
    assert (code, Path(told["path"]).name) == (0, "m.safetensors.index.json")
    assert load_file(tmp_path / "m-00001-of-00002.safetensors")["embed"].dtype is torch.float16


@pytest.mark.skipif(PACKED is None, reason="torch 2.8 brought the dtype")
def test_block_scales_and_packed_numbers_are_converted_bit_for_bit(tmp_path, capsys):
    """safetensors -> a step -> safetensors, and torch.save."""
    state = {"w": random_tensor((2, 4), PACKED), "s": random_tensor((4,), torch.float8_e8m0fnu)}
    save_file(state, tmp_path / "theirs.safetensors")
    for call in (
        ("import", tmp_path / "theirs.safetensors", tmp_path / "root"),
        ("export", tmp_path / "root", tmp_path / "out.safetensors"),
        ("convert", tmp_path / "out.safetensors", tmp_path / "out.pt"),
        ("convert", tmp_path / "out.pt", tmp_path / "again.safetensors"),
    ):
        assert document(capsys, *call)[0] == 0
    for name in ("out.safetensors", "again.safetensors"):
        for key, tensor in load_file(tmp_path / name).items():
            assert_same_tensor(tensor, state[key])


def test_export_splits_a_state_whose_files_together_exceed_its_memory(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(converting, "_BUDGET_BYTES", 1 * MIB)
    monkeypatch.setattr(converting, "EngineConfig", partial(EngineConfig, stall_timeout_secs=20))
    with SyncCheckpointEngine(tmp_path / "root") as engine:
        engine.save({f"w{n}": torch.full((100_000,), float(n)) for n in range(8)}).result()
    code, _ = document(
        capsys, "export", tmp_path / "root", tmp_path / "m.safetensors", "--max-shard-bytes", str(800_000)
    )
    assert code == 0
    assert load_file(tmp_path / "m-00004-of-00004.safetensors")["w7"].unique().tolist() == [7]


@pytest.mark.parametrize("out", ["out.pt", "out.safetensors", "out"])
def test_too_little_memory_names_no_setting_of_the_engine(tmp_path, capsys, monkeypatch, out):
    def refuse(*_):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    torch.save({"a": torch.ones(3)}, tmp_path / "a.pt")
    monkeypatch.setattr(arena_lifetimes, "map_arena", refuse)
    code, _, err = called(capsys, "convert", tmp_path / "a.pt", tmp_path / out)
    assert (code, "lacks the memory" in err, "ulimit -v" in err, "budget_bytes" in err) == (1, True, True, False), err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--to", "torch", "x.safetensors"), "should end in .pt"),
        (("weights/",), "weights: give the file OUT a suffix, which tells its format: .safetensors, .pt"),
        (("--dtype", "int33", "x.safetensors"), "--dtype int33: no such floating-point dtype"),
        (("--dtype", "int8", "x.safetensors"), "--dtype int8: no such floating-point dtype"),
        (("--dtype", "float16", "x.pt"), "are for .safetensors"),
    ],
)
def test_options_that_do_not_fit_are_refused(root, tmp_path, capsys, monkeypatch, arguments, text):
    monkeypatch.chdir(tmp_path)
    code, _, err = called(capsys, "export", root, *arguments)
    assert (code, text in err) == (2, True), err
    assert called(capsys, "export", root, "no/such/dir/x.pt")[0] == 1


async def test_a_damaged_checkpoint_is_not_exported(root, tmp_path, capsys):
    (tmp_path / "out.pt").write_bytes(b"old")
    await flip(root / STEP, "model.embed")
    code, _, err = called(capsys, "export", root / STEP, tmp_path / "out.pt")
    assert (code, "model.embed" in err, f"{root / STEP}: " in err) == (1, True, True), err
    assert "verify" not in err
    await flip(max(root.glob("step_*")), "model.embed")
    code, _, err = called(capsys, "export", root, tmp_path / "out.pt")
    assert (code, "model.embed" in err, f"`aio-ckpt verify {root}` tells which" in err) == (1, True, True), err
    assert (tmp_path / "out.pt").read_bytes() == b"old"
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_dcp_and_files_become_steps_and_back(tmp_path, capsys):
    values = {"model": {"w": torch.arange(10.0), "b": torch.ones(3, dtype=torch.bfloat16)}, "n": 7}
    save_by_dcp(values, tmp_path / "dcp")
    assert called(capsys, "convert", tmp_path / "dcp", tmp_path / "ours", "--step", 3)[0] == 0
    with SyncCheckpointEngine(tmp_path / "ours") as engine:
        assert engine.steps() == [3]
        assert engine.read()["n"] == 7
    assert called(capsys, "convert", tmp_path / "ours", tmp_path / "all.pt")[0] == 0
    assert torch.equal(torch.load(tmp_path / "all.pt")["model"]["w"], values["model"]["w"])
    assert called(capsys, "import", tmp_path / "all.pt", tmp_path / "again")[0] == 0
    template = {"model": {"w": torch.zeros(10), "b": torch.zeros(3, dtype=torch.bfloat16)}, "n": 0}
    with warnings.catch_warnings(action="ignore"):
        dcp.load(template, checkpoint_id=tmp_path / "again/step_000000001", no_dist=True)
    assert torch.equal(template["model"]["w"], values["model"]["w"])
    assert template["n"] == 7


def test_safetensors_are_imported_with_their_tied_names(tmp_path, capsys):
    w = torch.arange(6.0)
    with SyncCheckpointEngine(tmp_path / "root") as engine:
        engine.save_file(
            {"w": w, "head": w, "n": torch.ones(2)}, tmp_path / "m.safetensors", max_shard_bytes=24
        ).result()
    assert called(capsys, "import", tmp_path / "m.safetensors.index.json", tmp_path / "ours", "--step", 5)[0] == 0
    got = aio_ckpt.read(tmp_path / "ours/step_000000005")
    assert got.keys() == {"w", "head", "n"}
    assert got["head"].data_ptr() == got["w"].data_ptr()


def test_tensors_of_several_dtypes_become_a_torch_file_that_holds_no_byte_more(tmp_path, capsys):
    tensors = {"w": torch.ones(40, 40, dtype=torch.bfloat16), "n": torch.rand(3), "ids": torch.arange(5)}
    save_file(tensors, tmp_path / "m.safetensors")
    assert called(capsys, "convert", tmp_path / "m.safetensors", tmp_path / "m.pt")[0] == 0
    got = torch.load(tmp_path / "m.pt", weights_only=True)
    assert got.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert_same_tensor(got[name], tensor)
        assert got[name].untyped_storage().nbytes() == tensor.nbytes
    assert called(capsys, "convert", tmp_path / "m.safetensors", tmp_path / "n.pt", "--branch", "n")[0] == 0
    assert (tmp_path / "n.pt").stat().st_size < tensors["w"].nbytes


def test_a_branch_of_one_tensor_has_the_last_part_of_its_name(tmp_path, capsys):
    torch.save({"a": {"b": torch.arange(3)}}, tmp_path / "m.pt")
    assert called(capsys, "convert", tmp_path / "m.pt", tmp_path / "b.safetensors", "--branch", "a.b")[0] == 0
    assert {name: tensor.tolist() for name, tensor in load_file(tmp_path / "b.safetensors").items()} == {"b": [0, 1, 2]}


def test_a_storage_without_a_tensor_needs_trust_and_is_not_lost(tmp_path, capsys):
    storage = torch.arange(3.0).untyped_storage()
    torch.save({"s": storage, "w": torch.ones(2)}, tmp_path / "s.pt")
    code, _, err = called(capsys, "convert", tmp_path / "s.pt", tmp_path / "out.pt")
    assert (code, "torch.UntypedStorage outside of a tensor" in err, "--trusted" in err) == (1, True, True), err
    assert called(capsys, "convert", tmp_path / "s.pt", tmp_path / "out.pt", "--trusted")[0] == 0
    assert torch.load(tmp_path / "out.pt")["s"].tolist() == storage.tolist()


def test_the_metadata_of_a_safetensors_file_stays_in_another(tmp_path, capsys):
    w = torch.rand(4)
    with SyncCheckpointEngine(tmp_path / "root") as engine:
        engine.save_file({"w": w, "head": w}, tmp_path / "m.safetensors", metadata={"rank": "8"}).result()
    assert (
        called(capsys, "convert", tmp_path / "m.safetensors", tmp_path / "o.safetensors", "--dtype", "float16")[0] == 0
    )
    with safe_open(tmp_path / "o.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "rank": "8", "head": "w"}


def write_shards(folder: Path) -> None:
    """Two safetensors files, and their index."""
    files = {"a.w": "model-00001-of-00002.safetensors", "b.w": "model-00002-of-00002.safetensors"}
    for name, file in files.items():
        save_file({name: torch.rand(3)}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


@pytest.mark.parametrize("source", ["model.safetensors.index.json", "model-00001-of-00002.safetensors"])
def test_no_conversion_removes_a_file_of_its_source(tmp_path, capsys, source):
    write_shards(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    there = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    for out in (tmp_path / "model.safetensors", tmp_path / "link/model.safetensors"):
        code, _, err = called(capsys, "convert", tmp_path / source, out, "--branch", "a")
        assert (code, "a file of the source: give OUT in another directory" in err) == (2, True), err
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == there
    assert called(capsys, "convert", tmp_path / source, tmp_path / "other.safetensors", "--branch", "a")[0] == 0


@pytest.mark.parametrize("out", ["m.pt", "link.pt"])
def test_no_conversion_replaces_its_source(tmp_path, capsys, out):
    torch.save({"a": torch.ones(3), "b": torch.ones(3)}, tmp_path / "m.pt")
    (tmp_path / "link.pt").symlink_to("m.pt")
    code, _, err = called(capsys, "convert", tmp_path / "m.pt", tmp_path / out, "--branch", "a")
    assert (code, "take the place of m.pt, a file of the source" in err) == (2, True), err
    assert torch.load(tmp_path / "m.pt").keys() == {"a", "b"}


def test_the_next_step_of_a_root_is_taken_without_a_word_to_a_trainer(tmp_path, capsys, caplog):
    torch.save({"a": torch.ones(3)}, tmp_path / "m.pt")
    for step in (1, 2):
        code, told = document(capsys, "import", tmp_path / "m.pt", tmp_path / "root")
        assert (code, told["step"]) == (0, step)
    assert not caplog.records


def test_a_checkpoint_of_lightning_names_how_its_file_is_made(tmp_path, capsys):
    with SyncCheckpointEngine(tmp_path / "root") as engine:
        engine.save({"state_dict": {"w": torch.ones(3)}, "aio_ckpt_meta": b"rest"}, 1).result()
    code, _, err = called(capsys, "convert", tmp_path / "root/step_000000001", tmp_path / "m.ckpt")
    assert (code, "torch.save(AioCheckpointIO().load_checkpoint(" in err) == (1, True), err
    assert called(capsys, "export", tmp_path / "root", tmp_path / "m.ckpt", "--branch", "state_dict")[0] == 0


def test_the_index_of_several_torch_files_is_converted(tmp_path, capsys):
    places = {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}
    for name, file in places.items():
        torch.save({name: torch.full((3,), float(ord(name)))}, tmp_path / file)
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    assert called(capsys, "convert", index, tmp_path / "m.safetensors")[0] == 0
    got = load_file(tmp_path / "m.safetensors")
    assert {name: tensor.tolist() for name, tensor in got.items()} == {"a": [97.0] * 3, "b": [98.0] * 3}
    torch.save([1], tmp_path / places["b"])
    code, _, err = called(capsys, "convert", index, tmp_path / "n.safetensors")
    assert (code, "holds a list, where its index tells a dict" in err) == (1, True), err


@pytest.mark.parametrize("name", ["m.safetensor", "m.PT"])
def test_a_mistyped_suffix_makes_no_root(tmp_path, capsys, name):
    torch.save({"a": torch.ones(1)}, tmp_path / "a.pt")
    code, _, err = called(capsys, "convert", tmp_path / "a.pt", tmp_path / name)
    assert (code, "is that a file or a root?" in err) == (2, True), err
    assert os.listdir(tmp_path) == ["a.pt"]
    assert called(capsys, "convert", tmp_path / "a.pt", tmp_path / "run.v2")[0] == 0


def test_a_torch_file_becomes_a_safetensors_file(tmp_path, capsys):
    torch.save({"a": torch.arange(5), "b": {"c": torch.ones(2)}}, tmp_path / "pytorch_model.bin")
    assert called(capsys, "convert", tmp_path / "pytorch_model.bin", tmp_path / "m.safetensors")[0] == 0
    assert load_file(tmp_path / "m.safetensors")["b.c"].tolist() == [1, 1]


def test_damaged_and_foreign_files_are_refused(tmp_path, capsys):
    torch.save({"a": torch.full((100,), 3.0)}, tmp_path / "a.pt")
    data = bytearray((tmp_path / "a.pt").read_bytes())
    data[data.index(torch.full((9,), 3.0).numpy().tobytes()) + 8] ^= 1
    (tmp_path / "a.pt").write_bytes(data)
    save_file({"a": torch.ones(3)}, tmp_path / "b.safetensors")
    os.truncate(tmp_path / "b.safetensors", 70)
    (tmp_path / "c.pt").write_bytes(b"no zip")
    torch.save({"a": torch.ones(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    torch.save({"a": torch.nn.Linear(1, 1)}, tmp_path / "code.pt")
    torch.save({"a": torch.ones(3)}, tmp_path / "cut.pt")
    os.truncate(tmp_path / "cut.pt", 400)
    with zipfile.ZipFile(tmp_path / "zip.pt", "w") as archive:
        archive.writestr("a", "b")
    for name, text in (
        ("a.pt", "a.pt is damaged: the CRC32 of a/data/0 differs"),
        ("b.safetensors", "b.safetensors"),
        ("c.pt", "no torch.save file"),
        ("old.pt", "old.pt: has the format of torch before 1.6: load it by torch.load and save it"),
        ("code.pt", "code.pt: only running code can read an object in it (torch.nn.modules.linear.Linear)"),
        ("cut.pt", "cut.pt is damaged"),
        ("zip.pt", "zip.pt: does not unpickle: its zip has no record data.pkl"),
    ):
        code, _, err = called(capsys, "import", tmp_path / name, tmp_path / "root")
        assert (code, text in err) == (1, True), err
        assert not (tmp_path / "root").exists()


NUMPY = {
    "best": np.float64(0.1),
    "count": np.int32(7),
    "text": np.str_("text"),
    "flag": np.bool_(True),
    "history": np.arange(6.0).reshape(2, 3),
    "transposed": np.arange(6, dtype=np.int16).reshape(2, 3).T,
    "texts": np.array(["a", "bc"]),
    "empty": np.zeros((0, 3), np.float32),
    "rng": np.random.RandomState(3).get_state(),
    "nested": [{"a": (np.float32(1.5), [np.ones(2)])}],
    "fields": np.zeros(2, "i4,f4"),
    "day": np.datetime64("2026-01-01"),
    "kinds": [np.dtype("float32"), np.float64],
    "lr": 0.1,
}


@pytest.mark.parametrize("core", ["numpy.core", "numpy._core"])
def test_numpy_values_of_a_torch_file_need_no_trust_and_land_as_save_would_store_them(tmp_path, capsys, core):
    torch.save({"w": torch.arange(5), **NUMPY}, tmp_path / "a.pt")
    _rename_globals(tmp_path / "a.pt", core)
    assert called(capsys, "import", tmp_path / "a.pt", tmp_path / "root")[0] == 0
    assert called(capsys, "convert", tmp_path / "a.pt", tmp_path / "b.pt")[0] == 0
    with SyncCheckpointEngine(tmp_path / "saved") as engine:
        engine.save({"w": torch.arange(5), **NUMPY}, step=1).result()
    wanted = aio_ckpt.read(tmp_path / "saved/step_000000001")
    _, ours = document(capsys, "inspect", tmp_path / "root")
    _, saved = document(capsys, "inspect", tmp_path / "saved")
    assert ours["leaves"] == saved["leaves"]
    for got in (aio_ckpt.read(tmp_path / "root/step_000000001"), torch.load(tmp_path / "b.pt", weights_only=False)):
        assert got.keys() == wanted.keys()
        for name in NUMPY:
            assert _is_same(got[name], wanted[name]), name


def _rename_globals(path: Path, core: str) -> None:
    with zipfile.ZipFile(path) as source:
        records = {entry.filename: source.read(entry) for entry in source.infolist()}
    with zipfile.ZipFile(path, "w") as target:
        for name, data in records.items():
            target.writestr(name, data.replace(b"cnumpy._core.", f"c{core}.".encode()))


def _is_same(a: object, b: object) -> bool:
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(_is_same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_is_same(a[key], b[key]) for key in a)
    return type(a) is type(b) and getattr(a, "dtype", None) == getattr(b, "dtype", None) and bool(np.all(a == b))


class Made:
    """A type of the user's."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Made)

    __hash__ = None


@pytest.mark.parametrize("value", [Made(), np.array([1, None], dtype=object)])
def test_what_only_code_can_read_needs_the_flag_that_the_error_names(tmp_path, capsys, value):
    torch.save({"w": torch.arange(5), "value": value}, tmp_path / "a.pt")
    for command, out in (("import", "root"), ("convert", "b.pt")):
        code, _, err = called(capsys, command, tmp_path / "a.pt", tmp_path / out)
        assert (code, "a.pt: only running code can read an object" in err, "give --trusted" in err) == (1, 1, 1), err
        assert not (tmp_path / out).exists()
        assert called(capsys, command, tmp_path / "a.pt", tmp_path / out, "--trusted")[0] == 0
    got = torch.load(tmp_path / "b.pt", weights_only=False)["value"]
    assert np.all(got == value)


def test_a_class_that_is_not_found_is_named(tmp_path, capsys):
    torch.save({"w": torch.arange(5), "value": Made()}, tmp_path / "a.pt")
    data = (tmp_path / "a.pt").read_bytes()
    with zipfile.ZipFile(tmp_path / "b.pt", "w") as target, zipfile.ZipFile(io.BytesIO(data)) as source:
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry).replace(b"\nMade\n", b"\nGone\n"))
    code, _, err = called(capsys, "import", tmp_path / "b.pt", tmp_path / "root", "--trusted")
    assert (code, "b.pt: an object in it needs a module or class" in err, "Gone" in err) == (1, True, True), err


@pytest.mark.parametrize("slots", [64, 5, 3, -4, 1 << 62])
def test_a_storage_that_is_not_as_long_as_its_record_is_refused(tmp_path, capsys, slots):
    """torch.load(mmap=True) would take what lies behind the record for the values."""
    number = pickle.dumps(slots, 2)[2:-1]
    pickled = (
        b"\x80\x02}X\x01\x00\x00\x00wctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\n"
        b"X\x01\x00\x00\x000X\x03\x00\x00\x00cpu"
        + number
        + b"tQK\x00K\x04\x85K\x01\x85\x89ccollections\nOrderedDict\n)RtRs."
    )
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        for name, body in (("data.pkl", pickled), ("byteorder", b"little"), ("version", b"3\n"), ("data/0", bytes(16))):
            archive.writestr(f"a/{name}", body)
    code, _, err = called(capsys, "import", tmp_path / "a.pt", tmp_path / "root")
    assert (code, f"a.pt: a storage of {slots} elements of torch.float32 over 16 stored bytes" in err) == (1, True)


def test_a_call_that_takes_memory_by_a_number_is_refused(tmp_path, capsys):
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02cbuiltins\nbytearray\n\x8a\x05\x00\x00\x00\x00\x02\x85R.")
        archive.writestr("a/version", b"3\n")
    code, _, err = called(capsys, "import", tmp_path / "a.pt", tmp_path / "root")
    assert (code, "a.pt: " in err) == (1, True), err


CRAFTED = {
    "deep.safetensors.index.json": b'{"weight_map":' + b'{"a":' * 100_000,
    "nul.safetensors.index.json": b'{"weight_map":{"a":"x\\u0000y.safetensors"}}',
    "surrogate.safetensors.index.json": b'{"weight_map":{"a":"\\ud800.safetensors"}}',
    "names.bin.index.json": b'{"weight_map":[["a", ["b"]]]}',
    "none.safetensors.index.json": b'{"weight_map":{}}',
    "list.bin.index.json": b"[1]",
    "long.bin.index.json": b'{"weight_map":{"a":"' + b"x" * 300 + b'"}}',
    "shape.safetensors": {"a": {"dtype": "F32", "shape": [2**64, 0], "data_offsets": [0, 0]}},
    "empty.safetensors": b"",
    "eight.safetensors": bytes(8),
}


@pytest.mark.parametrize("name", CRAFTED)
@pytest.mark.parametrize("command", ["import", "convert"])
def test_crafted_headers_end_in_one_line_that_names_the_file(tmp_path, capsys, name, command):
    content = CRAFTED[name]
    if isinstance(content, dict):
        header = json.dumps(content).encode()
        content = struct.pack("<Q", len(header)) + header
    (tmp_path / name).write_bytes(content)
    code, _, err = called(capsys, command, tmp_path / name, tmp_path / "out.pt")
    assert (code, err.count("\n"), str(tmp_path) in err) == (1, 1, True), err


def test_a_zip_whose_offset_is_2_to_the_63_is_damaged(tmp_path, capsys):
    torch.save({"a": torch.ones(3)}, tmp_path / "a.pt")
    data = bytearray((tmp_path / "a.pt").read_bytes())
    assert data[-42:-38] == b"PK\6\7" or data[-22:-18] == b"PK\5\6"
    start = data.index(b"PK\1\2")
    for place in (1 << 63, (1 << 64) - 100):
        end = zip_records.end_of_zip(1, 10, place, zip64=True)
        (tmp_path / "a.pt").write_bytes(bytes(data[:start]) + end)
        code, _, err = called(capsys, "import", tmp_path / "a.pt", tmp_path / "root")
        assert (code, err.count("\n"), "a.pt is damaged" in err) == (1, 1, True), err


def test_what_each_rank_saved_under_names_of_its_own_is_in_the_export(tmp_path, capsys):
    stages = [{f"stage{rank}": {"w": torch.full((2,), rank + 1.0)}, "rng": PerRank(rank)} for rank in range(2)]
    path = write_checkpoint(tmp_path / "c", [content_of(stage, rank) for rank, stage in enumerate(stages)])
    assert called(capsys, "export", path, tmp_path / "o.pt")[0] == 0
    found = torch.load(tmp_path / "o.pt")
    assert (found["rng"], found["stage0"]["w"].tolist(), found["stage1"]["w"].tolist()) == (0, [1, 1], [2, 2])
    assert called(capsys, "convert", path, tmp_path / "o.safetensors", "--branch", "stage1")[0] == 0
    assert load_file(tmp_path / "o.safetensors")["w"].tolist() == [2, 2]


def test_an_object_that_needs_code_is_named_with_what_a_command_can_do(tmp_path, capsys):
    with SyncCheckpointEngine(tmp_path / "root") as engine:
        engine.save({"m": {"w": torch.ones(2)}, "when": torch.nn.Linear}, step=1).result()
    code, _, err = called(capsys, "export", tmp_path / "root", tmp_path / "o.pt")
    assert (code, "step_000000001: only running code can read 'when': give --branch" in err) == (1, True), err
    assert "or --trusted if you trust whoever wrote the checkpoint" in err
    assert called(capsys, "export", tmp_path / "root", tmp_path / "all.pt", "--trusted")[0] == 0
    assert torch.load(tmp_path / "all.pt", weights_only=False)["when"] is torch.nn.Linear
    assert called(capsys, "export", tmp_path / "root", tmp_path / "o.pt", "--branch", "m")[0] == 0


def test_damaged_manifests_are_named_with_their_checkpoint(root, tmp_path, capsys):
    (root / STEP / ".metadata").unlink()
    for command in (("export", root / STEP, tmp_path / "o.pt"), ("inspect", root / STEP)):
        code, _, err = called(capsys, *command)
        assert (code, f"{root / STEP}: .metadata: missing" in err) == (1, True), err


def test_an_index_that_names_a_missing_tensor_is_refused(tmp_path, capsys):
    save_file({"a": torch.ones(3)}, tmp_path / "a.safetensors")
    index = tmp_path / "m.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "a.safetensors", "b": "a.safetensors"}}))
    code, _, err = called(capsys, "convert", index, tmp_path / "o.pt")
    assert (code, "'b' is not in 'a.safetensors'" in err) == (1, True), err


def test_a_tensor_is_taken_from_the_file_that_the_index_names(tmp_path, capsys):
    save_file({"a": torch.ones(3)}, tmp_path / "1.safetensors")
    save_file({"a": torch.zeros(3), "b": torch.ones(2)}, tmp_path / "2.safetensors")
    index = tmp_path / "m.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
    code, _, err = called(capsys, "convert", index, tmp_path / "o.pt")
    assert code == 0, err
    assert torch.load(tmp_path / "o.pt")["a"].tolist() == [1.0] * 3


def test_two_tensors_of_one_name_are_refused(tmp_path, capsys):
    one, other = torch.ones(1), torch.zeros(1)
    for number, value in enumerate(({1: one, "1": other}, {"a": {"b": one}, "a.b": other})):
        torch.save(value, tmp_path / f"{number}.pt")
        code, _, err = called(capsys, "convert", tmp_path / f"{number}.pt", tmp_path / "o.safetensors")
        assert (code, "two tensors would have the name" in err) == (1, True), err


@pytest.mark.slow
def test_a_state_larger_than_the_memory_is_converted(tmp_path):
    """Anonymous memory stays far below the state; mapped files, which the system writes out, do not count."""
    source = """
        import sys
        from pathlib import Path
        import torch
        from aio_ckpt import SyncCheckpointEngine
        from aio_ckpt.cli import commands
        from aio_ckpt.cli import converting

        def peak():
            torch.ones(1)
            text = Path("/proc/self/status").read_text()
            return int(text.split("RssAnon:")[1].split()[0]) << 10

        converting._BUDGET_BYTES = 16 << 20
        folder = Path(sys.argv[1])
        with SyncCheckpointEngine(folder / "root") as engine:
            state = {str(n): torch.full((8 << 20,), n, dtype=torch.uint8) for n in range(24)}
            engine.save(state).result()
        del state
        seen = []
        saved = SyncCheckpointEngine.save_file
        def watched(self, *args, **options):
            ticket = saved(self, *args, **options)
            seen.append(peak())
            return ticket
        SyncCheckpointEngine.save_file = watched
        before = peak()
        assert commands.run(["export", str(folder / "root"), str(folder / "out.safetensors")]) == 0
        print(max(seen) - before)
    """
    done = run_warm(source, str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < 100 * MIB
    assert load_file(tmp_path / "out.safetensors")["7"].unique().tolist() == [7]
