"""Trash: directories that no reader finds any more, and their deletion.

A directory cannot be deleted at once if a thread still works in it, or if the deletion fails. It is then deleted after
a later commit, at the end of the engine, or by the next writer.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import anyio

from aio_ckpt.errors import AioCkptError
from aio_ckpt.format.checkpoint_files import METADATA_FILE
from aio_ckpt.format.root_names import TRASH_DIR
from aio_ckpt.remote_path import RemotePath
from aio_ckpt.storage.local import Storage

_log = logging.getLogger("aio_ckpt")
_AGAIN_SECS = 0.05
THREAD_WAIT_SECS = 5.0
"""Time that a failed save waits for its threads before it finishes. The lease waits as long as it takes."""
TIDY_SECS = 60.0
"""Longest time that a committed save waits for the removal of what it needs no more."""


async def delete_trash(storage: Storage, path: Path) -> None:
    """Delete a directory with all its files, ``.metadata`` first. Do nothing if it does not exist.

    So trash is whole as long as it has its ``.metadata``. If ``path`` is a symbolic link, as a step may be, the link is
    removed, and what it leads to stays.

    Raises:
        ReadError, WriteError: the system failed. The next call goes on.
    """
    if not await storage.is_link(path) and await storage.exists(path / METADATA_FILE):
        await storage.remove_file(path / METADATA_FILE)
        await storage.sync_dir(path)
    await storage.remove_tree(path)


def trash_of(pending: Path) -> Path:
    """Return the path in the trash of a root that a pending directory of the root gets."""
    return pending.parents[2] / TRASH_DIR / pending.name


async def discard_pending(storage: Storage, pending: Path) -> None:
    """Rename a pending directory to trash, and delete it. Trash is cleared even if a crash ends the deletion.

    In a store, the directory is deleted where it is: its record goes last, and so leads the next deletion.

    Raises:
        ReadError, WriteError: the system failed. The directory has its name below ``pending`` or below ``trash``.
    """
    if isinstance(pending, RemotePath):
        await storage.remove_tree(pending)
        return
    await storage.rename(pending, trash_of(pending))
    await delete_trash(storage, trash_of(pending))


async def tidy(removal: Coroutine[Any, Any, None], final: Path, left: str) -> bool:
    """Await ``removal``, shielded and with its own limit: ``final`` is committed. Return False if that fails.

    ``left``: what the log says of it then.
    """
    try:
        with anyio.fail_after(TIDY_SECS, shield=True):
            await removal
    except Exception as error:  # noqa: BLE001 - MemoryError, too: the save must not fail
        _log.warning("%s is committed, but %s: %s", final, left, str(error) or "too slow")
        return False
    return True


class Trash:
    """Directories that could not be deleted yet: those of failed saves, and replaced or removed checkpoints.

    It is used on the engine's loop.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._left: dict[Path, Callable[[], bool]] = {}

    def __len__(self) -> int:
        return len(self._left)

    def add(self, path: Path, is_idle: Callable[[], bool] = lambda: True) -> None:
        """Keep a directory for :meth:`sweep`. No thread works in it any more once ``is_idle()`` is True."""
        self._left[path] = is_idle

    async def delete(self, path: Path, *, limit_secs: float | None = None) -> bool:
        """Delete a directory, and return whether that succeeded in ``limit_secs``; None: ``THREAD_WAIT_SECS``.

        One below ``trash`` loses its ``.metadata`` first. A failure is logged, and the directory stays for
        :meth:`sweep`.
        """
        try:
            with anyio.fail_after(THREAD_WAIT_SECS if limit_secs is None else limit_secs):
                await self._delete(path)
        except (AioCkptError, OSError) as error:
            _log.warning("%s stays until it is cleared: %s", path, str(error) or "too slow")
            self.add(path)
            return False
        return True

    async def sweep(self) -> None:
        """Delete the idle directories, for at most ``THREAD_WAIT_SECS``. A directory that does not go stays."""
        with anyio.move_on_after(THREAD_WAIT_SECS):
            for path, is_idle in tuple(self._left.items()):
                if is_idle() and await self.delete(path):
                    self._left.pop(path, None)

    async def _delete(self, path: Path) -> None:
        while True:
            try:
                if path.parent.match(TRASH_DIR):
                    await delete_trash(self._storage, path)
                else:
                    await self._storage.remove_tree(path)
            except OSError as error:
                if error.errno == errno.ENOENT:  # another rank has removed it
                    return
                if error.errno != errno.ENOTEMPTY:  # another rank has just made a file in it
                    raise
            else:
                return
            await anyio.sleep(_AGAIN_SECS)
