"""Copies of steps in a mirror: those that a load may take, and those that its root has abandoned."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from aio_ckpt.commit.discovery import CommittedCheckpoint, discover, read_save_id
from aio_ckpt.errors import ReadError, RootError, WriteError
from aio_ckpt.format.root_names import ABANDONED_DIR, ENGINE_DIR, StepNames
from aio_ckpt.storage.local import Storage, names_in
from aio_ckpt.storage.small_files import read_small_file

_RECORD = "rollback-"
"""Begin of the name of a file with the ids of the saves that a rollback found in the mirror, one a line. It lies beside
the steps that were set aside, which people delete."""


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
    saves = await _abandoned_saves(storage, root)
    return [copy for copy in copies if not saves or await read_save_id(storage, copy.path) not in saves]


async def abandoned_copies(storage: Storage, root: Path, mirror: Path, names: StepNames) -> list[CommittedCheckpoint]:
    """Return the checkpoints of a mirror whose very saves a rollback of the root has abandoned, newest first."""
    saves = await _abandoned_saves(storage, root)
    copies = await discover(storage, mirror, names) if saves else []
    return [copy for copy in reversed(copies) if await read_save_id(storage, copy.path) in saves]


async def _abandoned_saves(storage: Storage, root: Path) -> set[str]:
    """Return the ids of the saves that rollbacks of a root have set aside, or found in its mirror."""
    saves = {
        await read_save_id(storage, root / ABANDONED_DIR / name)
        for name in await names_in(storage, root / ABANDONED_DIR)
    }
    for name in await names_in(storage, root / ENGINE_DIR):
        if name.startswith(_RECORD):
            record = await read_small_file(storage, root / ENGINE_DIR / name)
            saves.update((record or b"").decode(errors="replace").split())
    return saves - {""}


async def record_rollback(storage: Storage, root: Path, mirror: Path, names: StepNames, step: int, tag: str) -> None:
    """Record the copies of later steps than ``step``, before a rollback: the root may have deleted such steps.

    Raises:
        ReadError, WriteError: the mirror cannot be read, or the record not be written. Nothing was rolled back.
    """
    with _naming_mirror("without it, later steps would come back: call rollback() again, or open without mirror="):
        later = [copy for copy in await discover(storage, mirror, names) if copy.step > step]
    saves = [await read_save_id(storage, copy.path) for copy in later]
    if saves:
        await storage.write_file(root / ENGINE_DIR / f"{_RECORD}{tag}", "\n".join(saves).encode())
        await storage.sync_dir(root / ENGINE_DIR)
