"""Search for a checkpoint that verifies, from the newest back. A checkpoint is read twice before it is passed by."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias, TypeVar

from aio_ckpt.commit import discovery
from aio_ckpt.commit.mirror_copies import counting_copies
from aio_ckpt.commit.quarantine import CorruptCandidate, Quarantine
from aio_ckpt.engine.context import EngineContext
from aio_ckpt.errors import (
    AioCkptError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FormatVersionError,
    MismatchError,
    ReadError,
    RootError,
)
from aio_ckpt.message_texts import command_line, steps_shown
from aio_ckpt.reports import SkippedCheckpoint
from aio_ckpt.runtime.error_notes import mark_modified, name_checkpoint
from aio_ckpt.runtime.waiting import disk_warning
from aio_ckpt.storage.local import names_in

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedCheckpoint:
    """The checkpoint that a call asks for: the newest that verifies, one step, or one directory."""

    step: int | None = None
    path: Path | None = None
    """Directory of a checkpoint, absolute, which may lie outside of the root; None if none is given."""

    @property
    def is_newest(self) -> bool:
        """Whether an older checkpoint may be used if the newest does not verify."""
        return self.step is None and self.path is None


Use: TypeAlias = Callable[[discovery.CommittedCheckpoint, bool], Awaitable[T]]
"""Reads a checkpoint. In the second reading (True) it goes past the page cache: a mismatch then is damage on the
disk."""
_log = logging.getLogger("aio_ckpt")


async def newest_good(
    ctx: EngineContext, quarantine: Quarantine, wanted: WantedCheckpoint, use: Use[T], *, fallback: bool
) -> tuple[discovery.CommittedCheckpoint, tuple[SkippedCheckpoint, ...], T]:
    """Call ``use`` with the checkpoint ``wanted``. If that is the newest, go back while ``use`` finds damage.

    Only damage and an unknown format make the search go back. An I/O error or a template that does not match is raised.
    If a writer deletes or replaces a checkpoint meanwhile, the search begins anew. Checkpoints that were proven damaged
    are set aside once an older one was read whole. If none can be read, nothing is moved: the fault may lie elsewhere,
    and a restart must not take the root for an empty one.
    """
    search = FallbackSearch(ctx=ctx, quarantine=quarantine)
    for _ in range(discovery.MAX_RETRIES):
        search.damaged.clear()
        try:
            for candidate in await candidates(ctx, wanted):
                try:
                    value = await search.read_twice(candidate, use)
                except (CorruptCheckpointError, FormatVersionError) as error:
                    if not (wanted.is_newest and fallback):
                        name_checkpoint(error, candidate.path)
                        raise
                else:
                    return candidate, await search.report_skipped(), value
        except ChangedError as error:
            _log.info("%s was deleted or replaced while it was read: looking again", error)
        except Exception as error:
            search.complete(error)
            raise
        else:
            raise search.failure()
    failure = too_many_changes(search.ctx.root)
    failure.target_modified = search.is_modified
    raise failure


def too_many_changes(root: Path) -> CheckpointNotFoundError:
    """Return the error to raise if a writer deletes checkpoints faster than this search reads them."""
    return CheckpointNotFoundError(
        f"each of {discovery.MAX_RETRIES} checkpoints under {root} was deleted or replaced by its writer while it "
        "was read: keep more of them (keep_last), or protect(step) one before it is read"
    )


class ChangedError(AioCkptError):
    """The checkpoint was deleted or replaced while it was read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """Result of reading a damaged checkpoint twice."""

    checkpoint: discovery.CommittedCheckpoint
    error: CorruptCheckpointError | FormatVersionError
    """Error of the second reading, or of the only one if the format is unknown."""
    is_proven: bool
    """Whether both readings found a mismatch."""


