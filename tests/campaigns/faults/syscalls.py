"""Fail the n-th system call of a real process by strace, for n = 1, 2, 3 ... until a save passes untouched."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from aio_ckpt import CheckpointEngine, EngineConfig
from aio_ckpt.format.checkpoint_files import data_file_name, new_metadata_name, rank_manifest_name, root_manifest_name
from aio_ckpt.format.root_names import ENGINE_DIRS, PENDING_DIR, TRASH_DIR
from tests.campaigns.faults.campaign import Point
from tests.campaigns.faults.ground import is_state, small_chunks

__all__ = ["INJECTIONS", "Injection", "strace_refusal", "syscall_points"]

_TIMEOUT_SECS = 30.0
Start = Callable[[str], subprocess.Popen[str]]
"""Starts a child that saves to a root, with pipes for its orders and answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """A system call and what it answers."""

    calls: str
    """Names, separated by commas."""
    error: str
    """Name of the errno."""

    @property
    def name(self) -> str:
        """In the report."""
        return f"{self.calls} {self.error}"


INJECTIONS = tuple(
    Injection(calls=calls, error=error)
    for calls, errors in (
        ("write,pwrite64,pwritev,pwritev2", ("EIO", "ENOSPC", "EDQUOT", "EINTR")),
        ("fsync,fdatasync", ("EIO", "ENOSPC")),
        ("rename,renameat,renameat2", ("EIO", "ENOSPC")),
        ("openat", ("EIO", "EMFILE")),
        ("mkdir,mkdirat", ("ENOSPC", "EIO")),
        ("fallocate", ("ENOSPC", "EDQUOT", "EOPNOTSUPP")),
        ("unlink,unlinkat,rmdir", ("EIO",)),
        ("close", ("EIO",)),
        ("newfstatat,fstat,statx,stat", ("EIO",)),
    )
    for error in errors
)
"""What is injected; EINTR and a file system without fallocate must not even be noticed."""


def strace_refusal() -> str | None:
    """Why strace cannot be used here; None if it can."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    tried = subprocess.run(["strace", "-o", "/dev/null", "true"], capture_output=True, text=True, check=False)
    return None if tried.returncode == 0 else f"strace cannot trace here: {tried.stderr.strip()[-200:]}"


def start_python(root: str) -> subprocess.Popen[str]:
    """Start ``python -m tests.campaigns.faults.child``."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.campaigns.faults.child", root],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


