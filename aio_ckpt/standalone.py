"""Load or read one checkpoint directory without an engine: nothing is locked, and nothing is made on the disk."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from typing import Any, TypeVar

from aio_ckpt.argument_checks import check_callback, check_flag, check_kind
from aio_ckpt.checkpoint.load_progress import metered
from aio_ckpt.checkpoint.read_context import ReadContext
from aio_ckpt.commit.discovery import CommittedCheckpoint, checkpoint_at
from aio_ckpt.config import EngineConfig
from aio_ckpt.engine.loader import load_report, read_report, selection
from aio_ckpt.engine.outcome_log import log_load
from aio_ckpt.errors import ConfigError, CorruptCheckpointError
from aio_ckpt.format.step_names import StepNames
from aio_ckpt.leaves.values import State
from aio_ckpt.match.options import LoadOptions
from aio_ckpt.match.rename import Rename
from aio_ckpt.message_texts import shown
from aio_ckpt.ranks.store_coordinator import rank_in_default_group
from aio_ckpt.remote_path import check_place
from aio_ckpt.reports import LoadReport, OnProgress
from aio_ckpt.restore.load import load_checkpoint
from aio_ckpt.restore.read_state import read_state
from aio_ckpt.runtime.error_notes import naming_checkpoint
from aio_ckpt.runtime.one_call import call_on_own_threads
from aio_ckpt.runtime.portal import Executor
from aio_ckpt.storage.object_store import AnyStorage

__all__ = ["load", "read"]

T = TypeVar("T")


def load(
    path: str | os.PathLike[str],
    state: State,
    *,
    strict: bool = False,
    allow_missing: bool = False,
    skip_untrusted: bool = False,
    skip_mismatched: bool = False,
    cast: bool = False,
    rename: Rename | None = None,
    progress: OnProgress | None = None,
    config: EngineConfig | None = None,
) -> LoadReport:
    """Fill ``state`` in place from the checkpoint in the directory ``path``. Blocks.

    Each rank loads by itself: the ranks do not agree whether all have loaded.

    Args:
        path: directory of a checkpoint, of an engine or of stock ``dcp.save``; of a root, give one of its steps. It may
            be the URL of an object store (``s3://``, ``gs://``, ``az://``; needs ``aio-ckpt[remote]``).
        state: the template, as for :meth:`CheckpointEngine.load`.
        strict: refuse names of the checkpoint that the template lacks.
        allow_missing: leave template names that the checkpoint lacks as they are.
        skip_untrusted: leave objects that only running code reads as they are, and list them in the report.
        skip_mismatched: leave tensors of another shape as they are, and list them in the report.
        cast: convert tensors of another dtype to that of the template, as far as ``torch.can_cast`` allows.
            Values beyond the range of the template's dtype are not kept; a warning names such tensors.
        rename: names in the template of stored leaves: a mapping from stored names of leaves or branches, or a function
            from the stored name of each leaf. A renamed leaf takes the place of one of that name. None in the place of
            a name leaves the leaf or branch out.
        progress: function that gets a :class:`Progress`, as for :meth:`CheckpointEngine.load`.
        config: only ``trusted_objects``, ``verify``, ``workers``, ``direct_io`` and ``step_dir`` are used.

    Raises:
        CheckpointNotFoundError: ``path`` holds no checkpoint.
        CorruptCheckpointError and others: as :meth:`CheckpointEngine.load`.
    """
    if isinstance(state, (str, os.PathLike)) and not isinstance(path, (str, os.PathLike)):
        raise ConfigError(f"path={shown(path)}: the first argument is the path, the second is the template")
    began = time.perf_counter()
    options = LoadOptions(
        strict=strict,
        allow_missing=allow_missing,
        skip_untrusted=skip_untrusted,
        skip_mismatched=skip_mismatched,
        cast=cast,
        rename=rename,
        progress=progress,
    )
    options.check()

    async def use(ctx: ReadContext, found: CommittedCheckpoint) -> LoadReport:
        outcome = await load_checkpoint(ctx, found.path, state, step=None, options=options)
        report = load_report(found, (), outcome)
        log_load(report, time.perf_counter() - began, rank=ctx.rank, world_size=ctx.world_size)
        return report

    return _run(path, config, progress, use, *rank_in_default_group())


def read(
    path: str | os.PathLike[str],
    *,
    only: Collection[str] | None = None,
    skip_untrusted: bool = False,
    with_report: bool = False,
    progress: OnProgress | None = None,
    config: EngineConfig | None = None,
) -> Any:
    """Return the nested state of the checkpoint in the directory ``path``, in new host memory. Blocks.

    It has the names of all ranks that saved, and of ``PerRank`` values those of this rank.

    Args:
        path: directory of a checkpoint, of an engine or of stock ``dcp.save``; of a root, give one of its steps. It may
            be the URL of an object store (``s3://``, ``gs://``, ``az://``; needs ``aio-ckpt[remote]``).
        only: names of leaves, or of branches above them.
        skip_untrusted: put an :class:`UntrustedObject` in the place of objects that only running code reads.
        with_report: return a tuple of the state and a :class:`ReadReport`.
        progress: function that gets a :class:`Progress`, as for :meth:`CheckpointEngine.read`.
        config: only ``trusted_objects``, ``verify``, ``workers``, ``direct_io`` and ``step_dir`` are used.

    Raises:
        CheckpointNotFoundError: ``path`` holds no checkpoint.
        MissingNameError and others: as :meth:`CheckpointEngine.read`.
    """
    check_flag("skip_untrusted", skip_untrusted)
    check_flag("with_report", with_report)
    names, began = selection(only), time.perf_counter()

    async def use(ctx: ReadContext, found: CommittedCheckpoint) -> Any:
        outcome = await read_state(ctx, found.path, step=None, only=names, skip_untrusted=skip_untrusted)
        report = read_report(found, (), outcome)
        log_load(report, time.perf_counter() - began, rank=ctx.rank, world_size=ctx.world_size)
        return (outcome.state, report) if with_report else outcome.state

    rank, _ = rank_in_default_group()
    return _run(path, config, progress, use, rank, 1)  # the whole state, whatever the number of ranks


def _run(
    path: str | os.PathLike[str],
    config: EngineConfig | None,
    progress: OnProgress | None,
    use: Callable[[ReadContext, CommittedCheckpoint], Awaitable[T]],
    rank: int,
    world_size: int,
) -> T:
    """Return the result of ``use``, run on threads that end with this call. After Ctrl-C, no thread fills a tensor."""
    check_kind("config", config, EngineConfig)
    check_callback("progress", progress)
    settings = config or EngineConfig()
    directory = check_place("path", path)

    async def work(executor: Executor) -> T:
        storage = AnyStorage(executor, settings.direct_io)
        found = await checkpoint_at(storage, directory, StepNames(settings.step_dir))
        async with metered(progress, executor) as meter:
            ctx = ReadContext(
                config=settings, storage=storage, executor=executor, rank=rank, world_size=world_size, meter=meter
            )
            try:
                return await use(ctx, found)
            except CorruptCheckpointError:  # the transfer may have been bad, so the disk is read once more
                with naming_checkpoint(found.path):
                    return await use(replace(ctx, past_page_cache=True), found)

    return call_on_own_threads(work, settings.workers)
