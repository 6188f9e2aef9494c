"""Changes of a root from outside of its trainer: delete and roll back, by the engine's own routes, under its lock."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import time
from collections.abc import AsyncIterator, Collection, Sequence
from pathlib import Path

import anyio
import msgspec

from aio_ckpt.cli.work.root_table import RootRow, rows_of
from aio_ckpt.commit.discovery import CommittedCheckpoint, abandon_after, discover
from aio_ckpt.commit.owner import Owner, clear_leftovers, make_engine_dirs
from aio_ckpt.commit.retention import Policy, Retention, expired, protected_steps, unprotect_after
from aio_ckpt.commit.trash import check_engine_dirs
from aio_ckpt.config import EngineConfig, KeepBest
from aio_ckpt.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    ProtectedStepError,
    RootError,
    StepOrderError,
)
from aio_ckpt.format.names import LOCK_FILE, StepNames
from aio_ckpt.runtime.portal import Executor
from aio_ckpt.storage.local import Storage

_HELD = (errno.EAGAIN, errno.EACCES, errno.EBUSY)


@contextlib.asynccontextmanager
async def as_writer(storage: Storage, root: Path, names: StepNames, *, instead: str) -> AsyncIterator[Owner]:
    """Hold the root's lock, with the directories of an engine made and those of dead writers cleared.

    Args:
        instead: call of the engine that does the same inside of the trainer, for the message.

    Raises:
        RootError: a living writer holds the lock; names its process and host.
    """
    await check_engine_dirs(storage, root)
    try:
        lock = storage.lock(root / LOCK_FILE)
    except RootError as error:
        if error.errno not in _HELD:
            raise
        message = f"{error.strerror}: call {instead} in it, or wait until it has ended"
        raise RootError(error.errno, message, str(root)) from error
    with lock:
        here = Owner.of_this_process(f"cli{os.getpid()}")
        await make_engine_dirs(storage, root)
        await clear_leftovers(storage, root, names, here=here, stale_after_secs=EngineConfig().stale_after_secs)
        yield here


async def check_committed(storage: Storage, root: Path, names: StepNames, step: int) -> None:
    """Raise CheckpointNotFoundError unless ``step`` is committed. Changes nothing."""
    _check_among(step, [found.step for found in await discover(storage, root, names)], root)


def _check_among(step: int, committed: Sequence[int], root: Path) -> None:
    if step not in committed:
        told = ", ".join(map(str, committed)) or "no step is"
        raise CheckpointNotFoundError(f"step {step}: no such committed step under {root}; committed: {told}")


async def check_removable(
    storage: Storage, root: Path, names: StepNames, steps: Collection[int], *, allow_newest: bool
) -> None:
    """Refuse to delete ``steps`` if one is not committed, is protected, or is the newest. Changes nothing.

    Raises:
        CheckpointNotFoundError, ProtectedStepError, StepOrderError: the three cases. Each names the remedy.
    """
    committed = [found.step for found in await discover(storage, root, names)]
    marked = await protected_steps(storage, root)
    for step in sorted(steps):
        _check_among(step, committed, root)
        if step in marked:
            raise ProtectedStepError(f"step {step} is protected: 'aio-ckpt unprotect {root} {step}' ends that")
        if step == committed[-1] and not allow_newest:
            raise StepOrderError(f"step {step} is the newest of {root}: --allow-newest deletes it all the same")


async def delete_steps(
    storage: Storage, root: Path, names: StepNames, steps: Collection[int], *, allow_newest: bool
) -> None:
    """Delete steps, oldest first, durably. Needs the lock.

    Raises:
        CheckpointNotFoundError, ProtectedStepError, StepOrderError, WriteError: see :class:`Retention`. The
            steps before are gone.
    """
    retention = Retention(
        storage,
        root,
        names,
        Policy(keep_last=None, keep_every=None, keep_best=None),
        committed=functools.partial(discover, storage, root, names),
        renames=anyio.Lock(),
        must_wait=lambda: False,
    )
    for step in sorted(steps):
        await retention.discard(step, allow_newest=allow_newest)
        await retention.delete_discarded(step)


async def roll_back(storage: Storage, root: Path, names: StepNames, step: int) -> list[int]:
    """Set the steps after ``step`` aside, newest first, and return them. Needs the lock."""
    abandoned = await abandon_after(storage, root, names, step, str(time.time_ns()))
    await unprotect_after(storage, root, step)
    return abandoned


# -- prune ------------------------------------------------------------------------------------------


class PrunePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Which checkpoints a rule deletes."""

    expired: tuple[RootRow, ...]
    """Checkpoints to delete, oldest first."""
    kept: tuple[RootRow, ...]
    """All others."""

    @property
    def nbytes(self) -> int:
        """Length of what is deleted, in bytes."""
        return sum(row.nbytes for row in self.expired)


async def plan_prune(
    storage: Storage,
    executor: Executor,
    root: Path,
    names: StepNames,
    *,
    keep_last: int,
    keep_every: int | None,
    keep_best: KeepBest | None,
) -> PrunePlan:
    """Return what ``EngineConfig`` with the same settings would delete. Changes nothing.

    A checkpoint that looks damaged is not counted and stays: ``keep_last`` good ones are kept.
    """
    rows = await rows_of(storage, executor, root, names)
    good = [CommittedCheckpoint(step=row.step, path=Path(row.path)) for row in rows if row.fault is None]
    metrics = {row.step: row.metrics.get(keep_best.metric) for row in rows} if keep_best is not None else None
    gone = {
        checkpoint.step
        for checkpoint in expired(
            good,
            Policy(keep_last=keep_last, keep_every=keep_every, keep_best=keep_best),
            good=max((checkpoint.step for checkpoint in good), default=-1),
            protected=await protected_steps(storage, root),
            metrics=metrics,
        )
    }
    return PrunePlan(
        expired=tuple(row for row in rows if row.step in gone), kept=tuple(row for row in rows if row.step not in gone)
    )


def check_newest(plan: PrunePlan, root: Path) -> None:
    """Raise CorruptCheckpointError if the newest step looks damaged: the steps before it may be all that is good."""
    newest = max(plan.kept, key=lambda row: row.step)
    if newest.is_damaged:
        raise CorruptCheckpointError(
            f"step {newest.step}, the newest, is damaged ({newest.fault}), and nothing is deleted: "
            f"run 'aio-ckpt verify {root}', then delete {newest.path}"
        )
