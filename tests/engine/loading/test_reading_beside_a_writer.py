"""Readers beside a writer that deletes and replaces what they read: whole, the newest, or a clear "deleted"."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from gated_storage import TIMEOUT
from property_examples import gate_stride
from saved_files import data_file
from single_looks import SingleLooks
from warm_python import WarmPython

from aio_ckpt import EngineConfig, SyncCheckpointEngine
from aio_ckpt.cli import access
from aio_ckpt.cli import commands as cli
from aio_ckpt.commit import discovery
from aio_ckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from aio_ckpt.runtime.portal import Executor, run_blocking
from aio_ckpt.storage.data_file import ReadFile
from aio_ckpt.storage.direct_io import PageCache
from aio_ckpt.storage.local import FileStatus, Storage

KEEP_ONE = EngineConfig(keep_last=1)


def state(number: float) -> dict[str, object]:
    return {"w": torch.full((70_000,), float(number)), "b": torch.full((9,), float(number)), "step": int(number)}


def number_of(found: object) -> float:
    """The one number that the whole state holds: a mix of two checkpoints fails here."""
    assert isinstance(found, dict)
    values = {float(value) for name in ("w", "b") for value in found[name].unique()} | {float(found["step"])}
    assert len(values) == 1, f"a mix of {values}"
    return values.pop()


class DisturbedStorage(SingleLooks):
    """Before the ``at``-th thing that a reader asks of the file system, something else happens."""

    def __init__(self, executor: Executor, happens: Callable[[], object], at: int) -> None:
        super().__init__(executor)
        self._threads = executor
        self._happens = happens
        self._at = at
        self.count = 0

    async def _turn(self) -> None:
        self.count += 1
        if self.count == self._at:
            await run_blocking(self._threads, self._happens)

    async def open_data_file(self, path: Path, *, page_cache: PageCache = "pass") -> ReadFile:
        await self._turn()
        return await super().open_data_file(path, page_cache=page_cache)

    async def read_file(self, path: Path, *, max_bytes: int) -> bytes:
        await self._turn()
        return await super().read_file(path, max_bytes=max_bytes)

    async def list_dir(self, path: Path) -> list[str]:
        await self._turn()
        return await super().list_dir(path)

    async def exists(self, path: Path) -> bool:
        await self._turn()
        return await super().exists(path)

    async def status(self, path: Path) -> FileStatus | None:
        await self._turn()
        return await super().status(path)


@contextlib.contextmanager
def disturbed(root: Path, happens: Callable[[], object], at: int, **config: object) -> Iterator[SyncCheckpointEngine]:
    executor = Executor("disturbed", 4)
    storage = DisturbedStorage(executor, happens, at)
    try:
        with SyncCheckpointEngine(root, EngineConfig(**config), storage=storage) as engine:
            yield engine
    finally:
        assert executor.close(TIMEOUT)
        disturbed.reached = storage.count >= at  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with steps 1 and 2, to be copied."""
    root = tmp_path_factory.mktemp("readers") / "root"
    saved(root, 1, 2)
    return root


def each_moment(tmp_path: Path, original: Path) -> Iterator[tuple[int, Path]]:
    """A fresh root for a disturbance at the first, a later, ... question, until one was never asked."""
    disturbed.reached = True  # type: ignore[attr-defined]
    at, stride = 1 - gate_stride(3), gate_stride(3)
    while disturbed.reached:  # type: ignore[attr-defined]
        at += stride
        root = tmp_path / f"{at}"
        shutil.copytree(original, root)
        yield at, root
    assert at > 5, "the reader asked less than was expected"


def outcome(act: Callable[[], object]) -> str | None:
    """What the reader was told; None if it got what it asked for."""
    try:
        act()
    except CheckpointNotFoundError as error:
        return str(error)
    return None


def saved(root: Path, *steps: int) -> None:
    with SyncCheckpointEngine(root) as engine:
        for step in steps:
            engine.save(state(step), step).result(TIMEOUT)


def newer(root: Path) -> Callable[[], None]:
    """A writer commits step 9 and deletes all others; closing waits until they are gone."""

    def write() -> None:
        with SyncCheckpointEngine(root, KEEP_ONE) as writer:
            writer.save(state(9), 9).result(TIMEOUT)

    return write


