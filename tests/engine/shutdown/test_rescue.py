"""``shm_path``: the snapshot outlives the trainer. Real trainers, killed with SIGKILL, and ``aio-ckpt rescue``."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from builders import listing
from gated_storage import TIMEOUT, GatedStorage, gated_engine
from image_files import pin_chunk_bytes
from rank_processes import Ranks, engine_on
from rescued_trainer import NOT_RECORDED, POINTS, kill, start_trainer, state, train_until_killed
from saved_files import root_manifest
from tensor_bits import assert_same_tensor
from warm_python import WarmPython, run_warm

from aio_ckpt import EngineConfig, SyncCheckpointEngine
from aio_ckpt.cli import commands as cli
from aio_ckpt.commit import discovery
from aio_ckpt.commit.discovery import read_save_id
from aio_ckpt.commit.owner import Owner
from aio_ckpt.errors import CheckpointNotFoundError, ConfigError, ReadError, WriteError
from aio_ckpt.format.root_manifest import decode_root
from aio_ckpt.format.root_names import LOCK_FILE, PENDING_DIR, SEGMENTS_FILE
from aio_ckpt.format.step_names import StepNames
from aio_ckpt.memory.arena_lifetimes import Lease
from aio_ckpt.memory.cuda import Copies
from aio_ckpt.rescue import hooks
from aio_ckpt.rescue import recover as rescue
from aio_ckpt.rescue.found_segments import segment_prefix
from aio_ckpt.rescue.segment import IMAGE_OFFSET, SharedSegment, read_segment
from aio_ckpt.runtime.portal import Executor
from aio_ckpt.storage.local import Storage

MIB = 1 << 20


@pytest.fixture
def shm() -> Iterator[Path]:
    """A directory on a memory file system."""
    made = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="test-"))
    yield made
    shutil.rmtree(made)


class Killed:
    """What one trainer left that was killed while it wrote step 2; each test gets a copy of it."""

    def __init__(self, place: Path, shm: Path) -> None:
        self._root, self._shm = place / "root", shm
        train_until_killed(self._root, shm)

    def copy(self, root: Path, shm: Path) -> Path:
        """The copied segment: its name tells the root, as the file beside the root's lock tells where it is."""
        shutil.copytree(self._root, root)
        (root / SEGMENTS_FILE).write_text(json.dumps([str(shm)]))
        (left,) = self._shm.iterdir()
        name = segment_prefix(root) + left.name.removeprefix(segment_prefix(self._root))
        return Path(shutil.copy2(left, shm / name))


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killed]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="test-") as shm:
        yield Killed(tmp_path_factory.mktemp("killed"), Path(shm))


