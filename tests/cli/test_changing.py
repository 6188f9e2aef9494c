"""``rm``, ``prune`` and ``rollback``: changes under the root's lock, by the routes of the engine."""

from __future__ import annotations

import errno
import io
import os
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from command_line import called, document, flip, state
from other_owner import owner_elsewhere
from saved_files import ROOT_MANIFEST, root_manifest

from aio_ckpt.cli import commands as cli
from aio_ckpt.commit import discovery
from aio_ckpt.commit import root_claim as claims
from aio_ckpt.commit.owner import encoded_owner
from aio_ckpt.format.root_names import CLAIM_FILE
from aio_ckpt.storage import root_lock
from aio_ckpt.storage.mounts import Mount
from aio_ckpt.storage.root_lock import RootLock
from aio_ckpt.sync import SyncCheckpointEngine


@pytest.fixture(scope="module")
def six_saved(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("changing") / "many"
    with SyncCheckpointEngine(root) as engine:
        for step in range(1, 7):
            engine.save({"w": torch.ones(3)}, step=step, metrics={"loss": abs(step - 2)}).result()
        engine.protect(3)
    return root


@pytest.fixture
def many(six_saved, tmp_path) -> Path:
    """A root with the steps 1 to 6; the lowest loss is that of step 2, and step 3 is protected."""
    return Path(shutil.copytree(six_saved, tmp_path / "many"))


def steps(capsys, root) -> list[int]:
    return [row["step"] for row in document(capsys, "ls", root)[1]["checkpoints"]]


def test_rm_deletes_steps(many, capsys):
    assert called(capsys, "rm", many, 1, 2)[:2] == (0, "deleted: 1, 2\n")
    assert steps(capsys, many) == [3, 4, 5, 6]
    assert not list((many / ".aio_ckpt/trash").iterdir())
    assert document(capsys, "rm", many, 4)[1] == {"deleted": [4]}


def test_prune_lists_the_root_as_often_for_many_steps_as_for_one(many, capsys, monkeypatch):
    listed = []
    step_directories = discovery.step_directories

    async def counted(*arguments):
        listed.append(arguments)
        return await step_directories(*arguments)

    monkeypatch.setattr(discovery, "step_directories", counted)
    counts = []
    for kept in (5, 1):  # deletes step 1; then 2, 4 and 5
        listed.clear()
        assert called(capsys, "prune", many, "--keep-last", kept, "--yes")[0] == 0
        counts.append(len(listed))
    assert counts[0] == counts[1]
    assert steps(capsys, many) == [3, 6]


def test_a_user_who_may_not_write_is_not_told_of_another_process(many, capsys, monkeypatch):
    def refuse(path, flags):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(root_lock, "open_without_links", refuse)
    code, _, err = called(capsys, "rm", many, 1)
    assert code == 1
    assert "Permission denied" in err
    assert "Inside of that process" not in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [((1, 3), "`aio-ckpt unprotect"), ((1, 6), "--allow-newest"), ((1, 9), "no such committed step")],
)
def test_rm_that_refuses_one_step_deletes_none(many, capsys, arguments, words):
    code, out, err = called(capsys, "rm", many, *arguments)
    assert (code, out) == (1, "")
    assert words in err
    assert steps(capsys, many) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("command", ["rm", "protect", "unprotect", "rollback"])
def test_the_name_of_a_directory_is_no_step(many, capsys, command):
    code, _, err = called(capsys, command, many, "step_000000004")
    assert code == 2
    assert "'step_000000004' is no step: give the number, such as 100 for step_000000100" in err
    assert called(capsys, command, many, "--", "-1")[0] == 2
    assert steps(capsys, many) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "arguments", [("inspect", "R", "2"), ("verify", "R", "2"), ("prune", "R"), ("ls", "R", "--bad")]
)
def test_a_command_called_the_wrong_way_shows_its_example(many, capsys, arguments):
    code, out, err = called(capsys, *(many if argument == "R" else argument for argument in arguments))
    assert (code, out) == (2, "")
    assert f". Example: aio-ckpt {arguments[0]} runs/ckpt" in err


def test_rm_of_the_newest_step_is_possible(many, capsys):
    assert called(capsys, "rm", many, 6, "--allow-newest")[0] == 0
    assert steps(capsys, many) == [1, 2, 3, 4, 5]


