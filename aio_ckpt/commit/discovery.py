"""Discovery: the committed steps of a root."""

from __future__ import annotations

import errno
import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from aio_ckpt.commit.step_numbers import MAX_STEP
from aio_ckpt.errors import AioCkptError, CheckpointNotFoundError, ReadError
from aio_ckpt.format.checkpoint_files import METADATA_FILE, save_of_root_manifest
from aio_ckpt.format.step_names import StepNames
from aio_ckpt.remote_path import RemotePath
from aio_ckpt.storage.local import Storage, names_in
from aio_ckpt.storage.small_files import save_of, saves_in

IS_FILE = (
    "no checkpoint: it is a file; give the directory of a checkpoint, or let torch.load or safetensors read the file"
)
"""Text of the error of a path that is a file."""
REFUSED = (errno.EACCES, errno.EPERM)
"""Error numbers of a path that this user may not look into."""
_UNREADABLE = (*REFUSED, errno.ELOOP, errno.ENOTDIR)
_WARNED = 256
"""Most entries of roots whose warning is not repeated in this process."""
_log = logging.getLogger("aio_ckpt")
MAX_RETRIES = 32
"""Most listings of a root whose writer deletes listed steps meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedCheckpoint:
    """A committed checkpoint, as a listing of the root found it."""

    step: int
    """-1 if the caller gave the path of the checkpoint: only its manifest tells the step."""
    path: Path
    identity: tuple[int, ...] = ()
    """Identity of ``.metadata`` in the file system at that time; empty if ``.metadata`` was missing."""

    @property
    def title(self) -> str:
        """Name of the checkpoint in messages."""
        return str(self.path) if self.is_given else f"step {self.step}"

    @property
    def is_given(self) -> bool:
        """Whether the caller gave the path of the checkpoint, instead of a step of the root."""
        return self.step < 0

    @property
    def expected_step(self) -> int | None:
        """Step that its manifest has to tell; None if the caller gave the path."""
        return None if self.is_given else self.step


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDirectories:
    """Entries of a root that have the name of a step. A step may have several."""

    committed: list[CommittedCheckpoint]
    """Those with ``.metadata``, by name."""
    bare: list[CommittedCheckpoint]
    """Those without, which may be foreign."""
    refused: list[Path]
    """Those that this user may not look into."""


async def discover(
    storage: Storage, root: Path, names: StepNames, only: int | None = None
) -> list[CommittedCheckpoint]:
    """Return the committed checkpoints under ``root``, ascending by step. A checkpoint has a ``.metadata``.

    If a step has two directories, the one with the engine's own name counts. If ``only`` is given, other steps are not
    looked at: each costs a call of the server, or a request.
    """
    return _chosen((await step_directories(storage, root, names, only)).committed, names)


async def discover_all(
    storage: Storage, root: Path, names: StepNames
) -> tuple[list[CommittedCheckpoint], list[CommittedCheckpoint], list[Path]]:
    """Return :func:`discover`, checkpoints of other steps that have lost their ``.metadata``, and refused entries."""
    entries = await step_directories(storage, root, names)
    return _chosen(entries.committed, names), await torn_among(storage, entries), entries.refused


def _chosen(committed: Sequence[CommittedCheckpoint], names: StepNames) -> list[CommittedCheckpoint]:
    found: dict[int, CommittedCheckpoint] = {}
    for checkpoint in committed:
        if checkpoint.step not in found or checkpoint.path.name == names.name(checkpoint.step):
            found[checkpoint.step] = checkpoint
    return [found[step] for step in sorted(found)]


async def torn_among(storage: Storage, entries: StepDirectories) -> list[CommittedCheckpoint]:
    """Return the bare entries that are checkpoints of other steps than the committed ones and have lost ``.metadata``.

    Such a directory has a root manifest of ours and no save in progress. A store has none.
    """
    found: list[CommittedCheckpoint] = []
    steps = {checkpoint.step for checkpoint in entries.committed}
    for checkpoint in entries.bare:
        # In a store, files of saves under way and of those set aside lie so.
        if checkpoint.step in steps or isinstance(checkpoint.path, RemotePath):
            continue
        try:
            files = await names_in(storage, checkpoint.path)  # none if its writer deleted it meanwhile
        except ReadError as error:
            _pass_by(checkpoint.path, error, {})
            continue
        if any(map(save_of_root_manifest, files)) and not any(file.startswith(METADATA_FILE) for file in files):
            found.append(checkpoint)
    return found


def _pass_by(path: Path, error: ReadError, passed: dict[Path, ReadError]) -> None:
    """Pass by an entry of a root that this user may not look into, a loop of links, or a file. The log names it once.

    Its error is added to ``passed``. Any other error is raised: a disk that fails now must not make a load take an
    older step, nor a rollback leave a later one.
    """
    if error.errno not in _UNREADABLE:
        raise error
    passed[path] = error
    _warn_once(path, error.strerror or str(error))


@functools.lru_cache(maxsize=_WARNED)
def _warn_once(path: Path, why: str) -> None:
    _log.warning("%s has the name of a step and is passed by, because it cannot be looked into: %s", path, why)


async def step_directories(storage: Storage, root: Path, names: StepNames, only: int | None = None) -> StepDirectories:
    """Return the entries of a root that have the name of a step; if ``only`` is given, of that step.

    Raises:
        ReadError: the listing failed; or none is committed, and one may not be looked into.
    """
    for _ in range(MAX_RETRIES):
        found: list[CommittedCheckpoint] = []
        bare: list[CommittedCheckpoint] = []
        passed: dict[Path, ReadError] = {}
        steps = {
            name: step
            for name in await names_in(storage, root)
            if (step := names.step(name)) is not None and step <= MAX_STEP and only in (None, step)
        }
        statuses = await storage.statuses(root, [f"{name}/{METADATA_FILE}" for name in steps])
        for (name, step), status in zip(steps.items(), statuses, strict=True):
            path = root / name
            if isinstance(status, ReadError):
                _pass_by(path, status, passed)
            elif status is not None:
                found.append(CommittedCheckpoint(step=step, path=path, identity=status.identity))
            else:
                bare.append(CommittedCheckpoint(step=step, path=path))
        for each, status in zip(bare, await storage.statuses(root, [each.path.name for each in bare]), strict=True):
            if isinstance(status, ReadError):
                _pass_by(each.path, status, passed)
            elif status is None and await storage.is_link(each.path):  # it never was a step
                _warn_once(each.path, "the symbolic link leads nowhere")
        bare = [each for each in bare if each.path not in passed]
        # A client of a shared file system looks into a directory of this name even after another host has renamed it to
        # trash, for a minute. It asks the server for the names of the root.
        if not bare or {each.path.name for each in bare} <= {*await names_in(storage, root)}:
            break  # a step that vanished was deleted by a writer, so newer steps may not be in this listing
    if not found and (told := [error for error in passed.values() if error.errno != errno.ELOOP]):
        raise told[0]  # a root of another user is not an empty root
    refused = sorted(path for path, error in passed.items() if error.errno in REFUSED)
    return StepDirectories(committed=found, bare=bare, refused=refused)


async def checkpoint_at(storage: Storage, path: Path, names: StepNames) -> CommittedCheckpoint:
    """Return the checkpoint in the directory ``path``, which may lie outside of the root.

    Raises:
        CheckpointNotFoundError: ``path`` is no checkpoint. If it is a root, the message names one of its steps.
    """
    status = await storage.status(path / METADATA_FILE)
    if status is not None:
        return CommittedCheckpoint(step=-1, path=path, identity=status.identity)
    if not isinstance(path, RemotePath) and await saves_in(storage, path):
        return CommittedCheckpoint(step=-1, path=path)
    if not await storage.exists(path):
        raise CheckpointNotFoundError(errno.ENOENT, "no checkpoint: the directory does not exist", str(path))
    try:
        below = await discover(storage, path, names)
    except ReadError as error:
        if error.errno != errno.ENOTDIR:
            raise
        raise CheckpointNotFoundError(errno.ENOTDIR, IS_FILE, str(path)) from None
    remedy = f": it is a root; give one of its steps, such as {below[-1].path}" if below else ""
    raise CheckpointNotFoundError(errno.ENOENT, f"no checkpoint: there is no .metadata{remedy}", str(path))


async def step_at(storage: Storage, path: Path, step: int) -> CommittedCheckpoint:
    """Return the checkpoint of ``step`` in the directory ``path``, which a listing of another rank has found.

    Raises:
        CheckpointNotFoundError: the directory is gone.
    """
    status = await storage.status(path / METADATA_FILE)
    if status is None and path.name not in await names_in(storage, path.parent):  # see step_directories
        raise CheckpointNotFoundError(errno.ENOENT, "no checkpoint: the directory does not exist", str(path))
    return CommittedCheckpoint(step=step, path=path, identity=() if status is None else status.identity)


async def is_unchanged(storage: Storage, found: CommittedCheckpoint) -> bool:
    """Return whether a checkpoint was neither deleted nor replaced since :func:`discover` found it."""
    status = await storage.fresh_status(found.path / METADATA_FILE)
    return found.identity == (() if status is None else status.identity)


async def read_save_id(storage: Storage, checkpoint: Path) -> str:
    """Return the id of the save that wrote a checkpoint; "" if it cannot be read."""
    try:
        return await save_of(storage, checkpoint) or ""
    except AioCkptError:
        return ""
