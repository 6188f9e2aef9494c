"""Commit: pending -> durable -> visible; discovery of what is committed; leftovers of dead writers.

Root mode: everything is written and fsynced inside ``.pending-*``, which is then renamed into place, so a
checkpoint is whole or invisible at any instant. Directory mode: the directory is the caller's; the checkpoint
exists from the rename of its ``.metadata`` on.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import socket
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from aio_ckpt.errors import AioCkptError, CheckpointNotFoundError, RootError, StepOrderError, WriteError
from aio_ckpt.manifest import METADATA_FILE, ROOT_MANIFEST, decode_rank, decode_root
from aio_ckpt.storage import Storage, make_dirs

__all__ = [
    "Committed",
    "Owner",
    "StepNames",
    "abandon_after",
    "clear_leftovers",
    "commit_directory",
    "discover",
    "make_root",
    "pending_path",
    "publish",
    "retire_directory",
    "seal",
    "write_owner",
]

PENDING_PREFIX = ".pending-"
ABANDONED_PREFIX = ".abandoned-"
TRASH_PREFIX = ".trash-"
OWNER_FILE = "writer.json"
LOCK_FILE = ".aio_ckpt.lock"
MAX_SMALL_FILE_BYTES = 1 << 30
MAX_STEP = 1 << 62
"""Largest number that a manifest holds."""

_LITERAL = re.compile(r"\{step[^}]*\}")
_FOREIGN_STEP = re.compile(r"(?:step[-_]|iter_|checkpoint-|global_step)(\d+)")
_log = logging.getLogger("aio_ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A committed checkpoint."""

    step: int
    """Its step."""
    path: Path
    """Its directory."""


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """Who writes a pending directory (``writer.json``)."""

    session: str
    """Identity of the engine."""
    host: str
    """Host name."""
    boot_id: str
    """Identity of this boot of the host: a pid means nothing after another."""
    pid: int
    """Process."""
    started_unix: float
    """When the process started: a pid may be reused."""
    heartbeat_unix: float
    """When it last said that it lives."""

    @classmethod
    def of_this_process(cls, session: str) -> Owner:
        """The owner record of the calling process."""
        return cls(
            session=session,
            host=socket.gethostname(),
            boot_id=_boot_id(),
            pid=os.getpid(),
            started_unix=psutil.Process().create_time(),
            heartbeat_unix=time.time(),
        )

    def is_proven_dead(self) -> bool:
        """Whether this host can prove that the process is gone. An owner on another host never is."""
        if self.host != socket.gethostname():
            return False
        if self.boot_id != _boot_id():
            return True
        try:
            process = psutil.Process(self.pid)
            reused = abs(process.create_time() - self.started_unix) > 1.0
            return reused or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class StepNames:
    """Directory names of steps: one pattern for writing, several known ones for discovery."""

    def __init__(self, step_dir: str) -> None:
        self._step_dir = step_dir
        before, after = _LITERAL.split(step_dir)
        self._own = re.compile(rf"{re.escape(before)}(\d+){re.escape(after)}")

    def name(self, step: int) -> str:
        """Directory name of a step."""
        return self._step_dir.format(step=step)

    def step(self, name: str) -> int | None:
        """Step of a directory name; None if it is no name of a step."""
        match = self._own.fullmatch(name) or _FOREIGN_STEP.fullmatch(name)
        return int(match[1]) if match else None


def make_root(root: Path) -> None:
    """Make the root, if it is not there.

    Raises:
        RootError: it is a file, or cannot be made.
    """
    try:
        make_dirs(root)
    except OSError as error:
        raise RootError(
            error.errno, f"the root cannot be used ({error.strerror}): give a directory that can be made", str(root)
        ) from error


async def discover(storage: Storage, root: Path, names: StepNames) -> list[Committed]:
    """Committed checkpoints under ``root``, ascending by step. A directory without ``.metadata`` is none.

    Of a step that has two directories the one with the engine's own name counts.
    """
    found: dict[int, Committed] = {}
    for checkpoint in await _step_directories(storage, root, names):
        if checkpoint.step not in found or checkpoint.path.name == names.name(checkpoint.step):
            found[checkpoint.step] = checkpoint
    return [found[step] for step in sorted(found)]


