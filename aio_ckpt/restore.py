"""Restore: choose the checkpoint, and walk back past those that do not verify."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from aio_ckpt import commit
from aio_ckpt.errors import AioCkptError, CheckpointNotFoundError, CorruptCheckpointError, ReadError
from aio_ckpt.items import LoadReport, SkippedCheckpoint
from aio_ckpt.pipeline import Site
from aio_ckpt.read import Checkpoint, load_checkpoint, open_checkpoint, read_state

__all__ = ["LoadOptions", "load_state", "read_tree"]

T = TypeVar("T")
_log = logging.getLogger("aio_ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How a load treats what does not match."""

    strict: bool
    """Refuse names of the checkpoint that the template lacks."""
    allow_missing: bool
    """Leave template names that the checkpoint lacks."""
    fallback: bool
    """Walk back past what does not verify."""


async def load_state(site: Site, state: object, step: int | None, options: LoadOptions) -> LoadReport:
    """Fill ``state`` from ``step``, or from the newest checkpoint that verifies."""

    async def fill(checkpoint: Checkpoint) -> LoadReport:
        outcome = await load_checkpoint(
            site.storage,
            checkpoint,
            state,
            rank=site.coordinator.rank,
            world_size=site.coordinator.world_size,
            executor=site.executor,
            readers=site.config.workers,
            verify=site.config.verify == "load",
            strict=options.strict,
            allow_missing=options.allow_missing,
            trusted=site.config.trusted_objects,
        )
        return LoadReport(
            step=0,
            path=checkpoint.path,
            missing=outcome.missing,
            unexpected=outcome.unexpected,
            bytes_read=outcome.bytes_read,
            verified=outcome.verified,
        )

    chosen, skipped, report = await _newest_good(site, step, fill, fallback=options.fallback)
    return LoadReport(
        step=chosen.step,
        path=chosen.path,
        skipped=skipped,
        missing=report.missing,
        unexpected=report.unexpected,
        bytes_read=report.bytes_read,
        verified=report.verified,
    )


async def read_tree(site: Site, step: int | None, only: Collection[str] | None) -> object:
    """The nested state of ``step``, or of the newest checkpoint that verifies."""

    async def read(checkpoint: Checkpoint) -> object:
        return await read_state(
            site.storage,
            checkpoint,
            only=only,
            rank=site.coordinator.rank,
            world_size=site.coordinator.world_size,
            executor=site.executor,
            readers=site.config.workers,
            verify=site.config.verify == "load",
            trusted=site.config.trusted_objects,
        )

    _, _, state = await _newest_good(site, step, read, fallback=True)
    return state


async def _newest_good(
    site: Site, step: int | None, use: Callable[[Checkpoint], Awaitable[T]], *, fallback: bool
) -> tuple[commit.Committed, tuple[SkippedCheckpoint, ...], T]:
    """Use the checkpoint of ``step``; with None the newest, walking back while ``use`` finds it corrupt.

    Only a proven mismatch walks back: an I/O error or a template that does not match is raised as it is. What a writer
    deleted or replaced meanwhile proves nothing: then the root is looked at anew.
    """
    was_modified = False
    for _ in range(commit.MAX_LOOKS):
        try:
            candidates = _candidates(await commit.discover(site.storage, site.root, site.names), step, site)
            return await _first_good(site, candidates, use, walks_back=step is None and fallback)
        except _ChangedError as error:
            was_modified = was_modified or error.target_modified
            _log.info("%s was deleted or replaced while it was read: looking again", error)
        except AioCkptError as error:
            error.target_modified = error.target_modified or was_modified
            raise
    failure = CheckpointNotFoundError(
        f"each of {commit.MAX_LOOKS} checkpoints under {site.root} was deleted or replaced by its writer while it was "
        "read: keep more of them (keep_last), or protect(step) one before it is read"
    )
    failure.target_modified = was_modified
    raise failure


class _ChangedError(AioCkptError):
    """The checkpoint was deleted or replaced while it was read."""


async def _first_good(
    site: Site,
    candidates: Sequence[commit.Committed],
    use: Callable[[Checkpoint], Awaitable[T]],
    *,
    walks_back: bool,
) -> tuple[commit.Committed, tuple[SkippedCheckpoint, ...], T]:
    skipped: list[SkippedCheckpoint] = []
    for candidate in candidates:
        try:
            checkpoint = await open_checkpoint(site.storage, candidate.path, executor=site.executor)
            _check_identity(checkpoint, candidate)
            value = await use(checkpoint)
        except (CorruptCheckpointError, CheckpointNotFoundError, ReadError) as error:
            if not await commit.is_unchanged(site.storage, candidate):
                changed = _ChangedError(str(candidate.path))
                changed.target_modified = error.target_modified
                raise changed from error
            if not (walks_back and isinstance(error, CorruptCheckpointError)):
                raise
            _log.error("step %d does not verify, trying an older one: %s", candidate.step, error)
            skipped.append(SkippedCheckpoint(step=candidate.step, path=candidate.path, error=error))
        else:
            return candidate, tuple(skipped), value
    found = "; ".join(f"step {entry.step}: {entry.error}" for entry in skipped)
    failure = CorruptCheckpointError(f"no checkpoint under {site.root} verifies: {found}")
    failure.target_modified = any(entry.error.target_modified for entry in skipped)
    raise failure


def _check_identity(checkpoint: Checkpoint, candidate: commit.Committed) -> None:
    if checkpoint.step not in (None, candidate.step):
        raise CorruptCheckpointError(
            f"{candidate.path}: holds step {checkpoint.step} by its manifest: the directory was renamed or swapped"
        )


def _candidates(committed: list[commit.Committed], step: int | None, site: Site) -> list[commit.Committed]:
    chosen = [checkpoint for checkpoint in reversed(committed) if step in (None, checkpoint.step)]
    if not chosen:
        steps = [checkpoint.step for checkpoint in committed]
        wanted = "no committed checkpoint" if step is None else f"no committed checkpoint of step {step}"
        is_older = step is not None and bool(steps) and step < steps[-1]
        hint = " (retention, keep_last, deletes older ones: protect(step) keeps one)" if is_older else ""
        raise CheckpointNotFoundError(f"{wanted} under {site.root}; committed steps: {steps}{hint}")
    return chosen
