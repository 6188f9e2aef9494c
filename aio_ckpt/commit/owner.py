"""Whose a pending directory is, that it lives, and what may be cleared of the dead.

Invariant: a pending directory is touched only by its owner, until the owner is dead. It is dead when its own host
proves it (same boot, same pids, and no such process), or when nothing in the directory has changed for
``stale_after_secs`` by the file system's own clock. The clocks of two hosts are never compared, and neither a free
lock nor a pid alone proves anything.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import socket
import time
from pathlib import Path
from typing import Annotated

import anyio
import msgspec
import psutil

from aio_ckpt.errors import AioCkptError, WriteError
from aio_ckpt.format.manifests import METADATA_FILE
from aio_ckpt.format.names import (
    ENGINE_DIRS,
    LOCK_FILE,
    OWNER_FILE,
    PENDING_DIR,
    TRASH_DIR,
    StepNames,
    protected_name,
)
from aio_ckpt.storage.local import Storage, names_in, sync_parents

__all__ = [
    "Owner",
    "clear_leftovers",
    "is_abandoned",
    "keep_alive",
    "make_engine_dirs",
    "owner_by_name",
    "pending_path",
    "put_back_protected",
    "read_owner",
    "write_owner",
]

_HEARTBEATS = 6
"""Renewals in ``stale_after_secs``: several may be late or lost before anybody takes the owner for dead."""
_MAX_OWNER_BYTES = 1 << 20
_MAX_PID = (1 << 31) - 1
_NAMED = re.compile(
    r".*-(?P<machine>[0-9a-f]{8})-(?P<boot>[0-9a-f]{8})-(?P<namespace>[0-9a-f]{8})"
    r"-(?P<pid>\d{1,10})-(?P<started>\d{1,20})-\d+"
)
_log = logging.getLogger("aio_ckpt")


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """Who writes a pending directory (``writer.json``). What could not be learned is empty, and proves nothing.

    The modification time of the file is the heartbeat.
    """

    session: str
    """Identity of the engine."""
    host: str
    machine_id: str
    """Identity of the machine, across its boots: two machines may have one name."""
    boot_id: str
    """Identity of this boot: a pid means nothing after another."""
    pid_namespace: str
    """Identity of what numbers the processes: a pid means nothing in another container."""
    pid: Annotated[int, msgspec.Meta(ge=1, le=_MAX_PID)]
    started_ticks: int
    """When the process started, in clock ticks since the boot: a pid may be reused. Not by the wall clock, which may be
    set while the process runs."""
    heartbeat_unix: float
    """When this was written, by the writer's clock. For people: no decision rests on it."""

    @classmethod
    def of_this_process(cls, session: str) -> Owner:
        """The owner record of the calling process."""
        return cls(
            session=session,
            host=socket.gethostname(),
            machine_id=_first_line("/etc/machine-id"),
            boot_id=_first_line("/proc/sys/kernel/random/boot_id"),
            pid_namespace=_pid_namespace(),
            pid=os.getpid(),
            started_ticks=_start_ticks(os.getpid()) or 0,
            heartbeat_unix=time.time(),
        )

    def is_proven_dead(self, here: Owner) -> bool:
        """Whether the process ``here`` can prove that this owner is gone. An owner on another host never is."""
        if (self.host, self.machine_id) != (here.host, here.machine_id) or not (self.boot_id and here.boot_id):
            return False
        if self.boot_id != here.boot_id:
            return bool(self.machine_id)  # else it may be another machine of the same name
        if self.pid_namespace != here.pid_namespace or not self.pid_namespace:
            return False
        return _is_gone(self.pid, self.started_ticks)

    @property
    def tag(self) -> str:
        """The process in a few characters that may stand in a name."""
        identities = (self.host + self.machine_id, self.boot_id, self.pid_namespace)
        return "-".join([*map(_short, identities), str(self.pid), str(self.started_ticks)])


_OWNERS = msgspec.json.Decoder(Owner)


def is_abandoned(owner: Owner | None, here: Owner, *, idle_secs: float | None, stale_after_secs: float) -> bool:
    """Whether a pending directory may be cleared: the decision that :func:`clear_leftovers` carries out.

    ``owner`` is None where no readable record tells it; ``idle_secs`` is how long ago the file system saw the last
    sign of life, None if that cannot be told, and negative if its clock was set back.
    """
    if idle_secs is not None and idle_secs > stale_after_secs:
        return True
    return owner is not None and owner.is_proven_dead(here)


def pending_path(root: Path, owner: Owner, number: int) -> Path:
    """Where save ``number`` of the owner's session is written.

    The name says whose it is, too: a crash may come before ``writer.json`` is there, and space is reserved by then.
    """
    return root / PENDING_DIR / f"{owner.session}-{owner.tag}-{number}"


def owner_by_name(name: str, here: Owner) -> Owner | None:
    """Whose a pending directory or segment is by its name; None if it is of another host, or tells nobody."""
    match = _NAMED.fullmatch(name)
    if match is None or match["machine"] != _short(here.host + here.machine_id):
        return None
    if match["boot"] == _short("") or not 1 <= int(match["pid"]) <= _MAX_PID:
        return None  # what was not learned proves nothing
    return msgspec.structs.replace(
        here,
        boot_id=here.boot_id if match["boot"] == _short(here.boot_id) else "another",
        pid_namespace=here.pid_namespace if match["namespace"] == _short(here.pid_namespace) else "another",
        pid=int(match["pid"]),
        started_ticks=int(match["started"]),
    )


