"""What is on the disk below a directory."""

from __future__ import annotations

import os
from pathlib import Path


def tree_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Of everything below ``folder`` and of itself: inode, and time of the last change of its content."""
    found = {".": folder}
    for place, names, files in os.walk(folder):
        found |= {os.path.relpath(path, folder): path for path in (Path(place) / name for name in names + files)}
    return {name: ((status := path.lstat()).st_ino, status.st_mtime_ns) for name, path in found.items()}
