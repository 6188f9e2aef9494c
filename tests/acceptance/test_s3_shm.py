"""S3: CPU shared memory staging (Megatron-LM #4355): one anonymous segment, reused, exactly as large as needed."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import re
import resource
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from builders import steps_dir
from image_files import MIB, assert_uniform, raw_of, uniform
from killed_trainer import named_segments, train_until_killed
from warm_python import run_warm
from watched_writes import TIMEOUT, WatchedCondition, WatchedStorage, watched_engine

from aio_ckpt import EngineConfig, SyncCheckpointEngine
from aio_ckpt.errors import BudgetExceededError
from aio_ckpt.memory.arena import HUGE_PAGE_BYTES
from aio_ckpt.ranks.coordinator import SoloCoordinator
from aio_ckpt.ranks.messages import Topic

pytestmark = pytest.mark.usefixtures("chunks_of_4_mib")

SHM = EngineConfig(staging="shm", debug=True)
COUNT = 5

_SEGMENT = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ (\d+) +/memfd:aio_ckpt", re.MULTILINE)


_OTHERS: set[int] = set()
"""Inodes of the segments that tests before this one left mapped."""


@pytest.fixture(autouse=True)
def own_segments_only() -> None:
    gc.collect()
    _OTHERS.clear()
    _OTHERS.update(segments())


def segments(maps: str | None = None) -> dict[int, tuple[int, int]]:
    """Inode -> (address, bytes) of every mapped segment of this process."""
    found: dict[int, tuple[int, int]] = {}
    for begin, end, inode in _SEGMENT.findall(maps or Path("/proc/self/maps").read_text()):
        if int(inode) in _OTHERS:
            continue
        address, nbytes = found.get(int(inode), (int(begin, 16), 0))
        found[int(inode)] = (address, nbytes + int(end, 16) - int(begin, 16))
    return found


def open_data_files() -> int:
    """Descriptors of data files: others may be open or just closed now."""
    names = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            names.append(os.readlink(f"/proc/self/fd/{number}"))
    return len([name for name in names if name.endswith(".distcp")])


# -- 1: allocated once ----------------------------------------------------------------------------


def test_values_changed_in_place_reach_their_own_file_through_one_segment(tmp_path: Path) -> None:
    state = uniform(COUNT, 4 * MIB, 0.0)
    seen = []
    with SyncCheckpointEngine(tmp_path, SHM) as engine:
        for _ in range(3):
            torch._foreach_add_(list(state.values()), 1.0)
            assert engine.save(state).result(TIMEOUT) is not None
            seen.append((segments(), open_data_files()))
    assert len(seen[0][0]) == 1
    assert seen[0] == seen[1] == seen[2]
    assert segments() == {}
    for step in (1, 2, 3):
        assert_uniform(steps_dir(tmp_path, step), float(step), count=COUNT)


# -- 2: overlapping saves -------------------------------------------------------------------------


class RecordingCoordinator(SoloCoordinator):
    """Counts the agreements, and on which thread they were made."""

    def __init__(self) -> None:
        self.exchanges: list[tuple[Topic, str]] = []

    async def gather(self, topic: Topic, message: bytes, *, stage: str) -> tuple[bytes, ...]:
        self.exchanges.append((topic, threading.current_thread().name))
        return await super().gather(topic, message, stage=stage)


def test_a_save_beside_one_that_is_being_written_gets_a_segment_of_its_own(tmp_path: Path) -> None:
    storage = WatchedStorage()
    gate = storage.gate()
    storage.on_write = lambda write: gate.hold() if write.file == 0 else None
    state = uniform(COUNT, 4 * MIB, 1.0)
    with watched_engine(tmp_path, storage, staging="shm", max_in_flight=2) as engine:
        engine.save(state, step=1)
        gate.wait_held(4)
        torch._foreach_add_(list(state.values()), 1.0)
        second = engine.save(state, step=2)
        assert len(segments()) == 2
        torch._foreach_add_(list(state.values()), 1.0)
        gate.open()
        assert second.result(TIMEOUT) is not None
    assert storage.torn == []
    assert_uniform(steps_dir(tmp_path, 1), 1.0, count=COUNT)
    assert_uniform(steps_dir(tmp_path, 2), 2.0, count=COUNT)


def test_without_room_for_a_second_segment_the_save_waits_and_agrees_on_nothing_meanwhile(tmp_path: Path) -> None:
    storage = WatchedStorage()
    gate = storage.gate()
    storage.on_write = lambda write: gate.hold() if write.file == 0 else None
    coordinator = RecordingCoordinator()
    state = uniform(COUNT, 4 * MIB, 1.0)
    with (
        watched_engine(tmp_path, storage, coordinator, staging="shm", max_in_flight=2, budget_bytes=24 * MIB) as engine,
        ThreadPoolExecutor(1) as trainer,
    ):
        lent = engine._resources.lifetime._changed = WatchedCondition()
        engine.save(state, step=1)
        gate.wait_held(4)
        torch._foreach_add_(list(state.values()), 1.0)
        saving = trainer.submit(engine.save, state, 2)
        assert lent.waiting.wait(TIMEOUT)
        waits_since = time.perf_counter()
        assert len(segments()) == 1
        assert coordinator.exchanges == []
        assert not saving.done()
        waited_secs = time.perf_counter() - waits_since
        gate.open()
        second = saving.result(TIMEOUT)
        torch._foreach_add_(list(state.values()), 1.0)
        report = second.result(TIMEOUT)
        assert report is not None
        assert waited_secs <= report.timings.waited_secs <= report.timings.blocked_secs
        assert len(segments()) == 1
    assert [topic for topic, _ in coordinator.exchanges] == [Topic("save", 1), Topic("save", 2)]
    assert all(thread.endswith("-loop") for _, thread in coordinator.exchanges)
    assert storage.torn == []
    assert_uniform(steps_dir(tmp_path, 1), 1.0, count=COUNT)
    assert_uniform(steps_dir(tmp_path, 2), 2.0, count=COUNT)


# -- 3: many tensors ------------------------------------------------------------------------------


@pytest.mark.slow
def test_five_thousand_tensors_take_as_many_files_and_segments_as_five(tmp_path: Path) -> None:
    """While the one chunk that they fill is held in a thread."""
    taken = []
    for count in (5, 5000):
        storage = WatchedStorage()
        gate = storage.gate()
        storage.on_write = lambda write, gate=gate: gate.hold()
        with watched_engine(tmp_path / str(count), storage, staging="shm") as engine:
            before = open_data_files()
            ticket = engine.save(uniform(count, 4, 1.0), step=1)
            gate.wait_held()
            taken.append((open_data_files() - before, len(segments())))
            gate.open()
            assert ticket.result(TIMEOUT) is not None
    assert taken[0] == taken[1]
    assert taken[0][1] == 1
    assert_uniform(steps_dir(tmp_path / "5000", 1), 1.0, count=5000)


# -- 4: no room -----------------------------------------------------------------------------------


def test_memory_that_cannot_be_had_is_an_error_with_a_remedy_and_the_engine_goes_on(tmp_path: Path) -> None:
    """The limit of a file's size stands in for a full machine: it holds for memory files too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with SyncCheckpointEngine(tmp_path, SHM) as engine:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 * MIB, hard))
        try:
            with pytest.raises(BudgetExceededError, match='lower budget_bytes or use staging="pageable"'):
                engine.save(uniform(COUNT, 4 * MIB, 1.0), step=1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert (segments(), engine.lifetime.leases, engine.lifetime.arenas) == ({}, 0, 0)
        assert engine.save(uniform(COUNT, 4 * MIB, 2.0), step=1).result(TIMEOUT) is not None
    assert_uniform(steps_dir(tmp_path, 1), 2.0, count=COUNT)


NO_ROOM = """
    import os, sys
    from aio_ckpt import EngineConfig, SyncCheckpointEngine
    from aio_ckpt.errors import BudgetExceededError
    from image_files import MIB, uniform

    # Stands in for the kernel's own memory file system, which has no limit that a test could reach.
    os.memfd_create = lambda name, flags: os.open(sys.argv[2], os.O_TMPFILE | os.O_RDWR)
    with SyncCheckpointEngine(sys.argv[1], EngineConfig(staging="shm")) as engine:
        try:
            engine.save(uniform(4, 4 * MIB, 1.0), step=1)
        except BudgetExceededError as error:
            print(error)
        engine.save(uniform(1, MIB, 1.0), step=1).result(60)
        print(engine.steps())
"""


@pytest.fixture
def tiny_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """Shared memory of 4 MiB."""
    place = tmp_path / "shm"
    place.mkdir()
    if os.geteuid():
        pytest.skip("mounting a small tmpfs needs root")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


def test_shared_memory_that_is_too_small_is_an_error_and_not_a_bus_error(tmp_path: Path, tiny_tmpfs: Path) -> None:
    done = run_warm(NO_ROOM, str(tmp_path / "root"), str(tiny_tmpfs))
    assert (done.returncode, done.stderr) == (0, "")
    message, steps = done.stdout.splitlines()
    assert 'staging="shm": no ' in message
    assert "No space left on device" in message
    assert steps == "[1]"


# -- 5: the structure changes ---------------------------------------------------------------------


def test_after_a_change_of_structure_the_data_is_right_and_the_old_segment_is_gone(tmp_path: Path) -> None:
    """The third save adds, the fourth grows, the fifth shrinks."""
    states = [
        {"a": torch.full((MIB,), 1.0)},
        {"a": torch.full((MIB,), 2.0)},
        {"a": torch.full((MIB,), 3.0), "b": torch.full((3 * MIB,), 30.0)},
        {"a": torch.full((8 * MIB,), 4.0), "b": torch.full((3 * MIB,), 40.0)},
        {"a": torch.full((2 * MIB,), 5.0), "b": torch.full((7,), 50.0)},
    ]
    seen, files = [], []
    with SyncCheckpointEngine(tmp_path, SHM) as engine:
        for state in states:
            report = engine.save(state).result(TIMEOUT)
            assert report is not None
            ((inode, (_, nbytes)),) = segments().items()
            assert nbytes == engine.lifetime.arena_bytes
            assert nbytes - report.image_bytes < HUGE_PAGE_BYTES
            seen.append(inode)
            files.append(open_data_files())
    assert len(set(files)) == 1
    assert [seen[0] == seen[1], *(a != b for a, b in itertools.pairwise(seen[1:]))] == [True] * 4
    for step, state in enumerate(states, start=1):
        found = raw_of(steps_dir(tmp_path, step))
        assert {name: raw == state[name].numpy().tobytes() for name, raw in found.items()} == dict.fromkeys(state, True)


# -- 6: the trainer is killed ---------------------------------------------------------------------


def test_after_a_kill_no_segment_is_left(tmp_path: Path) -> None:
    before = named_segments()
    killed = train_until_killed(tmp_path, "shm")
    assert len(segments(killed.maps)) == 1
    assert killed.named_segments <= before
    assert named_segments() <= before
    with SyncCheckpointEngine(tmp_path, SHM) as engine:
        assert engine.save(uniform(4, 4 * MIB, 3.0)).result(TIMEOUT) is not None
        assert engine.steps() == [1, 2]
    assert_uniform(steps_dir(tmp_path, 2), 3.0, count=4)


# -- 7: no larger than needed ---------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize("nbytes", [4, 300_000, 5 * MIB + 4, 17 * MIB, 33 * MIB + 12])
def test_the_arena_is_the_image_rounded_up_to_a_page_and_to_no_power_of_two(tmp_path: Path, nbytes: int) -> None:
    with SyncCheckpointEngine(tmp_path, SHM) as engine:
        report = engine.save(uniform(1, nbytes, 1.0)).result(TIMEOUT)
        assert report is not None
        assert report.image_bytes <= nbytes + 2 * 4096
        spare = engine.lifetime.arena_bytes - report.image_bytes
    assert 0 <= spare < (HUGE_PAGE_BYTES if nbytes >= 16 * MIB else 64 << 10)


# -- 9: memfd -------------------------------------------------------------------------------------


def test_a_segment_has_no_name_in_dev_shm(tmp_path: Path) -> None:
    storage = WatchedStorage()
    gate = storage.gate()
    storage.on_write = lambda write: gate.hold()
    before = named_segments()
    with watched_engine(tmp_path, storage, staging="shm") as engine:
        engine.save(uniform(COUNT, 4 * MIB, 1.0))
        gate.wait_held()
        assert len(segments()) == 1
        assert named_segments() <= before


IN_A_CONTAINER = """
    import os, sys
    from aio_ckpt import EngineConfig, SyncCheckpointEngine
    from image_files import MIB, uniform
    from tests.campaigns.crash.disks import private_mounts, run

    private_mounts()
    run("mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/dev/shm")
    print(os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize)
    with SyncCheckpointEngine(sys.argv[1], EngineConfig(staging="shm")) as engine:
        print(engine.save(uniform(5, 4 * MIB, 1.0), step=1).result(60).step)
"""


def test_a_dev_shm_smaller_than_the_image_does_not_matter(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("a mount namespace with a small /dev/shm needs root")
    trial = ["unshare", "-m", "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", "/dev/shm"]
    if (tried := subprocess.run(trial, capture_output=True, text=True)).returncode:
        pytest.skip(f"no mount namespace here: {tried.stderr.strip()}")
    done = run_warm(IN_A_CONTAINER, str(tmp_path))
    assert (done.stdout, done.stderr) == ("65536\n1\n", "")
    assert_uniform(steps_dir(tmp_path, 1), 1.0, count=COUNT)
