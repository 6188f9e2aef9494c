"""Rescue as an engine uses it."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import msgspec

from aio_ckpt.commit.discovery import read_save_id
from aio_ckpt.commit.owner import Owner
from aio_ckpt.config import EngineConfig
from aio_ckpt.errors import AioCkptError
from aio_ckpt.format.root_names import SEGMENTS_FILE
from aio_ckpt.format.step_names import StepNames
from aio_ckpt.leaves.objects import ObjectBytes
from aio_ckpt.memory.arena import SharedMemoryFactory
from aio_ckpt.plan.save_plan import Plan
from aio_ckpt.remote_path import RemotePath
from aio_ckpt.rescue.decision import Decision, decide_against_root
from aio_ckpt.rescue.found_segments import (
    FoundSegment,
    find_segments,
    remove_segment,
    segment_directories,
    segment_prefix,
)
from aio_ckpt.rescue.segment import SegmentDirectory, SharedSegment
from aio_ckpt.rescue.snapshot_record import SnapshotRecord, store_record
from aio_ckpt.runtime.portal import Executor, Portal, run_blocking, watch_submissions
from aio_ckpt.runtime.waiting import call_within
from aio_ckpt.snapshot.captured_chunks import CapturedChunks
from aio_ckpt.snapshot.image import Image
from aio_ckpt.storage.local import Storage

_log = logging.getLogger("aio_ckpt")


class Rescue:
    """Rescue for the engine of one root. Without ``shm_path``, it makes no segment and records no snapshot.

    An engine without ``shm_path`` needs this, too, because it frees or gives up what dead trainers left for its root.

    Invariant: snapshots that could be rescued are kept until this engine commits a step, rolls back to a step before
    theirs, or needs their memory.
    """

    def __init__(
        self, storage: Storage, executor: Executor, root: Path, names: StepNames, owner: Owner, config: EngineConfig
    ) -> None:
        """Check ``config.shm_path``.

        Raises:
            ConfigError: ``shm_path`` is no writable directory of a memory file system.
        """
        self._storage = storage
        self._executor = executor
        self._root = root
        self._names = names
        self._owner = owner
        self._config = config
        self._kept: list[tuple[int, Path]] = []
        """Step and segment of each complete snapshot of a dead trainer."""
        self.shared_memory: SharedMemoryFactory | None = None
        """Factory of staging memory that outlives the process; None if the memory ends with the process."""
        self._directory: Path | None = None
        if config.shm_path is not None:
            self._directory = Path(config.shm_path).absolute()
            prefix = f"{segment_prefix(root)}{owner.label}"
            self.shared_memory = SegmentDirectory(self._directory, prefix, make_room=self._make_room)

    @property
    def has_orphans(self) -> bool:
        """Whether the engine keeps snapshots of dead trainers."""
        return bool(self._kept)

    def announce(self, portal: Portal) -> None:
        """Search the segments of dead trainers, log the snapshots that could be rescued, and keep them.

        The engine calls this when it is opened.
        """
        root, limit_secs = self._root, self._config.stall_timeout_secs
        try:
            found = call_within(limit_secs, self._find, "looking for what dead trainers have staged", root)
            if not any(orphan.record is not None and orphan.owner_is_dead for orphan in found):
                return
            decision = portal.call(
                decide_against_root, self._storage, root, self._names, found, timeout=limit_secs, what="opening"
            )
        except (AioCkptError, OSError) as error:
            _log.warning(
                "what a trainer that died has staged for %s could not be compared with its steps: %s", root, error
            )
            return
        for save in decision.saves:
            _log.warning(
                "step %d was staged by a trainer that died, and not committed: `aio-ckpt rescue %s` commits it; the "
                "first commit of this engine gives it up",
                save.step,
                root,
            )
        self._keep(decision)

    async def reclaim(self) -> None:
        """Free the segments that cannot be rescued, and record the directories of the others and of this engine.

        The engine calls this when it takes the root's lock.
        """
        if self._directory is None and not await self._storage.exists(self._root / SEGMENTS_FILE):
            return
        found = await run_blocking(self._executor, self._find)
        decision = await decide_against_root(self._storage, self._root, self._names, found)
        for refusal in decision.refusals:
            if refusal.is_obsolete:
                log = _log.warning if refusal.is_loss else _log.info
                log("removed %s: %s", refusal.orphan.stored.path, refusal.reason)
                await run_blocking(self._executor, remove_segment, refusal.orphan)
        self._keep(decision)
        own = [] if self._directory is None else [self._directory]
        directories = list(dict.fromkeys([*own, *(path.parent for _, path in self._kept)]))
        if directories:
            await self._record_directories(directories)
        else:
            await self._storage.remove_file(self._root / SEGMENTS_FILE)

    async def record(
        self,
        record: SnapshotRecord,
        plan: Plan,
        objects: ObjectBytes,
        image: Image,
        chunks: CapturedChunks,
        *,
        finished: Future[None],
    ) -> None:
        """Complete ``record`` and store it when every chunk is captured, concurrently with the write.

        Do nothing unless the image is in a named segment and holds the whole snapshot. The lease of the image is held
        for ``finished``, and the caller releases that hold when the save has ended.
        """
        segment = image.lease.arena.segment
        if not isinstance(segment, SharedSegment):
            return
        if not image.is_whole:
            _log.info(
                "step %d: larger than budget_bytes, so that no whole snapshot is there to be rescued", record.step
            )
            return
        image.lease.hold(finished)  # held before the await: the write, the other holder, may end while the id is read
        replaces = await read_save_id(self._storage, self._root / record.directory) if record.overwrite else ""
        record = msgspec.structs.replace(record, replaces=replaces, since_boot_secs=time.monotonic())
        for chunk in image.chunks:
            await chunks.wait(chunk.index, self._executor)
        with watch_submissions(image.lease.hold_until):
            await run_blocking(self._executor, store_record, segment, record, plan, objects, image)

    def give_up(self, why: str, *, after: int = -1) -> None:
        """Remove the kept snapshots of all steps after ``after``, and log ``why``."""
        dropped = [(step, path) for step, path in self._kept if step > after]
        self._kept = [(step, path) for step, path in self._kept if step <= after]
        for step, path in dropped:
            with contextlib.suppress(FileNotFoundError):  # another process has removed it
                path.unlink()
                _log.warning("%s: the snapshot of a dead trainer, of step %d, is given up: %s", path, step, why)

    def forget(self) -> None:
        """Remove the list of segment directories, unless snapshots of dead trainers are kept.

        The engine calls this when the writer ends well.
        """
        if not self.has_orphans and not isinstance(self._root, RemotePath):
            with contextlib.suppress(OSError):  # if the file stays, the next writer searches the directories in vain
                (self._root / SEGMENTS_FILE).unlink(missing_ok=True)

    def _make_room(self) -> bool:
        has_any = self.has_orphans
        self.give_up("there is no room for it beside the running trainer's")
        return has_any

    def _find(self) -> list[FoundSegment]:
        own = [] if self._directory is None else [self._directory]
        directories = [*segment_directories(self._root), *own]
        return find_segments(directories, self._root, self._owner, stale_after_secs=self._config.stale_after_secs)

    def _keep(self, decision: Decision) -> None:
        self._kept = [(save.step, save.orphan.stored.path) for save in decision.saves]

    async def _record_directories(self, directories: Sequence[Path]) -> None:
        """Replace the file that names the directories in one rename: a crash must not lose the old names."""
        if segment_directories(self._root) == directories:
            return
        temporary = self._root / f"{SEGMENTS_FILE}.tmp"
        await self._storage.remove_file(temporary)  # a writer that was killed here has left it
        await self._storage.write_file(temporary, msgspec.json.encode([str(path) for path in directories]))
        await self._storage.replace(temporary, self._root / SEGMENTS_FILE)
