"""Ranks: what the engine asks of the others, and the answer where there are none."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol, runtime_checkable

from aio_ckpt.errors import PeerFailedError
from aio_ckpt.ranks.messages import Decision

__all__ = ["Coordinator", "Decide", "SoloCoordinator"]

Decide = Callable[[tuple[bytes, ...]], Awaitable[Decision]]
"""The leader's: from the message of every rank, by rank."""


@runtime_checkable
class Coordinator(Protocol):
    """What the engine asks of the other ranks. Called on the engine's own thread only, but for ``close``."""

    rank: int
    """This rank, from 0."""
    world_size: int
    """Number of ranks that save together."""
    leader: int
    """The rank that commits."""

    def register(self, name: str, *, stall_secs: float) -> None:
        """First, on the thread that makes the engine: each rank's n-th that opens ``name`` meets the others' n-th.

        From :meth:`open` on a rank that gives no sign of life for ``stall_secs`` is taken for lost.
        """
        ...

    async def open(self, name: str, *, stall_secs: float) -> None:
        """Before all else: the ranks that open ``name`` meet under keys that no other engine has, or ever had.

        Raises:
            PeerFailedError: not all came in time.
        """
        ...

    async def gather(self, topic: str, message: bytes, *, stage: str) -> tuple[bytes, ...]:
        """Send this rank's message. On the leader: wait for all messages, by rank; elsewhere return () at once.

        An error, or a cancellation, is told to nobody: the caller calls :meth:`abort`.

        Raises:
            PeerFailedError: on the leader, a rank failed, or gives no sign of life; names it, its stage and the cause.
        """
        ...

    async def broadcast(self, topic: str, decision: Decision | None, *, stage: str) -> bytes:
        """What the leader tells this rank of ``topic``: there, by its ``decision``; elsewhere it is waited for.

        Raises:
            PeerFailedError: a rank failed, or the leader gives no sign of life.
        """
        ...

    async def exchange(self, topic: str, message: bytes, decide: Decide, *, stage: str) -> bytes:
        """:meth:`gather`, ``decide`` on the leader, :meth:`broadcast`. What the leader decided for this rank.

        Raises:
            PeerFailedError: a rank failed, or gives no sign of life; names it, its stage and the cause.
            Exception: on the leader, what ``decide`` raised; the others hear of it as PeerFailedError.
        """
        ...

    async def abort(self, topic: str, error: BaseException, *, stage: str) -> PeerFailedError | None:
        """This rank will not take part in ``topic``: the others' ``agree`` ends, now or when they come to it.

        Where the leader's word on it is out already, in what follows by that word. Returns what the leader has told of
        the failure; None if it does not say so in time, or had said the last word.
        """
        ...

    def begin_call(self, topic: str) -> None:
        """The numbered call that ``topic`` is part of begins here; from any thread."""
        ...

    def end_call(self, topic: str) -> None:
        """The numbered call that ``topic`` is part of has ended here: whoever waits for this rank in it is told so."""
        ...

    async def failure(self, topic: str) -> PeerFailedError | None:
        """What the leader has told of a failure in ``topic``; None if it has told nothing yet, or no failure."""
        ...

    async def raise_flag(self, name: str) -> None:
        """Let every rank know of ``name``, for good."""
        ...

    async def is_raised(self, name: str) -> bool:
        """Whether any rank has raised it."""
        ...

    async def beat(self) -> None:
        """Give a sign of life: this rank is on its way."""
        ...

    async def leave(self) -> None:
        """Before ``close``: nobody takes from the others what they still need. Takes seconds at most."""
        ...

    def close(self) -> None:
        """Let go of what ``open`` took. Idempotent, from any thread."""
        ...


class SoloCoordinator:
    """One process is all ranks."""

    rank = 0
    world_size = 1
    leader = 0

    def register(self, name: str, *, stall_secs: float) -> None:
        """Nobody to meet."""

    async def open(self, name: str, *, stall_secs: float) -> None:
        """Nobody to meet."""

    async def gather(self, topic: str, message: bytes, *, stage: str) -> tuple[bytes, ...]:
        """One message."""
        return (message,)

    async def broadcast(self, topic: str, decision: Decision | None, *, stage: str) -> bytes:
        """Nobody else to tell."""
        assert decision is not None, "the one rank leads"
        return decision.of(0)

    async def exchange(self, topic: str, message: bytes, decide: Decide, *, stage: str) -> bytes:
        """Decide alone."""
        messages = await self.gather(topic, message, stage=stage)
        return await self.broadcast(topic, await decide(messages), stage=stage)

    async def abort(self, topic: str, error: BaseException, *, stage: str) -> PeerFailedError | None:
        """Nobody to tell."""
        return None

    def begin_call(self, topic: str) -> None:
        """Nobody asks."""

    def end_call(self, topic: str) -> None:
        """Nobody waits."""

    async def failure(self, topic: str) -> PeerFailedError | None:
        """Nobody told anything."""
        return None

    async def raise_flag(self, name: str) -> None:
        """Nobody to see it."""

    async def is_raised(self, name: str) -> bool:
        """Nobody raised it."""
        return False

    async def beat(self) -> None:
        """Nobody to hear it."""

    async def leave(self) -> None:
        """Nobody needs anything."""

    def close(self) -> None:
        """Nothing was taken."""
