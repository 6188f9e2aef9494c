"""What stock ``dcp.save`` of each torch wrote is read here, and a newer torch's checkpoint is no damage."""

from __future__ import annotations

import logging
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from foreign.exchange import load_all, save_all
from foreign.foreign_state import KINDS, assert_equal, blank, quiet, sharded_state, whole_state
from rank_processes import Ranks, engine_on
from saved_files import data_file
from torch.distributed.checkpoint.api import CheckpointException

from aio_ckpt import SyncCheckpointEngine
from aio_ckpt.dcp import Reader, Writer
from aio_ckpt.errors import CorruptCheckpointError, FormatVersionError, MismatchError

FOREIGN = Path(__file__).parents[1] / "foreign"
VERSIONS = sorted((path.name for path in FOREIGN.glob("torch-*")), key=lambda name: int(name.rpartition(".")[2]))
STEP = 5
SECS = 20.0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def put(version: str, kind: str, root: Path, step: int = STEP) -> Path:
    """Copy a checkpoint to where an engine on ``root`` finds it."""
    return shutil.copytree(FOREIGN / version / kind, root / f"step_{step:09d}")


def test_there_is_a_checkpoint_of_every_minor_version_and_kind() -> None:
    assert [f"torch-2.{minor}" for minor in range(6, 16)] == VERSIONS
    assert all((FOREIGN / version / kind / ".metadata").exists() for version in VERSIONS for kind in KINDS)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("version", VERSIONS)
def test_the_engine_reads_what_stock_of_any_version_saved(root: Path, version: str, kind: str, caplog: Any) -> None:
    put(version, kind, root)
    with SyncCheckpointEngine(root) as engine, caplog.at_level(logging.INFO, logger="aio_ckpt"):
        target = blank(whole_state())
        report = engine.load(target)
        assert (report.step, report.skipped, report.verified) == (STEP, (), True)
        assert_equal(target, whole_state())
        assert_equal(engine.read(STEP), whole_state())
    assert not [message for message in caplog.messages if "does not know" in message]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("version", VERSIONS)
def test_reader_reads_what_stock_of_any_version_saved(version: str, kind: str) -> None:
    target = blank(whole_state())
    with quiet():
        dcp.load(target, storage_reader=Reader(FOREIGN / version / kind))
    assert_equal(target, whole_state())


def load_sharded(rank: int, count: int, root: Path) -> int:
    wanted = sharded_state(count)
    target = blank(wanted)
    with engine_on(root, SECS) as engine:
        engine.load(target)
    assert_equal(target, wanted)
    target = blank(wanted)
    dcp.load(target, storage_reader=Reader(root / f"step_{STEP:09d}"))
    assert_equal(target, wanted)
    return rank


@pytest.mark.slow
@pytest.mark.parametrize("version", [VERSIONS[0], VERSIONS[-1]])
def test_two_ranks_read_what_two_ranks_of_another_version_saved(two: Ranks, root: Path, version: str) -> None:
    put(version, "two_ranks", root)
    assert two.run(load_sharded, root) == [0, 1]


def exchange(rank: int, count: int, path: Path) -> int:
    with quiet():
        save_all(path)
        load_all(path)
    return rank


def test_stock_reads_what_engine_and_writer_saved(two: Ranks, tmp_path: Path) -> None:
    exchange(0, 1, tmp_path / "one")
    assert two.run(exchange, tmp_path / "two") == [0, 1]


# -- a torch that is newer than any known here ------------------------------------------------------


def make_unknown(checkpoint: Path) -> None:
    """Let ``.metadata`` ask for a class that no known torch has."""
    file = checkpoint / ".metadata"
    data = file.read_bytes()
    assert data.count(b"ChunkStorageMetadata") == 1
    file.write_bytes(data.replace(b"ChunkStorageMetadata", b"CrumbStorageMetadata"))


def test_a_load_without_a_step_skips_what_a_newer_torch_wrote_and_leaves_it_where_it_is(root: Path) -> None:
    put(VERSIONS[-1], "one_rank", root, 4)
    newer = put(VERSIONS[-1], "one_rank", root, 9)
    make_unknown(newer)
    before = {path: path.read_bytes() for path in newer.iterdir()}
    with SyncCheckpointEngine(root) as engine:
        target = blank(whole_state())
        report = engine.load(target)
        assert report.step == 4
        assert_equal(target, whole_state())
        [skipped] = report.skipped
        assert (skipped.step, skipped.quarantined, type(skipped.error)) == (9, None, FormatVersionError)
        assert "CrumbStorageMetadata" in str(skipped.error)
        engine.save(target, step=10).result()  # the first save sets aside what was proven damaged
        assert engine.steps() == [4, 9, 10]
    assert {path: path.read_bytes() for path in newer.iterdir()} == before


