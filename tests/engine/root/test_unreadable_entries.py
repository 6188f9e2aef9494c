"""An entry with the name of a step that cannot be looked into, or is a file, is named once and passed by."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from builders import listing, save, steps_dir, weights
from command_line import called
from gated_storage import TIMEOUT
from single_looks import SingleLooks

from aio_ckpt import EngineConfig, SyncCheckpointEngine
from aio_ckpt.errors import ReadError
from aio_ckpt.runtime.portal import Executor
from aio_ckpt.storage import local
from aio_ckpt.storage.local import FileStatus


class RefusingStorage(SingleLooks):
    """Refuses to look below directories, as of another user with mode 700: a test that root runs cannot have any."""

    refused: frozenset[int] = frozenset()
    code = errno.EACCES

    def _check(self, path: Path) -> None:
        for parent in path.parents:
            if parent.name in {f"step_{step:09d}" for step in self.refused}:
                raise ReadError(self.code, os.strerror(self.code), str(path))

    async def status(self, path: Path) -> FileStatus | None:
        self._check(path)
        return await super().status(path)

    async def exists(self, path: Path) -> bool:
        self._check(path)
        return await super().exists(path)


@contextmanager
def engine_beside(root: Path, *refused: int, code: int = errno.EACCES) -> Iterator[SyncCheckpointEngine]:
    executor = Executor("refusing", 4)
    storage = RefusingStorage(executor)
    storage.refused, storage.code = frozenset(refused), code
    try:
        with SyncCheckpointEngine(root, EngineConfig(keep_last=2), storage=storage) as engine:
            yield engine
    finally:
        assert executor.close(TIMEOUT)


@pytest.mark.parametrize("kind", ["loop", "nothing", "foreign", "file"])
def test_every_call_goes_on_beside_an_unreadable_entry_and_one_warning_names_it(
    root: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    with SyncCheckpointEngine(root) as engine:
        save(engine, 1, 2)
        if kind == "foreign":
            save(engine, 9)
    if kind == "file":  # as torch.save(state, "runs/step_9") makes it
        steps_dir(root, 9).write_bytes(b"PK")
    elif kind != "foreign":
        steps_dir(root, 9).symlink_to(steps_dir(root, 9) if kind == "loop" else root / "gone")
    with caplog.at_level(logging.WARNING), engine_beside(root, *([9] if kind == "foreign" else [])) as engine:
        assert engine.steps() == [1, 2]
        assert engine.load(weights(0)).step == 2
        assert torch.equal(engine.read(1)["w"], weights(1)["w"])
        engine.save(weights(3)).result(TIMEOUT)
        engine.save(weights(4)).result(TIMEOUT)
        engine.rollback(3)
        assert engine.steps() == [3], "retention counts the steps that can be read"
    assert "step_000000009" in listing(root)
    (warning,) = [record for record in caplog.records if "step_000000009" in record.getMessage()]
    assert "is passed by" in warning.getMessage()


def test_a_root_of_which_no_step_can_be_looked_into_is_no_empty_root(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        save(engine, 1, 2)
    with engine_beside(root, 1, 2) as engine:
        with pytest.raises(ReadError, match="Permission denied"):
            engine.steps()
        with pytest.raises(ReadError, match="Permission denied"):
            engine.load(weights(0))


def test_a_disk_that_fails_at_the_newest_step_is_not_passed_by(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        save(engine, 1, 2)
    with (
        engine_beside(root, 2, code=errno.EIO) as engine,
        pytest.raises(ReadError, match="Input/output error"),
    ):
        engine.load(weights(0))


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_disk_that_fails_at_any_step_stops_a_rollback(root: Path, step: int) -> None:
    """A later step that was left would come back once the disk answers."""
    with SyncCheckpointEngine(root) as engine:
        save(engine, 1, 2, 3)
    with engine_beside(root, step, code=errno.EIO) as engine, pytest.raises(ReadError, match="Input/output error"):
        engine.rollback(1)


@pytest.mark.parametrize("command", ["ls", "du", "verify"])
def test_a_step_whose_directory_cannot_be_listed_is_named_and_hides_no_other(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    with SyncCheckpointEngine(root) as engine:
        save(engine, 1, 2)
    real = os.scandir

    def scandir(path: str) -> object:
        if os.fspath(path) == str(steps_dir(root, 1)):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    code, out, _ = called(capsys, command, root)
    assert code == 0
    if command == "ls":
        assert "Permission denied" in out
        assert "unreadable" in out
        assert called(capsys, "prune", root, "--keep-last", "1", "--yes")[:2] == (0, "nothing to delete\n")


@pytest.mark.parametrize("is_link", [False, True])
def test_verify_of_a_root_counts_a_step_that_it_may_not_look_into_as_a_fault(
    root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_link: bool
) -> None:
    """A link may lead into a directory of which not even that it is there may be seen."""
    with SyncCheckpointEngine(root) as engine:
        save(engine, 1, 2)
    real = local._status

    def status(path: Path) -> FileStatus | None:
        if path.parent == steps_dir(root, 2) or (is_link and path == steps_dir(root, 2)):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path)

    monkeypatch.setattr(local, "_status", status)
    code, out, _ = called(capsys, "verify", root)
    assert code == 1
    assert "step_000000001: good" in out
    assert "Permission denied" in out
    assert "2 checkpoints, 1 with faults" in out
    assert "delete" not in out, "whoever may read it may find it good"


@pytest.mark.parametrize(
    "command", [("ls",), ("du",), ("verify",), ("inspect",), ("prune", "--keep-last", "1", "--yes"), ("rollback", "1")]
)
def test_the_command_line_goes_on_beside_a_loop_of_links(
    root: Path, capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    with SyncCheckpointEngine(root) as engine:
        save(engine, 1, 2)
    steps_dir(root, 9).symlink_to(steps_dir(root, 9))
    code, _, err = called(capsys, command[0], root, *command[1:])
    assert (code, err) == (0, "")
    assert steps_dir(root, 9).is_symlink()