def called(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Any]:
    capsys.readouterr()
    code = cli.run(["rescue", *map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


def step_dir(step: int) -> str:
    return f"step_{step:09d}"


def assert_holds(root: Path, step: int) -> None:
    """Step ``step`` verifies, and is bit for bit what the trainer saved, by ``read``, ``load`` and stock DCP."""
    assert cli.run(["verify", str(root / step_dir(step))]) == 0
    wanted = state(step)
    with SyncCheckpointEngine(root) as engine:
        back = engine.read(step)
        template = {key: value for key, value in state(0).items() if key not in ("conj",)}
        template["conj"] = torch.zeros(7, dtype=torch.complex64)
        assert engine.load(template, step=step, strict=True).step == step
    for found in (back, template):
        assert isinstance(found, dict)
        for name in ("large", "tied", "strided", "conj"):
            assert_same_tensor(found[name], wanted[name])
        for got, small in zip(found["small"], wanted["small"], strict=True):
            assert_same_tensor(got, small)
        assert (found["array"] == wanted["array"]).all()
        assert found["file"].getvalue() == wanted["file"].getvalue()
        assert found["optimizer"] == wanted["optimizer"]
    plain = {"large": torch.zeros(1_500_000)}
    with warnings.catch_warnings(action="ignore"):  # of one process being alone
        dcp.load(plain, checkpoint_id=root / step_dir(step), no_dist=True)
    assert_same_tensor(plain["large"], wanted["large"])


def segments_in(shm: Path) -> list[Path]:
    return sorted(shm.iterdir())


# -- what was whole is committed ------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("point", [point for point in POINTS if point != "behind the rename"])
def test_a_snapshot_that_was_whole_when_the_trainer_was_killed_is_committed(
    root: Path, shm: Path, point: str, capsys: pytest.CaptureFixture[str]
) -> None:
    train_until_killed(root, shm, point)
    assert len(segments_in(shm)) == 1
    assert list((root / PENDING_DIR).iterdir())
    code, told = called(capsys, root)
    assert (code, told["refused"]) == (0, [])
    assert [saved["step"] for saved in told["rescued"]] == [2]
    assert listing(root) == [step_dir(1), step_dir(2)]
    assert segments_in(shm) == []
    manifest = decode_root(root_manifest(root / step_dir(2)).read_bytes(), name="root")
    assert (manifest.step, manifest.metrics, manifest.world_size) == (2, {"loss": 0.5}, 1)
    assert manifest.extra == {"epoch": 4}
    assert_holds(root, 2)
    assert called(capsys, root) == (0, {"root": str(root), "rescued": [], "refused": []})


def test_what_became_visible_just_before_the_kill_is_not_committed_again(
    root: Path, shm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_until_killed(root, shm, "behind the rename")
    before = (root / step_dir(2)).stat().st_ino
    code, told = called(capsys, root)
    assert (code, told["rescued"], [other["reason"] for other in told["refused"]]) == (0, [], ["it is committed"])
    assert (root / step_dir(2)).stat().st_ino == before
    assert segments_in(shm) == []


def test_two_snapshots_in_flight_are_committed_in_their_order(
    root: Path, shm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = """
        import sys, threading
        from gated_storage import GatedStorage
        from rescued_trainer import RecordGate, state
        from aio_ckpt import CheckpointEngine, EngineConfig
        from aio_ckpt.runtime.portal import Executor

        sealing, storage = RecordGate(), GatedStorage(Executor("gated", 8))
        config = EngineConfig(staging="shm", shm_path=sys.argv[2], max_in_flight=2)
        engine = CheckpointEngine(sys.argv[1], config, storage=storage)
        storage.hold("write", "*.distcp")
        for step in (1, 2):
            engine.save(state(step), step=step)
        sealing.wait_for(2)
        print("held", flush=True)
        threading.Event().wait()
    """
    with WarmPython(source, str(root), str(shm), stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        child.send_signal(signal.SIGKILL)
    code, told = called(capsys, root)
    assert (code, [saved["step"] for saved in told["rescued"]]) == (0, [1, 2])
    assert segments_in(shm) == []
    assert_holds(root, 1)
    assert_holds(root, 2)


OVERWRITER = """
    import sys, threading
    from gated_storage import GatedStorage
    from rescued_trainer import RecordGate, state
    from aio_ckpt import CheckpointEngine, EngineConfig
    from aio_ckpt.runtime.portal import Executor

    sealing, storage = RecordGate(), GatedStorage(Executor("gated", 6))
    engine = CheckpointEngine(sys.argv[1], EngineConfig(staging="shm", shm_path=sys.argv[2]), storage=storage)
    gate = storage.hold(sys.argv[3], sys.argv[4].format(own=engine._ctx.owner.label))
    engine.save(state(float(sys.argv[5])), step=1, overwrite=True)
    gate.wait_reached()
    sealing.wait_for(1)
    print("held", flush=True)
    threading.Event().wait()
"""


def overwrite_until_killed(root: Path, shm: Path, call: str, where: str, value: int) -> None:
    """A trainer that is killed while it replaces step 1."""
    with WarmPython(OVERWRITER, str(root), str(shm), call, where, str(value), stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        child.send_signal(signal.SIGKILL)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("call", "where", "rescued", "reasons"),
    [
        ("replace", ".metadata.tmp-*", [1], ["a later snapshot of step 1 is there"]),
        ("rename", "pending/{own}-1", [], ["another step 1 was committed since", "it is committed"]),
    ],
    ids=["both were killed before", "the later one was killed behind it"],
)
def test_a_snapshot_replaces_the_checkpoint_that_was_there_and_no_later_one(
    root: Path,
    shm: Path,
    call: str,
    where: str,
    rescued: list[int],
    reasons: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    with SyncCheckpointEngine(root) as engine:
        engine.save(state(1), step=1).result(TIMEOUT)
    overwrite_until_killed(root, shm, "replace", ".metadata.tmp-*", 20)
    overwrite_until_killed(root, shm, call, where, 21)
    assert len(segments_in(shm)) == 2
    code, told = called(capsys, root)
    assert (code, [saved["step"] for saved in told["rescued"]]) == (0, rescued)
    assert sorted(other["reason"] for other in told["refused"]) == reasons
    assert segments_in(shm) == []
    with SyncCheckpointEngine(root) as engine:
        assert engine.read(1)["optimizer"][0]["lr"] == 21e-3


def test_an_overwrite_whose_write_ends_while_it_is_read_what_it_replaces_is_committed(
    root: Path, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_written, close = threading.Event(), Lease.close

    def closed(lease: Lease) -> None:
        close(lease)
        is_written.set()

    async def slow(storage: Storage, checkpoint: Path) -> str:
        async with asyncio.timeout(TIMEOUT):
            while not is_written.is_set():
                await asyncio.sleep(0)
        return await read_save_id(storage, checkpoint)

    with SyncCheckpointEngine(root, EngineConfig(staging="shm", shm_path=shm)) as engine:
        engine.save(state(1), step=1).result(TIMEOUT)
        monkeypatch.setattr(Lease, "close", closed)
        monkeypatch.setattr(hooks, "read_save_id", slow)
        engine.save(state(2), step=1, overwrite=True).result(TIMEOUT)
    assert segments_in(shm) == []


def test_what_a_torn_snapshot_superseded_is_not_removed(
    root: Path, shm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with SyncCheckpointEngine(root) as engine:
        engine.save(state(1), step=1).result(TIMEOUT)
    overwrite_until_killed(root, shm, "replace", ".metadata.tmp-*", 20)
    (older,) = segments_in(shm)
    overwrite_until_killed(root, shm, "replace", ".metadata.tmp-*", 21)
    (torn,) = {*segments_in(shm)} - {older}
    data = bytearray(torn.read_bytes())
    damage_image(data)
    torn.write_bytes(data)
    code, told = called(capsys, root)
    assert (code, told["rescued"], [other["is_removed"] for other in told["refused"]]) == (1, [], [False, False])
    torn.unlink()
    code, told = called(capsys, root)
    assert (code, [saved["step"] for saved in told["rescued"]]) == (0, [1])


def test_a_disk_that_is_full_leaves_the_snapshot_where_it_is(
    killed: Killed, root: Path, shm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed.copy(root, shm)
    executor = Executor("test", 4)
    storage = GatedStorage(executor)
    storage.fail("write", "*.distcp", WriteError(errno.ENOSPC, "No space left on device", "x"))

    async def run() -> rescue.RescueReport:
        return await rescue.rescue_root(
            storage,
            executor,
            root,
            StepNames(EngineConfig().step_dir),
            Owner.of_this_process("test"),
            directories=(),
            stale_after_secs=600.0,
        )

    with pytest.raises(WriteError):
        asyncio.run(run())
    assert executor.close(TIMEOUT)
    assert listing(root) == ["segments.json", step_dir(1)]
    assert len(segments_in(shm)) == 1
    assert called(capsys, root)[0] == 0
    assert_holds(root, 2)


# -- what is refused ------------------------------------------------------------------------------


def test_a_snapshot_that_was_not_whole_is_refused_and_its_memory_given_back(
    root: Path, shm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_until_killed(root, shm, NOT_RECORDED)
    code, told = called(capsys, root)
    assert (code, told["rescued"]) == (0, [])
    (refused,) = told["refused"]
    assert "no snapshot record" in refused["reason"]
    assert refused["is_removed"]
    assert (listing(root), segments_in(shm)) == ([step_dir(1)], [])


@pytest.mark.parametrize("nbytes", [0, 20])
def test_a_segment_that_was_never_filled_is_no_loss_and_goes(
    killed: Killed, root: Path, shm: Path, nbytes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trainer was killed while it made its first one."""
    killed.copy(root, shm).write_bytes(bytes(nbytes))
    code, told = called(capsys, root)
    assert (code, [other["reason"] for other in told["refused"]]) == (0, ["never filled"])
    assert (listing(root), segments_in(shm)) == ([step_dir(1)], [])


def damage_image(data: bytearray) -> None:
    data[IMAGE_OFFSET + 3 * MIB] ^= 1


def damage_seal(data: bytearray) -> None:
    data[-10] ^= 1


def damage_generation(data: bytearray) -> None:
    data[8] += 2


def damage_length(data: bytearray) -> None:
    del data[-1000:]


def damage_header(data: bytearray) -> None:
    data[16:24] = b"\xff" * 8


@pytest.mark.parametrize("damage", [damage_image, damage_seal, damage_generation, damage_length, damage_header])
def test_a_torn_snapshot_is_refused_and_nothing_becomes_visible(
    killed: Killed, root: Path, shm: Path, damage: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    killed.copy(root, shm)
    (path,) = segments_in(shm)
    data = bytearray(path.read_bytes())
    damage(data)
    path.write_bytes(data)
    code, told = called(capsys, root)
    assert (code, told["rescued"]) == (1, [])
    (refused,) = told["refused"]
    assert any(word in refused["reason"] for word in ("torn", "does not fit its length"))
    assert (refused["is_loss"], refused["is_removed"]) == (True, False)
    assert [name for name in listing(root) if name.startswith(("pending", "step"))] == [step_dir(1)]
    assert segments_in(shm) == [path]


def test_a_living_trainer_keeps_its_snapshot_and_its_root(
    root: Path, shm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    child = start_trainer(root, shm)
    try:
        assert cli.run(["rescue", str(root)]) == 1
        assert "locked by another writer" in capsys.readouterr().err
        assert len(segments_in(shm)) == 1
    finally:
        kill(child)
    assert called(capsys, root)[0] == 0


@pytest.mark.slow
def test_a_living_trainer_keeps_its_snapshot_on_a_file_system_without_locks(
    root: Path, shm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on file systems that have none: its claim tells that it lives."""
    child = start_trainer(root, shm)
    try:
        (root / LOCK_FILE).unlink()
        assert cli.run(["rescue", str(root)]) == 1
        assert " writes here, its last heartbeat is" in capsys.readouterr().err
        assert len(segments_in(shm)) == 1
    finally:
        kill(child)


def test_a_step_that_does_not_exceed_what_is_committed_is_refused(
    killed: Killed, root: Path, shm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed.copy(root, shm)
    (root / SEGMENTS_FILE).unlink()  # or the engine would give it up
    with SyncCheckpointEngine(root, EngineConfig()) as engine:
        engine.save(state(3), step=3).result(TIMEOUT)
    code, told = called(capsys, root, "--shm-path", shm)
    assert (code, told["rescued"]) == (0, [])
    assert [other["reason"] for other in told["refused"]] == ["step 3 is committed, which is not older"]
    assert segments_in(shm) == []


# -- the next engine ------------------------------------------------------------------------------


def test_the_next_engine_tells_of_a_snapshot_and_gives_it_up_with_its_first_commit(
    killed: Killed, root: Path, shm: Path, caplog: pytest.LogCaptureFixture
) -> None:
    killed.copy(root, shm)
    (kept,) = segments_in(shm)
    with SyncCheckpointEngine(root, EngineConfig(shm_path=shm)) as engine:
        assert "step 2 was staged by a trainer that died" in caplog.text
        assert f"`aio-ckpt rescue {root}` commits it" in caplog.text
        engine.prepare(state(2)).result(TIMEOUT)
        assert kept in segments_in(shm)
        assert len(segments_in(shm)) == 2
        engine.save(state(5), step=5).result(TIMEOUT)
        engine.close()
    assert "is given up: a later run has committed" in caplog.text
    assert segments_in(shm) == []
    assert listing(root) == [step_dir(1), step_dir(5)]


def test_an_engine_without_shm_path_gives_up_the_snapshot_of_a_dead_trainer(
    killed: Killed, root: Path, shm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Or it would be committed on top of what this engine goes on with."""
    killed.copy(root, shm)
    with SyncCheckpointEngine(root) as engine:
        engine.prepare(state(2)).result(TIMEOUT)
        assert len(segments_in(shm)) == 1
        engine.save(state(1), step=1, overwrite=True).result(TIMEOUT)
    assert (listing(root), segments_in(shm)) == ([step_dir(1)], [])
    assert called(capsys, root, "--shm-path", shm)[1]["rescued"] == []


def test_the_snapshot_of_a_trainer_that_died_after_the_engine_was_opened_is_given_up(root: Path, shm: Path) -> None:
    child = start_trainer(root, shm)
    try:
        engine = SyncCheckpointEngine(root)
    finally:
        kill(child)
    engine.save(state(1), step=1, overwrite=True).result(TIMEOUT)
    engine.close()
    assert (listing(root), segments_in(shm)) == ([step_dir(1)], [])


def save_where_only_the_other_rank_was_told(rank: int, count: int, root: Path, shm: Path) -> None:
    if rank:
        dist.barrier()
    with engine_on(root, TIMEOUT) as engine:
        if not rank:
            (root / SEGMENTS_FILE).write_text(json.dumps([str(shm)]))
            dist.barrier()
        dist.barrier()
        (root / SEGMENTS_FILE).unlink(missing_ok=True)
        dist.barrier()
        engine.save(state(3), step=3).result(TIMEOUT)
        dist.barrier()


@pytest.mark.slow
def test_each_rank_gives_up_what_it_was_told_of(killed: Killed, two: Ranks, root: Path, shm: Path) -> None:
    """The leader may be on another host, whose memory holds nothing of it."""
    killed.copy(root, shm)
    (root / SEGMENTS_FILE).unlink()
    two.run(save_where_only_the_other_rank_was_told, root, shm)
    assert segments_in(shm) == []


def test_what_is_not_newer_than_what_is_committed_is_not_offered(
    killed: Killed, root: Path, shm: Path, caplog: pytest.LogCaptureFixture
) -> None:
    killed.copy(root, shm)
    (root / SEGMENTS_FILE).unlink()
    with SyncCheckpointEngine(root) as engine:
        engine.save(state(3), step=3).result(TIMEOUT)
    assert len(segments_in(shm)) == 1
    with SyncCheckpointEngine(root, EngineConfig(shm_path=shm)) as engine:
        engine.prepare(state(2)).result(TIMEOUT)
    assert "was staged by a trainer that died" not in caplog.text
    assert segments_in(shm) == []


def test_an_engine_is_opened_where_the_steps_cannot_be_read(
    killed: Killed,
    root: Path,
    shm: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def discover(*_: object) -> None:
        raise ReadError(errno.EIO, "Input/output error", str(root))

    killed.copy(root, shm)
    with monkeypatch.context() as patched:
        patched.setattr(discovery, "discover", discover)
        SyncCheckpointEngine(root).close()
    assert "could not be compared with its steps" in caplog.text
    assert [saved["step"] for saved in called(capsys, root)[1]["rescued"]] == [2]


def test_a_rollback_gives_up_what_was_staged_of_a_later_step(
    root: Path, shm: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    train_until_killed(root, shm, saves=3)
    with SyncCheckpointEngine(root) as engine:
        assert engine.rollback(1) == [2]
    assert "of step 3, is given up: rollback(1) went back behind it" in caplog.text
    assert called(capsys, root, "--shm-path", shm) == (0, {"root": str(root), "rescued": [], "refused": []})


def test_a_rollback_that_fails_gives_nothing_up(killed: Killed, root: Path, shm: Path) -> None:
    killed.copy(root, shm)
    with SyncCheckpointEngine(root) as engine, pytest.raises(CheckpointNotFoundError):
        engine.rollback(0)
    assert len(segments_in(shm)) == 1


def test_a_close_right_behind_the_first_commit_gives_the_snapshot_up(killed: Killed, root: Path, shm: Path) -> None:
    killed.copy(root, shm)
    engine = SyncCheckpointEngine(root, EngineConfig(shm_path=shm))
    go_on = threading.Event()
    drop, background, release = (
        engine._rescue.give_up,
        engine._shutdown._background,
        engine._shutdown._release,
    )
    is_released: list[bool] = []

    def held(why: str) -> None:
        assert go_on.wait(TIMEOUT)
        is_released.append(bool(released))
        drop(why)

    def awaited() -> Any:
        found = [*background()]
        if not all(work.done() for work in found):
            go_on.set()
        return found

    released: list[bool] = []

    def release_late() -> None:
        released.append(True)
        go_on.set()
        release()

    engine._rescue.give_up = held  # type: ignore[method-assign]
    engine._shutdown._background, engine._shutdown._release = awaited, release_late
    engine.save(state(5), step=5).result(TIMEOUT)
    engine.close()
    assert is_released == [False]
    assert segments_in(shm) == []


def test_an_engine_that_commits_nothing_leaves_the_snapshot_to_be_rescued(
    killed: Killed, root: Path, shm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed.copy(root, shm)
    with SyncCheckpointEngine(root, EngineConfig(shm_path=shm)) as engine:
        engine.prepare(state(2)).result(TIMEOUT)
    assert len(segments_in(shm)) == 1
    code, told = called(capsys, root)
    assert (code, [saved["step"] for saved in told["rescued"]]) == (0, [2])


@pytest.mark.parametrize("call", ["write_file", "replace"])
def test_an_engine_that_cannot_tell_its_place_leaves_what_was_told(
    killed: Killed, root: Path, shm: Path, call: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Or what was staged there would be forgotten: the same holds where the engine is killed at this call."""
    killed.copy(root, shm)
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="test-") as other:
        with gated_engine(root, shm_path=other) as (engine, storage):
            storage.fail(call, "segments.json*", WriteError(errno.ENOSPC, "No space left on device", "x"))
            with pytest.raises(WriteError):
                engine.save(state(2))
        with SyncCheckpointEngine(root, EngineConfig(shm_path=other)) as later:
            later.prepare(state(2)).result(TIMEOUT)
            assert json.loads((root / SEGMENTS_FILE).read_text()) == [other, str(shm)]
    code, told = called(capsys, root)
    assert (code, [saved["step"] for saved in told["rescued"]]) == (0, [2])
    assert listing(root) == [step_dir(1), step_dir(2)]


def test_the_place_is_not_told_anew(killed: Killed, root: Path, shm: Path) -> None:
    killed.copy(root, shm)
    with gated_engine(root, shm_path=shm) as (engine, storage):
        engine.prepare(state(2)).result(TIMEOUT)
    assert [call for call in storage.begun if call.path.name.startswith("segments.json")] == []


@pytest.mark.sampled
@pytest.mark.parametrize("with_path", [True, False])
def test_the_next_engine_reclaims_what_nobody_can_commit(
    root: Path, shm: Path, with_path: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Also one without ``shm_path``: the root tells where to look."""
    caplog.set_level("INFO", "aio_ckpt")
    train_until_killed(root, shm, NOT_RECORDED)
    with SyncCheckpointEngine(root, EngineConfig(shm_path=shm if with_path else None)) as engine:
        assert engine.save(state(2)).result(TIMEOUT) is not None
        assert len(segments_in(shm)) == with_path
    assert "no snapshot record: its memory was free, or its writer died" in caplog.text
    assert segments_in(shm) == []
    assert listing(root) == [step_dir(1), step_dir(2)]


def test_the_snapshot_of_the_dead_gives_way_to_the_memory_of_the_living(
    killed: Killed, tmp_path: Path, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A trainer that could not save because of what a dead one left would be killed again and again."""
    place = tmp_path / "shm"
    place.mkdir()
    with small_tmpfs(place, "20m"):
        killed.copy(root, place)
        with SyncCheckpointEngine(root, EngineConfig(shm_path=place)) as engine:
            (kept,) = segments_in(place)
            assert engine.save({"w": torch.ones(4 * MIB)}).result(TIMEOUT) is not None
            assert kept not in segments_in(place)
        assert "there is no room for it beside" in caplog.text
        assert segments_in(place) == []


# -- the end of a process -------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["close", "terminate"])
def test_nothing_is_left_behind(root: Path, shm: Path, end: str) -> None:
    with gated_engine(root, shm_path=shm, max_in_flight=2) as (engine, storage):
        engine.save(state(1)).result(TIMEOUT)
        storage.hold("write", "*.distcp")
        engine.save(state(2))
        assert segments_in(shm)
        assert (root / SEGMENTS_FILE).exists()
        if end == "close":
            storage.open_gates()
            engine.close_blocking()
        else:
            engine.terminate()
        assert segments_in(shm) == []
        assert not (root / SEGMENTS_FILE).exists()


ENDS = {
    "the end of the script": "",
    "an exception": "raise ValueError('the trainer's own')".replace("'s", "s"),
    "sys.exit": "sys.exit(3)",
    "a forked child that ends first": """
pid = os.fork()
if not pid:
    sys.exit(0)
os.waitpid(pid, 0)
assert os.listdir(sys.argv[2])
""",
}


@pytest.mark.sampled
@pytest.mark.parametrize("end", ENDS)
def test_an_interpreter_that_ends_leaves_nothing(root: Path, shm: Path, end: str) -> None:
    source = f"""
import os, sys, torch
from aio_ckpt import EngineConfig, SyncCheckpointEngine

engine = SyncCheckpointEngine(sys.argv[1], EngineConfig(shm_path=sys.argv[2]))
engine.save({{"w": torch.ones(1 << 20)}}, step=1).result(60)
engine.save({{"w": torch.ones(1 << 20)}}, step=2)
{ENDS[end]}
"""
    run_warm(source, str(root), str(shm), options=(), is_end_tested=True)
    assert segments_in(shm) == []
    assert listing(root) == [step_dir(1), step_dir(2)]


# -- the segment while the trainer lives ----------------------------------------------------------


def test_a_segment_holds_a_snapshot_from_its_staging_to_its_commit_only(root: Path, shm: Path) -> None:
    with gated_engine(root, shm_path=shm) as (engine, storage):
        for step in (1, 2, 3):
            gate = storage.hold("rename", "pending/*")
            ticket = engine.save(state(step), step=step)
            gate.wait_reached()
            (path,) = segments_in(shm)
            stored = read_segment(path)
            assert (stored.fault, stored.generation) == ("", 2 * step)
            assert path.stat().st_mode & 0o777 == 0o600
            storage.release(gate)
            gate.open()
            ticket.result(TIMEOUT)
            assert "no snapshot record" in read_segment(path).fault
            assert segments_in(shm) == [path]


def test_a_segment_holds_no_snapshot_while_anything_is_still_to_be_captured(
    root: Path, shm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer's thread is held before the last tensor; the first chunk is on the disk by then."""
    pin_chunk_bytes(monkeypatch)
    held, real = threading.Event(), Copies.copy
    may_go = threading.Event()

    def copy(copies: Copies, target: torch.Tensor, source: torch.Tensor) -> None:
        if bool((source[:4].view(torch.float32) == 3.0).all()):
            held.set()
            assert may_go.wait(TIMEOUT)
        real(copies, target, source)

    monkeypatch.setattr(Copies, "copy", copy)
    with gated_engine(root, shm_path=shm) as (engine, storage), ThreadPoolExecutor(1) as trainer:
        gate = storage.hold("rename", "pending/*")
        saving = trainer.submit(engine.save, {str(n): torch.full((MIB,), float(n)) for n in (1, 2, 3)})
        assert held.wait(TIMEOUT)
        storage.wait_for("write", "*.distcp")
        (path,) = segments_in(shm)
        assert "no snapshot record" in read_segment(path).fault
        may_go.set()
        gate.wait_reached()
        assert read_segment(path).fault == ""
        gate.open()
        saving.result(TIMEOUT).result(TIMEOUT)


def test_after_a_change_of_structure_the_old_segment_is_gone(root: Path, shm: Path) -> None:
    with SyncCheckpointEngine(root, EngineConfig(shm_path=shm)) as engine:
        engine.save({"w": torch.ones(MIB)}).result(TIMEOUT)
        before = segments_in(shm)
        engine.save({"w": torch.ones(8 * MIB)}).result(TIMEOUT)
        after = segments_in(shm)
    assert (len(before), len(after)) == (1, 1)
    assert before != after


def test_a_save_that_failed_is_not_rescued(root: Path, shm: Path) -> None:
    with gated_engine(root, shm_path=shm, on_failure="log") as (engine, storage):
        engine.save(state(1)).result(TIMEOUT)
        storage.fail("sync", "*.distcp", WriteError(errno.EIO, "Input/output error", "x"))
        assert isinstance(engine.save(state(2)).exception(TIMEOUT), WriteError)
        (path,) = segments_in(shm)
        assert "no snapshot record" in read_segment(path).fault
        assert engine.lifetime.leases == 0


def test_a_snapshot_in_waves_is_not_sealed_and_says_so(root: Path, shm: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "aio_ckpt")
    with SyncCheckpointEngine(root, EngineConfig(shm_path=shm, budget_bytes=4 * MIB)) as engine:
        assert engine.save({"w": torch.ones(8 * MIB)}).result(TIMEOUT) is not None
        (path,) = segments_in(shm)
        assert path.stat().st_size <= 6 * MIB  # header included
    assert "such a snapshot cannot be rescued (shm_path); raise budget_bytes" in caplog.text
    assert "no whole snapshot is there to be rescued" in caplog.text


def test_no_room_for_the_seal_is_a_note_and_the_save_goes_on(
    root: Path, shm: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(segment: SharedSegment, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(SharedSegment, "mark_valid", full)
    with SyncCheckpointEngine(root, EngineConfig(shm_path=shm)) as engine:
        assert engine.save(state(1)).result(TIMEOUT) is not None
    assert "could not be rescued: no room for its snapshot record" in caplog.text


# -- no room, bad settings ------------------------------------------------------------------------


@contextlib.contextmanager
def small_tmpfs(place: Path, size: str) -> Iterator[None]:
    """Shared memory of a given size at ``place``."""
    if os.geteuid():
        pytest.skip("mounting a small tmpfs needs root")
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    if (mounted := subprocess.run(mount, capture_output=True, text=True)).returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_shared_memory_that_is_too_small_is_an_error_and_not_a_bus_error(tmp_path: Path, root: Path) -> None:
    place = tmp_path / "shm"
    place.mkdir()
    source = """
        import sys, torch
        from aio_ckpt import EngineConfig, SyncCheckpointEngine
        from aio_ckpt.errors import BudgetExceededError

        with SyncCheckpointEngine(sys.argv[1], EngineConfig(shm_path=sys.argv[2])) as engine:
            try:
                engine.save({"w": torch.ones(4 << 20)}, step=1)
            except BudgetExceededError as error:
                print(error)
            engine.save({"w": torch.ones(1 << 18)}, step=1).result(60)
            print(engine.steps())
    """
    with small_tmpfs(place, "4m"):
        done = run_warm(source, str(root), str(place))
        assert (done.returncode, done.stderr) == (0, "")
        message, steps = done.stdout.splitlines()
        assert "bytes of shared memory (No space left on device); lower budget_bytes" in message
        assert steps == "[1]"
        assert segments_in(place) == []


def test_a_directory_that_cannot_hold_segments_is_refused_when_the_engine_is_opened(
    tmp_path: Path, root: Path, shm: Path
) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        SyncCheckpointEngine(root, EngineConfig(shm_path=shm / "none"))
    (shm / "file").touch()
    with pytest.raises(ConfigError, match="no such directory"):
        SyncCheckpointEngine(root, EngineConfig(shm_path=shm / "file"))
    on_disk = subprocess.run(["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True).stdout.strip()
    if on_disk != "tmpfs":
        with pytest.raises(ConfigError, match="whose pages go to a disk"):
            SyncCheckpointEngine(root, EngineConfig(shm_path=tmp_path))
    assert not root.exists()


@pytest.mark.parametrize(
    "settings", [{"staging": "pinned"}, {"staging": "pageable"}, {"shm_path": ""}, {"shm_path": 3}]
)
def test_settings_that_make_no_sense_with_shm_path_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="shm_path="):
        EngineConfig(**{"shm_path": "/dev/shm", **settings})


def test_a_root_that_nobody_staged_for_is_not_touched(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / ".aio_ckpt").mkdir(parents=True)
    assert called(capsys, root) == (0, {"root": str(root), "rescued": [], "refused": []})
    assert list(root.rglob("*")) == [root / ".aio_ckpt"]


def test_steps_of_another_step_dir_are_not_committed_without_the_option(
    root: Path, shm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the trainer's pattern nobody can tell whether the step is newer than what is committed."""
    train_until_killed(root, shm, settings=json.dumps({"step_dir": "run-{step}"}))
    code, told = called(capsys, root)
    assert (code, told["rescued"]) == (1, [])
    assert "give the trainer's --step-dir" in told["refused"][0]["reason"]
    assert called(capsys, root, "--step-dir", "run-{step}")[0] == 0
    assert listing(root) == ["run-1", "run-2"]


@pytest.mark.parametrize("odd", ["", "a\0b", "none", "/" + "x" * 5000])
def test_a_place_that_cannot_be_is_passed_by(
    killed: Killed, root: Path, shm: Path, odd: str, capsys: pytest.CaptureFixture[str]
) -> None:
    killed.copy(root, shm)
    (root / SEGMENTS_FILE).write_text(json.dumps([odd, str(shm)]))
    with SyncCheckpointEngine(root) as engine:
        assert engine.steps() == [1]
    code, told = called(capsys, root)
    assert (code, [saved["step"] for saved in told["rescued"]]) == (0, [2])


def test_the_words_of_the_command(killed: Killed, root: Path, shm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    killed.copy(root, shm)
    assert cli.run(["rescue", str(root), "--shm-path", str(shm)]) == 0
    assert "step 2: rescued, " in capsys.readouterr().out
    assert cli.run(["rescue", str(root)]) == 0
    assert capsys.readouterr().out == f"nothing to rescue for {root}\n"


def test_a_root_that_is_not_there_has_nothing_to_rescue_and_fails_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the first start, and if it is mistyped: nothing else would tell that a snapshot is left elsewhere."""
    assert cli.run(["rescue", str(tmp_path / "none")]) == 1
    assert f"{tmp_path / 'none'}: no such directory" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
