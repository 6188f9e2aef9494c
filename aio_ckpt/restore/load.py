"""Load one checkpoint into a template: open, match, plan, fetch, decode.

Everything that can be known before a byte of data is read is checked before. A tensor of the template is filled block
by block, each block once it is proven. Objects and ``load_state_dict`` come last, when all is proven.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from aio_ckpt.checkpoint.catalog import Catalog
from aio_ckpt.checkpoint.data_files import Files
from aio_ckpt.checkpoint.open import Checkpoint, open_checkpoint
from aio_ckpt.checkpoint.requests import ReadRequest
from aio_ckpt.errors import TemplateMismatchError
from aio_ckpt.match.compounds import stored_compounds
from aio_ckpt.match.match import Match, OnMatched, at_once, match_template
from aio_ckpt.match.overlaps import check_agreement
from aio_ckpt.match.rename import Rename, renamed
from aio_ckpt.restore.apply import prepare_apply, target_modified
from aio_ckpt.restore.fetch_values import fetch_values
from aio_ckpt.restore.load_plan import LoadPlan, locate
from aio_ckpt.restore.options import LoadOptions, ReadContext
from aio_ckpt.restore.page_cache import is_read_by_several, wanted_bytes
from aio_ckpt.runtime.portal import run_blocking

__all__ = ["LoadOutcome", "load_checkpoint"]

_FREED_AFTER_SECS = 0.01
"""Delay after which an opened checkpoint is freed: no caller waits for its thousands of small objects then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOutcome:
    """What one load did."""

    step: int | None
    """Step that the checkpoint tells; None for plain DCP."""
    extra: Mapping[str, Any]
    """JSON values that are stored with the step."""
    missing: tuple[str, ...]
    """Template names that the checkpoint lacks (only with ``allow_missing``)."""
    unexpected: tuple[str, ...]
    """Names of the checkpoint that the template lacks."""
    untrusted: tuple[str, ...]
    """Objects that were left as they are (only with ``skip_untrusted``)."""
    bytes_read: int
    """Bytes read from data files."""
    verified: bool
    """False if ``verify`` was, or nothing that was read has a sum."""
    identity: str
    """Of the checkpoint that was read: another one in its place has another."""
    put_back: Callable[[], None]
    """Sets objects and calls every ``load_state_dict``, once; blocks. What that raises has ``target_modified``."""


async def load_checkpoint(
    ctx: ReadContext,
    path: Path,
    state: object,
    *,
    step: int | None,
    options: LoadOptions,
    past_page_cache: bool = False,
    on_matched: OnMatched = at_once,
) -> LoadOutcome:
    """Fill the tensors of ``state`` from the checkpoint at ``path``.

    The rest of ``state`` is as it was until ``put_back`` of the outcome is called: other ranks may still find damage.
    ``past_page_cache``: all is read from the disk, since the page cache would give what it gave before. ``on_matched``
    is awaited before the first tensor is touched.

    Raises:
        CheckpointNotFoundError, FormatVersionError: see :func:`aio_ckpt.checkpoint.open.open_checkpoint`.
        MissingNameError, UnexpectedNameError, TemplateMismatchError: before anything is touched; see
            :func:`aio_ckpt.match.match.match_template` and :func:`aio_ckpt.match.overlaps.check_agreement`.
        CorruptCheckpointError: names file and tensor. ``target_modified`` is True once reading began.
        UnsafeObjectError: an object needs trust.
        ReadError: the operating system could not read.
    """
    async with ctx.files(path, past_page_cache=past_page_cache) as files:
        checkpoint = await open_checkpoint(ctx.storage, path, executor=ctx.executor, step=step)
        if options.rename is not None:
            checkpoint = await run_blocking(ctx.executor, _renamed, checkpoint, options.rename, ctx.rank)
        found = await run_blocking(ctx.executor, _match, ctx, checkpoint, state, options)
        if not past_page_cache:
            await _share_page_cache(ctx, files, found, checkpoint.catalog)
        shared = await _fetch_shared(ctx, files, checkpoint, found)
        plan, requests = await _plan(ctx, files, checkpoint, found, skip_untrusted=options.skip_untrusted)
        await on_matched(checkpoint.identity)
        with target_modified():
            fetched = await fetch_values(ctx, files, checkpoint, plan, requests)
            prepare = functools.partial(prepare_apply, ctx, checkpoint, state, found, fetched, shared.values)
            put_back = await run_blocking(ctx.executor, prepare)
    asyncio.get_running_loop().call_later(_FREED_AFTER_SECS, _free, checkpoint)
    return LoadOutcome(
        step=checkpoint.step,
        extra=checkpoint.extra,
        missing=found.missing,
        unexpected=found.unexpected,
        untrusted=tuple(fetched.untrusted),
        bytes_read=fetched.bytes_read + shared.bytes_read,
        verified=fetched.is_verified and shared.is_verified,
        identity=checkpoint.identity,
        put_back=put_back,
    )