@dataclass(slots=True, kw_only=True)
class FallbackSearch:
    """State of a search from the newest checkpoint back."""

    ctx: EngineContext
    quarantine: Quarantine
    """Gets the checkpoints that were proven damaged."""
    damaged: list[Damage] = field(default_factory=list)
    """Checkpoints passed by so far, newest first."""
    is_modified: bool = False
    """Whether any reading has begun to fill the template."""

    async def read_twice(self, candidate: discovery.CommittedCheckpoint, use: Use[T]) -> T:
        """Call ``use`` with a checkpoint, and once more if it does not verify, because the transfer may have been bad.

        Raises:
            CorruptCheckpointError: neither reading verified. The checkpoint is added to ``damaged``.
            FormatVersionError: a newer torch or aio_ckpt wrote the checkpoint. It is added to ``damaged``, unproven.
            ChangedError: a writer has deleted or replaced the checkpoint.
        """
        try:
            return await self._read(candidate, use, past_page_cache=False)
        except FormatVersionError as error:
            self.damaged.append(Damage(checkpoint=candidate, error=error, is_proven=False))
            raise
        except CorruptCheckpointError as error:
            first = error
        _log.warning("%s does not verify, reading it once more: %s", candidate.title, first)
        try:
            return await self._read(candidate, use, past_page_cache=True)
        except CorruptCheckpointError as error:
            is_proven = isinstance(first, MismatchError) and isinstance(error, MismatchError)
            self.damaged.append(Damage(checkpoint=candidate, error=error, is_proven=is_proven))
            raise

    async def _read(self, candidate: discovery.CommittedCheckpoint, use: Use[T], *, past_page_cache: bool) -> T:
        try:
            value = await use(candidate, past_page_cache)
        except (CorruptCheckpointError, FormatVersionError, CheckpointNotFoundError, ReadError) as error:
            self.is_modified = self.is_modified or error.target_modified
            if not await discovery.is_unchanged(self.ctx.storage, candidate):
                raise ChangedError(str(candidate.path)) from error
            raise
        # If checksums are not verified, only this check finds a save that was replaced after its manifest was read.
        if self.ctx.config.verify == "never" and not await discovery.is_unchanged(self.ctx.storage, candidate):
            self.is_modified = True
            raise ChangedError(str(candidate.path))
        return value

    async def report_skipped(self) -> tuple[SkippedCheckpoint, ...]:
        """Log and return the checkpoints passed by, once an older one was good. Those proven damaged are set aside."""
        ctx = self.ctx
        proven = (
            CorruptCandidate(checkpoint=found.checkpoint, error=found.error)
            for found in self.damaged
            if found.is_proven
            and isinstance(found.error, CorruptCheckpointError)
            and found.checkpoint.path.parent != ctx.mirror  # its copies stay: the root may be copied anew
        )
        moved = await self.quarantine.add(ctx.storage, ctx.root, proven, ctx.config.stall_timeout_secs)
        for found in self.damaged:
            reason = "cannot be read here" if isinstance(found.error, FormatVersionError) else "does not verify"
            _log.error("skipped step %d, which %s: %s", found.checkpoint.step, reason, found.error)
        return tuple(
            SkippedCheckpoint(
                step=found.checkpoint.step,
                path=found.checkpoint.path,
                error=found.error.with_traceback(None),  # a report must not keep the frames and so the template alive
                quarantined=moved.get(found.checkpoint.path),
            )
            for found in self.damaged
        )

    def complete(self, error: Exception) -> None:
        """Note on ``error``, which ends the search, whether the template was touched, and the checkpoints passed by."""
        if self.is_modified:
            mark_modified(error)
        # An error about a checkpoint names it itself.
        if not isinstance(error, CorruptCheckpointError | FormatVersionError):
            for found in self.damaged:
                error.add_note(f"step {found.checkpoint.step} was tried before and does not verify: {found.error}")

    def failure(self) -> CorruptCheckpointError | FormatVersionError:
        """Return the error if no checkpoint is good: FormatVersionError if all of them have an unknown format."""
        text = nothing_verifies(self.ctx, [f"step {each.checkpoint.step}: {each.error}" for each in self.damaged])
        is_unknown = all(isinstance(found.error, FormatVersionError) for found in self.damaged)
        error = FormatVersionError(text) if is_unknown else CorruptCheckpointError(text)
        error.target_modified = self.is_modified
        return error


def nothing_verifies(ctx: EngineContext, faults: Sequence[str]) -> str:
    """Return the text of the error if no checkpoint is good. ``faults`` tell the damage of each."""
    return (
        f"no checkpoint under {ctx.root} verifies, and nothing was moved: {'; '.join(faults)}. "
        f"{command_line('verify', ctx.root, *ctx.names.option)} lists all that is damaged, and "
        "read(step, only=names) gives what is not"
    )


async def candidates(ctx: EngineContext, wanted: WantedCheckpoint) -> list[discovery.CommittedCheckpoint]:
    """Return the directory that is given, or the committed checkpoints, newest first.

    Checkpoints that have lost their ``.metadata`` are among them. If there is a mirror, its copies are, too, each after
    the checkpoint of the same step in the root.

    Raises:
        CheckpointNotFoundError: there is none.
        ReadError: the root holds none, and the mirror cannot be read.
    """
    if wanted.path is not None:
        return [await discovery.checkpoint_at(ctx.storage, wanted.path, ctx.names)]
    step = wanted.step
    with disk_warning("looking for checkpoints", ctx.root, rank=ctx.rank).on_loop():
        committed, torn, _ = await discovery.discover_all(ctx.storage, ctx.root, ctx.names)
    steps = [checkpoint.step for checkpoint in committed]
    chosen = [checkpoint for checkpoint in (*committed, *torn) if step in (None, checkpoint.step)]
    if step is None or not chosen:
        copies = await copies_or_none(ctx, is_needed=not chosen)
        chosen += [copy for copy in copies if step in (None, copy.step)]
    if not chosen:
        missing = "no committed checkpoint" if step is None else f"no committed checkpoint of step {step}"
        is_older = step is not None and bool(steps) and step < steps[0]
        hint = " (retention, keep_last, deletes older ones: protect(step) keeps one)" if is_older else ""
        if not steps:
            hint = await _why_empty(ctx)
        where = str(ctx.root) if ctx.mirror is None else f"{ctx.root}, nor in the mirror {ctx.mirror}"
        raise CheckpointNotFoundError(f"{missing} under {where}; committed steps: {steps_shown(steps)}{hint}")
    return sorted(chosen, key=lambda checkpoint: checkpoint.step, reverse=True)


async def copies_or_none(ctx: EngineContext, *, is_needed: bool) -> list[discovery.CommittedCheckpoint]:
    """Return the checkpoints of the mirror. If it cannot be read, and ``is_needed`` is False, return none."""
    if ctx.mirror is None:
        return []
    try:
        with disk_warning("looking for checkpoints", ctx.mirror, rank=ctx.rank).on_loop():
            return await counting_copies(ctx.storage, ctx.root, ctx.mirror, ctx.names)
    except (ReadError, RootError) as error:
        if is_needed:
            raise
        _log.warning("%s: the mirror cannot be read, and a newer step may be there: %s", ctx.mirror, error)
        return []


async def _why_empty(ctx: EngineContext) -> str:
    """Return why a root may hold no checkpoint, and the remedy; '' if the reason is unknown."""
    root, storage = ctx.root, ctx.storage
    if not await storage.exists(root):
        return " (the directory does not exist: check the path)"
    return "" if await names_in(storage, root) else " (the directory is empty: check the path)"
