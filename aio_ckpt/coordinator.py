"""Coordinator: agreement between the ranks of one engine. One process needs none: :class:`SoloCoordinator`."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

__all__ = ["Coordinator", "SoloCoordinator"]


@runtime_checkable
class Coordinator(Protocol):
    """What the engine asks of the other ranks. Called on the engine's own thread only."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        ...

    @property
    def world_size(self) -> int:
        """Number of ranks that save together."""
        ...

    @property
    def leader(self) -> int:
        """The rank that commits."""
        ...

    async def exchange(self, topic: str, message: bytes, *, timeout_secs: float) -> tuple[bytes, ...]:
        """Give every rank the message of every rank, by rank.

        Raises:
            PeerFailedError: a rank failed or is missing; names it, the stage and the cause.
        """
        ...


class SoloCoordinator:
    """One process is all ranks."""

    rank = 0
    world_size = 1
    leader = 0

    async def exchange(self, topic: str, message: bytes, *, timeout_secs: float) -> tuple[bytes, ...]:
        """Return the message."""
        return (message,)
