"""The store of the ranks: the thread that asks it, where engines meet in it, and the keys of one engine.

:class:`StoreClient` asks, with a limit. What is asked stands in :class:`StoreKeys` and :class:`Rendezvous`, in which
nothing waits.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeAlias, TypeVar

import anyio
import msgspec

from aio_ckpt.errors import AioCkptError, EngineClosedError, PeerFailedError, StallError
from aio_ckpt.ranks.messages import REPLIES, Heartbeat, Reply
from aio_ckpt.runtime.portal import Executor, run_blocking, unwatched

__all__ = ["Rendezvous", "Store", "StoreClient", "StoreKeys", "companions", "found", "without"]

T = TypeVar("T")
Store: TypeAlias = Any
"""``torch.distributed.Store``, whose stubs know neither ``append`` nor values of bytes."""

_NO_VALUE = "no value"
_REPLIES_KEPT = 256
"""A call may ask again for a reply that it has taken, as it ends; many calls may be under way."""

_TOLD_LOOKED_AT = 16
"""From so many topics on the leader looks which of them are still there, and again when they have doubled."""
_QUEUE = "queue"
_CLOSE_SECS = 5.0


class StoreClient:
    """Invariant: whatever touches the store does so in one thread, in the order in which it was asked."""

    def __init__(self, name: str, *, host_rank: int) -> None:
        """``host_rank``: who is named if the store is gone."""
        self._name = name
        self._host_rank = host_rank
        self._executor: Executor | None = Executor(name, 1)

    def begin(self, question: Callable[[], T], *, wait_secs: float) -> Future[T]:
        """Ask from a thread that may wait so long, whatever comes of it."""
        future = self._open_executor().submit(question)
        wait([future], wait_secs)
        return future

    async def ask(self, question: Callable[[], T], *, limit_secs: float) -> T:
        """What ``question`` gives.

        Raises:
            StallError: nothing for ``limit_secs``.
            PeerFailedError: the store is gone.
            EngineClosedError: so is this connection.
        """
        with unwatched():  # a load that ends waits for its threads, and this one may be stuck for ever
            return await self.limited(run_blocking(self._open_executor(), question), limit_secs=limit_secs)

    async def limited(self, work: Awaitable[T], *, limit_secs: float) -> T:
        """What ``work``, which asks the store, gives; raises as :meth:`ask`."""
        try:
            with anyio.fail_after(limit_secs):
                return await work
        except TimeoutError as error:
            raise StallError(
                f"the store of the ranks was not answering within {limit_secs} s: the process that hosts it, mostly "
                f"that of rank {self._host_rank} or its launcher, is stopped, hangs or cannot be reached"
            ) from error
        except AioCkptError:
            raise
        except RuntimeError as error:  # what torch's stores raise
            raise PeerFailedError(
                f"the store of the ranks cannot be reached, its host may be gone: {type(error).__name__}: {error}",
                rank=self._host_rank,
                stage="agree",
            ) from error

    def close(self) -> None:
        """End the thread; one that is stuck in the store is left behind. Idempotent."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.close(_CLOSE_SECS)

    def _open_executor(self) -> Executor:
        if self._executor is None:
            raise EngineClosedError(f"{self._name}: the engine was closed")
        return self._executor


