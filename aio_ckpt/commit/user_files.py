"""Files of the caller beside a checkpoint, as ``save(files=)`` takes them, and the names that it must not give."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from aio_ckpt.commit.root_claim import Check
from aio_ckpt.errors import ConfigError, CorruptCheckpointError, FormatVersionError
from aio_ckpt.format.checkpoint_files import METADATA_FILE
from aio_ckpt.message_texts import shown
from aio_ckpt.remote_path import RemotePath
from aio_ckpt.storage.local import Storage
from aio_ckpt.storage.object_store import store_of
from aio_ckpt.storage.small_files import read_root

_NAME_BYTES = 255


def check_files(files: Mapping[str, bytes] | None) -> dict[str, bytes]:
    """Return a copy of ``save(files=)``; empty for None.

    Raises:
        ConfigError: a name that is none of a file of the caller, or a content that is not bytes. Names it.
    """
    if files is None:
        return {}
    if not isinstance(files, Mapping):
        raise ConfigError(f"files={shown(files)}: give a dict of names and bytes")
    for name, content in files.items():
        # A name that cannot be printed cannot be encoded, or steers a terminal.
        if not (
            isinstance(name, str) and name.isprintable() and "/" not in name and 0 < len(name.encode()) <= _NAME_BYTES
        ):
            raise ConfigError(f"files: {shown(name)} is no name of a file: give one without a directory")
        if name.startswith(".") or is_of_checkpoint(name):
            raise ConfigError(f"files: {shown(name)} is a name of the checkpoint's own files: give another one")
        if not isinstance(content, bytes):
            raise ConfigError(f"files[{shown(name)}]: a {type(content).__name__} is no content: give bytes")
    return dict(files)


def is_of_checkpoint(name: str) -> bool:
    """Return whether a checkpoint's own files have such names."""
    return name.endswith(".distcp") or name.startswith((METADATA_FILE, "aio_ckpt."))


async def files_of_caller(storage: Storage, path: Path) -> tuple[str, ...]:
    """Return the names that ``save(files=)`` gave; none if there is no root manifest, or a damaged one."""
    try:
        root = await read_root(storage, path)
    except (CorruptCheckpointError, FormatVersionError):
        return ()
    return () if root is None else root.files


async def write_user_files(
    storage: Storage, pending: Path, write_dir: Path, files: Mapping[str, bytes], check: Check
) -> None:
    """Write the files of ``save(files=)``. In a store they replace those of the checkpoint before, just before it.

    Raises:
        RootError: another writer has taken over, see :data:`Check`.
        WriteError: the system failed.
    """
    if not isinstance(write_dir, RemotePath):
        for name, content in files.items():
            await storage.write_file(write_dir / name, content)
        return
    store = store_of(storage, write_dir)
    if files:
        await store.name_files(pending, tuple(files))
        await check()
    for name, content in files.items():
        await store.replace_file(write_dir / name, content)
