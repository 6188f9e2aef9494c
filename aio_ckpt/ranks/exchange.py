"""Typed exchanges between the ranks of an engine, which end on all ranks if one fails."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from aio_ckpt.plan.shard_table import malformed
from aio_ckpt.ranks.coordinator import Coordinator
from aio_ckpt.ranks.messages import Topic

M = TypeVar("M")
R = TypeVar("R")


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
