"""Directory mode: a checkpoint in the caller's own directory, which may hold foreign files; those stay.

The checkpoint exists from the rename of its ``.metadata`` on. Invariants: from its first byte until its commit, a save
has a marker file that is named by its id. While it replaces an older checkpoint, ``.metadata`` and root manifest of the
older one are renamed to names that end with the id; its other files stay untouched. So ``recover_directory`` can mend a
directory after a crash from the names alone.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from aio_ckpt.commit.discovery import read_root
from aio_ckpt.errors import CorruptCheckpointError, FormatVersionError, RootError
from aio_ckpt.format.rank_manifest import decode_rank
from aio_ckpt.format.root_manifest import METADATA_FILE, ROOT_MANIFEST, decode_root
from aio_ckpt.storage.local import Storage

ASIDE = ".replaced-"
"""Infix of a file that was set aside: between its own name and the id of the save that replaces it."""
PENDING = "aio_ckpt.pending-"
"""Prefix of a save's marker, an empty file. The save's id follows."""
LOCK = "aio_ckpt.lock"
"""Lock file of a directory. It exists while the lock is held, and after a crash."""
MAX_SMALL_FILE_BYTES = 1 << 30
_log = logging.getLogger("aio_ckpt")


async def begin_directory(storage: Storage, directory: Path, *, save_id: str) -> None:
    """Make the marker of a save, durably, on the leader: after ``recover_directory`` and before the first byte."""
    await storage.write_file(directory / f"{PENDING}{save_id}", b"")
    await storage.sync_dir(directory)


async def pending_saves(storage: Storage, directory: Path) -> list[str]:
    """Return the ids of the saves that have a marker."""
    return [name.removeprefix(PENDING) for name in await storage.list_dir(directory) if name.startswith(PENDING)]


@contextlib.contextmanager
def hold_directory(storage: Storage, directory: Path) -> Iterator[None]:
    """Hold the lock of a directory, to begin, commit or mend a save. Data is written without the lock.

    Raises:
        RootError: this process or another one holds the lock.
    """
    try:
        lock = storage.lock(directory / LOCK)
    except RootError as error:
        if error.errno not in (errno.EBUSY, errno.EAGAIN):
            raise
        raise RootError(
            error.errno,
            "another save into this directory is being begun, committed or mended: let one at a time save into it",
            str(directory),
        ) from error
    try:
        yield
    finally:
        lock.discard()


async def retire_directory(storage: Storage, directory: Path, *, save_id: str) -> tuple[str, ...]:
    """Set ``.metadata`` and root manifest of the old checkpoint aside, before the new ones get their names.

    Call ``recover_directory`` first. Call this late: until the commit, readers find no ``.metadata``. Data may be
    written before, to names with the save's id. Returns the names of the old checkpoint's files, which
    ``commit_directory`` removes once the new one is durable. Files that no manifest of ours names are foreign.
    """
    if not await storage.exists(directory / METADATA_FILE):
        return ()
    has_manifest = await storage.exists(directory / ROOT_MANIFEST)
    owned = await _files_named_by(storage, directory, ROOT_MANIFEST) if has_manifest else []
    # .metadata first, durably: a .metadata without root manifest would look like a checkpoint of plain DCP.
    for name in (METADATA_FILE, ROOT_MANIFEST) if has_manifest else (METADATA_FILE,):
        await storage.rename(directory / name, directory / f"{name}{ASIDE}{save_id}")
        await storage.sync_dir(directory)
        owned.append(f"{name}{ASIDE}{save_id}")
    return tuple(owned)


async def commit_directory(
    storage: Storage, directory: Path, *, metadata: bytes, root_manifest: bytes, save_id: str, retired: Sequence[str]
) -> None:
    """Write root manifest and then ``.metadata``, on the leader, each by temporary file, fsync and rename.

    Then remove the files of the old checkpoint. A file that cannot be removed is logged and left to the next
    ``recover_directory``. The new checkpoint is valid.
    """
    for name, data in ((ROOT_MANIFEST, root_manifest), (METADATA_FILE, metadata)):
        temporary = directory / f"{name}.tmp-{save_id}"
        await storage.write_file(temporary, data)
        await storage.replace(temporary, directory / name)
        await storage.sync_dir(directory)
    await storage.sync_dir(directory.parent)
    try:
        await _remove(storage, directory, [*retired, f"{PENDING}{save_id}"])
    except OSError as error:
        _log.warning("%s: what the new checkpoint replaced is still there: %s", directory, error)


async def is_checkpoint_of(storage: Storage, directory: Path, *, save_id: str) -> bool:
    """Return whether the directory holds the checkpoint of this save."""
    has_both = [await storage.exists(directory / name) for name in (METADATA_FILE, ROOT_MANIFEST)]
    return all(has_both) and await _save_id_of(storage, directory) == save_id


async def recover_directory(storage: Storage, directory: Path) -> bool:
    """Mend a directory after a crash. Its only writer calls this before a load or a save.

    A save that had not committed is undone: its files are removed and the old checkpoint is restored. If a save had
    committed, the files that it replaced are removed. After a crash in this function, call it again. Returns whether an
    old checkpoint was restored. If a save without a marker died before it set anything aside, its files stay, because
    they cannot be told from foreign ones.
    """
    if not await storage.exists(directory):
        return False
    names = await storage.list_dir(directory)
    asides = [name for name in names if name.startswith((METADATA_FILE + ASIDE, ROOT_MANIFEST + ASIDE))]
    came_back = False
    if METADATA_FILE in names:
        await _finish(storage, directory, asides)
    else:
        for name in asides:
            if name.startswith(METADATA_FILE):
                await _undo(storage, directory, names, save_id=name.removeprefix(METADATA_FILE + ASIDE))
                came_back = True
                break
    for mark in [name for name in names if name.startswith(PENDING)]:
        await _end(storage, directory, names, save_id=mark.removeprefix(PENDING))
    return came_back


async def _end(storage: Storage, directory: Path, names: Sequence[str], *, save_id: str) -> None:
    """End a save with a marker: remove its files unless the directory holds its checkpoint, then the marker."""
    mark = f"{PENDING}{save_id}"
    if await is_checkpoint_of(storage, directory, save_id=save_id):
        await _remove(storage, directory, [mark])
        return
    has_manifest = await storage.exists(directory / ROOT_MANIFEST)
    own = [ROOT_MANIFEST] if has_manifest and await _save_id_of(storage, directory) == save_id else []
    await _remove(storage, directory, own + [name for name in names if save_id and _is_of(name, save_id)])
    await storage.sync_dir(directory)
    await _remove(storage, directory, [mark])
    # A rank that saw the marker may have written since. A rank that writes later checks for the marker.
    late = await storage.list_dir(directory)
    await _remove(storage, directory, [name for name in late if save_id and _is_of(name, save_id)])


async def recoverable_names(storage: Storage, directory: Path) -> tuple[str, str]:
    """Return the names of ``.metadata`` and root manifest that ``recover_directory`` would restore. Changes nothing.

    Either file may be missing: there is no checkpoint then, or one of plain DCP.
    """
    names = await storage.list_dir(directory)
    aside = [name for name in names if name.startswith(METADATA_FILE + ASIDE)]
    if METADATA_FILE in names or not aside:
        return METADATA_FILE, ROOT_MANIFEST
    save_id = aside[0].removeprefix(METADATA_FILE + ASIDE)
    manifest = f"{ROOT_MANIFEST}{ASIDE}{save_id}"
    if manifest not in names and ROOT_MANIFEST in names and await _save_id_of(storage, directory) != save_id:
        manifest = ROOT_MANIFEST  # a crash between the two renames
    return aside[0], manifest


async def _finish(storage: Storage, directory: Path, asides: Sequence[str]) -> None:
    """Remove the old checkpoint. Its root manifest goes last, because it names the other files."""
    for name in sorted(asides):
        if name.startswith(ROOT_MANIFEST):
            await _remove(storage, directory, await _files_named_by(storage, directory, name))
    await _remove(storage, directory, sorted(asides))


async def _undo(storage: Storage, directory: Path, names: Sequence[str], *, save_id: str) -> None:
    """Restore the old checkpoint. Its ``.metadata`` is renamed last, because that makes it valid."""
    manifest = f"{ROOT_MANIFEST}{ASIDE}{save_id}"
    if manifest in names:
        await storage.replace(directory / manifest, directory / ROOT_MANIFEST)
    elif ROOT_MANIFEST in names and await _save_id_of(storage, directory) == save_id:
        await storage.remove_file(directory / ROOT_MANIFEST)  # the old checkpoint, of plain DCP, had none
    await _remove(storage, directory, [name for name in names if _is_of(name, save_id)])
    await storage.sync_dir(directory)
    await storage.rename(directory / f"{METADATA_FILE}{ASIDE}{save_id}", directory / METADATA_FILE)
    await storage.sync_dir(directory)


def _is_of(name: str, save_id: str) -> bool:
    return name.startswith((f"__{save_id}_", f"aio_ckpt.{save_id}.")) or name.endswith(f".tmp-{save_id}")


async def _save_id_of(storage: Storage, directory: Path) -> str | None:
    try:
        root = await read_root(storage, directory)
    except (CorruptCheckpointError, FormatVersionError):
        return None
    return None if root is None else root.save_id


async def _files_named_by(storage: Storage, directory: Path, manifest: str) -> list[str]:
    """Return the rank manifests and data files of a checkpoint that exist; none if its manifest is damaged.

    Raises:
        ReadError: the system failed. The files would stay for ever, because the caller removes the manifest next.
    """
    owned: list[str] = []
    try:
        data = await storage.read_file(directory / manifest, max_bytes=MAX_SMALL_FILE_BYTES)
        for entry in decode_root(data, name=manifest).ranks:
            if not await storage.exists(directory / entry.name):
                continue  # a removal has crashed: data files are removed before the manifest that names them
            encoded = await storage.read_file(directory / entry.name, max_bytes=MAX_SMALL_FILE_BYTES)
            file = decode_rank(encoded, name=entry.name).file
            owned += [entry.name] if file is None else [file.name, entry.name]
    except (CorruptCheckpointError, FormatVersionError):
        _log.warning("%s: the manifest %s is unreadable; the files that it names stay", directory, manifest)
    return owned


async def _remove(storage: Storage, directory: Path, names: Sequence[str]) -> None:
    for name in names:
        await storage.remove_file(directory / name)
