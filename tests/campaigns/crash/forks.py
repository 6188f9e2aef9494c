"""Processes forked from this one, which has imported everything and started no thread: real ones, at 20 ms each."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["DEADLINE_SECS", "Child", "Tell", "adopt_orphans", "fork", "wait_for_orphans"]

DEADLINE_SECS = 120.0
"""Longest life of a trainer; one that outlives it is killed and counts as a failure."""
MAX_TEXT = 240
"""Characters of an error that are told."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LIBC = ctypes.CDLL(None, use_errno=True)

Tell = Callable[[str], None]
"""Say one line to the supervisor; it has been handed over when the call returns, whatever becomes of the process."""


@dataclass(slots=True)
class Child:
    """A forked process and the lines that it said. Its owner ends it with :meth:`wait`."""

    pid: int
    """Process."""
    pipe: int
    """What it says; ends when it is gone."""
    said: bytes = b""
    """Everything so far."""

    @property
    def lines(self) -> list[str]:
        """Whole lines so far."""
        return self.said.decode().split("\n")[:-1]

    def listen(self, secs: float) -> bool:
        """Read what it says for ``secs``, what it has said already at the least; False once it is gone."""
        end = time.monotonic() + secs
        while True:
            left = max(0.0, end - time.monotonic())
            if not select.select([self.pipe], [], [], left)[0]:
                return True
            data = os.read(self.pipe, 1 << 16)  # a full pipe
            if not data:
                return False
            self.said += data
            if not left:
                return True

    def kill(self) -> None:
        """SIGKILL; it is this process's child and not yet waited for, so the pid is still its own."""
        os.kill(self.pid, signal.SIGKILL)

    def wait(self, deadline_secs: float = DEADLINE_SECS) -> int:
        """Hear it out and reap it: its exit code, negative for a signal. A child past the deadline is killed."""
        try:
            if self.listen(deadline_secs):
                self.kill()
                self.said += b"failed: it outlived its deadline\n"
        finally:
            os.close(self.pipe)
            code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return code


def fork(run: Callable[[Tell], None]) -> Child:
    """Run ``run`` in a child; what it raises is told as a line ``failed: ...`` and gives exit code 1.

    Raises:
        RuntimeError: this process has threads; a child would inherit their locks in whatever state they are.
    """
    if len(os.listdir("/proc/self/task")) != 1:
        raise RuntimeError("the supervisor has threads: it must not fork trainers")
    supervisor, (reads, writes) = os.getpid(), os.pipe()
    pid = os.fork()
    if pid:
        os.close(writes)
        return Child(pid, reads)
    code = 1
    try:
        os.close(reads)
        _silence()
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == supervisor:
            run(lambda line: _say(writes, line))
            code = 0
    except BaseException as error:  # noqa: BLE001 - the supervisor judges it; nothing may unwind into its frames
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(f"{type(error).__name__}: {error}".split())
        if len(text) > MAX_TEXT:
            text = f"{text[: MAX_TEXT // 3]} ... {text[-MAX_TEXT // 2 :]}"
        _say(writes, f"failed: {text} ({Path(frame.filename).name}:{frame.lineno})")
    finally:
        os._exit(code)


def adopt_orphans() -> None:
    """Children of children that end come to this process, so that it can wait for them."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)


def wait_for_orphans() -> None:
    """Until no child is left: each dies with the process that forked it, but not in the same instant."""
    end = time.monotonic() + DEADLINE_SECS
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < end:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                time.sleep(0.01)


def _silence() -> None:
    """What is wrong is told; what libraries log of it would fill the terminal."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    os.close(nothing)


def _say(pipe: int, line: str) -> None:
    data = f"{line}\n".encode()
    while data:
        data = data[os.write(pipe, data) :]
