"""Quarantine: checkpoints that a load proved damaged are renamed, so that later loads and saves do not meet them.

They are never deleted. Only the holder of the writer's lock renames; damage that is proven before an engine's first
save is remembered until then. Damage is proven if two readings found a wrong checksum, a wrong length or a missing file
(``MismatchError``), and the search then came to an older checkpoint that is good. An error of the system, a template
that does not match and a load of a given step prove nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio

from aio_ckpt.commit.discovery import CommittedCheckpoint, discover, is_unchanged
from aio_ckpt.commit.protection import unprotect
from aio_ckpt.commit.root_claim import Claim
from aio_ckpt.errors import CorruptCheckpointError, RootError
from aio_ckpt.format.root_names import CORRUPT_DIR
from aio_ckpt.format.step_names import StepNames
from aio_ckpt.storage.durability import sync_parents
from aio_ckpt.storage.local import Storage

_log = logging.getLogger("aio_ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class CorruptCandidate:
    """A checkpoint that two readings found damaged."""

    checkpoint: CommittedCheckpoint
    """The checkpoint as it was listed before the first reading."""
    error: CorruptCheckpointError


class Quarantine:
    """Checkpoints that loads of one engine proved damaged and that must be set aside.

    Invariant: a directory is renamed only while the writer's lock and :attr:`renames` are held, and only if it still is
    the checkpoint that was read.
    """

    def __init__(self) -> None:
        self._candidates: dict[Path, CorruptCandidate] = {}
        self.claim: Claim | None = None
        """Claim of the engine on the root while it holds the writer's lock. ``RootSession`` sets it."""
        self.additions = 0
        """Number of times that checkpoints were added. If it rises, a list of steps read before is out of date."""
        self.renames = anyio.Lock()
        """Lock of all renames of steps (commit, retention, rollback, quarantine): between the check of a directory and
        its rename, no other directory may take its name."""

    @property
    def is_waiting(self) -> bool:
        """Whether a checkpoint is still to be set aside."""
        return bool(self._candidates)

    async def add(
        self, storage: Storage, root: Path, found: Iterable[CorruptCandidate], limit_secs: float
    ) -> dict[Path, Path]:
        """Add damaged checkpoints. If this engine is the writer, set them aside at once.

        Returns old -> new path of the moved ones.
        """
        new = {entry.checkpoint.path: entry for entry in found}
        if not new:
            return {}
        self._candidates |= new
        self.additions += 1
        if self.claim is None:
            return {}
        try:
            return await self.enforce(storage, root, self.claim, limit_secs)
        except RootError as error:
            _log.warning("damaged checkpoints are not set aside: %s", error)
            return {}

    async def enforce(self, storage: Storage, root: Path, claim: Claim, limit_secs: float) -> dict[Path, Path]:
        """Set the damaged checkpoints aside, as the writer that holds the ``claim``. Return old -> new path.

        A checkpoint that cannot be renamed within ``limit_secs`` is logged and stays for the next call.

        Raises:
            RootError: another writer has taken over.
        """
        moved: dict[Path, Path] = {}
        if not self._candidates:
            return moved
        with anyio.move_on_after(limit_secs, shield=True) as limit:
            async with self.renames:
                for entry in tuple(self._candidates.values()):
                    target = await self._set_aside(storage, root, claim, entry)
                    if target is not None:
                        moved[entry.checkpoint.path] = target
        if limit.cancelled_caught:
            late = sorted(entry.checkpoint.step for entry in self._candidates.values())
            _log.warning("steps %s are damaged but were not set aside within %s s", late, limit_secs)
        return moved

    async def committed(self, storage: Storage, root: Path, names: StepNames) -> Sequence[CommittedCheckpoint]:
        """Return the committed checkpoints, ascending by step, without those to be set aside."""
        found = await discover(storage, root, names)
        return [checkpoint for checkpoint in found if not await self._is_damaged(storage, checkpoint.path)]

    async def _is_damaged(self, storage: Storage, path: Path) -> bool:
        """Return whether a directory still is a checkpoint that was proven damaged."""
        entry = self._candidates.get(path)
        return entry is not None and await is_unchanged(storage, entry.checkpoint)

    async def _set_aside(self, storage: Storage, root: Path, claim: Claim, entry: CorruptCandidate) -> Path | None:
        path = entry.checkpoint.path
        target = root / CORRUPT_DIR / f"{path.name}-{time.time_ns()}"
        try:
            if not await self._is_damaged(storage, path):  # it was overwritten or removed meanwhile
                del self._candidates[path]
                return None
            await claim.check()
            await storage.rename(path, target)
        except RootError:
            raise
        except OSError as error:
            _log.warning("step %d is damaged but could not be set aside: %s", entry.checkpoint.step, error)
            return None
        del self._candidates[path]
        try:
            await sync_parents(storage, path, target)
            # The mark of the step would protect its next checkpoint, too.
            await unprotect(storage, root, entry.checkpoint.step)
        except OSError as error:
            _log.warning(
                "step %d was set aside, but a power loss may undo that, or its mark stays: %s",
                entry.checkpoint.step,
                error,
            )
        _log.warning("step %d was set aside as %s: %s", entry.checkpoint.step, target.name, entry.error)
        return target
