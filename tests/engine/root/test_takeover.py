"""A writer that another one has taken over changes nothing under the root any more, whatever it is asked for."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import listing, save, steps_dir, weights
from gated_storage import TIMEOUT, GatedStorage
from lock_holder import locked_by_another_process
from other_owner import claim_of_another_host
from saved_files import data_file

from aio_ckpt import EngineConfig, SyncCheckpointEngine
from aio_ckpt.commit import retention
from aio_ckpt.commit import root_claim as claims
from aio_ckpt.errors import RootError
from aio_ckpt.format.root_names import CLAIM_FILE, LOCK_FILE, PENDING_DIR
from aio_ckpt.runtime.portal import Executor
from aio_ckpt.storage.mounts import Mount

NFS = Mount("nfs4", frozenset({"local_lock=none"}))


def take_over(root: Path) -> None:
    """Write the claim of an engine on another host."""
    (root / CLAIM_FILE).write_bytes(claim_of_another_host())


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
    monkeypatch.setattr(claims, "mount_of", lambda _: NFS)
    monkeypatch.setattr(claims, "SILENCE_SECS", 1.0)
    take_over(root)
    os.utime(root / CLAIM_FILE)
    with SyncCheckpointEngine(root, config=EngineConfig(stall_timeout_secs=0.5)) as engine:
        with pytest.raises(RootError, match=r"on node-7 claims the root.*It is dead if.*call again"):
            engine.save(weights(2), 2, deadline_secs=0.2)
        assert engine.save(weights(3), 3).result(TIMEOUT).step == 3


# -- in the middle of a change ------------------------------------------------------------------------


@contextlib.contextmanager
def gated(root: Path, **config: Any) -> Iterator[tuple[SyncCheckpointEngine, GatedStorage]]:
    executor = Executor("gated", 4)
    storage = GatedStorage(executor)
    try:
        with SyncCheckpointEngine(root, EngineConfig(**config), storage=storage) as engine:
            try:
                yield engine, storage
            finally:
                storage.open_gates()
    finally:
        assert executor.close(TIMEOUT)


def take_over_at(storage: GatedStorage, root: Path, name: str, where: str, call: Callable[[], object]) -> None:
    """Make ``call`` while another writer takes over during the first storage call ``name`` at ``where``."""
    gate = storage.hold(name, where)
    with ThreadPoolExecutor(1) as pool:
        calling = pool.submit(call)
        gate.wait_reached()
        take_over(root)
        storage.release(gate)
        gate.open()
        calling.result(TIMEOUT)


def test_a_rollback_stops_between_two_steps(root: Path) -> None:
    with gated(root) as (engine, storage):
        save(engine, 1, 2, 3)
        engine.protect(2)
        with pytest.raises(RootError, match="on node-7 has taken over"):
            take_over_at(storage, root, "rename", "step_000000003", lambda: engine.rollback(1))
        assert engine.steps() == [1, 2], "the first rename was under way"
        assert engine.protected_steps() == [2]


def test_a_rollback_leaves_the_marks_of_the_new_writer(root: Path) -> None:
    with gated(root) as (engine, storage):
        save(engine, 1, 2)
        engine.protect(2)
        with pytest.raises(RootError, match="on node-7 has taken over"):
            take_over_at(storage, root, "rename", "step_000000002", lambda: engine.rollback(1))
        assert engine.protected_steps() == [2]


def test_a_retention_pass_stops_between_two_steps(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with SyncCheckpointEngine(root) as engine:
        save(engine, 1, 2, 3)
    with gated(root, keep_last=1) as (engine, storage):
        gate = storage.hold("rename", "step_000000001")
        save(engine, 4)
        gate.wait_reached()
        take_over(root)
        gate.open()
    assert listing(root) == ["step_000000002", "step_000000003", "step_000000004", "trash/step_000000001"]
    assert "retention was put off" in caplog.text


@pytest.mark.parametrize("is_path", [False, True])
def test_an_overwrite_stops_before_its_metadata_replaces_that_of_the_step(
    root: Path, tmp_path: Path, is_path: bool
) -> None:
    place: dict[str, Any] = {"path": tmp_path / "best"} if is_path else {"step": 1, "overwrite": True}
    with gated(root) as (engine, storage):
        engine.save(weights(1), **(place if is_path else {"step": 1})).result(TIMEOUT)
        save_again = functools.partial(engine.save, weights(2), **place)
        with pytest.raises(RootError, match="on node-7 has taken over"):
            take_over_at(storage, root, "write_file", "aio_ckpt.pending-*", lambda: save_again().result(TIMEOUT))
        state = weights(0)
        engine.load(state, **({"path": tmp_path / "best"} if is_path else {"step": 1}))
        assert torch.equal(state["w"], weights(1)["w"])


def test_a_step_that_the_new_writer_may_have_replaced_is_not_deleted(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step_directories = retention.step_directories

    async def taken_over(*args: Any) -> Any:
        take_over(root)
        return await step_directories(*args)

    with SyncCheckpointEngine(root) as engine:
        save(engine, 1, 2)
        monkeypatch.setattr(retention, "step_directories", taken_over)
        with pytest.raises(RootError, match="on node-7 has taken over"):
            engine.delete(1)
    assert listing(root) == ["step_000000001", "step_000000002"]


# -- what a dead writer left --------------------------------------------------------------------------


def test_the_files_of_an_overwrite_that_was_killed_go_with_the_next_writer(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        save(engine, 1, 2)
    step = steps_dir(root, 1)
    whole = sorted(path.name for path in step.iterdir())
    for name in ("__dead-3_0_0.distcp", "aio_ckpt.dead-3.0.bin", "aio_ckpt.pending-dead-3", "aio_ckpt.lock"):
        (step / name).touch()
    (step / "notes.txt").touch()
    (root / PENDING_DIR / "dead-0-0-0-1-1-3").mkdir()
    with SyncCheckpointEngine(root) as engine:
        save(engine, 3)
        assert engine.load(weights(0), 1).step == 1
    assert sorted(path.name for path in step.iterdir()) == sorted([*whole, "notes.txt"])


def test_no_step_is_looked_at_if_no_writer_was_killed(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        save(engine, 1, 2)
    marker = steps_dir(root, 1) / "aio_ckpt.pending-x"
    marker.touch()
    with SyncCheckpointEngine(root) as engine:
        save(engine, 3)
    assert marker.exists()


def test_a_writer_goes_on_though_the_server_keeps_the_lock_of_a_lost_host(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFSv4 keeps it for its lease, NFSv3 until that host boots."""
    with SyncCheckpointEngine(root) as engine:
        save(engine, 1)
    take_over(root)
    monkeypatch.setattr(claims, "mount_of", lambda _: NFS)
    with locked_by_another_process(root / LOCK_FILE), SyncCheckpointEngine(root) as engine:
        with pytest.raises(RootError, match=r"on node-7 writes here, its last heartbeat is \d+ s old"):
            engine.save(weights(2), 2)
        os.utime(root / CLAIM_FILE, (1.0, 1.0))
        assert engine.save(weights(2), 2).result(TIMEOUT).step == 2
        assert engine.save(weights(3), 3).result(TIMEOUT).step == 3
