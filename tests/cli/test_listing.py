"""``ls`` and ``du``: what an operator sees of a root, at the cost of its manifests."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import threading
from pathlib import Path

import msgspec
import pytest
import torch
from checkpoint_maker import content_of, write_checkpoint
from command_line import called, document, save_by_dcp
from saved_files import data_file, rank_manifest, root_manifest

import aio_ckpt.dcp
from aio_ckpt.cli.listing import best_rule
from aio_ckpt.commit.owner import Owner, encoded_owner, pending_path
from aio_ckpt.config import EngineConfig, KeepBest
from aio_ckpt.errors import CorruptCheckpointError
from aio_ckpt.format.root_names import CLAIM_FILE
from aio_ckpt.storage import local
from aio_ckpt.sync import SyncCheckpointEngine

STEP = "step_000000010"


@pytest.fixture
def measured(tmp_path):
    """A root whose steps 1 to 4 have a metric; 1 is protected."""
    with SyncCheckpointEngine(tmp_path / "m", EngineConfig(step_dir="step_{step:09d}")) as engine:
        for step, loss in enumerate((0.9, 0.2, 0.5, float("nan")), start=1):
            engine.save({"w": torch.ones(3)}, step=step, metrics={"loss": loss}).result()
        engine.protect(1)
    return tmp_path / "m"


def test_ls_marks_newest_best_and_protected_and_shows_age_and_totals(measured, capsys):
    out = called(capsys, "ls", measured)[1].splitlines()
    assert out[0].split() == ["directory", "bytes", "ranks", "age", "marks", "metrics", "written", "torch"]
    for line, word in zip(out[1:5], ("  protected  ", "  best (lowest loss)  ", "  -  ", "  newest  "), strict=True):
        assert word in line
        assert " s  " in line
    assert out[5].startswith("4 checkpoints, ")
    assert out[5].endswith(" kB, 1 protected")
    rows = document(capsys, "ls", measured)[1]["checkpoints"]
    assert [(row["is_newest"], row["best_of"], row["is_protected"]) for row in rows] == [
        (False, None, True),
        (False, "lowest loss", False),
        (False, None, False),
        (True, None, False),
    ]


def test_ls_takes_the_rule_of_the_best_step(measured, capsys):
    found = document(capsys, "ls", measured, "--best", "loss:max")[1]["checkpoints"]
    assert [row["best_of"] for row in found] == ["highest loss", None, None, None]
    assert not any(row["best_of"] for row in document(capsys, "ls", measured, "--best", "acc")[1]["checkpoints"])


def test_ls_says_that_no_step_has_the_metric(measured, root, capsys):
    assert "\nno step has the metric acc: give one of loss\n" in called(capsys, "ls", measured, "--best", "acc:max")[1]
    assert called(capsys, "ls", root, "--best", "acc")[1].endswith("\nno step has the metric acc\n")
    assert "no step has" not in called(capsys, "ls", measured, "--best", "loss")[1]


def test_the_rule_of_the_best_step_may_hold_a_colon():
    assert best_rule(None, None, "val:loss") == KeepBest(metric="val:loss", mode="min")
    assert best_rule(None, None, "val:loss:max") == KeepBest(metric="val:loss", mode="max")


def cut_data(path):
    os.truncate(data_file(path), 4096)


def remove_data(path):
    data_file(path).unlink()


def flip_manifest(path):
    data = bytearray(rank_manifest(path).read_bytes())
    data[len(data) // 2] ^= 1
    rank_manifest(path).write_bytes(data)


def flip_metadata(path):
    data = bytearray((path / ".metadata").read_bytes())
    data[len(data) // 2] ^= 1
    (path / ".metadata").write_bytes(data)


def flip_root(path):
    root_manifest(path).write_text(root_manifest(path).read_text().replace("torch", "totch"))


def remove_root(path):
    root_manifest(path).unlink()


def remove_metadata(path):
    (path / ".metadata").unlink()


def swap(path):
    shutil.rmtree(path)
    shutil.copytree(path.with_name("step_000000020"), path)


@pytest.mark.parametrize(
    ("damage", "file"),
    [
        (cut_data, "_0_0.distcp"),
        (remove_data, "_0_0.distcp"),
        (flip_manifest, ".0.bin"),
        (flip_metadata, ".metadata"),
        (flip_root, ".json"),
        (remove_root, ".json"),
        (remove_metadata, ".metadata"),
        (swap, ".json"),
    ],
)
def test_ls_marks_a_damaged_step(root, capsys, damage, file):
    damage(root / STEP)
    code, out, _ = called(capsys, "ls", root)
    assert code == 0
    assert "damaged" in next(line for line in out.splitlines() if line.startswith(STEP))
    assert re.search(rf"step 10: \S*{re.escape(file)}", out)
    assert "1 damaged" in out
    rows = document(capsys, "ls", root)[1]["checkpoints"]
    assert [(row["step"], row["is_damaged"], row["fault"] is None) for row in rows] == [
        (10, True, False),
        (20, False, True),
    ]


def test_ls_of_a_newer_format_calls_it_unreadable_and_not_damaged(root, capsys):
    from aio_ckpt.format.root_manifest import add_checksum

    manifest = root_manifest(root / STEP)
    text = manifest.read_bytes().split(b',\n "blake2b"')[0].replace(b'"format": [\n  1', b'"format": [\n  99')
    manifest.write_bytes(add_checksum(text + b"\n}\n"))
    first = document(capsys, "ls", root)[1]["checkpoints"][0]
    assert "99.0" in first["fault"]
    assert not first["is_damaged"]
    assert "unreadable" in called(capsys, "ls", root)[1]


def test_a_step_that_stock_dcp_wrote_over_is_not_damaged(root, capsys):
    shutil.rmtree(root / STEP)
    save_by_dcp({"w": torch.ones(3)}, root / STEP, aio_ckpt.dcp.Writer(root / STEP))
    save_by_dcp({"w": torch.ones(4)}, root / STEP)
    assert document(capsys, "ls", root)[1]["checkpoints"][0]["fault"] is None


def cut_metadata(path):
    os.truncate(path / ".metadata", 100)


def swap_metadata(path):
    (path / ".metadata").write_bytes(b"x")


@pytest.mark.parametrize("is_over_ours", [False, True])
@pytest.mark.parametrize(
    ("damage", "file"),
    [
        (lambda path: os.truncate(data_file(path), 10), "__0_0.distcp"),
        (remove_data, "__0_0.distcp"),
        (cut_metadata, ".metadata"),
        (swap_metadata, ".metadata"),
    ],
)
def test_ls_marks_a_torn_step_of_plain_dcp_and_prune_does_not_count_it(root, capsys, damage, file, is_over_ours):
    newest = root / "step_000000030"
    if is_over_ours:
        save_by_dcp({"w": torch.ones(3)}, newest, aio_ckpt.dcp.Writer(newest))
    save_by_dcp({"w": torch.ones(5), "step": 30}, newest)
    assert document(capsys, "ls", root)[1]["checkpoints"][-1]["fault"] is None
    damage(newest)
    row = document(capsys, "ls", root)[1]["checkpoints"][-1]
    assert (row["step"], row["is_damaged"], row["fault"].partition(":")[0]) == (30, True, file)
    code, _, err = called(capsys, "prune", root, "--keep-last", 1, "--yes")
    assert code == 1
    assert "nothing is deleted" in err
    assert [row["step"] for row in document(capsys, "ls", root)[1]["checkpoints"]] == [10, 20, 30]


def test_ls_follows_the_links_of_a_plain_checkpoint_to_its_data_files(root, capsys, tmp_path):
    newest = root / "step_000000030"
    save_by_dcp({"w": torch.ones(5)}, newest)
    file = data_file(newest)
    file.rename(tmp_path / "blob")
    file.symlink_to(tmp_path / "blob")
    assert document(capsys, "ls", root)[1]["checkpoints"][-1]["fault"] is None


@pytest.mark.parametrize("awk", [*filter(shutil.which, ("mawk", "gawk", "busybox"))])
def test_the_awk_of_the_docs_prints_the_first_column(root, capsys, awk):
    page = (Path(__file__).parents[2] / "docs/cli.md").read_text()
    flags, program = re.findall(r"`awk -F '([^']+)' '([^']+)'`", page)[0]
    table = called(capsys, "ls", root)[1]
    command = ["busybox", "awk"] if awk == "busybox" else [awk]
    found = subprocess.run([*command, "-F", flags, program], input=table, capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[:3] == ["directory", STEP, "step_000000020"]


def test_ls_reads_no_data(root, capsys):
    size = data_file(root / STEP).stat().st_size
    data_file(root / STEP).write_bytes(bytes(size))  # only verify finds that
    assert document(capsys, "ls", root)[1]["checkpoints"][0]["fault"] is None
    assert called(capsys, "verify", root / STEP)[0] == 1


@pytest.mark.parametrize("columns", [80, 130])
def test_ls_of_long_metrics_fits_the_terminal(measured, capsys, monkeypatch, columns):
    with SyncCheckpointEngine(measured) as engine:
        metrics = {f"metric/{number}": number / 3 for number in range(6)}
        engine.save({"w": torch.ones(3)}, step=5, metrics=metrics, extra={"commit": "c" * 60}).result()
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    lines = called(capsys, "ls", measured)[1].splitlines()
    assert max(map(len, lines)) <= columns
    assert all("step_00000000" in line for line in lines[1:6])
    assert lines[6].startswith("left out")


def test_du_tells_the_parts_of_a_root(root, capsys):
    (root / ".aio_ckpt/pending/x-1").mkdir(parents=True)
    (root / ".aio_ckpt/pending/x-1/f").write_bytes(bytes(1000))
    (root / "notes.txt").write_bytes(bytes(77))
    called(capsys, "protect", root, 10)
    found = document(capsys, "du", root)[1]
    sizes = [sum(file.stat().st_size for file in step.iterdir()) for step in sorted(root.glob("step_*"))]
    assert found["checkpoints"] == sum(sizes)
    assert found["protected"] == sizes[0]
    assert found["pending"] == 1000
    assert found["nbytes"] == sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
    assert found["nbytes"] == found["checkpoints"] + found["pending"] + found["other"]
    out = called(capsys, "du", root)[1]
    assert "pending" in out
    assert "abandoned" not in out


@pytest.mark.parametrize(
    ("change", "claims", "words"),
    [
        ({}, False, "runs"),
        ({}, True, "runs"),
        ({"started_ticks": 1}, True, "is dead: the next engine that saves clears it"),
        ({"pid_namespace": "another"}, True, "claims the root, 0 s since its heartbeat"),
        ({"pid_namespace": "another"}, False, "has lost the root: the next engine that saves clears it"),
        ({"host": "another"}, True, "claims the root, 0 s since its heartbeat"),
    ],
)
def test_ls_tells_whether_the_writer_of_a_pending_directory_lives(root, capsys, change, claims, words):
    owner = msgspec.structs.replace(Owner.of_this_process("s"), **change)
    pending = pending_path(root, owner, 1)
    pending.mkdir(parents=True)
    if claims:
        (root / CLAIM_FILE).write_bytes(encoded_owner(owner))
    out = called(capsys, "ls", root)[1]
    told = f"its writer, process {os.getpid()} on {owner.host}, {words}"
    assert f"pending (not a checkpoint): {pending.relative_to(root)} ({told})" in out
    assert document(capsys, "ls", root)[1]["pending_owners"] == [told]


def test_ls_of_a_pending_directory_whose_name_tells_nobody_says_so(root, capsys):
    (root / ".aio_ckpt/pending/x-1").mkdir(parents=True)
    (root / ".aio_ckpt/pending/x-1/data").write_bytes(b"half")
    assert ".aio_ckpt/pending/x-1 (its writer is unknown: the next" in called(capsys, "ls", root)[1]
    assert "'aio-ckpt ls' tells whether a writer lives" in called(capsys, "du", root)[1]


@pytest.mark.parametrize("command", ["ls", "verify"])
@pytest.mark.parametrize(
    ("damaged", "words"),
    [
        ([20], "load() falls back to step 10 if it meets the damage; `aio-ckpt rm ROOT 20 --allow-newest` deletes it"),
        ([10], "load() takes step 20; `aio-ckpt rm ROOT 10` deletes it"),
        ([10, 20], "load() finds no step that is not damaged; `aio-ckpt rm ROOT 10 20 --allow-newest` deletes them"),
    ],
)
def test_the_last_line_below_damaged_steps_says_what_to_do(root, capsys, command, damaged, words):
    for step in damaged:
        cut_data(root / f"step_{step:09d}")
    assert called(capsys, command, root)[1].splitlines()[-1] == words.replace("ROOT", str(root))
    assert called(capsys, *words.split("`")[1].replace("ROOT", str(root)).split()[1:])[0] == 0


def test_a_command_that_is_advised_can_be_pasted_into_a_shell(root, capsys):
    """Without quotes, that of ``runs 20`` would delete step 20 of ``runs``."""
    spaced = root.rename(root.with_name("runs 20 'a'"))
    cut_data(spaced / "step_000000020")
    command = called(capsys, "ls", spaced)[1].splitlines()[-1].split("`")[1]
    assert shlex.split(command) == ["aio-ckpt", "rm", str(spaced), "20", "--allow-newest"]


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_a_step_without_metadata_is_one_to_delete_by_hand(root, capsys, command):
    remove_metadata(root / STEP)
    assert called(capsys, command, root)[1].splitlines()[-1] == (f"load() takes step 20; delete by hand: {root / STEP}")


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_no_rm_is_advised_that_would_delete_a_good_copy_of_the_step(root, capsys, command):
    shutil.copytree(root / STEP, root / "checkpoint-10")
    remove_data(root / STEP)
    assert called(capsys, command, root)[1].splitlines()[-1] == (f"load() takes step 20; delete by hand: {root / STEP}")


def test_commands_that_are_advised_find_steps_of_a_name_of_its_own(tmp_path, capsys):
    names = ("--step-dir", "ck-{step}")
    with SyncCheckpointEngine(tmp_path, EngineConfig(step_dir="ck-{step}")) as engine:
        for step in (1, 2):
            engine.save({"w": torch.ones(3)}, step=step).result()
        remove_data(tmp_path / "ck-2")
        remove_data(tmp_path / "ck-1")
        with pytest.raises(
            CorruptCheckpointError, match=rf"`aio-ckpt verify {tmp_path} --step-dir 'ck-{{step}}'` lists"
        ):
            engine.load({"w": torch.zeros(3)})
    advised = f"aio-ckpt rm {tmp_path} 1 2 --allow-newest --step-dir 'ck-{{step}}'"
    for command in ("ls", "verify"):
        assert f"`{advised}` deletes them" in called(capsys, command, tmp_path, *names)[1]
    assert called(capsys, *shlex.split(advised)[1:])[0] == 0


def test_verify_of_one_damaged_checkpoint_knows_nothing_of_its_siblings(root, capsys):
    remove_data(root / "step_000000020")
    lines = called(capsys, "verify", root / "step_000000020")[1].splitlines()
    assert lines[-1] == f"`aio-ckpt rm {root} 20 --allow-newest` deletes it"
    assert lines[0] == "step_000000020: 1 fault"
    assert re.fullmatch(r"  __\S+_0_0\.distcp: missing", lines[1])


def test_a_directory_of_checkpoints_at_paths_is_told_with_one_of_them(tmp_path, capsys):
    """As Lightning's ``dirpath``: none of its checkpoints is a step of a root."""
    with SyncCheckpointEngine(tmp_path) as engine:
        for name in ("epoch=0-step=15.ckpt", "last.ckpt"):
            engine.save({"w": torch.ones(3)}, path=tmp_path / name).result()
    remedy = f"give {tmp_path}/last.ckpt, or --step-dir if their engine had a step_dir"
    hint = f"2 of its directories are checkpoints of another name: {remedy}"
    assert called(capsys, "ls", tmp_path)[1].splitlines()[0] == f"no committed checkpoint under {tmp_path}; {hint}"
    for command, *options in (("verify",), ("inspect",), ("prune", "--keep-last", 1), ("rm", 1)):
        code, _, err = called(capsys, command, tmp_path, *options)
        assert (code, hint in err) == (1, True), err
    shutil.move(tmp_path / ".aio_ckpt", tmp_path / "aside")
    code, _, err = called(capsys, "ls", tmp_path)
    assert (code, f"holds no step and nothing of an engine; {hint}" in err) == (1, True), err
    shutil.move(tmp_path / "aside", tmp_path / ".aio_ckpt")
    shutil.rmtree(tmp_path / "last.ckpt")
    assert "; a directory in it is a checkpoint of" in called(capsys, "ls", tmp_path)[1]
    shutil.rmtree(tmp_path / "epoch=0-step=15.ckpt")
    assert called(capsys, "ls", tmp_path)[1].splitlines()[0] == f"no committed checkpoint under {tmp_path}"