def replaced(root: Path) -> Callable[[], None]:
    """A writer overwrites step 2 twice: the second directory may get the inode of the first one."""

    def write() -> None:
        with SyncCheckpointEngine(root) as writer:
            for value in (20, 200):
                writer.save(state(value), 2, overwrite=True).result(TIMEOUT)

    return write


# -- the engine -------------------------------------------------------------------------------------


def test_a_load_of_the_newest_goes_on_to_the_newest(tmp_path: Path, two_steps: Path) -> None:
    for at, root in each_moment(tmp_path, two_steps):
        target = state(0)
        with disturbed(root, newer(root), at) as reader:
            report = reader.load(target)
        assert report.skipped == (), at
        assert number_of(target) == report.step in (2, 9), at


def test_a_read_of_the_newest_goes_on_to_the_newest(tmp_path: Path, two_steps: Path) -> None:
    for at, root in each_moment(tmp_path, two_steps):
        with disturbed(root, newer(root), at) as reader:
            assert number_of(reader.read()) in (2, 9), at


def test_a_load_of_a_step_that_is_deleted_says_so_and_never_that_it_is_corrupt(tmp_path: Path, two_steps: Path) -> None:
    deleted = 0
    for at, root in each_moment(tmp_path, two_steps):
        target = state(0)
        with disturbed(root, newer(root), at) as reader:
            told = outcome(lambda target=target: reader.load(target, 2))
        deleted += told is not None
        assert number_of(target) == 2 if told is None else "retention" in told and "protect(step)" in told, at
    assert deleted


def deleted(root: Path) -> Callable[[], None]:
    """A writer deletes the newest step, 2."""

    def write() -> None:
        with SyncCheckpointEngine(root) as writer:
            writer.delete(2, allow_newest=True)

    return write


def test_a_load_of_the_newest_goes_on_to_an_older_one_if_it_is_deleted(tmp_path: Path, two_steps: Path) -> None:
    for at, root in each_moment(tmp_path, two_steps):
        target = state(0)
        with disturbed(root, deleted(root), at) as reader:
            report = reader.load(target)
        assert report.skipped == (), at
        assert number_of(target) == report.step in (1, 2), at


@pytest.mark.sampled
@pytest.mark.parametrize("verify", ["load", "never"])
def test_a_load_of_a_step_that_is_overwritten_gets_one_of_the_two_whole(
    tmp_path: Path, two_steps: Path, verify: str
) -> None:
    got = set()
    for at, root in each_moment(tmp_path, two_steps):
        target = state(0)
        with disturbed(root, replaced(root), at, verify=verify) as reader:
            report = reader.load(target, 2)
        assert report.skipped == (), at
        got.add(number_of(target))
    assert {2, 200} <= got <= {2, 20, 200}


def test_a_writer_that_never_rests_ends_a_load_with_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "MAX_RETRIES", 4)
    root = tmp_path / "root"
    saved(root, 1)
    steps = iter(range(2, 1000))

    class Restless(Storage):
        async def read_file(self, path: Path, *, max_bytes: int) -> bytes:
            await run_blocking(executor, write)
            return await super().read_file(path, max_bytes=max_bytes)

    def write() -> None:
        with SyncCheckpointEngine(root, KEEP_ONE) as writer:
            step = next(steps)
            writer.save(state(step), step).result(TIMEOUT)

    executor = Executor("restless", 4)
    target = state(0)
    told = "was deleted or replaced by its writer.*keep_last.*protect"
    with (
        SyncCheckpointEngine(root, storage=Restless(executor)) as reader,
        pytest.raises(CheckpointNotFoundError, match=told),
    ):
        reader.load(target)
    assert executor.close(TIMEOUT)


def test_what_is_corrupt_is_still_said_to_be(tmp_path: Path) -> None:
    root = tmp_path / "root"
    saved(root, 1, 2)
    data_file(root / "step_000000002").unlink()
    with SyncCheckpointEngine(root) as reader:
        with pytest.raises(CorruptCheckpointError, match="missing"):
            reader.load(state(0), 2)
        target = state(0)
        report = reader.load(target)
        assert [skipped.step for skipped in report.skipped] == [2]
        assert number_of(target) == 1


# -- the command line -------------------------------------------------------------------------------


