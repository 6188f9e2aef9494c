"""Owners: who is dead, who lives, and what is cleared of what they left."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from builders import listing, weights
from gated_storage import TIMEOUT, GatedStorage, gated_engine
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples
from saved_files import DATA_FILE
from warm_python import WarmPython

from aio_ckpt import SyncCheckpointEngine
from aio_ckpt.commit.in_place import unclaimed
from aio_ckpt.commit.leftovers import clear_leftovers
from aio_ckpt.commit.owner import (
    Owner,
    decoded_owner,
    encoded_owner,
    is_abandoned,
    owner_by_name,
    pending_path,
)
from aio_ckpt.errors import ReadError, RootError, SaveCancelledError, WriteError
from aio_ckpt.format.checkpoint_files import METADATA_FILE
from aio_ckpt.format.root_names import (
    ABANDONED_DIR,
    CLAIM_FILE,
    CORRUPT_DIR,
    ENGINE_DIRS,
    LOCK_FILE,
    PENDING_DIR,
    TRASH_DIR,
    protected_name,
)
from aio_ckpt.format.step_names import StepNames
from aio_ckpt.runtime.portal import Executor
from aio_ckpt.storage.local import FileStatus
from aio_ckpt.storage.root_lock import RootLock

STALE = 600.0
YEAR = 365 * 86_400.0
HERE = Owner.of_this_process("here")
DATA = DATA_FILE


@pytest.fixture
async def storage() -> AsyncIterator[GatedStorage]:
    executor = Executor("test", 2)
    yield GatedStorage(executor)
    assert executor.close(TIMEOUT)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    for name in ENGINE_DIRS:
        (root / name).mkdir(parents=True)
    (root / LOCK_FILE).touch()
    return root


def leave_pending(root: Path, name: str) -> Path:
    """What a writer left."""
    pending = root / PENDING_DIR / name
    pending.mkdir(parents=True)
    (pending / DATA).write_bytes(b"half")
    return pending


def changed(**fields: object) -> Owner:
    return msgspec.structs.replace(HERE, **fields)


def dead_pid() -> int:
    child = subprocess.Popen(["true"])
    child.wait(TIMEOUT)
    return child.pid


async def clear(storage: GatedStorage, root: Path, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the names of the directories that were cleared, as the log tells them."""
    caplog.set_level(logging.INFO, "aio_ckpt")
    caplog.clear()
    await clear_leftovers(storage, root, StepNames("step_{step:09d}"), unclaimed, here=HERE)
    told = [record.args for record in caplog.records if record.msg.startswith("cleared leftovers")]
    return [Path(name).name for (names,) in told for name in names.split(", ")]


# -- who is dead ------------------------------------------------------------------------------------

PROOFS: dict[str, tuple[Owner, bool]] = {
    "a process that is gone": (changed(pid=dead_pid()), True),
    "this very process": (changed(), False),
    "a pid that another process has now": (changed(started_ticks=HERE.started_ticks - 1), True),
    "a start that was not learned": (changed(started_ticks=0), False),
    "an earlier boot of this machine": (changed(boot_id="another"), True),
    "another machine of the same name": (changed(boot_id="another", machine_id="another"), False),
    "a machine that has no identity": (changed(boot_id="another", machine_id=""), False),
    "another host": (changed(host="another", pid=dead_pid()), False),
    "another host, whatever its boot": (changed(host="another", boot_id="another"), False),
    "another container of this host": (changed(pid_namespace="pid:[7]", pid=dead_pid()), False),
    "a boot that was not learned": (changed(boot_id="", pid=dead_pid()), False),
}
RUNNING = ("this very process", "a start that was not learned")


@pytest.mark.parametrize("case", PROOFS)
def test_a_name_tells_of_the_owner_what_a_record_tells(case: str) -> None:
    owner, is_dead = PROOFS[case]
    if "machine" in case and not HERE.machine_id:
        pytest.skip("this machine has no /etc/machine-id")
    named = owner_by_name(pending_path(Path("root"), owner, 7).name, HERE)
    for told in (owner, *([named] if named is not None else [])):
        assert told.is_proven_dead(HERE) is is_dead
        assert told.runs_here(HERE) is (case in RUNNING)


