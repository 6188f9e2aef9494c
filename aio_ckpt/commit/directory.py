"""Directory mode: a checkpoint in the caller's own directory, which may hold foreign files; those stay.

The checkpoint exists from the rename of its ``.metadata`` on. Invariants: from its first byte until it is committed a
save is named by a mark of its id; while it replaces an older checkpoint, that one's ``.metadata`` and root manifest
stand aside under names that end with the id, its other files untouched. So what a crash leaves can be mended from the
names alone (``recover_directory``).
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from aio_ckpt.errors import AioCkptError, RootError
from aio_ckpt.format.manifests import METADATA_FILE, ROOT_MANIFEST, decode_rank, decode_root
from aio_ckpt.storage.local import Storage

__all__ = [
    "ASIDE",
    "PENDING",
    "begin_directory",
    "commit_directory",
    "hold_directory",
    "is_held_by",
    "pending_saves",
    "recover_directory",
    "retire_directory",
    "standing_names",
]

ASIDE = ".replaced-"
"""Before the id of the save that replaces it, behind the name of what stands aside."""
PENDING = "aio_ckpt.pending-"
"""Before the id of a save, in the name of its mark: an empty file."""
LOCK = "aio_ckpt.lock"
"""Of a directory; there while it is held, and after a crash."""
MAX_SMALL_FILE_BYTES = 1 << 30
_log = logging.getLogger("aio_ckpt")


async def begin_directory(storage: Storage, directory: Path, *, save_id: str) -> None:
    """Leader, before the first byte of a save and after ``recover_directory``: leave its mark, durably."""
    await storage.write_file(directory / f"{PENDING}{save_id}", b"")
    await storage.sync_dir(directory)


async def pending_saves(storage: Storage, directory: Path) -> list[str]:
    """Ids of the saves whose mark is there."""
    return [name.removeprefix(PENDING) for name in await storage.list_dir(directory) if name.startswith(PENDING)]


@contextlib.contextmanager
def hold_directory(storage: Storage, directory: Path) -> Iterator[None]:
    """Whoever begins, commits or mends a save does it alone; writing takes place outside.

    Raises:
        RootError: somebody else does, in this process or another.
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
    """Before anything of a save gets a name of its own: put an old ``.metadata`` and its root manifest aside.

    Call ``recover_directory`` first. Data may be written before, to names with the save's id: the later this is
    called, the shorter the directory holds no checkpoint for those who look for ``.metadata``. Returns the names of
    the files that the old checkpoint consists of, for ``commit_directory`` to remove once the new one is durable. Files
    that no manifest of ours names are foreign.
    """
    if not await storage.exists(directory / METADATA_FILE):
        return ()
    has_manifest = await storage.exists(directory / ROOT_MANIFEST)
    owned = await _files_named_by(storage, directory, ROOT_MANIFEST) if has_manifest else []
    # The manifest only after .metadata's move is durable: without one it would pass for a checkpoint of plain DCP.
    for name in (METADATA_FILE, ROOT_MANIFEST) if has_manifest else (METADATA_FILE,):
        await storage.rename(directory / name, directory / f"{name}{ASIDE}{save_id}")
        await storage.sync_dir(directory)
        owned.append(f"{name}{ASIDE}{save_id}")
    return tuple(owned)


