"""What every call of one engine knows: where the checkpoints are, who saves, and by which settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from aio_ckpt.commit.owner import Owner, pending_path
from aio_ckpt.config import EngineConfig
from aio_ckpt.format.names import StepNames
from aio_ckpt.ranks.membership import Membership
from aio_ckpt.runtime.portal import Executor
from aio_ckpt.storage.local import Storage

__all__ = ["EngineContext"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineContext:
    """What all calls of one engine share and none of them changes."""

    root: Path
    """Checkpoint root, absolute."""
    names: StepNames
    """Directory names of steps."""
    owner: Owner
    """Owner record of this process."""
    config: EngineConfig
    members: Membership
    """All ranks, this one included."""
    storage: Storage
    """File system of the checkpoints."""
    executor: Executor
    """The engine's I/O threads."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        return self.members.coordinator.rank

    @property
    def world_size(self) -> int:
        """Number of ranks that save together."""
        return self.members.coordinator.world_size

    def final_path(self, step: int) -> Path:
        """Directory of a committed ``step``."""
        return self.root / self.names.name(step)

    def pending_path(self, number: int) -> Path:
        """Directory of call ``number`` of ``save()`` until it is committed; the same on every rank."""
        return pending_path(self.root, self.members.owner, number)

    def save_id(self, number: int) -> str:
        """Name of call ``number``, which no other save ever had; the same on every rank."""
        return f"{self.members.owner.session}-{number}"
