"""Claim: the file that names the one engine which may write under a root, on whatever host it runs.

A lock excludes writers on other hosts only if the file system carries it to a server, which many mounts do not.
``O_CREAT|O_EXCL`` excludes on all of them. The claim is read again before each commit: a writer that was taken over
while it stood still commits nothing more. Its modification time is the heartbeat. Clocks of hosts are not compared.
"""

from __future__ import annotations

import errno
import itertools
import logging
import math
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

import anyio

from aio_ckpt.commit.owner import MAX_OWNER_BYTES, Owner, decoded_owner, encoded_owner, now_of
from aio_ckpt.errors import MismatchError, RootError, WriteError
from aio_ckpt.format.root_names import CLAIM_FILE, LOCK_FILE, PENDING_DIR, TRASH_DIR
from aio_ckpt.remote_path import RemotePath
from aio_ckpt.storage.local import Storage
from aio_ckpt.storage.mounts import OBJECT_STORE, Mount, mount_of
from aio_ckpt.storage.os_errors import DISK_FULL
from aio_ckpt.storage.root_lock import ProcessLock, RootLock, root_is_gone
from aio_ckpt.storage.small_files import read_small_file

HEARTBEAT_SECS = 10.0
SILENCE_SECS = 3 * HEARTBEAT_SECS
"""Time without a heartbeat of an engine that seems dead, after which it is."""
_STORE_SILENCE_SECS = 12 * HEARTBEAT_SECS
"""The same in an object store, where a heartbeat alone tells. A request that hangs must have ended by then, see
:data:`~aio_ckpt.storage.object_client.COMMITS`."""
_BEATS_A_LOOK = 6
"""Heartbeats after which the claim is read: a writer that was taken over must not renew the claim of another one."""
_POLL_SECS = 1.0
_MAX_TAKEOVERS = 10
Check: TypeAlias = Callable[[], Awaitable[None]]
"""Function that raises RootError if another writer has taken over, called right before each change that counts."""
_log = logging.getLogger("aio_ckpt")


def silence_proving_death(holder: Owner | None, here: Owner, mount: Mount, *, is_locked: bool) -> float | None:
    """Return how many seconds without a heartbeat of the engine ``holder`` prove to ``here`` that it is dead.

    None: nothing but the age of its claim proves that it is dead. On a local file system, a granted lock is a proof,
    unless the process runs on: the system drops a lock if its process closes any descriptor of the file. On a shared
    one, hosts made from one image may have one name and machine id, and clients of NFS with one name take
    each other's locks: there, neither another boot nor a lock is a proof without silence.

    Args:
        holder: What the claim names; None if it cannot be decoded.
        is_locked: Whether the lock of the root was granted to the process that asks.
    """
    is_proven = holder is not None and holder.is_proven_dead(here)
    is_seen = is_proven and holder is not None and holder.boot_id == here.boot_id
    if mount.is_store:
        return 0.0 if is_seen else _STORE_SILENCE_SECS
    if not mount.is_shared:
        if holder is not None and holder.pid != here.pid and holder.runs_here(here):
            return SILENCE_SECS if is_locked else None
        return 0.0 if is_proven or is_locked else None
    if is_seen:
        return 0.0
    return SILENCE_SECS if is_proven or (is_locked and mount.locks_on_server) else None


async def claim_holder(storage: Storage, root: Path) -> Owner | None:
    """Return the engine that claims the root; None if there is no claim, or none that can be decoded."""
    return await _owner_in(storage, root / CLAIM_FILE)


async def _owner_in(storage: Storage, path: Path) -> Owner | None:
    try:
        data = await read_small_file(storage, path, max_bytes=MAX_OWNER_BYTES)
    except MismatchError:  # no regular file
        return None
    return None if data is None else decoded_owner(data)


async def mount_of_root(storage: Storage, root: Path) -> Mount:
    """Return where a root is mounted.

    Raises:
        RootError: it does not exist.
    """
    if isinstance(root, RemotePath):  # it exists once it holds an object
        return OBJECT_STORE
    status = await storage.status(root)
    if status is None:
        raise root_is_gone(root)
    return mount_of(status.identity[0])