async def _step_directories(storage: Storage, root: Path, names: StepNames) -> list[Committed]:
    if not await storage.exists(root):
        return []
    steps = [
        (step, root / name) for name in sorted(await storage.list_dir(root)) if (step := names.step(name)) is not None
    ]
    return [Committed(step=step, path=path) for step, path in steps if await storage.exists(path / METADATA_FILE)]


def pending_path(root: Path, owner: Owner, number: int) -> Path:
    """Where save ``number`` of the owner's session is written."""
    return root / f"{PENDING_PREFIX}{owner.session}-{number}"


async def write_owner(storage: Storage, pending: Path, owner: Owner) -> None:
    """Say whose the pending directory is, so that it is cleared only when its writer is dead."""
    await storage.write_file(pending / OWNER_FILE, msgspec.json.encode(owner))


async def seal(storage: Storage, pending: Path, root_manifest: bytes) -> None:
    """Leader, root mode: make a pending directory durable as a whole.

    All other files in it must have been fsynced, in whatever order: none counts before :func:`publish`.
    """
    await storage.write_file(pending / ROOT_MANIFEST, root_manifest)
    await storage.sync_dir(pending)


async def publish(storage: Storage, *, pending: Path, final: Path, overwrite: bool) -> None:
    """Leader, root mode: make a sealed directory visible, durably.

    It never replaces; with ``overwrite`` the two directories are exchanged in one step and the old one is removed
    when the new one is durable.
    """
    replaces = overwrite and await storage.exists(final)
    if replaces and not await storage.exists(final / OWNER_FILE):
        # The old one takes the pending name: what a crash leaves of it must be somebody's, to be cleared.
        await storage.write_file(final / OWNER_FILE, await _read_owner(storage, pending))
    move = storage.exchange if replaces else storage.rename
    try:
        await move(pending, final)
    except WriteError as error:
        if error.errno != errno.EEXIST:
            raise
        remedy = "is in the way and holds no checkpoint: move it away, or save another step"
        raise WriteError(errno.EEXIST, remedy, str(final)) from error
    try:
        await storage.sync_dir(final.parent)
    except OSError as error:
        # Visible but maybe not durable: the save fails, so it must not stay listed, and not come back after a power
        # loss without the files that are removed next.
        try:
            await move(final, pending)
            await storage.sync_dir(final.parent)
        except OSError as undoing:
            error.add_note(f"{final} may still become visible, whole: it could not be taken back: {undoing}")
            if isinstance(error, AioCkptError):
                error.in_doubt = True
        raise
    try:
        # Not before: without its owner what a crash leaves would be nobody's, and stay.
        await storage.remove_file(final / OWNER_FILE)
        if replaces:
            # As trash it is cleared even if a crash ends the removal.
            trash = pending.with_name(f"{TRASH_PREFIX}{pending.name}")
            await storage.rename(pending, trash)
            await storage.remove_tree(trash)
    except OSError as error:
        _log.warning("%s is committed, but what it replaces could not be removed: %s", final, error)


async def retire_directory(storage: Storage, directory: Path, *, save_id: str) -> tuple[str, ...]:
    """Directory mode, before the first byte: put an old ``.metadata`` aside.

    Returns the names of the files that the old checkpoint consists of; ``commit_directory`` removes them once
    the new one is durable. Files that no manifest of ours names are foreign and stay.
    """
    if not await storage.exists(directory / METADATA_FILE):
        return ()
    aside = f"{METADATA_FILE}.replaced-{save_id}"
    await storage.rename(directory / METADATA_FILE, directory / aside)
    await storage.sync_dir(directory)
    owned = [aside]
    if await storage.exists(directory / ROOT_MANIFEST):
        data = await storage.read_file(directory / ROOT_MANIFEST, max_bytes=MAX_SMALL_FILE_BYTES)
        try:
            for entry in decode_root(data, name=ROOT_MANIFEST).ranks:
                encoded = await storage.read_file(directory / entry.name, max_bytes=MAX_SMALL_FILE_BYTES)
                file = decode_rank(encoded, name=entry.name).file
                owned += [entry.name] if file is None else [entry.name, file.name]
        except AioCkptError:
            _log.warning("%s: the old manifest is unreadable; its files stay", directory)
    return tuple(owned)


