"""Context of an engine: its root, its ranks, its settings and its I/O threads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from aio_ckpt.commit.owner import Owner, pending_path
from aio_ckpt.config import EngineConfig
from aio_ckpt.format.step_names import StepNames
from aio_ckpt.ranks.membership import Membership
from aio_ckpt.reports import Target
from aio_ckpt.runtime.portal import Executor
from aio_ckpt.storage.local import Storage
from aio_ckpt.storage.mounts import Mount


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineContext:
    """Values that all calls of one engine share. No call changes them."""

    root: Path
    """Directory of the checkpoints, absolute."""
    names: StepNames
    """Directory names of steps."""
    owner: Owner
    """Owner record of this process."""
    config: EngineConfig
    members: Membership
    """All ranks of the engine, with this one."""
    storage: Storage
    """File system of the checkpoints."""
    mount: Mount
    """Where the root is mounted."""
    executor: Executor
    """The engine's I/O threads."""
    rank: int
    """This rank, from 0."""
    world_size: int
    """Number of ranks that save together."""

    mirror: Path | None = None
    """Root of the copies; None if there is no mirror."""

    def final_path(self, target: Target) -> Path:
        """Return the directory of a checkpoint once it is committed."""
        return target if isinstance(target, Path) else self.root / self.names.name(target)

    def pending_path(self, number: int) -> Path:
        """Return the directory of call ``number`` of ``save()`` until the commit. It is the same on every rank."""
        return pending_path(self.root, self.members.owner, number)

    def save_id(self, number: int) -> str:
        """Return a unique name of the save of call ``number``. It is the same on every rank."""
        return f"{self.members.owner.session}-{number}"
