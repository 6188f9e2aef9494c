"""Publish single files: rename them into place, then remove those of the save before that a reader may take.

One rename is the commit: that of the file, or of the index of several. Before it, no file that the old model needs is
touched: if its index uses a name, the new files take others. So a failure, a kill or a power loss leaves the old model
or the new one.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import operator
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path

import anyio

from aio_ckpt.commit.trash import THREAD_WAIT_SECS
from aio_ckpt.errors import AioCkptError, RootError, WriteError
from aio_ckpt.format.safetensors_file import SUFFIX, SafetensorsIndex, index_name, replaced_names
from aio_ckpt.storage.local import Storage
from aio_ckpt.storage.small_files import read_small_file

LOCK = ".aio_ckpt-file.lock"
"""Lock file of a directory, there while safetensors files are renamed into it."""
_AGAIN_SECS = 0.05
_log = logging.getLogger("aio_ckpt")


@contextlib.asynccontextmanager
async def only_writer(storage: Storage, folder: Path) -> AsyncIterator[None]:
    """Exclude other saves of safetensors files into ``folder``, of any process. Wait for one that renames its files.

    Raises:
        WriteError: the system failed.
    """
    async with contextlib.AsyncExitStack() as held:
        while True:
            try:
                await held.enter_async_context(storage.locked(folder / LOCK, release_secs=THREAD_WAIT_SECS))
                break
            except RootError as error:
                if error.errno not in (errno.EBUSY, errno.EAGAIN):
                    raise WriteError(error.errno, os.strerror(error.errno or 0), str(folder / LOCK)) from error
                await anyio.sleep(_AGAIN_SECS)
        yield


async def publish_files(
    storage: Storage, temporary: Path, place: Path, parts: Sequence[str], *, index: SafetensorsIndex | None
) -> Sequence[str]:
    """Rename the durable files ``parts`` of the directory ``temporary`` into that of ``place``, durably.

    Return their names there. Each gets the permissions that all files which it replaces grant; if there are none, those
    that it has. Call this inside of :func:`only_writer` if the files are safetensors files. ``place`` is the file or,
    with an ``index``, that of several files; it becomes visible last.

    Raises:
        WriteError, ReadError: the system failed. If ``in_doubt`` is set, the new files are in place: a power loss may
            bring the old ones back, or the message names an old file that is still there. Otherwise, the old files are.
    """
    folder, single = place.parent, place.name if index is None else index.single
    # Of the save before: the files that its index names, and the permissions of all its files that are there.
    old_index = await read_small_file(storage, folder / index_name(single)) if single.endswith(SUFFIX) else None
    replaced = replaced_names(single, old_index)
    shards = replaced - {single, index_name(single)}
    found = {name: await storage.status(folder / name) for name in sorted(replaced)}
    modes = {name: status.mode for name, status in found.items() if status is not None}
    names = parts if index is None else index.names(taken=shards)
    if index is not None:
        await storage.write_file(temporary / place.name, index.render(names))
    if modes:
        for name in {*parts, place.name}:
            await storage.set_mode(temporary / name, functools.reduce(operator.and_, modes.values()))
    # Readers may prefer the single file to the index, or the index to the single file.
    other = place.with_name(index_name(single) if index is None else single)
    try:
        await _move(storage, temporary, place, {} if index is None else dict(zip(parts, names, strict=True)))
        if other.name in modes:
            with _in_doubt():
                await storage.remove_file(other)
                await storage.sync_dir(folder)
    except WriteError as error:
        if error.in_doubt and other.name in modes:
            error.strerror = (
                f"{error.strerror}; the new files are in place, but {other} of the save before, which readers may "
                "take, is still there, too: remove it, or save again"
            )
        raise
    await _remove_stale(storage, folder, sorted(shards.difference(names)))
    return names


async def _move(storage: Storage, temporary: Path, place: Path, names: Mapping[str, str]) -> None:
    """Rename the files of an index to their new ``names``, then the file at ``place``. If that fails, undo it."""
    moved: list[Path] = []
    try:
        for part, name in names.items():
            await storage.replace(temporary / part, place.with_name(name))
            moved.append(place.with_name(name))
        if moved:
            await storage.sync_dir(place.parent)
        await storage.replace(temporary / place.name, place)
    except Exception as error:
        if isinstance(error, AioCkptError) and await _is_gone(storage, temporary / place.name):
            error.in_doubt = True  # the rename took effect and reported an error, as network file systems may
        else:
            await _remove_stale(storage, place.parent, [path.name for path in moved])
        raise
    with _in_doubt():
        await storage.sync_dir(place.parent)


@contextlib.contextmanager
def _in_doubt() -> Iterator[None]:
    """Note on an error of the block that the new files are in place."""
    try:
        yield
    except AioCkptError as error:
        error.in_doubt = True
        raise


async def _is_gone(storage: Storage, path: Path) -> bool:
    """Return whether ``path`` does not exist, or nobody can tell."""
    try:
        return not await storage.exists(path)
    except AioCkptError:
        return True


async def _remove_stale(storage: Storage, folder: Path, names: Sequence[str]) -> None:
    """Remove files that no index names. One that cannot be removed harms no reader of the index."""
    for name in names:
        try:
            await storage.remove_file(folder / name)
        except AioCkptError as error:
            _log.warning("%s stays, and no index names it: %s", folder / name, error)
    if names:
        with contextlib.suppress(AioCkptError):
            await storage.sync_dir(folder)
