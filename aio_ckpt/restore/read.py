"""Read the nested state of a checkpoint without a template."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aio_ckpt.checkpoint.open import Checkpoint, open_checkpoint
from aio_ckpt.checkpoint.rank_names import dropped_names, listed, wanted_names
from aio_ckpt.errors import MissingNameError
from aio_ckpt.leaves.values import UntrustedObject
from aio_ckpt.restore.fetch_values import FetchedValues, fetch_values
from aio_ckpt.restore.load_plan import HostMemory, LoadPlan, locate
from aio_ckpt.restore.options import ReadContext
from aio_ckpt.restore.progress import NO_METER, Meter
from aio_ckpt.runtime.portal import run_blocking
from aio_ckpt.state.build import build
from aio_ckpt.state.dcp_paths import unflatten_dcp

_log = logging.getLogger("aio_ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOutcome:
    """A state that was read without a template."""

    state: object
    """The nested state."""
    step: int | None
    """Step that the checkpoint tells; None for plain DCP."""
    extra: Mapping[str, Any]
    """JSON values that are stored with the step."""
    untrusted: tuple[str, ...]
    """Names of the objects that an ``UntrustedObject`` replaces."""
    plain: tuple[str, ...]
    """Containers that were read as a plain dict, list or tuple: ``name (type when saved)``."""
    bytes_read: int
    """Bytes read from data files."""
    verified: bool
    """Whether all that was read was compared with checksums; False if ``verify`` is off, or if a part has none."""


async def read_state(
    ctx: ReadContext,
    path: Path,
    *,
    step: int | None,
    only: Collection[str] | None,
    skip_untrusted: bool = False,
    past_page_cache: bool = False,
    meter: Meter = NO_METER,
) -> ReadOutcome:
    """Return the nested state, or the part of it that ``only`` names, in new host memory. Tied names share a tensor.

    ``meter`` counts the bytes that are read.

    Raises:
        MissingNameError: one of ``only`` selects nothing, or a PerRank value of a rank that the checkpoint lacks.
        CorruptCheckpointError, UnsafeObjectError, ReadError: see :func:`aio_ckpt.restore.load.load_checkpoint`.
    """
    meter.restart()
    checkpoint = await open_checkpoint(ctx.storage, path, executor=ctx.executor, step=step)
    checkpoint = await run_blocking(ctx.executor, ctx.as_one_state, checkpoint)
    names = await run_blocking(ctx.executor, stored_names, ctx, checkpoint, only)
    fetched = await read_leaves(
        ctx, checkpoint, names, skip_untrusted=skip_untrusted, past_page_cache=past_page_cache, meter=meter
    )
    return assemble(ctx, checkpoint, fetched, only=only)


def stored_names(ctx: ReadContext, checkpoint: Checkpoint, only: Collection[str] | None) -> list[str]:
    """Return the names of the leaves of a rank's state, or of the part of it that ``only`` names.

    Rank 0 warns of ``PerRank`` values of ranks that do not read.

    Raises:
        MissingNameError: see :func:`read_state`.
    """
    names = wanted_names(checkpoint, rank=ctx.rank, only=only)
    absent = [name for name in names if not checkpoint.holds(name)]
    if absent:
        raise MissingNameError(
            f"{checkpoint.path}: rank {ctx.rank} of {ctx.world_size} has no {absent[:5]} among the "
            f"{len(checkpoint.ranks)} ranks that saved; leave it out with only=[...]"
        )
    if ctx.rank == 0 and only is None and (dropped := dropped_names(checkpoint, set(names), ctx.world_size)):
        _log.warning(
            "%s: %d ranks saved, and %d read: the PerRank values of the others are left out: %s",
            checkpoint.path,
            len(checkpoint.ranks),
            ctx.world_size,
            listed(dropped),
        )
    return names


def assemble(
    ctx: ReadContext, checkpoint: Checkpoint, fetched: FetchedValues, *, only: Collection[str] | None
) -> ReadOutcome:
    """Return the nested state of the values that were read: those of all names of :func:`stored_names`."""
    values = fetched.values | {name: UntrustedObject(name, reason) for name, reason in fetched.untrusted.items()}
    plain: list[str] = []
    if checkpoint.has_skeleton:
        state = build(
            checkpoint.skeleton(ctx.rank),
            values,
            rank=ctx.rank,
            only=only,
            trusted=ctx.trusted,
            plain=plain,
            untrusted=fetched.skipped,
        )
    else:
        state = unflatten_dcp(checkpoint.dcp_paths, values)
    return ReadOutcome(
        state=state,
        step=checkpoint.step,
        extra=checkpoint.extra,
        untrusted=tuple(fetched.untrusted),
        plain=tuple(plain),
        bytes_read=fetched.bytes_read,
        verified=fetched.is_verified(verify=ctx.verify),
    )


async def read_leaves(
    ctx: ReadContext,
    checkpoint: Checkpoint,
    names: Sequence[str],
    *,
    skip_untrusted: bool = False,
    past_page_cache: bool = False,
    meter: Meter = NO_METER,
    memory: HostMemory | None = None,
) -> FetchedValues:
    """Return the values of stored leaves by name, in new host memory. Tied names share a tensor.

    ``memory`` gives the memory of the tensors; None: torch's own.

    Raises:
        CorruptCheckpointError, UnsafeObjectError, ReadError: see :func:`aio_ckpt.restore.load.load_checkpoint`.
    """
    objects = [name for name in names if name in checkpoint.catalog.objects]
    tensors = [name for name in names if name in checkpoint.catalog.shards]
    async with ctx.files(checkpoint.path, past_page_cache=past_page_cache) as files:
        source = await locate(ctx, files, checkpoint, names)
        plan = LoadPlan(source=source, skip_untrusted=skip_untrusted, memory=memory)
        await run_blocking(ctx.executor, plan.add_all, [], tensors, objects)
        requests = await run_blocking(ctx.executor, plan.reads.requests, ctx.readers)
        await meter.begin_reading(requests)
        return await fetch_values(ctx, files, checkpoint, plan, requests, meter=meter)
