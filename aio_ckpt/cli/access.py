"""What commands need of a root or a checkpoint: a loop to work on, the newest checkpoint, and the lock of a writer.

Commands import this module in their bodies, because ``--help`` and the completion of a shell do without its imports.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from aio_ckpt.commit.discovery import MAX_RETRIES, CommittedCheckpoint, discover_all
from aio_ckpt.errors import AioCkptError, CheckpointNotFoundError, CorruptCheckpointError, ReadError
from aio_ckpt.format.checkpoint_files import METADATA_FILE
from aio_ckpt.format.root_names import ENGINE_DIR
from aio_ckpt.format.step_names import StepNames
from aio_ckpt.message_texts import command_line, first_of
from aio_ckpt.runtime.portal import Executor, Portal
from aio_ckpt.storage.local import Storage, names_in
from aio_ckpt.storage.object_store import AnyStorage
from aio_ckpt.storage.small_files import saves_in

T = TypeVar("T")
READERS = 4
"""Reads in flight at once of a command that has no ``--workers``."""
_HOUSEKEEPING_THREADS = 2
_CLOSE_SECS = 5.0


def call(work: Callable[[AnyStorage, Executor], Coroutine[Any, Any, T]], *, readers: int = READERS) -> T:
    """Return the result of ``work``. It may be called inside of a running loop."""
    portal = Portal("aio_ckpt-cli", readers + _HOUSEKEEPING_THREADS)
    try:
        portal.start()
        return portal.call(work, AnyStorage(portal.executor), portal.executor, timeout=None)
    finally:
        portal.close(_CLOSE_SECS)


async def locate(storage: Storage, path: Path, names: StepNames) -> tuple[Sequence[Path], Sequence[Path]]:
    """Return the checkpoint at ``path``, or the checkpoints of the root at ``path``, ascending by step.

    The second sequence holds the entries of the root that this user may not look into.

    Raises:
        CheckpointNotFoundError: ``path`` is neither.
    """
    if await _is_checkpoint(storage, path):
        return [path], []
    committed, torn, refused = await discover_all(storage, path, names)
    found = _ascending(committed, torn)
    if not found:
        hint = await hint_below(storage, path)
        raise CheckpointNotFoundError(f"{path}: neither a checkpoint nor a root that holds one{hint}")
    return [checkpoint.path for checkpoint in found], refused


async def hint_below(storage: Storage, path: Path) -> str:
    """Return what to give if directories below ``path`` are checkpoints of other names, as Lightning's, or roots.

    Returns '' if none is.
    """
    checkpoints, roots = list[Path](), list[Path]()
    for child in [path / name for name in await _readable_names_in(storage, path)]:
        names = await _readable_names_in(storage, child)
        checkpoints += [child] if METADATA_FILE in names else []
        roots += [child] if ENGINE_DIR in names else []
    if checkpoints:
        count = f"{len(checkpoints)} of its directories are checkpoints"
        count = count if len(checkpoints) > 1 else "a directory in it is a checkpoint"
        return f"; {count} of another name: give {checkpoints[-1]}, or --step-dir if their engine had a step_dir"
    if roots:
        return f"; an engine saves into {first_of(roots)}: give {'one of them' if len(roots) > 1 else 'that'}"
    return ""


async def _readable_names_in(storage: Storage, path: Path) -> list[str]:
    """Return the names in a directory; none of a file, and of a place that cannot be read."""
    try:
        return await names_in(storage, path)
    except AioCkptError:
        return []


async def all_steps(storage: Storage, root: Path, names: StepNames) -> list[CommittedCheckpoint]:
    """Return each committed checkpoint, and each that has lost its ``.metadata``, ascending by step."""
    committed, torn, _ = await discover_all(storage, root, names)
    return _ascending(committed, torn)


def _ascending(*found: list[CommittedCheckpoint]) -> list[CommittedCheckpoint]:
    return sorted(itertools.chain(*found), key=lambda checkpoint: checkpoint.step)


async def _is_checkpoint(storage: Storage, path: Path) -> bool:
    """Return whether ``path`` holds ``.metadata`` or a root manifest. If only the latter, verify reports the fault."""
    return await storage.exists(path / METADATA_FILE) or bool(await saves_in(storage, path))


async def use_newest(storage: Storage, path: Path, names: StepNames, use: Callable[[Path], Awaitable[T]]) -> T:
    """Return the result of ``use`` with the checkpoint at ``path``, or with the newest of the root at ``path``.

    If its writer deletes or replaces it while ``use`` reads it, the newest one is looked for and used anew.

    Raises:
        CheckpointNotFoundError: ``path`` is neither; or it is a checkpoint, and its writer deleted it meanwhile.
        CorruptCheckpointError: the checkpoint is damaged; of a root, the error says how to find one that is good.
        Exception: any other error of ``use``.
    """
    is_given = await _is_checkpoint(storage, path)
    for _ in range(MAX_RETRIES):
        newest = path if is_given else (await locate(storage, path, names))[0][-1]
        before = await storage.status(newest)
        try:
            return await use(newest)
        except (CheckpointNotFoundError, CorruptCheckpointError, ReadError) as error:
            after = await storage.status(newest)
            if is_given and after is None:
                raise CheckpointNotFoundError(f"{path}: was deleted by its writer while it was read") from error
            if before is not None and after == before:
                hint = f"{command_line('verify', path, *names.option)} tells which steps are good: give the path of one"
                is_told = is_given or hint in str(error) or str(newest) not in str(error)  # ``use`` may read another
                if is_told or not isinstance(error, CorruptCheckpointError):
                    raise
                raise CorruptCheckpointError(f"{error}; {hint}") from error
    raise CheckpointNotFoundError(
        f"{path}: each of {MAX_RETRIES} checkpoints was deleted by its writer while it was read: protect a step first, "
        f"by {command_line('protect', path, 'STEP', *names.option)}, and give its directory"
    )


async def unless_replaced(
    storage: Storage, path: Path, use: Callable[[], Awaitable[T]], is_good: Callable[[T], bool]
) -> T | None:
    """Return the result of ``use``, which reads the checkpoint at ``path``; None if its writer deleted it meanwhile.

    If its writer replaced it meanwhile, a result that is not good may be of two checkpoints, and ``use`` runs anew.
    """
    found = None
    for _ in range(MAX_RETRIES):
        before = await storage.status(path)
        found = await use()
        after = await storage.status(path)
        if after is None:
            return None
        if before == after or is_good(found):
            break
    return found
