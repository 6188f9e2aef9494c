"""Interface by which the ranks of an engine agree."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeVar

import anyio

from aio_ckpt.errors import PeerFailedError
from aio_ckpt.ranks.messages import Topic

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
