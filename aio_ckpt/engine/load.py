"""Restore: choose the checkpoint, and fall back past those that do not verify."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import anyio

from aio_ckpt.checks import check_flag, shown
from aio_ckpt.commit.publish import CommittedCheckpoint, check_step_number
from aio_ckpt.commit.quarantine import Quarantine
from aio_ckpt.engine.context import EngineContext
from aio_ckpt.engine.fallback import newest_good
from aio_ckpt.engine.group_load import newest_good_for_all, refuse_for_all
from aio_ckpt.errors import AioCkptError, ConfigError
from aio_ckpt.read.load import LoadOutcome, load_checkpoint, read_state
from aio_ckpt.read.match import OnMatched, at_once
from aio_ckpt.reports import LoadReport
from aio_ckpt.runtime.futures import unless_given_up
from aio_ckpt.runtime.portal import Executor, run_blocking

__all__ = ["LoadOptions", "Loader", "load_state", "read_tree", "selection"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How a load treats what does not match."""

    strict: bool
    """Refuse names of the checkpoint that the template lacks."""
    allow_missing: bool
    """Leave template names that the checkpoint lacks."""
    fallback: bool
    """Without a step: fall back past what does not verify."""

    def __post_init__(self) -> None:
        for name in ("strict", "allow_missing", "fallback"):
            check_flag(name, getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """What the loads of one engine share."""

    ctx: EngineContext
    """The engine's."""
    quarantine: Quarantine
    """Told of checkpoints that were proven damaged."""


async def load_state(
    loader: Loader, state: object, step: object, options: Mapping[str, bool], given_up: Future[None]
) -> LoadReport:
    """Fill ``state`` from ``step``, or from the newest checkpoint that verifies; no longer once ``given_up`` is done.

    ``options``: the fields of :class:`LoadOptions`. However it ends, no thread touches ``state`` any more: whoever gave
    up may fill it by other means.

    Raises:
        StepOrderError, ConfigError: bad input; nothing was touched. The other ranks are told.
    """
    return await unless_given_up(given_up, lambda: _load(loader, state, step, options))


async def _load(loader: Loader, state: object, step: object, options: Mapping[str, bool]) -> LoadReport:
    ctx, quarantine, members = loader.ctx, loader.quarantine, loader.ctx.members
    name = members.next_load()  # first: a call that is refused here alone still counts, as on the others
    try:
        wanted = None if step is None else check_step_number(step)
        checked = LoadOptions(**options)
        await members.met()
    except BaseException as error:
        await _refuse(ctx, name, error)
        raise
    fill = functools.partial(_fill, loader, state, checked)

    async def fill_and_put_back(candidate: CommittedCheckpoint, again: bool) -> _Filled:
        filled = await fill(candidate, again, at_once)
        await filled.put_back()
        return filled

    if members.are_several:
        chosen, skipped, filled = await newest_good_for_all(
            ctx, quarantine, name, wanted, fill, fallback=checked.fallback
        )
    else:
        chosen, skipped, filled = await newest_good(
            ctx, quarantine, wanted, fill_and_put_back, fallback=checked.fallback
        )
    return LoadReport(
        step=chosen.step,
        path=chosen.path,
        skipped=skipped,
        missing=filled.outcome.missing,
        unexpected=filled.outcome.unexpected,
        bytes_read=filled.outcome.bytes_read,
        verified=filled.outcome.verified,
    )


async def _refuse(ctx: EngineContext, name: str, error: BaseException) -> None:
    """Tell the other ranks, which meet this one first; if they never do, there is nobody to tell."""
    if not ctx.members.are_several:
        return
    with anyio.CancelScope(shield=True):
        with contextlib.suppress(AioCkptError):
            await ctx.members.met()
            await refuse_for_all(ctx, name, error)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Filled:
    """A template whose tensors were filled."""

    outcome: LoadOutcome
    """By what."""
    executor: Executor
    """Where objects are set."""

    @property
    def identity(self) -> str:
        """Of the checkpoint that was read."""
        return self.outcome.identity

    async def put_back(self) -> None:
        """Set the objects and call every ``load_state_dict``."""
        await run_blocking(self.executor, self.outcome.put_back)


async def _fill(
    loader: Loader,
    state: object,
    options: LoadOptions,
    candidate: CommittedCheckpoint,
    again: bool,
    on_matched: OnMatched,
) -> _Filled:
    ctx = loader.ctx
    outcome = await load_checkpoint(
        ctx.storage,
        candidate.path,
        state,
        step=candidate.step,
        rank=ctx.rank,
        world_size=ctx.world_size,
        ranks_on_host=ctx.members.on_host,
        executor=ctx.executor,
        readers=ctx.config.workers,
        may_share=not again,
        verify=ctx.config.verify == "load",
        strict=options.strict,
        allow_missing=options.allow_missing,
        trusted=ctx.config.trusted_objects,
        on_matched=on_matched,
    )
    return _Filled(outcome=outcome, executor=ctx.executor)


def selection(only: Any) -> list[str] | None:
    """The names given to ``read(only=)``, one or several; None: all.

    Raises:
        ConfigError: no names.
    """
    if only is None:
        return None
    try:
        given = iter(only if isinstance(only, Iterable) and not isinstance(only, str) else [only])
    except TypeError:  # of an array of no dimension, which says that it is iterable
        given = iter([only])
    names: list[str] = []
    for name in given:
        if not isinstance(name, str):  # at the first: there may be no last one
            raise ConfigError(f"only={shown(only)}: give the name of a leaf or branch, or several")
        names.append(name)
    return names


async def read_tree(loader: Loader, step: int | None, only: Collection[str] | None) -> object:
    """The nested state of ``step``, or of the newest checkpoint that verifies."""
    ctx = loader.ctx

    async def read(candidate: CommittedCheckpoint, _: bool) -> object:
        return await read_state(
            ctx.storage,
            candidate.path,
            step=candidate.step,
            only=only,
            rank=ctx.rank,
            world_size=ctx.world_size,
            executor=ctx.executor,
            readers=ctx.config.workers,
            verify=ctx.config.verify == "load",
            trusted=ctx.config.trusted_objects,
        )

    _, _, state = await newest_good(ctx, loader.quarantine, step, read, fallback=True)
    return state
