"""One engine writes under a root, on whatever host: who gets the claim, and who learns that it is lost."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from lock_holder import locked_by_another_process

from aio_ckpt.commit import root_claim as claims
from aio_ckpt.commit.engine_dirs import make_engine_dirs
from aio_ckpt.commit.owner import Owner, encoded_owner
from aio_ckpt.commit.root_claim import Claim
from aio_ckpt.errors import RootError, WriteError
from aio_ckpt.format.root_names import CLAIM_FILE, LOCK_FILE, TRASH_DIR
from aio_ckpt.runtime.portal import Executor
from aio_ckpt.storage.local import Storage
from aio_ckpt.storage.mounts import Mount

STALE_SECS = 600.0
LOCAL = Mount("ext4", frozenset())
NFS = Mount("nfs4", frozenset({"local_lock=none"}))
NOLOCK = Mount("nfs", frozenset({"local_lock=all"}))


def owner(session: str, host: str, **fields: object) -> Owner:
    given: dict[str, object] = {
        "machine_id": host,
        "boot_id": f"boot of {host}",
        "pid_namespace": "1",
        "pid": os.getpid(),
        "started_ticks": 0,
        "heartbeat_unix": 0.0,
    }
    return msgspec.convert({"session": session, "host": host} | given | fields, Owner)


class Root:
    def __init__(self, path: Path, storage: Storage) -> None:
        self.path = path
        self.storage = storage
        self.file = path / CLAIM_FILE

    def claim(self, session: str, host: str, **fields: object) -> Claim:
        return Claim(self.storage, self.path, owner(session, host, **fields), stale_after_secs=STALE_SECS)

    def age(self, secs: float) -> None:
        seen = self.file.stat().st_mtime - secs
        os.utime(self.file, (seen, seen))


@pytest.fixture
async def root(tmp_path: Path) -> AsyncIterator[Root]:
    executor = Executor("claims", 2)
    storage = Storage(executor)
    await make_engine_dirs(storage, tmp_path)
    (tmp_path / LOCK_FILE).touch()
    try:
        yield Root(tmp_path, storage)
    finally:
        executor.shutdown()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "_POLL_SECS", 0.02)
    monkeypatch.setattr(claims, "SILENCE_SECS", 0.1)


async def test_the_first_engine_gets_the_claim_and_keeps_it(root: Root) -> None:
    first = root.claim("a", "one")
    await first.take(NOLOCK, is_locked=True)
    await first.take(NOLOCK, is_locked=True)
    await first.check()


async def test_without_locks_another_host_is_refused_by_name(root: Root) -> None:
    await root.claim("a", "one").take(NOLOCK, is_locked=True)
    with pytest.raises(RootError, match=r"process \d+ on one writes here.*let it end"):
        await root.claim("b", "two").take(NOLOCK, is_locked=True)


async def test_a_host_of_the_same_name_and_machine_id_is_refused_too(root: Root) -> None:
    await root.claim("a", "one").take(NOLOCK, is_locked=True)
    with pytest.raises(RootError, match="writes here"):
        await root.claim("b", "one").take(NOLOCK, is_locked=True)


async def test_a_claim_without_heartbeat_is_void_after_the_limit(root: Root) -> None:
    first, second = root.claim("a", "one"), root.claim("b", "two")
    await first.take(NOLOCK, is_locked=True)
    root.age(STALE_SECS + 5)
    await second.take(NOLOCK, is_locked=True)
    await second.check()


async def test_a_writer_that_was_taken_over_learns_it_by_name(root: Root) -> None:
    first = root.claim("a", "one")
    await first.take(NOLOCK, is_locked=True)
    root.age(STALE_SECS + 5)
    await root.claim("b", "two").take(NOLOCK, is_locked=True)
    with pytest.raises(RootError, match="on two has taken over"):
        await first.check()


async def test_a_claim_whose_file_was_removed_is_lost(root: Root) -> None:
    first = root.claim("a", "one")
    await first.take(NOLOCK, is_locked=True)
    root.file.unlink()
    with pytest.raises(RootError, match="is gone"):
        await first.check()


async def test_a_process_of_this_host_that_is_gone_is_followed_at_once(root: Root) -> None:
    await root.claim("a", "one", started_ticks=1).take(NOLOCK, is_locked=True)
    await root.claim("b", "one").take(NOLOCK, is_locked=True)


async def test_a_granted_lock_and_no_heartbeat_prove_the_death_of_an_engine_elsewhere(root: Root) -> None:
    await root.claim("a", "one").take(NFS, is_locked=True)
    second = root.claim("b", "two")
    await second.take(NFS, is_locked=True)
    await second.check()


async def test_a_heartbeat_beats_a_granted_lock(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "HEARTBEAT_SECS", 0.01)
    monkeypatch.setattr(claims, "SILENCE_SECS", 60.0)
    first = root.claim("a", "one")
    await first.take(NFS, is_locked=True)
    root.age(1.0)
    async with anyio.create_task_group() as group:
        group.start_soon(first.keep)
        with pytest.raises(RootError, match="writes here"):
            await root.claim("b", "two").take(NFS, is_locked=True)
        group.cancel_scope.cancel()
    await first.check()


async def test_a_silence_that_outlasts_a_call_is_awaited_further_by_the_next(
    root: Root, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(claims, "SILENCE_SECS", 0.3)
    await root.claim("a", "one").take(NFS, is_locked=True)
    second = root.claim("b", "two")
    calls = 1
    with pytest.raises(RootError, match=r"on one claims the root.*It is dead if.*more.*call again"):
        await second.take(NFS, is_locked=True, limit_secs=0.05)
    while True:
        calls += 1
        try:
            await second.take(NFS, is_locked=True, limit_secs=0.05)
        except RootError:
            continue
        break
    await second.check()
    assert 2 <= calls <= 7
    waits = [record.levelname for record in caplog.records if "waiting 0 s for its heartbeat" in record.message]
    assert waits == ["WARNING"], "one line tells what is waited for"


async def test_a_heartbeat_between_two_calls_begins_the_silence_anew(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "SILENCE_SECS", 60.0)
    await root.claim("a", "one").take(NFS, is_locked=True)
    second = root.claim("b", "two")
    for _ in range(2):
        root.age(1.0)
        with pytest.raises(RootError, match="It is dead if its heartbeat stays away for 60 s more"):
            await second.take(NFS, is_locked=True, limit_secs=0.01)


async def test_a_writer_that_was_taken_over_renews_no_heartbeat(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = root.claim("a", "one"), root.claim("b", "two")
    await first.take(NOLOCK, is_locked=True)
    root.age(STALE_SECS + 5)
    await second.take(NOLOCK, is_locked=True)
    root.age(100.0)
    seen = root.file.stat().st_mtime
    monkeypatch.setattr(claims, "HEARTBEAT_SECS", 0.01)
    monkeypatch.setattr(claims, "_BEATS_A_LOOK", 1)
    with anyio.move_on_after(0.1):
        await first.keep()
    assert root.file.stat().st_mtime == seen
    with anyio.move_on_after(0.1):
        await second.keep()
    assert root.file.stat().st_mtime > seen


async def test_a_torn_claim_is_taken_over_though_the_trash_still_holds_another(root: Root) -> None:
    for number in range(2):
        root.file.write_bytes(b"{")
        root.age(STALE_SECS + 5 + number)
        claim = root.claim(f"s{number}", "two")
        await claim.take(NOLOCK, is_locked=True)
        await claim.release()


async def test_a_released_claim_is_free_and_that_of_another_stays(root: Root) -> None:
    first, second = root.claim("a", "one"), root.claim("b", "two")
    await first.take(NOLOCK, is_locked=True)
    await second.release()
    await first.check()
    await first.release()
    await second.take(NOLOCK, is_locked=True)


async def test_of_many_engines_that_take_over_at_once_one_gets_the_claim(root: Root) -> None:
    await root.claim("dead", "one").take(NOLOCK, is_locked=True)
    root.age(STALE_SECS + 5)
    others = [root.claim(f"s{number}", f"host{number}") for number in range(8)]
    won: list[Claim] = []

    async def attempt(claim: Claim) -> None:
        try:
            await claim.take(NOLOCK, is_locked=True)
        except RootError:
            return
        won.append(claim)

    async with anyio.create_task_group() as group:
        for claim in others:
            group.start_soon(attempt, claim)
    assert len(won) == 1
    await won[0].check()


async def test_an_engine_that_comes_late_to_a_takeover_puts_the_new_claim_back(root: Root) -> None:
    """It has read the claim of the dead engine, and the first taker has cleared the trash since."""
    await root.claim("dead", "one").take(NOLOCK, is_locked=True)
    root.age(STALE_SECS + 1)
    first, late = root.claim("a", "two"), root.claim("b", "three")
    await first.take(NOLOCK, is_locked=True)
    for aside in (root.path / TRASH_DIR).iterdir():
        aside.unlink()
    assert not await late._remove(owner("dead", "one"), 0.0)
    await first.check()
    assert not any((root.path / TRASH_DIR).iterdir())


async def test_a_torn_claim_is_void_after_the_limit(root: Root) -> None:
    root.file.write_bytes(b"{")
    with pytest.raises(RootError, match="another writer"):
        await root.claim("b", "two").take(NOLOCK, is_locked=True)
    root.age(STALE_SECS + 5)
    await root.claim("b", "two").take(NOLOCK, is_locked=True)


async def test_on_a_local_file_system_a_granted_lock_is_proof_enough(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "SILENCE_SECS", 600.0)
    await root.claim("a", "one").take(LOCAL, is_locked=True)
    await root.claim("b", "two").take(LOCAL, is_locked=True)


@pytest.mark.parametrize(
    ("holder", "mount", "is_locked", "silence"),
    [
        ({"boot_id": "before"}, LOCAL, False, 0.0),
        ({"boot_id": "before"}, NOLOCK, False, 0.1),
        ({"started_ticks": 1}, NOLOCK, False, 0.0),
        ({}, LOCAL, False, None),
        ({"host": "two"}, NFS, True, 0.1),
        ({"host": "two"}, NFS, False, None),
        ({"host": "two"}, NOLOCK, True, None),
    ],
    ids=[
        "a reboot, local",
        "a reboot, or another host of this name",
        "a process that is gone",
        "a process that runs",
        "a lock of the server",
        "no lock",
        "a lock that stays on the host",
    ],
)
def test_what_proves_a_death(holder: dict[str, object], mount: Mount, is_locked: bool, silence: float | None) -> None:
    here = owner("b", "one", pid_namespace=Owner.of_this_process("x").pid_namespace)
    other = msgspec.structs.replace(here, session="a", **holder)
    assert claims.silence_proving_death(other, here, mount, is_locked=is_locked) == silence


async def test_a_process_of_this_host_that_runs_on_is_refused_though_its_lock_was_dropped(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process loses its lock silently if it closes any descriptor of the file, as a copy of the root does."""
    here = Owner.of_this_process("b")
    parent = msgspec.structs.replace(here, session="a", pid=os.getppid(), started_ticks=0)
    assert claims.silence_proving_death(parent, here, LOCAL, is_locked=True) == 0.1
    assert claims.silence_proving_death(parent, here, LOCAL, is_locked=False) is None
    itself = msgspec.structs.replace(here, session="a")
    assert claims.silence_proving_death(itself, here, LOCAL, is_locked=True) == 0.0


