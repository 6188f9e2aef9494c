"""The command line: what it shows, and its exit codes."""

from __future__ import annotations

import errno
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from child_python import child_environment
from command_line import called, document, flip, save_by_dcp, state
from saved_files import DATA_FILE, RANK_MANIFEST, root_manifest
from warm_python import WarmPython

from aio_ckpt.checkpoint import verify
from aio_ckpt.cli import commands as cli
from aio_ckpt.cli import console
from aio_ckpt.config import EngineConfig
from aio_ckpt.engine.engine import CheckpointEngine
from aio_ckpt.format.root_manifest import FORMAT_MAJOR, FORMAT_MINOR
from aio_ckpt.reports import amount
from aio_ckpt.sync import SyncCheckpointEngine

# -- ls ---------------------------------------------------------------------------------------------


def test_ls_shows_each_step_with_its_bytes_ranks_and_torch(root, capsys):
    code, out, _ = called(capsys, "ls", root)
    lines = out.splitlines()
    assert code == 0
    assert len(lines) == 4
    for line, step in zip(lines[1:3], (10, 20), strict=True):
        assert line.startswith(f"step_{step:09d}")
        assert torch.__version__ in line
        assert "2.4" in line
        assert "MB" in line


def test_ls_json_tells_what_the_table_tells_and_what_is_no_checkpoint(root, capsys):
    (root / ".aio_ckpt/pending/x-1").mkdir(parents=True)
    (root / ".aio_ckpt/abandoned/1-step_000000030").mkdir(parents=True)
    code, found = document(capsys, "ls", root)
    assert code == 0
    assert [row["step"] for row in found["checkpoints"]] == [10, 20]
    assert found["checkpoints"][0]["torch"] == torch.__version__
    assert found["checkpoints"][0]["nbytes"] == sum(path.stat().st_size for path in (root / "step_000000010").iterdir())
    assert found["pending"] == [".aio_ckpt/pending/x-1"]
    assert found["abandoned"] == [".aio_ckpt/abandoned/1-step_000000030"]
    assert ".aio_ckpt/pending/x-1" in called(capsys, "ls", root)[1]


def test_ls_has_a_column_for_extra_only_if_a_step_has_any(root, capsys):
    assert "extra" not in called(capsys, "ls", root)[1]
    extra = {"loss": 1.2345678, "epoch": 4, "run": "a b\x1b[2J", "config": {"lr": 0.5}, "log": "x" * 100}
    with SyncCheckpointEngine(root) as engine:
        engine.save(state(), step=30, extra=extra).result()
        engine.save(state(), step=40, extra={"loss": 1.23, "epoch": 4}).result()
    lines = called(capsys, "ls", root)[1].splitlines()
    assert [line.split()[-1] for line in lines[:3]] == ["extra", "-", "-"]
    assert lines[3].endswith("  loss=1.23457 epoch=4 run=a b\\x1b[2J c...")
    assert lines[4].endswith("  loss=1.23 epoch=4")
    rows = document(capsys, "ls", root)[1]["checkpoints"]
    assert [row["extra"] for row in rows] == [{}, {}, extra, {"loss": 1.23, "epoch": 4}]


def test_inspect_shows_the_whole_extra(root, capsys):
    extra = {"loss": 1.5, "config": {"lr": 0.5, "names": ["x" * 60, None]}}
    assert "extra" not in called(capsys, "inspect", root)[1]
    assert document(capsys, "inspect", root)[1]["extra"] == {}
    with SyncCheckpointEngine(root) as engine:
        engine.save(state(), step=30, extra=extra).result()
    words = f'loss=1.5 config={{"lr":0.5,"names":["{"x" * 60}",null]}}'
    assert f"extra    {words}" in called(capsys, "inspect", root)[1].splitlines()
    assert document(capsys, "inspect", root)[1]["extra"] == extra


def test_ls_lists_a_checkpoint_with_a_broken_manifest_and_says_so(root, capsys):
    root_manifest(root / "step_000000010").write_text("{")
    code, out, _ = called(capsys, "ls", root)
    assert code == 0
    assert f"step 10: {root_manifest(root / 'step_000000010').name}" in out
    assert "step_000000020" in out


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_ls_of_a_checkpoint_says_so_and_where_to_look(root, capsys, options):
    checkpoint = root / "step_000000020"
    code, out, err = called(capsys, "ls", checkpoint, *options)
    assert (code, out) == (1, "")
    assert f"{checkpoint} is a checkpoint, no root" in err
    assert f"`aio-ckpt inspect {checkpoint}`" in err
    assert f"`aio-ckpt ls {root}`" in err
    shutil.copy(checkpoint / ".metadata", root)  # a root that somebody saved into is still one
    assert called(capsys, "ls", root)[0] == 0


