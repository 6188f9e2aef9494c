"""Parameters of a load or a read: the context of the reading rank, and the options of the user."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from aio_ckpt.checkpoint.data_files import Files
from aio_ckpt.checkpoint.open import Checkpoint, RankSubset
from aio_ckpt.checkpoint.rank_names import as_one_state
from aio_ckpt.checks import check_callback, check_flag
from aio_ckpt.config import EngineConfig
from aio_ckpt.match.rename import Rename, check_rename
from aio_ckpt.reports import OnProgress
from aio_ckpt.runtime.portal import Executor
from aio_ckpt.storage.local import Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadContext:
    """The rank that reads, and its settings. All loads of an engine share it."""

    storage: Storage
    """File system of the checkpoints."""
    executor: Executor
    """Threads that read, verify, copy and decode."""
    rank: int = 0
    """Rank of the reader."""
    world_size: int = 1
    """Number of ranks that read."""
    ranks_on_host: int = 1
    """Number of those ranks on this host, which share its page cache."""
    readers: int
    """Most reads in flight at once."""
    verify: bool
    """Whether checksums are compared."""
    trusted: bool
    """Whether objects that only running code reads are decoded."""

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        storage: Storage,
        executor: Executor,
        *,
        rank: int,
        world_size: int,
        ranks_on_host: int = 1,
    ) -> ReadContext:
        """Return the context of a rank that reads as ``config`` says."""
        return cls(
            storage=storage,
            executor=executor,
            rank=rank,
            world_size=world_size,
            ranks_on_host=ranks_on_host,
            readers=config.workers,
            verify=config.verify == "load",
            trusted=config.trusted_objects,
        )

    @property
    def part(self) -> RankSubset | None:
        """The part of a checkpoint that this rank needs at most, if as many ranks saved it; None if it reads alone."""
        return RankSubset(self.rank, self.world_size) if self.world_size > 1 else None

    def as_one_state(self, checkpoint: Checkpoint) -> Checkpoint:
        """See :func:`aio_ckpt.checkpoint.rank_names.as_one_state`."""
        return as_one_state(checkpoint, rank=self.rank, world_size=self.world_size)

    def files(self, directory: Path, *, past_page_cache: bool) -> Files:
        """Return the data files in ``directory``; with ``past_page_cache``, all is read from the disk."""
        return Files(self.storage, directory, page_cache="pass" if past_page_cache else "take")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Options of one load, as the caller gave them. :meth:`check` is left to the load, which tells the other ranks."""

    step: int | None = None
    """Step of the checkpoint; None takes the newest that verifies."""
    path: str | os.PathLike[str] | None = None
    """Directory of the checkpoint, in the place of a step."""
    fallback: bool = True
    """Whether a load without a step passes by checkpoints that do not verify."""
    strict: bool = False
    """Whether names of the checkpoint that the template lacks are refused."""
    allow_missing: bool = False
    """Whether template names that the checkpoint lacks are left as they are, also below Stateful values."""
    skip_untrusted: bool = False
    """Whether objects that only running code reads are left as they are."""
    skip_mismatched: bool = False
    """Whether tensors of another shape are left as they are."""
    cast: bool = False
    """Whether tensors of another dtype are converted to that of the template."""
    rename: Rename | None = None
    """Maps stored names to those of the template; None if they are the same."""
    progress: OnProgress | None = None
    """Function of the caller that gets the progress."""

    def check(self) -> None:
        """Check the type of each option but those that name the checkpoint.

        Raises:
            ConfigError: names the option and its value.
        """
        check_rename(self.rename)
        for name in ("strict", "allow_missing", "skip_untrusted", "skip_mismatched", "cast", "fallback"):
            check_flag(name, getattr(self, name))
        check_callback("progress", self.progress)