@pytest.mark.parametrize("step", [None, 9])
def test_if_a_newer_torch_wrote_all_checkpoints_the_error_names_the_remedy(root: Path, step: int | None) -> None:
    make_unknown(put(VERSIONS[-1], "one_rank", root, 9))
    target = blank(whole_state())
    message = "CrumbStorageMetadata.*a newer torch or a newer aio_ckpt may read it"
    with SyncCheckpointEngine(root) as engine:
        with pytest.raises(FormatVersionError, match=message) as caught:
            engine.load(target, step)
        with pytest.raises(FormatVersionError, match=message):
            engine.read(step)
    assert not caught.value.target_modified
    assert_equal(target, blank(whole_state()))
    with pytest.raises(CheckpointException, match=message), quiet():  # DCP wraps what a rank raises
        dcp.load(target, storage_reader=Reader(root / "step_000000009"))


def test_an_error_about_a_damaged_and_a_newer_checkpoint_is_one_of_damage(root: Path) -> None:
    make_unknown(put(VERSIONS[-1], "one_rank", root, 9))
    data_file(put(VERSIONS[-1], "one_rank", root, 8)).unlink()
    with SyncCheckpointEngine(root) as engine, pytest.raises(CorruptCheckpointError, match=r"step 9.*Crumb.*step 8"):
        engine.load(blank(whole_state()))


def test_a_newer_torch_that_saved_into_a_step_of_ours_is_no_damage_and_a_flipped_bit_is(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        engine.save(whole_state(), step=1).result()
        ours = engine.save(whole_state(), step=2).result().path
        small = (ours / ".metadata").read_bytes()
        (ours / ".metadata").write_bytes(small.replace(b"ChunkStorage", b"CrumbStorage"))
        with pytest.raises(MismatchError, match=r"\.metadata"):
            engine.read(2)
        (ours / ".metadata").write_bytes((FOREIGN / VERSIONS[-1] / "one_rank" / ".metadata").read_bytes())
        make_unknown(ours)
        with pytest.raises(FormatVersionError, match="Crumb"):
            engine.read(2)
        report = engine.load(blank(whole_state()))
        assert (report.step, report.skipped[0].quarantined) == (1, None)


def skip_newer(rank: int, count: int, root: Path) -> tuple[int, str, bool]:
    with engine_on(root, SECS) as engine:
        report = engine.load(blank(whole_state()))
        [skipped] = report.skipped
        with pytest.raises(FormatVersionError, match="Crumb"):
            engine.load(blank(whole_state()), step=9)
        return report.step, type(skipped.error).__name__, skipped.quarantined is None


def find_nothing_else(rank: int, count: int, root: Path) -> str:
    with engine_on(root, SECS) as engine, pytest.raises(FormatVersionError, match="Crumb") as caught:
        engine.load(blank(whole_state()))
    return type(caught.value).__name__


def test_all_ranks_skip_what_a_newer_torch_wrote(two: Ranks, root: Path) -> None:
    make_unknown(put(VERSIONS[-1], "one_rank", root, 9))
    assert two.run(find_nothing_else, root) == ["FormatVersionError"] * 2
    put(VERSIONS[-1], "one_rank", root, 4)
    assert two.run(skip_newer, root) == [(4, "FormatVersionError", True)] * 2
    assert (root / "step_000000009" / ".metadata").exists()


# -- ids --------------------------------------------------------------------------------------------


def test_storage_meta_holds_the_ids_of_writer_and_reader_as_with_stock(tmp_path: Path) -> None:
    with quiet():
        for path, writer in ((tmp_path / "ours", Writer), (tmp_path / "stock", dcp.FileSystemWriter)):
            saving = writer(path)
            dcp.save(whole_state(), storage_writer=saving)
            stored = pickle.loads((path / ".metadata").read_bytes()).storage_meta
            assert (stored.checkpoint_id, stored.save_id) == (saving.checkpoint_id, saving.save_id)
            assert saving.storage_meta() == stored
    for loading in (Reader(tmp_path / "ours"), Reader(tmp_path / "stock")):
        found = loading.read_metadata().storage_meta
        assert found.load_id == loading.load_id
        assert str(found.checkpoint_id) == loading.checkpoint_id
    writer = Writer(tmp_path / "ours")
    first = writer.save_id
    writer.reset()
    assert writer.save_id not in (first, "")
