"""What stands between a bench and the disk: files are made clean, and dropped from the page cache."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["fsync_tree", "make_cold"]


def fsync_tree(folder: Path) -> None:
    """fsync every file below, then the folders."""
    for path in [*sorted(folder.rglob("*"), reverse=True), folder]:
        with _opened(path) as descriptor:
            os.fsync(descriptor)


def make_cold(path: Path) -> None:
    """Drop a file, or those below a folder, from the page cache; they are clean: fsynced. What is not there is cold."""
    for file in path.rglob("*") if path.is_dir() else (path,):
        if file.is_file():
            with _opened(file) as descriptor:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
