"""Symbolic links below a root: what they lead to is read, and never changed or deleted."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from builders import listing, save, steps_dir, weights
from command_line import save_by_dcp
from gated_storage import TIMEOUT

from aio_ckpt import EngineConfig, SyncCheckpointEngine
from aio_ckpt.cli import commands as cli
from aio_ckpt.dcp import Writer
from aio_ckpt.errors import RootError, WriteError
from aio_ckpt.format.root_names import ENGINE_DIR, ENGINE_DIRS, LOCK_FILE, PENDING_DIR, TRASH_DIR


def content(path: Path) -> dict[str, bytes]:
    """Every file below ``path``."""
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """A checkpoint outside of the root."""
    with SyncCheckpointEngine(tmp_path / "archive") as engine:
        engine.save(weights(1), step=1).result(TIMEOUT)
    return steps_dir(tmp_path / "archive", 1)


@pytest.fixture
def run(tmp_path: Path, archive: Path) -> Path:
    """A root whose step 1 is a link to the archive."""
    root = tmp_path / "run"
    root.mkdir()
    steps_dir(root, 1).symlink_to(archive)
    return root


# -- steps ------------------------------------------------------------------------------------------


def expire(run: Path) -> None:
    with SyncCheckpointEngine(run, EngineConfig(keep_last=1)) as engine:
        engine.save(weights(2), step=2).result(TIMEOUT)


def delete(run: Path) -> None:
    with SyncCheckpointEngine(run) as engine:
        engine.save(weights(2), step=2).result(TIMEOUT)
        engine.delete(1)


def command(*arguments: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        with SyncCheckpointEngine(run) as engine:
            engine.save(weights(2), step=2).result(TIMEOUT)
        assert cli.run([arguments[0], str(run), *arguments[1:]]) == 0

    return change


CHANGES = {
    "retention": expire,
    "delete": delete,
    "rm": command("rm", "1"),
    "prune": command("prune", "--keep-last", "1", "--yes"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_linked_step_is_read_and_its_deletion_removes_the_link_alone(run: Path, archive: Path, change: str) -> None:
    before = content(archive)
    with SyncCheckpointEngine(run) as engine:
        assert engine.load(weights(0)).step == 1
    CHANGES[change](run)
    assert content(archive) == before
    assert not steps_dir(run, 1).is_symlink()
    assert not listing(run / TRASH_DIR) + listing(run / PENDING_DIR)
    with SyncCheckpointEngine(run) as engine:
        assert engine.steps() == [2]


def test_an_overwrite_of_a_linked_step_is_refused_and_leaves_the_link_and_the_archive(run: Path, archive: Path) -> None:
    before = content(archive)
    refused = pytest.raises(WriteError, match="is a symbolic link: remove the link, or save another step")
    with SyncCheckpointEngine(run) as engine, refused:
        engine.save(weights(2), step=1, overwrite=True).result(TIMEOUT)
    assert steps_dir(run, 1).is_symlink()
    assert content(archive) == before


def test_a_root_that_is_a_link_is_used_as_the_directory_itself(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "runs").symlink_to("scratch")
    with SyncCheckpointEngine(tmp_path / "runs", EngineConfig(keep_last=1)) as engine:
        save(engine, 1, 2)
    assert listing(tmp_path / "scratch") == ["step_000000002"]


# -- directories of the engine ----------------------------------------------------------------------


@pytest.mark.parametrize("name", [ENGINE_DIR, *ENGINE_DIRS])
@pytest.mark.parametrize("how", ["save", "rm", "protect"])
def test_a_root_with_a_linked_directory_of_the_engine_is_refused_before_anything_is_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, how: str
) -> None:
    root, home = tmp_path / "root", tmp_path / "home"
    with SyncCheckpointEngine(root) as engine:
        save(engine, 1, 2)
    (root / name).rename(tmp_path / "aside")
    (home / "mine").mkdir(parents=True)
    (home / "mine" / "notes.txt").write_text("mine")
    (home / "lock").write_text("mine")
    (root / name).symlink_to(home)
    before = content(home)
    if how == "rm":
        assert cli.run(["rm", str(root), "1"]) == 1
        assert "remove the link" in capsys.readouterr().err
    else:
        with SyncCheckpointEngine(root) as engine:
            with pytest.raises(RootError, match=r"is a symbolic link.*remove the link"):
                engine.save(weights(3), step=3) if how == "save" else engine.protect(1)
            assert engine.load(weights(0)).step == 2, "reading such a root is harmless"
    assert content(home) == before


def test_a_linked_entry_of_trash_and_of_pending_is_unlinked(root: Path, tmp_path: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        save(engine, 1)
    home = tmp_path / "home"
    home.mkdir()
    (home / ".metadata").write_text("mine")
    os.utime(home, (0, 0))
    (root / TRASH_DIR / "x").symlink_to(home)
    (root / PENDING_DIR / "y").symlink_to(home)
    (root / TRASH_DIR / "tree").mkdir()
    (root / TRASH_DIR / "tree" / "below").symlink_to(home)
    with SyncCheckpointEngine(root, EngineConfig()) as engine:
        save(engine, 2)
    assert not listing(root / TRASH_DIR) + listing(root / PENDING_DIR)
    assert content(home) == {".metadata": b"mine"}


# -- files ------------------------------------------------------------------------------------------


def test_a_link_in_the_place_of_a_lock_file_is_replaced(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("the user's private key")
    for lock in (tmp_path / "root" / LOCK_FILE, tmp_path / "dcp" / "aio_ckpt.lock"):
        lock.parent.mkdir(parents=True)
        lock.symlink_to(key)
    with SyncCheckpointEngine(tmp_path / "root") as engine:
        save(engine, 1)
        assert not (tmp_path / "root" / LOCK_FILE).is_symlink()
    save_by_dcp(weights(1), tmp_path / "dcp", Writer(tmp_path / "dcp"))
    assert (tmp_path / "dcp" / ".metadata").is_file()
    assert key.read_text() == "the user's private key"


# -- failures that left trash -----------------------------------------------------------------------
