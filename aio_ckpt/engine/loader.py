"""The stages of a load: :meth:`Loader._load` chooses the checkpoint, and :mod:`aio_ckpt.restore.load` has the others.

    load(template)
       |  loop thread: accept the call, choose the newest checkpoint, or the next older one if it is damaged
       v
    match ------------> fetch ---------> apply
    (manifests and      (each block      (objects set,
     objects are read;   proven)          load_state_dict called)
     nothing touched)

Several ranks wait for each other after *match* and after *fetch*: all load the same checkpoint, or none does.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import anyio

from aio_ckpt.argument_checks import check_one_of
from aio_ckpt.checkpoint.load_progress import Meter, metered
from aio_ckpt.checkpoint.read_context import ReadContext
from aio_ckpt.commit.discovery import CommittedCheckpoint
from aio_ckpt.commit.quarantine import Quarantine
from aio_ckpt.commit.step_numbers import check_step_number
from aio_ckpt.engine.context import EngineContext
from aio_ckpt.engine.earlier_run import EarlierRun
from aio_ckpt.engine.group_load import first_round, newest_good_for_all
from aio_ckpt.engine.newest_good import WantedCheckpoint, newest_good
from aio_ckpt.engine.outcome_log import log_load
from aio_ckpt.errors import AioCkptError, ConfigError
from aio_ckpt.match.options import LoadOptions
from aio_ckpt.message_texts import shown
from aio_ckpt.ranks.messages import Topic
from aio_ckpt.remote_path import check_place
from aio_ckpt.reports import LoadReport, OnProgress, ReadReport, SkippedCheckpoint
from aio_ckpt.restore.load import LoadOutcome, load_checkpoint, match_checkpoint
from aio_ckpt.restore.read_state import ReadOutcome, read_state
from aio_ckpt.runtime.futures import run_cancellable
from aio_ckpt.ticket import PendingCall

T = TypeVar("T")
BeforeLoad: TypeAlias = Callable[[], Awaitable[None]]
"""Waits for the pending calls that change what a load finds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """Runs a load, from the call to a filled template.

    :meth:`_load` accepts the call and searches. :mod:`aio_ckpt.restore.load` loads one checkpoint: match, fetch, apply.
    """

    ctx: EngineContext
    quarantine: Quarantine
    """Gets the checkpoints that were proven damaged."""
    earlier_run: EarlierRun
    """Is told that this run goes on from a step of the root."""

    async def load(self, state: object, options: LoadOptions, given_up: Future[None], before: BeforeLoad) -> LoadReport:
        """Fill ``state`` from the checkpoint that ``options`` name, until ``given_up`` is done.

        ``before`` is awaited first. However the load ends, no thread touches ``state`` afterwards.

        Raises:
            StepOrderError, ConfigError: bad input; nothing was touched. The other ranks are told.
            SaveCancelledError: the load was given up.
        """
        began = time.perf_counter()
        report = await run_cancellable(given_up, lambda: self._load(state, options, before))
        self._end(report, options.path, began)
        return report

    async def _load(self, state: object, options: LoadOptions, before: BeforeLoad) -> LoadReport:
        """Accept the call, search a checkpoint, read it, apply it."""
        ctx, quarantine = self.ctx, self.quarantine
        name, wanted = await self._accept(options, before)  # on all ranks, or on none
        async with metered(options.progress, ctx.executor) as meter:
            if ctx.members.are_several:  # no rank fetches before all have matched, nor applies before all have decoded
                match = self._with(functools.partial(match_checkpoint, state=state, options=options), meter)
                found = await newest_good_for_all(ctx, quarantine, name, wanted, match, fallback=options.fallback)
            else:
                load = self._with(functools.partial(load_checkpoint, state=state, options=options), meter)
                found = await newest_good(ctx, quarantine, wanted, load, fallback=options.fallback)
        chosen, skipped, loaded = found
        return load_report(chosen, skipped, loaded)

    async def read(
        self,
        wanted: WantedCheckpoint,
        only: Collection[str] | None,
        skip_untrusted: bool = False,
        with_report: bool = False,
        progress: OnProgress | None = None,
        *,
        before: BeforeLoad,
    ) -> Any:
        """Return the state of the checkpoint ``wanted``; with ``with_report``, (state, ReadReport)."""
        await before()
        ctx, began = self.ctx, time.perf_counter()
        async with metered(progress, ctx.executor) as meter:
            read = self._with(functools.partial(read_state, only=only, skip_untrusted=skip_untrusted), meter)
            chosen, skipped, outcome = await newest_good(ctx, self.quarantine, wanted, read, fallback=True)
        report = read_report(chosen, skipped, outcome)
        self._end(report, wanted.path, began)
        return (outcome.state, report) if with_report else outcome.state

    def _with(self, call: Callable[..., T], meter: Meter) -> Callable[[CommittedCheckpoint, bool], T]:
        """Return ``call``, which reads a checkpoint, as a function of the checkpoint that a search has found."""

        def use(candidate: CommittedCheckpoint, past_page_cache: bool) -> T:
            ctx = self.ctx
            reading = ReadContext(
                config=ctx.config,
                storage=ctx.storage,
                executor=ctx.executor,
                rank=ctx.rank,
                world_size=ctx.world_size,
                ranks_on_host=ctx.members.on_host,
                past_page_cache=past_page_cache,
                meter=meter,
            )
            return call(reading, candidate.path, step=candidate.expected_step)

        return use

    def _end(self, report: LoadReport | ReadReport, path: object, began: float) -> None:
        ctx = self.ctx
        log_load(report, time.perf_counter() - began, rank=ctx.rank, world_size=ctx.world_size)
        if path is None:
            self.earlier_run.go_on()

    async def _accept(self, options: LoadOptions, before: BeforeLoad) -> tuple[Topic, WantedCheckpoint]:
        """Return the name of the call, which is the same on every rank, and the checkpoint that it asks for."""
        members = self.ctx.members
        name = members.next_load()  # first: a call that only this rank refuses counts on all ranks
        try:
            wanted = wanted_checkpoint(options.step, options.path)
            options.check()
            await members.met()
            await members.coordinator.while_beating(before)  # the other ranks may be in the load already
        except BaseException as error:
            await members.abort(first_round(name), error, stage="load")
            raise
        return name, wanted