@pytest.mark.parametrize("case", PROOFS)
async def test_what_the_holder_of_the_root_finds_is_cleared_unless_its_owner_runs_on_this_host(
    storage: GatedStorage, root: Path, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    owner, _ = PROOFS[case]
    pending = leave_pending(root, pending_path(root, owner, 7).name)
    assert await clear(storage, root, caplog) == ([] if case in RUNNING else [pending.name])
    assert pending.exists() is (case in RUNNING)
    assert not list(root.glob(".aio_ckpt/trash/*"))


@pytest.mark.parametrize("name", ["old-1", f"a-{changed(pid=9_999_999_999).tag}-1"], ids=["no owner", "no pid"])
async def test_what_tells_no_owner_is_cleared(
    storage: GatedStorage, root: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    leave_pending(root, name)
    assert owner_by_name(name, HERE) is None
    assert await clear(storage, root, caplog) == [name]


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"{",
        b'{"host": "here", "pid": 1}',
        b'{"pid": 1' + b"0" * 5000 + b"}",
        msgspec.json.encode(HERE).replace(b'"pid":', b'"pid":-'),
    ],
    ids=["empty", "torn", "another version", "a pid as large as an integer gets", "a pid that none has"],
)
def test_a_record_that_is_torn_forged_or_of_another_version_names_nobody(record: bytes) -> None:
    assert decoded_owner(record) is None
    assert decoded_owner(msgspec.json.encode(HERE)) == HERE


def test_the_owner_record_says_who_writes() -> None:
    assert (HERE.session, HERE.host, HERE.pid) == ("here", socket.gethostname(), os.getpid())
    assert all((HERE.boot_id, HERE.pid_namespace, HERE.started_ticks))
    assert not HERE.is_proven_dead(HERE)
    nameless = changed(machine_id="")
    assert not changed(machine_id="", boot_id="another").is_proven_dead(nameless), "another machine, for all we know"
    assert changed(machine_id="", pid=dead_pid()).is_proven_dead(nameless)
    record = msgspec.json.encode(HERE)
    assert msgspec.json.decode(record, type=Owner) == HERE


