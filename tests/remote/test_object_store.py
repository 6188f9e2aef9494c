"""Checkpoints in object storage, with a real S3 server: copied there, verified, read, and copied back."""

from __future__ import annotations

import errno
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import obstore
import pytest
import torch
from command_line import called, document, save_by_dcp
from obstore.store import from_url
from slow import slow

import aio_ckpt
from aio_ckpt import SyncCheckpointEngine, copying
from aio_ckpt.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    ReadError,
    StepOrderError,
    WriteError,
)
from aio_ckpt.remote_path import RemotePath, check_place
from aio_ckpt.runtime.portal import Executor
from aio_ckpt.storage import object_client
from aio_ckpt.storage.object_client import Limits
from aio_ckpt.storage.object_store import ObjectStorage
from bench.common.seaweedfs import SECRET
from tests.remote.fault_proxy import Fault

STEPS = (10, 20)


def state(step: int) -> dict[str, object]:
    return {"w": torch.arange(70_000.0) + step, "lr": step / 100, "deep": {"b": torch.full((3,), float(step))}}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with SyncCheckpointEngine(tmp_path / "root") as engine:
        for step in STEPS:
            engine.save(state(step), step=step, files={"card.md": b"mine"}).result()
    return tmp_path / "root"


@pytest.fixture
def copied(root: Path, bucket: str, capsys: pytest.CaptureFixture[str]) -> str:
    """A run in a bucket that holds both steps."""
    for path in sorted(root.glob("step_*")):
        code, out, err = called(capsys, "cp", path, f"{bucket}/run")
        assert (code, "copied and verified" in out) == (0, True), err
    return f"{bucket}/run"


@pytest.fixture
def executor() -> Iterator[Executor]:
    executor = Executor("test", 2)
    yield executor
    assert executor.close(10.0)


def keys(url: str) -> set[str]:
    """Names of the objects below a place."""
    place = check_place("path", url)
    listed = obstore.list(from_url(place.bucket_url), place.key)  # type: ignore[attr-defined]
    return {each["path"].removeprefix(f"{place.key}/") for batch in listed for each in batch}  # type: ignore[attr-defined]


def put(url: str, data: bytes) -> None:
    place = check_place("path", url)
    obstore.put(from_url(place.bucket_url), place.key, data)  # type: ignore[attr-defined]


def get(url: str) -> bytes:
    place = check_place("path", url)
    return bytes(obstore.get(from_url(place.bucket_url), place.key).bytes())  # type: ignore[attr-defined]


def data_of(url: str) -> str:
    """The data file of a step."""
    (name,) = [name for name in keys(url) if name.endswith(".distcp")]
    return f"{url}/{name}"


# -- copying ----------------------------------------------------------------------------------------


def test_a_copy_holds_the_files_of_the_step_and_nothing_else(root: Path, copied: str) -> None:
    for step in STEPS:
        path = root / f"step_{step:09d}"
        assert keys(f"{copied}/{path.name}") == {each.name for each in path.iterdir()}
        assert all(get(f"{copied}/{path.name}/{each.name}") == each.read_bytes() for each in path.iterdir())


def test_the_newest_step_of_a_root_is_copied_and_a_copy_back_equals_it(
    root: Path, bucket: str, tmp_path: Path, capsys
) -> None:
    assert called(capsys, "cp", root, f"{bucket}/run")[0] == 0
    assert called(capsys, "cp", f"{bucket}/run", tmp_path / "back")[0] == 0
    back, path = tmp_path / "back/step_000000020", root / "step_000000020"
    assert {each.name: each.read_bytes() for each in back.iterdir()} == {
        each.name: each.read_bytes() for each in path.iterdir()
    }
    with SyncCheckpointEngine(tmp_path / "back") as engine:
        assert engine.steps() == [20]
    code, told = document(capsys, "diff", f"{bucket}/run", tmp_path / "back", "--values")
    assert (code, told["values"]) == (0, [])


def test_a_step_that_is_there_is_never_copied_over(root: Path, copied: str, capsys) -> None:
    before = get(f"{copied}/step_000000010/.metadata")
    code, _, err = called(capsys, "cp", root / "step_000000010", copied)
    assert (code, "step 10 is there already" in err) == (1, True)
    assert get(f"{copied}/step_000000010/.metadata") == before


