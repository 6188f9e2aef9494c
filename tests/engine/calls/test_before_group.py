"""An engine that was opened before the process group of its ranks: it never saves or loads as if it were alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from builders import weights
from command_line import called
from disk_tree import tree_of
from rank_processes import ranks

import aio_ckpt
from aio_ckpt import SoloCoordinator, SyncCheckpointEngine
from aio_ckpt.errors import ConfigError

REMEDY = r"before init_process_group.*open it after init_process_group.*coordinator=SoloCoordinator\(\)"
CALLS: dict[str, Callable[[SyncCheckpointEngine, Path], Any]] = {
    "save": lambda engine, root: engine.save(weights(2.0), step=2),
    "save_path": lambda engine, root: engine.save(weights(2.0), path=root / "other"),
    "prepare": lambda engine, root: engine.prepare(weights(2.0)),
    "load": lambda engine, root: engine.load(weights(0.0)),
    "load_path": lambda engine, root: engine.load(weights(0.0), path=root / "step_000000001"),
    "read": lambda engine, root: engine.read(),
    "rollback": lambda engine, root: engine.rollback(1),
    "delete": lambda engine, root: engine.delete(1, allow_newest=True),
    "remove": lambda engine, root: engine.remove(root / "step_000000001"),
}


@pytest.fixture
def saved(root: Path) -> Path:
    with SyncCheckpointEngine(root) as engine:
        engine.save(weights(1.0), step=1).result()
    return root


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is one of two, as torchrun says it."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")


@pytest.mark.parametrize("call", CALLS)
def test_one_of_several_launched_processes_without_a_group_touches_nothing_and_is_told_why(
    saved: Path, launched: None, call: str
) -> None:
    before = tree_of(saved)
    with SyncCheckpointEngine(saved) as engine:
        with pytest.raises(ConfigError, match=rf"{REMEDY}") as raised:
            CALLS[call](engine, saved)
        assert engine.steps() == [1], "looking is allowed"
    assert "WORLD_SIZE=2" in str(raised.value)
    assert tree_of(saved) == before


def test_a_coordinator_that_is_given_says_that_the_process_is_meant_to_be_alone(saved: Path, launched: None) -> None:
    with SyncCheckpointEngine(saved, coordinator=SoloCoordinator()) as engine:
        engine.save(weights(2.0), step=2).result()
        assert engine.load(weights(0.0)).step == 2


def test_reading_without_an_engine_and_the_command_line_go_on_under_a_launcher(
    saved: Path, launched: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    place = saved / "step_000000001"
    template = weights(0.0)
    assert aio_ckpt.load(place, template).step == 1
    assert aio_ckpt.read(place)["w"].equal(template["w"])
    assert called(capsys, "ls", saved)[0] == 0
    assert called(capsys, "convert", place, tmp_path / "made.pt")[0] == 0
    assert called(capsys, "convert", tmp_path / "made.pt", tmp_path / "again")[0] == 0


@pytest.mark.parametrize("variables", [{}, {"WORLD_SIZE": "8"}, {"WORLD_SIZE": "1", "RANK": "0"}, {"RANK": "0"}])
def test_a_process_that_no_launcher_started_with_others_saves_alone(
    root: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with SyncCheckpointEngine(root) as engine:
        assert engine.save(weights(1.0), step=1).result().step == 1


def test_a_group_of_one_rank_counts_and_not_what_a_launcher_said(root: Path, launched: None) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    engine = SyncCheckpointEngine(root)
    try:
        assert engine.save(weights(1.0), step=1).result().step == 1
    finally:
        dist.destroy_process_group()
    with engine:
        assert engine.save(weights(2.0), step=2).result().step == 2


def open_before_the_group(rank: int, count: int, root: Path) -> str:
    """No variable of a launcher is set: the group itself tells."""
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    dist.destroy_process_group()
    engine = SyncCheckpointEngine(root)
    dist.init_process_group("gloo", store=dist.PrefixStore("later", store), rank=rank, world_size=count)
    with engine, pytest.raises(ConfigError, match=REMEDY) as raised:
        engine.save(weights(1.0), step=1)
    with SyncCheckpointEngine(root) as engine:
        engine.save(weights(1.0), step=1).result()
    return str(raised.value)


def test_a_group_that_was_made_after_the_engine_is_told_of_on_every_rank(root: Path) -> None:
    with ranks(2) as both:
        assert all("has 2 ranks" in text for text in both.run(open_before_the_group, root))
