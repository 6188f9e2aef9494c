"""Owners: processes that write under a root, and how a file or a name tells them.

Only the holder of a root's lock and claim writes under it, so that what another owner left is of a dead writer, or of
one that was taken over and can commit nothing. Its pending directory is renamed first: if a thread of the old writer
still works, it finds no directory, instead of an incomplete one.

The process of an owner is dead if its host was rebooted or the process has ended, which only a process on the same
host can prove. Neither a free lock nor a pid alone proves anything.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import socket
import time
import uuid
from pathlib import Path
from typing import Annotated

import msgspec

from aio_ckpt.format.root_names import (
    LOCK_FILE,
    PENDING_DIR,
)
from aio_ckpt.storage.local import Storage

MAX_OWNER_BYTES = 1 << 20
_MAX_PID = (1 << 31) - 1
_NAMED = re.compile(
    r".*-(?P<machine>[0-9a-f]{8})-(?P<boot>[0-9a-f]{8})-(?P<namespace>[0-9a-f]{8})"
    r"-(?P<pid>\d{1,10})-(?P<started>\d{1,20})-\d+"
)
_log = logging.getLogger("aio_ckpt")


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """A process that writes, as the claim of a root names it. An empty field is unknown, and proves nothing."""

    session: Annotated[str, msgspec.Meta(pattern=r"^[\w-]{1,64}$")]
    """Identity of the engine."""
    host: str
    machine_id: str
    """Identity of the machine, the same after a reboot. Two machines may have one host name."""
    boot_id: str
    """Identity of this boot. After another boot, the pid means nothing."""
    pid_namespace: str
    """Identity of the pid namespace. In another container, the pid means nothing."""
    pid: Annotated[int, msgspec.Meta(ge=1, le=_MAX_PID)]
    started_ticks: int
    """Start of the process, in clock ticks since the boot: a pid may be reused. The wall clock would not do, because it
    may be set while the process runs."""
    heartbeat_unix: float
    """Time of the record by the writer's clock, in seconds since 1970. For people: no decision uses it."""

    @classmethod
    def of_this_process(cls, session: str | None = None) -> Owner:
        """Return the owner record of the calling process. ``session`` is a new one if it is None."""
        return cls(
            session=session or uuid.uuid4().hex[:12],
            host=socket.gethostname(),
            machine_id=_first_line("/etc/machine-id"),
            boot_id=_first_line("/proc/sys/kernel/random/boot_id"),
            pid_namespace=_pid_namespace(),
            pid=os.getpid(),
            started_ticks=_start_ticks(os.getpid()) or 0,
            heartbeat_unix=time.time(),
        )

    @property
    def process(self) -> str:
        """Process and host, for messages."""
        host = self.host if self.host.isprintable() else ascii(self.host)  # the claim may be forged
        return f"process {self.pid} on {host}"

    def is_proven_dead(self, here: Owner) -> bool:
        """Return whether the process ``here`` can prove that this owner is dead.

        It cannot for an owner on another host.
        """
        if (self.host, self.machine_id) != (here.host, here.machine_id) or not (self.boot_id and here.boot_id):
            return False
        if self.boot_id != here.boot_id:
            return bool(self.machine_id)  # without a machine id, it may be another machine of the same name
        return self._shares_pids(here) and _is_gone(self.pid, self.started_ticks)

    def runs_here(self, here: Owner) -> bool:
        """Return whether this owner is a process of this host that the process ``here`` sees running."""
        is_seen = (self.host, self.machine_id) == (here.host, here.machine_id) and self._shares_pids(here)
        return is_seen and not _is_gone(self.pid, self.started_ticks)

    def _shares_pids(self, here: Owner) -> bool:
        """Return whether a pid means the same process to this owner and to ``here``, which have one host."""
        ours, theirs = ((each.boot_id, each.pid_namespace) for each in (self, here))
        return ours == theirs and all(ours)

    @property
    def tag(self) -> str:
        """Short identity of the process, for names of files."""
        identities = (self.host + self.machine_id, self.boot_id, self.pid_namespace)
        return "-".join([*map(_short, identities), str(self.pid), str(self.started_ticks)])

    @property
    def label(self) -> str:
        """Session and :attr:`tag`. Names of directories hold it, from which :func:`owner_by_name` tells the process."""
        return f"{self.session}-{self.tag}"


_OWNERS = msgspec.json.Decoder(Owner)


def is_abandoned(owner: Owner | None, here: Owner, *, idle_secs: float | None, stale_after_secs: float) -> bool:
    """Return whether ``owner`` is proven to be dead, or was silent for too long.

    ``owner`` is None if nothing tells it. ``idle_secs`` is the time since its last sign of life, by the file system's
    clock: None if unknown, negative if the clock was set back.
    """
    if idle_secs is not None and idle_secs > stale_after_secs:
        return True
    return owner is not None and owner.is_proven_dead(here)


def pending_path(root: Path, owner: Owner, number: int) -> Path:
    """Return the pending directory of save ``number`` of the owner's session. Its name tells the owner."""
    return root / PENDING_DIR / f"{owner.label}-{number}"


def owner_by_name(name: str, here: Owner) -> Owner | None:
    """Return the owner of a pending directory or segment by its name; None if it is of another host, or names none."""
    match = _NAMED.fullmatch(name)
    if match is None or match["machine"] != _short(here.host + here.machine_id):
        return None
    if match["boot"] == _short("") or not 1 <= int(match["pid"]) <= _MAX_PID:
        return None  # an unknown field proves nothing
    return msgspec.structs.replace(
        here,
        boot_id=here.boot_id if match["boot"] == _short(here.boot_id) else "another",
        pid_namespace=here.pid_namespace if match["namespace"] == _short(here.pid_namespace) else "another",
        pid=int(match["pid"]),
        started_ticks=int(match["started"]),
    )


def _short(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def encoded_owner(owner: Owner) -> bytes:
    """Return the content of a file that names an owner."""
    return msgspec.json.encode(owner)


async def now_of(storage: Storage, root: Path) -> float | None:
    """Return the time of the file system's clock, from a touch of the lock file; None if that fails."""
    try:
        await storage.touch(root / LOCK_FILE)
        status = await storage.status(root / LOCK_FILE)
    except OSError as error:
        _log.warning("%s: the file system's clock cannot be read: %s", root, error)
        return None
    return None if status is None else status.modified_unix


def decoded_owner(record: bytes) -> Owner | None:
    """Return the owner that a file names; None if it is torn, forged, or of another version."""
    try:
        return _OWNERS.decode(record)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


# -- this host --------------------------------------------------------------------------------------


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _is_gone(pid: int, started_ticks: int) -> bool:
    """Return whether the process has ended. Its pid may belong to another process by now."""
    import psutil  # the command line, which must start at once, seldom asks

    if not psutil.pid_exists(pid):
        return True
    started = _start_ticks(pid)
    if started is None:
        return False  # hidden (hidepid), or ended meanwhile
    if started_ticks not in (0, started):  # 0: unknown
        return True
    try:
        process = psutil.Process(pid)
        # If the first thread of a process has ended, its other threads may still write.
        return process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) and process.num_threads() <= 1
    except psutil.Error:
        return False


def _start_ticks(pid: int) -> int | None:
    """Return the start of a process, in clock ticks since the boot; None if ``/proc`` does not tell it.

    The start time of psutil follows the wall clock, which may be set while the process runs.
    """
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None
