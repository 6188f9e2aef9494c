"""What dead trainers orphan in named segments, and which of it may be committed."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aio_ckpt.commit.owner import Owner, is_abandoned, owner_by_name
from aio_ckpt.errors import AioCkptError
from aio_ckpt.rescue.segment import SEGMENT_PREFIX, StoredSegment, list_segments, read_segment
from aio_ckpt.rescue.snapshot_record import SnapshotRecord, decode_record

__all__ = ["Decision", "OrphanSegment", "Refusal", "RescuableSave", "decide", "find_orphans", "segment_prefix"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OrphanSegment:
    """A segment that was found."""

    path: Path
    """Its file."""
    owner_is_dead: bool
    """Whether this host proves it, or has seen no sign of life for long."""
    stored: StoredSegment
    """What is in it."""
    record: SnapshotRecord | None
    """Its snapshot record, if it has a good one."""
    fault: str
    """Why it has none."""
    is_damaged: bool = False
    """Whether it was sealed, and the snapshot record is not good."""


def segment_prefix(root: Path) -> str:
    """What the names of all segments for ``root`` begin with."""
    real = os.path.realpath(root)
    return f"{SEGMENT_PREFIX}{hashlib.blake2b(os.fsencode(real), digest_size=8).hexdigest()}-"


def find_orphans(
    directories: Sequence[Path], root: Path, here: Owner, *, stale_after_secs: float
) -> list[OrphanSegment]:
    """Segments for ``root`` that other processes made, whether they live or not.

    An owner whose death cannot be proven, as of another container, counts as dead once it has sealed nothing for
    ``stale_after_secs``: only the holder of the root's lock, which a living writer would have, may act on that.
    """
    prefix, found = segment_prefix(root), []
    for directory in dict.fromkeys(directories):
        for path in list_segments(directory, prefix):
            owner = owner_by_name(path.name, here)
            if owner is not None and (owner.pid, owner.started_ticks) == (here.pid, here.started_ticks):
                continue
            stored, record = read_segment(path), None
            fault, is_damaged = stored.fault, stored.is_damaged
            if not fault:
                try:
                    record = decode_record(stored)
                except AioCkptError as error:
                    fault, is_damaged = str(error), True
            idle_secs = None if stored.modified_unix is None else time.time() - stored.modified_unix
            is_dead = is_abandoned(owner, here, idle_secs=idle_secs, stale_after_secs=stale_after_secs)
            orphan = OrphanSegment(
                path=path, owner_is_dead=is_dead, stored=stored, record=record, fault=fault, is_damaged=is_damaged
            )
            found.append(orphan)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RescuableSave:
    """A whole snapshot that a dead trainer orphan."""

    orphan: OrphanSegment
    """Its segment."""
    record: SnapshotRecord
    """What the segment says of it."""

    @property
    def step(self) -> int:
        """Its step."""
        return self.record.step


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Segments that are not committed."""

    step: int | None
    """Of their save; None if no snapshot record tells."""
    reason: str
    """Why."""
    segments: tuple[OrphanSegment, ...]
    """Which."""
    is_obsolete: bool
    """Whether nobody can ever commit them, or needs to: their memory may be given back."""
    is_loss: bool
    """Whether a whole snapshot, or what claims to be one, is not committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What becomes of the segments of a root."""

    saves: tuple[RescuableSave, ...]
    """To commit, ascending by step."""
    refusals: tuple[Refusal, ...]
    """All others."""


def decide(found: Sequence[OrphanSegment], committed: Mapping[int, str]) -> Decision:
    """Which snapshots may be committed.

    The step of a save must exceed every committed one, or replace the very checkpoint that the trainer asked to
    replace. Of one step the last save counts.

    Args:
        found: segments of one root.
        committed: save id of each committed step; "" where it is not known.
    """
    refusals = [_unsealed(orphan) for orphan in found if orphan.record is None]
    whole = [RescuableSave(orphan=orphan, record=orphan.record) for orphan in found if orphan.record is not None]
    saves: list[RescuableSave] = []
    taken: dict[int, bool] = {}  # by step, whether its last save is committed now, or may be when its trainer is dead
    for save in sorted(whole, key=_last_first):
        refusal = _refusal(save, committed, taken)
        if refusal is None:
            saves.append(save)
        else:
            refusals.append(refusal)
        if refusal is None or not refusal.is_obsolete:
            taken.setdefault(save.step, refusal is None)
    return Decision(saves=tuple(saves), refusals=tuple(refusals))


def _unsealed(orphan: OrphanSegment) -> Refusal:
    if not orphan.owner_is_dead:
        return Refusal(
            step=None, reason="its trainer may be alive", segments=(orphan,), is_obsolete=False, is_loss=False
        )
    return Refusal(step=None, reason=orphan.fault, segments=(orphan,), is_obsolete=True, is_loss=orphan.is_damaged)


def _last_first(save: RescuableSave) -> tuple[int, float, float]:
    """By step; of one step the last save comes first."""
    return save.step, -save.record.since_boot_secs, -save.record.created_unix


def _replaces(record: SnapshotRecord, save_id: str) -> bool:
    """Whether the committed save ``save_id`` is what was there, or came of an earlier call of the same engine."""
    engine, _, number = save_id.rpartition("-")
    own_engine, _, own_number = record.save_id.rpartition("-")
    is_earlier = engine == own_engine and (len(number), number) < (len(own_number), own_number)
    return save_id == record.replaces or (bool(save_id) and is_earlier)


def _refusal(save: RescuableSave, committed: Mapping[int, str], taken: Mapping[int, bool]) -> Refusal | None:
    """Why a snapshot is not committed; None: it is. ``taken``: see :func:`decide`."""
    record, step, newest = save.record, save.step, max(committed, default=-1)

    def refused(reason: str, *, is_obsolete: bool, is_loss: bool) -> Refusal:
        return Refusal(step=step, reason=reason, segments=(save.orphan,), is_obsolete=is_obsolete, is_loss=is_loss)

    if not save.orphan.owner_is_dead:
        return refused(f"its trainer may be alive ({save.orphan.path.name})", is_obsolete=False, is_loss=True)
    if committed.get(step) == record.save_id:
        return refused("it is committed", is_obsolete=True, is_loss=False)
    if step in committed and record.overwrite and not _replaces(record, committed[step]):
        if record.replaces is None or not committed[step]:
            reason = f"nothing tells whether step {step}, as it is committed, is what it was to replace"
            return refused(reason, is_obsolete=True, is_loss=True)
        return refused(f"another step {step} was committed since", is_obsolete=True, is_loss=False)
    if step <= newest and not (step in committed and record.overwrite):
        return refused(f"step {newest} is committed, which is not older", is_obsolete=True, is_loss=False)
    if step in taken:
        return refused(f"a later snapshot of step {step} is there", is_obsolete=taken[step], is_loss=False)
    if not record.metadata:
        return refused("its .metadata is in no seal", is_obsolete=True, is_loss=True)
    return None
