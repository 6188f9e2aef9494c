"""Decision which orphan segments are committed, and why the others are not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from aio_ckpt.commit import discovery
from aio_ckpt.commit.discovery import read_save_id
from aio_ckpt.format.step_names import StepNames
from aio_ckpt.rescue.found_segments import FoundSegment
from aio_ckpt.rescue.snapshot_record import SnapshotRecord
from aio_ckpt.storage.local import Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class RescuableSave:
    """A complete snapshot of a dead trainer that may be committed."""

    orphan: FoundSegment
    record: SnapshotRecord

    @property
    def step(self) -> int:
        """Step of the save."""
        return self.record.step


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Segment that is not committed, and why."""

    step: int | None
    """None if no readable snapshot record holds the step."""
    reason: str
    orphan: FoundSegment
    is_obsolete: bool
    """Whether the segment can never be committed, or need not be: its memory may be freed."""
    is_loss: bool
    """Whether a complete snapshot, or a segment that claims to hold one, is not committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Which segments of a root are committed, and which are refused."""

    saves: tuple[RescuableSave, ...]
    """To be committed, ascending by step."""
    refusals: tuple[Refusal, ...]
    """All other segments."""


def decide(found: Sequence[FoundSegment], committed: Mapping[int, str]) -> Decision:
    """Decide which snapshots may be committed.

    The step of a save must exceed every committed step, unless the save replaces the very checkpoint that the trainer
    asked to replace. If there are several saves of one step, the last one counts.

    Args:
        found: segments of one root.
        committed: save id of each committed step; "" if the save id is not known.
    """
    refusals = [_without_record(orphan) for orphan in found if orphan.record is None]
    whole = [RescuableSave(orphan=orphan, record=orphan.record) for orphan in found if orphan.record is not None]
    saves: list[RescuableSave] = []
    taken: dict[int, bool] = {}  # by step, whether its last save is committed now, or may be when its trainer is dead
    for save in sorted(whole, key=_last_first):
        refusal = _why_refused(save, committed, taken)
        if refusal is None:
            saves.append(save)
        else:
            refusals.append(refusal)
        if refusal is None or not refusal.is_obsolete:
            taken.setdefault(save.step, refusal is None)
    return Decision(saves=tuple(saves), refusals=tuple(refusals))


async def decide_against_root(
    storage: Storage, root: Path, names: StepNames, found: Sequence[FoundSegment]
) -> Decision:
    """Compare segments with the committed steps of ``root``, and :func:`decide`."""
    steps = {orphan.record.step for orphan in found if orphan.record is not None}
    committed = {
        checkpoint.step: await read_save_id(storage, checkpoint.path) if checkpoint.step in steps else ""
        for checkpoint in (await discovery.discover(storage, root, names) if found else ())
    }
    return decide(found, committed)


def _without_record(orphan: FoundSegment) -> Refusal:
    if not orphan.owner_is_dead:
        return Refusal(step=None, reason="its trainer may be alive", orphan=orphan, is_obsolete=False, is_loss=False)
    stored = orphan.stored
    return Refusal(step=None, reason=stored.fault, orphan=orphan, is_obsolete=True, is_loss=stored.is_damaged)


def _last_first(save: RescuableSave) -> tuple[int, float, float]:
    """Sort by step; of one step, the last save comes first."""
    return save.step, -save.record.since_boot_secs, -save.record.created_unix


def _replaces(record: SnapshotRecord, save_id: str) -> bool:
    """Return whether ``save_id`` is the committed save to be replaced, or an earlier save of the same engine."""
    engine, _, number = save_id.rpartition("-")
    own_engine, _, own_number = record.save_id.rpartition("-")
    is_earlier = engine == own_engine and (len(number), number) < (len(own_number), own_number)
    return save_id == record.replaces or (bool(save_id) and is_earlier)


def _why_refused(save: RescuableSave, committed: Mapping[int, str], taken: Mapping[int, bool]) -> Refusal | None:
    """Return why a snapshot is not committed, or None if it is.

    ``taken`` holds the steps of later snapshots that may be committed: True if now, False if its trainer is still
    alive.
    """
    record, step, newest = save.record, save.step, max(committed, default=-1)

    def refused(reason: str, *, is_obsolete: bool, is_loss: bool) -> Refusal:
        return Refusal(step=step, reason=reason, orphan=save.orphan, is_obsolete=is_obsolete, is_loss=is_loss)

    if not save.orphan.owner_is_dead:
        return refused(f"its trainer may be alive ({save.orphan.stored.path.name})", is_obsolete=False, is_loss=True)
    if committed.get(step) == record.save_id:
        return refused("it is committed", is_obsolete=True, is_loss=False)
    if step in committed and record.overwrite and not _replaces(record, committed[step]):
        if not committed[step]:
            reason = f"nothing tells whether step {step}, as it is committed, is what it was to replace"
            return refused(reason, is_obsolete=True, is_loss=True)
        return refused(f"another step {step} was committed since", is_obsolete=True, is_loss=False)
    if step <= newest and not (step in committed and record.overwrite):
        return refused(f"step {newest} is committed, which is not older", is_obsolete=True, is_loss=False)
    if step in taken:
        return refused(f"a later snapshot of step {step} is there", is_obsolete=taken[step], is_loss=False)
    if not record.metadata:
        return refused("its .metadata is in no snapshot record", is_obsolete=True, is_loss=True)
    return None