def test_a_process_is_recognised_however_the_wall_clock_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its start is told in ticks since the boot: by the wall clock it moves when the clock is set."""
    for shift in (YEAR, -YEAR):
        monkeypatch.setattr(time, "time", lambda shift=shift: shift)
        now = Owner.of_this_process("here")
        assert now.started_ticks == HERE.started_ticks
        assert not HERE.is_proven_dead(now)


def test_a_process_that_is_hidden_is_not_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """``hidepid`` hides the processes of others: that a pid is not seen proves nothing, only that none has it."""
    read = Path.read_bytes

    def hidden(path: Path) -> bytes:
        if path.parts[:2] == ("/", "proc"):
            raise FileNotFoundError(errno.ENOENT, "hidden", str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", hidden)
    assert not changed(pid=1).is_proven_dead(HERE)
    assert changed(pid=dead_pid()).is_proven_dead(HERE)


def test_a_killed_process_that_nobody_has_reaped_is_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with child:
        started = int(Path(f"/proc/{child.pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
        owner = changed(pid=child.pid, started_ticks=started)
        assert not owner.is_proven_dead(HERE)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert owner.is_proven_dead(HERE)


@given(
    owner=st.none()
    | st.builds(
        changed,
        host=st.sampled_from([HERE.host, "another"]),
        machine_id=st.sampled_from([HERE.machine_id, "another", ""]),
        boot_id=st.sampled_from([HERE.boot_id, "another", ""]),
        pid_namespace=st.sampled_from([HERE.pid_namespace, "another", ""]),
    ),
    idle_secs=st.none() | st.floats(-YEAR, YEAR),
    stale_after_secs=st.floats(1, 86_400),
)
@examples(300)
def test_a_living_owner_is_never_abandoned(
    owner: Owner | None, idle_secs: float | None, stale_after_secs: float
) -> None:
    """The record names this very process, or one on a host, boot or in a container that nothing here can tell of."""
    is_fresh = idle_secs is None or idle_secs <= stale_after_secs
    is_earlier_boot = owner is not None and (owner.host, owner.machine_id) == (HERE.host, HERE.machine_id or "none")
    is_earlier_boot = is_earlier_boot and owner is not None and owner.boot_id == "another"
    got = is_abandoned(owner, HERE, idle_secs=idle_secs, stale_after_secs=stale_after_secs)
    assert got == (is_earlier_boot or not is_fresh)


@pytest.mark.parametrize("made", range(len(ENGINE_DIRS)))
def test_a_writer_that_died_while_it_made_its_directories_leaves_the_rest_to_the_next(
    tmp_path: Path, made: int
) -> None:
    for name in ENGINE_DIRS[:made]:
        (tmp_path / name).mkdir(parents=True)
    with SyncCheckpointEngine(tmp_path) as engine:
        assert engine.steps() == []
        engine.save(weights(1), step=1).result(TIMEOUT)
    assert all((tmp_path / name).is_dir() for name in ENGINE_DIRS)


# -- clearing ---------------------------------------------------------------------------------------


async def test_trash_is_cleared_and_everything_else_stays(
    storage: GatedStorage, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stays = [f"{ABANDONED_DIR}/1-step_2", f"{CORRUPT_DIR}/step_4", "logs", "step_3"]
    for name in (f"{TRASH_DIR}/step_1", *stays):
        (root / name).mkdir()
        os.utime(root / name, (0, 0))
    (root / protected_name(3)).touch()
    assert await clear(storage, root, caplog) == ["step_1"]
    assert all((root / name).exists() for name in (*stays, LOCK_FILE, protected_name(3)))


async def test_protected_steps_that_a_dead_writer_left_as_trash_stand_again(
    storage: GatedStorage, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3, 4, 5):
        trash = root / TRASH_DIR / f"step_{step:09d}"
        trash.mkdir()
        if step != 2:  # which may be torn
            (trash / METADATA_FILE).touch()
        if step != 5:
            (root / protected_name(step)).touch()
    (root / "step_000000003").mkdir()  # saved anew
    storage.fail("rename", "trash/step_000000004", WriteError(errno.EIO, "broken", "x"))
    assert await clear(storage, root, caplog) == [f"step_{step:09d}" for step in (2, 3, 5)]
    left = [f"step_{step:09d}" for step in (1, 3)]
    assert [path.name for path in sorted(root.glob("*step_*"))] == left
    assert [path.name for path in (root / TRASH_DIR).iterdir()] == ["step_000000004"]
    assert await clear(storage, root, caplog) == []
    assert (root / "step_000000004" / METADATA_FILE).exists()


async def test_a_directory_is_cleared_by_one_rename_first(
    storage: GatedStorage, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An owner that lives all the same finds it gone, and fails; it never commits what is half removed."""
    pending = leave_pending(root, "old-1")
    storage.fail("remove_tree", "*", WriteError(errno.EIO, "broken", "x"))
    assert await clear(storage, root, caplog) == []
    assert not pending.exists()
    assert [path.name for path in root.glob(".aio_ckpt/trash/*")] == ["old-1"]
    assert await clear(storage, root, caplog) == ["old-1"]


