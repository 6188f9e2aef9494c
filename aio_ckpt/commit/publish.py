"""Commit: pending -> durable -> visible; discovery of what is committed.

Root mode: everything is written and fsynced in a directory below ``.aio_ckpt/pending/``, which is then renamed into
place, so a checkpoint is whole or invisible at any instant. For a directory of the caller's see ``directory``.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import numbers
import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import anyio

from aio_ckpt.checks import shown
from aio_ckpt.commit.owner import read_owner
from aio_ckpt.errors import AioCkptError, CheckpointNotFoundError, ReadError, StepOrderError, WriteError
from aio_ckpt.format.manifests import METADATA_FILE, ROOT_MANIFEST
from aio_ckpt.format.names import ABANDONED_DIR, OWNER_FILE, TRASH_DIR, StepNames
from aio_ckpt.storage.local import Storage, names_in, sync_parents

__all__ = [
    "CommittedCheckpoint",
    "abandon_after",
    "check_step",
    "check_step_number",
    "discover",
    "discover_all",
    "is_unchanged",
    "publish",
    "sync_pending",
    "whole_number",
]

MAX_LOOKS = 32
"""How often a root is looked at anew because its writer deleted what was being looked at."""
MAX_STEP = 1 << 62
"""Largest number that a manifest holds."""

_TIDY_SECS = 60.0
"""How long a committed save waits for what it replaces to be removed."""
T = TypeVar("T")
_log = logging.getLogger("aio_ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedCheckpoint:
    """A committed checkpoint."""

    step: int
    """Its step."""
    path: Path
    """Its directory."""
    identity: tuple[int, ...] = ()
    """Of its ``.metadata`` when it was found; empty if it had lost it."""


async def discover(storage: Storage, root: Path, names: StepNames) -> list[CommittedCheckpoint]:
    """Committed checkpoints under ``root``, ascending by step. A directory without ``.metadata`` is none.

    Of a step that has two directories the one with the engine's own name counts.
    """
    committed, _ = await _step_directories(storage, root, names)
    return _chosen(committed, names)


async def discover_all(
    storage: Storage, root: Path, names: StepNames
) -> tuple[list[CommittedCheckpoint], list[CommittedCheckpoint]]:
    """As :func:`discover`, and what was committed before it lost its ``.metadata``, of other steps."""
    committed, bare = await _step_directories(storage, root, names)
    steps = {checkpoint.step for checkpoint in committed}
    return _chosen(committed, names), await _torn(storage, [found for found in bare if found.step not in steps])


def _chosen(committed: Sequence[CommittedCheckpoint], names: StepNames) -> list[CommittedCheckpoint]:
    found: dict[int, CommittedCheckpoint] = {}
    for checkpoint in committed:
        if checkpoint.step not in found or checkpoint.path.name == names.name(checkpoint.step):
            found[checkpoint.step] = checkpoint
    return [found[step] for step in sorted(found)]


async def _torn(storage: Storage, bare: Iterable[CommittedCheckpoint]) -> list[CommittedCheckpoint]:
    """Directories of steps that are ours by the root manifest, and no save into them runs."""
    found: list[CommittedCheckpoint] = []
    for checkpoint in bare:
        if not await storage.exists(checkpoint.path / ROOT_MANIFEST):
            continue
        try:
            files = await storage.list_dir(checkpoint.path)
        except ReadError as error:
            if error.errno != errno.ENOENT:
                raise
            continue  # its writer deleted it meanwhile
        if not any(file.startswith(METADATA_FILE) for file in files):
            found.append(checkpoint)
    return found


async def _step_directories(
    storage: Storage, root: Path, names: StepNames
) -> tuple[list[CommittedCheckpoint], list[CommittedCheckpoint]]:
    """What has ``.metadata`` and so is committed, and what is named like a step and has none: it may be anybody's."""
    found: list[CommittedCheckpoint] = []
    bare: list[CommittedCheckpoint] = []
    for _ in range(MAX_LOOKS):
        found.clear()
        bare.clear()
        has_vanished = False
        for name in await names_in(storage, root):
            step = names.step(name)
            if step is None or step > MAX_STEP:
                continue
            status = await storage.status(root / name / METADATA_FILE)
            if status is not None:
                found.append(CommittedCheckpoint(step=step, path=root / name, identity=status.identity))
            elif await storage.exists(root / name):
                bare.append(CommittedCheckpoint(step=step, path=root / name))
            else:
                has_vanished = True
        if not has_vanished:
            break  # else a writer deleted what was listed, maybe all of it: what it wrote instead is not listed yet
    return found, bare


async def is_unchanged(storage: Storage, found: CommittedCheckpoint) -> bool:
    """Whether a checkpoint is still the one that :func:`discover` found: neither deleted nor replaced since."""
    status = await storage.status(found.path / METADATA_FILE)
    return found.identity == (() if status is None else status.identity)


async def sync_pending(storage: Storage, pending: Path, root_manifest: bytes) -> None:
    """Leader, root mode: make a pending directory durable as a whole.

    All other files in it must have been fsynced, in whatever order: none counts before :func:`publish`.
    """
    await storage.write_file(pending / ROOT_MANIFEST, root_manifest)
    await storage.sync_dir(pending)


