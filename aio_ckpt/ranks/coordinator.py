"""Coordinator: what the engine asks of the other ranks, in bytes and typed, and the answer of a single rank."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import msgspec

from aio_ckpt.errors import PeerFailedError
from aio_ckpt.plan.shard_table import malformed
from aio_ckpt.ranks.messages import Decision

__all__ = ["Coordinator", "Decide", "Exchange", "SoloCoordinator"]

M = TypeVar("M")
R = TypeVar("R")

Decide = Callable[[tuple[bytes, ...]], Awaitable[Decision]]
"""Decides on the leader, from the messages of all ranks, by rank."""


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
        """Enter the rendezvous, first and on the thread that makes the engine.

        Each rank's n-th engine that opens ``name`` meets the n-th of the others. From :meth:`open` on, a rank that
        gives no sign of life for ``stall_secs`` is lost.
        """
        ...

    async def open(self, name: str, *, stall_secs: float) -> None:
        """Meet the other ranks that open ``name``, under keys that no other engine has, or ever had.

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
        """Return the leader's reply on ``topic`` to this rank. The leader passes its ``decision``, the others None.

        Raises:
            PeerFailedError: a rank failed, or the leader gives no sign of life.
        """
        ...

    async def exchange(self, topic: str, message: bytes, decide: Decide, *, stage: str) -> bytes:
        """Do :meth:`gather`, ``decide`` on the leader, and :meth:`broadcast`.

        Raises:
            PeerFailedError: a rank failed, or gives no sign of life; names it, its stage and the cause.
            Exception: on the leader, what ``decide`` raised; the others hear of it as PeerFailedError.
        """
        ...

    async def abort(self, topic: str, error: BaseException, *, stage: str) -> PeerFailedError | None:
        """Tell the others that this rank takes no part in ``topic``: their exchange fails, now or when they come to it.

        If the leader has already decided this topic, abort the follow-up topic that the decision names. Returns the
        failure that the leader has told all ranks; None if it does not answer in time, or its last reply was out.
        """
        ...

    def begin_call(self, topic: str) -> None:
        """Note that the numbered call of ``topic`` begins on this rank; from any thread."""
        ...

    def end_call(self, topic: str) -> None:
        """Note that the numbered call of ``topic`` has ended on this rank: heartbeats tell it to waiting ranks."""
        ...

    async def failure(self, topic: str) -> PeerFailedError | None:
        """Return the failure that the leader has told in ``topic``; None if it has told nothing yet, or no failure."""
        ...

    async def raise_flag(self, name: str) -> None:
        """Set the flag ``name`` for all ranks, for good."""
        ...

    async def is_raised(self, name: str) -> bool:
        """Return whether any rank has raised it."""
        ...

    async def beat(self) -> None:
        """Write a heartbeat."""
        ...

    async def leave(self) -> None:
        """Leave before ``close``, without deleting what other ranks still need. Takes seconds at most."""
        ...

    def close(self) -> None:
        """Release what ``open`` took. Idempotent, from any thread."""
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


class Exchange(Generic[M, R]):
    """One kind of exchange: every rank sends an ``M``, the leader decides, every rank gets an ``R``.

    Made at import, once for each kind: msgspec crashes if two threads decode a type that is new to it at the same time.
    """

    def __init__(self, message: Any, reply: Any, *, stage: str) -> None:
        """``message`` and ``reply`` are the types ``M`` and ``R``; ``stage`` is where a rank is that fails in it."""
        self._messages: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(message)
        self._replies: msgspec.msgpack.Decoder[R] = msgspec.msgpack.Decoder(reply)
        self._stage = stage

    async def run(
        self, coordinator: Coordinator, topic: str, mine: M, decide: Callable[[Sequence[M]], Awaitable[R]]
    ) -> R:
        """Send ``mine``; return what ``decide`` made on the leader of the messages of all ranks, by rank.

        Raises:
            PeerFailedError: a rank failed, gives no sign of life, or sent what is no ``M``.
            Exception: on the leader, what ``decide`` raised; the others hear of it as PeerFailedError.
        """

        async def decided(messages: tuple[bytes, ...]) -> Decision:
            return Decision(common=msgspec.msgpack.encode(await decide(self._of_all(messages))))

        reply = await coordinator.exchange(topic, msgspec.msgpack.encode(mine), decided, stage=self._stage)
        return self.reply(reply, leader=coordinator.leader)

    async def gather(self, coordinator: Coordinator, topic: str, mine: M) -> tuple[M, ...]:
        """The first half of :meth:`run`: on the leader, the messages of all ranks, by rank; elsewhere nothing.

        An error is told to nobody: the caller calls :meth:`Coordinator.abort`.
        """
        return self._of_all(await coordinator.gather(topic, msgspec.msgpack.encode(mine), stage=self._stage))

    async def broadcast(self, coordinator: Coordinator, topic: str, reply: R) -> R:
        """The second half of :meth:`run`: return the leader's ``reply``; what the others pass is not looked at."""
        return await self._broadcast(coordinator, topic, Decision(common=msgspec.msgpack.encode(reply)))

    async def broadcast_each(self, coordinator: Coordinator, topic: str, replies: Sequence[R], *, then: str) -> R:
        """As :meth:`broadcast`, with one reply for each rank; every rank goes on in the topic ``then``."""
        return await self._broadcast(coordinator, topic, Decision(each=_each(replies), then=then))

    async def _broadcast(self, coordinator: Coordinator, topic: str, decision: Decision) -> R:
        is_leader = coordinator.rank == coordinator.leader
        reply = await coordinator.broadcast(topic, decision if is_leader else None, stage=self._stage)
        return self.reply(reply, leader=coordinator.leader)

    def message(self, data: bytes, *, rank: int) -> M:
        """What ``rank`` sent."""
        return _decoded(self._messages, rank, data)

    def reply(self, data: bytes, *, leader: int) -> R:
        """What the leader replied."""
        return _decoded(self._replies, leader, data)

    def _of_all(self, messages: Sequence[bytes]) -> tuple[M, ...]:
        return tuple(self.message(data, rank=rank) for rank, data in enumerate(messages))


def _each(values: Sequence[object]) -> tuple[bytes, ...]:
    return tuple(msgspec.msgpack.encode(value) for value in values)


def _decoded(decoder: msgspec.msgpack.Decoder[M], rank: int, data: bytes) -> M:
    try:
        return decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise malformed(rank, error) from error
