"""Typed exchanges between the ranks of an engine, which end on all ranks if one fails, and what they are sent over."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import anyio
import msgspec

from aio_ckpt.errors import PeerFailedError
from aio_ckpt.plan.shard_table import malformed
from aio_ckpt.ranks.messages import Topic

M = TypeVar("M")
R = TypeVar("R")
T = TypeVar("T")


class CallEnd(NamedTuple):
    """How a call that this rank has ended by an error ends on all ranks."""

    failure: PeerFailedError | None = None
    """Failure by which the leader ends the call on all ranks. None if it has replied before, or does not answer."""
    is_earlier: bool = False
    """Whether that failure came before the error of this rank."""


class Coordinator:
    """Interface by which the ranks of an engine agree. These methods serve one rank alone: they return at once.

    If a method does not say otherwise, only the engine's own thread calls it.
    """

    rank: int = 0
    """This rank, from 0."""
    world_size: int = 1
    """Number of ranks that save together."""
    leader: int = 0
    """The rank that commits."""

    def register(self, name: str, *, stall_secs: float) -> None:
        """Enter the rendezvous. The thread that makes the engine calls this, before any other method.

        The n-th engine of one rank meets the n-th of every other rank, whatever ``name`` is there: hosts may mount one
        directory at different places. ``name`` stands in errors. From :meth:`open` on, a rank without a heartbeat for
        ``stall_secs`` is lost.
        """

    async def open(self, name: str, *, stall_secs: float) -> None:
        """Meet the other ranks, under keys that no other engine uses or has used.

        Raises:
            PeerFailedError: a rank did not come in time.
        """

    async def gather(self, topic: Topic, message: bytes, *, stage: str) -> tuple[bytes, ...]:
        """Send this rank's message. The leader waits for all messages, by rank; another rank returns () at once.

        If this call or :meth:`broadcast` fails or is cancelled, the caller calls :meth:`abort`.

        Raises:
            PeerFailedError: on the leader, a rank failed or gives no heartbeat; names rank, stage and cause.
        """
        return (message,)

    async def broadcast(
        self, topic: Topic, replies: Sequence[bytes], *, stage: str, then: Topic | None = None
    ) -> bytes:
        """Return the leader's reply on ``topic`` to this rank.

        The leader passes one reply for all ranks, or one for each, by rank. Every rank goes on in ``then``. What other
        ranks pass is ignored.

        Raises:
            PeerFailedError: a rank failed, or the leader gives no heartbeat.
        """
        return replies[0]

    async def abort(
        self, topic: Topic, error: BaseException, *, stage: str, limit_secs: float | None = None
    ) -> CallEnd:
        """End the call of ``topic`` on this rank by ``error``: the exchange of the other ranks fails now or later.

        If the leader has already decided this topic, abort the follow-up topic that the decision names. The other ranks
        are told at once. Then this rank waits for the leader's answer, shielded, while the leader lives, but for
        ``limit_secs`` at most; None: the time between two heartbeats. If the store fails, a note on ``error`` says so.
        """
        return CallEnd()

    def begin_call(self, topic: Topic, *, step: int | None = None) -> None:
        """Note that the numbered call of ``topic`` begins on this rank, and again once its ``step`` is known.

        Any thread may call this. The step is for messages only.
        """

    def end_call(self, topic: Topic) -> None:
        """Note that the numbered call of ``topic`` has ended on this rank. Heartbeats tell the ranks that wait."""

    async def raise_flag(self, name: str) -> None:
        """Set the flag ``name`` for all ranks. A rank that does not lead wakes the leader, which raises it, too."""

    async def flag(self, name: str) -> None:
        """Return once any rank has raised the flag ``name``. Nothing is asked again and again meanwhile.

        Raises:
            PeerFailedError: the store is gone.
        """
        await anyio.sleep_forever()

    async def lower_flag(self, name: str) -> None:
        """Delete the flag ``name``. The leader calls this once no rank waits for it or raises it any more."""

    async def beat(self) -> None:
        """Write a heartbeat."""

    async def while_beating(self, work: Callable[[], Awaitable[T]]) -> T:
        """Return the result of ``work``; meanwhile send heartbeats to the other ranks."""
        return await work()

    async def leave(self) -> None:
        """Leave the group, before ``close``. Keys that other ranks still need stay. Takes seconds at most."""

    def close(self) -> None:
        """Release the thread and the connection. Idempotent; any thread may call this."""


class SoloCoordinator(Coordinator):
    """Coordinator of one process without other ranks."""


class Exchange(Generic[M, R]):
    """One kind of exchange: every rank sends an ``M``, the leader decides, every rank gets an ``R``.

    Made at import, once for each kind: msgspec crashes if two threads decode a type that is new to it at the same time.
    """

    def __init__(self, message: Any, reply: Any, *, stage: str) -> None:
        """``message`` and ``reply`` are the types ``M`` and ``R``; errors name ``stage``."""
        self.messages: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(message)
        self.replies: msgspec.msgpack.Decoder[R] = msgspec.msgpack.Decoder(reply)
        self._stage = stage

    async def run(
        self,
        coordinator: Coordinator,
        topic: Topic,
        mine: M,
        act: Callable[[Sequence[M]], Awaitable[R]],
        *,
        then: Topic | None = None,
    ) -> R:
        """Send ``mine``; return the result of ``act``, which the leader calls with all messages, by rank.

        The leader sends heartbeats while it acts. However this call ends on a rank, no other rank waits for it: neither
        in ``topic`` nor in ``then``, in which every rank goes on.

        Raises:
            PeerFailedError: a rank failed, gives no heartbeat, or sent a message that is no ``M``.
            Exception: on the leader, any error of ``act``; the other ranks get a PeerFailedError.
        """
        try:
            messages = await self.gather(coordinator, topic, mine)
            replies: Sequence[R] = ()
            if coordinator.rank == coordinator.leader:
                replies = [await coordinator.while_beating(functools.partial(act, messages))]
            return await self.broadcast(coordinator, topic, replies, then=then)
        except BaseException as error:
            end = await coordinator.abort(topic, error, stage=self._stage)
            if end.failure is None and then is not None:  # some ranks may have the leader's reply
                await coordinator.abort(then, error, stage=self._stage)
            raise

    async def gather(self, coordinator: Coordinator, topic: Topic, mine: M) -> tuple[M, ...]:
        """Do the first half of :meth:`run`. The leader gets the messages of all ranks, by rank; another rank gets ().

        If this call or :meth:`broadcast` fails, the caller calls :meth:`Coordinator.abort`.
        """
        messages = await coordinator.gather(topic, msgspec.msgpack.encode(mine), stage=self._stage)
        return tuple(_decoded(self.messages, rank, data) for rank, data in enumerate(messages))

    async def broadcast(
        self, coordinator: Coordinator, topic: Topic, replies: Sequence[R], *, then: Topic | None = None
    ) -> R:
        """Do the second half of :meth:`run`: return the leader's reply to this rank.

        ``replies`` are as in :meth:`Coordinator.broadcast`.
        """
        encoded = [*map(msgspec.msgpack.encode, replies)]
        reply = await coordinator.broadcast(topic, encoded, stage=self._stage, then=then)
        return _decoded(self.replies, coordinator.leader, reply)


def _decoded(decoder: msgspec.msgpack.Decoder[M], rank: int, data: bytes) -> M:
    try:
        return decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise malformed(rank, error) from error
