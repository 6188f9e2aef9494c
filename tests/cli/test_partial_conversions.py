"""A conversion that was killed or interrupted: what it read is taken by the next one, and only what is still right."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest
import torch
from command_line import called, save_by_dcp
from warm_python import run_warm

import aio_ckpt
from aio_ckpt.cli.work import sources
from aio_ckpt.cli.work.partial import PartialTensors, partial_path
from aio_ckpt.sync import SyncCheckpointEngine

GROUPS = 6
KILLED_AT = 4
"""Group whose reading the kill interrupts: those before it are kept."""


@pytest.fixture
def state():
    """Groups of one tensor each, one of them with a second name and one transposed; an object and an empty tensor."""
    values: dict[str, object] = {
        f"t{number}": torch.full((64, 16), float(number), dtype=torch.bfloat16) for number in range(GROUPS)
    }
    values["t1"] = torch.arange(1024.0).reshape(32, 32).t()
    return values | {"tied": values["t2"], "lr": 0.5, "empty": torch.empty(0, 3)}


@pytest.fixture(params=["ours", "dcp"])
def source(request, state, tmp_path):
    if request.param == "dcp":
        save_by_dcp(state, tmp_path / "dcp")
        return tmp_path / "dcp"
    with SyncCheckpointEngine(tmp_path / "root") as engine:
        engine.save(state, step=7).result()
    return tmp_path / "root/step_000000007"


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    monkeypatch.setattr(sources, "_GROUP_BYTES", 1)


@pytest.mark.parametrize("out", ["out.pt", "out"])
def test_no_directory_is_left_where_a_removed_file_keeps_an_entry_while_it_is_mapped(
    source, tmp_path, capsys, monkeypatch, out
):
    """As on NFS and bindfs. The entry of the fake goes when the last tensor of the file is gone."""
    kept = tmp_path / f"{out}.partial" / ".nfs0001"
    unlink, rmdir = Path.unlink, Path.rmdir

    def unlink_on_nfs(path, missing_ok=False):
        if path.name == "tensors" and path.exists():
            path.rename(kept)
        else:
            unlink(path, missing_ok=missing_ok)

    def rmdir_on_nfs(path):
        if kept.exists() and str(kept) not in Path("/proc/self/maps").read_text():
            unlink(kept)
        rmdir(path)

    monkeypatch.setattr(Path, "unlink", unlink_on_nfs)
    monkeypatch.setattr(Path, "rmdir", rmdir_on_nfs)
    assert called(capsys, "convert", source, tmp_path / out, *(["--step", "9"] if out == "out" else []))[0] == 0
    assert not kept.parent.exists()


def kill_amid(source, out, *, by: str = "os.kill(os.getpid(), signal.SIGKILL)") -> str:
    """Convert in a process that is killed when it begins to read group ``KILLED_AT``. Returns its stderr."""
    program = f"""
        import os, signal, sys
        from aio_ckpt.cli import commands
        from aio_ckpt.cli.work import sources

        sources._GROUP_BYTES = 1
        real, calls = sources.read_leaves, []

        async def read_leaves(*args, **options):
            calls.append(args)
            if len(calls) > {KILLED_AT} + 1:  # the first call reads the objects
                {by}
            return await real(*args, **options)

        sources.read_leaves = read_leaves
        sys.exit(commands.run(["convert", *sys.argv[1:]]))
    """
    done = run_warm(program, str(source), str(out))
    assert done.returncode != 0
    assert not out.exists()
    return done.stderr


def same(got, wanted) -> bool:
    tensors = [name for name, value in wanted.items() if isinstance(value, torch.Tensor)]
    return got.keys() == wanted.keys() and got["lr"] == 0.5 and all(torch.equal(got[n], wanted[n]) for n in tensors)


@pytest.mark.parametrize("out", ["out.pt", "out"])
def test_a_killed_conversion_is_continued(source, state, tmp_path, capsys, read, out):
    out = tmp_path / out
    kill_amid(source, out)
    assert called(capsys, "convert", source, out)[0] == 0
    is_tied = source.name != "dcp"  # stock DCP stores such a tensor twice
    assert {name for name in read if name.startswith("t")} == {"t4", "t5"} | (set() if is_tied else {"tied"})
    got = torch.load(out) if out.suffix else aio_ckpt.read(next(out.glob("step_*")))
    assert same(got, state)
    assert (got["tied"].data_ptr() == got["t2"].data_ptr()) == is_tied
    assert not partial_path(out).exists()


def test_a_torn_group_is_read_again(source, state, tmp_path, capsys, read):
    out = tmp_path / "out.pt"
    kill_amid(source, out)
    with (partial_path(out) / "tensors").open("r+b") as file:
        file.write(b"\x55")  # of the first group
    with (partial_path(out) / "journal").open("ab") as file:
        file.write(b'\n{"group": 3, "cr')
    assert called(capsys, "convert", source, out)[0] == 0
    assert {"t0", "t4"} <= set(read)
    assert "t1" not in read
    assert same(torch.load(out), state)


@pytest.mark.parametrize(("old", "new"), [(b'"t1"', b'"t0"'), (b'"shape"', b'"shapf"')])
def test_a_changed_line_of_the_journal_does_not_count(source, state, tmp_path, capsys, read, old, new):
    out = tmp_path / "out.pt"
    kill_amid(source, out)
    journal = partial_path(out) / "journal"
    data = journal.read_bytes()
    assert old in data
    journal.write_bytes(data.replace(old, new, 1))
    assert called(capsys, "convert", source, out)[0] == 0
    assert same(torch.load(out), state)


def test_a_kill_twice_keeps_what_both_read(source, state, tmp_path, capsys, read):
    out = tmp_path / "out.pt"
    kill_amid(source, out)
    with (partial_path(out) / "journal").open("r+b") as file:
        file.truncate(os.path.getsize(file.name) - 5)  # the last line was cut off, so its group is read once more
    kill_amid(source, out)
    assert called(capsys, "convert", source, out)[0] == 0
    assert not {"t0", "t1", "t2", "t3", "t4"} & set(read)
    assert same(torch.load(out), state)


def test_a_source_that_changed_is_read_anew(source, state, tmp_path, capsys, read):
    out = tmp_path / "out.pt"
    kill_amid(source, out)
    os.utime(next(source.glob("*.distcp")), ns=(1, 1))
    assert called(capsys, "convert", source, out)[0] == 0
    assert {name for name in state if name.startswith("t")} <= set(read)
    assert same(torch.load(out), state)


def test_another_branch_is_read_anew_and_alone(tmp_path, capsys, read):
    with SyncCheckpointEngine(tmp_path / "root") as engine:
        engine.save({"model": {"a": torch.ones(3)}, "optimizer": {"a": torch.zeros(3)}}).result()
    assert called(capsys, "export", tmp_path / "root", tmp_path / "m.safetensors", "--branch", "model")[0] == 0
    assert read == ["model.a"]


def test_ctrl_c_says_what_is_kept(source, tmp_path, capsys):
    out = tmp_path / "out.pt"
    told = kill_amid(source, out, by="os.kill(os.getpid(), signal.SIGINT)")
    assert f"{out}.partial holds what was read: the same command continues" in told, told
    assert called(capsys, "convert", source, out)[0] == 0
    assert not partial_path(out).exists()


def test_a_failure_keeps_nothing(source, tmp_path, capsys):
    code, _, err = called(capsys, "convert", source, tmp_path / "all.safetensors")
    assert (code, "'lr' is no tensor" in err) == (1, True)
    assert not partial_path(tmp_path / "all.safetensors").exists()


def test_a_foreign_directory_of_that_name_stays(source, tmp_path, capsys):
    out = tmp_path / "out.pt"
    partial_path(out).mkdir()
    (partial_path(out) / "mine").write_text("mine")
    code, _, err = called(capsys, "convert", source, out)
    assert (code, "holds 'mine'" in err) == (2, True), err
    assert (partial_path(out) / "mine").read_text() == "mine"


def test_two_conversions_to_one_place_exclude_each_other(source, tmp_path, capsys):
    with PartialTensors(tmp_path / "out.pt"):
        code, _, err = called(capsys, "convert", source, tmp_path / "out.pt")
    assert (code, "writes here" in err) == (1, True), err
    assert called(capsys, "convert", source, tmp_path / "out.pt")[0] == 0


def test_a_full_disk_says_what_is_needed(source, tmp_path, capsys, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    code, _, err = called(capsys, "convert", source, tmp_path / "out.pt")
    assert (code, "a conversion needs room for its tensors" in err) == (1, True), err
    assert not partial_path(tmp_path / "out.pt").exists()


def test_a_file_system_without_fallocate_will_do(source, state, tmp_path, capsys, monkeypatch):
    def emulated(descriptor: int, at: int, nbytes: int) -> None:
        """As glibc does on a file system such as ramfs or NFS 3."""
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        os.pwrite(descriptor, b"\0", at + nbytes - 1)

    monkeypatch.setattr(os, "posix_fallocate", emulated)
    assert called(capsys, "convert", source, tmp_path / "out.pt")[0] == 0
    assert same(torch.load(tmp_path / "out.pt"), state)