def test_prune_keeps_what_the_rules_keep(many, capsys):
    assert called(capsys, "prune", many, "--keep-last", 1, "--keep-every", 4, "--yes")[:2] == (0, "deleted: 1, 2, 5\n")
    assert steps(capsys, many) == [3, 4, 6]
    assert called(capsys, "prune", many, "--keep-last", 9, "--yes")[1] == "nothing to delete\n"


@pytest.mark.parametrize(("rule", "kept"), [("loss", [2, 3, 6]), ("loss:max", [3, 6])])
def test_prune_keeps_the_best_step(many, capsys, rule, kept):
    assert called(capsys, "prune", many, "--keep-last", 1, "--keep-best", rule, "--yes")[0] == 0
    assert steps(capsys, many) == kept


def test_prune_by_a_metric_that_no_step_has_deletes_nothing_and_names_those_that_there_are(many, capsys):
    code, out, err = called(capsys, "prune", many, "--keep-last", 1, "--keep-best", "val_loss", "--yes")
    assert (code, out) == (1, "")
    assert "no step has the metric val_loss: give one of loss; nothing is deleted" in err
    assert steps(capsys, many) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("answer", "left"), [("y\n", [3, 5, 6]), ("n\n", [1, 2, 3, 4, 5, 6]), ("", [1, 2, 3, 4, 5, 6])]
)
def test_prune_shows_what_it_deletes_and_asks(many, capsys, answer, left):
    done = CliRunner().invoke(cli.commands, ["prune", str(many), "--keep-last", "2"], input=answer)
    assert "to be deleted: 1, 2, 4\n3 checkpoints, " in done.output
    assert "Delete them?" in done.output
    assert steps(capsys, many) == left


def test_prune_counts_no_damaged_step_and_keeps_it(many, capsys):
    root_manifest(many / "step_000000005").write_text("{")
    assert called(capsys, "prune", many, "--keep-last", 2, "--yes")[1] == "deleted: 1, 2\n"
    assert steps(capsys, many) == [3, 4, 5, 6]


@pytest.mark.parametrize("pattern", [ROOT_MANIFEST, ".metadata"])
def test_prune_beside_a_damaged_newest_step_deletes_nothing_and_names_it(many, capsys, pattern):
    (path,) = (many / "step_000000006").glob(pattern)
    path.unlink()
    code, out, err = called(capsys, "prune", many, "--keep-last", 1, "--yes")
    assert (code, out) == (1, "")
    assert f"step 6, the newest, is damaged ({path.name}: " in err
    assert f"run `aio-ckpt verify {many}`, then delete {many}/step_000000006" in err
    assert steps(capsys, many) == [1, 2, 3, 4, 5, 6]


async def test_prune_reads_every_byte_of_the_newest_step_before_it_deletes(many, capsys):
    newest, (data,) = many / "step_000000006", (many / "step_000000006").glob("*.distcp")
    await flip(newest, "w")
    code, out, err = called(capsys, "prune", many, "--keep-last", 1, "--yes")
    assert (code, out) == (1, "")
    assert f"step 6, the newest, is damaged ({data.name} 'w': " in err
    assert f"and nothing is deleted: run `aio-ckpt verify {many}`, then delete {newest}" in err
    assert steps(capsys, many) == [1, 2, 3, 4, 5, 6]
    await flip(newest, "w")
    assert called(capsys, "prune", many, "--keep-last", 1, "--yes")[0] == 0
    assert steps(capsys, many) == [3, 6]