def test_a_directory_of_roots_is_told_with_them(tmp_path, capsys):
    runs = tmp_path / "runs"
    (runs / "logs").mkdir(parents=True)
    (runs / "notes.txt").touch()
    for name in ("a", "b"):
        with SyncCheckpointEngine(runs / name) as engine:
            engine.save({"w": torch.ones(3)}, step=1).result()
        hint = "; an engine saves into {}: give {}".format(
            *((runs / "a", "that") if name == "a" else (f"{runs}/a, {runs}/b", "one of them"))
        )
        for command in ("ls", "verify", "inspect"):
            code, _, err = called(capsys, command, runs)
            assert (code, hint in err) == (1, True), err


def test_steps_and_the_manifests_of_each_are_read_at_once(tmp_path, capsys, monkeypatch):
    """In a store, each of them takes a round trip: a bucket of 20 steps of 64 ranks would take a minute."""
    steps, ranks = 3, 3  # more than the threads of other commands
    for step in range(steps):
        contents = [content_of({"w": torch.full((3,), float(rank))}, rank) for rank in range(ranks)]
        write_checkpoint(tmp_path / f"step_{step:09d}", contents, step=step)
    all_at_once, real = threading.Barrier(steps * ranks, timeout=20), local._read_file

    def read(path: Path, max_bytes: int) -> bytes:
        if path.suffix == ".bin":
            all_at_once.wait()
        return real(path, max_bytes)

    monkeypatch.setattr(local, "_read_file", read)
    code, out, err = called(capsys, "ls", tmp_path)
    assert (code, out.splitlines()[-1].split(",")[0]) == (0, "3 checkpoints"), err