class FullStorage(Storage):
    """A disk without room for one more file."""

    taken: Path | None = None

    def write_file(self, path: Path, *parts: bytes) -> Any:
        if path == self.taken and path.exists():
            return super().write_file(path, *parts)

        async def refuse() -> None:
            raise WriteError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

        return refuse()


async def test_on_a_full_local_disk_the_lock_alone_excludes_others_so_that_a_step_can_be_deleted(root: Root) -> None:
    root.storage = FullStorage(root.storage._executor)
    claim = root.claim("a", "one")
    await claim.take(LOCAL, is_locked=True)
    await claim.check()


async def test_on_a_full_shared_disk_the_claim_names_the_remedy(root: Root) -> None:
    root.storage = FullStorage(root.storage._executor)
    with pytest.raises(RootError, match=r"no room for this one small file.*\.aio_ckpt/pending"):
        await root.claim("a", "one").take(NFS, is_locked=True)


async def test_on_a_full_shared_disk_no_line_tells_of_a_takeover_that_failed(
    root: Root, caplog: pytest.LogCaptureFixture
) -> None:
    await root.claim("a", "one").take(NOLOCK, is_locked=True)
    root.age(STALE_SECS + 5)
    root.storage, other = FullStorage(root.storage._executor), root.storage
    root.storage.taken = root.file
    with pytest.raises(RootError, match="no room"):
        await root.claim("b", "two").take(NOLOCK, is_locked=True)
    assert "writes here now" not in caplog.text
    root.storage = other
    await root.claim("b", "two").take(NOLOCK, is_locked=True)


