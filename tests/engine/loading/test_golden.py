"""Golden checkpoints: what an older version wrote is read for ever, bit for bit; newer formats by the rules."""

from __future__ import annotations

import collections
import json
import shutil
import subprocess
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_maker import reseal
from gated_storage import TIMEOUT
from golden_state import KINDS, RANKS, STEP, golden_objects, golden_state, golden_tensors
from safetensors.torch import load_file
from saved_files import (
    DATA_FILE,
    FROZEN_FILE,
    RANK_MANIFEST,
    ROOT_MANIFEST,
    rank_manifest,
    root_manifest,
    without_save_id,
)
from tensor_bits import assert_is_sound_zip, assert_same_tensor, cut_items

from aio_ckpt import CheckpointEngine, EngineConfig, PerRank, SyncCheckpointEngine, load
from aio_ckpt.checkpoint.verify import verify_checkpoint
from aio_ckpt.cli.commands import run
from aio_ckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError
from aio_ckpt.format.root_manifest import FORMAT_MAJOR, FORMAT_MINOR, FROZEN_FORMAT, add_checksum
from aio_ckpt.format.tensor_columns import StoredColumns
from aio_ckpt.format.tensor_zip import is_dense
from aio_ckpt.runtime.portal import Executor
from aio_ckpt.storage.local import Storage

RELEASES = Path(__file__).parents[2] / "golden"
GOLDEN = RELEASES / "0.1.0"
STEP_NAME = f"step_{STEP:09d}"
NAMES_OF_DATA = {".metadata", DATA_FILE, RANK_MANIFEST, ROOT_MANIFEST}


