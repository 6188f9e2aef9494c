"""Publish single files: rename them into place, then remove those of the save before that no reader may take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from aio_ckpt.errors import AioCkptError
from aio_ckpt.format.safetensors_file import SUFFIX, index_name, parse_index
from aio_ckpt.storage.local import Storage, read_small_file

__all__ = ["publish_files"]


async def publish_files(
    storage: Storage, temporary: Path, place: Path, names: Sequence[str], *, replaces: str | None, mode: int | None
) -> None:
    """Rename the durable files ``names`` of the directory ``temporary`` into that of ``place``, durably.

    No reader takes files of two saves for one: if a name is used again, the old index is removed first.

    Args:
        place: the file, or the index of several, which becomes visible last.
        replaces: name of the single file that the index takes the place of; None without an index.
        mode: permissions of the files; None: those that they have.

    Raises:
        WriteError, ReadError: the system failed. If ``in_doubt`` is set, the new files are in place, and a power loss
            may bring the old ones back.
    """
    folder, is_indexed = place.parent, replaces is not None
    old = await _files_before(storage, folder, replaces or place.name)
    if is_indexed and not old.isdisjoint(names):
        await storage.remove_file(place)
        await storage.sync_dir(folder)
    for name in names:
        if mode is not None:
            await storage.set_mode(temporary / name, mode)
        await storage.replace(temporary / name, folder / name)
    await _sync(storage, folder)
    stale = sorted(old.difference(names))
    if replaces is not None:
        await storage.replace(temporary / place.name, place)
        await _sync(storage, folder)
        stale.insert(0, replaces)  # from_pretrained would take it before the index
    elif old:
        stale.insert(0, index_name(place.name))  # other readers would take it before the file
    for name in stale:
        await storage.remove_file(folder / name)
    if stale:
        await _sync(storage, folder)


async def _files_before(storage: Storage, folder: Path, name: str) -> set[str]:
    """Return the files that the index in the place of this save names."""
    if not name.endswith(SUFFIX):
        return set()
    index = await read_small_file(storage, folder / index_name(name))
    return set() if index is None else parse_index(index, name)


async def _sync(storage: Storage, folder: Path) -> None:
    try:
        await storage.sync_dir(folder)
    except AioCkptError as error:
        error.in_doubt = True
        raise