@pytest.mark.parametrize("is_same", [True, False])
def test_of_two_copies_at_once_none_takes_the_other_one_away(
    root: Path, bucket: str, capsys, monkeypatch: pytest.MonkeyPatch, is_same: bool
) -> None:
    place, write = f"{bucket}/run/step_000000020", ObjectStorage.write_file

    async def overtaken(self: ObjectStorage, path: Path, *parts: bytes) -> None:
        if path.name == ".metadata":
            put(f"{place}/.metadata", parts[0] if is_same else b"of another save")
        await write(self, path, *parts)

    monkeypatch.setattr(ObjectStorage, "write_file", overtaken)
    code, _, err = called(capsys, "cp", root, f"{bucket}/run")
    assert (code, "another checkpoint of this step was faster" in err) == ((0, False) if is_same else (1, True))
    assert get(f"{place}/.metadata") == (
        (root / "step_000000020/.metadata").read_bytes() if is_same else b"of another save"
    )
    assert called(capsys, "verify", f"{bucket}/run")[0] == (0 if is_same else 1)


def test_a_copy_whose_files_another_failed_copy_removes_is_no_success(
    root: Path, bucket: str, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, write = f"{bucket}/run/step_000000020", ObjectStorage.write_file

    async def overtaken(self: ObjectStorage, path: Path, *parts: bytes) -> None:
        if path.name == ".metadata":
            await self.remove_file(path.parent / "card.md")
        await write(self, path, *parts)

    with monkeypatch.context() as patched:
        patched.setattr(ObjectStorage, "write_file", overtaken)
        code, _, err = called(capsys, "cp", root, f"{bucket}/run")
    assert (code, "failed and removed card.md meanwhile: copy it again" in err) == (1, True)
    assert keys(place) == set()
    assert called(capsys, "cp", root, f"{bucket}/run")[0] == 0


def test_a_failed_copy_removes_nothing_once_another_copy_is_there(
    root: Path, bucket: str, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, remove = f"{bucket}/run/step_000000020", ObjectStorage.remove_file
    removed: list[str] = []

    async def overtaken(self: ObjectStorage, path: Path) -> None:
        await remove(self, path)
        removed.append(path.name)
        put(f"{place}/.metadata", b"of another copy")

    async def fail(*_: object) -> None:
        raise WriteError(errno.EIO, "lost", place)

    monkeypatch.setattr(ObjectStorage, "remove_file", overtaken)
    monkeypatch.setattr(copying, "_check_copy", fail)
    assert called(capsys, "cp", root, f"{bucket}/run")[0] == 1
    assert len(removed) == 1


def test_a_copy_that_arrives_damaged_never_becomes_visible_and_is_removed(
    root: Path, bucket: str, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_file = ObjectStorage._put_file

    def damaged(self: ObjectStorage, source: Path, path: Path, advance) -> None:
        put_file(self, source, path, advance)
        if path.suffix == ".distcp":
            put(str(path), bytes([get(str(path))[0] ^ 1]) + get(str(path))[1:])

    monkeypatch.setattr(ObjectStorage, "_put_file", damaged)
    code, _, err = called(capsys, "cp", root, f"{bucket}/run")
    assert (code, "the copy does not verify" in err) == (1, True)
    assert keys(f"{bucket}/run") == set()


def test_a_copy_that_was_killed_is_no_checkpoint_and_the_next_one_goes_through(root: Path, bucket: str, capsys) -> None:
    for path in (root / "step_000000020").iterdir():
        if path.suffix in (".distcp", ".bin"):
            put(f"{bucket}/run/step_000000020/{path.name}", path.read_bytes()[:100])
    assert "no committed checkpoint" in called(capsys, "ls", f"{bucket}/run")[1]
    assert called(capsys, "cp", root, f"{bucket}/run")[0] == 0
    assert called(capsys, "verify", f"{bucket}/run")[0] == 0


def test_a_copy_from_store_to_store_is_refused_by_name(copied: str, capsys) -> None:
    code, _, err = called(capsys, "cp", copied, f"{copied}2")
    assert (code, "both are in an object store" in err) == (2, True)


# -- reading ----------------------------------------------------------------------------------------


def test_a_step_in_a_store_is_read_and_loaded(copied: str, tmp_path: Path) -> None:
    found, report = aio_ckpt.read(f"{copied}/step_000000010", with_report=True)
    assert report.verified
    assert (found["lr"], found["deep"]["b"].tolist()) == (0.1, [10.0] * 3)
    template = state(0)
    assert aio_ckpt.load(f"{copied}/step_000000020", template).step == 20
    assert torch.equal(template["w"], state(20)["w"])  # type: ignore[arg-type]
    with SyncCheckpointEngine(tmp_path / "another") as engine:
        assert engine.load(template := state(0), path=f"{copied}/step_000000010").step == 10
        assert template["lr"] == 0.1
        assert engine.read(path=Path(f"{copied}/step_000000020"), only="lr") == {"lr": 0.2}


def test_plain_dcp_in_a_store_is_read(bucket: str, tmp_path: Path) -> None:
    save_by_dcp({"w": torch.arange(10.0)}, tmp_path / "plain")
    for path in (tmp_path / "plain").iterdir():
        put(f"{bucket}/plain/{path.name}", path.read_bytes())
    assert aio_ckpt.read(f"{bucket}/plain")["w"].tolist() == list(range(10))


def test_commands_look_into_a_store(copied: str, capsys) -> None:
    code, table = document(capsys, "ls", copied)
    assert (code, [row["step"] for row in table["checkpoints"]]) == (0, [*STEPS])
    assert table["checkpoints"][1]["is_newest"]
    assert not any(row["is_damaged"] for row in table["checkpoints"])
    assert [leaf["name"] for leaf in document(capsys, "inspect", copied)[1]["leaves"]] == ["deep.b", "lr", "w"]
    assert document(capsys, "verify", copied)[1]["is_good"]
    assert called(capsys, "diff", f"{copied}/step_000000010", copied)[0] == 0


def test_what_does_not_reach_into_a_store_says_so(bucket: str, capsys) -> None:
    code, _, err = called(capsys, "rescue", f"{bucket}/run")
    assert code != 0
    assert "only local file systems are supported here" in err
    assert "aio-ckpt cp" in err


def test_du_tells_the_parts_of_a_root_in_a_store(copied: str, capsys) -> None:
    assert called(capsys, "protect", copied, 10)[0] == 0
    protected, other = (length_of(f"{copied}/step_{step:09d}") for step in STEPS)
    found = document(capsys, "du", copied)[1]
    assert found["checkpoints"] == protected + other
    assert found["protected"] == protected
    assert found["nbytes"] == found["checkpoints"] + found["other"]
    assert found["free"] is None
    out = called(capsys, "du", copied)[1]
    assert "total" in out
    assert "free" not in out


def length_of(url: str) -> int:
    return sum(len(get(f"{url}/{key}")) for key in keys(url))


def test_a_step_in_a_store_is_exported_to_a_file_and_a_file_imported_to_a_store(
    copied: str, bucket: str, tmp_path: Path, capsys
) -> None:
    code, _, err = called(capsys, "export", copied, tmp_path / "w.safetensors", "--branch", "deep")
    assert code == 0, err
    assert called(capsys, "convert", f"{copied}/step_000000010", tmp_path / "all.pt")[0] == 0
    stored = aio_ckpt.read(f"{copied}/step_000000010")
    assert torch.equal(torch.load(tmp_path / "all.pt")["w"], stored["w"])
    for command in ("import", "convert"):
        assert called(capsys, command, tmp_path / "all.pt", f"{bucket}/{command}", "--step", 7)[0] == 0
        assert torch.equal(aio_ckpt.read(f"{bucket}/{command}/step_000000007")["w"], stored["w"])
    code, _, err = called(capsys, "import", tmp_path / "all.pt", f"{bucket}/import", "--step", 7)
    assert code != 0
    assert "does not exceed" in err


def test_a_file_in_a_store_is_neither_read_nor_written_by_convert(copied: str, tmp_path: Path, capsys) -> None:
    code, _, err = called(capsys, "convert", copied, f"{copied}/model.safetensors")
    assert code != 0
    assert "a file in an object store: give a file on a disk" in err


def test_damage_is_found_and_named(copied: str, capsys) -> None:
    url = data_of(f"{copied}/step_000000020")
    data = get(url)
    put(url, data[:5000] + bytes([data[5000] ^ 1]) + data[5001:])
    with pytest.raises(CorruptCheckpointError, match="step_000000020"):
        aio_ckpt.read(f"{copied}/step_000000020")
    code, told = document(capsys, "verify", copied)
    assert (code, [bool(each["faults"]) for each in told["checkpoints"]]) == (1, [False, True])
    put(url, data[:-1])
    code, told = document(capsys, "ls", copied)
    assert [row["is_damaged"] for row in told["checkpoints"]] == [False, True]


@pytest.mark.parametrize("name", ["", "/step_000000030"])
def test_what_is_no_checkpoint_says_what_it_is(copied: str, name: str) -> None:
    words = "it is a root; give one of its steps" if not name else "the directory does not exist"
    with pytest.raises(CheckpointNotFoundError, match=words):
        aio_ckpt.read(copied + name)


async def test_an_object_that_was_replaced_after_it_was_opened_is_not_read_as_if_it_were_the_same(
    bucket: str, executor: Executor
) -> None:
    path = check_place("path", f"{bucket}/file")
    assert isinstance(path, RemotePath)
    storage = ObjectStorage(executor, from_url(path.bucket_url))
    await storage.write_file(path, b"old" * 100)
    file = await storage.open_data_file(path)
    view = memoryview(bytearray(6))
    assert await file.read_into(3, view[:2], view[2:]) == 6
    assert bytes(view) == b"oldold"
    put(str(path), b"new" * 100)
    with pytest.raises(ReadError) as caught:
        await file.read_into(0, view)
    assert "changed this object" in str(caught.value)


# -- what users see if something is wrong ---------------------------------------------------------------


def test_no_message_and_no_log_line_holds_a_credential(
    copied: str, capsys, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    aio_ckpt.read(f"{copied}/step_000000010")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", f"{SECRET}-mistyped")
    with pytest.raises(ReadError) as caught:
        aio_ckpt.read(f"{copied}/step_000000010")
    code, out, err = called(capsys, "ls", copied)
    assert code == 1
    for text in (str(caught.value), repr(caught.value), out, err, caplog.text):
        assert SECRET not in text
        assert "Signature" not in text.replace("SignatureDoesNotMatch", "")  # a code of S3
    assert "Permission denied" in str(caught.value)
    assert f"{copied}/step_000000010" in str(caught.value)


def test_a_bucket_that_does_not_exist_is_named(root: Path, bucket: str, capsys) -> None:
    for arguments in (("cp", root, "s3://no-such-bucket/run"), ("ls", "s3://no-such-bucket/run")):
        code, _, err = called(capsys, *arguments)
        assert code == 1
        assert "the server answered 404 Not Found: The specified bucket does not exist (NoSuchBucket)" in err
        assert "s3://no-such-bucket/run" in err


def test_without_obstore_the_extra_is_named(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("obstore", "obstore.store", "obstore.exceptions"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"pip install 'aio-ckpt\[remote\]'"):
        aio_ckpt.read(f"{bucket}/x")


EXITING = "import sys, aio_ckpt; print(aio_ckpt.read(sys.argv[1])['lr'])"


@pytest.mark.slow
def test_a_short_process_that_reads_from_a_store_exits_cleanly(copied: str) -> None:
    """The async calls of obstore abort the interpreter at its exit in one of three short processes."""
    for _ in range(25):
        command = [sys.executable, "-c", EXITING, f"{copied}/step_000000010"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120.0, check=False)
        assert (done.returncode, done.stdout) == (0, "0.1\n"), done.stderr


def test_a_trainer_copies_its_steps_in_a_thread_of_its_own(tmp_path: Path, bucket: str) -> None:
    with ThreadPoolExecutor(1) as uploads, SyncCheckpointEngine(tmp_path / "root") as engine:
        copies = []
        for step in STEPS:
            report = engine.save(state(step), step=step).result()
            assert report is not None
            copies.append(uploads.submit(aio_ckpt.copy, report.path, f"{bucket}/run"))
        reports = [copy.result() for copy in copies]
    assert [(report.step, str(report.path)) for report in reports] == [
        (step, f"{bucket}/run/step_{step:09d}") for step in STEPS
    ]
    back = aio_ckpt.copy(reports[1].path, tmp_path / "back")
    assert aio_ckpt.read(back.path)["lr"] == 0.2
    with pytest.raises(CheckpointExistsError, match="step 20 is there already"):
        aio_ckpt.copy(tmp_path / "root/step_000000020", f"{bucket}/run")
    with pytest.raises(ConfigError, match="both are in an object store"):
        aio_ckpt.copy(f"{bucket}/run/step_000000020", f"{bucket}/other")
    with pytest.raises(CheckpointNotFoundError, match="it is a root; give one of its steps"):
        aio_ckpt.copy(tmp_path / "root", f"{bucket}/other")
    with pytest.raises(StepOrderError, match="is step 20 by its manifest"):
        aio_ckpt.copy(tmp_path / "root/step_000000020", f"{bucket}/other", step=3)


# -- faults on the way ----------------------------------------------------------------------------------


def test_a_store_that_is_busy_is_asked_again(root: Path, bucket: str, capsys, faulty) -> None:
    faulty(lambda method, path, number: "busy" if number <= 2 else "")
    assert called(capsys, "cp", root, f"{bucket}/run")[0] == 0
    assert called(capsys, "verify", f"{bucket}/run")[0] == 0
    assert aio_ckpt.read(f"{bucket}/run/step_000000020")["lr"] == 0.2


def test_data_on_a_slow_network_may_take_longer_than_a_commit(
    root: Path, bucket: str, tmp_path: Path, faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_client, "COMMITS", Limits(try_secs=1, retry_secs=1))

    def delay(method: str, path: str, number: int) -> Fault:
        if path.endswith(".distcp") and method in ("PUT", "GET"):
            threading.Event().wait(2.1)  # two tries of a commit
        return ""

    faulty(delay)
    aio_ckpt.copy(root / "step_000000010", f"{bucket}/run")
    aio_ckpt.copy(f"{bucket}/run/step_000000010", tmp_path / "back")
    for root_of_copy in (f"{bucket}/run", tmp_path / "back"):
        assert torch.equal(aio_ckpt.read(f"{root_of_copy}/step_000000010")["w"], state(10)["w"])


@pytest.mark.sampled
@pytest.mark.parametrize("end", [".distcp", slow(".bin"), slow(".json"), ".metadata"])
def test_a_put_whose_answer_is_lost_is_found_to_be_done(root: Path, bucket: str, capsys, faulty, end: str) -> None:
    faulty(lambda method, path, number: "lost" if method == "PUT" and path.endswith(end) and number == 1 else "")
    code, _, err = called(capsys, "cp", root, f"{bucket}/run")
    assert code == 0, err
    assert called(capsys, "verify", f"{bucket}/run")[0] == 0


@pytest.mark.sampled
@pytest.mark.parametrize("fault", ["cut", "flipped"])
@pytest.mark.parametrize("end", [".distcp", slow(".bin"), slow(".json"), ".metadata"])
def test_a_body_that_arrives_wrong_once_is_read_again_and_never_believed(
    copied: str, faulty, fault: Fault, end: str
) -> None:
    faulty(lambda method, path, number: fault if method == "GET" and path.endswith(end) and number == 1 else "")
    template = state(0)
    assert aio_ckpt.load(f"{copied}/step_000000020", template).step == 20
    assert torch.equal(template["w"], state(20)["w"])  # type: ignore[arg-type]
    assert template["lr"] == 0.2


def test_a_body_that_always_arrives_wrong_is_damage_and_named(copied: str, faulty) -> None:
    faulty(lambda method, path, number: "flipped" if method == "GET" and path.endswith(".distcp") else "")
    with pytest.raises(CorruptCheckpointError, match=r"step_000000020.*\.distcp"):
        aio_ckpt.load(f"{copied}/step_000000020", state(0))