def load_report(
    chosen: CommittedCheckpoint, skipped: tuple[SkippedCheckpoint, ...], outcome: LoadOutcome
) -> LoadReport:
    """Return the report of a load from the checkpoint ``chosen``."""
    found = outcome.found
    return LoadReport(
        **_common_fields(chosen, skipped, outcome),
        missing=found.all_missing,
        unexpected=found.unexpected,
        dropped=found.dropped,
        mismatched=found.mismatched,
    )


def read_report(
    chosen: CommittedCheckpoint, skipped: tuple[SkippedCheckpoint, ...], outcome: ReadOutcome
) -> ReadReport:
    """Return the report of a read of the checkpoint ``chosen``."""
    return ReadReport(**_common_fields(chosen, skipped, outcome), plain=outcome.plain)


def _common_fields(
    chosen: CommittedCheckpoint, skipped: tuple[SkippedCheckpoint, ...], outcome: LoadOutcome | ReadOutcome
) -> dict[str, Any]:
    """Return the fields that both reports have: the checkpoint, and what was read of it."""
    checkpoint, fetched = outcome.checkpoint, outcome.fetched
    return {
        "step": checkpoint.step if chosen.is_given and checkpoint.step is not None else chosen.step,
        "path": chosen.path,
        "skipped": skipped,
        "untrusted": tuple(fetched.untrusted),
        "bytes_read": fetched.bytes_read,
        "verified": not fetched.has_unchecked,
        "extra": checkpoint.extra,
    }


def wanted_checkpoint(step: object, path: object) -> WantedCheckpoint:
    """Return the checkpoint that the arguments of a load ask for.

    Raises:
        ConfigError, StepOrderError: an argument is invalid, or both are given.
    """
    check_one_of(step, path)
    if path is None:
        return WantedCheckpoint(step=None if step is None else check_step_number(step))
    return WantedCheckpoint(path=check_place("path", path))


def selection(only: Any) -> list[str] | None:
    """Return the names given to ``read(only=)``, one or several; None for all.

    Raises:
        ConfigError: ``only`` holds a value that is no name.
    """
    if only is None:
        return None
    try:
        given = iter(only if isinstance(only, Iterable) and not isinstance(only, str) else [only])
    except TypeError:  # an array without dimensions counts as iterable and is not
        given = iter([only])
    names: list[str] = []
    for name in given:
        if not isinstance(name, str) or not name:  # checked one by one: the iterable may be endless
            raise ConfigError(f"only={shown(only)}: give the name of a leaf or branch, or several")
        names.append(name)
    return names


class PendingLoad(PendingCall[LoadReport]):
    """Load that has begun. If its wait is cancelled, the load ends early, and the wait ends with it.

    Ctrl-C cancels it, and so does what another handler of a signal raises, as ``sys.exit()`` in that of SIGTERM.
    """

    def __init__(self, portal_check: Callable[[str], None], work: Future[LoadReport], given_up: Future[None]) -> None:
        """``given_up`` ends ``work`` early once it is done."""
        super().__init__("load()", portal_check, work)
        self._given_up = given_up

    async def _wait_in_loop(self) -> None:
        """Wait. Further cancellations, as a cancel scope of anyio sends them again and again, do not end it early."""
        try:
            await super()._wait_in_loop()
        except asyncio.CancelledError:
            self._give_up()
            with anyio.CancelScope(shield=True):
                while not self.done():
                    with contextlib.suppress(asyncio.CancelledError):
                        await super()._wait_in_loop()
            raise

    def _wait(self, timeout: float | None) -> None:
        try:
            super()._wait(timeout)
        except AioCkptError:
            raise  # the wait was not allowed, or its time is over: the load goes on
        except BaseException:
            self._give_up()
            while not self.done():
                with contextlib.suppress(BaseException):
                    super()._wait(None)
            raise

    def _give_up(self) -> None:
        with contextlib.suppress(InvalidStateError):  # another wait was cancelled before
            self._given_up.set_result(None)