class StoreKeys:
    """The keys of one engine in a store of all ranks. Only ever called in one thread.

    Invariant: the keys of a topic stay until every rank has taken the leader's reply on it, however late it comes; the
    last one to take it deletes them. So each rank takes a reply once, and remembers it.
    """

    def __init__(self, store: Store, *, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._known: dict[str, Reply] = {}
        self._told: list[str] = []
        self._sent: set[str] = set()
        self._looks_at = _TOLD_LOOKED_AT

    # -- topics ---------------------------------------------------------------------------------------

    def send(self, topic: str, data: bytes, *, wakes: bool) -> None:
        """Append a message for the leader, who looks at them when all are there, or one ``wakes`` it."""
        store = self._store
        self._sent.add(topic)
        store.append(f"{topic}/in", data)
        if store.add(f"{topic}/n", 1) == self._world_size - 1 or wakes:
            store.set(f"{topic}/woken", "1")

    def is_woken(self, topic: str) -> bool | None:
        """Whether the leader is to look; None: not yet."""
        return True if self._store.check([f"{topic}/woken"]) else None

    def messages(self, topic: str) -> bytes:
        """All that was sent so far."""
        return found(self._store, f"{topic}/in")

    def tell(self, topic: str, reply: Reply, each: Sequence[bytes]) -> None:
        """The leader's reply, or what it tells ``each`` rank instead; nothing if it was told before."""
        if topic in self._known:
            return
        store = self._store
        for rank, data in enumerate(each):
            if rank != self._rank:
                store.set(f"{topic}/out/{rank}", data)
        store.set(f"{topic}/out", msgspec.msgpack.encode(reply))
        self._remember(topic, reply)
        self._told.append(topic)
        if len(self._told) >= self._looks_at:
            self._told = self._untaken()
            self._looks_at = 2 * len(self._told) + _TOLD_LOOKED_AT

    def reply(self, topic: str) -> Reply | None:
        """The leader's reply, with what it tells this rank; None if it is not out."""
        store = self._store
        data = b"" if topic in self._known else found(store, f"{topic}/out")
        if not data:
            return self._known.get(topic)
        reply = REPLIES.decode(data)
        if reply.is_each:
            reply = msgspec.structs.replace(reply, common=found(store, f"{topic}/out/{self._rank}"))
            store.delete_key(f"{topic}/out/{self._rank}")
        self._remember(topic, reply)  # in this thread: whoever waits for it may have been cancelled
        if store.add(f"{topic}/taken", 1) == self._world_size - 1:
            self._delete_topic(topic)
        return reply

    def _remember(self, topic: str, reply: Reply) -> None:
        self._sent.discard(topic)
        self._known[topic] = reply
        if len(self._known) > _REPLIES_KEPT:
            del self._known[next(iter(self._known))]

    def _untaken(self) -> list[str]:
        return [topic for topic in self._told if self._store.check([f"{topic}/out"])]

    def _delete_topic(self, topic: str) -> None:
        for key in ("in", "n", "woken", "out", "taken"):
            self._store.delete_key(f"{topic}/{key}")

    # -- signs of life, flags -------------------------------------------------------------------------

    def beat(self, beat: Heartbeat) -> None:
        """This rank lives."""
        self._store.set(f"alive/{self._rank}", msgspec.msgpack.encode(beat))

    def forget_beat(self) -> None:
        """This rank goes on elsewhere."""
        self._store.delete_key(f"alive/{self._rank}")

    def beats(self, ranks: Sequence[int]) -> list[bytes]:
        """The last sign of life of each; empty where there was none."""
        return [found(self._store, f"alive/{rank}") for rank in ranks]

    def raise_flag(self, name: str) -> None:
        """For good."""
        self._store.append("flags", f"{name}\n")

    def is_raised(self, name: str) -> bool:
        """Whether any rank has raised it."""
        return name.encode() in found(self._store, "flags").splitlines()

    # -- the end --------------------------------------------------------------------------------------

    def leave(self) -> None:
        """This rank reads and writes nothing more. The last one to leave clears the store."""
        store = self._store
        rest = [*self._untaken(), *self._sent]
        if rest:
            store.append("rest", "".join(f"{topic}\n" for topic in rest))
        if store.add("left", 1) == self._world_size:
            self._clear()

    def have_all_left(self) -> bool | None:
        """Whether the store was cleared, after this rank has left; None: not yet."""
        return None if self._store.check(["left"]) else True

    def _clear(self) -> None:
        store, ranks = self._store, range(self._world_size)
        for topic in found(store, "rest").decode().splitlines():
            reply = found(store, f"{topic}/out")
            if reply and REPLIES.decode(reply).is_each:
                for rank in ranks:
                    store.delete_key(f"{topic}/out/{rank}")
            self._delete_topic(topic)
        for key in (*(f"alive/{rank}" for rank in ranks), "flags", "rest", "left"):
            store.delete_key(key)


def found(store: Store, key: str) -> bytes:
    """The value; empty if there is none. In one question: ``get`` would wait for a key that was deleted since."""
    value = bytes(store.compare_set(key, _NO_VALUE, _NO_VALUE))  # what is not there is set by an empty one alone
    return b"" if value == _NO_VALUE.encode() else value


class Rendezvous:
    """Where the engines of one root wait for each other, in the order in which each process made them.

    A queue in the store of all ranks. The leader's engine takes out those that come with it, and tells each where to
    go on; whoever gives up takes itself out. So nothing that was left by a process that died, or by a process group
    that is gone, is taken for one of those who meet: each has a name of its own, and is answered by that name.
    """

    def __init__(self, store: Store, *, world_size: int, name: str) -> None:
        self._store = store
        self._world_size = world_size
        self._name = name
        self._told = b""
        self._has_answered = False
        self._party: Mapping[int, str] | None = None

    def enter(self, rank: int, world: str) -> None:
        """Stand in the queue behind those that this process has made before; ``world``: see :func:`companions`."""
        self._store.append(_QUEUE, f"{rank} {world} {self._name}\n")

    def here(self) -> dict[int, str]:
        """Who stands here with this engine, by rank."""
        return companions(self._queue(), self._name)

    def claim(self) -> Mapping[int, str] | None:
        """The leader's: take all out who go on with this engine, once one of each rank is here."""
        self._party = self._party or self._take_out(self._world_size)
        return self._party

    def dismiss(self, *, withdraws_alone: bool) -> tuple[Mapping[int, str], bool]:
        """The leader's, who gives up: take all out who have come. Who they are, and whether it had claimed them.

        ``withdraws_alone``: they wait for another one.
        """
        if self._party is not None:
            return self._party, True
        party = {} if withdraws_alone else self._take_out(0) or {}
        self.withdraw()
        return party, False

    def withdraw(self) -> bool:
        """Take this engine out alone; False if the leader has taken it out."""
        while self._name in (queue := self._queue()):
            if self._put(queue, without(queue, [self._name])):
                return True
        return False

    def answer(self, names: Iterable[str], data: bytes) -> None:
        """The leader's: tell those that were taken out; once, for whoever has heard it looks no more."""
        if not self._has_answered:
            self._has_answered = True
            for name in names:
                self._store.set(f"{name}/out", data)

    def answered(self) -> bytes | None:
        """What this engine is told; None: nothing yet."""
        if not self._told:
            self._told = found(self._store, f"{self._name}/out")
            if self._told:
                self._store.delete_key(f"{self._name}/out")
        return self._told or None

    def _take_out(self, count: int) -> Mapping[int, str] | None:
        while True:
            queue = self._queue()
            party = companions(queue, self._name)
            if len(party) < count:
                return None
            if self._put(queue, without(queue, party.values())):
                return party

    def _queue(self) -> str:
        return found(self._store, _QUEUE).decode()

    def _put(self, old: str, new: str) -> bool:
        return bytes(self._store.compare_set(_QUEUE, old, new)).decode() == new


def companions(queue: str, name: str) -> dict[int, str]:
    """Who stands in ``queue`` at the place that ``name`` has among those of its rank: a name for each rank.

    Each line is a rank, its world (a process, and the process group that it is in) and a name. What a rank has
    entered in an earlier world counts no more.
    """
    lines = [line.split(" ") for line in queue.splitlines()]
    newest = {rank: world for rank, world, _ in lines}
    names: dict[int, list[str]] = {}
    for rank, world, other in lines:
        if newest[rank] == world:
            names.setdefault(int(rank), []).append(other)
    place = next((each.index(name) for each in names.values() if name in each), None)
    return {} if place is None else {rank: each[place] for rank, each in names.items() if len(each) > place}


def without(queue: str, names: Collection[str]) -> str:
    """``queue``, less those that are named."""
    return "".join(line for line in queue.splitlines(True) if line.split()[2] not in names)
