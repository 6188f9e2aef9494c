"""What dead writers left under a root, and its removal by the next writer."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

from aio_ckpt.commit.in_place import hold_directory, holds_leftovers, remove_leftovers
from aio_ckpt.commit.owner import Owner, owner_by_name
from aio_ckpt.commit.root_claim import Check
from aio_ckpt.commit.trash import delete_trash, discard_pending
from aio_ckpt.errors import AioCkptError, WriteError
from aio_ckpt.format.checkpoint_files import METADATA_FILE
from aio_ckpt.format.root_names import PENDING_DIR, TRASH_DIR, protected_name
from aio_ckpt.format.step_names import StepNames
from aio_ckpt.remote_path import RemotePath
from aio_ckpt.storage.durability import sync_parents
from aio_ckpt.storage.local import Storage, names_in

_log = logging.getLogger("aio_ckpt")


async def clear_leftovers(storage: Storage, root: Path, names: StepNames, check: Check, *, here: Owner) -> None:
    """Remove trash, the pending directories of other writers, and what killed overwrites left in steps.

    Only the holder of the root's lock and claim may call this. A directory stays if its owner is a running process of
    this host: an older engine of this process, or a writer that had no room for its claim and has lost its lock. What
    is removed is logged, and so is what cannot be removed; the next holder tries again.

    Raises:
        RootError: another writer has taken over.
    """
    trash = await restore_protected(storage, root, names, check)
    pending = [root / PENDING_DIR / name for name in await names_in(storage, root / PENDING_DIR)]
    dead = []
    for path in pending:
        if (owner := owner_by_name(path.name, here)) is not None and owner.runs_here(here):
            _log.debug("%s stays: its owner, %s, runs", path, owner.process)  # a store may list it though it is gone
        else:
            dead.append(path)
    if dead and not isinstance(root, RemotePath):  # first: without them, nothing tells that a writer was killed
        await _clear_steps(storage, root, names, check)
    cleared = []
    for path in (*dead, *trash):
        try:
            await (delete_trash if path in trash else discard_pending)(storage, path)
            cleared.append(str(path.relative_to(root)))
        except (AioCkptError, OSError) as error:
            if getattr(error, "errno", None) != errno.ENOENT:  # some stores list what was in a directory for a while
                _log.warning("%s stays: it could not be cleared: %s", path, error)
    if cleared:
        _log.info("cleared leftovers of dead writers: %s", ", ".join(cleared))


async def _clear_steps(storage: Storage, root: Path, names: StepNames, check: Check) -> None:
    """Remove files of other saves than that of the checkpoint from each step. An overwrite that is killed leaves such.

    Raises:
        RootError: another writer has taken over.
    """
    for name in await names_in(storage, root):
        step = root / name
        if names.step(name) is None or await storage.is_link(step):
            continue
        try:
            if holds_leftovers(await storage.list_dir(step)):
                await check()
                async with hold_directory(storage, step):
                    await remove_leftovers(storage, step, check)
                _log.info("%s: the files of an overwrite that was killed are removed", step)
        except (AioCkptError, OSError) as error:
            await check()
            _log.warning("%s: the files of an overwrite that was killed stay: %s", step, error)


async def restore_protected(storage: Storage, root: Path, names: StepNames, check: Check) -> list[Path]:
    """Restore steps that became trash although they are protected; return the other trash, which may be deleted.

    Only the lock's holder may call this.

    Protecting and deleting may race. Each side changes its file first and then checks for the other, so a protected
    step can briefly appear as trash. If the writer dies then, or cannot rename, the next writer restores the step.
    Trash without ``.metadata`` may be torn and stays trash, and so does a replaced checkpoint. A step that cannot be
    restored stays in the trash, and is not returned.
    """
    left = list[Path]()
    for name in await names_in(storage, root / TRASH_DIR):
        trash, place, step = root / TRASH_DIR / name, root / name, names.step(name)
        if step is None or not await storage.exists(root / protected_name(step)):
            left.append(trash)
            continue
        is_whole = await storage.is_link(trash) or await storage.exists(trash / METADATA_FILE)
        if not is_whole or await storage.exists(place):
            left.append(trash)
            continue
        await check()
        try:
            await storage.rename(trash, place)
            await sync_parents(storage, trash, place)
            _log.warning("step %d is protected and was put back", step)
        except WriteError as error:
            _log.warning("step %d is protected and could not be put back: %s", step, error)
    return left