def lock_root(storage: Storage, root: Path, mount: Mount) -> RootLock:
    """Take the lock of a root, as the first step to its claim.

    On a shared file system, a server keeps the lock of a host that was lost: for its lease with NFSv4, and until that
    host boots with NFSv3. So there a lock that is refused proves nothing, and the claim alone decides.

    Raises:
        RootError: a writer of this host holds the lock.
    """
    path = root / LOCK_FILE
    try:
        return storage.lock(path)
    except RootError as error:
        if not mount.is_shared or error.errno != errno.EAGAIN:
            raise
        _log.info("%s: %s. The claim decides", path, error.strerror)
        return ProcessLock(path)


def longest_silence(mount: Mount) -> float:
    """Return for how many seconds :meth:`Claim.take` may wait for a heartbeat."""
    return _STORE_SILENCE_SECS if mount.is_store else SILENCE_SECS


class Claim:
    """The claim of one engine on one root."""

    def __init__(self, storage: Storage, root: Path, owner: Owner, *, stale_after_secs: float) -> None:
        self._storage = storage
        self._root = root
        self._path = root / CLAIM_FILE
        self.owner = owner
        self._stale_after_secs = stale_after_secs
        self._is_left_out = False
        """On a full local disk, the lock alone excludes other writers, so that a step can be deleted."""
        self._watched: tuple[float | None, float] | None = None
        """Heartbeat of an engine that seems dead, and the ``time.monotonic`` at which it was first seen."""
        self._answered = time.monotonic()

    @property
    def idle_secs(self) -> float:
        """Seconds since the file system last returned a heartbeat, or since this object was made."""
        return time.monotonic() - self._answered

    async def take(self, mount: Mount, *, is_locked: bool, limit_secs: float = math.inf) -> None:
        """Make the claim, or take it over from an engine that is dead.

        See :func:`silence_proving_death` for the proofs. If the silence of an engine must be awaited for longer than
        ``limit_secs``, the next call goes on with it.

        Raises:
            RootError: another engine claims the root.
        """
        self._answered = time.monotonic()
        limit, dead = time.monotonic() + limit_secs, None
        for _ in range(_MAX_TAKEOVERS):
            try:
                await self._storage.write_file(self._path, encoded_owner(self.owner))
            except WriteError as error:
                if error.errno in DISK_FULL and is_locked and not mount.is_shared:
                    self._is_left_out = True
                    _log.warning("%s: no room for the claim of this writer: the lock alone excludes others", self._path)
                    return
                if error.errno in DISK_FULL:
                    text = "no room for this one small file, which claims the root: delete other files of its disk, "
                    text += f"what is below {self._root / PENDING_DIR}, which is of saves that were killed, or old "
                    text += "steps. Then aio_ckpt can delete here, too"
                    raise RootError(error.errno, text, str(self._path)) from error
                if error.errno != errno.EEXIST:
                    raise
            else:
                self._is_left_out = False
                if dead is not None:
                    _log.warning("%s: %s does not write here any more, and this process does now", self._root, dead)
                return
            holder = await claim_holder(self._storage, self._root)
            if holder is not None and holder.session == self.owner.session:
                return
            silence_secs = silence_proving_death(holder, self.owner, mount, is_locked=is_locked)
            void_secs = _STORE_SILENCE_SECS if mount.is_store else self._stale_after_secs
            seen = await self._check_dead(holder, silence_secs, limit, void_secs)
            if await self._remove(holder, seen):
                dead = _named(holder)
        raise RootError(errno.EBUSY, "several engines want to write here at once: let one of them", str(self._root))

    async def check(self) -> None:
        """Raise RootError if the claim is lost: another engine has taken over, or somebody removed the file."""
        if self._is_left_out:
            return
        holder = await claim_holder(self._storage, self._root)
        if holder is None:
            if not await self._storage.exists(self._root):
                raise root_is_gone(self._root)
            text = "the claim of this writer is gone: another one took over, or the file was removed. Open a new engine"
            raise RootError(errno.EBUSY, text, str(self._path))
        if holder.session != self.owner.session:
            raise RootError(
                errno.EBUSY,
                f"{_named(holder)} has taken over as the writer while this one did not answer: save with that one, or "
                "end it and open a new engine",
                str(self._root),
            )

    async def keep(self) -> None:
        """Renew the heartbeat until cancelled. A heartbeat that fails fails no save: :meth:`check` decides."""
        is_ours = True
        for beats in itertools.count(1):
            await anyio.sleep(HEARTBEAT_SECS)
            try:
                if beats % _BEATS_A_LOOK == 0:
                    is_ours = await self._is_ours()
                if is_ours:
                    await self._storage.touch(self._path)
            except OSError as error:
                if error.errno != errno.ENOENT:
                    _log.warning("%s: the heartbeat could not be renewed: %s", self._path, error)

    async def release(self) -> None:
        """Remove the claim if it is this engine's. If that fails, a warning is logged: the claim ends by its age."""
        try:
            if await self._is_ours():
                await self._storage.remove_file(self._path)
        except Exception as error:  # noqa: BLE001 - nothing that a caller of close() could do
            _log.warning("%s could not be removed: %r", self._path, error)

    async def _is_ours(self) -> bool:
        holder = await claim_holder(self._storage, self._root)
        return holder is not None and holder.session == self.owner.session

    async def _check_dead(
        self, holder: Owner | None, silence_secs: float | None, limit: float, void_secs: float
    ) -> float | None:
        """Return the last heartbeat of the engine that claims the root, which is dead, or older than ``void_secs``.

        Raises:
            RootError: it lives, or may live.
        """
        seen = await self._heartbeat()
        now = await now_of(self._storage, self._root)
        idle_secs = None if seen is None or now is None else now - seen
        if idle_secs is not None and idle_secs > void_secs:
            return seen
        if silence_secs is not None and await self._is_silent(holder, seen, silence_secs, limit):
            return seen
        idle = "an unknown time" if idle_secs is None else f"{max(idle_secs, 0.0):.0f} s"
        runs = holder is not None and holder.runs_here(self.owner)
        raise RootError(
            errno.EBUSY,
            f"{_named(holder)} writes here, its last heartbeat is {idle} old: let it end, or give another root. "
            f"Its claim is void {void_secs:.0f} s after the last heartbeat"
            + ("" if runs else "; if it is surely dead, remove this file"),
            str(self._path),
        )

    async def _is_silent(self, holder: Owner | None, seen: float | None, silence_secs: float, limit: float) -> bool:
        """Return whether the heartbeat stays as it was ``seen`` for ``silence_secs``. Earlier calls count.

        Raises:
            RootError: that is not known yet at ``limit``, by ``time.monotonic``.
        """
        if self._watched is None or self._watched[0] != seen:
            self._watched = seen, time.monotonic()
            if silence_secs:
                text = "%s claims %s: waiting %.0f s for its heartbeat; if none comes, it does not write here any more"
                _log.warning(text, _named(holder), self._root, silence_secs)
        proven = self._watched[1] + silence_secs
        while (now := time.monotonic()) < proven:
            if now >= limit:
                text = f"{_named(holder)} claims the root. It is dead if its heartbeat stays away for "
                text += f"{proven - now:.0f} s more, and the limit of this call has passed: call again"
                raise RootError(errno.EBUSY, text, str(self._root))
            await anyio.sleep(min(_POLL_SECS, proven - now, limit - now))
            if await self._heartbeat() != seen:
                self._watched = None
                return False
        return True

    async def _heartbeat(self) -> float | None:
        try:
            status = await self._storage.fresh_status(self._path)
        except MismatchError:  # no regular file
            return None
        finally:
            self._answered = time.monotonic()
        return None if status is None else status.modified_unix

    async def _remove(self, dead: Owner | None, seen: float | None) -> bool:
        """Set the claim of ``dead`` aside. Of several engines that try, one gets it: return whether this one did.

        The name there is taken by the first of them, and stays until the trash is cleared. An engine that read the
        claim of ``dead`` before, and comes later, therefore cannot set the new claim aside. If it comes even after the
        trash was cleared, it puts the new claim back. A claim that cannot be decoded goes by its last heartbeat,
        ``seen``.
        """
        aside = self._root / TRASH_DIR / f"claim-{f'of-{seen}' if dead is None else dead.session}"
        try:
            await self._storage.rename(self._path, aside)
        except WriteError as error:
            if error.errno not in (errno.EEXIST, errno.ENOENT):
                raise
            return False
        moved = await _owner_in(self._storage, aside)
        if dead is None or moved is None or moved.session == dead.session:
            return True
        await self._storage.rename(aside, self._path)
        return False


def _named(holder: Owner | None) -> str:
    return "another writer" if holder is None else holder.process
