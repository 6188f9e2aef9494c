"""Load one checkpoint into a template: open, match, plan, fetch, decode.

All checks that need no data file are made before a data file is read. A tensor of the template is filled block by
block, each block once it is verified. Objects and ``load_state_dict`` come last, once all is verified.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aio_ckpt.checkpoint.catalog import Catalog, Item
from aio_ckpt.checkpoint.data_files import Files
from aio_ckpt.checkpoint.open import Checkpoint, open_checkpoint
from aio_ckpt.checkpoint.requests import ReadRequest
from aio_ckpt.errors import TemplateMismatchError
from aio_ckpt.match.match import Match, OnMatched, at_once, match_template
from aio_ckpt.match.rename import renamed
from aio_ckpt.restore.apply import prepare_apply, target_modified
from aio_ckpt.restore.fetch_values import FetchedValues, fetch_values
from aio_ckpt.restore.load_plan import LoadPlan, locate
from aio_ckpt.restore.options import LoadOptions, ReadContext
from aio_ckpt.restore.page_cache import is_read_by_several, wanted_bytes
from aio_ckpt.restore.progress import NO_METER, Meter
from aio_ckpt.runtime.portal import run_blocking

_FREED_AFTER_SECS = 0.01
"""Delay after which an opened checkpoint is freed: no caller waits for its thousands of small objects then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOutcome:
    """Result of one load."""

    step: int | None
    """Step that the checkpoint tells; None for plain DCP."""
    extra: Mapping[str, Any]
    """JSON values that are stored with the step."""
    missing: tuple[str, ...]
    """Template names that the checkpoint lacks (only with ``allow_missing``)."""
    unexpected: tuple[str, ...]
    """Names of the checkpoint that the template lacks."""
    mismatched: tuple[str, ...]
    """Tensors of another shape, which were left as they are (only with ``skip_mismatched``)."""
    dropped: tuple[str, ...]
    """``PerRank`` values of ranks that this load lacks."""
    untrusted: tuple[str, ...]
    """Objects that were left as they are (only with ``skip_untrusted``)."""
    bytes_read: int
    """Bytes read from data files."""
    verified: bool
    """Whether all that was read was compared with checksums; False if ``verify`` is off, or if a part has none."""
    identity: str
    """Identity of the save that was read. A checkpoint that replaces it has another identity."""
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
        found = await run_blocking(ctx.executor, _match, ctx, checkpoint, state, options)
        if not past_page_cache:
            await _share_page_cache(ctx, files, found, checkpoint.catalog)
        values, objects = _unplaced(found, checkpoint.catalog)
        ahead = await _fetch_objects(ctx, files, checkpoint, objects, options, meter)
        plan, requests = await _plan(ctx, files, checkpoint, found, values)
        await on_matched(checkpoint.identity)
        await meter.begin_reading(requests)
        with target_modified():
            fetched = ahead.joined_with(await fetch_values(ctx, files, checkpoint, plan, requests, meter=meter))
            prepare = functools.partial(
                prepare_apply, ctx, checkpoint, state, found, fetched, fills_missing=options.allow_missing
            )
            apply, filled = await run_blocking(ctx.executor, prepare)
            await files.close()  # inside of the block, because an error of it comes after tensors were filled
    asyncio.get_running_loop().call_later(_FREED_AFTER_SECS, _free, checkpoint)
    return LoadOutcome(
        step=checkpoint.step,
        extra=checkpoint.extra,
        missing=(*found.missing, *filled),
        mismatched=tuple(found.mismatched),
        unexpected=found.unexpected,
        dropped=found.dropped,
        untrusted=tuple(fetched.untrusted),
        bytes_read=fetched.bytes_read,
        verified=fetched.is_verified(verify=ctx.verify),
        identity=checkpoint.identity,
        apply=apply,
    )


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
        skips_mismatched=options.skip_mismatched,
    )


def _free(_: Checkpoint) -> None:
    """Drop the last reference to the checkpoint."""


async def _share_page_cache(ctx: ReadContext, files: Files, found: Match, catalog: Catalog) -> None:
    """Read through the page cache if other ranks of this host read the same bytes."""
    if ctx.ranks_on_host > 1:
        wanted = await run_blocking(ctx.executor, wanted_bytes, found, catalog)
        if is_read_by_several(wanted, catalog.nbytes, ranks_on_host=ctx.ranks_on_host):
            await files.share()


# -- the plan of the load ----------------------------------------------------------------------------


async def _fetch_objects(
    ctx: ReadContext, files: Files, checkpoint: Checkpoint, objects: Sequence[str], options: LoadOptions, meter: Meter
) -> FetchedValues:
    """Read the objects before a tensor is touched: one that is damaged or needs trust refuses the load.

    Raises:
        UnsafeObjectError, CorruptCheckpointError, ReadError: see :func:`load_checkpoint`.
    """
    if not objects:
        return FetchedValues(skip_untrusted=options.skip_untrusted)
    source = await locate(ctx, files, checkpoint, objects)
    plan = LoadPlan(source=source, skip_untrusted=options.skip_untrusted)
    await run_blocking(ctx.executor, plan.add_all, [], [], objects)
    requests = await run_blocking(ctx.executor, plan.reads.requests, ctx.readers)
    return await fetch_values(ctx, files, checkpoint, plan, requests, meter=meter)


async def _plan(
    ctx: ReadContext, files: Files, checkpoint: Checkpoint, found: Match, values: Sequence[str]
) -> tuple[LoadPlan, list[ReadRequest]]:
    """Return the plan of the tensors and its read requests. ``values``: names of tensors outside the template."""
    names = [*(target.name for target in found.tensors), *values]
    await files.measure({item.file for item, _, _ in found.whole}, checkpoint.catalog.files)
    source = await locate(ctx, files, checkpoint, names)
    _check_tied(checkpoint, found.tied, source.items)
    plan = LoadPlan(source=source, found=found)

    def requests() -> list[ReadRequest]:
        plan.reads.add_whole(found.whole)
        plan.add_all(found.tensors, values, [])
        return plan.reads.requests(ctx.readers)

    return plan, await run_blocking(ctx.executor, requests)


def _check_tied(checkpoint: Checkpoint, pairs: Iterable[tuple[str, str]], items: Mapping[str, Sequence[Item]]) -> None:
    """Check that the two values that plain DCP stores for one tensor of the template have the same checksums.

    Raises:
        TemplateMismatchError: the values differ, or have no checksums.
    """
    for before, later in pairs:
        one, other = ({item.offsets: _content(item) for item in items.get(name, ())} for name in (before, later))
        if one and one == other and all(item.record_crc32 is not None for item in items[later]):
            continue
        holds = "holds other values for it" if one != other else "has no checksums that tell whether their values agree"
        raise TemplateMismatchError(
            f"{checkpoint.path}: {later!r} shares memory with {before!r} in the template, and the checkpoint {holds}: "
            "give it memory of its own (.clone()), or leave it out"
        )


def _content(item: Item) -> tuple[object, ...]:
    return item.record_crc32, item.raw_bytes, item.storage_offset, item.stride, item.is_conj, item.is_neg


def _unplaced(found: Match, catalog: Catalog) -> tuple[list[str], list[str]]:
    """Return the names of the tensors that no leaf of the template has memory for, and of the objects."""
    groups = [*(target.leaf_names for target in found.stateful), *(place.names for place in found.open.values())]
    below = [name for names in groups for name in names if name not in found.kept]
    values = [*(array.name for array in found.arrays), *(name for name in below if name in catalog.shards)]
    return values, [*found.objects, *(name for name in below if name in catalog.objects)]
