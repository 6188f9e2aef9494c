"""Who only looks makes nothing on the disk: neither a root that is missing, nor anything in one that is there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from builders import weights
from disk_tree import tree_of
from gated_storage import TIMEOUT

from aio_ckpt import SyncCheckpointEngine
from aio_ckpt.cli import commands as cli
from aio_ckpt.errors import CheckpointNotFoundError, RootError
from aio_ckpt.format.root_names import ENGINE_DIR


@contextlib.contextmanager
def unchanged(folder: Path) -> Iterator[None]:
    before = tree_of(folder)
    yield
    assert tree_of(folder) == before


@pytest.fixture(params=["missing", "empty", "full", "of others"])
def looked_at(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A root in each form that a reader may meet it in."""
    root = tmp_path / "runs" / "ckpt"
    if request.param == "empty":
        root.mkdir(parents=True)
    elif request.param != "missing":
        with SyncCheckpointEngine(root) as engine:
            engine.save(weights(1), step=3).result(TIMEOUT)
        if request.param == "of others":  # a step that was copied here, and nothing else
            (root / "step_000000003").rename(tmp_path / "step_000000003")
            root = tmp_path
    return root


def refused(kind: type[Exception], call: Callable[[], object]) -> None:
    with pytest.raises(kind):
        call()


def test_a_sync_engine_that_only_looks_makes_nothing(looked_at: Path, tmp_path: Path) -> None:
    with unchanged(tmp_path):
        with SyncCheckpointEngine(looked_at) as engine:
            has_steps = engine.latest_step() is not None
            assert engine.steps() == ([3] if has_steps else [])
            assert engine.protected_steps() == []
            engine.unprotect(3)
            if has_steps:
                assert engine.load(weights(1)).step == 3
                assert engine.read(3).keys() == {"w"}
            else:
                refused(CheckpointNotFoundError, lambda: engine.load(weights(1)))
                refused(CheckpointNotFoundError, engine.read)
                refused(CheckpointNotFoundError, lambda: engine.rollback(3))
                refused(CheckpointNotFoundError, lambda: engine.delete(3))
        SyncCheckpointEngine(looked_at).terminate()


@pytest.mark.parametrize("command", ["ls", "du", "inspect", "verify", "rescue", "diff"])
@pytest.mark.parametrize("shape", [[], ["--json"]], ids=["text", "json"])
def test_a_command_that_only_reads_makes_nothing(
    looked_at: Path, tmp_path: Path, command: str, shape: list[str]
) -> None:
    with unchanged(tmp_path):
        cli.run([command, *[str(looked_at)] * (2 if command == "diff" else 1), *shape])


def test_a_step_that_is_not_there_is_not_protected_in_somebody_elses_directory(tmp_path: Path) -> None:
    with unchanged(tmp_path):
        assert cli.run(["protect", str(tmp_path), "3"]) != 0
        with SyncCheckpointEngine(tmp_path) as engine:
            refused(CheckpointNotFoundError, lambda: engine.protect(3))


@pytest.mark.parametrize("first", ["save", "prepare"])
def test_the_first_save_or_prepare_makes_the_root(root: Path, first: str) -> None:
    root = root / "below"
    with SyncCheckpointEngine(root) as engine:
        assert not root.parent.exists()
        getattr(engine, first)(weights(1)).result(TIMEOUT)
        assert (root / ENGINE_DIR / "lock").exists()
        engine.save(weights(1)).result(TIMEOUT)


def test_a_root_that_is_a_link_to_nothing_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with unchanged(tmp_path):
        refused(RootError, lambda: SyncCheckpointEngine(tmp_path / "link"))
        refused(RootError, lambda: SyncCheckpointEngine(tmp_path / "link" / "below"))