@pytest.mark.parametrize("command", ["ls", "inspect", "verify", "protect"])
def test_a_path_that_is_no_utf8_is_shown_escaped_and_told_whole(root, capsysbinary, command):
    odd = os.fsdecode(os.fsencode(root) + b"-\xff")
    root.rename(odd)
    step = ["20"] if command == "protect" else []
    assert cli.run([command, odd, *step]) == 0
    capsysbinary.readouterr().out.decode()
    assert cli.run([command, odd, *step, "--json"]) == 0
    told = json.loads(capsysbinary.readouterr().out)
    if command == "protect":
        assert told == {"step": 20, "is_protected": True}
        return
    first = told["checkpoints"][0] if "checkpoints" in told else told
    assert Path(first["path"]).parent == Path(odd)


def test_an_empty_root_whose_path_is_no_utf8_is_listed(tmp_path, capsysbinary):
    odd = os.fsdecode(os.fsencode(tmp_path / "empty") + b"-\xff")
    (Path(odd) / ".aio_ckpt").mkdir(parents=True)
    assert cli.run(["ls", odd]) == 0
    assert b"no committed checkpoint under" in capsysbinary.readouterr().out


def test_ls_of_a_root_without_a_step_is_no_error(tmp_path, capsys):
    (tmp_path / ".aio_ckpt").mkdir()
    code, out, _ = called(capsys, "ls", tmp_path)
    assert code == 0
    assert out.startswith("no committed checkpoint")


def test_a_root_with_names_of_its_own_is_listed_by_its_pattern(tmp_path, capsys):
    with SyncCheckpointEngine(tmp_path, EngineConfig(step_dir="epoch-{step}.ckpt")) as engine:
        engine.save({"a": torch.ones(2)}, step=3).result()
    assert document(capsys, "ls", tmp_path)[1]["checkpoints"] == []
    found = document(capsys, "ls", tmp_path, "--step-dir", "epoch-{step}.ckpt")[1]
    assert [row["step"] for row in found["checkpoints"]] == [3]


# -- inspect ----------------------------------------------------------------------------------------


def test_inspect_tells_names_dtypes_shapes_bytes_step_and_torch(root, capsys):
    code, found = document(capsys, "inspect", root / "step_000000010")
    leaves = {leaf["name"]: leaf for leaf in found["leaves"]}
    assert code == 0
    assert found["step"] == 10
    assert found["written_by"]["torch"] == torch.__version__
    assert found["format"] == f"aio_ckpt {FORMAT_MAJOR}.{FORMAT_MINOR}"
    assert found["world_size"] == 1
    assert set(leaves) == {"model.embed", "model.head", "model.bias", "lr", "rng.rank0"}
    embed, bias = leaves["model.embed"], leaves["model.bias"]
    assert (embed["dtype"], embed["shape"], embed["nbytes"]) == ("float32", [600, 1000], 2_400_000)
    assert (bias["dtype"], bias["shape"], bias["nbytes"]) == ("bfloat16", [7], 14)
    assert leaves["lr"]["kind"] == "object"
    assert found["object_bytes"] == leaves["lr"]["nbytes"] > 0


def test_inspect_counts_a_tied_weight_once(root, capsys):
    _, found = document(capsys, "inspect", root)
    tied = [leaf["tied_to"] for leaf in found["leaves"] if leaf["name"] == "model.head"]
    assert tied == ["model.embed"]
    assert found["tensor_bytes"] == 2_400_000 + 14 + 16
    assert "model.head = model.embed" in called(capsys, "inspect", root)[1]


def test_inspect_of_a_root_takes_the_newest(root, capsys):
    code, out, _ = called(capsys, "inspect", root)
    assert code == 0
    assert "step     20\n" in out
    assert "model.embed" in out
    assert "(600, 1000)" in out


def test_inspect_reads_what_stock_dcp_wrote(tmp_path, capsys):
    save_by_dcp({"w": torch.ones(3, 5, dtype=torch.int16), "n": 1}, tmp_path / "plain")
    code, found = document(capsys, "inspect", tmp_path / "plain")
    leaves = {leaf["name"]: leaf for leaf in found["leaves"]}
    assert code == 0
    assert (found["format"], found["step"], found["written_by"]) == ("plain DCP", None, {})
    assert (leaves["w"]["dtype"], leaves["w"]["shape"], leaves["w"]["nbytes"]) == ("int16", [3, 5], 30)


def test_a_name_cannot_steer_the_terminal(tmp_path, capsys):
    with SyncCheckpointEngine(tmp_path) as engine:
        engine.save({"\x1b[2Jgone": torch.ones(2), "[red]x[/red]": torch.ones(2)}, step=1).result()
    _, out, _ = called(capsys, "inspect", tmp_path)
    assert "\x1b" not in out
    assert "\\x1b[2Jgone" in out
    assert "[red]x[/red]" in out


