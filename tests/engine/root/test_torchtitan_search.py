"""What other tools find in a root of ours by their own rules."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from builders import weights
from gated_storage import TIMEOUT, gated_engine
from saved_files import data_file

from aio_ckpt import EngineConfig, SyncCheckpointEngine
from aio_ckpt.errors import WriteError
from aio_ckpt.format.root_names import ABANDONED_DIR, CORRUPT_DIR, ENGINE_DIR, PENDING_DIR, TRASH_DIR, protected_name

TITAN = EngineConfig(step_dir="step-{step}")


def titan_steps(folder: Path) -> dict[int, Path]:
    """torchtitan's rule: every entry whose name has ``step-N`` anywhere and that holds ``.metadata``."""
    found = {}
    for name in os.listdir(folder):
        if (match := re.search(r"step-(\d+)", name)) and (folder / name / ".metadata").is_file():
            found[int(match[1])] = folder / name
    return found


def titan_purge(folder: Path, keep_latest_k: int) -> list[Path]:
    """torchtitan's rule: of all entries whose name has ``step-N`` anywhere, all but the last are deleted."""
    found = []
    for name in os.listdir(folder):
        if match := re.search(r"step-(\d+)", name):
            found.append((int(match[1]), folder / name))
    purged = [path for _, path in sorted(found)[:-keep_latest_k]]
    for path in purged:
        shutil.rmtree(path)
    return purged


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """One of each: committed, abandoned, corrupt, pending, trashed, protected."""
    root = tmp_path / "root"
    with SyncCheckpointEngine(root, TITAN) as engine:
        for step in (10, 20, 30, 40, 50, 60):
            engine.save(weights(step), step=step).result(TIMEOUT)
        engine.rollback(50)
        engine.protect(20)
        data = data_file(root / "step-50")
        data.write_bytes(
            data.read_bytes().replace(weights(50)["w"].numpy().tobytes(), weights(9)["w"].numpy().tobytes())
        )
        assert engine.load(weights(0)).step == 40
        engine.rollback(30)
    with gated_engine(root, step_dir="step-{step}", keep_last=2) as (engine, storage):
        storage.fail("remove_tree", "trash/*", WriteError(5, "broken", "x"))
        engine.save(weights(31), step=31).result(TIMEOUT)
        storage.wait_for("sync_dir", "trash/step-10")
    shutil.rmtree(root / "step-31")
    (root / PENDING_DIR / "a-step-70").mkdir()
    return root


def test_the_root_that_torchtitan_searches_holds_one_of_each_kind(root: Path) -> None:
    assert sorted(os.listdir(root)) == [ENGINE_DIR, "step-20", "step-30"]
    assert [path.name.partition("-")[2] for path in (root / ABANDONED_DIR).iterdir()].count("step-60") == 1
    assert [path.name[:7] for path in (root / CORRUPT_DIR).iterdir()] == ["step-50"]
    assert [path.name for path in (root / TRASH_DIR).iterdir()] == ["step-10"]
    assert [path.name for path in (root / PENDING_DIR).iterdir()] == ["a-step-70"]
    assert (root / protected_name(20)).is_file()


def test_torchtitans_search_finds_the_committed_steps_and_nothing_else(root: Path) -> None:
    assert titan_steps(root) == {step: root / f"step-{step}" for step in (20, 30)}


def test_torchtitans_purge_deletes_and_counts_nothing_of_ours(root: Path) -> None:
    (root / "step-40").mkdir()
    ours = sorted(path for path in (root / ENGINE_DIR).rglob("*"))
    assert titan_purge(root, 2) == [root / "step-20"]
    assert sorted(path for path in (root / ENGINE_DIR).rglob("*")) == ours
    with SyncCheckpointEngine(root, TITAN) as engine:
        assert engine.steps() == [30]
