"""Cheap check of a checkpoint: its manifests, and the lengths of its files. No data is read, and torch is not needed.

What it finds is damage. What it does not find may still be damaged: only ``verify`` reads every byte.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from aio_ckpt.errors import MismatchError
from aio_ckpt.format.root_manifest import METADATA_FILE, ROOT_MANIFEST, FileEntry, RootManifest, data_file_of
from aio_ckpt.storage.data_file import open_regular_file


def file_lengths(directory: Path) -> dict[str, int]:
    """Return the length of each regular file in ``directory``, in bytes."""
    with os.scandir(directory) as entries:
        return {entry.name: entry.stat().st_size for entry in entries if entry.is_file(follow_symlinks=False)}


def check_files(path: Path, root: RootManifest, step: int, lengths: Mapping[str, int]) -> None:
    """Check the files of the checkpoint at ``path`` against its root manifest and its rank manifests.

    Args:
        step: step in the name of the directory.
        lengths: from :func:`file_lengths`.

    Raises:
        CorruptCheckpointError: a file is missing, has another length, or a manifest has another CRC32; names the file.
        FormatVersionError: a newer version wrote a rank's manifest.
        OSError: a file cannot be read.
    """
    if root.step != step:
        raise MismatchError(f"{ROOT_MANIFEST}: holds step {root.step}: the directory was renamed or swapped")
    _read(path, root.metadata, lengths)
    for entry in root.ranks:
        file = data_file_of(_read(path, entry, lengths), name=entry.name)
        if file is not None:
            _check_length(file, lengths)


def _check_length(entry: FileEntry, lengths: Mapping[str, int]) -> None:
    nbytes = lengths.get(entry.name)
    if nbytes is None:
        beside = "" if entry.name == METADATA_FILE else ", although the manifests name it"
        raise MismatchError(f"{entry.name}: missing{beside}")
    if nbytes != entry.nbytes:
        raise MismatchError(f"{entry.name}: {nbytes} bytes long, {entry.nbytes} were written")


def _read(path: Path, entry: FileEntry, lengths: Mapping[str, int]) -> bytes:
    _check_length(entry, lengths)
    with open(open_regular_file(path / entry.name), "rb") as file:
        data = file.read(entry.nbytes + 1)
    if not entry.vouches_for(data):
        raise MismatchError(f"{entry.name}: does not match its CRC32 in {ROOT_MANIFEST}")
    return data
