"""Context of a load or a read: the rank that reads, and its settings."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from aio_ckpt.checkpoint.data_files import Files
from aio_ckpt.checkpoint.load_progress import NO_METER, Meter
from aio_ckpt.checkpoint.open import Checkpoint, RankSubset, open_checkpoint
from aio_ckpt.checkpoint.rank_names import as_seen_by_rank
from aio_ckpt.config import EngineConfig
from aio_ckpt.runtime.portal import Executor, run_blocking
from aio_ckpt.storage.local import Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadContext:
    """The rank that reads, its settings, and who is told of its progress."""

    config: EngineConfig
    storage: Storage
    executor: Executor
    """Threads that read, verify, copy and decode."""
    rank: int = 0
    world_size: int = 1
    """Number of ranks that read."""
    ranks_on_host: int = 1
    """Number of those ranks on this host, which share its page cache."""
    past_page_cache: bool = False
    """Whether all data is read from the disk itself, for a second reading after a mismatch."""
    meter: Meter = NO_METER
    """Counts the bytes that are read."""

    @property
    def verify(self) -> bool:
        """Whether checksums are compared."""
        return self.config.verify == "load"

    @property
    def part(self) -> RankSubset | None:
        """The part of a checkpoint that this rank needs at most, if as many ranks saved it; None if it reads alone."""
        return RankSubset(self.rank, self.world_size) if self.world_size > 1 else None

    async def open(self, path: Path, *, step: int | None, part: RankSubset | None = None) -> Checkpoint:
        """Open the checkpoint at ``path``, as the state that this rank reads.

        Raises:
            CheckpointNotFoundError and others: see :func:`aio_ckpt.checkpoint.open.open_checkpoint`.
        """
        checkpoint = await open_checkpoint(self.storage, path, executor=self.executor, step=step, part=part)
        seen = functools.partial(as_seen_by_rank, rank=self.rank, world_size=self.world_size)
        return await run_blocking(self.executor, seen, checkpoint)

    def files(self, directory: Path) -> Files:
        return Files(self.storage, directory, page_cache="pass" if self.past_page_cache else "take")
