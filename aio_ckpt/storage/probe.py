"""Probe: tries on a real directory what the engine depends on. Every file that it makes is removed again."""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import anyio

from aio_ckpt.errors import AioCkptError
from aio_ckpt.format.constants import PAGE_BYTES
from aio_ckpt.storage.local import Storage
from aio_ckpt.storage.mounts import Mount, mount_of

_CHUNK_BYTES = 8 << 20
NO_LOCKS = "the claim alone excludes writers; a new one waits for stale_after_secs after a crash"
"""What follows where file locks do not exclude other hosts."""
Verdict = Literal["good", "slower", "bad"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check."""

    check: str
    found: str
    verdict: Verdict
    """``slower``: checkpoints are right, and something costs more. ``bad``: a promise of the engine does not hold."""
    remedy: str = ""
    """What to do about it, or what follows."""


def mount_finding(mount: Mount) -> Finding:
    """Return what the type and the options of a mount tell."""
    return Finding("file system", mount.title, "bad" if mount.is_soft else "good", "; ".join(mount.consequences))


def try_names(folder: Path) -> Iterator[Finding]:
    """Try in the empty directory ``folder`` how names are made, renamed and locked."""
    mount = mount_of(folder.stat().st_dev)
    yield mount_finding(mount)
    yield _tried("exclusive create", lambda: _excludes(folder / "once"), "two writers would not exclude each other")
    yield _tried("replace a file by rename", lambda: _replaces(folder), "no checkpoint can be replaced")
    yield _tried("rename a directory", lambda: _renames(folder), "no step can be committed")
    yield _lock_finding(folder / "lock", mount)
    yield _tried("fsync of a file", lambda: _syncs(folder / "synced"), "nothing can be saved here")
    yield _directory_sync_finding(folder)


def _tried(check: str, attempt: Callable[[], str], what_fails: str) -> Finding:
    """Run ``attempt``, which returns the fault that it found, or an empty string."""
    try:
        fault = attempt()
    except OSError as error:
        fault = error.strerror or str(error)
    return Finding(check, fault or "works", "bad" if fault else "good", what_fails if fault else "")


def _excludes(path: Path) -> str:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    os.close(os.open(path, flags))
    try:
        os.close(os.open(path, flags))
    except FileExistsError:
        return ""
    return "a name was created twice"


def _replaces(folder: Path) -> str:
    old, new = folder / "replaced", folder / "new"
    old.write_bytes(b"old")
    new.write_bytes(b"new")
    os.replace(new, old)
    return "" if old.read_bytes() == b"new" and not new.exists() else "the old content is still there"


def _renames(folder: Path) -> str:
    (folder / "pending").mkdir()
    (folder / "pending" / "file").write_bytes(b"x")
    os.rename(folder / "pending", folder / "step")
    return "" if (folder / "step" / "file").read_bytes() == b"x" else "a file of it is gone"


def _syncs(path: Path) -> str:
    with path.open("wb") as file:
        file.write(b"x")
        file.flush()
        os.fsync(file.fileno())
    return ""


def _lock_finding(path: Path, mount: Mount) -> Finding:
    check = "file locks"
    try:
        with path.open("w") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return Finding(check, error.strerror or str(error), "slower", NO_LOCKS)
    if mount.is_shared and not mount.locks_on_server:
        remedy = "mount with locks on the server (NFS: without nolock and local_lock; Lustre: flock)"
        return Finding(check, "granted, perhaps by this host alone", "slower", remedy)
    return Finding(check, "granted", "good")


def _directory_sync_finding(folder: Path) -> Finding:
    check, number = "fsync of a directory", os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    except OSError as error:
        remedy = "after a power loss, the newest checkpoints may be missing, which a load notices"
        return Finding(check, error.strerror or str(error), "slower", remedy)
    finally:
        os.close(number)
    return Finding(check, "works", "good")


async def try_speed(storage: Storage, path: Path, nbytes: int, workers: int) -> list[Finding]:
    """Write the file ``path``, which does not exist, as a save does, and read it as a load does past the page cache.

    Args:
        storage: Storage whose executor has as many threads as ``workers``.
        workers: Writes and reads in flight at once.
    """
    memory = memoryview(mmap.mmap(-1, _CHUNK_BYTES))
    memory[:] = os.urandom(PAGE_BYTES) * (_CHUNK_BYTES // PAGE_BYTES)
    offsets = range(0, max(nbytes, _CHUNK_BYTES), _CHUNK_BYTES)
    total = len(offsets) * _CHUNK_BYTES
    try:
        begun = time.perf_counter()
        file = await storage.create_data_file(path, total)
        try:
            await _each(offsets, workers, lambda offset: file.write(offset, memory))
            await file.sync()
        finally:
            await file.close()
        written = time.perf_counter()
        reading = await storage.open_data_file(path)
        buffers = [memoryview(mmap.mmap(-1, _CHUNK_BYTES)) for _ in range(workers)]

        async def read(offset: int) -> None:
            buffer = buffers.pop()
            await reading.read_into(offset, buffer)
            buffers.append(buffer)

        try:
            await _each(offsets, workers, read)
        finally:
            await reading.close()
        ended = time.perf_counter()
    except AioCkptError as error:
        return [Finding("write and read", str(error), "bad", "no checkpoint can be saved here")]
    is_direct = file.mode == "direct"
    how = {"direct": "O_DIRECT", "dontcache": "page cache, dropped at once", "buffered": "page cache"}[file.mode]
    through = "" if is_direct else "writes go through the page cache, which costs CPU and memory"
    from_cache = "" if reading.is_direct else "of the page cache"
    return [
        Finding("way of the data", how, "good" if is_direct else "slower", through),
        Finding("write, until durable", f"{total / (written - begun) / 1e9:.2f} GB/s", "good"),
        Finding("read", f"{total / (ended - written) / 1e9:.2f} GB/s", "good", from_cache),
    ]


async def _each(offsets: range, workers: int, act: Callable[[int], Awaitable[None]]) -> None:
    left = iter(offsets)

    async def work() -> None:
        for offset in left:
            await act(offset)

    async with anyio.create_task_group() as group:
        for _ in range(workers):
            group.start_soon(work)