@pytest.mark.parametrize("mount", [NFS, NOLOCK])
async def test_on_a_shared_file_system_a_lock_that_is_refused_proves_nothing(root: Root, mount: Mount) -> None:
    """A server keeps the lock of a host that was lost."""
    with locked_by_another_process(root.path / LOCK_FILE) as pid:
        with claims.lock_root(root.storage, root.path, mount) as lock:
            assert not lock.is_granted
            assert not lock.renew()
            with pytest.raises(RootError, match="another engine of this process"):
                claims.lock_root(root.storage, root.path, mount)
        with pytest.raises(RootError, match=f"locked by another writer, process {pid}"):
            claims.lock_root(root.storage, root.path, LOCAL)
    with claims.lock_root(root.storage, root.path, mount) as lock:
        assert lock.is_granted


async def test_a_forged_claim_names_no_path_and_steers_no_terminal(root: Root) -> None:
    for session in ("../../x", "a" * 65, ""):
        root.file.write_bytes(encoded_owner(msgspec.structs.replace(owner("a", "one"), session=session)))
        assert await claims.claim_holder(root.storage, root.path) is None
    root.file.write_bytes(encoded_owner(owner("a", "one\x1b[2J")))
    with pytest.raises(RootError, match=r"on 'one\\x1b\[2J' writes here"):
        await root.claim("b", "two").take(NOLOCK, is_locked=True)


async def test_a_directory_in_the_place_of_the_claim_is_no_claim(root: Root) -> None:
    root.file.mkdir()
    claim = root.claim("a", "one")
    await claim.take(LOCAL, is_locked=True)
    await claim.check()
