"""Reports of saves, loads and reads. Sizes are bytes; :func:`amount` formats them for messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from aio_ckpt.errors import AioCkptError

__all__ = ["LoadReport", "ReadReport", "SaveReport", "SkippedCheckpoint", "StageTimings", "WriteMode", "amount"]

WriteMode = Literal["direct", "dontcache", "buffered"]

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimings:
    """Seconds from the call of ``save()`` unless said otherwise."""

    blocked_secs: float = 0.0
    """How long ``save()`` kept its caller, waiting for room included."""
    waited_secs: float = 0.0
    """Part of ``blocked_secs`` spent waiting for room (busy or out of budget)."""
    plan_secs: float = 0.0
    """Duration of walk, digest, fingerprint and, on a miss, planning; on the caller's thread."""
    staged_secs: float = 0.0
    """Until everything was copied to the image."""
    written_secs: float = 0.0
    """Until every chunk was written."""
    synced_secs: float = 0.0
    """Until the data file (fdatasync) and ``.metadata`` were durable."""
    agreed_secs: float = 0.0
    """Until every rank's manifest was durable and every rank had said so."""
    dir_synced_secs: float = 0.0
    """Until the pending directory was durable as a whole; what is left is to rename it and to make that durable."""
    committed_secs: float = 0.0
    """Until the checkpoint was durable and visible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveReport:
    """Report of one save."""

    step: int
    """Step that was saved."""
    path: Path
    """The committed directory."""
    image_bytes: int
    """Bytes in data files of this rank."""
    raw_bytes: int
    """Tensor bytes without envelope and alignment."""
    plan_hit: bool
    """Whether the cached layout was reused."""
    fingerprint_hit: bool
    """Whether the cached copy descriptors were reused."""
    mode: WriteMode
    """How the bytes went to the disk."""
    timings: StageTimings
    """Where the time went."""
    slowest_rank: Mapping[str, int] = field(default_factory=dict)
    """Per stage, the rank that took longest."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """JSON values that are stored with the step: those that rank 0 gave to ``save(extra=)``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippedCheckpoint:
    """Checkpoint that ``load`` passed over."""

    step: int
    """Step of the checkpoint."""
    path: Path
    """Directory in which it was found."""
    error: AioCkptError
    """Why the checkpoint was passed over."""
    quarantined: Path | None = None
    """Where it was moved to; None if it was left in place: the mismatch is not proven, or the engine does not hold the
    writer's lock (yet: its first save moves it)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """Report of one load."""

    step: int
    """Step that was loaded; -1 for a directory that was given by its path and tells none (stock DCP)."""
    path: Path
    """Directory of the checkpoint."""
    skipped: tuple[SkippedCheckpoint, ...] = ()
    """Newer checkpoints that did not verify, newest first."""
    missing: tuple[str, ...] = ()
    """Template names absent from the checkpoint (only with ``allow_missing=True``)."""
    unexpected: tuple[str, ...] = ()
    """Names of the checkpoint that the template lacks."""
    untrusted: tuple[str, ...] = ()
    """Objects that only running code reads, left as they were in the template (only with ``skip_untrusted=True``)."""
    bytes_read: int = 0
    """Bytes read from data files."""
    verified: bool = True
    """Whether sums were there and were checked."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """JSON values that ``save(extra=)`` stored with the step; empty if it stored none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadReport:
    """Report of one ``read(with_report=True)``."""

    step: int
    """Step that was read; -1 for a directory that was given by its path and tells none (stock DCP)."""
    path: Path
    """Directory of the checkpoint."""
    skipped: tuple[SkippedCheckpoint, ...] = ()
    """Newer checkpoints that did not verify, newest first."""
    untrusted: tuple[str, ...] = ()
    """Objects that only running code reads; an ``UntrustedObject`` stands in the place of each."""
    plain: tuple[str, ...] = ()
    """Containers that came back as a plain dict, list or tuple, as their type is not trusted: ``name (type)``."""
    bytes_read: int = 0
    """Bytes read from data files."""
    verified: bool = True
    """Whether sums were there and were checked."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """JSON values that ``save(extra=)`` stored with the step; empty if it stored none."""


def amount(nbytes: float) -> str:
    """Return a number of bytes in decimal units with three digits: ``58.1 MB``."""
    power = 0
    while nbytes >= 999.5 and power < len(_UNITS) - 1:
        nbytes, power = nbytes / 1000, power + 1
    return f"{nbytes:.0f} B" if power == 0 else f"{nbytes:.3g} {_UNITS[power]}"
