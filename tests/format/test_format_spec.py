"""docs/format.md is a specification: a reader written from the page alone reads the golden checkpoint bit for bit."""

from __future__ import annotations

import ast
import collections
import io
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import flip
from format_reader import DamagedError, Leaf, StoredTensor, read_checkpoint
from golden_state import STEP, golden_state
from saved_files import DATA_FILE, RANK_MANIFEST, ROOT_MANIFEST

from aio_ckpt import PerRank, SyncCheckpointEngine

TESTS = Path(__file__).parents[1]
GOLDEN = TESTS / "golden" / "0.1.0" / "one_rank" / f"step_{STEP:09d}"
WITH_FROZEN = GOLDEN.parents[1] / "frozen" / GOLDEN.name
AT_PATH = GOLDEN.parents[1] / "path" / "best"
OF_RANKS = GOLDEN.parents[1] / "ranks" / GOLDEN.name


def rebuilt(place: Any, values: dict[str, StoredTensor | bytes]) -> Any:
    """The state with its values: torch makes a view of the raw bytes."""
    if isinstance(place, dict):
        return {key: rebuilt(child, values) for key, child in place.items()}
    if isinstance(place, list | tuple):
        return type(place)(rebuilt(child, values) for child in place)
    assert isinstance(place, Leaf)
    value = values[place.name]
    if isinstance(value, bytes):
        assert place.code == 2
        return torch.load(io.BytesIO(value), weights_only=True)
    raw = torch.frombuffer(bytearray(value.raw), dtype=torch.uint8) if value.raw else torch.empty(0, dtype=torch.uint8)
    return raw.view(getattr(torch, value.dtype)).as_strided(value.shape, value.stride)


def plain(value: Any) -> Any:
    """Tensors and numpy values as (dtype, shape, bytes); containers as they are."""
    if isinstance(value, PerRank):
        return plain(value.value)
    if isinstance(value, dict):
        return {key: plain(child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(plain(child) for child in value)
    if isinstance(value, np.ndarray | np.generic):
        value = torch.from_numpy(np.array(value))
    if isinstance(value, torch.Tensor):
        flat = value.contiguous().view(-1)
        return str(value.dtype), tuple(value.shape), bytes(flat.view(torch.uint8).tolist()) if value.numel() else b""
    return value


@pytest.mark.parametrize("golden", [GOLDEN, WITH_FROZEN, AT_PATH], ids=["1.0", "2.0", "at a path"])
def test_a_reader_from_the_page_reads_the_golden_checkpoint_bit_for_bit(golden: Path) -> None:
    values, (state,) = read_checkpoint(golden)
    assert plain(rebuilt(state, values)) == plain(golden_state())
    assert list(state) == list(golden_state())


def test_a_reader_from_the_page_reads_what_each_of_several_ranks_has_saved() -> None:
    values, states = read_checkpoint(OF_RANKS)
    own = [rebuilt(state, values) for state in states]
    assert [int(state["mine"][f"rank_{rank}"]) for rank, state in enumerate(own)] == [0, 1, 2]
    assert [state["rng"].tolist() for state in own] == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]
    assert [state["epoch"] for state in own] == [3, 3, 3]


def test_a_reader_from_the_page_reads_containers_keys_and_names_of_every_kind(tmp_path: Path) -> None:
    shared = {"w": torch.ones(2)}
    state: dict[Any, Any] = {
        "names": types.SimpleNamespace(w=torch.ones(1).requires_grad_(), lr=0.1),
        "counts": collections.defaultdict(int, a=1),
        "queue": collections.deque([torch.ones(1)], maxlen=3),
        "sparse": torch.eye(2).to_sparse(),
        "one": shared,
        "two": [shared],
        0: torch.zeros(1),
        b"x": 1,
        1j: {float("inf"): 2, Path("/p"): 3, (1, b"y"): 4},
    }
    state["me"] = state
    with SyncCheckpointEngine(tmp_path) as engine:
        path = engine.save(state).result(60).path
    values, (found,) = read_checkpoint(path)
    assert found.pop("me") is not None
    assert found["one"] is found["two"][0]
    assert found["names"]["w"].code == 4
    back = rebuilt(found, values)
    assert list(back) == ["names", "counts", "queue", "sparse", "one", "two", 0, b"x", 1j]
    assert back[0].tolist() == [0]
    assert back[1j] == {float("inf"): 2, "/p": 3, (1, b"y"): 4}
    assert {name: part.tolist() for name, part in back["sparse"].items()} == {
        "indices": [[0, 1], [0, 1]],
        "values": [1, 1],
    }
    assert back["counts"] == {"a": 1}
    assert back["names"]["lr"] == 0.1


@pytest.mark.parametrize("name", [".metadata", DATA_FILE, RANK_MANIFEST, ROOT_MANIFEST])
def test_a_reader_from_the_page_finds_a_flipped_bit_in_every_file(tmp_path: Path, name: str) -> None:
    copy = Path(shutil.copytree(GOLDEN, tmp_path / "copy"))
    (path,) = copy.glob(name)
    flip(path, path.stat().st_size // 2, 1)
    with pytest.raises(DamagedError):
        read_checkpoint(copy)


def test_a_reader_from_the_page_reads_a_frozen_file_and_finds_a_flipped_bit_in_it(tmp_path: Path) -> None:
    state = {"base": torch.arange(300_000.0), "trained": torch.arange(10), "note": "of the main file"}
    with SyncCheckpointEngine(tmp_path) as engine:
        for step in range(1, 6):
            state["trained"] += 1
            report = engine.save(state, step=step).result()
    assert report.cloned_bytes > 1_200_000
    values, (found,) = read_checkpoint(report.path)
    assert plain(rebuilt(found, values)) == plain(state)
    (frozen,) = report.path.glob("__*_0_1.distcp")
    flip(frozen, 600_000)
    with pytest.raises(DamagedError, match=r"_0_1\.distcp"):
        read_checkpoint(report.path)


def test_the_reader_imports_nothing_of_the_package() -> None:
    tree = ast.parse((TESTS / "format" / "format_reader.py").read_text())
    found = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    found |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name for name in found if name.partition(".")[0] not in sys.stdlib_module_names} == set()
