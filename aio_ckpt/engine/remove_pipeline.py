"""Removal of checkpoints by path, in one order with the commits: :meth:`RemovePipeline.run` shows all of it."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import anyio

from aio_ckpt.commit import path_checkpoints
from aio_ckpt.commit.root_claim import Claim
from aio_ckpt.commit.trash import Trash
from aio_ckpt.engine.context import EngineContext
from aio_ckpt.engine.job import RemoveJob, sent_path
from aio_ckpt.errors import PeerFailedError, StallError
from aio_ckpt.ranks.exchange import Exchange
from aio_ckpt.ranks.messages import Topic
from aio_ckpt.reports import title
from aio_ckpt.runtime.error_notes import named
from aio_ckpt.runtime.futures import follow
from aio_ckpt.ticket import SaveTicket

_STAGE = "remove"
_Message: TypeAlias = tuple[str, str]
"""(path, why a save before the call failed; '' if none did)."""
_REMOVE: Exchange[_Message, _Message] = Exchange(tuple[str, str], tuple[str, str], stage=_STAGE)
"""A rank sends its path and its failure. The leader removes, and replies with the first failure of any rank."""
_log = logging.getLogger("aio_ckpt")


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovePipeline:
    """Runs removals on the loop."""

    ctx: EngineContext
    claim: Claim
    renames: anyio.Lock
    """Orders all renames under the root."""
    trash: Trash

    async def run(self, job: RemoveJob) -> None:
        """Wait for the saves before, agree, rename to trash, then delete the files."""
        failed = await _first_failed(job.tickets)
        moved, why = await self._agree(job, "" if failed is None else _text_of(failed))
        if why:
            _log.warning("remove(%s): dropped, and the checkpoint stays: %s", job.path, why)
            dropped = PeerFailedError(f"remove({job.path}) was dropped: {why}", rank=0, stage=_STAGE, cause=why)
            job.done.fail((None if failed is None else failed.committed.peek()) or dropped)
            return
        job.freed.set_result(None)
        for trash in moved:
            await self.trash.delete(trash, limit_secs=math.inf)

    async def _agree(self, job: RemoveJob, failure: str) -> tuple[list[Path], str]:
        """Remove the checkpoint on the leader, if no rank has a failure. Returns the trash, and the first failure."""
        members, topic, moved = self.ctx.members, Topic("remove", job.number), list[Path]()

        async def act(messages: Sequence[_Message]) -> _Message:
            why = _first_failure_of(messages)
            if not why:
                moved.append(await self._move_to_trash(job))
            return messages[0][0], why

        _, why = await _REMOVE.run(members.coordinator, topic, (sent_path(job.path, self.ctx.root), failure), act)
        members.coordinator.end_call(topic)
        return moved, why

    async def _move_to_trash(self, job: RemoveJob) -> Path:
        ctx, limit_secs = self.ctx, self.ctx.config.stall_timeout_secs
        name = f"removed-{ctx.save_id(job.number)}"
        async with self.renames:
            with anyio.move_on_after(limit_secs, shield=True):  # a rename that has begun is completed
                check = self.claim.check
                return await path_checkpoints.move_to_trash(
                    ctx.storage, job.path, ctx.root, ctx.names, check, name=name
                )
        raise StallError(f"remove({job.path}) did not end within {limit_secs} s: the disk is stalled")


async def _first_failed(tickets: Sequence[SaveTicket]) -> SaveTicket | None:
    """Wait for the saves. Return the first ticket of one that failed; None if all are committed."""
    for ticket in tickets:
        await asyncio.wrap_future(follow(ticket.committed))
        if ticket.committed.peek() is not None:
            return ticket
    return None


def _text_of(failed: SaveTicket) -> str:
    error = failed.committed.peek()
    assert error is not None
    return f"the save of {title(failed.path or failed.step)}, which came before, failed: {named(error)}"


def _first_failure_of(messages: Sequence[_Message]) -> str:
    """Return the first failure of any rank; '' if there is none.

    Raises:
        PeerFailedError: the ranks remove different paths.
    """
    for rank, (path, _) in enumerate(messages):
        if path != messages[0][0]:
            text = f"rank {rank} removes {path} where rank 0 removes {messages[0][0]}"
            raise PeerFailedError(f"{text}: give the same path on every rank", rank=rank, stage="agree")
    return next((failure for _, failure in messages if failure), "")
