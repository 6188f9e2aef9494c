"""``save(files=)``: files of the caller become durable and visible with the checkpoint, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import listing, weights
from gated_storage import TIMEOUT, gated_engine
from saved_files import ROOT_MANIFEST, without_save_id

from aio_ckpt import ConfigError, SyncCheckpointEngine, WriteError


def test_files_are_visible_and_durable_with_the_checkpoint(root: Path, tmp_path: Path) -> None:
    path, content = tmp_path / "best.ckpt", {"meta.pt": b"all else"}
    with gated_engine(root) as (engine, storage):
        gate = storage.hold("rename")
        ticket = engine.save(weights(1), path=path, files=content)
        content["later"] = b""
        gate.wait_reached()
        storage.wait_for("write_file", "meta.pt")  # which ends behind its fsync
        names = [call.path.name for call in storage.calls if call.name == "write_file"]
        assert names.index("meta.pt") < [without_save_id(name) for name in names].index(ROOT_MANIFEST)
        assert not path.exists()
        gate.open()
        ticket.result(TIMEOUT)
    assert (path / "meta.pt").read_bytes() == b"all else"
    assert not (path / "later").exists()


def test_a_save_that_overwrites_a_step_replaces_its_files(root: Path, tmp_path: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        report = engine.save(weights(1), files={"a": b"1"}).result(TIMEOUT)
        assert report is not None
        assert (report.path / "a").read_bytes() == b"1"
        for name in ("a", "b"):
            engine.save(weights(1), path=tmp_path / "last", files={name: b"2"}, overwrite=True).result(TIMEOUT)
        assert "a" not in listing(tmp_path / "last")


def test_if_a_file_cannot_be_written_nothing_is_visible(root: Path, tmp_path: Path) -> None:
    with gated_engine(root) as (engine, storage):
        storage.fail("write_file", "meta.pt", WriteError(28, "disk full", "meta.pt"))
        with pytest.raises(WriteError):
            engine.save(weights(1), path=tmp_path / "best", files={"meta.pt": b"x"}).result(TIMEOUT)
    assert not (tmp_path / "best").exists()


@pytest.mark.parametrize(
    "name", ["", "a/b", ".metadata", ".x", "__0_0.distcp", "aio_ckpt.json", "n" * 256, "\ud800", 1]
)
def test_a_name_of_the_checkpoints_own_files_is_refused(root: Path, name: str) -> None:
    with SyncCheckpointEngine(root) as engine, pytest.raises(ConfigError, match="files"):
        engine.save(weights(1), files={name: b""})
    assert not root.exists()


@pytest.mark.parametrize("files", [["a"], {"a": "text"}])
def test_what_is_no_file_is_refused(root: Path, files: object) -> None:
    with SyncCheckpointEngine(root) as engine, pytest.raises(ConfigError, match="bytes"):
        engine.save(weights(1), files=files)  # type: ignore[arg-type]