async def test_what_cannot_be_cleared_is_logged_and_hides_nothing_else(
    storage: GatedStorage, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = leave_pending(root, "a")
    second = leave_pending(root, "b")
    storage.fail("rename", first.name, WriteError(errno.EACCES, "not yours", str(first)))
    assert await clear(storage, root, caplog) == [second.name]
    assert "could not be cleared" in caplog.text
    assert first.exists()


def test_a_save_whose_directory_another_writer_has_cleared_tells_who_has_taken_over(root: Path) -> None:
    with gated_engine(root) as (engine, storage):
        gate = storage.hold("sync", "*.distcp")
        ticket = engine.save(weights(1), step=1)
        gate.wait_reached()
        (pending,) = root.glob(f"{PENDING_DIR}/*")
        (root / CLAIM_FILE).write_bytes(encoded_owner(changed(session="other", host="elsewhere")))
        shutil.move(pending, root / TRASH_DIR)
        gate.open()
        with pytest.raises(RootError, match="on elsewhere has taken over as the writer"):
            ticket.result(TIMEOUT)
        assert not list(root.glob("step_*"))


def test_leftovers_that_cannot_be_cleared_fail_no_save(root: Path) -> None:
    leave_pending(root, "old-1")
    with gated_engine(root) as (engine, storage):
        storage.fail("rename", "pending/old-1", WriteError(errno.EACCES, "not yours", "x"))
        assert engine.save(weights(1), step=1).result(TIMEOUT).step == 1


async def test_the_status_of_a_file_tells_its_replacement_from_itself(storage: GatedStorage, tmp_path: Path) -> None:
    file, other = tmp_path / "a", tmp_path / "b"
    assert await storage.status(file) is None
    assert await storage.status(file / "below") is None
    identities = set()
    for _ in range(20):  # ext4 gives the inode of what was removed to the next file
        other.touch()
        other.replace(file)
        found = await storage.status(file)
        assert isinstance(found, FileStatus)
        identities.add(found.identity)
    assert len(identities) > 1
    with pytest.raises(WriteError) as caught:
        await storage.touch(tmp_path / "missing")
    assert caught.value.errno == errno.ENOENT
    os.utime(file, (0, 0))
    await storage.touch(file)
    touched = await storage.status(file)
    assert touched is not None
    assert touched.modified_unix > time.time() - 3600
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(ReadError):
        await storage.status(tmp_path / "loop")


# -- several processes ------------------------------------------------------------------------------

WRITER = """
    import sys, torch
    from pathlib import Path
    from gated_storage import gated_engine
    with gated_engine(Path(sys.argv[1])) as (engine, storage):
        engine.save({"w": torch.ones(1000)}, step=4).result(30)
        gate = storage.hold("sync", "*.distcp")
        ticket = engine.save({"w": torch.ones(1000)}, step=5)
        gate.wait_reached()
        print("writing", flush=True)
        sys.stdin.read()
"""


def started(source: str, *args: str) -> subprocess.Popen[str]:
    """A program that has said that it is ready."""
    child = WarmPython(source, *args, options=(), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == "writing\n"
    return child


async def test_a_writer_killed_midway_leaves_the_last_step_and_what_it_left_is_cleared(
    storage: GatedStorage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "root"
    with started(WRITER, str(root)) as child:
        (pending,) = root.glob(f"{PENDING_DIR}/*")
        assert await clear(storage, root, caplog) == []
        child.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, but not yet reaped
        assert pending.exists()
        with gated_engine(root) as (engine, _):
            assert (await engine.steps()) == [4]
            engine.save(weights(2), step=5).result(TIMEOUT)
    assert listing(root) == ["step_000000004", "step_000000005"]


def test_a_second_writer_is_refused_by_name_until_the_first_is_killed(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with started(WRITER, str(root)) as child, SyncCheckpointEngine(root) as second:
        (pending,) = root.glob(f"{PENDING_DIR}/*")
        with pytest.raises(RootError, match=f"locked by another writer, process {child.pid} on "):
            second.save(weights(9), 9)
        with pytest.raises(RootError, match="locked by another writer"):  # and not: there is a newer step
            second.save(weights(4), 4)
        with pytest.raises(RootError):
            second.rollback(4)
        assert second.steps() == [4]
        assert pending.exists()
        child.kill()
        child.wait(TIMEOUT)
        assert second.save(weights(9), 9).result(TIMEOUT).step == 9
        assert second.steps() == [4, 9]
        assert not pending.exists()


COPIER = """
    import shutil, sys, torch
    from pathlib import Path
    from aio_ckpt import SyncCheckpointEngine
    from aio_ckpt.commit import root_claim
    root_claim.HEARTBEAT_SECS = 0.2
    root = Path(sys.argv[1])
    with SyncCheckpointEngine(root) as engine:
        engine.save({"w": torch.ones(10)}, step=1).result(30)
        if sys.argv[2] == "copied":
            shutil.copytree(root, root.with_name("copy"))  # closes a descriptor of the lock's file
        else:
            (root / ".aio_ckpt/lock").unlink()
        engine.save({"w": torch.ones(10)}, step=2).result(30)
        print("writing", flush=True)
        sys.stdin.readline()
        if sys.argv[2] == "copied":
            shutil.rmtree(root.with_name("copy"))
            shutil.copytree(root, root.with_name("copy"))
        else:
            (root / ".aio_ckpt/lock").unlink()
        print("lost", flush=True)
        sys.stdin.readline()
        print(engine.save({"w": torch.ones(10)}, step=9).result(30).step, flush=True)
"""


@pytest.mark.sampled
@pytest.mark.parametrize("how", ["copied", "removed"])
def test_a_writer_that_lost_its_lock_keeps_the_root_by_its_claim(tmp_path: Path, how: str) -> None:
    """The system drops it when any descriptor of its file is closed, and a removed file locks nobody out."""
    root = tmp_path / "root"
    with started(COPIER, str(root), how) as child, SyncCheckpointEngine(root) as second:
        assert child.stdin is not None
        assert child.stdout is not None
        with pytest.raises(RootError, match=f"process {child.pid} on "):
            second.save(weights(3), 3)
        child.stdin.write("\n"), child.stdin.flush()
        assert child.stdout.readline() == "lost\n"
        with pytest.raises(RootError, match=f"process {child.pid} on .* writes here"):
            second.save(weights(3), 3)
        child.stdin.write("\n"), child.stdin.flush()
        assert child.stdout.readline() == "9\n"


def test_a_root_that_was_removed_and_made_anew_is_saved_into(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = tmp_path / "root"
    with SyncCheckpointEngine(root) as engine:
        engine.save(weights(1), 1).result(TIMEOUT)
        shutil.rmtree(root)
        with pytest.raises(RootError, match=r"the root is gone .*: bring it back, or give another root"):
            engine.save(weights(2), 2).result(TIMEOUT)
        root.mkdir()
        engine.save(weights(3), 3).result(TIMEOUT)
        assert engine.steps() == [3]
    assert "the lock file of this engine is gone" in caplog.text


def test_a_save_during_which_the_root_is_removed_says_so(tmp_path: Path) -> None:
    with gated_engine(tmp_path / "root") as (engine, storage):
        engine.save(weights(1), 1).result(TIMEOUT)
        gate = storage.hold("sync_dir", "*")
        saving = engine.save(weights(2), 2)
        gate.wait_reached()
        shutil.rmtree(tmp_path / "root")
        gate.open()
        with pytest.raises(RootError, match="the root is gone"):
            saving.result(TIMEOUT)


def test_a_save_that_ends_before_it_claims_a_root_made_anew_leaves_the_claim_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, gate, begun, renew = tmp_path / "root", threading.Event(), threading.Event(), RootLock.renew

    def slow(lock: RootLock) -> bool:
        begun.set()
        assert gate.wait(TIMEOUT)
        return renew(lock)

    with SyncCheckpointEngine(root) as engine:
        engine.save(weights(1), 1).result(TIMEOUT)
        shutil.rmtree(root)
        root.mkdir()
        monkeypatch.setattr(RootLock, "renew", slow)
        ticket = engine.save(weights(2), 2)
        assert begun.wait(TIMEOUT)
        assert ticket.cancel()
        with pytest.raises(SaveCancelledError):
            ticket.result(TIMEOUT)
        gate.set()
        assert engine.save(weights(3), 3).result(TIMEOUT).step == 3
        assert engine.steps() == [3]


FORKING = """
    import os, sys, torch
    from pathlib import Path
    from aio_ckpt import SyncCheckpointEngine
    engine = SyncCheckpointEngine(sys.argv[1])
    engine.save({"w": torch.ones(10)}, step=1).result(30)
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os.read(read, 1)  # a data loader's worker: it lives on, with every descriptor of its parent
        os._exit(0)
    print("writing", flush=True)
    print(pid, flush=True)
    os.close(read)
    sys.stdin.read()
"""


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_worker_that_outlives_its_parent_does_not_keep_the_lock(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with started(FORKING, str(root)) as child, SyncCheckpointEngine(root) as second:
        assert child.stdout is not None
        worker = int(child.stdout.readline())
        with pytest.raises(RootError):
            second.save(weights(2), 2)
        pid = os.pidfd_open(worker)
        try:
            child.kill()
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
            signal.pidfd_send_signal(pid, 0)  # the worker is there: it waits for a byte that nobody writes
            assert second.save(weights(2), 2).result(TIMEOUT).step == 2
        finally:
            signal.pidfd_send_signal(pid, signal.SIGKILL)
            os.close(pid)
