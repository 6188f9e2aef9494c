"""What a ``save_file()`` of safetensors files replaces: the old model or the new one is there, private if it was."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import logging
import os
import shutil
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from forwarding_storage import Call, ForwardingStorage
from gated_storage import TIMEOUT, gated_engine
from safetensors.torch import load_file
from slow import slow
from warm_python import WarmPython

from aio_ckpt import CheckpointEngine, EngineConfig, SyncCheckpointEngine
from aio_ckpt.commit.publish_files import LOCK
from aio_ckpt.errors import AioCkptError, RootError, StallError, WriteError
from aio_ckpt.runtime.portal import Executor
from aio_ckpt.storage.local import Storage
from aio_ckpt.storage.root_lock import RootLock

T = TypeVar("T")
NAME = "m.safetensors"
INDEX = f"{NAME}.index.json"
SHARD_BYTES = {1: None, 2: 8000, 4: 4000}
"""``max_shard_bytes`` by the number of files."""
REPLACING = pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 4), (4, 1), slow(4, 2), slow(2, 4), slow(4, 4)])


def state(value: float) -> dict[str, torch.Tensor]:
    return {f"l{number}": torch.full((1000,), float(value)) for number in range(4)}


def listing(folder: Path) -> set[str]:
    return set(os.listdir(folder))


def save(engine: CheckpointEngine, folder: Path, value: float, files: int) -> BaseException | None:
    return engine.save_file(state(value), folder / NAME, max_shard_bytes=SHARD_BYTES[files]).exception(TIMEOUT)


def found_by_index(folder: Path) -> set[float]:
    """Values of the model that the index names. It is whole, and of one save."""
    files = json.loads((folder / INDEX).read_text())["weight_map"]
    assert files.keys() == state(0).keys()
    return {load_file(folder / file)[name].unique().item() for name, file in files.items()}


def found(folder: Path) -> set[float]:
    """Values that a reader finds, whichever of the two it prefers."""
    single = {value.unique().item() for value in load_file(folder / NAME).values()} if NAME in listing(folder) else None
    indexed = found_by_index(folder) if INDEX in listing(folder) else None
    assert all(len(values) == 1 for values in (single, indexed) if values is not None), "files of two saves"
    return (single or set()) | (indexed or set())


class WatchedStorage(ForwardingStorage):
    """Calls ``act_on`` before each call, and ``act_behind`` after each that changes something. Both may fail it."""

    def __init__(self, executor: Executor) -> None:
        super().__init__(Storage(executor))
        self.act_on: Callable[[Call], None] | None = None
        self.act_behind: Callable[[Call], None] | None = None

    async def run(self, call: Call, act: Callable[[], Awaitable[T]]) -> T:
        if self.act_on is not None:
            self.act_on(call)
        result = await act()
        if self.act_behind is not None:
            self.act_behind(call)
        return result

    async def run_read(self, call: Call, act: Callable[[], Awaitable[T]]) -> T:
        if self.act_on is not None:
            self.act_on(call)
        return await act()

    def lock(self, path: Path) -> RootLock:
        if self.act_on is not None:
            self.act_on(Call("lock", path))
        return super().lock(path)


@contextlib.contextmanager
def watched(root: Path, **config: object) -> Iterator[tuple[CheckpointEngine, WatchedStorage]]:
    executor = Executor("watched", 4)
    storage = WatchedStorage(executor)
    engine = CheckpointEngine(root, EngineConfig(on_failure="log", **config), storage=storage)  # type: ignore[arg-type]
    try:
        yield engine, storage
    finally:
        storage.act_on = storage.act_behind = None
        engine.close_blocking()
        assert executor.close(TIMEOUT)


class FailingCall:
    """Fails the n-th call that it gets."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, call: Call) -> None:
        self.left -= 1
        if not self.left:
            kind = RootError if call.name == "lock" else WriteError
            raise kind(errno.EIO, f"{call.name} fails", str(call.other or call.path))


# -- failures -------------------------------------------------------------------------------------


