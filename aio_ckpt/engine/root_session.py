"""The root of an engine: the writer's lock, the committed steps, retention and protection."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import math
import os
import stat
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, TypeVarTuple

import anyio

from aio_ckpt.commit import discovery, path_checkpoints, protection, retention, rollback
from aio_ckpt.commit.engine_dirs import make_engine_dirs, refuse_linked_dirs
from aio_ckpt.commit.leftovers import clear_leftovers
from aio_ckpt.commit.mirror_copies import record_rollback
from aio_ckpt.commit.quarantine import Quarantine
from aio_ckpt.commit.root_claim import Claim, lock_root, longest_silence, mount_of_root
from aio_ckpt.commit.trash import Trash
from aio_ckpt.config import EngineConfig, Mirror
from aio_ckpt.engine.context import EngineContext
from aio_ckpt.engine.known_steps import KnownSteps
from aio_ckpt.engine.newest_good import copies_or_none
from aio_ckpt.errors import CheckpointNotFoundError, ConfigError, EngineClosedError, RootError, StallError, WriteError
from aio_ckpt.format.checkpoint_files import METADATA_FILE
from aio_ckpt.format.root_names import ENGINE_DIR
from aio_ckpt.remote_path import Place, RemotePath, check_place, find_remote, place_of
from aio_ckpt.rescue.hooks import Rescue
from aio_ckpt.runtime.ctrl_c import Lock, new_future
from aio_ckpt.runtime.deadline import NO_DEADLINE, Deadline
from aio_ckpt.runtime.error_notes import note_stage
from aio_ckpt.runtime.futures import follow
from aio_ckpt.runtime.portal import STOP_SECS, Portal, run_blocking, start_beside_or_here, unwatched
from aio_ckpt.runtime.waiting import WaitWarning, call_within, disk_warning
from aio_ckpt.storage.mounts import OBJECT_STORE, Mount, mount_of
from aio_ckpt.storage.paths import checked_path
from aio_ckpt.storage.root_lock import RootLock

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
StepsChange: TypeAlias = tuple[int | None, list[int]]
"""(newest step after a change of the committed steps, or None; the steps that are gone)."""
_log = logging.getLogger("aio_ckpt")
_NEW_LOCK_FILE = (
    "%s: the lock file of this engine is gone, as if the directory was replaced or its file system was unmounted: look "
    "whether its steps are there. Saves go on in the directory that is there now"
)
_SHARED_STALE_SECS = 180.0
"""Least ``stale_after_secs`` on a shared file system. A client of NFS keeps attributes for 60 s."""


def usable_root(given: Place, limit_secs: float) -> tuple[Path, Mount]:
    """Return the absolute path of the directory of the checkpoints, and where it is mounted.

    Makes nothing: the first save makes the directory.

    Raises:
        RootError: the path is no path, is a file or a checkpoint, or cannot be made; see :func:`checked_path`.
        ConfigError: it is a URL that names no place in an object store, or one with credentials.
        StallError: the disk does not answer within ``limit_secs``.
    """
    root = place_of("root", given)
    if place := find_remote("root", root):
        if not place.key:
            text = "the root is a whole bucket: give a place in it, such as BUCKET/run, or a store object with a prefix"
            raise RootError(errno.EINVAL, text, str(place))
        return place, OBJECT_STORE
    path = checked_path(root).absolute()
    return path, call_within(limit_secs, functools.partial(_check_root, path), "looking at the root", path)


def usable_mirror(mirror: Mirror, root: Path, limit_secs: float) -> Path:
    """Return the place of a mirror, absolute.

    Raises:
        ConfigError: it cannot be that of this root; nothing was touched.
        StallError: the disk does not answer within ``limit_secs``.
    """
    place = check_place("mirror", place_of("mirror", mirror.place), of="a mirror")
    if isinstance(place, RemotePath) and isinstance(root, RemotePath):
        raise ConfigError(f"mirror={place}: the root is in an object store, too: give a mirror on a disk, or none")
    if isinstance(place, RemotePath) and not place.key:
        raise ConfigError(f"mirror={place}: a whole bucket: give a place in it, such as {place}/run")
    look = functools.partial(_real_paths, place, root)
    real, own = call_within(limit_secs, look, "looking at the mirror", place)
    if real.is_relative_to(own) or own.is_relative_to(real):
        raise ConfigError(f"mirror={place}: it holds the root {root}, or lies in it: give a directory beside it")
    return place


def check_stale_after(stale_after_secs: float, mount: Mount) -> None:
    """Raise ConfigError if a heartbeat, as another host sees it through ``mount``, may seem older than it is."""
    if mount.is_shared and stale_after_secs < _SHARED_STALE_SECS:
        raise ConfigError(
            f"stale_after_secs={stale_after_secs:g}: give at least {_SHARED_STALE_SECS:g} on {mount.kind}, where a "
            "host may see the heartbeat of another one a minute late, and take its root over"
        )


def check_in_store(config: EngineConfig, mount: Mount) -> None:
    """Raise ConfigError if a setting means a disk, and the root is in an object store."""
    if mount.is_store and config.shm_path is not None:
        raise ConfigError(
            f"shm_path={config.shm_path!r}: a staged snapshot can be rescued only for a root on a disk: leave it out, "
            "or give a root on a disk and copy its steps by aio_ckpt.copy"
        )
    if mount.is_store and config.direct_io == "on":
        raise ConfigError("direct_io='on': an object store has no O_DIRECT: leave it out")


def log_mount(root: Path, mount: Mount) -> None:
    """Log the file system of a root, the options of its mount that matter, and what follows."""
    _log.info("%s is on %s: %s", root, mount.title, "; ".join(mount.consequences))


def _real_paths(*paths: Path) -> list[Path]:
    return [path if isinstance(path, RemotePath) else Path(os.path.realpath(path)) for path in paths]


def _check_root(path: Path) -> Mount:
    try:
        device = _check_directory(path)
    except OSError as error:
        raise RootError(
            error.errno, f"the root cannot be used ({error.strerror}): give a directory that can be made", str(path)
        ) from error
    if os.path.isfile(path / METADATA_FILE):
        remedy = f"give its parent {path.parent} as the root, or load it by path="
        if (path / ENGINE_DIR).is_dir():
            remedy = "a save of another program has put .metadata and data files beside the steps: move those out of it"
        raise RootError(errno.EEXIST, f"the root is itself a checkpoint: {remedy}", str(path))
    return mount_of(device)


def _check_directory(path: Path) -> int:
    """Return the device of ``path``, or of the nearest directory above it.

    Raises:
        OSError: ``path`` is no directory, or is missing and may not be made.
    """
    for place in (path, *path.parents):
        try:
            status = place.stat()
        except FileNotFoundError:
            if place.is_symlink():
                raise FileNotFoundError(errno.ENOENT, f"the symbolic link {place} leads nowhere", str(place)) from None
            continue
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(place))
        if place != path and not os.access(place, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, f"{place} is not writable", str(place))
        return status.st_dev
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


class RootSession:
    """The root of one engine. A call that waits for the disk waits ``stall_timeout_secs`` at most for each answer.

    Invariant: without its lock, the engine renames and deletes nothing under the root but the directories of its own
    failed saves. It holds the lock from the first :meth:`become_writer` until :meth:`release`. Any process may
    protect a step without the lock.
    """

    def __init__(
        self,
        ctx: EngineContext,
        portal: Portal,
        *,
        claim: Claim,
        quarantine: Quarantine,
        known_steps: KnownSteps,
        trash: Trash,
        rescue: Rescue,
        must_wait: Callable[[], bool],
        held: Callable[[], Collection[int]],
        newest_copy: Callable[[], int | None],
    ) -> None:
        """While ``must_wait()`` is True, nothing is deleted. Steps that ``held()`` returns do not expire.

        ``newest_copy()`` is the newest step that this engine has copied to the mirror.
        """
        self._ctx = ctx
        self._claim = claim
        self._heartbeat: Future[None] | None = None
        self._quarantine = quarantine
        self._known_steps = known_steps
        self._trash = trash
        self._rescue = rescue
        self._portal = portal
        self._must_wait = must_wait
        self._newest_copy = newest_copy
        config = ctx.config
        policy = retention.Policy(keep_last=config.keep_last, keep_every=config.keep_every, keep_best=config.keep_best)
        self._retention = retention.Retention(
            ctx.storage,
            ctx.root,
            ctx.names,
            policy,
            check=claim.check,
            committed=self.committed,
            renames=quarantine.renames,
            must_wait=must_wait,
            held=held,
        )
        self._passes: list[Future[None]] = []
        self._copies: list[int] | None = None
        """Steps of the mirror, as they were read last; None before, and after a rollback."""
        self._lock: RootLock | None = None
        self._renewal: Future[None] | None = None
        """Newest renewal of the lock, in a thread."""
        self._lacks_claim = False
        """Whether a renewal found a new lock file, and its root was not claimed yet."""
        self._taking: Future[RootLock] | None = None
        """Taking of the lock that a save gave up waiting for, in a thread that the disk holds."""

    # -- the lock -------------------------------------------------------------------------------------

    @property
    def is_writer(self) -> bool:
        """Whether this engine has taken the lock."""
        return self._lock is not None

    def become_writer(self, deadline: Deadline) -> None:
        """Take the root's lock, before the first change under the root.

        Then set aside the checkpoints that loads proved damaged, clear leftovers, and read the steps.

        Raises:
            RootError: another writer holds it, or the root is not writable.
            EngineClosedError: the engine was closed.
            StallError: the deadline of the save passed. The next save begins anew.
        """
        if self._lock is not None:
            renew = functools.partial(self._ctx.members.coordinator.while_beating, self.renew)  # other ranks may wait
            self._call(renew, what=f"looking at the lock of {self._ctx.root}", deadline=deadline)
            return
        self._check_open()
        ctx, lock = self._ctx, None
        try:
            self._call(self._make_root, what="making the root", deadline=deadline)
            look = functools.partial(mount_of_root, ctx.storage, ctx.root)
            mount = self._call(look, what="looking at the root", deadline=deadline)
            lock = self._take_lock(functools.partial(lock_root, ctx.storage, ctx.root, mount), deadline)
            self._call(make_engine_dirs, ctx.storage, ctx.root, what="making its own directories", deadline=deadline)
            self._call(
                functools.partial(self._take_claim, lock, mount, deadline),
                what="claiming the root",
                idle_secs=lambda: self._claim.idle_secs,
                more_secs=longest_silence(mount),
                deadline=deadline,
            )
            self._quarantine.claim = self._claim
            self._call(self._set_aside, what="setting damaged checkpoints aside", deadline=deadline)
            self._call(self._clear, what="clearing leftovers", deadline=deadline)
            self._call(self._rescue.reclaim, what="clearing segments of dead writers", deadline=deadline)
            self._known_steps.learn(functools.partial(self.all_steps, deadline))
            self._lock = lock
            self._check_open()  # again: if the engine was closed meanwhile, nothing releases this lock
        except BaseException as error:
            note_stage(error, "open")
            self._lock = None
            self._quarantine.claim = None
            if lock is not None:
                self._release(lock)
            raise

    async def renew(self) -> None:
        """Make sure, on the loop, that the lock is still held, before a change under the root.

        Raises:
            RootError: another writer holds it now.
        """
        ctx, lock = self._ctx, self._lock
        try:
            if lock is not None:
                await self._renew(lock)
                if self._lacks_claim:  # the root may be a new one
                    _log.warning(_NEW_LOCK_FILE, ctx.root)
                    await refuse_linked_dirs(ctx.storage, ctx.root)
                    await make_engine_dirs(ctx.storage, ctx.root)
                    await self._take_claim(lock, await mount_of_root(ctx.storage, ctx.root), NO_DEADLINE)
                    self._lacks_claim = False
            if self._quarantine.is_waiting:  # a damaged checkpoint may be in the way of a save
                await self._set_aside()
        except BaseException as error:
            note_stage(error, "open")
            raise

    async def _renew(self, lock: RootLock) -> None:
        def renew() -> None:
            self._lacks_claim |= lock.renew()  # here: the save that waits for it may end before

        # One thread at a time: a disk that does not answer would hold one for each save.
        if self._renewal is None or self._renewal.done():
            with unwatched():  # the thread uses no memory of a save, which may end without it
                self._renewal = self._ctx.executor.submit(renew)
        renewal = self._renewal
        await asyncio.wrap_future(follow(renewal))
        if renewal.cancelled():  # the end of the engine dropped it before it began
            self._check_open()
        renewal.result()

    async def _take_claim(self, lock: RootLock, mount: Mount, deadline: Deadline) -> None:
        """Claim the root on all hosts, and keep the claim alive.

        Raises:
            RootError: an engine on another host writes here.
        """
        await self._claim.take(mount, is_locked=lock.is_granted, limit_secs=deadline.left_secs(math.inf))
        if self._heartbeat is None:
            self._heartbeat = self._portal.submit(self._claim.keep)

    def release_claim(self) -> None:
        """Remove the claim, before the loop ends. The lock is released afterwards, by :meth:`release`. Idempotent."""
        if self._heartbeat is not None:
            self._heartbeat.cancel()
            self._portal.call(self._claim.release, timeout=STOP_SECS, what="releasing the claim")
            self._heartbeat = None

    def _take_lock(self, take: Callable[[], RootLock], deadline: Deadline) -> RootLock:
        """Return ``take()``, from a thread. One runs at a time, also if a wait for it was given up.

        Raises:
            StallError: the deadline passed. The thread goes on, and the next call waits for it first.
        """
        limit_secs = deadline.left_secs(self._ctx.config.stall_timeout_secs)
        what = "taking the lock"
        waits, warning = time.monotonic() + limit_secs, self._warning(what)
        if self._taking is not None and warning.wait_for([self._taking], limit_secs):
            self._taking = None
        if self._taking is None:
            watched = _LockTaking(take)
            try:
                work = self._taking = self._ctx.executor.submit(watched)
                if warning.wait_for([work], waits - time.monotonic()):
                    self._taking = None
                    if work.cancelled():  # the end of the engine dropped it before it began
                        self._check_open()
                    return work.result()
            except BaseException:  # Ctrl-C, too, wherever it comes
                self._give_up(watched)
                if watched.has_begun:  # another engine may open the root next
                    warning.wait_for([watched.ended], STOP_SECS)
                raise
            self._give_up(watched)
        deadline.check(None, what)
        raise StallError(f"{what} of {self._ctx.root} did not end within {limit_secs} s: the disk does not answer")

    def _give_up(self, taking: _LockTaking) -> None:
        lock = taking.give_up()
        if lock is not None:
            self._release(lock)

    async def _make_root(self) -> None:
        storage, root = self._ctx.storage, self._ctx.root
        if await storage.exists(root):
            await refuse_linked_dirs(storage, root)
            return
        try:
            await storage.make_dirs(root)
        except WriteError as error:
            reason = error.strerror or str(error)
            raise RootError(
                error.errno, f"the root cannot be made ({reason}): give a directory that can be made", str(root)
            ) from error

    def forsake(self) -> None:
        """Note that the engine is about to be closed because nobody refers to it. Takes no lock of a thread."""
        if (lock := self._lock) is not None:
            lock.is_forsaken = True

    def give_way(self) -> None:
        """Let the next engine write: the saves of this one have ended, and its copies to the mirror may take long."""
        with contextlib.suppress(StallError, EngineClosedError):  # the end of the engine releases both, too
            self.last_passes()
            self._await_passes("close()")
            self.release_claim()
            self.release()

    def release(self) -> None:
        """Release the lock. Idempotent. If the disk does not answer within ``STOP_SECS``, log so and go on."""
        lock, self._lock = self._lock, None
        self._quarantine.claim = None
        if lock is not None:
            self._release(lock, self._rescue.forget)

    def _release(self, lock: RootLock, before: Callable[[], None] = lambda: None) -> None:
        """Call ``before`` and release ``lock``, in a thread, as the disk may hang."""

        def release() -> None:
            try:
                before()
            finally:
                lock.release()

        released, root = start_beside_or_here(release), self._ctx.root
        if not self._warning("releasing the lock").wait_for([released], STOP_SECS):
            text = "%s: the lock was not released within %.0f s: the file system does not answer. No engine can write "
            _log.error(text + "here until it does, or this process ends", root, STOP_SECS)
        else:
            released.result()

    def _check_open(self) -> None:
        if self._portal.is_closed:  # nothing would release the lock
            raise EngineClosedError

    async def _set_aside(self) -> None:
        ctx = self._ctx
        await self._quarantine.enforce(ctx.storage, ctx.root, self._claim, ctx.config.stall_timeout_secs)

    async def _clear(self) -> None:
        ctx = self._ctx
        await clear_leftovers(ctx.storage, ctx.root, ctx.names, self._claim.check, here=ctx.owner)

    # -- steps ----------------------------------------------------------------------------------------

    def steps(self, deadline: Deadline = NO_DEADLINE) -> list[int]:
        """Return the committed steps, ascending, without those to be set aside. Raises StallError at ``deadline``."""
        try:
            found = self._call(self.committed, what="reading the steps", deadline=deadline)
        except Exception as error:
            note_stage(error, "open")
            raise
        return [checkpoint.step for checkpoint in found]

    async def committed(self) -> Sequence[discovery.CommittedCheckpoint]:
        """Return the committed checkpoints, on the loop, without those to be set aside."""
        return await self._quarantine.committed(self._ctx.storage, self._ctx.root, self._ctx.names)

    def latest_step(self) -> int | None:
        """Return the newest committed step of the root and of its mirror, or None."""
        return max(self.all_steps(), default=None)

    def all_steps(self, deadline: Deadline = NO_DEADLINE) -> list[int]:
        """Return :meth:`steps`, and the steps of the mirror, from which a load may have come."""
        found = self.steps(deadline)
        self._copies = self._mirror_steps(deadline, is_needed=not found)
        return sorted({*found, *self._copies})

    def _mirror_steps(self, deadline: Deadline, *, is_needed: bool) -> list[int]:
        """Return the steps of the mirror. If it cannot be read, and ``is_needed`` is False, return none."""
        if self._ctx.mirror is None:
            return []
        read = functools.partial(copies_or_none, self._ctx, is_needed=is_needed)  # it warns of the mirror's store
        copies = self._within(read, what="reading the steps of the mirror", deadline=deadline)
        return [copy.step for copy in copies]

    def _known_copies(self, deadline: Deadline) -> Sequence[int]:
        """Return the steps of the mirror, as they were read last, and the newest that was copied since.

        A mirror that does not answer so keeps no further call. Without the lock, this returns none.
        """
        if self._lock is None:
            return ()
        if self._copies is None:
            self._copies = self._mirror_steps(deadline, is_needed=False)
        newest = self._newest_copy()
        return self._copies if newest is None else [*self._copies, newest]

    def learn_steps(self, deadline: Deadline) -> None:
        """Read the steps after which the next one is numbered, as the leader sees them, if they are not known.

        The steps of the mirror are among them once this engine writes.
        """
        members = self._ctx.members
        if self._known_steps.are_known:
            return
        if members.is_leader:
            self._known_steps.learn(lambda: [*self.steps(deadline), *self._known_copies(deadline)])
        else:
            # Another rank may see the disk late (NFS). The leader knows all steps and refuses one that this rank lacks.
            self._known_steps.learn(lambda: [] if members.newest_step is None else [members.newest_step])

    def check_holds_steps(self, what: str) -> None:
        """Raise CheckpointNotFoundError, with ``what`` was called, if the root holds no committed step."""
        if not self.steps():
            copies = self._mirror_steps(NO_DEADLINE, is_needed=False)
            text = f"{what}: no committed step under {self._ctx.root}"
            if copies:
                held = f"the mirror {self._ctx.mirror} holds steps up to {copies[-1]}"
                text += f"; {held}, and 'aio-ckpt cp' copies one into the root"
            raise CheckpointNotFoundError(text)

    def abandon_steps_after(self, step: int) -> StepsChange:
        """Move the steps after ``step`` below ``.aio_ckpt/abandoned/``. Needs the lock.

        Raises:
            CheckpointNotFoundError: ``step`` is not committed.
            RootError: another writer has taken over.
            StallError: steps are still being deleted.
        """
        self._await_passes(f"rollback({step})")
        return self._call(self._abandon_after, step, what="rollback()")

    def _await_passes(self, what: str) -> None:
        """Wait for deletions in progress: they may have listed the step of ``what``, so that no step might be left."""
        warning = self._warning(f"{what}: the deletion of expired steps")
        if not warning.wait_for(self._passes, self._ctx.config.stall_timeout_secs):
            raise StallError(f"{what}: the deletion of expired steps under {self._ctx.root} does not end")

    async def _abandon_after(self, step: int) -> StepsChange:
        ctx = self._ctx
        tag, check = str(time.time_ns()), self._claim.check
        if ctx.mirror is not None and step in [found.step for found in await self.committed()]:
            await check()
            await record_rollback(ctx.storage, ctx.root, ctx.mirror, ctx.names, step, tag)
            self._copies = None
        async with self._quarantine.renames:
            abandoned = await rollback.abandon_after(ctx.storage, ctx.root, ctx.names, step, tag, check)
        await check()
        await protection.unprotect_after(ctx.storage, ctx.root, step)
        return step, abandoned

    # -- retention ------------------------------------------------------------------------------------

    def discard(self, step: int, *, allow_newest: bool) -> StepsChange:
        """Rename one committed step to trash. Needs the lock.

        Raises:
            CheckpointNotFoundError, ProtectedStepError, StepOrderError, WriteError: see :meth:`Retention.discard`.
            RootError: another writer has taken over.
            StallError: the disk stalls.
        """
        copies = self._known_copies(NO_DEADLINE)  # first: if this fails, nothing is renamed
        discard = functools.partial(self._retention.discard, allow_newest=allow_newest)
        left = self._call(discard, step, what="delete()")
        return max([*left, *copies], default=None), [step]

    def delete_discarded(self, step: int) -> None:
        """Delete the files of a step that :meth:`discard` renamed, durably. Needs the lock.

        Raises:
            WriteError: see :meth:`Retention.delete_discarded`.
            StallError: expired steps are still being deleted, or the disk stalls.
        """
        self._call(self._retention.delete_discarded, step, what="delete()")

    def check_outside_root(self, path: Path, deadline: Deadline) -> None:
        """Raise ConfigError if no checkpoint can be saved or removed at ``path``; see ``path_checkpoints``."""
        ctx, what = self._ctx, f"looking at {path}"

        async def check() -> None:
            await run_blocking(ctx.executor, path_checkpoints.check_outside_root, path, ctx.root, ctx.names)

        self._call(check, what=what, deadline=deadline)

    def protect(self, step: int) -> None:
        """Protect a step from deletion, durably.

        Raises:
            CheckpointNotFoundError: ``step`` is not committed.
        """
        ctx = self._ctx
        self._call(protection.protect, ctx.storage, ctx.root, ctx.names, step, what="protect()")

    def unprotect(self, step: int) -> None:
        """End the protection of a step."""
        self._call(protection.unprotect, self._ctx.storage, self._ctx.root, step, what="unprotect()")

    def protected_steps(self) -> list[int]:
        """Return the protected steps, ascending."""
        ctx = self._ctx
        return sorted(self._call(protection.protected_steps, ctx.storage, ctx.root, what="protected_steps()"))

    @property
    def undeleted(self) -> Mapping[int, str]:
        """Steps that the last retention pass could not delete, with the reason."""
        return self._retention.undeleted

    def delete_expired(self, good: int | None) -> None:
        """After the commit of step ``good``: begin to delete expired steps and directories of failed saves.

        After the commit of a path, ``good`` is None, and no step expires. After that of a step, snapshots of dead
        trainers are deleted, too: this run does not go on from them.

        The deletion runs in the background. Without the lock no step expires, so only the leader of several ranks
        deletes steps, by its own settings.
        """
        self._passes = [done for done in self._passes if not done.done()]
        if good is not None and self._rescue.has_orphans:
            with contextlib.suppress(EngineClosedError):
                work = self._ctx.executor.submit(self._rescue.give_up, "a later run has committed a step")
                self._passes.append(work)
        if self._must_wait():
            return
        expires = good is not None and self._retention.has_work and self._lock is not None
        if expires or len(self._trash):
            self._begin_pass(good if expires else None)

    @property
    def passes(self) -> tuple[Future[None], ...]:
        """Futures of the deletions in the background."""
        return tuple(self._passes)

    def last_passes(self) -> tuple[Future[None], ...]:
        """Return :attr:`passes` and, as the engine is closing, one more for directories of failed saves."""
        if len(self._trash) and not self._must_wait():
            self._begin_pass(None)
        return self.passes

    def _begin_pass(self, good: int | None) -> None:
        with contextlib.suppress(EngineClosedError):  # the engine is closed; the next run deletes
            self._passes.append(self._portal.submit(self._delete, good))

    async def _delete(self, good: int | None) -> None:
        limit = self._ctx.config.stall_timeout_secs
        with anyio.move_on_after(limit) as scope:
            await self._trash.sweep()
            if good is not None:
                await self._retention.enforce(good)
        if scope.cancelled_caught:
            _log.warning("%s: deleting expired steps did not end within %s s", self._ctx.root, limit)

    def _warning(self, what: str, idle_secs: Callable[[], float] | None = None) -> WaitWarning:
        return disk_warning(what, self._ctx.root, idle_secs=idle_secs, rank=self._ctx.rank)

    def _call(
        self,
        async_fn: Callable[[*Ts], Coroutine[Any, Any, T]],
        *args: *Ts,
        what: str,
        deadline: Deadline = NO_DEADLINE,
        idle_secs: Callable[[], float] | None = None,
        more_secs: float = 0.0,
    ) -> T:
        """Do :meth:`_within`, and warn if the root's disk does not answer.

        ``idle_secs`` returns the seconds since the disk last answered; None: they are those of the call.
        """

        async def watched() -> T:
            with self._warning(what, idle_secs).on_loop():
                return await async_fn(*args)

        return self._within(watched, what=what, deadline=deadline, more_secs=more_secs)

    def _within(
        self, async_fn: Callable[[], Coroutine[Any, Any, T]], *, what: str, deadline: Deadline, more_secs: float = 0.0
    ) -> T:
        """Run ``async_fn()`` on the loop, for at most ``stall_timeout_secs`` and ``more_secs``."""
        timeout_secs = deadline.left_secs(self._ctx.config.stall_timeout_secs) + more_secs
        try:
            return self._portal.call(async_fn, timeout=timeout_secs, what=what)
        except StallError:
            deadline.check(None, what)
            raise


class _LockTaking:
    """Taking of the lock, in a thread. After :meth:`give_up`, the thread releases the lock that it gets."""

    def __init__(self, take: Callable[[], RootLock]) -> None:
        self._take = take
        self._mutex = Lock()
        self.has_begun = self._is_given_up = False
        self._taken: RootLock | None = None
        self.ended: Future[None] = new_future()
        """Done once the thread has ended."""

    def __call__(self) -> RootLock:
        try:
            with self._mutex:
                if self._is_given_up:
                    raise EngineClosedError("nobody waits for this call of the lock any more")
                self.has_begun = True
            lock = self._take()
            with self._mutex:
                self._taken, is_late = lock, self._is_given_up
            if is_late:
                lock.release()
            return lock
        finally:
            self.ended.set_result(None)

    def give_up(self) -> RootLock | None:
        """Return the lock if it was taken: the caller releases it. If it is taken later, the thread does."""
        with self._mutex:
            self._is_given_up = True
            return self._taken
