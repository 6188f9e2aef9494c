"""Copies of steps in a mirror: those that a load may take, and those that its root has abandoned."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

from aio_ckpt.commit.discovery import CommittedCheckpoint, discover, read_save_id
from aio_ckpt.errors import ReadError, RootError, WriteError
from aio_ckpt.format.root_names import ABANDONED_DIR, ENGINE_DIR
from aio_ckpt.format.step_names import StepNames
from aio_ckpt.storage.local import Storage, names_in
from aio_ckpt.storage.small_files import read_small_file

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
    with _naming_mirror("a newer step may be there: try again, or leave mirror= out"):
        copies = await discover(storage, mirror, names)
    abandoned = {*await _among(copies, await _abandoned_saves(storage, root, names), storage)}
    return [copy for copy in copies if copy not in abandoned]


async def abandoned_copies(storage: Storage, root: Path, mirror: Path, names: StepNames) -> list[CommittedCheckpoint]:
    """Return the checkpoints of a mirror whose very saves a rollback of the root has abandoned, newest first."""
    saves = await _abandoned_saves(storage, root, names)
    copies = await discover(storage, mirror, names) if saves else []
    return await _among(copies[::-1], saves, storage)


async def _among(
    copies: Sequence[CommittedCheckpoint], saves: AbstractSet[tuple[int, str]], storage: Storage
) -> list[CommittedCheckpoint]:
    """Return the copies of ``saves``. Only those of their steps are looked into: each costs a request."""
    steps = {step for step, _ in saves}
    return [
        copy for copy in copies if copy.step in steps and (copy.step, await read_save_id(storage, copy.path)) in saves
    ]


async def _abandoned_saves(storage: Storage, root: Path, names: StepNames) -> set[tuple[int, str]]:
    """Return the step and the id of each save that rollbacks of a root have set aside, or found in its mirror."""
    saves = set[tuple[int, str]]()
    for name in await names_in(storage, root / ABANDONED_DIR):
        step = names.step(name.partition("-")[2])
        if step is not None and (save_id := await read_save_id(storage, root / ABANDONED_DIR / name)):
            saves.add((step, save_id))
    for name in await names_in(storage, root / ENGINE_DIR):
        if name.startswith(_RECORD):
            record = await read_small_file(storage, root / ENGINE_DIR / name)
            lines = map(str.split, (record or b"").decode(errors="replace").splitlines())
            saves.update((int(line[0]), line[1]) for line in lines if len(line) == 2 and line[0].isdecimal())
    return saves


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
