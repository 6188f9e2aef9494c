"""What an engine tells about the mount of its root, and what it refuses there."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from aio_ckpt import EngineConfig, SyncCheckpointEngine
from aio_ckpt.engine import root_session as engine_root
from aio_ckpt.errors import ConfigError
from aio_ckpt.storage.mounts import Mount

NFS = Mount("nfs4", frozenset({"rw", "hard", "local_lock=none", "vers=4.2"}))


def test_one_line_at_opening_names_the_file_system_and_what_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also for a root that does not exist yet."""
    monkeypatch.setattr(engine_root, "mount_of", lambda _: NFS)
    root = tmp_path / "not" / "there"
    with caplog.at_level(logging.INFO, "aio_ckpt"), SyncCheckpointEngine(root):
        pass
    (line,) = [message for message in caplog.messages if "nfs4" in message]
    assert line.startswith(f"{root} is on nfs4 (hard,local_lock=none,vers=4.2): locks reach the server")
    assert not root.exists()


def test_a_claim_that_ends_within_the_age_of_attributes_is_refused_on_a_shared_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(stale_after_secs=60)
    with SyncCheckpointEngine(tmp_path, config):
        pass
    monkeypatch.setattr(engine_root, "mount_of", lambda _: NFS)
    with pytest.raises(ConfigError, match=r"stale_after_secs=60: give at least 180 on nfs4"):
        SyncCheckpointEngine(tmp_path, config)
    assert list(tmp_path.iterdir()) == []
