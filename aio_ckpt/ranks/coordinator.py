"""Coordinator: how the ranks of an engine exchange messages; typed exchanges, which end on all ranks if one fails."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import anyio
import msgspec

from aio_ckpt.errors import PeerFailedError
from aio_ckpt.plan.shard_table import malformed
from aio_ckpt.ranks.messages import Decision, Topic

M = TypeVar("M")
R = TypeVar("R")
T = TypeVar("T")


class Told(NamedTuple):
    """What all ranks are told of a call that this rank has ended by an error."""

    failure: PeerFailedError | None = None
    """Failure that the leader has told all ranks. None if it does not answer in time, or its last reply was none."""
    is_earlier: bool = False
    """Whether the leader had told it before this rank ended the call."""


class Coordinator:
    """How the ranks of an engine agree. This class serves one rank alone: every method returns at once.

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

        The n-th engine that opens ``name`` on one rank meets the n-th on every other rank. From :meth:`open` on, a
        rank without a heartbeat for ``stall_secs`` is lost.
        """

    async def open(self, name: str, *, stall_secs: float) -> None:
        """Meet the other ranks that open ``name``, under keys that no other engine uses or has used.

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

    async def broadcast(self, topic: Topic, decision: Decision | None, *, stage: str) -> bytes:
        """Return the leader's reply on ``topic`` to this rank. The leader passes its ``decision``, the others None.

        Raises:
            PeerFailedError: a rank failed, or the leader gives no heartbeat.
        """
        assert decision is not None, "the one rank leads"
        return decision.of(0)

    async def abort(self, topic: Topic, error: BaseException, *, stage: str, limit_secs: float | None = None) -> Told:
        """End the call of ``topic`` on this rank by ``error``: the exchange of the other ranks fails now or later.

        If the leader has already decided this topic, abort the follow-up topic that the decision names. The other ranks
        are told at once. Then this rank waits for the leader's answer, shielded, while the leader lives, but for
        ``limit_secs`` at most; None: the time between two heartbeats. If the store fails, a note on ``error`` says so.
        """
        return Told()

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
        self._messages: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(message)
        self._replies: msgspec.msgpack.Decoder[R] = msgspec.msgpack.Decoder(reply)
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
            decision = None
            if coordinator.rank == coordinator.leader:
                reply = await coordinator.while_beating(functools.partial(act, messages))
                decision = Decision(common=msgspec.msgpack.encode(reply), then=then)
            return self.reply(
                await coordinator.broadcast(topic, decision, stage=self._stage), leader=coordinator.leader
            )
        except BaseException as error:
            told = await coordinator.abort(topic, error, stage=self._stage)
            if told.failure is None and then is not None:  # some ranks may have the leader's reply
                await coordinator.abort(then, error, stage=self._stage)
            raise

    async def gather(self, coordinator: Coordinator, topic: Topic, mine: M) -> tuple[M, ...]:
        """Do the first half of :meth:`run`. The leader gets the messages of all ranks, by rank; another rank gets ().

        If this call or :meth:`broadcast` fails, the caller calls :meth:`Coordinator.abort`.
        """
        return self._of_all(await coordinator.gather(topic, msgspec.msgpack.encode(mine), stage=self._stage))

    async def broadcast(self, coordinator: Coordinator, topic: Topic, reply: R) -> R:
        """Do the second half of :meth:`run`: return the leader's ``reply``. The ``reply`` of other ranks is ignored."""
        return await self._broadcast(coordinator, topic, Decision(common=msgspec.msgpack.encode(reply)))

    async def broadcast_each(self, coordinator: Coordinator, topic: Topic, replies: Sequence[R], *, then: Topic) -> R:
        """Do :meth:`broadcast` with one reply for each rank. Every rank goes on in the topic ``then``."""
        each = tuple(map(msgspec.msgpack.encode, replies))
        return await self._broadcast(coordinator, topic, Decision(each=each, then=then))

    async def _broadcast(self, coordinator: Coordinator, topic: Topic, decision: Decision) -> R:
        is_leader = coordinator.rank == coordinator.leader
        reply = await coordinator.broadcast(topic, decision if is_leader else None, stage=self._stage)
        return self.reply(reply, leader=coordinator.leader)

    def message(self, data: bytes, *, rank: int) -> M:
        """Decode the message of ``rank``; PeerFailedError if it is no ``M``."""
        return _decoded(self._messages, rank, data)

    def reply(self, data: bytes, *, leader: int) -> R:
        """Decode the reply of ``leader``; PeerFailedError if it is no ``R``."""
        return _decoded(self._replies, leader, data)

    def _of_all(self, messages: Sequence[bytes]) -> tuple[M, ...]:
        return tuple(self.message(data, rank=rank) for rank, data in enumerate(messages))


def _decoded(decoder: msgspec.msgpack.Decoder[M], rank: int, data: bytes) -> M:
    try:
        return decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise malformed(rank, error) from error