def _renamed(checkpoint: Checkpoint, rename: Rename, rank: int) -> Checkpoint:
    return renamed(checkpoint, rename, stored_compounds(checkpoint, rank))


def _match(ctx: ReadContext, checkpoint: Checkpoint, state: object, options: LoadOptions) -> Match:
    return match_template(
        checkpoint,
        state,
        rank=ctx.rank,
        world_size=ctx.world_size,
        strict=options.strict,
        allow_missing=options.allow_missing,
        trusted=ctx.trusted,
        casts=options.cast,
    )


def _free(_: Checkpoint) -> None:
    """Drop the last reference to the checkpoint."""


async def _share_page_cache(ctx: ReadContext, files: Files, found: Match, catalog: Catalog) -> None:
    """Read through the page cache what other ranks of this host read, too."""
    if ctx.ranks_on_host > 1:
        wanted = await run_blocking(ctx.executor, wanted_bytes, found, catalog)
        if is_read_by_several(wanted, catalog.nbytes, ranks_on_host=ctx.ranks_on_host):
            await files.share()


# -- targets that share memory ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _SharedValues:
    """What was read for targets that share memory."""

    values: Mapping[str, torch.Tensor]
    """Host tensors by name."""
    bytes_read: int
    """Bytes read from data files."""
    is_verified: bool
    """As :attr:`LoadOutcome.verified`; True if nothing was read."""


async def _fetch_shared(ctx: ReadContext, files: Files, checkpoint: Checkpoint, found: Match) -> _SharedValues:
    """Read the values of targets that share memory into memory of their own.

    Raises:
        TemplateMismatchError: two values are stored for one place. Nothing was touched.
        CorruptCheckpointError, ReadError: as :func:`load_checkpoint`.
    """
    names = [name for name, _ in found.shared]
    if not names:
        return _SharedValues(values={}, bytes_read=0, is_verified=True)
    plan = LoadPlan(source=await locate(ctx, files, checkpoint, names))
    await run_blocking(ctx.executor, plan.add_all, [], names, [], ctx.trusted)
    requests = await run_blocking(ctx.executor, plan.reads.requests, ctx.readers)
    fetched = await fetch_values(ctx, files, checkpoint, plan, requests)
    values = {name: cast("torch.Tensor", fetched.values[name]).to(target.dtype) for name, target in found.shared}
    try:
        await run_blocking(ctx.executor, check_agreement, found.shared, values)
    except TemplateMismatchError as error:
        raise TemplateMismatchError(f"{checkpoint.path}: {error}") from error
    return _SharedValues(values=values, bytes_read=fetched.bytes_read, is_verified=fetched.is_verified)


# -- what is read into what -------------------------------------------------------------------------


async def _plan(
    ctx: ReadContext, files: Files, checkpoint: Checkpoint, found: Match, *, skip_untrusted: bool
) -> tuple[LoadPlan, list[ReadRequest]]:
    """Return what is read for a template, and by which requests."""
    catalog = checkpoint.catalog
    values, objects = _unplaced(found, catalog)
    names = [*(name for name, _ in found.tensors), *values, *objects]
    await files.measure({item.file for item, _, _ in found.whole}, catalog.files)
    plan = LoadPlan(
        source=await locate(ctx, files, checkpoint, names),
        live=found.live,
        live_at=found.live_at,
        layouts=found.layouts,
        skip_untrusted=skip_untrusted,
    )

    def requests() -> list[ReadRequest]:
        plan.reads.add_whole(found.whole)
        plan.add_all(found.tensors, values, objects, ctx.trusted)
        return plan.reads.requests(ctx.readers)

    return plan, await run_blocking(ctx.executor, requests)


def _unplaced(found: Match, catalog: Catalog) -> tuple[list[str], list[str]]:
    """Return the names of the tensors that are set or given to ``load_state_dict``, and of the objects."""
    below = [
        name
        for names in (*(names for _, _, names in found.stateful), *(place.names for place in found.open.values()))
        for name in names
    ]
    values = [*(name for name, *_ in found.arrays), *(name for name in below if name in catalog.shards)]
    return values, [*found.objects, *(name for name in below if name in catalog.objects)]
