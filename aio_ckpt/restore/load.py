"""Load one checkpoint into a template, in stages: ``match_checkpoint``, ``Matched.fetch``, ``LoadOutcome.apply``.

All checks that need no data file are made before a data file is read. A tensor of the template is filled block by
block, each block once it is verified. Objects and ``load_state_dict`` come last, once all is verified.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from aio_ckpt.checkpoint.data_files import Files
from aio_ckpt.checkpoint.open import Checkpoint, OnlyPartOpenError, RankSubset
from aio_ckpt.checkpoint.read_context import ReadContext
from aio_ckpt.errors import CorruptCheckpointError, MissingNameError, TemplateMismatchError, UnexpectedNameError
from aio_ckpt.match.fills import Fills
from aio_ckpt.match.match import Match, match_template
from aio_ckpt.match.options import LoadOptions
from aio_ckpt.match.rename import renamed
from aio_ckpt.match.takers import Fetched, target_modified
from aio_ckpt.restore.apply import prepare_apply
from aio_ckpt.restore.fetch_values import fetch_values
from aio_ckpt.restore.page_cache import share_page_cache
from aio_ckpt.restore.plan_fills import FillPlan, plan_fills
from aio_ckpt.runtime.portal import run_blocking

_MAY_NEED_MORE = (
    OnlyPartOpenError,
    CorruptCheckpointError,
    MissingNameError,
    UnexpectedNameError,
    TemplateMismatchError,
)
"""Errors that a match with a part of a checkpoint may raise, and a match with all of it may not."""
_FREED_AFTER_SECS = 0.01
"""Delay after which an opened checkpoint is freed: no caller waits for its thousands of small objects then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOutcome:
    """Result of a fetch: tensors are filled, objects and Stateful values are as they were."""

    ctx: ReadContext
    checkpoint: Checkpoint
    found: Match
    fetched: Fetched
    put: Callable[[], None]
    """Writes what the reads did not fill, and calls every ``load_state_dict``. It blocks and is called once."""

    async def apply(self) -> None:
        """Set the objects and call every ``load_state_dict``. Its errors have ``target_modified`` if any was set."""
        await self.ctx.meter.begin("apply")
        await run_blocking(self.ctx.executor, self.put)


@dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """Checkpoint that the template matches. Its objects are read, and the template is not touched."""

    ctx: ReadContext
    files: Files
    checkpoint: Checkpoint
    found: Match
    fetched: Fetched
    plan: FillPlan
    """Reads of the tensors."""

    async def fetch(self) -> LoadOutcome:
        """Fill the tensors of the template, and close the data files.

        Raises:
            CorruptCheckpointError: names file and tensor. ``target_modified`` is True.
            ReadError: the operating system could not read.
        """
        ctx = self.ctx
        await ctx.meter.begin_reading(self.plan.requests)
        with target_modified():
            await fetch_values(ctx, self.files, self.checkpoint, self.plan, self.fetched)
            put = await run_blocking(ctx.executor, prepare_apply, ctx, self.checkpoint, self.found, self.fetched)
            await self.files.close()  # inside of the block, because an error of it comes after tensors were filled
        # The loop keeps it until the caller was woken. What is called then, ``id``, does nothing.
        asyncio.get_running_loop().call_later(_FREED_AFTER_SECS, id, self.checkpoint)
        return LoadOutcome(ctx=ctx, checkpoint=self.checkpoint, found=self.found, fetched=self.fetched, put=put)


@asynccontextmanager
async def match_checkpoint(
    ctx: ReadContext, path: Path, state: object, *, step: int | None, options: LoadOptions
) -> AsyncIterator[Matched]:
    """Compare ``state`` with the checkpoint at ``path`` and yield the match, which is usable in the block.

    Raises:
        CheckpointNotFoundError, FormatVersionError: see :func:`aio_ckpt.checkpoint.open.open_checkpoint`.
        MissingNameError, UnexpectedNameError, TemplateMismatchError: see :func:`aio_ckpt.match.match.match_template`.
        UnsafeObjectError: an object needs trust.
        CorruptCheckpointError: a manifest or an object does not verify.
        ReadError: the operating system could not read.
    """
    async with ctx.files(path) as files:
        match = functools.partial(_open_and_match, ctx, files, state, step, options)
        part = ctx.part if options.rename is None and not ctx.past_page_cache else None
        matched: Matched | None = None
        if part is not None:
            with contextlib.suppress(*_MAY_NEED_MORE):  # with all of it open, the error comes again, or there is none
                matched = await match(part)
                if matched.checkpoint.part is not None and (matched.found.missing or matched.found.mismatched):
                    matched = None
        if matched is None:
            matched = await match(None)
        if not ctx.past_page_cache:
            stored = matched.checkpoint.stored_bytes
            await share_page_cache(files, matched.plan.pieces, stored, ranks_on_host=ctx.ranks_on_host)
        yield matched


async def load_checkpoint(
    ctx: ReadContext, path: Path, state: object, *, step: int | None, options: LoadOptions
) -> LoadOutcome:
    """Load the checkpoint at ``path`` into ``state``. See :func:`match_checkpoint`, :class:`Matched`."""
    async with match_checkpoint(ctx, path, state, step=step, options=options) as matched:
        outcome = await matched.fetch()
    await outcome.apply()
    return outcome


async def _open_and_match(
    ctx: ReadContext,
    files: Files,
    state: object,
    step: int | None,
    options: LoadOptions,
    part: RankSubset | None,
) -> Matched:
    """Compare ``state`` with the checkpoint of ``files``, of which ``part`` is opened, or all."""
    ctx.meter.restart()
    checkpoint = await ctx.open(files.directory, step=step, part=part)
    if options.rename is not None:
        checkpoint = await run_blocking(ctx.executor, renamed, checkpoint, options.rename, ctx.rank)
    found = await run_blocking(ctx.executor, match_template, ctx, checkpoint, state, options)
    fetched = Fetched(skip_untrusted=options.skip_untrusted)
    # Objects are read before a tensor is touched: one that is damaged or needs trust refuses the load.
    if found.fills.objects:
        plan = await plan_fills(ctx, files, checkpoint, Fills(objects=found.fills.objects))
        await fetch_values(ctx, files, checkpoint, plan, fetched)
    plan = await plan_fills(ctx, files, checkpoint, replace(found.fills, objects=[]), tied=found.tied)
    return Matched(ctx=ctx, files=files, checkpoint=checkpoint, found=found, fetched=fetched, plan=plan)
