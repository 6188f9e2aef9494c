"""``cp``, ``export``, ``convert`` and ``diff`` beside a trainer that deletes the step that they read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command_line import called, state

import aio_ckpt
from aio_ckpt import copying
from aio_ckpt.cli import comparing, sources
from aio_ckpt.config import EngineConfig
from aio_ckpt.sync import SyncCheckpointEngine

COMMANDS = {
    "cp": ((copying, "_copy_file"), ("cp", "PATH", "OUT")),
    "cp, before it is listed": ((copying, "copied_files"), ("cp", "PATH", "OUT")),
    "export": ((sources, "_mapped_memory"), ("export", "PATH", "OUT.pt")),
    "export, before it is looked at": ((sources, "stored_names"), ("export", "PATH", "OUT.pt")),
    "convert": ((sources, "_mapped_memory"), ("convert", "PATH", "OUT")),
    "diff": ((comparing, "leaves_of"), ("diff", "PATH", "OTHER", "--values")),
    "diff, as the other": ((comparing, "leaves_of"), ("diff", "OTHER", "PATH", "--values")),
}


@pytest.fixture
def expiring(root: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[object, str], None]:
    """Let a trainer save step 30 and delete steps 10 and 20 when a function is first called."""

    def at(module: object, name: str) -> None:
        real, is_done = getattr(module, name), []

        def disturbed(*arguments: object, **options: object) -> object:
            if not is_done:
                is_done.append(True)
                with SyncCheckpointEngine(root, EngineConfig(keep_last=1)) as engine:
                    engine.save({**state(), "lr": 2.0}, step=30).result()
            return real(*arguments, **options)

        monkeypatch.setattr(module, name, disturbed)

    return at


def arguments_of(command: str, path: Path, tmp_path: Path) -> list[str]:
    with SyncCheckpointEngine(tmp_path / "other") as engine:
        engine.save({**state(), "lr": 2.0}, step=30).result()
    places = {"PATH": path, "OUT": tmp_path / "out", "OUT.pt": tmp_path / "out.pt", "OTHER": tmp_path / "other"}
    return [str(places.get(word, word)) for word in COMMANDS[command][1]]


@pytest.mark.sampled
@pytest.mark.parametrize("command", COMMANDS)
def test_if_the_newest_step_of_a_root_expires_the_next_one_is_taken(root, tmp_path, capsys, expiring, command):
    expiring(*COMMANDS[command][0])
    assert called(capsys, *arguments_of(command, root, tmp_path))[::2] == (0, "")
    if command.startswith("export"):
        assert torch.load(tmp_path / "out.pt")["lr"] == 2.0
    elif not command.startswith("diff"):
        assert aio_ckpt.read(tmp_path / "out/step_000000030")["lr"] == 2.0
        assert not (tmp_path / "out/step_000000020").exists()


@pytest.mark.sampled
@pytest.mark.parametrize("command", COMMANDS)
def test_a_step_that_is_named_and_expires_is_said_to_be_deleted(root, tmp_path, capsys, expiring, command):
    expiring(*COMMANDS[command][0])
    code, out, err = called(capsys, *arguments_of(command, root / "step_000000020", tmp_path))
    assert (code, out) == (1, "")
    assert "step_000000020: was deleted by its writer while it was read" in err
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.pt").exists()
