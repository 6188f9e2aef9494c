"""Retention: decide which committed steps expire, and delete them. A crash leaves trash, never a torn step."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio

from aio_ckpt.commit.discovery import CommittedCheckpoint, step_directories
from aio_ckpt.commit.leftovers import restore_protected
from aio_ckpt.commit.protection import protected_steps
from aio_ckpt.commit.root_claim import Check
from aio_ckpt.commit.trash import delete_trash
from aio_ckpt.config import KeepBest
from aio_ckpt.errors import (
    AioCkptError,
    CheckpointNotFoundError,
    ProtectedStepError,
    StepOrderError,
)
from aio_ckpt.format.root_names import TRASH_DIR, protected_name
from aio_ckpt.format.step_names import StepNames
from aio_ckpt.message_texts import numbered, steps_shown
from aio_ckpt.storage.durability import sync_parents
from aio_ckpt.storage.local import Storage, names_in
from aio_ckpt.storage.small_files import read_root

_SHOWN = 10
"""Most steps that the line of one pass names."""
_MOVED_AT_ONCE = 16
"""Most steps that are renamed before the first is deleted: a commit waits for the renames."""
_log = logging.getLogger("aio_ckpt")


# -- decide -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Rule that decides which committed steps are kept."""

    keep_last: int | None
    """Number of newest steps to keep; None: no step is ever deleted."""
    keep_every: int | None
    """Also keep every step that is a multiple of this; None: no others."""
    keep_best: KeepBest | None
    """Also keep the best steps by a metric; None: no others."""


def expired(
    committed: Sequence[CommittedCheckpoint],
    policy: Policy,
    *,
    good: int,
    protected: Collection[int] = (),
    metrics: Mapping[int, float | None] | None = None,
) -> list[CommittedCheckpoint]:
    """Return the checkpoints to delete, oldest first.

    Args:
        committed: the committed checkpoints, ascending by step.
        good: the newest step that this engine committed, which is known to be whole. Only older steps expire. If it is
            not in ``committed``, none does.
        metrics: the value of ``keep_best``'s metric by step; a step without an entry stays.
    """
    if policy.keep_last is None or all(checkpoint.step != good for checkpoint in committed):
        return []
    stay = {checkpoint.step for checkpoint in committed[-policy.keep_last :]}.union(protected)
    if policy.keep_best is not None:
        known = metrics or {}
        stay.update(checkpoint.step for checkpoint in committed if checkpoint.step not in known)
        stay.update(best(known, policy.keep_best))
    return [
        checkpoint
        for checkpoint in committed
        if checkpoint.step < good
        and checkpoint.step not in stay
        and (policy.keep_every is None or checkpoint.step % policy.keep_every)
    ]


def best(metrics: Mapping[int, float | None], rule: KeepBest) -> list[int]:
    """Return the best steps, best first. A step without a finite value is never among them."""
    sign = 1 if rule.mode == "min" else -1
    ranked = [(sign * value, -step) for step, value in metrics.items() if value is not None and math.isfinite(value)]
    return [-step for _, step in sorted(ranked)[: rule.count]]


def check_deletion(step: int, committed: Sequence[int], *, is_protected: bool, allow_newest: bool, root: Path) -> None:
    """Refuse to delete ``step`` if it is not in ``committed``, is protected, or is the newest.

    Raises:
        CheckpointNotFoundError, ProtectedStepError, StepOrderError: the three cases. Each names the remedy.
    """
    if step not in committed:
        known = steps_shown(committed)
        raise CheckpointNotFoundError(f"delete({step}): no such committed step under {root}; committed are {known}")
    if is_protected:
        raise ProtectedStepError(f"delete({step}): the step is protected under {root}: unprotect({step}) it first")
    if step == max(committed) and not allow_newest:
        raise StepOrderError(
            f"delete({step}): it is the newest committed step under {root}: allow_newest=True deletes it all the same"
        )


# -- delete -----------------------------------------------------------------------------------------


