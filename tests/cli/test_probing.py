"""``aio-ckpt probe``: what it finds on a real directory, on a bad one, and with a second process."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path

import pytest

from aio_ckpt.cli.commands import run
from aio_ckpt.errors import RootError, StallError
from aio_ckpt.storage import mounts, probe, probe_peer
from aio_ckpt.storage.mounts import Mount
from aio_ckpt.storage.probe import mount_finding, try_names
from aio_ckpt.storage.probe_peer import Meeting

SECS = 30.0


def test_a_good_directory_is_good_and_left_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["probe", str(tmp_path), "--mib", "16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for check in ("file system", "exclusive create", "file locks", "fsync of a file", "write, until durable", "read"):
        assert any(line.startswith(check) for line in lines)
    assert lines[-1].startswith("checkpoints can be saved here")
    assert list(tmp_path.iterdir()) == []


def test_json_holds_every_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["probe", str(tmp_path), "--mib", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["directory"] == str(tmp_path)
    assert {each["verdict"] for each in found["findings"]} <= {"good", "slower"}


def test_names_that_are_made_twice_are_bad_and_end_with_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opens = os.open

    def forgetful(path: str | Path, flags: int, mode: int = 0o777, **options: int) -> int:
        return opens(path, flags & ~os.O_EXCL if str(path).endswith("once") else flags, mode, **options)

    monkeypatch.setattr(os, "open", forgetful)
    assert run(["probe", str(tmp_path), "--mib", "8"]) == 1
    out = capsys.readouterr().out
    assert "a name was created twice" in out
    assert "1 of 10 checks are bad: do not save here before that is mended" in out


@pytest.mark.parametrize(
    ("name", "code", "check", "verdict"),
    [
        ("lockf", errno.ENOLCK, "file locks", "slower"),
        ("fsync", errno.EINVAL, "fsync of a file", "bad"),
        ("replace", errno.EPERM, "replace a file by rename", "bad"),
    ],
)
def test_what_the_file_system_refuses_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int, check: str, verdict: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(probe.fcntl if name == "lockf" else os, name, refuse)
    (finding,) = [each for each in try_names(tmp_path) if each.check == check]
    assert (finding.found, finding.verdict) == (os.strerror(code), verdict)
    assert finding.remedy


def test_a_soft_mount_is_bad_and_a_mount_without_locks_is_slower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    soft = mount_finding(Mount("nfs", frozenset({"rw", "soft", "local_lock=none", "vers=3"})))
    assert (soft.found, soft.verdict) == ("nfs (local_lock=none,soft,vers=3)", "bad")
    assert "mount it hard" in soft.remedy
    monkeypatch.setattr(probe, "mount_of", lambda _: Mount("nfs", frozenset({"hard", "nolock", "local_lock=all"})))
    (lock,) = [each for each in try_names(tmp_path) if each.check == "file locks"]
    assert lock.verdict == "slower"
    assert "without nolock" in lock.remedy


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        ("ext4", "rw", "engines of other hosts do not see it"),
        ("nfs4", "hard,local_lock=none", "locks reach the server"),
        ("nfs", "hard,local_lock=all", "stale_after_secs"),
        ("lustre", "flock", "not tested"),
    ],
)
def test_what_follows_from_a_mount_is_told(kind: str, options: str, says: str) -> None:
    assert says in "; ".join(mounts.Mount(kind, frozenset(options.split(","))).consequences)


def test_two_processes_find_what_they_see_of_each_other(tmp_path: Path) -> None:
    """Two threads stand in: no lock of one process excludes another thread of it."""
    found: dict[bool, list[probe.Finding]] = {}

    def take_part() -> None:
        meeting = Meeting(tmp_path / "meeting", SECS, lambda _: None)
        found[meeting.leads] = list(meeting.findings())
        meeting.end()

    threads = [threading.Thread(target=take_part) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECS)
    assert set(found) == {True, False}
    assert [each.check for each in found[True]] == [each.check for each in found[False]]
    verdicts = {each.check: each.verdict for each in found[True]}
    assert verdicts["exclusive create, two hosts"] == verdicts["a new name, as the engine looks"] == "good"
    assert verdicts["a file replaced by rename, two hosts"] == "good"
    assert verdicts["file locks, two hosts"] == "slower", "both threads were granted it"


def test_a_third_process_is_refused_and_disturbs_nobody(tmp_path: Path) -> None:
    folder = tmp_path / "meeting"
    others = [threading.Thread(target=Meeting, args=(folder, SECS, lambda _: None)) for _ in range(2)]
    for thread in others:
        thread.start()
    for thread in others:
        thread.join(SECS)
    before = sorted(folder.iterdir())
    with pytest.raises(RootError, match="two other processes meet here"):
        Meeting(folder, SECS, lambda _: None)
    assert sorted(folder.iterdir()) == before


def test_what_a_killed_process_left_is_cleared_by_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_peer, "_ANSWER_SECS", 0.3)
    with pytest.raises(StallError):
        Meeting(tmp_path / "meeting", 0.2, lambda _: None)  # it leaves its files
    leaders: list[bool] = []
    pair = [
        threading.Thread(target=lambda: leaders.append(Meeting(tmp_path / "meeting", SECS, lambda _: None).leads))
        for _ in range(2)
    ]
    for number, thread in enumerate(pair):
        thread.start()
        if not number:
            thread.join(1.0)  # it finds what is left, clears it, and leads
    for thread in pair:
        thread.join(SECS)
    assert sorted(leaders) == [False, True]


def test_a_peer_that_never_comes_is_told_with_the_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(StallError, match="run the same command on another host"):
        Meeting(tmp_path / "alone", 0.2, lambda _: None)
    assert run(["probe", str(tmp_path), "--mib", "8", "--peer", "--wait", "1"]) == 1
    assert "within 1 s: run the same command" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["alone"], "a later try meets nothing of this one"