async def publish(storage: Storage, *, pending: Path, final: Path, overwrite: bool) -> tuple[Path, ...]:
    """Leader, root mode: make a sealed directory visible, durably.

    It never replaces; with ``overwrite`` the two directories are exchanged in one step and the old one is removed
    when the new one is durable. Where that fails it is under one of the names that are returned.
    """
    replaces = overwrite and await _holds_checkpoint(storage, final)  # else it would go without ever being one
    try:
        if replaces and not await storage.exists(final / OWNER_FILE):
            # The old one takes the pending name: what a crash leaves of it must be somebody's, to be cleared.
            await storage.write_file(final / OWNER_FILE, await read_owner(storage, pending))
        await _make_visible(storage, pending, final, replaces=replaces)
    except Exception:
        if replaces:  # the old one stays: it is a checkpoint again and nobody's
            with contextlib.suppress(AioCkptError, OSError):
                await storage.remove_file(final / OWNER_FILE)
        raise
    # Shielded, with a limit of its own: the step is committed, and no stall from here on may say that it is not.
    trash = final.parent / TRASH_DIR / pending.name if replaces else None
    is_tidy = False
    with anyio.move_on_after(_TIDY_SECS, shield=True) as tidying:
        is_tidy = await _tidied(storage, pending, final, trash)
    if tidying.cancelled_caught:
        _log.warning("%s is committed, but what it replaces was not removed within %s s", final, _TIDY_SECS)
    return () if is_tidy or trash is None else (pending, trash)


async def _holds_checkpoint(storage: Storage, path: Path) -> bool:
    """Whether it is a checkpoint, or was one of ours before it lost its ``.metadata``."""
    return await storage.exists(path / METADATA_FILE) or await storage.exists(path / ROOT_MANIFEST)


async def _make_visible(storage: Storage, pending: Path, final: Path, *, replaces: bool) -> None:
    move = storage.exchange if replaces else storage.rename
    try:
        await move(pending, final)
    except WriteError as error:
        if error.errno != errno.EEXIST:
            raise
        remedy = "is in the way and holds no checkpoint: move it away, or save another step"
        raise WriteError(errno.EEXIST, remedy, str(final)) from error
    try:
        await sync_parents(storage, pending, final)
    except Exception as error:
        # Visible but maybe not durable: the save fails, so it must not stay listed, and not come back after a power
        # loss without the files that are removed next.
        try:
            await move(final, pending)
            await sync_parents(storage, final, pending)
        except (AioCkptError, OSError) as undoing:
            error.add_note(f"{final} may still become visible, whole: it could not be taken back: {undoing}")
            if isinstance(error, AioCkptError):
                error.in_doubt = True
        raise


async def _tidied(storage: Storage, pending: Path, final: Path, trash: Path | None) -> bool:
    try:
        # Not before: without its owner what a crash leaves would be nobody's, and stay.
        await storage.remove_file(final / OWNER_FILE)
        if trash is not None:
            # As trash it is cleared even if a crash ends the removal.
            await storage.rename(pending, trash)
            await storage.remove_tree(trash)
    except Exception as error:  # noqa: BLE001 - MemoryError too: it is committed, and nothing may say that it is not
        _log.warning("%s is committed, but what it replaces could not be removed: %s", final, error)
        return False
    return True


async def abandon_after(storage: Storage, root: Path, names: StepNames, step: int, tag: str) -> list[int]:
    """Move every committed step after ``step`` below ``.aio_ckpt/abandoned/``, newest first; nothing is deleted.

    Newest first: a crash between two renames leaves a prefix of the history, never one with a gap.

    Raises:
        CheckpointNotFoundError: ``step`` is not committed.
    """
    step = check_step_number(step)
    committed, _ = await _step_directories(storage, root, names)  # every one: a step may have two
    steps = sorted({checkpoint.step for checkpoint in committed})
    if step not in steps:
        raise CheckpointNotFoundError(f"rollback({step}): no such committed step under {root}; committed are {steps}")
    committed.sort(key=lambda checkpoint: checkpoint.step)
    later = [checkpoint for checkpoint in reversed(committed) if checkpoint.step > step]
    for checkpoint in later:
        target = root / ABANDONED_DIR / f"{tag}-{checkpoint.path.name}"
        await storage.rename(checkpoint.path, target)
        await sync_parents(storage, checkpoint.path, target)  # each: a power loss may keep any of several renames
    return sorted({checkpoint.step for checkpoint in later}, reverse=True)


def check_step(
    step: object, *, newest: int | None, committed: Collection[int], pending: Collection[int], overwrite: bool
) -> int:
    """The step of a save: ``step``, or one after the newest committed or pending.

    Raises:
        StepOrderError: no whole number from 0, or it does not exceed ``newest`` and is not overwritten.
    """
    if step is None:
        return 1 if newest is None else check_step_number(newest + 1)
    step = check_step_number(step)
    if newest is None or step > newest or (overwrite and step in committed):
        return step
    hint = "overwrite=True replaces it" if step in committed else f"rollback({step}) goes back"
    if step in pending:
        hint = (
            "its save is pending: await its ticket (or engine.ready(), if one save is in flight) before overwrite=True"
        )
    raise StepOrderError(f"step={step} does not exceed the newest committed or pending step {newest}: {hint}")


def check_step_number(step: object) -> int:
    """``step`` as an int if it can be the number of a step.

    Raises:
        StepOrderError: no :func:`whole_number` from 0 to ``MAX_STEP``.
    """
    number = whole_number(step)
    if type(number) is not int or not 0 <= number <= MAX_STEP:
        told = shown(step) if type(number) is not int or abs(number) <= MAX_STEP else "so large a number"
        raise StepOrderError(f"step={told}: give a whole number of at least 0 and at most {MAX_STEP}")
    return number


def whole_number(step: T) -> T | int:
    """``step`` as an int if it is one of any kind, numpy's too; everything else unchanged, to be refused by name.

    No bool, and no tensor, although Python would take one for an index: reading it waits for its device.
    """
    return operator.index(step) if isinstance(step, numbers.Integral) and not isinstance(step, bool) else step