def test_prune_takes_the_steps_that_another_trainer_has_named(many, capsys):
    for step in range(1, 7):
        (many / f"step_{step:09d}").rename(many / f"checkpoint-{step}")
    assert called(capsys, "prune", many, "--keep-last", 1, "--yes")[:2] == (0, "deleted: 1, 2, 4, 5\n")
    assert sorted(path.name for path in many.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-6"]


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_prune_without_an_answer_says_what_to_give(many, capsys, monkeypatch, options):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    code, out, err = called(capsys, "prune", many, "--keep-last", 2, *options)
    assert code == 1
    assert err.endswith("aio-ckpt: no answer on standard input, and nothing is deleted: give --yes\n")
    assert "to be deleted: 1, 2, 4" in (err if options else out)
    assert not (options and out)
    assert steps(capsys, many) == [1, 2, 3, 4, 5, 6]


def test_rollback_sets_later_steps_aside(many, capsys):
    code, out, _ = called(capsys, "rollback", many, 2)
    assert code == 0
    assert out == "step 2 is the newest; set aside in .aio_ckpt/abandoned: 6, 5, 4, 3\n"
    assert steps(capsys, many) == [1, 2]
    assert not list((many / ".aio_ckpt/protected").iterdir())
    assert document(capsys, "rollback", many, 2)[1] == {"newest": 2, "abandoned": []}
    with SyncCheckpointEngine(many) as engine:
        engine.save({"w": torch.ones(3)}, step=3).result()


def test_rm_deletes_what_was_set_aside_and_nothing_else(many, capsys):
    called(capsys, "rollback", many, 4)
    (many / ".aio_ckpt/corrupt").mkdir(exist_ok=True)
    (many / "step_000000001").rename(many / ".aio_ckpt/corrupt/step_000000001-17")
    code, out, _ = called(capsys, "rm", many, "--aside")
    assert (code, out.count(".aio_ckpt/abandoned/"), out.count(".aio_ckpt/corrupt/")) == (0, 2, 1)
    assert steps(capsys, many) == [2, 3, 4]
    assert not [*many.glob(".aio_ckpt/*/*step_*")]
    assert called(capsys, "rm", many, "--aside")[1] == "nothing to delete\n"


def test_rm_of_what_was_set_aside_is_refused_beside_a_trainer_unless_nothing_is(root, capsys):
    with SyncCheckpointEngine(root) as engine:
        engine.save(state(), step=30).result()
        assert called(capsys, "rm", root, "--aside")[1] == "nothing to delete\n"
        engine.rollback(20)
        code, _, err = called(capsys, "rm", root, "--aside")
    assert (code, "another engine of this process writes here" in err) == (1, True)
    assert "does the same" not in err
    assert len(list((root / ".aio_ckpt/abandoned").iterdir())) == 1


@pytest.mark.parametrize("arguments", [("--aside", "2"), ()])
def test_rm_takes_either_steps_or_what_was_set_aside(many, capsys, arguments):
    code, _, err = called(capsys, "rm", many, *arguments)
    assert (code, "Give one STEP or more, or --aside. Example: aio-ckpt rm" in err) == (2, True)
    assert steps(capsys, many) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("arguments", "call"),
    [
        (("rm", "R", "10"), "engine.delete(10)"),
        (("prune", "R", "--keep-last", "1", "--yes"), "engine.delete(step)"),
        (("rollback", "R", "10"), "engine.rollback(10)"),
    ],
)
def test_a_running_trainer_is_named_and_nothing_changes(root, capsys, monkeypatch, arguments, call):
    words = [str(root) if word == "R" else word for word in arguments]
    # A lock of another process: that of this process would be refused without a look at the file.
    reading, writing = os.pipe()
    trainer = os.fork()
    if not trainer:
        lock = RootLock(root / ".aio_ckpt/lock")
        os.write(writing, b"x")
        os.read(os.pipe()[0], 1)
        lock.release()
        os._exit(0)
    try:
        os.read(reading, 1)
        code, out, err = called(capsys, *words)
    finally:
        os.kill(trainer, 9)
        os.waitpid(trainer, 0)
        os.close(reading)
        os.close(writing)
    assert (code, out) == (1, "")
    assert f"process {trainer} on {os.uname().nodename}" in err
    assert f"Inside of that process, {call} does the same" in err
    assert steps(capsys, root) == [10, 20]


def test_rm_is_refused_while_an_engine_of_this_process_holds_the_root(root, capsys):
    with SyncCheckpointEngine(root) as engine:
        engine.save(state(), step=30).result()
        code, _, err = called(capsys, "rm", root, 10)
    assert code == 1
    assert "engine.delete(10) does the same" in err


CLAIMED_ELSEWHERE = Mount("nfs", frozenset({"hard", "nolock", "local_lock=all"}))


@pytest.mark.parametrize("command", [["rm"], ["prune", "--yes", "--keep-last", "1"], ["rollback"]])
def test_a_root_that_another_host_claims_is_not_changed(
    many: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    """On a file system whose locks stay on this host, the claim alone tells."""
    monkeypatch.setattr(claims, "mount_of", lambda _: CLAIMED_ELSEWHERE)
    other = owner_elsewhere()
    (many / CLAIM_FILE).write_bytes(encoded_owner(other))
    before = sorted(path.name for path in many.iterdir())
    name, *options = command
    step = [] if name == "prune" else ["1"]
    code, _, told = called(capsys, name, many, *step, *options)
    assert code == 1
    assert f"process {other.pid} on node-7 writes here" in told
    assert str(many / CLAIM_FILE) in told
    assert sorted(path.name for path in many.iterdir()) == before
