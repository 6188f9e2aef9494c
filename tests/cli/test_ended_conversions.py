"""How conversions end: whole, or with nothing left beside the place of the result."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import tempfile

import pytest
import torch
from command_line import called, save_by_dcp
from warm_python import run_warm

import aio_ckpt
from aio_ckpt.sync import SyncCheckpointEngine

TENSORS = 6


@pytest.fixture
def state():
    """Tensors, one of them with a second name and one transposed; an object and an empty tensor."""
    values: dict[str, object] = {
        f"t{number}": torch.full((64, 16), float(number), dtype=torch.bfloat16) for number in range(TENSORS)
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


def same(got, wanted) -> bool:
    tensors = [name for name, value in wanted.items() if isinstance(value, torch.Tensor)]
    return got.keys() == wanted.keys() and got["lr"] == 0.5 and all(torch.equal(got[n], wanted[n]) for n in tensors)


@pytest.mark.parametrize("out", ["out.pt", "out"])
def test_tied_transposed_and_empty_tensors_are_converted(source, state, tmp_path, capsys, out):
    out = tmp_path / out
    assert called(capsys, "convert", source, out)[0] == 0
    got = torch.load(out) if out.suffix else aio_ckpt.read(next(out.glob("step_*")))
    assert same(got, state)
    is_tied = source.name != "dcp"  # stock DCP stores such a tensor twice
    assert (got["tied"].data_ptr() == got["t2"].data_ptr()) == is_tied


PROGRAM = """
    import os, signal, sys
    from aio_ckpt.cli import commands
    from aio_ckpt.cli import sources
    from aio_ckpt.sync import SyncCheckpointEngine

    when, number, *arguments = sys.argv[1:]

    def end():
        os.kill(os.getpid(), int(number))

    if when == "reading":
        real = sources.assemble
        def assemble(*args, **options):
            end()  # all tensors are in the mapped file
            return real(*args, **options)
        sources.assemble = assemble
    else:
        real_file, real_step = SyncCheckpointEngine.save_file, SyncCheckpointEngine.save
        def save_file(self, *args, **options):
            ticket = real_file(self, *args, **options)
            end()
            return ticket
        def save(self, *args, **options):
            ticket = real_step(self, *args, **options)
            end()
            return ticket
        SyncCheckpointEngine.save_file, SyncCheckpointEngine.save = save_file, save
    sys.exit(commands.run(["convert", *arguments]))
"""


@pytest.mark.sampled
@pytest.mark.parametrize("when", ["reading", "writing"])
@pytest.mark.parametrize("out", ["out.pt", "out"])
def test_ctrl_c_leaves_nothing_and_ends_with_130(source, state, tmp_path, capsys, out, when):
    before = {path.name for path in tmp_path.iterdir()}
    done = run_warm(PROGRAM, when, str(signal.SIGINT.value), str(source), str(tmp_path / out))
    assert (done.returncode, done.stderr.splitlines()[-1]) == (130, "aio-ckpt: interrupted"), done.stderr
    assert {path.name for path in tmp_path.iterdir()} - before <= {out}
    assert not [*tmp_path.glob("out/.aio_ckpt/pending/*")]
    if (tmp_path / "out.pt").exists():  # the result was whole before Ctrl-C came
        assert same(torch.load(tmp_path / "out.pt"), state)
    for step in tmp_path.glob("out/step_*"):
        assert same(aio_ckpt.read(step), state)


def test_a_killed_conversion_leaves_nothing(source, tmp_path):
    before = sorted(tmp_path.iterdir())
    done = run_warm(PROGRAM, "reading", str(signal.SIGKILL.value), str(source), str(tmp_path / "out.pt"))
    assert done.returncode == -signal.SIGKILL
    assert sorted(tmp_path.iterdir()) == before


def test_a_branch_is_read_alone(tmp_path, capsys, read):
    with SyncCheckpointEngine(tmp_path / "root") as engine:
        engine.save({"model": {"a": torch.ones(3)}, "optimizer": {"a": torch.zeros(3)}}).result()
    assert called(capsys, "export", tmp_path / "root", tmp_path / "m.safetensors", "--branch", "model")[0] == 0
    assert read == ["model.a"]


def test_a_failure_leaves_nothing(source, tmp_path, capsys):
    code, _, err = called(capsys, "convert", source, tmp_path / "all.safetensors")
    assert (code, "'lr' is no tensor" in err) == (1, True)
    assert not [path for path in tmp_path.iterdir() if path.is_file()]


def test_a_full_disk_says_what_is_needed_and_nothing_is_left(source, tmp_path, capsys, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    code, _, err = called(capsys, "convert", source, tmp_path / "out.pt")
    assert (code, "a conversion needs room for its tensors" in err) == (1, True), err
    assert not [path for path in tmp_path.iterdir() if path.is_file()]


def test_a_place_that_cannot_be_written_is_named_with_a_way_on(source, tmp_path, capsys, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(tmp_path / "tmp1234"))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    code, _, err = called(capsys, "convert", source, tmp_path / "out.pt")
    assert (code, "tmp1234" in err) == (1, False)
    assert f"{tmp_path}: Permission denied: give a path that this user may write to" in err


def test_a_file_system_without_fallocate_will_do(source, state, tmp_path, capsys, monkeypatch):
    def emulated(descriptor: int, at: int, nbytes: int) -> None:
        """As glibc does on a file system such as ramfs or NFS 3."""
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_APPEND:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        os.pwrite(descriptor, b"\0", at + nbytes - 1)

    monkeypatch.setattr(os, "posix_fallocate", emulated)
    assert called(capsys, "convert", source, tmp_path / "out.pt")[0] == 0
    assert same(torch.load(tmp_path / "out.pt"), state)
