"""Quarantine: checkpoints that a load proved damaged are renamed, so that they stand in nobody's way.

Never deleted, and never by a mere reader: only the holder of the writer's lock renames. What a load proves before its
engine saves for the first time is remembered until then.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio

from aio_ckpt.catalog import read_small_file
from aio_ckpt.commit import CORRUPT_PREFIX, Committed, StepNames, discover
from aio_ckpt.errors import CorruptCheckpointError
from aio_ckpt.manifest import METADATA_FILE, ROOT_MANIFEST
from aio_ckpt.storage import Storage

__all__ = ["Condemned", "Quarantine", "identify"]

_log = logging.getLogger("aio_ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Condemned:
    """A checkpoint that was read twice and did not match, either time."""

    checkpoint: Committed
    """Which."""
    identity: bytes
    """Of :func:`identify`, taken before the second reading."""
    error: CorruptCheckpointError
    """What did not match."""


async def identify(storage: Storage, path: Path) -> bytes:
    """Digest of the two files that name the save: another one under the same name (an overwrite) has another."""
    digest = hashlib.blake2b(digest_size=32)
    for name in (ROOT_MANIFEST, METADATA_FILE):
        data = await read_small_file(storage, path / name)
        digest.update(b"-" if data is None else b"+%d:" % len(data))
        digest.update(data or b"")
    return digest.digest()


class Quarantine:
    """What loads of one engine condemned.

    Invariant: a directory is renamed only while the writer's lock is held and no commit of this engine runs, and only
    if it still is the checkpoint that was read.
    """

    def __init__(
        self, storage: Storage, root: Path, *, is_writer: Callable[[], bool], on_condemned: Callable[[], None]
    ) -> None:
        """``is_writer`` tells whether the engine holds the writer's lock now; ``on_condemned`` that steps are gone."""
        self._storage = storage
        self._root = root
        self._is_writer = is_writer
        self._on_condemned = on_condemned
        self._condemned: dict[Path, Condemned] = {}
        self.commits = anyio.Lock()
        """Held by each commit: between a look at a directory and its rename, none may be exchanged."""

    async def condemn(self, found: Iterable[Condemned]) -> dict[Path, Path]:
        """Set these aside, now if this engine is the writer, else once it is; old -> new path of what was moved."""
        new = {entry.checkpoint.path: entry for entry in found}
        if not new:
            return {}
        self._condemned |= new
        moved = await self.enforce() if self._is_writer() else {}
        self._on_condemned()
        return moved

    async def enforce(self) -> dict[Path, Path]:
        """The writer: set aside what was condemned; old -> new path. What cannot be renamed is logged and stays."""
        moved: dict[Path, Path] = {}
        if self._condemned:
            with anyio.CancelScope(shield=True):
                async with self.commits:
                    for entry in tuple(self._condemned.values()):
                        target = await self._set_aside(entry)
                        if target is not None:
                            moved[entry.checkpoint.path] = target
        return moved

    async def committed(self, names: StepNames) -> Sequence[Committed]:
        """Committed checkpoints, ascending by step, less those that are to be set aside."""
        found = await discover(self._storage, self._root, names)
        return [checkpoint for checkpoint in found if not await self._is_condemned(checkpoint.path)]

    async def _is_condemned(self, path: Path) -> bool:
        entry = self._condemned.get(path)
        return entry is not None and await identify(self._storage, path) == entry.identity

    async def _set_aside(self, entry: Condemned) -> Path | None:
        path = entry.checkpoint.path
        target = self._root / f"{CORRUPT_PREFIX}{path.name}-{time.time_ns()}"
        try:
            if not await self._is_condemned(path):  # overwritten or removed meanwhile
                del self._condemned[path]
                return None
            await self._storage.rename(path, target)
            del self._condemned[path]
            await self._storage.sync_dir(self._root)
        except OSError as error:
            _log.warning("step %d is damaged but could not be set aside: %s", entry.checkpoint.step, error)
            return None
        _log.warning("step %d was set aside as %s: %s", entry.checkpoint.step, target.name, entry.error)
        return target
