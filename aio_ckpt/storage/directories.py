"""Durable making of directories."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from pathlib import Path

from aio_ckpt.format.root_names import ENGINE_DIR
from aio_ckpt.storage.durability import sync_dir


def remaking(directory: Path, act: Callable[[], None]) -> None:
    """Call ``act``, which makes a name in ``directory``.

    If that is one of the engine's own directories, and somebody has removed it while it was empty, it is made again. A
    root that is gone is not made.
    """
    try:
        act()
    except FileNotFoundError:
        if directory.parent.name != ENGINE_DIR or not directory.parent.is_dir():
            raise
        make_dirs(directory)
        act()


def make_dirs(*paths: Path) -> None:
    """Make directories and their missing parents, durably. A directory may exist.

    Raises:
        OSError: a directory cannot be made or synced. Those that were made before are durable: a later call, which
            finds them, syncs them no more.
    """
    parents: dict[Path, None] = {}
    try:
        for path in paths:
            missing = [*takewhile(lambda each: not each.is_dir(), (path, *path.parents))]
            for each in reversed(missing):
                each.mkdir(exist_ok=True)
                parents[each.parent] = None
    finally:
        for parent in parents:
            sync_dir(parent)