class Retention:
    """Deletion of expired steps in the background, one pass at a time, and of single steps on demand, in between.

    Only the holder of the root's lock may run it. A pass never fails a save: a step that cannot be deleted is logged,
    listed in ``undeleted``, and tried again after the next commit.

    Invariant: a pass lists, judges and renames steps to trash while it holds the lock ``renames``, so the newer steps
    that made a step expire still exist then. Trash is whole as long as it has its ``.metadata``.
    """

    def __init__(
        self,
        storage: Storage,
        root: Path,
        names: StepNames,
        policy: Policy,
        *,
        check: Check,
        committed: Callable[[], Awaitable[Sequence[CommittedCheckpoint]]],
        renames: anyio.Lock,
        must_wait: Callable[[], bool],
        held: Callable[[], Collection[int]] = lambda: (),
    ) -> None:
        """Set up retention by ``policy`` under ``root``.

        Args:
            check: function that raises RootError if another writer has taken over. It is called before each rename.
            committed: function that lists the steps that count.
            renames: lock of all renames of steps.
            must_wait: while this returns True, no step is deleted; a later pass deletes it.
            held: function that returns steps that do not expire yet, as they are being copied.
        """
        self._storage = storage
        self._root = root
        self._names = names
        self._policy = policy
        self._check = check
        self._committed = committed
        self._renames = renames
        self._must_wait = must_wait
        self._held = held
        self._one_at_a_time = anyio.Lock()
        self._is_pass_waiting = False
        self._metrics: dict[Path, tuple[tuple[int, ...], Mapping[str, float | None]]] = {}
        self._has_warned = False
        self._has_trash = False
        self._good: set[int] = set()
        self._last = -1
        self.undeleted: Mapping[int, str] = {}
        """Steps that the last pass could not delete, with the reason."""

    @property
    def has_work(self) -> bool:
        """Whether a pass may delete anything: the policy deletes steps, or a call of :meth:`delete` left trash."""
        return self._policy.keep_last is not None or self._has_trash

    async def enforce(self, good: int) -> None:
        """Delete the steps that expire by the commit of step ``good``.

        Each step is first renamed to trash, durably, so that no half-deleted step is ever listed.
        """
        self._good.add(good)
        self._last = good
        if self._is_pass_waiting:
            return  # that pass will see this commit, too
        self._is_pass_waiting = True
        try:
            await self._one_at_a_time.acquire()
        finally:
            self._is_pass_waiting = False
        try:
            undeleted: dict[int, str] = {}
            removed: list[int] = []
            try:
                self._has_trash = False
                async with self._renames:
                    left = await restore_protected(self._storage, self._root, self._names, self._check)
                steps = {path: self._names.step(path.name) for path in left}
                await self._delete({path: step for path, step in steps.items() if step is not None}, undeleted)
                has_more = True
                while has_more:
                    moved, has_more = await self._move_expired(undeleted)
                    removed += await self._delete(moved, undeleted)
                    has_more = has_more or await self._has_other_directory(moved.values())
            except OSError as error:
                self._has_trash = True
                _log.warning("%s: retention was put off: %s", self._root, error)
            self.undeleted = undeleted
            if removed:
                named = numbered("step", removed, most=_SHOWN)
                _log.info("%s: deleted %s (keep_last=%s)", self._root, named, self._policy.keep_last)
        finally:
            self._one_at_a_time.release()

    async def discard(self, *steps: int, allow_newest: bool) -> list[int]:
        """Rename committed steps to trash; return those that are left, ascending. A power loss may bring them back.

        Raises:
            CheckpointNotFoundError, ProtectedStepError, StepOrderError: see :func:`check_deletion`.
            RootError: another writer has taken over.
            WriteError: a rename failed.
        """
        storage, root = self._storage, self._root
        async with self._renames:
            left = [checkpoint.step for checkpoint in await self._committed()]
            committed = (await step_directories(storage, root, self._names)).committed  # a step may have several
            for step in sorted(steps):
                is_protected = await storage.exists(root / protected_name(step))
                check_deletion(step, left, is_protected=is_protected, allow_newest=allow_newest, root=root)
                moved = []
                for each in [directory for directory in committed if directory.step == step]:
                    await self._check()
                    moved.append(await self._move_to_trash(each))
                if None in moved:  # protected since the check
                    check_deletion(step, left, is_protected=True, allow_newest=allow_newest, root=root)
                left.remove(step)
        return left

    async def delete_discarded(self, *steps: int) -> None:
        """Delete the trash of ``steps``, durably, once no pass runs any more.

        Raises:
            WriteError: an fsync or a removal failed. A later pass or the next writer goes on.
        """
        async with self._one_at_a_time:
            trash = [
                name
                for name in await names_in(self._storage, self._root / TRASH_DIR)
                if self._names.step(name) in steps
            ]
            for name in trash[:1]:  # all have the same parents
                await sync_parents(self._storage, self._root / name, self._root / TRASH_DIR / name)
            for name in trash:
                await delete_trash(self._storage, self._root / TRASH_DIR / name)

    async def _move_expired(self, undeleted: dict[int, str]) -> tuple[dict[Path, int], bool]:
        """Rename some of the expired steps to trash, oldest first.

        Returns the step of each new path, and whether more steps have expired.
        """
        moved: dict[Path, int] = {}
        async with self._renames:
            may_expire = self._policy.keep_last is not None and not self._must_wait()
            found = await self._list_expired() if may_expire else []
            due = [checkpoint for checkpoint in found if checkpoint.step not in undeleted]
            for checkpoint in due[:_MOVED_AT_ONCE]:
                await self._check()
                with self._reporting_kept(checkpoint.step, undeleted):
                    if (trash := await self._move_to_trash(checkpoint)) is not None:
                        moved[trash] = checkpoint.step
        return moved, len(due) > _MOVED_AT_ONCE

    async def _has_other_directory(self, steps: Collection[int]) -> bool:
        """Return whether one of the moved ``steps`` has another directory, which counts in its place now."""
        return bool(steps) and any(
            self._names.step(name) in steps for name in await names_in(self._storage, self._root)
        )

    async def _delete(self, trash: Mapping[Path, int], undeleted: dict[int, str]) -> list[int]:
        """Make the renames to trash durable, by one pair of fsyncs, then delete the directories.

        Returns the steps that are gone.
        """
        deleted: list[int] = []
        is_durable = False
        for path, step in trash.items():
            if self._must_wait():
                self._has_trash = True
                break
            with self._reporting_kept(step, undeleted):
                if not is_durable:  # all have the same parents
                    await sync_parents(self._storage, self._root / path.name, path)
                    is_durable = True
                await delete_trash(self._storage, path)
                deleted.append(step)
        return deleted

    async def _list_expired(self) -> list[CommittedCheckpoint]:
        committed = await self._committed()
        self._good &= {checkpoint.step for checkpoint in committed}  # steps rolled back or proven damaged do not count
        stay = await protected_steps(self._storage, self._root)
        stay.update(self._held())
        stay.add(self._last)  # it may be an old step, which was overwritten
        rule, metrics = self._policy.keep_best, None
        if rule is not None:
            found = await self._read_metrics(committed)
            metrics = {step: of_step.get(rule.metric) for step, of_step in found.items()}
            self._warn_if_lacking(rule.metric, {name for of_step in found.values() for name in of_step})
        good = max(self._good, default=-1)
        return expired(committed, self._policy, good=good, protected=stay, metrics=metrics)

    async def _move_to_trash(self, checkpoint: CommittedCheckpoint) -> Path | None:
        """Rename a step to trash. Returns its new path; None if it is protected, and so was put back."""
        trash = self._root / TRASH_DIR / checkpoint.path.name
        self._has_trash = True  # if this call is cancelled, the next pass restores or deletes it
        await self._storage.rename(checkpoint.path, trash)
        is_protected = True  # until the mark was looked for
        try:
            is_protected = await self._storage.exists(self._root / protected_name(checkpoint.step))
        finally:
            if is_protected:
                await self._storage.rename(trash, checkpoint.path)
        return None if is_protected else trash

    @contextlib.contextmanager
    def _reporting_kept(self, step: int, undeleted: dict[int, str]) -> Iterator[None]:
        """Log an error of the system in the block, and list the step in ``undeleted``."""
        try:
            yield
        except OSError as error:
            self._has_trash = True
            _log.warning("step %d is kept beyond its time: %s", step, error)
            undeleted[step] = str(error)

    def _warn_if_lacking(self, metric: str, names: Collection[str]) -> None:
        if names and metric not in names and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%s: keep_best: no step has the metric %r, they have %s. Until one has it, keep_last and keep_every "
                "alone decide which steps are deleted. Logged once",
                self._root,
                metric,
                ", ".join(map(repr, sorted(names))),
            )

    async def _read_metrics(self, committed: Sequence[CommittedCheckpoint]) -> dict[int, Mapping[str, float | None]]:
        """Return the metrics of each step whose manifest can be read. Each manifest is read once."""
        known = {}
        for checkpoint in committed:
            cached = self._metrics.get(checkpoint.path)
            if cached is not None and cached[0] == checkpoint.identity:
                known[checkpoint.path] = cached
                continue
            try:
                root = await read_root(self._storage, checkpoint.path)
                known[checkpoint.path] = checkpoint.identity, {} if root is None else root.metrics
            except (AioCkptError, OSError) as error:
                _log.warning("step %d stays: its metrics cannot be read: %s", checkpoint.step, error)
        self._metrics = known
        return {checkpoint.step: known[checkpoint.path][1] for checkpoint in committed if checkpoint.path in known}