# -- verify -----------------------------------------------------------------------------------------


def test_verify_of_a_good_root_ends_with_0(root, capsys):
    code, out, _ = called(capsys, "verify", root)
    assert code == 0
    assert "step_000000010: good" in out
    assert "2 checkpoints, 0 with faults" in out


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_short_work_tells_no_progress_to_a_pipe(root, tmp_path, capsys, options):
    assert called(capsys, "verify", root, *options)[2] == ""
    assert called(capsys, "cp", root, tmp_path / "new", *options)[2] == ""


def test_verify_shows_how_far_it_is(root, capsys, monkeypatch):
    monkeypatch.setattr(console, "_QUIET_SECS", 0.0)
    _, _, err = called(capsys, "verify", root / "step_000000020")
    assert re.fullmatch(r"verify: 2.4\d* MB of 2.4\d* MB, \S+ .B/s, 0 s left", err.splitlines()[-1])


async def test_verify_names_file_and_tensor_of_a_flipped_bit_and_ends_with_1(root, capsys):
    item = await flip(root / "step_000000010", "model.embed")
    code, out, _ = called(capsys, "verify", root / "step_000000010")
    assert code == 1
    assert item.file in out
    assert "model.embed" in out
    code, found = document(capsys, "verify", root / "step_000000010")
    (checkpoint,) = found["checkpoints"]
    assert code == 1
    assert found["is_good"] is False
    assert (item.file, "model.embed") in {(fault["file"], fault["tensor"]) for fault in checkpoint["faults"]}


async def test_one_bad_checkpoint_of_a_root_does_not_hide_the_others(root, capsys):
    await flip(root / "step_000000010", "model.bias")
    code, out, _ = called(capsys, "verify", root, "--workers", 1)
    assert code == 1
    assert "model.bias" in out
    assert "step_000000020: good" in out
    assert "2 checkpoints, 1 with faults" in out


@pytest.mark.parametrize("name", [".metadata", RANK_MANIFEST, DATA_FILE])
def test_a_missing_file_is_a_fault_of_its_checkpoint(root, capsys, name):
    (path,) = (root / "step_000000010").glob(name)
    path.unlink()
    code, out, _ = called(capsys, "verify", root)
    assert code == 1
    assert path.name in out
    assert "step_000000020: good" in out


def test_a_disk_that_fails_is_a_fault_and_no_reason_to_delete(root, capsys, monkeypatch):
    stock = os.preadv

    def preadv(number, buffers, offset, *flags):
        if "step_000000020" in os.readlink(f"/proc/self/fd/{number}"):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return stock(number, buffers, offset, *flags)

    monkeypatch.setattr(os, "preadv", preadv)
    code, out, _ = called(capsys, "verify", root)
    assert (code, os.strerror(errno.ESTALE) in out, "aio-ckpt rm" in out) == (1, True, False), out


def test_two_directories_that_were_swapped_are_a_fault_of_both_and_a_copy_of_another_name_is_none(root, capsys):
    one, two = root / "step_000000010", root / "step_000000020"
    shutil.copytree(one, root / "best")
    one.rename(root / "aside")
    two.rename(one)
    (root / "aside").rename(two)
    for path, holds in ((one, 20), (two, 10)):
        code, out, _ = called(capsys, "verify", path)
        assert code == 1
        assert f"{root_manifest(path).name}: holds step {holds}" in out
    assert called(capsys, "verify", root)[0] == 1
    assert called(capsys, "verify", root / "best")[0] == 0


def test_a_checkpoint_of_a_newer_format_is_a_fault_that_names_it(root, capsys):
    manifest = root_manifest(root / "step_000000020")
    changed = json.loads(manifest.read_text())
    changed["format"] = [99, 0]
    manifest.write_text(json.dumps(changed))
    code, out, _ = called(capsys, "verify", root)
    assert code == 1
    assert "99.0" in out
    assert "aio-ckpt rm" not in out, "a newer aio_ckpt reads it"


def test_verify_reads_what_stock_dcp_wrote(tmp_path, capsys):
    save_by_dcp({"w": torch.ones(300)}, tmp_path / "plain")
    assert called(capsys, "verify", tmp_path / "plain")[0] == 0


