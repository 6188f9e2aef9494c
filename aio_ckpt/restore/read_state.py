"""Read the nested state of a checkpoint without a template."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from aio_ckpt.checkpoint.open import Checkpoint
from aio_ckpt.checkpoint.rank_names import dropped_names, wanted_names
from aio_ckpt.checkpoint.read_context import ReadContext
from aio_ckpt.errors import MissingNameError
from aio_ckpt.leaves.values import UntrustedObject
from aio_ckpt.match.fills import Fills
from aio_ckpt.match.takers import Fetched
from aio_ckpt.restore.fetch_values import fetch_values
from aio_ckpt.restore.plan_fills import HostMemory, plan_fills
from aio_ckpt.runtime.portal import run_blocking
from aio_ckpt.state.build import build
from aio_ckpt.state.dcp_paths import unflatten_dcp
from aio_ckpt.state.names import listed

_log = logging.getLogger("aio_ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOutcome:
    """A state that was read without a template."""

    state: object
    plain: tuple[str, ...]
    """Containers that were read as a plain dict, list or tuple: ``name (type when saved)``."""
    checkpoint: Checkpoint
    fetched: Fetched


async def read_state(
    ctx: ReadContext,
    path: Path,
    *,
    step: int | None,
    only: Collection[str] | None,
    skip_untrusted: bool = False,
) -> ReadOutcome:
    """Return the nested state, or the part of it that ``only`` names, in new host memory. Tied names share a tensor.

    Raises:
        MissingNameError: one of ``only`` selects nothing, or a PerRank value of a rank that the checkpoint lacks.
        CorruptCheckpointError, UnsafeObjectError, ReadError: see :func:`aio_ckpt.restore.load.match_checkpoint`.
    """
    ctx.meter.restart()
    checkpoint = await ctx.open(path, step=step)
    names = await run_blocking(ctx.executor, stored_names, ctx, checkpoint, only)
    fetched = await read_leaves(ctx, checkpoint, names, skip_untrusted=skip_untrusted)
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
            f"{checkpoint.world_size} ranks that saved; leave it out with only=[...]"
        )
    if ctx.rank == 0 and only is None and (dropped := dropped_names(checkpoint, set(names), ctx.world_size)):
        _log.warning(
            "%s: %d ranks saved, and %d read: the PerRank values of the others are left out: %s",
            checkpoint.path,
            checkpoint.world_size,
            ctx.world_size,
            listed(dropped),
        )
    return names


def assemble(
    ctx: ReadContext, checkpoint: Checkpoint, fetched: Fetched, *, only: Collection[str] | None
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
            trusted=ctx.config.trusted_objects,
            plain=plain,
            untrusted=fetched.skipped,
        )
    else:
        state = unflatten_dcp(checkpoint.dcp_paths, values)
    return ReadOutcome(state=state, plain=tuple(plain), checkpoint=checkpoint, fetched=fetched)


async def read_leaves(
    ctx: ReadContext,
    checkpoint: Checkpoint,
    names: Sequence[str],
    *,
    skip_untrusted: bool = False,
    memory: HostMemory | None = None,
) -> Fetched:
    """Return the values of stored leaves by name, in new host memory. Tied names share a tensor.

    ``memory`` gives the memory of the tensors; None: torch's own.

    Raises:
        CorruptCheckpointError, UnsafeObjectError, ReadError: see :func:`aio_ckpt.restore.load.match_checkpoint`.
    """
    async with ctx.files(checkpoint.path) as files:
        fills = Fills()
        fills.add_new(checkpoint.catalog, names)
        plan = await plan_fills(ctx, files, checkpoint, fills, memory=memory)
        await ctx.meter.begin_reading(plan.requests)
        fetched = Fetched(skip_untrusted=skip_untrusted)
        await fetch_values(ctx, files, checkpoint, plan, fetched)
        return fetched