@pytest.mark.sampled
@REPLACING
@pytest.mark.parametrize("when", ["act_on", "act_behind"])
def test_one_failing_call_leaves_the_old_model_or_the_new_one_and_the_error_says_which(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, before: int, after: int, when: str
) -> None:
    """Each call of a save fails once, before its effect or behind it, as on network file systems."""
    in_doubt = 0
    caplog.set_level(logging.ERROR, "aio_ckpt")
    with watched(tmp_path / "root") as (engine, storage):
        assert save(engine, tmp_path / "before", 1, before) is None
        for number in itertools.count(1):
            folder = Path(shutil.copytree(tmp_path / "before", tmp_path / str(number)))
            caplog.clear()
            failing = FailingCall(number)
            setattr(storage, when, failing)
            error = save(engine, folder, 2, after)
            setattr(storage, when, None)
            if failing.left > 0:
                assert error is None
                break
            if error is None:  # what no reader needs was not removed
                assert found(folder) == {2}
            else:
                assert isinstance(error, AioCkptError)
                assert found(folder) <= ({1, 2} if error.in_doubt else {1}), error
                assert ("is unchanged" in caplog.text) is not error.in_doubt
                in_doubt += error.in_doubt
                if len(found(folder)) == 2:
                    assert f"{folder / (INDEX if after == 1 else NAME)}" in str(error), "the old file is named"
            assert save(engine, folder, 3, after) is None
            assert found(folder) == {3}
    assert not [*tmp_path.glob("*/.aio_ckpt-file*")]
    assert in_doubt
    assert number > 8


@pytest.mark.usefixtures("quiet")
def test_an_old_file_that_readers_prefer_and_that_cannot_be_removed_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with gated_engine(tmp_path / "root") as (engine, storage):
        save(engine, folder, 1, 1)
        storage.fail("remove_file", NAME, WriteError(errno.EACCES, "Permission denied", str(folder / NAME)))
        error = save(engine, folder, 2, 4)
    assert isinstance(error, WriteError)
    assert error.in_doubt
    text = f"the new files are in place, but {folder / NAME} of the save before, which readers may take, is still there"
    assert text in str(error)
    assert "remove it, or save again" in str(error)


# -- without failures -----------------------------------------------------------------------------


@REPLACING
def test_no_file_of_the_save_before_is_left(tmp_path: Path, before: int, after: int) -> None:
    folder, foreign = tmp_path / "out", "m-00001-of-00009.safetensors"
    with SyncCheckpointEngine(tmp_path / "root") as engine:
        engine.save_file(state(1), folder / NAME, max_shard_bytes=SHARD_BYTES[before]).result(TIMEOUT)
        (folder / foreign).touch()  # no index names it
        for value in (2, 3, 4):
            engine.save_file(state(value), folder / NAME, max_shard_bytes=SHARD_BYTES[after]).result(TIMEOUT)
            there = listing(folder) - {foreign}
            assert len(there) == after + (after > 1)
            assert found(folder) == {value}


def test_the_names_of_several_files_are_the_usual_ones_and_alternate_if_these_are_in_use(tmp_path: Path) -> None:
    def names() -> set[str]:
        return listing(tmp_path / "out") - {INDEX}

    usual = {"m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors"}
    with SyncCheckpointEngine(tmp_path / "root") as engine:
        for number in range(4):
            report = engine.save_file(state(number), tmp_path / "out" / NAME, max_shard_bytes=8000).result(TIMEOUT)
            assert names() == (usual if number % 2 == 0 else {name.replace("m-", "m-alternate-") for name in usual})
            assert report is not None
            assert report.crc32s.keys() == names()


@REPLACING
def test_at_every_call_a_reader_finds_one_of_two_saves(tmp_path: Path, before: int, after: int) -> None:
    """So a kill at any instant leaves one, too."""
    seen: list[set[float]] = []
    folder = tmp_path / "out"
    with watched(tmp_path / "root") as (engine, storage):
        save(engine, folder, 1, before)
        storage.act_on = lambda _: seen.append(found(folder))
        storage.act_behind = storage.act_on
        assert save(engine, folder, 2, after) is None
    assert all(seen), "no model"
    assert seen[0] == {1}
    assert seen[-1] == {2}


