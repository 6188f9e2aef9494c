"""Writing outside of an engine: the lock and the claim of a root, held for one change by a command or a rescue."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import AsyncIterator
from pathlib import Path

import anyio

from aio_ckpt.commit.engine_dirs import make_engine_dirs, refuse_linked_dirs
from aio_ckpt.commit.leftovers import clear_leftovers
from aio_ckpt.commit.owner import Owner
from aio_ckpt.commit.root_claim import Claim, lock_root, mount_of_root
from aio_ckpt.config import EngineConfig
from aio_ckpt.errors import RootError
from aio_ckpt.format.step_names import StepNames
from aio_ckpt.runtime.futures import first_cause
from aio_ckpt.storage.local import Storage


@contextlib.asynccontextmanager
async def writing(
    storage: Storage, root: Path, names: StepNames, here: Owner, *, stale_after_secs: float
) -> AsyncIterator[Claim]:
    """Exclude every other writer of ``root``, on whatever host, and clear the leftovers of dead ones.

    Yields the claim. Check it before each change: this process may stand still for as long as makes it void.

    ``root`` exists, and ``here`` is the process that writes.

    Raises:
        RootError: a living writer holds the root; names its process and host.
    """
    await refuse_linked_dirs(storage, root)
    mount = await mount_of_root(storage, root)
    with lock_root(storage, root, mount) as lock:
        await make_engine_dirs(storage, root)
        claim = Claim(storage, root, here, stale_after_secs=stale_after_secs)
        await claim.take(mount, is_locked=lock.is_granted)
        try:
            async with anyio.create_task_group() as beside:
                beside.start_soon(claim.keep)
                await clear_leftovers(storage, root, names, claim.check, here=here)
                yield claim
                beside.cancel_scope.cancel()
        except BaseExceptionGroup as errors:
            raise first_cause(errors) from None
        finally:
            await claim.release()


@contextlib.asynccontextmanager
async def as_writer(storage: Storage, root: Path, names: StepNames, *, instead: str | None) -> AsyncIterator[Claim]:
    """Do :func:`writing` for a command, with the default limits.

    ``instead``: call of the engine that does the same inside of the trainer, for the message; None if there is none.

    Raises:
        RootError: a living writer holds the root; names its process and host.
    """
    async with contextlib.AsyncExitStack() as stack:
        try:
            here, stale_after_secs = Owner.of_this_process(), EngineConfig().stale_after_secs
            held = writing(storage, root, names, here, stale_after_secs=stale_after_secs)
            claim = await stack.enter_async_context(held)
        except RootError as error:
            if error.errno not in (errno.EAGAIN, errno.EBUSY):
                raise
            message = (
                error.strerror
                if instead is None
                else f"{error.strerror}. Inside of that process, {instead} does the same"
            )
            raise RootError(error.errno, message, error.filename or str(root)) from error
        yield claim
