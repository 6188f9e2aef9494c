"""Copy one committed step into the mirror, as the only writer there, and delete what expires by it."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

import anyio

from aio_ckpt.commit import discovery
from aio_ckpt.commit.mirror_copies import abandoned_copies
from aio_ckpt.commit.owner import Owner
from aio_ckpt.commit.protection import protected_steps
from aio_ckpt.commit.retention import Policy, Retention
from aio_ckpt.commit.rollback import abandon
from aio_ckpt.commit.root_claim import Claim
from aio_ckpt.commit.root_writer import writing
from aio_ckpt.copying import copy_as_writer, make_root
from aio_ckpt.errors import CheckpointExistsError, CheckpointNotFoundError, ProtectedStepError, RootError
from aio_ckpt.format.root_names import ENGINE_DIR
from aio_ckpt.format.step_names import StepNames
from aio_ckpt.message_texts import command_line
from aio_ckpt.remote_path import RemotePath
from aio_ckpt.runtime.portal import Executor
from aio_ckpt.storage.object_store import AnyStorage
from aio_ckpt.storage.small_files import save_of

_log = logging.getLogger("aio_ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCopier:
    """Copies steps of one root into one mirror."""

    storage: AnyStorage
    executor: Executor
    root: Path
    place: Path
    """The mirror."""
    names: StepNames
    """Names of the steps of both."""
    keep_last: int | None
    """Newest steps that the mirror keeps; None: all."""
    stale_after_secs: float

    async def copy(self, step: int, advance: Callable[[int], None], *, replaces: bool, is_known: bool) -> Path:
        """Copy a step, unless the mirror holds it. Return the directory of the copy.

        ``advance`` is called with the bytes done since, in any thread: each is copied, then read back. If ``replaces``,
        the copy takes the place of another save of the step in the mirror, once it was verified. If ``is_known``, the
        mirror has held a copy, and is not made anew.

        Raises:
            CheckpointNotFoundError: the root does not hold the step any more.
            CheckpointExistsError: the mirror holds another save of the step.
            CorruptCheckpointError: the step does not verify; nothing becomes visible, and no copy is deleted.
            ProtectedStepError: the mirror holds another save of the step, which is protected there.
            RootError, ReadError, WriteError: another writer holds the mirror, it is gone, or the system failed.
        """
        source = next(iter(await discovery.discover(self.storage, self.root, self.names, only=step)), None)
        if source is None:
            raise CheckpointNotFoundError(f"no committed step {step} under {self.root} any more")
        save_id = await save_of(self.storage, source.path)
        if (copied := await self._copy_of(step, save_id)) is not None:
            return copied
        if is_known and not await self._is_there():
            text = "the mirror is gone (its directory was removed or unmounted): bring it back"
            raise RootError(errno.ENOENT, text, str(self.place))  # a copy on the disk below would be lost with that
        await make_root(self.executor, self.place)
        async with self._as_writer() as claim:
            await self._abandon(claim)  # a mirror that was away has not been rolled back
            is_replaced = bool(await self._copies(only=step))
            if is_replaced:
                await self._check_replaceable(step, replaces=replaces)
            path = await copy_as_writer(
                self.storage,
                self.executor,
                source.path,
                self.place,
                self.names,
                step,
                claim,
                advance,
                replaces=is_replaced,
            )
            await self._retention(claim).enforce(step)
        return path

    async def set_abandoned_aside(self) -> None:
        """Roll the mirror back, as the root was: otherwise abandoned steps would come back if the root is lost.

        Raises:
            RootError, ReadError, WriteError: another writer holds the mirror, or the system failed.
        """
        if not await abandoned_copies(self.storage, self.root, self.place, self.names):
            return
        async with self._as_writer() as claim:
            await self._abandon(claim)

    async def _abandon(self, claim: Claim) -> None:
        aside = await abandoned_copies(self.storage, self.root, self.place, self.names)
        if aside:
            await abandon(self.storage, self.place, aside, str(time.time_ns()), claim.check)
            _log.info("%s: set aside steps %s, as the root was rolled back", self.place, [each.step for each in aside])

    def _as_writer(self) -> AbstractAsyncContextManager[Claim]:
        here = Owner.of_this_process()
        return writing(self.storage, self.place, self.names, here, stale_after_secs=self.stale_after_secs)

    async def _is_there(self) -> bool:
        if isinstance(self.place, RemotePath) or await self.storage.exists(self.place / ENGINE_DIR):
            return True
        return bool(await self._copies())  # made by hand

    async def _copies(self, only: int | None = None) -> list[discovery.CommittedCheckpoint]:
        return await discovery.discover(self.storage, self.place, self.names, only)

    async def _copy_of(self, step: int, save_id: str | None) -> Path | None:
        """Return the directory in the mirror that holds this very save of a step; None if there is none."""
        for found in await self._copies(only=step):
            if await save_of(self.storage, found.path) == save_id:
                return found.path
        return None

    async def _check_replaceable(self, step: int, *, replaces: bool) -> None:
        """Raise an error unless the copy may take the place of the mirror's own save of a step.

        Raises:
            CheckpointExistsError, ProtectedStepError: see :meth:`copy`.
        """
        what, where = f"{self.place} holds another save of step {step}", (self.place, step, *self.names.option)
        if not replaces:
            raise CheckpointExistsError(
                f"{what}, of another run, or of this one before it was overwritten: give each run a mirror of its own, "
                f"or delete the step there: {command_line('rm', *where)}"
            )
        if step in await protected_steps(self.storage, self.place):
            raise ProtectedStepError(f"{what}, protected: {command_line('unprotect', *where)} ends that")

    def _retention(self, claim: Claim) -> Retention:
        return Retention(
            self.storage,
            self.place,
            self.names,
            Policy(keep_last=self.keep_last, keep_every=None, keep_best=None),
            check=claim.check,
            committed=self._copies,
            renames=anyio.Lock(),
            must_wait=lambda: False,
        )
