"""The kind of memory that a save is staged in. ``staging="auto"`` takes page-locked memory wherever CUDA locks it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from aio_ckpt.config import Staging
from aio_ckpt.errors import AioCkptError, BudgetExceededError, ConfigError
from aio_ckpt.memory.arena import Arena, ArenaKind, map_arena
from aio_ckpt.memory.cuda import cuda_is_available

T = TypeVar("T")
_PROBE_BYTES = 4096
_log = logging.getLogger("aio_ckpt")


def check_staging(staging: Staging, shm_path: str | Path | None, world_size: int) -> None:
    """Raise ConfigError if this machine, or this number of ranks, cannot have the settings."""
    if staging == "pinned" and not cuda_is_available():
        raise ConfigError('staging="pinned": no CUDA device is present; use staging="auto" or "pageable"')
    if shm_path is not None and world_size > 1:
        raise ConfigError(
            f"shm_path= with {world_size} ranks: a snapshot can be rescued for one rank only; leave it away"
        )


def can_page_lock(source: torch.device) -> bool:
    """Return whether the driver page-locks memory for copies from ``source``. The test locks one page."""
    arena: Arena | None = None
    try:
        arena = map_arena(_PROBE_BYTES, "pinned", None)
        arena.register(source)
    except (BudgetExceededError, OSError):  # there is no memory for one page: the save itself will raise
        return True
    except RuntimeError as error:  # in virtual machines and containers, some drivers refuse to lock memory
        _log.warning('staging="auto": pinned memory cannot be used with %s: %s', source, error)
        return False
    finally:
        if arena is not None:
            arena.release()
    return True


class StagingChoice:
    """Choice of the kind of memory for each save of one engine or writer.

    ``auto`` asks the driver once, at the first save or ``prepare`` of a state with CUDA tensors. It does not ask when
    the engine is opened: a context on a device that this rank may never use would cost half a gigabyte.
    """

    def __init__(self, staging: Staging, *, is_named: bool = False) -> None:
        """Set the kind. If ``is_named``, the memory needs a name (``shm_path``), which only shared memory can have."""
        self._staging: Staging = "shm" if is_named else staging
        self._auto_kind: ArenaKind | None = None

    def kind(self, source: torch.device | None) -> ArenaKind:
        """Return the kind for a state whose tensors lie on ``source``; None means host memory."""
        if self._staging != "auto":
            return self._staging
        if source is None:
            return "pageable"
        if self._auto_kind is None:
            self._auto_kind = "pinned" if can_page_lock(source) else "pageable"
        return self._auto_kind

    def take(self, source: torch.device | None, acquire: Callable[[ArenaKind], T]) -> T:
        """Return ``acquire(kind)``. With ``auto``, fall back to pageable memory if the arena cannot be page-locked.

        A limit on locked memory may allow the one page of :func:`can_page_lock` and still refuse the arena of a state.
        """
        kind = self.kind(source)
        try:
            return acquire(kind)
        except RuntimeError as error:
            if isinstance(error, AioCkptError) or kind != self._auto_kind or kind == "pageable":
                raise
            _log.warning('staging="auto": pageable memory is taken from now on, for %s is refused: %s', kind, error)
            self._auto_kind = "pageable"
        return acquire("pageable")
