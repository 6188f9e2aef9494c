"""The store of the ranks: its one client thread, the rendezvous of engines, and the keys of one engine.

:class:`StoreClient` runs requests with a time limit. :class:`StoreKeys` and :class:`Rendezvous` make the requests; they
never wait.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeVar

import anyio
import msgspec
from torch.distributed import DistNetworkError

from aio_ckpt.errors import AioCkptError, EngineClosedError, PeerFailedError, StallError
from aio_ckpt.ranks.flag_watch import bell_key, flag_key
from aio_ckpt.ranks.messages import REPLIES, Frame, Heartbeat, Reply, pack, unpack
from aio_ckpt.ranks.store_values import SMALL_BYTES, Store, delete_value, found, put_value, value_of
from aio_ckpt.runtime.error_notes import named
from aio_ckpt.runtime.portal import Executor, run_blocking, unwatched
from aio_ckpt.runtime.waiting import WaitWarning, duration_text

T = TypeVar("T")
_REPLIES_KEPT = 256
"""Replies that a rank remembers, because a call may ask for its reply again when it ends. Bounds the calls in
flight."""

_PRUNE_AT = 16
"""Topics that the leader remembers until it first looks which keys are deleted; again when the rest has doubled."""
_QUEUE = "queue"
_INVITATION = b"?"
"""First byte of an invitation. No :class:`Reply` begins with it: it is a MessagePack array."""
_CLOSE_SECS = 5.0


class StoreClient:
    """Client of the store. Invariant: one thread runs all requests, in the order in which they were made."""

    def __init__(self, name: str, *, host_rank: int) -> None:
        """``host_rank``: the rank that errors name if the store is gone."""
        self._name = name
        self._host_rank = host_rank
        self._executor: Executor | None = Executor(name, 1)

    def begin(self, question: Callable[[], T], *, wait_secs: float) -> Future[T]:
        """Make a request and block for at most ``wait_secs``; return its future, done or not. Log lines meanwhile."""
        future = self._open_executor().submit(question)
        limit = f"; this thread waits for {duration_text(wait_secs)} at most"
        WaitWarning(lambda waited: self._line(waited) + limit).wait_for([future], wait_secs)
        return future

    async def ask(self, question: Callable[[], T], *, limit_secs: float) -> T:
        """Run ``question`` in the client's thread and return its result.

        Raises:
            StallError: no result within ``limit_secs``.
            PeerFailedError: the store is gone.
            EngineClosedError: this client is closed.
        """
        with unwatched():  # a load waits for its threads when it ends; this one may be stuck for ever
            return await self.limited(run_blocking(self._open_executor(), question), limit_secs=limit_secs)

    async def limited(self, work: Awaitable[T], *, limit_secs: float) -> T:
        """Return the result of ``work``, a request to the store. Raises like :meth:`ask`."""
        try:
            with anyio.fail_after(limit_secs), WaitWarning(self._line).on_loop():
                return await work
        except TimeoutError as error:
            raise StallError(
                f"the store of the ranks was not answering within {limit_secs} s: the process that hosts it, mostly "
                f"that of rank {self._host_rank} or its launcher, is stopped, hangs or cannot be reached"
            ) from error
        except AioCkptError:
            raise
        except RuntimeError as error:
            raise self.failure(error) from error

    def failure(self, error: RuntimeError) -> PeerFailedError:
        """Return the error to raise for an error of torch's store."""
        found, host = f"({named(error)})", f"mostly that of rank {self._host_rank} or its launcher"
        if isinstance(error, DistNetworkError):
            text = (
                f"the store of the ranks cannot be reached {found}: the process that hosts it, {host}, has ended or "
                "has closed the connection; start all ranks again"
            )
        else:
            text = f"the store of the ranks refused a request {found}: look at the process that hosts it, {host}"
        return PeerFailedError(text, rank=self._host_rank, stage="agree")

    def _line(self, waited: str) -> str:
        return (
            f"the store of the ranks has not answered for {waited}: look at the process that hosts it, mostly that of "
            f"rank {self._host_rank} or its launcher"
        )

    def close(self) -> None:
        """End the thread. A thread that is stuck in the store is left behind. Idempotent."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.close(_CLOSE_SECS)

    def _open_executor(self) -> Executor:
        if self._executor is None:
            raise EngineClosedError(f"{self._name}: the engine was closed")
        return self._executor


class StoreKeys:
    """Keys of one engine in the store of all ranks. One thread makes all calls.

    Invariant: the keys of a topic stay until every rank has read the leader's reply. The last rank that reads it
    deletes them, so each rank reads a reply once and remembers it.
    """

    def __init__(self, store: Store, *, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._known: dict[str, Reply] = {}
        self._replied: list[str] = []
        self._sent: set[str] = set()
        self._raised: set[str] = set()
        self._prune_at = _PRUNE_AT

    # -- topics ---------------------------------------------------------------------------------------

    def send(self, topic: str, frame: Frame) -> int:
        """Append a frame for the leader; return the bytes stored.

        The leader reads when all have sent, or when a frame tells of a failure. A large body is stored beside the
        frames, which the leader reads again and again while it waits.
        """
        store, nbytes = self._store, 0
        self._sent.add(topic)
        if frame.body is not None and len(frame.body) > SMALL_BYTES:
            nbytes = put_value(store, _body_key(topic, frame.rank), frame.body)
            frame = msgspec.structs.replace(frame, body=None)
        data = pack(frame)
        store.append(f"{topic}/in", data)
        if store.add(f"{topic}/n", 1) == self._world_size - 1 or frame.failure is not None:
            store.set(f"{topic}/woken", "1")
        return nbytes + len(data)

    def is_woken(self, topic: str) -> bool | None:
        """Return True if the leader is to read the messages, else None."""
        return True if self._store.check([f"{topic}/woken"]) else None

    def frames(self, topic: str) -> list[Frame]:
        """Return the frames that were sent so far."""
        return list(unpack(found(self._store, f"{topic}/in")))

    def large_body(self, topic: str, rank: int) -> bytes:
        """Return the body that ``rank`` has stored beside its frame."""
        return value_of(self._store, _body_key(topic, rank)) or b""

    def put_reply(self, topic: str, reply: Reply, each: Sequence[bytes] = ()) -> None:
        """Write the leader's reply and, if it differs by rank, the reply to ``each`` rank. The first reply stands."""
        if topic in self._known:
            return
        store = self._store
        for rank, data in enumerate(each):
            if rank != self._rank:
                put_value(store, f"{topic}/out/{rank}", data)
        put_value(store, f"{topic}/out", msgspec.msgpack.encode(reply))
        self._remember(topic, reply)
        self._replied.append(topic)
        if len(self._replied) >= self._prune_at:
            self._replied = self._untaken()
            self._prune_at = 2 * len(self._replied) + _PRUNE_AT

    def reply(self, topic: str) -> Reply | None:
        """Return the leader's reply to this rank; None if there is none yet."""
        store = self._store
        data = None if topic in self._known else value_of(store, f"{topic}/out")
        if data is None:
            return self._known.get(topic)
        reply = REPLIES.decode(data)
        if reply.is_each:
            reply = msgspec.structs.replace(reply, common=value_of(store, f"{topic}/out/{self._rank}") or b"")
            delete_value(store, f"{topic}/out/{self._rank}")
        self._remember(topic, reply)  # in the client's thread: the task that asked may have been cancelled
        if store.add(f"{topic}/taken", 1) == self._world_size - 1:
            self._delete_topic(topic)
        return reply

    def _remember(self, topic: str, reply: Reply) -> None:
        self._sent.discard(topic)
        self._known[topic] = reply
        if len(self._known) > _REPLIES_KEPT:
            del self._known[next(iter(self._known))]

    def _untaken(self) -> list[str]:
        return [topic for topic in self._replied if self._store.check([f"{topic}/out"])]

    def _delete_topic(self, topic: str) -> None:
        for frame in self.frames(topic):
            if frame.body is None:
                delete_value(self._store, _body_key(topic, frame.rank))
        delete_value(self._store, f"{topic}/out")
        for key in ("in", "n", "woken", "taken"):
            self._store.delete_key(f"{topic}/{key}")

    # -- signs of life, flags -------------------------------------------------------------------------

    def beat(self, beat: Heartbeat) -> None:
        """Write a heartbeat of this rank."""
        self._store.set(f"alive/{self._rank}", msgspec.msgpack.encode(beat))

    def forget_beat(self) -> None:
        """Delete the heartbeat of this rank, which goes on under other keys."""
        self._store.delete_key(f"alive/{self._rank}")

    def beats(self, ranks: Sequence[int]) -> list[bytes]:
        """Return the last heartbeat of each of ``ranks``, encoded; empty bytes for none."""
        return [found(self._store, f"alive/{rank}") for rank in ranks]

    def raise_flag(self, name: str, *, wakes: Iterable[int]) -> None:
        """Set the flag ``name`` for all ranks, and wake the watches of the ranks ``wakes``."""
        self._raised.add(name)
        self._store.set(flag_key(name), "1")
        self.ring(wakes)

    def lower_flag(self, name: str) -> None:
        """Delete the flag ``name``: no rank waits for it any more."""
        self._raised.discard(name)
        self._store.delete_key(flag_key(name))

    def ring(self, ranks: Iterable[int]) -> None:
        """Wake the watches of ``ranks``."""
        for rank in ranks:
            self._store.set(bell_key(rank), "1")

    def connect(self) -> Store:
        """Return the same keys through a connection of their own. Any thread may call this."""
        return self._store.clone()

    # -- the end --------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Note that this rank reads and writes nothing more. The last rank to leave deletes all keys."""
        store = self._store
        rest = [*self._untaken(), *self._sent]
        if rest:
            store.append("rest", "".join(f"{topic}\n" for topic in rest))
        if self._raised:
            store.append("flags", "".join(f"{name}\n" for name in self._raised))
        if store.add("left", 1) == self._world_size:
            self._clear()

    def have_all_left(self) -> bool | None:
        """Return True if the last rank has left and deleted all keys, else None. Call it after :meth:`leave`."""
        return None if self._store.check(["left"]) else True

    def _clear(self) -> None:
        store, ranks = self._store, range(self._world_size)
        for topic in found(store, "rest").decode().splitlines():
            reply = value_of(store, f"{topic}/out")
            if reply and REPLIES.decode(reply).is_each:
                for rank in ranks:
                    delete_value(store, f"{topic}/out/{rank}")
            self._delete_topic(topic)
        for name in found(store, "flags").decode().splitlines():
            store.delete_key(flag_key(name))
        for rank in ranks:
            store.delete_key(f"alive/{rank}")
            store.delete_key(bell_key(rank))
        for key in ("flags", "rest", "left"):
            store.delete_key(key)


