"""What an engine holds of its root: the writer's lock, the committed steps, what is deleted and what is protected."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

import anyio

from aio_ckpt import retention
from aio_ckpt.errors import RootError, tell_stage
from aio_ckpt.names import LOCK_FILE
from aio_ckpt.owner import clear_leftovers
from aio_ckpt.pipeline import Site
from aio_ckpt.portal import Portal
from aio_ckpt.rootlock import RootLock
from aio_ckpt.storage import make_dirs

__all__ = ["RootKeeper", "make_root"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_log = logging.getLogger("aio_ckpt")


def make_root(root: Path) -> None:
    """Make the directory of the checkpoints and its parents, durably; it may be there.

    Raises:
        RootError: it is a file or cannot be made.
    """
    try:
        make_dirs(root)
    except OSError as error:
        raise RootError(
            error.errno, f"the root cannot be used ({error.strerror}): give a directory that can be made", str(root)
        ) from error


class RootKeeper:
    """The root of one engine. Every call blocks its caller, for ``stall_timeout_secs`` at most.

    Invariant: nothing under the root is renamed, cleared or deleted without its lock, which is held from the first
    :meth:`become_writer` until :meth:`release`. A mark of protection is no such change: any process may set it.
    """

    def __init__(self, site: Site, portal: Portal, *, must_wait: Callable[[], bool]) -> None:
        """Nothing is deleted while ``must_wait()`` says so."""
        self._site = site
        self._portal = portal
        config = site.config
        policy = retention.Policy(keep_last=config.keep_last, keep_every=config.keep_every, keep_best=config.keep_best)
        self._retention = retention.Retention(
            site.storage, site.root, site.names, policy, commits=site.quarantine.commits, must_wait=must_wait
        )
        self._passes: list[Future[None]] = []
        self._lock: RootLock | None = None

    # -- the lock -------------------------------------------------------------------------------------

    def become_writer(self, learn: Callable[[Callable[[], list[int]]], None]) -> None:
        """Before the first change under the root: take its lock, set aside what loads proved damaged, clear leftovers,
        let ``learn`` read the steps.

        Raises:
            RootError: another writer holds it, or the root is not writable.
        """
        if self._lock is not None:
            self._lock.renew()
            return
        site, lock = self._site, None
        try:
            lock = site.storage.lock(site.root / LOCK_FILE)
            site.quarantine.is_writer = True
            self._call(site.quarantine.enforce, site.storage, site.root, what="setting damaged checkpoints aside")
            cleared = self._call(self._clear, what="clearing leftovers")
        except BaseException as error:
            tell_stage(error, "open")
            site.quarantine.is_writer = False
            if lock is not None:
                lock.release()
            raise
        self._lock = lock
        if cleared:
            _log.info("cleared leftovers of dead writers: %s", ", ".join(cleared))
        learn(self.steps)

    def release(self) -> None:
        """Let the lock go. Idempotent."""
        lock, self._lock = self._lock, None
        self._site.quarantine.is_writer = False
        if lock is not None:
            lock.release()

    async def _clear(self) -> list[str]:
        site = self._site
        return await clear_leftovers(
            site.storage, site.root, here=site.owner, stale_after_secs=site.config.stale_after_secs
        )

    # -- steps ----------------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Committed steps, ascending, less those that are to be set aside."""
        site = self._site
        try:
            found = self._call(site.quarantine.committed, site.storage, site.root, site.names, what="steps()")
        except Exception as error:
            tell_stage(error, "open")
            raise
        return [checkpoint.step for checkpoint in found]

    def rollback(self, step: int) -> list[int]:
        """Rename the steps after ``step`` to ``.abandoned-*``; returns them. Needs the lock.

        Raises:
            CheckpointNotFoundError: ``step`` is not committed.
        """
        return self._call(self._retention.rollback, step, str(time.time_ns()), what="rollback()")

    # -- retention ------------------------------------------------------------------------------------

    def protect(self, step: int) -> None:
        """Mark a step, durably, as never to be deleted.

        Raises:
            CheckpointNotFoundError: ``step`` is not committed.
        """
        site = self._site
        self._call(retention.protect, site.storage, site.root, site.names, step, what="protect()")

    def unprotect(self, step: int) -> None:
        """Take the mark away."""
        self._call(retention.unprotect, self._site.storage, self._site.root, step, what="unprotect()")

    def protected_steps(self) -> list[int]:
        """Marked steps, ascending."""
        site = self._site
        return sorted(self._call(retention.protected_steps, site.storage, site.root, what="protected_steps()"))

    @property
    def undeleted(self) -> Mapping[int, str]:
        """Steps that retention could not delete at last, and why."""
        return self._retention.undeleted

    def delete_expired(self, good: int) -> None:
        """Step ``good`` is committed: begin to delete, in the background, what expires by it."""
        self._passes = [done for done in self._passes if not done.done()]
        if self._retention.is_enabled:
            self._passes.append(self._portal.submit(self._enforce, good))

    @property
    def passes(self) -> tuple[Future[None], ...]:
        """Deletions in the background."""
        return tuple(self._passes)

    async def _enforce(self, good: int) -> None:
        limit = self._site.config.stall_timeout_secs
        with anyio.move_on_after(limit) as scope:
            await self._retention.enforce(good)
        if scope.cancelled_caught:
            _log.warning("%s: deleting expired steps did not end within %s s", self._site.root, limit)

    def _call(self, async_fn: Callable[[*Ts], Coroutine[Any, Any, T]], *args: *Ts, what: str) -> T:
        return self._portal.call(async_fn, *args, timeout=self._site.config.stall_timeout_secs, what=what)