async def commit_directory(
    storage: Storage, directory: Path, *, metadata: bytes, root_manifest: bytes, save_id: str, retired: Sequence[str]
) -> None:
    """Leader, directory mode: root manifest, then ``.metadata``, each by temporary file, fsync and rename."""
    for name, data in ((ROOT_MANIFEST, root_manifest), (METADATA_FILE, metadata)):
        temporary = directory / f"{name}.tmp-{save_id}"
        await storage.write_file(temporary, data)
        await storage.replace(temporary, directory / name)
        await storage.sync_dir(directory)
    await storage.sync_dir(directory.parent)
    for name in retired:
        await storage.remove_file(directory / name)


async def abandon_after(storage: Storage, root: Path, names: StepNames, step: int, tag: str) -> list[int]:
    """Rename every committed step after ``step`` to ``.abandoned-*``, newest first; nothing is deleted.

    Newest first: a crash between two renames leaves a prefix of the history, never one with a gap.

    Raises:
        CheckpointNotFoundError: ``step`` is not committed.
    """
    step = check_step_number(step)
    committed = await _step_directories(storage, root, names)  # every one: a step may have two
    steps = sorted({checkpoint.step for checkpoint in committed})
    if step not in steps:
        raise CheckpointNotFoundError(f"rollback({step}): no such committed step under {root}; committed are {steps}")
    committed.sort(key=lambda checkpoint: checkpoint.step)
    later = [checkpoint for checkpoint in reversed(committed) if checkpoint.step > step]
    for checkpoint in later:
        await storage.rename(checkpoint.path, root / f"{ABANDONED_PREFIX}{tag}-{checkpoint.path.name}")
        await storage.sync_dir(root)  # each: a power loss keeps renames that were not fsynced in any order
    return sorted({checkpoint.step for checkpoint in later}, reverse=True)


async def clear_leftovers(storage: Storage, root: Path) -> list[str]:
    """Remove trash and the pending directories whose writers are proven dead; returns their names."""
    cleared = []
    for name in await storage.list_dir(root):
        if name.startswith(TRASH_PREFIX) or (
            name.startswith(PENDING_PREFIX) and await _is_abandoned(storage, root / name)
        ):
            await storage.remove_tree(root / name)
            cleared.append(name)
    return cleared


async def _read_owner(storage: Storage, pending: Path) -> bytes:
    return await storage.read_file(pending / OWNER_FILE, max_bytes=MAX_SMALL_FILE_BYTES)


async def _is_abandoned(storage: Storage, pending: Path) -> bool:
    if not await storage.exists(pending / OWNER_FILE):
        return False
    data = await _read_owner(storage, pending)
    try:
        return msgspec.json.decode(data, type=Owner).is_proven_dead()
    except msgspec.DecodeError:
        return False


def check_step(step: object, *, newest: int | None, committed: Collection[int], overwrite: bool) -> int:
    """The step of a save: ``step``, or one after the newest committed or pending.

    Raises:
        StepOrderError: no whole number from 0, or it does not exceed ``newest`` and is not overwritten.
    """
    if step is None:
        return 1 if newest is None else newest + 1
    step = check_step_number(step)
    if newest is None or step > newest or (overwrite and step in committed):
        return step
    hint = "overwrite=True replaces it" if step in committed else f"rollback({step}) goes back"
    raise StepOrderError(f"step={step} does not exceed the newest committed or pending step {newest}: {hint}")


def check_step_number(step: object) -> int:
    """``step`` if it can be the number of a step.

    Raises:
        StepOrderError: no whole number from 0 to ``MAX_STEP``.
    """
    if type(step) is not int or not 0 <= step <= MAX_STEP:
        shown = repr(step) if type(step) is not int or abs(step) <= MAX_STEP else "so large a number"
        raise StepOrderError(f"step={shown}: give a whole number of at least 0 and at most {MAX_STEP}")
    return step
