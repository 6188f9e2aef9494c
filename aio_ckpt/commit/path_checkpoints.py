"""Checkpoints at paths that the caller names: which paths may be used, and removal. What a save replaces: ``publish``.

The pending directory of such a save lies below the root, as that of a step does, and its files are renamed. So the path
must be on the file system of the root.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from aio_ckpt.commit.discovery import checkpoint_at
from aio_ckpt.commit.root_claim import Check
from aio_ckpt.commit.user_files import files_of_caller, is_of_checkpoint
from aio_ckpt.errors import ConfigError, WriteError
from aio_ckpt.format.root_names import ENGINE_DIR, TRASH_DIR
from aio_ckpt.format.step_names import StepNames
from aio_ckpt.message_texts import first_of
from aio_ckpt.remote_path import RemotePath
from aio_ckpt.storage.durability import sync_or_undo
from aio_ckpt.storage.local import Storage
from aio_ckpt.storage.paths import device_of


def check_outside_root(path: Path, root: Path, names: StepNames) -> None:
    """Refuse a path at which no checkpoint can be saved or removed by its path. Blocks, and changes nothing.

    Raises:
        ConfigError: ``path`` holds the root, belongs to it, is a link, lies below a file, or is on another file system.
    """
    if isinstance(path, RemotePath) or isinstance(root, RemotePath):
        why = refusal(path, root, names) or _bucket_refusal(path, root)
        if why:
            raise ConfigError(f"path={str(path)!r}: {why}")
        return
    place, home = _real(path), Path(os.path.realpath(root))
    why = refusal(place, home, names)
    if not why and place.is_symlink():
        why = f"it is a symbolic link to {place.readlink()}: give the path of the directory itself"
    parent = next((parent for parent in place.parents if parent.exists()), place)
    if not why and not parent.is_dir():
        why = f"{parent} is a file: give a path in a directory"
    if not why and device_of(place.parent) != device_of(home):
        why = (
            f"it is on another file system than the root {root}, so that no rename can reach it: open an engine whose "
            "root is on the file system of the path"
        )
    if why:
        raise ConfigError(f"path={str(path)!r}: {why}")


def _bucket_refusal(path: Path, root: Path) -> str:
    """Return why ``path`` cannot be used beside a root, of which one is in an object store; '' if it can."""
    places = [f"in {place.bucket_url}" if isinstance(place, RemotePath) else "on a disk" for place in (path, root)]
    if places[0] == places[1]:
        return ""
    return (
        f"it is {places[0]}, and the root {root} is {places[1]}: open an engine whose root is where the path is, "
        "or copy a committed checkpoint by aio_ckpt.copy"
    )


def refusal(place: Path, root: Path, names: StepNames) -> str:
    """Return why ``place`` cannot be named by its path; '' if it can. Both paths are absolute, without links. Pure."""
    if root.is_relative_to(place):
        return f"it holds the root {root} of the engine: give the path of one checkpoint"
    if not place.is_relative_to(root):
        return ""
    first = place.relative_to(root).parts[0]
    step = names.step(first)
    if first == ENGINE_DIR:
        return f"the directory {ENGINE_DIR} of a root belongs to the engine: give a path outside of it"
    if step is not None and place.parent == root:
        return f"that is the name of a step in this root: give step={step}, or another name"
    if step is not None:
        return f"it lies in the checkpoint {first} of the root: give a path outside of it"
    return ""


def file_refusal(place: Path, root: Path, names: StepNames) -> str:
    """Return why no file can be saved at ``place``; '' if one can. Both paths are absolute, without links. Pure."""
    if is_of_checkpoint(place.name):
        return "that is a name of a checkpoint's own files: give another one"
    if root.is_relative_to(place):  # the engine makes its root at the first save, and a file there would fail it
        return f"the root {root} of the engine lies there: give the path of a file"
    first = place.relative_to(root).parts[0] if place.is_relative_to(root) else ""
    if first == ENGINE_DIR or names.step(first) is not None:
        return f"{first} of the root {root} belongs to the engine: give a path outside of it"
    return ""


def is_same_place(path: Path, other: Path) -> bool:
    """Return whether two paths name one directory. Blocks."""
    return path == other or _real(path) == _real(other)


async def prepare_place(storage: Storage, path: Path) -> None:
    """Make the parents of ``path``, durably. A store needs none.

    Raises:
        WriteError: one cannot be made.
    """
    if not isinstance(path, RemotePath) and not await storage.exists(path.parent):
        await storage.make_dirs(path.parent)


async def move_to_trash(storage: Storage, path: Path, root: Path, names: StepNames, check: Check, *, name: str) -> Path:
    """Rename the checkpoint at ``path`` to trash of ``root``, durably. Returns its new path.

    Raises:
        RootError: another writer has taken over.
        CheckpointNotFoundError: there is no checkpoint at ``path``.
        WriteError: files of others lie in it; or the rename or an fsync failed. The checkpoint is at its path, whole.
    """
    await checkpoint_at(storage, path, names)
    await _check_foreign(storage, path)
    trash = root / TRASH_DIR / name
    await check()
    await storage.rename(path, trash)
    await sync_or_undo(storage, storage.rename, path, trash)  # nothing would delete the trash of a failed removal
    return trash


async def _check_foreign(storage: Storage, path: Path) -> None:
    """Raise WriteError if files or directories lie in the checkpoint at ``path`` that no save put there."""
    foreign = [name for name in await storage.list_dir(path) if not is_of_checkpoint(name)]
    if foreign:
        own = await files_of_caller(storage, path)
        foreign = [name for name in foreign if name not in own]
    if foreign:
        text = f"is a checkpoint with files of others ({first_of(foreign)}): move them away first"
        raise WriteError(errno.EEXIST, text, str(path))


def _real(path: Path) -> Path:
    """Return the path without links in its parents. The directory itself may be a link, and may be missing."""
    if isinstance(path, RemotePath):
        return path
    return Path(os.path.realpath(path)) if path.name in ("", "..") else Path(os.path.realpath(path.parent), path.name)