async def commit_directory(
    storage: Storage, directory: Path, *, metadata: bytes, root_manifest: bytes, save_id: str, retired: Sequence[str]
) -> None:
    """Leader: root manifest, then ``.metadata``, each by temporary file, fsync and rename; then remove the old one.

    What cannot be removed is logged and left to the next ``recover_directory``: the new checkpoint stands.
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


async def is_held_by(storage: Storage, directory: Path, *, save_id: str) -> bool:
    """Whether what a save committed is what the directory holds."""
    has_both = [await storage.exists(directory / name) for name in (METADATA_FILE, ROOT_MANIFEST)]
    return all(has_both) and await _save_id_of(storage, directory) == save_id


async def recover_directory(storage: Storage, directory: Path) -> bool:
    """Mend what a crash left; to be called before loading from or saving to a directory, by its only writer.

    A save that had not committed is undone: its files go, the old checkpoint comes back. Of one that had, what it
    replaced is removed. A crash within is mended by the next call. Returns whether an old checkpoint came back.
    Of a save without a mark that died before it put anything aside, what it wrote stays: no name tells it from foreign
    files.
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
    """Of a save with a mark: remove its files unless it is what the directory holds, then the mark."""
    mark = f"{PENDING}{save_id}"
    if await is_held_by(storage, directory, save_id=save_id):
        await _remove(storage, directory, [mark])
        return
    has_manifest = await storage.exists(directory / ROOT_MANIFEST)
    own = [ROOT_MANIFEST] if has_manifest and await _save_id_of(storage, directory) == save_id else []
    await _remove(storage, directory, own + [name for name in names if save_id and _is_of(name, save_id)])
    await storage.sync_dir(directory)
    await _remove(storage, directory, [mark])
    late = await storage.list_dir(directory)  # of a rank that saw the mark; one that writes from now on looks for it
    await _remove(storage, directory, [name for name in late if save_id and _is_of(name, save_id)])


async def standing_names(storage: Storage, directory: Path) -> tuple[str, str]:
    """Names of ``.metadata`` and root manifest of the checkpoint that ``recover_directory`` would leave; no change.

    Neither need be there: then there is no checkpoint, or one of plain DCP.
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
    """The new checkpoint stands: the old one goes. Its manifest last, for it says what else is to go."""
    for name in sorted(asides):
        if name.startswith(ROOT_MANIFEST):
            await _remove(storage, directory, await _files_named_by(storage, directory, name))
    await _remove(storage, directory, sorted(asides))


async def _undo(storage: Storage, directory: Path, names: Sequence[str], *, save_id: str) -> None:
    """The old checkpoint stands again once its ``.metadata`` has its name; before that all else must be in place."""
    manifest = f"{ROOT_MANIFEST}{ASIDE}{save_id}"
    if manifest in names:
        await storage.replace(directory / manifest, directory / ROOT_MANIFEST)
    elif ROOT_MANIFEST in names and await _save_id_of(storage, directory) == save_id:
        await storage.remove_file(directory / ROOT_MANIFEST)  # the old one, of plain DCP, had none
    await _remove(storage, directory, [name for name in names if _is_of(name, save_id)])
    await storage.sync_dir(directory)
    await storage.rename(directory / f"{METADATA_FILE}{ASIDE}{save_id}", directory / METADATA_FILE)
    await storage.sync_dir(directory)


def _is_of(name: str, save_id: str) -> bool:
    return name.startswith((f"__{save_id}_", f"aio_ckpt.{save_id}.")) or name.endswith(f".tmp-{save_id}")


async def _save_id_of(storage: Storage, directory: Path) -> str | None:
    data = await storage.read_file(directory / ROOT_MANIFEST, max_bytes=MAX_SMALL_FILE_BYTES)
    try:
        return decode_root(data, name=ROOT_MANIFEST).save_id
    except AioCkptError:
        return None


async def _files_named_by(storage: Storage, directory: Path, manifest: str) -> list[str]:
    """Rank manifests and data files of a checkpoint, those that are there; none if its manifest cannot be read."""
    owned: list[str] = []
    try:
        data = await storage.read_file(directory / manifest, max_bytes=MAX_SMALL_FILE_BYTES)
        for entry in decode_root(data, name=manifest).ranks:
            if not await storage.exists(directory / entry.name):
                continue  # a crash within a removal: data goes before the manifest that names it
            encoded = await storage.read_file(directory / entry.name, max_bytes=MAX_SMALL_FILE_BYTES)
            file = decode_rank(encoded, name=entry.name).file
            owned += [entry.name] if file is None else [file.name, entry.name]
    except AioCkptError:
        _log.warning("%s: the manifest %s is unreadable; the files that it names stay", directory, manifest)
    return owned


async def _remove(storage: Storage, directory: Path, names: Sequence[str]) -> None:
    for name in names:
        await storage.remove_file(directory / name)