def _short(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


async def write_owner(storage: Storage, pending: Path, owner: Owner) -> None:
    """Say whose the pending directory is, so that it is cleared only when its writer is dead."""
    await storage.write_file(pending / OWNER_FILE, msgspec.json.encode(owner))


async def read_owner(storage: Storage, pending: Path) -> bytes:
    """The owner record of a pending directory as it was written."""
    return await storage.read_file(pending / OWNER_FILE, max_bytes=_MAX_OWNER_BYTES)


async def keep_alive(storage: Storage, pending: Path, stale_after_secs: float) -> None:
    """Renew the heartbeat of a pending directory, several times in ``stale_after_secs``, until cancelled.

    A sign of life that cannot be given fails no save: on this host the process proves that it lives, and any other
    needs the root's lock as well.
    """
    while True:
        await anyio.sleep(stale_after_secs / _HEARTBEATS)
        try:
            await storage.touch(pending / OWNER_FILE)
        except OSError as error:
            if error.errno == errno.ENOENT:  # not there yet, or committed
                continue
            _log.warning("%s: the heartbeat could not be renewed: %s", pending, error)


async def make_engine_dirs(storage: Storage, root: Path) -> None:
    """Make the directories below ``.aio_ckpt/``, durably. For the lock's holder, before its first change."""
    for name in ENGINE_DIRS:
        if not await storage.exists(root / name):
            await storage.make_dir(root / name, parents=True)


async def put_back_protected(storage: Storage, root: Path, names: StepNames) -> frozenset[str]:
    """Steps that became trash although they are protected stand again. For the lock's holder.

    Protecting and deleting may race. Each side changes its file first and then checks for the other, so a protected
    step can briefly appear as trash. A writer that dies there, or cannot rename, leaves it to the next one. Trash
    without ``.metadata`` may be torn, and stays trash, as does what an overwrite replaced. Returns the names of what
    could not be put back.
    """
    stuck = set[str]()
    for name in await names_in(storage, root / TRASH_DIR):
        trash, place, step = root / TRASH_DIR / name, root / name, names.step(name)
        if step is None or not await storage.exists(root / protected_name(step)):
            continue
        if not await storage.exists(trash / METADATA_FILE) or await storage.exists(place):
            continue
        try:
            await storage.rename(trash, place)
            await sync_parents(storage, trash, place)
            _log.warning("step %d is protected and was put back", step)
        except WriteError as error:
            _log.warning("step %d is protected and could not be put back: %s", step, error)
            stuck.add(name)
    return frozenset(stuck)


async def clear_leftovers(
    storage: Storage, root: Path, names: StepNames, *, here: Owner, stale_after_secs: float
) -> list[str]:
    """Remove trash, and the pending directories whose owners are dead; returns their names. For the lock's holder.

    What cannot be removed is logged and stays: the next holder of the lock tries again.
    """
    stuck = await put_back_protected(storage, root, names)
    pending = [PENDING_DIR + "/" + name for name in await names_in(storage, root / PENDING_DIR)]
    trash = [TRASH_DIR + "/" + name for name in await names_in(storage, root / TRASH_DIR) if name not in stuck]
    now = await _now(storage, root) if pending else None
    cleared = []
    for name in (*pending, *trash):
        try:
            if await _clear(storage, root, root / name, now, here, stale_after_secs):
                cleared.append(name)
        except (AioCkptError, OSError) as error:
            _log.warning("%s stays: it could not be cleared: %s", root / name, error)
    return cleared


async def _clear(
    storage: Storage, root: Path, path: Path, now: float | None, here: Owner, stale_after_secs: float
) -> bool:
    if path.parent == root / PENDING_DIR:
        seen = await _last_seen(storage, path)
        idle_secs = None if seen is None or now is None else now - seen
        owner = await _owner_of(storage, path) or owner_by_name(path.name, here)
        if not is_abandoned(owner, here, idle_secs=idle_secs, stale_after_secs=stale_after_secs):
            whose = "not told" if owner is None else f"process {owner.pid} on {owner.host}"
            idle = "unknown" if idle_secs is None else f"{idle_secs:.0f} s ago"
            _log.info("%s stays: owner %s, last sign of life %s", path, whose, idle)
            return False
        # One step: an owner that lives all the same finds its directory gone, never half of it.
        pending, path = path, root / TRASH_DIR / path.name
        await storage.rename(pending, path)
    await storage.remove_tree(path)
    return True


async def _now(storage: Storage, root: Path) -> float | None:
    """The file system's clock: what it stamps on the lock file, which is ours."""
    try:
        await storage.touch(root / LOCK_FILE)
        status = await storage.status(root / LOCK_FILE)
    except OSError as error:
        _log.warning("%s: the file system's clock cannot be read: %s", root, error)
        return None
    return None if status is None else status.modified_unix


async def _last_seen(storage: Storage, pending: Path) -> float | None:
    """When the file system last saw a change: of the heartbeat, or of the names in the directory."""
    found = [await storage.status(path) for path in (pending, pending / OWNER_FILE)]
    return max((status.modified_unix for status in found if status is not None), default=None)


async def _owner_of(storage: Storage, pending: Path) -> Owner | None:
    try:
        return _OWNERS.decode(await read_owner(storage, pending))
    except (AioCkptError, OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None  # missing, torn, forged, or of another version: its directory tells how old it is


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
    """Whether this process, and not only its pid, is no more."""
    if not psutil.pid_exists(pid):
        return True
    started = _start_ticks(pid)
    if started is None:
        return False  # hidden from us (hidepid), or gone since
    if started_ticks not in (0, started):  # 0: it could not be learned
        return True
    try:
        process = psutil.Process(pid)
        # Threads of a process whose first thread has ended may write on.
        return process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD) and process.num_threads() <= 1
    except psutil.Error:
        return False


def _start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since the boot; None if ``/proc`` does not tell.

    Not by psutil, whose start time follows the wall clock: that may be set while the process runs.
    """
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None