class Child:
    """The process under test."""

    def __init__(self, root: Path, start: Start) -> None:
        self.process = start(str(root))
        self.pending = str(self._answer()["pending"])
        """How the names of its pending directories begin."""
        self.saves = 0

    def save(self, step: int, value: int, *, overwrite: bool = False) -> dict[str, Any]:
        """Order one save; how it ended."""
        self.saves += 1
        _stream(self.process.stdin).write(json.dumps({"step": step, "value": value, "overwrite": overwrite}) + "\n")
        _stream(self.process.stdin).flush()
        return self._answer()

    def close(self) -> None:
        """End it."""
        _stream(self.process.stdin).close()
        try:
            self.process.wait(_TIMEOUT_SECS)
        finally:
            self.process.kill()
            _stream(self.process.stdout).close()

    def _answer(self) -> dict[str, Any]:
        line = _stream(self.process.stdout).readline()
        if not line:
            raise AssertionError(f"the child ended: {self.process.wait(_TIMEOUT_SECS)}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _stream(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


@contextlib.contextmanager
def _strace(child: Child, root: Path, step: int, injection: Injection, number: int, log: Path) -> Iterator[None]:
    """Injects into calls on what the next save of the child touches, for as long as this is open."""
    pending = root / PENDING_DIR / f"{child.pending}-{child.saves + 1}"
    final = root / f"step_{step:09d}"
    trash = root / TRASH_DIR / pending.name
    save_id = f"{child.pending.partition('-')[0]}-{child.saves + 1}"
    own = data_file_name(save_id, 0), rank_manifest_name(save_id, 0), root_manifest_name(save_id)
    names = ("", ".metadata", *own, new_metadata_name(save_id))
    paths = [
        root,
        *(root / name for name in ENGINE_DIRS),
        *(folder / name for folder in (pending, final, trash) for name in names),
    ]
    command = ["strace", "-f", "-p", str(child.process.pid), "-o", str(log), "-e", f"trace={injection.calls}"]
    command += ["-e", f"inject={injection.calls}:error={injection.error}:when={number}"]
    command += [part for path in paths for part in ("-P", str(path))]
    tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        line = _stream(tracer.stderr).readline()
        while "attached" not in line:
            if not line:
                raise AssertionError(f"strace did not attach: {tracer.wait(_TIMEOUT_SECS)}")
            line = _stream(tracer.stderr).readline()
        yield
    finally:
        tracer.send_signal(signal.SIGINT)
        tracer.communicate(timeout=_TIMEOUT_SECS)


def syscall_points(
    folder: Path, injections: Sequence[Injection], *, overwrite: bool = False, start: Start = start_python
) -> Iterator[Point]:
    """Every point of each injection into a save with a committed checkpoint before it."""
    root = folder / "root"
    folder.mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(small_chunks())
        child = stack.enter_context(contextlib.closing(Child(root, start)))
        reader = stack.enter_context(contextlib.closing(_Reader(root)))
        held = child.save(1, 1)["files"]
        run = _Run(child=child, reader=reader, log=folder / "strace.log", held=held, overwrite=overwrite)
        for injection in injections:
            for number in itertools.count(1):
                point = run.strike(injection, number)
                if point is None:
                    break
                yield point


@dataclass(slots=True, kw_only=True)
class _Run:
    """One child and what it has committed."""

    child: Child
    """Under test."""
    reader: _Reader
    """Looks from outside."""
    log: Path
    """Of strace."""
    held: int
    """Files that the child had open after its first save."""
    overwrite: bool
    """Whether the newest step is replaced."""
    committed: dict[int, int] = field(default_factory=lambda: {1: 1})
    """Value of each step that must load."""
    value: int = 1
    """Of the last state."""

    def strike(self, injection: Injection, number: int) -> Point | None:
        """One save under the injection and one without; None if it was not met."""
        step = max(self.committed) + (not self.overwrite)
        self.value += 1
        with _strace(self.child, self.reader.root, step, injection, number, self.log):
            answer = self.child.save(step, self.value, overwrite=self.overwrite)
        hits = [line for line in self.log.read_text().splitlines() if "(INJECTED)" in line]
        if not hits:
            if not answer["error"]:
                self.committed[step] = self.value
                return None
            raise AssertionError(f"a save that strace left alone failed: {answer}")
        if injection.calls == "close":  # strace leaves out what it lets fail: the file does stay open
            self.held = min(self.held + 1, answer["files"])
        problems = list(_wrong(answer, injection, self.held))
        is_in_doubt = bool(answer.get("in_doubt"))
        if not answer["error"] or is_in_doubt:  # documented: what a commit replaces may stay, and what is in doubt
            self.reader.allow_leftovers()
        shows = self.reader.has(step) and self.reader.holds(step, self.value)
        if answer["error"] and shows and not is_in_doubt:
            problems.append(f"it is visible, though it failed: {answer}")
        if shows:
            self.committed[step] = self.value
        problems += self.reader.look(self.committed)
        step = max(self.committed) + 1
        self.value += 1
        answer = self.child.save(step, self.value)
        if answer["error"]:
            problems.append(f"the next save failed: {answer}")
        else:
            self.committed[step] = self.value
        problems += [f"after the next save: {text}" for text in self.reader.look(self.committed)]
        name = f"{injection.name} {number}: {hits[0].partition(' ')[2][:150]}"
        return Point(name=name, problems=tuple(problems))


def _wrong(answer: dict[str, Any], injection: Injection, held: int) -> Iterator[str]:
    if answer["files"] != held or answer["leases"]:
        yield f"{answer['files']} files, {answer['leases']} leases are held, {held} and 0 before"
    if answer["error"]:
        if injection.error in ("EINTR", "EOPNOTSUPP"):
            yield f"it was not repeated: {answer}"
        elif answer["error"] not in ("WriteError", "ReadError") or injection.error != errno.errorcode.get(
            answer["code"]
        ):
            yield f"told as {answer}"
        elif not answer["stage"] or Path(answer["path"]).parts[:-1] == ():
            yield f"stage or path is missing: {answer}"


class _Reader:
    """What another process finds in the root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._engine = CheckpointEngine(root, EngineConfig(workers=1))
        self._allowed: set[str] = set()

    def close(self) -> None:
        """End it."""
        self._engine.close_blocking()

    def has(self, step: int) -> bool:
        """Whether the step is listed."""
        return step in self._engine.steps().result()

    def holds(self, step: int, value: int) -> bool:
        """Whether it is that state, bit for bit."""
        return is_state(self._engine.read(step, only=None).result(_TIMEOUT_SECS), value)

    def look(self, committed: dict[int, int]) -> Iterator[str]:
        """What is wrong."""
        if self._engine.steps().result() != sorted(committed):
            yield f"listed are {self._engine.steps().result()}, committed {sorted(committed)}"
        for step in sorted(committed)[-3:]:
            if self.has(step) and not self.holds(step, committed[step]):
                yield f"step {step} does not load as it was saved"
        left = self._leftovers() - self._allowed
        if left:
            yield f"left behind: {sorted(left)}"

    def allow_leftovers(self) -> None:
        """What lies there now may stay."""
        self._allowed = self._leftovers()

    def _leftovers(self) -> set[str]:
        return set(os.listdir(self.root / PENDING_DIR))
