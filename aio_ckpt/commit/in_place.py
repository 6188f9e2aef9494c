"""Replace the checkpoint of a directory in place. Other files in it stay.

The name of every file of a save holds the save's id, but for ``.metadata``, which tells the id of the directory's
checkpoint. So a save adds its files beside those of the checkpoint, and one rename of ``.metadata`` makes it the
checkpoint: at any time there is the old one or the new one. Files of all other saves are leftovers, and the next save
removes them.

From its first byte in the directory to its commit, a save has a marker, an empty file that is named by its id. Without
its marker it commits nothing, because another save has begun.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

from aio_ckpt.commit.root_claim import Check
from aio_ckpt.commit.trash import THREAD_WAIT_SECS, tidy
from aio_ckpt.commit.user_files import files_of_caller
from aio_ckpt.errors import AioCkptError, CorruptCheckpointError, RootError, WriteError
from aio_ckpt.format.checkpoint_files import METADATA_FILE, new_metadata_name, save_of_file
from aio_ckpt.remote_path import RemotePath
from aio_ckpt.storage.local import Storage, names_in
from aio_ckpt.storage.root_lock import ProcessLock
from aio_ckpt.storage.small_files import save_of

PENDING = "aio_ckpt.pending-"
"""Prefix of a save's marker. The save's id follows."""
LOCK = "aio_ckpt.lock"
"""Lock file of a directory. It exists while the lock is held, and after a crash."""
_log = logging.getLogger("aio_ckpt")


@contextlib.asynccontextmanager
async def hold_directory(storage: Storage, directory: Path) -> AsyncIterator[None]:
    """Hold the lock of a directory, to begin or to commit a save. Data is written without the lock.

    In an object store, it excludes the saves of this process alone. Of two others, the one that begins last commits.

    Raises:
        RootError: this process or another one holds the lock.
    """
    async with contextlib.AsyncExitStack() as held:
        try:
            if isinstance(directory, RemotePath):
                held.callback(ProcessLock(directory / LOCK).discard)
            else:
                await held.enter_async_context(storage.locked(directory / LOCK, release_secs=THREAD_WAIT_SECS))
        except RootError as error:
            if error.errno not in (errno.EBUSY, errno.EAGAIN):
                raise
            raise RootError(
                error.errno,
                "another save into this directory is being begun or committed: let one at a time save into it",
                str(directory),
            ) from error
        yield


async def unclaimed() -> None:
    """Return: no claim covers the directory, and its lock alone excludes other writers."""


async def begin_save(storage: Storage, directory: Path, save_id: str, check: Check = unclaimed) -> None:
    """Remove what other saves left, and mark this one. Call it with the lock, and before the first byte.

    A save that has not committed yet loses its marker, and then fails.
    """
    await remove_leftovers(storage, directory, check)
    await storage.write_file(directory / f"{PENDING}{save_id}", b"")


async def pending_saves(storage: Storage, directory: Path) -> list[str]:
    """Return the ids of the saves that have a marker."""
    return [name.removeprefix(PENDING) for name in await storage.list_dir(directory) if name.startswith(PENDING)]


async def check_pending(storage: Storage, directory: Path, save_id: str) -> None:
    """Raise RootError unless ``save_id`` is the one save with a marker."""
    if await pending_saves(storage, directory) != [save_id]:
        raise other_save_error(directory)


def other_save_error(directory: Path) -> RootError:
    """Return the error of a save that has lost its marker."""
    return RootError(
        errno.EBUSY, "another save into this directory has begun: let one at a time save into it", str(directory)
    )


async def commit_save(
    storage: Storage, directory: Path, save_id: str, check: Check = unclaimed, *, replaced: Iterable[str] = ()
) -> None:
    """Make a save the checkpoint of the directory, durably, then remove the files of all others, and ``replaced``.

    Call it with the lock. All files of the save are there, each durable; ``.metadata`` has its name of
    :func:`~aio_ckpt.format.checkpoint_files.new_metadata_name`. A file that cannot be removed is logged and left to the
    next save.

    Raises:
        RootError: another save has begun, or another writer has taken over.
        WriteError, ReadError: the system failed. If ``in_doubt`` is set, the new checkpoint is visible, but a power
            loss may undo that; or ``.metadata`` could not be read, so that nothing tells.
    """
    await check_pending(storage, directory, save_id)
    await storage.sync_dir(directory)
    await check()
    try:
        await storage.replace(directory / new_metadata_name(save_id), directory / METADATA_FILE)
        await storage.sync_dir(directory)
    except AioCkptError as error:
        error.in_doubt = True
        with contextlib.suppress(AioCkptError, OSError):
            error.in_doubt = await save_of(storage, directory) == save_id
            await storage.remove_file(directory / f"{PENDING}{save_id}")
        raise

    async def remove_replaced() -> None:
        await remove_leftovers(storage, directory, check)
        for name in replaced:
            await storage.remove_file(directory / name)

    await tidy(remove_replaced(), directory, "what it replaced is still there")


async def undo_save(storage: Storage, directory: Path, save_id: str) -> None:
    """Remove the files of a save that failed before its commit, and only those: another save may have begun.

    Errors are left to the next save.
    """
    with contextlib.suppress(AioCkptError, OSError):
        for name in await storage.list_dir(directory):
            if save_of_file(name) == save_id or name == f"{PENDING}{save_id}":
                await storage.remove_file(directory / name)


async def replace_by_pending(storage: Storage, pending: Path, directory: Path, save_id: str, check: Check) -> None:
    """Make the checkpoint in a pending directory of the same file system that of ``directory``.

    Files of the caller (``save(files=)``) replace those of the same names, one after the other, just before the commit.
    Those of the old checkpoint that the new one does not have are removed.

    Raises:
        RootError: another save into the directory is under way, or another writer has taken over.
        WriteError, ReadError: see :func:`commit_save`; else the old checkpoint is in place.
    """
    names = await storage.list_dir(pending)
    own = [name for name in names if save_of_file(name) == save_id]
    of_caller = [name for name in names if save_of_file(name) is None and name != METADATA_FILE]
    async with hold_directory(storage, directory):
        old_of_caller = await files_of_caller(storage, directory)
        try:
            await begin_save(storage, directory, save_id, check)
            for name in own:
                await storage.replace(pending / name, directory / name)
            await storage.replace(pending / METADATA_FILE, directory / new_metadata_name(save_id))
            for name in of_caller:
                await _replace(storage, pending / name, directory / name)
            replaced = sorted({*old_of_caller}.difference(of_caller))
            await commit_save(storage, directory, save_id, check, replaced=replaced)
        except BaseException as error:
            if not (isinstance(error, AioCkptError) and error.in_doubt):
                await undo_save(storage, directory, save_id)
            raise


async def _replace(storage: Storage, source: Path, target: Path) -> None:
    """Rename a file or a directory, in the place of what has the name."""
    try:
        await storage.replace(source, target)
    except WriteError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        await storage.remove_tree(target)  # a directory
        await storage.replace(source, target)


def holds_leftovers(names: Iterable[str]) -> bool:
    """Return whether one of the files in a checkpoint's directory is that of a save that ended before its time."""
    listed = tuple(names)
    saves = {save_id for name in listed if (save_id := save_of_file(name)) is not None}
    return len(saves) > 1 or any(name.startswith(PENDING) or name == LOCK for name in listed)


async def remove_leftovers(storage: Storage, directory: Path, check: Check = unclaimed) -> None:
    """Remove the files of all saves but that of the checkpoint. If its ``.metadata`` is damaged, remove markers only.

    Call it with the lock.

    Raises:
        RootError: another writer has taken over, whose files may be among those that are listed.
        WriteError, ReadError: the system failed.
    """
    names = await names_in(storage, directory)
    markers = [name for name in names if name.startswith(PENDING)]
    for name in markers:
        await storage.remove_file(directory / name)
    if markers:
        # Listed anew: until then a rank may have made files. One that writes on finds its marker gone and removes them.
        names = await names_in(storage, directory)
    try:
        committed = await save_of(storage, directory)
    except CorruptCheckpointError as error:
        _log.warning("%s: files of dead saves stay, as nothing tells which are of its checkpoint: %s", directory, error)
        return
    left = [name for name in names if save_of_file(name) not in (None, committed)]
    if left:
        await check()  # after the listing: files that a later writer makes are not in it
    for name in left:
        await storage.remove_file(directory / name)
