"""Reports of saves, loads and reads, and their progress. Sizes are bytes; :func:`amount` formats them for messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias

from aio_ckpt.errors import AioCkptError

WriteMode = Literal["direct", "dontcache", "buffered", "object"]
Target: TypeAlias = int | Path
"""What a save makes: a step of the root, or the checkpoint in a directory that the caller named."""
Stage = Literal["capture", "write", "agree", "commit", "read", "apply", "done", "failed"]

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Progress of one save, load or read on this rank."""

    stage: Stage
    """Of a save: ``capture`` (until all is copied), ``write``, ``agree`` (with the other ranks), ``commit``. Of a load:
    ``read``, ``apply`` (objects are set, ``load_state_dict`` is called). Of a read: ``read``. At the end ``done``, or
    ``failed``, also if it was cancelled."""
    bytes_done: int
    """Bytes of data files that are written, or read and verified. Chunks are written while others are captured."""
    bytes_total: int
    """Bytes of data files to write or read; 0 until they are known."""

    @property
    def has_ended(self) -> bool:
        """Whether the stage is ``done`` or ``failed``."""
        return self.stage in ("done", "failed")


OnProgress: TypeAlias = Callable[[Progress], object]
"""Function that gets the progress of a load or read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimings:
    """Seconds from the call of ``save()`` unless said otherwise."""

    blocked_secs: float = 0.0
    """How long ``save()`` kept its caller, waiting for room included."""
    waited_secs: float = 0.0
    """Part of ``blocked_secs`` spent waiting for room: for pending saves and for memory; of a file, for saves alone."""
    plan_secs: float = 0.0
    """From the call until there was a plan, on the caller's thread, without ``waited_secs``: walk, comparison and, on a
    miss, planning; also waits for another call of the engine and for the ranks to meet, and, in the first save, a look
    at the root. 0 for a file."""
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
    """Step that was saved; 0 for a save with ``path=`` and for a file, which have none."""
    path: Path
    """The committed directory, or the file."""
    image_bytes: int
    """Bytes in data files of this rank, or of the file."""
    raw_bytes: int
    """Tensor bytes without envelope and alignment."""
    cloned_bytes: int = 0
    """Bytes of ``image_bytes`` that were cloned from the step before, because they had not changed."""
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
    crc32s: Mapping[str, int] = field(default_factory=dict)
    """CRC32 of each whole file that ``save_file()`` wrote, by name; empty for a step."""


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
class _CheckpointReport:
    """What the reports of a load and of a read have in common."""

    step: int
    """Step of the checkpoint; 0 if ``save(path=)`` wrote it. -1 for a directory that was given by its path and tells
    none (stock DCP)."""
    path: Path
    """Directory of the checkpoint."""
    skipped: tuple[SkippedCheckpoint, ...] = ()
    """Newer checkpoints that did not verify, newest first."""
    untrusted: tuple[str, ...] = ()
    """Objects that only running code reads (only with ``skip_untrusted=True``). A load leaves them as they were in the
    template; a read puts an ``UntrustedObject`` in the place of each."""
    bytes_read: int = 0
    """Bytes read from data files."""
    verified: bool = True
    """Whether every byte of tensors and objects that was read was compared with a stored checksum. False with
    ``verify="never"``, and if stock DCP stored none for a part: it has one for a whole tensor, or none."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """JSON values that ``save(extra=)`` stored with the step; empty if it stored none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport(_CheckpointReport):
    """Report of one load."""

    missing: tuple[str, ...] = ()
    """Template names absent from the checkpoint, also those below modules, optimizers and other Stateful values (only
    with ``allow_missing=True``)."""
    mismatched: tuple[str, ...] = ()
    """Tensors of another shape than the stored ones, left as they were (only with ``skip_mismatched=True``)."""
    unexpected: tuple[str, ...] = ()
    """Names of the checkpoint that the template lacks."""
    dropped: tuple[str, ...] = ()
    """``PerRank`` values of ranks that saved and that this load lacks, as fewer ranks load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadReport(_CheckpointReport):
    """Report of one ``read(with_report=True)``."""

    plain: tuple[str, ...] = ()
    """Containers that came back as a plain dict, list or tuple, as their type is not trusted: ``name (type)``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyReport:
    """Report of one ``copy()``."""

    step: int
    """Step of the copy."""
    source: Path
    """Directory that was copied."""
    path: Path
    """Directory of the copy, which is committed and verified."""
    nbytes: int
    """Length of all its files, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Numbers of one engine since it was opened, on this rank."""

    rank: int
    """Rank of these numbers, from 0."""
    committed: int
    """Saves that were committed."""
    failed: int
    """Saves that failed after their capture had begun. Cancelled saves do not count."""
    skipped: int
    """Saves that were skipped (``when_busy="skip"``)."""
    pending: int
    """Saves whose capture has begun and that are not finished."""
    committed_bytes: int
    """Bytes of data files of this rank, in all committed saves."""
    blocked_secs: float
    """Seconds that ``save()`` kept its caller, in all committed saves."""
    stage_secs: Mapping[str, float]
    """Seconds in each stage, in all committed saves: ``wait`` (for room), ``plan``, ``capture``, ``write`` (fdatasync
    included), ``agree``, ``commit``. The stages of a save follow each other, from the call to the commit."""
    newest_step: int | None
    """Newest committed step that the engine knows; None before its first save, which reads the steps of the root."""
    newest_age_secs: float | None
    """Seconds since this engine committed ``newest_step``; None if another engine did."""
    memory_bytes: int
    """Host memory held for images now."""
    plan_hits: int
    """Saves, and calls of ``prepare()``, that reused the cached layout."""
    plan_misses: int
    """Saves, and calls of ``prepare()``, that planned anew."""
    mirrored_step: int | None
    """Newest step that this engine knows to be in the mirror; None before the first copy, and on other ranks than 0."""

    def numbers(self) -> dict[str, float]:
        """Return all numbers by name, without nesting, for a tracker: ``{"committed": 3, "write_secs": 0.8}``."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        del named["rank"], named["stage_secs"]
        named |= {f"{stage}_secs": secs for stage, secs in self.stage_secs.items()}
        return {name: value for name, value in named.items() if value is not None}


def step_of(target: Target) -> int | None:
    """Return the step of a target; None for a path."""
    return None if isinstance(target, Path) else target


def title(target: object) -> str:
    """Return the name of a :data:`Target` in messages: ``step 5``, or the path; ``the next step`` for None."""
    if target is None:
        return "the next step"
    return str(target) if isinstance(target, (Path, str)) else f"step {target}"


def amount(nbytes: float) -> str:
    """Return a number of bytes in decimal units with three digits: ``58.1 MB``."""
    power = 0
    while nbytes >= 999.5 and power < len(_UNITS) - 1:
        nbytes, power = nbytes / 1000, power + 1
    return f"{nbytes:.0f} B" if power == 0 else f"{nbytes:.3g} {_UNITS[power]}"