def _body_key(topic: str, rank: int) -> str:
    return f"{topic}/in/{rank}"


class Rendezvous:
    """Queue in the store in which the engines of a group of ranks meet, in the order in which each process made them.

    The leader's engine invites each engine that meets it. Once each has accepted, it removes them and tells each its
    session. An engine that gives up removes itself. Each engine has a unique name, by which it is invited and answered.
    So entries of earlier process groups and of dead processes are never taken for engines that meet: these accept
    nothing. Such entries are there if the store outlives its ranks, as that of torchrun does when it restarts them.
    """

    def __init__(self, store: Store, *, world_size: int, name: str) -> None:
        self._store = store
        self._world_size = world_size
        self._name = name
        self._answer = b""
        self._has_answered = False
        self._invited: set[str] = set()
        self._accepted = ""
        """Leader's engine whose invitation this one has accepted last."""
        self._party: Mapping[int, str] | None = None

    def enter(self, rank: int, world: str) -> None:
        """Append this engine to the queue; ``world``: see :func:`companions`."""
        self._store.append(_QUEUE, f"{rank} {world} {self._name}\n")

    def present(self) -> dict[int, str]:
        """On the leader: return the engines that meet this one so far and live: names by rank."""
        accepted = self._acceptances()
        return {rank: name for rank, name in companions(self._queue(), self._name).items() if name in accepted}

    def claim(self) -> Mapping[int, str] | None:
        """Invite the engines that have come, and remove them from the queue once one of each rank has accepted.

        Only the leader calls this, again and again. Returns their names by rank; None if one is missing.
        """
        if self._party is None:
            queue = self._queue()
            party = companions(queue, self._name)
            for name in {*party.values()} - self._invited - {self._name}:
                self._store.set(f"{name}/out", _INVITATION + self._name.encode())
                self._invited.add(name)
            is_whole = len(party) == self._world_size and self._acceptances().issuperset(party.values())
            if is_whole and self._put(queue, without(queue, party.values())):
                self._party = party
                self._withdraw_invitations(party.values())
        return self._party

    def dismiss(self, *, withdraws_alone: bool) -> tuple[Mapping[int, str], bool]:
        """On a leader that gives up: remove the engines that have come. Return them, and whether they were claimed.

        ``withdraws_alone``: remove the leader's engine only; the others wait for another leader.
        """
        if self._party is not None:
            return self._party, True
        party = {} if withdraws_alone else self._take_out()
        self.withdraw()
        self._withdraw_invitations(party.values())
        return party, False

    def withdraw(self) -> bool:
        """Remove this engine from the queue; False if the leader has removed it."""
        while self._name in (queue := self._queue()):
            if self._put(queue, without(queue, [self._name])):
                self._store.delete_key(f"{self._name}/out")
                return True
        return False

    def answer(self, names: Iterable[str], data: bytes) -> None:
        """On the leader: answer the engines that were removed. Only the first answer counts: they read one."""
        if not self._has_answered:
            self._has_answered = True
            for name in names:
                self._store.set(f"{name}/out", data)
            self._store.delete_key(f"{self._name}/here")

    def answered(self) -> bytes | None:
        """Return the leader's answer to this engine; None if there is none yet. Accepts an invitation."""
        if not self._answer:
            data = found(self._store, f"{self._name}/out")
            if data.startswith(_INVITATION):  # it stays there: to delete it might delete the answer
                leader = data.removeprefix(_INVITATION).decode()
                if leader != self._accepted:
                    self._accepted = leader
                    self._store.append(f"{leader}/here", f"{self._name}\n")
            elif data:
                self._answer = data
                self._store.delete_key(f"{self._name}/out")
                if self._accepted:  # again: this engine may have accepted after the leader had deleted it
                    self._store.delete_key(f"{self._accepted}/here")
        return self._answer or None

    def _acceptances(self) -> set[str]:
        """On the leader: return the names of the engines that have accepted, with its own."""
        return {self._name, *found(self._store, f"{self._name}/here").decode().splitlines()}

    def _withdraw_invitations(self, answered: Iterable[str]) -> None:
        """Remove the invitations of engines that get no answer: ``answered`` get one in their place."""
        for name in self._invited.difference(answered):
            self._store.delete_key(f"{name}/out")

    def _take_out(self) -> Mapping[int, str]:
        """Remove the engines that have come, whatever they accepted. Returns their names by rank."""
        while True:
            queue = self._queue()
            party = companions(queue, self._name)
            if self._put(queue, without(queue, party.values())):
                return party

    def _queue(self) -> str:
        return found(self._store, _QUEUE).decode()

    def _put(self, old: str, new: str) -> bool:
        return bytes(self._store.compare_set(_QUEUE, old, new)).decode() == new


def companions(queue: str, name: str) -> dict[int, str]:
    """Return the engines of ``queue`` that meet engine ``name``: names by rank.

    If ``name`` is the n-th engine of its rank, it meets the n-th engine of every other rank. Each line of the queue
    holds a rank, its world (a process and its process group) and a name. Entries of earlier worlds do not count.
    """
    entries = [line.split(" ") for line in queue.splitlines()]
    newest = {rank: world for rank, world, _ in entries}
    names: dict[int, list[str]] = {}
    for rank, world, other in entries:
        if newest[rank] == world:
            names.setdefault(int(rank), []).append(other)
    position = next((each.index(name) for each in names.values() if name in each), None)
    return {} if position is None else {rank: each[position] for rank, each in names.items() if len(each) > position}


def without(queue: str, names: Collection[str]) -> str:
    """Return ``queue`` without the engines ``names``."""
    return "".join(line for line in queue.splitlines(True) if line.split()[2] not in names)
