"""Load one checkpoint into a template: open, match, plan, fetch, decode.

All checks that need no data file are made before a data file is read. A tensor of the template is filled block by
block, each block once it is verified. Objects and ``load_state_dict`` come last, once all is verified.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from aio_ckpt.checkpoint.open import Checkpoint, open_checkpoint
from aio_ckpt.match.fills import Fills
from aio_ckpt.match.match import Match, OnMatched, at_once, match_template
from aio_ckpt.match.options import LoadOptions, ReadContext
from aio_ckpt.match.rename import renamed
from aio_ckpt.match.takers import Fetched, target_modified
from aio_ckpt.restore.apply import prepare_apply
from aio_ckpt.restore.fetch_values import fetch_values
from aio_ckpt.restore.load_plan import plan_reads
from aio_ckpt.restore.page_cache import share_page_cache
from aio_ckpt.restore.progress import NO_METER, Meter
from aio_ckpt.runtime.portal import run_blocking

_FREED_AFTER_SECS = 0.01
"""Delay after which an opened checkpoint is freed: no caller waits for its thousands of small objects then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOutcome:
    """Result of one load."""

    checkpoint: Checkpoint
    found: Match
    fetched: Fetched
    apply: Callable[[], None]
    """Writes what the reads did not fill, and calls every ``load_state_dict``. It blocks and is called once.
    If it has written something, its errors have ``target_modified``."""


async def load_checkpoint(
    ctx: ReadContext,
    path: Path,
    state: object,
    *,
    step: int | None,
    options: LoadOptions,
    past_page_cache: bool = False,
    on_matched: OnMatched = at_once,
    meter: Meter = NO_METER,
) -> LoadOutcome:
    """Fill the tensors of ``state`` from the checkpoint at ``path``.

    Objects and Stateful values stay as they are until ``apply`` of the outcome is called, because other ranks may
    still find damage.

    Args:
        past_page_cache: whether all bytes are read from the disk, for a second reading after a mismatch.
        on_matched: awaited before the first tensor is touched.
        meter: counts the bytes that are read; the stage ``apply`` is left to the caller.

    Raises:
        CheckpointNotFoundError, FormatVersionError: see :func:`aio_ckpt.checkpoint.open.open_checkpoint`.
        MissingNameError, UnexpectedNameError, TemplateMismatchError: before anything is touched; see
            :func:`aio_ckpt.match.match.match_template`.
        UnsafeObjectError: an object needs trust; no tensor was touched.
        CorruptCheckpointError: names file and tensor. ``target_modified`` is True once a tensor may have been filled.
        ReadError: the operating system could not read.
    """
    meter.restart()
    async with ctx.files(path, past_page_cache=past_page_cache) as files:
        checkpoint = await open_checkpoint(ctx.storage, path, executor=ctx.executor, step=step)
        checkpoint = await run_blocking(ctx.executor, ctx.as_one_state, checkpoint)
        if options.rename is not None:
            checkpoint = await run_blocking(ctx.executor, renamed, checkpoint, options.rename, ctx.rank)
        found = await run_blocking(ctx.executor, match_template, ctx, checkpoint, state, options)
        fetched = Fetched(skip_untrusted=options.skip_untrusted)
        # Objects are read before a tensor is touched: one that is damaged or needs trust refuses the load.
        if found.fills.objects:
            plan = await plan_reads(ctx, files, checkpoint, Fills(objects=found.fills.objects))
            await fetch_values(ctx, files, checkpoint, plan, fetched, meter=meter)
        plan = await plan_reads(ctx, files, checkpoint, replace(found.fills, objects=[]), tied=found.tied)
        if not past_page_cache:
            await share_page_cache(files, plan.reads, checkpoint.catalog.nbytes, ranks_on_host=ctx.ranks_on_host)
        await on_matched(checkpoint.identity)
        await meter.begin_reading(plan.requests)
        with target_modified():
            await fetch_values(ctx, files, checkpoint, plan, fetched, meter=meter)
            apply = await run_blocking(ctx.executor, prepare_apply, ctx, checkpoint, found, fetched)
            await files.close()  # inside of the block, because an error of it comes after tensors were filled
    asyncio.get_running_loop().call_later(_FREED_AFTER_SECS, _free, checkpoint)
    return LoadOutcome(checkpoint=checkpoint, found=found, fetched=fetched, apply=apply)


def _free(_: Checkpoint) -> None:
    """Drop the last reference to the checkpoint."""
