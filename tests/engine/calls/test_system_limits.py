"""Few threads, few open files, no fsync, a read-only file system: the work is done, or an error names the way on."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as stock
from slow import slow
from system_limits import names_of_threads, threads_up_to
from warm_python import run_warm

import aio_ckpt
from aio_ckpt import CheckpointEngine, EngineConfig, SyncCheckpointEngine
from aio_ckpt.cli import commands as cli
from aio_ckpt.dcp import Reader, Writer
from aio_ckpt.errors import AioCkptError, SystemLimitError, WriteError
from aio_ckpt.memory import read_buffers
from aio_ckpt.storage import data_file, durability, local

pytestmark = pytest.mark.filterwarnings("ignore:.*distributed is")
REFUSED = r"the system refuses a thread \(can't start new thread\): raise the limit on processes \(ulimit -u, here"


def state(value: float = 1.0) -> dict[str, Any]:
    return {"w": torch.full((1000,), value), "b": torch.full((10,), value)}


def save_and_load(root: Path) -> None:
    with SyncCheckpointEngine(root) as engine:
        engine.prepare(state(), step=1).result()
        engine.save(state(2.0), step=1).result()
        engine.save_file(state(2.0), root.parent / "w.pt").result()
        engine.load(back := state(0.0))
    assert bool((back["w"] == 2.0).all())


# -- threads --------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_an_engine_works_with_the_threads_that_it_gets_or_names_the_limit_and_leaves_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, count: int
) -> None:
    before = names_of_threads()
    with threads_up_to(count) as refused:
        if count < 2:  # the loop, and one that reads and writes
            with pytest.raises(SystemLimitError, match=REFUSED):
                save_and_load(tmp_path / "root")
        else:
            save_and_load(tmp_path / "root")
            assert f"the system gives {count - 1} of 8 threads" in caplog.text
    assert refused
    assert names_of_threads() <= before
    save_and_load(tmp_path / "root2")


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("call", ["load", "read", "dcp.save", "dcp.load", "ls"])
def test_calls_without_an_engine_work_with_the_threads_that_they_get_or_name_the_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], call: str, count: int
) -> None:
    with SyncCheckpointEngine(tmp_path / "root") as engine:
        path = engine.save(state(2.0), step=1).result().path

    def ls() -> None:
        if cli.run(["ls", str(tmp_path / "root")]):
            raise SystemLimitError(errno.EAGAIN, capsys.readouterr().err)

    calls: dict[str, Callable[[], object]] = {
        "load": lambda: aio_ckpt.load(path, state()),
        "read": lambda: aio_ckpt.read(path),
        "dcp.save": lambda: stock.save(state(), storage_writer=Writer(tmp_path / "dcp"), no_dist=True),
        "dcp.load": lambda: stock.load(state(), storage_reader=Reader(path), no_dist=True),
        "ls": ls,
    }
    before = names_of_threads()
    with threads_up_to(count):
        if count < 2:
            with pytest.raises(BaseException, match="ulimit -u") as caught:
                calls[call]()
            assert isinstance(caught.value, SystemLimitError) or "SystemLimitError" in str(caught.value)
        else:
            calls[call]()
    assert names_of_threads() <= before
    calls[call]()


async def test_a_delete_that_gets_no_thread_deletes_nothing_neither_now_nor_later(tmp_path: Path) -> None:
    async with CheckpointEngine(tmp_path) as engine:
        for step in (1, 2):
            await engine.save(state(), step=step)
        await asyncio.to_thread(int)  # a thread of the loop's pool is idle now
        with threads_up_to(0), pytest.raises(SystemLimitError, match=REFUSED):
            await engine.delete(1)
        assert await engine.steps() == [1, 2]
        await engine.delete(1)
        assert await engine.steps() == [2]


# -- open files -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_checkpoint_of_more_files_than_the_process_may_open_is_read(tmp_path: Path) -> None:
    """By all that reads data files: in a child, because the limit is that of a process."""
    tensors = {f"w{number}": torch.full((4,), float(number)) for number in range(60)}
    writer = stock.FileSystemWriter(tmp_path / "dcp", single_file_per_rank=False)
    stock.save(tensors, storage_writer=writer, no_dist=True)
    with SyncCheckpointEngine(tmp_path / "root") as engine:
        engine.save_file(tensors, tmp_path / "m.safetensors", max_shard_bytes=16).result()
    child = """
        import os, resource, sys, torch, torch.distributed.checkpoint as stock, aio_ckpt
        from aio_ckpt.cli.commands import run
        from aio_ckpt.dcp import Reader
        path = sys.argv[1] + "/dcp"
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
        template = {f"w{number}": torch.zeros(4) for number in range(60)}
        def right(found):
            assert all(found[f"w{number}"][0] == number for number in range(60))
        open_files = len(os.listdir("/proc/self/fd"))
        aio_ckpt.load(path, template)
        right(template)
        right(aio_ckpt.read(path))
        stock.load(template, storage_reader=Reader(path), no_dist=True)
        assert run(["verify", path]) == 0
        assert run(["convert", path, sys.argv[1] + "/a.pt"]) == 0
        right(torch.load(sys.argv[1] + "/a.pt"))
        assert run(["convert", sys.argv[1] + "/m.safetensors.index.json", sys.argv[1] + "/b.pt"]) == 0
        right(torch.load(sys.argv[1] + "/b.pt"))
        assert len(os.listdir("/proc/self/fd")) == open_files
    """
    done = run_warm(child, str(tmp_path), options=())
    assert done.returncode == 0, done.stderr


def test_a_read_that_gets_no_descriptor_at_all_names_the_limit(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path) as engine:
        path = engine.save(state(), step=1).result().path
    child = """
        import os, resource, sys, aio_ckpt
        held = {int(name) for name in os.listdir("/proc/self/fd")}
        free = [number for number in range(100) if number not in held]
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[3], free[3]))  # three for the loop, none for a file
        try:
            aio_ckpt.read(sys.argv[1])
        except aio_ckpt.ReadError as error:
            assert f"may have {free[3]} files open" in str(error) and "ulimit -n" in str(error), error
        else:
            sys.exit("it was read")
    """
    done = run_warm(child, str(path), options=())
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("by", ["ours", "dcp"])
@pytest.mark.parametrize("more", [2, slow(3)])
def test_verify_that_gets_no_descriptor_calls_no_file_damaged(tmp_path: Path, by: str, more: int) -> None:
    if by == "ours":
        with SyncCheckpointEngine(tmp_path) as engine:
            path = engine.save(state(), step=1).result().path
    else:
        path = tmp_path / "dcp"
        stock.save({"w": torch.ones(3)}, checkpoint_id=path, no_dist=True)
    child = """
        import os, resource, sys
        from aio_ckpt.checkpoint import verify  # opens files
        from aio_ckpt.cli.commands import run
        held = {int(name) for name in os.listdir("/proc/self/fd")}
        limit = [number for number in range(100) if number not in held][int(sys.argv[2])]
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        sys.exit(run(["verify", sys.argv[1]]))
    """
    done = run_warm(child, str(path), str(more), options=())
    assert (done.returncode, done.stdout) == (1, "")
    assert "Too many open files: this process may have" in done.stderr
    assert "ulimit -n" in done.stderr


def test_a_load_that_gets_no_memory_to_read_with_names_the_limit_and_touches_nothing(tmp_path: Path) -> None:
    with SyncCheckpointEngine(tmp_path / "root") as engine:
        engine.save(state(2.0), step=1).result()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(read_buffers, "map_private", no_memory)
            with pytest.raises(SystemLimitError, match=r"no memory for read buffers of \d+ bytes: .*ulimit -v"):
                engine.load(back := state(0.0))
        assert not back["w"].any()
        engine.load(back)
        assert back["w"].eq(2).all()


def no_memory(_: int) -> None:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def test_an_engine_without_open_files_to_come_names_the_limit_and_leaves_no_thread(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    before = names_of_threads()
    monkeypatch.setattr(asyncio.events, "new_event_loop", refuse)
    with pytest.raises(SystemLimitError, match=r"Too many open files: this process may have .*raise the limit \(ulim"):
        SyncCheckpointEngine(tmp_path)
    assert names_of_threads() <= before
    assert not caplog.records


# -- fsync ----------------------------------------------------------------------------------------

NO_SYNC = [
    ("step", errno.EINVAL),
    ("path", errno.ENOTSUP),
    ("file", errno.ENOSYS),
    ("files", errno.EINVAL),
    ("dcp", errno.EINVAL),
]


def refused_sync(monkeypatch: pytest.MonkeyPatch, code: int, *, of_files: bool) -> list[str]:
    """A file system without fsync of directories, or of files, too. Returns the files whose sync it refused."""
    refused: list[str] = []

    def without(real: Callable[[int], None]) -> Callable[[int], None]:
        def sync(descriptor: int) -> None:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            if of_files or os.path.isdir(path):
                refused.append(path)
                raise OSError(code, os.strerror(code))
            real(descriptor)

        return sync

    monkeypatch.setattr(os, "fsync", without(os.fsync))
    monkeypatch.setattr(os, "fdatasync", without(os.fdatasync))
    return refused


def commits(root: Path) -> dict[str, Callable[[], object]]:
    """Everything that makes a file or a checkpoint durable."""

    def with_engine(use: Callable[[SyncCheckpointEngine], object]) -> Callable[[], object]:
        def call() -> object:
            with SyncCheckpointEngine(root) as engine:
                return use(engine)

        return call

    return {
        "step": with_engine(lambda engine: engine.save(state(), step=1).result()),
        "path": with_engine(lambda engine: engine.save(state(), path=root / "best").result()),
        "file": with_engine(lambda engine: engine.save_file(state(), root / "w.pt").result()),
        "files": with_engine(
            lambda engine: engine.save_file(state(), root / "w.safetensors", max_shard_bytes=4000).result()
        ),
        "dcp": lambda: stock.save(state(), storage_writer=Writer(root / "dcp"), no_dist=True),
    }


@pytest.mark.parametrize(("commit", "code"), NO_SYNC)
def test_without_fsync_of_files_nothing_is_committed_and_the_error_names_the_way_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commit: str, code: int
) -> None:
    refused = refused_sync(monkeypatch, code, of_files=True)
    with pytest.raises(BaseException, match=r"this file system refuses fsync.*save to a local disk") as caught:
        commits(tmp_path / "root")[commit]()
    assert isinstance(caught.value, WriteError) or "WriteError" in str(caught.value)
    files = [path for path in refused if not os.path.isdir(path)]
    assert len(files) == len(set(files)), "no sync is tried again on the same pages"
    (tmp_path / "root").mkdir(exist_ok=True)
    visible = {name for name in os.listdir(tmp_path / "root") if not name.startswith(".")}
    assert visible <= {"dcp"}
    assert not (tmp_path / "root" / "dcp" / ".metadata").exists()


@pytest.mark.parametrize(("commit", "code"), NO_SYNC)
def test_without_fsync_of_directories_a_commit_succeeds_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, commit: str, code: int
) -> None:
    refused_sync(monkeypatch, code, of_files=False)
    durability.warn_of_unsynced_names.cache_clear()
    commits(tmp_path / "root")[commit]()
    told = [record for record in caplog.records if "refuses fsync of a directory" in record.getMessage()]
    assert len(told) == 1
    assert "may be missing or lack files" in told[0].getMessage()


# -- a read-only file system ----------------------------------------------------------------------


def mount_read_only(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    """Each change below ``root`` meets EROFS, as on a file system that is mounted for reading only."""

    def guarded(name: str) -> None:
        real = getattr(os, name)

        def call(path: Any, *arguments: Any, **options: Any) -> Any:
            is_change = name != "open" or arguments[0] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if is_change and isinstance(path, (str, os.PathLike)) and Path(path).is_relative_to(root):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), os.fspath(path))
            return real(path, *arguments, **options)

        monkeypatch.setattr(os, name, call)

    for name in ("open", "mkdir", "unlink", "rename", "replace", "utime", "chmod", "rmdir"):
        guarded(name)
    access = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: access(path, mode) and not (mode & os.W_OK and Path(path).is_relative_to(root))
    )

    def no_write(path: Path, *_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(local, "_write_file", no_write)
    monkeypatch.setattr(data_file, "create_direct", no_write)


def test_a_read_only_root_is_read_and_each_change_names_the_way_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "root"
    with SyncCheckpointEngine(root) as engine:
        for step in (1, 2):
            engine.save(state(float(step)), step=step).result()
    mount_read_only(monkeypatch, root)
    with SyncCheckpointEngine(root, EngineConfig(keep_last=1)) as engine:
        assert engine.load(back := state(0.0)).step == 2
        assert bool((back["w"] == 2.0).all())
        assert engine.steps() == [1, 2]
        changes: list[Callable[[], object]] = [
            lambda: engine.save(state(), step=3),
            lambda: engine.prepare(state(), step=3),
            lambda: engine.save(state(), path=root / "best"),
            lambda: engine.save_file(state(), root / "w.pt").result(),
            lambda: engine.delete(1),
            lambda: engine.rollback(1),
            lambda: engine.protect(1),
            lambda: SyncCheckpointEngine(root / "new"),
        ]
        for change in changes:
            with pytest.raises(OSError, match=r"give a (writable root|path on a file|directory that can)") as caught:
                change()
            assert isinstance(caught.value, AioCkptError)
    assert aio_ckpt.read(root / "step_000000001")["w"][0] == 1.0
    for arguments in (["ls"], ["verify"], ["inspect"], ["du"]):
        assert cli.run([*arguments, str(root)]) == 0
    for arguments in (["protect", str(root), "1"], ["prune", str(root), "--keep-last", "1", "--yes"]):
        capsys.readouterr()
        assert cli.run(arguments) == 1
        assert "Read-only file system" in (told := capsys.readouterr().err)
        assert "give a " in told
