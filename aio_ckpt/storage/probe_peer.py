"""Probe with a peer: two processes, mostly on two hosts, try on one directory what they see of each other.

They meet by names in that directory. Each step of one is a file; the other waits for it with fresh answers.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from aio_ckpt.errors import RootError, StallError
from aio_ckpt.storage.freshness import found_afresh
from aio_ckpt.storage.probe import NO_LOCKS, Finding, Verdict

_POLL_SECS = 0.05
_ANSWER_SECS = 10.0
"""Time within which a living process answers one that has come."""
_PLAIN_SECS = 75.0
"""Longest time that a client of NFS keeps an answer by default, and some more."""


class Meeting:
    """Two processes in one directory. The one that comes first leads."""

    def __init__(self, folder: Path, limit_secs: float, report: Callable[[str], None]) -> None:
        """Wait for the peer, for ``limit_secs`` at most.

        Raises:
            StallError: no peer came.
            RootError: two other processes meet in ``folder``.
        """
        self._folder, self._limit_secs, self._pair = folder, limit_secs, ""
        while True:
            folder.mkdir(exist_ok=True)
            self.leads = self._create("first")
            if self.leads:
                self._pair = uuid.uuid4().hex[:8]
                self._put("pair", self._pair)
                self.say("here-first", socket.gethostname())
                report(f"waits for the same command on another host, for {limit_secs:.0f} s")
                self.peer = self.hear("here-second")
                """Name of the other host."""
                self.say("met")
                return
            self._pair = self._wait_for("pair", _ANSWER_SECS) or "of a dead one"
            if not self._create(f"{self._pair}-second"):
                text = "two other processes meet here: wait for their end, or remove this directory"
                raise RootError(errno.EBUSY, text, str(folder))
            self.say("here-second", socket.gethostname())
            if self._wait_for(f"{self._pair}-met", _ANSWER_SECS) is not None:
                self.peer = self.hear("here-first")
                return
            shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed before it met another one

    def _create(self, name: str) -> bool:
        try:
            os.close(os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def say(self, name: str, text: str = "") -> None:
        """Make the file ``name`` of this pair with ``text``, at once."""
        self._put(f"{self._pair}-{name}", text)

    def _put(self, name: str, text: str) -> None:
        made = self._folder / f"{name}.{os.getpid()}.tmp"
        made.write_text(text)
        os.replace(made, self._folder / name)
        _pause()
        with contextlib.suppress(FileNotFoundError):  # the peer has ended the meeting
            os.utime(self._folder)  # NFS v3: a client that looked in the same tick of the server's clock sees no change

    def hear(self, name: str) -> str:
        """Wait for the file ``name`` of this pair and return its text.

        Raises:
            StallError: it did not come in time.
        """
        found = self._wait_for(f"{self._pair}-{name}", self._limit_secs)
        if found is None:
            raise StallError(
                f"{self._folder}: no other process came to {name!r} within {self._limit_secs:.0f} s: run the same "
                "command on another host at the same time, on the same directory, and let both hosts share it"
            )
        return found

    def _wait_for(self, name: str, limit_secs: float) -> str | None:
        until = time.monotonic() + limit_secs
        while time.monotonic() < until:
            try:
                return found_afresh(Path.read_text, self._folder / name)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ESTALE):
                    raise
            _pause()
        return None

    def findings(self) -> Iterator[Finding]:
        """Yield what both see of each other. Both processes yield the same checks."""
        yield self._exclusion()
        yield self._locks()
        yield from self._freshness()
        yield self._replacing()

    def _exclusion(self) -> Finding:
        rounds, won = 20, 0
        for number in range(rounds):
            self._together(f"round{number}")
            won += self._create(f"{self._pair}-taken{number}")
        self.say(f"won-{self.leads}", str(won))
        total = won + int(self.hear(f"won-{not self.leads}"))
        remedy = "" if total == rounds else "two writers would not exclude each other: give every job a root of its own"
        found = f"{total} of {rounds} names made once, {won} of them here"
        return Finding("exclusive create, two hosts", found, "good" if total == rounds else "bad", remedy)

    def _locks(self) -> Finding:
        path = self._folder / f"{self._pair}-lock"
        if self.leads:
            with path.open("w") as file:
                _lock(file.fileno())
                self.say("locked")
                found = self.hear("lock-tried")
        else:
            self.hear("locked")
            with path.open("r+") as file:
                found = "" if _lock(file.fileno()) else "refused"
            self.say("lock-tried", found)
        if found:
            return Finding("file locks, two hosts", "exclude", "good")
        return Finding("file locks, two hosts", "both were granted", "slower", NO_LOCKS)

    def _freshness(self) -> Iterator[Finding]:
        """One looks for two names that are missing, the other makes them, and the first one looks again."""
        secs: list[float] = []
        for name in ("plain", "asked"):
            path = self._folder / f"{self._pair}-{name}"
            if self.leads:
                self.hear(f"{name}-missed")
                _pause()  # a change in the same tick of an NFS v3 server's clock is not seen (docs: Limits)
                path.write_text("x")
                self.say(f"{name}-made")
                secs.append(float(self.hear(f"{name}-secs")))
                continue
            os.path.exists(path)  # the client may keep the answer
            self.say(f"{name}-missed")
            self.hear(f"{name}-made")
            begun = time.monotonic()
            while time.monotonic() - begun < _PLAIN_SECS and not _is_seen(path, asks=name == "asked"):
                _pause()
            secs.append(time.monotonic() - begun)
            self.say(f"{name}-secs", str(secs[-1]))
        plain, asked = secs
        yield Finding("a new name, plain look", f"seen {plain:.2f} s late", "good", _OTHER_TOOLS if plain > 1 else "")
        remedy = "" if asked < 1 else "new steps and commits of other hosts are seen late: mount with lookupcache=none"
        verdict: Verdict = "good" if asked < 1 else "bad"
        yield Finding("a new name, as the engine looks", f"seen {asked:.2f} s late", verdict, remedy)

    def _replacing(self) -> Finding:
        path, stale = self._folder / f"{self._pair}-replaced", 0
        for number in range(10):
            if self.leads:
                self.say("replaced", str(number))
                self.say(f"put{number}")
                self.hear(f"got{number}")
            else:
                self.hear(f"put{number}")
                stale += path.read_text() != str(number)
                self.say(f"got{number}")
        if not self.leads:
            self.say("stale", str(stale))
        stale = int(self.hear("stale"))
        remedy = "a load may read a replaced checkpoint for a while" if stale else ""
        found = f"{10 - stale} of 10 seen at once by the other host"
        return Finding("a file replaced by rename, two hosts", found, "slower" if stale else "good", remedy)

    def _together(self, name: str) -> None:
        self.say(f"{name}-{self.leads}")
        self.hear(f"{name}-{not self.leads}")

    def end(self) -> None:
        """Let the leader go on, which removes the directory, once both have ended."""
        if self.leads:
            self.hear("ended")
        else:
            self.say("ended")


_OTHER_TOOLS = "other tools may see a new step that late; the engine asks anew"


def _pause() -> None:
    time.sleep(_POLL_SECS)  # noqa: TID251 - two processes wait for each other's files, and there is no loop


def _is_seen(path: Path, *, asks: bool) -> bool:
    try:
        found_afresh(os.stat, path) if asks else os.stat(path)
    except FileNotFoundError:
        return False
    return True


def _lock(number: int) -> bool:
    try:
        fcntl.lockf(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