def called(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], object], at: int, *arguments: object) -> int:
    """Run a command with a disturbed storage; its exit code."""
    made: list[DisturbedStorage] = []
    left = at

    def make(executor: Executor) -> DisturbedStorage:
        made.append(DisturbedStorage(executor, happens, left - sum(storage.count for storage in made)))
        return made[-1]

    with monkeypatch.context() as patch:
        patch.setattr(access, "AnyStorage", make)
        code = cli.run([str(argument) for argument in arguments])
    disturbed.reached = sum(storage.count for storage in made) >= at  # type: ignore[attr-defined]
    return code


@pytest.mark.sampled
@pytest.mark.parametrize("change", [newer, replaced])
def test_ls_beside_a_writer_lists_what_is_there(
    tmp_path: Path,
    two_steps: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path], Callable[[], None]],
) -> None:
    for at, root in each_moment(tmp_path, two_steps):
        assert called(monkeypatch, change(root), at, "ls", root, "--json") == 0, at
        rows = json.loads(capsys.readouterr().out)["checkpoints"]
        assert all(row["fault"] is None for row in rows), at
        assert {row["step"] for row in rows} <= {1, 2, 9}


@pytest.mark.sampled
@pytest.mark.parametrize("change", [newer, replaced])
def test_verify_beside_a_writer_finds_no_fault(
    tmp_path: Path,
    two_steps: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path], Callable[[], None]],
) -> None:
    for at, root in each_moment(tmp_path, two_steps):
        assert called(monkeypatch, change(root), at, "verify", root, "--json") == 0, at
        found = json.loads(capsys.readouterr().out)
        assert found["is_good"], at
        assert change is newer or not any(checkpoint["is_gone"] for checkpoint in found["checkpoints"])
        if change is newer and any(checkpoint["is_gone"] for checkpoint in found["checkpoints"]):
            break  # one more below, as text
    if change is newer:
        root = tmp_path / "text"
        saved(root, 1, 2)
        assert called(monkeypatch, newer(root), at, "verify", root) == 0
        assert "deleted by its writer before it was verified" in capsys.readouterr().out


@pytest.mark.sampled
@pytest.mark.parametrize("change", [newer, replaced])
def test_inspect_beside_a_writer_shows_the_newest(
    tmp_path: Path,
    two_steps: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path], Callable[[], None]],
) -> None:
    for at, root in each_moment(tmp_path, two_steps):
        assert called(monkeypatch, change(root), at, "inspect", root, "--json") == 0, at
        assert json.loads(capsys.readouterr().out)["step"] in (2, 9)


# -- real processes ---------------------------------------------------------------------------------

SAVES = 120 // gate_stride(6)
WRITER = f"""
    import sys, torch
    from aio_ckpt import EngineConfig, SyncCheckpointEngine
    def state(n):
        return {{"w": torch.full((70_000,), float(n)), "b": torch.full((9,), float(n)), "step": n}}
    with SyncCheckpointEngine(sys.argv[1], EngineConfig(keep_last=1)) as engine:
        for step in range(1, {SAVES} + 1):
            ticket = engine.save(state(step), step)
            if step == 1:
                ticket.result(60)
                print("writing", flush=True)
        ticket.result(60)
"""


def test_readers_beside_a_writer_of_another_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each step is deleted while the readers loop; whatever they get is whole, and nothing is called corrupt."""
    root = tmp_path / "root"
    with WarmPython(WRITER, str(root), options=(), stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "writing\n"
        newest, rounds, got = 0.0, 0, list[float]()
        with SyncCheckpointEngine(root) as reader:
            while writer.poll() is None or not rounds:
                target = state(0)
                report = reader.load(target)
                assert number_of(target) == report.step >= newest
                assert report.skipped == ()
                newest, rounds = report.step, rounds + 1
                assert number_of(reader.read()) >= newest
                for step in reader.steps():
                    told = outcome(lambda step=step: got.append(number_of(reader.read(step))))
                    assert got.pop() == step if told is None else "retention" in told
                for command in ("ls", "verify", "inspect"):
                    assert cli.run([command, str(root), "--json"]) == 0, capsys.readouterr()
                    assert '"fault":' not in capsys.readouterr().out.replace('"fault": null', "")
            assert writer.wait(TIMEOUT) == 0
            assert reader.steps() == [SAVES]
            assert number_of(reader.read()) == SAVES
