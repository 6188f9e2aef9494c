"""A writer that another one has taken over changes nothing under the root any more, whatever it is asked for."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from builders import listing, save, steps_dir, weights
from gated_storage import TIMEOUT
from saved_files import data_file

from aio_ckpt import EngineConfig, SyncCheckpointEngine
from aio_ckpt.commit import claim as claims
from aio_ckpt.commit.owner import Owner, encoded_owner
from aio_ckpt.engine import root as roots
from aio_ckpt.errors import RootError
from aio_ckpt.format.names import CLAIM_FILE
from aio_ckpt.storage.mounts import Mount

NFS = Mount("nfs4", frozenset({"local_lock=none"}))


def take_over(root: Path) -> None:
    """Write the claim of an engine on another host, as one on a mount without locks of a server does."""
    other = msgspec.structs.replace(Owner.of_this_process(), host="node-7", machine_id="m", boot_id="b")
    (root / CLAIM_FILE).write_bytes(encoded_owner(other))


@pytest.mark.parametrize("call", ["save", "overwrite", "save_path", "rollback", "delete", "remove"])
def test_no_call_changes_what_the_new_writer_has(root: Path, tmp_path: Path, call: str) -> None:
    other_place = tmp_path / "best"
    with SyncCheckpointEngine(root) as engine:
        save(engine, 1, 2, 3)
        engine.save(weights(5), path=other_place).result(TIMEOUT)
        take_over(root)
        changes = {
            "save": lambda: engine.save(weights(9), 9).result(TIMEOUT),
            "overwrite": lambda: engine.save(weights(9), 3, overwrite=True).result(TIMEOUT),
            "save_path": lambda: engine.save(weights(9), path=other_place).result(TIMEOUT),
            "rollback": lambda: engine.rollback(1),
            "delete": lambda: engine.delete(1),
            "remove": lambda: engine.remove(other_place).result(TIMEOUT),
        }
        with pytest.raises(RootError, match="on node-7 has taken over"):
            changes[call]()
        assert listing(root) == ["step_000000001", "step_000000002", "step_000000003"]
        assert engine.load(weights(0), 3).step == 3
        assert engine.load(weights(0), path=other_place).path == other_place


def test_a_load_sets_no_damaged_step_aside(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with SyncCheckpointEngine(root) as engine:
        save(engine, 1, 2)
        take_over(root)
        data_file(steps_dir(root, 2)).write_bytes(b"")
        assert engine.load(weights(0)).step == 1
        assert listing(root) == ["step_000000001", "step_000000002"]
    assert "damaged checkpoints are not set aside" in caplog.text


def test_a_limit_shorter_than_the_silence_of_a_dead_writer_delays_the_takeover_and_does_not_prevent_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SyncCheckpointEngine(root) as engine:
        save(engine, 1)
    monkeypatch.setattr(roots, "mount_of", lambda _: NFS)
    monkeypatch.setattr(claims, "SILENCE_SECS", 1.0)
    take_over(root)
    os.utime(root / CLAIM_FILE)
    with SyncCheckpointEngine(root, config=EngineConfig(stall_timeout_secs=0.5)) as engine:
        with pytest.raises(RootError, match=r"on node-7 claims the root and seems to be dead.*call again"):
            engine.save(weights(2), 2, deadline_secs=0.2)
        assert engine.save(weights(3), 3).result(TIMEOUT).step == 3
