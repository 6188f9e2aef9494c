"""Retention: which committed steps are deleted, and how, so that a crash leaves trash but never a torn step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import anyio

from aio_ckpt.commit import TRASH_PREFIX, Committed, StepNames, discover
from aio_ckpt.storage import Storage

__all__ = ["Retention", "expired"]

_log = logging.getLogger("aio_ckpt")


def expired(committed: Sequence[Committed], *, keep_last: int | None, keep_every: int | None) -> list[Committed]:
    """Steps to delete, oldest first. Without ``keep_last`` none; the newest never."""
    if keep_last is None:
        return []
    return [
        checkpoint
        for checkpoint in committed[: -max(keep_last, 1)]
        if keep_every is None or checkpoint.step % keep_every
    ]


class Retention:
    """Deletes what the policy lets go, in the background, one pass at a time.

    Only the owner of the root's lock may run it. It never fails a save: what cannot be deleted is logged and
    tried again after the next commit.
    """

    def __init__(
        self,
        storage: Storage,
        root: Path,
        names: StepNames,
        *,
        keep_last: int | None,
        keep_every: int | None,
        must_wait: Callable[[], bool],
    ) -> None:
        """Nothing more is deleted while ``must_wait()`` says so: the next pass deletes it."""
        self._storage = storage
        self._root = root
        self._names = names
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._must_wait = must_wait
        self._one_at_a_time = anyio.Lock()

    @property
    def is_enabled(self) -> bool:
        """Whether anything is ever deleted."""
        return self._keep_last is not None

    async def enforce(self) -> list[int]:
        """Delete expired steps; returns them. Each is renamed to trash first: no half-deleted step is ever listed."""
        async with self._one_at_a_time:
            committed = await discover(self._storage, self._root, self._names)
            removed = []
            for checkpoint in expired(committed, keep_last=self._keep_last, keep_every=self._keep_every):
                if self._must_wait():
                    break
                trash = self._root / f"{TRASH_PREFIX}{checkpoint.path.name}"
                try:
                    await self._storage.rename(checkpoint.path, trash)
                    await self._storage.sync_dir(self._root)
                    await self._storage.remove_tree(trash)
                except OSError as error:
                    _log.warning("step %d is kept beyond its time: %s", checkpoint.step, error)
                else:
                    removed.append(checkpoint.step)
            return removed
