"""Restore: choose the checkpoint, and walk back past those that do not verify."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from aio_ckpt.commit import Committed
from aio_ckpt.config import check_flag
from aio_ckpt.errors import (
    ConfigError,
    shown,
)
from aio_ckpt.items import LoadReport
from aio_ckpt.joint import newest_good_for_all
from aio_ckpt.pending import Site
from aio_ckpt.progress import unless_given_up
from aio_ckpt.read import load_checkpoint, read_state
from aio_ckpt.walk import newest_good

__all__ = ["LoadOptions", "load_state", "read_tree", "selection"]

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
    """Without a step: walk back past what does not verify."""

    def __post_init__(self) -> None:
        for name in ("strict", "allow_missing", "fallback"):
            check_flag(name, getattr(self, name))


async def load_state(
    site: Site, state: object, step: int | None, options: LoadOptions, given_up: Future[None]
) -> LoadReport:
    """Fill ``state`` from ``step``, or from the newest checkpoint that verifies; no longer once ``given_up`` is done.

    However it ends, no thread touches ``state`` any more: whoever gave up may fill it by other means.
    """
    return await unless_given_up(given_up, lambda: _load(site, state, step, options))


async def _load(site: Site, state: object, step: int | None, options: LoadOptions) -> LoadReport:
    async def fill(candidate: Committed) -> LoadReport:
        outcome = await load_checkpoint(
            site.storage,
            candidate.path,
            state,
            step=candidate.step,
            rank=site.peers.coordinator.rank,
            world_size=site.peers.coordinator.world_size,
            executor=site.executor,
            readers=site.config.workers,
            verify=site.config.verify == "load",
            strict=options.strict,
            allow_missing=options.allow_missing,
            trusted=site.config.trusted_objects,
        )
        return LoadReport(
            step=0,
            path=candidate.path,
            missing=outcome.missing,
            unexpected=outcome.unexpected,
            bytes_read=outcome.bytes_read,
            verified=outcome.verified,
        )

    await site.peers.met()
    walk = newest_good_for_all if site.peers.are_several else newest_good
    chosen, skipped, report = await walk(site, step, fill, fallback=options.fallback)
    return LoadReport(
        step=chosen.step,
        path=chosen.path,
        skipped=skipped,
        missing=report.missing,
        unexpected=report.unexpected,
        bytes_read=report.bytes_read,
        verified=report.verified,
    )


def selection(only: Any) -> list[str] | None:
    """The names given to ``read(only=)``, one or several; None: all.

    Raises:
        ConfigError: no names.
    """
    if only is None:
        return None
    names: list[str] = []
    for name in [only] if isinstance(only, str) or not isinstance(only, Iterable) else only:
        if not isinstance(name, str):  # at the first: there may be no last one
            raise ConfigError(f"only={shown(only)}: give the name of a leaf or branch, or several")
        names.append(name)
    return names


async def read_tree(site: Site, step: int | None, only: Collection[str] | None) -> object:
    """The nested state of ``step``, or of the newest checkpoint that verifies."""

    async def read(candidate: Committed) -> object:
        return await read_state(
            site.storage,
            candidate.path,
            step=candidate.step,
            only=only,
            rank=site.peers.coordinator.rank,
            world_size=site.peers.coordinator.world_size,
            executor=site.executor,
            readers=site.config.workers,
            verify=site.config.verify == "load",
            trusted=site.config.trusted_objects,
        )

    _, _, state = await newest_good(site, step, read, fallback=True)
    return state
