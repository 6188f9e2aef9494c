"""Copies of steps in a mirror: those that a load may take, and those that its root has abandoned."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from aio_ckpt.commit.discovery import CommittedCheckpoint, discover, read_save_id
from aio_ckpt.errors import CorruptCheckpointError, ReadError, RootError, WriteError
from aio_ckpt.format.checkpoint_files import METADATA_FILE
from aio_ckpt.format.root_names import ABANDONED_DIR, ENGINE_DIR, name_before_rollback
from aio_ckpt.format.step_names import StepNames
from aio_ckpt.storage.local import Storage, names_in
from aio_ckpt.storage.small_files import read_small_file, save_of

_RECORD = "rollback-"
"""Begin of the name of a file with the steps that a rollback found in the mirror: number and id of the save a line. It
lies beside the steps that were set aside, which people delete."""


@contextlib.contextmanager
def _naming_mirror(way_on: str) -> Iterator[None]:
    """Say in an error of the block that it comes from the mirror, and how to go on."""
    try:
        yield
    except (ReadError, RootError, WriteError) as error:
        error.strerror = f"{error.strerror} (reading the mirror: {way_on})"
        raise


async def counting_copies(storage: Storage, root: Path, mirror: Path, names: StepNames) -> list[CommittedCheckpoint]:
    """Return the committed checkpoints of a mirror, ascending, without those that the root has abandoned."""
    saves = await _abandoned_saves(storage, root, names)
    with _naming_mirror("a newer step may be there: try again, or leave mirror= out"):
        copies = await discover(storage, mirror, names)
        abandoned = {*await _among(copies, saves, storage)}
    return [copy for copy in copies if copy not in abandoned]


async def abandoned_copies(storage: Storage, root: Path, mirror: Path, names: StepNames) -> list[CommittedCheckpoint]:
    """Return the checkpoints of a mirror whose very saves a rollback of the root has abandoned, newest first."""
    saves = await _abandoned_saves(storage, root, names)
    copies = await discover(storage, mirror, names) if saves else []
    return await _among(copies[::-1], saves, storage)


async def _abandoned_saves(storage: Storage, root: Path, names: StepNames) -> list[tuple[int | None, Path | str]]:
    """Return the step, and the directory or the id, of each save that rollbacks have set aside or found in the mirror.

    The step is None if the name of the directory tells none, as one of another ``step_dir``.
    """
    found: list[tuple[int | None, Path | str]] = [
        (names.step(name_before_rollback(name)), root / ABANDONED_DIR / name)
        for name in await names_in(storage, root / ABANDONED_DIR)
    ]
    for name in await names_in(storage, root / ENGINE_DIR):
        if name.startswith(_RECORD):
            record = await read_small_file(storage, root / ENGINE_DIR / name)
            lines = map(str.split, (record or b"").decode(errors="replace").splitlines())
            found += ((int(line[0]), line[1]) for line in lines if len(line) == 2 and line[0].isdecimal())
    return found


async def _among(
    copies: Sequence[CommittedCheckpoint], saves: Sequence[tuple[int | None, Path | str]], storage: Storage
) -> list[CommittedCheckpoint]:
    """Return the copies of ``saves``, and those that were set aside since the mirror was listed.

    Only what has the step of another one is looked into: each costs a request.
    """
    held = {copy.step for copy in copies}
    known = {
        (step, save if isinstance(save, str) else await read_save_id(storage, save))
        for step, save in saves
        if step is None or step in held
    }
    steps = {step for step, _ in known}
    found: list[CommittedCheckpoint] = []
    for copy in copies:
        if copy.step in steps or None in steps:
            try:
                save_id = await save_of(storage, copy.path)
            except CorruptCheckpointError:  # a load finds that
                continue
            is_gone = save_id is None and not await storage.exists(copy.path / METADATA_FILE)
            if is_gone or (copy.step, save_id) in known or (None, save_id) in known:
                found.append(copy)
    return found


async def record_rollback(storage: Storage, root: Path, mirror: Path, names: StepNames, step: int, tag: str) -> None:
    """Record the copies of later steps than ``step``, before a rollback: the root may have deleted such steps.

    Raises:
        ReadError, WriteError: the mirror cannot be read, or the record not be written. Nothing was rolled back.
    """
    with _naming_mirror("without it, later steps would come back: call rollback() again, or open without mirror="):
        later = [copy for copy in await discover(storage, mirror, names) if copy.step > step]
    lines = [f"{copy.step} {await read_save_id(storage, copy.path)}" for copy in later]
    if lines:
        await storage.write_file(root / ENGINE_DIR / f"{_RECORD}{tag}", "\n".join(lines).encode())
        await storage.sync_dir(root / ENGINE_DIR)