def test_an_index_names_no_file_of_others(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "../root", "b": "notes.txt"}}))
    (tmp_path / "notes.txt").write_text("mine")
    with SyncCheckpointEngine(tmp_path / "root") as engine:
        engine.save_file(state(2), tmp_path / NAME).result(TIMEOUT)
    assert listing(tmp_path) == {"notes.txt", NAME}


# -- permissions ----------------------------------------------------------------------------------


@REPLACING
def test_a_private_model_is_at_no_instant_readable_for_others(tmp_path: Path, before: int, after: int) -> None:
    folder, public = tmp_path / "out", list[str]()

    def look(_: Call) -> None:
        for path in folder.iterdir():
            is_safe = path.stat().st_mode & 0o077 == 0 or path.name == LOCK
            if not is_safe and not (path.is_dir() and not any(path.iterdir())):
                public.append(path.name)

    with watched(tmp_path / "root") as (engine, storage):
        save(engine, folder, 1, before)
        for path in folder.iterdir():
            path.chmod(0o600)
        storage.act_on = storage.act_behind = look
        assert save(engine, folder, 2, after) is None
    assert not public
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in folder.iterdir())


def test_several_files_get_the_permissions_that_all_replaced_ones_grant(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path / "root") as engine:
        engine.save_file(state(1), tmp_path / "out" / NAME, max_shard_bytes=4000).result(TIMEOUT)
        for path, mode in zip((tmp_path / "out").iterdir(), (0o640, 0o604, 0o644, 0o664, 0o644), strict=True):
            path.chmod(mode)
        engine.save_file(state(2), tmp_path / "out" / NAME, max_shard_bytes=8000).result(TIMEOUT)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o600}


# -- two writers ----------------------------------------------------------------------------------


def test_files_of_two_engines_at_one_path_never_stand_under_one_index(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with gated_engine(tmp_path / "a") as (first, storage), watched(tmp_path / "b") as (second, other):
        gate = storage.hold("replace", "m-00002-of*")
        slow = first.save_file(state(1), folder / NAME, max_shard_bytes=4000)
        gate.wait_reached()
        storage.release(gate)
        tries = itertools.count(1)

        def look(call: Call) -> None:
            if call.name == "lock" and next(tries) == 3:
                assert listing(folder).isdisjoint({INDEX, NAME})
                gate.open()

        other.act_on = look
        assert save(second, folder, 2, 2) is None
        slow.result(TIMEOUT)
        assert found(folder) == {2}
        assert len(listing(folder)) == 3


HOLDER = """
    import sys
    from pathlib import Path
    from aio_ckpt.storage.root_lock import RootLock

    lock = RootLock(Path(sys.argv[1]))
    print("held", flush=True)
    sys.stdin.readline()
    lock.discard()
"""


def test_a_save_waits_for_another_process_that_renames_its_files(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with WarmPython(HOLDER, str(tmp_path / "out" / LOCK), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        assert child.stdout.readline() == "held\n"
        with watched(tmp_path / "root") as (engine, storage):
            tries = itertools.count(1)

            def look(call: Call) -> None:
                if call.name == "lock" and next(tries) == 3:
                    assert child.stdin is not None
                    child.stdin.write("\n")
                    child.stdin.flush()

            storage.act_on = look
            assert save(engine, tmp_path / "out", 1, 2) is None
            assert next(tries) > 3
    assert found(tmp_path / "out") == {1}


@pytest.mark.usefixtures("quiet")
def test_the_wait_for_another_writer_ends(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with RootLock(tmp_path / "out" / LOCK), watched(tmp_path / "root", stall_timeout_secs=0.3) as (engine, _):
        error = save(engine, tmp_path / "out", 1, 2)
        assert isinstance(error, StallError)
        assert f"waiting for another save that renames files in {tmp_path / 'out'}" in str(error)
        assert engine.save_file(state(1), tmp_path / "out" / "x.pt").result(TIMEOUT), "one file needs no lock"
