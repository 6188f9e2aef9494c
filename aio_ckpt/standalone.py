"""Load or read one checkpoint directory without an engine: nothing is locked, and nothing is made on the disk."""

from __future__ import annotations

import os
import uuid
from collections.abc import Awaitable, Callable, Collection
from concurrent.futures import Future
from typing import Any, TypeVar

import torch.distributed as dist

from aio_ckpt.checks import check_flag, check_kind, check_path
from aio_ckpt.commit.discovery import CommittedCheckpoint, given
from aio_ckpt.config import EngineConfig
from aio_ckpt.engine.load import load_report, read_report, selection
from aio_ckpt.errors import CorruptCheckpointError
from aio_ckpt.format.names import StepNames
from aio_ckpt.read.load import load_checkpoint, read_state
from aio_ckpt.read.rename import Rename, check_rename
from aio_ckpt.reports import LoadReport
from aio_ckpt.runtime.futures import outcome_blocking, unless_given_up
from aio_ckpt.runtime.portal import HOUSEKEEPING_THREADS, STOP_SECS, Executor, Portal, run_blocking
from aio_ckpt.storage.local import LocalStorage, Storage

__all__ = ["load", "read"]

T = TypeVar("T")
_Use = Callable[[Storage, Executor, CommittedCheckpoint, bool], Awaitable[T]]
"""Reads a checkpoint; the second time (True) past the page cache."""


def load(
    path: str | os.PathLike[str],
    state: object,
    *,
    strict: bool = False,
    allow_missing: bool = False,
    skip_untrusted: bool = False,
    cast: bool = False,
    rename: Rename | None = None,
    config: EngineConfig | None = None,
) -> LoadReport:
    """Fill ``state`` in place from the checkpoint in the directory ``path``. Blocks.

    Each rank loads by itself: the ranks do not agree whether all have loaded.

    Args:
        path: directory of a checkpoint, of an engine or of stock ``dcp.save``; of a root, give one of its steps.
        state: the template, as for :meth:`CheckpointEngine.load`.
        strict: refuse names of the checkpoint that the template lacks.
        allow_missing: leave template names that the checkpoint lacks as they are.
        skip_untrusted: leave objects that only running code reads as they are, and list them in the report.
        cast: convert tensors of another dtype to that of the template, as far as ``torch.can_cast`` allows.
        rename: what the template calls a stored leaf: a mapping from stored names of leaves or branches, or a function
            from the stored name of each leaf. A renamed leaf takes the place of one of that name.
        config: ``trusted_objects``, ``verify``, ``workers`` and ``direct_io`` count.

    Raises:
        CheckpointNotFoundError: ``path`` holds no checkpoint.
        CorruptCheckpointError and others: as :meth:`CheckpointEngine.load`.
    """
    for name, flag in (
        ("strict", strict), ("allow_missing", allow_missing), ("skip_untrusted", skip_untrusted), ("cast", cast)
    ):  # fmt: skip
        check_flag(name, flag)
    check_rename(rename)
    settings, (rank, world_size) = _settings(config), _own_rank()

    async def use(storage: Storage, executor: Executor, found: CommittedCheckpoint, again: bool) -> LoadReport:
        outcome = await load_checkpoint(
            storage,
            found.path,
            state,
            step=None,
            executor=executor,
            rank=rank,
            world_size=world_size,
            readers=settings.workers,
            past_page_cache=again,
            verify=settings.verify == "load",
            strict=strict,
            allow_missing=allow_missing,
            trusted=settings.trusted_objects,
            skip_untrusted=skip_untrusted,
            casts=cast,
            rename=rename,
        )
        await run_blocking(executor, outcome.put_back)
        return load_report(found, (), outcome)

    return _run(path, settings, use)


def read(
    path: str | os.PathLike[str],
    *,
    only: Collection[str] | None = None,
    skip_untrusted: bool = False,
    with_report: bool = False,
    config: EngineConfig | None = None,
) -> Any:
    """The nested state of the checkpoint in the directory ``path``, in fresh host memory. Blocks.

    Args:
        path: directory of a checkpoint, of an engine or of stock ``dcp.save``; of a root, give one of its steps.
        only: names of leaves, or of branches above them.
        skip_untrusted: put an :class:`UntrustedObject` in the place of objects that only running code reads.
        with_report: return a tuple of the state and a :class:`ReadReport`.
        config: ``trusted_objects``, ``verify``, ``workers`` and ``direct_io`` count.

    Raises:
        CheckpointNotFoundError: ``path`` holds no checkpoint.
        MissingNameError and others: as :meth:`CheckpointEngine.read`.
    """
    check_flag("skip_untrusted", skip_untrusted)
    check_flag("with_report", with_report)
    settings, (rank, world_size), names = _settings(config), _own_rank(), selection(only)

    async def use(storage: Storage, executor: Executor, found: CommittedCheckpoint, again: bool) -> Any:
        outcome = await read_state(
            storage,
            found.path,
            step=None,
            executor=executor,
            only=names,
            rank=rank,
            world_size=world_size,
            readers=settings.workers,
            past_page_cache=again,
            verify=settings.verify == "load",
            trusted=settings.trusted_objects,
            skip_untrusted=skip_untrusted,
        )
        return (outcome.state, read_report(found, (), outcome)) if with_report else outcome.state

    return _run(path, settings, use)


def _settings(config: EngineConfig | None) -> EngineConfig:
    check_kind("config", config, EngineConfig)
    return config or EngineConfig()


def _own_rank() -> tuple[int, int]:
    """Rank and world size of the default group; of one process without it."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def _run(path: str | os.PathLike[str], settings: EngineConfig, use: _Use[T]) -> T:
    """``use`` on threads that end with this call. Ctrl-C ends it once no thread fills anything any more."""
    directory, given_up = check_path("path", path), Future[None]()
    portal = Portal(f"aio_ckpt-{uuid.uuid4().hex[:8]}", settings.workers + HOUSEKEEPING_THREADS)

    async def work() -> T:
        storage = LocalStorage(portal.executor, settings.direct_io)
        found = await given(storage, directory, StepNames(settings.step_dir))
        try:
            return await use(storage, portal.executor, found, False)
        except CorruptCheckpointError:  # a bad transfer is no damage on the disk
            return await use(storage, portal.executor, found, True)

    try:
        portal.start()
        return outcome_blocking(portal.submit(unless_given_up, given_up, work), given_up)
    finally:
        portal.close(STOP_SECS)