# -- errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["frobnicate"],
        ["verify"],
        ["ls", "--step-dir", "nostep", "."],
        ["verify", ".", "--workers", "0"],
        ["demo", "--steps", "1"],
        ["demo", "--seed", "-1"],
        *(["rescue", "--stale-after", secs, "."] for secs in ("nan", "inf", "0", "-1")),
    ],
)
def test_a_wrong_call_is_one_line_and_exit_code_2(arguments, capsys):
    code, out, err = called(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("aio-ckpt: ")
    assert err.count("\n") == 1


def test_a_command_that_does_not_exist_names_one_that_does(capsys):
    error = called(capsys, "list")[2]
    assert error.startswith("aio-ckpt: No such command 'list'.")  # newer versions of click add: Did you mean 'ls'?
    assert "?." not in error


def test_too_little_memory_is_one_line_and_exit_code_1(root, capsys, monkeypatch):
    def fail(*_, **__):
        raise MemoryError

    monkeypatch.setattr(verify, "verify_checkpoint", fail)
    code, _, err = called(capsys, "verify", root)
    assert (code, err) == (1, "aio-ckpt: this machine lacks the memory for it\n")


def test_a_corrupt_checkpoint_is_one_line_and_exit_code_1(root, capsys):
    (root / "step_000000020" / ".metadata").write_bytes(b"no pickle")
    code, out, err = called(capsys, "inspect", root / "step_000000020")
    assert code == 1
    assert out == ""
    assert ".metadata" in err
    assert err.count("\n") == 1


def test_the_command_without_arguments_shows_its_commands(capsys):
    code, out, _ = called(capsys)
    assert code == 0
    for command in ("ls", "inspect", "verify", "demo"):
        assert f"\n  {command} " in out


def test_the_list_of_commands_cuts_no_text_at_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _, listed = called(capsys, "--help")[1].split("Commands:")
    assert "..." not in listed
    assert listed.count("\n  ") >= len(cli.commands.commands)


async def test_the_commands_work_inside_a_running_loop(root, capsys):
    assert called(capsys, "verify", root)[0] == 0


async def test_reading_commands_do_not_disturb_a_writer(root, capsys):
    async with CheckpointEngine(root) as engine:
        await engine.save(state(), step=30)
        code, found = document(capsys, "ls", root)
        await engine.save(state(), step=40)
    assert code == 0
    assert [row["step"] for row in found["checkpoints"]] == [10, 20, 30]


# -- as a program -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_python_m_shows_colours_on_a_terminal(root):
    leader, follower = pty.openpty()
    environment = child_environment(TERM="xterm-256color")
    environment.pop("NO_COLOR", None)
    python_m = "import runpy; runpy.run_module('aio_ckpt', run_name='__main__', alter_sys=True)"
    with WarmPython(python_m, "verify", str(root), stdout=follower, stderr=follower, env=environment) as child:
        os.close(follower)
        shown = _read_all(leader)
    assert child.returncode == 0
    assert b"\x1b[" in shown
    assert b"good" in shown


def _read_all(descriptor: int) -> bytes:
    found = b""
    try:
        while more := os.read(descriptor, 65536):
            found += more
    except OSError:  # how Linux tells the end of a terminal
        pass
    finally:
        os.close(descriptor)
    return found


def test_a_reader_that_has_seen_enough_gets_no_traceback(root):
    with subprocess.Popen(
        [sys.executable, "-m", "aio_ckpt", "ls", str(root)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=child_environment(),
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        assert child.stderr.read() == b""


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (58_064_896, "58.1 MB"), (999_600_000, "1 GB"), (10**18, "1e+03 PB")],
)
def test_amounts_have_three_digits(nbytes, words):
    assert amount(nbytes) == words


@pytest.mark.parametrize("command", ["ls", "inspect", "verify", "protect"])
def test_every_command_that_takes_a_root_knows_names_of_ones_own(tmp_path, capsys, command):
    with SyncCheckpointEngine(tmp_path, EngineConfig(step_dir="run{step}x")) as engine:
        engine.save({"w": torch.ones(3)}, step=7).result()
    step = ["7"] if command == "protect" else []
    code, told = document(capsys, command, tmp_path, *step, "--step-dir", "run{step}x")
    assert code == 0
    assert "7" in json.dumps(told)
    assert told.get("checkpoints", [0])


async def test_json_of_verify_says_that_it_is_not_good(root, capsys):
    await flip(root / "step_000000010", "model.embed")
    code, told = document(capsys, "verify", root)
    assert (code, told["is_good"]) == (1, False)
    assert [bool(each["faults"]) for each in told["checkpoints"]] == [True, False]


def test_workers_is_how_many_reads_verify_has_in_flight(root, capsys, monkeypatch):
    seen = []

    async def look(*_, readers, **__):
        seen.append(readers)
        return ()

    monkeypatch.setattr(verify, "verify_checkpoint", look)
    assert called(capsys, "verify", root, "--workers", "3")[0] == 0
    assert seen == [3, 3]


# -- urls -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["ls", "inspect", "verify", "rescue"])
def test_a_file_url_is_taken_and_another_url_refused_by_name(root, capsys, command) -> None:
    code, out, _ = called(capsys, command, root.as_uri())
    assert code == 0
    assert "step" in out or "rescue" in out
    code, _, err = called(capsys, command, "hf://bucket/x")
    assert code != 0
    assert "'hf://bucket/x': a URL (hf:), and only local file systems are supported" in err
