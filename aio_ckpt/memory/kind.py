"""Which kind of memory a save is staged in; ``staging="auto"`` decides by measurement."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch

from aio_ckpt.config import Staging
from aio_ckpt.errors import AioCkptError, BudgetExceededError, ConfigError
from aio_ckpt.memory.arena import Arena, ArenaKind, map_arena
from aio_ckpt.memory.cuda import copy_secs, cuda_is_available

__all__ = ["StagingChoice", "check_staging", "fastest", "measure"]

T = TypeVar("T")
_PROBE_BYTES = 16 << 20
_PROBE_ROUNDS = 2
_log = logging.getLogger("aio_ckpt")


def check_staging(staging: Staging, shm_path: str | Path | None, world_size: int) -> None:
    """Raise ConfigError if a setting cannot be had on this machine or by so many ranks."""
    if staging == "pinned" and not cuda_is_available():
        raise ConfigError('staging="pinned": no CUDA device is present; use staging="auto" or "pageable"')
    if shm_path is not None and world_size > 1:
        raise ConfigError(
            f"shm_path= with {world_size} ranks: a snapshot can be rescued for one rank only; leave it away"
        )


def fastest(bytes_per_sec: Mapping[ArenaKind, float]) -> ArenaKind:
    """What ``auto`` takes, of what could be had: registered memory unless a copy to pageable memory is faster.

    On a tie registered: only from there does ``save()`` not wait for the copies.
    """
    pinned, pageable = bytes_per_sec.get("pinned", 0.0), bytes_per_sec.get("pageable", 0.0)
    return "pinned" if pinned and pinned >= pageable else "pageable"


def measure(source: torch.device) -> dict[ArenaKind, float]:
    """Bytes per second copied from ``source`` to memory of each kind; a kind that the driver refuses is left out.

    One copy that is not counted, then the best of two, of 16 MiB: about 20 ms in all, once the device has done what is
    queued on it: the driver waits for that before it unlocks memory.
    """
    found: dict[ArenaKind, float] = {}
    kinds: tuple[ArenaKind, ...] = ("pinned", "pageable")
    for kind in kinds:
        arena = map_arena(_PROBE_BYTES, kind, None)
        try:
            if kind == "pinned":
                arena.register(source)
            found[kind] = _bytes_per_sec(arena, source)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # as drivers of virtual machines and containers refuse to lock memory
            _log.warning('staging="auto": %s memory cannot be used with %s: %s', kind, source, error)
        finally:
            arena.release()
    return found


def _bytes_per_sec(arena: Arena, source: torch.device) -> float:
    data = torch.empty(_PROBE_BYTES, dtype=torch.uint8, device=source)
    secs = [copy_secs(arena.tensor[:_PROBE_BYTES], data) for _ in range(1 + _PROBE_ROUNDS)]
    return _PROBE_BYTES / min(secs[1:])


class StagingChoice:
    """The kind of memory for each save of one engine.

    ``auto`` is measured once, at the first save or ``prepare`` of a state with CUDA tensors and not when the engine is
    opened: a context on a device that this rank may never use would cost it half a gigabyte.
    """

    def __init__(self, staging: Staging, *, is_named: bool) -> None:
        """``is_named``: the memory is to have a name (``shm_path``), which only shared memory can have."""
        self._staging: Staging = "shm" if is_named else staging
        self._measured: ArenaKind | None = None

    def kind(self, source: torch.device | None) -> ArenaKind:
        """For a state whose tensors come from ``source``; None: from host memory."""
        if self._staging != "auto":
            return self._staging
        if source is None:
            return "pageable"
        if self._measured is None:
            self._measured = self._measure(source)
        return self._measured

    def take(self, source: torch.device | None, lease: Callable[[ArenaKind], T]) -> T:
        """What ``lease`` gives for memory of the kind; with ``auto`` of pageable memory if none can be locked.

        A limit on locked memory may let the probe pass and not the arena of a state.
        """
        kind = self.kind(source)
        try:
            return lease(kind)
        except RuntimeError as error:
            if isinstance(error, AioCkptError) or kind != self._measured or kind == "pageable":
                raise
            _log.warning('staging="auto": pageable memory is taken from now on, for %s is refused: %s', kind, error)
            self._measured = "pageable"
        return lease("pageable")

    def _measure(self, source: torch.device) -> ArenaKind:
        try:
            found = measure(source)
        except (BudgetExceededError, OSError, torch.OutOfMemoryError) as error:
            _log.info('staging="auto": not measured, pinned is taken: %s', error)
            return "pinned"
        chosen = fastest(found)
        told = ", ".join(f"{kind} {rate / 1e9:.1f} GB/s" for kind, rate in found.items())
        _log.info('staging="auto": %s is taken for %s (%s)', chosen, source, told)
        return chosen
