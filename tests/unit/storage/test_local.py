"""The local file system: data files in each write mode, cancellation, full disks, renames and the lock."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import functools
import itertools
import mmap
import os
import random
import re
import resource
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_examples import examples
from warm_python import WarmPython

from aio_ckpt.errors import CorruptCheckpointError, MismatchError, ReadError, RootError, WriteError
from aio_ckpt.runtime.portal import Executor, Portal, watch_submissions
from aio_ckpt.storage import data_file as datafile
from aio_ckpt.storage import direct_io, directories
from aio_ckpt.storage import local as storage
from aio_ckpt.storage.data_file import DataFile
from aio_ckpt.storage.direct_io import RWF_DONTCACHE
from aio_ckpt.storage.local import Storage
from aio_ckpt.storage.root_lock import RootLock

PAGE = 4096
TIMEOUT = 20.0
MODES = ("direct", "dontcache", "buffered")


class GatedExecutor(Executor):
    """While ``gate`` is set, every call waits for it in its thread; ``before_each`` runs there before a call."""

    def __init__(self, name: str, threads: int) -> None:
        super().__init__(name, threads)
        self.gate: threading.Event | threading.Barrier | None = None
        self.before_each: Callable[[], None] = lambda: None
        self.entered = threading.Semaphore(0)

    def submit(self, fn, /, *args, **kwargs):
        return super().submit(self._wait_and_call, self.gate, fn, *args, **kwargs)

    def _wait_and_call(self, gate, fn, /, *args, **kwargs):
        if gate is not None:
            self.entered.release()
            gate.wait(TIMEOUT)
        self.before_each()
        return fn(*args, **kwargs)


@pytest.fixture
def executor() -> Iterator[GatedExecutor]:
    executor = GatedExecutor("test", 4)
    yield executor
    assert executor.close(TIMEOUT)


@pytest.fixture
def local(executor: GatedExecutor) -> Storage:
    return Storage(executor)


@pytest.fixture(autouse=True)
def no_descriptor_is_left_open() -> Iterator[None]:
    before = open_files()
    yield
    assert open_files() <= before


@pytest.fixture(autouse=True)
async def the_loops_default_executor_is_never_used() -> AsyncIterator[None]:
    class Refusing(ThreadPoolExecutor):
        def submit(self, *args: object, **kwargs: object) -> Future[Any]:
            raise AssertionError("used the loop's default executor")

    asyncio.get_running_loop().set_default_executor(Refusing(1))
    async with asyncio.timeout(60):
        yield


def open_files() -> int:
    """Descriptors of files: what a loop keeps for itself (sockets, epoll) does not count."""
    links = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of listdir itself
            links.append(os.readlink(f"/proc/self/fd/{number}"))
    return sum(link.startswith("/") for link in links)


def is_direct(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


def refuse(patch: pytest.MonkeyPatch, *modes: str, code: int = errno.EINVAL) -> list[int]:
    """Let the file system open files with O_DIRECT and refuse operations of ``modes``. Returns the refusals."""
    refused: list[int] = []

    def check(descriptor: int, flags: int) -> None:
        if ("direct" in modes and is_direct(descriptor)) or ("dontcache" in modes and flags & RWF_DONTCACHE):
            refused.append(code)
            raise OSError(code, os.strerror(code))

    def pwritev(descriptor: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        check(descriptor, flags)
        return write(descriptor, buffers, offset, flags)

    def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        check(descriptor, flags)
        return read(descriptor, buffers, offset, flags)

    write, read = os.pwritev, os.preadv
    patch.setattr(os, "pwritev", pwritev)
    patch.setattr(os, "preadv", preadv)
    direct_io._WARNERS.clear()
    return refused


def storage_of_mode(executor: Executor, mode: str, path: Path, patch: pytest.MonkeyPatch) -> Storage:
    """A storage whose files are written in ``mode``; skips where this machine has no such mode."""
    scratch = path / f"probe-{mode}"
    descriptor = os.open(scratch, os.O_RDWR | os.O_CREAT)
    try:
        if mode == "direct":
            os.close(os.open(scratch, os.O_RDWR | os.O_DIRECT))
        if mode == "dontcache":
            os.pwritev(descriptor, [aligned(bytes(PAGE))], 0, RWF_DONTCACHE)
    except OSError as error:
        pytest.skip(f"{path} has no mode {mode}: {error}")
    finally:
        os.close(descriptor)
        scratch.unlink()
    refuse(patch, *MODES[: MODES.index(mode)])
    return Storage(executor)


def aligned(data: bytes) -> memoryview:
    memory = mmap.mmap(-1, max(len(data), 1))
    memory[: len(data)] = data
    return memoryview(memory)[: len(data)]


def numbers(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


async def until_entered(executor: GatedExecutor, count: int = 1) -> None:
    async with asyncio.timeout(TIMEOUT):
        for _ in range(count):
            while not executor.entered.acquire(blocking=False):
                await asyncio.sleep(0)


@contextlib.contextmanager
def largest_file(nbytes: int) -> Iterator[Callable[[], None]]:
    """A real limit of the kernel: writes fall short at it, then fail with EFBIG. Yields what lifts it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    lift = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (soft, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield lift
    finally:
        lift()


def run_python(source: str, *args: str) -> subprocess.Popen[str]:
    return WarmPython(source, *args, options=(), stdin=subprocess.PIPE, stdout=subprocess.PIPE)


# -- writing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
async def test_concurrent_writes_of_aligned_chunks_land_where_they_belong(
    executor: GatedExecutor, tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = storage_of_mode(executor, mode, tmp_path, monkeypatch)
    data = numbers(64 * PAGE)
    image = aligned(data)
    file = await local.create_data_file(tmp_path / "d", len(data))
    starts = list(range(0, len(data), 4 * PAGE))
    random.Random(1).shuffle(starts)
    async with asyncio.TaskGroup() as group:
        for start in starts:
            group.create_task(file.write(start, image[start : start + 4 * PAGE]))
    await file.sync()
    await file.close()
    assert (file.mode, file.path) == (mode, tmp_path / "d")
    assert (tmp_path / "d").read_bytes() == data


@pytest.mark.parametrize("mode", MODES)
@examples(25)
@given(cuts=st.lists(st.integers(0, 5 * PAGE), max_size=6), shift=st.integers(0, 64), order=st.randoms())
def test_any_cut_of_the_bytes_at_any_address_gives_the_same_file(
    tmp_path_factory: pytest.TempPathFactory,
    mode: str,
    cuts: list[int],
    shift: int,
    order: random.Random,
) -> None:
    data = numbers(5 * PAGE)
    image = aligned(bytes(shift) + data)[shift:]
    bounds = sorted({0, *cuts, len(data)})
    pieces = list(itertools.pairwise(bounds))
    order.shuffle(pieces)
    directory = tmp_path_factory.mktemp("cut")

    async def write() -> None:
        with pytest.MonkeyPatch.context() as patch:
            local = storage_of_mode(portal.executor, mode, directory, patch)
            file = await local.create_data_file(directory / "d", len(data))
        await file.write(0, memoryview(b""))
        async with asyncio.TaskGroup() as group:
            for start, stop in pieces:
                group.create_task(file.write(start, image[start:stop]))
        await file.close()

    portal = Portal("engine", 3)
    portal.start()
    try:
        portal.call(write, timeout=TIMEOUT)
    finally:
        portal.close(TIMEOUT)
    assert (directory / "d").read_bytes() == data


async def test_the_bytes_are_reserved_before_any_is_written(local: Storage, tmp_path: Path) -> None:
    nbytes = 3 << 20
    file = await local.create_data_file(tmp_path / "d", nbytes)
    status = (tmp_path / "d").stat()
    await file.close()
    assert status.st_size == nbytes
    assert status.st_blocks * 512 >= nbytes


@pytest.mark.parametrize("nbytes", [0, 1, PAGE - 1])
async def test_a_file_shorter_than_the_probe_keeps_its_length(local: Storage, tmp_path: Path, nbytes: int) -> None:
    file = await local.create_data_file(tmp_path / "d", nbytes)
    await file.write(0, memoryview(numbers(nbytes)))
    await file.close()
    assert (tmp_path / "d").read_bytes() == numbers(nbytes)


async def test_where_nothing_can_be_reserved_the_length_is_set(
    local: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Libc:
        @staticmethod
        def fallocate(*_: object) -> int:
            ctypes.set_errno(errno.EOPNOTSUPP)
            return -1

    monkeypatch.setattr(datafile, "_LIBC", Libc)
    file = await local.create_data_file(tmp_path / "d", 2 * PAGE)
    await file.close()
    assert (tmp_path / "d").stat().st_size == 2 * PAGE


async def test_a_file_on_a_shared_file_system_costs_one_open_and_no_reservation(
    executor: Executor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS takes unaligned bytes with O_DIRECT. Each further call would ask the server."""
    real, opens, opened = os.pwritev, os.open, list[str]()

    def write(descriptor: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        with monkeypatch.context() as any_alignment:
            any_alignment.setattr(os, "pwritev", real)
            cached = opens(tmp_path / "d", os.O_WRONLY)
            try:
                return os.pwritev(cached, buffers, offset)
            finally:
                os.close(cached)

    def seen(path: Any, *arguments: Any) -> int:
        opened.append(str(path))
        return opens(path, *arguments)

    monkeypatch.setattr(datafile, "is_shared", lambda device: True)
    monkeypatch.setattr(os, "pwritev", write)
    monkeypatch.setattr(os, "open", seen)
    file = await Storage(executor).create_data_file(tmp_path / "d", len(data := numbers(PAGE + 100)))
    assert (tmp_path / "d").stat().st_size == 0
    await file.write(0, aligned(data))
    await file.close()
    monkeypatch.undo()
    assert opened == [str(tmp_path / "d")]
    assert (tmp_path / "d").read_bytes() == data


async def test_a_file_that_was_created_though_o_direct_was_refused_is_created_once_more(
    executor: Executor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """open(2), BUGS: O_CREAT with an O_DIRECT that the file system refuses creates the file and fails."""
    opens = os.open

    def refusing(path: Any, flags: int, *mode: int) -> int:
        if not flags & os.O_DIRECT:
            return opens(path, flags, *mode)
        os.close(opens(path, flags & ~os.O_DIRECT, *mode))
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))

    monkeypatch.setattr(os, "open", refusing)
    file = await Storage(executor).create_data_file(tmp_path / "d", PAGE)
    await file.write(0, aligned(numbers(PAGE)))
    await file.close()
    assert file.mode != "direct"
    assert (tmp_path / "d").read_bytes() == numbers(PAGE)


async def test_an_existing_file_is_never_written_over(local: Storage, tmp_path: Path) -> None:
    (tmp_path / "d").write_bytes(b"precious")
    with pytest.raises(WriteError) as caught:
        await local.create_data_file(tmp_path / "d", PAGE)
    with pytest.raises(WriteError):
        await local.write_file(tmp_path / "d", b"new")
    assert (caught.value.errno, caught.value.filename) == (errno.EEXIST, str(tmp_path / "d"))
    assert isinstance(caught.value.__cause__, FileExistsError)
    assert (tmp_path / "d").read_bytes() == b"precious"


async def test_as_many_writes_run_at_once_as_there_are_writers(
    executor: GatedExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = storage_of_mode(executor, "buffered", tmp_path, monkeypatch)
    file = await local.create_data_file(tmp_path / "d", 3 * PAGE)
    executor.gate = threading.Barrier(3)  # passes only if three threads are in it at the same time
    async with asyncio.TaskGroup() as group:
        for index in range(3):
            group.create_task(file.write(index * PAGE, aligned(bytes([index]) * PAGE)))
    executor.gate = None
    await file.close()
    assert (tmp_path / "d").read_bytes() == b"".join(bytes([index]) * PAGE for index in range(3))


async def test_the_loop_answers_while_a_thread_writes(executor: GatedExecutor, tmp_path: Path) -> None:
    local = Storage(executor)
    file = await local.create_data_file(tmp_path / "d", PAGE)
    executor.gate = gate = threading.Event()
    tasks = [asyncio.create_task(file.write(0, aligned(bytes(PAGE)))), asyncio.create_task(file.sync())]
    await until_entered(executor, 2)  # this loop ran while both were in their threads
    assert not any(task.done() for task in tasks)
    gate.set()
    executor.gate = None
    await asyncio.gather(*tasks)
    await file.close()


# -- modes ----------------------------------------------------------------------------------------


async def test_direct_off_never_opens_with_o_direct(
    executor: GatedExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = refuse(monkeypatch, "direct")
    local = Storage(executor, "off")
    file = await local.create_data_file(tmp_path / "d", PAGE)
    await file.write(0, aligned(bytes(PAGE)))
    await file.close()
    reading = await local.open_data_file(tmp_path / "d")
    assert await reading.read_into(0, aligned(bytes(PAGE))) == PAGE
    await reading.close()
    assert file.mode != "direct"
    assert not reading.is_direct
    assert not refused


async def test_direct_on_refuses_to_fall_back(
    executor: GatedExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "direct" not in {mode async for mode in modes_here(executor, tmp_path)}:
        pytest.skip(f"{tmp_path} takes no direct I/O")
    refuse(monkeypatch, "direct", "dontcache")
    local = Storage(executor, "on")
    file = await local.create_data_file(tmp_path / "d", PAGE)
    with pytest.raises(WriteError, match='direct_io="on" refuses') as caught:
        await file.write(0, aligned(bytes(PAGE)))
    assert caught.value.errno == errno.EINVAL
    await file.close()
    reading = await local.open_data_file(tmp_path / "d")
    with pytest.raises(ReadError, match='direct_io="on" refuses'):
        await reading.read_into(0, aligned(bytes(PAGE)))
    await reading.close()


async def modes_here(executor: Executor, path: Path) -> AsyncIterator[str]:
    file = await Storage(executor).create_data_file(path / "mode", PAGE)
    await file.write(0, aligned(bytes(PAGE)))
    await file.close()
    yield file.mode


async def test_direct_on_leaves_nothing_where_no_file_opens_with_o_direct(
    executor: GatedExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens = os.open

    def without(path: Any, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))
        return opens(path, flags, *mode)

    monkeypatch.setattr(os, "open", without)
    local = Storage(executor, "on")
    with pytest.raises(WriteError, match='direct_io="on" refuses'):
        await local.create_data_file(tmp_path / "d", PAGE)
    assert os.listdir(tmp_path) == []
    (tmp_path / "d").write_bytes(bytes(PAGE))
    with pytest.raises(ReadError, match='direct_io="on" refuses'):
        await local.open_data_file(tmp_path / "d")


@pytest.mark.parametrize("code", [errno.EFAULT, errno.EINVAL])
async def test_direct_operations_that_are_refused_go_through_the_page_cache_with_one_warning(
    executor: GatedExecutor,
    tmp_path: Path,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Lustre refuses pinned memory so, though the file was opened with O_DIRECT."""
    if "direct" not in {mode async for mode in modes_here(executor, tmp_path)}:
        pytest.skip(f"{tmp_path} takes no direct I/O")
    refuse(monkeypatch, "direct", code=code)
    local, data = Storage(executor), numbers(9 * PAGE)
    for name in ("a", "b"):
        file = await local.create_data_file(tmp_path / name, len(data))
        async with asyncio.TaskGroup() as group:
            for start in range(0, len(data), 3 * PAGE):
                group.create_task(file.write(start, aligned(data[start : start + 3 * PAGE])))
        await file.sync()
        await file.close()
        assert file.mode != "direct"
        reading = await local.open_data_file(tmp_path / name)
        assert await reading.read_into(0, view := aligned(bytes(len(data)))) == len(data)
        await reading.close()
        assert bytes(view) == (tmp_path / name).read_bytes() == data
    (warning,) = [record.getMessage() for record in caplog.records if "O_DIRECT" in record.getMessage()]
    assert os.strerror(code) in warning
    assert 'direct_io="off"' in warning


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
async def test_a_direct_write_that_fails_for_another_reason_is_no_fallback(
    executor: GatedExecutor, tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = refuse(monkeypatch, "direct", "dontcache", code=code)
    file = await Storage(executor).create_data_file(tmp_path / "d", PAGE)
    with pytest.raises(WriteError) as caught:
        await file.write(0, aligned(bytes(PAGE)))
    assert caught.value.errno == code
    assert refused == [code]
    await file.close()


async def test_a_file_system_that_refuses_o_direct_at_open_is_written_all_the_same(executor: GatedExecutor) -> None:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm to write to")
    path = Path(f"/dev/shm/test-{os.getpid()}")
    try:
        file = await Storage(executor).create_data_file(path, 2 * PAGE)
        await file.write(0, aligned(numbers(2 * PAGE)))
        await file.sync()
        await file.close()
        reading = await Storage(executor).open_data_file(path)
        assert await reading.read_into(0, view := aligned(bytes(2 * PAGE))) == 2 * PAGE
        await reading.close()
        assert bytes(view) == path.read_bytes() == numbers(2 * PAGE)
    finally:
        path.unlink(missing_ok=True)


# -- short writes and full disks ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "limit"),
    [("direct", 3 * PAGE), *((mode, limit) for mode in MODES[1:] for limit in (3 * PAGE, 3 * PAGE + 100))],
)
async def test_a_write_that_falls_short_is_continued(
    executor: GatedExecutor, tmp_path: Path, mode: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = storage_of_mode(executor, mode, tmp_path, monkeypatch)
    file = await local.create_data_file(tmp_path / "d", 0)
    data = numbers(8 * PAGE)
    sizes: list[int] = []
    with largest_file(limit) as lift:
        real = os.pwritev

        def lift_after_the_first_write(*write: Any) -> int:
            sizes.append((tmp_path / "d").stat().st_size)
            if sizes[-1]:
                lift()
            return real(*write)

        monkeypatch.setattr(os, "pwritev", lift_after_the_first_write)
        await file.write(0, aligned(data))
    await file.close()
    assert limit in sizes
    assert (tmp_path / "d").read_bytes() == data


async def test_what_a_short_direct_write_leaves_unaligned_goes_through_the_page_cache(
    executor: GatedExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stands in for a kernel that stops inside a page; this one does not. It is asked first: NFS takes such bytes."""
    local, real, taken = storage_of_mode(executor, "direct", tmp_path, monkeypatch), os.pwritev, list[bool]()

    def falls_short(descriptor: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        taken.append(is_direct(descriptor))
        count = real(descriptor, buffers, offset, flags)
        return 100 if len(taken) == 1 else count

    monkeypatch.setattr(os, "pwritev", falls_short)
    file = await local.create_data_file(tmp_path / "d", 3 * PAGE)
    await file.write(0, aligned(numbers(3 * PAGE)))
    await file.close()
    assert taken == [True, True, False]
    assert (tmp_path / "d").read_bytes() == numbers(3 * PAGE)


@pytest.mark.parametrize(("mode", "flags"), [("direct", 0), ("dontcache", 0x80)])
async def test_only_the_uncached_mode_asks_for_uncached_writes(
    executor: GatedExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, flags: int
) -> None:
    asked: list[int] = []
    file = await storage_of_mode(executor, mode, tmp_path, monkeypatch).create_data_file(tmp_path / "d", PAGE)

    def pwritev(descriptor: int, buffers: list[memoryview], offset: int, rwf_flags: int = 0) -> int:
        asked.append(rwf_flags)
        return real(descriptor, buffers, offset, rwf_flags)

    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", pwritev)
    await file.write(0, aligned(numbers(PAGE)))  # the first write finds the mode
    await file.write(0, aligned(numbers(100)))  # unaligned: no direct I/O
    await file.close()
    assert asked[-1] == flags


async def test_a_write_that_makes_no_progress_fails_instead_of_repeating(
    executor: GatedExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = await storage_of_mode(executor, "buffered", tmp_path, monkeypatch).create_data_file(tmp_path / "d", PAGE)
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(WriteError, match="nothing of 4096 bytes was written at offset 0"):
        await file.write(0, aligned(bytes(PAGE)))
    await file.close()


@pytest.mark.parametrize("mode", MODES)
async def test_a_write_that_fails_keeps_errno_and_path(
    executor: GatedExecutor, tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = storage_of_mode(executor, mode, tmp_path, monkeypatch)
    file = await local.create_data_file(tmp_path / "d", 0)
    with largest_file(PAGE), pytest.raises(WriteError) as caught:
        await file.write(0, aligned(bytes(3 * PAGE)))
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(tmp_path / "d"))
    assert isinstance(caught.value.__cause__, OSError)
    await file.write(0, aligned(numbers(3 * PAGE)))  # the handle came back
    await file.close()
    assert (tmp_path / "d").read_bytes() == numbers(3 * PAGE)


async def test_a_disk_without_room_is_found_before_a_byte_is_written(local: Storage, tmp_path: Path) -> None:
    with largest_file(PAGE), pytest.raises(WriteError) as caught:
        await local.create_data_file(tmp_path / "d", 3 * PAGE)
    assert caught.value.errno == errno.EFBIG
    assert os.listdir(tmp_path) == []


async def test_a_full_file_system_is_found_when_the_file_is_created(local: Storage, tmp_path: Path) -> None:
    (tmp_path / "small").mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path / "small")], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small tmpfs: {mounted.stderr.strip()}")
    try:
        with pytest.raises(WriteError) as caught:
            await local.create_data_file(tmp_path / "small" / "d", 2 << 20)
        assert caught.value.errno == errno.ENOSPC
        with pytest.raises(WriteError) as caught:
            await local.write_file(tmp_path / "small" / "f", bytes(2 << 20))
        assert caught.value.errno == errno.ENOSPC
        assert os.listdir(tmp_path / "small") == []
        file = await local.create_data_file(tmp_path / "small" / "d", 512 << 10)
        await file.close()
    finally:
        subprocess.run(["umount", str(tmp_path / "small")], check=True)


async def test_a_small_file_that_could_not_be_written_is_removed(local: Storage, tmp_path: Path) -> None:
    with largest_file(PAGE), pytest.raises(WriteError) as caught:
        await local.write_file(tmp_path / "f", bytes(3 * PAGE))
    assert caught.value.errno == errno.EFBIG
    assert os.listdir(tmp_path) == []


# -- cancellation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["write", "sync", "read"])
async def test_a_descriptor_is_closed_only_after_the_thread_that_uses_it_is_done(
    executor: GatedExecutor, tmp_path: Path, what: str
) -> None:
    (tmp_path / "r").write_bytes(bytes(PAGE))
    baseline = open_files()
    local = Storage(executor)
    if what == "read":
        file = await local.open_data_file(tmp_path / "r")
        use = file.read_into(0, aligned(bytes(PAGE)))
    else:
        file = await local.create_data_file(tmp_path / "d", PAGE)
        use = file.write(0, aligned(bytes(PAGE))) if what == "write" else file.sync()
    opened = open_files()
    executor.gate = gate = threading.Event()
    submitted: list[Future[object]] = []
    with watch_submissions(submitted.append):
        task = asyncio.create_task(use)
    await until_entered(executor)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    executor.gate = None
    await file.close()
    await file.close()
    assert open_files() == opened > baseline
    gate.set()
    submitted[-1].result(TIMEOUT)
    assert executor.close(TIMEOUT)  # joins the threads, so that their callbacks have run
    assert open_files() == baseline


async def test_a_write_under_way_when_the_file_is_closed_is_finished_first(
    executor: GatedExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = storage_of_mode(executor, "buffered", tmp_path, monkeypatch)
    file = await local.create_data_file(tmp_path / "d", PAGE)
    executor.gate = gate = threading.Event()
    task = asyncio.create_task(file.write(0, aligned(b"1" * PAGE)))
    await until_entered(executor)
    await file.close()
    gate.set()
    await task
    assert (tmp_path / "d").read_bytes() == b"1" * PAGE


async def test_after_close_a_file_refuses_to_be_used(local: Storage, tmp_path: Path) -> None:
    file = await local.create_data_file(tmp_path / "d", PAGE)
    await file.close()
    reading = await local.open_data_file(tmp_path / "d")
    await reading.close()
    with pytest.raises(WriteError, match="closed"):
        await file.write(0, aligned(bytes(PAGE)))
    with pytest.raises(WriteError, match="closed"):
        await file.sync()
    with pytest.raises(ReadError, match="closed"):
        await reading.read_into(0, aligned(bytes(PAGE)))


async def test_a_cancelled_close_closes_all_the_same(executor: GatedExecutor, tmp_path: Path) -> None:
    baseline = open_files()
    file = await Storage(executor).create_data_file(tmp_path / "d", PAGE)
    executor.gate = gate = threading.Event()
    blockers = [executor.submit(int) for _ in range(4)]  # every thread is busy: the closing waits in the queue
    await until_entered(executor, 4)
    executor.gate = None
    task = asyncio.create_task(file.close())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.set()
    for blocker in blockers:
        blocker.result(TIMEOUT)
    await asyncio.wrap_future(executor.submit(int))
    async with asyncio.timeout(TIMEOUT):
        while open_files() > baseline:
            await asyncio.sleep(0)


async def test_a_creation_that_fails_closes_every_descriptor_though_a_close_tells_of_an_error(
    executor: Executor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a quota that NFS tells late."""
    local, path, opened = Storage(executor), tmp_path / "d", list[int]()
    open_, close, baseline = os.open, os.close, open_files()

    def seen_open(name: Any, *arguments: Any, **options: Any) -> int:
        if Path(name) != path:
            return open_(name, *arguments, **options)
        opened.append(open_(name, *arguments, **options))
        return opened[-1]

    class Full:
        @staticmethod
        def fallocate(*_: object) -> int:
            ctypes.set_errno(errno.ENOSPC)
            return -1

    def failing_close(number: int) -> None:
        close(number)
        if number in opened:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "open", seen_open)
    monkeypatch.setattr(os, "close", failing_close)
    monkeypatch.setattr(datafile, "_LIBC", Full)
    with pytest.raises(WriteError):
        await local.create_data_file(path, PAGE)
    monkeypatch.undo()
    assert len(opened) == 1
    assert open_files() == baseline
    assert not path.exists()


async def test_a_cancelled_creation_leaves_neither_file_nor_descriptor(
    executor: GatedExecutor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = storage_of_mode(executor, "buffered", tmp_path, monkeypatch)
    baseline = open_files()
    executor.gate = gate = threading.Event()
    task = asyncio.create_task(local.create_data_file(tmp_path / "d", PAGE))
    await until_entered(executor)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.set()
    executor.gate = None
    assert executor.close(TIMEOUT)
    assert os.listdir(tmp_path) == []
    assert open_files() == baseline


async def test_a_cancelled_opening_leaves_no_descriptor(executor: GatedExecutor, tmp_path: Path) -> None:
    (tmp_path / "r").write_bytes(bytes(PAGE))
    baseline = open_files()
    executor.gate = gate = threading.Event()
    task = asyncio.create_task(Storage(executor).open_data_file(tmp_path / "r"))
    await until_entered(executor)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.set()
    assert executor.close(TIMEOUT)
    assert open_files() == baseline


# -- reading --------------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("nbytes", [0, 5, 3 * PAGE, 3 * PAGE + 700])
async def test_every_range_reads_as_it_stands_in_the_file(
    executor: GatedExecutor, tmp_path: Path, direct: bool, nbytes: int
) -> None:
    data = numbers(nbytes)
    (tmp_path / "r").write_bytes(data)
    file = await Storage(executor, "auto" if direct else "off").open_data_file(tmp_path / "r")
    if direct and not file.is_direct:
        await file.close()
        pytest.skip(f"{tmp_path} takes no direct reads")
    assert (file.nbytes, file.is_direct, file.path) == (nbytes, direct, tmp_path / "r")
    for offset in (0, 1, PAGE, 2 * PAGE + 512, 3 * PAGE, 4 * PAGE):
        for length in (0, 1, 512, PAGE, 2 * PAGE, 2 * PAGE + 1, 5 * PAGE):
            for shift in (0, 8):
                view = aligned(bytes(length + shift))[shift:]
                count = await file.read_into(offset, view)
                assert bytes(view[:count]) == data[offset : offset + length]
                assert not any(view[count:])
    await file.close()


def bytes_from_disk() -> int:
    """What this process has made the disks read so far."""
    return int(re.search(r"^read_bytes: (\d+)", Path("/proc/self/io").read_text(), re.MULTILINE)[1])  # type: ignore[index]


async def test_what_is_cached_is_taken_from_the_page_cache_and_the_rest_from_the_disk(
    executor: GatedExecutor, tmp_path: Path
) -> None:
    data = numbers(64 * PAGE)
    with (tmp_path / "r").open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    for is_cached, page_cache, wanted in ((True, "pass", 64), (True, "take", 0), (False, "take", 64)):
        with (tmp_path / "r").open("rb") as file:
            file.read() if is_cached else os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        opened = await Storage(executor).open_data_file(tmp_path / "r", page_cache=page_cache)  # type: ignore[arg-type]
        if not opened.is_direct:
            await opened.close()
            pytest.skip(f"{tmp_path} takes no direct reads")
        before, view = bytes_from_disk(), aligned(bytes(64 * PAGE))
        assert await opened.read_into(0, view) == 64 * PAGE
        assert bytes(view) == data
        pages = (bytes_from_disk() - before) // PAGE
        assert pages == wanted if is_cached else pages >= wanted  # a miss makes the kernel read ahead
        await opened.close()


@pytest.mark.parametrize("most", [1 << 30, 3 * PAGE, 1000], ids=["whole", "pages", "odd"])
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("lengths", [(PAGE, 2 * PAGE), (2 * PAGE, 100), (100, PAGE, 0, 3), (5 * PAGE, PAGE), (0, 0)])
async def test_several_views_are_filled_one_after_the_other(
    executor: GatedExecutor, tmp_path: Path, monkeypatch, direct: bool, most: int, lengths: tuple[int, ...]
) -> None:
    """Whatever the kernel leaves of a read, is read by the next one."""
    data = numbers(5 * PAGE + 100)
    (tmp_path / "r").write_bytes(data)
    file = await Storage(executor, "auto" if direct else "off").open_data_file(tmp_path / "r")
    preadv = os.preadv

    monkeypatch.setattr(os, "preadv", lambda *given: min(preadv(*given), most))
    for offset in (0, PAGE, 17):
        views = [aligned(bytes(length)) for length in lengths]
        count = await file.read_into(offset, *views)
        assert count == min(sum(lengths), len(data) - offset)
        assert b"".join(bytes(view) for view in views)[:count] == data[offset : offset + count]
        assert not any(b"".join(bytes(view) for view in views)[count:])
    await file.close()


async def test_a_missing_file_is_a_read_error_with_its_errno(local: Storage, tmp_path: Path) -> None:
    for attempt in (
        local.open_data_file(tmp_path / "x"),
        local.read_file(tmp_path / "x", max_bytes=9),
        local.list_dir(tmp_path / "x"),
    ):
        with pytest.raises(ReadError) as caught:
            await attempt
        assert (caught.value.errno, caught.value.filename) == (errno.ENOENT, str(tmp_path / "x"))
        assert isinstance(caught.value.__cause__, FileNotFoundError)


async def test_a_whole_file_is_read_up_to_the_length_that_is_allowed(local: Storage, tmp_path: Path) -> None:
    await local.write_file(tmp_path / "f", b"12345")
    assert await local.read_file(tmp_path / "f", max_bytes=5) == b"12345"
    with pytest.raises(CorruptCheckpointError, match="5 bytes long, at most 4"):
        await local.read_file(tmp_path / "f", max_bytes=4)


# -- names ----------------------------------------------------------------------------------------


async def test_directories_that_were_made_before_one_could_not_be_made_are_durable(
    local: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next call finds them, and syncs them no more."""
    synced, make = list[Path](), Path.mkdir

    def make_unless_full(path: Path, **options: Any) -> None:
        if path.name == "c":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        make(path, **options)

    monkeypatch.setattr(Path, "mkdir", make_unless_full)
    monkeypatch.setattr(directories, "sync_dir", synced.append)
    with pytest.raises(WriteError) as caught:
        await local.make_dirs(tmp_path / "a" / "b" / "c")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(tmp_path / "a" / "b" / "c"))
    assert synced == [tmp_path, tmp_path / "a"]


async def test_directories_are_made_listed_and_removed(local: Storage, tmp_path: Path) -> None:
    await local.make_dirs(tmp_path / "a" / "b" / "c")
    await local.make_dirs(tmp_path / "a" / "b" / "c")
    await local.make_dir(tmp_path / "a" / "x")
    with pytest.raises(WriteError) as caught:
        await local.make_dir(tmp_path / "a" / "x")
    assert caught.value.errno == errno.EEXIST
    assert await local.list_dir(tmp_path / "a") == ["b", "x"]
    assert await local.exists(tmp_path / "a" / "b")
    await local.remove_tree(tmp_path / "a")
    await local.remove_tree(tmp_path / "a")
    assert not await local.exists(tmp_path / "a" / "b")


async def test_many_files_are_removed_by_several_threads_and_links_not_followed(
    local: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "f").touch()
    directory, threads, are_two, unlink = tmp_path / "d", set[int](), threading.Event(), Path.unlink
    (directory / "below").mkdir(parents=True)
    (directory / "below" / "f").touch()
    (directory / "link").symlink_to(tmp_path / "kept", target_is_directory=True)
    for number in range(100):
        (directory / f"{number}").touch()

    def noted(path: Path, missing_ok: bool = False) -> None:
        threads.add(threading.get_ident())
        if len(threads) > 1:
            are_two.set()
        assert are_two.wait(TIMEOUT), "one thread alone removes"
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", noted)
    await local.remove_tree(directory)
    monkeypatch.setattr(Path, "unlink", unlink)
    assert not directory.exists()
    assert (tmp_path / "kept" / "f").exists()
    await local.remove_tree(tmp_path / "kept" / "f")
    assert not any((tmp_path / "kept").iterdir())


async def test_many_files_are_looked_at_in_order_and_an_error_is_that_of_its_file(
    local: Storage, tmp_path: Path
) -> None:
    for number in range(0, 100, 2):
        (tmp_path / f"{number}").mkdir()
        (tmp_path / f"{number}" / "f").touch()
    (tmp_path / "7").symlink_to("7")
    found = await local.statuses(tmp_path, [f"{number}/f" for number in range(100)])
    assert [isinstance(each, ReadError) for each in found] == [number == 7 for number in range(100)]
    assert found[7].errno == errno.ELOOP
    assert str(tmp_path / "7" / "f") in str(found[7])
    assert [each is None for each in found] == [number % 2 == 1 and number != 7 for number in range(100)]
    assert found[42].identity == (await local.status(tmp_path / "42" / "f")).identity
    assert await local.statuses(tmp_path, []) == []


async def test_not_knowing_whether_a_path_exists_is_an_error_and_no_answer(local: Storage, tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    assert not await local.exists(tmp_path / "f" / "below a file")
    with pytest.raises(ReadError) as caught:
        await local.exists(tmp_path / ("n" * 300))
    assert caught.value.errno == errno.ENAMETOOLONG


async def test_what_is_promised_durable_is_fsynced(
    local: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, str]] = []

    def record(name: str) -> None:
        real = getattr(os, name)

        def sync(descriptor: int) -> None:
            synced.append((name, os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path)))
            real(descriptor)

        monkeypatch.setattr(os, name, sync)

    record("fsync")
    record("fdatasync")
    await local.make_dirs(tmp_path / "a" / "b")
    await local.write_file(tmp_path / "a" / "f", b"1")
    await local.sync_dir(tmp_path / "a")
    file = await local.create_data_file(tmp_path / "a" / "d", PAGE)
    await file.sync()
    await file.close()
    assert synced == [("fsync", "."), ("fsync", "a"), ("fsync", "a/f"), ("fsync", "a"), ("fdatasync", "a/d")]
    with pytest.raises(WriteError):
        await local.sync_dir(tmp_path / "missing")


@pytest.mark.parametrize("has_renameat2", [True, False])
async def test_a_rename_never_replaces_anything(
    local: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_renameat2: bool
) -> None:
    if not has_renameat2:
        monkeypatch.setattr(storage, "_LIBC", object())
    (tmp_path / "src").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "dangling").symlink_to("nowhere")
    for dst in ("empty", "dangling"):
        with pytest.raises(WriteError) as caught:
            await local.rename(tmp_path / "src", tmp_path / dst)
        assert caught.value.errno == errno.EEXIST
        assert str(tmp_path / dst) in str(caught.value)
    await local.rename(tmp_path / "src", tmp_path / "dst")
    assert sorted(os.listdir(tmp_path)) == ["dangling", "dst", "empty"]
    with pytest.raises(WriteError) as caught:
        await local.rename(tmp_path / "src", tmp_path / "dst2")
    assert caught.value.errno == errno.ENOENT


async def test_two_directories_are_exchanged_in_one_step(local: Storage, tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    await local.exchange(tmp_path / "a", tmp_path / "b")
    assert os.listdir(tmp_path / "a") == ["b"]
    assert os.listdir(tmp_path / "b") == ["a"]
    with pytest.raises(WriteError) as caught:
        await local.exchange(tmp_path / "a", tmp_path / "missing")
    assert caught.value.errno == errno.ENOENT


async def test_a_file_system_that_cannot_exchange_says_so(
    local: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "_LIBC", object())
    with pytest.raises(RootError, match="cannot exchange"):
        await local.exchange(tmp_path / "a", tmp_path / "b")


async def test_a_replace_takes_the_place_of_the_old_file(local: Storage, tmp_path: Path) -> None:
    await local.write_file(tmp_path / "f", b"old")
    await local.write_file(tmp_path / "tmp", b"new")
    await local.replace(tmp_path / "tmp", tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == b"new"
    assert not (tmp_path / "tmp").exists()
    await local.remove_file(tmp_path / "f")
    await local.remove_file(tmp_path / "f")
    assert os.listdir(tmp_path) == []
    with pytest.raises(WriteError):
        await local.remove_file(tmp_path)


# -- the lock -------------------------------------------------------------------------------------

HOLDER = """
    import sys
    from pathlib import Path
    from aio_ckpt.errors import RootError
    from aio_ckpt.storage.root_lock import RootLock

    try:
        with RootLock(Path(sys.argv[1])):
            print("held", flush=True)
            sys.stdin.read()
    except RootError as error:
        print(error, flush=True)
    """


def test_the_lock_keeps_other_processes_out_names_the_holder_and_dies_with_it(tmp_path: Path) -> None:
    holder = run_python(HOLDER, str(tmp_path / "lock"))
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RootError, match=f"locked by another writer, process {holder.pid} on "):
            RootLock(tmp_path / "lock")
        holder.kill()
        holder.wait(TIMEOUT)
    RootLock(tmp_path / "lock").release()


def test_a_second_lock_of_the_same_process_is_refused_and_does_not_drop_the_first(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    with RootLock(tmp_path / "lock"):
        for path in (tmp_path / "lock", tmp_path / "link" / "lock"):
            with pytest.raises(RootError, match="another engine of this process"):
                RootLock(path)
        with run_python(HOLDER, str(tmp_path / "lock")) as other:
            message, _ = other.communicate(timeout=60)
        assert f"process {os.getpid()} on" in message
    with RootLock(tmp_path / "lock") as lock:
        lock.release()
        lock.release()


def test_a_lock_whose_file_cannot_be_closed_without_an_error_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS reports there that the name of the holder could not be written."""
    lock, close = RootLock(tmp_path / "lock"), os.close

    def close_with_error(number: int) -> None:
        close(number)
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with monkeypatch.context() as patched:
        patched.setattr(os, "close", close_with_error)
        lock.release()
    RootLock(tmp_path / "lock").release()


def test_a_forked_child_neither_holds_nor_drops_its_parents_lock(tmp_path: Path) -> None:
    source = """
        import os, sys
        from pathlib import Path
        from aio_ckpt.errors import RootError
        from aio_ckpt.storage.root_lock import RootLock

        lock = RootLock(Path(sys.argv[1]))
        pid = os.fork()
        if not pid:
            lock.release()
            try:
                RootLock(Path(sys.argv[1]))
            except RootError as error:
                os._exit(0 if f"process {os.getppid()} " in str(error) else 2)
            os._exit(1)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        """
    with run_python(source, str(tmp_path / "lock")) as parent:
        output, _ = parent.communicate(timeout=60)
    assert output == "0\n"


def test_a_lock_whose_root_is_gone_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(RootError, match=r"the root is gone \(its directory was removed or unmounted\)") as caught:
        RootLock(tmp_path / "missing" / "too" / "lock")
    assert caught.value.errno == errno.ENOENT
    (tmp_path / "missing" / "too").mkdir(parents=True)
    RootLock(tmp_path / "missing" / "too" / "lock").release()


def test_a_lock_that_is_discarded_leaves_no_file_and_whoever_opened_that_file_locks_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, lockf = tmp_path / "lock", fcntl.lockf
    RootLock(path).discard()
    assert not path.exists()

    def lockf_of_a_slow_one(descriptor: int, command: int) -> None:
        monkeypatch.setattr(fcntl, "lockf", lockf)
        path.unlink()  # its holder discards it between our open and our lock
        lockf(descriptor, command)

    monkeypatch.setattr(fcntl, "lockf", lockf_of_a_slow_one)
    files = len(os.listdir("/proc/self/fd"))
    with RootLock(path) as lock, run_python(HOLDER, str(path)) as other:
        message, _ = other.communicate(timeout=60)
        assert "locked by another writer" in message
        path.rename(tmp_path / "moved")
        path.write_text("not ours")
        lock.discard()
    assert path.read_text() == "not ours"
    assert len(os.listdir("/proc/self/fd")) == files


def test_where_files_have_another_number_at_each_look_the_lock_can_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os.path, "samestat", lambda *_: False)
    with RootLock(tmp_path / "lock"):
        assert (tmp_path / "lock").read_text().startswith(f"{os.getpid()} on ")


def test_a_full_disk_keeps_nobody_from_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its holder clears what fills the disk; the note who holds it is for people."""

    def pwrite(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", pwrite)
    with RootLock(tmp_path / "lock"), run_python(HOLDER, str(tmp_path / "lock")) as other:
        message, _ = other.communicate(timeout=60)
    assert "locked by another writer" in message


def test_a_file_system_without_locks_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lockf(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", lockf)
    with RootLock(tmp_path / "lock"):
        assert "no file locks here" in caplog.text


async def test_the_storage_gives_the_lock(local: Storage, tmp_path: Path) -> None:
    with local.lock(tmp_path / "lock") as lock:
        assert lock.path == tmp_path / "lock"


# -- other loops ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_local_storage_works_under_uvloop(tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    uvloop = pytest.importorskip("uvloop")
    executor = Executor("test", 2)

    async def write() -> DataFile:
        local = storage_of_mode(executor, mode, tmp_path, monkeypatch)
        file = await local.create_data_file(tmp_path / "d", 4 * PAGE)
        async with asyncio.TaskGroup() as group:
            for index in range(4):
                group.create_task(file.write(index * PAGE, aligned(bytes([index]) * PAGE)))
        await file.sync()
        await file.close()
        return file

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            assert runner.run(write()).mode == mode
    finally:
        assert executor.close(TIMEOUT)
    assert (tmp_path / "d").read_bytes() == b"".join(bytes([index]) * PAGE for index in range(4))


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
async def test_what_stands_in_place_of_a_file_is_refused_and_never_waited_for(
    local: Storage, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    path = tmp_path / "f"
    make(path)
    try:
        for reading in (local.read_file(path, max_bytes=10), local.open_data_file(path)):
            with pytest.raises(MismatchError, match="f: no regular file"):
                async with asyncio.timeout(TIMEOUT):
                    await reading
    finally:
        with contextlib.suppress(IsADirectoryError):  # lets go whoever waits for a writer after all
            os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))


@pytest.mark.parametrize("failing", [1, 2])
async def test_a_file_whose_status_cannot_be_read_leaves_no_descriptor(
    local: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    path, calls, fstat = tmp_path / "f", itertools.count(1), os.fstat
    path.write_bytes(bytes(PAGE))

    def fail(descriptor: int) -> os.stat_result:
        if next(calls) == failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return fstat(descriptor)

    for reading in (local.read_file(path, max_bytes=PAGE), local.open_data_file(path)):
        before, calls = set(os.listdir("/proc/self/fd")), itertools.count(1)
        with monkeypatch.context() as patch, contextlib.suppress(ReadError):
            patch.setattr(os, "fstat", fail)
            opened = await reading
            if not isinstance(opened, bytes):
                await opened.close()
        assert {*os.listdir("/proc/self/fd")} <= before


def test_a_lock_that_cannot_be_looked_at_is_a_root_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(descriptor: int) -> os.stat_result:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with RootLock(tmp_path / "lock") as lock:
        with monkeypatch.context() as patch, pytest.raises(RootError, match="cannot see whether the lock") as caught:
            patch.setattr(os, "fstat", fail)
            lock.renew()
        assert (caught.value.errno, caught.value.filename) == (errno.EIO, str(tmp_path / "lock"))
        lock.renew()


async def test_a_directory_that_is_made_in_the_moment_in_which_it_is_listed_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader on another host looks for steps while the writer makes the root."""
    executor, root, listdir = Executor("test", 1), tmp_path / "root", os.listdir

    def list_then_make(path: Path) -> list[str]:
        try:
            return listdir(path)
        finally:
            root.mkdir(exist_ok=True)

    monkeypatch.setattr(os, "listdir", list_then_make)
    assert await storage.names_in(Storage(executor), root) == []
    assert root.exists()
    assert executor.close(TIMEOUT)
