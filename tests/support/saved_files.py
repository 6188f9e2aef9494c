"""The files of a checkpoint, whose names hold the id of its save."""

from __future__ import annotations

from pathlib import Path

from aio_ckpt.commit.in_place import PENDING
from aio_ckpt.format.checkpoint_files import save_of_file

DATA_FILE, RANK_MANIFEST, ROOT_MANIFEST = "__*_0_0.distcp", "aio_ckpt.*.0.bin", "aio_ckpt.*.json"
FROZEN_FILE = "__*_0_1.distcp"
"""Patterns of the names of the files of rank 0, and of the root manifest."""


def data_file(checkpoint: Path, rank: int = 0) -> Path:
    """That of stock DCP, too."""
    stock = checkpoint / f"__{rank}_0.distcp"
    return stock if stock.exists() else _one(checkpoint, f"__*_{rank}_0.distcp")


def rank_manifest(checkpoint: Path, rank: int = 0) -> Path:
    return _one(checkpoint, f"aio_ckpt.*.{rank}.bin")


def root_manifest(checkpoint: Path) -> Path:
    return _one(checkpoint, ROOT_MANIFEST)


def without_save_id(name: str) -> str:
    """The name of a file of ours with ``*`` in the place of the id of its save; another name as it is."""
    save_id = name.removeprefix(PENDING) if name.startswith(PENDING) else save_of_file(name)
    return name.replace(save_id, "*") if save_id else name


def _one(checkpoint: Path, pattern: str) -> Path:
    found = list(checkpoint.glob(pattern))
    assert len(found) == 1, f"{pattern} fits {[path.name for path in found]} in {checkpoint}"
    return found[0]