@pytest.fixture(params=["one_rank", "frozen"])
def root(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A copy, so that no test can harm the original."""
    return Path(shutil.copytree(GOLDEN / request.param, tmp_path / "root"))


@pytest.fixture
def checkpoint(root: Path) -> Path:
    return root / STEP_NAME


def assert_same(got: object, wanted: object, path: str = "state") -> None:
    """Same types, same order of keys, same bits; same strides where the elements lie without gaps."""
    if isinstance(wanted, PerRank):
        assert_same(got.value if isinstance(got, PerRank) else got, wanted.value, path)  # read() gives the rank's own
        return
    if isinstance(wanted, torch.Tensor):
        assert isinstance(got, torch.Tensor), path
        if wanted.is_sparse:
            got, wanted = got.to_dense(), wanted.to_dense()
        assert_same_tensor(got, wanted)
        assert got.stride() == wanted.stride() or not is_dense(tuple(wanted.shape), wanted.stride()), path
        return
    assert type(got) is type(wanted), path
    if isinstance(wanted, dict):
        assert isinstance(got, dict)
        assert list(got) == list(wanted), path
        assert [type(key) for key in got] == [type(key) for key in wanted], path
        for key, value in wanted.items():
            assert_same(got[key], value, f"{path}.{key}")
    elif isinstance(wanted, (list, tuple)):
        assert isinstance(got, (list, tuple))
        assert len(got) == len(wanted), path
        for index, value in enumerate(wanted):
            assert_same(got[index], value, f"{path}.{index}")
    elif isinstance(wanted, (np.ndarray, np.generic)):
        assert isinstance(got, (np.ndarray, np.generic))
        assert (got.dtype, got.shape, got.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes()), path
    else:
        assert got == wanted, path


def blank(value: Any) -> Any:
    """The same structure, with other values in every leaf."""
    if isinstance(value, PerRank):
        return PerRank(blank(value.value))
    if isinstance(value, torch.Tensor):
        return torch.ones_like(value) if not value.dtype.is_floating_point else torch.full_like(value, 9)
    if isinstance(value, dict):
        return type(value)((key, blank(item)) for key, item in value.items())
    if isinstance(value, list):
        return [blank(item) for item in value]
    if isinstance(value, tuple):
        return tuple(blank(item) for item in value)
    if isinstance(value, np.ndarray):
        return np.zeros_like(value)
    return np.float64(0) if isinstance(value, np.float64) else None


# -- today's format -------------------------------------------------------------------------------


def format_of(kind: str) -> list[int]:
    fields: dict[str, Any] = json.loads(root_manifest(GOLDEN / kind / STEP_NAME).read_bytes())
    return [*fields["format"]]


def test_there_is_a_golden_checkpoint_of_every_kind_in_today_s_format() -> None:
    assert sorted(path.name for path in GOLDEN.iterdir()) == sorted(KINDS)
    assert format_of("one_rank") == format_of("ranks") == format_of("objects") == [FORMAT_MAJOR, FORMAT_MINOR] == [1, 0]
    assert format_of("frozen") == [*FROZEN_FORMAT] == [2, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_git_keeps_every_file_of_a_golden_checkpoint(kind: str) -> None:
    files = [path for path in (GOLDEN / kind).rglob("*") if path.is_file()]
    wanted = NAMES_OF_DATA | {"frozen": {FROZEN_FILE}, "path": {"notes.txt"}}.get(kind, set())
    assert kind in {"files", "ranks"} or {without_save_id(path.name) for path in files} == wanted
    assert sum(path.stat().st_size for path in files) < 32 << 10
    if not (RELEASES.parents[1] / ".git").exists() or shutil.which("git") is None:
        pytest.skip("this is no git checkout: nothing to ask about ignored files")
    ignored = subprocess.run(
        ["git", "check-ignore", "--no-index", *map(str, files)], cwd=GOLDEN, capture_output=True, text=True
    )
    assert (ignored.returncode, ignored.stdout) == (1, ""), "1 is git's answer for: none is ignored"


async def test_the_engine_loads_a_golden_checkpoint_bit_for_bit(root: Path) -> None:
    target = blank(golden_state())
    async with CheckpointEngine(root) as engine:
        report = await engine.load(target, strict=True)
    assert (report.step, report.verified, report.skipped, report.unexpected) == (STEP, True, (), ())
    assert_same(target, golden_state())


async def test_the_engine_reads_a_golden_checkpoint_without_a_template_bit_for_bit(root: Path) -> None:
    async with CheckpointEngine(root) as engine:
        state: Any = await engine.read(STEP)
    assert_same(state, golden_state())
    assert state["model"]["tied"] is state["model"]["weight"]


def tensors_of(value: object, name: str = "") -> dict[str, torch.Tensor]:
    if isinstance(value, PerRank):
        return tensors_of(value.value, f"{name}.rank0")
    if isinstance(value, torch.Tensor):
        return {name: value}
    if isinstance(value, np.ndarray | np.generic):
        return {name: torch.from_numpy(np.array(value))}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    below = [tensors_of(item, f"{name}.{key}".removeprefix(".")) for key, item in items]
    return dict(collections.ChainMap(*below))


def test_stock_dcp_loads_a_golden_checkpoint_bit_for_bit(checkpoint: Path) -> None:
    wanted = tensors_of(golden_state())
    target = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of DCP's own, which differ from version to version
        dcp.load(target, checkpoint_id=str(checkpoint), no_dist=True)
    assert len(wanted) == 12
    for name, tensor in wanted.items():
        assert_same_tensor(target[name], tensor)


def test_each_item_is_a_zip_that_the_standard_library_proves(checkpoint: Path) -> None:
    items = cut_items(checkpoint)
    assert set(tensors_of(golden_state())) < set(items)
    for item in items.values():
        assert_is_sound_zip(item)


async def faults_of(checkpoint: Path) -> list[str]:
    executor = Executor("test", 2)
    try:
        found = await verify_checkpoint(
            Storage(executor), checkpoint, executor=executor, readers=2, on_progress=lambda _: None
        )
    finally:
        executor.close(TIMEOUT)
    return [fault.message for fault in found]


async def test_every_byte_of_a_golden_checkpoint_verifies(checkpoint: Path) -> None:
    assert await faults_of(checkpoint) == []


@pytest.mark.parametrize("name", [".metadata", DATA_FILE, RANK_MANIFEST, ROOT_MANIFEST])
async def test_a_flipped_byte_of_a_golden_checkpoint_is_found(checkpoint: Path, root: Path, name: str) -> None:
    (path,) = checkpoint.glob(name)
    data = bytearray(path.read_bytes())
    place = data.index(b"\x00\x00\x40\x40") if name.endswith("distcp") else len(data) // 2  # the raw bytes of 3.0
    data[place] ^= 0x10
    path.write_bytes(data)
    assert await faults_of(checkpoint) != []
    with SyncCheckpointEngine(root) as engine, pytest.raises(CorruptCheckpointError):
        engine.read(STEP)


# -- other kinds ----------------------------------------------------------------------------------


def copied(kind: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / kind, tmp_path / "root"))


async def test_golden_objects_are_read_without_trust(tmp_path: Path) -> None:
    root = copied("objects", tmp_path)
    async with CheckpointEngine(root) as engine:
        assert_same(await engine.read(STEP), golden_objects())
    assert await faults_of(root / STEP_NAME) == []


WHOLE = {
    "rows": torch.arange(24.0).reshape(6, 4),
    "uneven": torch.arange(8),
    "columns": torch.arange(12).to(torch.bfloat16).reshape(2, 6),
    "replica": torch.linspace(0, 1, 5),
    "mine": {f"rank_{rank}": torch.tensor([rank]) for rank in range(RANKS)},
}
"""What the ranks of the golden checkpoint have saved, each tensor whole."""


async def test_one_rank_loads_what_several_have_saved(tmp_path: Path) -> None:
    root = copied("ranks", tmp_path)
    target = blank(WHOLE) | {"rng": PerRank(torch.ones(2)), "epoch": 0}
    async with CheckpointEngine(root) as engine:
        assert (await engine.load(target, strict=False)).verified
    assert_same(target, WHOLE | {"rng": PerRank(torch.zeros(2)), "epoch": 3})
    assert await faults_of(root / STEP_NAME) == []


def test_stock_dcp_loads_what_several_ranks_have_saved(tmp_path: Path) -> None:
    wanted = tensors_of(WHOLE)
    target = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of DCP's own, which differ from version to version
        dcp.load(target, checkpoint_id=str(copied("ranks", tmp_path) / STEP_NAME), no_dist=True)
    for name, tensor in wanted.items():
        assert_same_tensor(target[name], tensor)


async def test_a_golden_checkpoint_at_a_path_is_loaded_with_what_belongs_to_it(tmp_path: Path) -> None:
    path = copied("path", tmp_path) / "best"
    target = blank(golden_state())
    report = load(path, target, strict=True)
    assert (report.step, report.extra, report.verified) == (0, {"epoch": 3}, True)
    assert_same(target, golden_state())
    assert (path / "notes.txt").read_bytes() == b"best"
    assert await faults_of(path) == []


def test_golden_files_are_read_by_their_own_libraries() -> None:
    folder, wanted = GOLDEN / "files", golden_tensors()
    assert_same(
        dict(sorted(load_file(folder / "model.safetensors").items())),
        {name: wanted[name] for name in ("bias", "scale", "weight")},
    )
    index = json.loads((folder / "sharded" / "model.safetensors.index.json").read_bytes())["weight_map"]
    assert len(set(index.values())) == 2
    for name, file in index.items():
        assert_same(load_file(folder / "sharded" / file)[name], wanted[name])
    state = torch.load(folder / "state.pt", weights_only=True)
    assert_same(state, {name: value for name, value in golden_state().items() if name in state})


# -- other versions -------------------------------------------------------------------------------


def change_root(checkpoint: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = root_manifest(checkpoint)
    fields = json.loads(path.read_bytes())
    fields.pop("blake2b", None)
    change(fields)
    path.write_bytes(add_checksum((json.dumps(fields, indent=1) + "\n").encode()))


def change_rank(checkpoint: Path, change: Callable[[dict[str, Any]], None]) -> None:
    fields = msgspec.msgpack.decode(rank_manifest(checkpoint).read_bytes(), strict=False)
    change(fields)
    reseal(checkpoint, 0, msgspec.msgpack.encode(fields))


def test_an_unknown_minor_version_is_read_and_what_it_added_is_ignored(checkpoint: Path, root: Path) -> None:
    def newer(fields: dict[str, Any]) -> None:
        major, minor = fields["format"]
        fields["format"] = [major, minor + 7]
        fields["added later"] = {"anything": [1, 2]}

    def newer_rank(fields: dict[str, Any]) -> None:
        newer(fields)
        known = len(StoredColumns.__struct_fields__)
        fields["columns"] = [*[*fields["columns"], ()][:known], "added later"]
        fields["objects"] = [[*entry, "added later"] for entry in fields["objects"]]

    change_rank(checkpoint, newer_rank)
    change_root(checkpoint, newer)
    with SyncCheckpointEngine(root) as engine:
        assert_same(engine.read(STEP), golden_state())
        target = blank(golden_state())
        assert engine.load(target).verified
        assert_same(target, golden_state())


@pytest.mark.parametrize("change", [change_root, change_rank], ids=["root", "rank"])
@pytest.mark.parametrize("step", [None, STEP], ids=["newest", "by step"])
def test_an_unknown_major_version_is_refused_by_name(
    checkpoint: Path, root: Path, change: Callable[..., None], step: int | None
) -> None:
    major, minor = FROZEN_FORMAT
    change(checkpoint, lambda fields: fields.update(format=[major + 1, 3], new=1))
    name = (root_manifest if change is change_root else rank_manifest)(checkpoint).name
    message = rf"{name}: format {major + 1}\.3, known here is {major}\.{minor}: read it with a newer aio_ckpt"
    target = blank(golden_state())
    with SyncCheckpointEngine(root) as engine:
        with pytest.raises(FormatVersionError, match=message) as caught:
            engine.load(target, step)
        with pytest.raises(FormatVersionError, match=message):
            engine.read(step)
    assert not caught.value.target_modified
    assert_same(target, blank(golden_state()))


def test_a_step_of_an_unknown_major_version_is_listed_kept_and_deleted_like_any_other(
    checkpoint: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which is what docs/versions.md says to those who go back to an older release."""
    change_root(checkpoint, lambda fields: fields.update(format=[FROZEN_FORMAT[0] + 1, 0]))
    assert run(["ls", str(root)]) == 0
    assert checkpoint.name in capsys.readouterr().out
    with SyncCheckpointEngine(root, EngineConfig(keep_last=2)) as engine:
        assert engine.steps() == [STEP]
        for step in (STEP + 1, STEP + 2):
            engine.save({"x": torch.ones(1)}, step=step).result()
        assert engine.load({"x": torch.zeros(1)}).step == STEP + 2
    with SyncCheckpointEngine(root) as engine:
        assert engine.steps() == [STEP + 1, STEP + 2]
        engine.rollback(STEP + 1)
    assert not checkpoint.exists()


def test_a_checkpoint_without_metadata_is_damaged(checkpoint: Path, root: Path) -> None:
    (checkpoint / ".metadata").unlink()
    with SyncCheckpointEngine(root) as engine:
        assert engine.steps() == []
        with pytest.raises(CorruptCheckpointError, match=r"step 7: \.metadata: missing"):
            engine.read()
        root_manifest(checkpoint).unlink()
        with pytest.raises(CheckpointNotFoundError):
            engine.read()


def test_an_object_is_a_torch_save_of_its_own(checkpoint: Path) -> None:
    item = cut_items(checkpoint)["name"]
    (checkpoint / "object").write_bytes(item)
    assert torch.load(checkpoint / "object", weights_only=True) == golden_state()["name"]
