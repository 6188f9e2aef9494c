"""Coordinator: agreement between the ranks of one engine, over a store of torch.distributed.

No collective is used: the process groups belong to the training, and a gloo group is unusable after one timeout. Every
rank appends one message to a value of the store. The leader reads them all, decides, and sets one value. Every rank
polls for it. One process alone uses :class:`~aio_ckpt.ranks.coordinator.SoloCoordinator`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import os
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Self, TypeVar

import anyio
import msgspec
import torch.distributed as dist

from aio_ckpt._torch import PrefixStore, default_store
from aio_ckpt._torch import Store as TorchStore
from aio_ckpt.errors import AioCkptError, ConfigError, EngineClosedError, PeerFailedError
from aio_ckpt.ranks.coordinator import CallEnd, Coordinator, SoloCoordinator
from aio_ckpt.ranks.failure import Failure, failure_of
from aio_ckpt.ranks.flag_watch import FlagWatch
from aio_ckpt.ranks.heartbeats import POLL_SECS_MAX, Liveness
from aio_ckpt.ranks.messages import REPLIES, Frame, Reply, Topic
from aio_ckpt.ranks.missing_ranks import HEARTBEATS_A_STALL, RENDEZVOUS
from aio_ckpt.ranks.store import Rendezvous, StoreClient, StoreKeys
from aio_ckpt.ranks.store_values import Store
from aio_ckpt.runtime.futures import follow

T = TypeVar("T")

_LEAVE_SECS = 5.0
_GIVE_UP_SECS = 3.0
_WAITS_END_SECS = 1.0
"""All three together are less than the time that an engine gives its coordinator to leave."""
_RING_SECS = 2.0
"""Seconds that closing waits for the watch of the flags. A store that is gone has ended it."""


# -- over a store -----------------------------------------------------------------------------------


class StoreCoordinator(Liveness):
    """Ranks that meet in a store of torch.distributed. One coordinator serves one engine.

    Invariant: one thread uses the store, through its own connection, under a prefix that no other engine has. No method
    blocks: a wait polls the store, at longer intervals if there are more ranks.

    Args:
        store: reachable from every rank; kept alive as long as the engine, so that a process group may be destroyed.
        rank: this rank, from 0.
        world_size: number of ranks; rank 0 leads.

    Raises:
        ConfigError: a rank beyond the world size, or no store.
    """

    def __init__(self, store: Store, *, rank: int, world_size: int) -> None:
        if type(rank) is not int or type(world_size) is not int or not 0 <= rank < world_size:
            raise ConfigError(f"rank={rank!r} of world_size={world_size!r}: give a rank from 0 below the world size")
        if not isinstance(store, TorchStore):
            raise ConfigError(f"store is a {type(store).__name__}: give one of torch.distributed, such as a TCPStore")
        super().__init__(rank=rank, world_size=world_size)
        self._parent: Store = store
        self._group_store: Store | None = default_store()
        """Store of the default process group. Its address identifies the group until the ranks have met, so it is
        kept."""
        self._registered: Future[Store] | None = None
        self._rendezvous: Rendezvous | None = None
        self._flags: FlagWatch | None = None
        self._aborts = 0
        """Aborts that this rank has begun and not ended."""
        self._session = uuid.uuid4().hex[:16]
        self.messages_sent = 0
        """Messages that this rank has sent to the leader."""
        self.bytes_sent = 0
        """Bytes of those messages, as stored."""
        self.bytes_received = 0
        """Bytes of messages and replies that this rank has read."""

    @classmethod
    def of_group(cls, group: dist.ProcessGroup) -> Self:
        """Return a coordinator of the ranks of a process group. Ranks of different groups never meet.

        Raises:
            ConfigError: this process is not in the group.
        """
        if not isinstance(group, dist.ProcessGroup):  # new_group() returns an int on processes outside of the group
            raise ConfigError("this process is no rank of the group: open an engine on the ranks that are in it")
        inner = default_store()
        assert inner is not None, "a process group has a store"
        store = PrefixStore(f"group {group.group_name}", inner)
        return cls(store, rank=dist.get_rank(group), world_size=dist.get_world_size(group))

    # -- opening and ending ---------------------------------------------------------------------------

    def register(self, name: str, *, stall_secs: float) -> None:
        """See :class:`Coordinator`. This waits for the store, and not for other ranks."""
        self._name, self.stall_secs = name, stall_secs
        self._client = StoreClient(f"aio_ckpt-ranks-{self._session}", host_rank=self.leader)
        self._registered = self._client.begin(self._enter_rendezvous, wait_secs=stall_secs)

    def _enter_rendezvous(self) -> Store:
        store = PrefixStore(f"aio_ckpt/{self.world_size}", self._parent.clone())
        self._keys = StoreKeys(store, rank=self.rank, world_size=self.world_size)
        self._rendezvous = Rendezvous(store, world_size=self.world_size, name=self._session)
        self._rendezvous.enter(self.rank, _world(self._group_store))
        return store

    async def open(self, name: str, *, stall_secs: float) -> None:
        if self._registered is None:
            self.register(name, stall_secs=stall_secs)
        assert self._client is not None
        assert self._registered is not None
        entered = asyncio.wrap_future(self._registered)
        with anyio.CancelScope(shield=True):  # one that is cancelled has to leave the rendezvous that it enters
            store = await self._client.limited(entered, limit_secs=self.stall_secs)
        try:
            session = await self._meet()
        except BaseException as error:
            with anyio.CancelScope(shield=True), contextlib.suppress(AioCkptError):
                await self._enter(store, await self._leave_rendezvous(error))
                self._is_leaving = False
                await self.leave()
            raise
        with anyio.CancelScope(shield=True):  # a cancellation between the two keys would be told to no rank
            await self._enter(store, session)
        await self.beat()

    async def _enter(self, store: Store, session: str) -> None:
        """Go on from the rendezvous to the keys of ``session``. If ``session`` is empty, there are no keys."""
        await self._ask(self._the_keys().forget_beat)
        keys = StoreKeys(PrefixStore(session, store), rank=self.rank, world_size=self.world_size)
        self._rendezvous, self._keys = None, keys if session else None

    async def _meet(self) -> str:
        session = await (self._admit() if self.rank == self.leader else self._be_admitted())
        if self._is_leaving:
            raise EngineClosedError(f"{self._name}: the engine was closed before the ranks had met")
        return session

    async def _admit(self) -> str:
        """On the leader: once an engine of every rank has come, tell each the session. Returns the session."""
        rendezvous = self._the_rendezvous()

        async def missing() -> Sequence[int]:
            present = await self._ask(rendezvous.present)
            return [rank for rank in range(self.world_size) if rank not in present]

        claim = functools.partial(self._while_in_group, rendezvous.claim)
        party = await self._wait_for(RENDEZVOUS, "open", claim, missing)
        await self._answer(party, Reply(self._session.encode()))
        return self._session

    async def _be_admitted(self) -> str:
        find = functools.partial(self._while_in_group, self._the_rendezvous().answered)
        reply = REPLIES.decode(await self._wait_for(RENDEZVOUS, "open", find, self._the_leader))
        if reply.failure is not None:
            raise reply.failure.error(RENDEZVOUS.text(), self.rank)
        return reply.common.decode()

    def _while_in_group(self, find: Callable[[], T]) -> T:
        """Return ``find()``. Raises PeerFailedError in another process group, whose engines may use the same queue."""
        if not self._is_regrouped():
            return find()
        text = f"this rank is in another process group now, and the ranks of the last never met: open {self._name} anew"
        raise PeerFailedError(text, rank=self.rank, stage="open")

    def _is_regrouped(self) -> bool:
        """Return whether this rank is in another default process group than when the engine was made."""
        return self._group_store is not None and default_store() not in (None, self._group_store)

    async def _answer(self, party: Mapping[int, str], reply: Reply) -> None:
        names = [name for rank, name in party.items() if rank != self.rank]
        await self._ask(functools.partial(self._the_rendezvous().answer, names, msgspec.msgpack.encode(reply)))

    async def _leave_rendezvous(self, error: BaseException) -> str:
        """Abort the rendezvous.

        Returns the session if the others were already admitted, so that this rank can tell them that it left;
        otherwise an empty string.
        """
        rendezvous = self._the_rendezvous()
        if self.rank == self.leader:
            dismiss = functools.partial(rendezvous.dismiss, withdraws_alone=self._is_regrouped())
            party, are_claimed = await self._ask(dismiss)  # a claim that the thread still runs ends first
            failed = Reply(b"", failure=failure_of(self.rank, "open", error))
            await self._answer(party, Reply(self._session.encode()) if are_claimed else failed)
            return self._session if are_claimed else ""
        if not await self._ask(rendezvous.withdraw):  # the leader has removed it: an answer is there or will come
            data = await self._poll(rendezvous.answered, _LEAVE_SECS)
            if data is not None:
                return REPLIES.decode(data).common.decode()
        return ""

    async def leave(self) -> None:
        """Leave the group. The leader waits until all ranks have left, because it may host the store.

        Aborts in progress end first: the last rank to leave deletes the leader's replies to them. Then the waits of
        this rank end, and the aborts that follow: what it set after the last rank has left would stay.
        """
        with anyio.move_on_after(_GIVE_UP_SECS):
            while self._aborts:  # noqa: ASYNC110 - it takes as long as the leader's reply
                await anyio.sleep(POLL_SECS_MAX)
        keys, has_left, self._is_leaving = self._keys, self._is_leaving, True
        if has_left or keys is None or self._rendezvous is not None:
            return  # if this rank is still in the rendezvous, ``open`` ends itself
        with anyio.move_on_after(_WAITS_END_SECS):
            while self._waits or self._aborts:  # noqa: ASYNC110 - a wait ends by its next poll
                await anyio.sleep(POLL_SECS_MAX)
        leader = self._lost.get(self.leader)
        if leader is not None and leader.is_silent:
            return
        with contextlib.suppress(AioCkptError):
            await self.beat(has_left=True)
            await self._ask(self._end_flags)
            await self._ask(keys.leave)
            if self.rank != self.leader:
                return
            await self._poll(keys.have_all_left, 0 if self._lost else _LEAVE_SECS)

    def close(self) -> None:
        """End the threads. A thread that is stuck in the store is left behind."""
        connection, self._client = self._client, None
        if connection is not None:
            if self._flags is not None:
                connection.begin(self._end_flags, wait_secs=_RING_SECS)
                self._flags.close(_RING_SECS)
            connection.close()
        self._keys = self._rendezvous = self._registered = None

    def _end_flags(self) -> None:
        """Let the watch of the flags end, and wake it. In the client's thread."""
        if self._flags is not None and not self._flags.has_ended:
            self._flags.end()
            if self._keys is not None:
                self._keys.ring((self.rank,))

    # -- agreement ------------------------------------------------------------------------------------

    async def gather(self, topic: Topic, message: bytes, *, stage: str) -> tuple[bytes, ...]:
        if self.rank == self.leader:
            return await self._collect(topic, message, stage)
        await self._send(topic, Frame(self.rank, message))
        return ()

    async def broadcast(
        self, topic: Topic, replies: Sequence[bytes], *, stage: str, then: Topic | None = None
    ) -> bytes:
        if self.rank != self.leader:
            return await self._receive(topic, stage)
        with anyio.CancelScope(shield=True):  # the thread would send it all the same, and this rank would not know
            await self._send_replies(topic, replies, then)
        return replies[0] if len(replies) == 1 else replies[self.rank]

    async def abort(
        self, topic: Topic, error: BaseException, *, stage: str, limit_secs: float | None = None
    ) -> CallEnd:
        failure, end = failure_of(self.rank, stage, error), CallEnd()
        self._aborts += 1
        try:
            limit_secs = self.stall_secs / HEARTBEATS_A_STALL if limit_secs is None else limit_secs
            with anyio.move_on_after(limit_secs, shield=True):
                end = await self._leave_topics(topic, failure)
        except AioCkptError as cause:  # the other ranks fail by their deadlines
            error.add_note(f"the other ranks could not be told: {type(cause).__name__}: {cause}")
        finally:
            self._aborts -= 1
        self.end_call(topic)  # the next heartbeat tells it
        return end

    async def _leave_topics(self, topic: Topic, failure: Failure) -> CallEnd:
        """Abort ``topic``, or the one that follows it by the leader's reply."""
        while True:
            before = await self._reply(topic)
            reply = before or await self._leave_topic(topic, failure)
            if reply is None or reply.then is None:
                break
            topic = reply.then
        error = None if reply is None or reply.failure is None else reply.failure.error(self._where(topic), self.rank)
        return CallEnd(error, is_earlier=before is not None and error is not None)

    async def _leave_topic(self, topic: Topic, failure: Failure) -> Reply | None:
        """Abort ``topic``. Returns the leader's reply; None if it did not come in time."""
        if self.rank == self.leader:
            with anyio.CancelScope(shield=True):
                await self._ask(functools.partial(self._the_keys().put_reply, topic.key, Reply(b"", failure=failure)))
            return await self._reply(topic)
        await self._send(topic, Frame(self.rank, b"", failure))
        if self.leader in self._lost:  # the last wait for the leader was in vain
            reply = await self._reply(topic)
            return Reply(b"", failure=failure) if reply is None and self._is_undecidable(topic) else reply
        with contextlib.suppress(AioCkptError):
            return await self._await_reply(topic, failure.stage)
        return None

    async def _reply(self, topic: Topic) -> Reply | None:
        """Return the leader's reply; None if there is none yet."""
        return await self._ask(functools.partial(self._the_keys().reply, topic.key))

    # -- flags ----------------------------------------------------------------------------------------

    async def raise_flag(self, name: str) -> None:
        """See :class:`Coordinator`. If all ranks are told to end at once, each sets two keys, and the leader all."""
        wakes = range(self.world_size) if self.rank == self.leader else (self.leader,)
        await self._ask(functools.partial(self._the_keys().raise_flag, name, wakes=wakes))

    async def flag(self, name: str) -> None:
        keys, client = self._the_keys(), self._client
        assert client is not None, "there are keys"
        try:
            if self._flags is None:
                self._flags = FlagWatch(f"aio_ckpt-ranks-{self._session}", keys.connect, rank=self.rank)
            with self._flags.wait_for(name) as raised:
                await self._ask(functools.partial(keys.ring, (self.rank,)))
                await asyncio.wrap_future(follow(raised))
                raised.result()
        except AioCkptError:
            raise
        except RuntimeError as error:
            raise client.failure(error) from error

    async def lower_flag(self, name: str) -> None:
        await self._ask(functools.partial(self._the_keys().lower_flag, name))

    # -- what a rank does -----------------------------------------------------------------------------

    async def _send(self, topic: Topic, frame: Frame) -> None:
        if self._is_leaving:  # after the last rank has left, no rank deletes the keys
            raise EngineClosedError(f"{self._name}: the engine was closed")
        self.bytes_sent += await self._ask(functools.partial(self._the_keys().send, topic.key, frame))
        self.messages_sent += 1

    async def _receive(self, topic: Topic, stage: str) -> bytes:
        reply = await self._await_reply(topic, stage)
        self._is_met = True
        if reply.failure is not None:
            raise reply.failure.error(self._where(topic), self.rank)
        self._hear(topic)
        self.bytes_received += len(reply.common)
        return reply.common

    async def _await_reply(self, topic: Topic, stage: str) -> Reply:
        find = functools.partial(self._the_keys().reply, topic.key)
        reply = await self._wait_for(topic, stage, find, self._the_leader)
        self._lost.pop(self.leader, None)
        return reply

    def _the_rendezvous(self) -> Rendezvous:
        if self._rendezvous is None:
            raise EngineClosedError(f"{self._name}: the engine was closed")
        return self._rendezvous

    # -- what the leader does -------------------------------------------------------------------------

    async def _collect(self, topic: Topic, message: bytes, stage: str) -> tuple[bytes, ...]:
        if self.world_size == 1:
            return (message,)
        frames = functools.partial(self._the_keys().frames, topic.key)

        async def missing() -> Sequence[int]:
            found = {frame.rank for frame in await self._ask(frames)}
            return sorted(set(range(self.world_size)) - found - {self.rank})

        await self._wait_for(topic, stage, functools.partial(self._the_keys().is_woken, topic.key), missing)
        sent = await self._ask(frames)
        failures = [frame.failure for frame in sent if frame.failure is not None]
        if failures:
            raise failures[0].error(self._where(topic), self.rank)
        self._is_met = True
        self._hear(topic)
        self._lost.clear()
        by_rank = {self.rank: message}
        for frame in sent:
            body = frame.body
            if body is None:
                body = await self._ask(functools.partial(self._the_keys().large_body, topic.key, frame.rank))
            self.bytes_received += len(body)
            by_rank[frame.rank] = body
        return tuple(by_rank[rank] for rank in range(self.world_size))

    async def _send_replies(self, topic: Topic, replies: Sequence[bytes], then: Topic | None) -> None:
        if self.world_size > 1:
            is_each = len(replies) > 1
            reply = Reply(b"" if is_each else replies[0], is_each=is_each, then=then)
            await self._ask(functools.partial(self._the_keys().put_reply, topic.key, reply, replies if is_each else ()))


def _world(group_store: Store | None) -> str:
    """Return an identity of this process and its process group; see :func:`~aio_ckpt.ranks.store.companions`."""
    text = f"{socket.gethostname()} {os.getpid()} {id(group_store)}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def has_default_group() -> bool:
    """Return whether the default process group is initialised, of however many ranks."""
    return default_store() is not None


def rank_in_default_group() -> tuple[int, int]:
    """Return rank and world size of the default process group, or those of a single process."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def default_coordinator(purpose: str = "engines") -> Coordinator:
    """Return a coordinator of the default process group if it has several ranks, else of this process alone.

    Coordinators of different purposes never meet.
    """
    store = default_store()
    if store is not None and dist.get_world_size() > 1:
        return StoreCoordinator(PrefixStore(purpose, store), rank=dist.get_rank(), world_size=dist.get_world_size())
    return SoloCoordinator()
